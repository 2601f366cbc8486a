//! The client side of an LMTP connection, as a pure state machine.
//!
//! Text goes in, events come out; the messages to send are returned by the calls.

mod received;
mod remote_buffers;
mod send;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};

use super::json::RawValue;
use super::write::{self, member};
use super::{Feature, Features, GenerateRequest, LmtpError, LmtpReason, Score, StreamFinish, read};
use crate::params::lora_to_json;
use crate::time::Time;
use received::ItemMembers;
use remote_buffers::RemoteBuffers;

pub use received::{ReceivedBranch, ReceivedItem, StreamUsage};

/// A stream or request of ours. Ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientCallId(u64);

/// The timeouts of a client. `None` means no timeout (LM-709).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientTimeouts {
    /// Time to the first item of a stream.
    pub first_item_timeout: Option<Duration>,
    /// Time from one item of a stream to the next.
    pub item_timeout: Option<Duration>,
    /// Time to the answer of a request.
    pub request_timeout: Option<Duration>,
    /// Maximum size of a message to the peer in bytes; `aiohttp` closes the connection above the default (LM-703).
    pub max_message_out: usize,
    /// Whether to ask for the text of items, where that was negotiated.
    pub text: bool,
}

impl Default for ClientTimeouts {
    fn default() -> Self {
        Self {
            first_item_timeout: Some(Duration::from_secs(300)),
            item_timeout: Some(Duration::from_secs(60)),
            request_timeout: Some(Duration::from_secs(5)),
            max_message_out: 4_194_303,
            text: false,
        }
    }
}

/// An event of a call. A call ends with an item that has a finish reason, with its model's metadata, or with a failure.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientEvent {
    /// One item of a stream.
    Item(ClientCallId, ReceivedItem),
    /// The answer to MODEL_INFO: the JSON of `model_info`.
    ModelInfo(ClientCallId, String),
    /// The stream or request failed.
    Failed(ClientCallId, LmtpError),
}

#[derive(Debug)]
enum CallKind {
    /// With the number of most likely tokens asked for.
    Generate(u32),
    Score,
    ModelInfo,
    Resume,
}

impl CallKind {
    /// Whether it is answered by a MSG.
    const fn is_request(&self) -> bool {
        matches!(self, Self::ModelInfo | Self::Resume)
    }
}

#[derive(Debug)]
struct OpenCall {
    kind: CallKind,
    model: String,
    /// Number of items that may still arrive (LM-707).
    left: u64,
    /// When it times out.
    due: Option<Time>,
    /// Its reader was dropped, but the peer still works on it (LM-702).
    abandoned: bool,
    /// Whether an item has arrived.
    begun: bool,
    /// The number of the next item, if the peer numbers them (LM-963).
    next: Option<u64>,
    /// Its connection is lost, and it was not resumed on another one yet.
    detached: bool,
}

/// The client state machine; see the module documentation.
#[derive(Debug)]
pub struct ClientMachine {
    options: ClientTimeouts,
    open: BTreeMap<u64, OpenCall>,
    last_id: u64,
    events: VecDeque<ClientEvent>,
    dropped: u64,
    raw_logprobs: bool,
    /// The negotiated features.
    features: Features,
    load: Option<u64>,
    draining: bool,
    /// The peer's name for this session, with which it can be resumed after the connection is lost.
    session: Option<String>,
    /// State of an earlier connection that waits to be resumed.
    detached: Option<RemoteBuffers>,
}

impl ClientMachine {
    /// Creates a connection without calls.
    #[must_use]
    pub const fn new(options: ClientTimeouts) -> Self {
        Self {
            options,
            open: BTreeMap::new(),
            last_id: 0,
            events: VecDeque::new(),
            dropped: 0,
            raw_logprobs: false,
            features: Features::NONE,
            load: None,
            draining: false,
            session: None,
            detached: None,
        }
    }

