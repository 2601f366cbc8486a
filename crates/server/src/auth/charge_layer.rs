//! The layer of the kernel that charges calls of models to the key of their request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::{Stream, stream};
use sapwood_kernel::{
    Call, Chunk, Chunks, Error, FairShare, KnownModels, Layer, Next, Result, TokenCharge,
};

use crate::auth::rate_limit::ChargedRun;
use crate::http::request_trace::{self, RequestTrace};

/// The layer that charges calls of models to the token meter of the request that they belong to, and sets in whose turn they
/// wait (D-54).
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowanceLayer;

impl Layer for AllowanceLayer {
    fn call(&self, mut call: Call, next: Next) -> Chunks {
        // Also of what is no model: it may call some.
        let trace = RequestTrace::of(&mut call);
        if let Some(turn) = trace.as_ref().map(RequestTrace::turn) {
            // The calls within a call inherit it: setting it anew would copy the extensions for nothing.
            if call.fair_share() != turn {
                call.extensions.insert(turn);
            }
        } else if call.fair_share() == FairShare::default() {
            call.extensions.insert(request_trace::present_turn());
        }
        let allowance = trace.and_then(|trace| trace.allowance());
        let limits = allowance.as_ref().map(|allowance| allowance.limits());
        if let Some(models) = limits.and_then(|limits| limits.models.clone()) {
            call.own.insert(KnownModels(models));
        }
        // Functions are free; the models that they call pass this layer again with the trace that was put into the call
        // above.
        let Some(allowance) = allowance.filter(|_| next.spec().model) else {
            return next.call(call);
        };
        match allowance.begin(&next.spec().name) {
            Err(error) => Box::pin(stream::once(std::future::ready(Err(error)))),
            Ok(running) => {
                let running = Arc::new(running);
                let charge = Arc::clone(&running) as Arc<dyn TokenCharge>;
                // Not inherited: the key's place is free when this call has ended, and not when the last call within it has.
                call.own.insert(charge);
                Box::pin(Charged {
                    chunks: next.call(call),
                    running,
                    answered: false,
                })
            }
        }
    }
}

/// The chunks of a call that is charged.
struct Charged {
    chunks: Chunks,
    running: Arc<ChargedRun>,
    answered: bool,
}

impl Stream for Charged {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = ready!(self.chunks.as_mut().poll_next(cx));
        match &item {
            Some(Ok(chunk)) => {
                self.answered = true;
                self.running.guess(chunk);
                if let Some(meta) = &chunk.meta {
                    self.running.settle(meta.usage);
                }
            }
            // Only before the first chunk: after it the call was served in part, and its tokens are charged.
            Some(Err(Error::Unavailable { .. } | Error::RateLimited { .. })) if !self.answered => {
                self.running.excuse();
            }
            Some(Err(_)) | None => {}
        }
        Poll::Ready(item)
    }
}
