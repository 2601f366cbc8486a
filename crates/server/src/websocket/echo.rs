//! A face whose WebSocket echoes every message. Conformance suites test with it what all faces share: frames, limits, closes.

use std::future::poll_fn;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::get;
use http::Request;

use super::{Keepalive, SocketLoss, SocketMessage, UpgradeRequest, WebSocket};
use crate::auth::scopes::RouteAccess;
use crate::context::Face;
use crate::http::route::Route;
use crate::ops::metrics::FaceLabel;

/// The face. Its only route is `/echo`.
#[must_use]
pub fn face() -> Face {
    let upgrade = |mut request: Request<Body>| async move {
        match UpgradeRequest::of(&mut request) {
            Ok(asked) => asked.accept(None, MESSAGE_BYTES_MAX, KEEPALIVE, echo),
            Err(rejection) => rejection.into_response(),
        }
    };
    Face {
        name: FaceLabel::Http,
        routes: vec![Route::http("/echo", RouteAccess::Open, get(upgrade))],
        root: None,
        descriptors: Vec::new(),
        services: Vec::new(),
    }
}

async fn echo(mut socket: Box<WebSocket>) {
    let lost = loop {
        let (bytes, is_text) = match socket.receive().await {
            Ok(SocketMessage::Text(text)) => (text, true),
            Ok(SocketMessage::Binary(bytes)) => (bytes, false),
            Err(lost) => break lost,
        };
        if socket.send(bytes, is_text).is_err() || poll_fn(|cx| socket.poll_sent(cx)).await.is_err()
        {
            return;
        }
    };
    let (code, why) = match lost {
        // Answered already, or nobody is left to answer.
        SocketLoss::Left | SocketLoss::Closed => return,
        SocketLoss::TooLarge => (1009, "a message is too large"),
        SocketLoss::NotText => (1007, "a text message is not UTF-8"),
        SocketLoss::Broken => (1002, "the client has sent an invalid frame"),
        SocketLoss::Overloaded => (1013, "the server's memory for messages is in use"),
    };
    socket.close(code, why.into(), GOODBYE).await;
}

/// The longest message of the Autobahn suite has 16 MiB.
const MESSAGE_BYTES_MAX: usize = 32 << 20;
const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(20),
    idle_timeout: Duration::from_secs(90),
};
/// How long the closing handshake may take.
const GOODBYE: Duration = Duration::from_secs(2);
