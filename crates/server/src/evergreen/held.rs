//! Sessions that outlive their connections (EV-940, EV-941, D-29).
//!
//! Owns: [`Held`]: which token brings whom back to which session, and the tasks of those sessions. Refuses to know: what
//! a session does meanwhile. How long one waits is the session's own time-out; how many there are is bounded here, and
//! what they hold counts like everybody else's (EV-801).

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Extensions;
use sapwood_kernel::session::{Back, Incoming, Outgoing};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

use crate::auth::{ANONYMOUS, Caller};
use crate::listener::Peer;

/// 32 random bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Token([u8; 32]);

impl Token {
    /// `None` if the system has no randomness to give.
    fn random() -> Option<Self> {
        let mut bytes = [0; 32];
        let source = rustls::crypto::ring::default_provider().secure_random;
        source.fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }

    /// As it stands in headers.
    pub(super) fn text(self) -> String {
        URL_SAFE_NO_PAD.encode(self.0)
    }

    fn read(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

/// Whoever opens sessions and comes back to them. A session belongs to the key that it was opened with, wherever its client
/// is by then.
#[derive(Clone, Debug)]
pub(super) struct Visitor {
    caller: Arc<str>,
    share: Share,
}

/// Who has one share of the places: a key, or, where nobody needs one, a network address; of IPv6 the network, in which one
/// client has as many addresses as it likes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Share {
    Key(Arc<str>),
    Address(Option<IpAddr>),
}

impl Visitor {
    /// Who has sent a request with these extensions.
    pub(super) fn of(extensions: &Extensions) -> Self {
        let caller = extensions.get::<Caller>();
        let caller = caller.map_or_else(|| Arc::from(ANONYMOUS), |caller| Arc::clone(&caller.name));
        let address = || extensions.get().map(|Peer(peer)| network(peer.ip()));
        let share = if *caller == *ANONYMOUS {
            Share::Address(address())
        } else {
            Share::Key(Arc::clone(&caller))
        };
        Self { caller, share }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// The sessions that can be come back to.
pub(super) struct Held {
    places: Mutex<Places>,
    most: usize,
    /// How many of them one visitor may have, so that none takes all.
    most_each: usize,
}

#[derive(Default)]
struct Places {
    by_token: HashMap<Token, Place>,
    /// How many each has.
    taken: HashMap<Share, usize>,
}

impl Places {
    fn remove(&mut self, token: &Token) -> Option<Place> {
        let place = self.by_token.remove(token)?;
        if let Some(taken) = self.taken.get_mut(&place.visitor.share) {
            *taken -= 1;
            if *taken == 0 {
                self.taken.remove(&place.visitor.share);
            }
        }
        Some(place)
    }
}

struct Place {
    visitor: Visitor,
    back: Option<Back>,
    task: Option<AbortOnDropHandle<()>>,
}

/// Held by a session's task: its end is the end of the token.
pub(super) struct Stay {
    held: Weak<Held>,
    token: Token,
}

impl Held {
    pub(super) fn new(most: usize, most_each: usize) -> Self {
        Self {
            places: Mutex::default(),
            most,
            most_each,
        }
    }

    /// A token for a new session of `visitor`; `None` where there are as many as there may be, of all or of these, and the
    /// session is one without resume.
    pub(super) fn issue(self: &Arc<Self>, visitor: &Visitor) -> Option<(Token, Stay)> {
        let token = Token::random()?;
        let mut places = self.places();
        let taken = places.taken.get(&visitor.share).copied().unwrap_or(0);
        if places.by_token.len() >= self.most || taken >= self.most_each {
            return None;
        }
        let place = Place {
            visitor: visitor.clone(),
            back: None,
            task: None,
        };
        places.by_token.insert(token, place);
        places.taken.insert(visitor.share.clone(), taken + 1);
        let stay = Stay {
            held: Arc::downgrade(self),
            token,
        };
        Some((token, stay))
    }

    /// How to come back, and the task, which is aborted with the server. A session that is over already needs neither.
    pub(super) fn keep(&self, token: Token, back: Back, task: AbortOnDropHandle<()>) {
        if let Some(place) = self.places().by_token.get_mut(&token) {
            (place.back, place.task) = (Some(back), Some(task));
        }
    }

    /// Whether `visitor` could come back with it: whoever could not is told before anything is waited for.
    pub(super) fn knows(&self, token: &str, visitor: &Visitor) -> bool {
        self.back(token, visitor).is_some()
    }

    /// Takes over with a new connection, which speaks so. Unknown, ended and somebody else's are one answer.
    ///
    /// # Errors
    /// `NO_SESSION`.
    pub(super) fn connect(
        &self,
        token: &str,
        visitor: &Visitor,
        dialect: Dialect,
        incoming: Incoming,
    ) -> Result<Outgoing, Status> {
        let back = self.back(token, visitor);
        let outgoing = back.and_then(|back| back.connect(dialect, incoming));
        outgoing.ok_or_else(gone)
    }

    fn back(&self, token: &str, visitor: &Visitor) -> Option<Back> {
        let token = Token::read(token)?;
        let places = self.places();
        let place = places.by_token.get(&token);
        let place = place.filter(|place| place.visitor.caller == visitor.caller);
        place?.back.clone()
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one answer to whoever must not come back.
pub(super) fn gone() -> Status {
    let message = "there is no session to come back to: open a new one";
    Status::new(Reason::NoSession, message)
}

impl Drop for Stay {
    fn drop(&mut self) {
        let place = self.held.upgrade();
        let place = place.and_then(|held| held.places().remove(&self.token));
        drop(place);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::auth::Scopes;

    fn visitor(name: &str, address: &str) -> Visitor {
        let mut extensions = Extensions::new();
        extensions.insert(Caller {
            name: name.into(),
            scopes: Scopes::ALL,
            allowance: None,
        });
        extensions.insert(Peer(SocketAddr::new(address.parse().unwrap(), 7)));
        Visitor::of(&extensions)
    }

    /// D-29
    #[test]
    fn ev_940_nobody_takes_all_places_with_a_key_or_without_one() {
        let held = Arc::new(Held::new(7, 2));
        // Each row is one share: two places, and not a third.
        let shares = [
            // A key, wherever it comes from.
            [
                ("key", "10.0.0.1"),
                ("key", "10.0.0.2"),
                ("key", "10.0.0.3"),
            ],
            // Without a key an address, which an IPv6 socket tells in another form.
            [
                (ANONYMOUS, "10.0.0.1"),
                (ANONYMOUS, "::ffff:10.0.0.1"),
                (ANONYMOUS, "10.0.0.1"),
            ],
            // Of IPv6 a network.
            [
                (ANONYMOUS, "2001:db8::1"),
                (ANONYMOUS, "2001:db8::2:1"),
                (ANONYMOUS, "2001:db8:0:0:ffff::1"),
            ],
        ];
        let mut stays = Vec::new();
        for share in shares {
            for (at, (name, address)) in share.into_iter().enumerate() {
                let issued = held.issue(&visitor(name, address));
                assert_eq!(issued.is_some(), at < 2, "{name} {address}");
                stays.extend(issued);
            }
        }
        // The seventh place is the last of all.
        stays.extend(held.issue(&visitor("other", "::1")));
        assert_eq!(stays.len(), 7);
        assert!(held.issue(&visitor("third", "::1")).is_none());
        // Who leaves makes room, and leaves nothing behind.
        drop(stays.remove(0));
        let again = held.issue(&visitor("key", "10.0.0.9"));
        assert!(again.is_some());
        drop((again, stays));
        let places = held.places();
        assert!(places.by_token.is_empty() && places.taken.is_empty());
    }
}
