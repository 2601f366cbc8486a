//! Panics: one of a function ends its action, one of the session's own code ends that session. All are counted, and
//! everything else continues.

use sapwood_proto::evergreen::SessionLimits;
use sapwood_proto::session::SessionStats;

use super::*;
use crate::probe::{FRAGILE_POLLS, Panics, fragile};

fn spec() -> Spec {
    Spec::new("fragile", "Panics.").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)])
}

/// A kernel whose function panics there, and a handle that is shared with all parts of the function that are not
/// dropped yet.
fn kernel(panics: Panics, endless: bool) -> (Kernel, Arc<()>) {
    let (kernel, alive) = (Kernel::new(), Arc::new(()));
    kernel.add_all(test_functions()).unwrap();
    let function = fragile(spec(), panics, endless, Arc::clone(&alive));
    kernel.add(function).unwrap();
    (kernel, alive)
}

fn partial() -> SessionOptions {
    SessionOptions {
        partial_failure: true,
        ..SessionOptions::default()
    }
}

fn session(kernel: &Kernel) -> Probe {
    Probe::over(kernel.clone(), partial(), stream::pending().boxed())
}

/// The session still works.
async fn goes_on(probe: &mut Probe) {
    probe
        .send(
            vec![leaf("i", 0, true, "on")],
            vec![action("echo", &[("text", "i")], &[("response", "o")])],
        )
        .await;
    assert_eq!(probe.complete("o").await.data, b"on");
}

/// Every place at which a function can panic.
fn sites() -> impl Iterator<Item = Panics> {
    let polls = 0..FRAGILE_POLLS;
    let both = polls.clone().map(Panics::PollAndDrop);
    let polls = polls.map(Panics::Poll);
    [Panics::Call, Panics::Drop]
        .into_iter()
        .chain(polls)
        .chain(both)
}

/// KE-139, EV-930
#[tokio::test(start_paused = true)]
async fn oa_913_a_function_that_panics_anywhere_ends_its_own_action_and_is_counted_once() {
    for position in sites() {
        let (kernel, alive) = kernel(position, false);
        let mut probe = session(&kernel);
        let outputs = [("output", "f"), ("__status__", "s")];
        let slow = action("slow", &[], &[("response", "other")]);
        let asked = vec![slow, action("fragile", &[], &outputs)];
        probe.send(vec![], asked).await;
        let status = probe.complete("s").await.status.unwrap();
        assert_eq!(
            (status.code, &*status.reason),
            (Code::Internal, "FUNCTION"),
            "{position:?}"
        );
        assert!(!status.message.contains("on purpose"), "{position:?}");
        assert_eq!(
            reason(probe.complete("f").await.status),
            "FUNCTION",
            "{position:?}"
        );
        goes_on(&mut probe).await;
        assert!(
            !probe.nodes.contains_key("other"),
            "{position:?}: it goes on"
        );
        assert_eq!(kernel.panics(), 1, "{position:?}");
        drop(probe.send);
        probe.task.abort();
        let _ = probe.task.await;
        drop(kernel);
        assert_eq!(
            Arc::strong_count(&alive),
            1,
            "{position:?}: nothing is left"
        );
    }
}

/// The stream of a function that does not end is dropped by the cancel, the deadline or the end that stops it.
#[tokio::test(start_paused = true)]
async fn oa_913_a_panic_in_a_drop_by_cancel_deadline_or_end_is_counted_and_ends_nothing_else() {
    let outputs = [("output", "f"), ("__status__", "s")];
    let begun = |kernel: &Kernel| (session(kernel), action("fragile", &[], &outputs));

    let (kernel, alive) = kernel(Panics::Drop, true);
    let (mut probe, asked) = begun(&kernel);
    probe.send(vec![], vec![asked]).await;
    probe.holds("f", "ab").await;
    let cancel = action("CANCEL", &[("action", "f")], &[("result", "c")]);
    probe.send(vec![], vec![cancel]).await;
    assert!(
        probe.complete("s").await.status.is_none(),
        "EV-913: a cancelled action ends well"
    );
    goes_on(&mut probe).await;
    assert_eq!((kernel.panics(), Arc::strong_count(&alive)), (1, 2));

    let (mut probe, mut asked) = begun(&kernel);
    asked.configs.push(timeout(1, 0));
    probe.send(vec![], vec![asked]).await;
    assert_eq!(reason(probe.complete("s").await.status), "DEADLINE");
    goes_on(&mut probe).await;
    assert_eq!((kernel.panics(), Arc::strong_count(&alive)), (2, 2));

    let (mut probe, asked) = begun(&kernel);
    probe.send(vec![], vec![asked]).await;
    probe.holds("f", "ab").await;
    let over = Status::new(Reason::Cancelled, "");
    probe.send.send(Err(over)).await.unwrap();
    assert_eq!(reason(probe.failure().await), "CANCELLED");
    assert_eq!(reason(probe.task.await.unwrap()), "CANCELLED");
    assert_eq!((kernel.panics(), Arc::strong_count(&alive)), (3, 2));

    // The task itself is dropped, as with its connection.
    let (mut probe, asked) = begun(&kernel);
    probe.send(vec![], vec![asked]).await;
    probe.holds("f", "ab").await;
    probe.task.abort();
    assert!(probe.task.await.unwrap_err().is_cancelled());
    assert_eq!((kernel.panics(), Arc::strong_count(&alive)), (4, 2));
}

