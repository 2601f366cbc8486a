//! Tests of the registry, of layers and of runs.

use std::sync::Mutex;

use futures::StreamExt;
use futures::executor::block_on;
use serde_json::json;

use super::*;
use crate::args;
use crate::args::Args;
use crate::args::IntoArgs;
use crate::chunk::Chunk;
use crate::handler::{function, raw};
use crate::layer::layered;
use crate::node::Node;
use crate::probe::{Count, played, source, texts, whole};
use crate::run::Run;
use crate::spec::{InputSpec, OutputSpec};
use crate::{Chunks, Port};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Named {
    name: String,
}

fn constant(name: &str, text: &'static str) -> Fun {
    function(name, "Says it.", move |_: Nothing| async move { text })
}

fn bad_name(name: &str, model: bool) -> bool {
    let mut spec = Spec::new(Name::shared(name), "");
    spec.model = model;
    let added = Kernel::new().add(raw(spec, |_| futures::stream::empty().boxed()));
    matches!(added, Err(Error::Argument { .. }))
}

/// Limits: `name_bytes` at 64 and 65.
#[test]
fn ke_132_legal_and_illegal_names() {
    for name in [
        "a",
        "plugin.fn2",
        "A_b.c_D",
        "_x",
        "GENERATE",
        &"n".repeat(64),
    ] {
        assert!(!bad_name(name, false), "{name}");
    }
    let long = "n".repeat(65);
    for name in [
        "",
        "a-b",
        ".a",
        "a.",
        "a..b",
        "1a",
        "a b",
        "ä",
        "fn",
        "fn.a",
        "CANCEL",
        "LIST_ACTIONS",
        &long,
    ] {
        assert!(bad_name(name, false), "{name}");
    }
    for (name, bad) in [("qwen/2.5-7b:q8 ü", false), ("", true), ("a\nb", true)] {
        assert_eq!(bad_name(name, true), bad, "{name}");
    }
    assert!(!bad_name(&"m".repeat(256), true) && bad_name(&"m".repeat(257), true));
}

#[test]
fn ke_132_a_taken_name_exists_and_replace_replaces() {
    let kernel = Kernel::new();
    kernel.add(constant("a", "one")).unwrap();
    assert!(matches!(
        kernel.add(constant("a", "two")),
        Err(Error::Exists { .. })
    ));
    assert!(matches!(
        kernel.add_all([constant("b", ""), constant("a", "")]),
        Err(Error::Exists { .. })
    ));
    assert!(
        matches!(
            kernel.get("b"),
            Err(Error::NotFound {
                kind: "function",
                ..
            })
        ),
        "all or none"
    );
    assert!(kernel.replace(constant("a", "two")).is_some());
    assert_eq!(whole(kernel.run::<String>("a", ())).unwrap(), "two");
    assert!(kernel.remove("a").is_some() && kernel.remove("a").is_none());
}

/// Limits: `inputs` and `ports` at 64 and 65.
#[test]
fn ke_133_inputs_and_ports_are_unique_and_counted() {
    let check = |spec: Spec| spec.check();
    let inputs = |count: usize| (0..count).map(|index| InputSpec::new(format!("i{index}")));
    assert!(check(Spec::new("f", "").inputs(inputs(64))).is_ok());
    assert!(check(Spec::new("f", "").inputs(inputs(65))).is_err());
    let ports = |count: usize| {
        let rest = (1..count).map(|index| OutputSpec::new(format!("p{index}"), "text/plain"));
        std::iter::once(OutputSpec::new("", "text/plain")).chain(rest)
    };
    assert!(check(Spec::new("f", "").outputs(ports(64))).is_ok());
    assert!(check(Spec::new("f", "").outputs(ports(65))).is_err());
    for spec in [
        Spec::new("f", "").inputs([InputSpec::new("a"), InputSpec::new("b").alias("a")]),
        Spec::new("f", "").inputs([InputSpec::new("")]),
        Spec::new("f", "").outputs([OutputSpec::new("a", "text/plain")]),
        Spec::new("f", "").outputs([
            OutputSpec::new("", "text/plain"),
            OutputSpec::new("", "text/plain"),
        ]),
        Spec::new("f", "").outputs([
            OutputSpec::new("", "text/plain"),
            OutputSpec::new("A", "text/plain"),
        ]),
    ] {
        assert!(matches!(check(spec), Err(Error::Argument { .. })));
    }
}

