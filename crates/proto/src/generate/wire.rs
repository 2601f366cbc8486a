//! Walks the fields of a gRPC message and counts their decoded size, without decoding it (D-47).
//!
//! Decoded, a message can be a hundred times as large as its bytes: an empty tensor takes two bytes, a dimension of a
//! shape one. The generated decoder allocates all of it at once, so the bytes are checked before.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::limits::RequestLimits;
use super::refused::InvalidRequest;

/// Checks the bytes of a `ModelInferRequest`; returns an upper bound of the memory that the message takes.
///
/// # Errors
/// `Tensors`, `Rank`, `Members` and `MessageBytes`; `Malformed` for bytes that are not a message.
pub fn request_bytes(message: &[u8], limits: &RequestLimits) -> Result<usize, InvalidRequest> {
    let mut counting = FieldCounter {
        limits,
        bytes: 0,
        inputs: 0,
        outputs: 0,
        parameters: 0,
    };
    each_field(message, &mut |tag, value| counting.request(tag, value))?;
    Ok(counting.bytes)
}

/// The value of a field.
#[derive(Clone, Copy)]
enum WireValue<'a> {
    /// A number; its value is not needed.
    Number,
    Bytes(&'a [u8]),
}

fn each_field<'a>(
    mut rest: &'a [u8],
    each: &mut dyn FnMut(u32, WireValue<'a>) -> Result<(), InvalidRequest>,
) -> Result<(), InvalidRequest> {
    while !rest.is_empty() {
        let (tag, kind) = decode_key(&mut rest).map_err(|_| InvalidRequest::Malformed)?;
        let value = if kind == WireType::LengthDelimited {
            let len = decode_varint(&mut rest).map_err(|_| InvalidRequest::Malformed)?;
            let len = usize::try_from(len).map_err(|_| InvalidRequest::Malformed)?;
            let (value, after) = rest
                .split_at_checked(len)
                .ok_or(InvalidRequest::Malformed)?;
            rest = after;
            WireValue::Bytes(value)
        } else {
            skip_field(kind, tag, &mut rest, DecodeContext::default())
                .map_err(|_| InvalidRequest::Malformed)?;
            WireValue::Number
        };
        each(tag, value)?;
    }
    Ok(())
}

/// Counts of one message.
struct FieldCounter<'a> {
    limits: &'a RequestLimits,
    bytes: usize,
    inputs: usize,
    outputs: usize,
    parameters: usize,
}

