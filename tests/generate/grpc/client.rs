//! Our client and its functions over gRPC against our face (D-5).

use futures::StreamExt;
use sapwood_engine::scripted::Cut;
use sapwood_kernel::connect::triton::import;
use sapwood_kernel::{GenerateConfig, Usage, args};
use sapwood_net::triton::{Address, Client};
use sapwood_proto::code::Code as Ours;
use sapwood_tests::until;
use serde_json::json;

use super::*;

#[tokio::test]
async fn tr_406_a_model_over_grpc_says_what_it_says_here() {
    let there = kernel(&[("demo", script(Script::Words))]);
    let server = Running::generating(there.clone(), Config::default()).await;
    let address = Address::new(format!("triton+grpc://{}", server.address));
    let client = Client::connect(&address).await.unwrap();
    let here = Kernel::new();
    here.add_all(import(&client).await.unwrap()).unwrap();
    let prompt = "gr\u{fc}ner Tee \u{1f375} for everybody";
    for config in [
        json!({"prompt_mode": "raw"}),
        json!({"prompt_mode": "raw", "max_tokens": 2}),
        json!({"prompt_mode": "raw", "stop": ["for"], "seed": 7, "temperature": 0}),
    ] {
        let args = || args! { prompt: prompt, config: config.clone() };
        let (text, told) = there.run::<String>("demo", args()).finish().await.unwrap();
        let (same, meta) = here.run::<String>("demo", args()).finish().await.unwrap();
        assert_eq!(same, text, "{config}");
        assert_eq!(meta.finish, told.finish, "{config}");
        let counts = |usage: Usage| (usage.prompt_tokens, usage.completion_tokens);
        assert_eq!(counts(meta.usage), counts(told.usage), "{config}");
    }
    let config = GenerateConfig {
        temperature: Some(200.0),
        ..GenerateConfig::default()
    };
    let args = args! { prompt: "x" }.with("config", config.into_chunk());
    let run = here.run::<String>("demo", args);
    assert_eq!(run.await.unwrap_err().code(), Ours::InvalidRequest);
}

/// D-11: a call without its end is truncated, whatever it has told before.
#[tokio::test]
async fn tr_1105_a_cut_call_has_no_end() {
    for cut in [Cut::Close, Cut::Reset] {
        let words = Step::Text("one ".into());
        let server = playing(vec![words, Step::SleepMs(20), Step::Cut(cut)]).await;
        let address = Address::new(format!("triton+grpc://{}/m", server.address));
        let client = Client::connect(&address).await.unwrap();
        let here = Kernel::new();
        here.add_all(import(&client).await.unwrap()).unwrap();
        let mut run = here.run::<String>("m", args! { prompt: "x" });
        let mut seen = String::new();
        let error = loop {
            match run.next().await.unwrap() {
                Ok(text) => seen.push_str(&text),
                Err(error) => break error,
            }
        };
        assert_eq!((&*seen, error.code()), ("one ", Ours::Truncated), "{error}");
    }
}

/// TR-608: dropping the run here frees the sequence there.
#[tokio::test]
async fn tr_907_a_dropped_run_over_grpc_frees_the_sequence() {
    let engine = spawned(steps(vec![Step::Text("a".into()), Step::Hang(true)]));
    let there = Kernel::new();
    there
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let server = Running::generating(there, Config::default()).await;
    let address = Address::new(format!("triton+grpc://{}", server.address));
    let client = Client::connect(&address).await.unwrap();
    let here = Kernel::new();
    here.add_all(import(&client).await.unwrap()).unwrap();
    let mut run = here.run::<String>("m", args! { prompt: "x" });
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
    drop(run);
    until("the sequence is gone", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
}
