//! Makes functions from plain Rust code.
//!
//! The spec is derived from the types.

use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::{Stream, StreamExt, stream};
use pin_project_lite::pin_project;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::task::JoinHandle;

use crate::call::Call;
use crate::chunk::{Chunk, Text};
use crate::error::Error;
use crate::from_chunks::schema_of;
use crate::function::{Fun, Function};
use crate::into_chunks::IntoChunks;
use crate::name::{Mime, Name, Port};
use crate::spec::{InputSpec, OutputSpec, Spec};
use crate::state::{NeededState, State};
use crate::{Chunks, Result};

/// Plain code that can be a function: `Fn(A) -> Fut` and `Fn(A, Call) -> Fut`, where `A` is a struct of inputs and the
/// future's output is [`IntoChunks`]; each also with a [`State`] before `A`. `M` only distinguishes the forms.
pub trait Handler<M>: Send + Sync + 'static {
    /// Its arguments: a struct whose fields are the inputs, or `()`.
    type Args: JsonSchema;

    /// Its result, which gives the output.
    type Output: IntoChunks;

    /// The state that it takes.
    fn state() -> Option<NeededState> {
        None
    }

    /// Makes the stream of a call. Nothing observable happens before the stream is polled (KE-131).
    fn call(self: Arc<Self>, call: Call) -> Chunks;
}

impl<F, A, Fut> Handler<(A,)> for F
where
    F: Fn(A) -> Fut + Send + Sync + 'static,
    A: DeserializeOwned + JsonSchema + Send + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoChunks,
{
    type Args = A;
    type Output = Fut::Output;

    fn call(self: Arc<Self>, call: Call) -> Chunks {
        with_args(call, move |args, _| self(args))
    }
}

impl<F, A, Fut> Handler<(A, Call)> for F
where
    F: Fn(A, Call) -> Fut + Send + Sync + 'static,
    A: DeserializeOwned + JsonSchema + Send + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoChunks,
{
    type Args = A;
    type Output = Fut::Output;

    fn call(self: Arc<Self>, call: Call) -> Chunks {
        with_args(call, move |args, call| self(args, call))
    }
}

impl<F, S, A, Fut> Handler<(State<S>, A, ())> for F
where
    F: Fn(State<S>, A) -> Fut + Send + Sync + 'static,
    S: Clone + Send + Sync + 'static,
    A: DeserializeOwned + JsonSchema + Send + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoChunks,
{
    type Args = A;
    type Output = Fut::Output;

    fn state() -> Option<NeededState> {
        Some(NeededState::of::<S>())
    }

    fn call(self: Arc<Self>, call: Call) -> Chunks {
        match state_of(&call) {
            Ok(state) => with_args(call, move |args, _| self(state, args)),
            Err(error) => failed(error),
        }
    }
}

impl<F, S, A, Fut> Handler<(State<S>, A, Call)> for F
where
    F: Fn(State<S>, A, Call) -> Fut + Send + Sync + 'static,
    S: Clone + Send + Sync + 'static,
    A: DeserializeOwned + JsonSchema + Send + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoChunks,
{
    type Args = A;
    type Output = Fut::Output;

    fn state() -> Option<NeededState> {
        Some(NeededState::of::<S>())
    }

    fn call(self: Arc<Self>, call: Call) -> Chunks {
        match state_of(&call) {
            Ok(state) => with_args(call, move |args, call| self(state, args, call)),
            Err(error) => failed(error),
        }
    }
}

/// Reads the state of the kernel that a call came from.
fn state_of<S: Clone + Send + Sync + 'static>(call: &Call) -> Result<State<S>> {
    // Registration has checked that it is there; a function that runs unregistered is checked here alone.
    let state = call.kernel().state::<S>().map(State);
    state.ok_or_else(|| NeededState::of::<S>().missing(&call.spec.name))
}

fn failed(error: Error) -> Chunks {
    stream::iter([Err(error)]).boxed()
}

