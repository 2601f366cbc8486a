//! Requests and responses of `infer`: tensors with shapes, as JSON or as raw bytes after it (section 8).

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::answer::{AnswerHead, ResponsePayload};
use super::datatype::Datatype;
use super::json::{self, Scalars};
use super::refused::InvalidRequest;
use super::request::{Mapped, Mapper, RequestParameter, TextMember, id};
use super::settings;
use super::signature::{InputRole, InputTensor, OutputRole, OutputTensor, Signature};
use super::tensor::{Tensor, TensorData, fit};
use crate::clip::shown;
use crate::generated::inference::InferTensorContents;

/// A request of `infer`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Infer {
    /// The tensors and parameters of the request.
    pub mapped: Mapped,
    /// The outputs that are sent as raw bytes; `all_binary` applies if no outputs are listed.
    pub binary: Vec<usize>,
    /// Whether every output is sent as raw bytes.
    pub all_binary: bool,
}

/// One tensor as sent.
pub(super) struct GivenTensor<'a> {
    pub(super) name: &'a str,
    pub(super) datatype: &'a str,
    pub(super) shape: &'a [i64],
    pub(super) from: ElementSource<'a>,
}

/// Where the elements of a tensor are.
#[derive(Clone, Copy)]
pub(super) enum ElementSource<'a> {
    /// They are absent.
    Nowhere,
    /// In the JSON.
    Json(&'a str),
    /// In raw bytes beside the JSON or message.
    Raw(&'a [u8]),
    /// In the typed lists of the gRPC schema.
    Contents(&'a InferTensorContents),
}

/// One entry of `inputs` in JSON.
#[derive(Default)]
struct InputEntry<'a> {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    /// Number of bytes after the JSON.
    raw: Option<usize>,
    data: Option<&'a str>,
}

impl InputEntry<'_> {
    /// The tensor; its raw bytes are taken from `rest`.
    fn given<'s, 'b: 's>(&'s self, rest: &mut &'b [u8]) -> Result<GivenTensor<'s>, InvalidRequest> {
        let from = match (self.raw, self.data) {
            // Raw bytes follow in the order of `inputs` (TR-802), so each entry takes its own from the front. If `data`
            // came first, its raw bytes would be taken for the next input's.
            (Some(bytes), _) => {
                let taken = rest.split_at_checked(bytes);
                let (taken, left) = taken.ok_or_else(|| too_few(&self.name))?;
                *rest = left;
                ElementSource::Raw(taken)
            }
            (None, Some(text)) => ElementSource::Json(text),
            (None, None) => ElementSource::Nowhere,
        };
        Ok(GivenTensor {
            name: &self.name,
            datatype: &self.datatype,
            shape: &self.shape,
            from,
        })
    }
}

