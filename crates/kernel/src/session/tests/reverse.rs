//! Functions that a client offers, as the functions of its session see them (section 8.3).

use std::sync::Mutex;

use futures::future::BoxFuture;
use sapwood_proto::evergreen::{Reason, SessionLimits};
use tokio::sync::oneshot;

use super::*;
use crate::call::Call;
use crate::error::Error;
use crate::session::reference::{FoundContent, ReferenceFetch};
use crate::{Fun, Run, args};

/// The offer of a plain client.
const WEATHER: &str =
    r#"{"actions":[{"name":"weather","inputs":[{"name":"city"}],"outputs":[{"name":"report"}]}]}"#;
const WEATHER_AND_CANCEL: &str = r#"{"actions":[{"name":"weather","inputs":[{"name":"city"}],"outputs":[{"name":"report"}]},{"name":"CANCEL"}]}"#;

/// A function of the server that calls `weather`, whichever side serves it.
fn ask() -> Fun {
    let spec = Spec::new("ask", "Asks for the weather.")
        .inputs([InputSpec::new("city")])
        .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT).wire("response")]);
    raw(spec, |call: Call| {
        stream::once(async move {
            let city: String = call.arg("city").await?;
            let report: Run<String> = call.kernel().run("weather", args! { city: city });
            Ok(Chunk::text(format!("it is {}", report.await?)))
        })
        .boxed()
    })
}

fn session(change: impl FnOnce(&mut SessionOptions, &mut SessionLimits)) -> Probe {
    let (mut options, mut limits) = (
        SessionOptions {
            partial_failure: true,
            ..SessionOptions::default()
        },
        SessionLimits::default(),
    );
    change(&mut options, &mut limits);
    options.limits = Arc::new(limits);
    Probe::open([ask()], options)
}

impl Probe {
    /// Offers the functions of `document`; returns the result, or the reason of the error.
    async fn offer(&mut self, id: &str, document: &str) -> Result<String, String> {
        let (input, result) = (format!("offer{id}"), format!("offered{id}"));
        let offer = action(
            "OFFER_ACTIONS",
            &[("actions", &input)],
            &[("result", &result)],
        );
        self.send(vec![leaf(&input, 0, true, document)], vec![offer])
            .await;
        let received = self.complete(&result).await;
        match received.status {
            Some(status) => Err(status.reason.to_string()),
            None => Ok(String::from_utf8(received.data).unwrap()),
        }
    }

    async fn ask(&mut self, output: &str, city: &str) {
        let input = format!("city-{output}");
        let ask = action("ask", &[("city", &input)], &[("response", output)]);
        self.send(vec![leaf(&input, 0, true, city)], vec![ask])
            .await;
    }

    /// The next call of the server.
    async fn asked(&mut self) -> Action {
        while self.asked.is_empty() {
            let message = self.outgoing.next().await.unwrap().unwrap();
            self.take(message);
        }
        self.asked.remove(0)
    }

    async fn text(&mut self, node: &str) -> String {
        let node = self.complete(node).await;
        assert!(node.status.is_none(), "{:?}", node.status);
        String::from_utf8(node.data).unwrap()
    }

    async fn rejection(&mut self, node: &str) -> String {
        reason(self.complete(node).await.status)
    }
}

