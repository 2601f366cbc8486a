//! Evergreen over WebSockets: access and choice of the dialect (EV-701, EV-704, EV-705).
//!
//! ```text
//!   options, quota ─► 101 ─┬─ subprotocol ──────────────► session in that dialect
//!                          └─ first message: detected ──► the same, or Close
//!   a new session, one that can be resumed, or the next connection of such a session (EV-941)
//! ```

mod driver;
mod inbox;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Request};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::{DetectedDialect, Dialect, Reason, Status, WebSocketFrame, socket};

use self::driver::SocketTransport;
use super::context::EvergreenContext;
use super::detached::{SessionRegistrationGuard, connect, session_gone};
use super::options::{RequestedOptions, TOKEN};
use crate::auth::caller::Caller;
use crate::auth::identity::CallerIdentity;
use crate::auth::quotas::Permit;
use crate::faces::socket_dispatch::{AllowedProtocols, SocketProtocol};
use crate::http::rejection::Rejection;
use crate::http::request_trace;
use crate::ops::drain::DrainPhase;
use crate::ops::metrics;
use crate::resume::SecretToken;
use crate::websocket::{Keepalive, SocketMessage, WebSocket};

/// EV-705.
pub(super) const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(30),
    idle_timeout: Duration::from_secs(60),
};

/// Evergreen, as the socket dispatch knows it.
pub(super) struct EvergreenSockets(pub(super) Arc<EvergreenContext>);

impl SocketProtocol for EvergreenSockets {
    fn face(&self) -> metrics::FaceLabel {
        metrics::FaceLabel::Evergreen
    }

    fn subprotocol(&self, offered: &[&str]) -> Option<&'static str> {
        let mut dialects = offered.iter().copied().filter_map(Dialect::of_subprotocol);
        dialects.next().and_then(Dialect::subprotocol)
    }

    /// Always false: Evergreen is the first face in the dispatch, which gets what no other recognises.
    fn is_begun_by(&self, _: &SocketMessage) -> bool {
        false
    }

    fn message_bytes_max(&self) -> usize {
        self.0.config.limits.max_message_bytes
    }

    fn invite(
        &self,
        request: &Request<Body>,
        chosen: Option<&'static str>,
    ) -> Result<AllowedProtocols, Rejection> {
        let context = Arc::clone(&self.0);
        let query = request.uri().query().unwrap_or_default();
        let options =
            RequestedOptions::of_upgrade(request.headers(), query).map_err(|malformed| {
                Rejection::new(
                    Code::InvalidRequest,
                    ErrorReason::BAD_SESSION_OPTION,
                    malformed.to_string(),
                )
            })?;
        let caller_identity = Caller::of(request.extensions())?.identity.clone();
        let chosen = chosen.and_then(Dialect::of_subprotocol);
        // A connection that resumes takes no place: its session holds one, and a caller whose share is full must still
        // be able to come back to it.
        let entry = match &options.token {
            Some(token) => SessionEntry::Back(Arc::clone(token)),
            None => {
                let room = context
                    .admit(&caller_identity)
                    .map_err(|status| rejection(&status))?;
                // The token goes out with the 101, before a first message shows the dialect. `serve` drops it where
                // that is a dialect without resume.
                let resumes = options.resume && chosen.is_none_or(Dialect::resumes);
                let issued = resumes
                    .then(|| context.detached.issue(&caller_identity))
                    .flatten();
                SessionEntry::New(room, issued)
            }
        };
        let mut headers = HeaderMap::new();
        // A dialect that is not known yet is announced as protobuf, which has all extensions.
        let names = context
            .config
            .extensions(chosen.unwrap_or(Dialect::Protobuf));
        if let Ok(names) = names.join(", ").parse::<HeaderValue>() {
            headers.insert("evergreen-extensions", names);
        }
        if let Some(Ok(mut token)) = entry.token().map(|token| token.parse::<HeaderValue>()) {
            // As good as a key: it must not be shown by whatever prints headers.
            token.set_sensitive(true);
            headers.insert(TOKEN, token);
        }
        Ok(AllowedProtocols {
            headers,
            // No other face has such tokens, so there is nothing to wait for.
            decided: matches!(entry, SessionEntry::Back(_)),
            serve: Box::new(move |socket, received| {
                let connection = NewConnection {
                    identity: caller_identity,
                    options,
                    entry,
                };
                Box::pin(async move { begin(&context, connection, chosen, socket, received).await })
            }),
        })
    }
}

/// A connection that was upgraded: its caller, its options, and the session that it is for.
struct NewConnection {
    identity: CallerIdentity,
    options: RequestedOptions,
    entry: SessionEntry,
}

/// The session of a connection.
enum SessionEntry {
    /// A new session with its place in the quota; with a token if it can be resumed.
    New(Permit, Option<(SecretToken, SessionRegistrationGuard)>),
    /// The next connection of the session with this token.
    Back(Arc<str>),
}

