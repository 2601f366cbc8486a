//! Controllers and constraints of models (aici.md section 9.2).

use std::collections::BTreeMap;
use std::sync::Mutex;

use sapwood_engine::api::{EngineEvent, EventKind};
use sapwood_engine::scripted::ScriptedSteerers;
use sapwood_proto::steer::{ConstraintChoice, ConstraintKind, ControllerChoice};

use super::*;
use crate::Chunks;
use crate::layer::{Layer, Next};
use crate::steering::{HoldPolicy, SteerRights, Steering};

/// A kernel with the steered model `m`, which ends at once if nothing steers it.
fn steered(hold: HoldPolicy) -> (Kernel, Arc<ScriptedSteerers>) {
    let source = Arc::new(ScriptedSteerers::default());
    let script = scripted(json!({"script": "text", "text": "unsteered"}));
    let engine = Engine::spawn(Box::new(script), EngineConfig::default()).unwrap();
    let steering = Steering {
        hold,
        ..Steering::new(Arc::clone(&source) as _)
    };
    let kernel = Kernel::new();
    kernel.add(steered_model("m", engine, steering)).unwrap();
    (kernel, source)
}

/// Each choice's text, and how it ended.
fn choices(kernel: &Kernel, config: &Value) -> BTreeMap<u32, (String, ChoiceFinish)> {
    let run = kernel
        .run::<Chunk>("m", args! { prompt: "hello", config: config.clone() })
        .wanting(RequestedPorts::main().into());
    let (chunks, meta) = block_on(run.finish()).unwrap();
    let mut texts: BTreeMap<u32, String> = BTreeMap::new();
    for chunk in &chunks {
        *texts.entry(chunk.choice).or_default() += &chunk.to_string();
    }
    let with = |(choice, text)| (choice, (text, meta.finish[&choice].clone()));
    texts.into_iter().map(with).collect()
}

fn one(kernel: &Kernel, config: &Value) -> String {
    let mut all = choices(kernel, config);
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(&0).unwrap().0
}

