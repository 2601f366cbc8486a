//! The version 2 state of a stream.
//!
//! A stream of the base protocol has no such state, and no cost for it.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut as _, BytesMut};
use serde::Serialize;

use super::buffers::BufferRequest;
use super::steered::SteeredStream;
use crate::lmtp::write::{self, member};
use crate::lmtp::{Feature, Features, StreamFinish, StreamId, StreamKey, TextCodec, TokenItem};
use crate::steer::Token;
use crate::time::Time;

/// The stream and the index of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleKey {
    /// The stream, by its first sample.
    pub(super) first: StreamKey,
    pub(super) index: u32,
}

/// The text that a stream's items carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TextMode {
    pub(super) text: bool,
    pub(super) bytes: bool,
    /// Text of the most likely tokens.
    pub(super) top: bool,
    /// Text of the prompt's tokens, with the first item.
    pub(super) prompt: bool,
}

/// Version 2 state of a stream, under the key of its first sample.
pub(super) struct ExtendedStream {
    pub(super) id: StreamId,
    /// The features negotiated when it began (LM-903).
    pub(super) features: Features,
    /// Number of items that may be sent without an acknowledgement.
    pub(super) window: Option<u32>,
    /// Number of samples, and of those still running.
    pub(super) samples: u32,
    pub(super) open: u32,
    /// Whether items carry the index of their sample.
    pub(super) numbered: bool,
    pub(super) shown: TextMode,
    /// Whether its first item has the prompt's log-probabilities.
    pub(super) prompt_logprobs: bool,
    pub(super) vocabulary: Option<Arc<dyn TextCodec>>,
    pub(super) prompt: Vec<Token>,
    /// `None` without a controller.
    pub(super) steered: Option<SteeredStream>,
    /// Number of tokens sent, over all samples.
    pub(super) sent: u64,
    pub(super) cached: u32,
    /// Whether nothing was sent yet.
    pub(super) fresh: bool,
    pub(super) began: Time,
    pub(super) deadline: Option<Time>,
    /// Deadline for the first token.
    pub(super) first_due: Option<Time>,
    pub(super) keep: Option<BufferRequest>,
    /// The output, if it is to be stored in a buffer.
    pub(super) output: Vec<Token>,
    /// When its client was last sent a status.
    pub(super) notified: Option<Time>,
    /// Whether its client was sent `queued` or `loading` (LM-922).
    pub(super) waited: bool,
}

#[derive(Serialize)]
struct BufferUsage {
    prompt_tokens: usize,
    cached_tokens: u32,
    completion_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    forced_tokens: Option<u64>,
}

#[derive(Serialize)]
struct SavedBuffer<'a> {
    id: &'a str,
    len: usize,
}

impl ExtendedStream {
    /// The keys of its samples, ended ones included.
    pub(super) fn keys(&self, first: StreamKey) -> impl Iterator<Item = StreamKey> + use<> {
        let end = first.0 + u64::from(self.samples);
        (first.0..end).map(StreamKey)
    }

    /// Counts an item of one of its samples.
    pub(super) fn take(&mut self, item: &TokenItem, sample: u32) {
        self.sent += 1;
        if let Some(steered) = &mut self.steered {
            steered.forced += u64::from(item.forced);
        }
        // Samples share one prompt, so their counts are not added.
        self.cached = self.cached.max(item.cached_tokens);
        // Forks are not retained.
        if self.keep.is_some() && sample == 0 {
            self.output.push(item.token);
        }
    }

