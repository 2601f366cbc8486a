//! What a model writes beside its answer: reasoning, and calls of tools.

use futures::{StreamExt, stream};
use sapwood_engine::scripted::{ScriptFinish, ToolCall};
use sapwood_kernel::{Call, Chunk, GenerateConfig, InputSpec, Mime, OutputSpec, Port, Spec, raw};
use serde_json::{Value, json};

use super::*;

const ONE: &str = "/v2/models/m/generate";
const STREAM: &str = "/v2/models/m/generate_stream";
const INFER: &str = "/v2/models/m/infer";
const TOOLS: &str =
    r#"[{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}]"#;

pub(super) fn thought() -> ScriptStep {
    ScriptStep::Reasoning("I look outside.".into())
}

pub(super) fn call() -> ScriptStep {
    ScriptStep::ToolCall(ToolCall {
        name: "weather".into(),
        arguments: json!({"city": "Bergen"}),
    })
}

/// A model that thinks before it answers.
async fn thinking() -> Running {
    playing(vec![thought(), ScriptStep::Text("It rains.".into())]).await
}

/// The body of a conversation with more members.
fn talk(members: &str) -> String {
    format!(r#"{{"messages":[{{"role":"user","content":"And?"}}]{members}}}"#)
}

fn joined(events: &[Value], output: &str) -> String {
    let texts = events.iter().filter_map(|event| event[output].as_str());
    texts.collect()
}

#[tokio::test]
async fn tr_501_reasoning_is_an_output_of_its_own() {
    let server = thinking().await;
    let answer = ask(&server, ONE, &talk("")).await;
    assert_eq!(
        answer.text(),
        r#"{"model_name":"m","model_version":"1","text_output":"It rains.","reasoning":"I look outside."}"#
    );
    let answer = ask(&server, ONE, &talk(r#","n":2"#)).await.json();
    assert_eq!(answer["text_output"], json!(["It rains.", "It rains."]));
    let twice = json!(["I look outside.", "I look outside."]);
    assert_eq!(answer["reasoning"], twice);
    // Not a conversation: nothing is taken apart.
    let answer = ask(&server, ONE, r#"{"text_input":"And?"}"#).await;
    assert_eq!(
        answer.text(),
        r#"{"model_name":"m","model_version":"1","text_output":"<think>\nI look outside.\n</think>\n\nIt rains."}"#
    );
}

/// Clients that know nothing of it see what they always saw.
#[tokio::test]
async fn tr_501_an_answer_without_reasoning_has_no_output_for_it() {
    let server = playing(vec![ScriptStep::Chunk("It rains.".into())]).await;
    let expect = r#"{"model_name":"m","model_version":"1","text_output":"It rains."}"#;
    for members in ["", &format!(r#","tools":{TOOLS}"#), r#","tools":[]"#] {
        let answer = ask(&server, ONE, &talk(members)).await;
        assert_eq!(answer.text(), expect, "{members}");
        let streamed = talk(&format!(r#"{members},"stream":true"#));
        let answer = ask(&server, STREAM, &streamed).await;
        assert_eq!(answer.text(), format!("data: {expect}\n\n"), "{members}");
    }
}

#[tokio::test]
async fn tr_406_reasoning_streams_before_the_answer() {
    let server = thinking().await;
    for more in ["", r#","return_num_output_tokens":true"#] {
        let body = talk(&format!(r#","stream":true{more}"#));
        let events = ask(&server, STREAM, &body).await.events();
        let answers = events
            .iter()
            .position(|event| event.get("reasoning").is_none());
        let (before, after) = events.split_at(answers.unwrap());
        assert!(before.len() > 1, "{events:?}");
        assert_eq!(joined(before, "reasoning"), "I look outside.");
        // A client that knows only the text finds one in each event.
        assert!(before.iter().all(|event| event["text_output"] == ""));
        assert_eq!(joined(after, "text_output"), "It rains.");
        assert!(after.iter().all(|event| event.get("reasoning").is_none()));
    }
}

#[tokio::test]
async fn tr_404_an_answer_that_ends_within_the_reasoning_has_what_there_is() {
    let server = thinking().await;
    // As many tokens as `<think>` and some of the text have: each byte is one.
    let body = talk(r#","max_tokens":14,"return_finish_reason":true"#);
    let answer = ask(&server, ONE, &body).await.json();
    assert_eq!(
        (&answer["text_output"], &answer["reasoning"]),
        (&json!(""), &json!("I look"))
    );
    assert_eq!(answer["finish_reason"], "length");
}

#[tokio::test]
async fn tr_1306_tools_of_a_conversation_are_called() {
    let server = playing(vec![
        ScriptStep::Text("Wait.".into()),
        call(),
        call(),
        ScriptStep::Finish(ScriptFinish::ToolCalls),
    ])
    .await;
    let asked = format!(r#","tools":{TOOLS},"return_finish_reason":true"#);
    let answer = ask(&server, ONE, &talk(&asked)).await.json();
    assert_eq!(answer["text_output"], "Wait.");
    assert_eq!(answer["finish_reason"], "tool_calls");
    let check = |list: &str| {
        let calls: Vec<Value> = serde_json::from_str(list).unwrap();
        let is_call = |call: &Value| {
            call["name"] == "weather" && call["arguments"] == json!({"city": "Bergen"})
        };
        assert!(calls.iter().all(is_call), "{list}");
        calls
            .into_iter()
            .map(|call| call["id"].to_string())
            .collect::<Vec<_>>()
    };
    let ids = check(answer["tool_calls"].as_str().unwrap());
    assert!(ids.len() == 2 && ids[0] != ids[1], "{ids:?}");
    let body = talk(&format!(r#"{asked},"stream":true"#));
    let events = ask(&server, STREAM, &body).await.events();
    let lists = events
        .iter()
        .filter_map(|event| event["tool_calls"].as_str());
    assert_eq!(lists.flat_map(check).count(), 2, "{events:?}");
    assert_eq!(events.last().unwrap()["finish_reason"], "tool_calls");
    // Without tools a call is text.
    let answer = ask(&server, ONE, &talk("")).await.json();
    let text = answer["text_output"].as_str().unwrap();
    assert!(text.contains("weather") && answer.get("tool_calls").is_none());
}

#[tokio::test]
async fn tr_1306_tools_and_template_arguments_need_a_conversation() {
    let server = thinking().await;
    for (body, part) in [
        (
            format!(r#"{{"text_input":"x","tools":{TOOLS}}}"#),
            "'tools' goes with 'messages'",
        ),
        (
            r#"{"text_input":"x","template_args":{"enable_thinking":false}}"#.into(),
            "'template_args' goes with 'messages'",
        ),
        (talk(r#","tools":{"name":"weather"}"#), "tools"),
        (talk(r#","tools":[{"type":"function"}]"#), "tools"),
        (talk(r##","tools":"[""##), "tools"),
        (talk(r#","template_args":[1]"#), "must be a JSON object"),
    ] {
        let answer = ask(&server, ONE, &body).await;
        assert_eq!(answer.summary().0, 400, "{body}");
        assert!(error(&answer).contains(part), "{body}: {}", error(&answer));
    }
    // Empty values are none.
    for members in [r#""tools":[]"#, r#""tools":"""#, r#""template_args":{}"#] {
        let body = format!(r#"{{"text_input":"x",{members}}}"#);
        assert_eq!(ask(&server, ONE, &body).await.summary().0, 200, "{body}");
    }
}

/// A request that names an output gets it, empty or not; one that names others does not.
#[tokio::test]
async fn tr_801_infer_has_the_outputs_that_it_names() {
    let inputs = |text: &str| json!([{"name": "messages", "shape": [1], "datatype": "BYTES", "data": [text]}]);
    let messages = r#"[{"role":"user","content":"And?"}]"#;
    let named = |names: &[&str]| {
        let outputs: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
        json!({"inputs": inputs(messages), "outputs": outputs}).to_string()
    };
    let outputs = |answer: Answer| {
        let answer = answer.json();
        let outputs = answer["outputs"].as_array().unwrap().iter();
        let outputs = outputs.map(|it| (it["name"].clone(), it["data"].clone()));
        outputs.collect::<Vec<_>>()
    };
    let thinking = thinking().await;
    let reasoning = (json!("reasoning"), json!(["I look outside."]));
    let text = (json!("text_output"), json!(["It rains."]));
    for (names, expect) in [
        (&["reasoning"][..], vec![reasoning.clone()]),
        (&["text_output"], vec![text.clone()]),
    ] {
        let answer = ask(&thinking, INFER, &named(names)).await;
        assert_eq!(outputs(answer), expect);
    }
    let body = json!({"inputs": inputs(messages)}).to_string();
    assert_eq!(
        outputs(ask(&thinking, INFER, &body).await),
        [text, reasoning]
    );
    let plain = playing(vec![ScriptStep::Text("x".into())]).await;
    let answer = ask(
        &plain,
        INFER,
        &named(&["text_output", "reasoning", "tool_calls"]),
    )
    .await;
    let empty = |name: &str| (json!(name), json!([""]));
    let expect = [
        (json!("text_output"), json!(["x"])),
        empty("reasoning"),
        empty("tool_calls"),
    ];
    assert_eq!(outputs(answer), expect);
}

/// Rows are told apart by their position.
#[tokio::test]
async fn tr_1307_rows_without_reasoning_have_an_empty_one_beside_others() {
    let model = ModelOptions {
        signature: Some(Signature {
            max_batch_size: 3,
            ..Signature::union()
        }),
        template_raw_prompts: true,
        ..ModelOptions::default()
    };
    let config = Config {
        models: [("m".to_owned(), model)].into(),
        ..Config::default()
    };
    let mut script = steps(vec![ScriptStep::Text("No.".into())]);
    let thinks = ScriptRule {
        pattern: Some("why".into()),
        steps: vec![thought(), ScriptStep::Text("So.".into())],
    };
    script.rules.insert(0, thinks);
    let server = Running::generating(kernel(&[("m", script)]), config).await;
    let answer = ask(&server, ONE, r#"{"text_input":["x","why","y"]}"#)
        .await
        .json();
    assert_eq!(answer["text_output"], json!(["No.", "So.", "No."]));
    assert_eq!(answer["reasoning"], json!(["", "I look outside.", ""]));
    let answer = ask(&server, ONE, r#"{"text_input":["x","y"]}"#)
        .await
        .json();
    assert!(answer.get("reasoning").is_none());
}

#[tokio::test]
async fn tr_1306_template_arguments_and_tools_reach_the_model() {
    let mut spec = Spec::new("m", "reports what it is given");
    let inputs = ["messages", "config", "tools"];
    spec.inputs = inputs.map(|name| InputSpec::new(name).optional()).into();
    spec.outputs = vec![OutputSpec::new(Port::MAIN, Mime::TEXT)];
    spec.model = true;
    let reports = raw(spec, |call: Call| {
        let text = async move {
            let mut config = call.read("config")?;
            let first = config.next().await.unwrap()?;
            let config = first.inner::<GenerateConfig>().unwrap();
            let tools = call.inputs.get("tools").unwrap().whole().await?;
            let tools = String::from_utf8_lossy(&tools).into_owned();
            let args = config.template_args.clone().unwrap();
            Ok(Chunk::text(format!("{args} {tools}")))
        };
        stream::once(text).boxed()
    });
    let kernel = Kernel::new();
    kernel.add(reports).unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let members = format!(r#","template_args":{{"enable_thinking":false}},"tools":{TOOLS}"#);
    let answer = ask(&server, ONE, &talk(&members)).await.json();
    let expect = format!(r#"{{"enable_thinking":false}} {TOOLS}"#);
    assert_eq!(answer["text_output"], *expect);
}
