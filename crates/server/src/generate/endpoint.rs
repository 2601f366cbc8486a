//! What each route answers: generate and generate_stream here, the rest by those who know it.
//!
//! Owns: the order of the checks (TR-203), how responses become an answer (sections 5 and 6). Refuses to know: how models
//! are found and what bodies mean.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::{Stream, StreamExt, stream};
use http::request::Parts;
use http::{Extensions, HeaderValue, Request, Response, StatusCode, header};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Head, Mapper, Refused, Signature, error_event};
use tokio::time::Instant;

use super::body::{Style, Upload};
use super::burden::Burden;
use super::call::{Call, Responses};
use super::catalogue::{Catalogue, Found};
use super::failure::{EVENTS, Failure, JSON};
use super::path::{Route, Target};
use super::stats::Counting;
use super::{infer, metadata, repository};
use crate::patience::Deadline;

/// JSON of more than this is read where it holds up nobody.
const READ_HERE: usize = 64 << 10;

/// Answers one request.
pub(super) async fn serve(catalogue: Arc<Catalogue>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let upload = Upload::new(parts.version, &parts.headers, body);
    let answered = match Route::read(parts.uri.path()) {
        None => {
            refuse(
                upload,
                Failure::new(Code::NotFound, "Not Found"),
                &catalogue,
            )
            .await
        }
        Some(route) if !route.takes(&parts.method) => {
            let failure = Failure::new(Code::InvalidRequest, "Method Not Allowed")
                .with_status(StatusCode::METHOD_NOT_ALLOWED);
            let mut answer = upload.refuse(failure, &catalogue.config).await.answer();
            let allow = HeaderValue::from_static(route.allow());
            answer.headers_mut().insert(header::ALLOW, allow);
            return answer;
        }
        Some(route) => {
            let burden = Burden::of(&catalogue, &route, &parts.headers);
            let mut answered = to(route, &catalogue, &parts, upload).await;
            if let (Ok(answer), Some(burden)) = (&mut answered, burden) {
                burden.tell(answer.headers_mut());
            }
            answered
        }
    };
    answered.unwrap_or_else(|failure| failure.answer())
}

async fn refuse(
    upload: Upload,
    failure: Failure,
    catalogue: &Catalogue,
) -> Result<Response<Body>, Failure> {
    Err(upload.refuse(failure, &catalogue.config).await)
}

async fn to(
    route: Route,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    match route {
        Route::Generate(target) => {
            let (call, counting) = read(catalogue, &target, parts, upload).await?;
            let told = Told::of(&call);
            let responses = call.begin(catalogue, false)?;
            one(responses, counting).await.map(|response| {
                let body = told.head.json(&told.signature, &response);
                json(body)
            })
        }
        Route::GenerateStream(target) => {
            let (call, counting) = read(catalogue, &target, parts, upload).await?;
            let told = Told::of(&call);
            let responses = call.begin(catalogue, true)?;
            events(responses, told, counting).await
        }
        Route::Infer(target) => infer::answer(target, catalogue, parts, upload).await,
        Route::Index | Route::Load(_) | Route::Unload(_) | Route::Repository => {
            repository::answer(route, catalogue, parts, upload).await
        }
        other => metadata::answer(other, catalogue, parts, upload).await,
    }
}

/// Everything that is checked before there is work.
async fn read(
    catalogue: &Catalogue,
    target: &Target,
    parts: &Parts,
    upload: Upload,
) -> Result<(Call, Counting), Failure> {
    let config = &catalogue.config;
    let found = match catalogue.find(target) {
        Ok(found) => found,
        Err(failure) => return Err(upload.refuse(failure, config).await),
    };
    let counting = catalogue.stats.begin(&found);
    let bytes = upload
        .whole(&parts.headers, Style::Generate, config)
        .await?;
    let size = bytes.len();
    let mapped = reading(&found, catalogue, size, move |mapper| mapper.map(&bytes)).await?;
    let unknown = &catalogue.shared.metrics.unknown_parameters;
    unknown.inc_by(mapped.unknown.into());
    let call = Call {
        found,
        mapped,
        deadline: deadline(&parts.extensions),
    };
    Ok((call, counting))
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
        tokio::task::spawn_blocking(reading).await.map_err(defect)?
    } else {
        reading()
    };
    Ok(read?)
}

/// What answers are written with.
struct Told {
    head: Head,
    signature: Arc<Signature>,
}

impl Told {
    fn of(call: &Call) -> Self {
        let found = &call.found;
        Self {
            head: Head::new(call.mapped.id.as_deref(), &found.name, found.version),
            signature: Arc::clone(&found.signature),
        }
    }
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
    counting.responded();
    match responses.next().await {
        None => {
            counting.succeeded();
            Ok(response)
        }
        Some(Err(failure)) => Err(failure),
        // Dropped, and cancelled with it.
        Some(Ok(_)) => Err(wrong()),
    }
}

fn json(body: Bytes) -> Response<Body> {
    let mut answer = Response::new(Body::from(body));
    answer.headers_mut().insert(header::CONTENT_TYPE, JSON);
    answer
}

/// TR-602 to TR-604: the first thing that comes decides the status.
async fn events(
    mut responses: Responses,
    told: Told,
    mut counting: Counting,
) -> Result<Response<Body>, Failure> {
    let first = match responses.next().await {
        Some(Ok(response)) => Some(response),
        Some(Err(failure)) if failure.early => return Err(failure),
        Some(Err(failure)) if !failure.cut => return Ok(failure.stream()),
        Some(Err(failure)) => return Ok(stream_of(stream::iter([Err(cut(&failure))]))),
        None => {
            counting.succeeded();
            return Ok(stream_of(stream::empty()));
        }
    };
    let sending = Sending {
        responses,
        told,
        counting,
        first,
        over: false,
    };
    let events = stream::unfold(sending, |mut sending| async move {
        let event = sending.next().await?;
        Some((event, sending))
    });
    Ok(stream_of(events))
}

fn stream_of(events: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response<Body> {
    let mut answer = Response::new(Body::from_stream(events));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, EVENTS);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    answer
}

/// A stream on its way. Dropped with the body, whose client has gone then (TR-608).
struct Sending {
    responses: Responses,
    told: Told,
    counting: Counting,
    first: Option<sapwood_proto::generate::Response>,
    over: bool,
}

impl Sending {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if self.over {
            return None;
        }
        let response = match self.first.take() {
            Some(first) => Some(Ok(first)),
            None => self.responses.next().await,
        };
        match response {
            Some(Ok(response)) => {
                self.counting.responded();
                Some(Ok(self.told.head.event(&self.told.signature, &response)))
            }
            Some(Err(failure)) => {
                self.over = true;
                if !failure.cut {
                    return Some(Ok(error_event(&failure.message)));
                }
                // What was told before goes out first: an error drops whatever the connection still holds.
                tokio::task::yield_now().await;
                Some(Err(cut(&failure)))
            }
            None => {
                self.over = true;
                self.counting.succeeded();
                None
            }
        }
    }
}

/// D-11: the connection ends without the protocol's own end.
fn cut(failure: &Failure) -> io::Error {
    io::Error::other(failure.message.clone())
}
