//! The Evergreen session: a pure state machine for the nodes and actions that two peers share.
//!
//! Messages are encoding-neutral ([`WireMessage`]); the current time is an argument.
//!
//! ```text
//!   handle(message) ──►┌────────────────────────────┐──► next_message()      when the transport can take one
//!   tick(now)       ──►│ nodes ◄─ cursors  actions  │──► poll() ─► Output    after whatever was called
//!   write, end, ..  ──►└────────────────────────────┘──► wake_at(now)        call tick then
//!
//!   open ──end_of_input──► half-closed ──all finished, all sent──► closed
//!     └───────────── violation, limit, abort, deadline ─────────────► closed (with a status)
//! ```
//!
//! After every call the driver (the shell) drains [`SessionMachine::poll`], asks [`SessionMachine::wake_at`] for the
//! next timer, and passes [`SessionMachine::next_message`] to the transport while the transport has room. No call
//! blocks, and none recurses over untrusted input.

mod accept;
mod actions;
mod ask;
mod clock;
mod closure;
mod copy_arena;
mod cursor;
mod dropping;
mod flow;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod half_close;
mod leaves;
mod outbound;
mod port;
mod produce;
mod read;
mod received_seqs;
mod reference;
mod release;
mod reserved;
mod resume;
mod search;
mod serve;
mod slab;
mod slice;
mod store;
mod ttl;
mod work;

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use self::accept::{Acceptance, AcceptanceRules};
use self::actions::Actions;
use self::clock::Clock;
use self::cursor::TreeCursor;
use self::flow::InboundFlow;
use self::leaves::InputLeaf;
use self::outbound::SessionOutbound;
use self::resume::{LinkState, Resume};
use self::search::Search;
use self::slab::Slab;
use self::store::{NodeProducer, Store};
use self::ttl::Ttls;
use self::work::ReadBudget;
use crate::evergreen::{Fragment, NodeId, Payload, Reason, Status, WireMessage};
use crate::time::Time;

pub use self::port::{
    ActionKey, ActionRequest, ActionStart, CancelledBy, Config, CursorId, CursorRead, LeafEnd,
    LeafPiece, NodeKey, SessionOutput, SessionStats, Side, WriteError,
};
pub use self::reference::{ExternalContent, Referenced};
pub use self::release::RetentionPolicy;
pub use self::slice::SliceOverlap;
pub use crate::evergreen::{MetadataMode, SessionLimits};

/// The lifecycle of a session.
#[derive(Clone, Debug, PartialEq)]
enum SessionPhase {
    Open,
    /// The peer sends nothing more (EV-109).
    HalfClosed,
    /// All actions are finished and all output is sent; content that was received can still be read.
    Finished,
    /// Aborted with the status of the first abort; all state is dropped (EV-901).
    Aborted(Arc<Status>),
}

/// The session state machine; see the module documentation.
#[derive(Debug)]
pub struct SessionMachine {
    side: Side,
    config: Config,
    phase: SessionPhase,
    store: Store,
    search: Search,
    cursors: Slab<TreeCursor>,
    /// Number of parked cursors.
    parked: usize,
    actions: Actions,
    /// Inputs of reserved actions that are not fully read yet.
    leaves: Vec<InputLeaf>,
    /// Whether one of `leaves` can make progress.
    leaves_ready: bool,
    /// Whether one of `leaves` continues in the next turn.
    leaves_paused: bool,
    /// Budget of visits that readers and searches share.
    work: ReadBudget,
    /// Readers that wait for that budget to refill.
    starved: Vec<CursorId>,
    ttls: Ttls,
    /// State for resuming the session on a new connection; `None` if the session cannot be resumed.
    resume: Option<Box<Resume>>,
    outbound: SessionOutbound,
    inbound: InboundFlow,
    clock: Clock,
    events: VecDeque<SessionOutput>,
    stats: SessionStats,
    /// Whether new actions of the peer are refused (EV-960).
    draining: bool,
    /// Whether our own nodes cannot grow any more either.
    ending: bool,
    /// Whether the caller has finished sending; reset once [`SessionOutput::HalfClose`] is emitted.
    sending_finished: bool,
    /// The status with which the peer closed its side, if it sent one.
    close_status: Option<Arc<Status>>,
}

