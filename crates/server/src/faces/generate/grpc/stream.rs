//! `ModelStreamInfer`: any number of requests on one stream, with their responses (TR-904 to TR-907).
//!
//! ```text
//!   messages in ─► decoupled: a stream of responses each ──► as they come ──┐
//!                └► one response each ──► in the order of the requests ────┴─► messages out
//! ```
//!
//! Everything runs within the polls of the response body: from a client that does not read, nothing is read, and one
//! that disconnects drops everything.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, FuturesOrdered, SelectAll};
use futures::{FutureExt, Stream, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{OutputRole, RequestParameter, ResponsePayload, Tensor, TensorData};
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::{
    ModelInferRequest, ModelInferResponse, ModelStreamInferResponse,
};
use tokio::time::Instant;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::infer::{GrpcResponseContext, read, target, whole};
use super::status;
use crate::auth::caller::Caller;
use crate::faces::generate::call::{CallResponses, CheckedRequest, revoked};
use crate::faces::generate::catalog::{FoundModel, ModelCatalog};
use crate::faces::generate::endpoint::deadline;
use crate::faces::generate::input_charge::{InputCharge, StreamHold};
use crate::faces::generate::request_error::RequestError;
use crate::faces::generate::stats::RequestTimer;
use crate::http::body_budget::Reservation;
use crate::http::intake::BodyIntake;
use crate::http::rejection::Rejection;
use crate::http::request_trace;
use crate::ops::drain::DrainPhase;

/// The parameter of a response that says whether it is the last one of its request.
const FINAL: &str = "triton_final_response";
/// The parameter of a request that wants the final mark even in a response without outputs (TR-906).
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";
/// The metadata with which the first error ends the call (TR-905).
const ERROR_AS_STATUS: &str = "triton_grpc_error";

/// A response of a request, or its failure.
type ResponseItem = Result<ModelInferResponse, FailedRequest>;

/// The requests of a stream, each with its charge to the byte budget, which ends when its model has it.
type ChargedRequests = BoxStream<'static, Result<(ModelInferRequest, Option<Reservation>), Status>>;

/// A request that has failed.
struct FailedRequest {
    id: String,
    failure: RequestError,
}

/// The response body.
pub(super) struct StreamBody {
    catalog: Arc<ModelCatalog>,
    caller: Result<Caller, Rejection>,
    /// `None` after the last request.
    incoming: Option<ChargedRequests>,
    running: StartedRequests<ResponseItem>,
    /// What the requests hold whose models have not begun.
    hold: Arc<StreamHold>,
    intake: Option<Arc<BodyIntake>>,
    /// The metadata of the call, for all its requests.
    metadata: Arc<MetadataMap>,
    /// The time limit of one request.
    time: Duration,
    error_as_status: bool,
    /// The last response was a refusal: running requests have their turn first.
    refused: bool,
    /// Resolves when the caller's key is revoked; `None` after that. No more requests are read then, and those that run
    /// end by themselves.
    revoked: Option<BoxFuture<'static, ()>>,
    over: bool,
    /// Set when a script cuts the call.
    cut: Arc<AtomicBool>,
}

impl StreamBody {
    pub(super) fn new(
        catalog: Arc<ModelCatalog>,
        request: tonic::Request<ChargedRequests>,
        cut: Arc<AtomicBool>,
    ) -> Self {
        let (metadata, extensions, incoming) = request.into_parts();
        let drain = catalog.shared.drain.clone();
        let departing = async move { drain.reached(DrainPhase::Refusing).await };
        Self {
            // An error here is the answer to each request: the headers have to go out at once (TR-907).
            caller: Caller::of(&extensions).cloned(),
            // A drain is like a half-close: requests that run are finished, and then the call ends with OK.
            incoming: Some(incoming.take_until(departing.boxed()).boxed()),
            running: StartedRequests::default(),
            hold: Arc::default(),
            intake: extensions.get().cloned(),
            // A duration and not the deadline itself: a stream may live for days, and each of its requests has its own.
            time: deadline(&extensions).saturating_duration_since(Instant::now()),
            error_as_status: asks_for_it(&metadata),
            metadata: Arc::new(metadata),
            refused: false,
            revoked: Some(request_trace::revoked()),
            over: false,
            cut,
            catalog,
        }
    }

    /// Starts a request. `Some`: it is refused at once.
    fn begin(
        &mut self,
        (message, reservation): (ModelInferRequest, Option<Reservation>),
    ) -> Option<ResponseItem> {
        let id = message.id.clone();
        let refuse = |failure| {
            let id = id.clone();
            Some(Err(FailedRequest { id, failure }))
        };
        let most = self.catalog.config.grpc_requests_per_stream;
        if self.running.len() >= most {
            let message = "too many requests on this stream";
            return refuse(RequestError::new(Code::Overloaded, message));
        }
        let target = target(&message.model_name, &message.model_version);
        let found = self
            .caller
            .as_ref()
            .map_err(|rejection| rejection.clone().into());
        let found = found.and_then(|caller| self.catalog.find(caller, &target));
        let found = match found {
            Ok(found) => found,
            Err(failure) => return refuse(failure),
        };
        let asked = UncheckedRequest {
            // Only now, where the model is known: what was refused above counts for no model.
            request_timer: self.catalog.stats.begin(&found),
            catalog: Arc::clone(&self.catalog),
            metadata: Arc::clone(&self.metadata),
            deadline: Instant::now() + self.time,
            found,
            message,
            charge: InputCharge::of_message(reservation, &self.hold),
        };
        if asked.found.signature.decoupled {
            let state = RequestProgress::Asked(Box::new(asked));
            let responses = stream::unfold((state, id), next).boxed();
            self.running.interleaved.push(responses);
        } else {
            self.running.ordered.push_back(single(asked, id).boxed());
        }
        None
    }

    /// Starts the requests that have arrived. `Ready(None)`: no more can come.
    fn poll_incoming(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ResponseItem, Status>>> {
        // To the end, because only a pending poll registers the waker. Each round starts a request, of which there are
        // at most `grpc_requests_per_stream`, or returns.
        loop {
            self.hold_back();
            let Some(incoming) = &mut self.incoming else {
                return Poll::Ready(None);
            };
            match incoming.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(message))) => {
                    if let Some(rejection) = self.begin(message) {
                        return Poll::Ready(Some(Ok(rejection)));
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(client(&error)))),
                // Half-closed: requests that run are finished (TR-907).
                Poll::Ready(None) => self.incoming = None,
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Reads no more messages while the requests hold too much of the byte budget; otherwise a client that sends prompts
    /// faster than they are computed would find no room there, which ends the call. Returns whether that is a change.
    fn hold_back(&self) -> bool {
        let Some(intake) = &self.intake else {
            return false;
        };
        intake.hold_back(self.hold.bytes() > intake.share())
    }

    /// The message of a response or a failure (TR-905).
    fn encode(&mut self, item: ResponseItem) -> Result<ModelStreamInferResponse, Status> {
        match item {
            Ok(response) => Ok(ModelStreamInferResponse {
                error_message: String::new(),
                infer_response: Some(response),
            }),
            Err(FailedRequest { failure, .. }) if self.error_as_status || failure.cut => {
                self.over = true;
                // Without the flag the status would go out in trailers, which is a proper end.
                self.cut.store(failure.cut, Ordering::Relaxed);
                Err(status(&failure))
            }
            Err(FailedRequest { id, failure }) => {
                let message = ModelInferResponse {
                    id,
                    ..ModelInferResponse::default()
                };
                Ok(ModelStreamInferResponse {
                    // Clients test this field for a failure, so it is never empty (TR-905).
                    error_message: Some(failure.message)
                        .filter(|message| !message.is_empty())
                        .unwrap_or_else(|| failure.code.name().into()),
                    infer_response: Some(marked(message, true)),
                })
            }
        }
    }
}

impl Stream for StreamBody {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Some(revoked) = &mut self.revoked
            && revoked.poll_unpin(cx).is_ready()
        {
            self.revoked = None;
            // The running requests watch the key themselves (`CheckedRequest::begin`), and each reports its end.
            self.incoming = None;
        }
        // Requests beyond the limit are refused as fast as they arrive: without this turn a client that sends them
        // without pause would get nothing but refusals.
        if std::mem::take(&mut self.refused)
            && let Poll::Ready(Some(item)) = self.running.poll_next(cx)
        {
            return Poll::Ready(Some(self.encode(item)));
        }
        // Before the running ones: requests run concurrently (TR-904), so each starts as it arrives.
        let came = self.poll_incoming(cx);
        if let Poll::Ready(Some(item)) = came {
            self.refused = true;
            return Poll::Ready(Some(match item {
                Ok(rejection) => self.encode(rejection),
                // A message that cannot be decoded has no id to answer to, and after a broken stream nothing follows.
                Err(status) => {
                    self.over = true;
                    Err(status)
                }
            }));
        }
        match (self.running.poll_next(cx), came) {
            (Poll::Ready(Some(item)), _) => Poll::Ready(Some(self.encode(item))),
            (Poll::Ready(None), Poll::Ready(None)) => {
                self.over = true;
                // Also where nothing ran: OK would look like an answer to a half-close.
                let is_revoked = self.revoked.is_none();
                Poll::Ready(is_revoked.then(|| Err(status(&revoked()))))
            }
            _ => {
                // A model has begun: only the next poll reads on, and registers a waker for what comes.
                if self.hold_back() {
                    cx.waker().wake_by_ref();
                }
                Poll::Pending
            }
        }
    }
}

/// The status with which a broken stream of requests ends, in the terms of section 14.
fn client(error: &Status) -> Status {
    match error.code() {
        // The library's code for a message that is too large.
        tonic::Code::OutOfRange => Status::resource_exhausted(error.message()),
        _ => error.clone(),
    }
}

fn asks_for_it(metadata: &MetadataMap) -> bool {
    let sent = metadata.get(ERROR_AS_STATUS);
    sent.is_some_and(|value| value.as_bytes() == b"true")
}

fn marked(mut message: ModelInferResponse, last: bool) -> ModelInferResponse {
    let flag = RequestParameter::Bool(last).to_message();
    message.parameters.insert(FINAL.into(), flag);
    message
}

/// The requests that run, and their responses.
struct StartedRequests<T> {
    /// Requests of decoupled models, whose responses interleave.
    interleaved: SelectAll<BoxStream<'static, T>>,
    /// Requests of other models, whose responses come in the order of the requests.
    ordered: FuturesOrdered<BoxFuture<'static, T>>,
    /// The ordered requests are polled first this time.
    ordered_first: bool,
}

impl<T> Default for StartedRequests<T> {
    fn default() -> Self {
        Self {
            interleaved: SelectAll::new(),
            ordered: FuturesOrdered::new(),
            ordered_first: false,
        }
    }
}

impl<T> StartedRequests<T> {
    fn len(&self) -> usize {
        self.interleaved.len() + self.ordered.len()
    }

    /// The next response; `None` where nothing runs.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        // In turn, because the first may be ready at each poll, and a request that is not polled does not even start.
        let ordered_first = self.ordered_first;
        self.ordered_first = !ordered_first;
        if ordered_first && let Poll::Ready(Some(response)) = self.ordered.poll_next_unpin(cx) {
            return Poll::Ready(Some(response));
        }
        let interleaved = self.interleaved.poll_next_unpin(cx);
        // Pending or empty: the ordered ones are polled as well, or they have no waker.
        if let Poll::Ready(Some(_)) = interleaved {
            return interleaved;
        }
        match self.ordered.poll_next_unpin(cx) {
            Poll::Ready(None) => interleaved,
            other => other,
        }
    }
}

