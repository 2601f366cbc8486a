//! Tests of calls and their inputs.

use std::sync::atomic::AtomicBool;

use futures::StreamExt;
use futures::executor::block_on;
use futures::stream;
use serde_json::json;

use super::*;
use crate::args;
use crate::chunk::Chunk;
use crate::from_chunks::Json;
use crate::handler::{function, raw};
use crate::kernel::Kernel;
use crate::probe::{Count, endless, played, texts, whole};

#[derive(serde::Deserialize, schemars::JsonSchema, serde::Serialize, Debug)]
struct Given {
    text: String,
    maybe: Option<String>,
    number: Option<i64>,
    list: Option<Vec<u8>>,
    any: Option<Value>,
    kind: Option<Kind>,
    wrapped: Option<Wrapped>,
}

#[derive(serde::Deserialize, schemars::JsonSchema, serde::Serialize, Debug)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Big,
}

#[derive(serde::Deserialize, schemars::JsonSchema, serde::Serialize, Debug)]
struct Wrapped(String);

fn kernel() -> Kernel {
    let kernel = Kernel::new();
    kernel
        .add(function("f", "", |given: Given| async move {
            serde_json::to_value(given)
        }))
        .unwrap();
    kernel
}

fn called(args: impl crate::IntoArgs) -> Result<Value> {
    let mut values: Vec<Value> = whole(kernel().run::<Json<Value>>("f", args))?;
    Ok(values.remove(0))
}

/// Whether a schema admits strings decides, through `Option`, enums and newtypes alike.
#[test]
fn ke_137_text_is_a_string_where_the_schema_admits_one() {
    let seen = called(args! { text: "7", maybe: "8", number: "9", list: "[1]", any: "x", kind: "big", wrapped: "w" }).unwrap();
    let expect = json!({"text": "7", "maybe": "8", "number": 9, "list": [1], "any": "x", "kind": "big", "wrapped": "w"});
    assert_eq!(seen, expect);
    let seen =
        called(json!({"text": "a", "maybe": null, "number": -3, "any": {"k": [1]}})).unwrap();
    assert_eq!(
        (seen.pointer("/number"), seen.pointer("/any/k/0")),
        (Some(&json!(-3)), Some(&json!(1)))
    );
}

#[test]
fn ke_137_inputs_that_do_not_decode_are_argument_errors() {
    let cases: [Args; 4] = [
        args! { text: "a", number: "nine" },
        args! { text: "a", kind: "small" },
        args! { text: Chunk::bytes(&b"\xff"[..]).with_mime("text/plain") },
        args! { text: Chunk::bytes(&b"x"[..]).with_mime("image/png") },
    ];
    for args in cases {
        let error = called(args).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
    }
}

use crate::args::Args;

/// Two inputs fed by one bounded source deadlock unless they are read together.
#[test]
fn ke_203_a_json_input_is_bounded() {
    let given = |bytes: usize| {
        let spaces = |bytes: usize| " ".repeat(bytes);
        // No chunk may be longer than a half of it.
        let [first, rest] = [8 << 20, bytes - (8 << 20) - 1].map(spaces);
        let parts = [
            first,
            rest[..1 << 20].to_owned(),
            rest[1 << 20..].to_owned() + "7",
        ];
        Node::new(stream::iter(parts.map(|part| Ok(Chunk::text(part)))))
    };
    let most = limits::JSON_VALUE_BYTES;
    assert!(called(args! { text: "a", number: given(most) }).is_ok());
    let refused = called(args! { text: "a", number: given(most + 1) });
    assert!(
        matches!(refused, Err(Error::Limit { max, .. }) if max == most as u64),
        "{refused:?}"
    );
}

#[test]
fn ke_137_inputs_are_read_concurrently() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Two {
        a: String,
        b: String,
    }
    let (mut a, node_a) = Node::channel(1);
    let (mut b, node_b) = Node::channel(1);
    let kernel = Kernel::new();
    kernel
        .add(function("f", "", |two: Two| async move { two.a + &two.b }))
        .unwrap();
    let feed = async {
        for _ in 0..3 {
            b.send(Chunk::text("b")).await.unwrap();
            a.send(Chunk::text("a")).await.unwrap();
        }
        b.finish();
        a.finish();
    };
    let run = kernel
        .run::<String>("f", args! { a: node_a, b: node_b })
        .finish();
    let (finished, ()) = block_on(futures::future::join(run, feed));
    assert_eq!(finished.unwrap().0, "aaabbb");
}

