//! [`MainChannel`]: the ops of the main channel, and which dialect the engine speaks (AI-104, AI-303).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use sapwood_proto::steer::Token;
use serde::Serialize;
use serde_json::{Value, json};

use super::answer::{AnswerRoom, StepAnswer};
use super::envelope::{self, Envelope, RequestError, Unreadable};
use super::hello::{self, WireFeatures};
use super::p1::{MidRequest, P1, PostPreRequest};
use super::p2::{P2, ProcessRequest};
use super::pending::Pending;
use super::rows::{MaskType, P2Rows};
use super::sequence::{Capabilities, Sequence};
use super::table::{StepClock, StepConfig};
use crate::wire::SharedRegion;

/// A form of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// The first op decides; until then as [`Dialect::P1`].
    #[default]
    Auto,
    /// `post_pre_process` and `mid_process`, as the seed describes.
    P1,
    /// P1, where `instantiate` runs the first `pre`.
    P1i,
    /// `mid_process` alone, with branches.
    P2,
}

impl Dialect {
    /// Whether answers to `instantiate` are results of a sequence (AI-315, AI-316).
    pub(crate) const fn answers_instantiate(self) -> bool {
        matches!(self, Self::P1i | Self::P2)
    }
}

/// The dialect of a connection, which both channels see. Decided at most once.
#[derive(Debug)]
pub(crate) struct DialectCell(AtomicU8);

impl DialectCell {
    pub(crate) fn new(dialect: Dialect) -> Arc<Self> {
        let cell = Self(AtomicU8::new(0));
        cell.set(dialect);
        Arc::new(cell)
    }

    pub(crate) fn get(&self) -> Dialect {
        match self.0.load(Ordering::Acquire) {
            1 => Dialect::P1,
            2 => Dialect::P2,
            3 => Dialect::P1i,
            _ => Dialect::Auto,
        }
    }

    fn set(&self, dialect: Dialect) {
        let number = match dialect {
            Dialect::Auto => 0,
            Dialect::P1 => 1,
            Dialect::P2 => 2,
            Dialect::P1i => 3,
        };
        self.0.store(number, Ordering::Release);
    }
}

/// What the main channel is started with.
#[derive(Clone, Debug)]
pub(crate) struct MainConfig {
    pub(crate) steps: StepConfig,
    pub(crate) capabilities: Capabilities,
    pub(crate) mask_type: MaskType,
    /// The engine's padded vocabulary; 0 if it is not padded.
    pub(crate) logits: usize,
    /// The limit of mid where the engine turns out to speak P2.
    pub(crate) p2_step_time: std::time::Duration,
}

/// The ops of the main channel. Answers one request after the other.
#[derive(Debug)]
pub(crate) struct MainChannel<S> {
    config: MainConfig,
    dialect: Arc<DialectCell>,
    features: Arc<WireFeatures>,
    machine: Machine<S>,
    pending: Arc<Pending<S>>,
    masks: SharedRegion,
}

#[derive(Debug)]
enum Machine<S> {
    Undecided,
    P1(P1<S>),
    P2(P2<S>),
}

impl<S: Sequence> Machine<S> {
    /// Their results did not fit in the answer (AI-441).
    fn fail(&mut self, ids: &[u64]) {
        match self {
            Self::Undecided => {}
            Self::P1(p1) => p1.fail(ids),
            Self::P2(p2) => p2.fail(ids),
        }
    }
}

/// What follows a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MainReply {
    Answer(Vec<u8>),
    /// The engine asked the runtime to end (AI-105).
    Stop,
}

impl<S: Sequence> MainChannel<S> {
    /// # Errors
    /// [`NoRowFits`] if the dialect is P2 already.
    pub(crate) fn new(
        config: MainConfig,
        (dialect, features): (Arc<DialectCell>, Arc<WireFeatures>),
        pending: Arc<Pending<S>>,
        masks: SharedRegion,
    ) -> Result<Self, NoRowFits> {
        let mut channel = Self {
            config,
            dialect,
            features,
            machine: Machine::Undecided,
            pending,
            masks,
        };
        match channel.dialect.get() {
            Dialect::Auto => {}
            Dialect::P1 | Dialect::P1i => channel.decide_p1(),
            Dialect::P2 => channel.decide_p2()?,
        }
        Ok(channel)
    }

    fn decide_p1(&mut self) {
        if self.dialect.get() == Dialect::Auto {
            self.dialect.set(Dialect::P1);
        }
        self.machine = Machine::P1(self.p1());
    }

    fn p1(&self) -> P1<S> {
        P1::new(StepConfig {
            repeats_pre: self.dialect.get() == Dialect::P1i,
            ..self.config.steps
        })
    }

    fn decide_p2(&mut self) -> Result<(), NoRowFits> {
        let MainConfig {
            mask_type, logits, ..
        } = self.config;
        let vocabulary = self.config.steps.vocabulary;
        let rows = P2Rows::new(mask_type, vocabulary, logits, &self.masks).ok_or(NoRowFits)?;
        let steps = StepConfig {
            step_time: self.config.p2_step_time,
            ..self.config.steps
        };
        self.machine = Machine::P2(P2::new(steps, self.config.capabilities, rows));
        self.dialect.set(Dialect::P2);
        Ok(())
    }

