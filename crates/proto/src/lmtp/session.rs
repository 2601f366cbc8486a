//! The server side of an LMTP connection: its streams, as a pure state machine for every transport (LM-101).
//!
//! Text goes in, messages come out; the current time is an argument.
//!
//! ```text
//!   handle(text)  ──►┌──────────────────┐──► next_message()   when the transport can take one
//!   step(pieces)  ──►│ streams, by id   │──► poll() ─► Output after whatever was called
//!   tick, close … ──►└──────────────────┘──► wake_at()        call tick then
//!
//!   open ──end_of_input──► half-closed ──no stream left, all taken──► closed
//!     └────── lose ──► detached ──resumed, or resume_grace──────► closed
//!     └────── close ──► last words ──all taken, or two seconds──► closed
//!     └────── hang_up, stall ─────────────────────────────────► closed
//! ```
//!
//! After every call the shell drains [`LmtpSession::poll`] and asks [`LmtpSession::wake_at`].

mod buffers;
mod cancel;
mod commands;
mod extended;
mod loading;
mod masks;
mod negotiation;
mod outbox;
mod replays;
mod request_reader;
mod resume;
mod status;
mod steered;
mod streams;
mod text;

use bytes::Bytes;
use bytestring::ByteString;

use super::json::{self, BadJson};
use super::port::{
    Config, LmtpClose, LmtpOutput, LmtpStats, MessageFraming, StreamKey, StreamPiece, StreamUpdate,
    Unreadable,
};
use super::read::{self, PayloadMembers};
use super::{Feature, LmtpError, LmtpReason, ModelLookup, StreamId};
use crate::time::Time;
use buffers::Buffers;
use loading::Loading;
use masks::Masks;
use negotiation::Negotiation;
use outbox::Outbox;
use replays::ReplayBuffers;
use request_reader::{StreamRequest, model};
use streams::Streams;

#[derive(Clone, Copy, Debug, PartialEq)]
enum LmtpPhase {
    Open,
    /// The client sends nothing more; its streams continue (LM-110).
    HalfClosed,
    /// All streams were sent their end; the transport has until this time to take it (LM-505).
    LastWords(LmtpClose, Time),
    /// The connection is lost, and the client may resume until this time (LM-964).
    Detached(Time),
    Closed,
}

/// The session state machine; see the module documentation.
#[derive(Debug)]
pub struct LmtpSession {
    config: Config,
    phase: LmtpPhase,
    /// The base protocol: streams and their items.
    streams: Streams,
    negotiation: Negotiation,
    /// Requests that wait for their model to load.
    loading: Loading,
    buffers: Buffers,
    masks: Masks,
    outbox: Outbox,
    /// Number of consecutive malformed messages.
    malformed: u32,
    /// Whether new streams are refused (LM-509).
    draining: bool,
    /// Counters that no other field has; [`Self::stats`] adds the rest.
    stats: LmtpStats,
}