/// KE-611, AI-911: the forms of a controller and of its argument.
#[test]
fn ai_931_a_controller_is_opened_with_its_argument_and_steers() {
    let (kernel, source) = steered(HoldPolicy::End);
    for config in [
        json!({"controller": "dictate", "controller_arg": "yes"}),
        json!({"controller": {"id": "dictate", "arg": "yes"}}),
        json!({"controller": {"module": "dictate", "arg": "yes"}}),
    ] {
        let all = choices(&kernel, &config);
        let expect = ("yes".to_owned(), ChoiceFinish::Controller);
        assert_eq!(all, [(0, expect)].into(), "{config}");
    }
    assert_eq!(one(&kernel, &json!({})), "unsteered");
    let number = json!({"controller": "dictate", "controller_arg": [1, "a"]});
    assert_eq!(one(&kernel, &number), r#"[1,"a"]"#);
    let calls = source.calls();
    assert_eq!(calls[0], "local admin dictate yes");
    assert_eq!(calls.len(), 4, "{calls:?}");
}

#[test]
fn ai_931_an_unknown_controller_fails_before_any_token() {
    let (kernel, _) = steered(HoldPolicy::End);
    let mut run = run(&kernel, json!({"controller": "nobody.knows-it"}));
    let first = block_on(run.next()).unwrap();
    let error = first.unwrap_err();
    assert_eq!(
        (error.code().name(), error.reason()),
        ("not-found", "UNKNOWN_CONTROLLER")
    );
    assert!(error.to_string().contains("nobody.knows-it"), "{error}");
}

#[test]
fn ai_902_the_source_is_asked_with_the_rights_of_the_caller() {
    let asked = |user: &str, is_admin, may_control| {
        let (kernel, source) = steered(HoldPolicy::End);
        let rights = SteerRights {
            user: user.into(),
            is_admin,
            may_control,
        };
        kernel.layer(move |mut call: Call, next: Next| {
            call.extensions.insert(rights.clone());
            next.call(call)
        });
        let config = json!({"controller": "private", "controller_arg": "ok"});
        let text = whole(run(&kernel, config)).map_err(|error| error.reason().to_owned());
        (source.calls().remove(0), text)
    };
    let ok = || Ok("ok".to_owned());
    let denied = Err("insufficient_scope".to_owned());
    for (answer, expect) in [
        (asked("ann", false, false), ("ann infer private ok", denied)),
        (asked("bob", false, true), ("bob control private ok", ok())),
        (asked("eve", true, true), ("eve admin private ok", ok())),
    ] {
        assert_eq!((answer.0.as_str(), answer.1), expect);
    }
}

/// AI-840, EV-602: formats become native constraints, and D-25: those are a leaf.
#[test]
fn ev_602_a_response_format_constrains() {
    let (kernel, source) = steered(HoldPolicy::End);
    for (format, text) in [
        (json!({"type": "regex", "schema": "a+"}), "a+"),
        (json!({"type": "json_schema", "schema": "{}"}), "{}"),
        (json!({"type": "choice", "choices": ["yes", "no"]}), "yes"),
        (json!({"type": "text"}), "unsteered"),
    ] {
        assert_eq!(one(&kernel, &json!({"response_format": format})), text);
    }
    assert_eq!(
        source.calls().join("\n"),
        "local admin sapwood:regex {\"value\":\"a+\"}\n\
         local admin sapwood:json-schema {\"value\":\"{}\"}\n\
         local admin sapwood:options {\"value\":[\"yes\",\"no\"]}"
    );
    let bad = json!({"response_format": {"type": "regex", "schema": "("}});
    let (code, reason) = error(&kernel, bad);
    assert_eq!(
        (code.as_str(), reason.as_str()),
        ("invalid-request", "invalid_grammar")
    );
}

/// EV-603 in its earlier form refused this; D-38 wins. Both dictate here, so they must agree on each byte.
#[test]
fn d_38_a_controller_and_a_format_are_combined() {
    let (kernel, source) = steered(HoldPolicy::End);
    let with = |pattern: &str| {
        json!({
            "controller": "dictate",
            "controller_arg": "yes",
            "response_format": {"type": "regex", "schema": pattern},
        })
    };
    let expect = ("yes".to_owned(), ChoiceFinish::Controller);
    assert_eq!(choices(&kernel, &with("yes")), [(0, expect)].into());
    assert_eq!(source.calls().len(), 2);
    let (code, reason) = error(&kernel, with("yak"));
    assert_eq!(
        (code.as_str(), reason.as_str()),
        ("controller-failed", "constraint_failed")
    );
}

/// KE-613, EV-604: the children are announced when there are any.
#[test]
fn ai_933_every_fork_is_a_whole_choice_with_the_next_index() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = json!({"controller": "fork", "controller_arg": "ab|c|de|f"});
    let all = choices(&kernel, &config);
    let texts: Vec<_> = all.values().map(|(text, _)| text.as_str()).collect();
    assert_eq!(texts, ["abc", "abde", "abf"]);
    assert!(
        all.values()
            .all(|(_, finish)| *finish == ChoiceFinish::Controller)
    );
    // A reader of one text gets the first.
    assert_eq!(whole(run(&kernel, config)).unwrap(), "abc");
}

#[test]
fn ai_936_text_that_is_taken_back_is_never_seen() {
    for (hold, expect) in [
        (HoldPolicy::End, Ok("Hence")),
        (HoldPolicy::Tokens(4), Ok("Hence")),
        (HoldPolicy::Tokens(3), Err("bad-result")),
    ] {
        let (kernel, _) = steered(hold);
        let config = json!({"controller": "rewind", "controller_arg": "Hello|ence"});
        let text = whole(run(&kernel, config)).map_err(|error| error.reason().to_owned());
        assert_eq!(text.as_deref().map_err(String::as_str), expect, "{hold:?}");
    }
    // Without a steerer that announces backtracks nothing is held: each step has its chunk.
    let (kernel, _) = steered(HoldPolicy::End);
    let run = run(
        &kernel,
        json!({"controller": "dictate", "controller_arg": "abc"}),
    );
    let pieces: Vec<String> = block_on(run.try_collect()).unwrap();
    assert_eq!(pieces.concat(), "abc");
    assert!(pieces.len() >= 3, "{pieces:?}");
}

