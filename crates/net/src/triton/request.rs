//! One request and its responses, for both transports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sapwood_proto::generate::{Datatype, Strings, TensorData, fit};
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::model_infer_request::InferInputTensor;
use sapwood_proto::generated::inference::{InferParameter, ModelInferRequest, ModelInferResponse};
use serde_json::{Map, Value};

use super::error::Error;
use super::model::{Declared, ModelSignature};

/// An inference request.
#[derive(Clone, Debug)]
pub struct InferRequest {
    /// The model's signature.
    pub model: Arc<ModelSignature>,
    /// Elements of inputs, by their index in the model's list. They are fitted to the declared shape (TR-309).
    pub inputs: Vec<(usize, TensorData)>,
    /// Parameters that are not declared by the model: flags, numbers and strings.
    pub parameters: Vec<(String, Value)>,
    /// The server is asked to cancel the request after this time (TR-404).
    pub timeout: Option<Duration>,
}

/// One response of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelResponse {
    /// Elements of outputs, by their index in the model's list, in the order in which they arrived.
    pub outputs: Vec<(usize, TensorData)>,
    /// Parameters of the response: flags, numbers and strings.
    pub parameters: Vec<(String, Value)>,
}

impl InferRequest {
    /// Creates a request without inputs.
    #[must_use]
    pub const fn new(model: Arc<ModelSignature>) -> Self {
        Self {
            model,
            inputs: Vec::new(),
            parameters: Vec::new(),
            timeout: None,
        }
    }

    fn timeout(&self) -> Option<i64> {
        let left = self.timeout?.as_micros().max(1);
        Some(i64::try_from(left).unwrap_or(i64::MAX))
    }

    /// Returns the body for `/generate` and `/generate_stream`.
    pub(super) fn json(&self) -> Result<Bytes, Error> {
        let mut members = Map::new();
        for (target, data) in &self.inputs {
            let input = self.declared(*target)?;
            members.insert(input.name.clone(), input_json(input, data)?);
        }
        let mut parameters: Map<String, Value> = self.parameters.iter().cloned().collect();
        if let Some(timeout) = self.timeout() {
            // A timeout that the caller has set as a parameter wins.
            parameters.entry(TIMEOUT).or_insert_with(|| timeout.into());
        }
        // A model may have an input of that name; then parameters cannot be sent (TR-306).
        if !parameters.is_empty() && !members.contains_key("parameters") {
            members.insert("parameters".into(), Value::Object(parameters));
        }
        Ok(Value::Object(members).to_string().into())
    }

    /// Returns the message for `ModelInfer` and `ModelStreamInfer`.
    pub(super) fn message(&self, id: &str) -> Result<ModelInferRequest, Error> {
        let mut message = ModelInferRequest {
            model_name: self.model.name.clone(),
            id: id.to_owned(),
            ..ModelInferRequest::default()
        };
        for (target, data) in &self.inputs {
            let input = self.declared(*target)?;
            // The message has to declare a shape, while JSON leaves the fitting to the server (TR-309).
            let shape = fit(&input.shape, data.len()).ok_or(UNFIT)?;
            message.inputs.push(InferInputTensor {
                name: input.name.clone(),
                datatype: input.datatype.name().to_owned(),
                shape,
                ..InferInputTensor::default()
            });
            let raw = data.to_raw(input.datatype);
            // Raw for all inputs: a message must not mix both forms (TR-901), and 16-bit floats have only this one.
            message.raw_input_contents.push(raw.into());
        }
        for (name, value) in &self.parameters {
            let value = parameter(value).ok_or(Error::Request(
                "a parameter is not a flag, a number or a string",
            ))?;
            message.parameters.insert(name.clone(), value);
        }
        if let Some(timeout) = self.timeout() {
            let value = parameter(&timeout.into()).unwrap_or_default();
            message.parameters.entry(TIMEOUT.into()).or_insert(value);
        }
        Ok(message)
    }

    fn declared(&self, target: usize) -> Result<&Declared, Error> {
        let input = self.model.inputs.get(target);
        input.ok_or(Error::Request("the model has no such input"))
    }
}

/// A single element is a scalar, as clients of the generate extension write it.
fn input_json(input: &Declared, data: &TensorData) -> Result<Value, Error> {
    if matches!(input.datatype, Datatype::Fp16 | Datatype::Bf16) {
        return Err(Error::Request(
            "an input of 16-bit floats cannot be sent as JSON: use triton+grpc://",
        ));
    }
    fit(&input.shape, data.len()).ok_or(UNFIT)?;
    let mut list = values(data)?;
    Ok(match list.len() {
        1 => list.remove(0),
        _ => Value::Array(list),
    })
}

