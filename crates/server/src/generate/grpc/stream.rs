//! `ModelStreamInfer`: any number of requests on one stream, and their responses (TR-904 to TR-907).
//!
//! Owns: [`Outgoing`], how many requests run at once, in which order responses are told, which one is the last. Refuses
//! to know: what a request asks for.
//!
//! ```text
//!   messages in ─► decoupled: a stream of responses each ──► as they come ──┐
//!                └► one response each ──► in the order of the requests ────┴─► messages out
//! ```
//!
//! Nothing runs beside the answer's body: who does not read is not read from, and who goes away drops everything.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, FuturesOrdered, SelectAll};
use futures::{FutureExt, Stream, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Data, OutputRole, Parameter, Response, Tensor};
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::{
    ModelInferRequest, ModelInferResponse, ModelStreamInferResponse,
};
use tokio::time::Instant;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::infer::{Told, read, target, whole};
use super::status;
use crate::body_budget::Reservation;
use crate::caller::Caller;
use crate::drain::Phase;
use crate::generate::call::{Call, Responses, revoked};
use crate::generate::catalogue::{Catalogue, Found};
use crate::generate::endpoint::deadline;
use crate::generate::failure::Failure;
use crate::generate::stats::Counting;
use crate::refusal::Refusal;
use crate::revocation;

/// The mark of the response that ends a request.
const FINAL: &str = "triton_final_response";
/// A request wants that mark even where it has to come alone.
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";
/// The metadata with which the first error ends the call.
const ERROR_AS_STATUS: &str = "triton_grpc_error";

/// What a request has to tell.
type Item = Result<ModelInferResponse, Failed>;

/// The requests of a stream, each with what it is charged until it has been read.
type Incoming = BoxStream<'static, Result<(ModelInferRequest, Option<Reservation>), Status>>;

/// A request that has failed.
struct Failed {
    id: String,
    failure: Failure,
}

/// The body of the answer.
pub(super) struct Outgoing {
    catalogue: Arc<Catalogue>,
    caller: Result<Caller, Refusal>,
    /// `None` when no request comes any more.
    incoming: Option<Incoming>,
    running: SelectAll<BoxStream<'static, Item>>,
    ordered: FuturesOrdered<BoxFuture<'static, Item>>,
    /// What came with the call, for all its requests.
    metadata: Arc<MetadataMap>,
    /// How long one request may take.
    time: Duration,
    error_as_status: bool,
    /// The last thing told was a refusal: whatever runs has its turn first.
    refused: bool,
    /// When the caller's key is revoked: nothing more is taken, and what runs ends by itself.
    revoked: Option<BoxFuture<'static, ()>>,
    over: bool,
    /// Set where a script cuts the call.
    cut: Arc<AtomicBool>,
}

impl Outgoing {
    pub(super) fn new(
        catalogue: Arc<Catalogue>,
        request: tonic::Request<Incoming>,
        cut: Arc<AtomicBool>,
    ) -> Self {
        let (metadata, extensions, incoming) = request.into_parts();
        let drain = catalogue.shared.drain.clone();
        let leaving = async move { drain.reached(Phase::Refusing).await };
        Self {
            caller: Caller::of(&extensions).cloned(),
            incoming: Some(incoming.take_until(leaving.boxed()).boxed()),
            running: SelectAll::new(),
            ordered: FuturesOrdered::new(),
            time: deadline(&extensions).saturating_duration_since(Instant::now()),
            error_as_status: says_so(&metadata),
            metadata: Arc::new(metadata),
            refused: false,
            revoked: Some(revocation::reached()),
            over: false,
            cut,
            catalogue,
        }
    }

