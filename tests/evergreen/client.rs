//! Our client in every dialect, against our server.

use std::sync::Arc;

use sapwood_engine::scripted;
use sapwood_kernel::connect::evergreen::import;
use sapwood_kernel::{Kernel, Name, args};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Metadata, SessionLimits};
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::rate_limit::{self, TokenMeter};
use sapwood_server::faces::evergreen::Config;
use sapwood_tests::{Running, key, request, spawned, until, with_model};

const URLS: [&str; 5] = [
    "http://",
    "ws://",
    "evergreen+ws:///evergreen",
    "ws://?dialect=json",
    "ws:///?dialect=msgpack",
];

/// The address of a server, as one of [`URLS`].
fn at(server: &Running, url: &str) -> ServerAddress {
    let (scheme, rest) = url.split_once("://").unwrap();
    ServerAddress::new(format!("{scheme}://{}{rest}", server.address))
}

async fn session(server: &Running, url: &str) -> ClientSession {
    let options = ClientSessionOptions {
        partial_failure: true,
        ..ClientSessionOptions::default()
    };
    ClientSession::connect(&at(server, url), options)
        .await
        .unwrap()
}

/// EV-973, EV-976
#[tokio::test]
async fn ev_970_the_url_selects_the_dialect_and_all_dialects_behave_alike() {
    let server = Running::with_test_functions().await;
    let text = Arc::new(Metadata::of("text/plain").with_role("USER"));
    for url in URLS {
        let session = session(&server, url).await;
        assert!(session.announces("cancel"), "{url}");
        let mut input = session.write().unwrap();
        let echo = |node| request("echo", &[("text", node)], &["response"]);
        let first = session.call(echo(input.node())).unwrap();
        // An output is an input before it exists.
        let between = first.output("response").unwrap();
        let second = session.call(echo(&between)).unwrap();
        let mut expect = Vec::new();
        for index in 0..300 {
            let word = format!("{index} ");
            expect.extend_from_slice(word.as_bytes());
            input.write(&text, word.into()).await.unwrap();
        }
        input.end(&text).unwrap();
        let read =
            |call: &sapwood_net::evergreen::PeerCall| call.output("response").unwrap().read();
        assert_eq!(read(&second).whole().await.unwrap(), expect, "{url}");
        assert_eq!(read(&first).whole().await.unwrap(), expect, "{url}");
        drop((first, second));
        session.close().await.unwrap();
    }
}

/// EV-971
#[tokio::test]
async fn ev_971_imported_functions_work_in_every_dialect() {
    let server = Running::over(with_model(spawned(scripted::Config::default()))).await;
    for url in URLS {
        let kernel = Kernel::new();
        let session = session(&server, url).await;
        kernel.add_all(import(&session).await.unwrap()).unwrap();
        let reply = kernel.run::<String>("concat", args! { a: "one", b: "two" });
        assert_eq!(reply.await.unwrap(), "onetwo", "{url}");
        let failed = kernel.run::<String>("fail", ()).await.unwrap_err();
        assert_eq!(failed.code(), Code::Internal, "{url}");
        let answer = kernel.run::<String>("parrot", args! { prompt: "Guten Tag" });
        assert_eq!(answer.await.unwrap(), "Guten Tag", "{url}");
    }
}

/// EV-974
#[tokio::test]
async fn ev_975_refused_connections_and_failed_calls_have_their_codes() {
    let key = key("anna", "one");
    let kernel = Kernel::new();
    kernel
        .add_all(sapwood_kernel::session::test_functions())
        .unwrap();
    let server = Running::start(kernel, Config::default(), vec![key]).await;
    let running = &server.shared.metrics.evergreen.actions_open;
    for url in URLS {
        let refused =
            ClientSession::connect(&at(&server, url), ClientSessionOptions::default()).await;
        assert_eq!(refused.err().unwrap().code, Code::Unauthenticated, "{url}");
        let address = at(&server, url).with_key("one");
        let session = ClientSession::connect(&address, ClientSessionOptions::default())
            .await
            .unwrap();
        let slow = session.call(request("slow", &[], &["response"])).unwrap();
        until("it runs", || running.get() == 1).await;
        // Dropping the call cancels it, and the session stays open.
        drop(slow);
        until("it is cancelled", || running.get() == 0).await;
        let unknown = request("nobody", &[], &["response"]);
        let unknown = session.call(unknown).unwrap();
        let read = unknown.output("response").unwrap().read().whole().await;
        assert_eq!(read.unwrap_err().code, Code::NotFound, "{url}");
    }
    for url in [
        "ws://x@localhost",
        "ws://localhost?dialect=morse",
        "ftp://localhost",
    ] {
        let bad =
            ClientSession::connect(&ServerAddress::new(url), ClientSessionOptions::default()).await;
        assert_eq!(bad.err().unwrap().code, Code::InvalidRequest, "{url}");
    }
}

