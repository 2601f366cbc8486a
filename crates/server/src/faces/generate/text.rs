//! Converts the chunks of a text model into responses (TR-401 to TR-407, TR-502).
//!
//! ```text
//!   chunks ──► each choice: text, reasoning, ──► stream: a response when one of these is there; the end is sent with the
//!              calls, tokens,                            last one if it is ready, else alone
//!              log-probabilities                 whole:  one response at the end
//! ```
//!
//! Reasoning and calls are outputs that only the responses with some of them have, and those whose request names them: the
//! answers of other models are what clients of the reference know.

use std::collections::VecDeque;
use std::iter::repeat_with;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt};
use sapwood_kernel::{
    Args, ChoiceFinish, Chunk, Error, GenerateConfig, Kernel, Mime, Port, PromptMode,
    RequestedPorts, Run, Want,
};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    InputRole, OutputRole, ResponsePayload, Settings, Signature, Strings, Tensor, TensorData,
};
use sapwood_proto::params::GenerationParams;
use serde_json::Value;
use tokio::time::Instant;

use super::call::{CallResponses, CheckedRequest, given, texts};
use super::choice_delta::ChoiceDelta;
use super::input_charge::InputCharge;
use super::request_error::RequestError;

/// Chunks that are joined into one response when several choices are sent together, or read before other tasks get their
/// turn.
const JOINED_MAX: usize = 64;

/// The prompt of a request.
pub(super) enum TextPrompt {
    Text(String),
    Messages(String),
}

/// Calls the model.
pub(super) fn begin(
    call: CheckedRequest,
    settings: &Settings,
    kernel: &Kernel,
    pieces: bool,
) -> Result<CallResponses, RequestError> {
    let prompt = prompt(&call)?;
    if let Some(why) = conflict(&call, settings, &prompt) {
        return Err(RequestError::new(Code::InvalidRequest, why.to_owned()));
    }
    let mut reporter = TextResponses::new(&call, settings, &prompt, kernel);
    // The prompt alone may be too much, where it stands before each choice.
    if let Some(failure) = reporter.overfull() {
        return Err(failure);
    }
    // Only where the caller takes several responses: `generate` must get exactly one (TR-504).
    reporter.is_separate = pieces && call.found.signature.is_separate(&call.mapped);
    Ok(reporter.boxed())
}

/// Why two inputs do not go together.
fn conflict(
    call: &CheckedRequest,
    settings: &Settings,
    prompt: &TextPrompt,
) -> Option<&'static str> {
    if settings.suffix.is_some() && matches!(prompt, TextPrompt::Messages(_)) {
        Some("'suffix' goes with a text prompt, not with 'messages': leave one of them out")
    } else if !is_raw(call, settings, prompt) {
        None
    } else if settings.tools.is_some() {
        // What only a template prints would be lost.
        Some("'tools' goes with 'messages': a text prompt has no chat template")
    } else if settings.template_args.is_some() {
        Some("'template_args' goes with 'messages': a text prompt has no chat template")
    } else {
        None
    }
}

fn prompt(call: &CheckedRequest) -> Result<TextPrompt, RequestError> {
    let signature = &call.found.signature;
    let wrong = |message: String| RequestError::new(Code::InvalidRequest, message);
    let text = given(signature, &call.mapped, |role| *role == InputRole::Prompt);
    let messages = given(signature, &call.mapped, |role| *role == InputRole::Messages);
    // Both are optional in the union signature, so that clients of either kind work; here exactly one must be there.
    let (name, tensor, chat) = match (text, messages) {
        (Some((text, _)), Some((messages, _))) => {
            return Err(wrong(format!(
                "give either '{text}' or '{messages}', not both"
            )));
        }
        (Some((name, tensor)), None) => (name, tensor, false),
        (None, Some((name, tensor))) => (name, tensor, true),
        (None, None) => return Err(wrong("the request has no prompt".into())),
    };
    // Batches were split before, so that more than one element is a mistake.
    let mut all = texts(name, tensor)?;
    match (all.pop(), all.is_empty()) {
        (Some(text), true) if chat => Ok(TextPrompt::Messages(text)),
        (Some(text), true) => Ok(TextPrompt::Text(text)),
        _ => Err(wrong(format!(
            "input '{name}' must have exactly one element"
        ))),
    }
}

