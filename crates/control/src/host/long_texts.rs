//! [`LongTexts`]: tokenises the long texts of controllers on threads of their own (AI-731).
//!
//! A tokenizer cannot be interrupted, nor can a text be cut for every tokenizer without a change of the tokens, and a
//! mebibyte takes it up to a second. So a callback waits for another thread, and no longer than its own time. A thread
//! that is late goes on to the end of its text, and nobody wants the tokens. It counts until then, so that strangers
//! occupy no more processors than there are threads.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;

use super::failure::Abort;

/// A limited number of threads, which exist only while they have a text.
#[derive(Debug)]
pub(super) struct LongTexts {
    free: Mutex<usize>,
    freed: Condvar,
}

/// The right to one thread.
struct Permit(Arc<LongTexts>);

impl LongTexts {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            free: Mutex::new(threads.max(1)),
            freed: Condvar::new(),
        }
    }

    /// Runs `work` on a thread, and waits for as long as `check` allows it. A panic of `work` goes on here. `work` is told
    /// whether nobody waits any more.
    ///
    /// # Errors
    /// That of `check`, or the system has no thread to give.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        check: impl Fn() -> Result<(), Abort>,
        work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static,
    ) -> Result<T, Abort> {
        let permit = self.permit(&check)?;
        let waiting = Arc::new(());
        let watched = Arc::downgrade(&waiting);
        let (sender, receiver) = sync_channel(1);
        let thread = thread::Builder::new()
            .name("controller-text".to_owned())
            .spawn(move || {
                let done = catch_unwind(AssertUnwindSafe(|| work(&|| watched.strong_count() == 0)));
                drop(permit);
                // If it is late, the receiver is gone.
                let _sent = sender.send(done);
            });
        if let Err(error) = thread {
            tracing::warn!(%error, "no thread for a long text");
            let text = "tokenize: there is no thread for a long text";
            return Err(Abort::limit(ErrorReason::LIMIT, text));
        }
        loop {
            match receiver.recv_timeout(LOOK_TIME) {
                Ok(Ok(result)) => return Ok(result),
                Ok(Err(panic)) => resume_unwind(panic),
                Err(RecvTimeoutError::Timeout) => check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Abort::trap("tokenize: the text has no tokens"));
                }
            }
        }
    }

    fn permit(self: &Arc<Self>, check: &impl Fn() -> Result<(), Abort>) -> Result<Permit, Abort> {
        let mut free = self.free();
        while *free == 0 {
            check()?;
            let waited = self.freed.wait_timeout(free, LOOK_TIME);
            free = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *free -= 1;
        Ok(Permit(Arc::clone(self)))
    }

    fn free(&self) -> MutexGuard<'_, usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *self.0.free() += 1;
        self.0.freed.notify_one();
    }
}

/// Bytes of a text that is tokenised at once: less than a millisecond's work, and more than a thread costs.
pub(super) const AT_ONCE_BYTES: usize = 4 << 10;
/// How often a callback that waits looks whether it must end.
const LOOK_TIME: Duration = Duration::from_millis(2);
