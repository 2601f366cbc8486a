//! Settings of a request, from parameters, tensors and the object of sampling.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::params::SamplerOrder;

pub(super) fn settings(body: &str) -> Result<Settings, String> {
    let union = Signature::union();
    let mapped = map(&union, body)?;
    Settings::of(&union, &mapped, &RequestLimits::default()).map_err(|refused| refused.to_string())
}

pub(super) fn asking(members: &str) -> Result<Settings, String> {
    settings(&format!(r#"{{"text_input":"a",{members}}}"#))
}

/// What is no field of vLLM's sampling counts beside that, and what would make another text of it is refused.
#[test]
fn tr_403_a_pattern_counts_beside_sampling_parameters() {
    let asked = asking(
        r#""sampling_parameters":"{\"temperature\":0}","regex":"[0-9]{2}","timeout":5,"dry_multiplier":3"#,
    );
    let asked = asked.unwrap();
    assert!(asked.constraint.is_some() && asked.timeout.is_some());
    assert_eq!(
        asked.params.dry_multiplier, None,
        "a field of sampling counts there"
    );
    for (members, field) in [
        (r#"{\"guided_decoding\":{\"json\":{}}}"#, "guided_decoding"),
        (
            r#"{\"structured_outputs\":{\"regex\":\"a\"}}"#,
            "structured_outputs",
        ),
        (r#"{\"best_of\":2}"#, "best_of"),
        (r#"{\"use_beam_search\":true}"#, "use_beam_search"),
    ] {
        let refused = asking(&format!(r#""sampling_parameters":"{members}""#)).unwrap_err();
        assert!(refused.contains(field), "{refused}");
    }
    for neutral in [
        r#"{\"best_of\":1,\"use_beam_search\":false,\"guided_decoding\":null}"#,
        r#"{\"best_of\":2,\"n\":2,\"use_beam_search\":\"false\",\"guided_decoding\":{}}"#,
        r#"{\"best_of\":\"\",\"use_beam_search\":0,\"structured_outputs\":\"\"}"#,
    ] {
        asking(&format!(r#""sampling_parameters":"{neutral}""#)).unwrap();
    }
}

/// As a JSON value they would be `null`, which is as if nothing had been sent.
#[test]
fn tr_404_numbers_without_a_json_form_are_refused() {
    let union = Signature::union();
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut mapped = map(&union, r#"{"text_input":"a","temperature":1}"#).unwrap();
        let temperature = union
            .inputs
            .iter()
            .position(|input| input.name == "temperature");
        for (location, tensor) in &mut mapped.tensors {
            if Some(*location) == temperature {
                *tensor = Arc::new(Tensor::flat(TensorData::Float(vec![number])));
            }
        }
        let read = Settings::of(&union, &mapped, &RequestLimits::default());
        let refused = read.unwrap_err().to_string();
        assert!(
            refused.contains("temperature") && refused.contains("finite"),
            "{refused}"
        );
    }
}

/// TR-401, TR-402
#[test]
fn tr_403_inputs_override_sampling_parameters_and_these_override_parameters() {
    let max = |members| asking(members).unwrap().params.max_tokens;
    for (members, expect) in [
        (r#""max_tokens":5"#, Some(5)),
        (r#""sampling_parameters":"{\"max_tokens\":6}""#, Some(6)),
        (r#""max_new_tokens":7"#, Some(7)),
        (
            r#""max_tokens":5,"sampling_parameters":"{\"max_tokens\":6}""#,
            Some(5),
        ),
        // D-20: the newer name wins.
        (r#""max_tokens":5,"max_completion_tokens":8"#, Some(8)),
        (r#""max_new_tokens":7,"sampling_parameters":"{}""#, None),
        (r#""max_tokens":99999"#, Some(4_096)),
        (r#""top_k":1"#, None),
    ] {
        assert_eq!(max(members), expect, "{members}");
    }
    // TR-404: the limit also holds for a request without a value, which may have a default of the model.
    let limit = asking(r#""top_k":1"#).unwrap().max_tokens_limit;
    assert_eq!(limit, Some(4_096));
    let all = asking(
        r#""sampling_parameters":"{\"stop\":[\"a\",\"\"],\"logit_bias\":{\"5\":-100},\"n\":2,\"min_p\":0.5}",
        "min_length":3,"random_seed":18446744073709551615,"top_k":-1,"end_id":9,"stop_words":["","END"],
        "bad_words":["","no",""]"#,
    )
    .unwrap();
    assert_eq!(
        (all.params.min_tokens, all.params.seed, all.params.top_k),
        (Some(3), Some(u64::MAX), Some(0))
    );
    assert_eq!((all.params.n, all.params.min_p), (Some(2), Some(0.5)));
    assert_eq!(
        (all.params.stop, all.params.stop_sequences),
        (vec!["END".to_owned()], vec![vec![9]])
    );
    assert_eq!(all.params.logit_bias[..], [(5, f32::NEG_INFINITY)]);
    assert_eq!(all.params.bad_words, ["no"]);
    let llama = asking(
        r#""repeat_last_n":64,"dry_multiplier":0.5,"dry_sequence_breakers":["\n"],"samplers":["dry","top_k"],"mirostat":"2",
        "parameters":{"include_stop_str_in_output":true,"logit_bias":"[[\"no\",false]]"}"#,
    )
    .unwrap();
    assert_eq!(
        (llama.params.penalty_last_n, llama.params.mirostat),
        (Some(64), Some(2))
    );
    assert_eq!(llama.params.dry_sequence_breakers.unwrap(), ["\n"]);
    assert_eq!(
        llama.params.samplers,
        SamplerOrder::of_names(["dry", "top_k"])
    );
    assert_eq!(llama.params.include_stop_str_in_output, Some(true));
    let texts = [("no".to_owned(), f32::NEG_INFINITY)];
    assert_eq!(llama.params.logit_bias_texts, texts);
    for members in [
        r#""bad_words":"no""#,
        r#""parameters":{"bad_words":"no"}"#,
        r#""sampling_parameters":"{\"bad_words\":[\"no\",\"\"]}""#,
    ] {
        assert_eq!(
            asking(members).unwrap().params.bad_words,
            ["no"],
            "{members}"
        );
    }
}

/// TR-407, TR-408
#[test]
fn tr_404_values_out_of_range_are_refused_with_the_range() {
    for (members, expect) in [
        (
            r#""top_p":1.5"#,
            "parameter 'top_p' must be in (0, 1], got 1.5",
        ),
        (
            r#""max_tokens":-1"#,
            "parameter 'max_tokens' must be at least 0, got -1",
        ),
        (
            r#""temperature":101"#,
            "parameter 'temperature' must be in [0, 100], got 101.0",
        ),
        (
            r#""presence_penalty":3"#,
            "parameter 'presence_penalty' must be in [-2, 2], got 3.0",
        ),
        (r#""n":17"#, "parameter 'n' must be in [1, 16], got 17"),
        (r#""n":0"#, "parameter 'n' must be in [1, 16], got 0"),
        (
            r#""logprobs":"many""#,
            "parameter 'logprobs' must be in [0, 20], got \"many\"",
        ),
        (r#""beam_width":2"#, "beam search is not supported"),
        (
            r#""num_return_sequences":17"#,
            "parameter 'num_return_sequences' must be in [1, 16], got 17",
        ),
        (
            r#""end_id":-2"#,
            "parameter 'end_id' must be a token id, or -1, got -2",
        ),
        (r#""image":["aGk="]"#, "'image' is not supported"),
        (
            r#""embedding_bias_words":["no"]"#,
            "'embedding_bias_words' is not supported",
        ),
        (
            r#""return_context_logits":true"#,
            "'return_context_logits' is not supported",
        ),
        (
            r#""sampling_parameters":"[]""#,
            "sampling_parameters must be a JSON object: it is a JSON value of another type",
        ),
        (
            r#""stream":true,"exclude_input_in_output":false"#,
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
    ] {
        assert_eq!(asking(members).unwrap_err(), expect, "{members}");
    }
    let written = asking(r#""timeout":1500,"priority":3"#).unwrap();
    assert_eq!(
        (written.timeout, written.params.priority),
        (Some(Duration::from_micros(1_500)), Some(-3))
    );
    for name in ["stop_words", "bad_words"] {
        let words = |count: usize, bytes: usize| {
            let word = format!("\"{}\"", "w".repeat(bytes));
            asking(&format!("\"{name}\":[{}]", vec![word; count].join(",")))
        };
        assert!(words(64, 1_024).is_ok() && words(65, 1).is_err() && words(1, 1_025).is_err());
    }
}

/// The lowest is first, and what is beyond the range of the other faces counts as its end.
#[test]
fn tr_404_any_priority_of_64_bits_is_accepted() {
    for (sent, expect) in [
        ("0", 0),
        ("10", -10),
        ("11", -10),
        ("9223372036854775807", -10),
        (r#""18446744073709551615""#, -10),
        ("-10", 10),
        ("-11", 10),
        ("-9223372036854775808", 10),
        (r#""-2147483647""#, 10),
    ] {
        let written = asking(&format!(r#""priority":{sent}"#)).unwrap();
        assert_eq!(written.params.priority, Some(expect), "{sent}");
    }
}

#[test]
fn tr_1305_patterns_and_controllers_are_read_wherever_they_are_sent() {
    use crate::steer::ConstraintKind::{Gbnf, JsonSchema, Lark, Regex};
    for (members, kind, value) in [
        (
            r#""json_schema":{"type": "object"}"#,
            JsonSchema,
            r#"{"type":"object"}"#,
        ),
        (
            r#""json_schema":"{\"type\":\"object\"}""#,
            JsonSchema,
            r#"{"type":"object"}"#,
        ),
        (
            r#""sampling_parameters":"{\"json_schema\":{\"type\":\"object\"}}""#,
            JsonSchema,
            r#"{"type":"object"}"#,
        ),
        (r#""regex":"a+""#, Regex, "a+"),
        (r#""parameters":{"regex":"a+"}"#, Regex, "a+"),
        (r#""grammar":"start: \"a\"""#, Lark, r#"start: "a""#),
        (r#""grammar":"root ::= \"a\"""#, Gbnf, r#"root ::= "a""#),
        (r#""regex":"a+","grammar":"""#, Regex, "a+"),
    ] {
        let constraint = asking(members).unwrap().constraint.unwrap();
        assert_eq!(
            (constraint.kind, constraint.value.as_str()),
            (kind, value),
            "{members}"
        );
    }
    for (members, arg) in [
        (r#""controller":"tag""#, ""),
        (
            r#""controller":"tag","controller_arg":"as {it} is""#,
            "as {it} is",
        ),
        (
            r#""controller":"tag","controller_arg":{"a": [1]}"#,
            r#"{"a":[1]}"#,
        ),
        (r#""controller":"tag","controller_arg":7"#, "7"),
        (
            r#""sampling_parameters":"{\"controller\":\"tag\",\"controller_arg\":true}""#,
            "true",
        ),
    ] {
        let controller = asking(members).unwrap().controller.unwrap();
        assert_eq!(
            (controller.id.as_str(), controller.arg.as_str()),
            ("tag", arg)
        );
    }
}

#[test]
fn lora_and_lora_name_may_not_differ() {
    let one = |members: &str| asking(members).unwrap().params.lora.map(|uses| uses.len());
    for same in [
        r#""lora_name":"a""#,
        r#""lora_name":"a","lora":"a""#,
        r#""lora_name":"a","lora":["a"]"#,
        r#""lora_name":"a","lora":"""#,
        r#""lora_name":"","lora":["a"]"#,
    ] {
        assert_eq!(one(same), Some(1), "{same}");
    }
    assert_eq!(one(r#""lora_name":"","lora":"""#), None);
    for other in [
        "\"b\"",
        "[]",
        r#"["a", "b"]"#,
        r#"[{"name": "a", "scale": 2}]"#,
    ] {
        let error = asking(&format!(r#""lora_name":"a","lora":{other}"#)).unwrap_err();
        assert!(error.to_string().contains("`lora_name`"), "{error}");
    }
}

#[test]
fn tr_402_a_suffix_is_a_text_and_an_empty_one_is_none() {
    for (members, expected) in [
        (r#""suffix":"b""#, Some("b")),
        (r#""suffix":["b"]"#, Some("b")),
        (r#""parameters":{"suffix":"b"}"#, Some("b")),
        (r#""sampling_parameters":"{\"suffix\":\"b\"}""#, Some("b")),
        (r#""sampling_parameters":"{\"suffix\":null}""#, None),
        (r#""suffix":"""#, None),
        (r#""max_tokens":1"#, None),
        // An empty one hides no other.
        (
            r#""sampling_parameters":"{\"suffix\":\"b\"}","suffix":"""#,
            Some("b"),
        ),
    ] {
        let suffix = asking(members).unwrap().suffix;
        assert_eq!(suffix.as_deref(), expected, "{members}");
    }
    // A parameter of an inference request is no input. Others are ignored beside the object (TR-403), but this one is none
    // of sampling.
    let union = Signature::union();
    for (object, expected) in [
        ("", "b"),
        (r#"{\"top_k\":3}"#, "b"),
        (r#"{\"suffix\":\"\"}"#, "b"),
        (r#"{\"suffix\":\"c\"}"#, "c"),
    ] {
        let body = format!(r#"{{"text_input":"a","sampling_parameters":"{object}"}}"#);
        let mut mapped = map(&union, &body).unwrap();
        let parameter = RequestParameter::Text("b".into());
        mapped.parameters = Arc::new([("suffix".to_owned(), parameter)].into());
        let settings = Settings::of(&union, &mapped, &RequestLimits::default()).unwrap();
        assert_eq!(settings.suffix.as_deref(), Some(expected), "{object}");
    }
    let error = asking(r#""suffix":7"#).unwrap_err();
    assert!(error.contains("JSON non-string"), "{error}");
    let nested = r#""sampling_parameters":"{\"suffix\":[\"b\"]}""#;
    let error = asking(nested).unwrap_err();
    assert!(error.contains("'suffix' must be a text"), "{error}");
}

#[test]
fn tr_1305_empty_patterns_are_none_and_wrong_ones_are_refused() {
    let none =
        asking(r#""controller":"","controller_arg":"","regex":"","json_schema":"""#).unwrap();
    assert_eq!((none.controller, none.constraint), (None, None));
    for (members, expect) in [
        (r#""regex":7"#, "parameter 'regex' must be a string, got 7"),
        (
            r#""regex":"a","json_schema":{}"#,
            "parameters 'json_schema' and 'regex' cannot be combined",
        ),
        (
            r#""controller":7"#,
            "parameter 'controller' must be a name, or an object of `id` and `arg`",
        ),
        (
            r#""controller_arg":"x""#,
            "parameter 'controller_arg' needs a 'controller'",
        ),
    ] {
        let error = asking(members).unwrap_err();
        assert!(error.starts_with(expect), "{members}: {error}");
    }
}

/// TR-401, D-55
#[test]
fn tr_404_neutral_values_of_unsupported_fields_are_accepted() {
    for members in [
        r#""beam_width":1"#,
        r#""image":[]"#,
        r#""return_context_logits":false"#,
        r#""n":16"#,
        r#""max_tokens":0"#,
        r#""pad_id":-1"#,
        r#""end_id":-1"#,
        r#""num_return_sequences":16"#,
        r#""length_penalty":2.0"#,
        r#""embedding_bias_words":[""]"#,
        r#""stream":true,"exclude_input_in_output":false,"beam_width":1"#,
        r#""stream":true,"exclude_input_in_output":false,"stop_words":[""]"#,
        r#""skip_special_tokens":true"#,
        r#""bad_words":[""]"#,
    ] {
        assert!(asking(members).is_ok(), "{members}");
    }
}