impl FieldCounter<'_> {
    fn request(&mut self, tag: u32, value: WireValue<'_>) -> Result<(), InvalidRequest> {
        match (tag, value) {
            (PARAMETERS, WireValue::Bytes(bytes)) => self.parameter(bytes.len()),
            (INPUTS, WireValue::Bytes(tensor)) => {
                self.inputs += 1;
                self.tensor(self.inputs)?;
                let mut rank = 0;
                each_field(tensor, &mut |tag, value| self.input(tag, value, &mut rank))
            }
            (OUTPUTS, WireValue::Bytes(output)) => {
                self.outputs += 1;
                self.tensor(self.outputs)?;
                each_field(output, &mut |tag, value| match (tag, value) {
                    (OUTPUT_PARAMETERS, WireValue::Bytes(bytes)) => self.parameter(bytes.len()),
                    (_, value) => self.text(value),
                })
            }
            // Each is a view of the message, not a copy.
            (RAW_CONTENTS, WireValue::Bytes(bytes)) => self.add(ENTRY_BYTES + bytes.len()),
            (_, value) => self.text(value),
        }
    }

    fn input(
        &mut self,
        tag: u32,
        value: WireValue<'_>,
        rank: &mut usize,
    ) -> Result<(), InvalidRequest> {
        match (tag, value) {
            (SHAPE, value) => {
                // Added up, because a list may come in several fields, packed or not.
                *rank += numbers(value);
                if *rank > self.limits.tensor_rank {
                    return Err(InvalidRequest::Rank(self.limits.tensor_rank));
                }
                Ok(())
            }
            (INPUT_PARAMETERS, WireValue::Bytes(bytes)) => self.parameter(bytes.len()),
            (CONTENTS, WireValue::Bytes(contents)) => {
                each_field(contents, &mut |tag, value| self.contents(tag, value))
            }
            (_, value) => self.text(value),
        }
    }

    fn contents(&mut self, tag: u32, value: WireValue<'_>) -> Result<(), InvalidRequest> {
        let bytes = match (tag, value) {
            (BOOLS, value) => numbers(value),
            (INTS | UINTS, value) => numbers(value) * 4,
            (INT64S | UINT64S, value) => numbers(value) * 8,
            // Four or eight bytes each, as on the wire.
            (FP32S | FP64S, WireValue::Bytes(bytes)) => bytes.len(),
            (FP32S | FP64S, WireValue::Number) => 8,
            (STRINGS, WireValue::Bytes(bytes)) => ENTRY_BYTES + bytes.len(),
            _ => 0,
        };
        self.add(bytes)
    }

    fn parameter(&mut self, bytes: usize) -> Result<(), InvalidRequest> {
        self.parameters += 1;
        if self.parameters > self.limits.json_members {
            return Err(InvalidRequest::Members(self.limits.json_members));
        }
        self.add(TENSOR_BYTES + bytes)
    }

    fn tensor(&mut self, count: usize) -> Result<(), InvalidRequest> {
        if count > self.limits.tensors {
            return Err(InvalidRequest::Tensors(self.limits.tensors));
        }
        self.add(TENSOR_BYTES)
    }

    fn text(&mut self, value: WireValue<'_>) -> Result<(), InvalidRequest> {
        match value {
            WireValue::Bytes(bytes) => self.add(bytes.len()),
            WireValue::Number => Ok(()),
        }
    }

    fn add(&mut self, bytes: usize) -> Result<(), InvalidRequest> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limits.input_bytes {
            return Err(InvalidRequest::MessageBytes(self.limits.input_bytes));
        }
        Ok(())
    }
}

/// Number of numbers in a field: each packed one ends with a byte below 128.
fn numbers(value: WireValue<'_>) -> usize {
    match value {
        WireValue::Number => 1,
        WireValue::Bytes(bytes) => bytes.iter().filter(|byte| **byte < 0x80).count(),
    }
}

/// Memory of a view of bytes, or of a string, without its bytes.
const ENTRY_BYTES: usize = 64;
/// Memory of a tensor or a parameter, without its texts.
const TENSOR_BYTES: usize = 256;

