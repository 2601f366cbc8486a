//! Tests of model functions with a scripted engine.

use futures::executor::block_on;
use sapwood_engine::Config as EngineConfig;
use sapwood_engine::scripted::{Config, Scripted};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::time::Time;
use serde_json::json;

use super::*;
use crate::args;
use crate::chunk::Chunk;
use crate::from_chunks::Json;
use crate::kernel::Kernel;
use crate::meta::{ChoiceFinish, Meta, RunUsage};
use crate::probe::whole;
use crate::run::Run;

mod calls;
mod embedding;
mod prompts;
mod steered;
mod typed;

fn scripted(config: Value) -> Scripted {
    let config: Config = serde_json::from_value(config).unwrap();
    Scripted::new(config).unwrap()
}

/// A kernel with the model `m`, which runs this script.
fn kernel(config: Value) -> Kernel {
    let engine = Engine::spawn(Box::new(scripted(config)), EngineConfig::default()).unwrap();
    let kernel = Kernel::new();
    kernel.add(model("m", engine)).unwrap();
    kernel
}

fn states(text: &str) -> Kernel {
    kernel(json!({"script": "text", "text": text}))
}

fn steps(steps: Value) -> Kernel {
    kernel(json!({"script": "steps", "rules": [{"steps": steps}]}))
}

fn run(kernel: &Kernel, config: Value) -> Run<String> {
    kernel.run("m", args! { prompt: "hello", config: config })
}

fn error(kernel: &Kernel, config: Value) -> (String, String) {
    let error = whole(run(kernel, config)).unwrap_err();
    (error.code().name().into(), error.reason().into())
}

#[test]
fn ke_611_a_model_is_a_function_with_generates_ports() {
    let kernel = states("Hello there");
    let spec = kernel.specs().remove(0);
    let inputs: Vec<&str> = spec.inputs.iter().map(|input| &*input.name).collect();
    let outputs: Vec<&str> = spec.outputs.iter().map(|output| &*output.wire).collect();
    assert_eq!(inputs, ["prompt", "suffix", "messages", "config", "tools"]);
    assert_eq!(
        outputs,
        [
            "response",
            "reasoning",
            "tool_calls",
            "tokens",
            "logprobs",
            "events",
            "meta",
            "controller_log"
        ]
    );
    assert!(spec.finishes && spec.model && spec.input("text").is_some());
    assert_eq!(spec.output_on_wire("text").unwrap().port, "");
    let (text, meta) = block_on(kernel.run::<String>("m", args! { text: "hi" }).finish()).unwrap();
    assert_eq!(text, "Hello there");
    assert_eq!(meta.finish[&0], ChoiceFinish::Stop);
    assert_eq!(meta.usage.completion_tokens, 11 + 1);
    assert!(meta.model.is_some() && meta.get("seed").is_some());
}

/// EV-506, KE-305: ports that are not requested are not produced; `meta` is produced if it is named.
#[test]
fn ke_305_the_meta_port_is_one_object_at_the_end() {
    let kernel = states("Hi");
    let mut metas = whole(
        kernel
            .run::<Json<Value>>("m", args! { prompt: "x" })
            .port("meta"),
    )
    .unwrap();
    let meta = metas.remove(0);
    assert!(metas.is_empty());
    for (pointer, expect) in [
        ("/finish_reason", json!("stop")),
        ("/usage/completion_tokens", json!(3)),
        ("/stop", json!(257)),
    ] {
        assert_eq!(meta.pointer(pointer), Some(&expect), "{meta}");
    }
    assert!(meta.pointer("/timing/total_ms").is_some() && meta.get("choices").is_none());
    let chunks = whole(
        kernel
            .run::<Chunk>("m", args! { prompt: "x" })
            .wanting(RequestedPorts::main().into()),
    )
    .unwrap();
    assert!(chunks.iter().all(|chunk| chunk.port == *""));
}

/// EV-604
#[test]
fn ke_612_text_is_whole_characters_and_held_back_only_for_a_stop() {
    let kernel = states("caf\u{e9} \u{1f600} STOP more");
    let (text, meta) = block_on(run(&kernel, json!({"stop": ["STOP"]})).finish()).unwrap();
    assert_eq!(
        (text.as_str(), &meta.finish[&0]),
        ("caf\u{e9} \u{1f600} ", &ChoiceFinish::Stop)
    );
    let run = kernel
        .run::<Json<Value>>("m", args! { prompt: "x", config: json!({"stop": "STOP"}) })
        .port("meta");
    assert_eq!(whole(run).unwrap()[0].get("stop"), Some(&json!("STOP")));
}

