//! Our client and its functions against our face (D-5): a server in front of a server.

mod resumable;

use futures::StreamExt;
use sapwood_engine::scripted::{ScriptedFailure, TransportCut};
use sapwood_kernel::connect::triton::import;
use sapwood_kernel::{ChoiceFinish, Error, GenerateConfig, Json, Port, args};
use sapwood_net::triton::{ServerAddress, TritonClient};
use sapwood_proto::code::Code;
use sapwood_proto::params::GenerationParams;
use sapwood_tests::until;
use serde_json::{Value, json};

use super::reasoning::{call, thought};
use super::*;

/// The schemes of the client.
const SCHEMES: [&str; 2] = ["triton+http", "triton+grpc"];

/// The models and functions of `server`, imported; with `model`, only that one.
async fn imported(server: &Running, scheme: &str, model: &str) -> Kernel {
    let address = ServerAddress::new(format!("{scheme}://{}{model}", server.address));
    let client = TritonClient::connect(&address).await.unwrap();
    let kernel = Kernel::new();
    kernel.add_all(import(&client).await.unwrap()).unwrap();
    kernel
}

/// What a model writes beside its answer passes a server in front of its own.
#[tokio::test]
async fn tr_406_reasoning_and_calls_of_another_server_have_their_ports() {
    let script = vec![thought(), ScriptStep::Text("Wait.".into()), call()];
    let server = playing(script).await;
    for scheme in SCHEMES {
        let here = imported(&server, scheme, "").await;
        let tools = json!([{"type": "function", "function": {"name": "weather"}}]);
        let messages = json!([{"role": "user", "content": "And?"}]);
        let node = here.node("m", args! { messages: messages, tools: tools });
        let reasoning = node.port(Port::REASONING).run::<String>();
        let calls = node.port(Port::TOOL_CALLS).run::<Json<Value>>();
        let text = node.port(Port::MAIN).run::<String>();
        assert_eq!(reasoning.await.unwrap(), "I look outside.", "{scheme}");
        assert_eq!(text.await.unwrap(), "Wait.", "{scheme}");
        let calls = calls.await.unwrap();
        assert_eq!(calls.len(), 1, "{scheme}");
        assert_eq!(calls[0]["arguments"], json!({"city": "Bergen"}), "{scheme}");
    }
}

/// The text of the imported model equals that of the model itself.
#[tokio::test]
async fn tr_406_a_model_of_another_server_gives_the_same_text() {
    let there = kernel(&[("demo", script(Script::Words))]);
    let server = Running::generating(there.clone(), Config::default()).await;
    for scheme in SCHEMES {
        let here = imported(&server, scheme, "").await;
        let specs = here.specs();
        assert_eq!(specs.len(), 1, "the models are listed");
        assert!(specs[0].model && specs[0].facts.is_none());
        let prompt = "gr\u{fc}ner Tee \u{1f375} for everybody";
        for config in [
            json!({"prompt_mode": "raw"}),
            json!({"prompt_mode": "raw", "max_tokens": 2}),
            json!({"prompt_mode": "raw", "stop": ["for"], "seed": 7, "temperature": 0}),
        ] {
            let args = || args! { prompt: prompt, config: config.clone() };
            let (text, received) = there.run::<String>("demo", args()).finish().await.unwrap();
            let (same, meta) = here.run::<String>("demo", args()).finish().await.unwrap();
            assert_eq!(same, text, "{scheme} {config}");
            assert_eq!(meta.finish, received.finish, "{scheme} {config}");
            assert_eq!(
                meta.usage.completion_tokens, received.usage.completion_tokens,
                "{scheme} {config}"
            );
            assert_eq!(
                meta.usage.prompt_tokens, received.usage.prompt_tokens,
                "{scheme} {config}"
            );
        }
        let config = GenerateConfig::from(GenerationParams {
            max_tokens: Some(1),
            ..GenerationParams::default()
        });
        let args = args! { prompt: prompt }.with("config", config.into_chunk());
        let (_, meta) = here.run::<String>("demo", args).finish().await.unwrap();
        assert_eq!(meta.finish[&0], ChoiceFinish::Length);
    }
}

