//! What each route answers: generate and generate_stream here, the rest by those who know it.
//!
//! Owns: the order of the checks (TR-203), how responses become one answer (section 5). Refuses to know: how models are found,
//! what bodies mean, and streams of events.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::StreamExt;
use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use sapwood_kernel::pool::{Pool, Size};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Mapper, Refused};
use tokio::time::Instant;

use super::body::{Style, Upload};
use super::burden::Burden;
use super::call::{Call, Responses};
use super::catalogue::{Catalogue, Found};
use super::compression::Packing;
use super::failure::{Failure, JSON};
use super::path::{Route, Target};
use super::stats::Counting;
use super::told::Told;
use super::wishes::Wishes;
use super::{events, infer, metadata, repository, resume};
use crate::caller::Caller;
use crate::patience::Deadline;
use crate::trail;

/// JSON of more than this is read where it holds up nobody.
const READ_HERE: usize = 64 << 10;

/// Answers one request.
pub(super) async fn serve(catalogue: Arc<Catalogue>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let upload = Upload::new(&parts, body);
    let answered = match Route::read(parts.uri.path()) {
        None => Err(Failure::new(Code::NotFound, "Not Found")),
        Some(route) => allowed(route, &parts, &catalogue),
    };
    match answered {
        Ok(route) => {
            let burden = Burden::of(&catalogue, &route, &parts);
            let mut answered = to(route, &catalogue, &parts, upload).await;
            if let (Ok(answer), Some(burden)) = (&mut answered, burden) {
                burden.tell(answer.headers_mut());
            }
            answered.unwrap_or_else(|failure| failure.answer())
        }
        Err(failure) => failure.answer(),
    }
}

/// TR-203: who may come in, and how. The header `Allow` goes with the refusal of a method.
fn allowed(route: Route, parts: &Parts, catalogue: &Catalogue) -> Result<Route, Failure> {
    let restriction = catalogue.config.restricted.get(&route.category());
    restriction.map_or(Ok(()), |restriction| restriction.check(&parts.headers))?;
    if route.takes(&parts.method) {
        return Ok(route);
    }
    let failure = Failure::new(Code::InvalidRequest, "Method Not Allowed")
        .with_status(StatusCode::METHOD_NOT_ALLOWED);
    Err(failure.with_header(header::ALLOW, HeaderValue::from_static(route.allow())))
}

async fn to(
    route: Route,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    match route {
        Route::Generate(target) => {
            let (call, counting, wishes) = read(catalogue, &target, parts, upload).await?;
            let told = Told::of(&call);
            let wanted = wishes.collect.then(|| told.signature.wanted(&call.mapped));
            let responses = begin(catalogue, call, &counting, parts, false)?;
            let response = match wanted {
                Some(wanted) => collected(responses, counting, &told, &wanted).await?,
                None => one(responses, counting).await?,
            };
            Ok(json(&parts.headers, told.json(&response)))
        }
        Route::GenerateStream(target) => {
            let (call, counting, wishes) = read(catalogue, &target, parts, upload).await?;
            let told = Told::of(&call);
            let responses = begin(catalogue, call, &counting, parts, true)?;
            let place = resume::place(catalogue, parts, wishes);
            events::answer(responses, told, counting, wishes, place).await
        }
        Route::Infer(target) => infer::answer(target, catalogue, parts, upload).await,
        Route::InferStream(target) => infer::stream(target, catalogue, parts, upload).await,
        Route::Request(id) => cancel(catalogue, parts, &id),
        Route::Stream(name) => resume::answer(&name, catalogue, parts),
        Route::Index | Route::Load(_) | Route::Unload(_) | Route::Repository => {
            repository::answer(route, catalogue, parts, upload).await
        }
        other => metadata::answer(other, catalogue, parts, upload).await,
    }
}

/// The responses of a call, which its sender may cancel by its id.
pub(super) fn begin(
    catalogue: &Catalogue,
    call: Call,
    counting: &Counting,
    parts: &Parts,
    pieces: bool,
) -> Result<Responses, Failure> {
    let id = call.mapped.id.clone();
    let responses = call.begin(catalogue, pieces)?;
    let caller = Caller::of(&parts.extensions)?;
    let running = &catalogue.running;
    let responses = running.list(&caller.identity, id.as_deref(), responses);
    Ok(counting.watch(responses))
}

/// TR-1311.
fn cancel(catalogue: &Catalogue, parts: &Parts, id: &str) -> Result<Response<Body>, Failure> {
    let caller = Caller::of(&parts.extensions)?;
    if !catalogue.running.cancel(&caller.identity, id) {
        let message = "no request of this id is running";
        return Err(Failure::new(Code::NotFound, message));
    }
    Ok(nothing())
}