fn values(data: &TensorData) -> Result<Vec<Value>, Error> {
    let number = |x: &f64| {
        let number = serde_json::Number::from_f64(*x);
        let number = number.ok_or(Error::Request("JSON has no infinite numbers and no NaN"))?;
        Ok(Value::Number(number))
    };
    let text = |bytes| {
        let text = std::str::from_utf8(bytes);
        let text = text.map_err(|_| Error::Request("text that is not UTF-8 cannot be JSON"))?;
        Ok(Value::from(text))
    };
    match data {
        TensorData::Bool(list) => Ok(list.iter().map(|flag| Value::from(*flag)).collect()),
        TensorData::Int(list) => Ok(list.iter().map(|number| Value::from(*number)).collect()),
        TensorData::Uint(list) => Ok(list.iter().map(|number| Value::from(*number)).collect()),
        TensorData::Float(list) => list.iter().map(number).collect(),
        TensorData::Bytes(list) => list.iter().map(text).collect(),
    }
}

impl ModelResponse {
    /// Parses a JSON object; `None` if an output does not have its declared type.
    pub(super) fn from_json(model: &ModelSignature, members: Map<String, Value>) -> Option<Self> {
        let mut response = Self::default();
        for (name, value) in members {
            if let Some(target) = model.output(&name) {
                let data = output(model.outputs[target].datatype, value)?;
                response.outputs.push((target, data));
            // The envelope of a response. Whatever else the model does not declare is a parameter.
            } else if !matches!(&*name, "id" | "model_name" | "model_version") {
                response.parameters.push((name, value));
            }
        }
        Some(response)
    }

    /// Converts a message; `None` if an output is not declared, or does not have its declared type.
    pub(super) fn from_message(
        model: &ModelSignature,
        message: ModelInferResponse,
    ) -> Option<Self> {
        let mut response = Self::default();
        let raw = !message.raw_output_contents.is_empty();
        for (index, output) in message.outputs.into_iter().enumerate() {
            let target = model.output(&output.name)?;
            let datatype = Datatype::from_name(&output.datatype)?;
            let data = if raw {
                TensorData::from_raw(datatype, message.raw_output_contents.get(index)?)?
            } else {
                TensorData::from_contents(datatype, &output.contents.unwrap_or_default())?
            };
            response.outputs.push((target, data));
        }
        response.parameters = parameters(message.parameters);
        Some(response)
    }
}

fn parameters(map: BTreeMap<String, InferParameter>) -> Vec<(String, Value)> {
    let value = |parameter: InferParameter| {
        Some(match parameter.parameter_choice? {
            ParameterChoice::BoolParam(flag) => flag.into(),
            ParameterChoice::Int64Param(number) => number.into(),
            ParameterChoice::Uint64Param(number) => number.into(),
            ParameterChoice::DoubleParam(number) => number.into(),
            ParameterChoice::StringParam(text) => text.into(),
        })
    };
    map.into_iter()
        // The marks of the transport, such as `triton_final_response`.
        .filter(|(name, _)| !name.starts_with("triton_"))
        .filter_map(|(name, parameter)| Some((name, value(parameter)?)))
        .collect()
}

fn parameter(value: &Value) -> Option<InferParameter> {
    let choice = match value {
        Value::Bool(flag) => ParameterChoice::BoolParam(*flag),
        Value::String(text) => ParameterChoice::StringParam(text.clone()),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => ParameterChoice::Int64Param(number),
            (None, Some(number)) => ParameterChoice::Uint64Param(number),
            (None, None) => ParameterChoice::DoubleParam(number.as_f64()?),
        },
        _ => return None,
    };
    Some(InferParameter {
        parameter_choice: Some(choice),
    })
}

/// Parses an output's elements: a scalar, or a flat list (TR-503). A float that is not a number is `null`.
fn output(datatype: Datatype, value: Value) -> Option<TensorData> {
    let list = match value {
        Value::Array(list) => list,
        scalar => vec![scalar],
    };
    Some(match TensorData::empty(datatype) {
        TensorData::Bool(_) => {
            TensorData::Bool(list.iter().map(Value::as_bool).collect::<Option<_>>()?)
        }
        TensorData::Int(_) => {
            TensorData::Int(list.iter().map(Value::as_i64).collect::<Option<_>>()?)
        }
        TensorData::Uint(_) => {
            TensorData::Uint(list.iter().map(Value::as_u64).collect::<Option<_>>()?)
        }
        TensorData::Float(_) => {
            let number = |value: &Value| match value {
                Value::Null => Some(f64::NAN),
                value => value.as_f64(),
            };
            TensorData::Float(list.iter().map(number).collect::<Option<_>>()?)
        }
        TensorData::Bytes(_) => {
            let mut strings = Strings::default();
            for value in &list {
                strings.push(value.as_str()?.as_bytes());
            }
            TensorData::Bytes(strings)
        }
    })
}

const TIMEOUT: &str = "timeout";
const UNFIT: Error = Error::Request("so many elements do not fit the input's shape");
