//! The messages between the runtime, the template and the controllers' processes, as bytes.
//!
//! ```text
//!   runtime ─► template     Config, Launch (descriptors: artefact, socket of the new process)
//!   runtime ─► controller   Start, Call, Fork (descriptor: socket of the new process), Answer
//!   controller ─► runtime   Hello (descriptor: of its process), Outcome, Forked, Read, Write, Charge
//! ```
//!
//! What comes from a controller's process is checked as if a stranger had sent it: generated code runs there.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Token, VariableWrite};

use super::bytes::{ByteReader, ByteWriter};
use crate::host::callback::Callback;
use crate::host::config::HostConfig;
use crate::host::failure::Abort;
use crate::host::group::variables::WriteResult;
use crate::host::group::{VariablesLimits, Versioned};
use crate::host::state::Capabilities;
use crate::module::Abi;

pub(super) const CONFIG: u8 = 1;
pub(super) const LAUNCH: u8 = 2;
pub(super) const START: u8 = 3;
pub(super) const CALL: u8 = 4;
pub(super) const FORK: u8 = 5;
pub(super) const ANSWER: u8 = 6;
pub(super) const HELLO: u8 = 7;
pub(super) const OUTCOME: u8 = 8;
pub(super) const FORKED: u8 = 9;
pub(super) const READ: u8 = 10;
pub(super) const WRITE: u8 = 11;
pub(super) const CHARGE: u8 = 12;

/// A message without values.
pub(super) fn bare(kind: u8) -> Vec<u8> {
    ByteWriter::of_kind(kind).finish()
}

/// The limits that the template and its clones need.
pub(super) fn config(config: &HostConfig) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(CONFIG);
    message
        .bytes(env!("CARGO_PKG_VERSION").as_bytes())
        .size(config.memory_bytes)
        .size(config.table_elements)
        .size(config.stack_bytes)
        .time(config.init_time)
        .time(config.pre_step_time)
        .time(config.step_time)
        .word(config.late_steps)
        .time(config.grace_time)
        .optional(config.fuel, |message, fuel| {
            message.long(fuel);
        })
        .time(config.timer_resolution)
        .size(config.result_bytes);
    message.finish()
}

pub(super) fn read_config(message: &[u8]) -> Option<HostConfig> {
    let mut reader = ByteReader::new(message);
    // A binary that was replaced while the runtime was running may speak otherwise.
    if reader.text()? != env!("CARGO_PKG_VERSION") {
        return None;
    }
    let config = HostConfig {
        memory_bytes: reader.size()?,
        table_elements: reader.size()?,
        stack_bytes: reader.size()?,
        init_time: reader.time()?,
        pre_step_time: reader.time()?,
        step_time: reader.time()?,
        late_steps: reader.word()?,
        grace_time: reader.time()?,
        fuel: reader.optional(ByteReader::long)?,
        timer_resolution: reader.time()?,
        result_bytes: reader.size()?,
        ..HostConfig::default()
    };
    reader.end()?;
    Some(config)
}

/// Which module a new process runs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LaunchedModule {
    pub(super) id: [u8; 32],
    pub(super) abi: Abi,
    /// The export of the start function.
    pub(super) start: Option<String>,
    /// Both must be those of the template's own model.
    pub(super) vocabulary: usize,
    pub(super) eos: Token,
}

impl LaunchedModule {
    pub(super) fn message(&self) -> Vec<u8> {
        let mut message = ByteWriter::of_kind(LAUNCH);
        for byte in self.id {
            message.byte(byte);
        }
        message
            .flag(self.abi == Abi::P2)
            .optional(self.start.as_deref(), |message, start| {
                message.bytes(start.as_bytes());
            })
            .size(self.vocabulary)
            .word(self.eos);
        message.finish()
    }

    pub(super) fn read(message: &[u8]) -> Option<Self> {
        let mut reader = ByteReader::new(message);
        let mut id = [0; 32];
        for byte in &mut id {
            *byte = reader.byte()?;
        }
        let module = Self {
            id,
            abi: if reader.flag()? { Abi::P2 } else { Abi::P1 },
            start: reader.optional(|reader| reader.text().map(str::to_owned))?,
            vocabulary: reader.size()?,
            eos: reader.word()?,
        };
        reader.end()?;
        Some(module)
    }
}

