//! [`ChoiceCalls`]: the calls of tools in one choice, their indices and ids, and the deltas of its output.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, RandomState};
use std::sync::LazyLock;

use super::output_parser::OutputPart;
use crate::call::CallId;
use crate::delta::{Delta, ToolCallRecord};

/// How the ids of calls are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct ToolCallIds {
    call: CallId,
    choice: u32,
    /// Nine letters and digits.
    short: bool,
    /// Tells the ids of one process from those of another.
    process: u64,
}

/// Drawn once: numbers of calls begin anew in each process, and a conversation outlives a restart and is answered by many servers.
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(()));
/// Letters and digits of a short id, and of what tells a process in a long one.
const SHORT_LETTERS: usize = 9;
const PROCESS_LETTERS: usize = 8;

impl ToolCallIds {
    pub(super) fn new(call: CallId, choice: u32, short: bool) -> Self {
        Self {
            call,
            choice,
            short,
            process: *PROCESS,
        }
    }

    /// The id of a call, unique over the calls of all processes: clients send these ids back beside those of earlier turns.
    fn id(self, index: u32) -> String {
        let Self {
            call,
            choice,
            short,
            process,
        } = self;
        if short {
            let hasher = BuildHasherDefault::<DefaultHasher>::new();
            return letters(
                hasher.hash_one((process, call, choice, index)),
                SHORT_LETTERS,
            );
        }
        let process = letters(process, PROCESS_LETTERS);
        format!("call_{process}_{call}_{choice}_{index}")
    }
}

/// The lowest digits of a number, in base 36.
fn letters(mut number: u64, count: usize) -> String {
    let digit = |_| {
        let digit = number % 36;
        number /= 36;
        // Below 36.
        char::from_digit(digit as u32, 36).unwrap_or('0')
    };
    (0..count).map(digit).collect()
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
                Some(ToolCallRecord {
                    index,
                    id,
                    name,
                    arguments: arguments.clone(),
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A conversation goes on behind a restart, and on another server.
    #[test]
    fn no_two_processes_give_calls_the_same_ids() {
        let call = CallId::next();
        for (short, form) in [(false, "call_"), (true, "")] {
            let ids = |process| {
                let of = |(choice, index): (u32, u32)| {
                    let ids = ToolCallIds {
                        process,
                        ..ToolCallIds::new(call, choice, short)
                    };
                    ids.id(index)
                };
                [(0, 0), (0, 1), (1, 0)].map(of)
            };
            assert_eq!(ids(1), ids(1));
            let all: HashSet<String> = [ids(1), ids(2), ids(u64::MAX)]
                .concat()
                .into_iter()
                .collect();
            assert_eq!(all.len(), 9, "{all:?}");
            assert!(all.iter().all(|id| id.starts_with(form)), "{all:?}");
            if short {
                let is_short = |id: &String| {
                    id.len() == SHORT_LETTERS && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
                };
                assert!(all.iter().all(is_short), "{all:?}");
            }
        }
        let long = ToolCallIds::new(call, 2, false).id(3);
        assert!(long.ends_with(&format!("_{call}_2_3")), "{long}");
        assert_eq!(
            long.split('_').nth(1),
            Some(&*letters(*PROCESS, PROCESS_LETTERS))
        );
    }
}
