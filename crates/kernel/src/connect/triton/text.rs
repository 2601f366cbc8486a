//! Text models of Triton servers (`text_input`, `text_output`) with GENERATE's inputs and outputs.
//!
//! ```text
//!   call ── read, refuse ──► Request ── Client ──► Response … ──► response chunks ──► meta, one chunk with the run's
//! ```
//!
//! Dropping the stream drops the responses, which ends the request at its server.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};
use sapwood_engine::recommended::RecommendedSampling;
use sapwood_net::triton::{
    Datatype, InferRequest, ModelResponse, ModelResponses, ModelSignature, TensorData, TritonClient,
};
use sapwood_proto::bounded_json;
use serde_json::{Value, json};

use super::{failure, fields};
use crate::Result;
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::limits;
use crate::meta::{ChoiceFinish, Meta, RunUsage};
use crate::model;
use crate::model::remote::{RemoteCall, RemotePrompt, unimplemented};
use crate::name::{Mime, Name, Port};
use crate::spec::{Effect, Spec};

/// Whether a model is a text model.
pub(super) fn is_text(model: &ModelSignature) -> bool {
    let text = |found: Option<Datatype>| found == Some(Datatype::Bytes);
    text(model.input(TEXT_INPUT).map(|it| model.inputs[it].datatype))
        && text(
            model
                .output(TEXT_OUTPUT)
                .map(|it| model.outputs[it].datatype),
        )
}

/// The function of a text model. It reports a finish reason and token counts if the server does; without a reported
/// reason it reports a stop.
pub(super) fn function(client: TritonClient, model: Arc<ModelSignature>) -> Fun {
    let name = Name::shared(&model.name);
    let what = "A text model of another server.";
    let mut spec = Spec::new(name.clone(), what).effect(Effect::Idempotent);
    spec.inputs = model::inputs();
    spec.outputs = model::outputs();
    // Nothing takes the text of such a server apart.
    spec.outputs.retain(|output| output.port != Port::EVENTS);
    spec.finishes = true;
    spec.model = true;
    // Only vLLM's models know min_p, and some of the others refuse unknown fields.
    spec.sampling = RecommendedSampling {
        temperature: Some(0.7),
        top_p: Some(0.95),
        ..RecommendedSampling::default()
    };
    let remote = TritonTextModel {
        client,
        model,
        name,
    };
    raw(spec, move |call| streamed(remote.clone().begin(call)))
}

#[derive(Clone)]
struct TritonTextModel {
    client: TritonClient,
    model: Arc<ModelSignature>,
    name: Name,
}

impl TritonTextModel {
    async fn begin(self, call: Call) -> Result<impl Stream<Item = Result<Chunk>> + Send> {
        // Elsewhere a suffix would be lost, and the prompt continued as if nothing came behind it.
        let takes_suffix = || {
            let target = self.model.input("suffix").map(drop);
            target.ok_or_else(|| unimplemented("input suffix"))
        };
        let asked = RemoteCall::read(&call, takes_suffix).await?;
        let mut request = self.request(asked)?;
        request.timeout = call
            .deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let responses = self.client.generate(request).await;
        let responses = responses.map_err(|error| failure::error(error, &self.name))?;
        let answer = TextAnswer {
            name: self.name,
            model: self.model,
            main: call.want.ports.has(&Port::MAIN),
            reasoning: call.want.ports.has(&Port::REASONING),
            tool_calls: call.want.ports.has(&Port::TOOL_CALLS),
            meta: call.want.ports.has(&Port::META),
            responses: Some(responses),
            ready: VecDeque::new(),
            begun: false,
            finish: None,
            prompt_tokens: None,
            completion_tokens: None,
        };
        Ok(stream::try_unfold(answer, TextAnswer::next))
    }

    fn request(&self, asked: RemoteCall) -> Result<InferRequest> {
        let mut request = InferRequest::new(Arc::clone(&self.model));
        let text = |text: &str| TensorData::Bytes([text.as_bytes()].into_iter().collect());
        let (input, prompt) = match &asked.prompt {
            RemotePrompt::Text(prompt) => (TEXT_INPUT, text(prompt)),
            RemotePrompt::Messages(messages) => ("messages", text(&messages.to_string())),
        };
        let target = self.model.input(input);
        // Only servers that render a chat template declare `messages`; anywhere else they would be lost.
        let target = target.ok_or_else(|| unimplemented("input messages"))?;
        request.inputs.push((target, prompt));
        if let (Some(suffix), Some(target)) = (&asked.suffix, self.model.input("suffix")) {
            request.inputs.push((target, text(suffix)));
        }
        if asked
            .tools
            .as_array()
            .is_some_and(|tools| !tools.is_empty())
        {
            let target = self
                .model
                .input("tools")
                .ok_or_else(|| unimplemented("tools"))?;
            request
                .inputs
                .push((target, text(&asked.tools.to_string())));
        }
        self.flag(&mut request, "stream", self.model.decoupled);
        // Otherwise vLLM's backend repeats the prompt in front of the answer.
        self.flag(&mut request, "exclude_input_in_output", true);
        for output in [FINISH, INPUT_TOKENS, OUTPUT_TOKENS] {
            if self.model.output(output).is_some() {
                self.flag(&mut request, &format!("return_{output}"), true);
            }
        }
        fields::fill(&mut request, &asked.config)?;
        Ok(request)
    }

    /// Sets a flag, if the model has an input for it.
    fn flag(&self, request: &mut InferRequest, name: &str, value: bool) {
        let target = self.model.input(name);
        let target = target.filter(|target| self.model.inputs[*target].datatype == Datatype::Bool);
        if let Some(target) = target {
            request.inputs.push((target, TensorData::Bool(vec![value])));
        }
    }
}

