//! Controllers and formats of a model that is called as an action.

use sapwood_engine::Engine;
use sapwood_engine::scripted::{Config, Scripted, ScriptedSteerers};
use sapwood_proto::generated::sapwood::v1::{Controller, ResponseFormat};

use super::*;
use crate::steering::Steering;

/// A session with the steered model `m`.
fn probe() -> Probe {
    let script: Config = serde_json::from_value(json!({"script": "text", "text": "-"})).unwrap();
    let script = Box::new(Scripted::new(script).unwrap());
    let engine = Engine::spawn(script, sapwood_engine::Config::default()).unwrap();
    let steering = Steering::new(Arc::new(ScriptedSteerers::default()));
    let options = SessionOptions {
        partial_failure: true,
        ..SessionOptions::default()
    };
    Probe::open([crate::steered_model("m", engine, steering)], options)
}

fn controller(module: &str, arg: &str) -> GenerateConfig {
    GenerateConfig {
        controller: Some(Controller {
            module: Some(module.into()),
            arg: Some(arg.into()),
        }),
        ..GenerateConfig::default()
    }
}

fn format(kind: &str, schema: &str) -> GenerateConfig {
    GenerateConfig {
        response_format: Some(ResponseFormat {
            r#type: Some(kind.into()),
            schema: Some(schema.into()),
            choices: Vec::new(),
        }),
        ..GenerateConfig::default()
    }
}

/// Calls the model; its answer is node `r`, its log node `l`, and how it ended node `s`.
async fn call(probe: &mut Probe, config: &GenerateConfig) {
    let mut asking = action(
        "m",
        &[("prompt", "p")],
        &[
            ("response", "r"),
            ("controller_log", "l"),
            ("__status__", "s"),
        ],
    );
    asking
        .configs
        .push(any("sapwood.v1.GenerateConfig", config));
    let prompt = leaf("p", 0, true, "hello");
    probe.send(vec![prompt], vec![asking]).await;
}

async fn texts(probe: &mut Probe) -> Vec<String> {
    let mut texts = Vec::new();
    for child in probe.complete("r").await.children {
        let data = probe.complete(&child).await.data;
        texts.push(String::from_utf8(data).unwrap());
    }
    texts
}

/// D-25, EV-602: field 18.
#[tokio::test]
async fn ev_604_the_answers_of_a_controller_are_children_and_its_log_is_a_leaf() {
    let mut probe = probe();
    call(&mut probe, &controller("talk", "ab")).await;
    assert_eq!(texts(&mut probe).await, ["ab"]);
    let log = probe.complete("l").await;
    assert_eq!(log.data, b"thinking\nstill thinking\n");
    assert_eq!(log.mime, "text/plain");
}

#[tokio::test]
async fn ai_933_forks_add_children_with_whole_texts() {
    let mut probe = probe();
    call(&mut probe, &controller("fork", "ab|c|d")).await;
    assert_eq!(texts(&mut probe).await, ["abc", "abd"]);
}

/// D-25: a format alone makes no tree.
#[tokio::test]
async fn ev_602_a_response_format_leaves_the_answer_a_leaf() {
    let mut probe = probe();
    call(&mut probe, &format("regex", "a+")).await;
    let answer = probe.complete("r").await;
    assert_eq!(
        (answer.data.as_slice(), answer.children.len()),
        (&b"a+"[..], 0)
    );
}

#[tokio::test]
async fn ev_603_a_controller_fails_its_action_with_the_protocols_reasons() {
    for (config, expect, cause) in [
        (controller("nobody", ""), "UNKNOWN_CONTROLLER", None),
        (controller("trap", "ab"), "CONTROLLER", Some("trap")),
        (controller("", ""), "BAD_CONFIG", None),
        (format("regex", "("), "BAD_CONFIG", None),
        (format("haiku", ""), "BAD_CONFIG", None),
    ] {
        let mut probe = probe();
        call(&mut probe, &config).await;
        let status = probe.complete("s").await.status.unwrap();
        assert_eq!(
            (&*status.reason, status.detail("cause")),
            (expect, cause),
            "{config:?}"
        );
    }
}