impl SessionMachine {
    /// Creates a session that begins at `now`. Allocates almost nothing until something is sent.
    #[must_use]
    pub fn new(side: Side, config: Config, now: Time) -> Self {
        Self {
            side,
            phase: SessionPhase::Open,
            store: Store::new(&config),
            search: Search::default(),
            cursors: Slab::new(),
            parked: 0,
            actions: Actions::new(),
            leaves: Vec::new(),
            leaves_ready: false,
            leaves_paused: false,
            work: ReadBudget::new(&config.limits, now),
            starved: Vec::new(),
            ttls: Ttls::default(),
            resume: config.resume.then(|| Box::new(Resume::new())),
            outbound: SessionOutbound::default(),
            inbound: InboundFlow::default(),
            clock: Clock::new(now),
            events: VecDeque::new(),
            stats: SessionStats::default(),
            draining: false,
            ending: false,
            sending_finished: false,
            close_status: None,
            config,
        }
    }

    /// Handles one message of the peer: fragments, then actions, then reserved actions (D-26).
    ///
    /// # Errors
    /// The rule that the message breaks. The session is aborted then; [`SessionOutput::Close`] carries the same status.
    pub fn handle(&mut self, message: WireMessage, now: Time) -> Result<(), Arc<Status>> {
        // A half-closed peer that reconnects still has to report what it has received.
        let returning = matches!(self.line(), LinkState::Returning(_));
        let incoming =
            self.phase == SessionPhase::Open || self.phase == SessionPhase::HalfClosed && returning;
        if !incoming || self.is_down() {
            return Ok(());
        }
        self.clock.received(now);
        let (value, max) = (
            message.wire_bytes as u64,
            self.config.limits.max_message_bytes as u64,
        );
        if value > max {
            let status = Status::limit(Reason::MessageTooLarge, "max_message_bytes", value, max);
            return Err(self.abort(status));
        }
        self.refill_work(now);
        self.search.refill(&self.config.limits, &self.work);
        // A payload smaller than half of its message is copied, so that it does not pin the receive buffer (EV-805).
        let copy_below = (message.wire_bytes / 2).max(COPY_BELOW_BYTES);
        let mut fragments = message.fragments.into_iter();
        let mut outcome = fragments.try_for_each(|fragment| self.take(fragment, copy_below));
        let mut actions = message.actions;
        // A stable sort: actions of the same rank keep their order.
        actions.sort_by_key(|action| reserved::rank(&action.name));
        for action in actions {
            // A failed action aborts the session itself (EV-107).
            if outcome.is_ok() && !self.is_closed() {
                outcome = self.serve(action, now);
            }
        }
        if outcome.is_ok() {
            self.expire(now);
        }
        self.search.settle(&mut self.work);
        match (outcome, &self.phase) {
            (Err(status), _) => Err(self.abort(status)),
            (Ok(()), SessionPhase::Aborted(status)) => Err(Arc::clone(status)),
            (Ok(()), _) => Ok(()),
        }
    }

    /// The peer has half-closed (EV-109). Readers that wait for content that can no longer arrive fail (EV-110).
    pub fn end_of_input(&mut self, now: Time) {
        if self.is_down() {
            // A peer that has half-closed does not reconnect (EV-940).
            self.abort_for(Reason::Cancelled, "the connection was lost");
        } else if self.phase == SessionPhase::Open {
            self.clock.received(now);
            self.half_close();
        }
    }

    /// The peer closes its side with a status, after it has sent everything it had to send (EV-960). Content that was
    /// received completely stays readable; readers of the rest fail with `status`.
    pub fn close_with_status(&mut self, status: impl Into<Arc<Status>>, now: Time) {
        if self.phase == SessionPhase::Open {
            self.close_status = Some(status.into());
            self.end_of_input(now);
        }
    }

