//! Tests of the layers `retry`, `timeout` and `trace`.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::executor::block_on;
use futures::{StreamExt, stream};
use tracing::field::{Field, Visit};
use tracing::span;

use super::*;
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::handler::raw;
use crate::kernel::Kernel;
use crate::layer::{Next, layered};
use crate::probe::{Count, endless, whole};
use crate::run::Run;
use crate::spec::{Effect, Spec};
use crate::{Chunks, Result};

fn pure() -> Spec {
    Spec::new("f", "").effect(Effect::Pure)
}

/// A function whose calls return these streams, one after another.
fn kernel(spec: Spec, calls: Vec<Vec<Result<Chunk>>>) -> (Kernel, Arc<Count>) {
    let (kernel, count) = (Kernel::new(), Count::new());
    let (counted, calls) = (count.clone(), Mutex::new(calls.into_iter()));
    kernel
        .add(raw(spec, move |_| {
            counted
                .polls
                .fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let items = calls.lock().unwrap().next().unwrap_or_default();
            stream::iter(items).boxed()
        }))
        .unwrap();
    (kernel, count)
}

fn busy() -> Result<Chunk> {
    Err(Error::Unavailable {
        why: "busy".into(),
        retry_after: None,
    })
}

#[tokio::test(start_paused = true)]
async fn retry_repeats_while_nothing_was_delivered() {
    let (kernel, count) = kernel(
        pure(),
        vec![vec![busy()], vec![busy()], vec![Ok(Chunk::text("a"))]],
    );
    kernel.layer(retry(3));
    let began = Instant::now();
    assert_eq!(kernel.run::<String>("f", ()).await.unwrap(), "a");
    let waited = began.elapsed();
    assert_eq!(count.polls(), 3);
    // 50 to 100 ms, then 100 to 200 ms.
    assert!((150..=301).contains(&waited.as_millis()), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn retry_waits_for_retry_after_and_stops_after_its_number_of_attempts() {
    let received = || {
        Err(Error::Unavailable {
            why: "busy".into(),
            retry_after: Some(Duration::from_secs(7)),
        })
    };
    let (kernel, count) = kernel(
        pure(),
        vec![
            vec![received()],
            vec![received()],
            vec![Ok(Chunk::text("never"))],
        ],
    );
    kernel.layer(retry(1));
    let began = Instant::now();
    assert!(matches!(
        kernel.run::<String>("f", ()).await,
        Err(Error::Unavailable { .. })
    ));
    assert_eq!((count.polls(), began.elapsed().as_secs()), (2, 7));
}

/// A server that says to come back after a day must not hold a call that has no deadline for that day.
#[tokio::test(start_paused = true)]
async fn retry_gives_up_when_it_is_asked_to_wait_for_more_than_a_minute() {
    for (seconds, attempts) in [(60, 2), (61, 1), (u64::MAX, 1)] {
        let refused = || {
            Err(Error::Unavailable {
                why: "busy".into(),
                retry_after: Some(Duration::from_secs(seconds)),
            })
        };
        let (kernel, count) = kernel(pure(), vec![vec![refused()], vec![refused()]]);
        kernel.layer(retry(1));
        let end = kernel.run::<String>("f", ()).await;
        assert!(matches!(end, Err(Error::Unavailable { .. })), "{seconds}");
        assert_eq!(count.polls(), attempts, "{seconds}");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_skips_delivered_permanent_and_effectful_calls() {
    let delivered = vec![Ok(Chunk::text("a")), busy()];
    let cases: [(Spec, Vec<Result<Chunk>>, RetryLayer, usize); 4] = [
        (pure(), delivered, retry(3), 1),
        (pure(), vec![Err(Error::Released)], retry(3), 1),
        (Spec::new("f", ""), vec![busy()], retry(3), 1),
        (Spec::new("f", ""), vec![busy()], retry(3).force(), 2),
    ];
    for (spec, first, layer, calls) in cases {
        let (kernel, count) = kernel(spec, vec![first]);
        kernel.layer(layer);
        let _any = kernel.run::<String>("f", ()).await;
        assert_eq!(count.polls(), calls);
    }
}

fn timed(pieces: &'static [u64], layer: Timeout) -> Kernel {
    let kernel = Kernel::new();
    kernel
        .add(raw(pure(), move |_| {
            let pieces = stream::iter(pieces).then(|wait| async move {
                tokio::time::sleep(Duration::from_secs(*wait)).await;
                Ok(Chunk::text("x"))
            });
            pieces.boxed()
        }))
        .unwrap();
    kernel.layer(layer);
    kernel
}

#[tokio::test(start_paused = true)]
async fn timeouts_first_idle_and_total() {
    let layer = timeout(
        Duration::from_secs(5),
        Duration::from_secs(3),
        Duration::from_secs(10),
    );
    let cases: [(&'static [u64], Result<usize, usize>); 5] = [
        (&[4, 2, 2], Ok(3)),
        (&[6], Err(0)),
        (&[1, 4], Err(1)),
        (&[4, 2, 2, 2, 2], Err(4)),
        (&[], Ok(0)),
    ];
    for (pieces, expect) in cases {
        let settled = timed(pieces, layer).run::<String>("f", ()).settle().await;
        let got = settled.whole.unwrap().len();
        assert_eq!(
            if settled.error.is_none() {
                Ok(got)
            } else {
                Err(got)
            },
            expect,
            "{pieces:?}"
        );
        assert!(settled.error.is_none() || matches!(settled.error, Some(Error::Deadline)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_does_not_poll_is_not_charged() {
    let kernel = timed(
        &[0, 1],
        timeout(
            Duration::from_secs(2),
            Duration::from_secs(2),
            Duration::from_secs(100),
        ),
    );
    let mut run: Run<String> = kernel.run("f", ());
    assert!(run.next().await.unwrap().is_ok());
    tokio::time::advance(Duration::from_secs(50)).await;
    assert!(
        run.next().await.unwrap().is_ok(),
        "idle time is counted while somebody waits"
    );
}

/// The recorded fields of spans, as text.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<String>>);

impl Visit for Spans {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0.lock().unwrap(), "{}={value:?} ", field.name());
    }
}

impl tracing::Subscriber for Spans {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        attributes.record(&mut self.clone());
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, values: &span::Record<'_>) {
        values.record(&mut self.clone());
    }
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_trace_has_counts_and_outcome_and_no_payload() {
    let spans = Spans::default();
    let reply = tracing::subscriber::with_default(spans.clone(), || {
        let (kernel, _) = kernel(
            pure(),
            vec![vec![Ok(Chunk::text("secret"))], vec![Err(Error::Released)]],
        );
        kernel.layer(trace());
        assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "secret");
        assert!(whole(kernel.run::<String>("f", ())).is_err());
        let count = Count::new();
        kernel
            .add(raw(Spec::new("g", ""), move |_| {
                endless(&count, [Chunk::text("x")]).boxed()
            }))
            .unwrap();
        let mut run = kernel.run::<String>("g", ());
        assert!(block_on(run.next()).is_some());
        drop(run);
        spans.0.lock().unwrap().clone()
    });
    for expect in [
        "function=f",
        "chunks=1 bytes=6",
        "outcome=\"ok\"",
        "outcome=\"failed-precondition\"",
        "outcome=\"dropped\"",
    ] {
        assert!(reply.contains(expect), "{expect} in {reply}");
    }
    assert!(!reply.contains("secret"));
}

/// KE-911's first sentence and KE-912: a layer spans the stream, and a layer that passes through changes nothing.
#[test]
fn a_layer_may_skip_repeat_and_rewrite() {
    let (kernel, count) = kernel(
        pure(),
        vec![vec![Ok(Chunk::text("a"))], vec![Ok(Chunk::text("b"))]],
    );
    let twice = |call: Call, next: Next| -> Chunks {
        next.call(call.clone()).chain(next.call(call)).boxed()
    };
    kernel.layer(twice);
    assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "ab");
    assert_eq!(count.polls(), 2);
    let skip = layered(kernel.get("f").unwrap(), |_: Call, _: Next| -> Chunks {
        stream::iter([Ok(Chunk::text("s"))]).boxed()
    });
    assert_eq!(whole(skip.run::<String>(&Kernel::new(), ())).unwrap(), "s");
    assert_eq!(count.polls(), 2);
}
