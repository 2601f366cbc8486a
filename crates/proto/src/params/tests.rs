//! Tests of the table: every parameter at its limits, in every range, and its round trip through JSON.

use serde_json::{Value, json};

use super::*;

fn set(
    name: &str,
    value: &Value,
    ranges: &ParamRanges,
    coercion: JsonCoercion,
) -> Option<GenerationParams> {
    let mut params = GenerationParams::default();
    let param = ParamSpec::named(name).unwrap();
    params
        .set_json(param, value, ranges, coercion)
        .ok()
        .map(|()| params)
}

/// A parameter, values that it takes, and values that it refuses.
type Case = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

fn check(cases: &[Case], ranges: &ParamRanges, coercion: JsonCoercion) {
    for (name, taken, refused) in cases {
        let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        for text in *taken {
            assert!(
                set(name, &value(text), ranges, coercion).is_some(),
                "{name} {text}"
            );
        }
        for text in *refused {
            assert!(
                set(name, &value(text), ranges, coercion).is_none(),
                "{name} {text}"
            );
        }
    }
}

/// Each parameter at the ends of its core range, and past them.
const CORE: &[Case] = &[
    (
        "max_tokens",
        &["0", "4294967295", "7.0"],
        &["-1", "4294967296", "1.5", "\"7\"", "true"],
    ),
    ("min_tokens", &["0"], &["-1"]),
    (
        "temperature",
        &["0", "100", "0.5"],
        &["-0.1", "100.5", "\"1\""],
    ),
    ("top_p", &["0.01", "1"], &["0", "1.1"]),
    ("top_k", &["-1", "0", "40"], &["-2", "0.5"]),
    ("min_p", &["0", "0.99"], &["1", "-0.1"]),
    ("repetition_penalty", &["0.1", "10"], &["0", "10.1"]),
    ("presence_penalty", &["-100", "100"], &["-101", "101"]),
    ("frequency_penalty", &["-100", "100"], &["-101", "101"]),
    (
        "seed",
        &[
            "0",
            "18446744073709551615",
            "\"18446744073709551615\"",
            "3.0",
        ],
        &["-1", "1.5", "1e17"],
    ),
    (
        "stop",
        &["[]", "\"a\"", "[\"a\",\"b\"]"],
        &["[\"\"]", "\"\"", "[1]", "1"],
    ),
    ("bad_words", &["[\"a\"]"], &["[null]"]),
    (
        "stop_token_ids",
        &["[0, 4294967295, 7.0]", "[]"],
        &["[-1]", "7", "[\"7\"]"],
    ),
    ("include_stop_str_in_output", &["true"], &["1"]),
    ("ignore_eos", &["true", "false"], &["1", "\"true\""]),
    ("skip_special_tokens", &["true"], &["0"]),
    ("top_logprobs", &["0", "1000"], &["1001", "-1"]),
    (
        "logit_bias",
        &[
            "{}",
            "[]",
            "{\"7\": 1e30, \"8\": -1e38}",
            "{\"a\": 1, \"7\": false}",
            "[[7, 1], [\"7\", false]]",
        ],
        &[
            "{\"7\": \"1\"}",
            "\"{}\"",
            "{\"-7\": 1}",
            "{\"4294967296\": 1}",
            "{\"a\": true}",
            "{\"\": 1}",
            "[7]",
            "[[7]]",
            "[[7, 1, 1]]",
            "[[-1, 1]]",
            "[[\"\", 1]]",
            "[[null, 1]]",
        ],
    ),
    (
        "lora",
        &[
            "[]",
            "\"style\"",
            "[\"style\", {\"id\": 1}]",
            "[{\"name\": \"style\", \"scale\": -10}]",
            "[{\"id\": 0, \"scale\": 10}, {\"id\": 4294967295.0}]",
            "[{\"id\": 0, \"name\": null, \"scale\": null}]",
        ],
        &[
            "1",
            "{\"id\": 0}",
            "\"\"",
            "[\"\"]",
            "[1]",
            "[{}]",
            "[{\"scale\": 1}]",
            "[{\"id\": 0, \"scale\": 10.1}]",
            "[{\"id\": 0, \"scale\": -1e39}]",
            "[{\"id\": 0, \"scale\": \"1\"}]",
            "[{\"id\": -1}]",
            "[{\"id\": 0.5}]",
            "[{\"id\": \"0\"}]",
            "[{\"name\": 1}]",
            "[{\"id\": 0, \"name\": \"style\"}]",
            "[{\"id\": 0, \"scales\": 1}]",
            "[{\"id\": 0}, {\"id\": 0}]",
            "\" style\"",
            "[\"style \"]",
            "[{\"name\": \" [a]\"}]",
            "[\"a\\nb\"]",
            "[\"style\", {\"name\": \"style\"}]",
        ],
    ),
    ("n", &["1", "64"], &["0", "65"]),
];