    /// Ends the session with `status`; the first abort wins and its status is returned. All state is dropped, and
    /// [`SessionOutput::Close`] is the last output.
    pub fn abort(&mut self, status: impl Into<Arc<Status>>) -> Arc<Status> {
        match &self.phase {
            SessionPhase::Aborted(first) => return Arc::clone(first),
            SessionPhase::Finished => return status.into(),
            SessionPhase::Open | SessionPhase::HalfClosed => {}
        }
        let status = status.into();
        self.phase = SessionPhase::Aborted(Arc::clone(&status));
        self.store = Store::new(&self.config);
        self.search = Search::default();
        self.cursors = Slab::new();
        self.actions = Actions::new();
        self.leaves = Vec::new();
        self.leaves_paused = false;
        self.starved = Vec::new();
        self.ttls = Ttls::default();
        self.outbound = SessionOutbound::default();
        self.parked = 0;
        self.events.clear();
        self.events
            .push_back(SessionOutput::Close(Some(Arc::clone(&status))));
        status
    }

    /// Returns the next output for the shell to act on.
    pub fn poll(&mut self) -> Option<SessionOutput> {
        if self.leaves_ready {
            self.read_leaves();
        }
        self.events.pop_front()
    }

    /// Returns the next message for the peer, of at most `coalesce_bytes` unless a single fragment is larger. Call it
    /// when the transport can accept one: messages that are not taken stay in the bounded queue, and producers wait
    /// (EV-803).
    pub fn next_message(&mut self, now: Time) -> Option<WireMessage> {
        if !matches!(self.phase, SessionPhase::Open | SessionPhase::HalfClosed) {
            return None;
        }
        if self.line() != LinkState::Up {
            return self.hello();
        }
        let coalesce = self.config.coalesce;
        let message = self.outbound.message(
            &mut self.store,
            &self.config.limits,
            coalesce,
            &mut self.stats,
        );
        self.clock.sent(now, self.has_message());
        self.after_sending();
        message
    }

    /// Whether [`Self::next_message`] may return a message.
    #[must_use]
    pub fn has_message(&self) -> bool {
        let sendable = if self.line() == LinkState::Up {
            self.outbound.is_sendable()
        } else {
            self.has_hello()
        };
        sendable && !self.is_closed()
    }

    /// Returns the node with this id; creates it if the id is not known yet.
    ///
    /// # Errors
    /// `BAD_ID`, `NODE_LIMIT` or `RETAINED_LIMIT`, without aborting the session; or the status of an aborted session.
    pub fn node(&mut self, id: &str) -> Result<NodeKey, Status> {
        if let SessionPhase::Aborted(status) = &self.phase {
            return Err(Status::clone(status));
        }
        let limits = Arc::clone(&self.config.limits);
        self.store.mention(id, &limits)
    }

    /// Returns the id of a node; `None` once the node is removed from the store, or the session is aborted.
    #[must_use]
    pub fn id(&self, node: NodeKey) -> Option<&NodeId> {
        self.store.has(node).then(|| &self.store.get(node).id)
    }

    /// Whether a node is complete (EV-208).
    #[must_use]
    pub fn is_complete(&self, node: NodeKey) -> bool {
        self.store.get(node).is_complete()
    }

    /// The status with which the session was aborted, if it was.
    #[must_use]
    pub const fn aborted(&self) -> Option<&Arc<Status>> {
        match &self.phase {
            SessionPhase::Aborted(status) => Some(status),
            _ => None,
        }
    }