/// AI-824: tokens that were taken back are on no port.
#[test]
fn ai_936_the_port_of_tokens_has_what_was_committed() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = json!({"controller": "rewind", "controller_arg": "abc|z"});
    let ports = RequestedPorts::Only(vec![Port::TOKENS]);
    let run = kernel
        .run::<Chunk>("m", args! { prompt: "x", config: config })
        .wanting(ports.into());
    let chunks = whole(run).unwrap();
    let data: Vec<u8> = chunks
        .iter()
        .flat_map(|chunk| chunk.data.to_vec())
        .collect();
    let ids: Vec<u32> = data
        .as_chunks::<4>()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    assert_eq!(ids, [97, 122]);
}

#[test]
fn ai_932_a_controller_that_fails_is_an_error_with_its_reason() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = json!({"controller": "trap", "controller_arg": "ab"});
    assert_eq!(
        error(&kernel, config),
        ("controller-failed".into(), "trap".into())
    );
}

#[test]
fn ai_915_a_fork_that_fails_ends_its_choice_and_the_first_one_ends_the_call() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = json!({"controller": "fork", "controller_arg": "ab|cd|e!|f"});
    let all = choices(&kernel, &config);
    let written = |choice| {
        let (text, finish) = &all[&choice];
        (text.as_str(), finish.name())
    };
    assert_eq!(written(0), ("abcd", "controller"));
    assert_eq!(written(1), ("abe", "error"));
    assert_eq!(written(2), ("abf", "controller"));
    // The other choices are whole before the error of the first one ends the call.
    let config = json!({"controller": "fork", "controller_arg": "ab|c!|defg"});
    let mut run = kernel
        .run::<Chunk>("m", args! { prompt: "hello", config: config })
        .wanting(RequestedPorts::main().into());
    let mut second = String::new();
    let error = loop {
        match block_on(run.next()).unwrap() {
            Ok(chunk) if chunk.choice == 1 => second += &chunk.to_string(),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!((second.as_str(), error.reason()), ("abdefg", "trap"));
    assert!(block_on(run.next()).is_none(), "the error is the end");
}

#[test]
fn ai_932_length_and_eos_end_a_steered_choice_as_any_other() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = json!({"controller": "dictate", "controller_arg": "abcdef", "max_tokens": 3});
    let expect = ("abc".to_owned(), ChoiceFinish::Length);
    assert_eq!(choices(&kernel, &config), [(0, expect)].into());
}

/// KE-135: nobody asks a steerer for reports that are not read.
#[test]
fn ke_135_a_controller_is_watched_only_if_its_log_is_read() {
    let (kernel, source) = steered(HoldPolicy::End);
    let config = json!({"controller": "dictate", "controller_arg": "a"});
    whole(run(&kernel, config.clone())).unwrap();
    let run = kernel
        .run::<String>("m", args! { prompt: "x", config: config })
        .port("controller_log");
    whole(run).unwrap();
    let calls = source.calls();
    assert_eq!(
        calls,
        ["local admin dictate a", "local admin dictate a watched"]
    );
}

/// The log is one leaf for all choices, and has what was printed in order.
#[test]
fn ai_936_what_a_controller_prints_is_on_its_port() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = json!({"controller": "talk", "controller_arg": "ab"});
    let run = kernel.run::<String>("m", args! { prompt: "x", config: config.clone() });
    let log = whole(run.port("controller_log")).unwrap();
    assert_eq!(log, "thinking\nstill thinking\n");
    assert_eq!(one(&kernel, &config), "ab");
}

#[test]
fn ai_827_a_model_without_a_source_refuses() {
    let kernel = states("x");
    for config in [
        json!({"controller": "dictate"}),
        json!({"response_format": {"type": "json_object"}}),
    ] {
        assert_eq!(error(&kernel, config).0, "unimplemented");
    }
    assert!(!kernel.specs()[0].steers);
    assert!(steered(HoldPolicy::End).0.specs()[0].steers);
}

