//! Reads what a runtime answers, as a stranger's (AI-853): what is wrong with one sequence is an error of that sequence,
//! what makes a reply unreadable is an error of the runtime.

mod values;

use std::collections::HashMap;

use sapwood_proto::bounded_json::{self, JsonBounds};
use sapwood_proto::clip;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, Token};
use serde::Deserialize;
use serde_json::{Map, Value};

use self::values::{
    PROMPT_TOKENS_MAX, in_vocabulary, read_branches, read_p1_mid, read_post, read_pre, write,
};
use super::request::MainRequest;
use super::rows::{MaskRows, RowLayout, RowSource};
use crate::host::{CallFailure, Returned};

/// A reply that says that the runtime cannot be used any more (AI-852).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Broken(pub(super) String);

/// Any answer.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) rid: Option<String>,
    pub(super) data: Result<Value, ReplyError>,
}

/// The error of a whole request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplyError {
    pub(super) text: String,
    pub(super) is_user: bool,
}

impl Reply {
    /// Parses a message.
    pub(super) fn parse(message: &[u8]) -> Result<Self, Broken> {
        let bounds = JsonBounds {
            values: VALUES_MAX,
            entries: ENTRIES_MAX,
        };
        let read = bounded_json::read(message, bounds);
        let read =
            read.map_err(|error| Broken(format!("it answered what cannot be read: {error}")));
        let Value::Object(mut members) = read? else {
            return Err(Broken("it answered what is no JSON object".into()));
        };
        let rid = match members.remove("$rid") {
            Some(Value::String(rid)) => Some(rid),
            _ => None,
        };
        let data = match members.get("type").and_then(Value::as_str) {
            Some("ok") => Ok(members.remove("data").unwrap_or_default()),
            Some("error" | "json-error") => {
                let text = members.get("error").and_then(Value::as_str);
                let is_user = members.get("is_user_error").and_then(Value::as_bool);
                Err(ReplyError {
                    text: clip::message(text.unwrap_or("no reason given").to_owned()),
                    is_user: is_user == Some(true),
                })
            }
            _ => return Err(Broken("it answered without a `type` that is known".into())),
        };
        Ok(Self { rid, data })
    }
}

/// What the answer to `tokens` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct TokensReply {
    pub(super) vocab_size: usize,
    /// Only P2 has it (AI-303).
    #[serde(default)]
    pub(super) eos_token_id: Option<Token>,
}

/// Limits against which results are checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResultLimits {
    /// Tokens of the vocabulary.
    pub(super) vocabulary: usize,
    /// Sequences of one request.
    pub(super) forks: u32,
}

/// The result of one callback.
pub(super) type CallResult = Result<Returned, CallFailure>;

/// What a step gave, by sequence.
#[derive(Debug, Default)]
pub(super) struct StepResults {
    /// P1.
    pub(super) post: Vec<(u64, CallResult)>,
    /// P1. `None`: the callback is late, and its result comes with a later answer (AI-441).
    pub(super) pre: Vec<(u64, Option<CallResult>)>,
    /// Of `mid_process`, in both dialects.
    pub(super) mid: Vec<(u64, CallResult)>,
    /// What was printed and written.
    pub(super) reports: Vec<(u64, StepReport)>,
}

/// Reads the data of the answer to `request`. `live`: the sequences that the runtime has.
pub(super) fn read_step(
    request: &MainRequest,
    live: &[u64],
    data: Value,
    masks: &dyn RowSource,
    limits: ResultLimits,
) -> Result<StepResults, Broken> {
    let Value::Object(mut data) = data else {
        return Err(Broken("its answer has no data".into()));
    };
    let mut results = StepResults::default();
    match request {
        MainRequest::PostPre { .. } => {
            let mut post = take_results(&mut data, "post_seqs")?;
            let mut pre = take_results(&mut data, "pre_seqs")?;
            for &id in live {
                // A late one has no entry yet.
                if let Some(result) = post.remove(&id) {
                    let (result, report) = split(result, read_post);
                    results.post.push((id, result));
                    results.reports.push((id, report));
                }
                let Some(result) = pre.remove(&id) else {
                    continue;
                };
                let (result, report) = split(result, |value| read_pre(value, limits));
                let late =
                    is_late(&report) && matches!(result, Ok(Returned::Pre { suspend: true, .. }));
                results.pre.push((id, (!late).then_some(result)));
                results.reports.push((id, report));
            }
        }
        MainRequest::Mid { ops } => {
            let mut seqs = take_results(&mut data, "seqs")?;
            for (index, op) in ops.iter().enumerate() {
                let result = seqs.remove(&op.id).unwrap_or_else(missing);
                let mask = || masks.p1_row(index, limits.vocabulary);
                let (result, report) = split(result, |value| read_p1_mid(value, limits, mask));
                results.mid.push((op.id, result));
                results.reports.push((op.id, report));
            }
        }
        MainRequest::Process { ops, .. } => {
            let mut seqs = take_results(&mut data, "seqs")?;
            let layout: RowLayout = serde_json::from_value(Value::Object(data))
                .map_err(|error| Broken(format!("it did not say where its masks are: {error}")))?;
            let mut rows = MaskRows::new(masks, layout, limits.vocabulary);
            for op in ops {
                let result = seqs.remove(&op.id).unwrap_or_else(missing);
                let mut broken = None;
                let (result, report) = split(result, |value| {
                    read_branches(value, limits, &mut rows).unwrap_or_else(|error| {
                        broken = Some(error);
                        Err(bad("a mask is missing"))
                    })
                });
                if let Some(broken) = broken {
                    return Err(broken);
                }
                results.mid.push((op.id, result));
                results.reports.push((op.id, report));
            }
        }
    }
    Ok(results)
}

