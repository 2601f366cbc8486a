//! The hand-over of messages between two processes, under a model checker (AI-211, AI-213).
//!
//! The very files that run, `src/wire/slot.rs` and `src/wire/word.rs`, are compiled here once more over a model of what the
//! system gives them: memory whose bytes become visible in any order that the orderings of `word` allow, futexes,
//! semaphores, and a clock. loom then tries every interleaving of a sender and a receiver. A lost wake-up is a deadlock,
//! which loom reports; a message that is read before it is whole has the wrong bytes. A process may end after any of its
//! accesses: the model lets all later ones do nothing. An ordinary test:
//! `cargo test -p sapwood-control --test slot_loom --release`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[expect(
    unreachable_pub,
    dead_code,
    reason = "the library and its own tests use all of it"
)]
#[path = "../src/wire/slot.rs"]
mod slot;
#[path = "../src/wire/word.rs"]
mod word;

/// What `word` is made of.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering, fence};
}

/// What `src/wire/spin.rs` is in the library: asks twice, with or without luck.
mod spin {
    #[derive(Debug)]
    pub(super) struct Spin;

    impl Spin {
        #[expect(clippy::needless_pass_by_ref_mut, reason = "as in the library")]
        pub(super) fn until(&mut self, mut ready: impl FnMut() -> bool) -> bool {
            ready() || ready()
        }
    }
}

