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
mod extended;
mod loading;
mod masks;
mod negotiation;
mod opening;
mod replays;
mod resume;
mod retry;
mod samples;
mod status;
mod text;
mod window;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;

use super::json::BadJson;
use super::outbound::LmtpOutbound;
use super::port::{
    Config, LmtpClose, LmtpOutput, LmtpStats, MessageFraming, StreamKey, StreamPiece, StreamUpdate,
    Unreadable,
};
use super::read::{self, PayloadMembers};
use super::{
    Features, LmtpError, LmtpReason, ModelLookup, StreamFinish, StreamId, TokenItem, write,
};
use crate::time::Time;
use buffers::Buffers;
use extended::{ExtendedStream, SampleKey, number};
use loading::Loading;
use masks::Masks;
use replays::ReplayBuffers;
use resume::ResumeQuestion;

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

/// A live stream, or one sample of it.
#[derive(Debug)]
struct LmtpStream {
    id: StreamId,
    /// Number of items that may still follow; never 0.
    left: u64,
    /// Number of most likely tokens that an item shows; `None` omits the member, as for SCORE.
    top: Option<u32>,
    /// Whether it is a SCORE.
    scores: bool,
    /// Key of its version 2 state in `extended`; `None` for the base protocol.
    part: Option<SampleKey>,
}

/// The session state machine; see the module documentation.
#[derive(Debug)]
pub struct LmtpSession {
    config: Config,
    phase: LmtpPhase,
    streams: BTreeMap<StreamKey, LmtpStream>,
    /// The first sample of each stream, by id.
    ids: BTreeMap<StreamId, StreamKey>,
    /// The negotiated features (LM-903).
    features: Features,
    /// Version 2 state of streams, by their first samples.
    extended: BTreeMap<StreamKey, ExtendedStream>,
    /// Deadlines by which streams must have started or ended.
    due: BTreeSet<(Time, StreamKey)>,
    /// Requests that wait for their model to load.
    loading: Loading,
    /// Items that may have to be sent again, and items that wait to be sent.
    replays: ReplayBuffers,
    buffers: Buffers,
    masks: Masks,
    /// The name with which its client can resume the session.
    name: Option<ByteString>,
    /// A question that the shell has to answer before further input is handled.
    question: Option<ResumeQuestion>,
    /// Number of streams admitted so far.
    admitted: u64,
    outbound: LmtpOutbound,
    events: VecDeque<LmtpOutput>,
    /// Since when too many bytes have been unsent without a message being taken (LM-607).
    parked: Option<Time>,
    /// Number of consecutive malformed messages.
    malformed: u32,
    /// Whether new streams are refused (LM-509).
    draining: bool,
    stats: LmtpStats,
}

