//! Sessions of Evergreen that outlive their connections (EV-940, EV-941).
//!
//! Owns: what is kept of one, and how a new connection takes it over. Refuses to know: places and tokens (`crate::held`). How
//! long a session waits is its own time-out.

use sapwood_kernel::session::{Back, Incoming, Outgoing};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

use crate::caller::Identity;
use crate::held::{self, Kind};

/// The way back to a session, and its task, which is aborted with the server.
pub(super) struct Kept {
    pub(super) back: Back,
    pub(super) _task: AbortOnDropHandle<()>,
}

/// The sessions that can be come back to.
pub(super) type Held = held::Held<Kept>;
/// A session's place among them.
pub(super) type Stay = held::Stay<Kept>;

/// Places for `most` sessions, of which one visitor may have `most_each`.
pub(super) fn held(most: usize, most_each: usize) -> Held {
    let kind = Kind {
        prefix: "",
        bytes: 32,
    };
    Held::new(kind, most, most_each)
}

/// Takes over with a new connection, which speaks so.
///
/// # Errors
/// `NO_SESSION`.
pub(super) fn connect(
    held: &Held,
    token: &str,
    visitor: &Identity,
    dialect: Dialect,
    incoming: Incoming,
) -> Result<Outgoing, Status> {
    let back = held.back(token, visitor, |kept| kept.back.clone());
    let outgoing = back.and_then(|back| back.connect(dialect, incoming));
    outgoing.ok_or_else(gone)
}

/// The one answer to whoever must not come back.
pub(super) fn gone() -> Status {
    let message = "there is no session to come back to: open a new one";
    Status::new(Reason::NoSession, message)
}