/// The answer to what is done, where nothing is to be said.
pub(super) fn nothing() -> Response<Body> {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::NO_CONTENT;
    answer
}

/// Everything that is checked before there is work.
async fn read(
    catalogue: &Catalogue,
    target: &Target,
    parts: &Parts,
    upload: Upload,
) -> Result<(Call, Counting, Wishes), Failure> {
    let config = &catalogue.config;
    let wishes = Wishes::of(&parts.headers)?;
    let caller = Caller::of(&parts.extensions)?;
    let found = catalogue.find(caller, target)?;
    let counting = catalogue.stats.begin(&found);
    let bytes = upload
        .whole(&parts.headers, Style::Generate, config)
        .await?;
    let size = bytes.len();
    let mut mapped = reading(&found, catalogue, size, move |mapper| mapper.map(&bytes)).await?;
    if let Some(forwarded) = &config.forwarded {
        forwarded.join(&parts.headers, &mut mapped);
    }
    let unknown = &catalogue.shared.metrics.unknown_parameters;
    unknown.inc_by(mapped.unknown.into());
    let call = Call {
        found,
        mapped,
        deadline: deadline(&parts.extensions),
    };
    Ok((call, counting, wishes))
}

/// When an answer has to be there: a moment before the gate gives its own, which is no answer of this face.
pub(super) fn deadline(extensions: &Extensions) -> Instant {
    let deadline = extensions.get::<Deadline>();
    deadline.map_or_else(|| Instant::now() + FOREVER, |deadline| deadline.0 - OURS)
}

const OURS: Duration = Duration::from_millis(5);
const FOREVER: Duration = Duration::from_secs(86_400);

/// Reads a request of this many bytes for a model, on a thread of its own where it is large.
pub(super) async fn reading<T: Send + 'static>(
    found: &Found,
    catalogue: &Catalogue,
    size: usize,
    read: impl FnOnce(&Mapper<'_>) -> Result<T, Refused> + Send + 'static,
) -> Result<T, Failure> {
    let limits = catalogue.config.limits.clone();
    let found = found.clone();
    let large = size > READ_HERE;
    let reading = move || {
        let known: Vec<String> = found.model.controls.values().cloned().collect();
        let mapper = Mapper {
            model: &found.name,
            signature: &found.signature,
            known: &known,
            strict: found.model.strict_parameters,
            limits: &limits,
        };
        read(&mapper)
    };
    let read = if large {
        let defect = |_| Failure::new(Code::Internal, "the request could not be read");
        let turn = trail::present_turn().caller;
        let reading = Pool::global().run_only(turn, Size::of(size), reading);
        reading.await.map_err(defect)?
    } else {
        reading()
    };
    Ok(read?)
}

/// TR-504: exactly one response.
pub(super) async fn one(
    mut responses: Responses,
    mut counting: Counting,
) -> Result<sapwood_proto::generate::Response, Failure> {
    let wrong = || {
        let message = "generate expects model to produce exactly 1 response, use generate stream for model that \
                       generates various number of responses";
        Failure::new(Code::Internal, message).late()
    };
    let response = responses.next().await.ok_or_else(wrong)??;
    counting.responded(1);
    match responses.next().await {
        None => {
            counting.succeeded();
            Ok(response)
        }
        Some(Err(failure)) => Err(failure),
        // Dropped, and cancelled with it.
        Some(Ok(_)) => {
            counting.ending().decide(None);
            Err(wrong())
        }
    }
}

/// TR-1302: whatever responses there are, as one.
async fn collected(
    mut responses: Responses,
    mut counting: Counting,
    told: &Told,
    wanted: &[bool],
) -> Result<sapwood_proto::generate::Response, Failure> {
    let mut whole = sapwood_proto::generate::Response::nothing(&told.signature, wanted);
    while let Some(response) = responses.next().await {
        whole.collect(&told.signature, response?);
        counting.responded(1);
    }
    counting.succeeded();
    Ok(whole)
}

/// A whole answer, in what the client likes to unpack (TR-1301).
fn json(asked: &HeaderMap, body: Bytes) -> Response<Body> {
    let (body, packing) = Packing::whole(asked, body);
    let mut answer = Response::new(Body::from(body));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, JSON);
    if let Some(packing) = packing {
        headers.insert(header::CONTENT_ENCODING, packing.name());
    }
    answer
}