/// Faces that can take back text read the engine's events.
#[test]
fn ai_936_a_watched_request_has_every_event_as_it_is() {
    let (kernel, _) = steered(HoldPolicy::End);
    let config = GenerateConfig {
        controller: Some(ControllerChoice {
            id: "rewind".into(),
            arg: "abc|z".into(),
        }),
        watched: true,
        ..GenerateConfig::default()
    };
    let run = kernel.run::<Chunk>("m", args! { prompt: "x", config: config.into_chunk() });
    let (chunks, meta) = block_on(run.finish()).unwrap();
    assert!(chunks.iter().all(|chunk| chunk.data.is_empty()));
    let events: Vec<&EngineEvent> = chunks.iter().filter_map(Chunk::inner).collect();
    assert_eq!(events.len(), chunks.len() - 1, "the last has the metadata");
    let mut text = String::new();
    let mut backtracked = 0;
    for event in &events {
        if let EventKind::Tokens(tokens) = &event.kind {
            text.truncate(text.len() - tokens.withdrawn as usize);
            text.push_str(&tokens.text);
            backtracked += tokens.backtrack;
        }
    }
    assert_eq!((text.as_str(), backtracked), ("az", 2));
    assert_eq!(meta.finish[&0], ChoiceFinish::Controller);
    assert!(matches!(events.last().unwrap().kind, EventKind::Usage(_)));
}

/// A face in this process passes both as values.
#[test]
fn ev_602_a_typed_config_has_the_same_choices() {
    let (kernel, source) = steered(HoldPolicy::End);
    let config = GenerateConfig {
        constraint: Some(ConstraintChoice::new(ConstraintKind::Regex, "b+")),
        ..GenerateConfig::default()
    };
    let run = kernel.run::<String>("m", args! { prompt: "x", config: config.into_chunk() });
    assert_eq!(whole(run).unwrap(), "b+");
    assert_eq!(
        source.calls(),
        [r#"local admin sapwood:regex {"value":"b+"}"#]
    );
}

/// Notes what is charged, and allows so much of it.
#[derive(Debug)]
struct Account {
    charged: Mutex<Vec<u32>>,
    allowed: u32,
}

impl TokenCharge for Account {
    fn prefix_scope(&self) -> u64 {
        0
    }

    fn prompt(&self, tokens: u32) -> Result<()> {
        if tokens > self.allowed {
            return Err(Error::Denied { why: "poor".into() });
        }
        self.charged.lock().unwrap().push(tokens);
        Ok(())
    }

    fn output(&self, _: u32) {}
}

struct Charging(Arc<Account>);

impl Layer for Charging {
    fn call(&self, mut call: Call, next: Next) -> Chunks {
        call.own.insert(Arc::clone(&self.0) as Arc<dyn TokenCharge>);
        next.call(call)
    }
}

#[test]
fn ai_931_a_steerer_is_charged_before_it_is_opened() {
    const PROMPT: u32 = 23;
    for (config, allowed, expect, opened) in [
        (json!({}), 100, &[PROMPT][..], 0),
        (
            json!({"controller": "dictate", "controller_arg": "yes"}),
            100,
            &[STEER_TOKENS, PROMPT],
            1,
        ),
        (json!({"controller": "nobody"}), 100, &[STEER_TOKENS], 1),
        (json!({"controller": "nobody"}), STEER_TOKENS - 1, &[], 0),
    ] {
        let (kernel, source) = steered(HoldPolicy::End);
        let charged = Mutex::default();
        let account = Arc::new(Account { charged, allowed });
        kernel.layer(Charging(Arc::clone(&account)));
        let _ = block_on(run(&kernel, config.clone()).finish());
        assert_eq!(*account.charged.lock().unwrap(), expect, "{config}");
        assert_eq!(source.calls().len(), opened, "{config}");
    }
}