// The fields of `ModelInferRequest` and of the messages within it.
const PARAMETERS: u32 = 4;
const INPUTS: u32 = 5;
const OUTPUTS: u32 = 6;
const RAW_CONTENTS: u32 = 7;
const SHAPE: u32 = 3;
const INPUT_PARAMETERS: u32 = 4;
const CONTENTS: u32 = 5;
const OUTPUT_PARAMETERS: u32 = 2;
const BOOLS: u32 = 1;
const INTS: u32 = 2;
const INT64S: u32 = 3;
const UINTS: u32 = 4;
const UINT64S: u32 = 5;
const FP32S: u32 = 6;
const FP64S: u32 = 7;
const STRINGS: u32 = 8;

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::generated::inference::model_infer_request::{
        InferInputTensor, InferRequestedOutputTensor,
    };
    use crate::generated::inference::{InferTensorContents, ModelInferRequest};

    fn check(
        message: &ModelInferRequest,
        limits: &RequestLimits,
        expect: Result<(), InvalidRequest>,
    ) {
        let counted = request_bytes(&message.encode_to_vec(), limits);
        assert_eq!(counted.map(|_| ()), expect);
    }

    fn input(tensor: InferInputTensor) -> ModelInferRequest {
        ModelInferRequest {
            inputs: vec![tensor],
            ..ModelInferRequest::default()
        }
    }

    fn contents(contents: InferTensorContents) -> ModelInferRequest {
        input(InferInputTensor {
            contents: Some(contents),
            ..InferInputTensor::default()
        })
    }

    #[test]
    fn d_47_the_rank_of_a_shape_is_bounded_before_it_is_decoded() {
        let limits = RequestLimits::default();
        let shape = |rank| {
            input(InferInputTensor {
                shape: vec![1; rank],
                ..InferInputTensor::default()
            })
        };
        check(&shape(16), &limits, Ok(()));
        check(&shape(17), &limits, Err(InvalidRequest::Rank(16)));
        // Not packed, as older libraries encode them: field 3 as single numbers.
        let one_by_one = |rank| {
            let tensor = [SHAPE as u8 * 8, 1].repeat(rank);
            [&[INPUTS as u8 * 8 + 2, tensor.len() as u8], &tensor[..]].concat()
        };
        assert!(request_bytes(&one_by_one(16), &limits).is_ok());
        let error = request_bytes(&one_by_one(17), &limits);
        assert_eq!(error, Err(InvalidRequest::Rank(16)));
    }

    #[test]
    fn d_47_tensors_and_parameters_are_bounded_before_they_are_decoded() {
        let limits = RequestLimits {
            tensors: 2,
            json_members: 2,
            ..RequestLimits::default()
        };
        let inputs = |count| ModelInferRequest {
            inputs: vec![InferInputTensor::default(); count],
            ..ModelInferRequest::default()
        };
        check(&inputs(2), &limits, Ok(()));
        check(&inputs(3), &limits, Err(InvalidRequest::Tensors(2)));
        let outputs = |count| ModelInferRequest {
            outputs: vec![InferRequestedOutputTensor::default(); count],
            ..ModelInferRequest::default()
        };
        check(&outputs(2), &limits, Ok(()));
        check(&outputs(3), &limits, Err(InvalidRequest::Tensors(2)));
        // Counted over the request and its tensors together.
        let parameter = |name: &str| (name.to_owned(), Default::default());
        let mut message = inputs(1);
        message.inputs[0].parameters = [parameter("a")].into();
        message.parameters = [parameter("a")].into();
        check(&message, &limits, Ok(()));
        message.parameters = ["a", "b"].map(parameter).into();
        check(&message, &limits, Err(InvalidRequest::Members(2)));
    }

    #[test]
    fn d_47_elements_are_counted_as_they_will_be_stored() {
        let room = |bytes| RequestLimits {
            input_bytes: TENSOR_BYTES + bytes,
            ..RequestLimits::default()
        };
        let numbers = |count: usize| {
            contents(InferTensorContents {
                int64_contents: vec![1; count],
                ..InferTensorContents::default()
            })
        };
        check(&numbers(10), &room(80), Ok(()));
        let max = TENSOR_BYTES + 80;
        check(
            &numbers(11),
            &room(80),
            Err(InvalidRequest::MessageBytes(max)),
        );
        let strings = |count: usize| {
            contents(InferTensorContents {
                bytes_contents: vec![Default::default(); count],
                ..InferTensorContents::default()
            })
        };
        check(&strings(10), &room(10 * ENTRY_BYTES), Ok(()));
        let max = TENSOR_BYTES + 10 * ENTRY_BYTES;
        let error = Err(InvalidRequest::MessageBytes(max));
        check(&strings(11), &room(10 * ENTRY_BYTES), error);
        let raw = |count| ModelInferRequest {
            raw_input_contents: vec![Default::default(); count],
            ..ModelInferRequest::default()
        };
        check(&raw(5), &room(ENTRY_BYTES), Ok(()));
        let max = TENSOR_BYTES + ENTRY_BYTES;
        check(
            &raw(6),
            &room(ENTRY_BYTES),
            Err(InvalidRequest::MessageBytes(max)),
        );
    }

    #[test]
    fn d_47_malformed_messages_are_refused() {
        let limits = RequestLimits::default();
        for bytes in [&[0xff][..], &[INPUTS as u8 * 8 + 2, 9, 0], &[0x0a, 0xff]] {
            assert_eq!(
                request_bytes(bytes, &limits),
                Err(InvalidRequest::Malformed)
            );
        }
    }
}
