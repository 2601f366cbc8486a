//! Errors of requests that are refused before any work, with the texts that clients match.

use super::datatype::Datatype;
use crate::steer::InvalidChoice;

/// Why a request is refused. Clients match the texts, so they must not change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    /// TR-301: the body is not valid JSON.
    #[error("failed to parse the request JSON buffer: {reason} at {offset}")]
    Syntax {
        /// In RapidJSON's wording.
        reason: &'static str,
        /// Byte offset of the error.
        offset: usize,
    },
    /// TR-302: nested too deep.
    #[error("JSON nesting depth exceeds maximum allowed limit ({0})")]
    Depth(usize),
    /// An object has too many members.
    #[error("a JSON object has more than {0} members")]
    Members(usize),
    /// TR-303: the body is not an object.
    #[error("attempt to get members for non-object")]
    NoObject,
    /// TR-304: the id is not a string.
    #[error("Unable to parse 'id': attempt to access JSON non-string as string")]
    Id,
    /// TR-304: the id is too long.
    #[error("'id' must be at most {0} bytes long")]
    IdBytes(usize),
    /// TR-306: `parameters` is not an object.
    #[error(
        "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
    )]
    Parameters,
    /// TR-306: an error inside `parameters`.
    #[error("Converting keyword: 'parameters': {0}")]
    Nested(Box<Self>),
    /// TR-306: the model has an input of that name.
    #[error("Keyword 'parameters' for nested schema also given as input tensor name")]
    ParametersIsInput,
    /// TR-307: a parameter that is not a string, number or boolean.
    #[error("parameter '{0}' has invalid type. It should be either 'int', 'bool', or 'string'.")]
    ParameterType(String),
    /// TR-307: a parameter that the model does not know, in strict mode.
    #[error("unknown parameter '{name}' for model '{model}'")]
    UnknownParameter {
        /// The parameter.
        name: String,
        /// The model.
        model: String,
    },
    /// TR-309: the number of elements does not match the shape.
    #[error("The schema can not convert input '{0}' to tensor with proper shape")]
    Shape(String),
    /// TR-310: an element of the wrong JSON type.
    #[error("{}", wrong_type(*.0))]
    Type(Datatype),
    /// TR-310: half precision has no JSON form.
    #[error(
        "receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
    )]
    Half {
        /// `FP16` or `BF16`.
        datatype: Datatype,
        /// The input.
        name: String,
    },
    /// TR-311: an integer outside the range of its datatype.
    #[error("value {value} of input '{name}' is out of range for {datatype}")]
    Range {
        /// The integer as sent.
        value: String,
        /// The input.
        name: String,
        /// Its datatype.
        datatype: Datatype,
    },
    /// More dimensions than a tensor may have (D-47).
    #[error("a shape has more than {0} dimensions")]
    Rank(usize),
    /// More tensors than a request may have (D-47).
    #[error("a request has more than {0} inputs or outputs")]
    Tensors(usize),
    /// More elements than a tensor may have.
    #[error("input '{name}' has more than {max} elements")]
    Elements {
        /// The input.
        name: String,
        /// The limit.
        max: usize,
    },
    /// TR-313: an input given twice.
    #[error("[request id: {id}] input '{name}' already exists in request")]
    Twice {
        /// The request's id.
        id: String,
        /// The input.
        name: String,
    },
    /// TR-314: inputs are missing.
    #[error("{0}")]
    Missing(String),
    /// TR-315: the JSON text is too long.
    #[error(
        "request JSON size of {bytes} bytes exceeds the maximum allowed input size of {max} bytes. Use \
         --http-max-input-size to increase the limit."
    )]
    JsonBytes {
        /// Its length, as far as it was received.
        bytes: u64,
        /// The limit.
        max: usize,
    },
    /// TR-315: a body of raw bytes, or of JSON followed by raw bytes, is too large.
    #[error(
        "request body size of {bytes} bytes exceeds the maximum allowed input size of {max} bytes. Use \
         --http-max-input-size to increase the limit."
    )]
    BodyBytes {
        /// Its length, as far as it was received.
        bytes: u64,
        /// The limit.
        max: usize,
    },
    /// D-47: the message would take too much memory once it is decoded.
    #[error(
        "the message takes more than {max} bytes once it is decoded: send fewer tensors, parameters or elements"
    )]
    DecodedBytes {
        /// The limit.
        max: usize,
    },
    /// TR-315: all tensors together are too large.
    #[error(
        "request size of {before} bytes with input '{name}' of size {bytes} bytes exceeds the maximum allowed input \
         size of {max}. Use --http-max-input-size to increase the limit."
    )]
    TensorBytes {
        /// Bytes of the preceding inputs.
        before: usize,
        /// The input.
        name: String,
        /// Its bytes.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// A string that must be UTF-8 and is not.
    #[error("input '{0}' is not valid UTF-8")]
    Utf8(String),
    /// TR-403: `sampling_parameters` is not an object.
    #[error("sampling_parameters must be a JSON object: {0}")]
    SamplingJson(String),
    /// TR-403: a field of the wrong type or out of range.
    #[error("parameter '{field}' must be {range}, got {got}")]
    Field {
        /// The field.
        field: String,
        /// The permitted values.
        range: String,
        /// The value given, truncated.
        got: String,
    },
    /// TR-405: the prompt was requested in a stream.
    #[error("When streaming, `exclude_input_in_output` = False is not allowed.")]
    PromptInStream,
    /// TR-401: beam search was requested.
    #[error("beam search is not supported")]
    Beam,
    /// TR-401: known, but not supported.
    #[error("'{0}' is not supported")]
    Unsupported(String),
    /// TR-1305: a controller, or its argument, that cannot be read.
    #[error("parameter '{}' {}", .0.field, .0.why)]
    Controller(InvalidChoice),
    /// TR-1305: an argument for no controller.
    #[error("parameter 'controller_arg' needs a 'controller'")]
    ArgWithoutController,
    /// TR-1305: two patterns.
    #[error("parameters '{0}' and '{1}' cannot be combined: give one constraint")]
    Constraints(&'static str, &'static str),
    /// TR-805: a reserved parameter name.
    #[error(
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
    )]
    Reserved,
    /// An error in a request of infer (TR-802 to TR-804).
    #[error("{0}")]
    Infer(String),
}

/// Why a body cannot be decoded as its `Content-Encoding` says (TR-209).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Encoding {
    /// An encoding that generate does not support.
    #[error("Unsupported content-encoding '{0}', supported: identity, gzip, deflate, zstd.")]
    Unknown(String),
    /// An encoding other than identity, where the reference server decodes none.
    #[error("Unsupported content-encoding, only 'identity' is supported.")]
    IdentityOnly,
    /// An encoding that infer does not support.
    #[error("Unsupported compression type")]
    UnknownCompression,
    /// The bytes do not match the encoding.
    #[error("the request body is not valid {0} data")]
    Corrupt(&'static str),
}

fn wrong_type(datatype: Datatype) -> String {
    let (is, wanted) = match datatype {
        Datatype::Bytes => {
            return "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
                .into();
        }
        Datatype::Bool => ("non-boolean", "boolean"),
        Datatype::Int8 | Datatype::Int16 | Datatype::Int32 | Datatype::Int64 => {
            ("non-signed-integer", "signed-integer")
        }
        Datatype::Uint8 | Datatype::Uint16 | Datatype::Uint32 | Datatype::Uint64 => {
            ("non-unsigned-integer", "unsigned-integer")
        }
        Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64 => {
            ("non-number", "double")
        }
    };
    format!("Unable to parse 'data': attempt to access JSON {is} as {wanted}")
}
