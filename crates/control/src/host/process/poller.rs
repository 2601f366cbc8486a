//! [`Poller`]: receives what controllers' processes send, and ends those that are late.
//!
//! ```text
//!   sockets, turn bell ──► `sockets` ──► `thread` ◄── bell
//!                             │             └─► a thread of its own, which also looks at the time
//!                             └─► during a turn: the engine's thread, through an `OutcomePoll`
//! ```
//!
//! An engine's thread that waits for the outcomes of a step receives them itself: handing them on to it would cost two
//! switches of threads for each group of them. Meanwhile the poller's thread does not listen to the sockets, so that an
//! outcome wakes one thread and not two.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use super::stream::RECEIVED_BYTES;

/// A process, as its poller sees it.
pub(super) trait PolledProcess: fmt::Debug + Send + Sync {
    /// The socket has room again.
    fn send_more(&self);

    /// Reads what the process has sent, once. Returns whether it has ended.
    fn receive(&self, buffer: &mut [u8]) -> bool;

    /// Kills the process if its time is over, and slows it down if it is late; returns when to look again.
    fn end_if_late(&self, now: Instant, buffer: &mut [u8]) -> Option<Instant>;

    /// The process has ended, and its memory is free.
    fn forget(&self);
}

/// The thread, and the sockets it waits on. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct Poller(Arc<PollShared>);

#[derive(Debug)]
struct PollShared {
    /// What the thread waits on: the bell, and the set of sockets.
    thread: OwnedFd,
    /// The sockets of the processes, and the bell of turns.
    sockets: OwnedFd,
    /// Ends a wait of the thread.
    bell: OwnedFd,
    /// Ends a wait of a turn.
    turn_bell: OwnedFd,
    state: Mutex<PollState>,
}

/// Lets an engine's thread receive outcomes itself, during its turns. There is one such thread.
#[derive(Debug)]
pub(crate) struct OutcomePoll {
    polled: Arc<PollShared>,
    inner: Mutex<TurnState>,
}

#[derive(Debug)]
struct TurnState {
    buffer: Vec<u8>,
    /// The thread of the poller does not listen.
    in_turn: bool,
}

#[derive(Debug, Default)]
struct PollState {
    /// The processes that have not ended.
    slots: HashMap<u64, Arc<dyn PolledProcess>>,
    next: u64,
    /// When the thread looks for late processes; `None`: not before it is asked to.
    wakes_at: Option<Instant>,
    closed: bool,
}

impl Poller {
    pub(super) fn start() -> io::Result<Self> {
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let polled = Arc::new(PollShared {
            thread: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            sockets: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            bell: bell()?,
            turn_bell: bell()?,
            state: Mutex::default(),
        });
        for (set, member, number) in [
            (&polled.thread, &polled.bell, BELL),
            (&polled.thread, &polled.sockets, SOCKETS),
            (&polled.sockets, &polled.turn_bell, BELL),
        ] {
            let data = epoll::EventData::new_u64(number);
            epoll::add(set, member, data, epoll::EventFlags::IN)?;
        }
        let of_thread = Arc::clone(&polled);
        // Nobody joins it: the last reference to a host may be dropped on it.
        std::thread::Builder::new()
            .name("controller-poll".to_owned())
            .spawn(move || of_thread.run())?;
        Ok(Self(polled))
    }

    /// The number of a process that is about to exist.
    pub(super) fn number(&self) -> u64 {
        let mut state = self.0.lock();
        state.next += 1;
        state.next
    }

    /// Listens to a process, until [`PolledProcess::receive`] says that it has ended.
    pub(super) fn add(
        &self,
        number: u64,
        socket: BorrowedFd<'_>,
        slot: Arc<dyn PolledProcess>,
    ) -> io::Result<()> {
        self.0.lock().slots.insert(number, slot);
        let data = epoll::EventData::new_u64(number);
        epoll::add(&self.0.sockets, socket, data, epoll::EventFlags::IN).inspect_err(|_| {
            self.0.lock().slots.remove(&number);
        })?;
        Ok(())
    }

    /// Whether to wait for room to send, too.
    pub(super) fn watch_room(&self, number: u64, socket: BorrowedFd<'_>, wanted: bool) {
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, wanted);
        let data = epoll::EventData::new_u64(number);
        if let Err(error) = epoll::modify(&self.0.sockets, socket, data, flags) {
            tracing::error!(%error, "a controller's process cannot be waited for");
        }
    }

    /// Listens no more. A socket whose other end is closed would wake the thread again and again.
    pub(super) fn remove(&self, socket: BorrowedFd<'_>) {
        if let Err(error) = epoll::delete(&self.0.sockets, socket) {
            tracing::error!(%error, "a controller's process cannot be forgotten");
        }
    }

    /// For an engine's thread.
    pub(super) fn outcome_poll(&self) -> OutcomePoll {
        OutcomePoll {
            polled: Arc::clone(&self.0),
            inner: Mutex::new(TurnState {
                buffer: vec![0; RECEIVED_BYTES],
                in_turn: false,
            }),
        }
    }

    /// Makes the thread look for late processes at this time, at the latest.
    pub(super) fn look_at(&self, time: Instant) {
        let mut state = self.0.lock();
        if state.wakes_at.is_none_or(|wakes_at| time < wakes_at) {
            state.wakes_at = Some(time);
            drop(state);
            self.0.ring();
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        drop(state);
        self.0.ring();
    }
}

