//! The client of servers that speak the KServe v2 protocol with Triton's generate extension, over HTTP or gRPC.
//!
//! Owns: addresses, connections, what a server says of its models, one request and its responses, typed errors. Refuses
//! to know: kernels; `kernel::connect` makes functions of it.
//!
//! ```text
//!   Address ─► Client ─► models, model ─► Model ─┐
//!                  └───── generate ◄── Request ◄─┘ ─► Response, Response, … end | Error
//! ```
//!
//! Each request has a connection (HTTP) or a call (gRPC) of its own, so dropping its responses ends it at the server
//! (TR-608, TR-907), and a stream that is cut is known as such. A server that keeps streams is come back to then (TR-1303).

mod address;
mod bounded;
mod error;
mod grpc;
mod http;
mod kept;
mod model;
mod request;

use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;

pub use self::address::Address;
pub use self::error::{Error, Said};
pub use self::model::{Declared, Listed, Model};
pub use self::request::{Request, Response};
pub use sapwood_proto::generate::{Data, Datatype, Strings};

use self::address::{Carrier, Place};

/// The responses of one request. After an error or the end it gives `None` for ever. The end means that the server has
/// said that there is no more; a stream without that is [`Error::Truncated`].
pub type Responses = BoxStream<'static, Result<Response, Error>>;

/// A server. Clones share its connection, where there is one to share.
#[derive(Clone, Debug)]
pub struct Client(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    place: Place,
    wire: Wire,
}

#[derive(Debug)]
enum Wire {
    Http(Arc<http::Http>),
    Grpc(grpc::Grpc),
}

impl Client {
    /// The server at `address`, if it is ready.
    ///
    /// # Errors
    /// The address cannot be used, nobody answers in time, or the server refuses.
    pub async fn connect(address: &Address) -> Result<Self, Error> {
        let place = Place::read(&address.url)?;
        let wire = match place.carrier {
            Carrier::Http => Wire::Http(Arc::new(http::Http::new(&place, address)?)),
            Carrier::Grpc => Wire::Grpc(grpc::Grpc::connect(&place, address).await?),
        };
        let client = Self(Arc::new(Inner { place, wire }));
        client.ready().await?;
        Ok(client)
    }

    /// The only model that the address means, if it names one.
    #[must_use]
    pub fn only(&self) -> Option<&str> {
        self.0.place.model.as_deref()
    }

    /// Asks whether the server can serve now, or the only model.
    ///
    /// # Errors
    /// It cannot, or does not answer.
    pub async fn ready(&self) -> Result<(), Error> {
        let ready = match &self.0.wire {
            Wire::Http(http) => in_time(http.ready(self.only())).await?,
            Wire::Grpc(grpc) => in_time(grpc.ready(self.only())).await?,
        };
        if ready {
            return Ok(());
        }
        Err(Error::Unreachable("it is not ready: try again later"))
    }

    /// The models that are ready, in the server's order; only the one that the address names, if it does.
    ///
    /// # Errors
    /// The server does not answer, or lists nothing.
    pub async fn models(&self) -> Result<Vec<Listed>, Error> {
        if let Some(only) = self.only() {
            return Ok(vec![Listed {
                name: only.to_owned(),
                versions: Vec::new(),
            }]);
        }
        let index = match &self.0.wire {
            Wire::Http(http) => in_time(http.index()).await?,
            Wire::Grpc(grpc) => in_time(grpc.index()).await?,
        };
        Ok(model::listed(index))
    }

    /// What a model takes and gives. A server that does not show configurations is believed to need every input, and to
    /// give any number of responses.
    ///
    /// # Errors
    /// The server does not answer, does not know the model, or describes it in a way that cannot be read.
    pub async fn model(&self, name: &str) -> Result<Model, Error> {
        match &self.0.wire {
            Wire::Http(http) => in_time(http.model(name)).await,
            Wire::Grpc(grpc) => in_time(grpc.model(name)).await,
        }
    }

    /// Sends a request. Resolves when the server has taken it or, over HTTP, has begun to answer.
    ///
    /// # Errors
    /// [`Error::Said`] with `started` false for what the server refuses. Nothing has been generated then, or nothing
    /// that anybody has seen.
    pub async fn generate(&self, request: Request) -> Result<Responses, Error> {
        match &self.0.wire {
            Wire::Http(http) => http.generate(request).await,
            Wire::Grpc(grpc) => grpc.generate(request).await,
        }
    }
}

/// What is asked beside requests is answered at once or not at all.
async fn in_time<T>(asked: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let late = |_| Error::Unreachable("it takes connections and says nothing");
    tokio::time::timeout(ANSWER_TIMEOUT, asked)
        .await
        .map_err(late)?
}

const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
