//! Converts the events of a request into the chunks of a model function, for local engines and for other servers
//! alike.
//!
//! Without markers and without `inner`, one step with text is one chunk, and only its bytes are allocated.
//!
//! ```text
//!   Tokens ──► [ held while a controller may take it back ] ──► response | reasoning | tool_calls | events, tokens, logprobs
//!   Report ──► controller_log
//!   Finish ──► what was held, what the parser held back    Usage ──► meta, and one empty chunk with the run's metadata
//! ```
//!
//! A watched request has none of these: each event is one chunk ([`super::GenerateConfig::watched`]).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use futures::Stream;
use sapwood_engine::api::{self, EngineEvent, EventKind, SharedVocabulary, StopCause, Tokens};
use serde_json::{Value, json};

use super::choice_calls::{ChoiceCalls, ToolCallIds};
use super::held_output::{HeldOutput, too_late};
use super::output_parser::{OutputEnd, OutputParser, OutputPart, OutputSettings};
use crate::Result;
use crate::call::{CallId, Instant};
use crate::chunk::{Chunk, Text};
use crate::delta::Delta;
use crate::error::Error;
use crate::limits;
use crate::meta::{ChoiceFinish, Meta, RunUsage};
use crate::name::{Mime, Name, Port};
use crate::observer::CallObserver;
use crate::steering::HoldPolicy;
use crate::token_charge::TokenCharge;
use crate::want::{RequestedPorts, Want};

/// What is known when the request is submitted.
pub(crate) struct SubmittedInfo {
    pub(crate) model: Name,
    pub(crate) vocabulary: SharedVocabulary,
    pub(crate) want: Want,
    pub(crate) call: CallId,
    pub(crate) choices: u32,
    /// The choices are announced: there are several, or a controller may make more (D-25).
    pub(crate) tree: bool,
    /// The events are emitted as they are.
    pub(crate) watched: bool,
    /// Set for controllers that may backtrack.
    pub(crate) hold: Option<HoldPolicy>,
    pub(crate) logprobs: bool,
    /// How the text is parsed.
    pub(crate) output: OutputSettings,
    /// Tokens of the prompt. They come with the first chunk, so that a face that reports them need not wait for the end
    /// (TR-401).
    pub(crate) prompt_tokens: u32,
    /// Whether the seed in the final report is the one that was used.
    pub(crate) seeded: bool,
    pub(crate) began: Instant,
    pub(crate) token_charge: Option<Arc<dyn TokenCharge>>,
    pub(crate) observer: Option<Arc<dyn CallObserver>>,
}

/// An event of a request.
pub(crate) enum AnswerEvent {
    /// An event as engines emit it.
    Event(EngineEvent),
    /// The next finish of this choice has a reason that no engine has.
    #[cfg_attr(
        not(feature = "net"),
        allow(dead_code, reason = "only servers elsewhere end so")
    )]
    Odd(u32, Name),
}

/// The chunks of one request.
pub(crate) struct AnswerChunks<S> {
    asked: SubmittedInfo,
    wants: WantedPorts,
    role: Arc<Meta>,
    /// Dropped with the stream, or at the end; that removes the sequence (D-7).
    handle: Option<S>,
    ready: VecDeque<Chunk>,
    choices: Vec<ChoiceProgress>,
    first_token: Option<Instant>,
    /// The first choice has failed: the call ends with this when the other choices have ended.
    failed: Option<Error>,
    /// An event of a watched request was emitted.
    watch_begun: bool,
}

/// Which ports are read.
#[derive(Clone, Copy)]
struct WantedPorts {
    main: bool,
    reasoning: bool,
    tool_calls: bool,
    tokens: bool,
    logprobs: bool,
    meta: bool,
    log: bool,
    events: bool,
}

struct ChoiceProgress {
    held: HeldOutput,
    parser: OutputParser,
    /// The first chunk of each of these ports carries the role.
    main_begun: bool,
    reasoning_begun: bool,
    calls: ChoiceCalls,
    odd: Option<Name>,
    finish: Option<(ChoiceFinish, Option<StopCause>)>,
}

