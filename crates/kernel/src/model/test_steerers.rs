//! A source of small steerers for tests of this crate: the name is what it does, the argument is its text.
//!
//! They are for the scripted model's vocabulary of bytes.

use std::sync::{Arc, Mutex};

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
    Fork(Vec<Vec<Move>>),
    /// Prints this.
    Log(&'static str),
    Trap,
}

fn bytes(text: &str) -> Vec<Move> {
    text.bytes().map(Move::Byte).collect()
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
                self.branches.clone_from(branches);
                self.moves = self.branches.remove(0);
                self.at = 0;
                Pre::Fork(u32::try_from(self.branches.len() + 1).unwrap())
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
                    message: "the test trapped".into(),
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
        let moves = match self.branches.get(index as usize - 1) {
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
pub(crate) struct TestSource {
    /// Each call: user, its rights, controller, argument, and whether it is watched.
    pub(crate) calls: Mutex<Vec<String>>,
}

impl SteerSource for TestSource {
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
        self.calls.lock().unwrap().push(line);
        let moves = match call.controller {
            "dictate" => bytes(call.arg),
            "sapwood:regex" | "sapwood:json-schema" | "sapwood:options" => constraint(call.arg)?,
            // `common|one|two`: a choice for each of the rest.
            "fork" => {
                let mut texts = call.arg.split('|').map(bytes);
                let mut moves = texts.next().unwrap_or_default();
                moves.push(Move::Fork(texts.collect()));
                moves
            }
            // `wrong|right`
            "rewind" => {
                let (wrong, right) = call.arg.split_once('|').unwrap();
                let mut moves = bytes(wrong);
                moves.push(Move::Back(u32::try_from(wrong.len() - 1).unwrap()));
                moves.extend(bytes(right));
                moves
            }
            "talk" => {
                let mut moves = vec![Move::Log("thinking\n")];
                moves.extend(bytes(call.arg));
                moves.insert(2, Move::Log("still thinking\n"));
                moves
            }
            "trap" => {
                let mut moves = bytes(call.arg);
                moves.push(Move::Trap);
                moves
            }
            "private" if !call.user.may_control => {
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
                    message: format!("there is no controller {unknown:?}"),
                });
            }
        };
        Ok(Box::new(Player::new(moves)))
    }
}

/// Dictates the pattern, or the first of a list; `(` does not compile.
fn constraint(arg: &str) -> Result<Vec<Move>, SteerRefusal> {
    let value: Value = serde_json::from_str(arg).unwrap();
    let value = value.get("value").unwrap();
    let text = value.as_str().or_else(|| value.get(0)?.as_str()).unwrap();
    if text == "(" {
        return Err(SteerRefusal {
            code: Code::InvalidRequest,
            reason: ErrorReason::INVALID_GRAMMAR,
            message: "invalid grammar: unclosed group at 0".into(),
        });
    }
    Ok(bytes(text))
}