    /// Writes an item of one of its samples. The end of the last sample is also the end of the stream (LM-973).
    pub(super) fn item(
        &self,
        out: &mut BytesMut,
        mut item: TokenItem,
        top: Option<u32>,
        index: u32,
        seq: Option<u64>,
    ) {
        // `open` still counts this sample: it is removed after its last item is written.
        let last = item.finish.is_some() && self.open == 1;
        let sample_end = item.finish.clone().filter(|_| self.numbered);
        let is_stopped = item.finish == Some(StreamFinish::Controller);
        if !last {
            // Of several samples only the last end is the end of the stream; the others have `sample_end` alone
            // (LM-973).
            item.finish = item.finish.filter(|_| !self.numbered);
        }
        write::item(out, &self.id, &item, top, |out| {
            self.text(out, &item, top);
            if item.forced {
                member(out, "forced", &true);
            }
            if let Some(prompt) = &item.prompt {
                write::logprobs(out, "prompt_logprobs", prompt);
            }
            if self.numbered {
                member(out, "sample", &index);
            }
            if let Some(end) = &sample_end {
                member(out, "sample_end", end.name());
            }
            if is_stopped {
                member(out, "stop_by", "controller");
            }
            number(out, seq);
            if last {
                self.closing(out);
            }
        });
    }

    /// Writes an end item without a token.
    pub(super) fn end(&self, out: &mut BytesMut, finish: &StreamFinish, seq: Option<u64>) {
        write::end(out, &self.id, finish, |out| {
            number(out, seq);
            self.closing(out);
        });
    }

    /// Writes the members of the last item, with or without a token (LM-942, LM-950).
    pub(super) fn closing(&self, out: &mut BytesMut) {
        if let Some(keep) = &self.keep {
            let len = self.prompt.len() + self.output.len();
            let id = &*keep.buffer;
            member(out, "buffer", &SavedBuffer { id, len });
        }
        self.usage(out);
    }

    /// Writes the token counts so far, if that feature was negotiated.
    pub(super) fn usage(&self, out: &mut BytesMut) {
        if self.features.has(Feature::Usage) {
            let usage = BufferUsage {
                prompt_tokens: self.prompt.len(),
                cached_tokens: self.cached,
                completion_tokens: self.sent,
                forced_tokens: self.steered.as_ref().map(|steered| steered.forced),
            };
            member(out, "usage", &usage);
        }
    }

    fn text(&self, out: &mut BytesMut, item: &TokenItem, top: Option<u32>) {
        if self.shown.text {
            member(out, "text", &*item.text);
            if let Some(stop) = &item.stop {
                member(out, "stop_match", stop);
            }
        }
        let Some(vocabulary) = &self.vocabulary else {
            return;
        };
        if self.shown.bytes {
            member(out, "bytes", &STANDARD.encode(vocabulary.bytes(item.token)));
        }
        if self.shown.top {
            // The same tokens as in `top_logprobs`, in the same order (LM-413).
            out.put_slice(b",\"top_text\":{");
            let shown = top.map_or(0, |top| usize::try_from(top).unwrap_or(usize::MAX));
            let others = item.top.iter().take(shown).map(|(token, _)| *token);
            let tokens = others.filter(|token| *token != item.token);
            for (at, token) in std::iter::once(item.token).chain(tokens).enumerate() {
                if at > 0 {
                    out.put_u8(b',');
                }
                write::json(out, &token.to_string());
                out.put_u8(b':');
                // A token may be a part of a character.
                write::json(out, &*String::from_utf8_lossy(vocabulary.bytes(token)));
            }
            out.put_u8(b'}');
        }
        // Facts about the prompt stand in the first item only (LM-913).
        if self.fresh && self.features.has(Feature::Text) {
            member(out, "prompt_len", &self.prompt.len());
            if self.shown.prompt {
                member(out, "prompt_tokens", &self.prompt);
            }
        }
    }
}

/// Writes the number of an item, if items are numbered (LM-963).
pub(super) fn number(out: &mut BytesMut, seq: Option<u64>) {
    if let Some(seq) = seq {
        member(out, "seq", &seq);
    }
}

// By hand, because a `dyn TextCodec` has no `Debug`.
impl fmt::Debug for ExtendedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extended")
            .field("id", &self.id)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}