/// What `src/wire/system.rs` is in the library.
mod system {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering as Plain};
    use std::time::{Duration, Instant};

    use loom::sync::atomic::{AtomicU8, AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    use super::word;

    /// The time of the model, which passes while somebody waits. No part of what is explored; a model runs on one thread.
    #[derive(Clone, Copy, Debug)]
    struct Clock {
        start: Instant,
        passed: Duration,
        runs: bool,
    }

    thread_local! {
        static CLOCK: Cell<Clock> = Cell::new(Clock {
            start: Instant::now(),
            passed: Duration::ZERO,
            runs: false,
        });
    }

    pub(super) fn now() -> Instant {
        let clock = CLOCK.get();
        clock.start + clock.passed
    }

    /// Begins a model, in which waits end by their time or only by what they wait for.
    pub(super) fn reset_clock(runs: bool) {
        CLOCK.set(Clock {
            passed: Duration::ZERO,
            runs,
            ..CLOCK.get()
        });
    }

    /// A process that may end: it has so many accesses left. `None`: it does not end.
    #[derive(Clone, Debug)]
    pub(super) struct Process {
        left: Option<Arc<AtomicU64>>,
    }

    impl Process {
        pub(super) fn immortal() -> Self {
            Self { left: None }
        }

        pub(super) fn ending_after(accesses: u64) -> Self {
            Self {
                left: Some(Arc::new(AtomicU64::new(accesses))),
            }
        }

        /// Whether it still runs; counts an access.
        fn runs(&self) -> bool {
            self.left.as_ref().is_none_or(|left| {
                let one_less = |left: u64| left.checked_sub(1);
                left.fetch_update(Plain::Relaxed, Plain::Relaxed, one_less)
                    .is_ok()
            })
        }
    }

    /// Lets another thread go on, as long as one can; then `time` has passed.
    fn pass(time: Duration) {
        let until = CLOCK.get().passed + time;
        loom::thread::yield_now();
        let clock = CLOCK.get();
        if clock.runs {
            CLOCK.set(Clock {
                passed: clock.passed.max(until),
                ..clock
            });
        }
    }

    /// Shared memory: one word, which is at offset 0, and the bytes after it.
    #[derive(Debug)]
    pub(super) struct Memory {
        word: AtomicU32,
        bytes: Vec<AtomicU8>,
        /// The kernel's queue of those who sleep on the word: it compares the word under this lock.
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl Memory {
        pub(super) fn new() -> Arc<Self> {
            Arc::new(Self {
                word: AtomicU32::new(0),
                bytes: (0..MESSAGE_BYTES).map(|_| AtomicU8::new(0)).collect(),
                queue: Mutex::new(()),
                woken: Condvar::new(),
            })
        }
    }

    /// Bytes of the longest message of these models.
    const MESSAGE_BYTES: usize = 2;

    /// The memory as one process has it: mapped, or, of a guarded region, through a descriptor.
    #[derive(Debug)]
    pub(super) struct SharedRegion {
        memory: Arc<Memory>,
        process: Process,
        is_guarded: bool,
    }

    impl SharedRegion {
        pub(super) fn new(memory: &Arc<Memory>, process: &Process, is_guarded: bool) -> Self {
            Self {
                memory: Arc::clone(memory),
                process: process.clone(),
                is_guarded,
            }
        }

        pub(super) fn bytes(&self) -> usize {
            // With futexes half of it is for the other direction, and 16 bytes of each half are never used.
            2 * (MESSAGE_BYTES + 16)
        }

        pub(super) fn load(&self, _: usize) -> Option<u32> {
            if !self.process.runs() {
                return None;
            }
            if !self.is_guarded {
                return Some(word::load(&self.memory.word));
            }
            let value = self.memory.word.load(Ordering::Relaxed);
            word::was_read();
            Some(value)
        }

        pub(super) fn store(&self, _: usize, value: u32) -> bool {
            if !self.process.runs() {
                return false;
            }
            if self.is_guarded {
                word::is_about_to_be_written();
                self.memory.word.store(value, Ordering::Relaxed);
            } else {
                word::store(&self.memory.word, value);
            }
            true
        }

        pub(super) fn replace(&self, offset: usize, old: u32, new: u32) -> bool {
            if self.is_guarded {
                return self.load(offset) == Some(old) && self.store(offset, new);
            }
            self.process.runs() && word::replace(&self.memory.word, old, new)
        }

        pub(super) fn read(&self, _: usize, bytes: usize, into: &mut Vec<u8>) -> bool {
            let bytes = self.memory.bytes.iter().take(bytes);
            into.extend(bytes.map(|byte| byte.load(Ordering::Relaxed)));
            self.process.runs()
        }

        pub(super) fn write(&self, _: usize, bytes: &[u8]) -> bool {
            // A process may end between any two of them.
            self.memory.bytes.iter().zip(bytes).all(|(byte, value)| {
                let runs = self.process.runs();
                if runs {
                    byte.store(*value, Ordering::Relaxed);
                }
                runs
            })
        }

        pub(super) fn sleep(&self, _: usize, value: u32, time: Option<Duration>) {
            if !self.process.runs() {
                return;
            }
            let queue = self.memory.queue.lock().unwrap();
            if self.memory.word.load(Ordering::SeqCst) != value {
                return;
            }
            match time {
                None => drop(self.memory.woken.wait(queue).unwrap()),
                Some(time) => {
                    drop(queue);
                    pass(time);
                }
            }
        }

        pub(super) fn wake(&self, _: usize) {
            if self.process.runs() {
                let _queue = self.memory.queue.lock().unwrap();
                self.memory.woken.notify_all();
            }
        }
    }

    /// The value of a semaphore.
    #[derive(Debug)]
    pub(super) struct Semaphore {
        value: Mutex<u32>,
        posted: Condvar,
    }

    impl Semaphore {
        pub(super) fn new(value: u32) -> Arc<Self> {
            Arc::new(Self {
                value: Mutex::new(value),
                posted: Condvar::new(),
            })
        }
    }

    /// A semaphore as one process has it.
    #[derive(Debug)]
    pub(super) struct NamedSemaphore {
        semaphore: Arc<Semaphore>,
        process: Process,
    }

    impl NamedSemaphore {
        pub(super) fn new(semaphore: &Arc<Semaphore>, process: &Process) -> Self {
            Self {
                semaphore: Arc::clone(semaphore),
                process: process.clone(),
            }
        }

        pub(super) fn post(&self) {
            if self.process.runs() {
                *self.semaphore.value.lock().unwrap() += 1;
                self.semaphore.posted.notify_one();
            }
        }

        pub(super) fn try_wait(&self) -> bool {
            if !self.process.runs() {
                return false;
            }
            take(&mut self.semaphore.value.lock().unwrap())
        }

        pub(super) fn wait(&self, until: Option<Instant>) -> bool {
            while self.process.runs() {
                let mut value = self.semaphore.value.lock().unwrap();
                if take(&mut value) {
                    return true;
                }
                let Some(until) = until else {
                    drop(self.semaphore.posted.wait(value).unwrap());
                    continue;
                };
                drop(value);
                let left = until.saturating_duration_since(now());
                if left.is_zero() {
                    return false;
                }
                pass(left);
            }
            false
        }
    }

    fn take(value: &mut u32) -> bool {
        let taken = *value > 0;
        *value -= u32::from(taken);
        taken
    }
}

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use slot::{Guard, MessageSlot, Received, SlotLimits};
use spin::Spin;
use system::{Memory, NamedSemaphore, Process, Semaphore, SharedRegion, now, reset_clock};

/// One direction of a channel, in memory that all processes share.
#[derive(Clone)]
struct Channel {
    memory: Arc<Memory>,
    /// `wr` and `rd`; none: a futex.
    semaphores: Option<[Arc<Semaphore>; 2]>,
}

impl Channel {
    fn new(synchronisation: Synchronisation, clock_runs: bool) -> Self {
        reset_clock(clock_runs);
        let semaphores = match synchronisation {
            Synchronisation::Semaphores => Some([Semaphore::new(1), Semaphore::new(0)]),
            Synchronisation::Futex => None,
        };
        Self {
            memory: Memory::new(),
            semaphores,
        }
    }

    /// The end that this process has.
    fn end(&self, process: &Process, is_guarded: bool) -> MessageSlot {
        let guard = match &self.semaphores {
            Some([wr, rd]) => Guard::Semaphores {
                wr: NamedSemaphore::new(wr, process),
                rd: NamedSemaphore::new(rd, process),
            },
            None => Guard::Futex { word: 0 },
        };
        let region = SharedRegion::new(&self.memory, process, is_guarded);
        let limits = SlotLimits {
            stall: Duration::from_millis(2),
            unread: Duration::from_millis(4),
        };
        MessageSlot::new(region, guard, Spin, limits)
    }
}

#[derive(Clone, Copy, Debug)]
enum Synchronisation {
    Semaphores,
    Futex,
}

/// The engine has its end guarded, and it sends in one direction and receives in the other.
const SETUPS: [(Synchronisation, bool); 4] = [
    (Synchronisation::Semaphores, true),
    (Synchronisation::Semaphores, false),
    (Synchronisation::Futex, true),
    (Synchronisation::Futex, false),
];

/// Of different bytes, so that a mixture of two is neither.
const MESSAGES: [&[u8]; 2] = [b"ab", b"cd"];

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    // Two threads with up to this many preemptions: every lost wake-up known needs two.
    checker.preemption_bound = Some(2);
    checker.check(model);
}

