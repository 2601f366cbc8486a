//! Answers of the main channel: a SeqResult for each sequence, and what is left out when they do not fit (AI-224, AI-421
//! to AI-431).

use std::collections::HashMap;

use sapwood_proto::steer::{StepReport, Token, VariableWrite};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::envelope::{self, RequestError};
use super::hello::AnswerFormat;
use super::rows::{BitLayout, RowLayout};
use super::sequence::Waiting;

/// What one phase of a step gave for one sequence.
#[derive(Debug)]
pub(crate) struct SeqResult {
    error: String,
    result: Option<SeqValue>,
    storage: Vec<StorageCommand>,
    logs: String,
    micros: u64,
    /// What is empty is left out.
    compact: bool,
}

impl Serialize for SeqResult {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let all = !self.compact;
        let mut map = serializer.serialize_map(None)?;
        if all || !self.error.is_empty() {
            map.serialize_entry("error", &self.error)?;
        }
        if all || self.result.as_ref().is_some_and(|it| !it.is_default()) {
            map.serialize_entry("result", &self.result)?;
        }
        if all || !self.storage.is_empty() {
            map.serialize_entry("storage", &self.storage)?;
        }
        if all || !self.logs.is_empty() {
            map.serialize_entry("logs", &self.logs)?;
        }
        if all || self.micros > 0 {
            map.serialize_entry("micros", &self.micros)?;
        }
        map.end()
    }
}

/// The result of a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum SeqValue {
    /// Of `instantiate` in P2.
    Prompt { prompt: Vec<Token> },
    /// Of a post op.
    Post { stop: bool },
    /// Of `pre`.
    Pre {
        suspend: bool,
        num_forks: u32,
        ff_tokens: Vec<Token>,
        /// With the feature `wait`: the variables for which a suspended sequence waits.
        #[serde(skip_serializing_if = "Option::is_none")]
        wait: Option<Waiting>,
    },
    /// Of `mid` in P1, instead of sampling.
    Splice {
        ff_tokens: Vec<Token>,
        backtrack: u32,
    },
    /// Of `mid` in P2.
    Branches { branches: Vec<WireBranch> },
}

/// How a sequence goes on in P2.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct WireBranch {
    /// The row of its mask.
    pub(crate) sample_mask: Option<usize>,
    pub(crate) temperature: Option<f32>,
    pub(crate) splices: Vec<WireSplice>,
    /// As in [`SeqValue::Pre`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wait: Option<Waiting>,
}

/// A change of the text in P2.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct WireSplice {
    pub(crate) when_sampled: Vec<Token>,
    /// Counts the sampled token.
    pub(crate) backtrack: u32,
    pub(crate) ff_tokens: Vec<Token>,
}

impl SeqValue {
    /// The sequence simply goes on.
    const fn is_default(&self) -> bool {
        match self {
            Self::Post { stop } => !*stop,
            Self::Pre {
                suspend: false,
                num_forks: 1,
                ff_tokens,
                wait: None,
            } => ff_tokens.is_empty(),
            _ => false,
        }
    }

    fn hide_wait(&mut self) {
        match self {
            Self::Pre { wait, .. } => *wait = None,
            Self::Branches { branches } => {
                for branch in branches {
                    branch.wait = None;
                }
            }
            _ => {}
        }
    }
}

impl WireBranch {
    /// Nothing happens to the sequence.
    pub(crate) fn noop(wait: Option<Waiting>) -> Self {
        Self {
            sample_mask: None,
            temperature: None,
            splices: vec![WireSplice {
                when_sampled: Vec::new(),
                backtrack: 0,
                ff_tokens: Vec::new(),
            }],
            wait,
        }
    }
}

/// A callback by the name that its errors have (AI-421).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Label {
    Setup,
    /// The first `pre`, in `instantiate` (AI-316).
    SetupPre,
    Pre,
    Mid,
    Post,
}

