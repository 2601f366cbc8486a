//! Reads what a runtime answers, as a stranger's (AI-853): what is wrong with one sequence is an error of that sequence,
//! what makes a reply unreadable is an error of the runtime.
//!
//! A reply is split without being copied, and the results in it are parsed one after the other. So how many values a result
//! may have is a limit of its own sequence, whatever the others answer, and reading takes at most three times the message,
//! which its region limits, and the tree of one result.

mod members;
mod values;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use sapwood_proto::bounded_json::JsonUnread;
use sapwood_proto::clip;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, Token, VariableWrite};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use self::members::{each_member, tree};
use self::values::{
    PROMPT_TOKENS_MAX, in_vocabulary, read_branches, read_p1_mid, read_post, read_pre, write,
};
use super::request::MainRequest;
use super::rows::{MaskRows, RowLayout, RowSource};
use crate::host::{CallFailure, Returned, ReturnedBranch};

/// A reply that says that the runtime cannot be used any more (AI-852).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Broken(pub(super) String);

/// Any answer.
#[derive(Debug)]
pub(super) struct Reply<'m> {
    pub(super) rid: Option<String>,
    pub(super) data: Result<ReplyData<'m>, ReplyError>,
}

/// The data of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyData<'m>(&'m RawValue);

/// The error of a whole request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplyError {
    pub(super) text: String,
    pub(super) is_user: bool,
}

impl<'m> Reply<'m> {
    /// Splits a message.
    pub(super) fn parse(message: &'m [u8]) -> Result<Self, Broken> {
        let (mut rid, mut kind, mut data) = (None, None, RawValue::NULL);
        let (mut error, mut is_user) = (None, None);
        let read = each_member(message, |name, value| match name {
            "$rid" => rid = string(value),
            "type" => kind = string(value),
            "data" => data = value,
            "error" => error = string(value),
            "is_user_error" => is_user = serde_json::from_str(value.get()).ok(),
            _ => {}
        });
        read.map_err(|error| Broken(format!("it answered what cannot be read: {error}")))?;
        let data = match kind.as_deref() {
            Some("ok") => Ok(ReplyData(data)),
            Some("error" | "json-error") => Err(ReplyError {
                text: clip::message(
                    error.map_or_else(|| "no reason given".to_owned(), Cow::into_owned),
                ),
                is_user: is_user == Some(true),
            }),
            _ => return Err(Broken("it answered without a `type` that is known".into())),
        };
        Ok(Self {
            rid: rid.map(Cow::into_owned),
            data,
        })
    }
}

fn string(value: &RawValue) -> Option<Cow<'_, str>> {
    serde_json::from_str(value.get()).ok()
}

impl<'m> ReplyData<'m> {
    #[cfg(test)]
    pub(super) const fn of_test(data: &'m RawValue) -> Self {
        Self(data)
    }

    /// Reads data of a type that takes no more memory than its text.
    pub(super) fn read<T: Deserialize<'m>>(self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.0.get())
    }

    /// The results of the sequences `wanted` in the object `member`.
    fn results(self, member: &str, wanted: &[u64]) -> Result<HashMap<u64, &'m RawValue>, Broken> {
        let broken = || Broken(format!("its answer has no `{member}`"));
        let mut object = None;
        let read = each_member(self.0.get().as_bytes(), |name, value| {
            if name == member {
                object = Some(value);
            }
        });
        read.map_err(|_| broken())?;
        let object = object.ok_or_else(broken)?;
        let wanted: HashSet<u64> = wanted.iter().copied().collect();
        let mut results = HashMap::with_capacity(wanted.len());
        let read = each_member(object.get().as_bytes(), |id, value| {
            // What is no number is none of ours, like whatever else was not asked for.
            if let Ok(id) = id.parse()
                && wanted.contains(&id)
            {
                results.insert(id, value);
            }
        });
        read.map_err(|_| broken())?;
        Ok(results)
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
    /// The time of each callback that has ended.
    pub(super) ran: Vec<Duration>,
}

impl StepResults {
    fn add_report(&mut self, id: u64, report: StepReport, result: &CallResult) {
        let nothing = match result {
            Ok(Returned::Pre { suspend, .. }) => *suspend,
            Ok(Returned::Branches(branches)) => branches.iter().all(ReturnedBranch::is_noop),
            Ok(_) => false,
            Err(_) => true,
        };
        // Then it may also be that it waits, was late or has ended before, and no callback has run.
        if report.micros > 0 || !nothing {
            self.ran.push(Duration::from_micros(report.micros));
        }
        self.reports.push((id, report));
    }
}

