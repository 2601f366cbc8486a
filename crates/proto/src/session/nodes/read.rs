//! Reading: what a cursor finds, and which readers fail because nothing more can come (EV-109, EV-110, D-3).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use super::Nodes;
use crate::evergreen::{Reason, Status};
use crate::session::calls::unanswered;
use crate::session::graph::closure::Closure;
use crate::session::graph::{Graph, NodeProducer};
use crate::session::lifecycle::{Lifecycle, SessionPhase};
use crate::session::port::{ActionKey, CursorId, CursorRead, NodeKey, Side};
use crate::session::readers::budget::ReadStop;
use crate::session::readers::cursor::CursorStep;
use crate::session::readers::slice::SliceOverlap;
use crate::time::Time;

impl Nodes {
    /// Opens a reader of `node`'s content from its first item (EV-302); `reader` is the action that reads, if any.
    pub fn open(&mut self, node: NodeKey, reader: Option<ActionKey>) -> CursorId {
        self.graph.bind_reader(node, reader);
        self.readers.open(node, reader)
    }

    /// Returns the next piece. After [`CursorRead::Pending`] wait for [`crate::session::SessionOutput::Ready`], after
    /// [`CursorRead::Busy`] for the next turn ([`Self::begin_turn`]); after the end or a failure the result stays the
    /// same. Reading may abort the session (`DEPTH_LIMIT`, `CYCLE`, `ACTION_CYCLE`).
    pub fn read(&mut self, id: CursorId) -> CursorRead {
        if let Some(status) = self.lifecycle.aborted() {
            return CursorRead::Failed(Arc::clone(status));
        }
        let over = self.lifecycle.phase == SessionPhase::Finished;
        let cycles = self.search.incomplete;
        // Readers outlive a finished session: content that was received stays readable, an aborted one drops it.
        let step = self.readers.step(id, &mut self.graph, cycles, over);
        match step {
            None => CursorRead::Pending,
            Some(CursorStep::Piece(piece)) => {
                self.flow.reads = true;
                CursorRead::Piece(piece)
            }
            Some(CursorStep::Reference(reference)) => CursorRead::Reference(reference),
            Some(CursorStep::Park(node)) => self.park(id, node),
            Some(CursorStep::Pause(ReadStop::Turn)) => CursorRead::Busy,
            Some(CursorStep::Pause(ReadStop::Budget)) => {
                self.readers.starve(id, &mut self.lifecycle);
                CursorRead::Pending
            }
            Some(CursorStep::End) => {
                self.flow.reads = true;
                CursorRead::End
            }
            Some(CursorStep::Fail(status)) => self.fail_read(id, status),
            Some(CursorStep::Abort(status)) => CursorRead::Failed(self.abort(status)),
        }
    }

    /// Closes a reader. Closing twice does nothing.
    pub fn close(&mut self, id: CursorId) {
        let held = self.readers.close(id, &mut self.graph);
        self.lifetime.reader_ended(held, &mut self.graph);
    }

    /// Starts the next turn of the task that drives this session: readers may make more visits.
    pub const fn begin_turn(&mut self) {
        self.readers.budget.begin_turn();
    }

    /// Counts `bytes` more of the external content that were delivered to the reader. Returns which of them are
    /// selected, where only a byte range of a node is read (EV-740).
    ///
    /// # Errors
    /// `FLATTEN_LIMIT` if that exceeds the limit of one read (EV-306); the reader has failed then.
    pub fn count_reference(
        &mut self,
        id: CursorId,
        bytes: usize,
    ) -> Result<SliceOverlap, Arc<Status>> {
        let Some(cursor) = self.readers.get_mut(id) else {
            return Ok(SliceOverlap::all(bytes));
        };
        let counted = cursor.count(bytes, &self.graph);
        // Before a failure is handled: that leaves the path, and with it the range.
        let meant = cursor.meant(bytes);
        if let Err(status) = &counted {
            self.fail_read(id, Arc::clone(status));
        }
        counted.map(|()| meant)
    }

    /// The reader has read all of the external content, and continues after it.
    pub fn end_reference(&mut self, id: CursorId) {
        if let Some(cursor) = self.readers.get_mut(id) {
            cursor.pass_reference(&mut self.graph);
        }
    }

    /// The external content cannot be read: the reader fails, with this status and the position of the reference.
    pub fn fail_reference(&mut self, id: CursorId, status: &Status) -> Arc<Status> {
        let cursor = self.readers.get(id);
        let position = cursor.and_then(|cursor| cursor.reference(&self.graph));
        let mut status = status.clone();
        if let Some((node, seq, _)) = position {
            let id = &self.graph.get(node).id;
            status = status.with("node", id).with("seq", seq);
        }
        let status = Arc::new(status);
        self.fail_read(id, Arc::clone(&status));
        status
    }

    /// Refills the budget of visits and wakes the readers that wait for it.
    pub(in crate::session) fn refill(&mut self, now: Time) {
        let limits = &self.config.limits;
        self.readers.refill(limits, now, &mut self.lifecycle);
    }

    /// Fails every reader that waits for content that can no longer arrive.
    pub(in crate::session) fn fail_stuck_readers(&mut self) {
        let parked = self.readers.iter();
        let parked = parked.filter_map(|(id, cursor)| Some((id, cursor.parked?, cursor.root)));
        // Collected first, because failing a reader changes the table of readers.
        let stuck: Vec<(CursorId, NodeKey, NodeKey)> = parked
            .filter(|(_, node, _)| can_never_grow(*node, &self.graph, &self.lifecycle))
            .collect();
        // Readers of the same root get the same status, so it is computed once per root.
        let mut known: HashMap<NodeKey, Arc<Status>> = HashMap::new();
        // One budget for all: a thousand readers of one large graph would each search all of it.
        let mut visits = MISSING_VISITS;
        for (id, node, root) in stuck {
            let status = known.entry(root).or_insert_with(|| {
                incomplete(root, self.side, &self.graph, &self.lifecycle, &mut visits)
            });
            let status = Arc::clone(status);
            self.fail_parked(id, node, status);
        }
    }

