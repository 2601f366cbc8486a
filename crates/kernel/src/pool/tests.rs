use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex};

use futures::executor::block_on;

use super::*;

/// Work that blocks until it is released, and reports when it has started.
fn busy(pool: &BlockingPool, turn: u64, size: TaskSize) -> (PoolRun<()>, SyncSender<()>) {
    let (go, gate) = mpsc::sync_channel::<()>(8);
    let (begun, has_begun) = mpsc::sync_channel(8);
    let running = pool.run(turn, size, move || {
        begun.send(()).unwrap();
        // Dropping the sender releases it, too.
        let _ = gate.recv();
    });
    has_begun.recv().unwrap();
    (running, go)
}

/// Queues work that records its name.
fn noted(
    pool: &BlockingPool,
    turn: u64,
    size: TaskSize,
    name: &'static str,
    notes: &SyncSender<&'static str>,
) -> PoolRun<()> {
    let notes = notes.clone();
    pool.run(turn, size, move || notes.send(name).unwrap())
}

fn drain(notes: &Receiver<&'static str>) -> Vec<&'static str> {
    notes.try_iter().collect()
}

#[test]
fn d_54_callers_take_turns_in_the_pool() {
    let pool = BlockingPool::new(2);
    let (_large, _go) = busy(&pool, 9, TaskSize::Large);
    let (small, go) = busy(&pool, 9, TaskSize::Small);
    let (notes, read) = mpsc::sync_channel(8);
    let all = [
        noted(&pool, 1, TaskSize::Small, "1a", &notes),
        noted(&pool, 1, TaskSize::Small, "1b", &notes),
        noted(&pool, 1, TaskSize::Small, "1c", &notes),
        noted(&pool, 2, TaskSize::Small, "2a", &notes),
    ];
    assert_eq!(pool.stats().waiting, 4);
    drop(go);
    block_on(small).unwrap();
    for running in all {
        block_on(running).unwrap();
    }
    assert_eq!(drain(&read), ["1a", "2a", "1b", "1c"]);
}

#[test]
fn small_work_does_not_wait_for_large_work_nor_large_for_all_small() {
    let pool = BlockingPool::new(2);
    let (large, go_large) = busy(&pool, 1, TaskSize::Large);
    let (notes, read) = mpsc::sync_channel(8);
    let waiting = noted(&pool, 1, TaskSize::Large, "large", &notes);
    block_on(noted(&pool, 1, TaskSize::Small, "small", &notes)).unwrap();
    assert_eq!(drain(&read), ["small"], "a thread is kept for small work");
    drop(go_large);
    block_on(large).unwrap();
    block_on(waiting).unwrap();
    assert_eq!(drain(&read), ["large"]);
    // One thread is busy with small work, and more small work waits: the other thread takes the large work.
    let (_small, _go) = busy(&pool, 1, TaskSize::Small);
    let (_second, go_second) = busy(&pool, 1, TaskSize::Small);
    let later = [
        noted(&pool, 1, TaskSize::Small, "small", &notes),
        noted(&pool, 1, TaskSize::Large, "large", &notes),
    ];
    drop(go_second);
    for running in later {
        block_on(running).unwrap();
    }
    assert_eq!(drain(&read), ["large", "small"]);
}

/// Otherwise what arrives later would wait for the longest work of somebody else, whatever its turn.
#[test]
fn d_54_a_caller_with_large_work_leaves_a_thread_to_others() {
    let pool = BlockingPool::new(4);
    let (_first, _go) = busy(&pool, 1, TaskSize::Large);
    let (second, go_second) = busy(&pool, 1, TaskSize::Large);
    let (notes, read) = mpsc::sync_channel(8);
    let third = noted(&pool, 1, TaskSize::Large, "third", &notes);
    block_on(noted(&pool, 2, TaskSize::Large, "other", &notes)).unwrap();
    block_on(noted(&pool, 1, TaskSize::Small, "small", &notes)).unwrap();
    assert_eq!(drain(&read), ["other", "small"]);
    // The other caller's thread is not the third one's either, and then there is none left for a third caller.
    let (_other, _gate) = busy(&pool, 2, TaskSize::Large);
    let last = noted(&pool, 3, TaskSize::Large, "last", &notes);
    block_on(noted(&pool, 2, TaskSize::Small, "small", &notes)).unwrap();
    assert_eq!(drain(&read), ["small"]);
    drop(go_second);
    block_on(second).unwrap();
    block_on(third).unwrap();
    block_on(last).unwrap();
    assert_eq!(drain(&read), ["third", "last"]);
}

#[test]
fn work_of_a_dropped_future_is_removed_or_asked_to_stop() {
    let pool = BlockingPool::new(2);
    let (_large, _go) = busy(&pool, 1, TaskSize::Large);
    let (_small, go) = busy(&pool, 1, TaskSize::Small);
    let (notes, read) = mpsc::sync_channel(8);
    let dropped = noted(&pool, 2, TaskSize::Small, "dropped", &notes);
    drop(dropped);
    assert_eq!(pool.stats().waiting, 0);
    drop(go);
    let (begun, has_begun) = mpsc::sync_channel(8);
    let (ended, has_ended) = mpsc::sync_channel(8);
    let running = pool.run(2, TaskSize::Small, move || {
        begun.send(()).unwrap();
        while !stop::stopped() {
            std::thread::yield_now();
        }
        ended.send(()).unwrap();
    });
    has_begun.recv().unwrap();
    drop(running);
    has_ended.recv().unwrap();
    assert_eq!(drain(&read), [""; 0]);
}

#[test]
fn a_panic_ends_one_piece_of_work() {
    let pool = BlockingPool::new(2);
    let failed: Result<(), _> = block_on(pool.run(1, TaskSize::Small, || panic!("of the test")));
    assert!(matches!(failed, Err(Error::Panicked { .. })), "{failed:?}");
    assert_eq!(pool.stats().panics, 1);
    assert_eq!(block_on(pool.run(1, TaskSize::Small, || 7)).unwrap(), 7);
}

/// Otherwise the second panic, out of the thread's own loop, would end the thread.
#[test]
fn a_panic_whose_payload_panics_ends_one_piece_of_work() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            panic!("while the payload is dropped");
        }
    }
    let pool = BlockingPool::new(2);
    let work = || std::panic::panic_any(Payload);
    let failed: Result<(), _> = block_on(pool.run(1, TaskSize::Small, work));
    assert!(matches!(failed, Err(Error::Panicked { .. })), "{failed:?}");
    assert_eq!(pool.stats().panics, 1);
    assert_eq!(block_on(pool.run(1, TaskSize::Small, || 7)).unwrap(), 7);
}

