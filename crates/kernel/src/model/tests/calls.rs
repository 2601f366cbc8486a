//! Tests of the port `events`, and of what readers see of calls that break off and of control tokens.

use futures::stream;
use sapwood_engine::api::{
    ChatRequest, ChoiceEnd, EngineEvent, EventKind, FinishReason, MARK_CLOSE, MARK_OPEN, StopCause,
    TokenUsage, Tokens,
};

use super::*;
use crate::delta::{Delta, ToolCallRecord};
use crate::model::output_parser::fuzz::ControlNames;

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "add"}}])
}

/// KE-307: everything in order, with the arguments of calls as they come; the whole is that of the other ports.
#[test]
fn ke_307_the_port_events_has_the_deltas_in_order() {
    let kernel = steps(json!([
        {"reasoning": "hm"},
        {"text": "Let me see. "},
        {"tool_call": {"name": "add", "arguments": {"a": 1}}},
        {"finish": "tool_calls"},
    ]));
    let run = kernel
        .run::<Json<Delta>>("m", args! { prompt: "x", tools: tools() })
        .port("events");
    let deltas: Vec<Delta> = whole(run).unwrap();
    let (mut text, mut json_text, mut pieces, mut calls) =
        (String::new(), String::new(), 0, Vec::new());
    let mut kinds = Vec::new();
    for delta in &deltas {
        let kind = match delta {
            Delta::Text { text: more, .. } => {
                text.push_str(more);
                "text"
            }
            Delta::Reasoning { .. } => "reasoning",
            Delta::ToolCall {
                index, name, id, ..
            } => {
                assert_eq!((*index, name.as_str()), (0, "add"));
                assert!(id.starts_with("call_"), "{id}");
                "call"
            }
            Delta::ToolArgs { json, .. } => {
                json_text.push_str(json);
                pieces += 1;
                "args"
            }
            Delta::ToolReady { call, .. } => {
                calls.push(call.clone());
                "ready"
            }
            Delta::Finish { reason, .. } => {
                assert_eq!(reason, "tool_calls");
                "finish"
            }
            other => panic!("{other:?}"),
        };
        if kinds.last() != Some(&kind) {
            kinds.push(kind);
        }
    }
    assert_eq!(
        kinds,
        ["reasoning", "text", "call", "args", "ready", "finish"]
    );
    assert_eq!(
        (text.as_str(), json_text.as_str()),
        ("Let me see. ", "{\"a\":1}")
    );
    assert!(
        pieces > 3,
        "as they come, and the model has a token for each byte: {pieces}"
    );
    let run = kernel
        .run::<Json<ToolCallRecord>>("m", args! { prompt: "x", tools: tools() })
        .port("tool_calls");
    let call = whole(run).unwrap().remove(0);
    let ids = |call: &ToolCallRecord| call.id.splitn(4, '_').nth(3).map(str::to_owned);
    assert_eq!(
        (&call.name, &call.arguments),
        (&calls[0].name, &calls[0].arguments)
    );
    assert_eq!(ids(&call), ids(&calls[0]));
}

/// A caller of all ports, and of others, gets no second copy.
#[test]
fn ke_307_events_come_only_to_those_who_name_them() {
    let kernel = states("Hi");
    let chunks = whole(kernel.run::<Chunk>("m", args! { prompt: "x" })).unwrap();
    assert!(chunks.iter().all(|chunk| chunk.port != *"events"));
}

/// A call that breaks off: its source is text, and readers of deltas are told.
#[test]
fn ke_307_a_broken_call_is_no_call() {
    let text = "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1";
    let kernel = states(text);
    let call = || args! { prompt: "x", tools: tools() };
    let (seen, meta) = block_on(kernel.run::<String>("m", call()).finish()).unwrap();
    assert_eq!(
        (seen.as_str(), &meta.finish[&0]),
        (text, &ChoiceFinish::Stop)
    );
    let deltas = whole(kernel.run::<Json<Delta>>("m", call()).port("events")).unwrap();
    let last = deltas.iter().rev().nth(1).cloned();
    let expect = Delta::ToolBroken {
        turn: 0,
        choice: 0,
        index: 0,
        text: text.to_owned(),
    };
    assert_eq!(last, Some(expect));
    let texts = deltas
        .iter()
        .filter(|delta| matches!(delta, Delta::Text { .. }));
    assert_eq!(texts.count(), 0, "its text comes with the end of the call");
}

/// A caller gets the numbers that the model wrote, on each port: a float has not all digits of an amount.
#[test]
fn the_numbers_of_arguments_keep_their_digits() {
    let arguments = "{\"wei\": 123456789012345678901,\n \"share\": 0.1234567890123456789}";
    let text = format!("<tool_call>{{\"name\": \"add\", \"arguments\": {arguments}}}</tool_call>");
    let kernel = states(&text);
    let call = || args! { prompt: "x", tools: tools() };
    let expect = r#"{"wei":123456789012345678901,"share":0.1234567890123456789}"#;
    let lines = whole(kernel.run::<String>("m", call()).port("tool_calls")).unwrap();
    assert!(
        lines.ends_with(&format!("\"arguments\":{expect}}}\n")),
        "{lines}"
    );
    assert_eq!(lines.lines().count(), 1, "{lines}");
    let records = whole(
        kernel
            .run::<Json<ToolCallRecord>>("m", call())
            .port("tool_calls"),
    );
    assert_eq!(records.unwrap()[0].arguments.as_str(), expect);
    let deltas = whole(kernel.run::<Json<Delta>>("m", call()).port("events")).unwrap();
    let ready = deltas.iter().find_map(|delta| match delta {
        Delta::ToolReady { call, .. } => Some(call.arguments.as_str()),
        _ => None,
    });
    assert_eq!(ready, Some(expect));
}