#[test]
fn functions_max_is_accepted_and_one_more_is_not() {
    let kernel = Kernel::new();
    let many = (0..limits::FUNCTIONS_MAX).map(|index| {
        raw(Spec::new(format!("f{index}"), ""), |_| {
            futures::stream::empty().boxed()
        })
    });
    kernel.add_all(many).unwrap();
    assert!(matches!(
        kernel.add(constant("more", "")),
        Err(Error::Limit {
            name: "functions_max",
            ..
        })
    ));
}

#[test]
fn ke_141_nothing_happens_before_the_first_poll() {
    let (calls, input) = (Count::new(), Count::new());
    let kernel = Kernel::new();
    let made = calls.clone();
    let spec = Spec::new("f", "").inputs([InputSpec::new("a")]);
    kernel
        .add(raw(spec, move |call| {
            made.polls.fetch_add(1, Ordering::SeqCst);
            call.read("a").unwrap()
        }))
        .unwrap();
    let layered = calls.clone();
    kernel.layer(move |call: Call, next: Next| -> Chunks {
        layered.given.fetch_add(1, Ordering::SeqCst);
        next.call(call)
    });
    let runs: Vec<Run> = (0..1000)
        .map(|_| {
            kernel.run(
                "f",
                args! { a: Node::new(played(&input, texts(["x"]).into_iter().map(Ok))) },
            )
        })
        .collect();
    assert!(runs.iter().all(|run| run.check().is_ok()));
    drop(runs);
    assert_eq!((calls.polls(), calls.given(), input.polls()), (0, 0, 0));
}

#[test]
fn ke_141_a_run_that_cannot_begin_has_one_item() {
    let kernel = Kernel::new();
    kernel
        .add(function(
            "greet",
            "",
            |args: Named| async move { args.name },
        ))
        .unwrap();
    type Case = (Run<String>, &'static str, &'static str);
    let cases: [Case; 5] = [
        (kernel.run("nobody", ()), "not-found", "UNKNOWN_ACTION"),
        (kernel.run("greet", ()), "invalid-request", "MISSING_INPUT"),
        (
            kernel.run("greet", args! { name: "a", age: 3 }),
            "invalid-request",
            "UNKNOWN_PARAM",
        ),
        (
            kernel.run("greet", [("name", "a"), ("name", "b")]),
            "invalid-request",
            "DUPLICATE_PARAM",
        ),
        (
            kernel.run("greet", args! { name: "a" }).port("nope"),
            "invalid-request",
            "UNKNOWN_PARAM",
        ),
    ];
    for (mut run, code, reason) in cases {
        let received = run.check().unwrap_err();
        let items: Vec<_> = block_on(run.by_ref().collect());
        let [Err(error)] = &items[..] else {
            panic!("{items:?}")
        };
        assert_eq!((error.code().name(), error.reason()), (code, reason));
        assert_eq!(received.to_string(), error.to_string());
        assert!(block_on(run.next()).is_none());
    }
}

#[test]
fn ke_146_scopes_see_their_parent_and_drop_only_their_own() {
    let kernel = Kernel::new();
    kernel.add(constant("a", "parent")).unwrap();
    let scope = kernel.scope();
    scope.add(constant("b", "own")).unwrap();
    scope.add(constant("a", "shadow")).unwrap();
    assert_eq!(whole(scope.run::<String>("a", ())).unwrap(), "shadow");
    assert_eq!(whole(kernel.run::<String>("a", ())).unwrap(), "parent");
    let names: Vec<String> = scope
        .specs()
        .iter()
        .map(|spec| spec.name.to_string())
        .collect();
    assert_eq!(names, ["a", "b"]);
    kernel.add(constant("late", "seen")).unwrap();
    assert!(scope.get("late").is_ok());
    drop(scope);
    assert!(kernel.get("b").is_err());
}

#[test]
fn ke_146_a_change_never_affects_a_running_call() {
    let kernel = Kernel::new();
    let counted = Count::new();
    kernel
        .add(source(Spec::new("f", ""), move || {
            played(&counted, texts(["a", "b"]).into_iter().map(Ok))
        }))
        .unwrap();
    let mut run = kernel.run::<String>("f", ());
    assert_eq!(block_on(run.next()).unwrap().unwrap(), "a");
    kernel.remove("f");
    kernel.layer(|_: Call, _: Next| -> Chunks { panic!("not for running calls") });
    assert_eq!(block_on(run.next()).unwrap().unwrap(), "b");
}

/// A layer that writes its name before and after the inner chunks.
fn named(name: &'static str, log: &Arc<Mutex<Vec<&'static str>>>) -> impl Layer {
    let log = log.clone();
    move |call: Call, next: Next| -> Chunks {
        log.lock().unwrap().push(name);
        next.call(call)
    }
}

