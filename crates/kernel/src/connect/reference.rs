//! What the clients of `sapwood-net` can read, for sessions that follow references.
//!
//! Owns: [`Resolve`] over [`References`]. Refuses to know: schemes and lists.

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use sapwood_net::references::{Error, References};
use sapwood_proto::evergreen::Status;

use crate::session::reference::{Content, Resolve};

impl Resolve for References {
    fn open<'a>(&'a self, uri: &'a str) -> BoxFuture<'a, Result<Content, Status>> {
        async move {
            let found = Self::open(self, uri).await;
            let found = found.map_err(|error| error.status())?;
            let told = |error: Error| error.status();
            Ok(Content {
                bytes: found.bytes,
                pieces: found.pieces.map_err(told).boxed(),
            })
        }
        .boxed()
    }
}
