//! Parses items and notices in all forms that servers send (LM-705).

use std::borrow::Cow;
use std::time::Duration;

use crate::lmtp::json::RawValue;
use crate::lmtp::read::member;
use crate::lmtp::{Features, LmtpError, LmtpReason, StreamFinish};
use crate::steer::Token;

/// One item as the peer sent it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReceivedItem {
    /// Its token id; absent if the peer ends a stream without a token.
    pub token: Option<Token>,
    /// Its log-probability as the peer computes it; `None` if that is not a number.
    pub logprob: Option<f32>,
    /// The sampled token and the most likely ones, in the peer's order.
    pub top: Vec<(Token, f32)>,
    /// The finish reason of the stream; nothing follows then.
    pub finish: Option<StreamFinish>,
    /// Text completed by this token, from peers that send text (version 2).
    pub text: Option<String>,
    /// The stop string that ended the stream (version 2).
    pub stop: Option<String>,
    /// Token counts of the stream, with its last item (version 2).
    pub usage: Option<StreamUsage>,
    /// The sample that it belongs to, if samples are numbered (version 2).
    pub sample: u32,
    /// A controller has appended the token (version 2).
    pub forced: bool,
    /// What else happened to the sample; boxed, because it is rare (version 2).
    pub branch: Option<Box<ReceivedBranch>>,
}

/// What happened to a sample of a stream, other than a token (LM-972, LM-973).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReceivedBranch {
    /// Why it ended, where samples are numbered; nothing of it follows then.
    pub end: Option<StreamFinish>,
    /// The error that it ended with, while others go on.
    pub error: Option<LmtpError>,
    /// It begins, as a fork of this one.
    pub fork_of: Option<u32>,
    /// How many tokens it has in common with that one; all before this item if the peer does not say.
    pub inherited: Option<u32>,
    /// This many of its last tokens are void.
    pub backtrack: Option<u32>,
}

/// Token counts of a stream, as its peer reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that came from the prefix cache.
    pub cached_tokens: u64,
    /// Tokens sent.
    pub completion_tokens: u64,
    /// How many of them a controller has appended.
    pub forced_tokens: u64,
}

impl ReceivedItem {
    /// Whether it reports anything; items that do not are no progress of their stream.
    pub(super) const fn is_progress(&self) -> bool {
        self.token.is_some() || self.finish.is_some() || self.branch.is_some()
    }

    /// Reduces `top` to what was requested: the reference server gives all streams of a batch the batch's maximum, and
    /// our 0 has to be requested as 1.
    pub(super) fn keep_top(&mut self, top: u32) {
        let Some(token) = self.token else {
            return self.top.clear();
        };
        if self.top.is_empty() {
            // Some peers leave the member out, and readers expect the sampled token in it (LM-705).
            self.top
                .extend(self.logprob.map(|logprob| (token, logprob)));
        }
        let mut others = top;
        self.top.retain(|(id, _)| {
            // The sampled token does not count: it is shown beside the most likely ones (LM-413).
            let shown = *id == token || others > 0;
            others = others.saturating_sub(u32::from(*id != token));
            shown
        });
    }
}

/// The known members of one item or notice.
#[derive(Debug, Default)]
pub(super) struct ItemMembers<'a> {
    pub(super) id: Option<u64>,
    token: Option<Token>,
    logprob: Option<RawValue<'a>>,
    finish: Option<Cow<'a, str>>,
    top: Option<RawValue<'a>>,
    error: Option<RawValue<'a>>,
    code: Option<Cow<'a, str>>,
    retry_after: Option<Duration>,
    pub(super) model_info: Option<RawValue<'a>>,
    /// The negotiated version 2 features.
    pub(super) lmtp: Option<RawValue<'a>>,
    /// The answer to CANCEL.
    pub(super) cancelled: bool,
    /// Whether it is the answer to RESUME; `gone` and `conflict` list the streams that do not continue.
    pub(super) resumed: bool,
    gone: Option<RawValue<'a>>,
    conflict: Option<RawValue<'a>>,
    /// The item's number in its stream.
    pub(super) seq: Option<u64>,
    /// The event name of a STATUS.
    pub(super) event: Option<Cow<'a, str>>,
    text: Option<Cow<'a, str>>,
    stop: Option<Cow<'a, str>>,
    usage: Option<RawValue<'a>>,
    sample: Option<u32>,
    sample_end: Option<Cow<'a, str>>,
    sample_error: Option<Cow<'a, str>>,
    fork_of: Option<u32>,
    inherited: Option<u32>,
    backtrack: Option<u32>,
    forced: bool,
    stop_by: Option<Cow<'a, str>>,
}

