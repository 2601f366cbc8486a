//! Sessions that outlive their connections (EV-940, EV-941, D-29).
//!
//! Owns: [`Held`]: which token brings whom back to which session, and the tasks of those sessions. Refuses to know: what
//! a session does meanwhile. How long one waits is the session's own time-out; how many there are is bounded here, and
//! what they hold counts like everybody else's (EV-801).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sapwood_kernel::session::{Back, Incoming, Outgoing};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

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

/// The sessions that can be come back to.
pub(super) struct Held {
    places: Mutex<HashMap<Token, Place>>,
    most: usize,
}

struct Place {
    caller: Arc<str>,
    back: Option<Back>,
    task: Option<AbortOnDropHandle<()>>,
}

/// Held by a session's task: its end is the end of the token.
pub(super) struct Stay {
    held: Weak<Held>,
    token: Token,
}

impl Held {
    pub(super) fn new(most: usize) -> Self {
        Self {
            places: Mutex::default(),
            most,
        }
    }

    /// A token for a new session of `caller`; `None` where there are as many as there may be, and the session is one
    /// without resume.
    pub(super) fn issue(self: &Arc<Self>, caller: &Arc<str>) -> Option<(Token, Stay)> {
        let token = Token::random()?;
        let mut places = self.places();
        if places.len() >= self.most {
            return None;
        }
        let place = Place {
            caller: Arc::clone(caller),
            back: None,
            task: None,
        };
        places.insert(token, place);
        let stay = Stay {
            held: Arc::downgrade(self),
            token,
        };
        Some((token, stay))
    }

    /// How to come back, and the task, which is aborted with the server. A session that is over already needs neither.
    pub(super) fn keep(&self, token: Token, back: Back, task: AbortOnDropHandle<()>) {
        if let Some(place) = self.places().get_mut(&token) {
            (place.back, place.task) = (Some(back), Some(task));
        }
    }

    /// Whether `caller` could come back with it: whoever could not is told before anything is waited for.
    pub(super) fn knows(&self, token: &str, caller: &str) -> bool {
        self.back(token, caller).is_some()
    }

    /// Takes over with a new connection, which speaks so. Unknown, ended and somebody else's are one answer.
    ///
    /// # Errors
    /// `NO_SESSION`.
    pub(super) fn connect(
        &self,
        token: &str,
        caller: &str,
        dialect: Dialect,
        incoming: Incoming,
    ) -> Result<Outgoing, Status> {
        let back = self.back(token, caller);
        let outgoing = back.and_then(|back| back.connect(dialect, incoming));
        outgoing.ok_or_else(gone)
    }

    fn back(&self, token: &str, caller: &str) -> Option<Back> {
        let token = Token::read(token)?;
        let places = self.places();
        let place = places.get(&token).filter(|place| *place.caller == *caller);
        place?.back.clone()
    }

    fn places(&self) -> MutexGuard<'_, HashMap<Token, Place>> {
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
