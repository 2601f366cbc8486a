//! The outputs of functions: trees, final fragments, and configurations read by type.

use sapwood_proto::generated::sapwood::v1::{LoraAdapter, LoraAdapters};

use super::*;

/// EV-306, EV-506
#[tokio::test(start_paused = true)]
async fn ev_511_the_test_functions_work_as_specified() {
    let mut probe = Probe::plain();
    probe
        .send(
            vec![
                leaf("a", 0, true, "one"),
                leaf("b", 0, true, "two"),
                tree("t", &["a", "b"]),
            ],
            vec![
                action("echo", &[("text", "t")], &[("response", "e")]),
                action("concat", &[("a", "b"), ("b", "a")], &[("response", "c")]),
            ],
        )
        .await;
    let echo = probe.complete("e").await;
    assert_eq!(
        (echo.data.as_slice(), echo.mime.as_str(), echo.role.as_str()),
        (&b"onetwo"[..], "text/plain", "USER")
    );
    assert_eq!(probe.complete("c").await.data, b"twoone");
    assert_eq!(reason(probe.end().await), "OK");
}

/// EV-604, D-25
#[tokio::test(start_paused = true)]
async fn ev_508_trees_announce_their_children_and_end_last() {
    let chunks = |call: crate::Call| {
        let many = call.inputs.get("many").is_some();
        let of = move |k: u32| {
            if many {
                Chunk::text(format!("<{k}>")).with_part(k)
            } else {
                Chunk::text(format!("<{k}>")).with_choice(k)
            }
        };
        stream::iter((0..3).map(of).map(Ok)).boxed()
    };
    let input = || InputSpec::new("many").optional();
    let plain = Spec::new("choices", "Three answers.").inputs([input()]);
    let parts = Spec::new("parts", "Three parts.")
        .inputs([input()])
        .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT).many()]);
    let n = Spec::new("n", "As many answers as asked for.")
        .inputs([InputSpec::new("config").optional()]);
    let mut probe = Probe::open(
        [
            raw(plain, move |call| chunks(call).skip(1).boxed()),
            raw(parts, chunks),
            raw(n, move |call| {
                let config = call.inputs.get("config").unwrap().whole();
                stream::once(config)
                    .flat_map(move |_| chunks(call.clone()))
                    .boxed()
            }),
        ],
        SessionOptions::default(),
    );
    probe
        .send(
            vec![leaf("m", 0, true, "yes"), leaf("cfg", 0, true, "{\"n\":3}")],
            vec![
                action("choices", &[], &[("output", "a")]),
                action("parts", &[("many", "m")], &[("output", "b")]),
                action("n", &[("config", "cfg")], &[("output", "c")]),
            ],
        )
        .await;
    for (root, texts) in [
        ("a", ["", "<1>", "<2>"]),
        ("b", ["<0>", "<1>", "<2>"]),
        ("c", ["<0>", "<1>", "<2>"]),
    ] {
        let tree = probe.complete(root).await;
        assert_eq!(tree.children.len(), 3, "{root}");
        for (child, text) in tree.children.iter().zip(texts) {
            assert!(child.starts_with('~'), "{child}");
            let child = &probe.nodes[child];
            assert!(child.last, "the root ends after all below it");
            assert_eq!(
                (child.data.as_slice(), child.mime.as_str()),
                (text.as_bytes(), "text/plain"),
                "{root}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn ev_508_an_output_without_content_is_one_final_fragment_of_its_type() {
    let silent = raw(Spec::new("silent", "Says nothing."), |_| {
        stream::empty().boxed()
    });
    let mut probe = Probe::open([silent], SessionOptions::default());
    probe
        .send(vec![], vec![action("silent", &[], &[("output", "r")])])
        .await;
    let node = probe.complete("r").await;
    assert_eq!(
        (node.fragments, node.mime.as_str(), node.data.len()),
        (1, "text/plain", 0)
    );
}

/// A config with every sampler, and its JSON.
fn samplers() -> (GenerateConfig, Value) {
    // Every number is one that both widths of floating-point numbers have.
    let config = GenerateConfig {
        min_p: Some(0.25),
        penalty_last_n: Some(-1),
        dry_multiplier: Some(0.5),
        dry_base: Some(1.75),
        dry_allowed_length: Some(3),
        dry_penalty_last_n: Some(64),
        dry_sequence_breakers: vec!["\n".into()],
        xtc_probability: Some(0.5),
        xtc_threshold: Some(0.125),
        typical_p: Some(0.75),
        top_n_sigma: Some(1.5),
        mirostat: Some(2),
        mirostat_tau: Some(4.0),
        mirostat_eta: Some(0.25),
        dynatemp_range: Some(0.5),
        dynatemp_exponent: Some(2.0),
        samplers: vec!["dry".into(), "temperature".into()],
        include_stop_str_in_output: Some(true),
        logit_bias: [(7, 1.5)].into(),
        logit_bias_texts: [("7".into(), -100.0)].into(),
        lora: Some(LoraAdapters {
            adapters: vec![
                LoraAdapter {
                    name: Some("style".into()),
                    scale: Some(-0.5),
                    ..Default::default()
                },
                LoraAdapter {
                    id: Some(0),
                    ..Default::default()
                },
            ],
        }),
        ..Default::default()
    };
    let json = json!({
        "min_p": 0.25, "penalty_last_n": -1, "dry_multiplier": 0.5, "dry_base": 1.75, "dry_allowed_length": 3,
        "dry_penalty_last_n": 64, "dry_sequence_breakers": ["\n"], "xtc_probability": 0.5, "xtc_threshold": 0.125,
        "typical_p": 0.75, "top_n_sigma": 1.5, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.25,
        "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "samplers": ["dry", "temperature"],
        "include_stop_str_in_output": true, "logit_bias": [[7, 1.5], ["7", -100.0]],
        "lora": [{"name": "style", "scale": -0.5}, {"id": 0}],
    });
    (config, json)
}

/// EV-509
#[tokio::test(start_paused = true)]
async fn ev_509_configs_are_decoded_by_type_and_the_input_config_overrides_them() {
    let spec =
        Spec::new("configured", "Tells its config.").inputs([InputSpec::new("config").optional()]);
    let notify = raw(spec, |call| {
        stream::once(async move {
            Ok(Chunk::text(
                call.inputs
                    .get("config")
                    .unwrap()
                    .whole()
                    .await
                    .map(|b| String::from_utf8(b.to_vec()).unwrap())?,
            ))
        })
        .boxed()
    });
    let generate = GenerateConfig {
        temperature: Some(0.5),
        max_tokens: Some(7),
        stop: vec!["x".into()],
        bad_words: vec!["y".into()],
        ..Default::default()
    };
    let (samplers, samplers_json) = samplers();
    let fields = [
        ("maxTokens", Kind::NumberValue(7.0)),
        ("top_p", Kind::NumberValue(0.25)),
    ];
    let object = prost_types::Struct {
        fields: fields
            .into_iter()
            .map(|(name, kind)| (name.into(), prost_types::Value { kind: Some(kind) }))
            .collect(),
    };
    for (config, over, expect) in [
        (
            any("sapwood.v1.GenerateConfig", &generate),
            None,
            json!({"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "bad_words": ["y"]}),
        ),
        (
            any("sapwood.v1.GenerateConfig", &generate),
            Some("{\"max_tokens\":9}"),
            json!({"temperature": 0.5, "max_tokens": 9, "stop": ["x"], "bad_words": ["y"]}),
        ),
        (
            any("google.protobuf.Struct", &object),
            None,
            json!({"max_tokens": 7, "top_p": 0.25}),
        ),
        (
            any("sapwood.v1.GenerateConfig", &samplers),
            None,
            samplers_json,
        ),
    ] {
        let mut probe = Probe::open([notify.clone()], SessionOptions::default());
        let mut configured = action("configured", &[], &[("output", "r")]);
        configured.configs.push(config);
        let mut fragments = vec![];
        if let Some(over) = over {
            configured.inputs.push(Param::new("config", "o"));
            fragments.push(leaf("o", 0, true, over));
        }
        probe.send(fragments, vec![configured]).await;
        let received: Value = serde_json::from_slice(&probe.complete("r").await.data).unwrap();
        assert_eq!(received, expect);
    }
}

#[tokio::test(start_paused = true)]
async fn ev_509_configs_that_cannot_be_used_are_refused() {
    let spec =
        Spec::new("configured", "Takes a config.").inputs([InputSpec::new("config").optional()]);
    let notify = raw(spec, |_| stream::empty().boxed());
    let nan = GenerateConfig {
        temperature: Some(f32::NAN),
        ..Default::default()
    };
    for (config, expect) in [
        (any("sapwood.v1.Unknown", &nan), "UNKNOWN_CONFIG"),
        (any("sapwood.v1.GenerateConfig", &nan), "BAD_CONFIG"),
        (
            prost_types::Any {
                type_url: "x/sapwood.v1.GenerateConfig".into(),
                value: vec![0xff],
            },
            "BAD_CONFIG",
        ),
    ] {
        let mut probe = Probe::open([notify.clone()], SessionOptions::default());
        let mut configured = action("configured", &[], &[("output", "r")]);
        configured.configs.push(config);
        probe.send(vec![], vec![configured]).await;
        assert_eq!(reason(probe.failure().await), expect);
    }
}

/// EV-605, EV-606
#[tokio::test(start_paused = true)]
async fn d_51_readers_see_the_finish_reason_of_answers_of_actions() {
    use crate::meta::ChoiceFinish;
    // Answers like a model, and stops for the given reason.
    let spec = Spec::new("answer", "Answers.")
        .inputs([InputSpec::new("end")])
        .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT).wire("response")]);
    let answers = raw(spec, |call: crate::Call| {
        stream::once(async move { call.arg::<String>("end").await })
            .flat_map(|end| {
                let end = Meta::default().with_finish(0, ChoiceFinish::from_name(&end.unwrap()));
                let role = Meta::default().with_role("ASSISTANT");
                let text = Chunk::text("hi").with_meta(role);
                stream::iter([Ok(text), Ok(Chunk::text("").with_meta(end))])
            })
            .boxed()
    });
    let spec =
        Spec::new("tell", "Tells what it reads.").inputs([InputSpec::new("prompt").streaming()]);
    let notify = raw(spec, |call: crate::Call| {
        let received = call.read("prompt").unwrap().map(|chunk| {
            let chunk = chunk?;
            let meta = chunk.meta.as_deref();
            let role = meta.and_then(|meta| meta.role.as_ref());
            let end = meta.and_then(|meta| meta.finish.get(&0));
            let text = String::from_utf8_lossy(&chunk.data).into_owned();
            let part = chunk.part;
            Ok(Chunk::text(format!("{part}{role:?}{text}{end:?};")))
        });
        received.boxed()
    });
    let mut probe = Probe::open([answers, notify], SessionOptions::default());
    let ends = ["stop", "length", "cancelled"];
    let mut asked = Vec::new();
    let mut fragments = Vec::new();
    for end in ends {
        let (given, output) = (format!("e-{end}"), format!("a-{end}"));
        fragments.push(leaf(&given, 0, true, end));
        asked.push(action(
            "answer",
            &[("end", &given)],
            &[("response", &output)],
        ));
    }
    fragments.push(tree("t", &["q", "a-stop", "a-length", "a-cancelled", "q"]));
    fragments.push(leaf("q", 0, true, "why"));
    asked.push(action("tell", &[("prompt", "t")], &[("output", "told")]));
    probe.send(fragments, asked).await;
    let received = probe.complete("told").await.data;
    let received = String::from_utf8(received).unwrap();
    let (user, ours) = (r#"Some("USER")"#, r#"Some("ASSISTANT")"#);
    let expect = format!(
        "0{user}whyNone;1{ours}hiNone;1NoneSome(Stop);2{ours}hiNone;2NoneSome(Length);\
         3{ours}hiNone;3NoneSome(Stop);4{user}whyNone;"
    );
    assert_eq!(received, expect);
    assert_eq!(reason(probe.end().await), "OK");
}

/// EV-508, EV-803
#[tokio::test(start_paused = true)]
async fn ev_803_a_tree_that_waits_for_room_creates_each_child_once() {
    let spec =
        Spec::new("parts", "Three parts.")
            .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT).many()]);
    let parts = raw(spec, |_| {
        let part = |k: u32| Ok(Chunk::text("x".repeat(1_000)).with_part(k));
        stream::iter((0..3).map(part)).boxed()
    });
    let options = SessionOptions {
        limits: Arc::new(SessionLimits {
            outbound_queue_bytes: 100,
            ..Default::default()
        }),
        ..SessionOptions::default()
    };
    let mut probe = Probe::open([parts], options);
    let asked = vec![action("parts", &[], &[("output", "r")])];
    probe.send(vec![], asked).await;
    // The transport does not read, and every wake-up of the session wakes the action as well.
    for count in 0..20 {
        let id = format!("i{count}");
        probe.send(vec![leaf(&id, 0, true, "x")], vec![]).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let tree = probe.complete("r").await;
    assert_eq!(tree.children.len(), 3);
    assert_eq!(reason(probe.failure_after_close().await), "OK");
    assert_eq!(probe.nodes.len(), 4, "{:?}", probe.nodes.keys());
}

/// EV-506
#[tokio::test(start_paused = true)]
async fn ev_507_an_action_without_outputs_runs_to_its_end() {
    let given = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&given);
    let spec = Spec::new("work", "Works.").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    let work = raw(spec, move |_| {
        let count = Arc::clone(&count);
        let chunks = stream::iter(0..100).then(move |_| {
            let count = Arc::clone(&count);
            async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                count.fetch_add(1, Ordering::SeqCst);
                Ok(Chunk::text("done"))
            }
        });
        chunks.boxed()
    });
    let mut probe = Probe::open([work], SessionOptions::default());
    probe.send(vec![], vec![action("work", &[], &[])]).await;
    assert_eq!(reason(probe.end().await), "OK");
    assert_eq!(given.load(Ordering::SeqCst), 100);
}
