//! Shares one lazy source among many readers: decides which reader polls the source and which wakers are woken.
//!
//! ```text
//!   a reader's poll:   item logged? ── yes ──────────────────────────────► Ready(item)
//!                          │ no, not ended
//!                      register waker ── turn taken by another ──────────► Pending
//!                          │ turn free                └─ by this very thread ► Reentered (KE-126)
//!                      take turn, unlock, poll source, lock, give turn back
//!                          ├─ an item or the end ── wake all waiting ────► Ready
//!                          └─ pending ── woken meanwhile? wake all waiting ► Pending
//! ```
//!
//! The source is polled with a waker of the relay's own, which wakes every waiting reader, and the lock is never held
//! while it is polled (KE-123). A reader that goes away wakes one that waits, so a turn is never lost with it. This
//! file is compiled a second time by `tests/takeover_loom.rs`, where a model checker tries every interleaving.

use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use futures::Stream;
use futures::stream::FusedStream;
use sapwood_proto::log::{Log, LogRead};

use crate::sync::{Mutex, MutexGuard, ThreadId, current_thread};

/// How much of a log is retained.
pub(super) struct RelayRetention<T> {
    /// Weight that may lie between the slowest and the leading reader; `None` retains everything (KE-124, KE-125).
    pub(super) window: Option<usize>,
    /// The weight of one item.
    pub(super) weight_of: fn(&T) -> usize,
}

/// The result of a reader's poll.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RelayPoll<T> {
    /// The next item.
    Item(T),
    /// There is no next item.
    End,
    /// The item at the reader's position has been released.
    Released,
    /// The reader is polled from inside the poll of its own source.
    Reentered,
}

/// A reader's slot and its position in the log.
#[derive(Debug)]
pub(super) struct ReaderPosition {
    pub(super) slot: usize,
    pub(super) position: usize,
}

/// The source, its log and its readers.
pub(super) struct Relay<S: Stream> {
    board: Arc<RelayBoard<S::Item>>,
    // Locked only by the reader that has the turn, so the lock is never contended.
    source: Mutex<Option<(S, Waker)>>,
}

/// State that the readers share. It is also the waker that the source gets.
struct RelayBoard<T> {
    state: Mutex<RelayState<T>>,
}

struct RelayState<T> {
    log: Log<T>,
    /// Weight of the retained items.
    weight: usize,
    retain: RelayRetention<T>,
    /// The thread that polls the source at the moment.
    turn: Option<ThreadId>,
    /// The source called its waker while a reader had the turn.
    woken: bool,
    readers: Vec<Option<RelayReader>>,
    free: Vec<usize>,
}

struct RelayReader {
    position: usize,
    waker: Option<Waker>,
}

/// Wakers to be called after the lock has been released.
type PendingWakers = smallvec::SmallVec<[Waker; 4]>;

enum RelayLook<T> {
    Here(RelayPoll<T>),
    Wait,
    Turn,
}

impl<T: Clone + Send + 'static> Wake for RelayBoard<T> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let calls = {
            let mut state = self.lock();
            // The reader that has the turn checks this flag before it releases the turn: a reader that registered in
            // between must not depend on the one with the turn being polled again.
            state.woken = state.turn.is_some();
            state.waiting()
        };
        calls.into_iter().for_each(Waker::wake);
    }
}