/// EV-801
#[tokio::test]
async fn worn_resolves_before_a_session_reaches_its_node_or_byte_limit() {
    let server = Running::with_test_functions().await;
    let worn_after = |limits: SessionLimits| {
        let options = ClientSessionOptions {
            limits: Arc::new(limits),
            ..ClientSessionOptions::default()
        };
        let address = at(&server, "http://");
        async move {
            let session = ClientSession::connect(&address, options).await.unwrap();
            let (worn, text) = (session.worn(), Arc::new(Metadata::of("text/plain")));
            tokio::pin!(worn);
            let mut made = 0;
            while futures::poll!(&mut worn).is_pending() {
                // A node of a hundred bytes, plus the overhead of its fragment.
                let mut writer = session.write().unwrap();
                writer.write(&text, vec![b'x'; 100].into()).await.unwrap();
                writer.end(&text).unwrap();
                made += 1;
            }
            made
        }
    };
    let nodes = SessionLimits {
        max_nodes: 40,
        ..SessionLimits::default()
    };
    assert_eq!(worn_after(nodes).await, 10);
    let bytes = SessionLimits {
        retained_bytes: 8_000,
        ..SessionLimits::default()
    };
    let made = worn_after(bytes).await;
    assert!((15..35).contains(&made), "{made}");
}

/// The key with the secret `rye`, restricted to these models.
fn may(models: &[&str]) -> Vec<ApiKey> {
    let mut some = key("anna", "rye");
    let models = models.iter().map(|name| Name::shared(name)).collect();
    some.allowance = Some(Arc::new(TokenMeter::new(
        "key",
        rate_limit::RateLimits {
            models: Some(Arc::new(models)),
            ..rate_limit::RateLimits::default()
        },
    )));
    vec![some]
}

/// The models of a key can change while its sessions are open: fewer, and more.
#[tokio::test]
async fn d_45_an_open_session_follows_the_models_of_its_key() {
    let kernel = with_model(spawned(scripted::Config::default()));
    let server = Running::start(kernel, Default::default(), may(&["parrot"])).await;
    let open = async || {
        let address = at(&server, "http://").with_key("rye");
        let options = ClientSessionOptions {
            partial_failure: true,
            ..ClientSessionOptions::default()
        };
        ClientSession::connect(&address, options).await.unwrap()
    };
    // One session opens while the key may use the model, the other while it may not.
    let wide = open().await;
    let kernel = Kernel::new();
    kernel.add_all(import(&wide).await.unwrap()).unwrap();
    let call = async || {
        let config = serde_json::json!({"prompt_mode": "raw"});
        let run = kernel.run::<String>("parrot", args! { prompt: "Hi", config: config });
        run.finish().await.map(|(text, _)| text)
    };
    let lists = async |session: &ClientSession| {
        let listed = import(session).await.unwrap();
        let mut names = listed.iter().map(|function| &function.spec().name);
        names.any(|name| name.as_str() == "parrot")
    };
    assert_eq!(call().await.unwrap(), "Hi");
    server.shared.auth.replace(may(&["other"]));
    let narrow = open().await;
    for (models, good) in [("other", false), ("parrot", true), ("other", false)] {
        server.shared.auth.replace(may(&[models]));
        for session in [&wide, &narrow] {
            assert_eq!(lists(session).await, good, "{models}");
        }
        match call().await {
            Ok(text) => assert!(good && text == "Hi", "{models}: {text}"),
            Err(error) => assert!(!good, "{models}: {error}"),
        }
    }
    // A model that was allowed only after the session opened can be called in it.
    server.shared.auth.replace(may(&["parrot"]));
    let kernel = Kernel::new();
    kernel.add_all(import(&narrow).await.unwrap()).unwrap();
    let config = serde_json::json!({"prompt_mode": "raw"});
    let run = kernel.run::<String>("parrot", args! { prompt: "Hi", config: config });
    assert_eq!(run.finish().await.unwrap().0, "Hi");
}
