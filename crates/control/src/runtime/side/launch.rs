//! [`Launches`]: `instantiate`, from the request until the instance can be bound (AI-313 to AI-316).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SteerUser, StepReport, Token};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::answer::{AnswerRoom, Label, SeqResult, SeqValue, StepAnswer};
use super::super::constraint::CONSTRAINT_PREFIX;
use super::super::envelope::{self, Envelope, RequestError};
use super::super::hello::{AnswerFormat, WireFeatures};
use super::super::main_channel::{Dialect, DialectCell};
use super::super::pending::{Pending, Reservation};
use super::super::sequence::{CallFailure, Callback, Outcome, Returned, Sequence};
use super::super::table::{failed_call, merge};
use super::super::wake::{LaunchWaker, StepWake};
use super::queue::{SideQueue, Ticket};
use super::{Launch, Launcher};
use crate::host::PreRounds;

/// The instances that are starting.
pub(super) struct Launches<L: Launcher> {
    launcher: L,
    pending: Arc<Pending<L::Sequence>>,
    dialect: Arc<DialectCell>,
    features: Arc<WireFeatures>,
    wake: Arc<StepWake>,
    queue: Arc<SideQueue>,
    room: AnswerRoom,
    starting: Mutex<HashMap<u64, Starting<L::Sequence>>>,
}

struct Starting<S> {
    ticket: Ticket,
    sequence: S,
    reservation: Reservation<S>,
    waker: Arc<LaunchWaker>,
    dialect: Dialect,
    /// What the request came with; the answer of P2 repeats it.
    prompt: Vec<Token>,
    /// What its callbacks printed and wrote so far.
    report: StepReport,
    /// It has begun, and its first `pre` runs (AI-316).
    first_pre: Option<PreRounds>,
}

#[derive(Deserialize)]
struct Instantiate {
    req_id: String,
    prompt: Prompt,
    module_id: String,
    #[serde(default)]
    module_arg: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Tokens(Vec<Token>),
    Text(String),
}

/// A start that has ended.
pub(super) struct EndedStart {
    pub(super) ticket: Ticket,
    /// The id that the instance can be bound by, if there is one now.
    pub(super) request: String,
    /// The answer as it is sent.
    pub(super) answer: Vec<u8>,
}

impl<L: Launcher> Launches<L> {
    pub(super) fn new(
        launcher: L,
        pending: Arc<Pending<L::Sequence>>,
        (dialect, features): (Arc<DialectCell>, Arc<WireFeatures>),
        wake: Arc<StepWake>,
        (queue, room): (Arc<SideQueue>, AnswerRoom),
    ) -> Self {
        Self {
            launcher,
            pending,
            dialect,
            features,
            wake,
            queue,
            room,
            starting: Mutex::new(HashMap::new()),
        }
    }