impl LmtpSession {
    /// Creates a session. Allocates almost nothing until something is sent.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            phase: LmtpPhase::Open,
            streams: Streams::default(),
            negotiation: Negotiation::new(&config),
            loading: Loading::default(),
            buffers: Buffers::default(),
            masks: Masks::default(),
            outbox: Outbox::new(&config),
            malformed: 0,
            draining: false,
            stats: LmtpStats::default(),
            config,
        }
    }

    /// Handles one frame or line, message by message. Returns the part that there is no room to answer: pass it in
    /// again, before any other input, when [`Self::wants_input`] returns `true`.
    pub fn handle(
        &mut self,
        text: ByteString,
        models: &dyn ModelLookup,
        now: Time,
    ) -> Option<ByteString> {
        // An empty text is one malformed message, not zero messages.
        let mut rest = &*text;
        loop {
            // A message may have closed the session; the rest of its frame is not handled then.
            if self.phase != LmtpPhase::Open {
                return None;
            }
            // Asked before each message: a frame may hold thousands of them, and each answer takes room.
            if !self.wants_input() {
                return Some(text.slice_ref(rest));
            }
            match read::command(rest) {
                Ok((command, behind)) => {
                    rest = behind;
                    match PayloadMembers::of(command.payload, self.negotiation.features) {
                        Some(members) => {
                            // Any object ends the row, also one of an unknown type (LM-202): the framing is right
                            // again.
                            self.malformed = 0;
                            self.command(command.word, &members, models, now);
                        }
                        None => self.refuse_malformed("the payload is not an object", now),
                    }
                }
                // The rest of the same text is discarded (LM-204).
                Err(BadJson(what)) => {
                    rest = "";
                    self.refuse_malformed(what, now);
                }
            }
            self.park(now);
            if rest.is_empty() {
                return None;
            }
        }
    }

    /// Handles input that is not valid text, while [`Self::wants_input`] is `true`. A bad line is answered and reading
    /// continues; a bad frame closes the connection (LM-106, LM-112, LM-1201).
    pub fn handle_unreadable(&mut self, what: Unreadable, now: Time) {
        if self.phase != LmtpPhase::Open {
            return;
        }
        match (self.config.carrier, what) {
            (MessageFraming::Frames, Unreadable::TooLarge) => self.close(LmtpClose::TOO_LARGE, now),
            (MessageFraming::Frames, Unreadable::BadText) => self.close(LmtpClose::BAD_TEXT, now),
            (MessageFraming::Lines, Unreadable::TooLarge) => {
                let max = self.config.limits.max_message_in;
                let message = format!("a line has more than {max} bytes");
                self.outbox
                    .notice(None, &LmtpError::new(LmtpReason::MessageTooLarge, message));
            }
            (MessageFraming::Lines, Unreadable::BadText) => self.refuse_malformed("not UTF-8", now),
        }
        self.park(now);
    }

    /// Handles the results of one step, for any of the streams; they are sent in order of admission (LM-601). Results
    /// for an ended stream are dropped.
    pub fn step(&mut self, mut pieces: Vec<(StreamKey, StreamPiece)>, now: Time) {
        // Keys are in order of admission. The sort is stable: several pieces of a stream keep their order.
        pieces.sort_by_key(|(stream, _)| *stream);
        // Before the items: a status after an item would split the message that the items of a step share (LM-601), and
        // none may follow the end of its stream (LM-922).
        let (statuses, pieces): (Vec<_>, Vec<_>) = pieces
            .into_iter()
            .partition(|(_, piece)| matches!(piece, StreamPiece::Status(_)));
        for (stream, piece) in statuses.into_iter().chain(pieces) {
            match piece {
                StreamPiece::Status(status) => self.status(stream, &status, now),
                StreamPiece::Branch(branch, event) => {
                    let out = &mut self.outbox;
                    self.streams.branch_event(stream, branch, event, out, now);
                }
                StreamPiece::Item(item) => self.streams.item(stream, item, &mut self.outbox, now),
                StreamPiece::Failed(error) => {
                    self.streams.fail(stream, &error, &mut self.outbox, now);
                }
            }
        }
        self.park(now);
        self.settle();
    }

    /// The work of a stream is over. If its end was not reported, the stream fails rather than hang (LM-501).
    pub fn finished(&mut self, stream: StreamKey, now: Time) {
        let error = LmtpError::new(LmtpReason::EngineError, "the stream stopped without an end");
        self.streams.fail(stream, &error, &mut self.outbox, now);
        self.park(now);
        self.settle();
    }

    /// The client sends nothing more, and all its input was handled; running streams finish, and then the session
    /// closes (LM-110, LM-113).
    pub fn end_of_input(&mut self) {
        if self.phase == LmtpPhase::Open {
            self.phase = LmtpPhase::HalfClosed;
            self.settle();
        }
    }

    /// The connection is lost: all work stops (LM-506). Only [`LmtpOutput::Cancel`] follows.
    pub fn hang_up(&mut self) {
        self.phase = LmtpPhase::Closed;
        // The shell may still answer a question that it was asked; the answer must find no request then.
        self.negotiation.withdraw();
        self.outbox.clear();
        self.cancel_all();
    }

    /// Refuses new streams from now on (LM-509).
    pub fn drain(&mut self) {
        if !std::mem::replace(&mut self.draining, true) && self.phase == LmtpPhase::Open {
            self.announce(&StreamUpdate::Draining { deadline: None });
        }
    }

    /// Ends every open stream with an error item, and then closes the connection (LM-505).
    pub fn close(&mut self, close: LmtpClose, now: Time) {
        if self.is_detached() {
            // Without a connection nobody can receive the error items of LM-505.
            return self.hang_up();
        }
        if !matches!(self.phase, LmtpPhase::Open | LmtpPhase::HalfClosed) {
            return;
        }
        if close == LmtpClose::SHUTDOWN {
            self.announce(&StreamUpdate::Shutdown);
        }
        let error = LmtpError::new(close.reason, close.message);
        let out = &mut self.outbox;
        self.streams.fail_all(&error, out, now);
        if let Some(id) = self.negotiation.withdraw() {
            out.request_failed(&id, &error);
        }
        self.loading.fail_all(&error, out);
        // Streams that have ended before may still have items, and their end, behind a closed window; LM-505 owes them
        // their end as well.
        self.streams.replays.open_windows();
        self.phase = LmtpPhase::LastWords(close, now + self.config.limits.last_words);
        self.streams.flow(&mut self.outbox, now);
        self.settle();
    }

    /// Returns the next output for the shell to act on.
    pub fn poll(&mut self) -> Option<LmtpOutput> {
        self.outbox.events.pop_front()
    }

    /// Returns the next message for the client, with the line end on a line transport. Call it when the transport can
    /// accept one: until then the items of further steps join the message, within
    /// [`super::ConnectionLimits::max_frame_out`] (LM-607).
    pub fn next_message(&mut self, now: Time) -> Option<Bytes> {
        let message = self.outbox.take(now)?;
        self.streams.flow(&mut self.outbox, now);
        self.settle();
        Some(message)
    }

    /// Whether [`Self::next_message`] returns a message.
    #[must_use]
    pub fn has_message(&self) -> bool {
        !self.outbox.messages.is_empty()
    }

    /// Whether [`Self::handle`] may be called. While this is `false`, read nothing, but watch the connection for a
    /// close: answers wait for room as items do.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.phase == LmtpPhase::Open && !self.outbox.is_parked() && !self.negotiation.is_waiting()
    }

    /// Whether the session is over.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.phase == LmtpPhase::Closed
    }

    /// When to call [`Self::tick`], if nothing else happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        match self.phase {
            LmtpPhase::Open | LmtpPhase::HalfClosed => {
                let limits = &self.config.limits;
                let replays = &self.streams.replays;
                let all = [
                    self.outbox.stalls_at(),
                    self.streams.due(),
                    replays.stalled(limits.stall_timeout).map(|(at, _)| at),
                    replays.expires_at(),
                    self.loading.due(limits),
                ];
                all.into_iter().flatten().min()
            }
            // Deadlines hold for streams whose client is away; windows and stalls do not.
            LmtpPhase::Detached(until) => self.streams.due().into_iter().chain([until]).min(),
            // All streams have ended, so only the transport is waited for.
            LmtpPhase::LastWords(_, until) => Some(until),
            LmtpPhase::Closed => None,
        }
    }

    /// Handles timers that are due at `now`.
    pub fn tick(&mut self, now: Time) {
        // The shell's timer may fire early, or after its cause is gone.
        if self.wake_at().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            LmtpPhase::LastWords(close, _) => self.end(LmtpOutput::Close(close)),
            // Before `until` it is a stream's deadline that is due; the last arm handles it as on a live connection.
            LmtpPhase::Detached(until) if until <= now => self.hang_up(),
            _ if self.outbox.stalls_at().is_some_and(|at| at <= now) => {
                // A client that does not read cannot be notified (LM-607).
                self.cancel_all();
                self.end(LmtpOutput::Reset);
            }
            _ => {
                let out = &mut self.outbox;
                // Deadlines before windows: if both have passed, the stream ends with the limit that its client has
                // set.
                self.streams.expire(out, now);
                self.loading.expire(out, now);
                self.streams.expire_windows(out, now);
                let grace = self.config.limits.resume_grace;
                self.streams.replays.expire(now, grace);
                self.park(now);
                self.settle();
            }
        }
    }

    /// The id of a live stream.
    #[must_use]
    pub fn id(&self, stream: StreamKey) -> Option<&StreamId> {
        self.streams.id(stream)
    }

    /// Number of live streams.
    #[must_use]
    pub fn live(&self) -> usize {
        self.streams.len()
    }

    /// Bytes that wait to be taken.
    #[must_use]
    pub const fn unsent_bytes(&self) -> usize {
        self.outbox.messages.bytes
    }

    /// The counters of this session.
    #[must_use]
    pub const fn stats(&self) -> LmtpStats {
        LmtpStats {
            streams: self.streams.opened,
            items_out: self.streams.items_out,
            messages_out: self.outbox.taken,
            refused: self.stats.refused + self.loading.refused,
            ..self.stats
        }
    }

    /// Number of streams that wait for their model.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.loading.len()
    }

    /// A model was loaded, or failed to load: the requests that wait for it start, or fail with the reason.
    pub fn models_changed(&mut self, models: &dyn ModelLookup, now: Time) {
        for request in self.loading.take() {
            // It was parsed successfully when it was received.
            let value = json::value(&request.payload).ok();
            let members = value.and_then(|(value, _)| PayloadMembers::of(value, request.features));
            let Some(members) = members else {
                continue;
            };
            // Still loading: it keeps its place and its deadlines, which a new request would not.
            let found = model(&members, models, &self.config);
            if found.is_err_and(|error| error.reason == LmtpReason::ModelLoading) {
                self.loading.push(request);
                continue;
            }
            let opened = StreamRequest {
                word: &request.word,
                id: &request.id,
                members: &members,
                features: request.features,
                received: request.received,
            };
            self.open(opened, models, now);
            if request.notified {
                self.streams.has_waited(&request.id);
            }
        }
        self.park(now);
        self.settle();
    }

    /// Handles a new status of a stream. It is sent if the client wants it, not too often, and never when items wait to
    /// be sent.
    pub fn status(&mut self, stream: StreamKey, status: &StreamUpdate, now: Time) {
        // A status describes the moment; a client that reconnects later has no use for it.
        if !self.is_detached() {
            self.streams.status(stream, status, &mut self.outbox, now);
        }
    }

    /// Answers [`LmtpOutput::Name`] with the name for resuming this session; `None` if it cannot be resumed.
    pub fn named(&mut self, name: Option<ByteString>) {
        self.negotiation.named(name, &mut self.outbox);
    }

    /// Whether the end of a stream with this id was not sent yet.
    fn is_in_use(&self, id: &StreamId) -> bool {
        self.streams.is_in_use(id) || self.loading.has(id)
    }

    /// Sends a new status of the connection. Such a status is never dropped.
    fn announce(&mut self, status: &StreamUpdate) {
        if self.negotiation.features.has(Feature::Status) {
            self.outbox.status(None, status);
        }
    }

    fn refuse_malformed(&mut self, what: &str, now: Time) {
        self.stats.malformed += 1;
        self.malformed += 1;
        let message = format!("malformed message: {what}");
        self.outbox
            .notice(None, &LmtpError::new(LmtpReason::Malformed, message));
        // After the answer, which names the cause; the error items that a close sends do not (LM-201, LM-202).
        if self.config.close_on_malformed {
            self.close(LmtpClose::AS_REFERENCE, now);
        } else if self.malformed >= self.config.limits.max_malformed {
            self.close(LmtpClose::MALFORMED, now);
        }
    }

    /// What follows every input: sends items that wait, and parks all streams if too many bytes are unsent then.
    fn park(&mut self, now: Time) {
        // Before the next message is handled: it may name the buffer of a stream that has just ended.
        self.buffers
            .store_all(&mut self.streams.kept, &self.config.limits, now);
        self.streams.flow(&mut self.outbox, now);
        self.outbox.park(now);
    }

    /// Closes the session once nothing is left to send.
    fn settle(&mut self) {
        if !self.outbox.messages.is_empty() {
            return;
        }
        match self.phase {
            LmtpPhase::LastWords(close, _) => self.end(LmtpOutput::Close(close)),
            LmtpPhase::HalfClosed if self.streams.is_finished() && self.loading.len() == 0 => {
                self.end(LmtpOutput::Close(LmtpClose::FINISHED));
            }
            _ => {}
        }
    }

    fn end(&mut self, how: LmtpOutput) {
        self.phase = LmtpPhase::Closed;
        // Outputs stay, so that cancelled work is stopped before the connection is closed.
        self.outbox.clear();
        self.streams.replays = ReplayBuffers::default();
        self.outbox.events.push_back(how);
    }

    fn cancel_all(&mut self) {
        // Requests that wait for a model have no work to cancel.
        self.loading.take();
        self.streams.cancel_all(&mut self.outbox);
    }
}
