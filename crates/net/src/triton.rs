//! The client of KServe v2 servers with Triton's generate extension, over HTTP or gRPC.
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
mod model;
mod request;
mod resumable;

use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;

pub use self::address::TritonAddress;
pub use self::error::{Error, ErrorReply};
pub use self::model::{Declared, ModelSignature, ReadyModel};
pub use self::request::{InferRequest, ModelResponse};
pub use sapwood_proto::generate::{Datatype, Strings, TensorData};

use self::address::{TritonScheme, TritonTarget};

/// The responses of one request. After an error or the end it gives `None` for ever. The end means that the server has
/// said that there is no more; a stream without that is [`Error::Truncated`].
pub type ModelResponses = BoxStream<'static, Result<ModelResponse, Error>>;

/// A server. Clones share its connection, where there is one to share.
#[derive(Clone, Debug)]
pub struct TritonClient(Arc<TritonInner>);

#[derive(Debug)]
struct TritonInner {
    target: TritonTarget,
    wire: TritonTransport,
}

#[derive(Debug)]
enum TritonTransport {
    Http(Arc<http::Http>),
    Grpc(grpc::Grpc),
}

impl TritonClient {
    /// The server at `address`, if it is ready.
    ///
    /// # Errors
    /// The address cannot be used, nobody answers in time, or the server refuses.
    pub async fn connect(address: &TritonAddress) -> Result<Self, Error> {
        let target = TritonTarget::read(&address.url)?;
        let wire = match target.carrier {
            TritonScheme::Http => {
                TritonTransport::Http(Arc::new(http::Http::new(&target, address)?))
            }
            TritonScheme::Grpc => {
                TritonTransport::Grpc(grpc::Grpc::connect(&target, address).await?)
            }
        };
        let client = Self(Arc::new(TritonInner { target, wire }));
        client.ready().await?;
        Ok(client)
    }

    /// The only model that the address means, if it names one.
    #[must_use]
    pub fn only(&self) -> Option<&str> {
        self.0.target.model.as_deref()
    }

    /// Asks whether the server can serve now, or the only model.
    ///
    /// # Errors
    /// It cannot, or does not answer.
    pub async fn ready(&self) -> Result<(), Error> {
        let ready = match &self.0.wire {
            TritonTransport::Http(http) => in_time(http.ready(self.only())).await?,
            TritonTransport::Grpc(grpc) => in_time(grpc.ready(self.only())).await?,
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
    pub async fn models(&self) -> Result<Vec<ReadyModel>, Error> {
        if let Some(only) = self.only() {
            return Ok(vec![ReadyModel {
                name: only.to_owned(),
                versions: Vec::new(),
            }]);
        }
        let index = match &self.0.wire {
            TritonTransport::Http(http) => in_time(http.index()).await?,
            TritonTransport::Grpc(grpc) => in_time(grpc.index()).await?,
        };
        Ok(model::listed(index))
    }

    /// What a model takes and gives. A server that does not show configurations is believed to need every input, and to
    /// give any number of responses.
    ///
    /// # Errors
    /// The server does not answer, does not know the model, or describes it in a way that cannot be read.
    pub async fn model(&self, name: &str) -> Result<ModelSignature, Error> {
        match &self.0.wire {
            TritonTransport::Http(http) => in_time(http.model(name)).await,
            TritonTransport::Grpc(grpc) => in_time(grpc.model(name)).await,
        }
    }

    /// Sends a request. Resolves when the server has taken it or, over HTTP, has begun to answer.
    ///
    /// # Errors
    /// [`Error::Reply`] with `started` false for what the server refuses. Nothing has been generated then, or nothing
    /// that anybody has seen.
    pub async fn generate(&self, request: InferRequest) -> Result<ModelResponses, Error> {
        match &self.0.wire {
            TritonTransport::Http(http) => http.generate(request).await,
            TritonTransport::Grpc(grpc) => grpc.generate(request).await,
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