impl<'a> ItemMembers<'a> {
    pub(super) fn of(object: RawValue<'a>) -> Option<Self> {
        let mut members = Self::default();
        for (name, value) in object.members()? {
            let whole = || {
                value
                    .integer()
                    .and_then(|number| u64::try_from(number).ok())
            };
            match &*name {
                // Our ids are integers; any other id belongs to none of our calls.
                "stream_id" => members.id = whole(),
                "token" => members.token = whole().and_then(|id| Token::try_from(id).ok()),
                "logprob" => members.logprob = Some(value),
                "finish_reason" => members.finish = value.string(),
                "top_logprobs" => members.top = Some(value),
                // A peer may send `error: null` with every item (LM-705).
                "error" => members.error = (!value.is_null()).then_some(value),
                "code" => members.code = value.string(),
                "retry_after_ms" => members.retry_after = whole().map(Duration::from_millis),
                "model_info" => members.model_info = Some(value),
                "lmtp" => members.lmtp = Some(value),
                "cancelled" => members.cancelled = true,
                "resumed" => members.resumed = true,
                "gone" => members.gone = Some(value),
                "conflict" => members.conflict = Some(value),
                "seq" => members.seq = whole(),
                "event" => members.event = value.string(),
                "text" => members.text = value.string(),
                "stop_match" => members.stop = value.string(),
                "usage" => members.usage = Some(value),
                name => members.steered(name, value),
            }
        }
        Some(members)
    }

    /// Reads a member of items of samples and controllers.
    fn steered(&mut self, name: &str, value: RawValue<'a>) {
        let count = || {
            value
                .integer()
                .and_then(|number| u32::try_from(number).ok())
        };
        match name {
            "sample" => self.sample = count(),
            "sample_end" => self.sample_end = value.string(),
            "sample_error" => self.sample_error = value.string(),
            "fork_of" => self.fork_of = count(),
            "inherited" => self.inherited = count(),
            "backtrack" => self.backtrack = count(),
            "forced" => self.forced = value.boolean() == Some(true),
            "stop_by" => self.stop_by = value.string(),
            _ => {}
        }
    }

    /// What happened to the sample, if anything did.
    fn branch(&self) -> Option<Box<ReceivedBranch>> {
        let error = self.sample_error.as_deref().map(|message| {
            let reason = self.code.as_deref().and_then(LmtpReason::from_name);
            let reason = reason.unwrap_or(LmtpReason::UpstreamError);
            LmtpError::new(reason, message.to_owned())
        });
        let branch = ReceivedBranch {
            end: self.finish(self.sample_end.as_deref()),
            error,
            fork_of: self.fork_of,
            inherited: self.inherited,
            backtrack: self.backtrack,
        };
        // Without a fork the number of tokens in common has no meaning.
        let is_any = branch.end.is_some() || branch.fork_of.is_some() || branch.backtrack.is_some();
        is_any.then(|| Box::new(branch))
    }

    /// A finish reason; one that a controller caused is distinguished.
    fn finish(&self, name: Option<&str>) -> Option<StreamFinish> {
        let is_stopped = self.stop_by.as_deref() == Some("controller");
        Some(match StreamFinish::from_name(name?) {
            StreamFinish::Stop if is_stopped => StreamFinish::Controller,
            other => other,
        })
    }

