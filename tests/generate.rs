//! Tests of the Triton face over real sockets.

mod abuse;
mod beyond;
mod bodies;
mod charges;
mod client;
mod controls;
mod embeddings;
pub(crate) mod grpc;
mod infer;
mod metrics;
mod models;
mod readers;
mod reasoning;
mod repository;
mod restricted;
mod resume;
mod scripts;
mod settings;
mod steering;
mod streams;

use sapwood_engine::scripted::{self, Script, ScriptRule, ScriptStep};
use sapwood_kernel::Kernel;
use sapwood_proto::generate::{
    Datatype, InputRole, InputTensor, OutputRole, OutputTensor, Signature,
};
use sapwood_server::faces::generate::{Config, ModelOptions, ScriptControl};
use sapwood_tests::http::{Answer, Wire};
use sapwood_tests::{Running, spawned};

/// A kernel with these scripted models, and the test functions.
fn kernel(models: &[(&'static str, scripted::Config)]) -> Kernel {
    let kernel = Kernel::new();
    for (name, config) in models {
        kernel
            .add(sapwood_kernel::model(*name, spawned(config.clone())))
            .unwrap();
    }
    kernel
        .add_all(sapwood_kernel::session::test_functions())
        .unwrap();
    kernel
}

fn script(script: Script) -> scripted::Config {
    scripted::Config {
        script,
        ..scripted::Config::default()
    }
}

/// A script of one rule for every prompt.
fn steps(steps: Vec<ScriptStep>) -> scripted::Config {
    scripted::Config {
        rules: vec![ScriptRule {
            pattern: None,
            steps,
        }],
        ..script(Script::Steps)
    }
}

/// A server with the model `demo`, which repeats the `words` of the prompt, one at a time.
async fn demo() -> Running {
    Running::generating(
        kernel(&[("demo", script(Script::Words))]),
        Config::default(),
    )
    .await
}

/// A server with the model `m`, which plays these steps.
async fn playing(list: Vec<ScriptStep>) -> Running {
    Running::generating(kernel(&[("m", steps(list))]), Config::default()).await
}

/// The signature of the page's example: QUESTION and LIVE in, ANSWER out.
fn parrot_signature() -> Signature {
    let input = |name: &str, datatype, shape: &[i64], role| InputTensor {
        name: name.into(),
        datatype,
        shape: shape.to_vec(),
        optional: false,
        role,
        accepts_json: false,
    };
    Signature {
        inputs: vec![
            input("QUESTION", Datatype::Bytes, &[1, 1], InputRole::Prompt),
            input("LIVE", Datatype::Bool, &[1, 1], InputRole::Stream),
            InputTensor {
                optional: true,
                ..input("hints", Datatype::Int32, &[1, -1], InputRole::Ignore)
            },
        ],
        outputs: vec![OutputTensor {
            name: "ANSWER".into(),
            datatype: Datatype::Bytes,
            shape: vec![1, -1],
            role: OutputRole::Text,
        }],
        max_batch_size: 0,
        decoupled: true,
        lenient: false,
        tensorrt_llm: false,
    }
}

/// A server with the page's example, modified by `change`.
async fn parrot(change: impl FnOnce(&mut ModelOptions)) -> Running {
    let controls = [
        (ScriptControl::Repeat, "TIMES"),
        (ScriptControl::DelayS, "PAUSE"),
        (ScriptControl::FailLast, "BREAK"),
        (ScriptControl::EmptyOutput, "HOLLOW"),
        (ScriptControl::FailFirst, "REFUSE"),
        (ScriptControl::Code, "KIND"),
    ];
    let mut model = ModelOptions {
        signature: Some(parrot_signature()),
        controls: controls
            .map(|(control, name)| (control, name.to_owned()))
            .into(),
        fail_message: "the parrot is tired".into(),
        ..ModelOptions::default()
    };
    change(&mut model);
    let config = Config {
        models: [("parrot".to_owned(), model)].into(),
        ..Config::default()
    };
    Running::generating(kernel(&[("parrot", script(Script::Echo))]), config).await
}

/// Posts a body and returns the response.
async fn ask(server: &Running, path: &str, body: &str) -> Answer {
    Wire::connect(server.address).await.post(path, body).await
}

/// The text of an error.
fn error(answer: &Answer) -> String {
    let json = answer.json();
    assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    json["error"].as_str().unwrap().to_owned()
}