/// Decodes the arguments of `call`, and returns the output of `f` for them.
fn with_args<A, Fut>(call: Call, f: impl FnOnce(A, Call) -> Fut + Send + 'static) -> Chunks
where
    A: DeserializeOwned + JsonSchema + Send + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoChunks,
{
    streamed(async move {
        // Before the user's code: arguments that do not decode fail before work (KE-137).
        let args = call.args().await?;
        Ok(f(args, call).await.into_chunks())
    })
}

/// The stream that `start` resolves to. Nothing happens before the first poll (KE-131).
pub(crate) fn streamed<S>(start: impl Future<Output = Result<S>> + Send + 'static) -> Chunks
where
    S: Stream<Item = Result<Chunk>> + Send + 'static,
{
    StartedStream {
        start: Some(start),
        chunks: None,
    }
    .boxed()
}

pin_project! {
    /// A future that gives the stream, then that stream. One type in place of adapters around adapters, because every
    /// function's chunks pass through it.
    struct StartedStream<F, S> {
        // `None` once it has ended, so that what it held is dropped before the first chunk.
        #[pin]
        start: Option<F>,
        #[pin]
        chunks: Option<S>,
    }
}

impl<F, S> Stream for StartedStream<F, S>
where
    F: Future<Output = Result<S>>,
    S: Stream<Item = Result<Chunk>>,
{
    type Item = Result<Chunk>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        if let Some(start) = this.start.as_mut().as_pin_mut() {
            let started = ready!(start.poll(cx));
            this.start.set(None);
            match started {
                Ok(chunks) => this.chunks.set(Some(chunks)),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        // After an error there are no chunks: the stream has ended.
        match this.chunks.as_pin_mut() {
            Some(chunks) => chunks.poll_next(cx),
            None => Poll::Ready(None),
        }
    }
}

/// Makes a function from plain code. Its inputs are the fields of `A`, its output is the result of `f`. An illegal name
/// or argument type is reported when the function is registered.
pub fn function<M: 'static, H: Handler<M>>(name: &str, description: &str, f: H) -> Fun {
    let mut output = OutputSpec::new(Port::MAIN, Mime::ANY);
    output.mimes = H::Output::mimes();
    output.schema = H::Output::schema();
    output.many = H::Output::many();
    let mut spec = Spec::new(Name::shared(name), Text::from(description)).outputs([output]);
    spec.state = H::state();
    match inputs_of(&schema_of::<H::Args>()) {
        Ok(inputs) => spec.inputs = inputs,
        Err(defect) => spec.defect = Some(defect),
    }
    let f = Arc::new(f);
    raw(spec, move |call| f.clone().call(call))
}

/// Makes a function from a spec and a closure that makes its stream. `f` must do nothing observable before the stream
/// is polled.
pub fn raw(spec: Spec, f: impl Fn(Call) -> Chunks + Send + Sync + 'static) -> Fun {
    Arc::new(Raw { spec, f })
}

struct Raw<F> {
    spec: Spec,
    f: F,
}

impl<F: Fn(Call) -> Chunks + Send + Sync + 'static> Function for Raw<F> {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn call(&self, call: Call) -> Chunks {
        (self.f)(call)
    }
}

/// The inputs that the schema of an argument struct declares.
fn inputs_of(schema: &Value) -> Result<Vec<InputSpec>, String> {
    let kind = schema.get("type").and_then(Value::as_str);
    let properties = match (kind, schema.get("properties")) {
        // `()` as arguments: a function without inputs.
        (Some("null"), _) => return Ok(Vec::new()),
        (Some("object"), properties) => properties.and_then(Value::as_object),
        _ => return Err("its arguments must be a struct with named fields".into()),
    };
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let defs = schema.get("$defs").and_then(Value::as_object);
    let input = |(name, schema): (&String, &Value)| {
        let mut input = InputSpec::new(Name::shared(name)).schema(with_defs(schema, defs));
        input.required = required.contains(&name.as_str());
        input
    };
    Ok(properties.into_iter().flatten().map(input).collect())
}

/// The schema of one property, with the definitions that it may refer to.
fn with_defs(schema: &Value, defs: Option<&Map<String, Value>>) -> Value {
    let mut schema = schema.clone();
    if let (Some(defs), Some(object)) = (defs, schema.as_object_mut()) {
        // A property stands alone as the schema of an input, so its references must resolve within it.
        object.insert("$defs".into(), Value::Object(defs.clone()));
    }
    schema
}

/// Makes code that blocks or computes for long usable in [`function`]: it runs on tokio's blocking pool and stalls no
/// other task (KE-139). Started by the first poll; once started it runs to its end, even without readers.
pub fn blocking<A, O>(f: impl Fn(A) -> O + Send + Sync + 'static) -> impl Fn(A) -> Blocking<O>
where
    A: Send + 'static,
    O: Send + 'static,
{
    let f = Arc::new(f);
    move |args| {
        let f = f.clone();
        Blocking(HandlerState::Waiting(Some(Box::new(move || f(args)))))
    }
}

/// The future of [`blocking`] code. Needs a tokio runtime.
#[must_use = "futures do nothing unless they are polled"]
pub struct Blocking<O>(HandlerState<O>);

enum HandlerState<O> {
    Waiting(Option<Box<dyn FnOnce() -> O + Send>>),
    Running(JoinHandle<O>),
}

impl<O: Send + 'static> Future for Blocking<O> {
    type Output = Result<O>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<O>> {
        let removed = |why: &str| {
            Poll::Ready(Err(Error::Unavailable {
                why: why.into(),
                retry_after: None,
            }))
        };
        if let HandlerState::Waiting(work) = &mut self.0 {
            let Ok(runtime) = tokio::runtime::Handle::try_current() else {
                return removed("blocking code needs a tokio runtime");
            };
            // A future may be polled after a failure although it should not; that is an error here and no panic.
            let Some(work) = work.take() else {
                return removed("blocking code was polled after its end");
            };
            self.0 = HandlerState::Running(runtime.spawn_blocking(work));
        }
        let HandlerState::Running(task) = &mut self.0 else {
            return removed("blocking code was not started");
        };
        match ready!(Pin::new(task).poll(cx)) {
            Ok(value) => Poll::Ready(Ok(value)),
            // Resumed here and caught again by the run, where the function's name is known.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => removed("the runtime is shutting down"),
            },
        }
    }
}

#[cfg(test)]
mod tests;