impl LmtpSession {
    /// Creates a session. Allocates almost nothing until something is sent.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let features = if config.negotiated {
            config.features
        } else {
            Features::NONE
        };
        let outbound = LmtpOutbound::new(config.bare);
        Self {
            config,
            phase: LmtpPhase::Open,
            streams: BTreeMap::new(),
            ids: BTreeMap::new(),
            features,
            extended: BTreeMap::new(),
            due: BTreeSet::new(),
            loading: Loading::default(),
            replays: ReplayBuffers::default(),
            name: None,
            question: None,
            buffers: Buffers::default(),
            masks: Masks::default(),
            admitted: 0,
            outbound,
            events: VecDeque::new(),
            parked: None,
            malformed: 0,
            draining: false,
            stats: LmtpStats::default(),
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
            if self.phase != LmtpPhase::Open {
                return None;
            }
            if !self.wants_input() {
                return Some(text.slice_ref(rest));
            }
            match read::command(rest) {
                Ok((command, behind)) => {
                    rest = behind;
                    match PayloadMembers::of(command.payload, self.features) {
                        Some(members) => {
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
                self.notice(None, &LmtpError::new(LmtpReason::MessageTooLarge, message));
            }
            (MessageFraming::Lines, Unreadable::BadText) => self.refuse_malformed("not UTF-8", now),
        }
        self.park(now);
    }

    /// Handles the results of one step, for any of the streams; they are sent in order of admission (LM-601). Results
    /// for an ended stream are dropped.
    pub fn step(&mut self, mut pieces: Vec<(StreamKey, StreamPiece)>, now: Time) {
        // A stable sort: several pieces of a stream keep their order.
        pieces.sort_by_key(|(stream, _)| *stream);
        for (stream, piece) in pieces {
            match piece {
                StreamPiece::Item(item) => self.item(stream, item, now),
                StreamPiece::Failed(error) => self.fail(stream, &error, now),
            }
        }
        self.park(now);
        self.settle();
    }

    /// The work of a stream is over. If its end was not reported, the stream fails rather than hang (LM-501).
    pub fn finished(&mut self, stream: StreamKey, now: Time) {
        let error = LmtpError::new(LmtpReason::EngineError, "the work ended without an end");
        self.fail(stream, &error, now);
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
        self.question = None;
        self.outbound = LmtpOutbound::default();
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
            return self.hang_up();
        }
        if !matches!(self.phase, LmtpPhase::Open | LmtpPhase::HalfClosed) {
            return;
        }
        if close == LmtpClose::SHUTDOWN {
            self.announce(&StreamUpdate::Shutdown);
        }
        let error = LmtpError::new(close.reason, close.message);
        while let Some((&stream, _)) = self.streams.first_key_value() {
            self.events.push_back(LmtpOutput::Cancel(stream));
            self.fail(stream, &error, now);
        }
        if let Some(question) = self.question.take() {
            self.request_failed(question.id(), &error);
        }
        self.fail_waiting(&error);
        self.replays.open_windows();
        self.phase = LmtpPhase::LastWords(close, now + self.config.limits.last_words);
        self.flow(now);
        self.settle();
    }

    /// Returns the next output for the shell to act on.
    pub fn poll(&mut self) -> Option<LmtpOutput> {
        self.events.pop_front()
    }

    /// Returns the next message for the client, with the line end on a line transport. Call it when the transport can
    /// accept one: until then the items of further steps join the message, within
    /// [`super::ConnectionLimits::max_frame_out`] (LM-607).
    pub fn next_message(&mut self, now: Time) -> Option<Bytes> {
        let message = self.outbound.take(self.config.carrier)?;
        self.stats.messages_out += 1;
        if self.parked.is_some() {
            self.parked = Some(now);
            if self.outbound.bytes < self.config.limits.outbox_low_bytes {
                self.parked = None;
                self.events.push_back(LmtpOutput::Unpark);
            }
        }
        self.flow(now);
        self.settle();
        Some(message)
    }

    /// Whether [`Self::next_message`] returns a message.
    #[must_use]
    pub fn has_message(&self) -> bool {
        !self.outbound.is_empty()
    }

    /// Whether [`Self::handle`] may be called. While this is `false`, read nothing, but watch the connection for a
    /// close: answers wait for room as items do.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.phase == LmtpPhase::Open && self.parked.is_none() && self.question.is_none()
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
                let due = self.due.first().map(|(due, _)| *due);
                let timeout = self.config.limits.stall_timeout;
                let stalled = self.replays.stalled(timeout).map(|(at, _)| at);
                let all = self.stalls_at().into_iter().chain(due).chain(stalled);
                let waiting = self
                    .replays
                    .expires_at()
                    .into_iter()
                    .chain(self.loading_due());
                all.chain(waiting).min()
            }
            LmtpPhase::Detached(until) => self
                .due
                .first()
                .map(|(due, _)| *due)
                .into_iter()
                .chain([until])
                .min(),
            LmtpPhase::LastWords(_, until) => Some(until),
            LmtpPhase::Closed => None,
        }
    }

    /// Handles timers that are due at `now`.
    pub fn tick(&mut self, now: Time) {
        if self.wake_at().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            LmtpPhase::LastWords(close, _) => self.end(LmtpOutput::Close(close)),
            LmtpPhase::Detached(until) if until <= now => self.hang_up(),
            _ if self.stalls_at().is_some_and(|at| at <= now) => {
                // A client that does not read cannot be notified (LM-607).
                self.cancel_all();
                self.end(LmtpOutput::Reset);
            }
            _ => {
                self.expire(now);
                self.expire_loading(now);
                self.expire_windows(now);
                self.replays.expire(now, self.config.limits.resume_grace);
                self.park(now);
                self.settle();
            }
        }
    }

    fn stalls_at(&self) -> Option<Time> {
        let timeout = self.config.limits.stall_timeout;
        self.parked.map(|since| since + timeout)
    }

    /// The id of a live stream.
    #[must_use]
    pub fn id(&self, stream: StreamKey) -> Option<&StreamId> {
        self.streams.get(&stream).map(|stream| &stream.id)
    }

    /// Number of live streams.
    #[must_use]
    pub fn live(&self) -> usize {
        self.streams.len()
    }

    /// Bytes that wait to be taken.
    #[must_use]
    pub const fn unsent_bytes(&self) -> usize {
        self.outbound.bytes
    }

    /// The counters of this session.
    #[must_use]
    pub const fn stats(&self) -> LmtpStats {
        self.stats
    }

    fn item(&mut self, key: StreamKey, mut item: TokenItem, now: Time) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        let nan = item.logprob.is_nan() || item.top.iter().any(|(_, value)| value.is_nan());
        if nan {
            self.events.push_back(LmtpOutput::Cancel(key));
            let message = "the engine gave a probability that is no number";
            return self.fail(key, &LmtpError::new(LmtpReason::EngineError, message), now);
        }
        let work_goes_on = item.finish.is_none();
        stream.left -= 1;
        if stream.scores {
            // SCORE has one item for each token, and the last one has the finish reason (LM-311).
            item.finish = (stream.left == 0).then_some(StreamFinish::Stop);
        } else if stream.left == 0 {
            // `max_tokens` is exact, whatever the engine does (LM-602).
            item.finish.get_or_insert(StreamFinish::Length);
        }
        let ends = item.finish.is_some();
        let max = self.config.limits.max_frame_out;
        let (top, part) = (stream.top, stream.part);
        self.send_running(part);
        let Some(stream) = self.streams.get(&key) else {
            return;
        };
        let extended = part.and_then(|part| Some((part, self.extended.get_mut(&part.first)?)));
        let mut parks = None;
        match extended {
            None => self.outbound.item(max, |out| {
                write::item(out, &stream.id, &item, top, |_| {});
            }),
            Some((part, extended)) => {
                extended.take(&item);
                let seq = self.replays.seq(part.first);
                let write = |out: &mut BytesMut| extended.item(out, item, top, part.index, seq);
                let outbound = &mut self.outbound;
                let full = self
                    .replays
                    .put(part.first, outbound, &self.config, now, write);
                parks = full.then_some(part.first);
                extended.fresh = false;
                if let Some(due) = extended.first_due.take() {
                    self.due.remove(&(due, part.first));
                }
            }
        }
        if !self.config.coalesce {
            self.outbound.end_items();
        }
        self.stats.items_out += 1;
        if ends {
            self.remove_stream(key, now);
            if work_goes_on {
                self.events.push_back(LmtpOutput::Cancel(key));
            }
        }
        if let Some(first) = parks {
            self.park_stream(first);
        }
    }

    /// Ends a stream with an error, unless it has ended; the work of this sample is over.
    fn fail(&mut self, key: StreamKey, error: &LmtpError, now: Time) {
        if let Some(stream) = self.streams.get(&key) {
            let first = stream.part.map_or(key, |part| part.first);
            self.fail_all_of(first, Some(key), error, now);
        }
    }

    /// Ends a stream with an error, by its first sample.
    fn fail_all_of(
        &mut self,
        first: StreamKey,
        but: Option<StreamKey>,
        error: &LmtpError,
        now: Time,
    ) {
        let Some((id, extended)) = self.dissolve(first, but, now) else {
            return;
        };
        self.replays.open_window(first);
        let seq = self.replays.seq(first);
        let max = self.config.limits.max_error_bytes;
        self.replays
            .put(first, &mut self.outbound, &self.config, now, |out| {
                write::failure(out, &id, error, max, |out| {
                    number(out, seq);
                    if let Some(extended) = &extended {
                        extended.closing(out);
                    }
                });
            });
        if !self.config.coalesce {
            self.outbound.end_items();
        }
    }

    /// Removes a sample that has ended. With its last sample a stream has ended, and its id may be reused (LM-508).
    fn remove_stream(&mut self, key: StreamKey, now: Time) {
        let Some(stream) = self.streams.remove(&key) else {
            return;
        };
        let first = stream.part.map_or(key, |part| part.first);
        if let Some(extended) = self.extended.get_mut(&first) {
            extended.open -= 1;
            if extended.open > 0 {
                return;
            }
        }
        let _ = self.dissolve(first, None, now);
        self.ids.remove(&stream.id);
    }

    /// Removes a stream from all tables, by its first sample; its running work, except one sample's, is cancelled.
    fn dissolve(
        &mut self,
        first: StreamKey,
        but: Option<StreamKey>,
        now: Time,
    ) -> Option<(StreamId, Option<ExtendedStream>)> {
        let Some(extended) = self.extended.remove(&first) else {
            let stream = self.streams.remove(&first)?;
            if but != Some(first) {
                self.events.push_back(LmtpOutput::Cancel(first));
            }
            self.ids.remove(&stream.id);
            return Some((stream.id, None));
        };
        for key in extended.keys(first) {
            if self.streams.remove(&key).is_some() && but != Some(key) {
                self.events.push_back(LmtpOutput::Cancel(key));
            }
        }
        self.ids.remove(&extended.id);
        for due in extended.deadline.into_iter().chain(extended.first_due) {
            self.due.remove(&(due, first));
        }
        self.store_output(&extended, now);
        let limits = &self.config.limits;
        self.replays.end(first, now + limits.resume_grace, limits);
        Some((extended.id.clone(), Some(extended)))
    }

    /// Answers a request with an error, with the members of an error item (LM-504).
    fn request_failed(&mut self, id: &StreamId, error: &LmtpError) {
        let max = self.config.limits.max_error_bytes;
        self.outbound
            .notice(|out| write::failure(out, id, error, max, |_| {}));
    }

    fn notice(&mut self, id: Option<&StreamId>, error: &LmtpError) {
        let max = self.config.limits.max_error_bytes;
        self.outbound
            .notice(|out| write::notice(out, id, error, max));
    }

    fn refuse_malformed(&mut self, what: &str, now: Time) {
        self.stats.malformed += 1;
        self.malformed += 1;
        let message = format!("malformed message: {what}");
        self.notice(None, &LmtpError::new(LmtpReason::Malformed, message));
        if self.config.close_on_malformed {
            self.close(LmtpClose::AS_REFERENCE, now);
        } else if self.malformed >= self.config.limits.max_malformed {
            self.close(LmtpClose::MALFORMED, now);
        }
    }

    /// Sends items that wait in replay buffers, as far as there is room.
    fn flow(&mut self, now: Time) {
        let (outbound, config) = (&mut self.outbound, &self.config);
        for first in self.replays.flow(outbound, config, now) {
            let going = self.samples(first).map(LmtpOutput::UnparkStream);
            let going: Vec<_> = going.collect();
            self.events.extend(going);
        }
    }

    fn park_stream(&mut self, first: StreamKey) {
        let standing = self.samples(first).map(LmtpOutput::ParkStream);
        let standing: Vec<_> = standing.collect();
        self.events.extend(standing);
    }

    /// The samples of a stream that are still running.
    fn samples(&self, first: StreamKey) -> impl Iterator<Item = StreamKey> + use<'_> {
        let extended = self.extended.get(&first).into_iter();
        let keys = extended.flat_map(move |extended| extended.keys(first));
        keys.filter(move |key| self.streams.contains_key(key))
    }

    /// Parks all streams if too many bytes are unsent.
    fn park(&mut self, now: Time) {
        self.flow(now);
        if self.parked.is_none() && self.outbound.bytes > self.config.limits.outbox_bytes {
            self.parked = Some(now);
            self.events.push_back(LmtpOutput::Park);
        }
    }

    /// Closes the session once nothing is left to send.
    fn settle(&mut self) {
        if !self.outbound.is_empty() {
            return;
        }
        match self.phase {
            LmtpPhase::LastWords(close, _) => self.end(LmtpOutput::Close(close)),
            LmtpPhase::HalfClosed
                if self.streams.is_empty() && self.replays.is_sent() && self.loading.len() == 0 =>
            {
                self.end(LmtpOutput::Close(LmtpClose::FINISHED))
            }
            _ => {}
        }
    }

    fn end(&mut self, how: LmtpOutput) {
        self.phase = LmtpPhase::Closed;
        self.outbound = LmtpOutbound::default();
        self.replays = ReplayBuffers::default();
        self.events.push_back(how);
    }

    fn cancel_all(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        self.ids.clear();
        self.extended.clear();
        self.due.clear();
        self.loading = Loading::default();
        self.replays = ReplayBuffers::default();
        self.events
            .extend(streams.into_keys().map(LmtpOutput::Cancel));
    }
}