impl Mapper<'_> {
    /// Reads a whole body. `header` is the value of `Inference-Header-Content-Length`, if the request has it.
    ///
    /// # Errors
    /// The first error in it.
    pub fn infer(&self, body: &[u8], header: Option<&str>) -> Result<Infer, InvalidRequest> {
        let (text, mut rest) = split(body, header)?;
        // A header length of 0 declares the whole body as the one raw value (TR-802).
        if text.is_empty() && header.is_some() {
            return self.raw_body(rest);
        }
        let members = json::read(text, self.limits)?;
        let mut infer = Infer::default();
        // First, because the texts of later errors contain it (TR-313).
        infer.mapped.id = id(&members, self.limits)?;
        let member = |name: &str| {
            members
                .iter()
                .find(|(mine, _)| mine == name)
                .map(|(_, value)| *value)
        };
        if let Some(parameters) = member("parameters") {
            infer.all_binary = self.parameters(&mut infer.mapped, parameters)?;
        }
        let inputs = member("inputs").filter(|text| text.starts_with('['));
        let inputs = inputs.ok_or_else(|| {
            refused("Unable to parse 'inputs': attempt to access JSON non-array as array")
        })?;
        json::elements(inputs, &mut |entry| {
            let entry = self.entry(entry)?;
            let given = entry.given(&mut rest)?;
            self.input(&mut infer.mapped, given)
        })?;
        if !rest.is_empty() {
            return Err(self.too_many());
        }
        if let Some(outputs) = member("outputs") {
            self.outputs(&mut infer, outputs)?;
        }
        self.complete(&mut infer.mapped)?;
        Ok(infer)
    }

    /// Reads the whole body as the one string that the model requires (TR-802).
    fn raw_body(&self, body: &[u8]) -> Result<Infer, InvalidRequest> {
        let needed = |input: &&InputTensor| !input.optional && input.datatype == Datatype::Bytes;
        let mut needed = self.signature.inputs.iter().filter(needed);
        // With two such inputs it would be unclear which one the body is.
        let (Some(input), None) = (needed.next(), needed.next()) else {
            let message = format!(
                "model '{}' does not take a raw body: it needs one BYTES input",
                self.model
            );
            return Err(refused(message));
        };
        // A client that does not send JSON does not read it either.
        let mut infer = Infer {
            all_binary: true,
            ..Infer::default()
        };
        let location = self.signature.input(&input.name).unwrap_or(0);
        let data = TensorData::Bytes([body].into_iter().collect());
        let shape =
            fit(&input.shape, 1).ok_or_else(|| InvalidRequest::Shape(input.name.clone()))?;
        let tensor = Arc::new(Tensor { shape, data });
        infer.mapped.tensors.push((location, tensor));
        self.complete(&mut infer.mapped)?;
        Ok(infer)
    }

    /// TR-805. Returns whether outputs are raw by default.
    fn parameters(&self, mapped: &mut Mapped, text: &str) -> Result<bool, InvalidRequest> {
        if !text.starts_with('{') {
            return Err(InvalidRequest::Parameters);
        }
        let mut binary = false;
        for (name, value) in json::members(text, self.limits)? {
            match name.as_str() {
                // Values are still JSON text here: only the literal `true` is a boolean that is set.
                "binary_data_output" => binary = value == "true",
                // Models are stateless: accepted and ignored (TR-805).
                "sequence_id" | "sequence_start" | "sequence_end" => {}
                name if name.starts_with("triton_") => return Err(InvalidRequest::Reserved),
                name => {
                    let value = super::request::parameter(name, value)?;
                    self.parameter(mapped, name, value)?;
                }
            }
        }
        Ok(binary)
    }

    pub(super) fn too_many(&self) -> InvalidRequest {
        refused(format!(
            "unexpected additional input data for model '{}'",
            self.model
        ))
    }

    /// Reads a member of an object.
    fn member<'a>(&self, object: &'a str, name: &str) -> Result<Option<&'a str>, InvalidRequest> {
        let members = json::members(object, self.limits)?;
        let found = members.into_iter().rfind(|(mine, _)| mine == name);
        Ok(found.map(|(_, value)| value))
    }

    fn entry<'a>(&self, entry: &'a str) -> Result<InputEntry<'a>, InvalidRequest> {
        let wrong = |member: &str| refused(format!("Unable to parse '{member}' of an input"));
        if !entry.starts_with('{') {
            return Err(wrong("inputs"));
        }
        let mut given = InputEntry::default();
        for (name, value) in json::members(entry, self.limits)? {
            match name.as_str() {
                "name" => given.name = json::string(value).map_err(|_| wrong("name"))?.into(),
                "datatype" => {
                    given.datatype = json::string(value).map_err(|_| wrong("datatype"))?.into();
                }
                "shape" => {
                    let shape = json::shape(value, self.limits.tensor_rank)?;
                    given.shape = shape.ok_or_else(|| wrong("shape"))?;
                }
                "data" => given.data = Some(value),
                "parameters" => {
                    let size = self.member(value, "binary_data_size");
                    let size = size.map_err(|_| wrong("parameters"))?;
                    let size = size.map(str::parse).transpose();
                    given.raw = size.map_err(|_| wrong("binary_data_size"))?;
                }
                _ => {}
            }
        }
        Ok(given)
    }

    /// Adds one tensor (TR-803, TR-901).
    pub(super) fn input(
        &self,
        mapped: &mut Mapped,
        given: GivenTensor<'_>,
    ) -> Result<(), InvalidRequest> {
        let GivenTensor {
            name,
            datatype,
            shape,
            from,
        } = given;
        let id = mapped.shown_id().to_owned();
        let Some(location) = self.signature.input(name) else {
            return self.alias(mapped, &given, &id);
        };
        let input = &self.signature.inputs[location];
        if mapped.tensor(location).is_some() {
            let name = name.to_owned();
            return Err(InvalidRequest::Twice { id, name });
        }
        if datatype != input.datatype.name() {
            let (wanted, model) = (input.datatype, self.model);
            let datatype = shown(datatype);
            return Err(refused(format!(
                "[request id: {id}] inference input '{name}' data-type is '{datatype}', but model '{model}' expects \
                 '{wanted}'"
            )));
        }
        // Shape before content: the shape is a few numbers, and tells how many elements may be stored at all (D-47).
        let count = self.elements(input, shape, &id)?;
        let wrong = |what: String| refused(format!("[request id: {id}] {what}"));
        let data = match from {
            ElementSource::Raw(bytes) => {
                behind(input, bytes, count).map_err(|(what, expecting)| {
                    wrong(format!("{what} for model '{}'{expecting}", self.model))
                })?
            }
            ElementSource::Json(text) => {
                let reading = TextMember {
                    input,
                    lenient: self.signature.lenient,
                    limits: self.limits,
                };
                let data = reading.data(text)?;
                // JSON may be nested or flat, so only the number of elements is compared with the shape.
                if data.len() != count {
                    let written =
                        "Unable to parse 'data': Shape does not match true shape of 'data' field";
                    return Err(refused(written));
                }
                data
            }
            ElementSource::Contents(contents) => {
                let data = TensorData::from_contents(input.datatype, contents);
                let data = data
                    .ok_or_else(|| wrong(format!("invalid data for inference input '{name}'")))?;
                let (got, model) = (data.len(), self.model);
                if got != count {
                    return Err(wrong(format!(
                        "unexpected number of elements {got} for inference input '{name}' for model '{model}', \
                         expecting {count}"
                    )));
                }
                data
            }
            ElementSource::Nowhere => return Err(wrong(format!("input '{name}' has no data"))),
        };
        let shape = shape.to_vec();
        let tensor = Arc::new(Tensor { shape, data });
        mapped.tensors.push((location, tensor));
        Ok(())
    }

    /// Checks a shape against the declared one and returns the number of elements. Clients of the union signature may
    /// prepend dimensions of 1.
    fn elements(
        &self,
        input: &InputTensor,
        shape: &[i64],
        id: &str,
    ) -> Result<usize, InvalidRequest> {
        let rank = self.limits.tensor_rank;
        if shape.len() > rank {
            return Err(InvalidRequest::Rank(rank));
        }
        let declared = self.signature.shown(&input.shape);
        let more = shape.len().saturating_sub(declared.len());
        // Clients of embedding models send each text as a row of its own.
        if matches!(input.role, InputRole::Texts | InputRole::Documents)
            && let [rows, 1] = *shape
            && declared == [-1]
        {
            return self.elements(input, &[rows], id);
        }
        let (ones, rest) = shape.split_at(more);
        let fits = rest.len() == declared.len()
            && (more == 0 || self.signature.lenient && ones.iter().all(|size| *size == 1))
            && rest
                .iter()
                .zip(&declared)
                .all(|(size, declared)| *size >= 0 && (*declared < 0 || size == declared));
        // Checked, because the sizes are the client's and their product may exceed any integer.
        let count = shape
            .iter()
            .try_fold(1_i64, |count, size| count.checked_mul(*size));
        let count = count.and_then(|count| usize::try_from(count).ok());
        match count.filter(|_| fits) {
            Some(count) => self.limits.admit(input, count).map(|()| count),
            None => Err(refused(format!(
                "[request id: {id}] unexpected shape for input '{}' for model '{}'. Expected {}, got {}",
                input.name,
                self.model,
                list(&declared),
                list(shape),
            ))),
        }
    }

    /// D-20: an undeclared input is refused by name, unless it is an alias of a sampling field.
    fn alias(
        &self,
        mapped: &mut Mapped,
        given: &GivenTensor<'_>,
        id: &str,
    ) -> Result<(), InvalidRequest> {
        let name = given.name;
        let value = match (
            self.signature.lenient && settings::is_field(name),
            given.from,
        ) {
            (false, _) => None,
            (true, ElementSource::Json(text)) => {
                // A tensor's data is a list, at any depth; a parameter is the one value in it.
                let mut scalars = Scalars::new(text);
                let only = scalars.next().filter(|_| scalars.next().is_none());
                only.map(|value| super::request::parameter(name, value))
                    .transpose()?
            }
            (true, from) => scalar(given.datatype, from),
        };
        let Some(value) = value else {
            let (name, model) = (shown(name), self.model);
            return Err(refused(format!(
                "[request id: {id}] unexpected inference input '{name}' for model '{model}'"
            )));
        };
        self.parameter(mapped, name, value)
    }

    /// The index of an output that is requested by name.
    pub(super) fn output(&self, name: &str, id: &str) -> Result<usize, InvalidRequest> {
        if self.signature.lacks_output(name) {
            return Err(InvalidRequest::Unsupported(name.into()));
        }
        self.signature.output(name).ok_or_else(|| {
            let (name, model) = (shown(name), self.model);
            refused(format!(
                "[request id: {id}] unexpected inference output '{name}' for model '{model}'"
            ))
        })
    }

    pub(super) fn output_twice(&self, name: &str, id: &str) -> InvalidRequest {
        let (name, model) = (shown(name), self.model);
        refused(format!(
            "[request id: {id}] output '{name}' is requested twice for model '{model}'"
        ))
    }

    /// TR-804.
    fn outputs(&self, infer: &mut Infer, text: &str) -> Result<(), InvalidRequest> {
        if !text.starts_with('[') {
            return Err(refused(
                "Unable to parse 'outputs': attempt to access JSON non-array as array",
            ));
        }
        let id = infer.mapped.shown_id().to_owned();
        let most = self.limits.tensors;
        let mut asked: Vec<usize> = Vec::new();
        json::elements(text, &mut |entry| {
            // Bounded while the list is parsed (D-47).
            if asked.len() == most {
                return Err(InvalidRequest::Tensors(most));
            }
            let name = self.member(entry, "name").ok().flatten();
            let name = name.and_then(|name| json::string(name).ok());
            let name = name.unwrap_or_default();
            let location = self.output(&name, &id)?;
            // A response has each output once, and two entries may want it in different forms.
            if asked.contains(&location) {
                return Err(self.output_twice(&name, &id));
            }
            asked.push(location);
            let parameters = self.member(entry, "parameters").ok().flatten();
            let binary = parameters.and_then(|object| self.member(object, "binary_data").ok()?);
            if binary == Some("true") {
                infer.binary.push(location);
            }
            Ok(())
        })?;
        if !asked.is_empty() {
            // A list of outputs overrides `binary_data_output` (TR-804).
            infer.all_binary = false;
            infer.mapped.outputs = Some(asked);
        }
        Ok(())
    }
}

