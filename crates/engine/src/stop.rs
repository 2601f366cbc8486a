//! A thread-local stop flag for slow work whose result is no longer needed.
//!
//! Rendering and tokenising are plain calls, many layers deep and partly in other crates. So the flag is not an
//! argument but belongs to the thread while the work lasts, like the budget of a template. The work checks it between
//! pieces.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Runs `work`, during which [`stopped`] returns the value of `flag`.
pub fn with<T>(flag: &Arc<AtomicBool>, work: impl FnOnce() -> T) -> T {
    /// Restores the previous flag, also if the work panics: the thread has other work afterwards.
    struct RestoreStopFlag(Option<Arc<AtomicBool>>);
    impl Drop for RestoreStopFlag {
        fn drop(&mut self) {
            let before = self.0.take();
            FLAG.with_borrow_mut(|retained| *retained = before);
        }
    }
    // The previous flag is restored afterwards, because such work may be nested.
    let before = FLAG.with_borrow_mut(|retained| retained.replace(Arc::clone(flag)));
    let _restore = RestoreStopFlag(before);
    work()
}

/// Returns whether the work on this thread may end without a result. Always false outside of [`with`].
#[must_use]
pub fn stopped() -> bool {
    FLAG.with_borrow(|flag| {
        flag.as_ref()
            .is_some_and(|flag| flag.load(Ordering::Relaxed))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_belongs_to_the_thread_during_the_work() {
        let flag = Arc::new(AtomicBool::new(true));
        assert!(!stopped());
        assert!(with(&flag, stopped));
        assert!(!stopped());
        let panicked = std::panic::catch_unwind(|| with(&flag, || panic!("in the work")));
        assert!(panicked.is_err() && !stopped());
    }
}
