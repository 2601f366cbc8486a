//! Tools at the client: our client serves functions to a server, whose functions call them (section 8.3).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{StreamExt, stream};
use sapwood_kernel::connect::evergreen::{import, remote, serve};
use sapwood_kernel::{
    Call, Chunk, Error, Fun, InputSpec, Kernel, Mime, OutputSpec, Port, Run, Spec, args, function,
    raw,
};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_proto::code::Code;
use sapwood_tests::{Running, until};

use super::resume::{Cutter, DIALECTS, Dialect};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Look {
    city: String,
}

/// The client's functions: `weather`, which counts its runs; `stuck`, which never answers and counts its ends; `sad`.
fn tools(runs: &Arc<AtomicUsize>, ends: &Arc<AtomicUsize>) -> Kernel {
    let (runs, ends) = (Arc::clone(runs), Arc::clone(ends));
    let kernel = Kernel::new();
    kernel
        .add(function("weather", "How it is.", move |look: Look| {
            runs.fetch_add(1, Ordering::Relaxed);
            async move { format!("sunny in {}", look.city) }
        }))
        .unwrap();
    kernel
        .add(raw(Spec::new("stuck", "Never ends."), move |_| {
            let guard = Guard(Arc::clone(&ends));
            stream::once(async move {
                let _guard = guard;
                futures::future::pending().await
            })
            .boxed()
        }))
        .unwrap();
    let sad = Spec::new("sad", "Fails.").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    kernel
        .add(raw(sad, |_| {
            stream::iter([Err(
                Error::argument("city", "is nowhere").because("NO_SUCH_CITY")
            )])
            .boxed()
        }))
        .unwrap();
    kernel
}

struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A function of the server that calls the client's function named by `tool`.
fn ask() -> Fun {
    let spec = Spec::new("ask", "Asks whom it is told to.")
        .inputs([InputSpec::new("tool"), InputSpec::new("city")])
        .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT).wire("response")]);
    raw(spec, |call: Call| {
        stream::once(async move {
            let (tool, city): (String, String) = (call.arg("tool").await?, call.arg("city").await?);
            let received: Run<String> = if tool == "weather" {
                call.kernel().run(&tool, args! { city: city })
            } else {
                call.kernel().run(&tool, ())
            };
            Ok(Chunk::text(format!("it is {}", received.await?)))
        })
        .boxed()
    })
}

async fn server() -> Running {
    let kernel = Kernel::new();
    kernel.add(ask()).unwrap();
    Running::over(kernel).await
}

async fn asked(kernel: &Kernel, tool: &str, city: &str) -> Result<String, Error> {
    let args = args! { tool: tool, city: city };
    kernel.run::<String>("ask", args).await
}

async fn functions(session: &ClientSession) -> Kernel {
    let kernel = Kernel::new();
    kernel.add_all(import(session).await.unwrap()).unwrap();
    kernel
}

fn partial() -> ClientSessionOptions {
    ClientSessionOptions {
        partial_failure: true,
        ..ClientSessionOptions::default()
    }
}

/// EV-103, EV-812, EV-931
#[tokio::test]
async fn ev_976_a_client_serves_functions_of_a_kernel_in_every_dialect_with_offers() {
    let server = server().await;
    for url in [
        "http://ADDRESS",
        "ws://ADDRESS",
        "ws://ADDRESS/?dialect=json",
    ] {
        let address = ServerAddress::new(url.replace("ADDRESS", &server.address.to_string()));
        let session = ClientSession::connect(&address, partial()).await.unwrap();
        assert!(session.announces("reverse-actions"), "{url}");
        let (runs, ends) = (Arc::default(), Arc::default());
        let served = serve(&session, tools(&runs, &ends)).await.unwrap();
        let again = serve(&session, Kernel::new()).await.unwrap_err();
        assert_eq!(again.code(), Code::AlreadyExists, "one at a time");
        let serving = tokio::spawn(served);
        let kernel = functions(&session).await;
        for city in ["Bergen", "Oslo"] {
            let received = asked(&kernel, "weather", city).await.unwrap();
            assert_eq!(received, format!("it is sunny in {city}"), "{url}");
        }
        let sad = asked(&kernel, "sad", "x").await.unwrap_err();
        assert_eq!(
            (sad.code(), sad.reason()),
            (Code::InvalidRequest, "NO_SUCH_CITY"),
            "{url}"
        );
        // A tool whose caller has gone is cancelled.
        let ask = kernel.run::<String>("ask", args! { tool: "stuck", city: "x" });
        let late = ask.timeout(Duration::from_millis(200)).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{url}");
        until("the tool has stopped", || ends.load(Ordering::Relaxed) == 1).await;
        assert_eq!(runs.load(Ordering::Relaxed), 2, "{url}");
        // Another session has no such tools.
        let other = ClientSession::connect(&address, partial()).await.unwrap();
        let refused = asked(&functions(&other).await, "weather", "x")
            .await
            .unwrap_err();
        assert_eq!(refused.reason(), "UNKNOWN_ACTION", "{url}");
        drop(kernel);
        drop(session);
        serving.await.unwrap();
    }
}

