//! Allowances on a virtual clock, with a model of the kernel's making.

use futures::{StreamExt, stream};
use sapwood_kernel::{Call, Kernel, Meta, Mime, OutputSpec, Port, Spec, raw};

use super::*;
use crate::auth::charge_layer::AllowanceLayer;
use crate::http::access_log::AccessRecord;
use crate::http::request_id::RequestId;
use crate::http::request_trace::RequestTrace;

fn limits(running: Option<u32>, requests: Option<u32>, tokens: Option<u32>) -> RateLimits {
    RateLimits {
        models: None,
        requests_running: running,
        requests_per_minute: requests,
        tokens_per_minute: tokens,
    }
}

/// Models of ten prompt tokens and five output tokens: `near` charges them as an engine does, `far` reports them at its end.
fn kernel() -> Kernel {
    let kernel = Kernel::new();
    for name in ["near", "far"] {
        let mut spec = Spec::new(name, "").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
        spec.model = true;
        let model = raw(spec, move |call: Call| {
            let charge = call.own.get::<Arc<dyn TokenCharge>>();
            let token_charge = charge.cloned().filter(|_| name == "near");
            let begun = token_charge
                .as_ref()
                .map_or(Ok(()), |token_charge| token_charge.prompt(10));
            let meta = Meta::default()
                .with_usage(0, RunUsage::of(10, 5))
                .with_finish(0, sapwood_kernel::ChoiceFinish::Stop);
            let items = (0..5).map(move |_| {
                if let Some(token_charge) = &token_charge {
                    token_charge.output(1);
                }
                Ok(Chunk::text("a"))
            });
            match begun {
                Err(error) => stream::iter([Err(error)]).boxed(),
                Ok(()) => stream::iter(items)
                    .chain(stream::iter([Ok(Chunk::empty().with_meta(meta))]))
                    .boxed(),
            }
        });
        kernel.add(model).unwrap();
    }
    kernel.layer(AllowanceLayer);
    kernel
}

/// A request trace as the middleware makes it for a key with these limits.
fn request_trace(limits: RateLimits) -> (RequestTrace, Arc<TokenMeter>) {
    let (request, ()) = http::Request::new(()).into_parts();
    let allowance = Arc::new(TokenMeter::new("key", limits));
    let entry = AccessRecord::new(RequestId::fresh(), None, &request);
    (
        RequestTrace::new(entry, Some(Arc::clone(&allowance))),
        allowance,
    )
}

fn headers_of(allowance: &TokenMeter) -> Vec<String> {
    let mut headers = HeaderMap::new();
    allowance.add_headers(&mut headers);
    let mut received: Vec<_> = headers
        .iter()
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
        .collect();
    received.sort();
    received
}

