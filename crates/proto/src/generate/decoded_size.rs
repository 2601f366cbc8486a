//! Computes the memory that a gRPC message takes once it is decoded, before it is decoded (D-47).
//!
//! An empty tensor is two bytes on the wire and hundreds as a struct; a number is one byte and then eight. The bytes
//! are only walked: nothing is allocated, and malformed input is left to the decoder, which stops at the same position.

use super::limits::RequestLimits;
use super::refused::InvalidRequest;

/// An upper bound of the memory that an encoded `ModelInferRequest` takes once it is decoded, including its texts.
#[must_use]
pub fn decoded_bytes(message: &[u8]) -> usize {
    measured(message, |number, field| match number {
        INPUTS => sum(INPUT, of_input(field)),
        OUTPUTS => sum(INPUT, of_entries(field, 2)),
        PARAMETERS => sum(ENTRY, field.len()),
        // A view of the message itself, not a copy.
        RAW => ELEMENT,
        _ => sum(ELEMENT, field.len()),
    })
}

/// The same for an encoded `ModelInferResponse`.
#[must_use]
pub fn decoded_answer_bytes(message: &[u8]) -> usize {
    measured(message, |number, field| match number {
        // Its tensors have the same field numbers as those of a request.
        ANSWER_OUTPUTS => sum(INPUT, of_input(field)),
        PARAMETERS => sum(ENTRY, field.len()),
        ANSWER_RAW => ELEMENT,
        _ => sum(ELEMENT, field.len()),
    })
}

/// The same for an encoded `ModelStreamInferResponse`.
#[must_use]
pub fn decoded_part_bytes(message: &[u8]) -> usize {
    measured(message, |number, field| match number {
        PART_ANSWER => sum(ELEMENT, decoded_answer_bytes(field)),
        _ => sum(ELEMENT, field.len()),
    })
}

impl RequestLimits {
    /// Checks whether a message may be decoded whose decoded form takes this many bytes.
    ///
    /// # Errors
    /// `DecodedBytes` above twice the limit for tensor bytes: texts and shapes come in addition.
    pub fn admit_message(&self, decoded: usize) -> Result<(), InvalidRequest> {
        let max = self.input_bytes.saturating_mul(2);
        if decoded > max {
            return Err(InvalidRequest::DecodedBytes { max });
        }
        Ok(())
    }
}

fn of_input(input: &[u8]) -> usize {
    // Unknown fields count as their bytes: the decoder skips them, and a bound may be too high.
    measured(input, |number, field| match number {
        SHAPE => numbers(field, 8),
        INPUT_PARAMETERS => sum(ENTRY, field.len()),
        CONTENTS => of_contents(field),
        _ => field.len(),
    })
}

fn of_contents(contents: &[u8]) -> usize {
    measured(contents, |number, field| match number {
        INTS | UINTS => numbers(field, 4),
        INTS64 | UINTS64 => numbers(field, 8),
        BYTES => sum(ELEMENT, field.len()),
        // Fixed-width numbers, packed or a single one; the list may have grown to twice their size.
        _ => field.len().max(8).saturating_mul(2),
    })
}

/// Packed numbers of this size each, or a single one, in a list that grows by doubling.
fn numbers(packed: &[u8], bytes: usize) -> usize {
    let count = packed.iter().filter(|byte| **byte < 0x80).count();
    count.max(1).saturating_mul(2 * bytes)
}

fn of_entries(message: &[u8], entries: u64) -> usize {
    let entries = measured(
        message,
        |number, _| if number == entries { ENTRY } else { 0 },
    );
    sum(message.len(), entries)
}

/// The sum over all fields, by number and content.
fn measured(message: &[u8], field_bytes: impl Fn(u64, &[u8]) -> usize) -> usize {
    let mut total = 0;
    walk(message, &mut |number, field| {
        total = sum(total, field_bytes(number, field))
    });
    total
}