#[test]
fn ke_147_layers_wrap_in_order_the_first_outermost() {
    let log = Arc::default();
    let kernel = Kernel::new();
    kernel.layer(named("parent 1", &log));
    kernel.layer_on("plugin.*", named("parent 2", &log));
    kernel.layer_on("other*", named("never", &log));
    let scope = kernel.scope();
    scope.layer(named("own", &log));
    scope
        .add(layered(constant("plugin.f", "x"), named("innermost", &log)))
        .unwrap();
    assert_eq!(whole(scope.run::<String>("plugin.f", ())).unwrap(), "x");
    assert_eq!(
        *log.lock().unwrap(),
        ["own", "parent 1", "parent 2", "innermost"]
    );
}

#[test]
fn globs_match() {
    for (pattern, name, expect) in [
        ("*", "anything", true),
        ("a.*", "a.b", true),
        ("a.*", "ab", false),
        ("*.b", "a.a.b", true),
        ("a?c", "abc", true),
        ("a?c", "ac", false),
        ("*a*b*", "xxaxxbxx", true),
        ("*a*b", "aab", true),
        ("", "", true),
        ("", "a", false),
    ] {
        assert_eq!(glob(pattern, name), expect, "{pattern} {name}");
    }
}

#[test]
fn ke_148_forms_of_arguments() {
    let given = |args: Result<Vec<(Name, Node)>>| {
        let names: Vec<String> = args
            .unwrap()
            .iter()
            .map(|(name, _)| name.to_string())
            .collect();
        names.join(",")
    };
    assert_eq!(given(().into_args()), "");
    assert_eq!(given([("a", 1), ("b", 2)].into_args()), "a,b");
    assert_eq!(given(vec![(String::from("a"), "x")].into_args()), "a");
    assert_eq!(given(json!({"a": 1, "b": "x"}).into_args()), "a,b");
    assert_eq!(given(Args::new().with("a", true).into_args()), "a");
    assert_eq!(
        given(args! { city: "Kyoto", days: 3, }.into_args()),
        "city,days"
    );
    assert!(matches!(
        json!([1]).into_args(),
        Err(Error::Argument { .. })
    ));
}

/// KE-R1
#[test]
fn ke_149_a_handle_and_the_kernel_give_the_same() {
    let kernel = Kernel::new();
    let fun = function("greet", "", |args: Named| async move {
        format!("Hello, {}", args.name)
    });
    kernel.add(fun.clone()).unwrap();
    let by_name: Vec<String> = block_on(
        kernel
            .run::<String>("greet", args! { name: "A" })
            .map(Result::unwrap)
            .collect(),
    );
    let by_handle: Vec<String> = block_on(
        fun.run::<String>(&kernel, args! { name: "A" })
            .map(Result::unwrap)
            .collect(),
    );
    assert_eq!(
        (by_name.clone(), by_name),
        (by_handle, vec!["Hello, A".to_owned()])
    );
}

#[test]
fn ke_r1_streaming_runs_exist_on_kernel_and_handle() {
    ke_149_a_handle_and_the_kernel_give_the_same();
}

/// A function with an expensive port that counts how often it is computed.
fn costly(count: &Arc<Count>) -> Fun {
    let spec = Spec::new("f", "").outputs([
        OutputSpec::new("", "text/plain"),
        OutputSpec::new("costly", "text/plain"),
    ]);
    let count = count.clone();
    raw(spec, move |call| {
        let mut chunks = texts(["a"]);
        if call.want.ports.has("costly") {
            count.polls.fetch_add(1, Ordering::SeqCst);
            chunks.push(Chunk::text("c").on("costly"));
        }
        futures::stream::iter(chunks.into_iter().map(Ok)).boxed()
    })
}

#[test]
fn ke_149_a_node_computes_the_ports_that_its_views_ask_for() {
    let count = Count::new();
    let kernel = Kernel::new();
    kernel.add(costly(&count)).unwrap();
    let node = kernel.node("f", ());
    assert_eq!(whole(node.run::<String>()).unwrap(), "a");
    assert_eq!(count.polls(), 0, "nobody asked");
    let node = kernel.node("f", ());
    let view = node.port("costly");
    assert_eq!(whole(node.run::<String>()).unwrap(), "a");
    assert_eq!(whole(view.run::<String>()).unwrap(), "c");
    assert_eq!(count.polls(), 1);
    let all: Vec<_> = block_on(kernel.node("f", ()).read().collect());
    assert_eq!(all.len(), 2, "a bare reader reads every port");
    assert_eq!(
        block_on(kernel.node("f", ()).port(Port::MAIN).whole()).unwrap(),
        "a"
    );
    assert_eq!(count.polls(), 2);
}