/// A request whose inputs were not checked yet.
struct UncheckedRequest {
    catalog: Arc<ModelCatalog>,
    found: FoundModel,
    message: ModelInferRequest,
    charge: InputCharge,
    metadata: Arc<MetadataMap>,
    deadline: Instant,
    request_timer: RequestTimer,
}

impl UncheckedRequest {
    /// Checks the request. Returns the call, and whether its end may come alone.
    async fn read(
        mut self,
    ) -> Result<(CheckedRequest, RequestTimer, bool, Arc<ModelCatalog>), RequestError> {
        let mut empty_final = false;
        // Taken out before the mapping, which refuses every name that starts with `triton_` (TR-805).
        if let Some(asked) = self.message.parameters.remove(EMPTY_FINAL) {
            let Some(ParameterChoice::BoolParam(flag)) = asked.parameter_choice else {
                let message = format!("parameter '{EMPTY_FINAL}' must be true or false");
                return Err(RequestError::new(Code::InvalidRequest, message));
            };
            empty_final = flag;
        }
        let reading = read(
            &self.catalog,
            self.found,
            self.message,
            &self.metadata,
            self.deadline,
        );
        let mut call = reading.await?;
        // The message is gone by now, and the prompt is not. A stream may be open for long, so its messages are not charged
        // until it ends.
        call.charge = self.charge;
        Ok((call, self.request_timer, empty_final, self.catalog))
    }
}

