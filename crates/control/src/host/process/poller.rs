//! [`Poller`]: the thread of the runtime that receives what controllers' processes send, and ends those that are late.

use std::collections::HashMap;
use std::fmt;
use std::io;
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

    /// Kills the process if it is late; else returns when it would be.
    fn end_if_late(&self, now: Instant) -> Option<Instant>;

    /// The process has ended, and its memory is free.
    fn forget(&self);
}

/// The thread, and the sockets it waits on. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct Poller(Arc<PollShared>);

#[derive(Debug)]
struct PollShared {
    epoll: OwnedFd,
    /// Ends a wait.
    bell: OwnedFd,
    state: Mutex<PollState>,
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
        let polled = Arc::new(PollShared {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            state: Mutex::default(),
        });
        epoll::add(
            &polled.epoll,
            &polled.bell,
            epoll::EventData::new_u64(BELL),
            epoll::EventFlags::IN,
        )?;
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
        epoll::add(&self.0.epoll, socket, data, epoll::EventFlags::IN).inspect_err(|_| {
            self.0.lock().slots.remove(&number);
        })?;
        Ok(())
    }

    /// Whether to wait for room to send, too.
    pub(super) fn watch_room(&self, number: u64, socket: BorrowedFd<'_>, wanted: bool) {
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, wanted);
        let data = epoll::EventData::new_u64(number);
        if let Err(error) = epoll::modify(&self.0.epoll, socket, data, flags) {
            tracing::error!(%error, "a controller's process cannot be waited for");
        }
    }

    /// Listens no more. A socket whose other end is closed would wake the thread again and again.
    pub(super) fn remove(&self, socket: BorrowedFd<'_>) {
        if let Err(error) = epoll::delete(&self.0.epoll, socket) {
            tracing::error!(%error, "a controller's process cannot be forgotten");
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
        // It fails only where it has been rung very often, and is ringing.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS);
        let mut buffer = vec![0; RECEIVED_BYTES];
        loop {
            let state = self.lock();
            if state.closed {
                return;
            }
            let wakes_at = state.wakes_at;
            drop(state);
            events.clear();
            let timeout = wakes_at.map(until);
            let space = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, space, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return tracing::error!(%error, "controllers' processes cannot be polled");
                }
            }
            for event in &events {
                let (data, flags) = (event.data, event.flags);
                match data.u64() {
                    BELL => {
                        let mut rung = [0; 8];
                        let _ = rustix::io::read(&self.bell, &mut rung);
                    }
                    number => self.serve(number, flags, &mut buffer),
                }
            }
            if wakes_at.is_some_and(|wakes_at| Instant::now() >= wakes_at) {
                self.end_late();
            }
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
        if slot.receive(buffer) {
            slot.forget();
            self.lock().slots.remove(&number);
        }
    }

    fn end_late(&self) {
        let slots: Vec<_> = {
            let mut state = self.lock();
            state.wakes_at = None;
            state.slots.values().cloned().collect()
        };
        let now = Instant::now();
        let next = slots.iter().filter_map(|slot| slot.end_if_late(now)).min();
        if let Some(next) = next {
            let mut state = self.lock();
            // Another one may have been asked for meanwhile.
            let earlier = state.wakes_at.map_or(next, |wakes_at| wakes_at.min(next));
            state.wakes_at = Some(earlier);
        }
    }
}

fn until(time: Instant) -> Timespec {
    // Rounded up, or the thread would wake a moment too early, and again.
    let left = time.saturating_duration_since(Instant::now()) + Duration::from_micros(100);
    Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    }
}

/// The number of the bell; processes begin at 1.
const BELL: u64 = 0;
/// Events of one wait.
const EVENTS: usize = 64;