    /// A request that has come. `Some`: it is refused at once.
    fn begin(
        &mut self,
        (message, reservation): (ModelInferRequest, Option<Reservation>),
    ) -> Option<Item> {
        let id = message.id.clone();
        let refuse = |failure| {
            let id = id.clone();
            Some(Err(Failed { id, failure }))
        };
        let most = self.catalogue.config.grpc_requests_per_stream;
        if self.running.len() + self.ordered.len() >= most {
            let message = "too many requests on this stream";
            return refuse(Failure::new(Code::Overloaded, message));
        }
        let target = target(&message.model_name, &message.model_version);
        let found = self
            .caller
            .as_ref()
            .map_err(|refusal| refusal.clone().into());
        let found = found.and_then(|caller| self.catalogue.find(caller, &target));
        let found = match found {
            Ok(found) => found,
            Err(failure) => return refuse(failure),
        };
        let asked = Asked {
            counting: self.catalogue.stats.begin(&found),
            catalogue: Arc::clone(&self.catalogue),
            metadata: Arc::clone(&self.metadata),
            deadline: Instant::now() + self.time,
            empty_final: false,
            found,
            message,
            reservation,
        };
        if asked.found.signature.decoupled {
            let state = State::Asked(Box::new(asked));
            self.running.push(stream::unfold((state, id), next).boxed());
        } else {
            self.ordered.push_back(single(asked, id).boxed());
        }
        None
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Item, Status>>> {
        while let Some(incoming) = &mut self.incoming {
            match incoming.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(message))) => {
                    if let Some(refusal) = self.begin(message) {
                        return Poll::Ready(Some(Ok(refusal)));
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(client(&error)))),
                // Half-closed: what runs is finished (TR-907).
                Poll::Ready(None) => self.incoming = None,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(None)
    }

    fn poll_running(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let running = self.running.poll_next_unpin(cx);
        if let Poll::Ready(Some(_)) = running {
            return running;
        }
        match self.ordered.poll_next_unpin(cx) {
            Poll::Ready(None) => running,
            other => other,
        }
    }

    /// TR-905.
    fn tell(&mut self, item: Item) -> Result<ModelStreamInferResponse, Status> {
        match item {
            Ok(response) => Ok(ModelStreamInferResponse {
                error_message: String::new(),
                infer_response: Some(response),
            }),
            Err(Failed { failure, .. }) if self.error_as_status || failure.cut => {
                self.over = true;
                self.cut.store(failure.cut, Ordering::Relaxed);
                Err(status(&failure))
            }
            Err(Failed { id, failure }) => {
                let message = ModelInferResponse {
                    id,
                    ..ModelInferResponse::default()
                };
                Ok(ModelStreamInferResponse {
                    error_message: Some(failure.message)
                        .filter(|message| !message.is_empty())
                        .unwrap_or_else(|| failure.code.name().into()),
                    infer_response: Some(marked(message, true)),
                })
            }
        }
    }
}

impl Stream for Outgoing {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Some(revoked) = &mut self.revoked
            && revoked.poll_unpin(cx).is_ready()
        {
            self.revoked = None;
            self.incoming = None;
        }
        if std::mem::take(&mut self.refused)
            && let Poll::Ready(Some(item)) = self.poll_running(cx)
        {
            return Poll::Ready(Some(self.tell(item)));
        }
        let came = self.poll_incoming(cx);
        if let Poll::Ready(Some(item)) = came {
            self.refused = true;
            return Poll::Ready(Some(match item {
                Ok(refusal) => self.tell(refusal),
                Err(status) => {
                    self.over = true;
                    Err(status)
                }
            }));
        }
        match (self.poll_running(cx), came) {
            (Poll::Ready(Some(item)), _) => Poll::Ready(Some(self.tell(item))),
            (Poll::Ready(None), Poll::Ready(None)) => {
                self.over = true;
                let is_revoked = self.revoked.is_none();
                Poll::Ready(is_revoked.then(|| Err(status(&revoked()))))
            }
            _ => Poll::Pending,
        }
    }
}

/// What a client's stream ends with, in the terms of section 14.
fn client(error: &Status) -> Status {
    match error.code() {
        tonic::Code::OutOfRange => Status::resource_exhausted(error.message()),
        _ => error.clone(),
    }
}

fn says_so(metadata: &MetadataMap) -> bool {
    let said = metadata.get(ERROR_AS_STATUS);
    said.is_some_and(|value| value.as_bytes() == b"true")
}

fn marked(mut message: ModelInferResponse, last: bool) -> ModelInferResponse {
    let flag = Parameter::Bool(last).to_message();
    message.parameters.insert(FINAL.into(), flag);
    message
}

/// A request whose form is still to be checked.
struct Asked {
    catalogue: Arc<Catalogue>,
    found: Found,
    message: ModelInferRequest,
    /// What the message is charged.
    reservation: Option<Reservation>,
    metadata: Arc<MetadataMap>,
    deadline: Instant,
    empty_final: bool,
    counting: Counting,
}