/// The same for the samplers of llama.cpp.
const SAMPLERS: &[Case] = &[
    (
        "penalty_last_n",
        &["-1", "0", "64", "2147483647"],
        &["-2", "2147483648", "0.5", "\"64\""],
    ),
    ("dry_multiplier", &["0", "100"], &["-0.1", "100.1"]),
    ("dry_base", &["1", "1.75", "100"], &["0.9", "101"]),
    (
        "dry_allowed_length",
        &["1", "1000000"],
        &["0", "1000001", "1.5"],
    ),
    ("dry_penalty_last_n", &["-1", "0"], &["-2"]),
    (
        "dry_sequence_breakers",
        &["[]", "[\"\\n\"]", "\":\""],
        &["[\"\"]", "[1]", "1"],
    ),
    ("xtc_probability", &["0", "1"], &["-0.1", "1.1"]),
    ("xtc_threshold", &["0", "1"], &["-0.1", "1.1"]),
    ("typical_p", &["0.1", "1"], &["0", "1.1"]),
    ("top_n_sigma", &["-1", "0", "100"], &["-1.1", "100.1"]),
    ("mirostat", &["0", "2", "2.0"], &["1", "3", "-1", "\"2\""]),
    ("mirostat_tau", &["0", "100"], &["-0.1", "100.1"]),
    ("mirostat_eta", &["0", "1"], &["-0.1", "1.1"]),
    ("dynatemp_range", &["0", "100"], &["-0.1", "100.1"]),
    ("dynatemp_exponent", &["0", "100"], &["-0.1", "100.1"]),
    (
        "samplers",
        &["[]", "[\"top_k\",\"temperature\"]", "[\"typical_p\"]"],
        &["[\"top_k\",\"top_k\"]", "[\"warp\"]", "[1]", "\"top_k\""],
    ),
];

#[test]
fn d_43_every_parameter_has_its_core_range() {
    let cases = CORE.len() + SAMPLERS.len();
    assert_eq!(cases, PARAMS.len(), "a row of the table has no case");
    check(CORE, &ParamRanges::CORE, JsonCoercion::Strict);
    check(SAMPLERS, &ParamRanges::CORE, JsonCoercion::Strict);
}

#[test]
fn d_20_protocols_narrow_the_ranges() {
    let narrow: &[Case] = &[
        ("presence_penalty", &["-2", "2"], &["-2.1", "2.1"]),
        ("n", &["16"], &["17"]),
        ("top_logprobs", &["20"], &["21"]),
        (
            "logit_bias",
            &["{\"1\": -100, \"2\": 100}"],
            &["{\"1\": -101}", "{\"1\": 101}"],
        ),
    ];
    check(narrow, &ParamRanges::EVERGREEN, JsonCoercion::Strict);
    check(narrow, &ParamRanges::TRITON, JsonCoercion::FromText);
    let evergreen: &[Case] = &[
        ("temperature", &["2"], &["2.1"]),
        ("top_k", &["0"], &["-1"]),
    ];
    check(evergreen, &ParamRanges::EVERGREEN, JsonCoercion::Strict);
    check(
        &[("temperature", &["100"], &[])],
        &ParamRanges::TRITON,
        JsonCoercion::FromText,
    );
    for (ranges, coercion, count, bytes) in [
        (ParamRanges::EVERGREEN, JsonCoercion::Strict, 16, 256),
        (ParamRanges::TRITON, JsonCoercion::FromText, 64, 1_024),
    ] {
        for name in ["stop", "bad_words"] {
            let texts = |count: usize, bytes: usize| {
                set(
                    name,
                    &json!(vec!["x".repeat(bytes); count]),
                    &ranges,
                    coercion,
                )
                .is_some()
            };
            assert!(texts(count, bytes) && !texts(count + 1, 1) && !texts(1, bytes + 1));
        }
    }
}