#[test]
fn ke_612_inner_has_every_token_and_only_when_asked() {
    let kernel = states("caf\u{e9}");
    let chunks = whole(kernel.run::<Chunk>("m", args! { prompt: "x" })).unwrap();
    let ids: Vec<u32> = chunks
        .iter()
        .filter_map(|chunk| chunk.inner::<api::Tokens>())
        .flat_map(|tokens| tokens.tokens.iter().map(|token| token.id))
        .collect();
    let port: Vec<u8> = chunks
        .iter()
        .filter(|chunk| chunk.port == *"tokens")
        .flat_map(|chunk| chunk.data.to_vec())
        .collect();
    let listed: Vec<u32> = port
        .as_chunks::<4>()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    assert_eq!(ids, listed);
    assert!(ids.len() >= 5, "one token per byte: {ids:?}");
    let plain = whole(
        kernel
            .run::<Chunk>("m", args! { prompt: "x" })
            .wanting(RequestedPorts::main().into()),
    )
    .unwrap();
    assert!(plain.iter().all(|chunk| chunk.inner.is_none()));
    let empty = plain.iter().filter(|chunk| chunk.data.is_empty()).count();
    assert_eq!(empty, 1, "the one that carries the metadata");
}

/// EV-604: choices are announced in order.
#[test]
fn ke_613_every_choice_has_its_own_text_and_finish() {
    let kernel = states("abc");
    let config = json!({"n": 3, "max_tokens": 2});
    let want = RequestedPorts::Only(vec![Port::MAIN, Port::META]);
    let run = kernel
        .run::<Chunk>("m", args! { prompt: "x", config: config })
        .wanting(want.into());
    let (chunks, meta) = block_on(run.finish()).unwrap();
    let order: Vec<u32> = chunks.iter().take(3).map(|chunk| chunk.choice).collect();
    assert_eq!(order, [0, 1, 2]);
    for choice in 0..3 {
        let mine = chunks
            .iter()
            .filter(|chunk| chunk.choice == choice && chunk.port == *"");
        let text: String = mine.map(ToString::to_string).collect();
        assert_eq!(
            (text.as_str(), &meta.finish[&choice]),
            ("ab", &ChoiceFinish::Length)
        );
    }
    let document = chunks.iter().find(|chunk| chunk.port == *"meta").unwrap();
    let document: Value = serde_json::from_slice(&document.data).unwrap();
    assert_eq!(
        document
            .get("choices")
            .and_then(Value::as_array)
            .map(Vec::len),
        Some(3)
    );
    assert_eq!(
        meta.usage.completion_tokens, 6,
        "counted once for all choices"
    );
}

#[test]
fn ke_614_logprobs_are_as_long_as_asked() {
    let kernel = states("ab");
    for (config, length) in [(json!({}), 0), (json!({"top_logprobs": 3}), 3)] {
        let run = kernel
            .run::<Json<Value>>("m", args! { prompt: "x", config: config })
            .port("logprobs");
        let lines = whole(run).unwrap();
        let line = &lines[0];
        assert_eq!(line.get("text"), Some(&json!("a")));
        assert_eq!(line.pointer("/bytes/0"), Some(&json!(97)));
        assert!(line.get("logprob").and_then(Value::as_f64).unwrap() <= 0.0);
        let top = line.get("top").and_then(Value::as_array).unwrap();
        assert_eq!((top.len(), line.get("choice")), (length, Some(&json!(0))));
    }
}