    /// Answers a message.
    pub(crate) fn handle(
        &mut self,
        message: &[u8],
        room: AnswerRoom,
        clock: StepClock<'_>,
    ) -> MainReply {
        let envelope = match Envelope::parse(message) {
            Ok(envelope) => envelope,
            Err(Unreadable(error)) => {
                return MainReply::Answer(envelope::encode_unreadable(&error));
            }
        };
        if envelope.op == "stop" {
            return MainReply::Stop;
        }
        let rid = envelope.rid.clone();
        let rid = rid.as_deref();
        MainReply::Answer(match self.run(envelope, clock) {
            Ok(MainData::Step(answer)) => {
                let encoded = answer.encode(rid, room, self.features.format());
                self.machine.fail(&encoded.failed);
                encoded.bytes
            }
            Ok(MainData::Value(data)) => envelope::encode(rid, &Ok(data)),
            Err(error) => envelope::encode::<()>(rid, &Err(error)),
        })
    }

    fn run(&mut self, envelope: Envelope, clock: StepClock<'_>) -> Result<MainData, RequestError> {
        self.pending.drop_expired(clock.arrival);
        // Of the wrong shape it is an error, although nothing here depends on the user.
        envelope.user()?;
        match envelope.op.as_str() {
            "ping" => Ok(MainData::Value(json!({"pong": 1}))),
            "tokens" => Ok(self.tokens()),
            "hello" => hello::answer(envelope, &self.features).map(MainData::Value),
            "post_pre_process" => self.post_pre_process(envelope, clock),
            "mid_process" => self.mid_process(envelope, clock),
            _ => Err(RequestError::bad_op()),
        }
    }

    fn tokens(&self) -> MainData {
        #[derive(Serialize)]
        struct Tokens {
            vocab_size: usize,
            #[serde(skip_serializing_if = "Option::is_none")]
            eos_token_id: Option<Token>,
        }
        let steps = &self.config.steps;
        let eos = matches!(self.machine, Machine::P2(_)).then_some(steps.eos);
        let tokens = Tokens {
            vocab_size: steps.vocabulary,
            eos_token_id: eos,
        };
        MainData::Value(json!(tokens))
    }

    fn post_pre_process(
        &mut self,
        envelope: Envelope,
        clock: StepClock<'_>,
    ) -> Result<MainData, RequestError> {
        if matches!(self.machine, Machine::P2(_)) {
            return Err(RequestError::bad_op());
        }
        let request: PostPreRequest = envelope.decode()?;
        if matches!(self.machine, Machine::Undecided) {
            self.decide_p1();
        }
        let Machine::P1(p1) = &mut self.machine else {
            return Err(RequestError::bad_op());
        };
        p1.post_pre_process(request, &self.pending, clock)
            .map(MainData::Step)
    }

    fn mid_process(
        &mut self,
        envelope: Envelope,
        clock: StepClock<'_>,
    ) -> Result<MainData, RequestError> {
        let is_p2 = is_p2(&envelope);
        match &self.machine {
            Machine::Undecided if is_p2 => self
                .decide_p2()
                .map_err(|_| RequestError::user("shm size too small"))?,
            Machine::P1(_) if is_p2 => return Err(RequestError::bad_op()),
            _ => {}
        }
        let (bits, logits) = (self.features.format().bitmask, self.config.logits);
        let answer = match &mut self.machine {
            Machine::P2(p2) => {
                if bits {
                    p2.use_bits(logits, &self.masks);
                }
                let request: ProcessRequest = envelope.decode()?;
                p2.mid_process(request, &self.pending, &self.masks, clock)?
            }
            Machine::P1(p1) => {
                if bits {
                    p1.use_bits(logits);
                }
                let request: MidRequest = envelope.decode()?;
                p1.mid_process(&request, &self.masks, clock)?
            }
            // No sequence is bound yet, so there is nothing to keep.
            Machine::Undecided => {
                let request: MidRequest = envelope.decode()?;
                let mut p1 = self.p1();
                if bits {
                    p1.use_bits(logits);
                }
                p1.mid_process(&request, &self.masks, clock)?
            }
        };
        Ok(MainData::Step(answer))
    }
}

/// Whether a `mid_process` has members that P1 does not know (AI-104).
fn is_p2(envelope: &Envelope) -> bool {
    let is_p2_op = |op: &Value| {
        ["tokens", "sampled", "req_id"]
            .iter()
            .any(|member| op.get(member).is_some())
    };
    envelope.member("freed").is_some()
        || envelope
            .member("ops")
            .and_then(Value::as_array)
            .is_some_and(|ops| ops.iter().any(is_p2_op))
}

/// The data of an answer.
#[derive(Debug)]
enum MainData {
    Value(Value),
    Step(StepAnswer),
}

/// The mask region has no space for one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the mask region is too small for one row: raise --bin-size")]
pub(crate) struct NoRowFits;

#[cfg(test)]
mod tests;
