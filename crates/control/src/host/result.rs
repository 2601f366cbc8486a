//! Reads the results of callbacks: JSON of a guest, so everything in it is limited (AI-405, AI-414, AI-508, AI-605).

use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SharedMask, Token};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::failure::CallFailure;
use super::group::{GroupMark, Member, Waiting};

/// What a callback returned.
#[derive(Clone, Debug, PartialEq)]
pub enum Returned {
    /// Of the start: the prompt that replaces the request's, if the controller changed it.
    Begun {
        /// The replacement.
        prompt: Option<Vec<Token>>,
    },
    /// Of [`Callback::Pre`](super::Callback::Pre).
    Pre {
        /// 0 to stop, 1 to go on, more to fork.
        num_forks: u32,
        /// Leave the sequence out of the step.
        suspend: bool,
        /// To be appended.
        ff_tokens: Vec<Token>,
        /// A suspended sequence waits for this.
        wait: Option<Waiting>,
    },
    /// Of [`Callback::Mid`](super::Callback::Mid).
    Mid(MidReturned),
    /// Of [`Callback::Post`](super::Callback::Post).
    Post {
        /// End the sequence.
        stop: bool,
    },
    /// Of [`Callback::Process`](super::Callback::Process): none to stop, several to fork.
    Branches(Vec<ReturnedBranch>),
}

/// What a P1 `mid_process` returned.
#[derive(Clone, Debug, PartialEq)]
pub enum MidReturned {
    /// End the sequence.
    Stop,
    /// Sample with the mask; `None` if the controller gave none.
    Sample(Option<SharedMask>),
    /// Change the text instead. One of the two is not empty.
    Splice {
        /// Tokens to take back; here without the one about to be sampled.
        backtrack: u32,
        /// Tokens to append.
        ff_tokens: Vec<Token>,
    },
}

/// One branch of a P2 `mid_process`. It has a mask or a splice.
#[derive(Clone, Debug, PartialEq)]
pub struct ReturnedBranch {
    /// Sample with this mask; without one exactly one splice applies.
    pub mask: Option<SharedMask>,
    /// The new temperature.
    pub temperature: Option<f32>,
    /// The first that applies wins.
    pub splices: Vec<ReturnedSplice>,
    /// A branch that does nothing waits for this.
    pub wait: Option<Waiting>,
}

/// A splice of a P2 branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReturnedSplice {
    /// It applies after one of these, or always.
    pub when_sampled: Vec<Token>,
    /// Tokens to take back, counting the sampled one.
    pub backtrack: u32,
    /// Tokens to append.
    pub ff_tokens: Vec<Token>,
}

impl ReturnedBranch {
    /// Nothing happens to the sequence in this step.
    #[must_use]
    pub fn is_noop(&self) -> bool {
        let noop = |splice: &ReturnedSplice| splice.backtrack == 0 && splice.ff_tokens.is_empty();
        self.mask.is_none() && self.splices.iter().all(noop)
    }
}

/// What a callback handed over, before it is read.
#[derive(Debug, Default)]
pub(super) struct RawResult {
    /// The JSON of the last call of `aici_host_return_process_result`.
    pub(super) json: Option<Vec<u8>>,
    /// The masks of the callback, in order of the calls.
    pub(super) masks: Vec<SharedMask>,
}

/// What results are checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResultLimits {
    pub(super) vocabulary: usize,
    pub(super) branches: usize,
}

/// Tokens of one result, in all its lists.
pub(super) const TOKENS_MAX: usize = 65_536;
pub(super) const SPLICES_MAX: usize = 64;
/// Variables that one sequence waits for. Each step looks at all of them.
pub(crate) const WAIT_NAMES_MAX: usize = 64;

/// Whose results wait, and since when.
#[derive(Debug)]
pub(super) struct Waits<'m> {
    pub(super) member: &'m Member,
    /// Of the moment before the callback ran.
    pub(super) mark: GroupMark,
}

impl Waits<'_> {
    pub(super) fn read(&self, names: Option<Vec<String>>) -> Read<Option<Waiting>> {
        let Some(names) = names else {
            return Ok(None);
        };
        if names.len() > WAIT_NAMES_MAX {
            let text = format!(
                "waits for too many variables: {} > {WAIT_NAMES_MAX}",
                names.len()
            );
            return Err(CallFailure::bad_result(text));
        }
        let group = Arc::clone(self.member.group());
        let (member, now) = (self.member.number(), Instant::now());
        Ok(Some(Waiting::new(group, member, self.mark, names, now)))
    }
}

