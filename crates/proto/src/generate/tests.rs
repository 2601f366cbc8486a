//! Tests of sections 1, 3 and 4: tables of bodies with the expected error text, tensors or settings.

use super::fuzz::every_datatype;
use super::*;
use crate::corpus;

mod bounds;
mod chat;
mod other_forms;
mod sampling;

fn parrot() -> Signature {
    let input = |name: &str, datatype, shape: &[i64], role| InputTensor {
        name: name.into(),
        datatype,
        shape: shape.to_vec(),
        optional: false,
        role,
        accepts_json: false,
    };
    Signature {
        inputs: vec![
            input("QUESTION", Datatype::Bytes, &[1, 1], InputRole::Prompt),
            input("LIVE", Datatype::Bool, &[1, 1], InputRole::Stream),
            InputTensor {
                optional: true,
                ..input("hints", Datatype::Int32, &[1, -1], InputRole::Ignore)
            },
        ],
        outputs: vec![OutputTensor {
            name: "ANSWER".into(),
            datatype: Datatype::Bytes,
            shape: vec![1, -1],
            role: OutputRole::Text,
        }],
        max_batch_size: 0,
        decoupled: true,
        lenient: false,
        tensorrt_llm: false,
    }
}

fn mapper<'a>(signature: &'a Signature, limits: &'a RequestLimits) -> Mapper<'a> {
    Mapper {
        model: "parrot",
        signature,
        known: &[],
        strict: false,
        limits,
    }
}

fn map(signature: &Signature, body: &str) -> Result<Mapped, String> {
    mapper(signature, &RequestLimits::default())
        .map(body.as_bytes())
        .map_err(|refused| refused.to_string())
}

/// Checks the error text of each body.
fn refuses(signature: &Signature, table: &[(&str, &str)]) {
    for (body, expect) in table {
        assert_eq!(map(signature, body).unwrap_err(), *expect, "{body}");
    }
}

