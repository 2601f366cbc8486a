//! The version 2 state of a stream.
//!
//! A stream of the base protocol has none of this, and costs nothing for it.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut as _, BytesMut};
use bytestring::ByteString;
use serde::Serialize;

use crate::lmtp::write::{self, member};
use crate::lmtp::{Feature, Features, StreamFinish, StreamId, StreamKey, TextCodec, TokenItem};
use crate::steer::Token;
use crate::time::Time;

/// Which sample of which stream a key stands for.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleKey {
    /// The stream, by its first sample.
    pub(super) first: StreamKey,
    pub(super) index: u32,
}

/// What text of its items a stream wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TextMode {
    pub(super) text: bool,
    pub(super) bytes: bool,
    /// Of the most likely tokens.
    pub(super) top: bool,
    /// The prompt's tokens, with the first item.
    pub(super) prompt: bool,
}

/// A buffer to be made of a stream (LM-942).
#[derive(Clone, Debug)]
pub(super) struct BufferRequest {
    pub(super) buffer: String,
    pub(super) model: ByteString,
    /// Tokens of all buffers of this model together.
    pub(super) quota: usize,
}

/// A stream of a connection that has negotiated something, under the key of its first sample.
pub(super) struct ExtendedStream {
    pub(super) id: StreamId,
    /// What was negotiated when it began (LM-903).
    pub(super) features: Features,
    /// What was asked for, in short, where a client may come back for it.
    pub(super) request: Option<u64>,
    /// How many items its client takes without a word.
    pub(super) window: Option<u32>,
    /// Samples in all, and those that go on.
    pub(super) samples: u32,
    pub(super) open: u32,
    /// Items say which sample they are of.
    pub(super) numbered: bool,
    pub(super) shown: TextMode,
    /// Its first item says how likely the prompt is.
    pub(super) prompt_logprobs: bool,
    pub(super) vocabulary: Option<Arc<dyn TextCodec>>,
    pub(super) prompt: Vec<Token>,
    /// Tokens sent, of all samples.
    pub(super) sent: u64,
    pub(super) cached: u32,
    /// Nothing was sent yet.
    pub(super) fresh: bool,
    pub(super) began: Time,
    pub(super) deadline: Option<Time>,
    /// When the first token has to be there.
    pub(super) first_due: Option<Time>,
    pub(super) keep: Option<BufferRequest>,
    /// The output, where it is to be kept.
    pub(super) output: Vec<Token>,
    /// When its client last got a status.
    pub(super) notified: Option<Time>,
    /// Its client got a status that it waits.
    pub(super) waited: bool,
}

#[derive(Serialize)]
struct BufferUsage {
    prompt_tokens: usize,
    cached_tokens: u32,
    completion_tokens: u64,
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

    /// Books an item.
    pub(super) fn take(&mut self, item: &TokenItem) {
        self.sent += 1;
        self.cached = self.cached.max(item.cached_tokens);
        if self.keep.is_some() {
            self.output.push(item.token);
        }
    }

    /// An item of one of its samples. That the last sample ends is said of the stream as well (LM-973).
    pub(super) fn item(
        &self,
        out: &mut BytesMut,
        mut item: TokenItem,
        top: Option<u32>,
        index: u32,
        seq: Option<u64>,
    ) {
        let last = item.finish.is_some() && self.open == 1;
        let sample_end = item.finish.clone().filter(|_| self.numbered);
        if !last {
            item.finish = item.finish.filter(|_| !self.numbered);
        }
        write::item(out, &self.id, &item, top, |out| {
            self.text(out, &item, top);
            if let Some(prompt) = &item.prompt {
                write::logprobs(out, "prompt_logprobs", prompt);
            }
            if self.numbered {
                member(out, "sample", &index);
            }
            if let Some(end) = &sample_end {
                member(out, "sample_end", end.name());
            }
            number(out, seq);
            if last {
                self.closing(out);
            }
        });
    }

    /// An end without a token.
    pub(super) fn end(&self, out: &mut BytesMut, finish: &StreamFinish, seq: Option<u64>) {
        write::end(out, &self.id, finish, |out| {
            number(out, seq);
            self.closing(out);
        });
    }

    /// What the last item says, whatever it is (LM-942, LM-950).
    pub(super) fn closing(&self, out: &mut BytesMut) {
        if let Some(keep) = &self.keep {
            let len = self.prompt.len() + self.output.len();
            let id = &*keep.buffer;
            member(out, "buffer", &SavedBuffer { id, len });
        }
        self.usage(out);
    }

    /// What it has cost by now, if its client wants to know.
    pub(super) fn usage(&self, out: &mut BytesMut) {
        if self.features.has(Feature::Usage) {
            let usage = BufferUsage {
                prompt_tokens: self.prompt.len(),
                cached_tokens: self.cached,
                completion_tokens: self.sent,
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
                write::json(out, &*String::from_utf8_lossy(vocabulary.bytes(token)));
            }
            out.put_u8(b'}');
        }
        if self.fresh && self.features.has(Feature::Text) {
            member(out, "prompt_len", &self.prompt.len());
            if self.shown.prompt {
                member(out, "prompt_tokens", &self.prompt);
            }
        }
    }
}

/// The number of an item, if it bears one (LM-963).
pub(super) fn number(out: &mut BytesMut, seq: Option<u64>) {
    if let Some(seq) = seq {
        member(out, "seq", &seq);
    }
}

impl fmt::Debug for ExtendedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extended")
            .field("id", &self.id)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}