/// Reads the data of the answer to `request`. `live`: the sequences that the runtime has.
pub(super) fn read_step(
    request: &MainRequest,
    live: &[u64],
    data: ReplyData<'_>,
    masks: &dyn RowSource,
    limits: ResultLimits,
) -> Result<StepResults, Broken> {
    let mut results = StepResults::default();
    match request {
        MainRequest::PostPre { .. } => {
            let post = data.results("post_seqs", live)?;
            let pre = data.results("pre_seqs", live)?;
            for id in live {
                // A late one has no entry yet.
                if let Some(result) = post.get(id) {
                    let (result, report) = read_result(result, read_post);
                    results.add_report(*id, report, &result);
                    results.post.push((*id, result));
                }
                let Some(result) = pre.get(id) else {
                    continue;
                };
                let (result, report) = read_result(result, |value| read_pre(value, limits));
                let late =
                    is_late(&report) && matches!(result, Ok(Returned::Pre { suspend: true, .. }));
                results.add_report(*id, report, &result);
                results.pre.push((*id, (!late).then_some(result)));
            }
        }
        MainRequest::Mid { ops } => {
            let seqs = data.results("seqs", &request.ids())?;
            for (index, op) in ops.iter().enumerate() {
                let mask = || masks.p1_row(index, limits.vocabulary);
                let (result, report) = match seqs.get(&op.id) {
                    Some(result) => read_result(result, |value| read_p1_mid(value, limits, mask)),
                    None => missing(),
                };
                results.add_report(op.id, report, &result);
                results.mid.push((op.id, result));
            }
        }
        MainRequest::Process { ops, .. } => {
            let seqs = data.results("seqs", &request.ids())?;
            let layout: RowLayout = data
                .read()
                .map_err(|error| Broken(format!("it did not say where its masks are: {error}")))?;
            let mut rows = MaskRows::new(masks, layout, limits.vocabulary);
            for op in ops {
                let mut broken = None;
                let read = |value| {
                    read_branches(value, limits, &mut rows).unwrap_or_else(|error| {
                        broken = Some(error);
                        Err(bad("a mask is missing"))
                    })
                };
                let (result, report) = match seqs.get(&op.id) {
                    Some(result) => read_result(result, read),
                    None => missing(),
                };
                if let Some(broken) = broken {
                    return Err(broken);
                }
                results.add_report(op.id, report, &result);
                results.mid.push((op.id, result));
            }
        }
    }
    Ok(results)
}

/// Reads the data of the answer to `instantiate` in P2: the prompt to use (AI-315).
pub(super) fn read_begun(data: ReplyData<'_>, limits: ResultLimits) -> (CallResult, StepReport) {
    #[derive(Deserialize)]
    struct Begun {
        prompt: Vec<Token>,
    }
    let (mut result, report) = read_limited(data.0, BEGUN_VALUES_MAX, |value| {
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

fn missing() -> (CallResult, StepReport) {
    let failure = bad("the runtime did not answer for this sequence");
    (Err(failure), StepReport::default())
}

/// Reads a SeqResult (section 4 of the page): its value, by `read`, and what was printed and written beside it.
fn read_result(
    result: &RawValue,
    read: impl FnOnce(Value) -> CallResult,
) -> (CallResult, StepReport) {
    read_limited(result, RESULT_VALUES_MAX, read)
}

fn read_limited(
    result: &RawValue,
    values_max: usize,
    read: impl FnOnce(Value) -> CallResult,
) -> (CallResult, StepReport) {
    match WireResult::read(result, values_max) {
        Err(failure) => (Err(failure), StepReport::default()),
        Ok(WireResult {
            error,
            result,
            report,
        }) if error.is_empty() => (read(result), report),
        Ok(WireResult { error, report, .. }) => (Err(failure_of(&error)), report),
    }
}

/// A SeqResult.
struct WireResult {
    error: String,
    result: Value,
    report: StepReport,
}

impl WireResult {
    /// Parses its members, of which each may be absent; `values_max`: JSON values of the result.
    fn read(whole: &RawValue, values_max: usize) -> Result<Self, CallFailure> {
        let (mut error, mut logs, mut micros) = (None, None, None);
        let (mut result, mut storage) = (RawValue::NULL, None);
        let read = each_member(whole.get().as_bytes(), |name, value| match name {
            "error" => error = Some(value),
            "result" => result = value,
            "storage" => storage = Some(value),
            "logs" => logs = Some(value),
            "micros" => micros = Some(value),
            _ => {}
        });
        read.map_err(shape)?;
        Ok(Self {
            error: member(error)?,
            // Before the result, so that there is one tree at a time.
            report: StepReport {
                logs: member(logs)?,
                storage: storage.map(writes).transpose()?.unwrap_or_default(),
                micros: member(micros)?,
            },
            result: limited(result, values_max)?,
        })
    }
}

fn member<T: Default + for<'m> Deserialize<'m>>(
    value: Option<&RawValue>,
) -> Result<T, CallFailure> {
    match value {
        Some(value) => serde_json::from_str(value.get()).map_err(shape),
        None => Ok(T::default()),
    }
}

fn writes(storage: &RawValue) -> Result<Vec<VariableWrite>, CallFailure> {
    match limited(storage, STORAGE_VALUES_MAX)? {
        Value::Array(commands) => Ok(commands.into_iter().filter_map(write).collect()),
        _ => Err(bad("its `storage` is no list")),
    }
}

fn limited(value: &RawValue, values_max: usize) -> Result<Value, CallFailure> {
    tree(value, values_max).map_err(|error| match error {
        JsonUnread::Syntax(error) => shape(error),
        JsonUnread::Values(_) | JsonUnread::Entries(_) => {
            let text = format!("the runtime answered too much for this sequence: {error}");
            CallFailure::new(ErrorReason::LIMIT, text)
        }
    })
}

/// A line of the runtime says that a callback has more time than its limit.
fn is_late(report: &StepReport) -> bool {
    // It is the last one: those before it are what the controller has printed.
    let last = report.logs.trim_end_matches('\n').rsplit('\n').next();
    last.is_some_and(|line| line.starts_with("⏲ timeout [deadline:"))
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

/// JSON values of the result of one callback. The longest one that is allowed has 65,536 tokens, and 64 splices in each of
/// 64 branches, which count 11 values each.
const RESULT_VALUES_MAX: usize = 1 << 17;
/// JSON values of the writes of one step: 1,024 writes count 20 values each, and several callbacks may have written.
const STORAGE_VALUES_MAX: usize = 1 << 17;
/// JSON values of the result of a start: the longest prompt, and room for what it is in.
const BEGUN_VALUES_MAX: usize = PROMPT_TOKENS_MAX + 64;

#[cfg(test)]
mod tests;
