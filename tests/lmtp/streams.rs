//! GENERATE and SCORE over a real engine.

use sapwood_engine::scripted;
use sapwood_tests::spawned;
use serde_json::{Value, json};

use super::{chatter, client, kernel, of_parrot, parrot, stream, tokens_and_end, with_config};

/// Prompt and further members of a GENERATE for the parrot; its tokens, and how it ends.
const GENERATED: &[(&str, &str, &str, &str)] = &[
    // LM-404: EOS is sent.
    ("[72,105]", "", "72 105 257", "stop"),
    // LM-602, LM-404: EOS as the last allowed token is a stop.
    ("[72,105]", r#","max_tokens":1"#, "72", "length"),
    ("[72,105]", r#","max_tokens":3"#, "72 105 257", "stop"),
    // LM-303: an empty prompt starts with BOS.
    ("[]", "", "257", "stop"),
    ("[null]", "", "257", "stop"),
    // LM-305: the bias is added first; unknown ids are ignored.
    (
        "[72,105]",
        r#","logit_bias":{"257":100,"100000":100}"#,
        "257",
        "stop",
    ),
    (
        "[72,72]",
        r#","logit_bias":{"72":-Infinity},"max_tokens":1"#,
        "0",
        "length",
    ),
    // LM-307: the token that completes a stop is sent, and the prompt is not matched.
    (
        "[72,101,108,108,111]",
        r#","stop":"l""#,
        "72 101 108",
        "stop",
    ),
    (
        "[72,101,108,108,111]",
        r#","stop":["lo","x"]"#,
        "72 101 108 108 111",
        "stop",
    ),
    (
        "[72,101,108,108,111]",
        r#","stop_tokens":[[108,108]]"#,
        "72 101 108 108",
        "stop",
    ),
    (
        "[72,101,108,108,111]",
        r#","stop_tokens":[101]"#,
        "72 101",
        "stop",
    ),
    (
        "[72,101,108]",
        r#","stop_tokens":[101],"min_tokens":3"#,
        "0",
        "stop",
    ),
    (
        "[7]",
        r#","ignore_eos":true,"max_tokens":3"#,
        "7 257 257",
        "length",
    ),
    // LM-321, LM-303, LM-304
    ("[300]", "", "", "invalid_value"),
    ("\"Hi\"", "", "", "invalid_type"),
    ("[1]", r#","max_tokens":0"#, "", "invalid_value"),
    ("[1]", r#","model":"nobody""#, "", "model_not_found"),
    ("[1]", r#","num_samples":2"#, "", "unsupported_operation"),
];

/// LM-303, LM-304, LM-305, LM-307, LM-321, LM-405, LM-602
#[tokio::test]
async fn lm_404_streams_send_their_tokens_and_end_once() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    for (index, (prompt, members, tokens, end)) in GENERATED.iter().enumerate() {
        let text = format!(
            r#"GENERATE {{"model":"parrot","prompt":{prompt},"stream_id":{index}{members}}}"#
        );
        socket.send_text(&text).await;
        let items = stream(&mut socket, index).await;
        let expect: Vec<u64> = tokens
            .split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect();
        let (reply, how) = tokens_and_end(&items);
        assert_eq!(how, *end, "{text}");
        // 0 stands for any token where only the number is known.
        if expect != [0] {
            assert_eq!(reply, expect, "{text}");
        }
        for item in items.iter().filter(|item| item.get("error").is_none()) {
            let top = item["top_logprobs"].as_object().unwrap();
            assert!(top.contains_key(&item["token"].to_string()), "{item}");
            assert!(item["logprob"].as_f64().unwrap() <= 0.0);
        }
    }
    assert_eq!(server.shared.metrics.lmtp.refused.get(), 5);
}

/// LM-312, LM-313
#[tokio::test]
async fn lm_311_a_score_has_one_item_for_each_token_and_no_alternatives() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    for (prompt, scored, count) in [
        ("[256,72]", "[105,33]", 2),
        ("[]", "[72,105,33]", 3),
        ("[]", "[72]", 1),
    ] {
        let text = format!(
            r#"SCORE {{"model":"parrot","prompt":{prompt},"scored":{scored},"stream_id":"s"}}"#
        );
        socket.send_text(&text).await;
        let items = stream(&mut socket, "s").await;
        assert_eq!(items.len(), count, "{text}");
        let tokens: Vec<Value> = items.iter().map(|item| item["token"].clone()).collect();
        assert_eq!(Value::from(tokens).to_string(), scored);
        assert!(items.iter().all(|item| item.get("top_logprobs").is_none()));
        assert_eq!(items[count - 1]["finish_reason"], json!("stop"));
        if prompt == "[]" {
            assert_eq!(items[0]["logprob"], json!(0.0));
        }
    }
    let wrong = r#"SCORE {"model":"parrot","prompt":[1],"scored":[],"stream_id":"s"}"#;
    socket.send_text(wrong).await;
    assert_eq!(
        tokens_and_end(&stream(&mut socket, "s").await).1,
        "invalid_value"
    );
}

#[tokio::test]
async fn lm_314_score_gives_the_log_probabilities_of_generate() {
    let config = scripted::Config {
        gap: 2.0,
        ..chatter()
    };
    let server = with_config(kernel("m", spawned(config)), Default::default()).await;
    let mut socket = client(&server).await;
    let ask = r#"GENERATE {"model":"m","prompt":[72,105],"stream_id":1,"max_tokens":20,"top_logprobs":4}"#;
    socket.send_text(ask).await;
    let generated = stream(&mut socket, 1).await;
    for item in &generated {
        // LM-413: the sampled token first, then the best ones; greedy sampling takes the best.
        let top: Vec<f64> = item["top_logprobs"]
            .as_object()
            .unwrap()
            .values()
            .map(|value| value.as_f64().unwrap())
            .collect();
        assert_eq!(top.len(), 4);
        assert!(top.windows(2).all(|pair| pair[0] >= pair[1]), "{item}");
    }
    let scored = tokens_and_end(&generated).0;
    let text =
        format!(r#"SCORE {{"model":"m","prompt":[72,105],"scored":{scored:?},"stream_id":2}}"#);
    socket.send_text(&text).await;
    let values = |items: &[Value]| -> Vec<f64> {
        items
            .iter()
            .map(|item| item["logprob"].as_f64().unwrap())
            .collect()
    };
    assert_eq!(values(&stream(&mut socket, 2).await), values(&generated));
}

#[tokio::test]
async fn lm_306_prompt_and_output_share_the_context() {
    let config = scripted::Config {
        context_tokens: 8,
        ..chatter()
    };
    let server = with_config(kernel("m", spawned(config)), Default::default()).await;
    let mut socket = client(&server).await;
    for (prompt, count, end) in [
        (8, 0, "context_length_exceeded"),
        (7, 1, "length"),
        (3, 5, "length"),
    ] {
        let prompt = vec![65; prompt];
        socket
            .send_text(&format!(
                r#"GENERATE {{"model":"m","prompt":{prompt:?},"stream_id":1}}"#
            ))
            .await;
        let (tokens, how) = tokens_and_end(&stream(&mut socket, 1).await);
        assert_eq!((tokens.len(), how.as_str()), (count, end));
    }
}

/// The output becomes part of the next prompt, as LMQL does it: nothing is computed twice.
#[tokio::test]
async fn lm_1308_a_growing_prompt_is_computed_once() {
    let engine = spawned(chatter());
    let server = with_config(kernel("m", engine.clone()), Default::default()).await;
    let mut socket = client(&server).await;
    let mut new = 0;
    for query in 0..4 {
        let mut prompt: Vec<u64> = (0..200).map(|at| 300 + query + at).collect();
        new += prompt.len();
        for _ in 0..5 {
            let text = format!(
                r#"GENERATE {{"model":"m","prompt":{prompt:?},"stream_id":1,"max_tokens":16}}"#
            );
            socket.send_text(&text).await;
            let (tokens, _) = tokens_and_end(&stream(&mut socket, 1).await);
            new += tokens.len();
            prompt.extend(tokens);
        }
    }
    let stats = engine.stats();
    let computed = stats.prompt_tokens.get() - stats.prefix_hits.get();
    let new = u64::try_from(new).unwrap();
    assert!(
        stats.prompt_tokens.get() > 3 * new,
        "prompts were sent again"
    );
    assert!(10 * computed <= 11 * new, "{computed} computed, {new} new");
}

/// LM-603
#[tokio::test]
async fn lm_605_each_stream_has_its_own_seed_and_parameters() {
    let config = scripted::Config {
        gap: 0.0,
        ..chatter()
    };
    let server = with_config(kernel("m", spawned(config)), Default::default()).await;
    let mut socket = client(&server).await;
    let members = [
        r#""temperature":1"#,
        r#""temperature":1"#,
        r#""temperature":1,"seed":7"#,
        r#""temperature":1,"seed":7"#,
        r#""temperature":1,"seed":-1"#,
        r#""temperature":0,"seed":7"#,
        r#""temperature":0,"seed":7"#,
        r#""temperature":1,"seed":7,"top_k":1"#,
    ];
    for (id, members) in members.iter().enumerate() {
        let text = format!(
            r#"GENERATE {{"model":"m","prompt":[1],"stream_id":{id},"max_tokens":12,{members}}}"#
        );
        socket.send_text(&text).await;
    }
    let mut reply = vec![Vec::new(); members.len()];
    let mut open = members.len();
    while open > 0 {
        for item in super::message(&mut socket).await.1 {
            let id = usize::try_from(item["stream_id"].as_u64().unwrap()).unwrap();
            reply[id].push(item["token"].as_u64().unwrap());
            open -= usize::from(!item["finish_reason"].is_null());
        }
    }
    assert!(reply.iter().all(|tokens| tokens.len() == 12));
    assert_ne!(reply[0], reply[1]);
    assert_eq!(reply[2], reply[3]);
    assert_ne!(reply[2], reply[4]);
    assert_eq!(reply[5], reply[6]);
    assert_eq!(reply[5], reply[7], "the best of one is the best");
}

/// LM-503: a failure of one request does not affect others.
#[tokio::test]
async fn lm_503_a_failing_stream_fails_alone() {
    use sapwood_engine::scripted::{Script, ScriptRule, ScriptStep};
    let rule = |pattern: &str, steps| ScriptRule {
        pattern: Some(pattern.into()),
        steps,
    };
    let config = scripted::Config {
        script: Script::Steps,
        rules: vec![
            rule(
                "P",
                vec![ScriptStep::Text("ab".into()), ScriptStep::Panic(true)],
            ),
            rule(
                "C",
                vec![
                    ScriptStep::Text("ab".into()),
                    ScriptStep::Cut(scripted::TransportCut::Close),
                ],
            ),
            rule("H", vec![ScriptStep::Text("hello".into())]),
        ],
        ..parrot()
    };
    let server = with_config(kernel("m", spawned(config)), Default::default()).await;
    let mut socket = client(&server).await;
    for (prompt, end, least) in [
        (80, "engine_error", 0),
        (67, "engine_error", 2),
        (72, "stop", 5),
    ] {
        socket
            .send_text(&format!(
                r#"GENERATE {{"model":"m","prompt":[{prompt}],"stream_id":1}}"#
            ))
            .await;
        let items = stream(&mut socket, 1).await;
        let (tokens, how) = tokens_and_end(&items);
        assert_eq!(how, end, "{prompt}");
        // LM-502: tokens before the failure are sent first.
        assert!(tokens.len() >= least, "{items:?}");
        if end != "stop" {
            assert_eq!(items.last().unwrap()["retryable"], json!(true));
        }
    }
}
