//! Requests and responses as messages of the gRPC schema (TR-901, TR-906).

use super::answer::ResponsePayload;
use super::infer::{ElementSource, GivenTensor, refused, shaped, too_few};
use super::refused::InvalidRequest;
use super::request::{Mapped, Mapper, RequestParameter};
use super::signature::Signature;
use crate::clip::shown;
use crate::generated::inference::infer_parameter::ParameterChoice;
use crate::generated::inference::model_infer_response::InferOutputTensor;
use crate::generated::inference::{InferParameter, ModelInferRequest, ModelInferResponse};

impl Mapper<'_> {
    /// Reads a message.
    ///
    /// # Errors
    /// The first error in it.
    pub fn message(&self, message: &ModelInferRequest) -> Result<Mapped, InvalidRequest> {
        if message.id.len() > self.limits.id_bytes {
            return Err(InvalidRequest::IdBytes(self.limits.id_bytes));
        }
        let mut mapped = Mapped {
            id: Some(message.id.clone()).filter(|id| !id.is_empty()),
            ..Mapped::default()
        };
        self.choices(&mut mapped, message)?;
        let raw = &message.raw_input_contents;
        let mut raws = raw.iter();
        for input in &message.inputs {
            let from = match &input.contents {
                // All inputs are raw or none is: raw contents have no names, only an order (TR-901).
                Some(_) if !raw.is_empty() => {
                    let (name, model) = (shown(&input.name), self.model);
                    return Err(refused(format!(
                        "contents field must not be specified when using raw_input_contents for '{name}' for model \
                         '{model}'"
                    )));
                }
                Some(contents) => ElementSource::Contents(contents),
                None if raw.is_empty() => ElementSource::Nowhere,
                None => ElementSource::Raw(raws.next().ok_or_else(|| too_few(&input.name))?),
            };
            let given = GivenTensor {
                name: &input.name,
                datatype: &input.datatype,
                shape: &input.shape,
                from,
            };
            self.input(&mut mapped, given)?;
        }
        if raws.next().is_some() {
            return Err(self.too_many());
        }
        if !message.outputs.is_empty() {
            let id = mapped.shown_id().to_owned();
            let mut asked = Vec::with_capacity(message.outputs.len());
            for output in &message.outputs {
                let location = self.output(&output.name, &id)?;
                // A response has each output once.
                if asked.contains(&location) {
                    return Err(self.output_twice(&output.name, &id));
                }
                asked.push(location);
            }
            mapped.outputs = Some(asked);
        }
        self.complete(&mut mapped)?;
        Ok(mapped)
    }

    /// TR-805.
    fn choices(
        &self,
        mapped: &mut Mapped,
        message: &ModelInferRequest,
    ) -> Result<(), InvalidRequest> {
        if message.parameters.len() > self.limits.json_members {
            return Err(InvalidRequest::Members(self.limits.json_members));
        }
        for (name, value) in &message.parameters {
            match name.as_str() {
                // Models are stateless: accepted and ignored (TR-805).
                "sequence_id" | "sequence_start" | "sequence_end" => {}
                name if name.starts_with("triton_") => return Err(InvalidRequest::Reserved),
                name => {
                    let value = RequestParameter::from_message(value);
                    let value = value.ok_or_else(|| InvalidRequest::ParameterType(shown(name)))?;
                    self.parameter(mapped, name, value)?;
                }
            }
        }
        Ok(())
    }
}

impl ResponsePayload {
    /// The response as a message, without the model's name and the request's id.
    #[must_use]
    pub fn message(&self, signature: &Signature) -> ModelInferResponse {
        let mut message = ModelInferResponse::default();
        for (location, tensor) in &self.outputs {
            let Some(output) = signature.outputs.get(*location) else {
                continue;
            };
            message.outputs.push(InferOutputTensor {
                name: output.name.clone(),
                datatype: output.datatype.name().into(),
                shape: shaped(signature, output, tensor),
                ..InferOutputTensor::default()
            });
            // Always raw (TR-901): the typed lists have none for 16-bit floats.
            let raw = tensor.data.to_raw(output.datatype);
            message.raw_output_contents.push(raw.into());
        }
        let parameters = self.parameters.iter();
        message.parameters = parameters
            .map(|(name, value)| (name.clone(), value.to_message()))
            .collect();
        message
    }
}

impl RequestParameter {
    /// Reads a parameter; `None` if no value is set, or it is not a finite number.
    fn from_message(message: &InferParameter) -> Option<Self> {
        Some(match message.parameter_choice.as_ref()? {
            ParameterChoice::BoolParam(flag) => Self::Bool(*flag),
            ParameterChoice::Int64Param(number) => Self::Int(*number),
            ParameterChoice::Uint64Param(number) => Self::of_unsigned(*number),
            ParameterChoice::DoubleParam(number) => {
                Self::Double(Some(*number).filter(|number| number.is_finite())?)
            }
            ParameterChoice::StringParam(text) => Self::Text(text.clone()),
        })
    }

    /// The parameter as a message.
    #[must_use]
    pub fn to_message(&self) -> InferParameter {
        let choice = match self {
            Self::Bool(flag) => ParameterChoice::BoolParam(*flag),
            Self::Int(number) => ParameterChoice::Int64Param(*number),
            Self::Double(number) => ParameterChoice::DoubleParam(*number),
            Self::Text(text) => ParameterChoice::StringParam(text.clone()),
            // The schema has no lists.
            Self::List(_) => ParameterChoice::StringParam(self.to_json().to_string()),
        };
        InferParameter {
            parameter_choice: Some(choice),
        }
    }
}
