//! Evergreen over WebSockets: access and choice of the dialect (EV-701, EV-704, EV-705).
//!
//! ```text
//!   options, place ─► 101 ─┬─ subprotocol ──────────────► conversation in that dialect
//!                          └─ first message: which? ─────► the same, or Close
//!   a new session, one that can be resumed, or the next connection of such a one (EV-941)
//! ```

mod driver;
mod inbox;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures::StreamExt;
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

    /// Evergreen takes what is nobody else's.
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
        let entry = match &options.token {
            Some(token) => SessionEntry::Back(Arc::clone(token)),
            None => {
                let room = context
                    .admit(&caller_identity)
                    .map_err(|status| rejection(&status))?;
                let resumes = options.resume && chosen.is_none_or(Dialect::resumes);
                let issued = resumes
                    .then(|| context.detached.issue(&caller_identity))
                    .flatten();
                SessionEntry::New(room, issued)
            }
        };
        let mut headers = HeaderMap::new();
        let names = context
            .config
            .extensions(chosen.unwrap_or(Dialect::Protobuf));
        if let Ok(names) = names.join(", ").parse::<HeaderValue>() {
            headers.insert("evergreen-extensions", names);
        }
        if let Some(Ok(mut token)) = entry.token().map(|token| token.parse::<HeaderValue>()) {
            token.set_sensitive(true);
            headers.insert(TOKEN, token);
        }
        Ok(AllowedProtocols {
            headers,
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

/// Who has come, and for what.
struct NewConnection {
    identity: CallerIdentity,
    options: RequestedOptions,
    entry: SessionEntry,
}

/// What a connection is to become.
enum SessionEntry {
    /// A session with a place among the others; with a token if it is one that can be resumed.
    New(Permit, Option<(SecretToken, SessionRegistrationGuard)>),
    /// The next connection of the session with this token.
    Back(Arc<str>),
}

impl SessionEntry {
    /// The token that is given out.
    fn token(&self) -> Option<String> {
        match self {
            Self::New(_, Some((token, _))) => Some(token.text().to_owned()),
            Self::New(_, None) | Self::Back(_) => None,
        }
    }
}

/// Finds out the dialect, and speaks it.
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
    // A connection that comes back has no place among the sessions: without a session it must not wait for its first words.
    let knocks = matches!(&connection.entry, SessionEntry::Back(token) if context.detached.back(token, &connection.identity, |_| ()).is_none());
    if knocks {
        let (code, status) = (1008, session_gone());
        return socket
            .close(code, socket::reason_text(&status), driver::LAST_WORDS)
            .await;
    }
    // Boxed, so that a long session does not hold the room of its beginning.
    match Box::pin(first(context, &mut socket, received)).await {
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
            let outgoing = context.hold(dialect, options, issued, room, incoming.boxed());
            driver::run_detached(inbox, outgoing, wire).await;
        }
        SessionEntry::New(room, _) => {
            let (session, outgoing) = context.open(dialect, options, None, room.caller());
            driver::run(session, context.orders(), outgoing, wire).await;
            drop(room);
        }
        SessionEntry::Back(token) => {
            let (inbox, incoming) = inbox::new();
            let retained = dialect.resumes().then_some(&context.detached);
            let outgoing = retained.ok_or_else(session_gone).and_then(|retained| {
                connect(
                    retained,
                    &token,
                    &caller_identity,
                    dialect,
                    incoming.boxed(),
                )
            });
            match outgoing {
                Ok(outgoing) => driver::run_detached(inbox, outgoing, wire).await,
                Err(status) => Box::pin(wire.end(Some(&Arc::new(status)))).await,
            }
        }
    }
}

/// The first message with content, and what it shows. Otherwise how to close, if the client is still there.
async fn first(
    context: &EvergreenContext,
    socket: &mut WebSocket,
    mut ahead: Option<SocketMessage>,
) -> Result<(Dialect, WebSocketFrame), Option<(u16, Status)>> {
    let close =
        |reason: Reason, code: u16, message: &str| Some((code, Status::new(reason, message)));
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
            DetectedDialect::Nothing => {}
            DetectedDialect::Foreign => {
                return Err(close(Reason::BadMessage, 1007, "no dialect of Evergreen"));
            }
        }
    }
}

/// Why there is no place, as an HTTP answer.
fn rejection(status: &Status) -> Rejection {
    let reason = match status.known() {
        Some(Reason::GoingAway) => ErrorReason::DRAINING,
        _ => ErrorReason::SERVER_OVERLOADED,
    };
    Rejection::new(Code::Unavailable, reason, status.message.clone())
}
