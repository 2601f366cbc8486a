//! Evergreen over WebSockets: the upgrade, and which dialect it becomes (EV-701, EV-704, EV-705).
//!
//! Owns: what is refused before the upgrade, the first message, pings' times. Refuses to know: the session on it
//! (`conversation`), and bytes of messages (`proto::evergreen`).
//!
//! ```text
//!   GET ─ options, place ─► 101 ─┬─ subprotocol ──────────────► conversation in that dialect
//!                                └─ first message: which? ─────► the same, or Close
//!   a new session, one that can be come back to, or the next connection of such a one (EV-941)
//! ```

mod conversation;
mod inbox;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get};
use futures::StreamExt;
use http::{HeaderValue, Request, Response};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Detected, Dialect, Frame, Reason, Status, socket};
use tokio::sync::OwnedSemaphorePermit;

use self::conversation::Wire;
use super::held::{Stay, Token, gone};
use super::house::House;
use super::options::{Options, TOKEN};
use crate::auth::Caller;
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
    let caller = request.extensions().get::<Caller>();
    let caller = caller.map_or_else(|| Arc::from(""), |caller| Arc::clone(&caller.name));
    let chosen = asked.offered().find_map(Dialect::of_subprotocol);
    let entry = match &options.token {
        Some(token) => Entry::Back(Arc::clone(token)),
        None => {
            let room = house.admit().map_err(|status| refusal(&status))?;
            let resumes = options.resume && chosen.is_none_or(Dialect::resumes);
            let issued = resumes.then(|| house.held.issue(&caller)).flatten();
            Entry::New(room, issued)
        }
    };
    let token = entry.token();
    let names = house.config.extensions(chosen.unwrap_or(Dialect::Protobuf));
    let bytes_max = house.config.limits.max_message_bytes;
    let subprotocol = chosen.and_then(Dialect::subprotocol);
    let mut answer = asked.accept(
        subprotocol,
        bytes_max,
        place.keepalive,
        move |socket| async move {
            let guest = Guest {
                caller,
                options,
                entry,
            };
            begin(&house, place, guest, chosen, socket).await;
        },
    );
    if let Ok(names) = names.join(", ").parse::<HeaderValue>() {
        answer.headers_mut().insert("evergreen-extensions", names);
    }
    if let Some(Ok(mut token)) = token.map(|token| token.parse::<HeaderValue>()) {
        token.set_sensitive(true);
        answer.headers_mut().insert(TOKEN, token);
    }
    Ok(answer)
}

/// Who has come, and for what.
struct Guest {
    caller: Arc<str>,
    options: Options,
    entry: Entry,
}

/// What a connection is to become.
enum Entry {
    /// A session with a place among the others; with a token if it is one that can be come back to.
    New(OwnedSemaphorePermit, Option<(Token, Stay)>),
    /// The next connection of the session with this token.
    Back(Arc<str>),
}

impl Entry {
    /// The token that is given out.
    fn token(&self) -> Option<String> {
        match self {
            Self::New(_, Some((token, _))) => Some(token.text()),
            Self::New(_, None) | Self::Back(_) => None,
        }
    }
}

/// Finds out the dialect, and speaks it.
async fn begin(
    house: &House,
    place: Place,
    guest: Guest,
    chosen: Option<Dialect>,
    mut socket: Box<Socket>,
) {
    if let Some(dialect) = chosen {
        return serve(house, guest, Wire::new(socket, dialect, None)).await;
    }
    // A connection that comes back has no place among the sessions: without a session it must not wait for its first words.
    let knocks =
        matches!(&guest.entry, Entry::Back(token) if !house.held.knows(token, &guest.caller));
    if knocks {
        let (code, status) = (1008, gone());
        return socket
            .close(code, socket::reason_text(&status), conversation::LAST_WORDS)
            .await;
    }
    // Boxed, so that a long session does not hold the room of its beginning.
    match Box::pin(first(house, place, &mut socket)).await {
        Ok((dialect, first)) => {
            serve(house, guest, Wire::new(socket, dialect, Some(first))).await;
        }
        Err(None) => {}
        Err(Some((code, status))) => {
            let reason = socket::reason_text(&status);
            socket.close(code, reason, conversation::LAST_WORDS).await;
        }
    }
}

/// Lets the guest into its session.
async fn serve(house: &House, guest: Guest, wire: Box<Wire>) {
    let Guest {
        caller,
        options,
        entry,
    } = guest;
    let dialect = wire.dialect();
    match entry {
        Entry::New(room, Some(issued)) if dialect.resumes() => {
            let (inbox, incoming) = inbox::new();
            let outgoing = house.hold(dialect, options, issued, room, incoming.boxed());
            conversation::apart(inbox, outgoing, wire).await;
        }
        Entry::New(room, _) => {
            let (session, outgoing) = house.open(dialect, options, None);
            conversation::run(session, house.orders(), outgoing, wire).await;
            drop(room);
        }
        Entry::Back(token) => {
            let (inbox, incoming) = inbox::new();
            let held = dialect.resumes().then_some(&house.held);
            let outgoing = held
                .ok_or_else(gone)
                .and_then(|held| held.connect(&token, &caller, dialect, incoming.boxed()));
            match outgoing {
                Ok(outgoing) => conversation::apart(inbox, outgoing, wire).await,
                Err(status) => Box::pin(wire.end(Some(&Arc::new(status)))).await,
            }
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