/// Runs a request of a model that gives one response, which is the final one.
async fn single(asked: UncheckedRequest, id: String) -> ResponseItem {
    let reported = async {
        let (call, request_timer, _, catalog) = asked.read().await?;
        whole(&catalog, call, request_timer).await
    };
    match reported.await {
        Ok(message) => Ok(marked(message, true)),
        Err(failure) => Err(FailedRequest { id, failure }),
    }
}

/// The progress of a request of a decoupled model.
enum RequestProgress {
    Asked(Box<UncheckedRequest>),
    Reporter(Box<ResponseWriter>),
    Over,
}

/// A request whose responses are being sent.
struct ResponseWriter {
    responses: CallResponses,
    response_context: GrpcResponseContext,
    request_timer: RequestTimer,
    empty_final: bool,
    /// It is a text model, whose clients wait for a last payload (TR-906).
    text: bool,
    /// The response that was ready behind the one that was sent.
    ahead: Option<Result<ResponsePayload, RequestError>>,
    /// Elements of the text output of the last response.
    texts: usize,
}

async fn next(
    (state, id): (RequestProgress, String),
) -> Option<(ResponseItem, (RequestProgress, String))> {
    let reported = match state {
        RequestProgress::Over => return None,
        RequestProgress::Reporter(reporter) => reporter.next().await,
        RequestProgress::Asked(asked) => match ResponseWriter::begin(*asked).await {
            Ok(reporter) => reporter.next().await,
            Err(failure) => Some((Err(failure), RequestProgress::Over)),
        },
    };
    let (reported, state) = reported?;
    let item = reported.map_err(|failure| {
        let id = id.clone();
        FailedRequest { id, failure }
    });
    Some((item, (state, id)))
}

