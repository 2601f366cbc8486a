//! Turns a decoded request into a call of the kernel, and the call's chunks into responses.

use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    InputRole, Mapped, ResponsePayload, Settings, Signature, Tensor, TensorData,
};
use tokio::time::Instant;

use super::catalog::{FoundModel, ModelCatalog};
use super::input_charge::InputCharge;
use super::request_end::EarlyEnd;
use super::request_error::RequestError;
use super::text::AnswerSize;
use super::{batch, embedding, function, scripted, text};
use crate::http::request_trace;
use crate::ops::drain::Drain;

/// The responses of a call as they come; the end of the stream is the final flag. Dropping it ends the work.
pub(super) type CallResponses = BoxStream<'static, Result<ResponsePayload, RequestError>>;

/// A request that has passed every check of its form.
#[derive(Debug)]
pub(super) struct CheckedRequest {
    pub(super) found: FoundModel,
    pub(super) mapped: Mapped,
    /// When its answer must be complete.
    pub(super) deadline: Instant,
    /// What its answer holds, if that is in one piece. The rows of a batch share it.
    pub(super) held: Arc<AnswerSize>,
    /// What its inputs are charged until its model has them; nothing where the charge of the body lasts until the answer.
    pub(super) charge: InputCharge,
}

impl CheckedRequest {
    /// Makes the call. Nothing runs before the responses are polled. `pieces`: one response for each chunk of a
    /// function's output, or for each sequence of a request that tells them apart (D-55), rather than one for all.
    ///
    /// # Errors
    /// Those of the values that TR-203 has checked.
    pub(super) fn begin(
        self,
        catalog: &ModelCatalog,
        pieces: bool,
    ) -> Result<CallResponses, RequestError> {
        let responses = self.responses(catalog, pieces)?;
        // Here, around the calls of every kind of endpoint, so that none can forget it.
        let ended = ended(catalog.shared.drain.clone(), request_trace::revoked()).boxed();
        let cuttable = stream::unfold(Some((responses, ended)), |state| async move {
            let (mut responses, mut ended) = state?;
            // Both arms may be cancelled: a response that was not taken is still there. Responses first: those that are
            // ready are sent, and an end that is ready is not made an error. After an error the responses are dropped
            // here, which ends the work: the stream itself lives until its reader has taken the error.
            tokio::select! {
                biased;
                next = responses.next() => Some((next?, Some((responses, ended)))),
                failure = &mut ended => Some((Err(failure), None)),
            }
        });
        Ok(cuttable.boxed())
    }

    fn responses(
        self,
        catalog: &ModelCatalog,
        pieces: bool,
    ) -> Result<CallResponses, RequestError> {
        let kernel = &catalog.kernel;
        if self.found.embeds {
            return embedding::begin(self, kernel);
        }
        if !self.found.text {
            return function::begin(self, kernel, pieces);
        }
        let limits = &catalog.config.limits;
        // Before the settings: of a batch each row has its own.
        let rows = self.mapped.rows(&self.found.signature, &self.found.name)?;
        if let Some(rows) = rows {
            return batch::begin(self, rows, catalog, pieces);
        }
        let settings = Settings::of(&self.found.signature, &self.mapped, limits)?;
        if self.found.model.controls.is_empty() {
            return text::begin(self, &settings, kernel, pieces);
        }
        scripted::begin(self, settings, kernel)
    }

    /// The id as messages show it.
    pub(super) fn shown_id(&self) -> &str {
        self.mapped.shown_id()
    }
}

/// Resolves with the error of requests that a drain cuts, or whose key is revoked (OA-904, D-45).
async fn ended(drain: Drain, key_revoked: BoxFuture<'static, ()>) -> RequestError {
    // Both arms may be cancelled: either is only a signal.
    tokio::select! {
        biased;
        () = key_revoked => revoked(),
        () = drain.cutting() => {
            let message = "The server is shutting down: try another one.";
            RequestError::new(Code::Unavailable, message).because(EarlyEnd::Drain)
        }
    }
}

/// The error of a request whose key was revoked.
pub(super) fn revoked() -> RequestError {
    let message = "revoked: the key of this request is no longer valid";
    RequestError::new(Code::Unauthenticated, message)
        .late()
        .because(EarlyEnd::Revoked)
}

/// The name and the tensor of the first input with this role, if the request has it.
pub(super) fn given<'a>(
    signature: &'a Signature,
    mapped: &'a Mapped,
    role: impl Fn(&InputRole) -> bool,
) -> Option<(&'a str, &'a Tensor)> {
    mapped.tensors.iter().find_map(|(registration, tensor)| {
        let input = signature.inputs.get(*registration)?;
        role(&input.role).then_some((&*input.name, &**tensor))
    })
}

/// Whether a request asks for its responses as they come.
pub(super) fn streams(found: &FoundModel, mapped: &Mapped) -> bool {
    let asked = given(&found.signature, mapped, |role| *role == InputRole::Stream);
    asked.is_some_and(|(_, tensor)| match &tensor.data {
        // One element for each row of a batch: a request is answered in one way.
        TensorData::Bool(list) => list.contains(&true),
        _ => false,
    })
}

/// The elements of a tensor as texts.
pub(super) fn texts(name: &str, tensor: &Tensor) -> Result<Vec<String>, RequestError> {
    let wrong =
        |why: &str| RequestError::new(Code::InvalidRequest, format!("input '{name}' {why}"));
    let TensorData::Bytes(list) = &tensor.data else {
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
pub(super) fn failed(failure: RequestError) -> CallResponses {
    stream::iter([Err(failure)]).boxed()
}
