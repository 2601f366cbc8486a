//! [`Layer`]: a wrapper around a function, for the whole life of its stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};

use crate::call::Call;
use crate::chunk::Chunk;
use crate::function::{Fun, Function};
use crate::spec::Spec;
use crate::{Chunks, Result};

/// A wrapper around a function. It runs when the stream is first polled, around every chunk, and at the end, or on drop
/// by its guards (KE-911).
pub trait Layer: Send + Sync + 'static {
    /// Makes the stream of a call; [`Next`] makes the inner stream.
    fn call(&self, call: Call, next: Next) -> Chunks;
}

impl<F> Layer for F
where
    F: Fn(Call, Next) -> Chunks + Send + Sync + 'static,
{
    fn call(&self, call: Call, next: Next) -> Chunks {
        self(call, next)
    }
}

/// The inside of a layer: further layers, then the function. It may be called zero, one or several times.
#[derive(Clone)]
pub struct Next {
    layers: Arc<[Arc<dyn Layer>]>,
    depth: usize,
    function: Fun,
}

impl Next {
    pub(crate) const fn new(layers: Arc<[Arc<dyn Layer>]>, function: Fun) -> Self {
        Self {
            layers,
            depth: 0,
            function,
        }
    }

    /// The spec of the inner function.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        self.function.spec()
    }

    /// Calls the next layer or the function.
    #[must_use]
    pub fn call(&self, mut call: Call) -> Chunks {
        // Before each layer and before the function: the layer above may have changed what nested calls inherit.
        call.pass_down();
        match self.layers.get(self.depth) {
            Some(layer) => {
                // The list of layers is shared, so a chain of any length copies only pointers.
                let next = Self {
                    depth: self.depth + 1,
                    ..self.clone()
                };
                layer.call(call, next)
            }
            None => self.function.call(call),
        }
    }
}

/// A function that is `function` with `layer` as its innermost layer.
pub fn layered(function: Fun, layer: impl Layer) -> Fun {
    Arc::new(Layered {
        next: Next::new(Arc::from([Arc::new(layer) as Arc<dyn Layer>]), function),
    })
}

struct Layered {
    next: Next,
}

impl Function for Layered {
    fn spec(&self) -> &Spec {
        self.next.spec()
    }

    fn call(&self, call: Call) -> Chunks {
        // Lazy: the layer's code runs at the first poll (KE-911), and this function is called before that.
        let next = self.next.clone();
        Lazy::new(move || next.call(call)).boxed()
    }
}

/// A stream that is created when it is first polled.
pub(crate) enum Lazy<F> {
    Waiting(Option<F>),
    Running(Chunks),
}

impl<F> Lazy<F> {
    pub(crate) const fn new(make: F) -> Self {
        Self::Waiting(Some(make))
    }
}

impl<F: FnOnce() -> Chunks + Unpin> Stream for Lazy<F> {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut *self {
                Self::Running(chunks) => return chunks.as_mut().poll_next(cx),
                Self::Waiting(make) => {
                    let Some(make) = make.take() else {
                        return Poll::Ready(None);
                    };
                    *self = Self::Running(make());
                }
            }
        }
    }
}