/// Reads the data of the answer to `instantiate` in P2: the prompt to use (AI-315).
pub(super) fn read_begun(data: Value, limits: ResultLimits) -> (CallResult, StepReport) {
    #[derive(Deserialize)]
    struct Begun {
        prompt: Vec<Token>,
    }
    let result = serde_json::from_value(data).map_err(shape);
    let (mut result, report) = split(result, |value| {
        let Begun { prompt } = serde_json::from_value(value).map_err(shape)?;
        if prompt.len() > PROMPT_TOKENS_MAX {
            return Err(bad("the prompt is too long"));
        }
        in_vocabulary(&prompt, limits)?;
        Ok(Returned::Begun {
            prompt: Some(prompt),
        })
    });
    if let Err(failure) = &mut result
        && failure.reason == ErrorReason::TRAP
    {
        failure.reason = ErrorReason::INIT;
    }
    (result, report)
}

/// A SeqResult (section 4 of the page).
#[derive(Debug, Deserialize)]
#[serde(default)]
struct WireResult {
    error: String,
    result: Value,
    storage: Vec<Value>,
    logs: String,
    micros: u64,
}

impl Default for WireResult {
    fn default() -> Self {
        Self {
            error: String::new(),
            result: Value::Null,
            storage: Vec::new(),
            logs: String::new(),
            micros: 0,
        }
    }
}

type ReadResult = Result<WireResult, CallFailure>;

fn take_results(
    data: &mut Map<String, Value>,
    member: &str,
) -> Result<HashMap<u64, ReadResult>, Broken> {
    match data.remove(member) {
        Some(Value::Object(results)) => Ok(results
            .into_iter()
            // An id that is no number is none of ours.
            .filter_map(|(id, result)| Some((id.parse().ok()?, result)))
            .map(|(id, result)| (id, serde_json::from_value(result).map_err(shape)))
            .collect()),
        _ => Err(Broken(format!("its answer has no `{member}`"))),
    }
}

fn missing() -> ReadResult {
    Err(bad("the runtime did not answer for this sequence"))
}

/// The value of a result, read by `read`, and what was printed and written beside it.
fn split(result: ReadResult, read: impl FnOnce(Value) -> CallResult) -> (CallResult, StepReport) {
    let result = match result {
        Ok(result) => result,
        Err(failure) => return (Err(failure), StepReport::default()),
    };
    let report = StepReport {
        logs: result.logs,
        storage: result.storage.into_iter().filter_map(write).collect(),
        micros: result.micros,
    };
    if result.error.is_empty() {
        return (read(result.result), report);
    }
    (Err(failure_of(&result.error)), report)
}

/// A line of the runtime says that a callback has more time than its limit.
fn is_late(report: &StepReport) -> bool {
    report.logs.contains("⏲ timeout [deadline:")
}

/// The failure that an error text stands for (AI-421, AI-431, AI-932).
fn failure_of(error: &str) -> CallFailure {
    let reason = if let Some(text) = error.strip_prefix("Worker: ") {
        if text.starts_with("timeout") {
            ErrorReason::TIMEOUT
        } else if text.contains("memory") {
            ErrorReason::MEMORY
        } else if text.starts_with("died") {
            ErrorReason::TRAP
        } else {
            ErrorReason::LIMIT
        }
    } else if error.starts_with("Error (setup)") {
        ErrorReason::INIT
    } else if error.contains("fuel exhausted") {
        ErrorReason::FUEL
    } else {
        ErrorReason::TRAP
    };
    CallFailure::new(reason, clip::message(error.to_owned()))
}

fn bad(message: &str) -> CallFailure {
    CallFailure::new(ErrorReason::BAD_RESULT, message)
}

fn shape(error: serde_json::Error) -> CallFailure {
    let text = format!("the runtime answered what it must not: {error}");
    CallFailure::new(ErrorReason::BAD_RESULT, clip::message(text))
}

/// Values of a reply: twice the longest prompt, as in requests.
const VALUES_MAX: usize = 2 << 20;
/// Members of a reply.
const ENTRIES_MAX: usize = 1_024;
#[cfg(test)]
mod tests;