/// The chunks of an answer whose vocabulary has the markers of its family as control tokens.
fn answer(template: &str, names: &[&'static str], text: &str) -> Vec<Chunk> {
    let end = ChoiceEnd {
        reason: FinishReason::Stop,
        stop: None,
    };
    answer_until(template, names, text, end)
}

fn answer_until(template: &str, names: &[&'static str], text: &str, end: ChoiceEnd) -> Vec<Chunk> {
    let vocabulary = ControlNames {
        names: names.to_vec(),
        template: Some(template.to_owned()),
    };
    let format = Arc::new(OutputFormat::new(OutputParsers::default(), &vocabulary));
    let declared = Some(Arc::new(DeclaredTools::of(&tools())));
    let asked = SubmittedInfo {
        model: "m".into(),
        vocabulary: Arc::new(vocabulary),
        want: crate::want::Want {
            inner: true,
            ..RequestedPorts::All.into()
        },
        call: crate::call::CallId::next(),
        choices: 1,
        tree: false,
        watched: false,
        hold: None,
        logprobs: false,
        output: OutputSettings::of_chat(format, declared, &ChatRequest::default()),
        prompt_tokens: 1,
        seeded: false,
        began: Instant::now(),
        token_charge: None,
        observer: None,
    };
    let event = |kind| {
        Ok(AnswerEvent::Event(EngineEvent {
            step: 0,
            choice: 0,
            kind,
        }))
    };
    let tokens = Tokens {
        text: text.into(),
        ..Tokens::default()
    };
    let events = [
        event(EventKind::Tokens(tokens)),
        event(EventKind::Finish(end)),
        event(EventKind::Usage(TokenUsage::default())),
    ];
    let chunks = AnswerChunks::new(asked, stream::iter(events));
    block_on(chunks.try_collect::<Vec<Chunk>>()).unwrap()
}

/// A model that is cut off in its reasoning has made no call, although it drafted one.
#[test]
fn a_draft_of_a_call_is_a_call_only_if_the_model_stopped_there() {
    let text = "<think>hm\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let stop = |stop| (FinishReason::Stop, stop);
    for ((reason, stop), calls) in [
        (stop(None), 1),
        (stop(Some(StopCause::Tokens(vec![2]))), 1),
        (stop(Some(StopCause::Text("\n\n".to_owned()))), 0),
        ((FinishReason::Length, None), 0),
        ((FinishReason::Cancelled, None), 0),
        ((FinishReason::Controller, None), 0),
        ((FinishReason::Fuel, None), 0),
    ] {
        let end = ChoiceEnd { reason, stop };
        let chunks = answer_until("<tool_call>", &[], text, end.clone());
        let found = chunks.iter().filter(|chunk| chunk.port == *"tool_calls");
        assert_eq!(found.count(), calls, "{end:?}");
        let thought = chunks.iter().filter(|chunk| chunk.port == *"reasoning");
        let thought: String = thought.map(ToString::to_string).collect();
        assert_eq!(
            thought.contains("<tool_call>"),
            calls == 0,
            "{end:?}: {thought}"
        );
    }
}

/// Control tokens are for the parser: no reader gets to see their names, in `inner` neither.
#[test]
fn d_10_no_reader_sees_a_control_token() {
    let token = |name: &str| format!("{MARK_OPEN}{name}{MARK_CLOSE}");
    let (call, arguments) = (token("[TOOL_CALLS]"), token("[ARGS]"));
    let text = format!("a{arguments}b{call}add[ARGS]{call}add{arguments}{{\"a\": 1}}");
    let chunks = answer("[TOOL_CALLS]", &["[TOOL_CALLS]", "[ARGS]"], &text);
    let port = |port: &str| -> String {
        let chunks = chunks.iter().filter(|chunk| chunk.port == *port);
        chunks.map(ToString::to_string).collect()
    };
    assert_eq!(port(""), "abadd[ARGS]", "and the same letters stay text");
    let made: ToolCallRecord = serde_json::from_str(&port("tool_calls")).unwrap();
    assert_eq!(
        (made.name.as_str(), made.arguments.as_str()),
        ("add", r#"{"a":1}"#)
    );
    // Templates of Mistral take no other ids.
    assert!(
        made.id.len() == 9 && made.id.bytes().all(|byte| byte.is_ascii_alphanumeric()),
        "{}",
        made.id
    );
    let inner = chunks.iter().filter_map(|chunk| chunk.inner::<Tokens>());
    let inner: String = inner.map(|tokens| tokens.text.to_string()).collect();
    assert_eq!(inner, "abadd[ARGS]add{\"a\": 1}");
}

/// The id that a model gives its call comes back to its template.
#[test]
fn the_id_of_a_call_is_the_models_own_if_it_gives_one() {
    let one = |id: &str| {
        format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>")
    };
    let text = format!(
        "<|tool_calls_section_begin|>{}{}{}<|tool_calls_section_end|>",
        one("functions.add:0"),
        one("functions.add:0"),
        one("functions.add:1"),
    );
    let chunks = answer("<|tool_calls_section_begin|>", &[], &text);
    let lines = chunks.iter().filter(|chunk| chunk.port == *"tool_calls");
    let calls = lines.map(|chunk| serde_json::from_slice::<ToolCallRecord>(&chunk.data).unwrap());
    let ids: Vec<String> = calls.map(|call| call.id).collect();
    assert_eq!(
        (ids[0].as_str(), ids[2].as_str()),
        ("functions.add:0", "functions.add:1")
    );
    assert!(
        ids[1].starts_with("call_"),
        "of two with one id, clients would lose one: {}",
        ids[1]
    );
}
