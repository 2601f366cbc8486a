//! Registry of Evergreen sessions that wait for their client to reconnect (EV-940, EV-941).
//!
//! How long a session waits is its own time-out.

use sapwood_kernel::session::{IncomingMessages, OutgoingMessages, Reconnector};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

use crate::auth::identity::CallerIdentity;
use crate::resume::{self, TokenFormat};

/// The way back to a session, and its task, which is aborted with the server.
pub(super) struct DetachedSession {
    pub(super) back: Reconnector,
    pub(super) _task: AbortOnDropHandle<()>,
}

/// The sessions that can be resumed.
pub(super) type SessionRegistry = resume::ResumeRegistry<DetachedSession>;
/// A session's place among them.
pub(super) type SessionRegistrationGuard = resume::RegistryGuard<DetachedSession>;

/// Room for `most` sessions, of which one caller may have `most_each`.
pub(super) fn new_registry(most: usize, most_each: usize) -> SessionRegistry {
    let kind = TokenFormat {
        prefix: "",
        bytes: 32,
    };
    SessionRegistry::new(kind, most, most_each)
}

/// Takes over with a new connection, which speaks so.
///
/// # Errors
/// `NO_SESSION`.
pub(super) fn connect(
    registry: &SessionRegistry,
    token: &str,
    identity: &CallerIdentity,
    dialect: Dialect,
    incoming: IncomingMessages,
) -> Result<OutgoingMessages, Status> {
    let back = registry.back(token, identity, |retained| retained.back.clone());
    let outgoing = back.and_then(|back| back.connect(dialect, incoming));
    outgoing.ok_or_else(session_gone)
}

/// The one answer to a client that must not resume.
pub(super) fn session_gone() -> Status {
    let message = "there is no session to resume: open a new one";
    Status::new(Reason::NoSession, message)
}