#[test]
fn the_queue_of_one_caller_is_limited_and_others_still_enter() {
    let pool = BlockingPool::new(2);
    let (_large, _go) = busy(&pool, 9, TaskSize::Large);
    let (_small, _gate) = busy(&pool, 9, TaskSize::Small);
    let nothing = |turn| pool.run(turn, TaskSize::Small, || ());
    let waiting: Vec<_> = (0..QUEUE_EACH_MAX).map(|_| nothing(1)).collect();
    let refused = block_on(nothing(1)).unwrap_err();
    assert_eq!(
        (refused.code(), refused.reason()),
        (Code::Overloaded, "ENGINE_BUSY")
    );
    let _other = nothing(2);
    assert_eq!(pool.stats().waiting, QUEUE_EACH_MAX + 1);
    assert_eq!(pool.stats().refused, 1);
    drop(waiting);
    assert_eq!(pool.stats().waiting, 1);
}

#[test]
fn captured_values_are_dropped_outside_the_lock() {
    /// Calls the pool while it is dropped.
    struct Asks(BlockingPool, Arc<Mutex<usize>>);
    impl Drop for Asks {
        fn drop(&mut self) {
            *self.1.lock().unwrap() = self.0.stats().waiting + 1;
        }
    }
    let pool = BlockingPool::new(2);
    let (_large, _go) = busy(&pool, 1, TaskSize::Large);
    let (_small, _gate) = busy(&pool, 1, TaskSize::Small);
    let seen = Arc::new(Mutex::new(0));
    let asks = Asks(pool.clone(), Arc::clone(&seen));
    let running = pool.run(1, TaskSize::Small, move || drop(asks));
    drop(running);
    assert_eq!(*seen.lock().unwrap(), 1);
}
