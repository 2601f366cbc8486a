//! The Evergreen session: a pure state machine for the nodes and actions that two peers share.
//!
//! Messages are encoding-neutral ([`WireMessage`]); the current time is an argument. The interface is of four kinds:
//!
//! ```text
//!   connection   handle(message), end_of_input, lost, returned ──►┌─────────┐──► next_message()   while the transport
//!   timers       tick(now)                                      ──►│ session │                     can take one
//!   nodes        nodes(): write, end, list, open, read, ..      ──►│         │──► poll() ─► output after every call
//!   actions      calls(): call, cancel, finish, fail, ..        ──►└─────────┘──► wake_at(now)     call tick then
//! ```
//!
//! After every call the driver (the shell) drains [`SessionMachine::poll`], asks [`SessionMachine::wake_at`] for the
//! next timer, and passes [`SessionMachine::next_message`] to the transport while the transport has room. No call
//! blocks, and none recurses over untrusted input.
//!
//! The work is done by small machines, each with its own state, in three layers. None knows the layer above it:
//!
//! ```text
//!   session    phase, timers (clock), back-pressure (flow)      adapter: other dialects' fragments in canonical form
//!     calls      the table of actions, reserved actions ── link: what a new connection needs
//!       nodes      graph: nodes, ids, edges, quota    readers: cursors, budget of visits
//!                  sender: the queue to the peer      lifetime: DROP and TTL      lifecycle: phase, outputs
//! ```

mod adapter;
mod calls;
mod clock;
mod flow;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod graph;
mod lifecycle;
mod lifetime;
mod link;
mod nodes;
mod port;
mod readers;
mod reference;
mod sender;
mod slab;

use std::sync::Arc;

use self::clock::Clock;
use self::flow::InboundFlow;
use self::lifecycle::SessionPhase;
use self::link::Link;
use crate::evergreen::{Action, NodeId, Reason, Status, WireMessage};
use crate::time::Time;

pub use self::adapter::PeerAdapter;
pub use self::calls::Calls;
pub use self::graph::release::RetentionPolicy;
pub use self::nodes::Nodes;
pub use self::port::{
    ActionKey, ActionRequest, ActionStart, CancelledBy, Config, CursorId, CursorRead, LeafEnd,
    LeafOrder, LeafPiece, NodeKey, SessionOutput, SessionStats, Side, WriteError,
};
pub use self::readers::slice::SliceOverlap;
pub use self::reference::{ExternalContent, Referenced};
pub use crate::evergreen::{MetadataMode, SessionLimits};

/// The session state machine; see the module documentation.
#[derive(Debug)]
pub struct SessionMachine {
    calls: Calls,
    inbound: InboundFlow,
    clock: Clock,
}

impl SessionMachine {
    /// Creates a session that begins at `now`. Allocates almost nothing until something is sent.
    #[must_use]
    pub fn new(side: Side, config: Config, now: Time) -> Self {
        let link = Link::new(side, config.resume);
        Self {
            calls: Calls::new(Nodes::new(side, config, now), link),
            inbound: InboundFlow::default(),
            clock: Clock::new(now),
        }
    }

    /// The nodes: for writers and readers.
    pub const fn nodes(&mut self) -> &mut Nodes {
        &mut self.calls.nodes
    }

    /// The actions: for shells that run the peer's actions, and for callers of the peer.
    pub const fn calls(&mut self) -> &mut Calls {
        &mut self.calls
    }

