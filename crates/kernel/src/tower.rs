//! Bridge to `tower`: [`tower_layer()`] makes a kernel layer of a tower layer, so that the middleware that people have for
//! their HTTP services (limits, timeouts, retries, load shedding) goes around functions as well.
//!
//! A response of tower is complete when its head is there, and its body streams later. The head of a call is its first
//! chunk: a [`Service`] of a call answers when the first chunk is there, or fails if the call fails before that.

use std::error::Error as StdError;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::poll_fn;
use futures::{StreamExt, stream};
use tower_layer::Layer as TowerLayer;
use tower_service::Service;

use crate::call::Call;
use crate::error::Error;
use crate::handler::streamed;
use crate::layer::{Layer, Next};
use crate::{Chunks, Result};

/// The future of the first chunk of a call.
pub type Head = Pin<Box<dyn Future<Output = Result<Chunks>> + Send>>;

/// The inside of a layer is a service: the next layers, then the function.
impl Service<Call> for Next {
    type Response = Chunks;
    type Error = Error;
    type Future = Head;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: Call) -> Head {
        let mut chunks = Self::call(self, call);
        Box::pin(async move {
            match chunks.next().await {
                Some(Ok(first)) => {
                    let first = stream::once(std::future::ready(Ok(first)));
                    Ok(first.chain(chunks).boxed())
                }
                Some(Err(error)) => Err(error),
                None => Ok(stream::empty().boxed()),
            }
        })
    }
}

/// Makes a kernel layer of a tower layer. The tower layer is applied anew for each call; one that counts across calls
/// shares its state in itself (`GlobalConcurrencyLimitLayer`, not `ConcurrencyLimitLayer`).
///
/// Limits and timeouts end with the first chunk, as they end with the head of an HTTP response: they bound the calls
/// that have not answered yet, not the streams that are being read.
///
/// An error of the middleware that is not an [`Error`] is an [`Error::Function`] with its text.
pub fn tower_layer<L>(layer: L) -> impl Layer
where
    L: TowerLayer<Next> + Send + Sync + 'static,
    L::Service: Service<Call, Response = Chunks> + Send + 'static,
    <L::Service as Service<Call>>::Error: Into<Box<dyn StdError + Send + Sync>>,
    <L::Service as Service<Call>>::Future: Send,
{
    move |call: Call, next: Next| {
        // A service serves one request at a time (`&mut self`), and calls are concurrent, so each has its own.
        let mut service = layer.layer(next);
        streamed(async move {
            poll_fn(|cx| service.poll_ready(cx))
                .await
                .map_err(Error::function)?;
            service.call(call).await.map_err(Error::function)
        })
    }
}

#[cfg(test)]
mod tests;
