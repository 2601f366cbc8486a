//! What functions answer: trees, final fragments, and configurations read by type.

use super::*;

/// EV-306, EV-506
#[tokio::test(start_paused = true)]
async fn ev_511_the_test_functions_do_what_they_say() {
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
    let input = || Input::new("many").optional();
    let plain = Spec::new("choices", "Three answers.").inputs([input()]);
    let parts = Spec::new("parts", "Three parts.")
        .inputs([input()])
        .outputs([Output::new(Port::MAIN, Mime::TEXT).many()]);
    let n =
        Spec::new("n", "As many answers as asked for.").inputs([Input::new("config").optional()]);
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
        Options::default(),
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
    let mut probe = Probe::open([silent], Options::default());
    probe
        .send(vec![], vec![action("silent", &[], &[("output", "r")])])
        .await;
    let node = probe.complete("r").await;
    assert_eq!(
        (node.fragments, node.mime.as_str(), node.data.len()),
        (1, "text/plain", 0)
    );
}

/// EV-509
#[tokio::test(start_paused = true)]
async fn ev_509_configs_are_read_by_type_and_the_input_goes_over_them() {
    let spec =
        Spec::new("configured", "Tells its config.").inputs([Input::new("config").optional()]);
    let tell = raw(spec, |call| {
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
    ] {
        let mut probe = Probe::open([tell.clone()], Options::default());
        let mut configured = action("configured", &[], &[("output", "r")]);
        configured.configs.push(config);
        let mut fragments = vec![];
        if let Some(over) = over {
            configured.inputs.push(Param::new("config", "o"));
            fragments.push(leaf("o", 0, true, over));
        }
        probe.send(fragments, vec![configured]).await;
        let told: Value = serde_json::from_slice(&probe.complete("r").await.data).unwrap();
        assert_eq!(told, expect);
    }
}

#[tokio::test(start_paused = true)]
async fn ev_509_configs_that_cannot_be_used_are_refused() {
    let spec = Spec::new("configured", "Takes a config.").inputs([Input::new("config").optional()]);
    let tell = raw(spec, |_| stream::empty().boxed());
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
        let mut probe = Probe::open([tell.clone()], Options::default());
        let mut configured = action("configured", &[], &[("output", "r")]);
        configured.configs.push(config);
        probe.send(vec![], vec![configured]).await;
        assert_eq!(reason(probe.failure().await), expect);
    }
}
