//! How runs end: errors, cancels, deadlines, panics, and what is dropped then.

use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::function::Fun;
use crate::layer::Next;
use crate::spec::InputSpec;
use crate::{Chunks, args};

#[test]
fn ke_311_an_error_is_the_last_item_for_ever() {
    let kernel = Kernel::new();
    kernel
        .add(raw(spec(), |_| {
            stream::iter([
                Ok(Chunk::text("a")),
                Err(Error::Released),
                Ok(Chunk::text("b")),
                Err(Error::Deadline),
            ])
            .boxed()
        }))
        .unwrap();
    let mut run = kernel.run::<String>("f", ());
    let items: Vec<_> = block_on(run.by_ref().collect());
    assert!(matches!(&items[..], [Ok(_), Err(Error::Released)]));
    for _ in 0..3 {
        assert!(block_on(run.next()).is_none());
    }
    assert!(run.is_terminated());
}

/// Reports when it is dropped.
struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn guarded(live: &Arc<AtomicUsize>, pauses: usize) -> Fun {
    let live = live.clone();
    raw(spec(), move |_| {
        let live = live.clone();
        let once = async move {
            live.fetch_add(1, Ordering::SeqCst);
            let guard = Guard(live);
            for _ in 0..pauses {
                let mut woken = false;
                std::future::poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if std::mem::replace(&mut woken, true) {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
            }
            drop(guard);
            Ok(Chunk::text("done"))
        };
        stream::once(once).boxed()
    })
}

proptest! {
    /// KE-131
    #[test]
    fn ke_501_a_drop_at_any_poll_leaves_no_live_guard(polls in 0_usize..12, pauses in 0_usize..8, layered in any::<bool>()) {
        let live = Arc::new(AtomicUsize::new(0));
        let kernel = Kernel::new();
        kernel.add(guarded(&live, pauses)).unwrap();
        if layered {
            kernel.layer(|call: Call, next: Next| -> Chunks { next.call(call).map(|item| item).boxed() });
        }
        let mut run = kernel.run::<String>("f", ());
        let cancel = run.cancel();
        for _ in 0..polls {
            let _any = poll_once(&mut run, Waker::noop());
        }
        drop(run);
        prop_assert_eq!(live.load(Ordering::SeqCst), 0);
        prop_assert!(cancel.is_cancelled());
    }
}

#[test]
fn ke_131_a_call_does_nothing_before_its_first_poll() {
    let live = Arc::new(AtomicUsize::new(0));
    let kernel = Kernel::new();
    kernel.add(guarded(&live, 1)).unwrap();
    let mut run = kernel.run::<String>("f", ());
    assert_eq!(live.load(Ordering::SeqCst), 0);
    assert!(poll_once(&mut run, Waker::noop()).is_pending());
    assert_eq!(live.load(Ordering::SeqCst), 1);
}

#[test]
fn ke_502_a_cancel_ends_the_run_and_wakes_it() {
    let seen: Arc<Mutex<Option<Cancel>>> = Arc::default();
    let kernel = Kernel::new();
    let nested = seen.clone();
    kernel
        .add(raw(Spec::new("inner", ""), move |call| {
            *nested.lock().unwrap() = Some(call.cancel);
            stream::pending().boxed()
        }))
        .unwrap();
    kernel
        .add(raw(spec(), |call| call.kernel().node("inner", ()).read()))
        .unwrap();
    let mut run = kernel.run::<String>("f", ());
    let (woken, waker) = Woken::new();
    assert!(poll_once(&mut run, &waker).is_pending());
    let cancel = run.cancel();
    let inner = seen.lock().unwrap().clone().unwrap();
    assert!(!cancel.is_cancelled() && !inner.is_cancelled());
    cancel.cancel();
    assert!(woken.count() > 0 && inner.is_cancelled());
    block_on(cancel.cancelled());
    assert!(matches!(
        poll_once(&mut run, &waker),
        Poll::Ready(Some(Err(Error::Cancelled)))
    ));
    assert!(matches!(poll_once(&mut run, &waker), Poll::Ready(None)));
    let run = kernel.run::<String>("f", ());
    let cancel = run.cancel();
    drop(run);
    assert!(cancel.is_cancelled() && cancel.child().is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn ke_503_a_deadline_reaches_nested_calls_and_busy_streams() {
    let kernel = Kernel::new();
    let seen: Arc<Mutex<Vec<Option<Instant>>>> = Arc::default();
    let deadlines = seen.clone();
    kernel
        .add(raw(Spec::new("inner", ""), move |call| {
            deadlines.lock().unwrap().push(call.deadline);
            stream::pending().boxed()
        }))
        .unwrap();
    kernel
        .add(raw(spec(), |call| call.kernel().node("inner", ()).read()))
        .unwrap();
    kernel
        .add(raw(Spec::new("busy", ""), |_| {
            stream::repeat_with(|| Ok(Chunk::text("x"))).boxed()
        }))
        .unwrap();
    let began = Instant::now();
    let run = kernel
        .run::<String>("f", ())
        .timeout(Duration::from_secs(3));
    assert!(matches!(run.await, Err(Error::Deadline)));
    assert_eq!(
        seen.lock().unwrap()[0],
        Some(began + Duration::from_secs(3))
    );
    // A stream that is always ready is looked at every 64 chunks.
    let mut busy = kernel
        .run::<String>("busy", ())
        .timeout(Duration::from_secs(1));
    assert!(busy.next().await.unwrap().is_ok());
    tokio::time::advance(Duration::from_secs(2)).await;
    let more = busy
        .take_while(|item| std::future::ready(item.is_ok()))
        .count()
        .await;
    assert!(more <= 64, "{more}");
}

#[test]
fn ke_503_a_deadline_without_a_runtime_is_an_error() {
    let kernel = Kernel::new();
    kernel
        .add(raw(spec(), |_| stream::pending().boxed()))
        .unwrap();
    let run = kernel
        .run::<String>("f", ())
        .timeout(Duration::from_secs(1));
    assert!(matches!(whole(run), Err(Error::Unavailable { .. })));
}

#[test]
fn ke_504_three_items_of_a_million_are_produced_if_three_are_read() {
    let (kernel, count) = (Kernel::new(), Count::new());
    let counted = count.clone();
    kernel
        .add(raw(spec(), move |_| {
            let counted = counted.clone();
            let numbers = (0..1_000_000_u32).inspect(move |_| {
                counted.given.fetch_add(1, Ordering::SeqCst);
            });
            stream::iter(
                numbers
                    .map(|number| Chunk::json(&number).map(|chunk| chunk.with_mime("text/plain"))),
            )
            .boxed()
        }))
        .unwrap();
    for name in ["second", "third"] {
        let spec = Spec::new(name, "").inputs([InputSpec::new("a")]);
        kernel
            .add(raw(spec, |call| call.read("a").unwrap()))
            .unwrap();
    }
    let second = kernel.node("second", args! { a: kernel.node("f", ()) });
    let mut third = kernel.run::<String>("third", args! { a: second });
    for _ in 0..3 {
        assert!(block_on(third.next()).unwrap().is_ok());
    }
    assert_eq!(count.given(), 3);
}

/// OA-913.
#[test]
fn ke_139_a_panic_ends_one_run_and_its_text_stays_private() {
    let kernel = Kernel::new();
    let panics: [Fun; 2] = [
        raw(Spec::new("at_call", ""), |_| panic!("secret")),
        raw(Spec::new("at_poll", ""), |_| {
            stream::poll_fn(|_| panic!("secret")).boxed()
        }),
    ];
    kernel.add_all(panics).unwrap();
    for name in ["at_call", "at_poll"] {
        let error = whole(kernel.run::<String>(name, ())).unwrap_err();
        assert!(matches!(&error, Error::Panicked { function } if *function == *name));
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
    assert_eq!((kernel.panics(), kernel.scope().panics()), (2, 2));
    kernel.layer(|_: Call, _: Next| -> Chunks { panic!("secret") });
    assert!(matches!(
        whole(kernel.run::<String>("at_call", ())),
        Err(Error::Panicked { .. })
    ));
}

/// A panic can carry any value, also one that panics when it is dropped.
#[test]
fn ke_139_a_panic_whose_payload_panics_ends_one_run() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            panic!("while the payload is dropped");
        }
    }
    let kernel = Kernel::new();
    let panics: [Fun; 2] = [
        raw(Spec::new("at_call", ""), |_| std::panic::panic_any(Payload)),
        raw(Spec::new("at_poll", ""), |_| {
            stream::poll_fn(|_| std::panic::panic_any(Payload)).boxed()
        }),
    ];
    kernel.add_all(panics).unwrap();
    for name in ["at_call", "at_poll"] {
        let end = whole(kernel.run::<String>(name, ()));
        assert!(matches!(end, Err(Error::Panicked { .. })), "{name}");
    }
    assert_eq!(kernel.panics(), 2);
}