/// KE-505: an input that nobody reads is never produced; one that still runs at the end is dropped.
#[test]
fn ke_505_unread_inputs_are_never_produced() {
    let (unread, running) = (Count::new(), Count::new());
    let kernel = Kernel::new();
    let spec = Spec::new("f", "").inputs([InputSpec::new("a"), InputSpec::new("b")]);
    kernel
        .add(raw(spec, |call| call.read("b").unwrap().take(1).boxed()))
        .unwrap();
    let a = Node::new(played(&unread, texts(["x"]).into_iter().map(Ok)));
    let b = Node::new(endless(&running, texts(["y", "z"])));
    assert_eq!(
        whole(kernel.run::<String>("f", args! { a: a, b: b })).unwrap(),
        "y"
    );
    assert_eq!((unread.polls(), unread.dropped()), (0, 1));
    assert_eq!((running.given(), running.dropped()), (1, 1));
}

/// Limit: `call_depth` at 16 and 17.
#[test]
fn ke_138_nested_calls_inherit_and_depth_is_limited() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Down {
        left: u32,
    }
    let kernel = Kernel::new();
    kernel
        .add(function("down", "", |down: Down, call: Call| async move {
            let key = call.context("key").cloned();
            assert_eq!((key, call.deadline.is_none()), (Some(json!(7)), true));
            if down.left == 0 {
                return Ok(format!("{}", call.parent.is_some()));
            }
            let run = call
                .kernel()
                .run::<String>("down", args! { left: down.left - 1 });
            run.await
        }))
        .unwrap();
    let deep = |left: u32| {
        whole(
            kernel
                .run::<String>("down", args! { left: left })
                .context("key", 7),
        )
    };
    assert_eq!(deep(0).unwrap(), "false");
    assert_eq!(deep(15).unwrap(), "true");
    assert!(matches!(
        deep(16),
        Err(Error::Limit {
            name: "call_depth",
            max: 16
        })
    ));
}

#[test]
fn ke_r13_each_run_has_an_id_and_nested_calls_name_their_parent() {
    let kernel = Kernel::new();
    let ids = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = ids.clone();
    kernel
        .add(raw(Spec::new("inner", ""), move |call| {
            seen.lock().unwrap().push((call.id, call.parent));
            stream::empty().boxed()
        }))
        .unwrap();
    kernel
        .add(raw(Spec::new("outer", ""), |call| {
            call.kernel().node("inner", ()).read()
        }))
        .unwrap();
    let run = kernel.run::<()>("outer", ());
    let outer = run.id();
    whole(run).unwrap();
    let other = kernel.run::<()>("outer", ());
    assert_ne!(other.id(), outer);
    let seen = ids.lock().unwrap();
    assert_eq!(seen[0].1, Some(outer));
    assert_ne!(seen[0].0, outer);
}

#[test]
fn ke_138_calls_within_inherit_what_a_layer_replaced() {
    struct Replaced {
        cancel: Cancel,
        deadline: Instant,
    }
    type Case = (
        &'static str,
        fn(&mut Call, &Replaced),
        fn(&Call, &Replaced) -> bool,
    );
    let cases: [Case; 3] = [
        (
            "cancel",
            |call, by| call.cancel = by.cancel.clone(),
            |call, by| {
                by.cancel.cancel();
                call.cancel.is_cancelled()
            },
        ),
        (
            "deadline",
            |call, by| call.deadline = Some(by.deadline),
            |call, by| call.deadline == Some(by.deadline),
        ),
        (
            "extensions",
            |call, _| call.extensions.insert(7_u8),
            |call, _| call.extensions.get() == Some(&7_u8),
        ),
    ];
    for (value, replace, arrived) in cases {
        let by = Arc::new(Replaced {
            cancel: Cancel::new(),
            deadline: Instant::now() + std::time::Duration::from_secs(60),
        });
        let kernel = Kernel::new();
        let (given, inherited) = (by.clone(), Arc::new(AtomicBool::new(false)));
        let seen = inherited.clone();
        kernel
            .add(raw(Spec::new("inner", ""), move |call| {
                seen.store(arrived(&call, &given), Ordering::SeqCst);
                stream::empty().boxed()
            }))
            .unwrap();
        kernel
            .add(raw(Spec::new("outer", ""), |call| {
                call.kernel().node("inner", ()).read()
            }))
            .unwrap();
        kernel.layer_on(
            "outer",
            move |mut call: Call, next: crate::Next| -> Chunks {
                replace(&mut call, &by);
                next.call(call)
            },
        );
        // How it ends is not the matter: the case of the token cancels the inner call.
        let _ended = whole(kernel.run::<()>("outer", ()));
        assert!(inherited.load(Ordering::SeqCst), "{value}");
    }
}
