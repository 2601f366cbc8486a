use super::*;
use crate::lmtp::Features;
use crate::lmtp::ModelLookup as _;
use crate::lmtp::fuzz::FuzzModels;
use crate::params::{BIAS_MOST, GenerationParams};

fn with(
    word: &str,
    model: &str,
    members: &str,
    limits: &ConnectionLimits,
) -> Result<GenerateRequest, LmtpError> {
    let text = format!("{word} {{{members}}}");
    let (command, _) = command(&text).expect("a message");
    let members = PayloadMembers::of(command.payload, Features::NONE).expect("an object");
    let model = FuzzModels.find(model).unwrap();
    let prompt = members.tokens("prompt", &model)?;
    if word == "SCORE" {
        let Score { prompt, scored, .. } = score(&members, &model, prompt)?;
        return Ok(GenerateRequest {
            prompt,
            params: GenerationParams {
                stop_sequences: vec![scored],
                ..GenerationParams::default()
            },
            ..GenerateRequest::default()
        });
    }
    generate(&members, &model, limits, false, prompt)
}

fn read(members: &str) -> Result<GenerateRequest, LmtpError> {
    with("GENERATE", "tiny", members, &ConnectionLimits::default())
}

/// With a prompt.
fn parse(members: &str) -> Result<GenerateRequest, LmtpError> {
    read(&format!(r#""prompt":[1],{members}"#))
}

fn refused(members: &str) -> LmtpReason {
    match parse(members) {
        Ok(read) => panic!("{members} is {read:?}"),
        Err(error) => {
            let name = members.split('"').nth(1).unwrap();
            assert!(error.message.contains(name), "{members}: {}", error.message);
            error.reason
        }
    }
}

#[test]
fn lm_301_what_lmql_sends_is_read() {
    let read = read(concat!(
        r#""max_tokens": 16, "temperature": 1.2, "top_logprobs": 4, "model": "tiny", "prompt": [256, 72], "#,
        r#""stream_id": 3, "logit_bias": {"5": 100, "300": -100}, "top_p": 0.5, "top_k": 3, "#,
        r#""repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.25, "length_penalty": 2"#
    ));
    let expected = GenerateRequest {
        prompt: vec![256, 72],
        params: GenerationParams {
            max_tokens: Some(16),
            temperature: Some(1.2),
            top_logprobs: Some(4),
            logit_bias: [(5, 100.0)].into(),
            top_p: Some(0.5),
            top_k: Some(3),
            repetition_penalty: Some(1.5),
            presence_penalty: Some(-1.0),
            frequency_penalty: Some(0.25),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    assert_eq!(read, Ok(expected));
}

/// LM-205: null is absent.
#[test]
fn lm_301_defaults_are_those_of_the_specification() {
    let read = parse(
        r#""max_tokens":null,"temperature":null,"top_logprobs":null,"logit_bias":null,"stop":null,"seed":null,"ignore_eos":null"#,
    )
    .unwrap();
    let expected = GenerateRequest {
        prompt: vec![1],
        params: GenerationParams {
            max_tokens: Some(32),
            top_logprobs: Some(1),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    assert_eq!(read, expected);
    assert_eq!((read.max_tokens(), read.temperature()), (32, 0.0));
}

/// The stream may have as many items as the model's default allows.
#[test]
fn lm_301_a_default_of_the_model_takes_the_place_of_the_protocols() {
    let model = LmtpModelInfo {
        default_max_tokens: Some(64),
        ..LmtpModelInfo::clone(&FuzzModels.find("tiny").unwrap())
    };
    for (members, expected) in [("", 64), (r#","max_tokens":7"#, 7)] {
        let text = format!(r#"GENERATE {{"prompt":[1]{members}}}"#);
        let (command, _) = command(&text).expect("a message");
        let members = PayloadMembers::of(command.payload, Features::NONE).expect("an object");
        let limits = ConnectionLimits::default();
        let read = generate(&members, &model, &limits, false, vec![1]).unwrap();
        assert_eq!(read.max_tokens(), expected, "{text}");
    }
}

#[test]
fn lm_303_prompts_are_lists_of_ids() {
    use LmtpReason::{InvalidType, InvalidValue, MissingRequiredParameter};
    for (members, reason, states) in [
        (r#""a":1"#, MissingRequiredParameter, "'prompt'"),
        (r#""prompt":null"#, MissingRequiredParameter, "'prompt'"),
        (r#""prompt":"Hi""#, InvalidType, "'prompt'"),
        (r#""prompt":{"0":1}"#, InvalidType, "'prompt'"),
        (r#""prompt":[1,"2"]"#, InvalidType, "index 1"),
        (r#""prompt":[1.5]"#, InvalidType, "index 0"),
        (r#""prompt":[true]"#, InvalidType, "index 0"),
        (r#""prompt":[null,1]"#, InvalidType, "index 0"),
        (r#""prompt":[1,null]"#, InvalidType, "index 1"),
        (r#""prompt":[[1]]"#, InvalidType, "index 0"),
        (r#""prompt":[1,2,-1]"#, InvalidValue, "index 2"),
        (r#""prompt":[258]"#, InvalidValue, "index 0"),
        (r#""prompt":[NaN]"#, InvalidValue, "index 0"),
        (
            r#""prompt":[12345678901234567890123]"#,
            InvalidValue,
            "index 0",
        ),
    ] {
        let error = read(members).unwrap_err();
        assert_eq!(error.reason, reason, "{members}");
        assert!(
            error.message.contains(states),
            "{members}: {}",
            error.message
        );
    }
    assert_eq!(read(r#""prompt":[ 1.0, 257 ]"#).unwrap().prompt, [1, 257]);
}

#[test]
fn lm_303_an_empty_prompt_becomes_bos_or_eos() {
    for empty in ["[]", "[null]", "[ ]"] {
        let members = format!(r#""prompt":{empty}"#);
        assert_eq!(read(&members).unwrap().prompt, [256]);
        let error = with("GENERATE", "bare", &members, &ConnectionLimits::default()).unwrap_err();
        assert_eq!(error.reason, LmtpReason::InvalidValue);
    }
}

/// Members with values in range, out of range, and of another type.
type Range = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
    &'static [&'static str],
);

const RANGES: &[Range] = &[
    (
        "max_tokens",
        &["1", "16.0", "1e300"],
        &["0", "-1", "NaN", "-Infinity"],
        &["\"abc\"", "1.5", "[1]", "true"],
    ),
    (
        "temperature",
        &["0", "100", "0.5"],
        &["-0.1", "100.1", "NaN", "Infinity", "1e400"],
        &["\"1\"", "{}"],
    ),
    (
        "top_logprobs",
        &["0", "1000"],
        &["-1", "1001", "Infinity"],
        &["\"1\"", "0.5"],
    ),
    ("top_p", &["1", "1e-7"], &["0", "-1", "1.1", "NaN"], &["[]"]),
    ("top_k", &["-1", "0", "5"], &["-2"], &["2.5"]),
    ("min_p", &["0", "0.99"], &["1", "-0.1", "NaN"], &["\"\""]),
    (
        "repetition_penalty",
        &["10", "0.1"],
        &["0", "10.1", "-1"],
        &["false"],
    ),
    (
        "presence_penalty",
        &["-100", "100"],
        &["-100.1", "100.1"],
        &["\"1\""],
    ),
    (
        "frequency_penalty",
        &["-100", "100"],
        &["-100.1", "100.1"],
        &["\"1\""],
    ),
    (
        "seed",
        &["0", "-9223372036854775808", "18446744073709551615"],
        &["-9223372036854775809", "18446744073709551616"],
        &["\"1\"", "0.5"],
    ),
    (
        "penalty_last_n",
        &["-1", "0", "2147483647"],
        &["-2", "2147483648", "Infinity"],
        &["\"1\"", "0.5"],
    ),
    ("dry_multiplier", &["0", "100"], &["-1", "101"], &["\"1\""]),
    ("dry_base", &["1", "100"], &["0.5", "NaN"], &["\"1\""]),
    (
        "dry_allowed_length",
        &["1", "9"],
        &["0", "1000001"],
        &["[]"],
    ),
    ("dry_penalty_last_n", &["-1", "64"], &["-2"], &["\"1\""]),
    (
        "dry_sequence_breakers",
        &["[]", "[\"\\n\",\":\"]", "\"*\""],
        &["[\"\"]"],
        &["[1]", "1"],
    ),
    ("xtc_probability", &["0", "1"], &["-0.1", "1.1"], &["\"1\""]),
    ("xtc_threshold", &["0", "1"], &["-0.1", "1.1"], &["\"1\""]),
    ("typical_p", &["0.1", "1"], &["0", "1.1"], &["\"1\""]),
    ("top_n_sigma", &["-1", "100"], &["-2", "101"], &["\"1\""]),
    (
        "mirostat",
        &["0", "2"],
        &["1", "3", "-1", "NaN"],
        &["\"2\""],
    ),
    ("mirostat_tau", &["0", "100"], &["-1", "101"], &["\"1\""]),
    ("mirostat_eta", &["0", "1"], &["-1", "1.1"], &["\"1\""]),
    ("dynatemp_range", &["0", "100"], &["-1", "101"], &["\"1\""]),
    (
        "dynatemp_exponent",
        &["0", "100"],
        &["-1", "101"],
        &["\"1\""],
    ),
    (
        "samplers",
        &["[]", "[\"top_k\",\"temperature\"]"],
        &["[\"warp\"]", "[\"xtc\",\"xtc\"]"],
        &["[1]", "\"top_k\""],
    ),
    (
        "lora",
        &["[]", "\"style\"", "[\"style\",{\"id\":0,\"scale\":0.5}]"],
        &["1", "[1]", "[{}]", "[{\"id\":0,\"scale\":101}]", "\"\""],
        &[],
    ),
    (
        "include_stop_str_in_output",
        &["true", "false"],
        &[],
        &["1"],
    ),
    ("min_tokens", &["0", "7"], &["-1"], &["\"1\""]),
    ("ignore_eos", &["true", "false"], &[], &["1", "\"true\""]),
    ("num_samples", &["1", "1.0"], &[], &["\"1\""]),
];

/// LM-1201: at the limit, and one past it.
#[test]
fn lm_304_members_are_in_range_or_refused() {
    use LmtpReason::{InvalidType, InvalidValue};
    for &(name, good, bad, wrong) in RANGES {
        for value in good {
            let members = format!("\"{name}\":{value}");
            assert!(parse(&members).is_ok(), "{members}");
        }
        for value in bad {
            assert_eq!(
                refused(&format!("\"{name}\":{value}")),
                InvalidValue,
                "{name} {value}"
            );
        }
        for value in wrong {
            assert_eq!(
                refused(&format!("\"{name}\":{value}")),
                InvalidType,
                "{name} {value}"
            );
        }
    }
    assert_eq!(
        refused(r#""num_samples":2"#),
        LmtpReason::UnsupportedOperation
    );
    assert_eq!(parse(r#""seed":-1"#).unwrap().params.seed, Some(u64::MAX));
    assert_eq!(parse(r#""top_k":-1"#).unwrap().params.top_k, Some(0));
    assert_eq!(
        parse(r#""max_tokens":1e300"#).unwrap().params.max_tokens,
        Some(u32::MAX)
    );
}

/// Clients show these texts to people.
#[test]
fn lm_304_the_error_names_the_member_and_its_range() {
    for (member, text) in [
        (r#""max_tokens":0"#, "at least 1"),
        (r#""max_tokens":"a""#, "an integer"),
        (r#""temperature":-1"#, "0 to 100"),
        (r#""temperature":"a""#, "a number"),
        (r#""top_logprobs":-1"#, "0 or more"),
        (r#""top_logprobs":1001"#, "at most 1000"),
        (r#""top_p":0"#, "above 0 and at most 1"),
        (r#""top_k":-2"#, "at least -1"),
        (r#""min_p":1"#, "at least 0 and below 1"),
        (r#""repetition_penalty":0"#, "above 0 and at most 10"),
        (r#""presence_penalty":101"#, "-100 to 100"),
        (r#""frequency_penalty":NaN"#, "-100 to 100"),
        (r#""seed":1e30"#, "64 bits, signed or not"),
        (r#""seed":"a""#, "an integer"),
        (r#""min_tokens":-1"#, "at least 0"),
        (r#""penalty_last_n":-2"#, "-1 to 2147483647"),
        (r#""mirostat":1"#, "0 or 2"),
        (r#""dry_allowed_length":0"#, "1 or more"),
        (
            r#""dry_sequence_breakers":[""]"#,
            "strings of 1 to 64 bytes",
        ),
        (
            r#""samplers":["warp"]"#,
            "a list of these names, each at most once: penalties, dry, temperature, top_n_sigma, top_k, typ_p, top_p, \
             min_p, xtc",
        ),
        (r#""ignore_eos":1"#, "true or false"),
        (r#""stop":1"#, "a string or a list of strings"),
        (r#""stop":"""#, "strings of 1 to 1024 bytes"),
        (
            r#""stop_tokens":1"#,
            "a list of token ids or of lists of them",
        ),
        (r#""stop_tokens":[[]]"#, "sequences of at least one id"),
    ] {
        let name = member.split('"').nth(1).unwrap();
        let error = parse(member).unwrap_err();
        assert_eq!(error.message, format!("'{name}' must be {text}"));
    }
}

#[test]
fn lm_205_of_repeated_members_the_last_wins() {
    assert_eq!(
        parse(r#""max_tokens":0,"max_tokens":7"#)
            .unwrap()
            .max_tokens(),
        7
    );
    assert_eq!(
        parse(r#""max_tokens":7,"max_tokens":null"#)
            .unwrap()
            .max_tokens(),
        32
    );
    assert_eq!(parse(r#""max_t\u006fkens":5"#).unwrap().max_tokens(), 5);
}

/// D-20: additive as sent.
#[test]
fn lm_305_biases_are_added_by_id() {
    for (sent, expected) in [
        ("{}", vec![]),
        ("null", vec![]),
        (r#"{"5":1,"3":-0.5}"#, vec![(3, -0.5), (5, 1.0)]),
        (r#"{"5":1,"5":2,"05":3}"#, vec![(5, 3.0)]),
        (
            r#"{"258":100,"-1":100,"99999999999999999999":-100}"#,
            vec![],
        ),
        (
            r#"{"1":-Infinity,"2":1e39,"3":-1e39}"#,
            vec![
                (1, f32::NEG_INFINITY),
                (2, BIAS_MOST),
                (3, f32::NEG_INFINITY),
            ],
        ),
    ] {
        let read = parse(&format!(r#""logit_bias":{sent}"#)).unwrap();
        assert_eq!(read.params.logit_bias[..], expected[..], "{sent}");
    }
    for sent in [
        "[]",
        "[[1,2]]",
        "5",
        "\"x\"",
        r#"{"a":1}"#,
        r#"{"":1}"#,
        r#"{"-":1}"#,
        r#"{"+1":1}"#,
        r#"{"1.0":1}"#,
        r#"{"1":NaN}"#,
        r#"{"1":Infinity}"#,
        r#"{"1":1e400}"#,
        r#"{"1":"2"}"#,
        r#"{"1":null}"#,
        r#"{"1":[]}"#,
    ] {
        assert_eq!(
            refused(&format!(r#""logit_bias":{sent}"#)),
            LmtpReason::InvalidValue,
            "{sent}"
        );
    }
}

#[test]
fn lm_305_a_bias_that_forbids_everything_is_refused() {
    let all = |count: u32| {
        let entries: Vec<_> = (0..count).map(|id| format!("\"{id}\":-Infinity")).collect();
        format!(r#""logit_bias":{{{}}}"#, entries.join(","))
    };
    assert!(parse(&all(257)).is_ok());
    assert_eq!(refused(&all(258)), LmtpReason::ConstraintFailed);
}

/// LM-1201
#[test]
fn lm_305_biases_have_a_limit() {
    let limits = ConnectionLimits {
        max_biases: 2,
        ..ConnectionLimits::default()
    };
    let read = |bias: &str| {
        with(
            "GENERATE",
            "tiny",
            &format!(r#""prompt":[1],"logit_bias":{bias}"#),
            &limits,
        )
    };
    assert!(read(r#"{"1":1,"2":1}"#).is_ok());
    assert_eq!(
        read(r#"{"1":1,"2":1,"900":1}"#).unwrap_err().reason,
        LmtpReason::InvalidValue
    );
}

/// D-23
#[test]
fn lm_306_a_prompt_is_shorter_than_the_context() {
    let prompt = |length: usize| format!("\"prompt\":[{}]", vec!["1"; length].join(","));
    assert_eq!(read(&prompt(4_095)).unwrap().prompt.len(), 4_095);
    assert_eq!(
        read(&prompt(4_096)).unwrap_err().reason,
        LmtpReason::ContextLengthExceeded
    );
}

/// LM-1201, D-20
#[test]
fn lm_307_stops_are_texts_or_tokens() {
    use LmtpReason::{InvalidType, InvalidValue};
    assert_eq!(parse(r#""stop":"\n""#).unwrap().params.stop, ["\n"]);
    assert_eq!(
        parse(r#""stop":["a","b\u00e9"]"#).unwrap().params.stop,
        ["a", "b\u{e9}"]
    );
    assert_eq!(parse(r#""stop":[]"#).unwrap().params.stop, [""; 0]);
    assert_eq!(
        parse(r#""stop_tokens":[10,[1,2]]"#)
            .unwrap()
            .params
            .stop_sequences,
        [vec![10], vec![1, 2]]
    );
    for (sent, reason) in [
        (r#""stop":1"#, InvalidType),
        (r#""stop":[1]"#, InvalidType),
        (r#""stop":"""#, InvalidValue),
        (r#""stop":["a",""]"#, InvalidValue),
        (r#""stop":"\ud800""#, InvalidType),
        (r#""stop_tokens":10"#, InvalidType),
        (r#""stop_tokens":["a"]"#, InvalidType),
        (r#""stop_tokens":[[]]"#, InvalidValue),
        (r#""stop_tokens":[[1,258]]"#, InvalidValue),
    ] {
        assert_eq!(refused(sent), reason, "{sent}");
    }
    let strings = |count: usize, bytes: usize| {
        let stop = format!("\"{}\"", "x".repeat(bytes));
        format!(r#""stop":[{}]"#, vec![stop; count].join(","))
    };
    assert!(parse(&strings(64, 1_024)).is_ok());
    assert_eq!(refused(&strings(65, 1)), InvalidValue);
    assert_eq!(refused(&strings(1, 1_025)), InvalidValue);
    let lists = |count: usize, ids: usize| {
        let list = format!("[{}]", vec!["1"; ids].join(","));
        format!(r#""stop_tokens":[{}]"#, vec![list; count].join(","))
    };
    assert!(parse(&lists(64, 64)).is_ok());
    assert_eq!(refused(&lists(65, 1)), InvalidValue);
    assert_eq!(refused(&lists(1, 65)), InvalidValue);
    let error = with(
        "GENERATE",
        "bare",
        r#""prompt":[1],"stop":"x""#,
        &ConnectionLimits::default(),
    );
    assert_eq!(error.unwrap_err().reason, LmtpReason::UnsupportedOperation);
}

/// LM-312: an empty prompt stays empty, nothing precedes the first token.
#[test]
fn lm_313_a_score_needs_tokens_and_room_in_the_context() {
    use LmtpReason::{ContextLengthExceeded, InvalidType, InvalidValue, MissingRequiredParameter};
    let score = |members: &str| with("SCORE", "tiny", members, &ConnectionLimits::default());
    let read = score(r#""prompt":[],"scored":[1,2],"max_tokens":"x""#).unwrap();
    assert_eq!(
        (read.prompt, &*read.params.stop_sequences[0]),
        (vec![], &[1, 2][..])
    );
    assert_eq!(
        score(r#""prompt":[null],"scored":[1]"#).unwrap().prompt,
        [0; 0]
    );
    let long = vec!["1"; 4_095].join(",");
    for (members, reason) in [
        (r#""scored":[1]"#.to_owned(), MissingRequiredParameter),
        (r#""prompt":[1]"#.to_owned(), MissingRequiredParameter),
        (r#""prompt":[1],"scored":"x""#.to_owned(), InvalidType),
        (r#""prompt":[1],"scored":[null]"#.to_owned(), InvalidType),
        (r#""prompt":[1],"scored":[]"#.to_owned(), InvalidValue),
        (r#""prompt":[1],"scored":[258]"#.to_owned(), InvalidValue),
        (
            format!(r#""prompt":[{long}],"scored":[1,2]"#),
            ContextLengthExceeded,
        ),
    ] {
        assert_eq!(score(&members).unwrap_err().reason, reason, "{members}");
    }
    assert!(score(&format!(r#""prompt":[{long}],"scored":[1]"#)).is_ok());
}
