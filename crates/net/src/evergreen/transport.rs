//! A transport of Evergreen: a stream and a sink of messages (EV-702, EV-703, EV-970).
//!
//! This file has gRPC; WebSockets are in `websocket`.

use std::error::Error;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Dialect, Status, WireMessage};
use sapwood_proto::secret::masked;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Uri};

use super::grpc::{self, GrpcCodec};
use super::websocket::WebSocketTarget;
use crate::address::{ServerAddress, without_credentials};
use crate::connection::{NO_ANSWER, UNTRUSTED, distrust, grpc_endpoint};

/// The connection over which sessions are opened. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct ServerConnection {
    transport: SessionTransport,
    key: Option<HeaderValue>,
}

#[derive(Clone, Debug)]
enum SessionTransport {
    /// An HTTP/2 connection that sessions share.
    Grpc(Channel),
    /// Each session has its own connection.
    WebSocket(WebSocketTarget),
}

/// The messages of a server over one connection.
pub(super) type ServerMessages = BoxStream<'static, Result<WireMessage, Status>>;

/// One accepted call.
pub(super) struct OpenedCall {
    /// The server's messages.
    pub(super) incoming: ServerMessages,
    /// The extensions that the server announced.
    pub(super) extensions: Vec<String>,
    /// The token with which this session is resumed (EV-940).
    pub(super) token: Option<String>,
}

impl OpenedCall {
    /// Creates the call that a server has accepted with these headers.
    pub(super) fn new(headers: &HeaderMap, incoming: ServerMessages) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let names = text("evergreen-extensions").unwrap_or_default().split(',');
        let names = names.map(str::trim).filter(|name| !name.is_empty());
        Self {
            incoming,
            extensions: names.map(str::to_owned).collect(),
            token: text(TOKEN).map(str::to_owned),
        }
    }
}

impl ServerConnection {
    /// Connects.
    pub(super) async fn open(address: &ServerAddress) -> Result<Self, Status> {
        let url = address.url.as_str();
        let url = url.strip_prefix("evergreen+").unwrap_or(url);
        let uri: Uri = url.parse().map_err(|_| bad_address("it is not a URL"))?;
        without_credentials(&uri).map_err(bad_address)?;
        let key = address.bearer().map_err(bad_address)?;
        let transport = match uri.scheme_str() {
            Some("http" | "https") => SessionTransport::Grpc(channel(uri, address).await?),
            // Parsed only: each session connects on its own, so a WebSocket server that is away is noticed there.
            Some("ws" | "wss") => {
                SessionTransport::WebSocket(WebSocketTarget::new(uri, address.clone())?)
            }
            _ => {
                return Err(bad_address(
                    "it must begin with http://, https://, ws:// or wss://",
                ));
            }
        };
        Ok(Self { transport, key })
    }

    /// Returns the dialect of messages.
    pub(super) const fn dialect(&self) -> Dialect {
        match &self.transport {
            SessionTransport::Grpc(_) => Dialect::Grpc,
            SessionTransport::WebSocket(target) => target.dialect(),
        }
    }

