//! Fuzz entry points: arbitrary bytes as a body or a message.
//!
//! Invariants for every input: a refusal, or tensors that match their signature; and responses that are JSON. Built for
//! tests and fuzzing only.

use prost::Message;

use super::{
    AnswerHead, Datatype, InputRole, InputTensor, Mapper, OutputRole, OutputTensor, RequestLimits,
    ResponsePayload, Settings, Signature, TensorData, error_body,
};
use crate::generated::inference::ModelInferRequest;

/// One input of every datatype, and one for JSON.
#[must_use]
pub fn every_datatype() -> Signature {
    let input = |datatype: &Datatype| InputTensor {
        name: datatype.name().to_lowercase(),
        datatype: *datatype,
        shape: vec![2, -1],
        optional: true,
        role: InputRole::Port(datatype.name().into()),
        accepts_json: false,
    };
    let mut inputs: Vec<_> = Datatype::ALL.iter().map(input).collect();
    inputs.push(InputTensor {
        name: "json".into(),
        shape: vec![1],
        accepts_json: true,
        ..input(&Datatype::Bytes)
    });
    let outputs = inputs.iter().map(|input| OutputTensor {
        name: input.name.clone(),
        datatype: input.datatype,
        shape: vec![-1],
        role: OutputRole::Port(input.name.clone()),
    });
    Signature {
        outputs: outputs.collect(),
        inputs,
        max_batch_size: 0,
        decoupled: true,
        lenient: false,
        tensorrt_llm: false,
    }
}

/// Reads `bytes` as the body of a request for either kind of model.
///
/// # Panics
/// If an invariant does not hold.
pub fn body(bytes: &[u8]) {
    let limits = RequestLimits {
        input_bytes: 1 << 16,
        json_members: 64,
        tensor_elements: 256,
        ..RequestLimits::default()
    };
    for signature in [Signature::union(), every_datatype()] {
        let mapper = mapper(&signature, &limits);
        infer(&mapper, bytes);
        let mapped = match mapper.map(bytes) {
            Ok(mapped) => mapped,
            Err(refused) => {
                let written = error_body(&refused.to_string());
                let written: serde_json::Value =
                    serde_json::from_slice(&written).expect("the error is not JSON");
                assert!(
                    written["error"]
                        .as_str()
                        .is_some_and(|text| !text.is_empty())
                );
                continue;
            }
        };
        fits(&mapper, &mapped);
        if let Ok(settings) = Settings::of(&signature, &mapped, &limits) {
            assert!(
                settings
                    .params
                    .max_tokens
                    .is_none_or(|max| max <= limits.new_tokens)
            );
            assert!(settings.params.stop.len() <= limits.stop_words);
        }
        echo(&signature, &mapped);
    }
}

fn mapper<'a>(signature: &'a Signature, limits: &'a RequestLimits) -> Mapper<'a> {
    Mapper {
        model: "m",
        signature,
        known: &[],
        strict: false,
        limits,
    }
}

/// Reads `bytes` as a message of the gRPC service for either kind of model.
///
/// # Panics
/// If an invariant does not hold.
pub fn message(bytes: &[u8]) {
    let Ok(message) = ModelInferRequest::decode(bytes) else {
        return;
    };
    let limits = RequestLimits {
        tensor_elements: 256,
        ..RequestLimits::default()
    };
    for signature in [Signature::union(), every_datatype()] {
        let mapper = mapper(&signature, &limits);
        let mapped = match mapper.message(&message) {
            Ok(mapped) => mapped,
            Err(refused) => {
                assert!(!refused.to_string().is_empty());
                continue;
            }
        };
        fits(&mapper, &mapped);
        let _ = Settings::of(&signature, &mapped, &limits);
        let response = echoed(&signature, &mapped);
        let written = response.message(&signature);
        assert_eq!(written.outputs.len(), written.raw_output_contents.len());
        assert_eq!(written.outputs.len(), response.outputs.len());
    }
}

/// Checks that every tensor is of its datatype's kind, and has as many elements as its shape requires.
fn fits(mapper: &Mapper<'_>, mapped: &super::Mapped) {
    for (location, tensor) in &mapped.tensors {
        let elements: i64 = tensor.shape.iter().product();
        assert_eq!(usize::try_from(elements), Ok(tensor.data.len()));
        assert!(tensor.data.len() <= mapper.limits.tensor_elements);
        let kind = TensorData::empty(mapper.signature.inputs[*location].datatype);
        assert_eq!(
            std::mem::discriminant(&kind),
            std::mem::discriminant(&tensor.data)
        );
    }
}

/// Reads the same bytes as a body of infer: as JSON alone, and with the JSON ending at its last brace.
fn infer(mapper: &Mapper<'_>, bytes: &[u8]) {
    let end = bytes.iter().rposition(|byte| *byte == b'}');
    let end = end.map_or(0, |end| end + 1).to_string();
    for header in [None, Some(end.as_str()), Some("0")] {
        let Ok(infer) = mapper.infer(bytes, header) else {
            continue;
        };
        fits(mapper, &infer.mapped);
        let response = echoed(mapper.signature, &infer.mapped);
        let head = AnswerHead::new(infer.mapped.id.as_deref(), "m", 1);
        let (json, _) = infer.answer(&head, mapper.signature, &response);
        serde_json::from_slice::<serde_json::Value>(&json).expect("the response is not JSON");
    }
}

/// A response with the tensors and parameters of a request, as far as the signature has outputs for them.
fn echoed(signature: &Signature, mapped: &super::Mapped) -> ResponsePayload {
    let outputs = mapped.tensors.iter();
    let outputs = outputs.filter(|(location, _)| *location < signature.outputs.len());
    let parameters = mapped.parameters.iter();
    ResponsePayload {
        outputs: outputs
            .map(|(location, tensor)| (*location, (**tensor).clone()))
            .collect(),
        parameters: parameters
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
    }
}

/// Encodes the input as a response, which must be one line of JSON.
fn echo(signature: &Signature, mapped: &super::Mapped) {
    let response = echoed(signature, mapped);
    let head = AnswerHead::new(mapped.id.as_deref(), "m", 1);
    let mut event = Vec::new();
    head.event(signature, &response, &mut event);
    let text = event
        .strip_prefix(b"data: ")
        .and_then(|text| text.strip_suffix(b"\n\n"));
    let text = text.expect("the response is not one event");
    assert!(!text.contains(&b'\n'));
    serde_json::from_slice::<serde_json::Value>(text).expect("the event is not JSON");
}
