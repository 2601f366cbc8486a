//! Our client against our server, over a real socket.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sapwood_engine::scripted;
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, PeerNodeWriter, SessionNode};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Metadata;
use sapwood_proto::time::Time;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::rate_limit::{RateLimits, TokenMeter};
use sapwood_server::faces::evergreen::Config;

use sapwood_tests::{Running, by_hand, key, request, spawned, until, with_model};

pub(super) fn text(role: &str) -> Arc<Metadata> {
    Arc::new(Metadata::of("text/plain").with_role(role))
}

async fn leaf(session: &ClientSession, role: &str, reply: &str) -> SessionNode {
    let mut writer = session.write().unwrap();
    writer
        .write(&text(role), Bytes::copy_from_slice(reply.as_bytes()))
        .await
        .unwrap();
    writer.end(&text(role)).unwrap()
}

async fn tree(session: &ClientSession, children: &[SessionNode]) -> SessionNode {
    let mut writer: PeerNodeWriter = session.write().unwrap();
    writer.list(children).await.unwrap();
    writer.end(&Arc::default()).unwrap()
}

pub(super) async fn whole(node: Option<SessionNode>) -> String {
    String::from_utf8(node.unwrap().read().whole().await.unwrap()).unwrap()
}

/// EV-706, EV-970, EV-971, EV-972
#[tokio::test]
async fn ev_702_headers_are_sent_at_once_and_an_echo_streams_back() {
    let server = Running::with_test_functions().await;
    // The call is accepted before anything has been sent.
    let session = server.session().await;
    assert!(session.announces("cancel") && session.announces("list-actions"));
    let mut input = session.write().unwrap();
    let call = session
        .call(request("echo", &[("text", input.node())], &["response"]))
        .unwrap();
    let mut response = call.output("response").unwrap().read();
    for word in ["ein ", "zwei ", "drei"] {
        input
            .write(&text("USER"), Bytes::from_static(word.as_bytes()))
            .await
            .unwrap();
        let piece = response.next().await.unwrap().unwrap();
        assert_eq!(piece.data, word);
        assert_eq!(
            (&*piece.metadata.mimetype, &*piece.metadata.role),
            ("text/plain", "USER")
        );
    }
    input.end(&text("USER")).unwrap();
    assert!(response.next().await.is_none());
    drop((response, call));
    session.close().await.unwrap();
    until("the session is gone", || {
        server.shared.metrics.evergreen.sessions_open.get() == 0
    })
    .await;
}

#[tokio::test]
async fn ev_109_after_a_half_close_running_actions_finish_and_the_status_is_ok() {
    let server = Running::with_test_functions().await;
    let session = server.session().await;
    let data = "x".repeat(300_000);
    let input = leaf(&session, "", &data).await;
    let call = session
        .call(request("echo", &[("text", &input)], &["response"]))
        .unwrap();
    let output = call.output("response");
    call.detach();
    let (closed, echoed) = futures::join!(session.close(), whole(output));
    closed.unwrap();
    assert!(echoed == data);
}

/// EV-601, EV-506
#[tokio::test]
async fn ev_601_generate_streams_an_answer_with_its_meta() {
    let server = Running::over(with_model(spawned(scripted::Config::default()))).await;
    let session = server.session().await;
    let prompt = leaf(&session, "USER", "Guten Tag, Köln").await;
    let call = session
        .call(request(
            "GENERATE",
            &[("prompt", &prompt)],
            &["response", "meta"],
        ))
        .unwrap();
    let mut response = call.output("response").unwrap().read();
    let first = response.next().await.unwrap().unwrap();
    assert_eq!(
        (&*first.metadata.mimetype, &*first.metadata.role),
        ("text/plain", "ASSISTANT")
    );
    assert_eq!(whole(call.output("response")).await, "Guten Tag, Köln");
    let meta: serde_json::Value = serde_json::from_str(&whole(call.output("meta")).await).unwrap();
    assert_eq!(
        (&meta["finish_reason"], &meta["model"]),
        (&"stop".into(), &"scripted".into())
    );
    session
        .close()
        .await
        .unwrap_or_else(|status| panic!("{status}"));
}

/// EV-309
#[tokio::test]
async fn ev_610_a_prompt_that_arrives_after_its_action_gets_the_same_answer() {
    let server = Running::over(with_model(spawned(scripted::Config::default()))).await;
    let session = server.session().await;
    let mut answers = Vec::new();
    for comes_after in [false, true] {
        let mut prompt = session.write().unwrap();
        let node = prompt.node().clone();
        let asked = || request("GENERATE", &[("prompt", &node)], &["response", "meta"]);
        let early = comes_after.then(|| session.call(asked()).unwrap());
        for word in ["Guten ", "Tag, ", "K\u{f6}ln"] {
            prompt.write(&text("USER"), word.into()).await.unwrap();
        }
        prompt.end(&text("USER")).unwrap();
        let call = early.unwrap_or_else(|| session.call(asked()).unwrap());
        let meta = whole(call.output("meta")).await;
        let meta: serde_json::Value = serde_json::from_str(&meta).unwrap();
        let used = meta["usage"]["prompt_tokens"].clone();
        answers.push((whole(call.output("response")).await, used));
    }
    assert_eq!(answers[0].0, "Guten Tag, Köln");
    assert_eq!(answers[0], answers[1]);
    session.close().await.unwrap();
}