#[test]
fn ke_r18_the_first_item_comes_before_the_model_has_finished() {
    let (mut owner, engine) = Engine::by_hand(
        Box::new(scripted(json!({"script": "text", "text": "abcdef"}))),
        EngineConfig::default(),
    );
    let kernel = Kernel::new();
    kernel.add(model("m", engine)).unwrap();
    let mut run = kernel.run::<String>("m", args! { prompt: "x" });
    assert!(crate::probe::poll_once(&mut run, std::task::Waker::noop()).is_pending());
    let mut steps = 0;
    loop {
        steps += 1;
        assert!(owner.step(Time::from_millis(steps)).finished.is_empty() && steps < 20);
        if let std::task::Poll::Ready(item) =
            crate::probe::poll_once(&mut run, std::task::Waker::noop())
        {
            assert_eq!(item.unwrap().unwrap(), "a");
            break;
        }
    }
    drop(run);
    // EV-611, KE-501: removed before the next step that would include it.
    let report = owner.step(Time::from_millis(steps + 1));
    assert_eq!((report.cancelled.len(), report.batch().count()), (1, 0));
    assert!(owner.is_empty());
}

/// D-10
#[test]
fn reasoning_and_tool_calls_go_to_their_ports() {
    let kernel = steps(json!([
        {"reasoning": "hm"},
        {"text": "Let me see. "},
        {"tool_call": {"name": "add", "arguments": {"a": 1}}},
        {"finish": "tool_calls"},
    ]));
    let tools = json!([{"type": "function", "function": {"name": "add"}}]);
    let run = kernel.run::<Chunk>("m", args! { prompt: "x", tools: tools });
    let (chunks, meta) = block_on(run.finish()).unwrap();
    let text = |port: &str| -> String {
        chunks
            .iter()
            .filter(|chunk| chunk.port == *port)
            .map(ToString::to_string)
            .collect()
    };
    assert_eq!(
        (text("").as_str(), text("reasoning").as_str()),
        ("Let me see. ", "hm")
    );
    let call: Value = serde_json::from_str(&text("tool_calls")).unwrap();
    assert_eq!(
        (
            call.get("name"),
            call.pointer("/arguments/a"),
            call.get("index")
        ),
        (Some(&json!("add")), Some(&json!(1)), Some(&json!(0)))
    );
    assert!(call.get("id").is_some_and(Value::is_string));
    assert_eq!(meta.finish[&0], ChoiceFinish::ToolCalls);
    let role = |port: &str| {
        chunks
            .iter()
            .find(|chunk| chunk.port == *port)
            .and_then(|chunk| chunk.meta.clone())
    };
    assert_eq!(role("").unwrap().role.as_deref(), Some("ASSISTANT"));
    assert_eq!(
        role("reasoning").unwrap().role.as_deref(),
        Some("ASSISTANT")
    );
    let without = whole(kernel.run::<String>("m", args! { prompt: "x" })).unwrap();
    assert!(
        without.contains("<tool_call>"),
        "without tools it is text: {without}"
    );
}

#[test]
fn ev_602_fields_reach_the_engine() {
    let kernel = kernel(json!({"script": "tokens"}));
    let text = |config: Value| whole(run(&kernel, config)).unwrap();
    let words = |text: &str| text.split_whitespace().count();
    assert_eq!(text(json!({"max_tokens": 0})), "");
    assert_eq!(
        words(&text(json!({"max_tokens": 5, "seed": 7, "temperature": 0}))),
        5
    );
    let seeded =
        |seed: Value| text(json!({"max_tokens": 8, "seed": seed, "temperature": 2.0, "topP": 0.9}));
    assert_eq!(
        seeded(json!(7)),
        seeded(json!("7")),
        "a string of 64 bits is a number"
    );
    let finish = block_on(run(&kernel, json!({"max_tokens": 5})).finish())
        .unwrap()
        .1
        .finish;
    assert_eq!(finish[&0], ChoiceFinish::Length);
}

