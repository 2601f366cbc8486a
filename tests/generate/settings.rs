//! Effects of inputs and parameters on the response (sections 3 and 4).

use sapwood_engine::scripted::{self, Script};
use sapwood_server::faces::generate::{Config, ModelOptions};
use sapwood_tests::Running;
use serde_json::{Value, json};

use super::{ask, demo, error, kernel, script};

async fn generate(server: &Running, body: Value) -> Value {
    ask(server, "/v2/models/demo/generate", &body.to_string())
        .await
        .json()
}

async fn events(server: &Running, body: Value) -> Vec<Value> {
    ask(server, "/v2/models/demo/generate_stream", &body.to_string())
        .await
        .events()
}

/// TR-402
#[tokio::test]
async fn tr_401_max_tokens_and_stop_words_work_as_inputs_parameters_and_sampling_fields() {
    let server = demo().await;
    for body in [
        json!({"text_input": "one two three", "max_tokens": 2}),
        json!({"text_input": ["one two three"], "max_tokens": "2"}),
        json!({"text_input": "one two three", "max_new_tokens": 2}),
        json!({"text_input": "one two three", "parameters": {"max_tokens": 2}}),
        json!({"text_input": "one two three", "sampling_parameters": "{\"max_tokens\": 2}"}),
        json!({"text_input": "one two three", "max_tokens": 50, "max_completion_tokens": 2}),
        json!({"text_input": "one two three", "stop_words": [" three"]}),
        json!({"text_input": "one two three", "stop": " three"}),
    ] {
        let answer = generate(&server, body.clone()).await;
        assert_eq!(answer["text_output"], "one two", "{body}");
    }
}

#[tokio::test]
async fn tr_402_control_tokens_are_text_on_request() {
    let server = demo().await;
    for (skip, reply) in [(true, "one"), (false, "one</s></s>")] {
        let body = json!({"text_input": "one", "ignore_eos": true, "max_tokens": 3, "skip_special_tokens": skip});
        assert_eq!(generate(&server, body).await["text_output"], reply);
    }
}

#[tokio::test]
async fn tr_401_the_output_has_no_bad_words_and_empty_ones_are_ignored() {
    let server = demo().await;
    let prompt = "one two three two";
    for body in [
        json!({"text_input": prompt, "bad_words": ["", " two"]}),
        json!({"text_input": prompt, "bad_words": "wo"}),
        json!({"text_input": prompt, "bad_words": "e two t"}),
        json!({"text_input": prompt, "parameters": {"bad_words": " two"}}),
        json!({"text_input": prompt, "sampling_parameters": "{\"bad_words\": [\"tw\"]}"}),
        json!({"text_input": prompt, "bad_words": [" two"], "temperature": 3, "n": 4}),
    ] {
        let answer = generate(&server, body.clone()).await;
        let texts = answer["text_output"].to_string();
        assert!(
            texts.contains("one") && !texts.contains("e two t"),
            "{body}: {texts}"
        );
        let mut streamed = body;
        streamed["stream"] = true.into();
        let events = events(&server, streamed).await;
        let texts = events
            .iter()
            .filter_map(|event| event["text_output"].as_str());
        assert!(!texts.collect::<String>().contains("e two t"));
    }
    let answer = generate(&server, json!({"text_input": prompt, "bad_words": [""]})).await;
    assert_eq!(answer["text_output"], prompt);
    // Bad words that leave no token are the request's own error, and its message names the cause.
    let body = json!({"text_input": "aa", "bad_words": ["a"], "sampling_parameters": ""});
    let mut body = body;
    let all: serde_json::Map<_, _> = (0..1_024)
        .filter(|id| *id != 97)
        .map(|id| (id.to_string(), json!(-100)))
        .collect();
    body["sampling_parameters"] = json!({"logit_bias": all}).to_string().into();
    let small = scripted::Config {
        vocab: 1_024,
        ..script(Script::Words)
    };
    let small = Running::generating(kernel(&[("demo", small)]), Config::default()).await;
    let answer = ask(&small, "/v2/models/demo/generate", &body.to_string()).await;
    assert_eq!(answer.summary().0, 400);
    assert_eq!(
        error(&answer),
        "logit_bias, bad_words and min_tokens together allow no token"
    );
}