/// EV-307, EV-973
#[tokio::test]
async fn ev_612_the_second_turn_is_sent_before_the_first_answer_exists() {
    let server = Running::over(with_model(spawned(scripted::Config::default()))).await;
    let session = server.session().await;
    let river = leaf(&session, "USER", "Name a river.").await;
    let first_prompt = tree(&session, &[river]).await;
    let first = session
        .call(request(
            "GENERATE",
            &[("prompt", &first_prompt)],
            &["response"],
        ))
        .unwrap();
    let long = leaf(&session, "USER", "How long is it?").await;
    let second_prompt = tree(
        &session,
        &[first_prompt, first.output("response").unwrap(), long],
    )
    .await;
    let second = session
        .call(request(
            "GENERATE",
            &[("prompt", &second_prompt)],
            &["response", "meta"],
        ))
        .unwrap();
    assert_eq!(whole(second.output("response")).await, "How long is it?");
    assert_eq!(whole(first.output("response")).await, "Name a river.");
    let meta: serde_json::Value =
        serde_json::from_str(&whole(second.output("meta")).await).unwrap();
    // The prompt had both turns and the answer between them.
    assert!(
        meta["usage"]["prompt_tokens"].as_u64().unwrap() > 40,
        "{meta}"
    );
}

/// EV-931, EV-975
#[tokio::test]
async fn ev_930_with_partial_failure_a_session_outlives_a_failed_action() {
    let server = Running::with_test_functions().await;
    let session = server.partial().await;
    let failed = session.call(request("fail", &[], &["response"])).unwrap();
    let mut response = failed.output("response").unwrap().read();
    assert_eq!(
        response.next().await.unwrap().unwrap().data,
        "before the failure"
    );
    let status = response.next().await.unwrap().unwrap_err();
    assert_eq!((status.code, &*status.reason), (Code::Internal, "FUNCTION"));
    assert_eq!(status.detail("action"), Some("fail"));
    let input = leaf(&session, "", "still here").await;
    let echo = session
        .call(request("echo", &[("text", &input)], &["response"]))
        .unwrap();
    assert_eq!(whole(echo.output("response")).await, "still here");
}