impl Infer {
    /// Encodes the response: its JSON, and the raw bytes after it, which may be empty.
    #[must_use]
    pub fn answer(
        &self,
        head: &AnswerHead,
        signature: &Signature,
        response: &ResponsePayload,
    ) -> (Bytes, Bytes) {
        let mut raw = Vec::new();
        let mut outputs = Vec::new();
        for (location, tensor) in &response.outputs {
            let Some(output) = signature.outputs.get(*location) else {
                continue;
            };
            let shape = shaped(signature, output, tensor);
            let mut written =
                json!({"name": output.name, "datatype": output.datatype.name(), "shape": shape});
            let (key, value) = if self.all_binary || self.binary.contains(location) {
                let before = raw.len();
                raw.extend(tensor.data.to_raw(output.datatype));
                (
                    "parameters",
                    json!({"binary_data_size": raw.len() - before}),
                )
            } else {
                ("data", Value::Array(tensor.data.shown()))
            };
            if let Some(object) = written.as_object_mut() {
                object.insert(key.into(), value);
            }
            outputs.push(written);
        }
        let parameters = response.parameters.iter();
        let parameters: Map<String, Value> = parameters
            .map(|(name, value)| (name.clone(), value.to_json()))
            .collect();
        let mut text = head.open().to_owned();
        if !parameters.is_empty() {
            text.push_str(&format!(",\"parameters\":{}", Value::Object(parameters)));
        }
        text.push_str(&format!(",\"outputs\":{}}}", Value::Array(outputs)));
        (text.into(), raw.into())
    }
}

