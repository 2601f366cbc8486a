//! Cursor operations for the shell: open, read, close.

use std::sync::Arc;

use super::cursor::{CursorStep, TreeCursor};
use super::port::{ActionKey, CursorId, CursorRead, NodeKey};
use super::work::{ReadBudget, ReadStop};
use super::{SessionMachine, SessionPhase};
use crate::evergreen::Status;

impl SessionMachine {
    /// Opens a reader of `node`'s content from its first item (EV-302); `reader` is the action that reads, if any.
    pub fn open(&mut self, node: NodeKey, reader: Option<ActionKey>) -> CursorId {
        let bound = reader
            .and_then(|reader| self.actions.get_mut(reader))
            .is_some_and(|entry| entry.opens(node));
        if !bound {
            self.store.bind_reader(node);
        }
        CursorId(self.cursors.insert(TreeCursor::new(node, reader)))
    }

    /// Returns the next piece. After [`CursorRead::Pending`] wait for [`super::SessionOutput::Ready`], after
    /// [`CursorRead::Busy`] for the next turn ([`SessionMachine::begin_turn`]); after the end or a failure the result
    /// stays the same. Reading may abort the session (`DEPTH_LIMIT`, `CYCLE`, `ACTION_CYCLE`).
    pub fn read(&mut self, id: CursorId) -> CursorRead {
        if let SessionPhase::Aborted(status) = &self.phase {
            return CursorRead::Failed(Arc::clone(status));
        }
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return CursorRead::End;
        };
        if let Some(status) = &cursor.failed {
            return CursorRead::Failed(Arc::clone(status));
        }
        let over = self.phase == SessionPhase::Finished;
        if cursor.parked.is_some() || cursor.starved && !over {
            return CursorRead::Pending;
        }
        // A closed session is read without a budget: no more time passes for it, so the budget would never refill.
        let mut unbounded = ReadBudget::unlimited(self.work.turn());
        let work = if over { &mut unbounded } else { &mut self.work };
        let step = cursor.step(
            id,
            &mut self.store,
            &self.config.limits,
            self.search.incomplete,
            work,
        );
        if over {
            self.work.set_turn(unbounded.turn());
        }
        match step {
            CursorStep::Piece(piece) => {
                self.bytes_were_read();
                CursorRead::Piece(piece)
            }
            CursorStep::Reference(reference) => CursorRead::Reference(reference),
            CursorStep::Park(node) => self.park(id, node),
            CursorStep::Pause(ReadStop::Turn) => CursorRead::Busy,
            CursorStep::Pause(ReadStop::Budget) => self.starve(id),
            CursorStep::End => {
                self.bytes_were_read();
                CursorRead::End
            }
            CursorStep::Fail(status) => self.fail_read(id, status),
            CursorStep::Abort(status) => CursorRead::Failed(self.abort(status)),
        }
    }

    /// Closes a reader. Closing twice does nothing.
    pub fn close(&mut self, id: CursorId) {
        self.reader_closed(id);
        let Some(cursor) = self.cursors.remove(id.0) else {
            return;
        };
        if cursor.starved {
            self.starved.retain(|starved| *starved != id);
        }
        if let Some(node) = cursor.parked {
            self.parked -= 1;
            self.store
                .get_mut(node)
                .waiters
                .retain(|waiter| *waiter != id);
        }
    }

    fn park(&mut self, id: CursorId, node: NodeKey) -> CursorRead {
        if self.can_never_grow(node) {
            let status = self
                .cursors
                .get(id.0)
                .map(|cursor| self.incomplete(cursor.root));
            return status.map_or(CursorRead::End, |status| self.fail_read(id, status));
        }
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.parked = Some(node);
            self.parked += 1;
            self.store.get_mut(node).waiters.push(id);
        }
        self.reader_parked();
        CursorRead::Pending
    }

    pub(super) fn fail_read(&mut self, id: CursorId, status: Arc<Status>) -> CursorRead {
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.failed = Some(Arc::clone(&status));
        }
        self.reader_closed(id);
        CursorRead::Failed(status)
    }
}