#[test]
fn tr_404_parameters_sent_as_text_are_read() {
    let ranges = ParamRanges {
        biases: 2,
        ..ParamRanges::TRITON
    };
    let cases: &[Case] = &[
        ("max_tokens", &["\"7\"", "99999999999"], &["\"x\""]),
        ("temperature", &["\"0.5\""], &["\"NaN\"", "\"\""]),
        ("ignore_eos", &["\"true\"", "\"false\""], &["\"yes\"", "1"]),
        ("mirostat", &["\"2\""], &["\"1\""]),
        ("penalty_last_n", &["\"-1\""], &["\"x\""]),
        (
            "samplers",
            &[
                "\"top_k;temperature\"",
                "\"top_k, min_p\"",
                "[\"top_k;min_p\"]",
                "\"\"",
                "\" [\\\"top_k\\\", \\\"min_p\\\"]\"",
            ],
            &["\"top_k;top_k\"", "\"warp\"", "\"[top_k]\""],
        ),
        (
            "dry_sequence_breakers",
            &["\"\"", "\"#\"", "\",\"", "\"[\\\"[\\\"]\""],
            &["\"[\"", "\"[1]\"", "\"[[\\\"a\\\"]]\""],
        ),
        ("stop", &["[\"\"]", "[\"\", \"a\"]"], &[]),
        (
            "lora",
            &[
                "\"\"",
                "\"style\"",
                "\" []\"",
                "\"[\\\"a\\\", {\\\"id\\\": 1, \\\"scale\\\": 0.5}]\"",
            ],
            &[
                "\"[style]\"",
                "\"[{\\\"id\\\": \\\"1\\\"}]\"",
                "\"[[]]\"",
                "[\"\"]",
                "[\"style\", \"\"]",
            ],
        ),
        (
            "logit_bias",
            &[
                "\"{\\\"5\\\": -100}\"",
                "{\"1\":1,\"2\":2}",
                "\"[[1,1],[2,1]]\"",
            ],
            &[
                "{\"1\":1,\"2\":2,\"3\":3}",
                "\"x\"",
                "[[1,1],[2,1],[3,1]]",
                "\"[[1,1],[2,1],[3,1]]\"",
            ],
        ),
    ];
    check(cases, &ranges, JsonCoercion::FromText);
}

#[test]
fn tr_404_what_parameters_sent_as_text_mean() {
    let ranges = ParamRanges::TRITON;
    let stop = set("stop", &json!(["", "a"]), &ranges, JsonCoercion::FromText).unwrap();
    assert_eq!(stop.stop, ["a"]);
    let most = set(
        "max_tokens",
        &json!(99_999_999_999_u64),
        &ranges,
        JsonCoercion::FromText,
    )
    .unwrap();
    assert_eq!(most.max_tokens, Some(u32::MAX));
    let off = set("top_k", &json!(-1), &ranges, JsonCoercion::FromText).unwrap();
    assert_eq!(off.top_k, Some(0));
}