type Read<T> = Result<T, CallFailure>;

impl RawResult {
    /// The result of `aici_init_prompt` (P1).
    pub(super) fn begun_p1(self) -> Read<Returned> {
        self.parse::<&RawValue>()?;
        Ok(Returned::Begun { prompt: None })
    }

    /// The result of `aici_init_prompt` (P2) for a request with `prompt`.
    pub(super) fn begun_p2(self, prompt: &[Token], limits: ResultLimits) -> Read<Returned> {
        #[derive(Deserialize)]
        struct Json {
            prompt: Vec<Token>,
        }
        let Json { prompt: returned } = self.parse()?;
        check_vocabulary("prompt token", &returned, limits)?;
        let changed = returned != prompt;
        Ok(Returned::Begun {
            prompt: changed.then_some(returned),
        })
    }

    /// The result of `aici_pre_process`.
    pub(super) fn pre(self, limits: ResultLimits, waits: &Waits<'_>) -> Read<Returned> {
        #[derive(Deserialize)]
        struct Json {
            #[serde(default = "one")]
            num_forks: u32,
            #[serde(default)]
            suspend: bool,
            #[serde(default)]
            ff_tokens: Vec<Token>,
            #[serde(default)]
            wait: Option<Vec<String>>,
        }
        let Json {
            num_forks,
            suspend,
            ff_tokens,
            wait,
        } = self.parse()?;
        check_tokens(&ff_tokens, limits)?;
        check_forks(num_forks, limits)?;
        // Without a suspension there is nothing that could wait.
        let wait = waits.read(wait.filter(|_| suspend))?;
        let wrong = match (ff_tokens.is_empty(), num_forks, suspend) {
            (false, 1, true) => "can't suspend when returning ff_tokens",
            (false, 1, false) | (true, _, false) | (true, 1, true) => {
                return Ok(Returned::Pre {
                    num_forks,
                    suspend,
                    ff_tokens,
                    wait,
                });
            }
            (false, ..) => "can't fork when returning ff_tokens",
            (true, ..) => "can't fork when suspending",
        };
        Err(CallFailure::bad_result(wrong))
    }

    /// The result of `aici_mid_process` (P1).
    pub(super) fn mid(mut self, limits: ResultLimits) -> Read<Returned> {
        #[derive(Deserialize)]
        struct Empty {}
        #[derive(Deserialize)]
        enum Json {
            Stop,
            SampleWithBias(Empty),
            Splice {
                #[serde(default)]
                backtrack: u32,
                #[serde(default)]
                ff_tokens: Vec<Token>,
            },
        }
        // With P1 masks there is at most one: several calls make a union while the callback runs.
        let mask = self.masks.pop();
        Ok(Returned::Mid(match self.parse()? {
            Json::Stop => MidReturned::Stop,
            Json::SampleWithBias(Empty {}) => MidReturned::Sample(mask),
            Json::Splice {
                backtrack: 0,
                ff_tokens,
            } if ff_tokens.is_empty() => {
                let text = "empty Splice (both backtrack == 0 and ff_tokens == [])";
                return Err(CallFailure::bad_result(text));
            }
            Json::Splice {
                backtrack,
                ff_tokens,
            } => {
                check_tokens(&ff_tokens, limits)?;
                MidReturned::Splice {
                    backtrack,
                    ff_tokens,
                }
            }
        }))
    }

    /// The result of `aici_post_process`.
    pub(super) fn post(self) -> Read<Returned> {
        #[derive(Deserialize)]
        struct Json {
            #[serde(default)]
            stop: bool,
        }
        let Json { stop } = self.parse()?;
        Ok(Returned::Post { stop })
    }

    /// The result of `aici_mid_process` (P2).
    pub(super) fn branches(self, limits: ResultLimits, waits: &Waits<'_>) -> Read<Returned> {
        let JsonBranches { branches } = self.parse()?;
        if branches.len() > limits.branches {
            let text = format!(
                "too many branches: {} > {}",
                branches.len(),
                limits.branches
            );
            return Err(CallFailure::bad_result(text));
        }
        let mut tokens = 0;
        let read = |mut branch: JsonBranch| {
            let wait = branch.wait.take();
            let mut branch = read_branch(branch, &self.masks, &mut tokens, limits)?;
            branch.wait = waits.read(wait.filter(|_| branch.is_noop()))?;
            Ok(branch)
        };
        let branches = branches.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(Returned::Branches(branches))
    }

