//! Additional outputs in every combination, as the test suite of vLLM's backend asks for them (TR-401, D-55).

use std::fmt::Write;

use serde_json::Value;

use super::*;

const TOKENS: usize = 6;

/// What one request asks for: absent, `true` or `false`.
#[derive(Clone, Copy, Debug)]
struct Asked {
    stream: bool,
    finish: Option<bool>,
    cumulative: Option<bool>,
    alternatives: Option<u64>,
    logprobs: Option<bool>,
    input: Option<bool>,
    output: Option<bool>,
}

fn all() -> impl Iterator<Item = Asked> {
    let three = [None, Some(true), Some(false)];
    let flags = move |mut number: usize| {
        let mut next = || {
            let flag = three[number % 3];
            number /= 3;
            flag
        };
        [next(), next(), next(), next(), next()]
    };
    let combined = move |number: usize| {
        let [finish, cumulative, logprobs, input, output] = flags(number / 6);
        Asked {
            stream: number.is_multiple_of(2),
            alternatives: [None, Some(0), Some(2)][number / 2 % 3],
            finish,
            cumulative,
            logprobs,
            input,
            output,
        }
    };
    (0..6 * 243).map(combined)
}

fn message(asked: &Asked) -> ModelInferRequest {
    let mut message = prompt("m", "7", "In this example,", false);
    let mut add = |name: &str, datatype: &str, raw: Vec<u8>| {
        message.inputs.push(tensor(name, datatype, &[1]));
        message.raw_input_contents.push(raw.into());
    };
    add("stream", "BOOL", vec![u8::from(asked.stream)]);
    let mut sampling = format!(r#"{{"temperature":"0","top_p":"1","max_tokens":{TOKENS}"#);
    if let Some(alternatives) = asked.alternatives {
        write!(sampling, r#","logprobs":{alternatives}"#).unwrap();
    }
    sampling.push('}');
    add("sampling_parameters", "BYTES", bytes(&sampling));
    for (name, flag) in [
        ("return_finish_reason", asked.finish),
        ("return_cumulative_logprob", asked.cumulative),
        ("return_logprobs", asked.logprobs),
        ("return_num_input_tokens", asked.input),
        ("return_num_output_tokens", asked.output),
    ] {
        if let Some(flag) = flag {
            add(name, "BOOL", vec![u8::from(flag)]);
        }
    }
    message
}

/// The raw bytes of an output; its text without the length prefix.
fn output<'a>(message: &'a ModelInferResponse, name: &str) -> Option<&'a [u8]> {
    let slot = message
        .outputs
        .iter()
        .position(|output| output.name == name)?;
    let raw = &message.raw_output_contents[slot];
    Some(match &*message.outputs[slot].datatype {
        "BYTES" => &raw[4..],
        _ => raw,
    })
}

fn number(raw: &[u8]) -> u32 {
    u32::from_le_bytes(raw.try_into().unwrap())
}

/// The tokens of a response with their alternatives; the text is that of the best ones.
fn check_logprobs(received: &Value, alternatives: usize, text: &str) -> usize {
    let received = received.as_array().unwrap();
    let mut best = String::new();
    for token in received {
        let token = token.as_object().unwrap();
        assert!((1..=alternatives + 1).contains(&token.len()), "{token:?}");
        let mut first = token.values().filter(|entry| entry["rank"] == 1);
        best += first.next().expect("a best one")["decoded_token"]
            .as_str()
            .unwrap();
        assert!(first.next().is_none());
        for entry in token.values() {
            assert!(
                entry["logprob"].is_f64() && entry["rank"].is_u64(),
                "{entry}"
            );
        }
    }
    assert_eq!(best, text);
    received.len()
}

fn check(asked: &Asked, responses: &[ModelInferResponse]) {
    let (mut text, mut cumulative, mut tokens) = (String::new(), 0.0, 0);
    for (at, response) in responses.iter().enumerate() {
        let has = |name: &str, flag: Option<bool>| {
            let raw = output(response, name);
            assert_eq!(raw.is_some(), flag == Some(true), "{name}: {asked:?}");
            raw
        };
        let reply = output(response, "text_output").unwrap();
        let reply = std::str::from_utf8(reply).unwrap();
        text += reply;
        if let Some(reason) = has("finish_reason", asked.finish) {
            let is_last = at + 1 == responses.len();
            let expect: &[u8] = if is_last { b"length" } else { b"None" };
            assert_eq!(reason, expect, "{asked:?}: no event of its own for the end");
        }
        if let Some(raw) = has("cumulative_logprob", asked.cumulative) {
            let now = f32::from_le_bytes(raw.try_into().unwrap());
            assert_ne!(now, cumulative, "{asked:?}");
            cumulative = now;
        }
        let count = has("num_output_tokens", asked.output).map(number);
        assert_ne!(count, Some(0), "{asked:?}");
        tokens += count.unwrap_or(0) as usize;
        if let Some(raw) = has("logprobs", asked.logprobs) {
            let received: Value = serde_json::from_slice(raw).unwrap();
            match asked.alternatives {
                None => assert!(received.is_null(), "{asked:?}: {received}"),
                Some(most) => {
                    let received = check_logprobs(&received, most as usize, reply);
                    assert!(count.is_none_or(|count| count as usize == received));
                }
            }
        }
        if let Some(raw) = has("num_input_tokens", asked.input) {
            assert!((1..=16).contains(&number(raw)), "{asked:?}");
        }
    }
    assert!(text.matches(' ').count() > 2, "{text:?}");
    assert!(asked.output != Some(true) || tokens == TOKENS, "{asked:?}");
}

#[tokio::test]
async fn d_55_additional_outputs_come_with_each_response_in_every_combination() {
    let config = scripted::Config {
        count: 1 << 20,
        ..script(Script::Tokens)
    };
    let server = Running::generating(kernel(&[("m", config)]), Config::default()).await;
    let mut grpc = Grpc::connect(&server).await;
    for asked in all() {
        let received = grpc.all(vec![message(&asked)]).await.into_iter();
        let mut responses: Vec<_> = received
            .map(|received| {
                assert_eq!(received.error_message, "", "{asked:?}");
                received.infer_response.unwrap()
            })
            .collect();
        // If only text is asked for, the final flag may come with an empty text.
        let nothing = [
            asked.finish,
            asked.cumulative,
            asked.logprobs,
            asked.input,
            asked.output,
        ];
        if nothing.iter().all(|flag| *flag != Some(true)) {
            responses.retain(|response| !text(response).is_empty());
        }
        check(&asked, &responses);
    }
}