    /// Handles one message of the peer: fragments, then actions, then reserved actions (D-26).
    ///
    /// # Errors
    /// The rule that the message breaks. The session is aborted then; [`SessionOutput::Close`] carries the same status.
    pub fn handle(&mut self, message: WireMessage, now: Time) -> Result<(), Arc<Status>> {
        // A half-closed peer that reconnects still has to report what it has received.
        let returning = self.calls.link.is_returning() && self.is_half_closed();
        let incoming = *self.phase() == SessionPhase::Open || returning;
        // Not an error: messages that were on their way cross a close or the loss of the connection.
        if !incoming || self.is_down() {
            return Ok(());
        }
        self.clock.received(now);
        let (limit, max) = ("max_message_bytes", self.config().limits.max_message_bytes);
        Status::within(Reason::MessageTooLarge, limit, message.wire_bytes, max)
            .map_err(|status| self.abort(status))?;
        // Before the message: its searches and drops share what is granted here (D-27).
        self.grant_visits(now);
        let outcome = self.apply(message, now);
        if outcome.is_ok() {
            // A TTL of 0 takes effect at the end of the message that sets it (EV-912).
            self.calls.nodes.expire(now);
        }
        self.settle_visits();
        if let Err(status) = outcome {
            self.abort(status);
        }
        // A failed action aborts the session itself (EV-107).
        self.aborted()
            .map_or(Ok(()), |status| Err(Arc::clone(status)))
    }

    /// Sorts the actions of a message into the order in which they are applied (D-26): for a shell that passes a message
    /// of many in parts.
    pub fn sort_actions(actions: &mut [Action]) {
        // A stable sort: actions of the same rank keep their order.
        actions.sort_by_key(|action| calls::reserved::rank(&action.name));
    }

    /// The peer has half-closed (EV-109). Readers that wait for content that can no longer arrive fail (EV-110).
    pub fn end_of_input(&mut self, now: Time) {
        if self.is_down() {
            // A peer that has half-closed does not reconnect (EV-940).
            self.abort(Status::new(Reason::Cancelled, "the connection was lost"));
        } else if *self.phase() == SessionPhase::Open {
            self.clock.received(now);
            self.calls.half_close();
        }
    }

    /// The peer closes its side with a status, after it has sent everything it had to send (EV-960). Content that was
    /// received completely stays readable; readers of the rest fail with `status`.
    pub fn close_with_status(&mut self, status: impl Into<Arc<Status>>, now: Time) {
        if *self.phase() == SessionPhase::Open {
            // Before the end of input, whose failing readers take it instead of INCOMPLETE_INPUT or TRUNCATED.
            self.calls.nodes.lifecycle.close_status = Some(status.into());
            self.end_of_input(now);
        }
    }

    /// The connection is lost: nothing is dropped, and nothing is sent until there is a new one (EV-940). Without
    /// resume the session ends (EV-109).
    pub fn lost(&mut self, now: Time) {
        self.clock.disconnected();
        self.calls.lost(now);
    }

    /// There is a new connection. Nothing but RESUME is sent on it until the peer has reported what it has received;
    /// the client asks first.
    pub fn returned(&mut self, now: Time) {
        self.calls.returned(now);
    }

    /// The peer does not know the session any more. If every action is answered and we have half-closed, the session
    /// ends normally; otherwise it ends with `status`.
    pub fn fail_resume(&mut self, status: Status) {
        // The server ends such a session by itself, and may have forgotten it before the client has seen its end.
        let answered = self.calls.unfinished() == 0 && self.calls.link.has_half_closed();
        if answered && *self.phase() == SessionPhase::Open {
            self.calls.half_close();
        } else {
            self.abort(status);
        }
    }

    /// Makes this session end with its connection: nothing is retained for another one. Call it before anything is
    /// written.
    pub fn without_resume(&mut self) {
        self.calls.link.without_resume();
        let nodes = &mut self.calls.nodes;
        nodes.config.resume = false;
        // `evergreen-retain: unread` was overruled by resume and holds again.
        nodes.graph.retain = nodes.config.retention();
    }

    /// The client of the new connection may need another order than that of the last one (EV-941). Call it before
    /// [`Self::returned`].
    pub const fn set_leaf_order(&mut self, order: LeafOrder) {
        let nodes = &mut self.calls.nodes;
        nodes.config.leaf_order = order;
        nodes.sender.set_leaf_order(order);
    }

    /// Whether the shell should stop reading from the connection until [`SessionOutput::Resume`]. It still watches the
    /// connection for a close.
    pub fn inbound_paused(&mut self) -> bool {
        // A resuming peer is never paused: the session waits for what it has not sent yet.
        let flows = *self.phase() == SessionPhase::Open && self.calls.link.is_up();
        flows && self.inbound.pauses(&mut self.calls)
    }

