//! [`ScriptedSteerers`]: a source of small, deterministic steerers, beside the scripted model.
//!
//! They are for a vocabulary of bytes, so the model must have no tokenizer. The name is what a steerer does; the argument
//! is its text:
//!
//! | name | what it does |
//! |---|---|
//! | `dictate` | lets the model write the text, and stops |
//! | `fork` | `common|one|two…`: after the common text, becomes as many sequences as there are others; one that ends with `!` fails there |
//! | `rewind` | `wrong|right`: takes back all but the first byte of the wrong text, and goes on with the right one |
//! | `talk` | prints a line before the first byte and another after it |
//! | `trap` | fails after the text |
//! | `private` | dictates, for callers who may run the controllers of others |
//! | `sapwood:KIND` | dictates the pattern, or the first of a list; `(` does not compile |

use std::sync::{Arc, Mutex, PoisonError};

use sapwood_proto::clip::shown;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Branch, Mask, Mid, Post, Pre, Sample, Splice, Steer, SteerCall, SteerFailure,
    SteerRefusal, SteerSource, Steered, StepReport, StepWaker, Token,
};
use serde_json::Value;

/// Bytes, BOS and EOS.
const VOCABULARY: usize = 258;

/// What happens in one round.
#[derive(Clone, Debug)]
enum Move {
    /// This byte is the only one allowed.
    Byte(u8),
    /// Takes back so many tokens.
    Back(u32),
    /// Becomes as many sequences as there are lists of moves; each goes on with its own.
    Fork(Vec<Vec<Self>>),
    /// Prints this.
    Log(&'static str),
    Trap,
}

fn bytes(text: &str) -> Vec<Move> {
    text.bytes().map(Move::Byte).collect()
}

fn trapping(text: &str) -> Vec<Move> {
    let mut moves = bytes(text);
    moves.push(Move::Trap);
    moves
}

/// Plays moves, and stops after the last.
struct Player {
    moves: Vec<Move>,
    at: usize,
    /// What the branches of a fork in this step go on with.
    branches: Vec<Vec<Move>>,
    backtracks: bool,
    logs: String,
}

impl Player {
    fn new(moves: Vec<Move>) -> Self {
        let backtracks = moves.iter().any(|next| matches!(next, Move::Back(_)));
        Self {
            moves,
            at: 0,
            branches: Vec::new(),
            backtracks,
            logs: String::new(),
        }
    }
}

impl Steer for Player {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        while let Some(Move::Log(text)) = self.moves.get(self.at) {
            self.logs.push_str(text);
            self.at += 1;
        }
        let pre = match self.moves.get(self.at) {
            None => Pre::Stop,
            Some(Move::Fork(branches)) => {
                let mut branches = branches.clone().into_iter();
                self.moves = branches.next().unwrap_or_default();
                self.branches = branches.collect();
                self.at = 0;
                Pre::Fork(count(self.branches.len()) + 1)
            }
            Some(_) => Pre::Run {
                fast_forward: Vec::new(),
            },
        };
        Ok(Some(pre))
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let branch = match self.moves.get(self.at) {
            Some(Move::Byte(byte)) => {
                let mut mask = Mask::none(VOCABULARY);
                mask.allow(Token::from(*byte));
                Branch::Sample(Sample {
                    mask: Some(Arc::new(mask)),
                    ..Sample::default()
                })
            }
            Some(Move::Back(tokens)) => Branch::Splice(Splice {
                backtrack: *tokens,
                tokens: Vec::new(),
            }),
            _ => {
                return Err(SteerFailure {
                    reason: ErrorReason::TRAP,
                    message: "the script traps here".into(),
                });
            }
        };
        Ok(Some(Mid::One(branch)))
    }

    fn post(&mut self, _appended: Appended<'_>) -> Steered<Post> {
        self.at += 1;
        Ok(if self.at >= self.moves.len() {
            Post::Stop
        } else {
            Post::Continue
        })
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let branch = self.branches.get((index as usize).wrapping_sub(1));
        let moves = match branch {
            Some(branch) => branch.clone(),
            // A request for several choices forks before the first step.
            None => self.moves.clone(),
        };
        Ok(Box::new(Self::new(moves)))
    }

