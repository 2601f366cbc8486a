//! Encodes responses: one JSON object, or one server-sent event (TR-502, TR-503, TR-601 to TR-604).

use bytes::Bytes;
use serde::Serialize;

use super::datatype::Datatype;
use super::request::RequestParameter;
use super::signature::Signature;
use super::tensor::{Tensor, TensorData};

/// One response of a model: outputs by their index in the signature, in that order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponsePayload {
    /// The outputs of the model.
    pub outputs: Vec<(usize, Tensor)>,
    /// Additional parameters.
    pub parameters: Vec<(String, RequestParameter)>,
}

/// The members that all responses of a request begin with, encoded once.
#[derive(Clone, Debug)]
pub struct AnswerHead(String);

impl AnswerHead {
    /// The members `id`, if there is one, `model_name` and `model_version`.
    #[must_use]
    pub fn new(id: Option<&str>, model: &str, version: u64) -> Self {
        let id = id.map_or_else(String::new, |id| format!("\"id\":{},", text(id)));
        Self(format!(
            "{{{id}\"model_name\":{},\"model_version\":\"{version}\"",
            text(model)
        ))
    }

    /// The members as the beginning of an object that is not closed.
    pub(super) fn open(&self) -> &str {
        &self.0
    }

    /// The response of `/generate`.
    #[must_use]
    pub fn json(&self, signature: &Signature, response: &ResponsePayload) -> Bytes {
        let mut out = Vec::with_capacity(self.0.len() + 128);
        self.write(&mut out, signature, response);
        out.into()
    }

    /// Appends the same as a server-sent event.
    pub fn event(&self, signature: &Signature, response: &ResponsePayload, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: ");
        self.write(out, signature, response);
        out.extend_from_slice(b"\n\n");
    }

    fn write(&self, out: &mut Vec<u8>, signature: &Signature, response: &ResponsePayload) {
        out.extend_from_slice(self.0.as_bytes());
        for (location, tensor) in &response.outputs {
            // An index beyond the signature would be a defect of a model: its output is left out, because a panic here
            // would lose the whole response.
            let Some(output) = signature.outputs.get(*location) else {
                continue;
            };
            out.push(b',');
            put(out, &output.name);
            out.push(b':');
            write_tensor(out, output.datatype, tensor);
        }
        for (name, value) in &response.parameters {
            out.push(b',');
            put(out, name);
            out.push(b':');
            write_parameter(out, value);
        }
        out.push(b'}');
    }
}

/// The body of an error (TR-205).
#[must_use]
pub fn error_body(message: &str) -> Bytes {
    format!("{{\"error\":{}}}", text(message)).into()
}

/// An error as an event (TR-604).
#[must_use]
pub fn error_event(message: &str) -> Bytes {
    format!("data: {{\"error\":{}}}\n\n", text(message)).into()
}

fn text(value: &str) -> String {
    let mut out = Vec::with_capacity(value.len() + 2);
    put(&mut out, value);
    // This cannot fail: what was written is JSON, which is UTF-8.
    String::from_utf8(out).unwrap_or_default()
}

/// Writes a value. This cannot fail: the writer is memory, and no value is a map.
fn put<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) {
    let _ = serde_json::to_writer(out, value);
}

/// TR-503: one element is written as a scalar, any other number of elements as a flat array.
fn write_tensor(out: &mut Vec<u8>, datatype: Datatype, tensor: &Tensor) {
    match &tensor.data {
        TensorData::Bool(list) => write_list(out, list.iter(), put),
        TensorData::Int(list) => write_list(out, list.iter(), put),
        TensorData::Uint(list) => write_list(out, list.iter(), put),
        TensorData::Float(list) => write_list(out, list.iter(), |out, number| {
            write_float(out, datatype, *number);
        }),
        TensorData::Bytes(list) => {
            write_list(out, list.iter(), |out, bytes| {
                match std::str::from_utf8(bytes) {
                    Ok(text) => put(out, text),
                    // JSON holds text only (TR-503); raw outputs of `infer` carry such bytes unchanged.
                    Err(_) => put(out, &*String::from_utf8_lossy(bytes)),
                }
            });
        }
    }
}

fn write_list<T>(
    out: &mut Vec<u8>,
    list: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut Vec<u8>, T),
) {
    let begin = out.len();
    let mut count = 0;
    for element in list {
        // The number of elements is known at the end only; a single one loses its bracket again below (TR-503).
        out.push(if count == 0 { b'[' } else { b',' });
        write(out, element);
        count += 1;
    }
    match count {
        0 => out.extend_from_slice(b"[]"),
        1 => {
            out.remove(begin);
        }
        _ => out.push(b']'),
    }
}

/// Non-finite numbers have no JSON form and are written as `null`, as serde does.
fn write_float(out: &mut Vec<u8>, datatype: Datatype, number: f64) {
    if datatype == Datatype::Fp64 {
        put(out, &number);
    } else {
        #[allow(
            clippy::cast_possible_truncation,
            reason = "it has no more digits than that"
        )]
        put(out, &(number as f32));
    }
}

fn write_parameter(out: &mut Vec<u8>, value: &RequestParameter) {
    match value {
        RequestParameter::Bool(flag) => put(out, flag),
        RequestParameter::Int(number) => put(out, number),
        RequestParameter::Double(number) => put(out, number),
        RequestParameter::Text(text) => put(out, text),
        RequestParameter::List(list) => put(out, list),
    }
}