    /// Returns the next message for the peer, of at most `coalesce_bytes` unless a single fragment is larger. Call it
    /// when the transport can accept one: messages that are not taken stay in the bounded queue, and producers wait
    /// (EV-803).
    pub fn next_message(&mut self, now: Time) -> Option<WireMessage> {
        if self.is_closed() {
            return None;
        }
        if !self.calls.link.is_up() {
            return self.calls.link.take_hello();
        }
        let message = self.calls.nodes.next_message();
        // After the message was taken: whether another one waits decides about the stall timer.
        self.clock.sent(now, self.has_message());
        // This message may have been the last that a half-close or the end of the session waits for.
        self.calls.after_sending();
        message
    }

    /// Whether [`Self::next_message`] may return a message.
    #[must_use]
    pub fn has_message(&self) -> bool {
        let sendable = if self.calls.link.is_up() {
            self.calls.nodes.sender.is_sendable()
        } else {
            self.calls.link.has_hello()
        };
        sendable && !self.is_closed()
    }

    /// Returns the next output for the shell to act on.
    pub fn poll(&mut self) -> Option<SessionOutput> {
        // First: an abort by the nodes leaves actions in the table, which would continue their reads below.
        self.calls.forget_if_aborted();
        if self.calls.nodes.readers.take_own_ready() {
            self.calls.read_leaves();
        }
        if self.inbound.continues(&mut self.calls) {
            self.calls.nodes.lifecycle.emit(SessionOutput::Resume);
        }
        self.calls.nodes.lifecycle.poll()
    }

    /// When to call [`Self::tick`] next, if nothing else happens before. Ask after every call. Causes no output: the
    /// shell has woken the transport before it asks.
    pub fn wake_at(&mut self, now: Time) -> Option<Time> {
        if self.is_closed() {
            return None;
        }
        // Timers are started and stopped here, because every call may change what they depend on.
        self.anchor(now);
        let calls = &self.calls;
        let limits = &calls.nodes.config.limits;
        let times = [
            self.clock.next(limits),
            calls.table.deadline().map(|(deadline, _)| deadline),
            calls.nodes.config.deadline,
            calls.nodes.lifetime.next_expiry(),
            calls.link.deadline(limits.resume_grace),
            calls.nodes.readers.wake_at(limits, now),
        ];
        times.into_iter().flatten().min()
    }

    /// Handles timers that are due at `now` (EV-111, EV-803, EV-912, EV-940, EV-950).
    pub fn tick(&mut self, now: Time) {
        if self.is_closed() {
            return;
        }
        self.anchor(now);
        let past = |at: Option<Time>| at.is_some_and(|at| now >= at);
        let grace = self.config().limits.resume_grace;
        // What ends the session comes before what fails single actions: their errors could not be sent any more.
        if past(self.calls.link.deadline(grace)) {
            let message = "the connection was lost, and the client did not reconnect in time";
            self.abort(Status::new(Reason::Cancelled, message));
            return;
        }
        if past(self.config().deadline) {
            let message = "the session was not finished in the time allowed";
            self.abort(Status::new(Reason::Deadline, message));
            return;
        }
        self.calls.handle_deadlines(now);
        if self.is_closed() {
            return;
        }
        // An expiry searches as a DROP does, also without a message.
        self.grant_visits(now);
        self.calls.nodes.expire(now);
        self.settle_visits();
        if let Some((reason, message)) = self.clock.due(now, &self.config().limits) {
            self.abort(Status::new(reason, message));
        }
    }

    /// Ends the session with `status`; the first abort wins and its status is returned. All state is dropped, and
    /// [`SessionOutput::Close`] is the last output.
    pub fn abort(&mut self, status: impl Into<Arc<Status>>) -> Arc<Status> {
        self.calls.abort(status)
    }

    /// The status with which the session was aborted, if it was.
    #[must_use]
    pub const fn aborted(&self) -> Option<&Arc<Status>> {
        self.calls.nodes.lifecycle.aborted()
    }