impl<S> AnswerChunks<S> {
    pub(crate) fn new(asked: SubmittedInfo, handle: S) -> Self {
        let has = |port: Port| asked.want.ports.has(&port);
        let wants = WantedPorts {
            main: has(Port::MAIN),
            reasoning: has(Port::REASONING),
            tool_calls: has(Port::TOOL_CALLS),
            tokens: has(Port::TOKENS),
            logprobs: has(Port::LOGPROBS) && asked.logprobs,
            meta: has(Port::META),
            log: has(Port::CONTROLLER_LOG),
            // It repeats what the others have, so only who names it gets it.
            events: matches!(&asked.want.ports, RequestedPorts::Only(ports) if ports.contains(&Port::EVENTS)),
        };
        let mut answer = Self {
            wants,
            role: Arc::new(
                Meta::default()
                    .with_role("ASSISTANT")
                    .with_usage(0, RunUsage::of(asked.prompt_tokens.into(), 0)),
            ),
            handle: Some(handle),
            ready: VecDeque::new(),
            choices: Vec::new(),
            first_token: None,
            failed: None,
            watch_begun: false,
            asked,
        };
        if answer.asked.tree && !answer.asked.watched {
            // All choices are announced at once, in order, because a face builds a tree of them (EV-604).
            for choice in 0..answer.asked.choices {
                answer.text(choice, Port::MAIN, Text::new());
            }
        }
        answer
    }

    fn choice(&mut self, index: u32) -> Result<&mut ChoiceProgress> {
        // Events of other servers come through here too, so the index is not trusted.
        if index >= limits::CHOICES_SEEN_MAX {
            return Err(Error::Protocol {
                peer: self.asked.model.clone(),
                why: format!("choice {index} is out of range"),
            });
        }
        while self.choices.len() <= index as usize {
            self.choices.push(ChoiceProgress {
                held: HeldOutput::default(),
                parser: OutputParser::new(self.asked.output.clone()),
                main_begun: false,
                reasoning_begun: false,
                calls: ChoiceCalls::default(),
                odd: None,
                finish: None,
            });
        }
        Ok(&mut self.choices[index as usize])
    }

    fn take(&mut self, reported: AnswerEvent) -> Result<()> {
        let event = match reported {
            AnswerEvent::Event(event) => event,
            AnswerEvent::Odd(choice, name) => {
                self.choice(choice)?.odd = Some(name);
                return Ok(());
            }
        };
        if let EventKind::Tokens(tokens) = &event.kind {
            self.charge(tokens);
        }
        if self.asked.watched && !matches!(event.kind, EventKind::Error(_)) {
            return self.watch(event);
        }
        let choice = event.choice;
        match event.kind {
            EventKind::Tokens(tokens) => self.committed(choice, tokens),
            EventKind::Finish(finish) => self.finish(choice, finish),
            EventKind::Failed(error) => self.fail(choice, error.into()),
            EventKind::Report(report) => {
                if self.wants.log && !report.logs.is_empty() {
                    let data = Bytes::from(report.logs);
                    self.push(choice, Port::CONTROLLER_LOG, Mime::TEXT, data);
                }
                Ok(())
            }
            EventKind::Usage(usage) => {
                self.end(usage);
                self.failed.take().map_or(Ok(()), Err)
            }
            EventKind::Error(error) => Err(error.into()),
        }
    }

    /// Charges tokens as they come, so that a call that is cancelled has paid for what it got.
    fn charge(&mut self, tokens: &Tokens) {
        let made = u32::try_from(tokens.tokens.len()).unwrap_or(u32::MAX);
        // What a branch repeats was charged to its parent.
        let made = made.saturating_sub(tokens.inherited);
        if made > 0 {
            self.first_token.get_or_insert_with(Instant::now);
            if let Some(token_charge) = &self.asked.token_charge {
                token_charge.output(made);
            }
        }
    }

    /// Emits an event as it is.
    fn watch(&mut self, event: EngineEvent) -> Result<()> {
        let (port, mime) = self.carrier();
        let mut chunk = Chunk::empty().on(port).with_mime(mime);
        // The tokens of the prompt, as with the first chunk of any other request.
        if !std::mem::replace(&mut self.watch_begun, true) {
            chunk.meta = Some(Arc::clone(&self.role));
        }
        let usage = match &event.kind {
            EventKind::Finish(finish) => {
                let state = self.choice(event.choice)?;
                state.finish = Some((reason(finish.reason, 0), finish.stop.clone()));
                None
            }
            EventKind::Failed(_) => {
                self.choice(event.choice)?.finish = Some((ChoiceFinish::Failed, None));
                None
            }
            EventKind::Usage(usage) => Some(*usage),
            _ => None,
        };
        self.ready
            .push_back(chunk.with_choice(event.choice).with_inner(event));
        if let Some(usage) = usage {
            self.end(usage);
        }
        Ok(())
    }