impl Asked {
    /// The call, and whether its end may come alone.
    async fn read(mut self) -> Result<(Call, Counting, bool, Arc<Catalogue>), Failure> {
        if let Some(asked) = self.message.parameters.remove(EMPTY_FINAL) {
            let Some(ParameterChoice::BoolParam(flag)) = asked.parameter_choice else {
                let message = format!("parameter '{EMPTY_FINAL}' must be true or false");
                return Err(Failure::new(Code::InvalidRequest, message));
            };
            self.empty_final = flag;
        }
        let Self {
            catalogue,
            found,
            message,
            reservation,
            metadata,
            deadline,
            empty_final,
            counting,
        } = self;
        let call = read(&catalogue, found, message, &metadata, deadline).await?;
        drop(reservation);
        Ok((call, counting, empty_final, catalogue))
    }
}

/// A model that gives one response; its end is known with it.
async fn single(asked: Asked, id: String) -> Item {
    let told = async {
        let (call, counting, _, catalogue) = asked.read().await?;
        whole(&catalogue, call, counting).await
    };
    match told.await {
        Ok(message) => Ok(marked(message, true)),
        Err(failure) => Err(Failed { id, failure }),
    }
}

/// How far a request is.
enum State {
    Asked(Box<Asked>),
    Telling(Box<Telling>),
    Over,
}

/// A request whose responses are being told.
struct Telling {
    responses: Responses,
    told: Told,
    counting: Counting,
    empty_final: bool,
    /// It is a text model: its clients wait for a last payload.
    text: bool,
    /// What was found behind the last response, where that was at hand.
    ahead: Option<Result<Response, Failure>>,
    /// Elements of the text output of the last response.
    texts: usize,
}

async fn next((state, id): (State, String)) -> Option<(Item, (State, String))> {
    let told = match state {
        State::Over => return None,
        State::Telling(telling) => telling.next().await,
        State::Asked(asked) => match Telling::begin(*asked).await {
            Ok(telling) => telling.next().await,
            Err(failure) => Some((Err(failure), State::Over)),
        },
    };
    let (told, state) = told?;
    let item = told.map_err(|failure| {
        let id = id.clone();
        Failed { id, failure }
    });
    Some((item, (state, id)))
}

impl Telling {
    async fn begin(asked: Asked) -> Result<Box<Self>, Failure> {
        let (call, counting, empty_final, catalogue) = asked.read().await?;
        let told = Told::of(&call);
        let text = call.found.text && call.found.model.controls.is_empty();
        let responses = counting.watch(call.begin(&catalogue, true)?);
        Ok(Box::new(Self {
            responses,
            told,
            counting,
            empty_final,
            text,
            ahead: None,
            texts: 1,
        }))
    }

    /// The next message, and how far the request is then. An end that is at hand is told with the response before it; no
    /// response waits for one (TR-906).
    async fn next(mut self: Box<Self>) -> Option<(Result<ModelInferResponse, Failure>, State)> {
        let response = match self.ahead.take() {
            Some(ahead) => Some(ahead),
            None => self.responses.next().await,
        };
        let response = match response {
            Some(Ok(response)) => response,
            Some(Err(failure)) => return Some((Err(failure), State::Over)),
            None => {
                self.counting.succeeded();
                let message = self.end()?;
                return Some((Ok(marked(message, true)), State::Over));
            }
        };
        self.counting.responded(1);
        self.texts = self.texts_of(&response);
        let message = self.told.message(&response);
        let behind = self.responses.next().now_or_never();
        let last = matches!(behind, Some(None));
        if last {
            self.counting.succeeded();
            return Some((Ok(marked(message, true)), State::Over));
        }
        self.ahead = behind.flatten();
        Some((Ok(marked(message, false)), State::Telling(self)))
    }

    /// What is told where the end comes alone.
    fn end(&self) -> Option<ModelInferResponse> {
        if self.empty_final {
            return Some(self.told.message(&Response::default()));
        }
        let place = self.text_output().filter(|_| self.text)?;
        let empty = Data::Bytes(vec![&b""[..]; self.texts].into_iter().collect());
        Some(self.told.message(&Response {
            outputs: vec![(place, Tensor::flat(empty))],
            parameters: Vec::new(),
        }))
    }

    fn text_output(&self) -> Option<usize> {
        let outputs = &self.told.signature.outputs;
        outputs
            .iter()
            .position(|output| output.role == OutputRole::Text)
    }

    fn texts_of(&self, response: &Response) -> usize {
        let mine = self.text_output();
        let text = response
            .outputs
            .iter()
            .find(|(place, _)| Some(*place) == mine);
        text.map_or(self.texts, |(_, tensor)| tensor.data.len())
    }
}
