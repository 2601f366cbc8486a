//! The waker of a session's task, under a model checker (D-2).
//!
//! The very file that runs, `src/session/task_waker.rs`, is compiled here once more over loom's primitives; loom then tries
//! every interleaving of the task and of a wake-up. A lost wake-up is a deadlock, which loom reports. An ordinary test:
//! `cargo test -p sapwood-kernel --test task_waker_loom --release`.

#[path = "../src/session/task_waker.rs"]
mod task_waker;

/// What `src/sync.rs` is in the library.
mod sync {
    use std::task::Waker;

    pub(crate) use loom::sync::atomic::AtomicU8;

    /// Loom's, with the interface of the one in `futures`.
    pub(crate) struct AtomicWaker(loom::future::AtomicWaker);

    impl Default for AtomicWaker {
        fn default() -> Self {
            Self(loom::future::AtomicWaker::new())
        }
    }

    impl std::fmt::Debug for AtomicWaker {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("AtomicWaker")
        }
    }

    impl AtomicWaker {
        pub(crate) fn register(&self, waker: &Waker) {
            self.0.register_by_ref(waker);
        }

        pub(crate) fn wake(&self) {
            self.0.wake();
        }
    }
}

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Wake, Waker};

use loom::future::block_on;
use loom::sync::atomic::AtomicBool;
use loom::thread;
use task_waker::TaskWaker;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    // Three threads with up to this many preemptions: every lost wake-up known needs two.
    checker.preemption_bound = Some(2);
    checker.check(model);
}

#[test]
fn d_2_the_task_of_a_session_misses_no_wake_up() {
    check(|| {
        let bell = Arc::new(TaskWaker::default());
        let rung = Arc::new(AtomicBool::new(false));
        let ringer = {
            let (bell, rung) = (bell.clone(), rung.clone());
            thread::spawn(move || {
                rung.store(true, Ordering::SeqCst);
                bell.wake_by_ref();
            })
        };
        // As `Driver::poll_session` does.
        block_on(poll_fn(|cx| {
            bell.attend(cx.waker());
            loop {
                if rung.load(Ordering::SeqCst) {
                    return Poll::Ready(());
                }
                if bell.leave() {
                    return Poll::Pending;
                }
                bell.attend(cx.waker());
            }
        }));
        ringer.join().unwrap();
    });
}

#[test]
fn d_2_a_task_that_is_polling_is_not_woken() {
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    loom::model(|| {
        let woken = Arc::new(Count(AtomicUsize::new(0)));
        let owner = Waker::from(woken.clone());
        let bell = Arc::new(TaskWaker::default());
        let ringer = Waker::from(bell.clone());
        ringer.wake_by_ref();
        bell.attend(&owner);
        assert!(!bell.has_rung(), "earlier wake-ups are cleared");
        ringer.wake_by_ref();
        ringer.wake_by_ref();
        assert!(bell.has_rung() && !bell.leave());
        assert_eq!(woken.0.load(Ordering::SeqCst), 0, "the owner is polling");
        bell.attend(&owner);
        assert!(bell.leave());
        ringer.wake_by_ref();
        ringer.wake_by_ref();
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(bell.has_rung());
    });
}
