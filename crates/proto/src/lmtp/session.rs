//! A session of LMTP at the server's end: the streams of one connection, as a pure machine for every transport (LM-101).
//!
//! Owns: which streams live, that each ends exactly once, what is refused, the order of what is sent, and last words.
//! Refuses to know: sockets, tasks, clocks, engines. Text goes in, messages come out; time goes in as an argument.
//!
//! ```text
//!   handle(text)  ──►┌──────────────────┐──► next_message()   when the transport can take one
//!   step(pieces)  ──►│ streams, by id   │──► poll() ─► Output after whatever was called
//!   tick, close … ──►└──────────────────┘──► wake_at()        call tick then
//!
//!   open ──end_of_input──► half-closed ──no stream left, all taken──► closed
//!     └────── lose ──► held ──its client back, or resume_grace──► closed
//!     └────── close ──► last words ──all taken, or two seconds──► closed
//!     └────── hang_up, stall ─────────────────────────────────► closed
//! ```
//!
//! After every call the shell drains [`Session::poll`] and asks [`Session::wake_at`].

mod buffers;
mod cancel;
mod extended;
mod loading;
mod masks;
mod negotiation;
mod opening;
mod resume;
mod retry;
mod rings;
mod samples;
mod status;
mod text;
mod window;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;

use super::json::Malformed;
use super::outbound::Outbound;
use super::port::{Carrier, Close, Config, Output, Piece, Stats, Status, StreamKey, Unreadable};
use super::read::{self, Members};
use super::{Fault, Features, Finish, Id, Item, Models, Reason, write};
use crate::time::Time;
use buffers::Buffers;
use extended::{Extended, Part, number};
use loading::Loading;
use masks::Masks;
use resume::Question;
use rings::Rings;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Open,
    /// The client sends nothing more; its streams go on (LM-110).
    HalfClosed,
    /// Everybody was told the end; the transport may take it until then (LM-505).
    LastWords(Close, Time),
    /// Its connection is lost, and its client may come back until then (LM-964).
    Held(Time),
    Closed,
}

/// What lives under an id, or one sample of it.
#[derive(Debug)]
struct Stream {
    id: Id,
    /// Items that may still come; never 0.
    left: u64,
    /// How many of the most likely tokens an item shows; `None` shows not even the member, as for SCORE.
    top: Option<u32>,
    /// It is a SCORE.
    scores: bool,
    /// What version 2 knows of it stands elsewhere; `None` for the base protocol.
    part: Option<Part>,
}

/// The machine. See the module's page.
#[derive(Debug)]
pub struct Session {
    config: Config,
    phase: Phase,
    streams: BTreeMap<StreamKey, Stream>,
    /// The first sample of each.
    ids: BTreeMap<Id, StreamKey>,
    /// What was negotiated (LM-903).
    features: Features,
    /// Streams of version 2, by their first samples.
    extended: BTreeMap<StreamKey, Extended>,
    /// When they have to have begun or ended.
    due: BTreeSet<(Time, StreamKey)>,
    /// Requests whose model is being loaded.
    loading: Loading,
    /// Items that may be wanted again, and those that wait.
    rings: Rings,
    buffers: Buffers,
    masks: Masks,
    /// By what its client comes back.
    name: Option<ByteString>,
    /// What the shell has to answer before anything is read.
    question: Option<Question>,
    /// How many streams there were.
    admitted: u64,
    outbound: Outbound,
    events: VecDeque<Output>,
    /// Since when nothing was taken although too much waits (LM-607).
    parked: Option<Time>,
    /// Malformed messages in a row.
    malformed: u32,
    /// Whether new streams are refused (LM-509).
    draining: bool,
    stats: Stats,
}

