//! Functions of another server, imported into a kernel.

use std::time::Duration;

use futures::{StreamExt, stream};
use sapwood_engine::embedding::{Embedder, Pooling, ScriptedEmbedding, ScriptedEmbeddingConfig};
use sapwood_engine::scripted;
use sapwood_kernel::connect::evergreen::import;
use sapwood_kernel::{
    Call, ChoiceFinish, Chunk, Json, Kernel, Meta, Mime, Node, OutputSpec, Port, RunUsage, Spec,
    args, raw,
};
use sapwood_proto::code::Code;

use sapwood_tests::{Running, spawned, until, with_model};

/// A kernel with all functions of the server.
async fn imported(server: &Running) -> Kernel {
    let kernel = Kernel::new();
    kernel
        .add_all(import(&server.partial().await).await.unwrap())
        .unwrap();
    kernel
}

fn text_node(text: &str) -> Node {
    Node::from(Chunk::text(text.to_owned()).with_meta(Meta::default().with_role("USER")))
}

/// KE-706, EV-914
#[tokio::test]
async fn ke_801_a_remote_function_is_called_like_a_local_one() {
    let local = with_model(spawned(scripted::Config::default()));
    let server = Running::over(local.clone()).await;
    let remote = imported(&server).await;
    let names = |kernel: &Kernel| {
        kernel
            .specs()
            .iter()
            .map(|spec| spec.name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&remote), names(&local));
    for kernel in [&local, &remote] {
        for (name, expect) in [
            ("GENERATE", "Guten Tag"),
            ("parrot", "Guten Tag"),
            ("concat", "onetwo"),
            ("echo", "e"),
        ] {
            let run = match name {
                "concat" => kernel.run::<String>(name, args! { a: "one", b: "two" }),
                "echo" => kernel.run::<String>(name, args! { text: "e" }),
                _ => kernel.run::<String>(name, args! { prompt: "Guten Tag" }),
            };
            let (text, meta) = run.finish().await.unwrap();
            assert_eq!(text, expect, "{name}");
            if name == "GENERATE" {
                assert_eq!(meta.model.as_deref(), Some("scripted"));
                assert!(
                    meta.usage.completion_tokens > 0 && meta.finish.contains_key(&0),
                    "{meta:?}"
                );
            }
        }
        let error = kernel.run::<String>("fail", args! {}).await.unwrap_err();
        assert_eq!((error.code(), error.reason()), (Code::Internal, "FUNCTION"));
        let late = kernel
            .run::<String>("slow", args! {})
            .timeout(Duration::from_millis(20))
            .await
            .unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        let missing = kernel.run::<String>("echo", args! {}).await.unwrap_err();
        assert_eq!(missing.reason(), "MISSING_INPUT");
        let choices: Vec<_> = kernel
            .run::<Chunk>(
                "GENERATE",
                args! { prompt: "x", config: serde_json::json!({"n": 2}) },
            )
            .port(Port::MAIN)
            .filter_map(async |chunk| {
                chunk
                    .ok()
                    .filter(|chunk| !chunk.data.is_empty())
                    .map(|chunk| chunk.choice)
            })
            .collect()
            .await;
        assert!(choices.contains(&0) && choices.contains(&1), "{choices:?}");
    }
}

/// A model that embeds is an action of its own name, whatever that is, and no target of GENERATE.
#[tokio::test]
async fn ev_914_a_model_that_embeds_is_called_by_its_name() {
    let local = with_model(spawned(scripted::Config::default()));
    for (name, pooling) in [("bge-m3:q8", Pooling::Mean), ("ranks", Pooling::Rank)] {
        let model = ScriptedEmbedding::new(ScriptedEmbeddingConfig {
            name: name.to_owned(),
            pooling,
            ..ScriptedEmbeddingConfig::default()
        });
        let embedder = Embedder::spawn(Box::new(model), &sapwood_engine::Config::default());
        let function = sapwood_kernel::embedding_model(name, embedder.unwrap());
        local.add(function).unwrap();
    }
    let server = Running::over(local.clone()).await;
    let remote = imported(&server).await;
    let texts = ["one", "two"];
    let rows = remote.embed("bge-m3:q8", texts).await.unwrap();
    assert_eq!(rows, local.embed("bge-m3:q8", texts).await.unwrap());
    let run = remote.run::<Json<f32>>(
        "ranks",
        args! { query: "ab", documents: serde_json::json!(["ab", "b", "x"]) },
    );
    let (scores, meta) = run.finish().await.unwrap();
    assert_eq!(scores, [1.0, 0.5, 0.0]);
    assert!(meta.usage.prompt_tokens > 0, "{meta:?}");
    for kernel in [&local, &remote] {
        // The only model that generates is still the default one.
        let run = kernel.run::<String>("GENERATE", args! { prompt: "hi" });
        assert_eq!(run.await.unwrap(), "hi");
        let run = kernel.run::<String>("GENERATE", args! { prompt: "hi", target: "ranks" });
        let error = run.await.unwrap_err();
        assert!(error.to_string().contains("generates no text"), "{error}");
    }
}

