//! D-47: the contents of a request are limited while they are parsed.

use super::*;
use crate::generated::inference::model_infer_request::InferInputTensor;
use crate::generated::inference::{InferParameter, InferTensorContents, ModelInferRequest};

fn infer(inputs: &str) -> Result<Infer, String> {
    let body = format!(r#"{{"inputs":[{inputs}]}}"#);
    let (signature, limits) = (Signature::union(), RequestLimits::default());
    let read = mapper(&signature, &limits).infer(body.as_bytes(), None);
    read.map_err(|refused| refused.to_string())
}

fn list(count: usize) -> String {
    format!("[{}]", vec![r#""a""#; count].join(","))
}

#[test]
fn d_47_a_shape_has_sixteen_dimensions_at_most() {
    let shaped = |rank: usize| {
        let shape = vec!["1"; rank].join(",");
        infer(&format!(
            r#"{{"name":"text_input","datatype":"BYTES","shape":[{shape}],"data":["x"]}}"#
        ))
    };
    assert!(shaped(16).is_ok());
    assert_eq!(
        shaped(17).unwrap_err(),
        "a shape has more than 16 dimensions"
    );
}

#[test]
fn d_47_errors_truncate_the_client_text_that_they_quote() {
    let refused = infer(r#"{"name":"text_input","datatype":"BYTES","shape":[2,2],"data":["x"]}"#);
    assert!(refused.unwrap_err().len() < 256);
    let name = "n".repeat(10_000);
    let refused = infer(&format!(
        r#"{{"name":"{name}","datatype":"BYTES","shape":[1],"data":["x"]}}"#
    ));
    assert!(refused.unwrap_err().len() < 512);
    let body = format!(r#"{{"text_input":"x","temperature":"{name}"}}"#);
    assert!(map(&Signature::union(), &body).unwrap_err().len() < 512);
    let body = format!(r#"{{"text_input":"x","{name}":null}}"#);
    assert!(map(&Signature::union(), &body).unwrap_err().len() < 512);
}

#[test]
fn d_47_errors_truncate_names_of_inputs_and_parameters_in_messages() {
    let name = "n".repeat(10_000);
    let input = InferInputTensor {
        name: name.clone(),
        contents: Some(InferTensorContents::default()),
        ..InferInputTensor::default()
    };
    let parametered = ModelInferRequest {
        parameters: [(name.clone(), InferParameter::default())].into(),
        ..ModelInferRequest::default()
    };
    let both = ModelInferRequest {
        inputs: vec![input],
        raw_input_contents: vec![Default::default()],
        ..ModelInferRequest::default()
    };
    let (signature, limits) = (Signature::union(), RequestLimits::default());
    for (message, expect) in [
        (parametered, "has invalid type"),
        (both, "contents field must not be specified"),
    ] {
        let refused = mapper(&signature, &limits).message(&message).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains(expect) && refused.len() < 512, "{expect}");
    }
    let refused = infer(&format!(
        r#"{{"name":"{name}","parameters":{{"binary_data_size":1}}}}"#
    ));
    let refused = refused.unwrap_err();
    assert!(refused.contains("unexpected end of input data") && refused.len() < 512);
}

#[test]
fn d_47_a_nested_list_is_read_in_one_pass() {
    let every = every_datatype();
    let read = |value: &str| {
        let mapped = map(&every, &format!(r#"{{"bytes":{value}}}"#))?;
        let data = &mapped.tensors[0].1.data;
        let TensorData::Bytes(texts) = data else {
            panic!("{data:?} are no texts");
        };
        let texts = texts.iter().map(|text| String::from_utf8_lossy(text));
        Ok::<_, String>(texts.collect::<Vec<_>>().join("|"))
    };
    let shape = "The schema can not convert input 'bytes' to tensor with proper shape";
    let kind = "Unable to parse JSON bytes array: attempt to access JSON non-string as string";
    for (value, expect) in [
        (r#"["a","b"]"#, Ok("a|b")),
        (" [ [ \"a]\" ] ,\n\t[[\"\\\\\"]]\r] ", Ok("a]|\\")),
        // As many elements as the outer list has, wherever they are.
        (r#"[["a","b"],[]]"#, Ok("a|b")),
        (r#"[["a","b"]]"#, Err(shape)),
        (r#"[[],[]]"#, Err(shape)),
        (r#"["[\"",["\",]"]]"#, Ok("[\"|\",]")),
        (r#"["a",{"b":["c"]}]"#, Err(kind)),
        (r#"["a",[null]]"#, Err(kind)),
    ] {
        let expect = expect.map(str::to_owned).map_err(str::to_owned);
        assert_eq!(read(value), expect, "{value}");
    }
    // Each level of nesting would read its blanks again.
    let blanks = " ".repeat(1 << 20);
    let deep = format!(r#"[{}"a"{blanks}{},"b"]"#, "[".repeat(97), "]".repeat(97));
    assert_eq!(read(&deep), Ok("a|b".to_owned()));
}

#[test]
fn d_47_stop_words_and_bad_words_are_limited_while_they_are_parsed() {
    for name in ["stop_words", "bad_words"] {
        let given = |count| {
            let body = format!(r#"{{"text_input":"x","{name}":{}}}"#, list(count));
            map(&Signature::union(), &body)
        };
        assert!(given(64).is_ok());
        let refused = given(65).unwrap_err();
        assert!(
            refused.contains("must be at most 64 strings of at most 1024 bytes"),
            "{refused}"
        );
        // As a tensor: refused by its shape alone.
        let tensor = |count: usize| {
            infer(&format!(
                r#"{{"name":"text_input","datatype":"BYTES","shape":[1],"data":["x"]}},
                {{"name":"{name}","datatype":"BYTES","shape":[{count}],"data":{}}}"#,
                list(count)
            ))
        };
        assert!(tensor(64).is_ok());
        assert!(tensor(65).unwrap_err().contains("at most 64 strings"));
    }
}

#[test]
fn d_47_sampling_parameters_are_limited_while_they_are_parsed() {
    let settings = |count: usize| {
        let list = format!(r#"{{\"x\":[{}]}}"#, vec!["0"; count].join(","));
        let body = format!(r#"{{"text_input":"x","sampling_parameters":"{list}"}}"#);
        let signature = Signature::union();
        let mapped = map(&signature, &body).unwrap();
        Settings::of(&signature, &mapped, &RequestLimits::default())
            .map_err(|refused| refused.to_string())
    };
    // An object counts eight, and the list is one.
    assert!(settings(9_991).is_ok());
    assert_eq!(
        settings(9_992).unwrap_err(),
        "sampling_parameters must be a JSON object: more than 10000 JSON values"
    );
}

#[test]
fn d_47_messages_are_stored_as_compact_text() {
    let body = r#"{"messages": [ {"role" : "user",
        "content": "a  \" b\\" } ] }"#;
    let mapped = map(&Signature::union(), body).unwrap();
    let (_, tensor) = &mapped.tensors[0];
    let expect = r#"[{"role":"user","content":"a  \" b\\"}]"#;
    assert_eq!(**tensor, Tensor::texts([expect]));
}

#[test]
fn tr_307_of_many_parameters_the_first_of_a_name_counts() {
    let limits = RequestLimits::default();
    let members = |value: usize| {
        let each = (0..limits.json_members - 1).map(|at| format!(r#""p{at}":{value}"#));
        each.collect::<Vec<_>>().join(",")
    };
    let body = format!(
        r#"{{{},"parameters":{{"text_input":"x",{}}}}}"#,
        members(1),
        members(2)
    );
    let mapped = map(&Signature::union(), &body).unwrap();
    assert_eq!(mapped.parameters.len(), limits.json_members - 1);
    assert_eq!(mapped.unknown as usize, 2 * (limits.json_members - 1));
    for name in ["p0", "p9998"] {
        assert_eq!(mapped.parameter(name), Some(&RequestParameter::Int(1)));
    }
}

/// D-20
#[test]
fn tr_307_a_sampling_field_as_an_input_has_one_element() {
    let alias = |data: &str| {
        let field =
            format!(r#"{{"name":"max_new_tokens","datatype":"INT32","shape":[1],"data":{data}}}"#);
        let prompt = r#"{"name":"text_input","datatype":"BYTES","shape":[1],"data":["x"]}"#;
        let infer = infer(&format!("{prompt},{field}"))?;
        Ok::<_, String>(infer.mapped.parameter("max_new_tokens").cloned())
    };
    for one in ["5", "[5]", "[[\n5 ]]"] {
        assert_eq!(alias(one), Ok(Some(RequestParameter::Int(5))), "{one}");
    }
    for not_one in ["[1,2]", "[[1],[2]]", r#"["a","b"]"#, "[]"] {
        let refused = alias(not_one).unwrap_err();
        assert!(
            refused.contains("unexpected inference input 'max_new_tokens'"),
            "{refused}"
        );
    }
}