    /// Takes the tokens of a step: emits them, or holds them if they may be taken back (AI-936).
    fn committed(&mut self, choice: u32, tokens: Tokens) -> Result<()> {
        let Some(policy) = self.asked.hold else {
            // A steerer that does not announce that it backtracks must not.
            if tokens.backtrack > 0 || tokens.withdrawn > 0 {
                return Err(too_late());
            }
            return self.tokens(choice, tokens);
        };
        match self.choice(choice)?.held.push(tokens, policy)? {
            Some(released) => self.tokens(choice, released),
            None => Ok(()),
        }
    }

    fn tokens(&mut self, choice: u32, mut tokens: Tokens) -> Result<()> {
        let before = self.ready.len();
        let inner = self.asked.want.inner;
        let text = Text::from(&*tokens.text);
        self.parse(choice, |parser, out| parser.push(text, out))?;
        // A caller that reads `inner` gets a chunk for each step, also if its text is held back (KE-612).
        if inner && self.ready.len() == before {
            self.text(choice, Port::MAIN, Text::new());
        }
        if self.wants.tokens && !tokens.tokens.is_empty() {
            let mut data = BytesMut::with_capacity(4 * tokens.tokens.len());
            tokens
                .tokens
                .iter()
                .for_each(|token| data.put_u32_le(token.id));
            self.push(choice, Port::TOKENS, Mime::TOKENS, data.freeze());
        }
        if self.wants.logprobs {
            for token in &tokens.tokens {
                let found = self.logprob_line(choice, token);
                self.push(
                    choice,
                    Port::LOGPROBS,
                    Mime::NDJSON,
                    line(found.to_string()),
                );
            }
        }
        // The first chunk of the step carries what the step sampled.
        if let Some(chunk) = self.ready.get_mut(before).filter(|_| inner) {
            self.asked.output.hide_marks(&mut tokens);
            chunk.inner = Some(Arc::new(tokens));
        }
        Ok(())
    }

    /// Runs the choice's parser and emits the events that it finds.
    fn parse(
        &mut self,
        choice: u32,
        feed: impl FnOnce(&mut OutputParser, &mut dyn FnMut(OutputPart)),
    ) -> Result<()> {
        let mut parser =
            // Taken out for the call, because the parts that it emits change the same choice.
            std::mem::replace(&mut self.choice(choice)?.parser, OutputParser::plain());
        feed(&mut parser, &mut |part| self.part(choice, part));
        self.choice(choice)?.parser = parser;
        Ok(())
    }

    fn part(&mut self, choice: u32, mut part: OutputPart) {
        if let OutputPart::CallBegin { id, .. } = &mut part {
            id.take_if(|id| !self.asked.output.takes_id(id));
        }
        let (events, reads_calls) = (self.wants.events, self.wants.tool_calls);
        let short = self.asked.output.has_short_ids();
        let ids = ToolCallIds::new(self.asked.call, choice, short);
        let Ok(state) = self.choice(choice) else {
            return;
        };
        // Also if nobody reads them: the finish reason depends on the number of calls.
        let call = state.calls.take(&part, ids);
        if events && let Some(delta) = state.calls.delta(choice, &part, call.as_ref()) {
            self.event(&delta);
        }
        if reads_calls && let Some(call) = &call {
            self.push(choice, Port::TOOL_CALLS, Mime::NDJSON, line(call.to_line()));
        }
        match part {
            OutputPart::Text(text) if self.wants.main => self.text(choice, Port::MAIN, text),
            OutputPart::Reasoning(text) if self.wants.reasoning => {
                self.text(choice, Port::REASONING, text);
            }
            // Who reads the text has not seen the beginning of this call.
            OutputPart::CallBroken { source } if self.wants.main && !source.is_empty() => {
                self.text(choice, Port::MAIN, Text::from(source));
            }
            _ => {}
        }
    }

    /// Emits a line of the port `events`. It is one output, whatever the number of choices.
    fn event(&mut self, delta: &Delta) {
        self.push(0, Port::EVENTS, Mime::NDJSON, line(delta.to_line()));
    }

