//! Evergreen over WebSockets: the upgrade, and which dialect it becomes (EV-701, EV-704, EV-705).
//!
//! Owns: what is refused before the upgrade, the first message, pings' times. Refuses to know: the session on it
//! (`conversation`), and bytes of messages (`proto::evergreen`).
//!
//! ```text
//!   GET ─ options, place ─► 101 ─┬─ subprotocol ──────────────► conversation in that dialect
//!                                └─ first message: which? ─────► the same, or Close
//! ```

mod conversation;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get};
use http::{HeaderValue, Request, Response};
use sapwood_kernel::session;
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Detected, Dialect, Frame, Reason, Status, socket};

use super::house::House;
use super::options::Options;
use crate::drain::Phase;
use crate::refusal::Refusal;
use crate::websocket::{Asked, Keepalive, Socket};

/// What holds on one path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    keepalive: Keepalive,
    /// Text that begins with a word and a space is another protocol's (D-32).
    shared: bool,
}

/// EV-705.
pub(super) const EVERGREEN: Place = Place {
    keepalive: Keepalive {
        every: Duration::from_secs(30),
        silence: Duration::from_secs(60),
    },
    shared: false,
};

/// D-32.
pub(super) const ROOT: Place = Place {
    keepalive: Keepalive {
        every: Duration::from_secs(20),
        silence: Duration::from_secs(90),
    },
    shared: true,
};

/// The route of a path.
pub(super) fn route(house: &Arc<House>, place: Place) -> MethodRouter {
    let house = Arc::clone(house);
    get(move |request: Request<Body>| async move {
        upgrade(house, place, request).unwrap_or_else(IntoResponse::into_response)
    })
}

fn upgrade(
    house: Arc<House>,
    place: Place,
    mut request: Request<Body>,
) -> Result<Response<Body>, Refusal> {
    let asked = Asked::of(&mut request)?;
    let query = request.uri().query().unwrap_or_default();
    let options = Options::of_upgrade(request.headers(), query).map_err(|malformed| {
        Refusal::new(
            Code::InvalidRequest,
            "bad_session_option",
            malformed.to_string(),
        )
    })?;
    if options.returns {
        let message = "sessions are come back to over gRPC, not over a WebSocket: open a new one";
        return Err(Refusal::new(Code::NotFound, "NO_SESSION", message));
    }
    let room = house.admit().map_err(|status| refusal(&status))?;
    let chosen = asked.offered().find_map(Dialect::of_subprotocol);
    let bytes_max = house.config.limits.max_message_bytes;
    let subprotocol = chosen.and_then(Dialect::subprotocol);
    let mut answer = asked.accept(
        subprotocol,
        bytes_max,
        place.keepalive,
        move |socket| async move {
            begin(&house, place, options, chosen, socket).await;
            drop(room);
        },
    );
    if let Ok(names) = session::extensions(false).join(", ").parse::<HeaderValue>() {
        answer.headers_mut().insert("evergreen-extensions", names);
    }
    Ok(answer)
}

/// Finds out the dialect, and speaks it.
async fn begin(
    house: &House,
    place: Place,
    options: Options,
    chosen: Option<Dialect>,
    mut socket: Socket,
) {
    if let Some(dialect) = chosen {
        return conversation::run(house, dialect, options, socket, None).await;
    }
    match first(house, place, &mut socket).await {
        Ok((dialect, first)) => {
            conversation::run(house, dialect, options, socket, Some(first)).await;
        }
        Err(None) => {}
        Err(Some((code, status))) => {
            let reason = socket::reason_text(&status);
            socket.close(code, reason, conversation::LAST_WORDS).await;
        }
    }
}

/// The first message that says something, and what it shows. Otherwise how to close, if anybody is there to be told.
async fn first(
    house: &House,
    place: Place,
    socket: &mut Socket,
) -> Result<(Dialect, Frame), Option<(u16, Status)>> {
    let close =
        |reason: Reason, code: u16, message: &str| Some((code, Status::new(reason, message)));
    let idle = tokio::time::sleep(house.config.limits.idle_timeout);
    tokio::pin!(idle);
    loop {
        // Every arm may be cancelled: a message not yet heard whole stays in the socket.
        let heard = tokio::select! {
            heard = socket.heard() => heard,
            () = house.shared.drain.reached(Phase::Refusing) => {
                return Err(close(Reason::GoingAway, 1001, "the server is shutting down"));
            }
            () = &mut idle => {
                return Err(close(Reason::IdleTimeout, 1001, "nothing was said"));
            }
        };
        let frame = match heard {
            Ok(heard) => conversation::frame(heard),
            Err(lost) => return Err(conversation::status(lost)),
        };
        match Dialect::detect(&frame) {
            Detected::Dialect(dialect) => return Ok((dialect, frame)),
            Detected::Nothing => {}
            Detected::Foreign if place.shared && is_command(&frame) => {
                let message = "LMTP is not served here";
                return Err(close(Reason::Unimplemented, 1003, message));
            }
            Detected::Foreign => {
                return Err(close(Reason::BadMessage, 1007, "no dialect of Evergreen"));
            }
        }
    }
}

/// A word and a space: what LMTP begins with, a face to come.
fn is_command(frame: &Frame) -> bool {
    let Frame::Text(text) = frame else {
        return false;
    };
    let word = text.iter().take_while(|byte| byte.is_ascii_alphabetic());
    let word = word.count();
    word > 0 && text.get(word) == Some(&b' ')
}

/// Why there is no place, as an HTTP answer.
fn refusal(status: &Status) -> Refusal {
    let reason = match status.known() {
        Some(Reason::GoingAway) => "draining",
        _ => "server_overloaded",
    };
    Refusal::new(Code::Unavailable, reason, status.message.clone())
}
