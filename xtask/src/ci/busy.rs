//! Busy loops beside the tests, to find tests that wait for the clock instead of an event.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Threads that compute until this value is dropped.
pub(super) struct BusyLoops {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyLoops {
    /// Starts `count` threads.
    pub(super) fn start(count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let threads = (0..count).map(|_| std::thread::spawn(spin(Arc::clone(&stop))));
        Self {
            threads: threads.collect(),
            stop,
        }
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The threads cannot panic.
            let _ = thread.join();
        }
    }
}
