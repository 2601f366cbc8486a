//! Turns a decoded request into a call of the kernel, and the call's chunks into responses.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, Stream, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    InputRole, Mapped, ResponsePayload, Settings, Signature, Tensor, TensorData,
};
use tokio::time::Instant;

use super::catalog::{FoundModel, ModelCatalog};
use super::request_end::EarlyEnd;
use super::request_error::RequestError;
use super::{batch, function, scripted, text};
use crate::http::request_trace;

/// The responses of a call as they come; the end of the stream is the final flag. Dropping it ends the work.
pub(super) type CallResponses = BoxStream<'static, Result<ResponsePayload, RequestError>>;

/// A request that has passed every check of its form.
#[derive(Debug)]
pub(super) struct CheckedRequest {
    pub(super) found: FoundModel,
    pub(super) mapped: Mapped,
    /// When its answer must be complete.
    pub(super) deadline: Instant,
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
        // Here, around the calls of every kind of endpoint, so that none can forget it.
        let cutting = catalog.shared.drain.clone();
        let cutting = async move { cutting.cutting().await };
        Ok(CuttableResponses {
            responses: self.responses(catalog, pieces)?,
            cutting: cutting.boxed(),
            revoked: request_trace::revoked(),
            over: false,
        }
        .boxed())
    }

    fn responses(
        self,
        catalog: &ModelCatalog,
        pieces: bool,
    ) -> Result<CallResponses, RequestError> {
        let kernel = &catalog.kernel;
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

/// Responses that end with an error of this face when a drain cuts them or the key is revoked (OA-904, D-45).
struct CuttableResponses {
    responses: CallResponses,
    cutting: BoxFuture<'static, ()>,
    revoked: BoxFuture<'static, ()>,
    over: bool,
}

impl Stream for CuttableResponses {
    type Item = Result<ResponsePayload, RequestError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        // Responses first: those that are ready are sent, and an end that is ready is not made an error.
        if let Poll::Ready(next) = self.responses.poll_next_unpin(cx) {
            return Poll::Ready(next);
        }
        // Both are polled while neither is ready, or one of them has no waker.
        let failure = if self.revoked.poll_unpin(cx).is_ready() {
            revoked()
        } else {
            ready!(self.cutting.poll_unpin(cx));
            let message = "The server is shutting down: try another one.";
            RequestError::new(Code::Unavailable, message).because(EarlyEnd::Drain)
        };
        self.over = true;
        // Dropped here, which ends the work: the stream itself lives until its reader has taken the error.
        self.responses = stream::empty().boxed();
        Poll::Ready(Some(Err(failure)))
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