#[test]
fn tr_301_syntax_errors_have_the_wording_and_offset_of_rapidjson() {
    let prefix = "failed to parse the request JSON buffer: ";
    for (body, rest) in [
        ("", "The document is empty. at 0"),
        ("{", "Missing a name for object member. at 1"),
        (r#"{"a":}"#, "Invalid value. at 5"),
        ("[1", "Missing a comma or ']' after an array element. at 2"),
        (
            r#"{"a" 1}"#,
            "Missing a colon after a name of object member. at 5",
        ),
        (
            r#"{"a":"x"#,
            "Missing a closing quotation mark in string. at 7",
        ),
        (
            "{} {}",
            "The document root must not be followed by other values. at 3",
        ),
        (r#"{"text_input":NaN}"#, "Invalid value. at 14"),
    ] {
        let written = map(&Signature::union(), body).unwrap_err();
        assert_eq!(written, format!("{prefix}{rest}"), "{body}");
    }
    let odd = mapper(&Signature::union(), &RequestLimits::default())
        .map(b"{\"text_input\":\"\xff\"}")
        .unwrap_err();
    assert_eq!(
        odd.to_string(),
        format!("{prefix}Invalid encoding in string. at 15")
    );
    let half = map(&Signature::union(), r#"{"text_input":"\ud800"}"#).unwrap_err();
    assert!(half.starts_with(prefix), "{half}");
}

#[test]
fn tr_302_nesting_depth_and_number_of_members_are_limited() {
    let nested = |depth: usize| {
        format!(
            r#"{{"QUESTION":{}{}}}"#,
            "[".repeat(depth),
            "]".repeat(depth)
        )
    };
    let written = map(&parrot(), &nested(100)).unwrap_err();
    assert_eq!(
        written,
        "JSON nesting depth exceeds maximum allowed limit (100)"
    );
    // The body's own object is the hundredth level.
    let written = map(&parrot(), &nested(99)).unwrap_err();
    assert!(written.starts_with("The schema can not"), "{written}");
    assert!(map(&parrot(), &nested(1_000_000)).is_err());
    let strings = format!(r#"{{"QUESTION":"{}","LIVE":true}}"#, "[".repeat(1_000));
    assert!(map(&parrot(), &strings).is_ok());
    let limits = RequestLimits {
        json_members: 3,
        ..RequestLimits::default()
    };
    let body = |count: usize| {
        let members: Vec<_> = (0..count).map(|index| format!(r#""p{index}":1"#)).collect();
        format!(r#"{{{}}}"#, members.join(","))
    };
    let mapped = |count| {
        mapper(&parrot(), &limits)
            .map(body(count).as_bytes())
            .unwrap_err()
    };
    assert_eq!(mapped(4), InvalidRequest::Members(3));
    assert!(matches!(mapped(3), InvalidRequest::Missing(_)));
}

/// TR-304, TR-306, TR-307, TR-310, TR-311, TR-313
#[test]
fn tr_303_each_invalid_request_has_its_exact_text() {
    refuses(
        &parrot(),
        &[
            ("[]", "attempt to get members for non-object"),
            ("3", "attempt to get members for non-object"),
            (
                r#"{"QUESTION":1,"id":7}"#,
                "Unable to parse 'id': attempt to access JSON non-string as string",
            ),
            (
                r#"{"parameters":[]}"#,
                "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
            ),
            (
                r#"{"parameters":{"x":null}}"#,
                "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be either 'int', 'bool', \
                 or 'string'.",
            ),
            (
                r#"{"x":[]}"#,
                "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
            ),
            (
                r#"{"x":{}}"#,
                "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
            ),
            (
                r#"{"QUESTION":1}"#,
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
            ),
            (
                r#"{"LIVE":1}"#,
                "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
            ),
            (
                r#"{"LIVE":"true"}"#,
                "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
            ),
            (
                r#"{"hints":1.5}"#,
                "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
            ),
            (
                r#"{"hints":[1,2147483648]}"#,
                "value 2147483648 of input 'hints' is out of range for INT32",
            ),
            (
                r#"{"QUESTION":"a","QUESTION":"b"}"#,
                "[request id: <id_unknown>] input 'QUESTION' already exists in request",
            ),
            (
                r#"{"QUESTION":"a","parameters":{"QUESTION":"b"},"id":"7"}"#,
                "Converting keyword: 'parameters': [request id: 7] input 'QUESTION' already exists in request",
            ),
            // The first error in the order of the body is reported.
            (
                r#"{"LIVE":1,"QUESTION":1}"#,
                "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
            ),
        ],
    );
    let mut odd = parrot();
    odd.inputs[2].name = "parameters".into();
    let written = map(&odd, r#"{"parameters":{}}"#).unwrap_err();
    assert_eq!(
        written,
        "Keyword 'parameters' for nested schema also given as input tensor name"
    );
}

#[test]
fn tr_304_the_first_id_is_kept_unchanged_up_to_1024_bytes() {
    for (body, expect) in [
        (r#"{"QUESTION":"a","LIVE":true,"id":"x y"}"#, Some("x y")),
        (r#"{"QUESTION":"a","LIVE":true,"id":""}"#, None),
        (r#"{"QUESTION":"a","LIVE":true}"#, None),
        (
            r#"{"id":"1","QUESTION":"a","LIVE":true,"id":"2"}"#,
            Some("1"),
        ),
    ] {
        assert_eq!(
            map(&parrot(), body).unwrap().id.as_deref(),
            expect,
            "{body}"
        );
    }
    let body = |bytes: usize| {
        format!(
            r#"{{"QUESTION":"a","LIVE":true,"id":"{}"}}"#,
            "i".repeat(bytes)
        )
    };
    assert!(map(&parrot(), &body(1_024)).is_ok());
    let written = map(&parrot(), &body(1_025)).unwrap_err();
    assert_eq!(written, "'id' must be at most 1024 bytes long");
}

/// TR-305, TR-317
#[test]
fn tr_306_members_of_parameters_are_mapped_like_those_of_the_body() {
    let body = r#"{"a":1,"parameters":{"LIVE":true,"b":"two","id":"p","c":1e3},"QUESTION":"q","a":2,
        "sequence_id":5,"timeout":3,"triton_x":false,"big":9223372036854775808}"#;
    let mapped = map(&parrot(), body).unwrap();
    let given: Vec<usize> = mapped
        .tensors
        .iter()
        .map(|(location, _)| *location)
        .collect();
    assert_eq!(given, [1, 0]);
    assert_eq!(mapped.id, None);
    for (name, expect) in [
        ("a", RequestParameter::Int(1)),
        ("b", RequestParameter::Text("two".into())),
        ("id", RequestParameter::Text("p".into())),
        ("c", RequestParameter::Double(1000.0)),
        ("sequence_id", RequestParameter::Int(5)),
        ("timeout", RequestParameter::Int(3)),
        ("triton_x", RequestParameter::Bool(false)),
        ("big", RequestParameter::Double(9_223_372_036_854_775_808.0)),
    ] {
        assert_eq!(mapped.parameter(name), Some(&expect), "{name}");
    }
}

#[test]
fn tr_307_unknown_parameters_are_counted_or_refused() {
    let body = br#"{"QUESTION":"q","LIVE":true,"temperature":1,"mystery":1,"known":2}"#;
    let (signature, limits, known) = (parrot(), RequestLimits::default(), ["known".to_owned()]);
    let lax = Mapper {
        known: &known,
        ..mapper(&signature, &limits)
    };
    assert_eq!(lax.map(body).unwrap().unknown, 1);
    let strict = Mapper {
        strict: true,
        ..lax
    };
    let written = strict.map(body).unwrap_err().to_string();
    assert_eq!(written, "unknown parameter 'mystery' for model 'parrot'");
}

/// TR-309
#[test]
fn tr_308_scalars_and_lists_fit_the_shape_or_are_refused() {
    let wrong = |name: &str| {
        Err(format!(
            "The schema can not convert input '{name}' to tensor with proper shape"
        ))
    };
    for (value, expect) in [
        ("1", Ok(vec![1, 1])),
        ("[1]", Ok(vec![1, 1])),
        ("[1,2,3]", Ok(vec![1, 3])),
        ("[]", Ok(vec![1, 0])),
        ("[[1],[2]]", Ok(vec![1, 2])),
        ("[[1,2]]", wrong("hints")),
    ] {
        let body = format!(r#"{{"QUESTION":"q","LIVE":true,"hints":{value}}}"#);
        let shape = map(&parrot(), &body).map(|mapped| mapped.tensor(2).unwrap().shape.clone());
        assert_eq!(shape, expect, "{value}");
    }
    for (value, expect) in [
        (r#""x""#, Ok(vec![1, 1])),
        (r#"["x"]"#, Ok(vec![1, 1])),
        (r#"[["x"]]"#, Ok(vec![1, 1])),
        (r#"["x","y"]"#, wrong("QUESTION")),
        ("[]", wrong("QUESTION")),
    ] {
        let body = format!(r#"{{"QUESTION":{value},"LIVE":true}}"#);
        let shape = map(&parrot(), &body).map(|mapped| mapped.tensor(0).unwrap().shape.clone());
        assert_eq!(shape, expect, "{value}");
    }
    let every = every_datatype();
    for (value, expect) in [
        ("[1,2,3,4]", Ok(vec![2, 2])),
        ("[]", Ok(vec![2, 0])),
        ("[1,2,3]", wrong("int8")),
        ("1", wrong("int8")),
    ] {
        let body = format!(r#"{{"int8":{value}}}"#);
        let shape = map(&every, &body).map(|mapped| mapped.tensors[0].1.shape.clone());
        assert_eq!(shape, expect, "{value}");
    }
}

/// TR-102
#[test]
fn tr_310_every_datatype_accepts_only_its_json_type() {
    let request = |is: &str, wanted: &str| {
        format!("Unable to parse 'data': attempt to access JSON {is} as {wanted}")
    };
    let (signed, unsigned) = (
        request("non-signed-integer", "signed-integer"),
        request("non-unsigned-integer", "unsigned-integer"),
    );
    let half = |kind: &str| {
        let name = kind.to_lowercase();
        format!(
            "receiving {kind} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    };
    let bytes = "Unable to parse JSON bytes array: attempt to access JSON non-string as string";
    for (name, value, expect) in [
        ("bool", "true", None),
        ("bool", "0", Some(request("non-boolean", "boolean"))),
        ("int8", "-128", None),
        (
            "int8",
            "128",
            Some("value 128 of input 'int8' is out of range for INT8".into()),
        ),
        ("int8", "1.0", Some(signed.clone())),
        ("int8", "\"1\"", Some(signed)),
        (
            "int16",
            "-32769",
            Some("value -32769 of input 'int16' is out of range for INT16".into()),
        ),
        ("int64", "-9223372036854775808", None),
        (
            "int64",
            "9223372036854775808",
            Some("value 9223372036854775808 of input 'int64' is out of range for INT64".into()),
        ),
        ("uint8", "255", None),
        (
            "uint8",
            "256",
            Some("value 256 of input 'uint8' is out of range for UINT8".into()),
        ),
        ("uint16", "true", Some(unsigned.clone())),
        ("uint32", "4294967295", None),
        ("uint64", "18446744073709551615", None),
        ("uint64", "null", Some(unsigned)),
        ("fp32", "1", None),
        ("fp32", "-1.5e3", None),
        ("fp32", "\"1\"", Some(request("non-number", "double"))),
        ("fp64", "[]", None),
        ("fp16", "1", Some(half("FP16"))),
        ("bf16", "1", Some(half("BF16"))),
        ("bytes", "\"a\"", None),
        ("bytes", "{}", Some(bytes.into())),
    ] {
        let body = format!(r#"{{"{name}":[{value},{value}]}}"#);
        let value = if value == "[]" {
            r#"{"fp64":[]}"#.to_owned()
        } else {
            body
        };
        assert_eq!(map(&every_datatype(), &value).err(), expect, "{value}");
    }
    let huge = map(&every_datatype(), r#"{"fp64":[1e400,1]}"#).unwrap_err();
    assert!(
        huge.contains("Number too big to be stored in double."),
        "{huge}"
    );
}

#[test]
fn tr_312_the_union_signature_accepts_strings_for_numbers_and_booleans() {
    let body = r#"{"text_input":["hi"],"max_tokens":"16","temperature":"0.5","stream":"true","seed":" 7 "}"#;
    let union = Signature::union();
    let mapped = map(&union, body).unwrap();
    let settings = Settings::of(&union, &mapped, &RequestLimits::default()).unwrap();
    assert_eq!(
        (
            settings.params.max_tokens,
            settings.params.temperature,
            settings.stream,
            settings.params.seed
        ),
        (Some(16), Some(0.5), true, Some(7))
    );
    refuses(
        &union,
        &[
            (
                r#"{"text_input":"a","max_tokens":"many"}"#,
                "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
            ),
            (
                r#"{"text_input":"a","stream":"yes"}"#,
                "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
            ),
        ],
    );
}

#[test]
fn tr_314_all_missing_inputs_are_listed_in_one_error() {
    let tail = "Please provide all required input(s).";
    for (body, expect) in [
        (
            "{}",
            format!(
                "[request id: <id_unknown>] expected number of inputs between 2 and 3 but got 0 inputs for model \
                 'parrot'. Got input(s) [], but missing required input(s) ['QUESTION','LIVE']. {tail}"
            ),
        ),
        (
            r#"{"id":"9","hints":1,"LIVE":true,"other":1}"#,
            format!(
                "[request id: 9] expected number of inputs between 2 and 3 but got 2 inputs for model 'parrot'. Got \
                 input(s) ['LIVE','hints'], but missing required input(s) ['QUESTION']. {tail}"
            ),
        ),
    ] {
        assert_eq!(map(&parrot(), body).unwrap_err(), expect);
    }
    let mut strict = parrot();
    strict.inputs.truncate(2);
    let written = map(&strict, r#"{"LIVE":false}"#).unwrap_err();
    let expect = format!(
        "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'parrot'. Got input(s) ['LIVE'], but \
         missing required input(s) ['QUESTION']. {tail}"
    );
    assert_eq!(written, expect);
    let union = Signature::union();
    assert!(
        map(&union, r#"{"messages":[]}"#).is_ok(),
        "messages replace the prompt"
    );
}

#[test]
fn tr_315_json_text_tensor_bytes_and_elements_are_limited() {
    let limits = RequestLimits {
        input_bytes: 64,
        ..RequestLimits::default()
    };
    let signature = parrot();
    let small = mapper(&signature, &limits);
    let body = |bytes: usize| format!(r#"{{"LIVE":true,"QUESTION":"{}"}}"#, "x".repeat(bytes - 27));
    assert_eq!(body(64).len(), 64);
    assert!(small.map(body(64).as_bytes()).is_ok());
    let written = small.map(body(65).as_bytes()).unwrap_err().to_string();
    assert_eq!(
        written,
        "request JSON size of 65 bytes exceeds the maximum allowed input size of 64 bytes. Use --http-max-input-size to \
         increase the limit."
    );
    let written = small
        .map(br#"{"LIVE":true,"hints":[1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6]}"#)
        .unwrap_err()
        .to_string();
    assert_eq!(
        written,
        "request size of 1 bytes with input 'hints' of size 64 bytes exceeds the maximum allowed input size of 64. Use \
         --http-max-input-size to increase the limit."
    );
    let limits = RequestLimits {
        tensor_elements: 4,
        ..RequestLimits::default()
    };
    let few = mapper(&signature, &limits);
    let hints = |list: &str| {
        few.map(format!(r#"{{"QUESTION":"q","LIVE":true,"hints":{list}}}"#).as_bytes())
    };
    assert!(hints("[1,2,3,4]").is_ok());
    assert_eq!(
        hints("[1,2,3,4,5]").unwrap_err(),
        InvalidRequest::Elements {
            name: "hints".into(),
            max: 4
        }
    );
}

#[test]
fn tr_105_the_error_of_an_invalid_signature_names_the_tensor() {
    let change = |change: fn(&mut Signature)| {
        let mut signature = parrot();
        change(&mut signature);
        signature.check()
    };
    assert_eq!(change(|_| {}), Ok(()));
    assert_eq!(Signature::union().check(), Ok(()));
    for (got, expect) in [
        (
            change(|it| it.inputs[1].name = "QUESTION".into()),
            InvalidSignature::Twice("QUESTION".into()),
        ),
        (
            change(|it| it.inputs[1].name = "id".into()),
            InvalidSignature::Reserved("id".into()),
        ),
        (
            change(|it| it.outputs[0].name = "model_name".into()),
            InvalidSignature::Reserved("model_name".into()),
        ),
        (
            change(|it| it.inputs[0].role = InputRole::Ignore),
            InvalidSignature::NoPrompt,
        ),
        (
            change(|it| it.outputs[0].shape = vec![-2]),
            InvalidSignature::Malformed("ANSWER".into()),
        ),
    ] {
        assert_eq!(got, Err(expect));
    }
}

/// TR-101
#[test]
fn tr_104_every_role_has_a_name() {
    for name in [
        "prompt",
        "messages",
        "tools",
        "template_args",
        "stream",
        "exclude_prompt",
        "sampling_json",
        "sampling.top_k",
        "want.finish_reason",
        "image",
        "port.text",
        "ignore",
        "control.repeat",
    ] {
        assert!(InputRole::from_name(name).is_some(), "{name}");
    }
    for name in [
        "text",
        "reasoning",
        "tool_calls",
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
        "embedding",
        "port.response",
    ] {
        assert!(OutputRole::from_name(name).is_some(), "{name}");
    }
    assert_eq!(InputRole::from_name("text"), None);
    assert_eq!(OutputRole::from_name("prompt"), None);
}

#[test]
fn tr_1306_json_inputs_accept_any_value_as_compact_text() {
    let union = Signature::union();
    let location = union.input("messages").unwrap();
    for (value, expect) in [
        (
            r#"[ {"role" : "user", "content":"x"} ]"#,
            r#"[{"role":"user","content":"x"}]"#,
        ),
        ("\"[]\"", "[]"),
    ] {
        let mapped = map(&union, &format!(r#"{{"messages":{value}}}"#)).unwrap();
        let tensor = mapped.tensor(location).unwrap();
        assert_eq!(*tensor, Tensor::texts([expect]));
    }
}

/// TR-501, TR-502
#[test]
fn tr_503_answers_are_compact_json_with_scalars_where_there_is_one_element() {
    let signature = every_datatype();
    let location = |name: &str| signature.output(name).unwrap();
    let mut odd = Strings::default();
    odd.push(b"a\xff\n");
    let response = ResponsePayload {
        outputs: vec![
            (location("bool"), Tensor::flat(TensorData::Bool(vec![true]))),
            (location("int8"), Tensor::flat(TensorData::Int(vec![-1, 2]))),
            (
                location("fp32"),
                Tensor::flat(TensorData::Float(vec![0.1, f64::NAN])),
            ),
            (
                location("fp64"),
                Tensor::flat(TensorData::Float(vec![f64::INFINITY])),
            ),
            (location("bytes"), Tensor::flat(TensorData::Bytes(odd))),
            (
                location("json"),
                Tensor::flat(TensorData::Bytes(Strings::default())),
            ),
        ],
        parameters: vec![
            ("p".into(), RequestParameter::Double(1.5)),
            ("q".into(), RequestParameter::Bool(false)),
        ],
    };
    let outputs = "\"bool\":true,\"int8\":[-1,2],\"fp32\":[0.1,null],\"fp64\":null,\"bytes\":\"a\u{fffd}\\n\",\
                   \"json\":[],\"p\":1.5,\"q\":false}";
    let head = AnswerHead::new(Some("a\"1"), "org/m", 3);
    let expect =
        format!("{{\"id\":\"a\\\"1\",\"model_name\":\"org/m\",\"model_version\":\"3\",{outputs}");
    assert_eq!(head.json(&signature, &response), expect);
    let mut events = b": before\n\n".to_vec();
    head.event(&signature, &response, &mut events);
    let events = String::from_utf8(events).unwrap();
    assert_eq!(events, format!(": before\n\ndata: {expect}\n\n"));
    let bare = AnswerHead::new(None, "m", 1);
    assert_eq!(
        bare.json(&signature, &ResponsePayload::default()),
        r#"{"model_name":"m","model_version":"1"}"#
    );
}

#[test]
fn the_fuzz_corpus_of_bodies_is_replayed() {
    corpus::replay("generate_body", fuzz::body);
}

#[test]
fn the_fuzz_corpus_of_messages_is_replayed() {
    corpus::replay("generate_message", fuzz::message);
}