/// A small request cannot make a response of a hundred megabytes; a stream buffers none of it.
#[tokio::test]
async fn d_47_a_single_response_has_at_most_65536_log_probabilities() {
    let server = demo().await;
    let asking = |choices: u32| {
        let settings = json!({"n": choices, "logprobs": 20, "max_tokens": 1_000}).to_string();
        json!({"text_input": "one ".repeat(500), "return_logprobs": true, "sampling_parameters": settings})
    };
    let answer = generate(&server, asking(1)).await;
    let logprobs: Value = serde_json::from_str(answer["logprobs"].as_str().unwrap()).unwrap();
    let of_one: usize = logprobs
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_object().unwrap().len())
        .sum();
    assert!((6_000..60_000).contains(&of_one), "{of_one}");
    let many = asking(16);
    let answer = ask(&server, "/v2/models/demo/generate", &many.to_string()).await;
    assert_eq!(answer.summary().0, 400);
    assert!(error(&answer).contains("at most 65536 log-probabilities"));
}

/// TR-407
#[tokio::test]
async fn tr_401_additional_outputs_are_returned_on_request() {
    let server = demo().await;
    let all = json!({"text_input": "one two", "return_finish_reason": true, "return_num_input_tokens": true,
        "return_num_output_tokens": true, "return_cumulative_logprob": true, "return_logprobs": true, "logprobs": 1,
        "return_log_probs": true});
    let answer = generate(&server, all.clone()).await;
    assert_eq!(answer["finish_reason"], "stop");
    let tokens = answer["num_output_tokens"].as_u64().unwrap();
    assert!(answer["num_input_tokens"].as_u64().unwrap() > 0 && tokens >= 2);
    let logprobs: Value = serde_json::from_str(answer["logprobs"].as_str().unwrap()).unwrap();
    let list = logprobs.as_array().unwrap();
    assert_eq!(list.len() as u64, tokens);
    let first = list[0].as_object().unwrap().values().next().unwrap();
    assert_eq!(
        (&first["rank"], &first["decoded_token"]),
        (&json!(1), &json!("one"))
    );
    assert_eq!(
        answer["output_log_probs"].as_array().unwrap().len() as u64,
        tokens
    );
    assert!(answer["cumulative_logprob"].is_f64() && answer["cum_log_probs"].is_f64());

    let mut streamed = all;
    streamed["stream"] = true.into();
    let events = events(&server, streamed).await;
    let last = events.last().unwrap();
    assert_eq!(
        (&last["finish_reason"], &last["num_input_tokens"]),
        (&json!("stop"), &answer["num_input_tokens"])
    );
    assert!(
        events[..events.len() - 1]
            .iter()
            .all(|event| event["finish_reason"] == "None")
    );
    let sum: u64 = events
        .iter()
        .map(|event| event["num_output_tokens"].as_u64().unwrap())
        .sum();
    assert_eq!(sum, tokens);
    let text: String = events
        .iter()
        .map(|event| event["text_output"].as_str().unwrap())
        .collect();
    assert_eq!(text, "one two");
    // Nothing is returned that was not requested.
    let bare = generate(&server, json!({"text_input": "one"})).await;
    assert_eq!(
        bare,
        json!({"model_name": "demo", "model_version": "1", "text_output": "one"})
    );
}

#[tokio::test]
async fn tr_407_choices_are_elements_in_their_order() {
    let wander = scripted::Config {
        gap: 0.0,
        ..script(Script::Tokens)
    };
    let server = Running::generating(kernel(&[("demo", wander)]), Config::default()).await;
    let ask = |stream: bool| json!({"text_input": "x", "n": 3, "max_tokens": 4, "seed": 1, "stream": stream});
    let whole = generate(&server, ask(false)).await;
    let whole = whole["text_output"].as_array().unwrap();
    assert_eq!(whole.len(), 3);
    let mut texts = vec![String::new(); 3];
    for event in events(&server, ask(true)).await {
        let pieces = event["text_output"].as_array().unwrap().clone();
        for (text, piece) in texts.iter_mut().zip(pieces) {
            text.push_str(piece.as_str().unwrap());
        }
    }
    assert_eq!(json!(texts), json!(whole));
    assert_eq!(
        *whole,
        generate(&server, ask(false)).await["text_output"]
            .as_array()
            .unwrap()
            .clone()
    );
}