/// EV-602, and `choices_max`: at the limit and one past it.
#[test]
fn ev_603_out_of_range_is_bad_config_before_anything_runs() {
    let kernel = states("x");
    let many = |count: usize| Value::from(vec!["s"; count]);
    let long = |bytes: usize| Value::from("s".repeat(bytes));
    for good in [
        json!({"temperature": 2.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 10, "presence_penalty": -2}),
        json!({"n": 16, "top_logprobs": 20, "stop": many(16), "max_tokens": 4.0}),
        json!({"bad_words": many(16)}),
        json!({"dry_multiplier": 0.8, "dryBase": 1.75, "dry_sequence_breakers": ["\n"], "penalty_last_n": -1}),
        json!({"mirostat": 2, "samplers": ["penalties", "temperature"], "logit_bias": [["a", 1.5], [5, false]]}),
        json!({"logit_bias": {"a": 1}}),
        json!({"bad_words": long(256)}),
        json!({"stop": [long(256)], "logit_bias": {"5": -100}, "stop_token_ids": [0], "prompt_mode": "chat"}),
        json!({"response_format": {"type": "text"}, "template_args": {}, "seed": u64::MAX, "controller": null}),
    ] {
        assert!(whole(run(&kernel, good.clone())).is_ok(), "{good}");
    }
    for (field, bad) in [
        ("temperature", json!(2.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("min_p", json!(1)),
        ("repetition_penalty", json!(0)),
        ("presence_penalty", json!(2.5)),
        ("frequency_penalty", json!(-3)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(1.5)),
        ("top_k", json!(4_294_967_296_u64)),
        ("top_logprobs", json!(21)),
        ("n", json!(0)),
        ("n", json!(17)),
        ("seed", json!(-1)),
        ("stop", many(17)),
        ("stop", json!([""])),
        ("stop", json!([long(257)])),
        ("bad_words", many(17)),
        ("bad_words", json!([""])),
        ("bad_words", json!([long(257)])),
        ("bad_words", json!([1])),
        ("stop_token_ids", json!([4_000_000])),
        ("logit_bias", json!({"a": true})),
        ("logit_bias", json!([["a", 101]])),
        ("dry_base", json!(0.5)),
        ("mirostat", json!(1)),
        ("samplers", json!(["warp"])),
        ("penalty_last_n", json!(-2)),
        ("logit_bias", json!({"1": 101})),
        ("logit_bias", json!({"4000000": 1})),
        ("ignore_eos", json!(1)),
        ("prompt_mode", json!("loud")),
        ("template_args", json!([])),
        ("response_format", json!({"type": "haiku"})),
        ("response_format", json!({"type": "regex"})),
        ("controller", json!({"arg": "of what?"})),
        ("controller", json!("")),
        ("controller_arg", json!("of what?")),
        ("colour", json!("blue")),
    ] {
        let config: Value = [(field.to_owned(), bad.clone())]
            .into_iter()
            .collect::<Map<_, _>>()
            .into();
        let error = whole(run(&kernel, config)).unwrap_err();
        assert_eq!(error.reason(), "BAD_CONFIG", "{field} {bad}");
        assert!(
            matches!(&error, Error::Argument { name, .. } if *name == *field),
            "{field}: {error:?}"
        );
    }
    assert_eq!(error(&kernel, json!([])).1, "BAD_CONFIG");
}

#[test]
fn ev_601_a_base_from_the_context_is_overridden_field_by_field() {
    let kernel = states("abcdef");
    let base = json!({"max_tokens": 2, "stop": ["e"]});
    let with =
        |config: Value| whole(run(&kernel, config).context(CONFIG_CONTEXT, base.clone())).unwrap();
    assert_eq!(with(json!({})), "ab");
    assert_eq!(with(json!({"maxTokens": 6})), "abcd");
}

#[test]
fn ev_609_errors_of_the_engine_keep_their_reason() {
    let small = kernel(json!({"script": "text", "text": "x", "context_tokens": 64}));
    let refused = whole(small.run::<String>("m", args! { prompt: "p".repeat(500) })).unwrap_err();
    assert_eq!(
        (refused.code().name(), refused.reason()),
        ("invalid-request", "PROMPT_TOO_LONG")
    );
    let failing =
        steps(json!([{"text": "a"}, {"error": {"code": "overloaded", "message": "full"}}]));
    let settled = block_on(run(&failing, json!({})).settle());
    assert_eq!(settled.whole.as_deref(), Some("a"));
    assert_eq!(
        settled.error.map(|error| error.code().name()),
        Some("overloaded")
    );
}

#[test]
fn ke_303_usage_of_a_model_is_counted_once() {
    let kernel = states("abc");
    let mut run = kernel.run::<Chunk>("m", args! { prompt: "x" });
    let mut seen = Vec::new();
    while let Some(chunk) = block_on(run.next()) {
        let usage = chunk
            .unwrap()
            .meta
            .as_deref()
            .map_or_else(RunUsage::default, |meta| meta.usage);
        seen.push(usage.completion_tokens);
    }
    assert_eq!(seen.iter().filter(|tokens| **tokens > 0).count(), 1);
    assert_eq!(run.meta().usage_by_turn.len(), 1);
}
