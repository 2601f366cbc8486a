//! Limits of a request of the generate protocol (section 14 of the specification).

use super::refused::InvalidRequest;
use super::signature::{InputRole, InputTensor};
use crate::params::{Domain, ParamRanges, ParamSpec, SamplerStep};

/// The limits of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Bytes of the JSON text, and of all tensors together; a string counts its length and 4 (TR-315).
    pub input_bytes: usize,
    /// Maximum nesting depth of JSON (TR-302).
    pub json_depth: usize,
    /// Members of one object.
    pub json_members: usize,
    /// Bytes of an id (TR-304).
    pub id_bytes: usize,
    /// Tensors of one request: inputs, and requested outputs.
    pub tensors: usize,
    /// Dimensions of one tensor.
    pub tensor_rank: usize,
    /// Elements of one tensor.
    pub tensor_elements: usize,
    /// Maximum of the tokens that one request may ask for; larger values are clipped. 0: only the context limits it
    /// (TR-404).
    pub new_tokens: u32,
    /// Stop strings of one request, and also bad words.
    pub stop_words: usize,
    /// Bytes of one stop string, and of one bad word.
    pub stop_bytes: usize,
    /// Choices of one request (TR-407).
    pub choices: u32,
    /// Entries of `logit_bias`.
    pub biases: usize,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            input_bytes: 64 << 20,
            json_depth: 100,
            json_members: 10_000,
            id_bytes: 1_024,
            tensors: 1_024,
            tensor_rank: 16,
            tensor_elements: 16_777_216,
            new_tokens: 4_096,
            stop_words: 64,
            stop_bytes: 1_024,
            choices: 16,
            biases: 1_024,
        }
    }
}

impl RequestLimits {
    /// Checks whether this input may have this many elements, before each of them is stored.
    ///
    /// # Errors
    /// `Field` for lists of texts, which have lower limits; `Elements` for everything else.
    pub(super) fn admit(&self, input: &InputTensor, elements: usize) -> Result<(), InvalidRequest> {
        // The table of parameters checks this number too, but only once every string is stored (D-47).
        if let InputRole::Sampling(field) = &input.role
            && let Some(param) = ParamSpec::named(field)
        {
            let domain = param.domain(&self.ranges());
            let most = match domain {
                Domain::Texts { count, .. } => count,
                Domain::Samplers => SamplerStep::ALL.len(),
                _ => usize::MAX,
            };
            if elements > most {
                return Err(InvalidRequest::Field {
                    field: field.clone(),
                    range: domain.to_string(),
                    got: "more of them".into(),
                });
            }
        }
        if elements > self.tensor_elements {
            return Err(InvalidRequest::Elements {
                name: input.name.clone(),
                max: self.tensor_elements,
            });
        }
        Ok(())
    }

    /// The ranges of a request's generation parameters.
    pub(super) fn ranges(&self) -> ParamRanges {
        ParamRanges {
            n: self.choices,
            biases: self.biases,
            texts: self.stop_words,
            text_bytes: self.stop_bytes,
            ..ParamRanges::TRITON
        }
    }
}