impl SessionEntry {
    /// The token that is sent to the client; a client that resumes has it already.
    fn token(&self) -> Option<String> {
        match self {
            Self::New(_, Some((token, _))) => Some(token.text().to_owned()),
            Self::New(_, None) | Self::Back(_) => None,
        }
    }
}

/// Determines the dialect, then serves the session in it.
async fn begin(
    context: &EvergreenContext,
    connection: NewConnection,
    chosen: Option<Dialect>,
    mut socket: Box<WebSocket>,
    received: Option<SocketMessage>,
) {
    if let Some(dialect) = chosen {
        return serve(
            context,
            connection,
            SocketTransport::new(socket, dialect, None),
        )
        .await;
    }
    // A connection that resumes holds no place in the quota. If its session does not exist it is closed here: otherwise
    // sockets with invented tokens could wait for a first message in any number.
    let knocks = matches!(&connection.entry, SessionEntry::Back(token) if context.detached.back(token, &connection.identity, |_| ()).is_none());
    let first = if knocks {
        Err(Some((1008, session_gone())))
    } else {
        // Boxed, so that a long session does not hold the memory of its start.
        Box::pin(first(context, &mut socket, received)).await
    };
    match first {
        Ok((dialect, first)) => {
            serve(
                context,
                connection,
                SocketTransport::new(socket, dialect, Some(first)),
            )
            .await;
        }
        Err(None) => {}
        Err(Some((code, status))) => {
            let reason = socket::reason_text(&status);
            socket.close(code, reason, driver::LAST_WORDS).await;
        }
    }
}

/// Connects the client to its session.
async fn serve(context: &EvergreenContext, connection: NewConnection, wire: Box<SocketTransport>) {
    let NewConnection {
        identity: caller_identity,
        options,
        entry,
    } = connection;
    let dialect = wire.dialect();
    match entry {
        SessionEntry::New(room, Some(issued)) if dialect.resumes() => {
            let (inbox, incoming) = inbox::new();
            let outgoing = context.hold(dialect, options, issued, room, incoming);
            driver::run_detached(inbox, outgoing, wire).await;
        }
        SessionEntry::New(room, _) => {
            let (session, outgoing) = context.open(dialect, options, None, room.caller());
            driver::run(session, context.orders(), outgoing, wire).await;
            // After the last messages and the Close: until then the connection still costs memory.
            drop(room);
        }
        SessionEntry::Back(token) => {
            let (inbox, incoming) = inbox::new();
            // Msgpack sessions do not resume (D-29): a token in that dialect gets the answer of an unknown one.
            let retained = dialect.resumes().then_some(&context.detached);
            let outgoing = retained.ok_or_else(session_gone).and_then(|retained| {
                connect(retained, &token, &caller_identity, dialect, incoming)
            });
            match outgoing {
                Ok(outgoing) => driver::run_detached(inbox, outgoing, wire).await,
                Err(status) => Box::pin(wire.end(Some(&Arc::new(status)))).await,
            }
        }
    }
}

/// The first message with content, and the dialect that it shows; otherwise the code and status to close with, or `None`
/// if the client has disconnected.
async fn first(
    context: &EvergreenContext,
    socket: &mut WebSocket,
    mut ahead: Option<SocketMessage>,
) -> Result<(Dialect, WebSocketFrame), Option<(u16, Status)>> {
    let close =
        |reason: Reason, code: u16, message: &str| Some((code, Status::new(reason, message)));
    // Started once, outside the loop: empty messages do not prolong it.
    let idle = tokio::time::sleep(context.config.limits.idle_timeout);
    tokio::pin!(idle);
    loop {
        let received = match ahead.take() {
            Some(received) => Ok(received),
            // Every arm may be cancelled: a message not yet received whole stays in the socket.
            None => tokio::select! {
                received = socket.receive() => received,
                () = context.shared.drain.reached(DrainPhase::Refusing) => {
                    return Err(close(Reason::GoingAway, 1001, "the server is shutting down"));
                }
                () = request_trace::revoked() => {
                    let message = "the key of this connection is no longer valid";
                    return Err(close(Reason::Revoked, 1008, message));
                }
                () = &mut idle => {
                    return Err(close(Reason::IdleTimeout, 1001, "no message arrived"));
                }
            },
        };
        let frame = match received {
            Ok(received) => driver::frame(received),
            Err(lost) => return Err(driver::status(lost)),
        };
        match Dialect::detect(&frame) {
            DetectedDialect::Dialect(dialect) => return Ok((dialect, frame)),
            // A message without content is legal in every dialect, so the next one decides.
            DetectedDialect::Nothing => {}
            DetectedDialect::Foreign => {
                return Err(close(
                    Reason::BadMessage,
                    1007,
                    "the message is in no dialect of Evergreen",
                ));
            }
        }
    }
}

/// The HTTP answer where [`EvergreenContext::admit`] has refused a session.
fn rejection(status: &Status) -> Rejection {
    let reason = match status.known() {
        Some(Reason::GoingAway) => ErrorReason::DRAINING,
        _ => ErrorReason::SERVER_OVERLOADED,
    };
    Rejection::new(Code::Unavailable, reason, status.message.clone())
}