#[tokio::test(start_paused = true)]
async fn oa_906_requests_over_the_rate_are_refused_until_the_bucket_refills() {
    let (trace, allowance) = request_trace(limits(None, Some(2), None));
    let kernel = kernel();
    trace
        .follow(async {
            for _ in 0..2 {
                assert_eq!(kernel.run::<String>("near", ()).await.unwrap(), "aaaaa");
            }
            let error = kernel.run::<String>("near", ()).await.unwrap_err();
            assert_eq!(error.code().http(), 429);
            assert_eq!(error.retry_after(), Some(Duration::from_secs(30)));
            assert_eq!(
                headers_of(&allowance),
                [
                    "x-ratelimit-limit-requests: 2",
                    "x-ratelimit-remaining-requests: 0",
                    "x-ratelimit-reset-requests: 1m0s",
                ]
            );
            tokio::time::advance(Duration::from_secs(30)).await;
            assert!(kernel.run::<String>("near", ()).await.is_ok());
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn oa_906_tokens_are_charged_as_they_are_used_wherever_the_model_runs() {
    for model in ["near", "far"] {
        let (trace, allowance) = request_trace(limits(None, None, Some(60)));
        let kernel = kernel();
        trace
            .follow(async {
                assert!(kernel.run::<String>(model, ()).await.is_ok());
                assert!(
                    headers_of(&allowance).contains(&"x-ratelimit-remaining-tokens: 45".into())
                );
                let mut cut = kernel.run::<String>(model, ());
                cut.next().await.unwrap().unwrap();
                drop(cut);
            })
            .await;
        // A call that is cut short has paid for its prompt and its first token; a remote one only for the token.
        let left = if model == "near" { 34 } else { 44 };
        assert!(headers_of(&allowance).contains(&format!("x-ratelimit-remaining-tokens: {left}")));
    }
}

#[tokio::test(start_paused = true)]
async fn oa_906_a_prompt_that_never_fits_has_no_retry_time() {
    let (small, _) = request_trace(limits(None, None, Some(9)));
    let kernel = kernel();
    let error = small.follow(async { kernel.run::<String>("near", ()).await });
    let error = error.await.unwrap_err();
    assert!(
        !error.retryable() && error.retry_after().is_none(),
        "{error}"
    );
    let (tight, _) = request_trace(limits(None, None, Some(20)));
    tight
        .follow(async {
            assert!(kernel.run::<String>("near", ()).await.is_ok());
            let error = kernel.run::<String>("near", ()).await.unwrap_err();
            assert_eq!(
                error.retry_after(),
                Some(Duration::from_secs(15)),
                "{error}"
            );
            tokio::time::advance(Duration::from_secs(15)).await;
            assert!(kernel.run::<String>("near", ()).await.is_ok());
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn oa_906_usage_reported_by_an_upstream_counts_for_the_next_call() {
    let (trace, _) = request_trace(limits(None, None, Some(12)));
    let kernel = kernel();
    trace
        .follow(async {
            assert!(kernel.run::<String>("far", ()).await.is_ok());
            let error = kernel.run::<String>("far", ()).await.unwrap_err();
            // Overdrawn by three, and one token has to be left.
            assert_eq!(
                error.retry_after(),
                Some(Duration::from_secs(20)),
                "{error}"
            );
            tokio::time::advance(Duration::from_secs(20)).await;
            assert!(kernel.run::<String>("far", ()).await.is_ok());
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn oa_906_a_request_that_was_not_served_is_refunded() {
    let (trace, allowance) = request_trace(limits(None, Some(2), Some(9)));
    let kernel = kernel();
    trace
        .follow(async {
            for _ in 0..4 {
                let error = kernel.run::<String>("near", ()).await.unwrap_err();
                assert_eq!(error.reason(), "RATE_LIMITED");
            }
        })
        .await;
    assert!(headers_of(&allowance).contains(&"x-ratelimit-remaining-requests: 2".into()));
}

#[tokio::test]
async fn oa_906_concurrent_calls_are_limited_per_key() {
    let (trace, _) = request_trace(limits(Some(1), None, None));
    let kernel = kernel();
    trace
        .follow(async {
            let mut first = kernel.run::<String>("near", ());
            first.next().await.unwrap().unwrap();
            let error = kernel.run::<String>("near", ()).await.unwrap_err();
            assert_eq!(error.reason(), "RATE_LIMITED");
            drop(first);
            assert!(kernel.run::<String>("near", ()).await.is_ok());
        })
        .await;
    assert!(kernel.run::<String>("near", ()).await.is_ok(), "nobody's");
}

#[tokio::test]
async fn oa_906_calls_from_a_task_of_a_function_are_charged_to_its_caller() {
    let (trace, allowance) = request_trace(limits(None, Some(2), None));
    let kernel = kernel();
    let spec = Spec::new("agent", "").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    let agent = raw(spec, |call: Call| {
        let within = call.kernel();
        let task = tokio::spawn(async move { within.run::<String>("near", ()).await });
        let answer = async move { Ok(Chunk::text(task.await.unwrap()?)) };
        stream::once(answer).boxed()
    });
    kernel.add(agent).unwrap();
    trace
        .follow(async {
            for _ in 0..2 {
                assert!(kernel.run::<String>("agent", ()).await.is_ok());
            }
            let error = kernel.run::<String>("agent", ()).await.unwrap_err();
            assert_eq!(error.reason(), "RATE_LIMITED");
        })
        .await;
    assert!(headers_of(&allowance).contains(&"x-ratelimit-remaining-requests: 0".into()));
    let nobodys = kernel.run::<String>("agent", ()).await;
    assert!(nobodys.is_ok(), "{nobodys:?}");
}

#[tokio::test]
async fn oa_905_a_key_may_use_only_its_models() {
    let (trace, _) = request_trace(RateLimits {
        models: Some(Arc::new([Name::new("near")].into())),
        ..RateLimits::default()
    });
    let kernel = kernel();
    trace
        .follow(async {
            assert!(kernel.run::<String>("near", ()).await.is_ok());
            let error = kernel.run::<String>("far", ()).await.unwrap_err();
            assert_eq!((error.reason(), error.http()), ("insufficient_scope", 403));
        })
        .await;
}

/// A model that the key may not use, an unknown model and another key's default get the same answer.
#[tokio::test]
async fn oa_905_generate_names_no_model_that_a_key_may_not_use() {
    let kernel = kernel();
    let targets = sapwood_kernel::Targets {
        default: Some(Name::new("far")),
        aliases: [(Name::new("alias"), Name::new("far"))].into(),
    };
    kernel.add(sapwood_kernel::generate(targets)).unwrap();
    let ask = async |models: &[&'static str], target: &'static str| {
        let models = models.iter().map(|name| Name::new(name)).collect();
        let (trace, _) = request_trace(RateLimits {
            models: Some(Arc::new(models)),
            ..RateLimits::default()
        });
        let args = sapwood_kernel::args! { target: target };
        let received = trace
            .follow(async { kernel.run::<String>("GENERATE", args).await })
            .await;
        received.map_err(|error| (error.reason().to_owned(), error.to_string()))
    };
    assert_eq!(ask(&["near"], "near").await, Ok("aaaaa".into()));
    assert_eq!(
        ask(&["near"], "").await,
        Ok("aaaaa".into()),
        "its only model"
    );
    for target in ["far", "alias", "nowhere"] {
        let (reason, received) = ask(&["near"], target).await.unwrap_err();
        assert_eq!(reason, "insufficient_scope");
        assert_eq!(
            received.replace(target, ""),
            ask(&["near"], "zzz")
                .await
                .unwrap_err()
                .1
                .replace("zzz", "")
        );
    }
    assert!(!ask(&[], "").await.unwrap_err().1.contains("far"));
}

#[tokio::test(start_paused = true)]
async fn oa_906_new_limits_apply_to_open_callers_without_a_refill() {
    let (trace, allowance) = request_trace(limits(None, Some(2), None));
    let kernel = kernel();
    trace
        .follow(async {
            let call = || kernel.run::<String>("near", ());
            assert!(call().await.is_ok());
            allowance.renew(&limits(None, Some(100), None));
            assert!(call().await.is_ok());
            let error = call().await.unwrap_err();
            assert_eq!(error.reason(), "RATE_LIMITED", "one was left of two");
            allowance.renew(&limits(None, None, None));
            assert!(call().await.is_ok());
            let models = Some(Arc::new([Name::new("far")].into()));
            allowance.renew(&RateLimits {
                models,
                ..limits(None, None, None)
            });
            assert_eq!(call().await.unwrap_err().reason(), "insufficient_scope");
        })
        .await;
}

#[test]
fn oa_906_durations_are_formatted_as_clients_parse_them() {
    for (milliseconds, spelled) in [
        (0, "0ms"),
        (999, "999ms"),
        (1500, "1.5s"),
        (59_950, "60s"),
        (360_000, "6m0s"),
    ] {
        assert_eq!(spell(Duration::from_millis(milliseconds)), spelled);
    }
}
