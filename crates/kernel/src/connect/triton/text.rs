//! Text models elsewhere: `text_input` in, `text_output` out, GENERATE's inputs and outputs around it.
//!
//! Owns: [`function`], the request, and the way from responses to chunks. Refuses to know: where fields of a config go.
//!
//! ```text
//!   call ── read, refuse ──► Request ── Client ──► Response … ──► response chunks ──► meta, one chunk with the run's
//! ```
//!
//! Dropping the stream drops the responses, which ends the request at its server.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use sapwood_engine::recommended::RecommendedSampling;
use sapwood_net::triton::{Client, Data, Datatype, Model, Request, Response, Responses};
use serde_json::{Value, json};

use super::{failure, fields};
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::function::Fun;
use crate::handler::raw;
use crate::meta::{Meta, Reason, Usage};
use crate::model;
use crate::model::elsewhere::{Asked, Prompt, unimplemented};
use crate::name::{Mime, Name, Port};
use crate::spec::{Effect, Spec};
use crate::{Chunks, Result};

/// Whether it is one.
pub(super) fn is_text(model: &Model) -> bool {
    let text = |found: Option<Datatype>| found == Some(Datatype::Bytes);
    text(model.input(TEXT_INPUT).map(|it| model.inputs[it].datatype))
        && text(
            model
                .output(TEXT_OUTPUT)
                .map(|it| model.outputs[it].datatype),
        )
}

/// The function of a text model. It reports a finish reason and token counts where its server can tell them; a server
/// that cannot has always stopped.
pub(super) fn function(client: Client, model: Arc<Model>) -> Fun {
    let name = Name::shared(&model.name);
    let what = "A text model of another server.";
    let mut spec = Spec::new(name.clone(), what).effect(Effect::Idempotent);
    spec.inputs = model::inputs();
    spec.outputs = model::outputs();
    spec.finishes = true;
    spec.model = true;
    // Others than vLLM's do not know min_p, and some refuse what they do not know.
    spec.sampling = RecommendedSampling {
        temperature: Some(0.7),
        top_p: Some(0.95),
        ..RecommendedSampling::default()
    };
    let remote = Remote {
        client,
        model,
        name,
    };
    raw(spec, move |call| {
        let remote = remote.clone();
        let chunks = async move { remote.begin(call).await };
        chunks.into_stream().try_flatten().boxed()
    })
}

#[derive(Clone)]
struct Remote {
    client: Client,
    model: Arc<Model>,
    name: Name,
}

impl Remote {
    async fn begin(self, call: Call) -> Result<Chunks> {
        let asked = Asked::read(&call).await?;
        let mut request = self.request(asked)?;
        request.timeout = call
            .deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let responses = self.client.generate(request).await;
        let responses = responses.map_err(|error| failure::error(error, &self.name))?;
        let answer = Answer {
            name: self.name,
            model: self.model,
            main: call.want.ports.has(&Port::MAIN),
            meta: call.want.ports.has(&Port::META),
            responses: Some(responses),
            ready: VecDeque::new(),
            begun: false,
            finish: None,
            prompt_tokens: None,
            completion_tokens: None,
        };
        Ok(stream::try_unfold(answer, Answer::next).boxed())
    }

    fn request(&self, asked: Asked) -> Result<Request> {
        let mut request = Request::new(Arc::clone(&self.model));
        let text = |text: &str| Data::Bytes([text.as_bytes()].into_iter().collect());
        let (input, prompt) = match &asked.prompt {
            Prompt::Text(prompt) => (TEXT_INPUT, text(prompt)),
            Prompt::Messages(messages) => ("messages", text(&messages.to_string())),
        };
        let place = self.model.input(input);
        let place = place.ok_or_else(|| unimplemented("input messages"))?;
        request.inputs.push((place, prompt));
        if asked
            .tools
            .as_array()
            .is_some_and(|tools| !tools.is_empty())
        {
            let place = self
                .model
                .input("tools")
                .ok_or_else(|| unimplemented("tools"))?;
            request.inputs.push((place, text(&asked.tools.to_string())));
        }
        self.flag(&mut request, "stream", self.model.decoupled);
        self.flag(&mut request, "exclude_input_in_output", true);
        for output in [FINISH, INPUT_TOKENS, OUTPUT_TOKENS] {
            if self.model.output(output).is_some() {
                self.flag(&mut request, &format!("return_{output}"), true);
            }
        }
        fields::fill(&mut request, &asked.config)?;
        Ok(request)
    }

    /// Sets an input, if the model has it.
    fn flag(&self, request: &mut Request, name: &str, value: bool) {
        let place = self.model.input(name);
        let place = place.filter(|place| self.model.inputs[*place].datatype == Datatype::Bool);
        if let Some(place) = place {
            request.inputs.push((place, Data::Bool(vec![value])));
        }
    }
}

/// An answer that is being read.
struct Answer {
    name: Name,
    model: Arc<Model>,
    main: bool,
    meta: bool,
    /// `None` at the end.
    responses: Option<Responses>,
    ready: VecDeque<Chunk>,
    /// The first chunk carries the role.
    begun: bool,
    finish: Option<Reason>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl Answer {
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

    fn take(&mut self, response: &Response) {
        for (place, data) in &response.outputs {
            match (&*self.model.outputs[*place].name, data) {
                (TEXT_OUTPUT, Data::Bytes(texts)) => {
                    let mut all = BytesMut::new();
                    texts.iter().for_each(|text| all.extend_from_slice(text));
                    self.text(all.freeze());
                }
                (FINISH, Data::Bytes(reasons)) => {
                    let reason = reasons.iter().next().map(String::from_utf8_lossy);
                    let reason = reason.filter(|reason| !matches!(&**reason, "" | "None"));
                    if let Some(reason) = reason {
                        self.finish = Some(Reason::from_name(&reason));
                    }
                }
                (INPUT_TOKENS, counts) => self.prompt_tokens = count(counts).or(self.prompt_tokens),
                (OUTPUT_TOKENS, counts) => {
                    // Of this response only (TR-401).
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
        if !self.main || (text.is_empty() && self.begun) {
            return;
        }
        let mut chunk = Chunk::bytes(text).with_mime(Mime::TEXT);
        if !std::mem::replace(&mut self.begun, true) {
            chunk = chunk.with_meta(Meta::default().with_role("ASSISTANT"));
        }
        self.ready.push_back(chunk);
    }

    /// The server has said that there is no more.
    fn end(&mut self) {
        self.responses = None;
        let finish = self.finish.clone().unwrap_or(Reason::Stop);
        let mut meta = Meta::default()
            .with_role("ASSISTANT")
            .with_finish(0, finish.clone());
        meta.model = Some(self.name.clone());
        let counted = self.prompt_tokens.is_some() || self.completion_tokens.is_some();
        let prompt = self.prompt_tokens.unwrap_or(0);
        let completion = self.completion_tokens.unwrap_or(0);
        if counted {
            meta = meta.with_usage(0, Usage::of(prompt, completion));
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

/// The sum of some counts.
fn count(data: &Data) -> Option<u64> {
    match data {
        Data::Uint(list) => Some(list.iter().sum()),
        Data::Int(list) => list.iter().map(|count| u64::try_from(*count).ok()).sum(),
        _ => None,
    }
}

const TEXT_INPUT: &str = "text_input";
const TEXT_OUTPUT: &str = "text_output";
const FINISH: &str = "finish_reason";
const INPUT_TOKENS: &str = "num_input_tokens";
const OUTPUT_TOKENS: &str = "num_output_tokens";
