//! The routes below `/v2`: generate and generate_stream are handled here, the others are passed on.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use futures::StreamExt;
use http::request::Parts;
use http::{Extensions, HeaderValue, Request, Response, StatusCode, header};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{InvalidRequest, Mapper};
use tokio::time::Instant;

use super::body::{EncodingErrorStyle, Upload};
use super::call::{CallResponses, CheckedRequest};
use super::catalog::{FoundModel, ModelCatalog};
use super::compression::compressed;
use super::input_charge::InputCharge;
use super::load_report::LoadReportRequest;
use super::offload::offload;
use super::path::{GenerateRoute, Target};
use super::request_error::{JSON, RequestError};
use super::request_options::RequestOptions;
use super::response_json::JsonResponseContext;
use super::stats::RequestTimer;
use super::{embedding, events, infer, metadata, repository, resume};
use crate::auth::caller::Caller;
use crate::http::request_trace;
use crate::http::timeouts::Deadline;

/// Answers one request.
pub(super) async fn serve(catalog: Arc<ModelCatalog>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let upload = Upload::new(&parts, body);
    let answered = answer(&catalog, &parts, upload).await;
    answered.unwrap_or_else(|failure| failure.answer())
}

async fn answer(
    catalog: &ModelCatalog,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, RequestError> {
    let route = GenerateRoute::read(parts.uri.path());
    let route = route.ok_or_else(|| RequestError::new(Code::NotFound, "Not Found"))?;
    allowed(&route, parts, catalog)?;
    // Looked up before the route is consumed, and read after the answer has begun, so that it shows the load by then.
    let load = LoadReportRequest::of(catalog, &route, parts);
    let mut answer = to(route, catalog, parts, upload).await?;
    if let Some(load) = load {
        load.add_header(answer.headers_mut());
    }
    Ok(answer)
}

/// Checks access and method, in this order and before the model is looked up (TR-203, TR-202).
fn allowed(
    route: &GenerateRoute,
    parts: &Parts,
    catalog: &ModelCatalog,
) -> Result<(), RequestError> {
    if let Some(restriction) = catalog.config.restricted.get(&route.category()) {
        restriction.check(&parts.headers)?;
    }
    if route.takes(&parts.method) {
        return Ok(());
    }
    let failure = RequestError::new(Code::InvalidRequest, "Method Not Allowed")
        .with_status(StatusCode::METHOD_NOT_ALLOWED);
    Err(failure.with_header(header::ALLOW, HeaderValue::from_static(route.allow())))
}

async fn to(
    route: GenerateRoute,
    catalog: &ModelCatalog,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, RequestError> {
    match route {
        GenerateRoute::Generate(target) => {
            let (call, request_timer, _) = read(catalog, &target, parts, upload).await?;
            let reported = JsonResponseContext::of(&call);
            let responses = begin(catalog, call, &request_timer, parts, false)?;
            let response = one(responses, request_timer).await?;
            let size = infer::written_size(&response);
            let turn = request_trace::present_turn().caller;
            let written = offload(size, turn, move || reported.json(&response)).await;
            let json = written.map_err(|_| infer::unwritten())?;
            Ok(compressed(&parts.headers, JSON, json).await)
        }
        GenerateRoute::GenerateStream(target) => {
            let (mut call, request_timer, options) = read(catalog, &target, parts, upload).await?;
            // With pings the head may go out long before the model has the prompt, and ends the charge of the body.
            call.charge = InputCharge::of_body(&parts.extensions);
            let reported = JsonResponseContext::of(&call);
            let responses = begin(catalog, call, &request_timer, parts, true)?;
            // After all checks: a request that is refused takes no place among the resumable streams.
            let registration = resume::register(catalog, parts, options);
            events::answer(responses, reported, request_timer, options, registration).await
        }
        GenerateRoute::Infer(target) => infer::answer(target, catalog, parts, upload).await,
        GenerateRoute::Request(id) => cancel(catalog, parts, &id),
        GenerateRoute::Stream(name) => resume::answer(&name, catalog, parts),
        GenerateRoute::Index
        | GenerateRoute::Load(_)
        | GenerateRoute::Unload(_)
        | GenerateRoute::Repository => repository::answer(route, catalog, parts, upload).await,
        other => metadata::answer(other, catalog, parts, upload).await,
    }
}

/// Makes a call that its sender may cancel by its id (TR-1311).
pub(super) fn begin(
    catalog: &ModelCatalog,
    call: CheckedRequest,
    request_timer: &RequestTimer,
    parts: &Parts,
    pieces: bool,
) -> Result<CallResponses, RequestError> {
    let id = call.mapped.id.clone();
    let responses = call.begin(catalog, pieces)?;
    let caller = Caller::of(&parts.extensions)?;
    let running = &catalog.running;
    let responses = running.list(&caller.identity, id.as_deref(), responses);
    // Outermost: a cancellation by id is an end that has to be counted as well.
    Ok(request_timer.watch(responses))
}

/// Cancels the running requests of an id (TR-1311).
fn cancel(catalog: &ModelCatalog, parts: &Parts, id: &str) -> Result<Response<Body>, RequestError> {
    let caller = Caller::of(&parts.extensions)?;
    if !catalog.running.cancel(&caller.identity, id) {
        let message = "no request of this id is running";
        return Err(RequestError::new(Code::NotFound, message));
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Reads and checks a request, in the order of TR-203. Nothing runs yet.
async fn read(
    catalog: &ModelCatalog,
    target: &Target,
    parts: &Parts,
    upload: Upload,
) -> Result<(CheckedRequest, RequestTimer, RequestOptions), RequestError> {
    let config = &catalog.config;
    let options = RequestOptions::of(&parts.headers)?;
    let caller = Caller::of(&parts.extensions)?;
    let found = catalog.find(caller, target)?;
    let request_timer = catalog.stats.begin(&found);
    let bytes = upload
        .whole(&parts.headers, EncodingErrorStyle::Generate, config)
        .await?;
    let size = bytes.len();
    let mut mapped = reading(&found, catalog, size, move |mapper| mapper.map(&bytes)).await?;
    if let Some(forwarded) = &config.forwarded {
        forwarded.join(&parts.headers, &mut mapped);
    }
    let unknown = &catalog.shared.metrics.unknown_parameters;
    unknown.inc_by(mapped.unknown.into());
    let call = CheckedRequest {
        found,
        mapped,
        deadline: deadline(&parts.extensions),
        held: Arc::default(),
        charge: InputCharge::default(),
    };
    Ok((call, request_timer, options))
}

/// The deadline of the answer: a moment before that of the middleware, whose own answer is not in the form of this face.
pub(super) fn deadline(extensions: &Extensions) -> Instant {
    let deadline = extensions.get::<Deadline>();
    deadline.map_or_else(|| Instant::now() + FOREVER, |deadline| deadline.0 - OURS)
}

const OURS: Duration = Duration::from_millis(5);
const FOREVER: Duration = Duration::from_secs(86_400);

/// Reads a request of this many bytes for a model, on a thread of the pool if it is large.
pub(super) async fn reading<T: Send + 'static>(
    found: &FoundModel,
    catalog: &ModelCatalog,
    size: usize,
    read: impl FnOnce(&Mapper<'_>) -> Result<T, InvalidRequest> + Send + 'static,
) -> Result<T, RequestError> {
    let limits = catalog.config.limits.clone();
    let found = found.clone();
    let reading = move || {
        // Parameters that only this model knows, which must not count as unknown ones (TR-307).
        let mut known: Vec<String> = found.model.controls.values().cloned().collect();
        if found.embeds {
            known.extend(embedding::PARAMETERS.map(str::to_owned));
        }
        let mapper = Mapper {
            model: &found.name,
            signature: &found.signature,
            known: &known,
            strict: found.model.strict_parameters,
            limits: &limits,
        };
        read(&mapper)
    };
    let read = offload(size, request_trace::present_turn().caller, reading).await;
    let defect = |_| RequestError::new(Code::Internal, "the request could not be read");
    Ok(read.map_err(defect)??)
}

/// The response of a call that must have exactly one (TR-504).
pub(super) async fn one(
    mut responses: CallResponses,
    mut request_timer: RequestTimer,
) -> Result<sapwood_proto::generate::ResponsePayload, RequestError> {
    let wrong = || {
        let message = "generate expects model to produce exactly 1 response, use generate stream for model that \
                       generates various number of responses";
        RequestError::new(Code::Internal, message).late()
    };
    let response = responses.next().await.ok_or_else(wrong)??;
    request_timer.responded(1);
    // Awaited for an error as well: one that comes in place of the end wins over the response (TR-504).
    match responses.next().await {
        None => {
            request_timer.succeeded();
            Ok(response)
        }
        Some(Err(failure)) => Err(failure),
        // The call is dropped, which cancels it. It is decided as a failure here, or the drop would count a client that
        // has disconnected.
        Some(Ok(_)) => {
            request_timer.ending().decide(None);
            Err(wrong())
        }
    }
}
