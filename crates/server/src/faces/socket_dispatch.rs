//! Dispatches WebSockets to a face: by their path, or on `/` by the first message (D-32, LM-103, EV-701).
//!
//! A face registers a [`SocketProtocol`], which receives the socket once it is selected.
//!
//! ```text
//!   GET ─ subprotocol? ─ each protocol checks the request ─► 101 ─┬─ decided ──────► that protocol
//!                                                                 └─ first message ► the one that knows it, else the first
//! ```

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get};
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};

use crate::http::rejection::Rejection;
use crate::http::request_trace::{self, RequestTrace};
use crate::ops::drain::{Drain, DrainPhase};
use crate::ops::metrics;
use crate::websocket::{Keepalive, SocketLoss, SocketMessage, UpgradeRequest, WebSocket};

/// A face's protocol over WebSockets.
pub(crate) trait SocketProtocol: Send + Sync + 'static {
    /// The face that it belongs to, for the access log and the metrics.
    fn face(&self) -> metrics::FaceLabel;

    /// Selects one of the subprotocols that a client offers.
    fn subprotocol(&self, offered: &[&str]) -> Option<&'static str>;

    /// Whether a first message is in this protocol and in no other.
    fn is_begun_by(&self, first: &SocketMessage) -> bool;

    /// The maximum size of a message, in bytes.
    fn message_bytes_max(&self) -> usize;

    /// Checks a request before it is upgraded, and acquires what its connection needs; `chosen` is the subprotocol, if
    /// it is one of this protocol's.
    ///
    /// # Errors
    /// Why it cannot be upgraded.
    fn invite(
        &self,
        request: &Request<Body>,
        chosen: Option<&'static str>,
    ) -> Result<AllowedProtocols, Rejection>;
}

/// Serves a socket to its end; the message is the one that selected the protocol, if one was needed.
pub(crate) type ServeSocket =
    Box<dyn FnOnce(Box<WebSocket>, Option<SocketMessage>) -> BoxFuture<'static, ()> + Send>;

/// A protocol's consent to an upgrade. It holds the connection's place in the quotas of its face until it is dropped.
pub(crate) struct AllowedProtocols {
    /// Headers for the 101 response.
    pub(crate) headers: HeaderMap,
    /// The request itself selects this protocol: no first message is awaited.
    pub(crate) decided: bool,
    /// Takes over the socket.
    pub(crate) serve: ServeSocket,
}

/// The route of a path with these protocols. A first message that none recognises goes to the first of them.
pub(crate) fn route(
    protocols: impl Into<Arc<[Arc<dyn SocketProtocol>]>>,
    keepalive: Keepalive,
    drain: Drain,
) -> MethodRouter {
    let dispatch = SocketDispatch {
        protocols: protocols.into(),
        keepalive,
        drain,
    };
    get(
        move |request: Request<Body>| async move { dispatch.upgrade(request).unwrap_or_else(refused) },
    )
}

/// LM-102: a request that asks for no WebSocket gets an error that says what to ask for.
fn refused(rejection: Rejection) -> Response<Body> {
    let mut answer = rejection.into_response();
    if answer.status() == StatusCode::UPGRADE_REQUIRED {
        let websocket = HeaderValue::from_static("websocket");
        answer.headers_mut().insert(header::UPGRADE, websocket);
    }
    answer
}

#[derive(Clone)]
struct SocketDispatch {
    protocols: Arc<[Arc<dyn SocketProtocol>]>,
    keepalive: Keepalive,
    drain: Drain,
}

/// A protocol, and its answer to an upgrade request.
type ProtocolAnswer = (Arc<dyn SocketProtocol>, Result<AllowedProtocols, Rejection>);

impl SocketDispatch {
    fn upgrade(self, mut request: Request<Body>) -> Result<Response<Body>, Rejection> {
        // Before any protocol is asked: a plain GET must not acquire a place in a quota.
        let asked = UpgradeRequest::of(&mut request)?;
        let offered: Vec<&str> = asked.offered().collect();
        // Only the first match is used, and so the order of the protocols is their precedence where a client offers the
        // subprotocols of several.
        let mut choices = self.protocols.iter().filter_map(|protocol| {
            let name = protocol.subprotocol(&offered)?;
            Some((Arc::clone(protocol), name))
        });
        let (chosen, mut answered) = match choices.next() {
            Some((protocol, name)) => {
                let invited = protocol.invite(&request, Some(name))?;
                (Some(name), vec![(protocol, Ok(invited))])
            }
            None => (None, self.ask_all(&request)?),
        };
        let is_decided = |(_, invited): &ProtocolAnswer| {
            let decided = invited.as_ref().is_ok_and(|invited| invited.decided);
            chosen.is_some() || decided
        };
        if let Some(index) = answered.iter().position(is_decided) {
            answered.swap(0, index);
            // The other protocols hold a place for this client as well; dropping their answers frees those places before
            // the session begins.
            answered.truncate(1);
        }
        // Headers of every protocol that may still be chosen: the 101 goes out before the first message decides.
        let mut headers = HeaderMap::new();
        for invited in answered
            .iter_mut()
            .filter_map(|(_, invited)| invited.as_mut().ok())
        {
            headers.extend(std::mem::take(&mut invited.headers));
        }
        // The largest limit of all: the protocol is not known yet, and the one that is selected checks its own limit.
        let sizes = answered
            .iter()
            .map(|(protocol, _)| protocol.message_bytes_max());
        let bytes_max = sizes.max().unwrap_or(0);
        let drain = self.drain;
        let mut answer = asked.accept(chosen, bytes_max, self.keepalive, move |socket| {
            serve(answered, drain, socket)
        });
        answer.headers_mut().extend(headers);
        Ok(answer)
    }

