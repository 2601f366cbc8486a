//! The channel between a resumable stream and its present reader (TR-1303).
//!
//! ```text
//!   Here ◄── a reader attaches ── Away ── grace, or a drain that admits nobody ──► over
//!    └──── it detaches ───────────►┘                       GivenUp ───────────────►┘
//! ```

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use futures::{Stream, stream};
use sapwood_proto::replay::ReplayGap;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};

use super::replay::{EventReplay, ReplayNext, StreamEnd};
use crate::ops::drain::{Drain, DrainGuard, DrainPhase};

/// What the task that produces events and their reader share.
#[derive(Debug)]
pub(super) struct EventChannel {
    state: Mutex<ChannelState>,
    /// Notified when reading has made room.
    room: Notify,
    presence: watch::Sender<ReaderPresence>,
}

#[derive(Debug)]
struct ChannelState {
    replay: EventReplay,
    /// Notifies the reader of new events; `None` without a reader.
    reader: Option<Arc<Notify>>,
}

/// Whether the stream has a reader, or may get one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReaderPresence {
    Here,
    /// Since the last one left.
    Away(Instant),
    /// The stream was given up: no reader is let in.
    GivenUp,
}

/// Why a reader cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadRefused {
    /// The stream was given up.
    Over,
    Behind(ReplayGap),
    /// All was read, and it ended well.
    Nothing,
}

impl EventChannel {
    /// A channel that retains up to `most` bytes, and its first reader.
    pub(super) fn new(most: usize, work: DrainGuard) -> (Arc<Self>, EventReader) {
        let changed = Arc::new(Notify::new());
        let state = ChannelState {
            replay: EventReplay::new(most),
            reader: Some(Arc::clone(&changed)),
        };
        let channel = Arc::new(Self {
            state: Mutex::new(state),
            room: Notify::new(),
            presence: watch::Sender::new(ReaderPresence::Here),
        });
        let reader = EventReader {
            channel: Arc::clone(&channel),
            changed,
            over: false,
            _work: work,
        };
        (channel, reader)
    }

    /// Whether a reader could continue after this event.
    ///
    /// # Errors
    /// Why none could.
    pub(super) fn follows(&self, after: u64) -> Result<(), ReadRefused> {
        self.may_read(&self.state(), after)
    }

    /// Continues after this event. The present reader is cut off. `work`: a drain waits until all is read.
    ///
    /// # Errors
    /// Why that is not possible; then no reader is cut off.
    pub(super) fn read(
        self: &Arc<Self>,
        after: u64,
        work: DrainGuard,
    ) -> Result<EventReader, ReadRefused> {
        let mut state = self.state();
        self.may_read(&state, after)?;
        // All that can fail comes before the present reader is replaced: a bad position must not cut off a good reader.
        state.replay.rewind(after).map_err(ReadRefused::Behind)?;
        let changed = Arc::new(Notify::new());
        if let Some(former) = state.reader.replace(Arc::clone(&changed)) {
            // It is woken to find that the handle in `reader` is not its own, and ends.
            former.notify_one();
        }
        // Under the state's lock, as in `give_up`: a stream cannot be given up between the check above and this.
        self.presence.send_replace(ReaderPresence::Here);
        // A reader that continues behind unread events has read them, which may make room.
        self.room.notify_one();
        Ok(EventReader {
            channel: Arc::clone(self),
            changed,
            over: false,
            _work: work,
        })
    }

    fn may_read(&self, state: &ChannelState, after: u64) -> Result<(), ReadRefused> {
        if *self.presence.borrow() == ReaderPresence::GivenUp {
            return Err(ReadRefused::Over);
        }
        state.replay.follows(after).map_err(ReadRefused::Behind)?;
        // An error and not a reader: the answer is 204, which tells a browser not to come again.
        if state.replay.is_all(after) {
            return Err(ReadRefused::Nothing);
        }
        Ok(())
    }

    /// Resolves when there is room for an event.
    pub(super) async fn room(&self) {
        // `notify_one` leaves a permit where nothing waits, so that room which is made between the check and the wait is
        // seen. A permit that is out of date costs one more check.
        while !self.state().replay.has_room() {
            self.room.notified().await;
        }
    }

    /// Appends an event.
    pub(super) fn push(&self, event: &[u8]) {
        self.change(|replay| replay.push(event));
    }