    /// Whether the session is over.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(
            self.phase,
            SessionPhase::Aborted(_) | SessionPhase::Finished
        )
    }

    /// Whether the peer has half-closed (EV-109).
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        self.phase == SessionPhase::HalfClosed
    }

    /// Retained bytes, as the quota counts them (EV-801).
    #[must_use]
    pub const fn retained_bytes(&self) -> u64 {
        self.store.retained()
    }

    /// Number of unfinished actions, the peer's and ours.
    #[must_use]
    pub const fn unfinished(&self) -> usize {
        self.actions.len()
    }

    /// The counters of this session (EV-904).
    #[must_use]
    pub const fn stats(&self) -> SessionStats {
        self.stats
    }

    /// The session's configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Which side this is.
    #[must_use]
    pub const fn side(&self) -> Side {
        self.side
    }

    fn take(&mut self, mut fragment: Fragment, copy_below: usize) -> Result<(), Status> {
        self.stats.fragments_in += 1;
        let payload = fragment
            .chunk
            .as_ref()
            .and_then(|chunk| chunk.payload.as_ref());
        self.stats.bytes_in += payload.map_or(0, Payload::len) as u64;
        if self.config.capabilities.lax_seq {
            let Some(seq) = self.store.lax_seq(&fragment) else {
                self.stats.discarded += 1;
                return Ok(());
            };
            fragment.seq = seq;
        }
        let seq = u32::try_from(fragment.seq).unwrap_or_default();
        let lists = !fragment.children.is_empty();
        let rules = AcceptanceRules {
            limits: &self.config.limits,
            mode: self.config.metadata,
            references: self.config.references,
            copy_below,
            joins: self.config.capabilities.joins,
            mixes: self.config.capabilities.mixes,
        };
        let accepted = self.store.accept(fragment, &rules)?;
        let key = match accepted {
            Acceptance::Duplicate => {
                self.stats.duplicates += 1;
                return Ok(());
            }
            Acceptance::Discarded => {
                self.stats.discarded += 1;
                return Ok(());
            }
            Acceptance::Buffered(key) | Acceptance::Grown(key) | Acceptance::Complete(key) => key,
        };
        if lists {
            self.look_for_cycles(key, seq)?;
            self.inbound.closures_changed();
        }
        if !matches!(accepted, Acceptance::Buffered(_)) {
            self.wake(key);
        }
        if let NodeProducer::Peer(Some(action)) = self.store.get(key).owner {
            self.is_answered(action);
            if matches!(accepted, Acceptance::Complete(_)) {
                self.output_complete(action);
            }
        }
        Ok(())
    }

    fn look_for_cycles(&mut self, parent: NodeKey, seq: u32) -> Result<(), Status> {
        let Some(piece) = self.store.get(parent).piece(seq) else {
            return Ok(());
        };
        let children: SmallVec<[NodeKey; 4]> = piece.children().into();
        self.search.edges(
            parent,
            &children,
            &mut self.store,
            &self.actions,
            &self.config.limits,
        )
    }

    /// Wakes the readers that wait for this node, because it has grown.
    fn wake(&mut self, key: NodeKey) {
        if self.store.get(key).waiters.is_empty() {
            return;
        }
        for cursor in std::mem::take(&mut self.store.get_mut(key).waiters) {
            self.ready(cursor);
        }
    }

    /// Marks a parked cursor as ready; its waiter entry is already removed.
    fn ready(&mut self, id: CursorId) {
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return;
        };
        let cursor_is_ours = cursor.ours;
        if cursor.parked.take().is_some() {
            self.parked -= 1;
        }
        if let Some(reader) = cursor.reader {
            self.actions.set_waiting(reader, false);
        }
        if cursor_is_ours {
            self.leaves_ready = true;
        } else {
            self.emit(SessionOutput::Ready(id));
        }
    }

    /// Handles the completion of an output of an action that we called.
    fn output_complete(&mut self, action: ActionKey) {
        let Some(entry) = self.actions.get_mut(action) else {
            return;
        };
        entry.incomplete = entry.incomplete.saturating_sub(1);
        if entry.incomplete == 0 {
            self.actions.remove(action);
            self.inbound.closures_changed();
            self.emit(SessionOutput::Done(action));
        }
    }

    /// Emits an output for the shell, unless the session is closed.
    fn emit(&mut self, output: SessionOutput) {
        if !self.is_closed() {
            self.events.push_back(output);
        }
    }

    /// Aborts because of a limit or rule that was found outside of `handle`.
    fn abort_for(&mut self, reason: Reason, message: &str) {
        self.abort(Status::new(reason, message));
    }
}

/// Payloads below this size are copied out of the receive buffer (EV-805): such a small copy is cheaper than reference
/// counting.
const COPY_BELOW_BYTES: usize = 4096;

#[cfg(test)]
mod tests;
