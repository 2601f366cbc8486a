//! A bounded queue between log writers and standard error.
//!
//! ```text
//!   any thread ── push: queued, or counted as dropped ──► thread `log` ── write, may block ──► standard error
//! ```
//!
//! `push` never waits for the reader, so a blocked pipe costs log lines and nothing else. When the reader continues,
//! one line reports how many are missing.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The queue. Clones share it.
#[derive(Clone)]
pub(crate) struct LogQueue(Arc<LogQueueShared>);

struct LogQueueShared {
    state: Mutex<LogQueueState>,
    /// Notified when a line is queued.
    queued: Condvar,
    /// Notified when a line is written.
    written: Condvar,
    dropped: Arc<AtomicU64>,
    bytes_max: usize,
}

#[derive(Default)]
struct LogQueueState {
    lines: VecDeque<Vec<u8>>,
    /// Bytes of all `lines`.
    bytes: usize,
    /// Whether a line is being written.
    writing: bool,
    /// Number of lines written or lost so far; a waiting thread sees by it whether the reader makes progress.
    done: u64,
}

impl LogQueue {
    /// A queue with a thread that writes it to `sink`, and calls `missed` with the number of dropped lines when it can
    /// write again. The thread ends with the process.
    ///
    /// # Errors
    /// The system provides no thread.
    pub(crate) fn start(
        bytes_max: usize,
        sink: impl Write + Send + 'static,
        missed: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        let queue = Self(Arc::new(LogQueueShared {
            state: Mutex::default(),
            queued: Condvar::new(),
            written: Condvar::new(),
            dropped: Arc::default(),
            bytes_max,
        }));
        let theirs = queue.clone();
        let thread = std::thread::Builder::new().name("log".into());
        thread.spawn(move || theirs.empty(sink, missed))?;
        Ok(queue)
    }

    /// Queues a line, or counts it as dropped if the queue is full.
    pub(crate) fn push(&self, line: &[u8]) {
        let mut state = self.state();
        // Dropped without waiting for room: no writer of a log may depend on its reader.
        if state.bytes + line.len() > self.0.bytes_max {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line.to_vec());
        self.0.queued.notify_one();
    }

    /// Number of dropped lines so far.
    pub(crate) fn dropped(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.0.dropped)
    }

    /// Waits until everything is written, as long as each line is written within `timeouts`.
    pub(crate) fn flush(&self, timeouts: Duration) {
        let mut state = self.state();
        while state.writing || !state.lines.is_empty() {
            // The timeout is for one line, so a slow reader that makes progress gets everything.
            let before = state.done;
            let waited = self.0.written.wait_timeout_while(state, timeouts, |state| {
                state.done == before && (state.writing || !state.lines.is_empty())
            });
            let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return;
            }
            state = after;
        }
    }

    fn state(&self) -> MutexGuard<'_, LogQueueState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Vec<u8> {
        let mut state = self.state();
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.len();
                // Under the same lock as the removal, or `flush` would find an empty queue before the line is written.
                state.writing = true;
                return line;
            }
            let waited = self.0.queued.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn empty(&self, mut sink: impl Write, missed: impl Fn(u64)) {
        let mut reported = 0;
        loop {
            let line = self.next();
            // A broken pipe must not end the server either.
            let written = sink.write_all(&line).and_then(|()| sink.flush());
            if written.is_err() {
                self.0.dropped.fetch_add(1, Ordering::Relaxed);
            }
            let dropped = self.0.dropped.load(Ordering::Relaxed);
            // Reports only when there is room again, or the report would be dropped too.
            let has_room = self.state().bytes <= self.0.bytes_max / 2;
            if written.is_ok() && has_room && dropped > reported {
                // Called without the lock: the report is a log line itself, and comes back through `push`.
                missed(dropped - reported);
                reported = dropped;
            }
            let mut state = self.state();
            state.writing = false;
            state.done += 1;
            drop(state);
            self.0.written.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    use super::*;

    /// A reader that accepts a line when the test allows it.
    struct Slow {
        allowed: Receiver<()>,
        took: SyncSender<String>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let stopped = |_| io::Error::from(io::ErrorKind::BrokenPipe);
            self.allowed.recv().map_err(stopped)?;
            let line = String::from_utf8_lossy(bytes).into_owned();
            self.took
                .send(line)
                .map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stalled_reader_costs_lines_that_are_counted() {
        let (allow, allowed) = sync_channel(100);
        let (took, taken) = sync_channel(100);
        let (missed, reported) = sync_channel(100);
        let queue = LogQueue::start(8, Slow { allowed, took }, move |count| {
            missed.send(count).unwrap();
        })
        .unwrap();
        queue.push(b"first");
        // It is being written now and does not count any more.
        while !queue.state().writing {
            std::thread::yield_now();
        }
        // At the limit, and one past it.
        queue.push(b"1234");
        queue.push(b"5678");
        queue.push(b"9");
        queue.push(b"");
        assert_eq!(queue.dropped().load(Ordering::Relaxed), 1);
        queue.flush(Duration::ZERO);
        for _ in 0..4 {
            allow.send(()).unwrap();
        }
        let lines: Vec<_> = (0..3).map(|_| taken.recv().unwrap()).collect();
        assert_eq!(lines, ["first", "1234", "5678"]);
        assert_eq!(reported.recv().unwrap(), 1);
        // There is room again.
        queue.push(b"more");
        assert_eq!(taken.recv().unwrap(), "more");
        queue.flush(Duration::from_secs(3600));
        assert_eq!(queue.dropped().load(Ordering::Relaxed), 1);
        assert!(reported.try_recv().is_err());
    }

    #[test]
    fn a_closed_reader_blocks_no_writer() {
        let (allow, allowed) = sync_channel(1);
        let (took, _) = sync_channel(1);
        drop(allow);
        let queue = LogQueue::start(100, Slow { allowed, took }, |_| ()).unwrap();
        for _ in 0..3 {
            queue.push(b"a line");
        }
        queue.flush(Duration::from_secs(3600));
        assert_eq!(queue.dropped().load(Ordering::Relaxed), 3);
    }
}