    /// Builds a text chunk; the first one of a port carries the role.
    fn text(&mut self, choice: u32, port: Port, text: Text) {
        let Ok(state) = self.choice(choice) else {
            return;
        };
        let begun = if port == Port::REASONING {
            &mut state.reasoning_begun
        } else {
            &mut state.main_begun
        };
        let first = !std::mem::replace(begun, true);
        let mut chunk = Chunk::text(text).on(port).with_choice(choice);
        chunk.meta = first.then(|| Arc::clone(&self.role));
        self.ready.push_back(chunk);
    }

    fn push(&mut self, choice: u32, port: Port, mime: Mime, data: Bytes) {
        let chunk = Chunk::bytes(data)
            .with_mime(mime)
            .on(port)
            .with_choice(choice);
        self.ready.push_back(chunk);
    }

    /// Ends a choice whose controller failed while others go on (AI-915). Most callers read the first choice alone, so
    /// its failure is that of the call as well.
    fn fail(&mut self, choice: u32, error: Error) -> Result<()> {
        self.release(choice, OutputEnd::Cut)?;
        self.ended(choice, ChoiceFinish::Failed, None)?;
        if choice == 0 {
            self.failed = Some(error);
        }
        Ok(())
    }

    /// Emits what is held back of a choice that ends.
    fn release(&mut self, choice: u32, end: OutputEnd) -> Result<()> {
        if let Some(held) = self.choice(choice)?.held.finish() {
            self.tokens(choice, held)?;
        }
        self.parse(choice, |parser, out| parser.end(end, out))
    }

    fn finish(&mut self, choice: u32, finish: api::ChoiceEnd) -> Result<()> {
        let odd = self.choice(choice)?.odd.take();
        let end = match (&odd, finish.reason, &finish.stop) {
            (Some(_), ..) | (None, _, Some(StopCause::Text(_))) => OutputEnd::Cut,
            // Tokens that a request names as stops are those that end the answers of its model.
            (None, api::FinishReason::Stop, _) => OutputEnd::Model,
            (None, ..) => OutputEnd::Cut,
        };
        // First: text that was held back, or a call that ends here, comes before the finish and may decide it.
        self.release(choice, end)?;
        if let Some(name) = odd {
            return self.ended(choice, ChoiceFinish::Other(name), finish.stop);
        }
        let calls = self.choice(choice)?.calls.complete();
        let reason = reason(finish.reason, calls);
        self.ended(choice, reason, finish.stop)
    }

    fn ended(&mut self, choice: u32, reason: ChoiceFinish, stop: Option<StopCause>) -> Result<()> {
        if self.wants.events {
            self.event(&Delta::Finish {
                turn: 0,
                choice,
                reason: reason.name().to_owned(),
            });
        }
        self.choice(choice)?.finish = Some((reason, stop));
        Ok(())
    }

    fn logprob_line(&self, choice: u32, token: &api::Sampled) -> Value {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let bytes = self.asked.vocabulary.bytes(token.id);
        let top: Vec<Value> = token
            .top
            .iter()
            .map(|(id, logprob)| {
                let text = text(self.asked.vocabulary.bytes(*id));
                json!({"token_id": id, "text": text, "logprob": logprob})
            })
            .collect();
        json!({
            "token_id": token.id,
            "text": text(bytes),
            "bytes": bytes.to_vec(),
            "logprob": token.logprob,
            "rank": token.rank,
            "top": top,
            "choice": choice,
        })
    }

    /// Everything has been generated: emits the metadata for its port and for the run.
    fn end(&mut self, usage: api::TokenUsage) {
        if let Some(observer) = &self.asked.observer {
            observer.took(&usage);
        }
        // The reader of a watched request has the events, and no port but the one that carries them.
        if self.wants.meta && !self.asked.watched {
            let document = self.meta_document(&usage);
            let data = Bytes::from(document.to_string());
            self.push(0, Port::META, Mime::JSON, data);
        }
        let counted = RunUsage {
            cached_tokens: u64::from(usage.cached_tokens),
            ..RunUsage::of(
                u64::from(usage.prompt_tokens),
                u64::from(usage.completion_tokens),
            )
        };
        let mut meta = Meta::default()
            .with_role("ASSISTANT")
            .with_usage(0, counted);
        if self.asked.seeded {
            meta = meta.with_extra("seed", usage.seed);
        }
        meta.model = Some(self.asked.model.clone());
        for (index, choice) in self.choices.iter().enumerate() {
            if let Some((reason, _)) = &choice.finish {
                // Choices are counted in 32 bits, see `choice`.
                meta = meta.with_finish(index as u32, reason.clone());
            }
        }
        // A caller that reads tokens also gets the text that stopped them.
        if self.asked.want.inner
            && let Some(first) = self.choices.first()
            && let Some((_, Some(StopCause::Text(text)))) = &first.finish
        {
            meta = meta.with_extra("stop", text.as_str());
        }
        let (port, mime) = self.carrier();
        let carrier = Chunk::empty().on(port).with_mime(mime);
        // The usage is the last event of a request, so nothing more is read.
        self.ready.push_back(carrier.with_meta(meta));
        self.handle = None;
    }