/// EV-974
#[tokio::test]
async fn ev_913_dropping_a_call_cancels_the_call_and_not_the_session() {
    let endless = scripted::Config {
        script: scripted::Script::Tokens,
        context_tokens: 1 << 20,
        ..Default::default()
    };
    let engine = spawned(scripted::Config {
        count: 1 << 19,
        ..endless
    });
    let server = Running::over(with_model(engine.clone())).await;
    let session = server.session().await;
    let prompt = leaf(&session, "USER", "on and on").await;
    let call = session
        .call(request("GENERATE", &[("prompt", &prompt)], &["response"]))
        .unwrap();
    let mut response = call.output("response").unwrap().read();
    response.next().await.unwrap().unwrap();
    // The metric of running requests is updated after the step's events are published.
    until("it runs", || engine.stats().requests_running.get() == 1).await;
    drop((response, call));
    until("the sequence is gone", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
    let input = leaf(&session, "", "next").await;
    let echo = session
        .call(request("echo", &[("text", &input)], &["response"]))
        .unwrap();
    assert_eq!(whole(echo.output("response")).await, "next");
}

#[tokio::test]
async fn ev_611_a_disconnect_frees_the_sequence_within_one_step() {
    let config = scripted::Config {
        script: scripted::Script::Tokens,
        count: 4000,
        ..Default::default()
    };
    let (mut owner, engine) = by_hand(config);
    let server = Running::over(with_model(engine.clone())).await;
    let session = server.session().await;
    let prompt = leaf(&session, "USER", "count").await;
    let call = session
        .call(request("GENERATE", &[("prompt", &prompt)], &["response"]))
        .unwrap();
    let mut response = call.output("response").unwrap().read();
    until("the sequence decodes", || {
        !owner.step(Time::ZERO).decoded.is_empty()
    })
    .await;
    let mut asked = Box::pin(response.next());
    let mut first = None;
    until("an answer comes", || {
        owner.step(Time::ZERO);
        first = futures::FutureExt::now_or_never(asked.as_mut());
        first.is_some()
    })
    .await;
    let numbers = &server.shared.metrics.evergreen;
    drop((asked, call, prompt, session));
    drop(response);
    until("the server has noticed the disconnect", || {
        numbers.sessions_open.get() == 0
    })
    .await;
    let next = owner.step(Time::ZERO);
    assert_eq!(
        (next.cancelled.len(), next.batch().count()),
        (1, 0),
        "{next:?}"
    );
    assert_eq!(
        (numbers.actions_open.get(), numbers.retained_bytes.get()),
        (0, 0)
    );
}

#[tokio::test]
async fn ev_950_the_deadline_of_a_session_is_sent_to_the_server() {
    let server = Running::with_test_functions().await;
    let options = ClientSessionOptions {
        timeout: Some(Duration::from_millis(20)),
        ..ClientSessionOptions::default()
    };
    let session = ClientSession::connect(&server.at(), options).await.unwrap();
    let call = session.call(request("slow", &[], &["response"])).unwrap();
    let status = call
        .output("response")
        .unwrap()
        .read()
        .next()
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(
        (status.code, &*status.reason),
        (Code::DeadlineExceeded, "DEADLINE")
    );
}

#[tokio::test]
async fn ev_704_a_session_without_a_valid_key_is_refused() {
    let key = key("anna", "secret");
    let kernel = sapwood_kernel::Kernel::new();
    let server = Running::start(kernel, Config::default(), vec![key]).await;
    // The reason is sent in trailers, too.
    let refused = (Code::Unauthenticated, "INVALID_API_KEY");
    for (address, expect) in [
        (server.at(), Some(refused)),
        (server.at().with_key("wrong"), Some(refused)),
        (server.at().with_key("secret"), None),
    ] {
        let got = ClientSession::connect(&address, ClientSessionOptions::default()).await;
        let got = got.err();
        let got = got.as_ref().map(|status| (status.code, &*status.reason));
        assert_eq!(got, expect);
        assert!(!format!("{address:?}").contains("secret"));
    }
}

#[tokio::test]
async fn oa_906_a_session_is_charged_to_its_key() {
    let limits = RateLimits {
        requests_per_minute: Some(1),
        tokens_per_minute: Some(600),
        ..RateLimits::default()
    };
    let allowance = Arc::new(TokenMeter::new("key", limits));
    let key = ApiKey {
        allowance: Some(allowance),
        ..key("anna", "secret")
    };
    let kernel = with_model(spawned(scripted::Config::default()));
    let server = Running::start(kernel, Config::default(), vec![key]).await;
    let options = ClientSessionOptions {
        partial_failure: true,
        ..ClientSessionOptions::default()
    };
    let session = ClientSession::connect(&server.at().with_key("secret"), options)
        .await
        .unwrap();
    let prompt = leaf(&session, "", "one two three").await;
    let ask = || {
        session
            .call(request("GENERATE", &[("prompt", &prompt)], &["response"]))
            .unwrap()
    };
    let first = ask();
    assert!(!whole(first.output("response")).await.is_empty());
    let second = ask();
    let refused = second.output("response").unwrap().read().whole().await;
    let status = refused.unwrap_err();
    assert_eq!(
        (status.code, &*status.reason),
        (Code::RateLimited, "RATE_LIMITED")
    );
    assert!(
        status
            .retry_after
            .is_some_and(|wait| wait > Duration::from_secs(30))
    );
}

/// EV-902
#[tokio::test]
async fn a_session_above_the_limit_is_refused_with_a_retry_delay() {
    let config = Config {
        sessions: 1,
        ..Config::default()
    };
    let server = Running::start(sapwood_kernel::Kernel::new(), config, Vec::new()).await;
    let first = server.session().await;
    let refused = ClientSession::connect(&server.at(), ClientSessionOptions::default())
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code.grpc(), refused.retry_after.is_some()),
        (14, true),
        "{refused}"
    );
    drop(first);
    until("the session is released", || {
        server.shared.metrics.evergreen.sessions_open.get() == 0
    })
    .await;
    server.session().await;
}

/// EV-904
#[tokio::test]
async fn ev_904_sessions_are_counted() {
    let server = Running::with_test_functions().await;
    let session = server.partial().await;
    let input = leaf(&session, "", "12345").await;
    let echo = session
        .call(request("echo", &[("text", &input)], &["response"]))
        .unwrap();
    whole(echo.output("response")).await;
    let failed = session.call(request("fail", &[], &["response"])).unwrap();
    let _ = failed.output("response").unwrap().read().whole().await;
    let numbers = &server.shared.metrics.evergreen;
    assert_eq!(
        (numbers.sessions_open.get(), numbers.actions_open.get()),
        (1, 0)
    );
    assert_eq!(numbers.failures.with_label_values(&["FUNCTION"]).get(), 1);
    assert_eq!(numbers.bytes.with_label_values(&["in"]).get(), 5);
    assert!(numbers.retained_bytes.get() > 10);
    session.close().await.unwrap();
    until("nothing is retained", || {
        numbers.retained_bytes.get() == 0 && numbers.sessions_open.get() == 0
    })
    .await;
    assert!(
        server
            .shared
            .metrics
            .render(sapwood_server::ops::metrics::Format::Text)
            .contains("sapwood_evergreen_bytes_total{direction=\"in\"} 5")
    );
}