    /// Fails the cursors of actions that only wait for each other's outputs (D-3). Before the half-close the peer may
    /// still cancel one of them, so that is no deadlock yet.
    pub(in crate::session) fn fail_deadlocked(&mut self) {
        if self.lifecycle.phase != SessionPhase::HalfClosed || self.readers.parked() == 0 {
            return;
        }
        for (id, node) in self.readers.deadlocked(&self.graph) {
            let name = &self.graph.get(node).id;
            // All of the set fail (EV-110): each of them waits for another.
            let message = format!(
                "actions wait for one another's outputs, here for node {name:?}; nothing more can come"
            );
            let status = Status::new(Reason::Deadlock, message).with("node", name);
            self.fail_parked(id, node, Arc::new(status));
        }
    }

    /// Fails the readers of these nodes with `status`.
    pub(in crate::session) fn fail_readers(&mut self, roots: &[NodeKey], status: &Arc<Status>) {
        let readers: Vec<(CursorId, Option<NodeKey>)> = self
            .readers
            .iter()
            .filter(|(_, cursor)| roots.contains(&cursor.root) && cursor.failed.is_none())
            .map(|(id, cursor)| (id, cursor.parked))
            .collect();
        for (id, parked) in readers {
            // A reader between two pieces is not parked: it meets the failure at its next read.
            match parked {
                Some(node) => self.fail_parked(id, node, Arc::clone(status)),
                None => {
                    self.fail_read(id, Arc::clone(status));
                }
            }
        }
    }

    fn park(&mut self, id: CursorId, node: NodeKey) -> CursorRead {
        if can_never_grow(node, &self.graph, &self.lifecycle) {
            // Not parked in the first place: after the end of input no event would wake it.
            let Some(root) = self.readers.get(id).map(|cursor| cursor.root) else {
                return CursorRead::End;
            };
            let mut visits = MISSING_VISITS;
            let status = incomplete(root, self.side, &self.graph, &self.lifecycle, &mut visits);
            return self.fail_read(id, status);
        }
        self.readers.park(id, node, &mut self.graph);
        self.flow.reads = true;
        CursorRead::Pending
    }

    fn fail_read(&mut self, id: CursorId, status: Arc<Status>) -> CursorRead {
        let held = self.readers.fail(id, Arc::clone(&status), &mut self.graph);
        self.lifetime.reader_ended(held, &mut self.graph);
        CursorRead::Failed(status)
    }

    fn fail_parked(&mut self, id: CursorId, node: NodeKey, status: Arc<Status>) {
        // Before the wake-up, so that the next read finds the failure.
        self.fail_read(id, status);
        self.readers
            .wake_failed(id, node, &mut self.graph, &mut self.lifecycle);
    }
}

/// Whether a node can receive no more content.
fn can_never_grow(node: NodeKey, graph: &Graph, lifecycle: &Lifecycle) -> bool {
    // Until the session is about to finish, actions of ours may still write.
    let ours = graph.get(node).owner.is_local();
    lifecycle.phase != SessionPhase::Open && (lifecycle.ending || !ours)
}

/// The error of a reader of `root` that cannot continue, with the missing nodes that are found within so many visits.
fn incomplete(
    root: NodeKey,
    side: Side,
    graph: &Graph,
    lifecycle: &Lifecycle,
    visits: &mut u32,
) -> Arc<Status> {
    // The peer's own reason for ending explains more than the list of what is missing.
    if let Some(status) = &lifecycle.close_status {
        return Arc::clone(status);
    }
    let was_asked_for = matches!(graph.get(root).owner, NodeProducer::Peer(Some(_)));
    let (reason, mut message) = match side {
        // The client did not leave its own input incomplete: it owes an answer.
        Side::Server if was_asked_for => return Arc::new(unanswered()),
        Side::Server => (
            Reason::IncompleteInput,
            "the input ended and is incomplete; missing:".to_owned(),
        ),
        Side::Client => (
            Reason::Truncated,
            "the stream ended without its final fragment; missing:".to_owned(),
        ),
    };
    let (mut missing, mut repeated) = (Vec::new(), None);
    // In reading order as far as that is known.
    for key in Closure::new(graph, [Some(root)], visits) {
        let node = graph.get(key);
        repeated = repeated.or_else(|| Some((&node.id, node.repeated?)));
        // Nodes of ours are not the peer's to send; if they never end, the reader waits for an action and not for the
        // peer.
        if missing.len() < MISSING_NAMED && !node.is_complete() && !node.owner.is_local() {
            missing.push(match node.highest() {
                Some(_) => format!("{}@{}", node.id, node.next_seq()),
                None => node.id.to_string(),
            });
        }
    }
    if missing.is_empty() && *visits == 0 {
        message.push_str(" more than could be searched");
    }
    for item in &missing {
        let _ = write!(message, " {item}");
    }
    // For a client that numbers wrongly.
    if let Some((node, seq)) = repeated {
        let _ = write!(
            message,
            "; of two different fragments of node {node:?} with seq {seq} the first counts: number them 0, 1, 2 …"
        );
    }
    let status = Status::new(reason, message);
    let first = missing.into_iter().next().unwrap_or_default();
    let id = &graph.get(root).id;
    Arc::new(status.with("node", id).with("value", first))
}

/// Number of missing items that an error names (EV-110).
const MISSING_NAMED: usize = 16;
/// Number of edges that the search for them follows.
const MISSING_VISITS: u32 = 10_000;