/// An observer that panics once an action has been counted.
struct Nervous;

impl Observe for Nervous {
    fn counted(&mut self, stats: &SessionStats) {
        assert!(stats.actions == 0, "on purpose");
    }
}

#[tokio::test(start_paused = true)]
async fn oa_913_a_panic_of_a_sessions_own_task_ends_that_session_with_a_code() {
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let mut other = session(&kernel);
    // The transport's stream and the observer panic.
    let broken =
        stream::iter([()]).map(|()| -> Result<WireMessage, Status> { panic!("on purpose") });
    let (session, mut outgoing) = open(kernel.clone(), partial(), ());
    let task = tokio::spawn(session.run(broken, stream::pending::<SessionCommand>()));
    let reply = outgoing.next().await.unwrap().unwrap_err();
    assert_eq!((reply.code, &*reply.reason), (Code::Internal, "FUNCTION"));
    assert!(outgoing.next().await.is_none());
    assert_eq!(reason(task.await.unwrap()), "FUNCTION");
    assert_eq!(kernel.panics(), 1);

    let (session, mut outgoing) = open(kernel.clone(), partial(), Nervous);
    let echo = action("echo", &[("text", "i")], &[("response", "o")]);
    let message = WireMessage {
        fragments: [leaf("i", 0, true, "in")].into_iter().collect(),
        actions: vec![echo],
        ..WireMessage::default()
    };
    let incoming = stream::iter([Ok(message)]).chain(stream::pending());
    let task = tokio::spawn(session.run(incoming, stream::pending::<SessionCommand>()));
    let reply = loop {
        match outgoing.next().await {
            Some(Ok(_)) => {}
            Some(Err(status)) => break status,
            None => panic!("it ended well"),
        }
    };
    assert_eq!((reply.code, &*reply.reason), (Code::Internal, "FUNCTION"));
    assert_eq!(reason(task.await.unwrap()), "FUNCTION");
    // The observer panics twice: for the action, and at the end of the session.
    assert_eq!(kernel.panics(), 3);
    goes_on(&mut other).await;
}

fn timeout(seconds: i64, nanos: i32) -> prost_types::Any {
    let options = ActionOptions {
        timeout: Some(prost_types::Duration { seconds, nanos }),
    };
    prost_types::Any {
        type_url: "type.googleapis.com/sapwood.v1.ActionOptions".into(),
        value: prost::Message::encode_to_vec(&options),
    }
}

/// EV-912
#[tokio::test(start_paused = true)]
async fn ev_950_the_longest_durations_are_accepted_and_never_expire() {
    for (seconds, nanos) in [
        (i64::MAX, 999_999_999),
        (i64::MAX, 0),
        (i64::MAX / 2, 0),
        (9_223_372_036, 0),
        (u32::MAX.into(), 0),
        (315_576_000_000, 999_999_999),
    ] {
        let options = SessionOptions {
            limits: Arc::new(SessionLimits {
                // Nothing else sets a timer.
                idle_timeout: Duration::MAX,
                ..SessionLimits::default()
            }),
            timeout: Some(Duration::MAX),
            ..partial()
        };
        let mut probe = Probe::open([], options);
        let mut slow = action("slow", &[], &[("response", "r")]);
        slow.configs.push(timeout(seconds, nanos));
        let ttl = prost_types::Duration { seconds, nanos };
        let mut set = action("SET_TTL", &[("node", "r")], &[("result", "set")]);
        set.configs.push(prost_types::Any {
            type_url: "type.googleapis.com/google.protobuf.Duration".into(),
            value: prost::Message::encode_to_vec(&ttl),
        });
        let spelled = action(
            "SET_TTL",
            &[("node", "r"), ("ttl", "t")],
            &[("result", "again")],
        );
        let text = leaf("t", 0, true, "\"999999999999.999999999s\"");
        probe.send(vec![text], vec![slow, set, spelled]).await;
        for result in ["set", "again"] {
            assert_eq!(probe.complete(result).await.data, br#"{"set":true}"#);
        }
        goes_on(&mut probe).await;
        assert!(!probe.nodes.contains_key("r"), "{seconds}: it goes on");
        assert!(!probe.task.is_finished());
    }
}
