//! Limits on what a session holds, and the final fragments, which need no room.

use super::*;

/// KE-305, EV-803
#[tokio::test(start_paused = true)]
async fn ev_601_trailing_meta_needs_no_room_in_a_full_queue() {
    let spec = || Spec::new("talk", "Talks.").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    let words = || {
        let meta = Meta::default().with_extra("mood", "good");
        let chunk = Chunk::text("x".repeat(500)).with_meta(meta);
        stream::iter([Ok(chunk)])
    };
    for (endless, expect) in [(false, "good"), (true, "cancelled")] {
        let talk = raw(spec(), move |_| {
            let rest = stream::pending().take(usize::from(endless));
            words().chain(rest).boxed()
        });
        let limits = Arc::new(SessionLimits {
            outbound_queue_bytes: 100,
            ..SessionLimits::default()
        });
        let options = SessionOptions {
            limits,
            ..SessionOptions::default()
        };
        let mut probe = Probe::open([talk], options);
        let outputs = [("output", "r"), ("meta", "m")];
        let mut asked = vec![action("talk", &[], &outputs)];
        if endless {
            asked.push(action("CANCEL", &[("action", "r")], &[]));
        }
        probe.send(vec![], asked).await;
        // The transport has not read anything when the function ends.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let meta: Value = serde_json::from_slice(&probe.complete("m").await.data).unwrap();
        assert!(meta.to_string().contains(expect), "{meta}");
        probe.complete("r").await;
        assert_eq!(reason(probe.end().await), "OK");
    }
}

/// EV-803
#[tokio::test(start_paused = true)]
async fn ev_950_a_run_that_waits_for_room_is_dropped_at_its_deadline() {
    for (dialect, mime) in [(Dialect::Grpc, Mime::TEXT), (Dialect::Json, Mime::JSON)] {
        let spec = Spec::new("talk", "Talks.").outputs([OutputSpec::new(Port::MAIN, Mime::ANY)]);
        let held = Arc::new(());
        let weak = Arc::downgrade(&held);
        // Always ready, so that nothing but the queue is ever waited for.
        let talk = raw(spec, move |_| {
            let (held, mime) = (Arc::clone(&held), mime.clone());
            let words = std::iter::repeat_with(move || {
                let _held = &held;
                Ok(Chunk::text("x".repeat(500)).with_mime(mime.clone()))
            });
            stream::iter(words).boxed()
        });
        let options = SessionOptions {
            dialect,
            partial_failure: true,
            limits: Arc::new(SessionLimits {
                outbound_queue_bytes: 100,
                ..SessionLimits::default()
            }),
            ..SessionOptions::default()
        };
        let mut probe = Probe::open([talk], options);
        let mut asked = action("talk", &[], &[("output", "r")]);
        let timeout = ActionOptions {
            timeout: Some(prost_types::Duration {
                seconds: 1,
                nanos: 0,
            }),
        };
        asked
            .configs
            .push(any("sapwood.v1.ActionOptions", &timeout));
        // Other output fills the queue: buffered JSON alone does not.
        let info = action("SESSION_INFO", &[], &[("info", "i")]);
        probe.send(vec![], vec![info, asked]).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(weak.strong_count(), 2, "{dialect:?}: it runs");
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(weak.strong_count(), 1, "{dialect:?}");
    }
}