/// EV-103, EV-811
#[tokio::test(start_paused = true)]
async fn ev_812_a_running_function_calls_what_its_client_offers() {
    let mut probe = session(|_, _| {});
    assert_eq!(probe.offer("", WEATHER).await.unwrap(), r#"{"offered":1}"#);
    probe.ask("a", "Bergen").await;
    let asked = probe.asked().await;
    assert_eq!(asked.name, "weather");
    let (city, report) = (
        asked.inputs[0].id.to_string(),
        asked.outputs[0].id.to_string(),
    );
    assert!(
        city.starts_with('~') && report.starts_with('~'),
        "{city}, {report}"
    );
    assert_eq!(
        (&*asked.inputs[0].name, &*asked.outputs[0].name),
        ("city", "report")
    );
    assert_eq!(probe.text(&city).await, "Bergen");
    probe
        .send(vec![leaf(&report, 0, false, "wet ")], vec![])
        .await;
    probe
        .send(vec![leaf(&report, 1, true, "indeed")], vec![])
        .await;
    assert_eq!(probe.text("a").await, "it is wet indeed");
    assert_eq!(reason(probe.end().await), "OK");
}

#[tokio::test(start_paused = true)]
async fn ev_810_a_client_without_an_offer_receives_no_action() {
    let mut probe = session(|_, _| {});
    probe.ask("a", "Bergen").await;
    assert_eq!(probe.rejection("a").await, "UNKNOWN_ACTION");
    assert!(probe.asked.is_empty());
}

#[tokio::test(start_paused = true)]
async fn ev_810_a_later_offer_replaces_the_current_one() {
    let mut probe = session(|_, _| {});
    probe.offer("1", WEATHER).await.unwrap();
    let tides = r#"{"actions":[{"name":"tides"},{"name":"moon.phase"}]}"#;
    assert_eq!(probe.offer("2", tides).await.unwrap(), r#"{"offered":2}"#);
    probe.ask("a", "Bergen").await;
    assert_eq!(probe.rejection("a").await, "UNKNOWN_ACTION");
    // A refused offer changes nothing.
    assert_eq!(
        probe.offer("3", r#"{"actions":[{"name":"echo"}]}"#).await,
        Err("BAD_NAME".into())
    );
    // The order of offers is that of the actions, whichever can be decoded first.
    let late = action(
        "OFFER_ACTIONS",
        &[("actions", "late")],
        &[("result", "was-late")],
    );
    probe.send(vec![], vec![late]).await;
    probe.offer("4", WEATHER).await.unwrap();
    probe
        .send(vec![leaf("late", 0, true, r#"{"actions":[]}"#)], vec![])
        .await;
    assert_eq!(probe.text("was-late").await, r#"{"offered":0}"#);
    probe.ask("b", "Bergen").await;
    let under_way = probe.asked().await.outputs[0].id.to_string();
    probe.offer("5", r#"{"actions":[]}"#).await.unwrap();
    probe.ask("c", "Bergen").await;
    assert_eq!(probe.rejection("c").await, "UNKNOWN_ACTION");
    let answer = leaf(&under_way, 0, true, "fine");
    probe.send(vec![answer], vec![]).await;
    assert_eq!(probe.text("b").await, "it is fine");
}

#[tokio::test(start_paused = true)]
async fn ev_810_invalid_offers_are_refused() {
    let named = |name: &str| format!(r#"{{"actions":[{{"name":"{name}"}}]}}"#);
    let cases = [
        ("no JSON".to_owned(), "BAD_CONFIG"),
        ("{}".to_owned(), "BAD_CONFIG"),
        (r#"{"actions":[{"inputs":[]}]}"#.to_owned(), "BAD_CONFIG"),
        (
            format!(r#"{{"actions":{}{}}}"#, "[".repeat(200), "]".repeat(200)),
            "BAD_CONFIG",
        ),
        (named(""), "BAD_NAME"),
        (named("two words"), "BAD_NAME"),
        (named("__status__"), "BAD_NAME"),
        (named("__mine"), "BAD_NAME"),
        (named("OFFER_ACTIONS"), "BAD_NAME"),
        (named("DROP"), "BAD_NAME"),
        (named("fn.x"), "BAD_NAME"),
        // A function of the server's is never hidden by a client's.
        (named("ask"), "BAD_NAME"),
        (
            r#"{"actions":[{"name":"a"},{"name":"a"}]}"#.to_owned(),
            "BAD_NAME",
        ),
        (
            r#"{"actions":[{"name":"a","inputs":[{"name":"x"},{"name":"x"}]}]}"#.to_owned(),
            "BAD_NAME",
        ),
    ];
    let mut probe = session(|_, _| {});
    for (index, (document, expect)) in cases.iter().enumerate() {
        let refused = probe.offer(&index.to_string(), document).await;
        assert_eq!(refused, Err((*expect).to_owned()), "{document}");
    }
    let offer = action("OFFER_ACTIONS", &[], &[("result", "nothing")]);
    probe.send(vec![], vec![offer]).await;
    assert_eq!(probe.rejection("nothing").await, "MISSING_INPUT");
    let mut deaf = session(|options, _| options.extensions = extensions(false, false));
    assert_eq!(
        deaf.offer("", WEATHER).await,
        Err(Reason::Unimplemented.name().to_owned())
    );
}

#[tokio::test(start_paused = true)]
async fn ev_812_a_function_that_the_server_gets_later_is_not_hidden_by_an_offer() {
    let kernel = Kernel::new();
    kernel.add(ask()).unwrap();
    let mut probe = Probe::over(
        kernel.clone(),
        SessionOptions::default(),
        stream::pending().boxed(),
    );
    assert!(probe.offer("", WEATHER).await.is_ok());
    let spec = Spec::new("weather", "Knows.").inputs([InputSpec::new("city")]);
    let known = |_| stream::iter([Ok(Chunk::text("known here"))]).boxed();
    kernel.add(raw(spec, known)).unwrap();
    probe.ask("a", "Bergen").await;
    assert_eq!(probe.text("a").await, "it is known here");
    kernel.remove("weather").unwrap();
    probe.ask("b", "Bergen").await;
    assert_eq!(probe.asked().await.name, "weather");
}

#[tokio::test(start_paused = true)]
async fn ev_810_offers_are_limited_in_number_and_bytes() {
    let many = |count: usize| {
        let list: Vec<_> = (0..count)
            .map(|at| json!({ "name": format!("f{at}") }))
            .collect();
        json!({ "actions": list }).to_string()
    };
    let mut probe = session(|_, limits| limits.max_offers = 3);
    assert!(probe.offer("1", &many(3)).await.is_ok());
    assert_eq!(probe.offer("2", &many(4)).await, Err("ACTION_LIMIT".into()));
    let status = probe.nodes["offered2"].status.as_ref().unwrap();
    let limit = (status.detail("limit"), status.detail("max"));
    assert_eq!(limit, (Some("max_offers"), Some("3")));
    let mut probe = session(|_, limits| limits.max_offer_bytes = WEATHER.len());
    assert!(probe.offer("1", WEATHER).await.is_ok());
    assert_eq!(
        probe.offer("2", &format!("{WEATHER} ")).await,
        Err("FLATTEN_LIMIT".into())
    );
}

/// EV-801: also after the document itself was dropped.
#[tokio::test(start_paused = true)]
async fn ev_810_offers_count_against_the_server_quota() {
    struct Last(Arc<AtomicUsize>);
    impl Observe for Last {
        fn retains(&mut self, bytes: u64) -> Result<(), Status> {
            self.0
                .store(usize::try_from(bytes).unwrap(), Ordering::SeqCst);
            Ok(())
        }
    }
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let retained = Arc::new(AtomicUsize::new(0));
    let (mut send, incoming) = mpsc::channel(4);
    let (session, mut outgoing) = open(
        kernel,
        SessionOptions::default(),
        Last(Arc::clone(&retained)),
    );
    let session = tokio::spawn(session.run(incoming, stream::pending()));
    let schema = json!({ "enum": vec![0; 5_000] });
    let input = json!({ "name": "x", "schema": schema });
    let document = json!({ "actions": [{ "name": "f", "inputs": [input] }] }).to_string();
    let offer = action("OFFER_ACTIONS", &[("actions", "o")], &[("result", "r")]);
    let drop = action("DROP", &[("node", "o")], &[("result", "d")]);
    for (fragments, action, result) in [
        (vec![leaf("o", 0, true, &document)], offer, "r"),
        (vec![], drop, "d"),
    ] {
        let message = WireMessage {
            fragments: fragments.into(),
            actions: vec![action],
            ..WireMessage::default()
        };
        send.send(Ok(message)).await.unwrap();
        let is_last = |message: WireMessage| {
            let mut fragments = message.fragments.into_iter();
            fragments.any(|fragment| fragment.id == result && fragment.last)
        };
        while !is_last(outgoing.next().await.unwrap().unwrap()) {}
    }
    tokio::task::yield_now().await;
    let reserved_for_it = retained.load(Ordering::SeqCst);
    assert!(
        reserved_for_it > 5_000 * size_of::<Value>(),
        "{reserved_for_it}"
    );
    send.close_channel();
    assert_eq!(reason(session.await.unwrap()), "OK");
    assert!(retained.load(Ordering::SeqCst) < document.len());
}

#[tokio::test(start_paused = true)]
async fn ev_812_other_sessions_see_nothing_of_an_offer() {
    let kernel = Kernel::new();
    kernel.add(ask()).unwrap();
    let options = SessionOptions {
        partial_failure: true,
        ..SessionOptions::default()
    };
    let open = || Probe::over(kernel.clone(), options.clone(), stream::pending().boxed());
    let (mut one, mut other) = (open(), open());
    one.offer("", WEATHER).await.unwrap();
    other.ask("a", "Bergen").await;
    assert_eq!(other.rejection("a").await, "UNKNOWN_ACTION");
    assert!(kernel.get("weather").is_err());
    one.send(
        vec![],
        vec![action("LIST_ACTIONS", &[], &[("actions", "l")])],
    )
    .await;
    let listed = one.text("l").await;
    assert!(
        !listed.contains(r#""weather""#) && listed.contains("reverse-actions"),
        "{listed}"
    );
}

/// EV-812
#[tokio::test(start_paused = true)]
async fn ev_931_a_client_fails_an_offered_function_with_a_status() {
    let mut probe = session(|_, _| {});
    probe.offer("", WEATHER).await.unwrap();
    for (id, started) in [("a", false), ("b", true)] {
        probe.ask(id, "Bergen").await;
        let report = probe.asked().await.outputs[0].id.to_string();
        if started {
            probe.send(vec![leaf(&report, 0, false, "w")], vec![]).await;
        }
        let status = Status::other(Code::NotFound, "NO_SUCH_CITY", "Bergen is unknown");
        let chunk = WireChunk {
            metadata: None,
            payload: Some(Payload::Status(Some(Arc::new(status)))),
        };
        let failed = Fragment {
            id: report.as_str().into(),
            seq: i32::from(started),
            last: true,
            chunk: Some(chunk),
            ..Fragment::default()
        };
        probe.send(vec![failed], vec![]).await;
        let received = probe.complete(id).await.status.unwrap();
        assert_eq!(
            (received.code, &*received.reason),
            (Code::NotFound, "NO_SUCH_CITY")
        );
        assert!(
            received.message.contains("Bergen is unknown"),
            "{received:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn ev_811_a_missing_answer_fails_the_calling_function_after_reverse_timeout() {
    let mut probe = session(|_, limits| limits.reverse_timeout = Duration::from_secs(7));
    probe.offer("", WEATHER_AND_CANCEL).await.unwrap();
    let began = tokio::time::Instant::now();
    probe.ask("a", "Bergen").await;
    let report = probe.asked().await.outputs[0].id.to_string();
    assert_eq!(probe.rejection("a").await, "DEADLINE");
    assert_eq!(began.elapsed().as_secs(), 7);
    // A late reply is ignored, and the session goes on.
    probe
        .send(vec![leaf(&report, 0, true, "fine")], vec![])
        .await;
    probe.ask("b", "Oslo").await;
    let report = probe.asked().await.outputs[0].id.to_string();
    probe
        .send(vec![leaf(&report, 0, true, "fine")], vec![])
        .await;
    assert_eq!(probe.text("b").await, "it is fine");
}

/// EV-810
#[tokio::test(start_paused = true)]
async fn ev_974_cancel_is_sent_only_to_clients_that_offer_it() {
    for (offer, received) in [(WEATHER, false), (WEATHER_AND_CANCEL, true)] {
        let mut probe = session(|_, _| {});
        probe.offer("", offer).await.unwrap();
        probe.ask("a", "Bergen").await;
        let asked = probe.asked().await;
        probe
            .send(
                vec![],
                vec![action("CANCEL", &[("action", "a")], &[("result", "c")])],
            )
            .await;
        probe.complete("a").await;
        probe.complete("c").await;
        let echo = action("echo", &[("text", "city-a")], &[("response", "e")]);
        probe.send(vec![], vec![echo]).await;
        probe.complete("e").await;
        let cancels = probe
            .asked
            .iter()
            .map(|action| (&*action.name, &*action.inputs[0].id));
        let expect = received.then_some(("CANCEL", &*asked.outputs[0].id));
        assert_eq!(cancels.collect::<Vec<_>>(), Vec::from_iter(expect));
    }
}

/// A function whose task continues after the session has ended.
fn linger(received: oneshot::Sender<(Error, Error)>) -> Fun {
    let received = Mutex::new(Some(received));
    raw(Spec::new("linger", "Stays."), move |call: Call| {
        let received = received.lock().unwrap().take().unwrap();
        let weather =
            |kernel: &Kernel| -> Run<String> { kernel.run("weather", args! { city: "x" }) };
        tokio::spawn(async move {
            let in_flight = weather(&call.kernel()).await.unwrap_err();
            let after = weather(&call.kernel()).await.unwrap_err();
            received.send((in_flight, after)).unwrap();
        });
        stream::once(futures::future::pending()).boxed()
    })
}

/// EV-104
#[tokio::test(start_paused = true)]
async fn ev_812_offers_vanish_with_the_session_and_calls_in_flight_are_cancelled() {
    let (send, received) = oneshot::channel();
    let mut probe = Probe::open([linger(send)], SessionOptions::default());
    probe.offer("", WEATHER).await.unwrap();
    probe
        .send(vec![], vec![action("linger", &[], &[("output", "o")])])
        .await;
    assert_eq!(probe.asked().await.name, "weather");
    probe
        .send
        .send(Err(Status::new(Reason::GoingAway, "bye")))
        .await
        .unwrap();
    assert_eq!(reason(probe.failure().await), "GOING_AWAY");
    let (in_flight, after) = received.await.unwrap();
    assert!(matches!(in_flight, Error::Cancelled), "{in_flight:?}");
    assert_eq!(after.reason(), "UNKNOWN_ACTION", "{after:?}");
}

/// EV-410, EV-812
#[tokio::test(start_paused = true)]
async fn ev_811_references_in_answers_are_not_followed_but_data_uris_are_read() {
    #[derive(Debug)]
    struct Never;
    impl ReferenceFetch for Never {
        fn open<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<FoundContent, Status>> {
            panic!("nothing is fetched for an answer")
        }
    }
    for follows in [false, true] {
        let mut probe = session(|options, _| {
            options.references = follows.then(|| Arc::new(Never) as Arc<dyn ReferenceFetch>);
        });
        assert!(probe.offer("", WEATHER).await.is_ok());
        for (output, uri, expect) in [
            ("a", "data:text/plain,wet", Ok("it is wet")),
            ("b", "file:///etc/weather", Err("REF_DENIED")),
            ("c", "https://weather.example/", Err("REF_DENIED")),
        ] {
            probe.ask(output, "Bergen").await;
            let report = probe.asked().await.outputs[0].id.to_string();
            let mut answer = leaf(&report, 0, true, "");
            if let Some(chunk) = &mut answer.chunk {
                chunk.payload = Some(Payload::Ref(uri.into()));
            }
            probe.send(vec![answer], vec![]).await;
            match expect {
                Ok(text) => assert_eq!(probe.text(output).await, text),
                Err(reason) => assert_eq!(probe.rejection(output).await, reason, "{uri}"),
            }
        }
        assert_eq!(reason(probe.end().await), "OK");
    }
}

/// A client chooses what its answers contain, and a tree can repeat a leaf a thousand times.
#[tokio::test(start_paused = true)]
async fn ev_811_the_meta_of_an_answer_is_bounded() {
    let offer = r#"{"actions":[{"name":"dig","outputs":[{"name":"out"},{"name":"meta"}]}]}"#;
    let answer = |session: &mut Probe, parts: Vec<Fragment>| {
        let (outgoing, parts) = (&mut session.send, parts.into());
        let message = WireMessage {
            fragments: parts,
            ..WireMessage::default()
        };
        outgoing.try_send(Ok(message)).unwrap();
    };
    let values = format!("[{}0]", "0,".repeat(crate::limits::JSON_VALUES));
    let spaces = " ".repeat(64 << 10);
    for (text, repeats, expect) in [
        (&*spaces, 15, "OK"),
        (&*spaces, 17, "FUNCTION"),
        (&*values, 1, "FUNCTION"),
    ] {
        let mut probe = session(|_, _| {});
        probe.offer("", offer).await.unwrap();
        let asked = action("dig", &[], &[("out", "o")]);
        probe.send(vec![], vec![asked]).await;
        let asked = probe.asked().await;
        let id = |name: &str| {
            let output = asked.outputs.iter().find(|output| &*output.name == name);
            output.unwrap().id.to_string()
        };
        let mut children = vec!["begin"];
        children.extend(std::iter::repeat_n("text", repeats));
        children.push("end");
        let end = if text == spaces { "1}" } else { "}" };
        let parts = vec![
            leaf(&id("out"), 0, true, "dug"),
            tree(&id("meta"), &children),
            leaf("begin", 0, true, "{\"x\":"),
            leaf("text", 0, true, text),
            leaf("end", 0, true, end),
        ];
        answer(&mut probe, parts);
        let received = probe.complete("o").await;
        assert_eq!(reason(received.status), expect, "{repeats}");
    }
}