    /// Whether the session is over.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.calls.nodes.lifecycle.is_closed()
    }

    /// Whether the peer has half-closed (EV-109).
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        *self.phase() == SessionPhase::HalfClosed
    }

    /// Whether the connection is lost.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.calls.link.is_down()
    }

    /// Returns the id of a node; `None` once the node is removed from the graph, or the session is aborted.
    #[must_use]
    pub fn id(&self, node: NodeKey) -> Option<&NodeId> {
        let graph = &self.calls.nodes.graph;
        graph.has(node).then(|| &graph.get(node).id)
    }

    /// Whether a node is complete (EV-208).
    #[must_use]
    pub fn is_complete(&self, node: NodeKey) -> bool {
        self.calls.nodes.is_complete(node)
    }

    /// How an action ended a leaf that it wrote; `None` for a leaf that its sender wrote itself.
    #[must_use]
    pub fn written(&self, node: NodeKey) -> Option<LeafEnd> {
        let known = self.calls.nodes.graph.get(node);
        // Answers of actions on either side: a prompt may contain both (D-51).
        known.owner.action()?;
        Some(if known.cut {
            LeafEnd::Cut
        } else {
            LeafEnd::Whole
        })
    }

    /// Retained bytes, as the quota counts them (EV-801).
    #[must_use]
    pub const fn retained_bytes(&self) -> u64 {
        self.calls.nodes.graph.quota.retained()
    }

    /// The counters of this session (EV-904).
    #[must_use]
    pub const fn stats(&self) -> SessionStats {
        self.calls.nodes.stats
    }

    /// The session's configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.calls.nodes.config
    }

    const fn phase(&self) -> &SessionPhase {
        &self.calls.nodes.lifecycle.phase
    }

    /// Applies the parts of a message in their order.
    fn apply(&mut self, message: WireMessage, now: Time) -> Result<(), Status> {
        // A payload smaller than half of its message is copied, so that it does not pin the receive buffer (EV-805).
        let copy_below = (message.wire_bytes / 2).max(COPY_BELOW_BYTES);
        for fragment in message.fragments {
            self.calls.nodes.stats.received(&fragment);
            // One at a time: the seq that a fragment is given depends on the fragments before it.
            let adapter = self.config().adapter;
            match adapter.receive(fragment, &mut self.calls.nodes.graph) {
                Some(fragment) => self.calls.take(fragment, copy_below)?,
                None => self.calls.nodes.stats.discarded += 1,
            }
        }
        let mut actions = message.actions;
        Self::sort_actions(&mut actions);
        for action in actions {
            // A failed action aborts the session itself (EV-107).
            if !self.is_closed() {
                self.calls.serve(action, now)?;
            }
        }
        Ok(())
    }

    /// Refills the budget of visits, and grants the searches of what follows their share of it.
    fn grant_visits(&mut self, now: Time) {
        let nodes = &mut self.calls.nodes;
        nodes.refill(now);
        nodes
            .search
            .refill(&nodes.config.limits, &mut nodes.readers.budget);
    }

    /// Charges what the searches have used.
    fn settle_visits(&mut self) {
        let nodes = &mut self.calls.nodes;
        nodes.search.settle(&mut nodes.readers.budget);
    }

    /// Starts and stops timers according to the state that the last calls left.
    fn anchor(&mut self, now: Time) {
        if self.calls.link.is_up() {
            // An action's time to be answered runs only while there is a connection to answer over.
            self.calls.table.start_time_limits(now);
        }
        // An action that only waits does not keep the session from being idle: nothing comes of it without a message.
        let waiting = self.calls.nodes.readers.waiting();
        let (any_runs, has_message) = (self.calls.unfinished() > waiting, self.has_message());
        self.clock.anchor(now, any_runs, has_message);
    }
}

/// Payloads below this size are copied out of the receive buffer (EV-805): such a small copy is cheaper than reference
/// counting.
const COPY_BELOW_BYTES: usize = 4096;

#[cfg(test)]
mod tests;
