//! The shell without a transport: messages in, messages out, a virtual clock.

mod output;
mod panics;
mod quotas;
mod reference;
mod reverse;
mod steering;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::channel::mpsc;
use futures::{SinkExt, StreamExt, stream};
use prost_types::value::Kind;
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{
    Action, Chunk as WireChunk, Fragment, Metadata, Param, Payload, Status, WireMessage,
};
use sapwood_proto::generated::sapwood::v1::{ActionOptions, GenerateConfig};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::*;
use crate::chunk::Chunk;
use crate::handler::raw;
use crate::meta::Meta;
use crate::name::{Mime, Port};
use crate::spec::{InputSpec, OutputSpec, Spec};

/// A session under test: the messages sent to it, and the content of its nodes.
struct Probe {
    send: mpsc::Sender<Result<WireMessage, Status>>,
    outgoing: OutgoingMessages,
    task: JoinHandle<Option<Arc<Status>>>,
    nodes: BTreeMap<String, Node>,
    /// The calls of the server to its client.
    asked: Vec<Action>,
}

/// One node as the peer sees it.
#[derive(Clone, Debug, Default)]
struct Node {
    data: Vec<u8>,
    mime: String,
    role: String,
    children: Vec<String>,
    last: bool,
    status: Option<Arc<Status>>,
    fragments: usize,
}

impl Probe {
    fn open(functions: impl IntoIterator<Item = crate::Fun>, options: SessionOptions) -> Self {
        let kernel = Kernel::new();
        kernel.add_all(test_functions()).unwrap();
        kernel.add_all(functions).unwrap();
        Self::over(kernel, options, stream::pending().boxed())
    }

    fn over(
        kernel: Kernel,
        options: SessionOptions,
        orders: stream::BoxStream<'static, SessionCommand>,
    ) -> Self {
        let (send, incoming) = mpsc::channel(64);
        let (session, outgoing) = open(kernel, options, ());
        let task = tokio::spawn(session.run(incoming, orders));
        Self {
            send,
            outgoing,
            task,
            nodes: BTreeMap::new(),
            asked: Vec::new(),
        }
    }

    fn plain() -> Self {
        Self::open([], SessionOptions::default())
    }

    async fn send(&mut self, fragments: Vec<Fragment>, actions: Vec<Action>) {
        let message = WireMessage {
            fragments: fragments.into(),
            actions,
            ..WireMessage::default()
        };
        self.send.send(Ok(message)).await.unwrap();
    }

    /// Receives messages until `node` is final.
    async fn complete(&mut self, node: &str) -> Node {
        while !self.nodes.get(node).is_some_and(|node| node.last) {
            match self.outgoing.next().await {
                Some(Ok(message)) => self.take(message),
                other => panic!("{node} is not complete and the session ended: {other:?}"),
            }
        }
        self.nodes[node].clone()
    }

    /// Receives messages until `node` contains `data`.
    async fn holds(&mut self, node: &str, data: &str) {
        while self
            .nodes
            .get(node)
            .is_none_or(|node| node.data != data.as_bytes())
        {
            let message = self.outgoing.next().await.unwrap().unwrap();
            self.take(message);
        }
    }

    fn take(&mut self, message: WireMessage) {
        self.asked.extend(message.actions);
        for fragment in message.fragments {
            let node = self.nodes.entry(fragment.id.to_string()).or_default();
            assert!(
                !node.last,
                "{} goes on after its final fragment",
                fragment.id
            );
            assert_eq!(
                usize::try_from(fragment.seq).unwrap(),
                node.fragments,
                "in seq order"
            );
            node.fragments += 1;
            node.last = fragment.last;
            node.children
                .extend(fragment.children.iter().map(ToString::to_string));
            let Some(chunk) = fragment.chunk else {
                continue;
            };
            if let Some(metadata) = chunk.metadata.filter(|_| fragment.seq == 0) {
                node.mime = metadata.mimetype.to_string();
                node.role = metadata.role.to_string();
            }
            match chunk.payload {
                Some(Payload::Data(data)) => node.data.extend_from_slice(&data),
                Some(Payload::Status(status)) => node.status = status,
                _ => {}
            }
        }
    }

    /// Half-closes, receives the rest and returns how the session ended.
    async fn end(mut self) -> Option<Arc<Status>> {
        self.send.close_channel();
        self.failure().await
    }

    /// The same, but the nodes can be inspected afterwards.
    async fn failure_after_close(&mut self) -> Option<Arc<Status>> {
        self.send.close_channel();
        self.failure().await
    }