/// The whole text of a model for one prompt, for callers that build responses by other rules.
pub(super) async fn whole(
    call: &CheckedRequest,
    settings: &Settings,
    prompt: String,
    kernel: &Kernel,
) -> Result<String, RequestError> {
    let mut reporter = TextResponses::new(call, settings, &TextPrompt::Text(prompt), kernel);
    if let Some(failure) = reporter.overfull() {
        return Err(failure);
    }
    reporter.read_all().await?;
    // There is at least one choice: `n` is 1 or more.
    Ok(reporter.choices.swap_remove(0).text)
}

/// What an answer in one piece holds so far, all its choices and rows together.
#[derive(Debug, Default)]
pub(super) struct AnswerSize {
    alternatives: AtomicUsize,
    text_bytes: AtomicUsize,
}

/// A call whose responses are being sent.
struct TextResponses {
    run: Run<Chunk>,
    signature: Arc<Signature>,
    /// Which outputs are sent.
    wanted: Vec<bool>,
    /// Outputs beside the text are sent.
    more: bool,
    /// The port of tokens is read.
    counts: bool,
    /// The port of log-probabilities is read.
    logprobs: bool,
    /// The request names its outputs, and gets each of them.
    is_named: bool,
    /// The request sets the number of alternatives: only then the output of log-probabilities has content, as with
    /// vLLM's backend.
    alternatives: bool,
    stream: bool,
    id: String,
    choices: Vec<ChoiceDelta>,
    /// A controller may fork: each fork is one more choice (TR-1305).
    grows: bool,
    /// What stands before the text of each choice (TR-405).
    prepended: String,
    /// What the whole answer holds.
    held: Arc<AnswerSize>,
    charge: InputCharge,
    /// The answer begins with the prompt, which is in memory until it is sent.
    repeats_prompt: bool,
    /// A response is of one choice, and has its index (D-55).
    is_separate: bool,
    /// Responses of the last step that were not sent yet.
    queued: VecDeque<ResponsePayload>,
    /// The chunk after the last response, which was found while the end was looked for.
    ahead: Option<Result<Chunk, Error>>,
    over: bool,
}

impl TextResponses {
    fn new(
        call: &CheckedRequest,
        settings: &Settings,
        prompt: &TextPrompt,
        kernel: &Kernel,
    ) -> Self {
        let signature = Arc::clone(&call.found.signature);
        let wanted = signature.wanted(&call.mapped);
        let reported = |roles: &[OutputRole]| {
            let mut outputs = signature.outputs.iter().zip(&wanted);
            outputs.any(|(output, wanted)| *wanted && roles.contains(&output.role))
        };
        let logprobs = reported(&[
            OutputRole::Logprobs,
            OutputRole::TokenLogprobs,
            OutputRole::CumulativeLogprob,
        ]);
        let tokens = logprobs || reported(&[OutputRole::NumOutputTokens]);
        // Only what is sent is asked for: log-probabilities cost the engine a pass over the vocabulary for each token.
        let mut ports = vec![Port::MAIN];
        ports.extend(tokens.then_some(Port::TOKENS));
        ports.extend(logprobs.then_some(Port::LOGPROBS));
        // Only the output of a conversation is taken apart, and calls are looked for only where there are tools.
        let chat = !is_raw(call, settings, prompt);
        ports.extend((chat && reported(&[OutputRole::Reasoning])).then_some(Port::REASONING));
        let calls = settings.tools.is_some() && reported(&[OutputRole::ToolCalls]);
        ports.extend(calls.then_some(Port::TOOL_CALLS));
        let args = args(call, settings, prompt, logprobs);
        let run = kernel
            .run::<Chunk>(&call.found.function, args)
            .wanting(Want::from(RequestedPorts::Only(ports)))
            .timeout(time(call, settings));
        // Messages have no text to prepend before the template has rendered them.
        let prepended = match prompt {
            TextPrompt::Text(text) if prepends(call, settings) => text.clone(),
            _ => String::new(),
        };
        let mut responses = Self {
            run,
            counts: tokens,
            logprobs,
            is_named: call.mapped.outputs.is_some(),
            alternatives: settings.params.top_logprobs.is_some(),
            more: tokens || reported(&[OutputRole::FinishReason, OutputRole::NumInputTokens]),
            signature,
            wanted,
            stream: settings.stream,
            id: call.shown_id().to_owned(),
            choices: Vec::new(),
            grows: settings.controller.is_some(),
            repeats_prompt: !prepended.is_empty(),
            prepended,
            held: Arc::clone(&call.held),
            charge: call.charge.clone(),
            is_separate: false,
            queued: VecDeque::new(),
            ahead: None,
            over: false,
        };
        responses.grow(settings.params.n.unwrap_or(1) as usize);
        if !responses.grows {
            // No later choice needs it, and it is as long as the prompt.
            responses.prepended = String::new();
        }
        responses
    }