#[test]
fn ai_211_no_wake_up_is_lost_and_no_message_is_read_before_it_is_whole() {
    for (synchronisation, engine_sends) in SETUPS {
        check(move || {
            let channel = Channel::new(synchronisation, false);
            let process = Process::immortal();
            let mut sender = channel.end(&process, engine_sends);
            let mut receiver = channel.end(&process, !engine_sends);
            let sending = thread::spawn(move || {
                for message in MESSAGES {
                    sender.send(message).unwrap();
                }
            });
            for expected in MESSAGES {
                let mut message = Vec::new();
                let received = receiver.receive(&mut message, None);
                assert_eq!((received, &message[..]), (Ok(Received::Message), expected));
            }
            sending.join().unwrap();
        });
    }
}

/// As many accesses as two messages take.
const ACCESSES: u64 = 12;

#[test]
fn ai_213_a_sender_that_ends_at_any_moment_leaves_no_part_of_a_message_and_nobody_waiting() {
    for (synchronisation, engine_sends) in SETUPS {
        for accesses in 0..=ACCESSES {
            check(move || {
                let channel = Channel::new(synchronisation, true);
                let mut sender = channel.end(&Process::ending_after(accesses), engine_sends);
                let mut receiver = channel.end(&Process::immortal(), !engine_sends);
                let sending = thread::spawn(move || {
                    let _ = MESSAGES.map(|message| sender.send(message));
                });
                for expected in MESSAGES {
                    let mut message = Vec::new();
                    let until = now() + Duration::from_millis(100);
                    match receiver.receive(&mut message, Some(until)) {
                        Ok(Received::Message) => assert_eq!(message, expected),
                        Ok(Received::Nothing) | Err(_) => break,
                        Ok(too_long) => panic!("{too_long:?}"),
                    }
                }
                sending.join().unwrap();
            });
        }
    }
}

#[test]
fn ai_245_a_receiver_that_ends_at_any_moment_leaves_no_sender_waiting() {
    for (synchronisation, engine_sends) in SETUPS {
        for accesses in 0..=ACCESSES {
            check(move || {
                let channel = Channel::new(synchronisation, true);
                let mut sender = channel.end(&Process::immortal(), engine_sends);
                let mut receiver = channel.end(&Process::ending_after(accesses), !engine_sends);
                let receiving = thread::spawn(move || {
                    for expected in MESSAGES {
                        let mut message = Vec::new();
                        let until = now() + Duration::from_millis(100);
                        if receiver.receive(&mut message, Some(until)) != Ok(Received::Message) {
                            break;
                        }
                        assert_eq!(message, expected);
                    }
                });
                for message in MESSAGES {
                    if sender.send(message).is_err() {
                        break;
                    }
                }
                receiving.join().unwrap();
            });
        }
    }
}