/// With what a controller starts in its process.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StartMessage {
    pub(super) arg: Arc<str>,
    pub(super) prompt: Vec<Token>,
    pub(super) capabilities: Capabilities,
    pub(super) forks_max: u32,
    pub(super) variables: VariablesLimits,
    /// The seed of its random bytes, if they have one (AI-1010).
    pub(super) seed: Option<u64>,
}

impl StartMessage {
    pub(super) fn message(&self) -> Vec<u8> {
        let Self {
            arg,
            prompt,
            capabilities,
            forks_max,
            variables,
            seed,
        } = self;
        let mut message = ByteWriter::of_kind(START);
        message
            .bytes(arg.as_bytes())
            .words(prompt)
            .flag(capabilities.fork)
            .flag(capabilities.backtrack)
            .flag(capabilities.ff_tokens)
            .word(*forks_max)
            .size(variables.name_bytes)
            .size(variables.value_bytes)
            .size(variables.number)
            .size(variables.total_bytes)
            .size(variables.writes_per_step)
            .optional(*seed, |message, seed| {
                message.long(seed);
            });
        message.finish()
    }

    pub(super) fn read(message: &[u8]) -> Option<Self> {
        let mut reader = ByteReader::new(message);
        let start = Self {
            arg: reader.text()?.into(),
            prompt: reader.words()?,
            capabilities: Capabilities {
                fork: reader.flag()?,
                backtrack: reader.flag()?,
                ff_tokens: reader.flag()?,
                // Only engines in the runtime's own process have them.
                logits: false,
            },
            forks_max: reader.word()?,
            variables: VariablesLimits {
                name_bytes: reader.size()?,
                value_bytes: reader.size()?,
                number: reader.size()?,
                total_bytes: reader.size()?,
                writes_per_step: reader.size()?,
            },
            seed: reader.optional(ByteReader::long)?,
        };
        reader.end()?;
        Some(start)
    }
}

/// A callback for the sequence `number`.
pub(super) fn call(number: u32, callback: &Callback) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(CALL);
    message.word(number);
    match callback {
        Callback::Pre => message.byte(0),
        Callback::Mid { fork_group } => message.byte(1).words(fork_group),
        Callback::Post { backtrack, tokens } => message.byte(2).word(*backtrack).words(tokens),
        Callback::Process {
            backtrack,
            tokens,
            sampled,
            fork_group,
        } => message
            .byte(3)
            .word(*backtrack)
            .words(tokens)
            .optional(*sampled, |message, sampled| {
                message.word(sampled);
            })
            .words(fork_group),
    };
    message.finish()
}

pub(super) fn read_call(message: &[u8]) -> Option<(u32, Callback)> {
    let mut reader = ByteReader::new(message);
    let number = reader.word()?;
    let callback = match reader.byte()? {
        0 => Callback::Pre,
        1 => Callback::Mid {
            fork_group: reader.words()?,
        },
        2 => Callback::Post {
            backtrack: reader.word()?,
            tokens: reader.words()?,
        },
        3 => Callback::Process {
            backtrack: reader.word()?,
            tokens: reader.words()?,
            sampled: reader.optional(ByteReader::word)?,
            fork_group: reader.words()?,
        },
        _ => return None,
    };
    reader.end()?;
    Some((number, callback))
}

/// Says how a fork went; the text says why it did not go.
pub(super) fn forked(failure: Option<&str>) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(FORKED);
    message.optional(failure, |message, text| {
        message.bytes(text.as_bytes());
    });
    message.finish()
}

pub(super) fn read_forked(message: &[u8]) -> Option<Result<(), String>> {
    let mut reader = ByteReader::new(message);
    let failure = reader.optional(|reader| reader.text().map(str::to_owned))?;
    reader.end()?;
    Some(failure.map_or(Ok(()), Err))
}

pub(super) fn read_variable(name: &str) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(READ);
    message.bytes(name.as_bytes());
    message.finish()
}

