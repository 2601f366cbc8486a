//! From what a request gives to a call of the kernel, and the responses that come of it.
//!
//! Owns: [`Call`], [`Responses`]. Refuses to know: how responses are sent.

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use sapwood_kernel::Kernel;
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    Data, InputRole, Limits, Mapped, Response, Settings, Signature, Tensor,
};
use tokio::time::Instant;

use super::catalogue::Found;
use super::failure::Failure;
use super::{function, scripted, text};

/// Responses as they come; the end is the final flag. Dropping it ends the work.
pub(super) type Responses = BoxStream<'static, Result<Response, Failure>>;

/// A request that has passed every check of its form.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) found: Found,
    pub(super) mapped: Mapped,
    /// When it must be over.
    pub(super) deadline: Instant,
}

impl Call {
    /// The responses, of which none has been asked for yet. `pieces`: one for each chunk of a function's output, rather
    /// than one for all.
    ///
    /// # Errors
    /// What TR-203 checks of values.
    pub(super) fn begin(
        self,
        kernel: &Kernel,
        limits: &Limits,
        pieces: bool,
    ) -> Result<Responses, Failure> {
        if !self.found.text {
            return function::begin(self, kernel, pieces);
        }
        let settings = Settings::of(&self.found.signature, &self.mapped, limits)?;
        if self.found.model.controls.is_empty() {
            return text::begin(self, &settings, kernel);
        }
        scripted::begin(self, settings, kernel)
    }

    /// The id as messages show it.
    pub(super) fn shown_id(&self) -> &str {
        self.mapped.shown_id()
    }
}

/// What the request gives for the first input with this role.
pub(super) fn given<'a>(
    signature: &'a Signature,
    mapped: &'a Mapped,
    role: impl Fn(&InputRole) -> bool,
) -> Option<(&'a str, &'a Tensor)> {
    mapped.tensors.iter().find_map(|(place, tensor)| {
        let input = signature.inputs.get(*place)?;
        role(&input.role).then_some((&*input.name, tensor))
    })
}

/// The elements of a tensor as texts.
pub(super) fn texts(name: &str, tensor: &Tensor) -> Result<Vec<String>, Failure> {
    let wrong = |why: &str| Failure::new(Code::InvalidRequest, format!("input '{name}' {why}"));
    let Data::Bytes(list) = &tensor.data else {
        return Err(wrong("must be of datatype BYTES"));
    };
    list.iter()
        .map(|text| match std::str::from_utf8(text) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(wrong("is not valid UTF-8")),
        })
        .collect()
}

/// A single failure as responses.
pub(super) fn failed(failure: Failure) -> Responses {
    stream::iter([Err(failure)]).boxed()
}