    fn parse<'j, T: Deserialize<'j>>(&'j self) -> Read<T> {
        let Some(json) = &self.json else {
            let text = "aici_host_return_process_result not called";
            return Err(CallFailure::bad_result(text));
        };
        // The recursion limit of the parser bounds its nesting, the length of the result everything else.
        serde_json::from_slice(json).map_err(|error| {
            let error = sapwood_proto::clip::shown(error);
            CallFailure::bad_result(format!(
                "the result of the callback cannot be read: {error}"
            ))
        })
    }
}

#[derive(Deserialize)]
struct JsonBranches {
    branches: Vec<JsonBranch>,
}

#[derive(Deserialize)]
struct JsonBranch {
    #[serde(default)]
    sample_mask: Option<u32>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    splices: Vec<JsonSplice>,
    #[serde(default)]
    wait: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct JsonSplice {
    #[serde(default)]
    when_sampled: Vec<Token>,
    #[serde(default)]
    backtrack: u32,
    #[serde(default)]
    ff_tokens: Vec<Token>,
}

fn read_branch(
    branch: JsonBranch,
    masks: &[SharedMask],
    tokens: &mut usize,
    limits: ResultLimits,
) -> Read<ReturnedBranch> {
    let mask = match branch.sample_mask {
        None => None,
        Some(handle) => match masks.get(handle as usize) {
            Some(mask) => Some(Arc::clone(mask)),
            None => {
                let text = format!("sample_mask {handle} was not returned in this callback");
                return Err(CallFailure::bad_result(text));
            }
        },
    };
    if branch.splices.len() > SPLICES_MAX {
        let text = format!("too many splices: {} > {SPLICES_MAX}", branch.splices.len());
        return Err(CallFailure::bad_result(text));
    }
    match (&mask, &branch.splices[..]) {
        (Some(_), _) => {}
        (None, []) => {
            let text = "a branch has neither sample_mask nor splices";
            return Err(CallFailure::bad_result(text));
        }
        (None, [splice]) if splice.when_sampled.is_empty() => {}
        (None, _) => {
            let text =
                "a branch without sample_mask needs exactly one splice, without when_sampled";
            return Err(CallFailure::bad_result(text));
        }
    }
    // A temperature that is not a number would reach the sampler's arithmetic.
    if let Some(temperature) = branch.temperature
        && !(0.0..=TEMPERATURE_MAX).contains(&temperature)
    {
        let text = format!("temperature is not between 0 and {TEMPERATURE_MAX}");
        return Err(CallFailure::bad_result(text));
    }
    let mut splices = Vec::with_capacity(branch.splices.len());
    for splice in branch.splices {
        *tokens += splice.when_sampled.len() + splice.ff_tokens.len();
        check_count(*tokens)?;
        check_vocabulary("when_sampled token", &splice.when_sampled, limits)?;
        check_vocabulary("ff_token", &splice.ff_tokens, limits)?;
        splices.push(ReturnedSplice {
            when_sampled: splice.when_sampled,
            backtrack: splice.backtrack,
            ff_tokens: splice.ff_tokens,
        });
    }
    Ok(ReturnedBranch {
        mask,
        temperature: branch.temperature,
        splices,
        wait: None,
    })
}

/// The core's widest range (D-20).
pub(super) const TEMPERATURE_MAX: f32 = 100.0;

fn check_tokens(tokens: &[Token], limits: ResultLimits) -> Read<()> {
    check_count(tokens.len())?;
    check_vocabulary("ff_token", tokens, limits)
}

/// More could never be made, and whoever translates the result makes something for each (AI-413).
fn check_forks(forks: u32, limits: ResultLimits) -> Read<()> {
    if forks as usize > limits.branches {
        let text = format!("too many forks (max={})", limits.branches);
        return Err(CallFailure::new(ErrorReason::LIMIT, text));
    }
    Ok(())
}

pub(super) fn check_count(tokens: usize) -> Read<()> {
    if tokens > TOKENS_MAX {
        let text = format!("too many tokens in a result: {tokens} > {TOKENS_MAX}");
        return Err(CallFailure::bad_result(text));
    }
    Ok(())
}

fn check_vocabulary(what: &str, tokens: &[Token], limits: ResultLimits) -> Read<()> {
    let vocabulary = limits.vocabulary;
    let beyond = |token: &&Token| **token as usize >= vocabulary;
    let Some(at) = tokens.iter().position(|token| beyond(&token)) else {
        return Ok(());
    };
    let text = format!(
        "{what} out of range ({} >= {vocabulary} at {at})",
        tokens[at]
    );
    Err(CallFailure::bad_result(text))
}

const fn one() -> u32 {
    1
}