/// A model that computes its whole answer before it sends anything.
fn unstreamed() -> Kernel {
    let mut spec =
        Spec::new("whole", "Answers at once.")
            .outputs([OutputSpec::new(Port::MAIN, Mime::TEXT).wire("response")]);
    spec.finishes = true;
    let kernel = Kernel::new();
    kernel
        .add(raw(spec, |_: Call| {
            let meta = Meta::default()
                .with_finish(0, ChoiceFinish::Length)
                .with_usage(0, RunUsage::of(3, 7));
            let answer = Chunk::text("all of it, twice: all of it").with_meta(meta);
            stream::iter([Ok(answer)]).boxed()
        }))
        .unwrap();
    kernel
}

/// KE-R16, KE-305
#[tokio::test]
async fn ke_615_a_model_that_does_not_stream_is_one_chunk_with_its_finish_and_usage() {
    let local = unstreamed();
    let server = Running::over(local.clone()).await;
    for kernel in [local, imported(&server).await] {
        // A chunk that only carries the trailing metadata is not a piece of text.
        let texts: Vec<String> = kernel
            .run::<String>("whole", ())
            .map(Result::unwrap)
            .collect()
            .await;
        assert_eq!(texts, ["all of it, twice: all of it"]);
        let (text, meta) = kernel.run::<String>("whole", ()).finish().await.unwrap();
        assert_eq!(text, texts[0]);
        assert_eq!(meta.finish.get(&0), Some(&ChoiceFinish::Length));
        assert_eq!(
            (meta.usage.prompt_tokens, meta.usage.completion_tokens),
            (3, 7)
        );
    }
}

/// KE-501
#[tokio::test]
async fn ke_501_dropping_a_remote_run_stops_it_at_the_server() {
    let server = Running::with_test_functions().await;
    let remote = imported(&server).await;
    let open = || server.shared.metrics.evergreen.actions_open.get();
    let mut run = remote.run::<String>("slow", args! {});
    assert!(futures::poll!(run.next()).is_pending());
    let mut polled = std::pin::pin!(run.next());
    until("it runs", || {
        let _ = futures::FutureExt::now_or_never(polled.as_mut());
        open() == 1
    })
    .await;
    drop(run);
    until("it is cancelled", || open() == 0).await;
}

#[tokio::test]
async fn ke_802_earlier_nodes_are_referred_to_by_id_and_not_sent_again() {
    let server = Running::over(with_model(spawned(scripted::Config::default()))).await;
    let remote = imported(&server).await;
    let bytes_in = || {
        server
            .shared
            .metrics
            .evergreen
            .bytes
            .with_label_values(&["in"])
            .get()
    };
    let first = text_node("a first question of forty-two characters.");
    let answer = remote.node("GENERATE", args! { prompt: Node::tree([first.clone()]) });
    let text = answer.run::<String>().await.unwrap();
    assert_eq!(text, "a first question of forty-two characters.");
    let before = bytes_in();
    let second = text_node("and now?");
    let prompt = Node::tree([first, answer, second]);
    assert_eq!(
        remote
            .run::<String>("GENERATE", args! { prompt: prompt })
            .await
            .unwrap(),
        "and now?"
    );
    assert_eq!(bytes_in() - before, "and now?".len() as u64);
}