/// EV-914
#[tokio::test(start_paused = true)]
async fn ev_803_reserved_actions_are_answered_while_the_queue_is_full() {
    let spec = || Spec::new("talk", "Talks.").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    let talk = raw(spec(), |_| {
        let words = stream::iter([Ok(Chunk::text("x".repeat(500)))]);
        words.chain(stream::pending()).boxed()
    });
    let options = SessionOptions {
        limits: Arc::new(SessionLimits {
            outbound_queue_bytes: 100,
            ..SessionLimits::default()
        }),
        ..SessionOptions::default()
    };
    let mut probe = Probe::open([talk], options);
    let asked = action("talk", &[], &[("output", "r")]);
    probe.send(vec![], vec![asked]).await;
    // The client does not read, so the queue stays full.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let asked = action("SESSION_INFO", &[], &[("info", "i")]);
    probe.send(vec![], vec![asked]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let info: Value = serde_json::from_slice(&probe.complete("i").await.data).unwrap();
    assert_eq!(info["dialect"], "grpc");
}

/// EV-722
#[tokio::test(start_paused = true)]
async fn ev_801_buffered_json_is_charged_and_refunded() {
    let spec = || Spec::new("list", "Lists.").outputs([OutputSpec::new(Port::MAIN, Mime::JSON)]);
    let piece = || Ok(Chunk::text("x".repeat(1000)).with_mime(Mime::JSON));
    let options = |retained_bytes| SessionOptions {
        dialect: Dialect::Json,
        limits: Arc::new(SessionLimits {
            retained_bytes,
            ..SessionLimits::default()
        }),
        ..SessionOptions::default()
    };
    let list = raw(spec(), move |_| {
        stream::iter([piece(), piece(), piece()])
            .chain(stream::pending())
            .boxed()
    });
    for (most, expect) in [(3_000 + 1, None), (3_000, Some("RETAINED_LIMIT"))] {
        let mut probe = Probe::open([list.clone()], options(most));
        probe
            .send(vec![], vec![action("list", &[], &[("output", "r")])])
            .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let retained = probe
            .outgoing
            .link
            .with(|live| live.machine().retained_bytes());
        if let Some(expect) = expect {
            assert_eq!(reason(probe.failure().await), expect);
            continue;
        }
        assert_eq!(retained, 3_001, "the id of the output, and what waits");
        let cancel = action("CANCEL", &[("action", "r")], &[]);
        probe.send(vec![], vec![cancel]).await;
        assert_eq!(
            reason(probe.failure().await),
            "RETAINED_LIMIT",
            "there is no room for a fragment"
        );
    }
    let all = raw(spec(), move |_| stream::iter([piece(), piece()]).boxed());
    let mut probe = Probe::open([all], options(1 << 20));
    probe
        .send(vec![], vec![action("list", &[], &[("output", "r")])])
        .await;
    assert_eq!(probe.complete("r").await.data.len(), 2000);
    let retained = probe
        .outgoing
        .link
        .with(|live| live.machine().retained_bytes());
    let metadata = "application/json".len() as u64;
    assert_eq!(retained, 1 + 2000 + 64 + metadata);
}

/// Many actions that gather one node hold many copies of it, which must count: a client must not get them for the price
/// of one.
#[tokio::test(start_paused = true)]
async fn ev_801_gathered_inputs_are_charged_until_their_actions_end() {
    let gather = |name: &'static str, input: InputSpec| {
        let spec = Spec::new(name, "Gathers.")
            .inputs([input])
            .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
        raw(spec, |call| {
            stream::once(async move { Ok(Chunk::text(call.arg::<String>("x").await?)) }).boxed()
        })
    };
    let text = "x".repeat(1000);
    for (name, actions, expect) in [
        ("gathers", 8, None),
        ("gathers", 9, Some("RETAINED_LIMIT")),
        ("streams", 9, None),
    ] {
        let options = SessionOptions {
            limits: Arc::new(SessionLimits {
                retained_bytes: 10_000,
                ..SessionLimits::default()
            }),
            ..SessionOptions::default()
        };
        let functions = [
            gather("gathers", InputSpec::new("x")),
            gather("streams", InputSpec::new("x").streaming()),
        ];
        let mut probe = Probe::open(functions, options);
        let all = vec![action(name, &[("x", "a")], &[]); actions];
        probe.send(vec![leaf("a", 0, false, &text)], all).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        if let Some(expect) = expect {
            assert_eq!(reason(probe.failure().await), expect);
            continue;
        }
        probe.send(vec![leaf("a", 1, true, "")], vec![]).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let link = &probe.outgoing.link;
        let retained = link.with(|live| live.machine().retained_bytes());
        assert!(retained < 2_000, "{retained}");
        assert_eq!(reason(probe.end().await), "OK");
    }
}

/// EV-805
#[tokio::test(start_paused = true)]
async fn ev_803_a_peer_that_does_not_read_stops_the_run_and_ends_the_session() {
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    let flood = raw(Spec::new("flood", "Never stops."), move |_| {
        let count = Arc::clone(&count);
        let chunk = move || {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(Chunk::text("x".repeat(1024)))
        };
        stream::repeat_with(chunk).boxed()
    });
    let mut probe = Probe::open([flood], SessionOptions::default());
    probe
        .send(vec![], vec![action("flood", &[], &[("output", "r")])])
        .await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    let after_half_a_minute = made.load(Ordering::Relaxed);
    // 1 MiB of queue, and the batch that the run holds.
    assert!(
        (900..1_100).contains(&after_half_a_minute),
        "{after_half_a_minute} KiB were made for nobody"
    );
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(made.load(Ordering::Relaxed), after_half_a_minute);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(reason(probe.failure().await), "SLOW_READER");
}

/// EV-510
#[tokio::test(start_paused = true)]
async fn ev_904_observers_see_actions_refused_before_start() {
    struct Refused(Arc<std::sync::Mutex<Vec<String>>>);
    impl Observe for Refused {
        fn action_refused(&mut self, rejection: &Status) {
            self.0.lock().unwrap().push(rejection.reason.to_string());
        }
    }
    let received = Arc::default();
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let limits = SessionLimits {
        max_actions: 1,
        ..SessionLimits::default()
    };
    let options = SessionOptions {
        limits: Arc::new(limits),
        ..SessionOptions::default()
    };
    let (mut send, incoming) = mpsc::channel(4);
    let (session, _outgoing) = open(kernel, options, Refused(Arc::clone(&received)));
    let slow = ["1", "2"].map(|id| action("slow", &[], &[("response", id)]));
    let message = WireMessage {
        actions: slow.into(),
        ..WireMessage::default()
    };
    send.send(Ok(message)).await.unwrap();
    let ended = session.run(incoming, stream::pending()).await;
    assert_eq!(reason(ended), "ACTION_LIMIT");
    assert_eq!(*received.lock().unwrap(), ["ACTION_LIMIT"]);
}
