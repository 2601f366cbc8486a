//! Resolves references through the clients of `sapwood-net`.

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use sapwood_net::references::{Error, ReferenceResolver};
use sapwood_proto::evergreen::Status;

use crate::session::reference::{FoundContent, ReferenceFetch};

impl ReferenceFetch for ReferenceResolver {
    fn open<'a>(&'a self, uri: &'a str) -> BoxFuture<'a, Result<FoundContent, Status>> {
        async move {
            let found = Self::open(self, uri).await;
            let found = found.map_err(|error| error.status())?;
            let reported = |error: Error| error.status();
            Ok(FoundContent {
                bytes: found.bytes,
                pieces: found.pieces.map_err(reported).boxed(),
            })
        }
        .boxed()
    }
}