#[test]
fn tr_404_only_an_empty_list_means_none_and_a_text_may_have_a_list() {
    let read = |name, value: Value| {
        let mut params = GenerationParams::default();
        let param = ParamSpec::named(name).unwrap();
        let (ranges, coercion) = (&ParamRanges::TRITON, JsonCoercion::FromText);
        let set = params.set_json(param, &value, ranges, coercion);
        set.map(|()| (params.samplers, params.dry_sequence_breakers))
    };
    let breakers = |list: &[&str]| Some(list.iter().map(|&text| text.to_owned()).collect());
    for unset in [json!(""), json!([""]), json!(["", ""]), json!("[\"\"]")] {
        for name in ["samplers", "dry_sequence_breakers"] {
            assert_eq!(read(name, unset.clone()), Ok((None, None)), "{unset}");
        }
    }
    assert_eq!(read("samplers", json!(" ; ,")), Ok((None, None)));
    for none in [json!([]), json!("[]"), json!(" [ ]")] {
        let empty = SamplerOrder::of_names([]);
        assert_eq!(read("samplers", none.clone()), Ok((empty, None)), "{none}");
        let read = read("dry_sequence_breakers", none.clone());
        assert_eq!(read, Ok((None, breakers(&[]))), "{none}");
    }
    let many = vec!["a"; DRY_BREAKERS_MAX + 1];
    for (sent, expected) in [
        (json!("[\"\\n\", \"[\"]"), Some(breakers(&["\n", "["]))),
        (json!(","), Some(breakers(&[","]))),
        (json!(["["]), Some(breakers(&["["]))),
        (json!("[\"a\""), None),
        (
            json!(json!(many[1..]).to_string()),
            Some(breakers(&many[1..])),
        ),
        (json!(json!(many).to_string()), None),
    ] {
        let read = read("dry_sequence_breakers", sent.clone()).ok();
        assert_eq!(read.map(|(_, breakers)| breakers), expected, "{sent}");
    }
}

#[test]
fn d_20_a_bias_of_minus_100_forbids() {
    let params = set(
        "logit_bias",
        &json!({"4": -100, "5": -99.5}),
        &ParamRanges::CORE,
        JsonCoercion::Strict,
    );
    assert_eq!(
        params.unwrap().logit_bias[..],
        [(4, f32::NEG_INFINITY), (5, -99.5)]
    );
}

#[test]
fn d_43_written_parameters_are_read_back_unchanged() {
    let all = GenerationParams {
        max_tokens: Some(7),
        min_tokens: Some(2),
        temperature: Some(0.7),
        top_p: Some(0.9),
        top_k: Some(40),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
        presence_penalty: Some(-0.5),
        frequency_penalty: Some(0.25),
        penalty_last_n: Some(-1),
        dry_multiplier: Some(0.8),
        dry_base: Some(1.75),
        dry_allowed_length: Some(3),
        dry_penalty_last_n: Some(256),
        dry_sequence_breakers: Some(Vec::new()),
        xtc_probability: Some(0.5),
        xtc_threshold: Some(0.2),
        typical_p: Some(0.9),
        top_n_sigma: Some(1.5),
        mirostat: Some(2),
        mirostat_tau: Some(4.0),
        mirostat_eta: Some(0.2),
        dynatemp_range: Some(0.3),
        dynatemp_exponent: Some(1.2),
        samplers: SamplerOrder::of_names(["top_k", "typ_p", "temperature"]),
        seed: Some(u64::MAX),
        stop: vec!["END".into()],
        stop_sequences: vec![vec![3], vec![9]],
        bad_words: vec!["bad".into()],
        include_stop_str_in_output: Some(true),
        ignore_eos: Some(true),
        skip_special_tokens: Some(false),
        top_logprobs: Some(3),
        logit_bias: [(4, f32::NEG_INFINITY), (5, 1.5)].into(),
        logit_bias_texts: vec![("12".into(), 2.5), ("no".into(), f32::NEG_INFINITY)],
        lora: Some(vec![
            LoraUse::named("style").scaled(0.1),
            LoraUse {
                adapter: LoraName::Index(3),
                scale: None,
            },
        ]),
        n: Some(2),
        priority: None,
    };
    let json = all.to_json().unwrap();
    // Every field has a row, or its value would be lost.
    assert_eq!(json.len(), PARAMS.len());
    assert_eq!(json["temperature"], json!(0.7));
    let mut read = GenerationParams::default();
    for (name, value) in &json {
        let param = ParamSpec::named(name).unwrap();
        read.set_json(param, value, &ParamRanges::EVERGREEN, JsonCoercion::Strict)
            .unwrap();
    }
    assert_eq!(read, all);
    assert_eq!(GenerationParams::default().to_json().unwrap().len(), 0);
    let several = GenerationParams {
        stop_sequences: vec![vec![1, 2]],
        ..GenerationParams::default()
    };
    assert!(several.to_json().is_none());
}

type Change = fn(&mut GenerationParams);