    /// Receives the rest and returns how the session ended.
    async fn failure(&mut self) -> Option<Arc<Status>> {
        loop {
            match self.outgoing.next().await {
                Some(Ok(message)) => self.take(message),
                Some(Err(status)) => return Some(status),
                None => return None,
            }
        }
    }
}

fn action(name: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> Action {
    let params = |list: &[(&str, &str)]| {
        list.iter()
            .map(|(name, id)| Param::new(*name, *id))
            .collect()
    };
    Action {
        name: name.into(),
        inputs: params(inputs),
        outputs: params(outputs),
        ..Action::default()
    }
}

fn leaf(id: &str, seq: i32, last: bool, data: &str) -> Fragment {
    let metadata = (seq == 0).then(|| Arc::new(Metadata::of("text/plain").with_role("USER")));
    let payload = Some(Payload::Data(Bytes::copy_from_slice(data.as_bytes())));
    Fragment {
        id: id.into(),
        seq,
        last,
        chunk: Some(WireChunk { metadata, payload }),
        ..Fragment::default()
    }
}

fn tree(id: &str, children: &[&str]) -> Fragment {
    let children = children.iter().map(|child| (*child).into()).collect();
    Fragment {
        id: id.into(),
        last: true,
        children,
        ..Fragment::default()
    }
}

fn reason(status: Option<Arc<Status>>) -> String {
    status.map_or_else(|| "OK".to_owned(), |status| status.reason.to_string())
}

#[tokio::test(start_paused = true)]
async fn ev_107_a_failing_action_aborts_the_session_and_cancels_the_others() {
    let mut probe = Probe::plain();
    probe
        .send(
            vec![],
            vec![
                action("slow", &[], &[("response", "s")]),
                action("fail", &[], &[("response", "f")]),
            ],
        )
        .await;
    let status = probe.failure().await.unwrap();
    assert_eq!(
        (&*status.reason, status.detail("action")),
        ("FUNCTION", Some("fail"))
    );
    assert!(probe.task.await.unwrap().is_some());
}

/// EV-931, EV-921
#[tokio::test(start_paused = true)]
async fn ev_930_with_partial_failure_an_error_ends_only_the_outputs_of_its_action() {
    let options = SessionOptions {
        partial_failure: true,
        ..SessionOptions::default()
    };
    let mut probe = Probe::open([], options);
    probe
        .send(
            vec![],
            vec![
                action("fail", &[], &[("response", "f"), ("__status__", "s")]),
                action("concat", &[("a", "f"), ("b", "f")], &[("response", "c")]),
                action("no_such", &[], &[("response", "n")]),
            ],
        )
        .await;
    let failed = probe.complete("f").await;
    assert_eq!(
        (failed.data.as_slice(), failed.mime.as_str()),
        (&b"before the failure"[..], "text/plain")
    );
    assert_eq!(reason(failed.status), "FUNCTION");
    assert_eq!(reason(probe.complete("s").await.status), "FUNCTION");
    // A reader that reaches a failed node fails alike, and the error names the node.
    let reader = probe.complete("c").await;
    assert_eq!(reader.data, b"before the failure");
    assert_eq!(
        reader.status.as_ref().unwrap().detail("upstream"),
        Some("f")
    );
    let unknown = probe.complete("n").await.status.unwrap();
    assert_eq!(
        (&*unknown.reason, unknown.code),
        ("UNKNOWN_ACTION", Code::NotFound)
    );
    assert!(unknown.message.contains("echo"), "{}", unknown.message);
    probe
        .send(
            vec![leaf("i", 0, true, "on")],
            vec![action("echo", &[("text", "i")], &[("response", "o")])],
        )
        .await;
    assert_eq!(probe.complete("o").await.data, b"on");
    assert_eq!(reason(probe.end().await), "OK");
}

/// EV-504
#[tokio::test(start_paused = true)]
async fn ev_502_binding_errors_name_the_reason() {
    let twice = raw(
        Spec::new("aliased", "Two names for one input.")
            .inputs([InputSpec::new("text").alias("prompt")]),
        |_| stream::empty().boxed(),
    );
    for (inputs, outputs, expect) in [
        (
            &[("text", "p")][..],
            &[("no_such", "r")][..],
            "UNKNOWN_PARAM",
        ),
        (&[("no_such", "p")], &[("output", "r")], "UNKNOWN_PARAM"),
        (&[], &[("output", "r")], "MISSING_INPUT"),
        (
            &[("text", "p"), ("prompt", "q")],
            &[("output", "r")],
            "DUPLICATE_PARAM",
        ),
        (
            &[("text", "p"), ("text", "q")],
            &[("output", "r")],
            "DUPLICATE_PARAM",
        ),
    ] {
        let mut probe = Probe::open([twice.clone()], SessionOptions::default());
        probe
            .send(vec![], vec![action("aliased", inputs, outputs)])
            .await;
        assert_eq!(
            reason(probe.failure().await),
            expect,
            "{inputs:?} {outputs:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn ev_913_cancel_ends_one_action_and_not_the_session() {
    let mut probe = Probe::plain();
    probe
        .send(vec![], vec![action("slow", &[], &[("response", "r")])])
        .await;
    probe
        .send(
            vec![],
            vec![action("CANCEL", &[("action", "r")], &[("result", "c")])],
        )
        .await;
    assert_eq!(probe.complete("c").await.data, br#"{"cancelled":true}"#);
    let cut = probe.complete("r").await;
    assert!(cut.status.is_none() && cut.data.is_empty());
    probe
        .send(
            vec![],
            vec![action("CANCEL", &[("action", "r")], &[("result", "again")])],
        )
        .await;
    assert_eq!(
        probe.complete("again").await.data,
        br#"{"cancelled":false}"#
    );
    assert_eq!(reason(probe.end().await), "OK");
}

#[tokio::test(start_paused = true)]
async fn ev_913_meta_of_a_cancelled_action_has_finish_reason_cancelled() {
    let spec = Spec::new("talk", "Talks and never ends.").outputs([
        OutputSpec::new(Port::MAIN, Mime::TEXT),
        OutputSpec::new("meta", Mime::JSON),
    ]);
    let talk = raw(spec, |_| {
        stream::iter([Ok(Chunk::text("well"))])
            .chain(stream::pending())
            .boxed()
    });
    let mut probe = Probe::open([talk], SessionOptions::default());
    probe
        .send(
            vec![],
            vec![action("talk", &[], &[("output", "r"), ("meta", "m")])],
        )
        .await;
    probe.holds("r", "well").await;
    probe
        .send(vec![], vec![action("CANCEL", &[("action", "m")], &[])])
        .await;
    let meta: Value = serde_json::from_slice(&probe.complete("m").await.data).unwrap();
    assert_eq!(meta["finish_reason"], "cancelled");
    assert_eq!(probe.complete("r").await.data, b"well");
}

/// KE-139
#[tokio::test(start_paused = true)]
async fn a_panic_in_a_function_is_an_internal_error_and_other_work_goes_on() {
    let broken = raw(Spec::new("broken", "Panics."), |_| {
        stream::once(async { panic!("a secret of the function") }).boxed()
    });
    let mut probe = Probe::open([broken], SessionOptions::default());
    probe
        .send(vec![], vec![action("broken", &[], &[("output", "r")])])
        .await;
    let status = probe.failure().await.unwrap();
    assert_eq!((status.code, &*status.reason), (Code::Internal, "FUNCTION"));
    assert!(!status.message.contains("secret"));
}

/// A key for some models learns nothing of the others, not even whether they exist.
#[tokio::test(start_paused = true)]
async fn d_45_hidden_and_missing_functions_get_the_same_error() {
    let mut hidden = Spec::new("hidden", "");
    hidden.model = true;
    let hidden = raw(hidden, |_| stream::empty().boxed());
    let options = SessionOptions {
        partial_failure: true,
        models: VisibleModels::by(|| Some(Arc::new(["mine".into()].into()))),
        ..SessionOptions::default()
    };
    let mut probe = Probe::open([hidden], options);
    let asked = ["hidden", "nobody"].map(|name| action(name, &[], &[("response", name)]));
    probe.send(vec![], asked.to_vec()).await;
    for name in ["hidden", "nobody"] {
        let status = probe.complete(name).await.status.unwrap();
        assert_eq!(status.code, Code::PermissionDenied, "{status:?}");
        let expect = format!("this key may not call a function named \"{name}\"");
        assert_eq!(status.message, expect);
    }
}

/// EV-950
#[tokio::test(start_paused = true)]
async fn ev_950_sessions_and_actions_end_at_their_deadlines() {
    let options = SessionOptions {
        timeout: Some(Duration::from_millis(50)),
        ..SessionOptions::default()
    };
    let mut probe = Probe::open([], options);
    probe
        .send(vec![], vec![action("slow", &[], &[("response", "r")])])
        .await;
    assert_eq!(reason(probe.failure().await), "DEADLINE");
    let mut probe = Probe::open(
        [],
        SessionOptions {
            partial_failure: true,
            ..SessionOptions::default()
        },
    );
    let mut late = action("slow", &[], &[("response", "r")]);
    let timeout = ActionOptions {
        timeout: Some(prost_types::Duration {
            seconds: 0,
            nanos: 5_000_000,
        }),
    };
    late.configs.push(any("sapwood.v1.ActionOptions", &timeout));
    probe.send(vec![], vec![late]).await;
    assert_eq!(reason(probe.complete("r").await.status), "DEADLINE");
    assert_eq!(reason(probe.end().await), "OK");
}

#[tokio::test(start_paused = true)]
async fn ev_914_list_actions_and_session_info_describe_the_server() {
    let mut probe = Probe::plain();
    let ask = vec![
        action("LIST_ACTIONS", &[], &[("actions", "l")]),
        action("SESSION_INFO", &[], &[("info", "i")]),
    ];
    probe.send(vec![], ask).await;
    let list: Value = serde_json::from_slice(&probe.complete("l").await.data).unwrap();
    let echo = list["actions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|action| action["name"] == "echo")
        .unwrap();
    assert_eq!(
        (&echo["inputs"][0]["name"], &echo["inputs"][0]["required"]),
        (&json!("text"), &json!(true))
    );
    assert_eq!(echo["outputs"][0]["name"], "response");
    assert_eq!(echo["configs"], json!(["sapwood.v1.ActionOptions"]));
    assert!(
        list["extensions"]
            .as_array()
            .unwrap()
            .contains(&json!("cancel"))
    );
    let info: Value = serde_json::from_slice(&probe.complete("i").await.data).unwrap();
    assert_eq!(
        (&info["dialect"], &info["options"]["evergreen-metadata"]),
        (&json!("grpc"), &json!("lenient"))
    );
    assert_eq!(info["limits"]["max_actions"], 256);
    assert_eq!(reason(probe.end().await), "OK");
}

/// D-27
#[tokio::test(start_paused = true)]
async fn ev_912_a_duration_that_takes_several_turns_to_read_is_answered_at_once() {
    let mut probe = Probe::plain();
    let empty = |id: &str| Fragment {
        id: id.into(),
        last: true,
        ..Fragment::default()
    };
    // Each of the 36,000 children takes two visits; a turn has 16,384.
    let list = |seq| Fragment {
        seq,
        last: false,
        ..tree("ttl", &["nothing"; 4_000])
    };
    let end = Fragment {
        seq: 9,
        ..tree("ttl", &["duration"])
    };
    let mut fragments: Vec<Fragment> = (0..9).map(list).collect();
    fragments.extend([end, empty("nothing"), empty("x")]);
    fragments.push(leaf("duration", 0, true, "\"30s\""));
    let inputs = [("node", "x"), ("ttl", "ttl")];
    let asked = action("SET_TTL", &inputs, &[("result", "r")]);
    probe.send(fragments, vec![asked]).await;
    let before = tokio::time::Instant::now();
    // Time passes in jumps here: a transport that nobody wakes would wait for this.
    let answered = tokio::time::timeout(Duration::from_secs(60), probe.complete("r"));
    assert_eq!(answered.await.unwrap().data, b"{\"set\":true}");
    assert!(before.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn ev_960_a_draining_session_finishes_and_leaves() {
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let (mut order, orders) = mpsc::channel(4);
    let options = SessionOptions {
        partial_failure: true,
        ..SessionOptions::default()
    };
    let mut probe = Probe::over(kernel.clone(), options.clone(), orders.boxed());
    probe
        .send(
            vec![leaf("i", 0, false, "a")],
            vec![action("echo", &[("text", "i")], &[("response", "o")])],
        )
        .await;
    probe.holds("o", "a").await;
    order.send(SessionCommand::Finish).await.unwrap();
    probe.send(vec![leaf("i", 1, true, "b")], vec![]).await;
    assert_eq!(probe.complete("o").await.data, b"ab");
    assert_eq!(reason(probe.failure().await), "GOING_AWAY");

    let mut probe = Probe::over(
        kernel,
        options,
        stream::iter([SessionCommand::Finish, SessionCommand::Leave]).boxed(),
    );
    assert_eq!(reason(probe.failure().await), "GOING_AWAY");
}

/// EV-611
#[tokio::test(start_paused = true)]
async fn ev_109_the_end_of_the_task_drops_every_run_and_wakes_the_transport() {
    struct Guard(Arc<AtomicUsize>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&dropped);
    let hold = raw(Spec::new("hold", "Holds."), move |_| {
        let guard = Guard(Arc::clone(&count));
        stream::once(async move {
            let _guard = guard;
            futures::future::pending::<crate::Result<Chunk>>().await
        })
        .boxed()
    });
    let mut probe = Probe::open([hold], SessionOptions::default());
    probe
        .send(vec![], vec![action("hold", &[], &[("output", "r")])])
        .await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    probe.task.abort();
    assert!(probe.failure().await.is_some());
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
}

fn any(name: &str, message: &impl prost::Message) -> prost_types::Any {
    prost_types::Any {
        type_url: format!("type.googleapis.com/{name}"),
        value: message.encode_to_vec(),
    }
}

#[tokio::test(start_paused = true)]
async fn ev_110_actions_that_wait_for_each_other_fail_at_half_close() {
    let mut probe = Probe::plain();
    probe
        .send(
            vec![leaf("x", 0, true, "x")],
            vec![
                action("concat", &[("a", "q"), ("b", "x")], &[("response", "p")]),
                action("concat", &[("a", "p"), ("b", "x")], &[("response", "q")]),
            ],
        )
        .await;
    // Both wait, and more could still come: neither is failed.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(reason(probe.end().await), "DEADLOCK");
}

/// D-27
#[tokio::test(start_paused = true)]
async fn ev_110_an_action_that_has_used_up_its_turn_waits_for_nobody() {
    // Copies `b` to its end, and looks at `a` all the while.
    let inputs = ["a", "b"].map(|name| InputSpec::new(name).streaming());
    let spec = Spec::new("beside", "Copies `b`.")
        .inputs(inputs)
        .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    let beside = raw(spec, |call| {
        let [mut a, mut b] = ["a", "b"].map(|name| call.read(name).unwrap());
        stream::poll_fn(move |cx| {
            let _ = a.poll_next_unpin(cx);
            b.poll_next_unpin(cx)
        })
        .boxed()
    });
    // More visits than a turn has, or than the whole session has.
    for (levels, session_visits) in [(14, 1 << 20), (10, 4_096)] {
        let limits = Arc::new(SessionLimits {
            session_visits,
            ..SessionLimits::default()
        });
        let options = SessionOptions {
            limits,
            ..SessionOptions::default()
        };
        let mut probe = Probe::open([beside.clone()], options);
        let mut fragments: Vec<Fragment> = (0..levels)
            .map(|level| {
                let below = format!("n{}", level + 1);
                tree(&format!("n{level}"), &[&below, &below])
            })
            .collect();
        fragments.push(Fragment {
            id: format!("n{levels}").into(),
            last: true,
            ..Fragment::default()
        });
        fragments.push(tree("big", &["n0", "n0", "n0", "n0", "end"]));
        fragments.push(leaf("end", 0, true, "done"));
        let first = action(
            "beside",
            &[("a", "second"), ("b", "big")],
            &[("output", "first")],
        );
        let second = action("echo", &[("text", "first")], &[("response", "second")]);
        probe.send(fragments, vec![first, second]).await;
        probe.send.close_channel();
        assert_eq!(probe.complete("second").await.data, b"done");
        assert_eq!(reason(probe.failure().await), "OK");
    }
}

/// EV-306
#[tokio::test(start_paused = true)]
async fn ev_601_an_input_config_is_bounded_before_it_is_parsed() {
    let input = InputSpec::new("config").taking([Mime::JSON, Mime::TEXT]);
    let spec = Spec::new("set", "Reads its config.")
        .inputs([input])
        .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    let set = raw(spec, |call| {
        stream::once(async move {
            call.arg::<Value>("config").await?;
            Ok(Chunk::text("set"))
        })
        .boxed()
    });
    let values = "0,".repeat(1 << 10);
    let spaces = " ".repeat(1 << 20);
    for (part, repeats, expect) in [
        (&values, 255, "OK"),
        (&values, 256, "BAD_CONFIG"),
        (&spaces, 15, "OK"),
        (&spaces, 16, "FUNCTION"),
    ] {
        let mut probe = Probe::open([set.clone()], SessionOptions::default());
        let mut children = vec!["begin"];
        children.extend(std::iter::repeat_n("part", repeats));
        children.push("end");
        let fragments = vec![
            tree("c", &children),
            leaf("begin", 0, true, "{\"x\":["),
            leaf("part", 0, true, part),
            leaf("end", 0, true, "0]}"),
        ];
        let asked = action("set", &[("config", "c")], &[("output", "o")]);
        probe.send(fragments, vec![asked]).await;
        assert_eq!(reason(probe.end().await), expect, "{repeats}");
    }
}
