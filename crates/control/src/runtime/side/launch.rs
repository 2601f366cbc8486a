//! [`Launches`]: `instantiate`, from the request until the instance can be bound (AI-313 to AI-316).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sapwood_proto::steer::{SteerUser, StepReport, Token};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::answer::{Label, SeqResult, SeqValue};
use super::super::envelope::{Envelope, RequestError};
use super::super::main_channel::{Dialect, DialectCell};
use super::super::pending::{Pending, Reservation};
use super::super::sequence::{Outcome, Returned, Sequence};
use super::super::wake::{LaunchWaker, StepWake};
use super::queue::{SideQueue, Ticket};
use super::{Launch, Launcher};

/// The instances that are starting.
pub(super) struct Launches<L: Launcher> {
    launcher: L,
    pending: Arc<Pending<L::Sequence>>,
    dialect: Arc<DialectCell>,
    wake: Arc<StepWake>,
    queue: Arc<SideQueue>,
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

/// The answer to a request, and which one it is.
type Answered = (Ticket, Result<Value, RequestError>);

impl<L: Launcher> Launches<L> {
    pub(super) fn new(
        launcher: L,
        pending: Arc<Pending<L::Sequence>>,
        dialect: Arc<DialectCell>,
        wake: Arc<StepWake>,
        queue: Arc<SideQueue>,
    ) -> Self {
        Self {
            launcher,
            pending,
            dialect,
            wake,
            queue,
            starting: Mutex::new(HashMap::new()),
        }
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
        let arg = argument(request.module_arg)?;
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
    pub(super) fn poll(&self, number: u64) -> Option<Answered> {
        // The lock is held while it is asked: a wake at this moment queues another look, which finds the entry.
        let mut starting = self.lock();
        let outcome = starting.get_mut(&number)?.sequence.poll()?;
        let begun = starting.remove(&number)?;
        drop(starting);
        let (ticket, answer) = (begun.ticket.clone(), begun.end(outcome));
        Some((ticket, answer))
    }

    /// Drops the instance of a cancelled request, which frees its request id.
    pub(super) fn cancel(&self, number: u64) {
        let starting = self.lock().remove(&number);
        if let Some(starting) = starting {
            self.queue.finish(&starting.ticket);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Starting<L::Sequence>>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Sequence> Starting<S> {
    fn end(self, outcome: Outcome) -> Result<Value, RequestError> {
        let report = outcome.report;
        match outcome.result {
            Ok(Returned::Begun { prompt }) => {
                // In this order: an outcome after the binding is the main channel's, and the answer comes last, because
                // the engine binds as soon as it has it (AI-314).
                self.waker.set_begun();
                self.reservation.ready(self.sequence, Instant::now());
                let prompt = prompt.unwrap_or(self.prompt);
                Ok(match self.dialect {
                    Dialect::P2 => {
                        let value = SeqValue::Prompt { prompt };
                        json!(SeqResult::new(Some(value), report))
                    }
                    Dialect::Auto | Dialect::P1 => json!({}),
                })
            }
            Ok(_) => Err(RequestError {
                text: "the controller did not start".into(),
                is_user: false,
            }),
            Err(failure) => failed(self.dialect, &failure.message, report),
        }
    }
}

fn failed(dialect: Dialect, message: &str, report: StepReport) -> Result<Value, RequestError> {
    match dialect {
        Dialect::P2 => Ok(json!(SeqResult::callback_error(
            Label::Setup,
            message,
            report
        ))),
        Dialect::Auto | Dialect::P1 => Err(RequestError::user(Label::Setup.error(message))),
    }
}

/// The argument as the controller gets it: a string as it is, other JSON compact (AI-313).
fn argument(value: Value) -> Result<String, RequestError> {
    let text = match value {
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