    /// Bytes of memory of all controllers.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.launcher.memory_bytes()
    }

    /// Starts an instance. Its answer follows when it has begun.
    pub(super) fn begin(
        &self,
        ticket: Ticket,
        envelope: Envelope,
    ) -> Result<(), (Ticket, RequestError)> {
        let number = ticket.number;
        match self.start(&ticket, envelope) {
            Ok(start) => {
                let starting = start(ticket);
                self.lock().insert(number, starting);
                // The waker may have been called before there was an entry.
                self.queue.begun(number);
                // Cancelled meanwhile: whoever cancelled it found no entry to drop.
                if self.queue.is_cancelled(number) {
                    self.cancel(number);
                }
                Ok(())
            }
            Err(error) => Err((ticket, error)),
        }
    }

    fn start(
        &self,
        ticket: &Ticket,
        envelope: Envelope,
    ) -> Result<impl FnOnce(Ticket) -> Starting<L::Sequence> + use<L>, RequestError> {
        let user = envelope.user()?;
        let request: Instantiate = envelope.decode()?;
        let arg = argument(&request.module_id, request.module_arg)?;
        let prompt = self.prompt(request.prompt)?;
        let reservation = self.pending.reserve(&request.req_id, Instant::now())?;
        let dialect = self.dialect.get();
        let step = Arc::clone(&self.wake);
        let waker = Arc::new(LaunchWaker::new(step, &self.queue, ticket.number));
        let sequence = self.launcher.launch(Launch {
            user: SteerUser {
                name: &user.name,
                is_admin: user.is_admin,
                may_control: true,
            },
            controller: &request.module_id,
            arg: &arg,
            prompt: prompt.clone(),
            dialect,
            waker: Arc::clone(&waker) as Arc<_>,
        })?;
        Ok(move |ticket| Starting {
            ticket,
            sequence,
            reservation,
            waker,
            dialect,
            prompt,
            report: StepReport::default(),
            first_pre: None,
        })
    }

    fn prompt(&self, prompt: Prompt) -> Result<Vec<Token>, RequestError> {
        let tokens = match prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => self.launcher.tokenize_prompt(&text),
        };
        if tokens.len() > PROMPT_TOKENS_MAX {
            let text = format!("prompt too long: {} > {PROMPT_TOKENS_MAX}", tokens.len());
            return Err(RequestError::user(text));
        }
        let vocabulary = self.launcher.vocabulary();
        let beyond = tokens.iter().find(|token| **token as usize >= vocabulary);
        if let Some(token) = beyond {
            let text = format!("prompt token out of range ({token} >= {vocabulary})");
            return Err(RequestError::user(text));
        }
        Ok(tokens)
    }

    /// Looks whether an instance has begun. `None`: not yet, or it was answered before.
    pub(super) fn poll(&self, number: u64) -> Option<EndedStart> {
        // The lock is held while it is asked: a wake at this moment queues another look, which finds the entry.
        let mut starting = self.lock();
        let entry = starting.get_mut(&number)?;
        let ended = loop {
            let outcome = entry.sequence.poll()?;
            if let Some(ended) = entry.take(outcome) {
                break ended;
            }
        };
        let begun = starting.remove(&number)?;
        drop(starting);
        Some(EndedStart {
            ticket: begun.ticket.clone(),
            request: begun.reservation.request().to_owned(),
            answer: begun.end(ended, self.features.format(), self.room),
        })
    }

    /// Drops the instance of a cancelled request, which frees its request id.
    pub(super) fn cancel(&self, number: u64) {
        let starting = self.lock().remove(&number);
        if let Some(starting) = starting {
            self.queue.finish(&starting.ticket);
        }
    }

    /// How many instances have not begun.
    #[cfg(test)]
    pub(super) fn starting(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Starting<L::Sequence>>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a start ended.
#[derive(Debug)]
enum StartEnd {
    /// The instance can be bound; in P2 with the prompt of the controller.
    Begun(Option<Vec<Token>>),
    /// So can it after its first `pre`, whose tokens the engine appends.
    Forwarded(Vec<Token>),
    /// It failed in this callback.
    Failed(Label, CallFailure),
}

impl<S: Sequence> Starting<S> {
    /// Takes an outcome. `None`: another callback follows.
    fn take(&mut self, outcome: Outcome) -> Option<StartEnd> {
        merge(&mut self.report, outcome.report);
        let label = match self.first_pre {
            None => Label::Setup,
            Some(_) => Label::SetupPre,
        };
        let failed = |failure: &CallFailure| StartEnd::Failed(label, failure.clone());
        let returned = match outcome.result {
            Ok(returned) => returned,
            Err(failure) => return Some(failed(&failure)),
        };
        match (returned, &mut self.first_pre) {
            (Returned::Begun { .. }, None) if self.dialect == Dialect::P1i => {
                self.first_pre = Some(PreRounds::default());
                self.sequence.call(Callback::Pre);
                None
            }
            (Returned::Begun { prompt }, None) => Some(StartEnd::Begun(prompt)),
            (Returned::Post { stop: false }, Some(_)) => {
                self.sequence.call(Callback::Pre);
                None
            }
            (Returned::Post { stop: true }, Some(_)) => Some(asks_to_wait(label)),
            (
                Returned::Pre {
                    num_forks,
                    suspend,
                    ff_tokens,
                    ..
                },
                Some(rounds),
            ) => {
                if !ff_tokens.is_empty() {
                    return match rounds.add(ff_tokens) {
                        Ok(post) => {
                            self.sequence.call(post);
                            None
                        }
                        Err(failure) => Some(failed(&failure)),
                    };
                }
                if suspend || num_forks == 0 {
                    return Some(asks_to_wait(label));
                }
                // A fork is asked for again, when there is a sequence to be forked.
                Some(StartEnd::Forwarded(rounds.finish()))
            }
            _ => Some(failed(&CallFailure::unexpected())),
        }
    }

    /// Returns the answer, and lets the instance be bound unless the answer says that it is none.
    fn end(self, ended: StartEnd, format: AnswerFormat, room: AnswerRoom) -> Vec<u8> {
        let rid = self.ticket.rid.as_deref();
        let answers = self.dialect.answers_instantiate();
        let encode = |result| StepAnswer::Begun((0, result)).encode(rid, room, format);
        let value = match ended {
            StartEnd::Begun(prompt) => {
                let prompt = prompt.unwrap_or(self.prompt);
                SeqValue::Prompt { prompt }
            }
            StartEnd::Forwarded(ff_tokens) => SeqValue::Pre {
                suspend: false,
                num_forks: 1,
                ff_tokens,
                wait: None,
            },
            StartEnd::Failed(label, failure) if answers => {
                return encode(failed_call(&failure, label, self.report)).bytes;
            }
            StartEnd::Failed(label, failure) => {
                let error = RequestError::user(label.error(&failure.message));
                return envelope::encode::<()>(rid, &Err(error));
            }
        };
        let answer = if answers {
            let encoded = encode(SeqResult::new(Some(value), self.report));
            if encoded.lost || !encoded.failed.is_empty() {
                // Its engine never gets to know what it began with. The id is free for another try.
                return encoded.bytes;
            }
            encoded.bytes
        } else {
            envelope::encode(rid, &Ok(json!({})))
        };
        // In this order: an outcome after the binding is the main channel's, and the answer comes last, because the engine
        // binds as soon as it has it (AI-314).
        self.waker.set_begun();
        self.reservation.ready(self.sequence, Instant::now());
        answer
    }
}

/// A sequence that does not run cannot be bound: its engine expects a first step.
fn asks_to_wait(label: Label) -> StartEnd {
    let text = "setup-pre asked for suspend";
    StartEnd::Failed(label, CallFailure::new(ErrorReason::BAD_RESULT, text))
}

/// The argument as the controller gets it: a string as it is, other JSON compact, and `null` if there is none (AI-313). A
/// native constraint must have one: `null` would be its pattern, and a regex would match these four letters.
fn argument(controller: &str, value: Value) -> Result<String, RequestError> {
    let text = match value {
        Value::Null if controller.starts_with(CONSTRAINT_PREFIX) => {
            let text = "invalid grammar: the pattern is missing: it is the module_arg";
            return Err(RequestError::user(text));
        }
        Value::String(text) => text,
        other => other.to_string(),
    };
    if text.len() > ARG_BYTES_MAX {
        let text = format!("module_arg too long: {} > {ARG_BYTES_MAX}", text.len());
        return Err(RequestError::user(text));
    }
    Ok(text)
}

/// Tokens of a prompt.
const PROMPT_TOKENS_MAX: usize = 1 << 20;
/// Bytes of an argument.
const ARG_BYTES_MAX: usize = 1 << 20;