pub(super) fn write_variable(write: &VariableWrite) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(WRITE);
    message
        .bytes(write.name.as_bytes())
        .bytes(&write.value)
        .flag(write.append)
        .optional(write.when_version_is, |message, version| {
            message.long(version);
        });
    message.finish()
}

pub(super) fn read_name(message: &[u8]) -> Option<&str> {
    let mut reader = ByteReader::new(message);
    let name = reader.text()?;
    reader.end()?;
    Some(name)
}

pub(super) fn read_write(message: &[u8]) -> Option<VariableWrite> {
    let mut reader = ByteReader::new(message);
    let write = VariableWrite {
        name: reader.text()?.to_owned(),
        value: reader.bytes()?.to_vec(),
        append: reader.flag()?,
        when_version_is: reader.optional(ByteReader::long)?,
    };
    reader.end()?;
    Some(write)
}

/// Asks for so many bytes of the memory that all controllers share.
pub(super) fn charge(bytes: usize) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(CHARGE);
    message.size(bytes);
    message.finish()
}

pub(super) fn read_charge(message: &[u8]) -> Option<usize> {
    let mut reader = ByteReader::new(message);
    let bytes = reader.size()?;
    reader.end()?;
    Some(bytes)
}

/// An answer, and the value with which it ends. Apart, because values are large and need not be copied.
#[derive(Debug)]
pub(super) struct AnswerMessage {
    pub(super) head: Vec<u8>,
    pub(super) value: Option<Arc<Vec<u8>>>,
}

/// The answer to [`charge`].
pub(super) fn charged(granted: bool) -> AnswerMessage {
    let mut message = ByteWriter::of_kind(ANSWER);
    message.flag(granted);
    AnswerMessage {
        head: message.finish(),
        value: None,
    }
}

pub(super) fn read_charged(message: &[u8]) -> Option<bool> {
    ByteReader::new(message).flag()
}

/// The answer to [`read_variable`].
pub(super) fn variable(value: Option<&Versioned>) -> AnswerMessage {
    let mut message = ByteWriter::of_kind(ANSWER);
    message.flag(value.is_some());
    ended_by(message, value)
}

#[expect(
    clippy::option_option,
    reason = "whether it could be read, and whether it is there"
)]
pub(super) fn read_versioned(message: &[u8]) -> Option<Option<Versioned>> {
    ByteReader::new(message).optional(versioned)
}

/// The message, and a value if there is one.
fn ended_by(mut message: ByteWriter, value: Option<&Versioned>) -> AnswerMessage {
    let Some(Versioned { version, value }) = value else {
        return AnswerMessage {
            head: message.finish(),
            value: None,
        };
    };
    message.long(*version).size(value.len());
    AnswerMessage {
        head: message.finish_before(value.len()),
        value: Some(Arc::clone(value)),
    }
}

fn versioned(reader: &mut ByteReader<'_>) -> Option<Versioned> {
    Some(Versioned {
        version: reader.long()?,
        value: Arc::new(reader.bytes()?.to_vec()),
    })
}

/// The answer to [`write_variable`].
pub(super) fn written(result: &Result<WriteResult, Abort>) -> AnswerMessage {
    let mut message = ByteWriter::of_kind(ANSWER);
    let mut value = None;
    match result {
        Ok(WriteResult::Written(version)) => message.byte(0).long(*version),
        Ok(WriteResult::Conflict(current)) => {
            value = current.as_ref();
            message.byte(1).flag(value.is_some())
        }
        Err(abort) => message.byte(2).bytes(abort.message.as_bytes()),
    };
    ended_by(message, value)
}

pub(super) fn read_written(message: &[u8]) -> Option<Result<WriteResult, Abort>> {
    let mut reader = ByteReader::new(message);
    Some(match reader.byte()? {
        0 => Ok(WriteResult::Written(reader.long()?)),
        1 => Ok(WriteResult::Conflict(reader.optional(versioned)?)),
        // A limit is the only reason for which variables refuse a write.
        _ => Err(Abort::limit(ErrorReason::LIMIT, reader.text()?)),
    })
}