/// EV-810
#[tokio::test]
async fn ev_976_offers_that_cannot_be_served_are_refused() {
    let server = server().await;
    let tools = tools(&Arc::default(), &Arc::default());
    let msgpack = ServerAddress::new(format!("ws://{}/?dialect=msgpack", server.address));
    let session = ClientSession::connect(&msgpack, partial()).await.unwrap();
    let refused = serve(&session, tools.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    // The server has a function of this name itself.
    let session = ClientSession::connect(&server.at(), partial())
        .await
        .unwrap();
    tools.add(ask()).unwrap();
    let refused = serve(&session, tools.clone()).await.unwrap_err();
    assert_eq!(refused.reason(), "BAD_NAME");
    // A client whose offer was refused, or that has stopped serving, may serve other functions.
    tools.remove("ask");
    let served = serve(&session, tools).await.unwrap();
    let kernel = functions(&session).await;
    drop(served);
    let removed = asked(&kernel, "weather", "x").await.unwrap_err();
    assert_eq!(removed.reason(), "UNKNOWN_ACTION");
}

/// EV-940, EV-811
#[tokio::test]
async fn ev_943_a_tool_at_the_client_runs_once_wherever_the_connection_is_cut() {
    let asks = Arc::new(AtomicUsize::new(0));
    let runs = Arc::new(AtomicUsize::new(0));
    let kernel = Kernel::new();
    let count = Arc::clone(&asks);
    kernel.add(ask()).unwrap();
    kernel.layer_on("ask", move |call: Call, next: sapwood_kernel::Next| {
        count.fetch_add(1, Ordering::Relaxed);
        next.call(call)
    });
    let server = Running::over(kernel).await;
    let talk = async |cutter: &Cutter, dialect: Dialect| {
        let options = ClientSessionOptions {
            resume: true,
            ..partial()
        };
        let session = ClientSession::connect(&cutter.at(dialect), options)
            .await
            .ok()?;
        let served = serve(&session, tools(&runs, &Arc::default())).await;
        let serving = tokio::spawn(served.unwrap());
        let spec = ask().spec().clone();
        let kernel = Kernel::new();
        kernel.add(remote(&session, spec)).unwrap();
        let mut received = Vec::new();
        for city in ["Bergen", "Oslo", "Rome"] {
            received.push(asked(&kernel, "weather", city).await.unwrap());
        }
        drop((kernel, session));
        serving.await.unwrap();
        Some(received)
    };
    for dialect in DIALECTS {
        let uncut = Cutter::before(server.address, Vec::new()).await;
        let expect = talk(&uncut, dialect).await.unwrap();
        assert_eq!(expect[2], "it is sunny in Rome");
        let total = uncut.bytes.load(Ordering::Relaxed);
        let mut resumed = 0;
        for at in (1_000..total).step_by(97) {
            asks.store(0, Ordering::Relaxed);
            runs.store(0, Ordering::Relaxed);
            let cutter = Cutter::before(server.address, vec![at]).await;
            let Some(received) = talk(&cutter, dialect).await else {
                continue;
            };
            assert_eq!(received, expect, "{dialect:?} cut at {at}");
            let ran = (asks.load(Ordering::Relaxed), runs.load(Ordering::Relaxed));
            assert_eq!(ran, (3, 3), "{dialect:?} cut at {at}");
            resumed += usize::from(cutter.connections.load(Ordering::Relaxed) > 1);
        }
        assert!(resumed > 10, "{dialect:?}: {resumed} of {total} bytes");
    }
}
