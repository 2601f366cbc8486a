//! [`ChoiceCalls`]: the calls of tools in one choice, their indices and ids, and the deltas of its output.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use serde_json::Value;

use super::output_parser::OutputPart;
use crate::call::CallId;
use crate::delta::{Delta, ToolCallRecord};

/// How the ids of calls are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct ToolCallIds {
    pub(super) call: CallId,
    pub(super) choice: u32,
    /// Nine letters and digits.
    pub(super) short: bool,
}

impl ToolCallIds {
    /// The id of a call, unique over the calls of this process: clients send these ids back beside those of earlier turns.
    fn id(self, index: u32) -> String {
        let Self {
            call,
            choice,
            short,
        } = self;
        let long = format!("call_{call}_{choice}_{index}");
        if !short {
            return long;
        }
        let hasher = BuildHasherDefault::<DefaultHasher>::new();
        let mut number = hasher.hash_one(long);
        let digit = |_| {
            let digit = number % 36;
            number /= 36;
            // Below 36.
            char::from_digit(digit as u32, 36).unwrap_or('0')
        };
        (0..9).map(digit).collect()
    }
}

/// The calls of one choice.
#[derive(Debug, Default)]
pub(super) struct ChoiceCalls {
    /// Calls that began, complete or not.
    begun: u32,
    complete: u32,
    /// The index, the id and the name of the last one.
    last: Option<(u32, String, String)>,
    /// The ids that the model gave.
    given: Vec<String>,
}

/// Bytes of an id that a model gives.
const GIVEN_ID_BYTES: usize = 64;

impl ChoiceCalls {
    /// The number of complete calls.
    pub(super) fn complete(&self) -> u32 {
        self.complete
    }

    /// Takes the next part of the output. Returns its call if it completes one.
    pub(super) fn take(&mut self, part: &OutputPart, ids: ToolCallIds) -> Option<ToolCallRecord> {
        match part {
            OutputPart::CallBegin { name, id } => {
                let index = self.begun;
                self.begun += 1;
                let id = self
                    .given_id(id.as_deref())
                    .unwrap_or_else(|| ids.id(index));
                self.last = Some((index, id, name.clone()));
                None
            }
            OutputPart::CallEnd { arguments } => {
                self.complete += 1;
                let (index, id, name) = self.last.clone()?;
                let arguments: Value = arguments.clone();
                Some(ToolCallRecord {
                    index,
                    id,
                    name,
                    arguments,
                })
            }
            _ => None,
        }
    }

    /// The id that the model gave a call, if it can serve as one. Some templates print it again when it comes back.
    fn given_id(&mut self, id: Option<&str>) -> Option<String> {
        let is_plain = |id: &&str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
            !id.is_empty() && id.len() <= GIVEN_ID_BYTES && id.chars().all(plain)
        };
        let id = id.filter(is_plain)?;
        // Of two calls with one id, clients would lose one.
        if self.given.iter().any(|given| given == id) {
            return None;
        }
        self.given.push(id.to_owned());
        Some(id.to_owned())
    }

    /// The delta of a part that was taken.
    pub(super) fn delta(
        &self,
        choice: u32,
        part: &OutputPart,
        call: Option<&ToolCallRecord>,
    ) -> Option<Delta> {
        let turn = 0;
        let last = self.last.as_ref();
        let index = last.map_or(0, |(index, ..)| *index);
        Some(match part {
            OutputPart::Text(text) => Delta::Text {
                turn,
                choice,
                text: text.to_string(),
            },
            OutputPart::Reasoning(text) => Delta::Reasoning {
                turn,
                choice,
                text: text.to_string(),
            },
            OutputPart::CallBegin { .. } => {
                let (index, id, name) = last?.clone();
                Delta::ToolCall {
                    turn,
                    choice,
                    index,
                    id,
                    name,
                }
            }
            OutputPart::CallArguments(json) => Delta::ToolArgs {
                turn,
                choice,
                index,
                json: json.clone(),
            },
            OutputPart::CallEnd { .. } => Delta::ToolReady {
                turn,
                choice,
                call: call?.clone(),
            },
            OutputPart::CallBroken { source } => Delta::ToolBroken {
                turn,
                choice,
                index,
                text: source.clone(),
            },
        })
    }
}