#[tokio::test]
async fn tr_405_the_prompt_precedes_the_output_only_on_request() {
    let server = demo().await;
    let prompt = |exclude| json!({"text_input": "one", "exclude_input_in_output": exclude});
    assert_eq!(generate(&server, prompt(true)).await["text_output"], "one");
    assert_eq!(
        generate(&server, prompt(false)).await["text_output"],
        "oneone"
    );
    let one = events(&server, prompt(false)).await;
    assert_eq!(one[0]["text_output"], "oneone");
    let model = ModelOptions {
        prepend_prompt_default: true,
        ..ModelOptions::default()
    };
    let config = Config {
        models: [("demo".to_owned(), model)].into(),
        ..Config::default()
    };
    let server = Running::generating(kernel(&[("demo", script(Script::Words))]), config).await;
    assert_eq!(
        generate(&server, json!({"text_input": "one"})).await["text_output"],
        "oneone"
    );
    assert_eq!(generate(&server, prompt(true)).await["text_output"], "one");
    let streamed = events(&server, json!({"text_input": "one", "stream": true})).await;
    assert_eq!(streamed[0]["text_output"], "one");
}

#[tokio::test]
async fn tr_408_a_prompt_that_is_too_long_is_refused_with_its_length_and_the_limit() {
    let small = scripted::Config {
        context_tokens: 16,
        ..script(Script::Echo)
    };
    let server = Running::generating(kernel(&[("demo", small)]), Config::default()).await;
    // One token for each byte, and BOS (D-23).
    for (bytes, expect) in [
        (14, None),
        (
            15,
            Some("prompt of 16 tokens exceeds the model's context of 16 tokens"),
        ),
    ] {
        let body = json!({"text_input": "x".repeat(bytes)}).to_string();
        for tail in ["generate", "generate_stream"] {
            let answer = ask(&server, &format!("/v2/models/demo/{tail}"), &body).await;
            match expect {
                None => assert_eq!(answer.summary().0, 200),
                Some(text) => {
                    assert_eq!(
                        (answer.summary().0, answer.summary().1.as_str()),
                        (400, "application/json")
                    );
                    assert_eq!(error(&answer), text);
                }
            }
        }
    }
    let answer = generate(&server, json!({"text_input": "x", "max_tokens": 1_000_000})).await;
    assert_eq!(answer["text_output"], "x");
}

/// TR-307, D-24
#[tokio::test]
async fn tr_1306_messages_get_the_chat_template_and_raw_prompts_only_by_a_model_option() {
    let server = demo().await;
    let messages = json!({"messages": [{"role": "user", "content": "hello there"}], "mystery": 1});
    assert_eq!(
        generate(&server, messages).await["text_output"],
        "hello there"
    );
    assert_eq!(server.shared.metrics.unknown_parameters.get(), 1);
    let both = json!({"messages": [{"role": "user", "content": "a"}], "text_input": "b"});
    let both = ask(&server, "/v2/models/demo/generate", &both.to_string()).await;
    assert_eq!(
        (both.summary().0, error(&both).as_str()),
        (400, "give either 'text_input' or 'messages', not both")
    );
    let count = json!({"text_input": "hello", "return_num_input_tokens": true});
    let raw = generate(&server, count.clone()).await["num_input_tokens"].as_u64();
    let model = ModelOptions {
        template_raw_prompts: true,
        strict_parameters: true,
        ..ModelOptions::default()
    };
    let config = Config {
        models: [("demo".to_owned(), model)].into(),
        ..Config::default()
    };
    let server = Running::generating(kernel(&[("demo", script(Script::Words))]), config).await;
    let templated = generate(&server, count).await["num_input_tokens"].as_u64();
    assert!(raw < templated);
    let strict = ask(
        &server,
        "/v2/models/demo/generate",
        r#"{"text_input":"a","mystery":1}"#,
    )
    .await;
    assert_eq!(
        (strict.summary().0, error(&strict).as_str()),
        (400, "unknown parameter 'mystery' for model 'demo'")
    );
}