    /// Ends the stream, if it has not ended.
    pub(super) fn end(&self, end: StreamEnd) {
        self.change(|replay| replay.end(end));
    }

    /// Ends the stream with this event, if it has not ended, and gives it up.
    pub(super) fn cancel(&self, last: &[u8]) {
        self.change(|replay| {
            replay.push(last);
            replay.end(StreamEnd::Well);
        });
        self.give_up();
    }

    /// Refuses all readers from now on.
    pub(super) fn give_up(&self) {
        // The lock keeps this from happening between the check and the arrival of a reader.
        let _state = self.state();
        self.presence.send_replace(ReaderPresence::GivenUp);
    }

    /// Resolves when the stream was given up, has had no reader for `grace`, or can get none because of a drain.
    pub(super) async fn deserted(&self, grace: Duration, drain: &Drain) {
        let mut presence = self.presence.subscribe();
        loop {
            let now = *presence.borrow_and_update();
            let left = match now {
                ReaderPresence::GivenUp => return,
                ReaderPresence::Here => {
                    // The sender lives in `self`: waiting cannot fail, here and below.
                    let _ = presence.changed().await;
                    continue;
                }
                // The grace counts from when the reader left, and not from when this looks.
                ReaderPresence::Away(left) => left,
            };
            // All arms may be cancelled: nothing is taken by any. A reader may have come and gone between two polls.
            tokio::select! {
                _ = presence.wait_for(|later| *later != now) => {}
                () = sleep(grace.saturating_sub(left.elapsed())) => return,
                () = drain.reached(DrainPhase::Refusing) => return,
            }
        }
    }

    /// Since when it has been read to its end and has had no reader, if so.
    pub(super) fn spare_since(&self) -> Option<Instant> {
        let state = self.state();
        match *self.presence.borrow() {
            ReaderPresence::Away(left) if state.replay.is_read() => Some(left),
            _ => None,
        }
    }

    fn change(&self, change: impl FnOnce(&mut EventReplay)) {
        let mut state = self.state();
        change(&mut state.replay);
        if let Some(reader) = &state.reader {
            reader.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The present reader of a channel. Dropped with the response that carries it.
#[derive(Debug)]
pub(super) struct EventReader {
    channel: Arc<EventChannel>,
    changed: Arc<Notify>,
    over: bool,
    _work: DrainGuard,
}

impl EventReader {
    /// The events, to the end of the stream or until another reader takes over.
    pub(super) fn events(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::unfold(self, |mut reader| async move {
            let event = reader.next().await?;
            Some((event, reader))
        })
    }

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        while !self.over {
            match self.look() {
                None => return Some(Err(self.cut("another reader has taken over"))),
                Some(ReplayNext::Event(event)) => return Some(Ok(event)),
                Some(ReplayNext::End(StreamEnd::Well)) => return None,
                Some(ReplayNext::End(StreamEnd::Cut)) => {
                    return Some(Err(self.cut("the stream is cut")));
                }
                // `notify_one` leaves a permit where nothing waits: an event between the look and the wait is not missed.
                Some(ReplayNext::Later) => self.changed.notified().await,
            }
        }
        None
    }

    /// What is next; `None` once another reader has taken over.
    fn look(&self) -> Option<ReplayNext> {
        let mut state = self.channel.state();
        if !self.is_current(&state) {
            return None;
        }
        let full = !state.replay.has_room();
        let next = state.replay.next();
        // Only when the border is crossed: the writer is woken once, and not for each event.
        if full && state.replay.has_room() {
            self.channel.room.notify_one();
        }
        Some(next)
    }

    fn cut(&mut self, why: &'static str) -> io::Error {
        self.over = true;
        io::Error::other(why)
    }

    fn is_current(&self, state: &ChannelState) -> bool {
        let current = state.reader.as_ref();
        current.is_some_and(|current| Arc::ptr_eq(current, &self.changed))
    }
}

impl Drop for EventReader {
    fn drop(&mut self) {
        let mut state = self.channel.state();
        // A reader that was replaced changes nothing: its successor is here, and the grace must not begin.
        if self.is_current(&state) {
            state.reader = None;
            self.channel.presence.send_if_modified(|now| {
                // A stream that was given up stays so, although its last reader may still have been reading.
                let leaves = *now == ReaderPresence::Here;
                if leaves {
                    *now = ReaderPresence::Away(Instant::now());
                }
                leaves
            });
        }
    }
}
