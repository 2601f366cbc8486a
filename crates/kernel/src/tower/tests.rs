//! Middleware of tower around functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ::tower::ServiceBuilder;
use ::tower::limit::GlobalConcurrencyLimitLayer;
use ::tower::retry::{Policy, RetryLayer};
use ::tower::timeout::TimeoutLayer;
use futures::StreamExt;
use futures::stream;

use super::*;
use crate::chunk::Chunk;
use crate::handler::function;
use crate::into_chunks::StreamOf;
use crate::kernel::Kernel;

/// A function that waits, then counts to three.
fn slow() -> Kernel {
    let kernel = Kernel::new();
    let count = |(): ()| async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let late = stream::iter(1..=3).then(|n| async move {
            tokio::time::sleep(Duration::from_secs(60)).await;
            n
        });
        StreamOf(stream::iter([0]).chain(late.boxed()))
    };
    kernel.add(function("count", "", count)).unwrap();
    kernel
}

#[tokio::test(start_paused = true)]
async fn a_tower_timeout_ends_with_the_first_chunk() {
    for (seconds, expected) in [(4, None), (6, Some(4))] {
        let kernel = slow();
        kernel.layer(tower_layer(TimeoutLayer::new(Duration::from_secs(seconds))));
        let items: Vec<Result<Chunk>> = kernel.run::<Chunk>("count", ()).collect().await;
        let whole = items.iter().all(Result::is_ok).then_some(items.len());
        assert_eq!(whole, expected, "{items:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shared_limit_sheds_calls_above_it() {
    let kernel = slow();
    let limit = GlobalConcurrencyLimitLayer::new(1);
    kernel.layer(tower_layer(
        ServiceBuilder::new().load_shed().layer(limit).into_inner(),
    ));
    let run = || async { kernel.run::<Chunk>("count", ()).next().await.unwrap() };
    let (first, second) = tokio::join!(run(), run());
    assert_eq!(first.unwrap().data, "0\n");
    assert!(matches!(second, Err(Error::Function(_))), "{second:?}");
    assert_eq!(run().await.unwrap().data, "0\n", "the first has its head");
}

/// Tries a call three times.
#[derive(Clone)]
struct Thrice(u32);

impl Policy<Call, Chunks, Error> for Thrice {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _call: &mut Call,
        result: &mut Result<Chunks>,
    ) -> Option<std::future::Ready<()>> {
        self.0 -= 1;
        (result.is_err() && self.0 > 0).then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, call: &Call) -> Option<Call> {
        Some(call.clone())
    }
}

#[tokio::test]
async fn a_retry_repeats_a_call_that_fails_before_its_first_chunk() {
    let tries = Arc::new(AtomicU32::new(0));
    let kernel = Kernel::new();
    let counted = tries.clone();
    let flaky = move |(): ()| {
        let tried = counted.fetch_add(1, Ordering::Relaxed) + 1;
        async move {
            if tried < 3 {
                return Err(Error::Unavailable {
                    why: "not yet".into(),
                    retry_after: None,
                });
            }
            Ok(tried)
        }
    };
    kernel.add(function("flaky", "", flaky)).unwrap();
    kernel.layer(tower_layer(RetryLayer::new(Thrice(3))));
    assert_eq!(kernel.run::<String>("flaky", ()).await.unwrap(), "3");
    assert_eq!(tries.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn kernel_errors_pass_through_unchanged() {
    let kernel = Kernel::new();
    let fails = |(): ()| async { Err::<u32, _>(Error::Cancelled) };
    kernel.add(function("fails", "", fails)).unwrap();
    kernel.layer(tower_layer(TimeoutLayer::new(Duration::from_secs(60))));
    let error = kernel.run::<String>("fails", ()).await.unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error:?}");
}