impl Label {
    const fn name(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::SetupPre => "setup-pre",
            Self::Pre => "pre0",
            Self::Mid => "mid",
            Self::Post => "post",
        }
    }

    /// The result beside an error.
    const fn of_error(self) -> Option<SeqValue> {
        match self {
            Self::Post => Some(SeqValue::Post { stop: true }),
            Self::Pre => Some(SeqValue::Pre {
                suspend: false,
                num_forks: 1,
                ff_tokens: Vec::new(),
                wait: None,
            }),
            Self::Mid | Self::Setup | Self::SetupPre => None,
        }
    }

    /// The text of an error of this callback.
    pub(crate) fn error(self, message: &str) -> String {
        format!("Error ({}): {message}", self.name())
    }
}

impl SeqResult {
    /// A result, with what the callbacks printed and wrote.
    pub(crate) fn new(result: Option<SeqValue>, report: StepReport) -> Self {
        Self {
            error: String::new(),
            result,
            storage: report
                .storage
                .into_iter()
                .map(StorageCommand::from)
                .collect(),
            logs: report.logs,
            micros: report.micros,
            compact: false,
        }
    }

    /// The error of a callback.
    pub(crate) fn callback_error(label: Label, message: &str, report: StepReport) -> Self {
        let error = label.error(message);
        let mut result = Self::new(label.of_error(), report);
        result.logs.push_str(&error);
        result.error = error;
        result
    }

    /// A failure of the runtime itself (AI-431).
    pub(crate) fn worker_error(message: &str) -> Self {
        let error = format!("Worker: {message}");
        Self {
            logs: error.clone(),
            error,
            result: None,
            storage: Vec::new(),
            micros: 0,
            compact: false,
        }
    }

    /// The result of a `pre` that appends tokens.
    pub(crate) fn forward(&self) -> Option<SeqValue> {
        match &self.result {
            Some(value @ SeqValue::Pre { ff_tokens, .. }) if !ff_tokens.is_empty() => {
                Some(value.clone())
            }
            _ => None,
        }
    }

    /// Sets how it is written.
    pub(crate) fn set_format(&mut self, format: AnswerFormat) {
        self.compact = format.compact;
        if !format.wait
            && let Some(value) = &mut self.result
        {
            value.hide_wait();
        }
    }

    /// Adds a line to the logs.
    pub(crate) fn log(&mut self, line: &str) {
        if !self.logs.is_empty() && !self.logs.ends_with('\n') {
            self.logs.push('\n');
        }
        self.logs.push_str(line);
        self.logs.push('\n');
    }
}

/// A write, in the form in which the controller asked for it.
#[derive(Debug)]
struct StorageCommand(VariableWrite);

impl From<VariableWrite> for StorageCommand {
    fn from(write: VariableWrite) -> Self {
        Self(write)
    }
}

impl Serialize for StorageCommand {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Write<'a> {
            name: &'a str,
            value: String,
            op: &'static str,
            when_version_is: Option<u64>,
        }
        let write = Write {
            name: &self.0.name,
            value: hex(&self.0.value),
            op: if self.0.append { "Append" } else { "Set" },
            when_version_is: self.0.when_version_is,
        };
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("WriteVar", &write)?;
        map.end()
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// Results by the id of their sequence, in the order of the answer.
#[derive(Debug, Default)]
pub(crate) struct SeqResults(pub(crate) Vec<(u64, SeqResult)>);

impl SeqResults {
    pub(crate) fn push(&mut self, id: u64, result: SeqResult) {
        self.0.push((id, result));
    }
}

impl Serialize for SeqResults {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, result)| (id, result)))
    }
}

/// How long answers may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerRoom {
    /// Bytes of the longest message.
    pub(crate) bytes_max: usize,
    /// Bytes of the region.
    pub(crate) room: usize,
}