/// A parameter, a value at the end of its range, and one past it.
const CHANGES: &[(&str, Change, Change)] = &[
    (
        "temperature",
        |p| p.temperature = Some(100.0),
        |p| p.temperature = Some(f32::NAN),
    ),
    ("min_p", |p| p.min_p = Some(0.0), |p| p.min_p = Some(1.0)),
    ("n", |p| p.n = Some(64), |p| p.n = Some(0)),
    (
        "stop",
        |p| p.stop = vec!["x".repeat(1_024); 64],
        |p| p.stop = vec![String::new()],
    ),
    (
        "stop_sequences",
        |p| p.stop_sequences = vec![vec![9; 64]; 256],
        |p| p.stop_sequences = vec![vec![10]],
    ),
    (
        "stop_sequences",
        |_| (),
        |p| p.stop_sequences = vec![vec![1; 65]],
    ),
    (
        "stop_sequences",
        |_| (),
        |p| p.stop_sequences = vec![vec![1]; 257],
    ),
    (
        "logit_bias",
        |p| p.logit_bias = [(9, f32::NEG_INFINITY)].into(),
        |p| p.logit_bias = [(1, f32::INFINITY)].into(),
    ),
    (
        "logit_bias",
        |_| (),
        |p| p.logit_bias = [(1, f32::NAN)].into(),
    ),
    ("logit_bias", |_| (), |p| p.logit_bias = [(10, 0.0)].into()),
    (
        "logit_bias",
        |p| p.logit_bias_texts = vec![("x".repeat(256), 1.0); 1_024],
        |p| p.logit_bias_texts = vec![("x".repeat(257), 1.0)],
    ),
    (
        "logit_bias",
        |_| (),
        |p| p.logit_bias_texts = vec![("x".into(), 1.0); 1_025],
    ),
    (
        "logit_bias",
        |_| (),
        |p| p.logit_bias_texts = vec![("x".into(), f32::NAN)],
    ),
    (
        "mirostat",
        |p| p.mirostat = Some(2),
        |p| p.mirostat = Some(1),
    ),
    (
        "penalty_last_n",
        |p| p.penalty_last_n = Some(-1),
        |p| p.penalty_last_n = Some(-2),
    ),
    (
        "dry_sequence_breakers",
        |p| p.dry_sequence_breakers = Some(vec!["x".repeat(64); 64]),
        |p| p.dry_sequence_breakers = Some(vec!["x".into(); 65]),
    ),
    (
        "dry_sequence_breakers",
        |_| (),
        |p| p.dry_sequence_breakers = Some(vec!["x".repeat(65)]),
    ),
    (
        "lora",
        |p| p.lora = Some(vec![LoraUse::named("x".repeat(128)).scaled(10.0)]),
        |p| p.lora = Some(vec![LoraUse::named("x".repeat(129))]),
    ),
    (
        "lora",
        |p| p.lora = Some(numbered(64)),
        |p| p.lora = Some(numbered(65)),
    ),
    (
        "lora",
        |_| (),
        |p| p.lora = Some(vec![LoraUse::named("x").scaled(f32::NAN)]),
    ),
    (
        "min_tokens",
        |p| (p.min_tokens, p.max_tokens) = (Some(3), Some(3)),
        |p| (p.min_tokens, p.max_tokens) = (Some(4), Some(3)),
    ),
];

fn numbered(count: u32) -> Vec<LoraUse> {
    let indices = 0..count;
    let one = |index| LoraUse {
        adapter: LoraName::Index(index),
        scale: None,
    };
    indices.map(one).collect()
}

/// A list in a text is bounded while it is read, and a full one is within the bounds.
#[test]
fn tr_404_as_many_adapters_as_may_be_fit_into_a_text() {
    let (ranges, coercion) = (&ParamRanges::TRITON, JsonCoercion::FromText);
    for (count, fits) in [(64, true), (65, false)] {
        let uses = (0..count).map(|id| json!({"id": id, "scale": 0.5}));
        let list = Value::Array(uses.collect());
        for sent in [list.clone(), json!(list.to_string())] {
            let read = set("lora", &sent, ranges, coercion);
            assert_eq!(read.is_some(), fits, "{count}");
        }
    }
    let unset = set("lora", &json!(""), ranges, coercion).unwrap();
    assert_eq!(unset.lora, None);
    let none = set("lora", &json!("[]"), ranges, coercion).unwrap();
    assert_eq!(none.lora, Some(Vec::new()));
}

