//! Fields of sampling in the forms in which other servers take them: lists, objects, and unknown ones.

use super::sampling::asking;
use super::*;

#[test]
fn tr_402_stop_is_a_text_or_a_list_of_texts() {
    let stop = |members: &str| asking(members).map(|asked| asked.params.stop);
    for (members, expect) in [
        (r#""stop":"END""#, &["END"][..]),
        (r#""stop":["END"]"#, &["END"]),
        (r#""stop":["\n","é",""]"#, &["\n", "é"]),
        (r#""stop":[]"#, &[]),
        (r#""parameters":{"stop":["a","b"]}"#, &["a", "b"]),
        // A text is never read as a list: the bracket may be what is looked for.
        (r#""stop":"[\"a\",\"b\"]""#, &[r#"["a","b"]"#]),
        (r#""stop":"[INST]""#, &["[INST]"]),
        // As a text beside others: an input counts more, and so does the object of sampling.
        (r#""stop":["a"],"stop_words":["b"]"#, &["b"]),
        (r#""stop_words":["b"],"stop":["a"]"#, &["b"]),
        (r#""stop":["a"],"sampling_parameters":"{}""#, &[]),
        (r#""stop":["a"],"stop":["b"]"#, &["a"]),
    ] {
        assert_eq!(stop(members).unwrap(), expect, "{members}");
    }
    let range = "parameter 'stop' must be at most 64 strings of at most 1024 bytes, got";
    for wrong in [r#"["a",1]"#, r#"[["a"]]"#, r#"[{"a":"b"}]"#, "[null]"] {
        let refused = stop(&format!(r#""stop":{wrong}"#)).unwrap_err();
        assert!(refused.starts_with(range), "{wrong}: {refused}");
    }
    let many = |count: usize| stop(&format!(r#""stop":[{}]"#, vec![r#""a""#; count].join(",")));
    assert_eq!(many(64).unwrap().len(), 64);
    assert!(many(65).unwrap_err().starts_with(range));
    assert!(many(100_000).unwrap_err().len() < 512);
}

/// Also of a signature of a model's own, which has no leniency (TR-312).
#[test]
fn tr_307_no_other_parameter_is_a_list() {
    for members in [
        r#""stop":null"#,
        r#""stop":{}"#,
        r#""stop_token_ids":[1]"#,
        r#""mystery":["a"]"#,
    ] {
        let refused = asking(members).unwrap_err();
        assert!(refused.contains("has invalid type"), "{refused}");
    }
    let refused = map(&parrot(), r#"{"QUESTION":"q","LIVE":true,"stop":["a"]}"#);
    assert!(refused.unwrap_err().contains("has invalid type"));
}

#[test]
fn tr_403_sampling_parameters_is_an_object_or_its_text() {
    for members in [
        r#""sampling_parameters":{"max_tokens": 6, "stop": ["a"]}"#,
        r#""sampling_parameters":"{\"max_tokens\": 6, \"stop\": [\"a\"]}""#,
        r#""sampling_parameters":["{\"max_tokens\": 6, \"stop\": [\"a\"]}"]"#,
        r#""parameters":{"sampling_parameters":{"max_tokens": 6, "stop": ["a"]}}"#,
    ] {
        let params = asking(members).unwrap().params;
        assert_eq!(
            (params.max_tokens, params.stop.as_slice()),
            (Some(6), &["a".to_owned()][..]),
            "{members}"
        );
    }
    for wrong in ["1", "null", r#"[{"max_tokens":6}]"#, "[1]"] {
        let refused = asking(&format!(r#""sampling_parameters":{wrong}"#)).unwrap_err();
        assert!(refused.contains("JSON non-string"), "{wrong}: {refused}");
    }
    let refused = asking(r#""sampling_parameters":{"top_p":1.5}"#).unwrap_err();
    assert_eq!(refused, "parameter 'top_p' must be in (0, 1], got 1.5");
}

#[test]
fn tr_307_unknown_fields_of_sampling_parameters_are_counted_or_refused() {
    let (signature, limits, known) = (
        Signature::union(),
        RequestLimits::default(),
        ["known".to_owned()],
    );
    let lax = Mapper {
        known: &known,
        ..mapper(&signature, &limits)
    };
    let strict = Mapper {
        strict: true,
        ..lax
    };
    for (object, unknown) in [
        (r#"{"max_tokens":1,"stop":["a"],"known":2}"#, &[][..]),
        // vLLM's clients send their defaults.
        (r#"{"detokenize":null}"#, &[]),
        (
            r#"{"repeat_penalty":1.1,"top_k":1,"n_predict":3}"#,
            &["repeat_penalty", "n_predict"],
        ),
        // As deep as it may be.
        (r#"{"x":[[{"max_tokens":1}]]}"#, &["x"]),
    ] {
        let text = serde_json::to_string(object).unwrap();
        for value in [object, &text] {
            let body = format!(r#"{{"text_input":"a","sampling_parameters":{value}}}"#);
            let mapped = lax.map(body.as_bytes()).unwrap();
            assert_eq!(mapped.unknown as usize, unknown.len(), "{body}");
            let refused = strict.map(body.as_bytes()).err();
            let expect = unknown.first();
            let expect =
                expect.map(|name| format!("unknown parameter '{name}' for model 'parrot'"));
            assert_eq!(refused.map(|error| error.to_string()), expect, "{body}");
        }
    }
    // Of the two the parameter is found first, and both are counted.
    let body = br#"{"text_input":"a","sampling_parameters":{"x":1},"y":1}"#;
    assert_eq!(lax.map(body).unwrap().unknown, 2);
    // What is no object is refused where it is read.
    for text in [r#""[1]""#, r#""{\"x\"""#, r#""""#, r#""nonsense""#] {
        let body = format!(r#"{{"text_input":"a","sampling_parameters":{text}}}"#);
        assert!(strict.map(body.as_bytes()).is_ok(), "{text}");
    }
}