/// The shape with which an output is sent: the declared one, as far as that determines the layout.
pub(super) fn shaped(signature: &Signature, output: &OutputTensor, tensor: &Tensor) -> Vec<i64> {
    if signature.tensorrt_llm && output.role == OutputRole::Text {
        // The ensemble decodes a list of texts, and its client reads one, whatever the configuration declares.
        return vec![i64::try_from(tensor.data.len()).unwrap_or(i64::MAX)];
    }
    if output.role == OutputRole::Embedding {
        // A request may ask for fewer dimensions than are declared.
        return tensor.shape.clone();
    }
    // Rows of a batch were joined along the leading dimension.
    let rows = match tensor.shape[..] {
        [rows, _] if signature.max_batch_size > 0 && rows > 0 => rows,
        _ => 1,
    };
    let each = usize::try_from(rows).map_or(0, |rows| tensor.data.len() / rows);
    match fit(&output.shape, each) {
        Some(shape) if signature.max_batch_size > 0 => [&[rows], shape.as_slice()].concat(),
        Some(shape) => shape,
        // The model sent more or fewer elements than it declares: its own shape at least matches the data.
        None => tensor.shape.clone(),
    }
}

/// TR-802: splits the body at the end of the JSON.
fn split<'a>(body: &'a [u8], header: Option<&str>) -> Result<(&'a [u8], &'a [u8]), InvalidRequest> {
    let Some(header) = header else {
        return Ok((body, &[]));
    };
    // Signed, because a negative length has the error of a length out of range, not of a bad number (TR-802).
    let length: i64 = header.trim().parse().map_err(|_| {
        refused(format!(
            "Unable to parse Inference-Header-Content-Length, got: {}",
            shown(header)
        ))
    })?;
    let at = usize::try_from(length)
        .ok()
        .and_then(|length| body.split_at_checked(length));
    at.ok_or_else(|| {
        let bytes = body.len();
        refused(format!(
            "inference header size should be in range (0, {bytes}), got: {length}"
        ))
    })
}