    /// Starts a call. Returns when the server's headers are received, which is before the server reads any message
    /// (EV-702).
    pub(super) async fn call(
        &self,
        options: &[(&'static str, String)],
        token: Option<&str>,
        outgoing: impl Stream<Item = WireMessage> + Send + Unpin + 'static,
    ) -> Result<OpenedCall, Status> {
        let headers = self.headers(options, token)?;
        match &self.transport {
            SessionTransport::Grpc(channel) => over_grpc(channel, headers, outgoing).await,
            SessionTransport::WebSocket(target) => target.call(headers, outgoing).await,
        }
    }

    /// Options travel as headers, because the server needs them before it reads the first message.
    fn headers(
        &self,
        options: &[(&'static str, String)],
        token: Option<&str>,
    ) -> Result<HeaderMap, Status> {
        let value = |name: &str, value: &str| {
            let message = || format!("the session option {name} cannot be sent as a header");
            HeaderValue::try_from(value)
                .map_err(|_| Status::other(Code::InvalidRequest, "", message()))
        };
        let mut headers = HeaderMap::new();
        for (name, option) in options {
            headers.insert(*name, value(name, option)?);
        }
        if let Some(token) = token {
            let mut token = value(TOKEN, token)?;
            token.set_sensitive(true);
            headers.insert(TOKEN, token);
        }
        if let Some(key) = &self.key {
            headers.insert(AUTHORIZATION, key.clone());
        }
        Ok(headers)
    }
}

/// Connects to a server over gRPC.
async fn channel(uri: Uri, address: &ServerAddress) -> Result<Channel, Status> {
    let endpoint = grpc_endpoint(uri, address.authorities.as_deref())
        .map_err(bad_address)?
        .connect_timeout(address.connect_timeout)
        // The default of 64 KiB would limit one stream to that many bytes for each round trip.
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        // A session may be idle for long, and a connection that a firewall has dropped must be noticed nevertheless.
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_while_idle(true);
    let connecting = endpoint.connect().await;
    connecting.map_err(|cause| unreached(address, &cause))
}

async fn over_grpc(
    channel: &Channel,
    headers: HeaderMap,
    outgoing: impl Stream<Item = WireMessage> + Send + Unpin + 'static,
) -> Result<OpenedCall, Status> {
    let metadata = MetadataMap::from_headers(headers);
    let request = Request::from_parts(metadata, Default::default(), outgoing);
    // gzip is accepted and never sent (EV-703).
    let mut client = Grpc::new(channel.clone())
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(grpc::MESSAGE_BYTES_MAX)
        .max_encoding_message_size(grpc::MESSAGE_BYTES_MAX);
    // The channel reconnects by itself. An error here means that it could not.
    client.ready().await.map_err(|cause| {
        tracing::debug!(cause = %chain(&cause), "the connection is gone");
        Status::other(
            Code::Unavailable,
            "",
            "the connection to the server is gone: connect again",
        )
    })?;
    let path = PathAndQuery::from_static(grpc::PATH);
    let answer = client.streaming(request, path, GrpcCodec).await;
    let (metadata, messages, _) = answer
        .map_err(|status| grpc::from_grpc(&status))?
        .into_parts();
    let messages = messages.map(|item| item.map_err(|status| grpc::from_grpc(&status)));
    Ok(OpenedCall::new(metadata.as_ref(), messages.boxed()))
}

pub(super) fn bad_address(why: &str) -> Status {
    Status::other(
        Code::InvalidRequest,
        "",
        format!("the server's address cannot be used: {why}"),
    )
}

/// Converts the failure of a connection attempt.
pub(super) fn unreached(address: &ServerAddress, cause: &(dyn Error + 'static)) -> Status {
    tracing::debug!(cause = %chain(cause), "cannot connect");
    if let Some(why) = distrust(cause) {
        return Status::other(Code::Unavailable, UNTRUSTED, why);
    }
    let server = masked(&address.url);
    let message = format!("no answer from {server}: is the server running there?");
    Status::other(Code::Unavailable, NO_ANSWER, message)
}

/// Returns the chain of causes on one line, for the log.
fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let causes: Vec<_> = causes.map(ToString::to_string).collect();
    causes.join(": ")
}

/// The header of the session token, in both directions.
pub(super) const TOKEN: &str = "evergreen-session-token";
/// The flow-control window of a stream (EV-703).
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
const KEEPALIVE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    #[test]
    fn ev_970_only_named_extensions_count_as_announced() {
        for (header, names) in [
            (None, &[][..]),
            (Some(""), &[]),
            (Some("cancel, retain,"), &["cancel", "retain"]),
        ] {
            let header = header.map(HeaderValue::from_static);
            let name = http::HeaderName::from_static("evergreen-extensions");
            let headers = header.into_iter().map(|value| (name.clone(), value));
            let opened = OpenedCall::new(&headers.collect(), stream::empty().boxed());
            assert_eq!(opened.extensions, names);
        }
    }
}