    /// Starts a stream; send the returned message as it is, in a frame or line of its own. Token stop sequences are
    /// checked here if the peer does not support them (LM-704).
    ///
    /// # Errors
    /// `unsupported_operation` for a parameter on which the reference server fails, or which it ignores (LM-703,
    /// LM-704), unless version 2 was negotiated; `message_too_large`. Nothing is to be sent then.
    pub fn generate(
        &mut self,
        model: &str,
        wanted: &GenerateRequest,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        self.generate_within(model, wanted, None, now)
    }

    /// The same with a deadline: if that feature was negotiated, the peer ends the stream with `deadline` (LM-962).
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub fn generate_within(
        &mut self,
        model: &str,
        wanted: &GenerateRequest,
        within: Option<Duration>,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        // Not counted before `begin` succeeds: a message that is refused here must not use up an id.
        let id = self.last_id + 1;
        let mut out = BytesMut::new();
        send::generate(&mut out, id, model, wanted, self.features)?;
        if self.options.text && self.features.has(Feature::Text) {
            member(&mut out, "text", &true);
        }
        if let Some(within) = within.filter(|_| self.features.has(Feature::Cancel)) {
            let ms = within.as_millis().clamp(1, DEADLINE_MS_MAX);
            member(&mut out, "deadline_ms", &ms);
        }
        out.put_u8(b'}');
        let kind = CallKind::Generate(wanted.top_logprobs());
        // A controller may fork, and each sample has as many tokens of its own.
        let samples = if wanted.controller.is_some() {
            SAMPLES_MAX
        } else {
            1
        };
        let items = u64::from(wanted.max_tokens()).saturating_mul(samples);
        let begun = self.begin(out, model, kind, items, now)?;
        Ok(begun)
    }

    /// Starts a SCORE stream.
    ///
    /// # Errors
    /// `message_too_large`; `unsupported_operation` for LoRA adapters without [`Feature::Lora`]: the peer would score without
    /// them.
    pub fn score(
        &mut self,
        model: &str,
        wanted: &Score,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        let mut out = BytesMut::from(&b"SCORE {\"model\":"[..]);
        write::json(&mut out, model);
        out.put_slice(b",\"prompt\":");
        write::json(&mut out, &wanted.prompt);
        out.put_slice(b",\"scored\":");
        write::json(&mut out, &wanted.scored);
        if let Some(uses) = &wanted.lora {
            if !self.features.has(Feature::Lora) {
                return Err(send::unsupported("lora"));
            }
            member(&mut out, "lora", &lora_to_json(uses));
        }
        member(&mut out, "stream_id", &(self.last_id + 1));
        out.put_u8(b'}');
        self.begin(out, model, CallKind::Score, wanted.scored.len() as u64, now)
    }

    /// Requests the metadata of a model.
    ///
    /// # Errors
    /// `message_too_large`.
    pub fn model_info(
        &mut self,
        model: &str,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        self.introduce(model, None, now)
    }

    /// Requests the metadata of a model, and negotiates features of version 2. Ends like [`Self::model_info`]; the
    /// result applies to calls started after that, see [`Self::features`].
    ///
    /// # Errors
    /// `message_too_large`.
    pub fn negotiate(
        &mut self,
        model: &str,
        features: Features,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        self.introduce(model, Some(features), now)
    }

    fn introduce(
        &mut self,
        model: &str,
        features: Option<Features>,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        let mut out = BytesMut::from(&b"MODEL_INFO {\"model\":"[..]);
        write::json(&mut out, model);
        member(&mut out, "stream_id", &(self.last_id + 1));
        // `data` repeats the model, as LMQL's own client sends it (LM-703).
        out.put_slice(b",\"data\":{\"model\":");
        write::json(&mut out, model);
        if let Some(features) = features {
            out.put_slice(b",\"lmtp\":{\"version\":2,\"features\":");
            write::json(&mut out, &features.names().collect::<Vec<_>>());
            out.put_u8(b'}');
        }
        out.put_slice(b"}}");
        self.begin(out, model, CallKind::ModelInfo, 0, now)
    }