impl Session {
    /// A session that begins now. Allocates next to nothing until something is sent.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let features = if config.negotiated {
            config.features
        } else {
            Features::NONE
        };
        let outbound = Outbound::new(config.bare);
        Self {
            config,
            phase: Phase::Open,
            streams: BTreeMap::new(),
            ids: BTreeMap::new(),
            features,
            extended: BTreeMap::new(),
            due: BTreeSet::new(),
            loading: Loading::default(),
            rings: Rings::default(),
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
            stats: Stats::default(),
        }
    }

    /// Takes in one frame or line, message by message. Returns what it has no room to answer: hand that in again, before
    /// anything else, when [`Self::wants_input`] says so.
    pub fn handle(
        &mut self,
        text: ByteString,
        models: &dyn Models,
        now: Time,
    ) -> Option<ByteString> {
        // Text that holds nothing is one malformed message, not none.
        let mut rest = &*text;
        loop {
            if self.phase != Phase::Open {
                return None;
            }
            if !self.wants_input() {
                return Some(text.slice_ref(rest));
            }
            match read::command(rest) {
                Ok((command, behind)) => {
                    rest = behind;
                    match Members::of(command.payload, self.features) {
                        Some(members) => {
                            self.malformed = 0;
                            self.command(command.word, &members, models, now);
                        }
                        None => self.refuse_malformed("the payload is not an object", now),
                    }
                }
                // What follows in the same text is discarded (LM-204).
                Err(Malformed(what)) => {
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

    /// Something came that is no text, where [`Self::wants_input`] had asked for input. A line is answered and reading
    /// goes on; a frame ends the connection (LM-106, LM-112, LM-1201).
    pub fn handle_unreadable(&mut self, what: Unreadable, now: Time) {
        if self.phase != Phase::Open {
            return;
        }
        match (self.config.carrier, what) {
            (Carrier::Frames, Unreadable::TooLarge) => self.close(Close::TOO_LARGE, now),
            (Carrier::Frames, Unreadable::BadText) => self.close(Close::BAD_TEXT, now),
            (Carrier::Lines, Unreadable::TooLarge) => {
                let max = self.config.limits.max_message_in;
                let message = format!("a line has more than {max} bytes");
                self.notice(None, &Fault::new(Reason::MessageTooLarge, message));
            }
            (Carrier::Lines, Unreadable::BadText) => self.refuse_malformed("not UTF-8", now),
        }
        self.park(now);
    }

    /// Takes in what one step gave, for any of the streams; it goes out in order of admission (LM-601). What comes for a
    /// stream that has ended is dropped.
    pub fn step(&mut self, mut pieces: Vec<(StreamKey, Piece)>, now: Time) {
        // Stable: several pieces of a stream keep their order.
        pieces.sort_by_key(|(stream, _)| *stream);
        for (stream, piece) in pieces {
            match piece {
                Piece::Item(item) => self.item(stream, item, now),
                Piece::Failed(fault) => self.fail(stream, &fault, now),
            }
        }
        self.park(now);
        self.settle();
    }

    /// The work of a stream is over. If it has not said how, the stream fails rather than hang (LM-501).
    pub fn finished(&mut self, stream: StreamKey, now: Time) {
        let fault = Fault::new(Reason::EngineError, "the work ended without an end");
        self.fail(stream, &fault, now);
        self.park(now);
        self.settle();
    }

    /// The client sends nothing more, and nothing that it sent is left; what runs finishes, and then the session closes
    /// (LM-110, LM-113).
    pub fn end_of_input(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::HalfClosed;
            self.settle();
        }
    }

    /// The connection is gone: everything of it stops (LM-506). Nothing follows but [`Output::Cancel`].
    pub fn hang_up(&mut self) {
        self.phase = Phase::Closed;
        self.question = None;
        self.outbound = Outbound::default();
        self.cancel_all();
    }

    /// New streams are refused from here on (LM-509).
    pub fn drain(&mut self) {
        if !std::mem::replace(&mut self.draining, true) && self.phase == Phase::Open {
            self.announce(&Status::Draining { deadline: None });
        }
    }

    /// Ends every open stream with an error item, and then the connection (LM-505).
    pub fn close(&mut self, close: Close, now: Time) {
        if self.is_held() {
            return self.hang_up();
        }
        if !matches!(self.phase, Phase::Open | Phase::HalfClosed) {
            return;
        }
        if close == Close::SHUTDOWN {
            self.announce(&Status::Shutdown);
        }
        let fault = Fault::new(close.reason, close.message);
        while let Some((&stream, _)) = self.streams.first_key_value() {
            self.events.push_back(Output::Cancel(stream));
            self.fail(stream, &fault, now);
        }
        if let Some(question) = self.question.take() {
            self.request_failed(question.id(), &fault);
        }
        self.fail_waiting(&fault);
        self.rings.open_windows();
        self.phase = Phase::LastWords(close, now + self.config.limits.last_words);
        self.flow(now);
        self.settle();
    }

    /// The next thing for the shell to do.
    pub fn poll(&mut self) -> Option<Output> {
        self.events.pop_front()
    }

    /// The next message for the client, with the line's end on a line transport. Call it when the transport can take one:
    /// what steps give in the meantime is joined, within [`super::Limits::max_frame_out`] (LM-607).
    pub fn next_message(&mut self, now: Time) -> Option<Bytes> {
        let message = self.outbound.take(self.config.carrier)?;
        self.stats.messages_out += 1;
        if self.parked.is_some() {
            self.parked = Some(now);
            if self.outbound.bytes < self.config.limits.outbox_low_bytes {
                self.parked = None;
                self.events.push_back(Output::Unpark);
            }
        }
        self.flow(now);
        self.settle();
        Some(message)
    }

    /// Whether [`Self::next_message`] gives one.
    #[must_use]
    pub fn has_message(&self) -> bool {
        !self.outbound.is_empty()
    }

    /// Whether [`Self::handle`] may be called. While it says no nothing is to be read, but a client that goes is to be
    /// seen: answers wait for room as items do.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.phase == Phase::Open && self.parked.is_none() && self.question.is_none()
    }

    /// Whether the session is over.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// When to call [`Self::tick`], if nothing happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        match self.phase {
            Phase::Open | Phase::HalfClosed => {
                let due = self.due.first().map(|(due, _)| *due);
                let timeout = self.config.limits.stall_timeout;
                let stalled = self.rings.stalled(timeout).map(|(at, _)| at);
                let all = self.stalls_at().into_iter().chain(due).chain(stalled);
                let waiting = self
                    .rings
                    .expires_at()
                    .into_iter()
                    .chain(self.loading_due());
                all.chain(waiting).min()
            }
            Phase::Held(until) => self
                .due
                .first()
                .map(|(due, _)| *due)
                .into_iter()
                .chain([until])
                .min(),
            Phase::LastWords(_, until) => Some(until),
            Phase::Closed => None,
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Time) {
        if self.wake_at().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            Phase::LastWords(close, _) => self.end(Output::Close(close)),
            Phase::Held(until) if until <= now => self.hang_up(),
            _ if self.stalls_at().is_some_and(|at| at <= now) => {
                // Who does not read cannot be told (LM-607).
                self.cancel_all();
                self.end(Output::Reset);
            }
            _ => {
                self.expire(now);
                self.expire_loading(now);
                self.expire_windows(now);
                self.rings.expire(now, self.config.limits.resume_grace);
                self.park(now);
                self.settle();
            }
        }
    }

    fn stalls_at(&self) -> Option<Time> {
        let timeout = self.config.limits.stall_timeout;
        self.parked.map(|since| since + timeout)
    }

    /// What the client calls a live stream.
    #[must_use]
    pub fn id(&self, stream: StreamKey) -> Option<&Id> {
        self.streams.get(&stream).map(|stream| &stream.id)
    }

    /// How many streams live.
    #[must_use]
    pub fn live(&self) -> usize {
        self.streams.len()
    }

    /// Bytes that wait to be taken.
    #[must_use]
    pub const fn unsent_bytes(&self) -> usize {
        self.outbound.bytes
    }

    /// What was counted.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    fn item(&mut self, key: StreamKey, mut item: Item, now: Time) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        let nan = item.logprob.is_nan() || item.top.iter().any(|(_, value)| value.is_nan());
        if nan {
            self.events.push_back(Output::Cancel(key));
            let message = "the engine gave a probability that is no number";
            return self.fail(key, &Fault::new(Reason::EngineError, message), now);
        }
        let work_goes_on = item.finish.is_none();
        stream.left -= 1;
        if stream.scores {
            // One item for each token, and the last says so (LM-311).
            item.finish = (stream.left == 0).then_some(Finish::Stop);
        } else if stream.left == 0 {
            // Exact, whatever the engine does (LM-602).
            item.finish.get_or_insert(Finish::Length);
        }
        let ends = item.finish.is_some();
        let max = self.config.limits.max_frame_out;
        let (top, part) = (stream.top, stream.part);
        self.tell_running(part);
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
                let seq = self.rings.seq(part.first);
                let write = |out: &mut BytesMut| extended.item(out, item, top, part.index, seq);
                let outbound = &mut self.outbound;
                let full = self
                    .rings
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
            self.forget(key, now);
            if work_goes_on {
                self.events.push_back(Output::Cancel(key));
            }
        }
        if let Some(first) = parks {
            self.park_stream(first);
        }
    }

    /// A stream ends badly, unless it has ended; the work of this sample of it is over.
    fn fail(&mut self, key: StreamKey, fault: &Fault, now: Time) {
        if let Some(stream) = self.streams.get(&key) {
            let first = stream.part.map_or(key, |part| part.first);
            self.fail_all_of(first, Some(key), fault, now);
        }
    }

    /// A stream ends badly, by its first sample.
    fn fail_all_of(&mut self, first: StreamKey, but: Option<StreamKey>, fault: &Fault, now: Time) {
        let Some((id, extended)) = self.dissolve(first, but, now) else {
            return;
        };
        self.rings.open_window(first);
        let seq = self.rings.seq(first);
        let max = self.config.limits.max_error_bytes;
        self.rings
            .put(first, &mut self.outbound, &self.config, now, |out| {
                write::failure(out, &id, fault, max, |out| {
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

    /// A sample has ended. With its last one a stream has, and its id may be used again (LM-508).
    fn forget(&mut self, key: StreamKey, now: Time) {
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

    /// Takes a stream out of everything, by its first sample; work that goes on, but for one, is cancelled.
    fn dissolve(
        &mut self,
        first: StreamKey,
        but: Option<StreamKey>,
        now: Time,
    ) -> Option<(Id, Option<Extended>)> {
        let Some(extended) = self.extended.remove(&first) else {
            let stream = self.streams.remove(&first)?;
            if but != Some(first) {
                self.events.push_back(Output::Cancel(first));
            }
            self.ids.remove(&stream.id);
            return Some((stream.id, None));
        };
        for key in extended.keys(first) {
            if self.streams.remove(&key).is_some() && but != Some(key) {
                self.events.push_back(Output::Cancel(key));
            }
        }
        self.ids.remove(&extended.id);
        for due in extended.deadline.into_iter().chain(extended.first_due) {
            self.due.remove(&(due, first));
        }
        self.kept(&extended, now);
        let limits = &self.config.limits;
        self.rings.end(first, now + limits.resume_grace, limits);
        Some((extended.id.clone(), Some(extended)))
    }

    /// A request gets the error that answers it, with the members of an error item (LM-504).
    fn request_failed(&mut self, id: &Id, fault: &Fault) {
        let max = self.config.limits.max_error_bytes;
        self.outbound
            .notice(|out| write::failure(out, id, fault, max, |_| {}));
    }

    fn notice(&mut self, id: Option<&Id>, fault: &Fault) {
        let max = self.config.limits.max_error_bytes;
        self.outbound
            .notice(|out| write::notice(out, id, fault, max));
    }

    fn refuse_malformed(&mut self, what: &str, now: Time) {
        self.stats.malformed += 1;
        self.malformed += 1;
        let message = format!("malformed message: {what}");
        self.notice(None, &Fault::new(Reason::Malformed, message));
        if self.config.close_on_malformed {
            self.close(Close::AS_REFERENCE, now);
        } else if self.malformed >= self.config.limits.max_malformed {
            self.close(Close::MALFORMED, now);
        }
    }

    /// Says what waits in rings, as far as there is room.
    fn flow(&mut self, now: Time) {
        let (outbound, config) = (&mut self.outbound, &self.config);
        for first in self.rings.flow(outbound, config, now) {
            let going = self.samples(first).map(Output::UnparkStream);
            let going: Vec<_> = going.collect();
            self.events.extend(going);
        }
    }

    fn park_stream(&mut self, first: StreamKey) {
        let standing = self.samples(first).map(Output::ParkStream);
        let standing: Vec<_> = standing.collect();
        self.events.extend(standing);
    }

    /// The samples of a stream that go on.
    fn samples(&self, first: StreamKey) -> impl Iterator<Item = StreamKey> + use<'_> {
        let extended = self.extended.get(&first).into_iter();
        let keys = extended.flat_map(move |extended| extended.keys(first));
        keys.filter(move |key| self.streams.contains_key(key))
    }

    /// Too much waits now.
    fn park(&mut self, now: Time) {
        self.flow(now);
        if self.parked.is_none() && self.outbound.bytes > self.config.limits.outbox_bytes {
            self.parked = Some(now);
            self.events.push_back(Output::Park);
        }
    }

    /// Closes once there is nothing left to say.
    fn settle(&mut self) {
        if !self.outbound.is_empty() {
            return;
        }
        match self.phase {
            Phase::LastWords(close, _) => self.end(Output::Close(close)),
            Phase::HalfClosed
                if self.streams.is_empty() && self.rings.is_told() && self.loading.len() == 0 =>
            {
                self.end(Output::Close(Close::FINISHED))
            }
            _ => {}
        }
    }

    fn end(&mut self, how: Output) {
        self.phase = Phase::Closed;
        self.outbound = Outbound::default();
        self.rings = Rings::default();
        self.events.push_back(how);
    }

    fn cancel_all(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        self.ids.clear();
        self.extended.clear();
        self.due.clear();
        self.loading = Loading::default();
        self.rings = Rings::default();
        self.events.extend(streams.into_keys().map(Output::Cancel));
    }
}