/// TR-605, TR-1105, D-11: errors of the server keep their codes here.
#[tokio::test]
async fn tr_604_errors_keep_their_codes_and_cuts_are_truncated() {
    let failure = |code: &str| {
        ScriptStep::Error(ScriptedFailure {
            code: code.into(),
            message: "the parrot is tired".into(),
        })
    };
    let words = || ScriptStep::Text("one ".into());
    for (schemes, steps, text, code) in [
        (
            &SCHEMES[..1],
            vec![failure("unavailable")],
            "",
            Code::Unavailable,
        ),
        (
            &SCHEMES[..1],
            vec![failure("internal")],
            "",
            Code::UpstreamFailed,
        ),
        (
            &SCHEMES[..1],
            vec![words(), failure("unavailable")],
            "one ",
            Code::UpstreamFailed,
        ),
        (
            &SCHEMES[..],
            vec![
                words(),
                ScriptStep::SleepMs(20),
                ScriptStep::Cut(TransportCut::Close),
            ],
            "one ",
            Code::Truncated,
        ),
        (
            &SCHEMES[..],
            vec![
                words(),
                ScriptStep::SleepMs(20),
                ScriptStep::Cut(TransportCut::Reset),
            ],
            "one ",
            Code::Truncated,
        ),
    ] {
        let server = playing(steps).await;
        for scheme in schemes {
            let here = imported(&server, scheme, "/m").await;
            let mut run = here.run::<String>("m", args! { prompt: "x" });
            let mut seen = String::new();
            let error = loop {
                match run.next().await.unwrap() {
                    Ok(text) => seen.push_str(&text),
                    Err(error) => break error,
                }
            };
            assert_eq!(
                (seen.as_str(), error.code()),
                (text, code),
                "{scheme}: {error}"
            );
        }
    }
}

/// TR-605
#[tokio::test]
async fn tr_604_a_bad_parameter_is_an_invalid_request() {
    let server = demo().await;
    for scheme in SCHEMES {
        let here = imported(&server, scheme, "").await;
        let config = GenerateConfig::from(GenerationParams {
            temperature: Some(200.0),
            ..GenerationParams::default()
        });
        let args = args! { prompt: "x" }.with("config", config.into_chunk());
        let run = here.run::<String>("demo", args);
        assert_eq!(run.await.unwrap_err().code(), Code::InvalidRequest);
    }
}

/// TR-907
#[tokio::test]
async fn tr_608_dropping_the_run_frees_the_sequence_at_the_server() {
    for scheme in SCHEMES {
        let engine = spawned(steps(vec![
            ScriptStep::Text("a".into()),
            ScriptStep::Hang(true),
        ]));
        let there = Kernel::new();
        there
            .add(sapwood_kernel::model("m", engine.clone()))
            .unwrap();
        let server = Running::generating(there, Config::default()).await;
        let here = imported(&server, scheme, "").await;
        let mut run = here.run::<String>("m", args! { prompt: "x" });
        assert_eq!(run.next().await.unwrap().unwrap(), "a");
        // The metric is updated at the end of a step, after the step's events are published.
        until("the sequence runs", || {
            engine.stats().requests_running.get() == 1
        })
        .await;
        drop(run);
        until("the sequence is gone", || {
            engine.stats().requests_running.get() == 0
        })
        .await;
    }
}

/// A deadline of the caller is sent to the server as well.
#[tokio::test]
async fn tr_404_a_deadline_ends_the_request_on_both_sides() {
    let engine = spawned(steps(vec![ScriptStep::Hang(true)]));
    let there = Kernel::new();
    there
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let server = Running::generating(there, Config::default()).await;
    let here = imported(&server, SCHEMES[0], "").await;
    let run = here.run::<String>("m", args! { prompt: "x" });
    let soon = std::time::Duration::from_millis(50);
    let error = run.timeout(soon).await.unwrap_err();
    assert!(matches!(error, Error::Deadline), "{error}");
    until("the sequence is gone", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
}

/// A function of the server is imported under its name.
#[tokio::test]
async fn tr_1308_a_function_of_another_server_is_imported_by_name() {
    let server = demo().await;
    let here = imported(&server, SCHEMES[0], "/concat").await;
    assert!(!here.specs().remove(0).model);
    let args = || args! { a: "one ", b: "two" };
    assert_eq!(
        here.run::<String>("concat", args()).await.unwrap(),
        "one two"
    );
    let missing = TritonClient::connect(&ServerAddress::new(format!(
        "triton+http://{}/nobody",
        server.address
    )))
    .await;
    assert_eq!(missing.unwrap_err().code(), Code::NotFound);
}
