//! The phase of a session and the outputs that wait for its shell.
//!
//! ```text
//!   open ──end of input──► half-closed ──all finished, all sent──► finished
//!     └───────────── violation, limit, abort, deadline ─────────────► aborted (with a status)
//! ```
//!
//! The close is always the last output, and there is only one: nothing is emitted once the session is over.

use std::collections::VecDeque;
use std::sync::Arc;

use super::port::SessionOutput;
use crate::evergreen::Status;

/// The phase of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum SessionPhase {
    #[default]
    Open,
    /// The peer sends nothing more (EV-109).
    HalfClosed,
    /// All actions are finished and all output is sent; content that was received can still be read.
    Finished,
    /// Aborted with the status of the first abort; all state is dropped (EV-901).
    Aborted(Arc<Status>),
}

/// The phase and the outputs; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct Lifecycle {
    pub(super) phase: SessionPhase,
    outputs: VecDeque<SessionOutput>,
    /// The status with which the peer closed its side, if it sent one.
    pub(super) close_status: Option<Arc<Status>>,
    /// Whether our own nodes cannot grow any more either: the session is about to finish.
    pub(super) ending: bool,
}

impl Lifecycle {
    /// Whether the session is over.
    pub(super) const fn is_closed(&self) -> bool {
        matches!(
            self.phase,
            SessionPhase::Aborted(_) | SessionPhase::Finished
        )
    }

    /// The status with which the session was aborted, if it was.
    pub(super) const fn aborted(&self) -> Option<&Arc<Status>> {
        match &self.phase {
            SessionPhase::Aborted(status) => Some(status),
            _ => None,
        }
    }

    /// Fails with the status of an aborted session.
    pub(super) fn check_alive(&self) -> Result<(), Status> {
        let aborted = self.aborted();
        aborted.map_or(Ok(()), |status| Err(Status::clone(status)))
    }

    /// Emits an output for the shell, unless the session is over.
    pub(super) fn emit(&mut self, output: SessionOutput) {
        if !self.is_closed() {
            self.outputs.push_back(output);
        }
    }

    /// Reports an action that was never started. At the front, so that it comes before a close that it caused.
    pub(super) fn refused(&mut self, status: Arc<Status>) {
        // Without `emit`, which is silent once the session is over: the refusal may be what has ended it.
        self.outputs.push_front(SessionOutput::Refused(status));
    }

    /// Takes the next output.
    pub(super) fn poll(&mut self) -> Option<SessionOutput> {
        self.outputs.pop_front()
    }

    /// Aborts an unfinished session. Outputs that the shell has not taken are dropped: the state that they refer to no
    /// longer exists.
    pub(super) fn abort(&mut self, status: Arc<Status>) {
        self.phase = SessionPhase::Aborted(Arc::clone(&status));
        self.outputs.clear();
        self.outputs.push_back(SessionOutput::Close(Some(status)));
    }

    /// Ends the session without an error.
    pub(super) fn finish(&mut self) {
        // Before the phase changes: `emit` is silent afterwards.
        self.emit(SessionOutput::Close(None));
        self.phase = SessionPhase::Finished;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evergreen::Reason;

    #[test]
    fn ev_901_the_close_is_the_last_output_and_the_only_one() {
        let mut lifecycle = Lifecycle::default();
        lifecycle.emit(SessionOutput::Writable);
        lifecycle.abort(Arc::new(Status::new(Reason::Cancelled, "first")));
        lifecycle.emit(SessionOutput::Writable);
        assert!(matches!(
            lifecycle.poll(),
            Some(SessionOutput::Close(Some(status))) if status.message == "first"
        ));
        assert!(lifecycle.poll().is_none());
        let mut lifecycle = Lifecycle::default();
        lifecycle.emit(SessionOutput::Writable);
        lifecycle.finish();
        lifecycle.emit(SessionOutput::Resume);
        assert!(matches!(lifecycle.poll(), Some(SessionOutput::Writable)));
        assert!(matches!(lifecycle.poll(), Some(SessionOutput::Close(None))));
        assert!(lifecycle.poll().is_none());
    }
}