impl<T> RelayBoard<T> {
    fn lock(&self) -> MutexGuard<'_, RelayState<T>> {
        // Nothing panics while this lock is held: sources and wakers run outside it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S> Relay<S>
where
    S: FusedStream + Unpin + Send + 'static,
    S::Item: Clone + Send + 'static,
{
    /// A relay around `source`, which has not been polled yet.
    pub(super) fn new(source: S, retain: RelayRetention<S::Item>) -> Self {
        let board = Arc::new(RelayBoard {
            state: Mutex::new(RelayState {
                log: Log::new(),
                weight: 0,
                retain,
                turn: None,
                woken: false,
                readers: Vec::new(),
                free: Vec::new(),
            }),
        });
        let waker = Waker::from(board.clone());
        Self {
            board,
            source: Mutex::new(Some((source, waker))),
        }
    }

    /// A new reader, positioned at the very first item.
    pub(super) fn open(&self) -> ReaderPosition {
        let mut state = self.board.lock();
        let reader = Some(RelayReader {
            // A reader that opens after the first items were released cannot read from the start, so it holds back no
            // release.
            position: if state.log.released() > 0 {
                usize::MAX
            } else {
                0
            },
            waker: None,
        });
        // Slots are reused, so a node with many short-lived readers does not grow.
        let slot = if let Some(slot) = state.free.pop() {
            state.readers[slot] = reader;
            slot
        } else {
            state.readers.push(reader);
            state.readers.len() - 1
        };
        ReaderPosition { slot, position: 0 }
    }

    /// Removes a reader. If it was about to poll the source, a waiting reader is woken to take over.
    pub(super) fn close(&self, position: &ReaderPosition) {
        let calls = {
            let mut state = self.board.lock();
            if let Some(reader) = state.readers.get_mut(position.slot)
                && reader.take().is_some()
            {
                state.free.push(position.slot);
            }
            // All waiting readers and not one: which of them is still polled is not known here (KE-123).
            state.release_passed();
            state.waiting()
        };
        calls.into_iter().for_each(Waker::wake);
    }

    /// Polls the next item of a reader.
    pub(super) fn poll(
        &self,
        position: &mut ReaderPosition,
        waker: &Waker,
    ) -> Poll<RelayPoll<S::Item>> {
        let (look, calls) = {
            let mut state = self.board.lock();
            let look = state.look(position, waker);
            // This reader's step may have been the one that the leading reader waits for.
            let room = state.release_passed();
            (
                look,
                if room {
                    state.waiting()
                } else {
                    PendingWakers::new()
                },
            )
        };
        calls.into_iter().for_each(Waker::wake);
        match look {
            RelayLook::Here(step) => return Poll::Ready(step),
            RelayLook::Wait => return Poll::Pending,
            RelayLook::Turn => {}
        }
        // Without the board's lock: a source may take long, and may read this very node again (KE-126).
        let (polled, ended) = self.poll_source();
        let (step, calls) = {
            let mut state = self.board.lock();
            // One critical section for giving the turn back, the item and the flag: a reader that registers after it
            // finds the turn free.
            state.turn = None;
            let woken = std::mem::take(&mut state.woken);
            if let Poll::Ready(Some(item)) = &polled {
                state.append(item.clone());
            }
            if ended {
                // Only the holder of the turn ends the log, and no turn is given after the end.
                let _first = state.log.end(());
            }
            match polled {
                Poll::Ready(Some(item)) => {
                    let step = state.take_next(position, item);
                    state.release_passed();
                    (Poll::Ready(step), state.waiting())
                }
                Poll::Ready(None) => (Poll::Ready(RelayPoll::End), state.waiting()),
                // Readers that registered after that wake-up saw the turn taken, and nothing else would wake them.
                Poll::Pending if woken => (Poll::Pending, state.waiting()),
                Poll::Pending => (Poll::Pending, PendingWakers::new()),
            }
        };
        calls.into_iter().for_each(Waker::wake);
        step
    }

    /// Whether the source has ended.
    pub(super) fn is_ended(&self) -> bool {
        self.board.lock().log.ended().is_some()
    }

    /// Polls the source: returns its item and whether that was the last one. An ended source is dropped here.
    fn poll_source(&self) -> (Poll<Option<S::Item>>, bool) {
        let mut retained = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((source, waker)) = retained.as_mut() else {
            return (Poll::Ready(None), true);
        };
        let polled = Pin::new(&mut *source).poll_next(&mut Context::from_waker(waker));
        // A terminated source may still return its last item. Ending with it lets `is_ended` be true without one more
        // poll.
        let ended = matches!(polled, Poll::Ready(None)) || source.is_terminated();
        if ended {
            *retained = None;
        }
        (polled, ended)
    }
}

impl<T: Clone> RelayState<T> {
    /// What a reader can do at its position. Registers its waker if it has to wait.
    fn look(&mut self, reader_position: &mut ReaderPosition, waker: &Waker) -> RelayLook<T> {
        match self.log.at(reader_position.position) {
            LogRead::Released => return RelayLook::Here(RelayPoll::Released),
            LogRead::Item(item) => {
                let item = item.clone();
                return RelayLook::Here(self.take_next(reader_position, item));
            }
            LogRead::End(()) => return RelayLook::Here(RelayPoll::End),
            LogRead::Pending => {}
        }
        // Compared by thread: a re-entrant poll is on the stack of the poll that has the turn. Waiting for that would
        // deadlock.
        if self.turn == Some(current_thread()) {
            return RelayLook::Here(RelayPoll::Reentered);
        }
        if let Some(Some(reader)) = self.readers.get_mut(reader_position.slot) {
            match &mut reader.waker {
                Some(old) if old.will_wake(waker) => {}
                slot => *slot = Some(waker.clone()),
            }
        }
        // After the waker is stored: the reader that has the turn, or that makes room, must find it.
        if self.turn.is_some() || self.window_is_full() {
            return RelayLook::Wait;
        }
        self.turn = Some(current_thread());
        RelayLook::Turn
    }

    /// Advances a reader past the item that it receives.
    fn take_next(&mut self, reader_position: &mut ReaderPosition, item: T) -> RelayPoll<T> {
        reader_position.position += 1;
        if let Some(Some(reader)) = self.readers.get_mut(reader_position.slot) {
            reader.position = reader_position.position;
            // A reader with an item is not waiting; waking it again would only poll its task for nothing.
            reader.waker = None;
        }
        RelayPoll::Item(item)
    }

    fn append(&mut self, item: T) {
        self.weight += (self.retain.weight_of)(&item);
        // The log is open: only the holder of the turn appends or ends it.
        let _refused = self.log.append(item);
    }

    fn window_is_full(&self) -> bool {
        self.retain.window.is_some_and(|max| self.weight > max)
    }

    /// Releases the items that every reader has passed; without readers nothing is released. `true` if that made room
    /// in the window.
    fn release_passed(&mut self) -> bool {
        if self.retain.window.is_none() {
            return false;
        }
        let was_full = self.window_is_full();
        let positions = self.readers.iter().flatten().map(|reader| reader.position);
        // Without readers no item has been passed, and a later reader may still start at the first one.
        let Some(slowest) = positions.min() else {
            return false;
        };
        while self.log.released() < slowest {
            let Some(item) = self.log.release() else {
                break;
            };
            self.weight -= (self.retain.weight_of)(&item);
        }
        was_full && !self.window_is_full()
    }

    /// Takes the wakers of all waiting readers.
    fn waiting(&mut self) -> PendingWakers {
        self.readers
            .iter_mut()
            .flatten()
            .filter_map(|reader| reader.waker.take())
            .collect()
    }
}