#[test]
fn d_20_the_core_checks_what_was_set_in_this_process() {
    for (name, good, bad) in CHANGES {
        let checked = |change: &Change| {
            let mut params = GenerationParams::default();
            change(&mut params);
            params.check(&ParamRanges::CORE, 10)
        };
        assert_eq!(checked(good), Ok(()), "{name}");
        assert_eq!(checked(bad).unwrap_err().name, *name);
    }
}

#[test]
fn intervals_display_open_and_closed_ends() {
    for (interval, shown, inside, outside) in [
        (
            Interval::closed(0.0, 2.0),
            "[0, 2]",
            [0.0, 2.0],
            [-0.1, 2.1],
        ),
        (
            Interval::above(0.0, 1.0),
            "(0, 1]",
            [0.1, 1.0],
            [0.0, f32::NAN],
        ),
        (
            Interval::below(0.0, 1.0),
            "[0, 1)",
            [0.0, 0.9],
            [1.0, f32::INFINITY],
        ),
    ] {
        assert_eq!(interval.to_string(), shown);
        assert!(
            inside.iter().all(|value| interval.contains(*value)),
            "{shown}"
        );
        assert!(
            outside.iter().all(|value| !interval.contains(*value)),
            "{shown}"
        );
    }
}

#[test]
fn biases_by_text_are_kept_apart_from_those_by_id() {
    let expected = (
        vec![(15_043, 1.0), (3, f32::NEG_INFINITY)],
        vec![
            ("Hello".to_owned(), -0.5),
            ("42".to_owned(), f32::NEG_INFINITY),
        ],
    );
    let pairs = json!([[15_043, 1.0], ["Hello", -0.5], [3, false], ["42", -100]]);
    let read = set(
        "logit_bias",
        &pairs,
        &ParamRanges::CORE,
        JsonCoercion::Strict,
    )
    .unwrap();
    assert_eq!((read.logit_bias.to_vec(), read.logit_bias_texts), expected);
    let object = json!({"3": false, "Hello": -0.5});
    let read = set(
        "logit_bias",
        &object,
        &ParamRanges::CORE,
        JsonCoercion::Strict,
    )
    .unwrap();
    assert_eq!(read.logit_bias[..], [(3, f32::NEG_INFINITY)]);
    assert_eq!(read.logit_bias_texts, [("Hello".to_owned(), -0.5)]);
    // Digits alone are an id.
    for (key, id, text) in [
        ("5", Some(5), None),
        ("+5", None, Some("+5")),
        ("-5", None, None),
    ] {
        let mut object = serde_json::Map::new();
        object.insert(key.into(), json!(1));
        let (core, strict) = (&ParamRanges::CORE, JsonCoercion::Strict);
        let read = set("logit_bias", &object.into(), core, strict);
        let ids = read.as_ref().and_then(|read| read.logit_bias.first());
        assert_eq!(ids.map(|(id, _)| *id), id, "{key}");
        let texts = read.as_ref().and_then(|read| read.logit_bias_texts.first());
        assert_eq!(texts.map(|(text, _)| &**text), text, "{key}");
    }
}

#[test]
fn repeated_biases_of_a_token_are_written_as_their_sum() {
    for (biases, written) in [
        (
            &[(5, 1.5), (6, 1.0), (5, -0.5)][..],
            json!({"5": 1.0, "6": 1.0}),
        ),
        (&[(5, 1.5), (5, f32::NEG_INFINITY)], json!({"5": -100.0})),
        (&[(5, 60.0), (5, 40.0)], json!({"5": 100.0})),
        // Sums that would be refused, or that would forbid the token.
        (&[(5, 60.0), (5, 60.0)], json!([[5, 60.0], [5, 60.0]])),
        (&[(5, -60.0), (5, -40.0)], json!([[5, -60.0], [5, -40.0]])),
        (&[(5, -60.0), (6, -70.0)], json!({"5": -60.0, "6": -70.0})),
    ] {
        let params = GenerationParams {
            logit_bias: biases.into(),
            ..GenerationParams::default()
        };
        let json = params.to_json().unwrap();
        assert_eq!(json["logit_bias"], written, "{biases:?}");
    }
}