    /// The answers of all protocols to a client that has named none.
    ///
    /// # Errors
    /// The rejection of a protocol that finds the request invalid. One that only has no room keeps its rejection for the
    /// clients that turn out to be its own.
    fn ask_all(&self, request: &Request<Body>) -> Result<Vec<ProtocolAnswer>, Rejection> {
        let mut answered = Vec::with_capacity(self.protocols.len());
        for protocol in &*self.protocols {
            let invited = protocol.invite(request, None);
            // Below 500 the request is wrong, which no other protocol makes right. With one protocol there is nothing to
            // wait for: the rejection can still be an HTTP status, which is worth more to a client than a Close.
            if let Err(rejection) = &invited
                && (self.protocols.len() == 1 || rejection.code.http() < 500)
            {
                return Err(rejection.clone());
            }
            answered.push((Arc::clone(protocol), invited));
        }
        Ok(answered)
    }
}

/// Gives the socket to its protocol. The parts are boxed, so that a long session does not hold the memory of its start.
fn serve(
    mut answered: Vec<ProtocolAnswer>,
    drain: Drain,
    mut socket: Box<WebSocket>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let first = if answered.len() == 1 {
            None
        } else {
            match Box::pin(first(&drain, &mut socket)).await {
                Ok(received) => Some(received),
                Err(None) => return,
                Err(Some((code, why))) => return socket.close(code, why.into(), GOODBYE).await,
            }
        };
        let begun = first.as_ref().and_then(|first| {
            let begun = |(protocol, _): &ProtocolAnswer| protocol.is_begun_by(first);
            answered.iter().position(begun)
        });
        let (protocol, invited) = answered.swap_remove(begun.unwrap_or(0));
        // The places that the other protocols hold for this client are freed here, and not at the end of the session.
        drop(answered);
        // The access log had no face for this request: its path belongs to several.
        if let Some(request_trace) = RequestTrace::present() {
            request_trace.note(|entry| entry.face = Some(protocol.face()));
        }
        match invited {
            Ok(invited) => (invited.serve)(socket, first).await,
            // The upgrade has been accepted by then, so the rejection can only be a Close.
            Err(rejection) => {
                let reason = rejection.reason.to_string();
                Box::pin(socket.close(TRY_AGAIN_LATER, reason, GOODBYE)).await;
            }
        }
    })
}

/// The first message; otherwise the code and reason to close with, or `None` if the client has disconnected.
async fn first(
    drain: &Drain,
    socket: &mut WebSocket,
) -> Result<SocketMessage, Option<(u16, &'static str)>> {
    // Every arm may be cancelled: a message not yet received whole stays in the socket.
    let received = tokio::select! {
        received = socket.receive() => received,
        () = drain.reached(DrainPhase::Refusing) => return Err(Some((1001, GOING_AWAY))),
        () = request_trace::revoked() => return Err(Some((1008, REVOKED))),
        () = tokio::time::sleep(IDLE_MAX) => return Err(Some((1001, IDLE_TIMEOUT))),
    };
    received.map_err(|lost| match lost {
        SocketLoss::Left | SocketLoss::Closed => None,
        SocketLoss::TooLarge => Some((1009, "a message is too large")),
        SocketLoss::NotText => Some((1007, "a text message is not UTF-8")),
        SocketLoss::Overloaded => {
            Some((TRY_AGAIN_LATER, "the server has no room for this message"))
        }
        SocketLoss::Broken => Some((1002, "the data is not a WebSocket frame of a client")),
    })
}

/// In the form that Evergreen clients parse (EV-903); for other clients the close code is enough.
const GOING_AWAY: &str = "UNAVAILABLE: GOING_AWAY";
const REVOKED: &str = "UNAUTHENTICATED: REVOKED";
const IDLE_TIMEOUT: &str = "DEADLINE_EXCEEDED: IDLE_TIMEOUT";
/// How long a client may send nothing but pongs: the idle limit of a session (EV-111). It holds a place of each
/// protocol.
const IDLE_MAX: Duration = Duration::from_secs(30 * 60);
/// How long the closing handshake may take.
const GOODBYE: Duration = Duration::from_secs(2);
/// The close code of an overloaded server.
const TRY_AGAIN_LATER: u16 = 1013;
/// For sockets that may be LMTP's: LMQL clients block their event loop for many seconds (D-32, LM-107).
pub(crate) const LONG_WAIT: Keepalive = Keepalive {
    every: Duration::from_secs(20),
    idle_timeout: Duration::from_secs(90),
};
