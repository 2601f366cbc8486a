//! A transport of Evergreen: a stream and a sink of messages (EV-702, EV-703, EV-970).
//!
//! This file has gRPC; WebSockets are in `websocket`.

use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use http::uri::{PathAndQuery, Scheme};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Dialect, Status, WireMessage};
use sapwood_proto::secret::{Secret, masked};
use tonic::client::Grpc;
use tonic::codec::CompressionEncoding;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Uri};
use tonic::{Request, Streaming};

use super::grpc::{self, GrpcCodec};
use super::websocket::WebSocketTarget;
use crate::connection::{NO_ANSWER, UNTRUSTED, distrust, is_loopback};

/// The address of a server, and the credentials to use.
#[derive(Clone)]
pub struct ServerAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT` for gRPC; `ws://` or `wss://` for WebSockets, in protobuf unless
    /// `?dialect=json` or `?dialect=msgpack` is given. All may have the prefix `evergreen+` (D-40).
    pub url: String,
    /// Sent as `authorization: Bearer KEY`; never logged.
    pub key: Option<Secret>,
    /// The time limit of connecting.
    pub connect_timeout: Duration,
    /// Authorities (PEM) to trust beside the well-known ones, for `https://`.
    pub authorities: Option<Vec<u8>>,
}

impl ServerAddress {
    /// The server at `url`, without a key.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            key: None,
            connect_timeout: Duration::from_secs(10),
            authorities: None,
        }
    }

    /// Sets a bearer key.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Returns whether the key would be sent unencrypted to another machine.
    #[must_use]
    pub fn exposes_key(&self) -> bool {
        let Ok(uri) = self.plain().parse::<Uri>() else {
            return false;
        };
        let secure = matches!(uri.scheme_str(), Some("https" | "wss"));
        let other = uri.host().is_some_and(|host| !is_loopback(host));
        self.key.is_some() && !secure && other
    }

    fn plain(&self) -> &str {
        self.url.strip_prefix("evergreen+").unwrap_or(&self.url)
    }

    fn endpoint(&self) -> Result<Endpoint, Status> {
        let uri: Uri = self
            .plain()
            .parse()
            .map_err(|_| bad_address("it is not a URL"))?;
        let secure = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            _ => {
                return Err(bad_address(
                    "it must begin with http://, https://, ws:// or wss://",
                ));
            }
        };
        if uri
            .authority()
            .is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err(bad_address(
                "a key belongs in the key option, not in the URL",
            ));
        }
        let endpoint = Endpoint::from(uri)
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            // The default of 64 KiB would limit one stream to that many bytes for each round trip.
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            // A session may be idle for long, and a connection that a firewall has dropped must be noticed
            // nevertheless.
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_while_idle(true);
        if !secure {
            return Ok(endpoint);
        }
        // tonic's own TLS settings, because its channel takes no others; they trust what `tls::client` trusts.
        let mut tls = ClientTlsConfig::new().with_webpki_roots();
        if let Some(pem) = &self.authorities {
            tls = tls.ca_certificate(Certificate::from_pem(pem));
        }
        endpoint
            .tls_config(tls)
            .map_err(|_| bad_address("the authorities to trust are not PEM certificates"))
    }
}

impl std::fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Address")
            .field("url", &masked(&self.url))
            .field("key", &self.key.is_some())
            .finish()
    }
}

/// The connection over which sessions are opened. Clones share it.
#[derive(Clone, Debug)]
pub(super) enum ServerConnection {
    /// An HTTP/2 connection that sessions share.
    Grpc {
        channel: Channel,
        key: Option<AsciiMetadataValue>,
    },
    /// Each session has its own connection.
    WebSocket(WebSocketTarget, Box<ServerAddress>),
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

impl ServerConnection {
    /// Connects.
    pub(super) async fn open(address: &ServerAddress) -> Result<Self, Status> {
        // Parsed only: each session connects on its own, so a WebSocket server that is away is noticed there.
        if let Some(target) = WebSocketTarget::of(address.plain()) {
            return Ok(Self::WebSocket(target?, Box::new(address.clone())));
        }
        let key = address.key.as_ref().map(|key| {
            let mut value = AsciiMetadataValue::try_from(key.bearer()).map_err(|_| {
                Status::other(
                    Code::InvalidRequest,
                    "",
                    "the key has characters that a header cannot contain",
                )
            })?;
            value.set_sensitive(true);
            Ok(value)
        });
        let key = key.transpose()?;
        let channel = address.endpoint()?.connect().await.map_err(|cause| {
            tracing::debug!(cause = %chain(&cause), "cannot connect");
            if let Some(why) = distrust(&cause) {
                return Status::other(Code::Unavailable, UNTRUSTED, why);
            }
            let message = format!(
                "no answer from {}: is the server running there?",
                masked(&address.url)
            );
            Status::other(Code::Unavailable, NO_ANSWER, message)
        })?;
        Ok(Self::Grpc { channel, key })
    }

    /// Returns the dialect of messages.
    pub(super) const fn dialect(&self) -> Dialect {
        match self {
            Self::Grpc { .. } => Dialect::Grpc,
            Self::WebSocket(target, _) => target.dialect(),
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
        let (channel, key) = match self {
            Self::Grpc { channel, key } => (channel, key),
            Self::WebSocket(target, address) => {
                return target.call(address, options, token, outgoing).await;
            }
        };
        let mut request = Request::new(outgoing);
        // Options travel as headers, because the server needs them before it reads the first message.
        for (name, value) in options {
            let value = value.parse().map_err(|_| bad_option(name))?;
            request
                .metadata_mut()
                .insert(AsciiMetadataKey::from_static(name), value);
        }
        if let Some(key) = key {
            request.metadata_mut().insert("authorization", key.clone());
        }
        if let Some(token) = token {
            let mut token: AsciiMetadataValue = token.parse().map_err(|_| bad_option(TOKEN))?;
            token.set_sensitive(true);
            request.metadata_mut().insert(TOKEN, token);
        }
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
        let answer = client
            .streaming(request, path, GrpcCodec)
            .await
            .map_err(|status| grpc::from_grpc(&status))?;
        let announced = answer
            .metadata()
            .get("evergreen-extensions")
            .and_then(|value| value.to_str().ok());
        let extensions = announced
            .unwrap_or_default()
            .split(',')
            .map(|name| name.trim().to_owned())
            .collect();
        let token = answer.metadata().get(TOKEN);
        let token = token.and_then(|token| token.to_str().ok());
        let token = token.map(str::to_owned);
        Ok(OpenedCall {
            token,
            incoming: incoming(answer.into_inner()),
            extensions,
        })
    }
}

fn incoming(messages: Streaming<WireMessage>) -> BoxStream<'static, Result<WireMessage, Status>> {
    messages
        .map(|item| item.map_err(|status| grpc::from_grpc(&status)))
        .boxed()
}

pub(super) fn bad_address(why: &str) -> Status {
    Status::other(
        Code::InvalidRequest,
        "",
        format!("the server's address cannot be used: {why}"),
    )
}

fn bad_option(name: &str) -> Status {
    Status::other(
        Code::InvalidRequest,
        "",
        format!("the session option {name} cannot be sent as a header"),
    )
}

/// Returns the chain of causes on one line, for the log.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// The header of the session token, in both directions.
pub(super) const TOKEN: &str = "evergreen-session-token";
/// The flow-control window of a stream (EV-703).
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
const KEEPALIVE: Duration = Duration::from_secs(30);
