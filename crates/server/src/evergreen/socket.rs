//! Evergreen over WebSockets: who is let in, and which dialect it becomes (EV-701, EV-704, EV-705).
//!
//! Owns: what is refused before the upgrade, the dialect that a first message shows, pings' times. Refuses to know: the
//! upgrade itself (`reception`), the session on it (`conversation`), and bytes of messages (`proto::evergreen`).
//!
//! ```text
//!   options, place ─► 101 ─┬─ subprotocol ──────────────► conversation in that dialect
//!                          └─ first message: which? ─────► the same, or Close
//!   a new session, one that can be come back to, or the next connection of such a one (EV-941)
//! ```

mod conversation;
mod inbox;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, Request};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Detected, Dialect, Frame, Reason, Status, socket};

use self::conversation::Wire;
use super::held::{Stay, connect, gone};
use super::house::House;
use super::options::{Options, TOKEN};
use crate::caller::{Caller, Identity};
use crate::drain::Phase;
use crate::held::Token;
use crate::metrics;
use crate::places::Place;
use crate::reception::{Invited, Protocol};
use crate::refusal::Refusal;
use crate::websocket::{Heard, Keepalive, Socket};

/// EV-705.
pub(super) const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(30),
    silence: Duration::from_secs(60),
};

/// Evergreen, as the reception knows it.
pub(super) struct Sockets(pub(super) Arc<House>);

impl Protocol for Sockets {
    fn face(&self) -> metrics::Face {
        metrics::Face::Evergreen
    }

    fn subprotocol(&self, offered: &[&str]) -> Option<&'static str> {
        let mut dialects = offered.iter().copied().filter_map(Dialect::of_subprotocol);
        dialects.next().and_then(Dialect::subprotocol)
    }

    /// Evergreen takes what is nobody else's.
    fn is_begun_by(&self, _: &Heard) -> bool {
        false
    }

    fn message_bytes_max(&self) -> usize {
        self.0.config.limits.max_message_bytes
    }

    fn invite(
        &self,
        request: &Request<Body>,
        chosen: Option<&'static str>,
    ) -> Result<Invited, Refusal> {
        let house = Arc::clone(&self.0);
        let query = request.uri().query().unwrap_or_default();
        let options = Options::of_upgrade(request.headers(), query).map_err(|malformed| {
            Refusal::new(
                Code::InvalidRequest,
                "bad_session_option",
                malformed.to_string(),
            )
        })?;
        let visitor = Caller::of(request.extensions())?.identity.clone();
        let chosen = chosen.and_then(Dialect::of_subprotocol);
        let entry = match &options.token {
            Some(token) => Entry::Back(Arc::clone(token)),
            None => {
                let room = house.admit(&visitor).map_err(|status| refusal(&status))?;
                let resumes = options.resume && chosen.is_none_or(Dialect::resumes);
                let issued = resumes.then(|| house.held.issue(&visitor)).flatten();
                Entry::New(room, issued)
            }
        };
        let mut headers = HeaderMap::new();
        let names = house.config.extensions(chosen.unwrap_or(Dialect::Protobuf));
        if let Ok(names) = names.join(", ").parse::<HeaderValue>() {
            headers.insert("evergreen-extensions", names);
        }
        if let Some(Ok(mut token)) = entry.token().map(|token| token.parse::<HeaderValue>()) {
            token.set_sensitive(true);
            headers.insert(TOKEN, token);
        }
        Ok(Invited {
            headers,
            decided: matches!(entry, Entry::Back(_)),
            serve: Box::new(move |socket, heard| {
                let guest = Guest {
                    visitor,
                    options,
                    entry,
                };
                Box::pin(async move { begin(&house, guest, chosen, socket, heard).await })
            }),
        })
    }
}

/// Who has come, and for what.
struct Guest {
    visitor: Identity,
    options: Options,
    entry: Entry,
}

/// What a connection is to become.
enum Entry {
    /// A session with a place among the others; with a token if it is one that can be come back to.
    New(Place, Option<(Token, Stay)>),
    /// The next connection of the session with this token.
    Back(Arc<str>),
}

impl Entry {
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
    house: &House,
    guest: Guest,
    chosen: Option<Dialect>,
    mut socket: Box<Socket>,
    heard: Option<Heard>,
) {
    if let Some(dialect) = chosen {
        return serve(house, guest, Wire::new(socket, dialect, None)).await;
    }
    // A connection that comes back has no place among the sessions: without a session it must not wait for its first words.
    let knocks = matches!(&guest.entry, Entry::Back(token) if house.held.back(token, &guest.visitor, |_| ()).is_none());
    if knocks {
        let (code, status) = (1008, gone());
        return socket
            .close(code, socket::reason_text(&status), conversation::LAST_WORDS)
            .await;
    }
    // Boxed, so that a long session does not hold the room of its beginning.
    match Box::pin(first(house, &mut socket, heard)).await {
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
        visitor,
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
            let (session, outgoing) = house.open(dialect, options, None, room.caller());
            conversation::run(session, house.orders(), outgoing, wire).await;
            drop(room);
        }
        Entry::Back(token) => {
            let (inbox, incoming) = inbox::new();
            let held = dialect.resumes().then_some(&house.held);
            let outgoing = held
                .ok_or_else(gone)
                .and_then(|held| connect(held, &token, &visitor, dialect, incoming.boxed()));
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
    socket: &mut Socket,
    mut ahead: Option<Heard>,
) -> Result<(Dialect, Frame), Option<(u16, Status)>> {
    let close =
        |reason: Reason, code: u16, message: &str| Some((code, Status::new(reason, message)));
    let idle = tokio::time::sleep(house.config.limits.idle_timeout);
    tokio::pin!(idle);
    loop {
        let heard = match ahead.take() {
            Some(heard) => Ok(heard),
            // Every arm may be cancelled: a message not yet heard whole stays in the socket.
            None => tokio::select! {
                heard = socket.heard() => heard,
                () = house.shared.drain.reached(Phase::Refusing) => {
                    return Err(close(Reason::GoingAway, 1001, "the server is shutting down"));
                }
                () = &mut idle => {
                    return Err(close(Reason::IdleTimeout, 1001, "nothing was said"));
                }
            },
        };
        let frame = match heard {
            Ok(heard) => conversation::frame(heard),
            Err(lost) => return Err(conversation::status(lost)),
        };
        match Dialect::detect(&frame) {
            Detected::Dialect(dialect) => return Ok((dialect, frame)),
            Detected::Nothing => {}
            Detected::Foreign => {
                return Err(close(Reason::BadMessage, 1007, "no dialect of Evergreen"));
            }
        }
    }
}

/// Why there is no place, as an HTTP answer.
fn refusal(status: &Status) -> Refusal {
    let reason = match status.known() {
        Some(Reason::GoingAway) => "draining",
        _ => "server_overloaded",
    };
    Refusal::new(Code::Unavailable, reason, status.message.clone())
}