/// The answer to an op of the main channel that runs callbacks.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum StepAnswer {
    /// Of `post_pre_process`.
    PostPre {
        post_seqs: SeqResults,
        pre_seqs: SeqResults,
    },
    /// Of `mid_process` in P1.
    Mid {
        seqs: SeqResults,
        num_seqs: usize,
        #[serde(flatten)]
        rows: Option<BitLayout>,
    },
    /// Of `mid_process` in P2.
    Process {
        seqs: SeqResults,
        #[serde(flatten)]
        rows: RowLayout,
    },
    /// Of `instantiate`, where it is a result; of no sequence yet.
    Begun(#[serde(serialize_with = "only_result")] (u64, SeqResult)),
}

fn only_result<S: Serializer>(
    (_, result): &(u64, SeqResult),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    result.serialize(serializer)
}

/// An answer as it is sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EncodedStep {
    pub(crate) bytes: Vec<u8>,
    /// Their results were too large: they have failed, so that the others have theirs.
    pub(crate) failed: Vec<u64>,
    /// The answer is an error: it has nobody's result.
    pub(crate) lost: bool,
}

impl StepAnswer {
    fn entries(&mut self) -> impl Iterator<Item = &mut (u64, SeqResult)> {
        let (first, second) = match self {
            Self::PostPre {
                post_seqs,
                pre_seqs,
            } => (&mut post_seqs.0[..], &mut pre_seqs.0[..]),
            Self::Mid { seqs, .. } | Self::Process { seqs, .. } => (&mut seqs.0[..], &mut [][..]),
            Self::Begun(only) => (std::slice::from_mut(only), &mut [][..]),
        };
        first.iter_mut().chain(second)
    }

    fn results(&mut self) -> impl Iterator<Item = &mut SeqResult> {
        self.entries().map(|(_, result)| result)
    }

    /// Replaces the largest results by an error, until `excess` bytes are gone, or as many as that can do. Returns whose
    /// they were.
    fn drop_largest_results(&mut self, mut excess: usize) -> Vec<u64> {
        fn encoded(result: &SeqResult) -> usize {
            serde_json::to_vec(result).map_or(0, |json| json.len())
        }
        let mut entries: Vec<_> = self
            .entries()
            .map(|(id, result)| (encoded(result), *id, result))
            .collect();
        entries.sort_by_key(|&(bytes, id, _)| (std::cmp::Reverse(bytes), id));
        let mut failed = Vec::new();
        for (bytes, id, result) in entries {
            let mut error = SeqResult::worker_error(RESULT_TOO_LARGE);
            error.compact = result.compact;
            let saved = bytes.saturating_sub(encoded(&error));
            if excess == 0 || saved == 0 {
                break;
            }
            *result = error;
            excess = excess.saturating_sub(saved);
            failed.push(id);
        }
        failed.sort_unstable();
        failed.dedup();
        failed
    }

    /// Drops writes that cannot fit anyway, those of the results with most of them: one sequence must not cost the others
    /// their step, and nothing is encoded in vain.
    fn drop_excessive_writes(&mut self, bytes_max: usize) {
        let results = self.results().count().max(1);
        let all = |answer: &mut Self| -> usize {
            let bytes = answer
                .results()
                .map(|result| written_bytes(&result.storage));
            bytes.sum()
        };
        if all(self) <= bytes_max {
            return;
        }
        self.results()
            .for_each(|result| drop_replaced(&mut result.storage));
        if all(self) > bytes_max {
            let share = bytes_max / 2 / results;
            self.results()
                .filter(|result| written_bytes(&result.storage) > share)
                .for_each(|result| result.storage.clear());
        }
    }