    /// The negotiated features; empty for a base server.
    #[must_use]
    pub const fn features(&self) -> Features {
        self.features
    }

    /// Number of streams of all clients of the peer, as it last reported (LM-902).
    #[must_use]
    pub const fn load(&self) -> Option<u64> {
        self.load
    }

    /// Whether the peer has announced that it drains (LM-921): it accepts nothing new.
    #[must_use]
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Handles one frame or line of the peer.
    pub fn handle(&mut self, text: &str, now: Time) {
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let line = rest.lines().next().unwrap_or(rest);
            // No message at all, and no harm to any stream (LM-705).
            if !line.contains(' ') {
                rest = rest[line.len()..].trim_start();
                continue;
            }
            match read::command(rest) {
                Ok((command, behind)) => {
                    rest = behind;
                    self.message(command.word, command.payload, now);
                }
                Err(_) => {
                    self.dropped += 1;
                    if rest.starts_with("TOKEN ") {
                        // It is not known whose items they were: failing all streams is better than leaving one without
                        // its end (LM-706).
                        self.fail_all(
                            LmtpReason::UpstreamError,
                            "the upstream sent items that cannot be read",
                            |open| !open.kind.is_request(),
                        );
                    }
                    // Where the broken message ends is not known, so the rest of the text is dropped.
                    return;
                }
            }
        }
    }

    /// The reader of a call was dropped: no event follows. The call counts as [`Self::outstanding`] until its end. The
    /// returned message, if there is one, asks the peer to stop it (LM-702); otherwise the peer continues.
    pub fn abandon(&mut self, call: ClientCallId) -> Option<Bytes> {
        if self.abandon_buffer(call) {
            return None;
        }
        let open = self.open.get_mut(&call.0)?;
        // A base peer knows no CANCEL: it generates to the end, and its items are dropped here (LM-702).
        if std::mem::replace(&mut open.abandoned, true)
            || open.kind.is_request()
            || !self.features.has(Feature::Cancel)
        {
            return None;
        }
        self.last_id += 1;
        let mut out = BytesMut::from(&b"CANCEL {\"model\":"[..]);
        write::json(&mut out, &open.model);
        member(&mut out, "stream_id", &self.last_id);
        member(&mut out, "streams", &[call.0]);
        out.put_u8(b'}');
        // Its answer is not waited for, because the stream's own end shows whether the peer works on it.
        Some(out.freeze())
    }

    /// The connection is lost: every call fails (LM-709). See [`Self::part`].
    pub fn lost(&mut self) {
        self.detached = None;
        self.fail_all(LmtpReason::ConnectionLost, remote_buffers::LOST, |_| true);
    }

    /// Returns the next event.
    pub fn poll(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    /// When to call [`Self::tick`], if nothing else happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        self.open.values().filter_map(|open| open.due).min()
    }

    /// Handles timeouts: calls that waited too long fail. The error names the model, because a reference server that
    /// cannot load a model sends nothing (LM-710).
    pub fn tick(&mut self, now: Time) {
        let late: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, open)| open.due.is_some_and(|due| due <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            let Some(open) = self.open.get(&id) else {
                continue;
            };
            let message = format!(
                "the upstream's model '{}' did not answer in time",
                open.model
            );
            self.fail(id, LmtpError::new(LmtpReason::Timeout, message));
        }
    }

    /// Reading was paused on our side for a while: restarts the timeouts of all calls.
    pub fn resume(&mut self, now: Time) {
        for open in self.open.values_mut() {
            let timeout = match open.kind {
                CallKind::ModelInfo | CallKind::Resume => self.options.request_timeout,
                CallKind::Generate(_) | CallKind::Score if open.begun => self.options.item_timeout,
                CallKind::Generate(_) | CallKind::Score => self.options.first_item_timeout,
            };
            // Calls without a timeout get none: streams that wait for RESUME.
            open.due = open.due.and(timeout).map(|timeout| now + timeout);
        }
    }

    /// Number of calls whose end was not received yet, abandoned ones included.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.open.len()
    }

    /// Number of items and messages that were dropped: for unknown or ended streams, or unreadable.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether the peer sends values that are no probabilities: one was above 1 by more than rounding explains
    /// (LM-711).
    #[must_use]
    pub const fn raw_logprobs(&self) -> bool {
        self.raw_logprobs
    }

    fn begin(
        &mut self,
        out: BytesMut,
        model: &str,
        kind: CallKind,
        left: u64,
        now: Time,
    ) -> Result<(ClientCallId, Bytes), LmtpError> {
        if out.len() > self.options.max_message_out {
            let message = format!(
                "the message has {} bytes; the upstream accepts at most {}",
                out.len(),
                self.options.max_message_out
            );
            return Err(LmtpError::new(LmtpReason::MessageTooLarge, message));
        }
        self.last_id += 1;
        let timeout = match kind {
            CallKind::ModelInfo | CallKind::Resume => self.options.request_timeout,
            CallKind::Generate(_) | CallKind::Score => self.options.first_item_timeout,
        };
        // A peer numbers the items of a stream by what was negotiated when the stream began (LM-903).
        let is_numbered = !kind.is_request() && self.features.has(Feature::Resume);
        let open = OpenCall {
            kind,
            model: model.to_owned(),
            left,
            due: timeout.map(|timeout| now + timeout),
            abandoned: false,
            begun: false,
            next: is_numbered.then_some(0),
            detached: false,
        };
        self.open.insert(self.last_id, open);
        Ok((ClientCallId(self.last_id), out.freeze()))
    }

    fn message(&mut self, word: &str, payload: RawValue<'_>, now: Time) {
        match (word, payload.elements()) {
            // Other types are of later versions, and are ignored (LM-705).
            ("TOKEN" | "MSG", Some(items)) => items.for_each(|item| self.object(word, item, now)),
            // The seed sends a bare object.
            ("TOKEN" | "MSG", None) => self.object(word, payload, now),
            ("STATUS", Some(items)) if self.features.has(Feature::Status) => {
                items
                    .filter_map(ItemMembers::of)
                    .for_each(|update| self.receive_update(&update, now));
            }
            _ => self.dropped += 1,
        }
    }

    fn object(&mut self, word: &str, item: RawValue<'_>, now: Time) {
        let Some(members) = ItemMembers::of(item) else {
            self.dropped += 1;
            return;
        };
        if word == "MSG" {
            self.notice(&members, now);
        } else {
            self.item(&members, now);
        }
    }

    /// A status of a stream shows that the stream is alive: the timeout for its first item restarts (LM-922).
    fn receive_update(&mut self, update: &ItemMembers<'_>, now: Time) {
        match update.id {
            None => {
                self.draining |= matches!(update.event.as_deref(), Some("draining" | "shutdown"))
            }
            Some(id) => {
                let timeout = self.options.first_item_timeout;
                if let Some(open) = self.open.get_mut(&id)
                    && !open.begun
                    && !open.kind.is_request()
                {
                    open.due = timeout.map(|timeout| now + timeout);
                }
            }
        }
    }

    /// A MSG answers a pending request first; an error ends a live stream, except the error that its id is in use
    /// (LM-708, D-39).
    fn notice(&mut self, members: &ItemMembers<'_>, now: Time) {
        let Some((id, open)) = members.id.and_then(|id| Some((id, self.open.get(&id)?))) else {
            // The answer to CANCEL has nothing to read: each cancelled stream gets its own end item.
            self.dropped += u64::from(!members.cancelled);
            return;
        };
        let is_request = open.kind.is_request();
        let cause = members.error();
        match (is_request, cause, members.model_info) {
            (true, Some(cause), _) => self.fail(id, cause),
            (true, None, None) if members.resumed && matches!(open.kind, CallKind::Resume) => {
                self.open.remove(&id);
                self.came_back(members, now);
            }
            (true, None, Some(facts)) if !matches!(open.kind, CallKind::Resume) => {
                // An old server ignores the request and answers without it: the client stays with the base protocol
                // (LM-901).
                if members.lmtp.is_some() {
                    self.features = members.features();
                    self.session = members.session();
                    self.load = members.load();
                }
                let facts = facts.as_str().to_owned();
                self.end(id, |call| ClientEvent::ModelInfo(call, facts));
            }
            (false, Some(cause), _) if cause.reason != LmtpReason::DuplicateStream => {
                self.fail(id, cause);
            }
            _ => self.dropped += 1,
        }
    }

    fn item(&mut self, members: &ItemMembers<'_>, now: Time) {
        let open = members
            .id
            .and_then(|id| Some((id, self.open.get_mut(&id)?)));
        let Some((id, open)) = open.filter(|(_, open)| !open.kind.is_request()) else {
            self.dropped += 1;
            return;
        };
        if let Some(cause) = members.error() {
            return self.fail(id, cause);
        }
        if let (Some(next), Some(seq)) = (open.next, members.seq) {
            // The reader has it already.
            if seq < next {
                self.dropped += 1;
                return;
            }
            // A missing item cannot be requested again, and the reader must not take what follows for the whole output.
            if seq > next {
                let why = "the upstream has left out items of the stream";
                return self.fail(id, LmtpError::new(LmtpReason::ConnectionLost, why));
            }
            open.next = Some(next + 1);
        }
        let mut item = members.item();
        // No progress: such an item must not restart the timeout below.
        if !item.is_progress() {
            self.dropped += 1;
            return;
        }
        self.raw_logprobs |= item.logprob.is_some_and(|logprob| logprob > RAW_ABOVE);
        open.due = self.options.item_timeout.map(|timeout| now + timeout);
        open.begun = true;
        open.left = open.left.saturating_sub(u64::from(item.token.is_some()));
        let unreasoned = match open.kind {
            CallKind::Generate(top) => {
                item.keep_top(top);
                StreamFinish::Length
            }
            CallKind::Score | CallKind::ModelInfo | CallKind::Resume => {
                item.top.clear();
                StreamFinish::Stop
            }
        };
        // The reference server goes on to the maximum of its batch, and gives no reason here (LM-707).
        if open.left == 0 {
            item.finish.get_or_insert(unreasoned);
        }
        if item.finish.is_some() {
            self.end(id, |call| ClientEvent::Item(call, item));
        } else if !open.abandoned {
            self.events
                .push_back(ClientEvent::Item(ClientCallId(id), item));
        }
    }

    fn fail(&mut self, id: u64, error: LmtpError) {
        // A RESUME has no reader of its own: its failure is that of the streams that wait for it.
        if matches!(
            self.open.get(&id),
            Some(OpenCall {
                kind: CallKind::Resume,
                ..
            })
        ) {
            self.open.remove(&id);
            return self.stay_detached();
        }
        self.end(id, |call| ClientEvent::Failed(call, error));
    }

    fn end(&mut self, id: u64, event: impl FnOnce(ClientCallId) -> ClientEvent) {
        if self.open.remove(&id).is_some_and(|open| !open.abandoned) {
            self.events.push_back(event(ClientCallId(id)));
        }
    }

    fn fail_all(
        &mut self,
        reason: LmtpReason,
        message: &'static str,
        which: impl Fn(&OpenCall) -> bool,
    ) {
        let open = self.open.iter().filter(|(_, open)| which(open));
        let ids: Vec<u64> = open.map(|(id, _)| *id).collect();
        for id in ids {
            self.fail(id, LmtpError::new(reason, message));
        }
    }
}

/// Number of samples of a stream with a controller whose items are accepted.
const SAMPLES_MAX: u64 = 64;
/// The longest permitted deadline (LM-962).
const DEADLINE_MS_MAX: u128 = 86_400_000;
/// Tolerance for log-probabilities above 0: a reference backend adds up to 0.01 to the sampled token (LM-711).
const RAW_ABOVE: f32 = 0.05;

#[cfg(test)]
mod tests;
