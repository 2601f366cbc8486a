//! Buffers: token sequences that a client stores by name and continues (LM-941 to LM-943).

use std::collections::HashMap;
use std::time::Duration;

use bytestring::ByteString;
use serde::Serialize;

use super::LmtpSession;
use super::extended::{BufferRequest, ExtendedStream};
use super::text::RequestSubject;
use crate::lmtp::json::RawValue;
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::write::{self, member};
use crate::lmtp::{ConnectionLimits, LmtpError, LmtpModelInfo, LmtpReason, ModelLookup, StreamId};
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

/// The buffers of one connection.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    named: HashMap<String, Buffer>,
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

/// The result of a BUFFER.
enum BufferOutcome {
    Made { len: usize, ttl: Duration },
    Dropped(bool),
}

impl Buffers {
    /// Returns the tokens of a buffer, and marks it as used.
    fn get(&mut self, name: &str, model: &str, now: Time) -> Result<&[Token], LmtpError> {
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
        while self.named.len() > limits.max_buffers || tokens(&self.named) > quota {
            let oldest = self.named.iter().min_by_key(|(_, buffer)| buffer.used);
            let Some(oldest) = oldest.map(|(name, _)| name.clone()) else {
                return;
            };
            self.named.remove(&oldest);
        }
    }
}

impl Buffers {
    /// Takes over the buffers of another connection; buffers with the same name here are retained.
    pub(super) fn take_over(&mut self, other: Self, now: Time, limits: &ConnectionLimits) {
        let mut others: Vec<_> = other.named.into_iter().collect();
        others.retain(|(name, buffer)| buffer.expires > now && !self.named.contains_key(name));
        others.sort_by_key(|(_, buffer)| buffer.used);
        for (name, buffer) in others {
            self.put(name, buffer, limits);
        }
    }
}

impl LmtpSession {
    /// Creates, replaces or drops a buffer.
    pub(super) fn buffer(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) {
        let done = self.about(members, models, |session, about| {
            let name = members.name("buffer", &session.config.limits)?;
            let name = name.ok_or_else(|| {
                let message = "'buffer' is required: a name for it";
                LmtpError::new(LmtpReason::MissingRequiredParameter, message)
            })?;
            let done = session.change_buffer(members, about, &name, now)?;
            Ok((name, done))
        });
        match done {
            Err(error) => self.request_failed(id, &error),
            Ok((name, done)) => self.outbound.notice(|out| {
                write::answer(out, id, |out| match done {
                    BufferOutcome::Dropped(dropped) => {
                        member(out, "buffer", &Dropped { id: &name, dropped });
                    }
                    BufferOutcome::Made { len, ttl } => {
                        let made = BufferReply {
                            id: &name,
                            len,
                            cached: 0,
                            expires_s: ttl.as_secs(),
                        };
                        member(out, "buffer", &made);
                    }
                });
            }),
        }
    }

    fn change_buffer(
        &mut self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
        name: &str,
        now: Time,
    ) -> Result<BufferOutcome, LmtpError> {
        if members.flag("drop")? == Some(true) {
            return Ok(BufferOutcome::Dropped(
                self.buffers.named.remove(name).is_some(),
            ));
        }
        let mut tokens = self
            .part_of(members, "from", about, now)?
            .unwrap_or_default();
        if members.value("append").is_some() && members.value("append_text").is_some() {
            let message = "'append' and 'append_text' exclude each other; send one";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        if members.value("append_text").is_some() {
            let begins = tokens.is_empty();
            tokens.extend(self.text(members, "append_text", about, begins)?);
        } else if members.value("append").is_some() {
            tokens.extend(members.tokens("append", about.model)?);
        }
        let limits = &self.config.limits;
        let quota = self.buffer_quota(about.model);
        if tokens.len() > quota {
            let message = format!("a buffer must have at most {quota} tokens");
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let asked = members.integer("ttl_s", "at least 1", |ttl| ttl >= 1)?;
        let asked = asked.map(|ttl| Duration::from_secs(u64::try_from(ttl).unwrap_or(u64::MAX)));
        let ttl = asked
            .unwrap_or(limits.buffer_ttl)
            .min(limits.max_buffer_ttl);
        let len = tokens.len();
        self.put_buffer(
            name.to_owned(),
            about.name.clone(),
            tokens,
            (ttl, quota),
            now,
        );
        Ok(BufferOutcome::Made { len, ttl })
    }

    fn put_buffer(
        &mut self,
        name: String,
        model: ByteString,
        tokens: Vec<Token>,
        (ttl, quota): (Duration, usize),
        now: Time,
    ) {
        let buffer = Buffer {
            model,
            tokens,
            quota,
            ttl,
            expires: now + ttl,
            used: 0,
        };
        self.buffers.put(name, buffer, &self.config.limits);
    }

    fn buffer_quota(&self, model: &LmtpModelInfo) -> usize {
        model
            .max_context
            .unwrap_or(CONTEXT_UNKNOWN)
            .saturating_mul(self.config.limits.max_buffer_contexts)
    }

    /// The prefix of a request, if it has one.
    pub(super) fn prefix(
        &mut self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
        now: Time,
    ) -> Result<Option<Vec<Token>>, LmtpError> {
        self.part_of(members, "prefix", about, now)
    }

    /// Returns the tokens of `{"buffer": name, "len": n}` in the member `name`: the first `len` of that buffer, or all.
    fn part_of(
        &mut self,
        members: &PayloadMembers<'_>,
        name: &str,
        about: RequestSubject<'_>,
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
        let tokens = self.buffers.get(&buffer, about.name, now)?;
        let len = match len.filter(|len| !len.is_null()) {
            None => tokens.len(),
            Some(len) => {
                let len = len.integer().and_then(|len| usize::try_from(len).ok());
                let len = len.filter(|len| *len <= tokens.len());
                let range = "a part of the buffer: 'len' from 0 to its length";
                len.ok_or_else(|| wrong(LmtpReason::InvalidValue, range))?
            }
        };
        Ok(Some(tokens[..len].to_vec()))
    }

    /// The buffer to create from a stream's output, if the request asks for one.
    pub(super) fn keep(
        &self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
        samples: usize,
    ) -> Result<Option<BufferRequest>, LmtpError> {
        let Some(buffer) = members.name("keep", &self.config.limits)? else {
            return Ok(None);
        };
        if samples > 1 {
            let message = "'keep' is for streams of one sample";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        Ok(Some(BufferRequest {
            buffer,
            model: about.name.clone(),
            quota: self.buffer_quota(about.model),
        }))
    }

    /// Creates the buffer that an ended stream has asked for, however it has ended.
    pub(super) fn store_output(&mut self, extended: &ExtendedStream, now: Time) {
        let Some(keep) = &extended.keep else {
            return;
        };
        let tokens = [&*extended.prompt, &*extended.output].concat();
        let life = (self.config.limits.buffer_ttl, keep.quota);
        self.put_buffer(keep.buffer.clone(), keep.model.clone(), tokens, life, now);
    }
}

/// Size of a context in quotas, if the model's is not known.
const CONTEXT_UNKNOWN: usize = 131_072;