    /// Encodes the answer in at most `bytes_max` bytes, of a region of `room`: without the oldest logs, then without
    /// writes that later ones replace, then without logs, then without writes, then without the largest results, as few as
    /// possible, whose sequences fail, because one must not cost the others their step, and at last as an error (AI-224,
    /// AI-441).
    pub(crate) fn encode(
        mut self,
        rid: Option<&str>,
        AnswerRoom { bytes_max, room }: AnswerRoom,
        format: AnswerFormat,
    ) -> EncodedStep {
        self.results().for_each(|result| result.set_format(format));
        self.drop_excessive_writes(bytes_max);
        let mut bytes = envelope::encode_data(rid, &self);
        let of = |bytes, failed| EncodedStep {
            bytes,
            failed,
            lost: false,
        };
        if bytes.len() <= bytes_max {
            return of(bytes, Vec::new());
        }
        let results = self.results().count().max(1);
        let logs_max = room / 2 / results;
        for shorten in [
            &(|result: &mut SeqResult| keep_newest(&mut result.logs, logs_max)) as &dyn Fn(&mut _),
            &|result: &mut SeqResult| drop_replaced(&mut result.storage),
            &|result: &mut SeqResult| result.logs.clear(),
            &|result: &mut SeqResult| result.storage.clear(),
        ] {
            self.results().for_each(shorten);
            bytes = envelope::encode_data(rid, &self);
            if bytes.len() <= bytes_max {
                return of(bytes, Vec::new());
            }
        }
        let share = bytes_max / 2 / results;
        self.results()
            .for_each(|result| keep_oldest(&mut result.error, share));
        bytes = envelope::encode_data(rid, &self);
        if bytes.len() <= bytes_max {
            return of(bytes, Vec::new());
        }
        let failed = self.drop_largest_results(bytes.len() - bytes_max);
        bytes = envelope::encode_data(rid, &self);
        if bytes.len() <= bytes_max {
            return of(bytes, failed);
        }
        let error = RequestError {
            text: format!("response too large; {} > {bytes_max}", bytes.len()),
            is_user: false,
        };
        EncodedStep {
            bytes: envelope::encode::<()>(rid, &Err(error)),
            failed,
            lost: true,
        }
    }
}

/// The log line of a mask without tokens (AI-237).
pub(crate) const EMPTY_MASK: &str = "empty mask: only EOS allowed";

/// The failure of a sequence whose result does not fit beside those of the others.
pub(crate) const RESULT_TOO_LARGE: &str = "result too large";

/// Drops the beginning of `logs` so that what is left is at most `bytes_max` bytes of JSON.
fn keep_newest(logs: &mut String, bytes_max: usize) {
    let mut bytes = 0;
    for (at, character) in logs.char_indices().rev() {
        bytes += json_bytes(character);
        if bytes > bytes_max {
            logs.drain(..at + character.len_utf8());
            return;
        }
    }
}

/// Drops the end of `error`, whose beginning says what it is, so that what is left is at most `bytes_max` bytes of JSON.
fn keep_oldest(error: &mut String, bytes_max: usize) {
    let mut bytes = 0;
    let is_over = |(at, character): (usize, char)| {
        bytes += json_bytes(character);
        (bytes > bytes_max).then_some(at)
    };
    if let Some(at) = error.char_indices().find_map(is_over) {
        error.truncate(at);
    }
}

/// What a character takes in JSON.
const fn json_bytes(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' => 2,
        '\0'..='\x1f' => 6,
        other => other.len_utf8(),
    }
}

/// What writes take in an answer, at least: their values are written as hexadecimal digits.
fn written_bytes(storage: &[StorageCommand]) -> usize {
    let bytes = |StorageCommand(write): &StorageCommand| write.name.len() + 2 * write.value.len();
    storage.iter().map(bytes).sum()
}

/// Drops writes whose value a later `Set` of the same variable replaces.
fn drop_replaced(storage: &mut Vec<StorageCommand>) {
    let mut last_set = HashMap::new();
    for (at, StorageCommand(write)) in storage.iter().enumerate() {
        if !write.append {
            last_set.insert(write.name.clone(), at);
        }
    }
    let mut at = 0;
    storage.retain(|StorageCommand(write)| {
        let kept = last_set.get(&write.name).is_none_or(|last| at >= *last);
        at += 1;
        kept
    });
}

#[cfg(test)]
mod tests;
