//! Buffers: token sequences that a client stores by name and continues (LM-941 to LM-943).

use std::collections::HashMap;
use std::time::Duration;

use bytes::BytesMut;
use bytestring::ByteString;
use serde::Serialize;

use super::text::RequestSubject;
use crate::lmtp::json::RawValue;
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::write::member;
use crate::lmtp::{ConnectionLimits, LmtpError, LmtpReason};
use crate::steer::Token;
use crate::time::Time;

#[derive(Debug)]
struct Buffer {
    model: ByteString,
    tokens: Vec<Token>,
    /// Maximum of the tokens of all buffers, at the time when this one was created.
    quota: usize,
    ttl: Duration,
    expires: Time,
    used: u64,
}

/// A buffer to be created from the output of a stream (LM-942).
#[derive(Clone, Debug)]
pub(super) struct BufferRequest {
    pub(super) buffer: String,
    model: ByteString,
    /// Maximum of the tokens of all buffers, for this model.
    quota: usize,
}

/// The buffers of one connection.
///
/// Invariants after every call: at most `max_buffers` buffers, whose tokens together are within the quota of the one
/// that was created last; no two buffers have the same `used`.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    named: HashMap<String, Buffer>,
    /// Number of uses so far, which orders the buffers from the least to the most recently used.
    uses: u64,
}

/// The answer for a buffer that was created.
#[derive(Serialize)]
struct BufferReply<'a> {
    id: &'a str,
    len: usize,
    /// Always 0: the buffer is computed when it is first used.
    cached: usize,
    expires_s: u64,
}

#[derive(Serialize)]
struct Dropped<'a> {
    id: &'a str,
    dropped: bool,
}

