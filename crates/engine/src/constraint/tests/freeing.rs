//! Large automata are freed on the threads of masks: the engine's thread drops them, and serves all other requests.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, ThreadId};
use std::time::Duration;

use super::super::ConstraintSource;
use super::super::mask_workers::{FREED_MAX, MaskWorkers};
use super::driver::{Random, Sequence, open, source};

/// Says which thread drops it, and then waits for its gate, if it has one.
struct Noted {
    dropped: SyncSender<ThreadId>,
    gate: Option<Receiver<()>>,
}

impl Drop for Noted {
    fn drop(&mut self) {
        let _sent = self.dropped.send(thread::current().id());
        if let Some(gate) = &self.gate {
            // Not for ever, if it is dropped by the thread that would open it.
            let _opened = gate.recv_timeout(WAIT_MAX);
        }
    }
}

const WAIT_MAX: Duration = Duration::from_secs(20);

/// The only worker is held up until the result is dropped or sent to.
fn hold_up(workers: &MaskWorkers) -> SyncSender<()> {
    let (dropped, freed) = sync_channel(1);
    let (open, gate) = sync_channel(1);
    workers.free(Box::new(Noted {
        dropped,
        gate: Some(gate),
    }));
    assert_ne!(freed.recv().unwrap(), thread::current().id());
    open
}

/// Waits until the only worker has done what it was asked for.
fn wait_for(workers: &MaskWorkers) {
    let (dropped, freed) = sync_channel(1);
    workers.free(Box::new(Noted {
        dropped,
        gate: None,
    }));
    freed.recv().unwrap();
}

#[test]
fn ai_811_so_many_values_wait_to_be_freed_and_more_are_freed_at_once() {
    let workers = MaskWorkers::with_threads(1);
    let open = hold_up(&workers);
    let (dropped, freed) = sync_channel(FREED_MAX + 1);
    let noted = || Noted {
        dropped: dropped.clone(),
        gate: None,
    };
    for _ in 0..FREED_MAX {
        workers.free(Box::new(noted()));
    }
    assert_eq!(freed.try_recv(), Err(TryRecvError::Empty));
    workers.free(Box::new(noted()));
    assert_eq!(freed.try_recv(), Ok(thread::current().id()));
    drop(open);
    for _ in 0..FREED_MAX {
        assert_ne!(freed.recv().unwrap(), thread::current().id());
    }
}

/// A sequence whose automaton takes more than is kept for others.
fn large(source: &ConstraintSource) -> Sequence {
    // Each state is another set of positions of `a`.
    let steer = open(source, "sapwood:regex", "[ab]*a[ab]{60}c").unwrap();
    let mut sequence = Sequence::new(steer);
    let mut random = Random::new(3);
    let before = source.budget.used();
    while source.budget.used() < before + LARGE_BYTES {
        let token = u32::from(b'a') + u32::from(random.below(2) == 1);
        sequence.forced().unwrap();
        sequence.mid().unwrap();
        sequence.append(0, &[token], Some(token)).unwrap();
    }
    sequence
}

/// Charged for caches of 1 MiB, with some more for what else there is.
const LARGE_BYTES: usize = 5 << 19;

#[test]
fn ai_811_a_large_automaton_is_not_freed_by_who_drops_its_sequence() {
    let source = source();
    for has_mask in [false, true] {
        let mut sequence = large(&source);
        if has_mask {
            sequence.steer.mid_begin(&[0]);
            wait_for(&source.workers);
        }
        let used = source.budget.used();
        let open = hold_up(&source.workers);
        drop(sequence);
        assert_eq!(source.budget.used(), used);
        drop(open);
        wait_for(&source.workers);
        assert!(source.budget.used() <= used - LARGE_BYTES);
    }
}
