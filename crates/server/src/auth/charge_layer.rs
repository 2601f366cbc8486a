//! The kernel layer that charges calls of models to the key of their request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::{Stream, stream};
use sapwood_kernel::{
    Call, Chunk, Chunks, Error, FairShare, KnownModels, Layer, Next, Result, SteerRights,
    TokenCharge,
};

use crate::auth::rate_limit::ChargedRun;
use crate::http::request_trace::{self, RequestTrace};

/// Charges calls of models to the token meter of their request, and sets the fair share under which they wait (D-54) and
/// what they may do with controllers (AI-902).
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowanceLayer;

impl Layer for AllowanceLayer {
    fn call(&self, mut call: Call, next: Next) -> Chunks {
        // For every function and not only for models: a function may call models, and they find the trace in its extensions.
        let trace = RequestTrace::of(&mut call);
        if let Some(turn) = trace.as_ref().map(RequestTrace::turn) {
            // The calls within a call inherit it: setting it anew would copy the extensions for nothing.
            if call.fair_share() != turn {
                call.extensions.insert(turn);
            }
        } else if call.fair_share() == FairShare::default() {
            // A connection without requests (LMTP on a Unix socket) has no trace, but takes turns all the same.
            call.extensions.insert(request_trace::present_turn());
            // With the share, once for the call and those within it, which may run in tasks of their own.
            if let Some(rights) = request_trace::connection_rights() {
                call.extensions.insert(rights);
            }
        }
        // For every model: those of other servers look at it before they relay a controller. Calls within a call have the
        // trace, and come here again.
        if next.spec().model {
            match &trace {
                Some(trace) => call.extensions.insert(trace.rights()),
                // Without any rights a model takes a call for one of the process itself, which may do everything. Behind
                // a server no call is that, so a path that forgets its caller gets the least.
                None if call.extensions.get::<SteerRights>().is_none() => {
                    call.extensions.insert(SteerRights::nobody());
                }
                None => {}
            }
        }
        let allowance = trace.and_then(|trace| trace.allowance());
        let limits = allowance.as_ref().map(|allowance| allowance.limits());
        if let Some(models) = limits.and_then(|limits| limits.models.clone()) {
            // For functions that list models or choose a default: what the key may not call is not named to it (OA-905).
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
                // Not inherited by the calls within: the key's place is free when this call ends, and not when the last of
                // them does.
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
                // The guess before the settling: the last chunk of a remote model carries text and the usage, which then
                // covers that text as well.
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