impl Buffers {
    /// Returns the tokens of a buffer, and marks it as used.
    fn get(&mut self, name: &str, model: &str, now: Time) -> Result<&[Token], LmtpError> {
        // Expiry is checked where a buffer is used, so buffers need no timer; until then one only takes up room, which
        // the quota bounds.
        self.named.retain(|_, buffer| buffer.expires > now);
        let buffer = self.named.get_mut(name).ok_or_else(|| {
            let message = "there is no buffer of this name; send the full prompt";
            LmtpError::new(LmtpReason::BufferNotFound, message)
        })?;
        if buffer.model != model {
            let message = "the buffer belongs to another model";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        self.uses += 1;
        buffer.used = self.uses;
        buffer.expires = now + buffer.ttl;
        Ok(&buffer.tokens)
    }

    fn put(&mut self, name: String, mut buffer: Buffer, limits: &ConnectionLimits) {
        let quota = buffer.quota;
        self.uses += 1;
        buffer.used = self.uses;
        self.named.insert(name, buffer);
        let tokens = |all: &HashMap<String, Buffer>| -> usize {
            all.values().map(|buffer| buffer.tokens.len()).sum()
        };
        // The new buffer has the latest use, so it is evicted last. Alone it is within its quota, unless it holds the
        // output of a stream, whose length is not known when the request is checked; then it evicts itself too.
        while self.named.len() > limits.max_buffers || tokens(&self.named) > quota {
            // A scan, because `max_buffers` is small; an index by use would have to be updated with each use.
            let oldest = self.named.iter().min_by_key(|(_, buffer)| buffer.used);
            let Some(oldest) = oldest.map(|(name, _)| name.clone()) else {
                return;
            };
            self.named.remove(&oldest);
        }
    }

    /// Takes over the buffers of another connection; buffers with the same name here are retained.
    pub(super) fn take_over(&mut self, other: Self, now: Time, limits: &ConnectionLimits) {
        let mut others: Vec<_> = other.named.into_iter().collect();
        others.retain(|(name, buffer)| buffer.expires > now && !self.named.contains_key(name));
        // In order of use: `put` counts each as used, so the order survives, and the oldest are evicted if room is
        // short.
        others.sort_by_key(|(_, buffer)| buffer.used);
        for (name, buffer) in others {
            self.put(name, buffer, limits);
        }
    }

    /// Handles BUFFER: creates, replaces or drops a buffer. Returns the members of the answer.
    pub(super) fn change(
        &mut self,
        members: &PayloadMembers<'_>,
        subject: &RequestSubject,
        now: Time,
    ) -> Result<BytesMut, LmtpError> {
        let name = members.name("buffer", &subject.limits)?.ok_or_else(|| {
            let message = "'buffer' is required: a name for it";
            LmtpError::new(LmtpReason::MissingRequiredParameter, message)
        })?;
        let mut reply = BytesMut::new();
        if members.flag("drop")? == Some(true) {
            let dropped = self.named.remove(&name).is_some();
            member(&mut reply, "buffer", &Dropped { id: &name, dropped });
            return Ok(reply);
        }
        let tokens = self.content(members, subject, now)?;
        let quota = quota(subject);
        if tokens.len() > quota {
            // Refused here, because `put` would evict all other buffers before this one.
            let message = format!("a buffer must have at most {quota} tokens");
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let limits = &subject.limits;
        let asked = members.integer("ttl_s", "at least 1", |ttl| ttl >= 1)?;
        let asked = asked.map(|ttl| Duration::from_secs(u64::try_from(ttl).unwrap_or(u64::MAX)));
        let ttl = asked
            .unwrap_or(limits.buffer_ttl)
            .min(limits.max_buffer_ttl);
        let made = BufferReply {
            id: &name,
            len: tokens.len(),
            cached: 0,
            expires_s: ttl.as_secs(),
        };
        member(&mut reply, "buffer", &made);
        let buffer = Buffer {
            model: subject.name.clone(),
            tokens,
            quota,
            ttl,
            expires: now + ttl,
            used: 0,
        };
        self.put(name, buffer, limits);
        Ok(reply)
    }

    /// The tokens of a buffer to be created.
    fn content(
        &mut self,
        members: &PayloadMembers<'_>,
        subject: &RequestSubject,
        now: Time,
    ) -> Result<Vec<Token>, LmtpError> {
        let from = self.part(members, "from", subject, now)?;
        let mut tokens = from.unwrap_or_default();
        match members.one_of(&["append", "append_text"])? {
            None => {}
            Some("append") => tokens.extend(members.tokens("append", &subject.model)?),
            Some(text) => {
                // BOS is added only where the text begins the sequence.
                let begins = tokens.is_empty();
                tokens.extend(subject.text(members, text, begins)?);
            }
        }
        Ok(tokens)
    }

    /// Returns the tokens of `{"buffer": name, "len": n}` in the member `name`: the first `len` of that buffer, or all.
    pub(super) fn part(
        &mut self,
        members: &PayloadMembers<'_>,
        name: &str,
        subject: &RequestSubject,
        now: Time,
    ) -> Result<Option<Vec<Token>>, LmtpError> {
        let Some(value) = members.value(name) else {
            return Ok(None);
        };
        let wrong = |reason, what: &str| LmtpError::new(reason, format!("'{name}' must be {what}"));
        let shape = "{\"buffer\": name, \"len\": number}";
        let entries = value
            .members()
            .ok_or_else(|| wrong(LmtpReason::InvalidType, shape))?;
        let (mut buffer, mut len): (Option<RawValue<'_>>, Option<RawValue<'_>>) = (None, None);
        for (key, value) in entries {
            match &*key {
                "buffer" => buffer = Some(value),
                "len" => len = Some(value),
                _ => {}
            }
        }
        let buffer = buffer.and_then(RawValue::string);
        let buffer = buffer.ok_or_else(|| wrong(LmtpReason::InvalidType, shape))?;
        let tokens = self.get(&buffer, &subject.name, now)?;
        let len = match len.filter(|len| !len.is_null()) {
            None => tokens.len(),
            Some(len) => {
                let len = len.integer().and_then(|len| usize::try_from(len).ok());
                let len = len.filter(|len| *len <= tokens.len());
                let range = "a part of the buffer: 'len' from 0 to its length";
                len.ok_or_else(|| wrong(LmtpReason::InvalidValue, range))?
            }
        };
        // A copy: the stream keeps what it began with if the buffer is replaced (LM-943).
        Ok(Some(tokens[..len].to_vec()))
    }

    /// Creates the buffers that ended streams have asked for, however the streams have ended.
    pub(super) fn store_all(
        &mut self,
        kept: &mut Vec<(BufferRequest, Vec<Token>)>,
        limits: &ConnectionLimits,
        now: Time,
    ) {
        for (request, tokens) in kept.drain(..) {
            self.store(request, tokens, limits, now);
        }
    }

    fn store(
        &mut self,
        request: BufferRequest,
        tokens: Vec<Token>,
        limits: &ConnectionLimits,
        now: Time,
    ) {
        let buffer = Buffer {
            model: request.model,
            tokens,
            quota: request.quota,
            ttl: limits.buffer_ttl,
            expires: now + limits.buffer_ttl,
            used: 0,
        };
        self.put(request.buffer, buffer, limits);
    }
}

impl BufferRequest {
    /// Reads which buffer to create from the output of a request with so many samples, if it asks for one.
    pub(super) fn read(
        members: &PayloadMembers<'_>,
        subject: &RequestSubject,
        samples: usize,
    ) -> Result<Option<Self>, LmtpError> {
        let Some(buffer) = members.name("keep", &subject.limits)? else {
            return Ok(None);
        };
        // Several samples have several outputs, and there is one name.
        if samples > 1 {
            let message = "'keep' is for streams of one sample";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        Ok(Some(Self {
            buffer,
            model: subject.name.clone(),
            quota: quota(subject),
        }))
    }
}

/// Maximum of the tokens of all buffers, for the model of a request.
fn quota(subject: &RequestSubject) -> usize {
    let context = subject.model.max_context.unwrap_or(CONTEXT_UNKNOWN);
    context.saturating_mul(subject.limits.max_buffer_contexts)
}

/// Size of a context in quotas, if the model's is not known.
const CONTEXT_UNKNOWN: usize = 131_072;