    /// Number of streams of all clients of the peer, if it reports that (LM-902).
    pub(super) fn load(&self) -> Option<u64> {
        let load = member(self.lmtp?, "load")?;
        let count = |name| u64::try_from(member(load, name)?.integer()?).ok();
        let counts = ["running", "queued", "parked"]
            .into_iter()
            .filter_map(count);
        // The peer may report any number.
        Some(counts.fold(0, u64::saturating_add))
    }

    /// The name under which the peer retains this session when the connection is lost (LM-964).
    pub(super) fn session(&self) -> Option<String> {
        let name = member(self.lmtp?, "session")?.string()?;
        (!name.is_empty()).then(|| name.into_owned())
    }

    /// The streams of a RESUME that do not continue.
    pub(super) fn left_behind(&self) -> impl Iterator<Item = u64> {
        let lists = [self.gone, self.conflict].into_iter().flatten();
        let ids = lists.filter_map(RawValue::elements).flatten();
        ids.filter_map(|id| u64::try_from(id.integer()?).ok())
    }

    /// The features that the peer has accepted.
    pub(super) fn features(&self) -> Features {
        let member = |name| member(self.lmtp?, name);
        let version = member("version").and_then(RawValue::integer);
        // Below version 2 nothing is negotiated, whatever the list says (LM-902).
        if version.is_none_or(|version| version < 2) {
            return Features::NONE;
        }
        let names = member("features").and_then(RawValue::elements);
        let names: Vec<_> = names
            .into_iter()
            .flatten()
            .filter_map(RawValue::string)
            .collect();
        Features::named(names.iter().map(AsRef::as_ref))
    }

    /// The error, if there is one; without a code that we know it is an upstream error.
    pub(super) fn error(&self) -> Option<LmtpError> {
        let error = self.error?;
        let message = match error.string() {
            Some(text) => text.into_owned(),
            // A value that strict JSON cannot represent stays as it was sent.
            None => serde_json::from_str::<serde_json::Value>(error.as_str())
                .map_or_else(|_| error.as_str().to_owned(), |value| value.to_string()),
        };
        let reason = self.code.as_deref().and_then(LmtpReason::from_name);
        Some(LmtpError {
            retry_after: self.retry_after,
            ..LmtpError::new(reason.unwrap_or(LmtpReason::UpstreamError), message)
        })
    }

    pub(super) fn item(&self) -> ReceivedItem {
        let number = |value: RawValue<'_>| {
            // NaN means that there is no log-probability (LM-705).
            let number = value.number().filter(|number| !number.is_nan())?;
            Some(number as f32)
        };
        let top = self.top.and_then(RawValue::members).into_iter().flatten();
        ReceivedItem {
            token: self.token,
            logprob: self.logprob.and_then(number),
            top: top
                .filter_map(|(id, value)| Some((id.parse().ok()?, number(value)?)))
                .collect(),
            finish: self.finish(self.finish.as_deref()),
            text: self.text.as_deref().map(str::to_owned),
            stop: self.stop.as_deref().map(str::to_owned),
            usage: self.usage.and_then(usage),
            sample: self.sample.unwrap_or_default(),
            forced: self.forced,
            branch: self.branch(),
        }
    }
}

fn usage(value: RawValue<'_>) -> Option<StreamUsage> {
    let mut usage = StreamUsage::default();
    for (name, value) in value.members()? {
        let count = value.integer().and_then(|count| u64::try_from(count).ok());
        // Counts are for accounting only: one that cannot be read does not fail the stream.
        let count = count.unwrap_or_default();
        match &*name {
            "prompt_tokens" => usage.prompt_tokens = count,
            "cached_tokens" => usage.cached_tokens = count,
            "completion_tokens" => usage.completion_tokens = count,
            "forced_tokens" => usage.forced_tokens = count,
            _ => {}
        }
    }
    Some(usage)
}