/// Calls `see` with the number and the content of each field; a plain number has no content. Groups, which no known
/// client sends, are walked as well.
fn walk(mut message: &[u8], see: &mut impl FnMut(u64, &[u8])) {
    while !message.is_empty() {
        let Some(tag) = varint(&mut message) else {
            return;
        };
        let length = match tag & 7 {
            0 => match varint(&mut message) {
                Some(_) => 0,
                None => return,
            },
            1 => 8,
            2 => match varint(&mut message).map(usize::try_from) {
                Some(Ok(length)) => length,
                _ => return,
            },
            // The fields within a group count as if they were outside: the sum stays an upper bound.
            3 | 4 => continue,
            5 => 4,
            _ => return,
        };
        let Some((field, rest)) = message.split_at_checked(length) else {
            return;
        };
        see(tag >> 3, field);
        message = rest;
    }
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    // A varint has at most ten bytes; a longer one is malformed to the decoder as well.
    for location in 0..10 {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f).checked_shl(7 * location)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

const fn sum(one: usize, other: usize) -> usize {
    one.saturating_add(other)
}

// Field numbers; a test compares them with the generated code.
const PARAMETERS: u64 = 4;
const INPUTS: u64 = 5;
const OUTPUTS: u64 = 6;
const SHAPE: u64 = 3;
const INPUT_PARAMETERS: u64 = 4;
const CONTENTS: u64 = 5;
const INTS: u64 = 2;
const INTS64: u64 = 3;
const UINTS: u64 = 4;
const UINTS64: u64 = 5;
const BYTES: u64 = 8;
const RAW: u64 = 7;
const ANSWER_OUTPUTS: u64 = 5;
const ANSWER_RAW: u64 = 6;
const PART_ANSWER: u64 = 2;

/// A tensor without content: the struct, in a list that grows by doubling.
const INPUT: usize = 1024;
/// An entry of a map, with its share of the map's nodes.
const ENTRY: usize = 256;
/// A text or payload without content: its pointer, and the minimum allocation for it.
const ELEMENT: usize = 80;

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::generated::inference::model_infer_request::{
        InferInputTensor, InferRequestedOutputTensor,
    };
    use crate::generated::inference::model_infer_response::InferOutputTensor;
    use crate::generated::inference::{
        InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse,
        ModelStreamInferResponse,
    };

    fn input(contents: InferTensorContents) -> ModelInferRequest {
        let inputs = vec![InferInputTensor {
            contents: Some(contents),
            ..InferInputTensor::default()
        }];
        ModelInferRequest {
            inputs,
            ..ModelInferRequest::default()
        }
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "one table")]
    fn d_47_every_list_of_a_message_is_counted_before_it_is_decoded() {
        const N: usize = 10_000;
        let none = InferTensorContents::default;
        let parameters = |n: usize| (0..n).map(|i| (i.to_string(), InferParameter::default()));
        let mut shaped = input(none());
        shaped.inputs[0].shape = vec![1; N];
        let mut parametered = input(none());
        parametered.inputs[0].parameters = parameters(N).collect();
        let output = InferRequestedOutputTensor {
            parameters: parameters(N).collect(),
            ..InferRequestedOutputTensor::default()
        };
        let plain = ModelInferRequest::default;
        for (least, message) in [
            (
                N * size_of::<InferInputTensor>(),
                ModelInferRequest {
                    inputs: vec![InferInputTensor::default(); N],
                    ..plain()
                },
            ),
            (
                N * size_of::<InferRequestedOutputTensor>(),
                ModelInferRequest {
                    outputs: vec![InferRequestedOutputTensor::default(); N],
                    ..plain()
                },
            ),
            (
                N * 80,
                ModelInferRequest {
                    outputs: vec![output],
                    ..plain()
                },
            ),
            (
                N * 80,
                ModelInferRequest {
                    parameters: parameters(N).collect(),
                    ..plain()
                },
            ),
            (
                N * 32,
                ModelInferRequest {
                    raw_input_contents: vec![Default::default(); N],
                    ..plain()
                },
            ),
            (N * 8, shaped),
            (N * 80, parametered),
            (
                N,
                input(InferTensorContents {
                    bool_contents: vec![true; N],
                    ..none()
                }),
            ),
            (
                N * 4,
                input(InferTensorContents {
                    int_contents: vec![1; N],
                    ..none()
                }),
            ),
            (
                N * 8,
                input(InferTensorContents {
                    int64_contents: vec![1; N],
                    ..none()
                }),
            ),
            (
                N * 4,
                input(InferTensorContents {
                    uint_contents: vec![1; N],
                    ..none()
                }),
            ),
            (
                N * 8,
                input(InferTensorContents {
                    uint64_contents: vec![1; N],
                    ..none()
                }),
            ),
            (
                N * 4,
                input(InferTensorContents {
                    fp32_contents: vec![1.0; N],
                    ..none()
                }),
            ),
            (
                N * 8,
                input(InferTensorContents {
                    fp64_contents: vec![1.0; N],
                    ..none()
                }),
            ),
            (
                N * 24,
                input(InferTensorContents {
                    bytes_contents: vec![Vec::new(); N],
                    ..none()
                }),
            ),
        ] {
            let bytes = message.encode_to_vec();
            let counted = decoded_bytes(&bytes);
            assert!(
                counted >= least,
                "{counted} < {least} of {} bytes",
                bytes.len()
            );
            // A truncated message is counted as far as it goes.
            assert!(decoded_bytes(&bytes[..bytes.len() - 1]) <= counted);
        }
        // Numbers that are not packed, which decoders accept too.
        let sparse: Vec<u8> = [0x18, 1].repeat(N);
        let head = [&[0x2a][..], &prost_length(sparse.len())].concat();
        assert!(decoded_bytes(&[head, sparse].concat()) >= N * 8);
    }

    #[test]
    fn d_47_every_list_of_an_answer_is_counted_before_it_is_decoded() {
        const N: usize = 10_000;
        let parameters = |n: usize| (0..n).map(|i| (i.to_string(), InferParameter::default()));
        let plain = ModelInferResponse::default;
        let shaped = InferOutputTensor {
            shape: vec![1; N],
            ..InferOutputTensor::default()
        };
        let texts = InferOutputTensor {
            contents: Some(InferTensorContents {
                bytes_contents: vec![Vec::new(); N],
                ..InferTensorContents::default()
            }),
            ..InferOutputTensor::default()
        };
        let of = |outputs| ModelInferResponse { outputs, ..plain() };
        let empty = vec![InferOutputTensor::default(); N];
        let raw = ModelInferResponse {
            raw_output_contents: vec![Vec::new().into(); N],
            ..plain()
        };
        let written = ModelInferResponse {
            parameters: parameters(N).collect(),
            ..plain()
        };
        for (least, answer) in [
            (N * size_of::<InferOutputTensor>(), of(empty)),
            (N * 8, of(vec![shaped])),
            (N * 24, of(vec![texts])),
            (N * 32, raw),
            (N * 80, written),
        ] {
            let bytes = answer.encode_to_vec();
            assert!(decoded_answer_bytes(&bytes) >= least, "{}", bytes.len());
            let part = ModelStreamInferResponse {
                infer_response: Some(answer),
                ..ModelStreamInferResponse::default()
            };
            assert!(decoded_part_bytes(&part.encode_to_vec()) >= least);
        }
    }

    fn prost_length(length: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        prost::encode_length_delimiter(length, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn d_47_an_ordinary_message_counts_little_more_than_its_bytes() {
        let text = "x".repeat(1 << 20);
        let bytes_contents = vec![text.into_bytes()];
        let message = input(InferTensorContents {
            bytes_contents,
            ..InferTensorContents::default()
        });
        let bytes = message.encode_to_vec();
        assert!(decoded_bytes(&bytes) < bytes.len() + 4096);
        assert_eq!(decoded_bytes(&[]), 0);
    }

    #[test]
    fn d_47_the_decoded_size_is_limited_to_twice_the_input_limit() {
        let limits = RequestLimits::default();
        assert!(limits.admit_message(128 << 20).is_ok());
        assert!(limits.admit_message((128 << 20) + 1).is_err());
    }
}
