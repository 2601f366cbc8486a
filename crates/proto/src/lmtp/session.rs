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
//!     └────── close ──► last words ──all taken, or two seconds──► closed
//!     └────── hang_up, stall ─────────────────────────────────► closed
//! ```
//!
//! After every call the shell drains [`Session::poll`] and asks [`Session::wake_at`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;

use super::json::Malformed;
use super::outbound::Outbound;
use super::port::{
    Carrier, Close, Config, Output, Piece, Start, Stats, StreamKey, Unreadable, Work,
};
use super::read::{self, Members};
use super::{Fault, Finish, Id, Item, Model, Models, Reason, write};
use crate::time::Time;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Open,
    /// The client sends nothing more; its streams go on (LM-110).
    HalfClosed,
    /// Everybody was told the end; the transport may take it until then (LM-505).
    LastWords(Close, Time),
    Closed,
}

/// What lives under an id.
#[derive(Debug)]
struct Stream {
    id: Id,
    /// Items that may still come; never 0.
    left: u64,
    /// How many of the most likely tokens an item shows; `None` for SCORE, whose items show none.
    top: Option<u32>,
}

/// The machine. See the module's page.
#[derive(Debug)]
pub struct Session {
    config: Config,
    phase: Phase,
    streams: BTreeMap<StreamKey, Stream>,
    ids: BTreeMap<Id, StreamKey>,
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
        Self {
            config,
            phase: Phase::Open,
            streams: BTreeMap::new(),
            ids: BTreeMap::new(),
            admitted: 0,
            outbound: Outbound::default(),
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
                    match Members::of(command.payload) {
                        Some(members) => {
                            self.malformed = 0;
                            self.command(command.word, &members, models);
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
                Piece::Item(item) => self.item(stream, item),
                Piece::Failed(fault) => self.fail(stream, &fault),
            }
        }
        self.park(now);
        self.settle();
    }

    /// The work of a stream is over. If it has not said how, the stream fails rather than hang (LM-501).
    pub fn finished(&mut self, stream: StreamKey, now: Time) {
        self.fail(
            stream,
            &Fault::new(Reason::EngineError, "the work ended without an end"),
        );
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
        self.outbound = Outbound::default();
        self.cancel_all();
    }

    /// New streams are refused from here on (LM-509).
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Ends every open stream with an error item, and then the connection (LM-505).
    pub fn close(&mut self, close: Close, now: Time) {
        if !matches!(self.phase, Phase::Open | Phase::HalfClosed) {
            return;
        }
        let fault = Fault::new(close.reason, close.message);
        let open: Vec<_> = self.streams.keys().copied().collect();
        for stream in open {
            self.events.push_back(Output::Cancel(stream));
            self.fail(stream, &fault);
        }
        self.phase = Phase::LastWords(close, now + self.config.limits.last_words);
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
        self.phase == Phase::Open && self.parked.is_none()
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
            Phase::Open | Phase::HalfClosed => self
                .parked
                .map(|since| since + self.config.limits.stall_timeout),
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
            _ => {
                // Who does not read cannot be told (LM-607).
                self.cancel_all();
                self.end(Output::Reset);
            }
        }
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

    fn command(&mut self, word: &str, members: &Members<'_>, models: &dyn Models) {
        let id = members.id(&self.config.limits);
        match word {
            "GENERATE" | "SCORE" | "MODEL_INFO" => match id {
                Err(fault) => self.notice(None, &fault),
                Ok(id) if word == "MODEL_INFO" => self.model_info(&id, members, models),
                Ok(id) if self.ids.contains_key(&id) => {
                    let fault = Fault::new(Reason::DuplicateStream, "stream_id is in use");
                    self.notice(Some(&id), &fault);
                }
                Ok(id) => self.open(word, id, members, models),
            },
            "CANCEL" | "TOKENIZE" | "DETOKENIZE" | "BUFFER" | "MASK" | "RESUME" | "ACK" => {
                let message = "version 2 was not negotiated on this connection";
                let fault = Fault::new(Reason::NotNegotiated, message);
                self.notice(id.ok().as_ref(), &fault);
            }
            unknown => {
                let shown: String = unknown.chars().take(WORD_CHARS).collect();
                let message = format!("Unknown command: {shown}");
                let fault = Fault::new(Reason::UnknownCommand, message);
                self.notice(id.ok().as_ref(), &fault);
            }
        }
    }

    /// Answered from memory, at once (LM-332).
    fn model_info(&mut self, id: &Id, members: &Members<'_>, models: &dyn Models) {
        let max = self.config.limits.max_error_bytes;
        match self.model(members, models) {
            Ok((name, model)) => self
                .outbound
                .notice(|out| write::model_info(out, id, &name, &model)),
            // With the members of an error item (LM-504).
            Err(fault) => self
                .outbound
                .notice(|out| write::failure(out, id, &fault, max)),
        }
    }