    /// Adds choices up to `count`.
    fn grow(&mut self, count: usize) {
        let more = count.saturating_sub(self.choices.len());
        let bytes = self.prepended.len().saturating_mul(more);
        let before = self.held.text_bytes.fetch_add(bytes, Ordering::Relaxed);
        // A copy for each choice may be a gigabyte. Without it the answer is refused by `overfull`.
        let text = if before.saturating_add(bytes) <= PIECE_BYTES_MAX {
            self.prepended.as_str()
        } else {
            ""
        };
        let choice = || ChoiceDelta {
            text: text.to_owned(),
            ..ChoiceDelta::default()
        };
        self.choices.extend(repeat_with(choice).take(more));
    }

    /// Reads all chunks to the end.
    async fn read_all(&mut self) -> Result<(), RequestError> {
        self.over = true;
        while let Some(chunk) = self.run.next().await {
            let chunk = chunk.map_err(|error| RequestError::of(&error, &self.id))?;
            self.take(&chunk);
            if let Some(failure) = self.overfull() {
                return Err(failure);
            }
            // A model that is always ready would keep this worker thread for itself.
            tokio::task::coop::consume_budget().await;
        }
        self.finish();
        Ok(())
    }

    /// The error of an answer in one piece that has become larger than it may. A stream is bounded by its reader.
    fn overfull(&self) -> Option<RequestError> {
        let most = if self.stream {
            return None;
        } else if self.held.alternatives.load(Ordering::Relaxed) > ALTERNATIVES_MAX {
            format!("{ALTERNATIVES_MAX} log-probabilities")
        } else if self.held.text_bytes.load(Ordering::Relaxed) > PIECE_BYTES_MAX {
            format!("{PIECE_BYTES_MAX} bytes of text")
        } else {
            return None;
        };
        Some(too_much(&most))
    }