    fn ends_at_eos(&self) -> bool {
        false
    }

    fn may_backtrack(&self) -> bool {
        self.backtracks
    }

    fn take_report(&mut self) -> Option<StepReport> {
        let logs = std::mem::take(&mut self.logs);
        Some(StepReport {
            logs,
            ..StepReport::default()
        })
    }
}

/// Opens the steerers, and notes who asked for them.
#[derive(Debug, Default)]
pub struct ScriptedSteerers {
    calls: Mutex<Vec<String>>,
}

impl ScriptedSteerers {
    /// The calls so far: the user, what it may do (`admin`, `control`, `infer`), the name, the argument, and `watched` if
    /// it is.
    pub fn calls(&self) -> Vec<String> {
        let calls = self.calls.lock();
        calls.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl SteerSource for ScriptedSteerers {
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        let rights = match (call.user.is_admin, call.user.may_control) {
            (true, _) => "admin",
            (false, true) => "control",
            (false, false) => "infer",
        };
        let watched = if call.watched { " watched" } else { "" };
        let line = format!(
            "{} {rights} {} {}{watched}",
            call.user.name, call.controller, call.arg
        );
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push(line);
        moves(call).map(|moves| Box::new(Player::new(moves)) as _)
    }
}

fn moves(call: SteerCall<'_>) -> Result<Vec<Move>, SteerRefusal> {
    Ok(match call.controller {
        "dictate" => bytes(call.arg),
        name if name.starts_with("sapwood:") => return constraint(call.arg),
        // `common|one|two`: a choice for each of the rest.
        "fork" => {
            let mut texts = call
                .arg
                .split('|')
                .map(|text| match text.strip_suffix('!') {
                    Some(text) => trapping(text),
                    None => bytes(text),
                });
            let mut moves = texts.next().unwrap_or_default();
            moves.push(Move::Fork(texts.collect()));
            moves
        }
        // `wrong|right`
        "rewind" => {
            let (wrong, right) = call.arg.split_once('|').unwrap_or_default();
            let mut moves = bytes(wrong);
            moves.push(Move::Back(count(wrong.len().saturating_sub(1))));
            moves.extend(bytes(right));
            moves
        }
        "talk" => {
            let mut moves = vec![Move::Log("thinking\n")];
            let mut rest = bytes(call.arg).into_iter();
            moves.extend(rest.next());
            moves.push(Move::Log("still thinking\n"));
            moves.extend(rest);
            moves
        }
        "trap" => trapping(call.arg),
        "private" if !call.user.may_control && !call.user.is_admin => {
            return Err(SteerRefusal {
                code: Code::PermissionDenied,
                reason: ErrorReason::INSUFFICIENT_SCOPE,
                message: "this key may not run controllers of others".into(),
            });
        }
        "private" => bytes(call.arg),
        unknown => {
            return Err(SteerRefusal {
                code: Code::NotFound,
                reason: ErrorReason::UNKNOWN_CONTROLLER,
                message: format!("there is no controller {:?}", shown(unknown)),
            });
        }
    })
}

/// The moves of a constraint, whose argument is an object (AI-840).
fn constraint(arg: &str) -> Result<Vec<Move>, SteerRefusal> {
    let value: Value = serde_json::from_str(arg).unwrap_or_default();
    let value = value.get("value").unwrap_or(&Value::Null);
    let first = || value.get(0).and_then(Value::as_str);
    let text = value.as_str().or_else(first).unwrap_or("(");
    if text == "(" {
        return Err(SteerRefusal {
            code: Code::InvalidRequest,
            reason: ErrorReason::INVALID_GRAMMAR,
            message: "invalid grammar: unclosed group at 0".into(),
        });
    }
    Ok(bytes(text))
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