impl PollShared {
    fn lock(&self) -> MutexGuard<'_, PollState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        ring(&self.bell);
    }

    fn run(&self) {
        let mut space = [MaybeUninit::uninit(); EVENTS];
        let mut buffer = vec![0; RECEIVED_BYTES];
        loop {
            let state = self.lock();
            if state.closed {
                return;
            }
            let wakes_at = state.wakes_at;
            drop(state);
            let timeout = wakes_at.map(until);
            let events = match wait(&self.thread, &mut space, timeout.as_ref()) {
                Ok(events) => events,
                Err(error) => {
                    return tracing::error!(%error, "controllers' processes cannot be polled");
                }
            };
            let mut has_sockets = false;
            for event in events {
                match event.data.u64() {
                    BELL => clear(&self.bell),
                    _ => has_sockets = true,
                }
            }
            if has_sockets {
                self.receive(&mut buffer, &AT_ONCE, || {});
            }
            if wakes_at.is_some_and(|wakes_at| Instant::now() >= wakes_at) {
                self.end_late(&mut buffer);
            }
        }
    }

    /// Receives what processes have sent, or will send within `timeout`. Calls `awake` after the wait.
    fn receive(&self, buffer: &mut [u8], timeout: &Timespec, awake: impl FnOnce()) {
        let mut space = [MaybeUninit::uninit(); EVENTS];
        let waited = wait(&self.sockets, &mut space, Some(timeout));
        awake();
        let events = match waited {
            Ok(events) => events,
            Err(error) => {
                return tracing::error!(%error, "controllers' processes cannot be polled");
            }
        };
        for event in events {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                BELL => clear(&self.turn_bell),
                number => self.serve(number, flags, buffer),
            }
        }
    }

    fn listen(&self, listens: bool) {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, listens);
        let data = epoll::EventData::new_u64(SOCKETS);
        if let Err(error) = epoll::modify(&self.thread, &self.sockets, data, flags) {
            tracing::error!(%error, "controllers' processes cannot be waited for");
        }
    }

    fn serve(&self, number: u64, flags: epoll::EventFlags, buffer: &mut [u8]) {
        let slot = self.lock().slots.get(&number).cloned();
        let Some(slot) = slot else {
            return;
        };
        if flags.contains(epoll::EventFlags::OUT) {
            slot.send_more();
        }
        // The other thread may receive the same end.
        if slot.receive(buffer) && self.lock().slots.remove(&number).is_some() {
            slot.forget();
        }
    }

    fn end_late(&self, buffer: &mut [u8]) {
        let slots: Vec<_> = {
            let mut state = self.lock();
            state.wakes_at = None;
            state.slots.values().cloned().collect()
        };
        let now = Instant::now();
        let look = slots
            .iter()
            .filter_map(|slot| slot.end_if_late(now, buffer));
        let next = look.min();
        if let Some(next) = next {
            let mut state = self.lock();
            // Another one may have been asked for meanwhile.
            let earlier = state.wakes_at.map_or(next, |wakes_at| wakes_at.min(next));
            state.wakes_at = Some(earlier);
        }
    }
}

impl OutcomePoll {
    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this thread receives what processes send, when it waits.
    pub(crate) fn begin(&self) {
        if !std::mem::replace(&mut self.lock().in_turn, true) {
            self.polled.listen(false);
        }
    }

    /// From now on the poller's thread does.
    pub(crate) fn end(&self) {
        if std::mem::take(&mut self.lock().in_turn) {
            self.polled.listen(true);
        }
    }

    /// Receives what is there, or waits for more, but not longer than `time`, nor after [`Self::wake`]. Calls `awake` when
    /// the wait is over, before anything is received.
    pub(crate) fn wait(&self, time: Duration, awake: impl FnOnce()) {
        let mut inner = self.lock();
        self.polled
            .receive(&mut inner.buffer, &timespec(time), awake);
    }

    /// Ends a wait.
    pub(crate) fn wake(&self) {
        ring(&self.polled.turn_bell);
    }
}

fn ring(bell: &OwnedFd) {
    // It fails only where it has been rung very often, and is ringing.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

fn clear(bell: &OwnedFd) {
    let mut rung = [0; 8];
    let _ = rustix::io::read(bell, &mut rung);
}

/// Waits for events.
fn wait<'s>(
    set: &OwnedFd,
    space: &'s mut [MaybeUninit<epoll::Event>],
    timeout: Option<&Timespec>,
) -> io::Result<&'s mut [epoll::Event]> {
    match epoll::wait(set, space, timeout) {
        Ok((events, _)) => Ok(events),
        Err(rustix::io::Errno::INTR) => Ok(&mut []),
        Err(error) => Err(error.into()),
    }
}

fn until(time: Instant) -> Timespec {
    timespec(time.saturating_duration_since(Instant::now()))
}

fn timespec(time: Duration) -> Timespec {
    // Rounded up, or the thread would wake a moment too early, and again.
    let time = if time.is_zero() {
        time
    } else {
        time + Duration::from_micros(100)
    };
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};
/// The number of a bell; processes begin at 1.
const BELL: u64 = 0;
/// The number of the set of sockets.
const SOCKETS: u64 = 1;
/// Events of one wait.
const EVENTS: usize = 64;