impl ResponseWriter {
    async fn begin(asked: UncheckedRequest) -> Result<Box<Self>, RequestError> {
        let (call, timer, empty_final, catalog) = asked.read().await?;
        let reported = GrpcResponseContext::of(&call);
        let text = call.found.text && call.found.model.controls.is_empty();
        let responses = timer.watch(call.begin(&catalog, true)?);
        Ok(Box::new(Self {
            responses,
            response_context: reported,
            request_timer: timer,
            empty_final,
            text,
            ahead: None,
            texts: 1,
        }))
    }

    /// The next message, and the progress of the request after it. An end that is ready is sent with the response
    /// before it; no response waits for one (TR-906).
    async fn next(
        mut self: Box<Self>,
    ) -> Option<(Result<ModelInferResponse, RequestError>, RequestProgress)> {
        let response = match self.ahead.take() {
            Some(ahead) => Some(ahead),
            None => self.responses.next().await,
        };
        let response = match response {
            Some(Ok(response)) => response,
            Some(Err(failure)) => return Some((Err(failure), RequestProgress::Over)),
            None => {
                self.request_timer.succeeded();
                let message = self.end()?;
                return Some((Ok(marked(message, true)), RequestProgress::Over));
            }
        };
        self.request_timer.responded(1);
        self.texts = self.texts_of(&response);
        let message = self.response_context.message(&response);
        // Polled once with a waker that does nothing. That loses no wake-up: the stream is polled again for the next
        // message, with the waker of the body.
        let behind = self.responses.next().now_or_never();
        let last = matches!(behind, Some(None));
        if last {
            self.request_timer.succeeded();
            return Some((Ok(marked(message, true)), RequestProgress::Over));
        }
        self.ahead = behind.flatten();
        Some((Ok(marked(message, false)), RequestProgress::Reporter(self)))
    }

    /// The message of an end that comes alone.
    fn end(&self) -> Option<ModelInferResponse> {
        if self.empty_final {
            return Some(self.response_context.message(&ResponsePayload::default()));
        }
        let registration = self.text_output().filter(|_| self.text)?;
        // As many elements as the responses before it: clients index the choices.
        let empty = TensorData::Bytes(vec![&b""[..]; self.texts].into_iter().collect());
        Some(self.response_context.message(&ResponsePayload {
            outputs: vec![(registration, Tensor::flat(empty))],
            parameters: Vec::new(),
        }))
    }

    fn text_output(&self) -> Option<usize> {
        let signature = &self.response_context.signature;
        signature.output_of(&OutputRole::Text)
    }

    /// Elements of the text output of this response, or of the last one that had that output.
    fn texts_of(&self, response: &ResponsePayload) -> usize {
        let mine = self.text_output();
        let text = response
            .outputs
            .iter()
            .find(|(registration, _)| Some(*registration) == mine);
        text.map_or(self.texts, |(_, tensor)| tensor.data.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_904_a_request_that_is_always_ready_does_not_keep_others_waiting() {
        let mut running = StartedRequests::default();
        running.interleaved.push(stream::repeat("stream").boxed());
        for single in ["first", "second"] {
            running.ordered.push_back(async move { single }.boxed());
        }
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let responses: Vec<_> = (0..6).map(|_| running.poll_next(&mut cx)).collect();
        for single in ["first", "second"] {
            assert!(
                responses.contains(&Poll::Ready(Some(single))),
                "{responses:?}"
            );
        }
        assert_eq!(responses[5], Poll::Ready(Some("stream")));
    }
}
