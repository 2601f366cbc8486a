//! `POST /v1/run`: runs a model with a controller (AI-911 to AI-916).

use std::sync::Arc;

use axum::body::Body;
use axum::response::IntoResponse;
use futures::{FutureExt, StreamExt};
use http::{HeaderName, HeaderValue, Response, header};
use sapwood_kernel::pool::{BlockingPool, TaskSize};
use sapwood_kernel::{
    Args, Chunk, Error, Fun, GenerateConfig, ModelFacts, PromptMode, RequestedPorts, Run,
    VariablesSharing, Want,
};
use sapwood_proto::code::Code;
use serde_json::json;
use tokio::time::timeout;

use super::endpoint::{AskedAction, ControllersContext, time_left};
use super::event_stream::{BegunRun, RunStream};
use super::live_runs::LiveRun;
use super::run_request::{self, RunRequest};
use super::run_variables::hex;
use super::{body, models, refusals};
use crate::http::intake::BodyIntake;
use crate::http::rejection::Rejection;
use crate::http::request_trace;
use crate::ops::metrics::FaceLabel;
use crate::ops::open_streams::OpenStreamGuard;
use crate::resume::fill_unguessably;

const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Begins a run, and answers with its events. Errors of the request are answered here; those of the controller are events.
pub(super) async fn answer(
    context: &ControllersContext,
    asked: AskedAction,
) -> Result<Response<Body>, Rejection> {
    let AskedAction {
        parts,
        body,
        caller,
        model,
        ..
    } = asked;
    let bytes = body::whole(&parts, body, context.config.body_bytes, "the request").await?;
    let mut request = RunRequest::read(&body::object(&bytes)?)?;
    drop(bytes);
    // The head may go out before the model has the prompt, and ends the charge of the body.
    let intake = parts.extensions.get::<Arc<BodyIntake>>();
    let mut charge = intake.map(|it| it.take_kept()).unwrap_or_default();
    // The prefix wins: a client that was given one knows no other name of the model.
    let name = model.as_deref().or(request.model.as_deref());
    let function = models::find(context, &caller, name)?;
    let spec = function.spec();
    if request.controller.is_some() && !spec.steers {
        return Err(refusals::unsupported("This model runs no controllers."));
    }
    if let (Some(most), Some(facts)) = (request.params.max_tokens, &spec.facts) {
        fits(facts, &request.prompt, most).await?;
    }
    let id = run_id();
    let id = id.ok_or_else(|| refusals::internal("The system has no randomness to give."))?;
    let vars = std::mem::take(&mut request.vars);
    let (sharer, live) = context.runs.begin(&id, caller.identity.clone(), vars);
    let mut run = begin(context, &function, request, sharer).timeout(time_left(&parts));
    let first = timeout(context.config.head_wait, run.next()).await.ok();
    if first.is_some() {
        charge.clear();
    }
    if let Some(Some(Err(error))) = &first
        && !is_event(error)
    {
        return Err(refusals::of_call(error));
    }
    let drain = context.shared.drain.clone();
    let stream = RunStream::new(BegunRun {
        run,
        charge,
        first: first.flatten(),
        initial: json!({
            "id": id, "object": "initial-run", "created": models::unix_seconds(),
            "model": spec.name.as_str(),
        }),
        keep_alive: context.config.keep_alive,
        live,
        open: OpenStreamGuard::begin(&context.shared.metrics, &drain, FaceLabel::Controllers),
        cutting: async move { drain.cutting().await }.boxed(),
    });
    let headers = [
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream"),
        ),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (NO_BUFFERING, HeaderValue::from_static("no")),
    ];
    Ok((headers, Body::from_stream(stream)).into_response())
}

fn begin(
    context: &ControllersContext,
    function: &Fun,
    request: RunRequest,
    sharer: Arc<LiveRun>,
) -> Run<Chunk> {
    let config = GenerateConfig {
        params: request.params,
        default_temperature: Some(run_request::TEMPERATURE),
        // Without a controller there are no variables.
        sharer: request
            .controller
            .is_some()
            .then(|| VariablesSharing(sharer)),
        controller: request.controller,
        watched: true,
        // The prompt is the controller's business: no template is put around it.
        prompt_mode: PromptMode::Raw,
        ..GenerateConfig::default()
    };
    let args = Args::new()
        .with("prompt", request.prompt)
        .with("config", config.into_chunk());
    let mut want = Want::from(RequestedPorts::main());
    want.inner = true;
    let name = &function.spec().name;
    context.kernel.run::<Chunk>(name, args).wanting(want)
}

/// Refuses a request whose prompt and `max_tokens` do not fit the context together (AI-911); other faces cut `max_tokens`.
async fn fits(facts: &ModelFacts, prompt: &str, most: u32) -> Result<(), Rejection> {
    let Some(context) = facts
        .context_tokens()
        .filter(|_| facts.vocabulary.has_text())
    else {
        return Ok(());
    };
    let exceeded = |prompt: usize| {
        refusals::context_exceeded(format!(
            "This model's maximum context length is {context} tokens. However, you requested {} tokens ({prompt} in the \
             prompt, {most} in the completion). Please reduce the length of the prompt or completion.",
            prompt.saturating_add(most as usize)
        ))
    };
    // What cannot fit is refused before the work: no token has more bytes than the longest. A number of bytes that fits may
    // still be too many tokens.
    let least = prompt.len() / facts.vocabulary.token_bytes_max().max(1);
    if least.saturating_add(most as usize) > context as usize {
        return Err(exceeded(least));
    }
    let (vocabulary, text) = (facts.vocabulary.clone(), prompt.to_owned());
    let count = move || {
        let begin = usize::from(vocabulary.bos().is_some());
        vocabulary.tokenize(&text, false).len() + begin
    };
    let turn = request_trace::present_turn().caller;
    let counted = if prompt.len() <= INLINE_BYTES {
        count()
    } else {
        let size = TaskSize::of(prompt.len());
        let counted = BlockingPool::global().run(turn, size, count).await;
        counted.map_err(|error| refusals::of_call(&error))?
    };
    if counted.saturating_add(most as usize) > context as usize {
        return Err(exceeded(counted));
    }
    Ok(())
}

/// A new id of a run, in the form of a UUID. Whoever knows it and has no key may use its variables, so it cannot be guessed.
fn run_id() -> Option<String> {
    let mut bytes = [0; 16];
    fill_unguessably(&mut bytes)?;
    let digits = hex(&bytes);
    let mut run = String::from("run-");
    for (at, digit) in digits.char_indices() {
        if matches!(at, 8 | 12 | 16 | 20) {
            run.push('-');
        }
        run.push(digit);
    }
    Some(run)
}

/// Whether the error is one of the controller, which its client reads as an event (AI-915).
fn is_event(error: &Error) -> bool {
    error.code() == Code::ControllerFailed
}

/// Prompts of this many bytes are tokenised in place.
const INLINE_BYTES: usize = 2 << 10;