    /// A stream begins, or is refused with the first rule that it breaks (LM-302).
    fn open(&mut self, word: &str, id: Id, members: &Members<'_>, models: &dyn Models) {
        match self.admit(word, members, models) {
            Ok((name, model, work)) => {
                let stream = StreamKey(self.admitted);
                self.admitted += 1;
                self.stats.streams += 1;
                let (left, top) = match &work {
                    Work::Generate(wanted) => {
                        (u64::from(wanted.max_tokens), Some(wanted.top_logprobs))
                    }
                    Work::Score(wanted) => (wanted.scored.len() as u64, None),
                };
                self.ids.insert(id.clone(), stream);
                self.streams.insert(stream, Stream { id, left, top });
                self.events.push_back(Output::Start(Box::new(Start {
                    stream,
                    name,
                    model,
                    work,
                })));
            }
            Err(fault) => {
                self.stats.refused += 1;
                self.failure(&id, &fault);
            }
        }
    }

    fn admit(
        &mut self,
        word: &str,
        members: &Members<'_>,
        models: &dyn Models,
    ) -> Result<(ByteString, Arc<Model>, Work), Fault> {
        let (name, model) = self.model(members, models)?;
        let limits = &self.config.limits;
        let work = if word == "SCORE" {
            Work::Score(read::score(members, &model)?)
        } else {
            self.stats.unknown_parameters += members.unknown();
            let strict = self.config.strict_parameters;
            Work::Generate(read::generate(members, &model, limits, strict)?)
        };
        if self.draining {
            let message = "the server is shutting down; ask another";
            return Err(Fault::new(Reason::Draining, message));
        }
        if self.streams.len() >= limits.max_streams {
            let message = format!(
                "{} streams are open on this connection; wait for one to end",
                limits.max_streams
            );
            return Err(Fault {
                retry_after: Some(limits.retry_after),
                ..Fault::new(Reason::ServerOverloaded, message)
            });
        }
        Ok((name, model, work))
    }

    fn model(
        &self,
        members: &Members<'_>,
        models: &dyn Models,
    ) -> Result<(ByteString, Arc<Model>), Fault> {
        let named = members.model(&self.config.limits)?;
        let named = named.map(|name| ByteString::from(&*name));
        let name = named
            .or_else(|| self.config.default_model.clone())
            .ok_or_else(|| {
                let message = "'model' is required: the name of a model";
                Fault::new(Reason::MissingRequiredParameter, message)
            })?;
        let model = models.find(&name).map_err(Fault::model)?;
        Ok((name, model))
    }

    fn item(&mut self, key: StreamKey, mut item: Item) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        let nan = item.logprob.is_nan() || item.top.iter().any(|(_, value)| value.is_nan());
        if nan {
            self.events.push_back(Output::Cancel(key));
            let message = "the engine gave a probability that is no number";
            return self.fail(key, &Fault::new(Reason::EngineError, message));
        }
        let work_goes_on = item.finish.is_none();
        stream.left -= 1;
        if stream.top.is_none() {
            // One item for each token, and the last says so (LM-311).
            item.finish = (stream.left == 0).then_some(Finish::Stop);
        } else if stream.left == 0 {
            // Exact, whatever the engine does (LM-602).
            item.finish.get_or_insert(Finish::Length);
        }
        let max = self.config.limits.max_frame_out;
        self.outbound.item(max, |out| {
            write::item(out, &stream.id, &item, stream.top);
        });
        if !self.config.coalesce {
            self.outbound.end_items();
        }
        self.stats.items_out += 1;
        if item.finish.is_some() {
            self.forget(key);
            if work_goes_on {
                self.events.push_back(Output::Cancel(key));
            }
        }
    }

    /// A stream ends badly, unless it has ended.
    fn fail(&mut self, key: StreamKey, fault: &Fault) {
        if let Some(id) = self.forget(key) {
            self.failure(&id, fault);
        }
    }

    fn failure(&mut self, id: &Id, fault: &Fault) {
        let (frame, error) = (
            self.config.limits.max_frame_out,
            self.config.limits.max_error_bytes,
        );
        self.outbound
            .item(frame, |out| write::failure(out, id, fault, error));
        if !self.config.coalesce {
            self.outbound.end_items();
        }
    }

    /// Its id may be used again (LM-508).
    fn forget(&mut self, key: StreamKey) -> Option<Id> {
        let stream = self.streams.remove(&key)?;
        self.ids.remove(&stream.id);
        Some(stream.id)
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

    /// Too much waits now.
    fn park(&mut self, now: Time) {
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
            Phase::HalfClosed if self.streams.is_empty() => {
                self.end(Output::Close(Close::FINISHED))
            }
            _ => {}
        }
    }

    fn end(&mut self, how: Output) {
        self.phase = Phase::Closed;
        self.outbound = Outbound::default();
        self.events.push_back(how);
    }

    fn cancel_all(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        self.ids.clear();
        self.events.extend(streams.into_keys().map(Output::Cancel));
    }
}

/// Characters of an unknown type that are shown (LM-203).
const WORD_CHARS: usize = 64;
