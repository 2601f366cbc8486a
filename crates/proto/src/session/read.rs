//! Readers, as the shell uses them.
//!
//! Owns: opening, reading, parking and closing cursors. Refuses to know: wakers; the shell maps cursor ids to them.

use std::sync::Arc;

use super::cursor::{Cursor, Step};
use super::port::{ActionKey, CursorId, NodeKey, Read};
use super::work::{Refused, Work};
use super::{Phase, Session};
use crate::evergreen::Status;

impl Session {
    /// A reader of `node`'s content from its first item on (EV-302), on behalf of `reader` if an action reads.
    pub fn open(&mut self, node: NodeKey, reader: Option<ActionKey>) -> CursorId {
        let bound = reader
            .and_then(|reader| self.actions.get_mut(reader))
            .is_some_and(|entry| entry.opens(node));
        if !bound {
            self.store.bind_reader(node);
        }
        CursorId(self.cursors.insert(Cursor::new(node, reader)))
    }

    /// The next piece. After [`Read::Pending`] wait for [`super::Output::Ready`], after [`Read::Busy`] for the next turn
    /// ([`Session::begin_turn`]); after the end or a failure the
    /// answer stays the same. Reading may abort the session (`DEPTH_LIMIT`, `CYCLE`, `ACTION_CYCLE`).
    pub fn read(&mut self, id: CursorId) -> Read {
        if let Phase::Aborted(status) = &self.phase {
            return Read::Failed(Arc::clone(status));
        }
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return Read::End;
        };
        if let Some(status) = &cursor.failed {
            return Read::Failed(Arc::clone(status));
        }
        let over = self.phase == Phase::Finished;
        if cursor.parked.is_some() || cursor.starved && !over {
            return Read::Pending;
        }
        // Of a session that is over the rest is read at once: no time passes for it any more.
        let mut unbounded = Work::unlimited(self.work.turn());
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
            Step::Piece(piece) => {
                self.bytes_were_read();
                Read::Piece(piece)
            }
            Step::Reference(reference) => Read::Reference(reference),
            Step::Park(node) => self.park(id, node),
            Step::Pause(Refused::Turn) => Read::Busy,
            Step::Pause(Refused::Budget) => self.starve(id),
            Step::End => {
                self.bytes_were_read();
                Read::End
            }
            Step::Fail(status) => self.fail_read(id, status),
            Step::Abort(status) => Read::Failed(self.abort(status)),
        }
    }

    /// Closes a reader. Closing twice does nothing.
    pub fn close(&mut self, id: CursorId) {
        self.reader_gone(id);
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

    fn park(&mut self, id: CursorId, node: NodeKey) -> Read {
        if self.can_never_grow(node) {
            let status = self
                .cursors
                .get(id.0)
                .map(|cursor| self.incomplete(cursor.root));
            return status.map_or(Read::End, |status| self.fail_read(id, status));
        }
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.parked = Some(node);
            self.parked += 1;
            self.store.get_mut(node).waiters.push(id);
        }
        self.reader_parked();
        Read::Pending
    }

    pub(super) fn fail_read(&mut self, id: CursorId, status: Arc<Status>) -> Read {
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.failed = Some(Arc::clone(&status));
        }
        self.reader_gone(id);
        Read::Failed(status)
    }
}