pub(super) fn too_few(name: &str) -> InvalidRequest {
    let name = shown(name);
    refused(format!("unexpected end of input data for input '{name}'"))
}

/// The single element of a tensor, as a parameter.
fn scalar(datatype: &str, from: ElementSource<'_>) -> Option<RequestParameter> {
    let datatype = Datatype::from_name(datatype)?;
    let data = match from {
        ElementSource::Raw(bytes) => TensorData::from_raw(datatype, bytes)?,
        ElementSource::Contents(contents) => TensorData::from_contents(datatype, contents)?,
        ElementSource::Json(_) | ElementSource::Nowhere => return None,
    };
    Some(match &data {
        TensorData::Bool(list) => RequestParameter::Bool(only(list)?),
        TensorData::Int(list) => RequestParameter::Int(only(list)?),
        TensorData::Uint(list) => RequestParameter::of_unsigned(only(list)?),
        TensorData::Float(list) => {
            RequestParameter::Double(only(list).filter(|number| number.is_finite())?)
        }
        TensorData::Bytes(list) if list.len() == 1 => {
            RequestParameter::Text(std::str::from_utf8(list.iter().next()?).ok()?.to_owned())
        }
        TensorData::Bytes(_) => return None,
    })
}

fn only<T: Copy>(list: &[T]) -> Option<T> {
    match list {
        [one] => Some(*one),
        _ => None,
    }
}

/// Reads `count` elements from the bytes after the JSON (TR-803); an error names the mismatch, and what was expected if
/// that is known.
fn behind(input: &InputTensor, bytes: &[u8], count: usize) -> Result<TensorData, (String, String)> {
    let name = &input.name;
    let width = input.datatype.width();
    // Before decoding, which would read a tensor of the wrong size in full.
    if let Some(expected) = width.map(|width| count.saturating_mul(width))
        && expected != bytes.len()
    {
        return Err((
            format!("input byte size mismatch for input '{name}'"),
            format!(". Expected {expected}, got {}", bytes.len()),
        ));
    }
    let Some(data) = TensorData::from_raw(input.datatype, bytes) else {
        let what = if width.is_none() {
            "incomplete string"
        } else {
            "invalid"
        };
        let what = format!("{what} data for inference input '{name}'");
        return Err((what, String::new()));
    };
    if data.len() == count {
        return Ok(data);
    }
    let got = data.len();
    Err((
        format!("unexpected number of string elements {got} for inference input '{name}'"),
        format!(", expecting {count}"),
    ))
}

fn list(shape: &[i64]) -> String {
    let sizes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    format!("[{}]", sizes.join(","))
}

pub(super) fn refused(text: impl Into<String>) -> InvalidRequest {
    InvalidRequest::Infer(text.into())
}

impl RequestParameter {
    /// An integer; a double if it does not fit, as in JSON.
    #[allow(
        clippy::cast_precision_loss,
        reason = "TR-307: what fits no i64 is a double"
    )]
    pub(super) fn of_unsigned(number: u64) -> Self {
        i64::try_from(number).map_or(Self::Double(number as f64), Self::Int)
    }

    /// The parameter as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        match self {
            Self::Bool(flag) => (*flag).into(),
            Self::Int(number) => (*number).into(),
            Self::Double(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(list) => list.as_slice().into(),
        }
    }
}