/// The state of an answer that is being read.
struct TextAnswer {
    name: Name,
    model: Arc<ModelSignature>,
    main: bool,
    reasoning: bool,
    tool_calls: bool,
    meta: bool,
    /// `None` at the end.
    responses: Option<ModelResponses>,
    ready: VecDeque<Chunk>,
    /// The first chunk carries the role.
    begun: bool,
    finish: Option<ChoiceFinish>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl TextAnswer {
    async fn next(mut self) -> Result<Option<(Chunk, Self)>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Ok(Some((chunk, self)));
            }
            let Some(responses) = &mut self.responses else {
                return Ok(None);
            };
            match responses.next().await {
                Some(Ok(response)) => self.take(&response),
                Some(Err(error)) => return Err(failure::error(error, &self.name)),
                None => self.end(),
            }
        }
    }

    fn take(&mut self, response: &ModelResponse) {
        for (target, data) in &response.outputs {
            match (&*self.model.outputs[*target].name, data) {
                (TEXT_OUTPUT, TensorData::Bytes(texts)) => {
                    let mut all = BytesMut::new();
                    texts.iter().for_each(|text| all.extend_from_slice(text));
                    self.text(all.freeze());
                }
                // Outputs of servers like this one, which take apart what a model writes.
                (REASONING, TensorData::Bytes(texts)) if self.reasoning => {
                    let chunks = texts.iter().filter(|text| !text.is_empty()).map(|text| {
                        let chunk = Chunk::bytes(text.to_vec()).with_mime(Mime::TEXT);
                        chunk.on(Port::REASONING)
                    });
                    self.ready.extend(chunks);
                }
                (TOOL_CALLS, TensorData::Bytes(lists)) if self.tool_calls => {
                    let lines = lists.iter().flat_map(calls).map(|call| {
                        let chunk = Chunk::bytes(format!("{call}\n")).with_mime(Mime::NDJSON);
                        chunk.on(Port::TOOL_CALLS)
                    });
                    self.ready.extend(lines);
                }
                (FINISH, TensorData::Bytes(reasons)) => {
                    let reason = reasons.iter().next().map(String::from_utf8_lossy);
                    // vLLM's backend sends `None` as text with every response but the last.
                    let reason = reason.filter(|reason| !matches!(&**reason, "" | "None"));
                    if let Some(reason) = reason {
                        self.finish = Some(ChoiceFinish::from_name(&reason));
                    }
                }
                (INPUT_TOKENS, counts) => self.prompt_tokens = count(counts).or(self.prompt_tokens),
                (OUTPUT_TOKENS, counts) => {
                    // Token counts of this response only (TR-401).
                    let more = count(counts);
                    self.completion_tokens = more.map_or(self.completion_tokens, |more| {
                        Some(self.completion_tokens.unwrap_or(0).saturating_add(more))
                    });
                }
                _ => {}
            }
        }
    }

    fn text(&mut self, text: Bytes) {
        // The first chunk is kept even if it is empty: it carries the role.
        if !self.main || (text.is_empty() && self.begun) {
            return;
        }
        let mut chunk = Chunk::bytes(text).with_mime(Mime::TEXT);
        if !std::mem::replace(&mut self.begun, true) {
            chunk = chunk.with_meta(Meta::default().with_role("ASSISTANT"));
        }
        self.ready.push_back(chunk);
    }

    /// The server has sent the last response.
    fn end(&mut self) {
        self.responses = None;
        let finish = self.finish.clone().unwrap_or(ChoiceFinish::Stop);
        let mut meta = Meta::default()
            .with_role("ASSISTANT")
            .with_finish(0, finish.clone());
        meta.model = Some(self.name.clone());
        let counted = self.prompt_tokens.is_some() || self.completion_tokens.is_some();
        let prompt = self.prompt_tokens.unwrap_or(0);
        let completion = self.completion_tokens.unwrap_or(0);
        if counted {
            meta = meta.with_usage(0, RunUsage::of(prompt, completion));
        }
        let carrier = if self.main || !self.meta {
            Chunk::empty()
        } else {
            Chunk::empty().on(Port::META).with_mime(Mime::JSON)
        };
        if self.meta {
            let usage = json!({
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "cached_tokens": 0,
            });
            let document = json!({
                "model": self.name.as_str(),
                "finish_reason": finish.name(),
                "usage": if counted { usage } else { Value::Null },
            });
            let document = Chunk::bytes(document.to_string()).with_mime(Mime::JSON);
            self.ready.push_back(document.on(Port::META));
        }
        self.ready.push_back(carrier.with_meta(meta));
    }
}

/// The calls in a list of them; none in a text that is no such list.
fn calls(list: &[u8]) -> Vec<Value> {
    match bounded_json::read(list, limits::JSON_BOUNDS) {
        Ok(Value::Array(calls)) => calls,
        _ => Vec::new(),
    }
}

/// The sum of a tensor's elements, as a count of tokens. It saturates: the server may send any numbers.
fn count(data: &TensorData) -> Option<u64> {
    match data {
        TensorData::Uint(list) => Some(list.iter().copied().fold(0, u64::saturating_add)),
        TensorData::Int(list) => list.iter().try_fold(0_u64, |sum, count| {
            Some(sum.saturating_add(u64::try_from(*count).ok()?))
        }),
        _ => None,
    }
}

const TEXT_INPUT: &str = "text_input";
const TEXT_OUTPUT: &str = "text_output";
const REASONING: &str = "reasoning";
const TOOL_CALLS: &str = "tool_calls";
const FINISH: &str = "finish_reason";
const INPUT_TOKENS: &str = "num_input_tokens";
const OUTPUT_TOKENS: &str = "num_output_tokens";
