//! Registry of Evergreen sessions that wait for their client to reconnect (EV-940, EV-941).
//!
//! How long a session waits is the session's own timer, and not this registry's.

use sapwood_kernel::session::{IncomingMessages, OutgoingMessages, Reconnector};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

use crate::auth::identity::CallerIdentity;
use crate::resume::{self, TokenFormat};

/// A handle to a session, and its task, which is aborted with the server.
pub(super) struct DetachedSession {
    pub(super) back: Reconnector,
    pub(super) _task: AbortOnDropHandle<()>,
}

/// The sessions that can be resumed, attached or not.
pub(super) type SessionRegistry = resume::ResumeRegistry<DetachedSession>;
/// A session's place among them.
pub(super) type SessionRegistrationGuard = resume::RegistryGuard<DetachedSession>;

/// Room for `most` sessions, of which one caller may have `most_each`.
pub(super) fn new_registry(most: usize, most_each: usize) -> SessionRegistry {
    let kind = TokenFormat {
        // EV-940 fixes the form: 32 random bytes in base64url, and nothing before them.
        prefix: "",
        bytes: 32,
    };
    SessionRegistry::new(kind, most, most_each)
}

/// Attaches a new connection in this dialect to the session of `token`.
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
    // Only cloned under the registry's lock, which all callers share: connecting takes the session's own lock and wakes
    // the former connection, which ends with `SUPERSEDED`.
    let back = registry.back(token, identity, |retained| retained.back.clone());
    let outgoing = back.and_then(|back| back.connect(dialect, incoming));
    outgoing.ok_or_else(session_gone)
}

/// The one answer for unknown, expired and foreign tokens, so that a guess learns nothing (EV-941).
pub(super) fn session_gone() -> Status {
    let message = "there is no session to resume: open a new one";
    Status::new(Reason::NoSession, message)
}
