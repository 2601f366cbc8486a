//! The values of results, each checked (AI-403, AI-414, AI-505, AI-951).

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SharedMask, Token, VariableWrite};
use serde::Deserialize;
use serde_json::Value;

use super::super::rows::MaskRows;
use super::{Broken, CallResult, ResultLimits, bad, shape};
use crate::host::{
    CallFailure, MidReturned, Returned, ReturnedBranch, ReturnedSplice, WAIT_NAMES_MAX, Waiting,
};

pub(super) fn read_post(value: Value) -> CallResult {
    #[derive(Deserialize)]
    struct Post {
        stop: bool,
    }
    let Post { stop } = serde_json::from_value(value).map_err(shape)?;
    Ok(Returned::Post { stop })
}

pub(super) fn read_pre(value: Value, limits: ResultLimits) -> CallResult {
    #[derive(Deserialize)]
    struct Pre {
        suspend: bool,
        num_forks: u32,
        #[serde(default)]
        ff_tokens: Vec<Token>,
        /// Of our own runtime (AI-1005).
        #[serde(default)]
        wait: Option<Vec<String>>,
    }
    let Pre {
        suspend,
        num_forks,
        ff_tokens,
        wait,
    } = serde_json::from_value(value).map_err(shape)?;
    if num_forks > limits.forks {
        return Err(too_many_forks(limits));
    }
    if !ff_tokens.is_empty() && (suspend || num_forks > 1) {
        return Err(bad("tokens to append, and not to run, at once"));
    }
    check_tokens(&ff_tokens, limits)?;
    Ok(Returned::Pre {
        num_forks,
        suspend,
        ff_tokens,
        wait: waiting(wait)?,
    })
}

pub(super) fn read_p1_mid(
    value: Value,
    limits: ResultLimits,
    mask: impl FnOnce() -> Option<SharedMask>,
) -> CallResult {
    #[derive(Deserialize)]
    struct Splice {
        #[serde(default)]
        ff_tokens: Vec<Token>,
        #[serde(default)]
        backtrack: u32,
    }
    if value.is_null() {
        return Ok(Returned::Mid(MidReturned::Sample(mask())));
    }
    let Splice {
        ff_tokens,
        backtrack,
    } = serde_json::from_value(value).map_err(shape)?;
    check_tokens(&ff_tokens, limits)?;
    Ok(Returned::Mid(MidReturned::Splice {
        // Without the token that an engine would have sampled first (AI-414).
        backtrack: backtrack.saturating_sub(1),
        ff_tokens,
    }))
}

/// The result of `mid_process` in P2.
#[derive(Deserialize)]
struct AnsweredBranches {
    branches: Vec<AnsweredBranch>,
}

#[derive(Deserialize)]
struct AnsweredBranch {
    #[serde(default)]
    sample_mask: Option<usize>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    splices: Vec<AnsweredSplice>,
    /// As in `pre`.
    #[serde(default)]
    wait: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct AnsweredSplice {
    #[serde(default)]
    when_sampled: Vec<Token>,
    #[serde(default)]
    backtrack: u32,
    #[serde(default)]
    ff_tokens: Vec<Token>,
}

pub(super) fn read_branches(
    value: Value,
    limits: ResultLimits,
    rows: &mut MaskRows<'_>,
) -> Result<CallResult, Broken> {
    let AnsweredBranches { branches } = match serde_json::from_value(value) {
        Ok(branches) => branches,
        Err(error) => return Ok(Err(shape(error))),
    };
    if branches.len() > limits.forks as usize {
        return Ok(Err(too_many_forks(limits)));
    }
    let lists = branches.iter().flat_map(|branch| &branch.splices);
    let tokens = lists.map(|splice| splice.ff_tokens.len() + splice.when_sampled.len());
    if tokens.sum::<usize>() > TOKENS_MAX {
        return Ok(Err(too_many_tokens()));
    }
    let mut returned = Vec::with_capacity(branches.len());
    for branch in branches {
        if branch.splices.len() > SPLICES_MAX {
            return Ok(Err(bad("too many splices")));
        }
        let unconditional = matches!(&branch.splices[..], [only] if only.when_sampled.is_empty());
        if branch.sample_mask.is_none() && !unconditional {
            return Ok(Err(bad("a branch has neither a mask nor one splice")));
        }
        if branch
            .temperature
            .is_some_and(|it| !it.is_finite() || it < 0.0)
        {
            return Ok(Err(bad("a temperature is out of range")));
        }
        let wait = match waiting(branch.wait) {
            Ok(wait) => wait,
            Err(failure) => return Ok(Err(failure)),
        };
        for splice in &branch.splices {
            let checked = in_vocabulary(&splice.ff_tokens, limits)
                .and_then(|()| in_vocabulary(&splice.when_sampled, limits));
            if let Err(failure) = checked {
                return Ok(Err(failure));
            }
        }
        returned.push(ReturnedBranch {
            mask: branch.sample_mask.map(|row| rows.mask(row)).transpose()?,
            temperature: branch.temperature,
            wait,
            splices: branch
                .splices
                .into_iter()
                .map(|splice| ReturnedSplice {
                    when_sampled: splice.when_sampled,
                    backtrack: splice.backtrack,
                    ff_tokens: splice.ff_tokens,
                })
                .collect(),
        });
    }
    Ok(Ok(Returned::Branches(returned)))
}

/// What a sequence waits for, which is kept for as long as it waits.
fn waiting(names: Option<Vec<String>>) -> Result<Option<Waiting>, CallFailure> {
    match names {
        Some(names) if names.len() > WAIT_NAMES_MAX => Err(bad("waits for too many variables")),
        names => Ok(names.map(Waiting::in_other_process)),
    }
}

fn check_tokens(tokens: &[Token], limits: ResultLimits) -> Result<(), CallFailure> {
    if tokens.len() > TOKENS_MAX {
        return Err(too_many_tokens());
    }
    in_vocabulary(tokens, limits)
}

fn too_many_tokens() -> CallFailure {
    bad("more than 65536 tokens in one result")
}

pub(super) fn in_vocabulary(tokens: &[Token], limits: ResultLimits) -> Result<(), CallFailure> {
    let beyond = |token: &&Token| **token as usize >= limits.vocabulary;
    match tokens.iter().find(beyond) {
        Some(token) => Err(bad(&format!("token {token} is outside the vocabulary"))),
        None => Ok(()),
    }
}

fn too_many_forks(limits: ResultLimits) -> CallFailure {
    let text = format!("too many forks (max={})", limits.forks);
    CallFailure::new(ErrorReason::LIMIT, text)
}

/// A write in the form of AI-951; other commands are of no interest.
pub(super) fn write(command: Value) -> Option<VariableWrite> {
    let write = command.get("WriteVar")?;
    let append = match write.get("op")?.as_str()? {
        "Set" => false,
        "Append" => true,
        _ => return None,
    };
    Some(VariableWrite {
        name: write.get("name")?.as_str()?.to_owned(),
        value: from_hex(write.get("value")?.as_str()?)?,
        append,
        when_version_is: write.get("when_version_is").and_then(Value::as_u64),
    })
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text
        .chars()
        .map(|digit| u8::try_from(digit.to_digit(16)?).ok())
        .collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| high << 4 | low);
    rest.is_empty().then(|| bytes.collect())
}

/// Tokens of a result, in all its lists (section 11 of the page).
pub(super) const TOKENS_MAX: usize = 65_536;
const SPLICES_MAX: usize = 64;
pub(super) const PROMPT_TOKENS_MAX: usize = 1 << 20;