    fn take(&mut self, chunk: &Chunk) {
        // The model has begun, and so it has read the prompt.
        if !self.repeats_prompt {
            self.charge.release();
        }
        let count = chunk.choice as usize + 1;
        // The kernel bounds the choices of a call, forks included.
        if self.grows && count > self.choices.len() {
            self.grow(count);
        }
        // A remote model may send choices that were not asked for; they have no output.
        let Some(choice) = self.choices.get_mut(chunk.choice as usize) else {
            return;
        };
        match chunk.port.as_str() {
            // The text of a model is UTF-8, and cut between characters (TR-406). Another function may send anything.
            "" => {
                let more = append(&mut choice.text, &chunk.data);
                self.held.text_bytes.fetch_add(more, Ordering::Relaxed);
            }
            "reasoning" => {
                let more = append(&mut choice.reasoning, &chunk.data);
                self.held.text_bytes.fetch_add(more, Ordering::Relaxed);
            }
            "tool_calls" => {
                let more = choice.call(&chunk.data);
                self.held.text_bytes.fetch_add(more, Ordering::Relaxed);
            }
            // Ids of four bytes each.
            "tokens" => choice.tokens += u32::try_from(chunk.data.len() / 4).unwrap_or(0),
            "logprobs" => {
                for line in chunk.data.split(|byte| *byte == b'\n') {
                    let more = choice.logprob(line);
                    self.held.alternatives.fetch_add(more, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }

    fn finish(&mut self) {
        for (index, choice) in (0..).zip(&mut self.choices) {
            choice.end_call();
            choice.finish = self.run.meta().finish.get(&index).cloned();
        }
    }

    fn has_text(&self) -> bool {
        self.choices.iter().any(ChoiceDelta::has_text)
    }

    /// Whether the end of the request is ready. A step that ends it yields its tokens and the end at once, and the
    /// finish reason belongs to the response with its last token (D-55).
    fn is_last(&mut self, cx: &mut Context<'_>) -> bool {
        // Without outputs beside the text the last response has nothing that an earlier one has not, so it need not be
        // recognised.
        if !self.more {
            return false;
        }
        loop {
            match self.run.poll_next_unpin(cx) {
                // Only metadata, which the run keeps.
                Poll::Ready(Some(Ok(chunk))) if chunk.data.is_empty() => {}
                Poll::Ready(Some(ahead)) => {
                    self.ahead = Some(ahead);
                    return false;
                }
                Poll::Ready(None) => {
                    self.over = true;
                    self.finish();
                    return true;
                }
                Poll::Pending => return false,
            }
        }
    }

    /// Whether a response that is not the last one is ready.
    fn is_tellable(&self) -> bool {
        self.stream && self.choices.iter().any(ChoiceDelta::is_ready) && self.is_whole_step()
    }

    /// Whether the tokens and log-probabilities of the text have arrived as well: they come on ports of their own.
    fn is_whole_step(&self) -> bool {
        // With several choices each step has chunks of some of them only, and nothing shows which are still to come.
        !self.counts
            || self.choices.len() > 1
            || self.choices.iter().all(|choice| {
                choice.tokens > 0
                    && (!self.logprobs || choice.logprobs.len() >= choice.tokens as usize)
            })
    }

    /// Builds a response of what is ready: all of it, or of the first choice that has something while the others
    /// queue.
    fn flush(&mut self, last: bool) -> Option<Result<ResponsePayload, RequestError>> {
        if !self.is_separate {
            return Some(Ok(self.response(0..self.choices.len(), last)));
        }
        for registration in 0..self.choices.len() {
            // The end of a choice needs a response of its own only where one of its outputs shows it.
            let has_end = last && (self.more || !self.stream);
            if has_end || self.choices[registration].is_ready() {
                let response = self.response(registration..registration + 1, last);
                self.queued.push_back(response);
            }
        }
        self.queued.pop_front().map(Ok)
    }

    /// Builds a response of what these choices have ready.
    fn response(&mut self, reported: Range<usize>, last: bool) -> ResponsePayload {
        let mut outputs = Vec::with_capacity(1);
        for (registration, output) in self.signature.outputs.iter().enumerate() {
            if self.wanted.get(registration) == Some(&true)
                && let Some(tensor) = self.output(&output.role, reported.clone(), last)
            {
                outputs.push((registration, tensor));
            }
        }
        // `cumulative` goes on: it is of the whole output.
        for choice in &mut self.choices[reported] {
            choice.text.clear();
            choice.reasoning.clear();
            choice.calls.clear();
            choice.tokens = 0;
            choice.logprobs.clear();
            choice.token_logprobs.clear();
        }
        ResponsePayload {
            outputs,
            parameters: Vec::new(),
        }
    }

    /// An output that is left out where no choice has any of it.
    fn optional(&self, texts: Strings) -> Option<Strings> {
        let has_some = self.is_named || texts.iter().any(|text| !text.is_empty());
        has_some.then_some(texts)
    }

    fn output(&self, role: &OutputRole, reported: Range<usize>, last: bool) -> Option<Tensor> {
        let choices = &self.choices[reported.clone()];
        let data = match role {
            OutputRole::Text => {
                let texts = choices.iter().map(|choice| choice.text.as_bytes());
                TensorData::Bytes(texts.collect())
            }
            OutputRole::Reasoning => {
                let texts = choices.iter().map(|choice| choice.reasoning.as_bytes());
                TensorData::Bytes(self.optional(texts.collect())?)
            }
            OutputRole::ToolCalls => {
                let mut texts = Strings::default();
                let lists = choices.iter().map(ChoiceDelta::calls_list);
                lists.for_each(|list| texts.push(list.as_bytes()));
                TensorData::Bytes(self.optional(texts)?)
            }
            OutputRole::FinishReason => {
                // The text of an absent reason is Python's, as vLLM's backend writes it.
                let reason = |choice: &ChoiceDelta| {
                    match choice.finish.as_ref().filter(|_| last) {
                        None => "None".to_owned(),
                        // TR-1305
                        Some(ChoiceFinish::Controller) => ChoiceFinish::Stop.to_string(),
                        Some(reason) => reason.to_string(),
                    }
                };
                let mut reasons = Strings::default();
                choices
                    .iter()
                    .for_each(|choice| reasons.push(reason(choice).as_bytes()));
                TensorData::Bytes(reasons)
            }
            OutputRole::CumulativeLogprob => {
                TensorData::Float(choices.iter().map(|choice| choice.cumulative).collect())
            }
            OutputRole::Logprobs => {
                let mut texts = Strings::default();
                choices.iter().for_each(|choice| {
                    let reported = if self.alternatives && !choice.logprobs.is_empty() {
                        Value::Array(choice.logprobs.clone())
                    } else {
                        Value::Null
                    };
                    texts.push(reported.to_string().as_bytes());
                });
                TensorData::Bytes(texts)
            }
            OutputRole::TokenLogprobs => {
                let all = choices.iter().flat_map(|choice| &choice.token_logprobs);
                TensorData::Float(all.copied().collect())
            }
            OutputRole::NumInputTokens => {
                let tokens = self.run.meta().usage.prompt_tokens;
                // An upstream may report them at its end only.
                if tokens == 0 && !last {
                    return None;
                }
                TensorData::Uint(vec![tokens])
            }
            OutputRole::NumOutputTokens => {
                TensorData::Uint(choices.iter().map(|choice| choice.tokens.into()).collect())
            }
            // The index within a batch is set where its rows are joined.
            OutputRole::BatchIndex => TensorData::Int(vec![0; choices.len()]),
            OutputRole::SequenceIndex => {
                TensorData::Int((0..).take(reported.end).skip(reported.start).collect())
            }
            OutputRole::Embedding
            | OutputRole::Score
            | OutputRole::Port(_)
            | OutputRole::Nothing => return None,
        };
        Some(Tensor::flat(data))
    }
}

/// The responses: each as soon as its text is ready, or one at the end.
impl Stream for TextResponses {
    type Item = Result<ResponsePayload, RequestError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let reporter = &mut *self;
        if let Some(queued) = reporter.queued.pop_front() {
            return Poll::Ready(Some(Ok(queued)));
        }
        let mut taken = 0;
        while !reporter.over {
            // What `is_last` found while it looked for the end comes first: the order of chunks is the order of the
            // text.
            let polled = match reporter.ahead.take() {
                Some(ahead) => Poll::Ready(Some(ahead)),
                None => reporter.run.poll_next_unpin(cx),
            };
            match polled {
                Poll::Ready(Some(Ok(chunk))) => {
                    reporter.take(&chunk);
                    taken += 1;
                    if let Some(failure) = reporter.overfull() {
                        reporter.over = true;
                        return Poll::Ready(Some(Err(failure)));
                    }
                    // A model that is always ready would keep this worker thread for itself. A stream returns for each
                    // response, and so needs no such pause.
                    if !reporter.stream && taken > JOINED_MAX {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    // Choices of one step are sent together (TR-407): what is ready is taken with the first of them.
                    if reporter.choices.len() > 1 && taken <= JOINED_MAX {
                        continue;
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    reporter.over = true;
                    return Poll::Ready(Some(Err(RequestError::of(&error, &reporter.id))));
                }
                Poll::Ready(None) => {
                    reporter.over = true;
                    reporter.finish();
                    // TR-406: the last event exists where an output shows the end; otherwise only for text that is left.
                    let reports = !reporter.stream || reporter.more || reporter.has_text();
                    return Poll::Ready(if reports { reporter.flush(true) } else { None });
                }
                Poll::Pending if taken == 0 || !reporter.is_tellable() => return Poll::Pending,
                Poll::Pending => {}
            }
            if reporter.is_tellable() {
                let last = reporter.is_last(cx);
                return Poll::Ready(reporter.flush(last));
            }
        }
        Poll::Ready(None)
    }
}

/// Appends text, and returns by how many bytes `all` has grown.
fn append(all: &mut String, data: &[u8]) -> usize {
    let before = all.len();
    match std::str::from_utf8(data) {
        Ok(text) => all.push_str(text),
        Err(_) => all.push_str(&String::from_utf8_lossy(data)),
    }
    all.len() - before
}

/// The error of a request whose answer in one piece would be too large.
pub(super) fn too_much(most: &str) -> RequestError {
    let message = format!(
        "an answer in one piece holds at most {most}: stream it, or ask for fewer tokens, choices or alternatives"
    );
    // Late: the model has worked for it, and a stream's answer is an event by then.
    RequestError::new(Code::LimitExceeded, message).late()
}

/// Log-probabilities of an answer in one piece. Each takes some 600 bytes until the answer is written (D-47).
const ALTERNATIVES_MAX: usize = 65_536;
/// Bytes of an answer in one piece. The output of functions and upstream models has no length that is known here, and
/// need not end.
pub(super) const PIECE_BYTES_MAX: usize = 16 << 20;

/// Whether the prompt stands before the output (TR-405).
fn prepends(call: &CheckedRequest, settings: &Settings) -> bool {
    match settings.exclude_prompt {
        // A stream never repeats the prompt, even if the request asks for it (D-55).
        Some(exclude) => !exclude && !settings.stream,
        None => call.found.model.prepend_prompt_default && !settings.stream,
    }
}

/// The rest of the request's time.
fn time(call: &CheckedRequest, settings: &Settings) -> Duration {
    let left = call.deadline.saturating_duration_since(Instant::now());
    settings.timeout.map_or(left, |asked| asked.min(left))
}

/// Whether the prompt is used as it is, without a chat template. D-24: `text_input` is, unless the model's options say
/// that it is a turn of a conversation.
fn is_raw(call: &CheckedRequest, settings: &Settings, prompt: &TextPrompt) -> bool {
    let templated = call.found.model.template_raw_prompts;
    matches!(prompt, TextPrompt::Text(_)) && (!templated || settings.suffix.is_some())
}

fn args(call: &CheckedRequest, settings: &Settings, prompt: &TextPrompt, logprobs: bool) -> Args {
    // In the ranges of the core (D-20). It is passed as a value, without JSON.
    let config = GenerateConfig {
        params: GenerationParams {
            // Log-probabilities are computed only for requests that read them.
            top_logprobs: logprobs.then(|| settings.params.top_logprobs.unwrap_or(0)),
            ..settings.params.clone()
        },
        max_tokens_limit: settings.max_tokens_limit,
        prompt_mode: if is_raw(call, settings, prompt) {
            PromptMode::Raw
        } else {
            PromptMode::Auto
        },
        template_args: settings.template_args.clone().map(Value::Object),
        controller: settings.controller.clone(),
        constraint: settings.constraint.clone(),
        ..GenerateConfig::default()
    };
    let mut args = Args::new().with("config", config.into_chunk());
    if let Some(suffix) = &settings.suffix {
        args = args.with("suffix", suffix.as_str());
    }
    if let Some(tools) = &settings.tools {
        args = args.with("tools", Chunk::text(tools.as_str()).with_mime(Mime::JSON));
    }
    match prompt {
        TextPrompt::Text(text) => args.with("prompt", text.as_str()),
        TextPrompt::Messages(text) => {
            args.with("messages", Chunk::text(text.as_str()).with_mime(Mime::JSON))
        }
    }
}
