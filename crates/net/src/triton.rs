//! The client of KServe v2 servers with Triton's generate extension, over HTTP or gRPC.
//!
//! ```text
//!   ServerAddress ─► TritonClient ─► models, model ─► ModelSignature ─┐
//!                       └───── generate ◄────── InferRequest ◄────────┘ ─► ModelResponse, ModelResponse, … end | Error
//! ```
//!
//! Each request has its own connection (HTTP) or call (gRPC), so dropping its responses cancels it at the server
//! (TR-608, TR-907), and a stream that is cut is detected. A stream that is cut at a server with a replay buffer is
//! resumed (TR-1303).

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

pub use self::error::{Error, ErrorReply};
pub use self::model::{Declared, ModelSignature, ReadyModel};
pub use self::request::{InferRequest, ModelResponse};
pub use crate::address::ServerAddress;
pub use sapwood_proto::generate::{Datatype, Strings, TensorData};

use self::address::{TritonScheme, TritonTarget};

/// The responses of one request. After an error or the end it yields `None`. The end means that the server has marked
/// the stream as complete; a stream without that mark is [`Error::Truncated`].
pub type ModelResponses = BoxStream<'static, Result<ModelResponse, Error>>;

/// A client of one server. Clones share its connection, if there is one to share.
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
    /// Connects to the server at `address` and checks that it is ready. The URL is `triton+http://HOST:PORT`,
    /// `triton+https://`, `triton+grpc://` or `triton+grpcs://`, followed by `/MODEL` if only one model is meant; every
    /// character in it that is not a letter, digit, `-`, `.`, `_` or `~` is percent-encoded. Default ports: 80, 443, and
    /// 8001 for gRPC.
    ///
    /// # Errors
    /// The address cannot be used, the server does not answer in time, or it refuses.
    pub async fn connect(address: &ServerAddress) -> Result<Self, Error> {
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
        // An upstream that is not ready is reported at the start, where the operator sees it.
        client.ready().await?;
        Ok(client)
    }

    /// Returns the only model of this client, if the address names one.
    #[must_use]
    pub fn only(&self) -> Option<&str> {
        self.0.target.model.as_deref()
    }

    /// Checks whether the server, or the only model, is ready.
    ///
    /// # Errors
    /// It is not ready, or does not answer.
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

    /// Returns the models that are ready, in the server's order; only the model that the address names, if it names
    /// one.
    ///
    /// # Errors
    /// The server does not answer, or does not list its models.
    pub async fn models(&self) -> Result<Vec<ReadyModel>, Error> {
        // Not looked up in the index, which a server may not offer, and which costs a request.
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

    /// Returns the inputs and outputs of a model. If a server does not expose configurations, every input counts as
    /// required, and the number of responses as arbitrary.
    ///
    /// # Errors
    /// The server does not answer, does not know the model, or its description cannot be parsed.
    pub async fn model(&self, name: &str) -> Result<ModelSignature, Error> {
        match &self.0.wire {
            TritonTransport::Http(http) => in_time(http.model(name)).await,
            TritonTransport::Grpc(grpc) => in_time(grpc.model(name)).await,
        }
    }

    /// Sends a request. Resolves when the server has accepted it or, over HTTP, when the response head is received.
    ///
    /// # Errors
    /// [`Error::Reply`] with `started` false for a request that the server refuses. In that case no response was
    /// received.
    pub async fn generate(&self, request: InferRequest) -> Result<ModelResponses, Error> {
        match &self.0.wire {
            TritonTransport::Http(http) => http.generate(request).await,
            TritonTransport::Grpc(grpc) => grpc.generate(request).await,
        }
    }
}

/// Limits the time of requests other than `generate`.
async fn in_time<T>(asked: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    // Not for `generate`, whose first response may wait in the server's queue; that has [`IDLE_TIMEOUT`].
    let late = |_| Error::Unreachable("it accepts connections but does not answer");
    tokio::time::timeout(ANSWER_TIMEOUT, asked)
        .await
        .map_err(late)?
}

const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server may be silent within a response; then the response counts as cut.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests;