    /// The port for the run's metadata: one that the caller reads, so that the metadata reaches a caller that forwards
    /// this stream.
    fn carrier(&self) -> (Port, Mime) {
        let wants = &self.wants;
        let ports = [
            (wants.main, Port::MAIN, Mime::TEXT),
            (wants.reasoning, Port::REASONING, Mime::TEXT),
            (wants.meta, Port::META, Mime::JSON),
            (wants.tool_calls, Port::TOOL_CALLS, Mime::NDJSON),
            (wants.tokens, Port::TOKENS, Mime::TOKENS),
            (wants.logprobs, Port::LOGPROBS, Mime::NDJSON),
            (wants.log, Port::CONTROLLER_LOG, Mime::TEXT),
            (wants.events, Port::EVENTS, Mime::NDJSON),
        ];
        let read = ports.into_iter().find(|(wanted, ..)| *wanted);
        read.map_or((Port::MAIN, Mime::TEXT), |(_, port, mime)| (port, mime))
    }

    fn meta_document(&self, usage: &api::TokenUsage) -> Value {
        let ms =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1000.0;
        let now = Instant::now();
        let first = self.first_token.map(|first| ms(self.asked.began, first));
        let finish = |choice: Option<&ChoiceProgress>| {
            choice.and_then(|choice| choice.finish.as_ref()).cloned()
        };
        let fields = |finish: Option<(ChoiceFinish, Option<StopCause>)>| {
            let (reason, stop) = finish.unzip();
            (
                reason.map(|reason| reason.to_string()),
                stop.flatten().map(stop_json),
            )
        };
        let (reason, stop) = fields(finish(self.choices.first()));
        let mut document = json!({
            "model": self.asked.model.as_str(),
            "finish_reason": reason,
            "stop": stop,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "seed": self.asked.seeded.then_some(usage.seed),
            "timing": {"first_token_ms": first, "total_ms": ms(self.asked.began, now)},
        });
        if let (Some(object), true) = (document.as_object_mut(), self.choices.len() > 1) {
            let choices = self.choices.iter().enumerate().map(|(index, choice)| {
                let (reason, stop) = fields(finish(Some(choice)));
                json!({"index": index, "finish_reason": reason, "stop": stop})
            });
            object.insert("choices".into(), choices.collect());
        }
        document
    }
}

impl<S: Stream<Item = Result<AnswerEvent>> + Unpin> Stream for AnswerChunks<S> {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(chunk)));
            }
            let Some(handle) = &mut self.handle else {
                return Poll::Ready(None);
            };
            let taken = match ready!(Pin::new(handle).poll_next(cx)) {
                Some(reported) => reported.and_then(|reported| self.take(reported)),
                // An engine whose stream ends without a finish (KE-313).
                None => Err(Error::Truncated {
                    what: self.asked.model.clone(),
                }),
            };
            if let Err(error) = taken {
                self.handle = None;
                self.ready.clear();
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}

/// The reason of a choice that made so many calls of tools.
fn reason(reason: api::FinishReason, calls: u32) -> ChoiceFinish {
    match reason {
        // The engine reports an end of sequence where the model waits for the results of its tools.
        api::FinishReason::Stop if calls > 0 => ChoiceFinish::ToolCalls,
        api::FinishReason::Stop => ChoiceFinish::Stop,
        // AI-932
        api::FinishReason::Length | api::FinishReason::Fuel => ChoiceFinish::Length,
        api::FinishReason::Controller => ChoiceFinish::Controller,
        api::FinishReason::Cancelled => ChoiceFinish::Cancelled,
    }
}

fn stop_json(stop: StopCause) -> Value {
    match stop {
        StopCause::Text(text) => text.into(),
        StopCause::Tokens(tokens) => match tokens[..] {
            [token] => token.into(),
            _ => tokens.into(),
        },
    }
}

fn line(mut text: String) -> Bytes {
    text.push('\n');
    text.into()
}
