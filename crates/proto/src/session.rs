//! The Evergreen session: the state that two peers share, as a pure state machine.
//!
//! Messages go in and come out wire-neutral ([`WireMessage`]); time goes in as an argument.
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
//! After every call the shell drains [`SessionMachine::poll`], asks [`SessionMachine::wake_at`], and lets the transport take
//! [`SessionMachine::next_message`] while it has room. No call blocks, and none recurses over untrusted input.

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
mod live;
mod outbound;
pub mod peer;
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
mod shared;
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

pub use self::live::{Live, Wakers};
pub use self::port::{
    ActionKey, ActionRequest, ActionStart, CancelledBy, Config, CursorId, CursorRead, LeafEnd,
    LeafPiece, NodeKey, SessionOutput, SessionStats, Side, WriteError,
};
pub use self::reference::{ExternalContent, Referenced};
pub use self::release::RetentionPolicy;
pub use self::shared::SharedSession;
pub use self::slice::SliceOverlap;
pub use crate::evergreen::{MetadataMode, SessionLimits};

/// Whether the session still takes anything.
#[derive(Clone, Debug, PartialEq)]
enum SessionPhase {
    Open,
    /// The peer sends nothing more (EV-109).
    HalfClosed,
    /// Everything was finished and sent; what was read can still be read.
    Finished,
    /// The first abort; everything is dropped (EV-901).
    Aborted(Arc<Status>),
}

/// The machine. See the module's page.
#[derive(Debug)]
pub struct SessionMachine {
    side: Side,
    config: Config,
    phase: SessionPhase,
    store: Store,
    search: Search,
    cursors: Slab<TreeCursor>,
    /// How many cursors are parked.
    parked: usize,
    actions: Actions,
    /// Inputs of reserved actions that are still to come.
    leaves: Vec<InputLeaf>,
    /// Whether one of them may go on.
    leaves_ready: bool,
    /// Whether one of them goes on with the next turn.
    leaves_paused: bool,
    /// What readers and searches may still do.
    work: ReadBudget,
    /// Readers that wait for more of that.
    starved: Vec<CursorId>,
    ttls: Ttls,
    /// What is remembered for a connection that comes back.
    resume: Option<Box<Resume>>,
    outbound: SessionOutbound,
    inbound: InboundFlow,
    clock: Clock,
    events: VecDeque<SessionOutput>,
    stats: SessionStats,
    /// Whether new actions of the peer are refused (EV-960).
    draining: bool,
    /// Whether not even our own nodes can grow any more.
    ending: bool,
    /// Whether we have said that we send nothing more.
    sending_finished: bool,
    /// Why the peer sends nothing more, if it said so.
    close_status: Option<Arc<Status>>,
}

impl SessionMachine {
    /// A session that begins now. Allocates next to nothing until something is sent.
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

    /// Takes in one message of the peer: fragments, then actions, then reserved actions (D-26).
    ///
    /// # Errors
    /// The rule that the message breaks. The session is aborted then, [`SessionOutput::Close`] says so as well.
    pub fn handle(&mut self, message: WireMessage, now: Time) -> Result<(), Arc<Status>> {
        // Who comes back after its last word has still to say what it has.
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
        // What is less than half of a message does not pin it in memory (EV-805).
        let copy_below = (message.wire_bytes / 2).max(COPY_BELOW_BYTES);
        let mut fragments = message.fragments.into_iter();
        let mut outcome = fragments.try_for_each(|fragment| self.take(fragment, copy_below));
        let mut actions = message.actions;
        // Stable: those of the same rank keep their order.
        actions.sort_by_key(|action| reserved::rank(&action.name));
        for action in actions {
            // A failed action aborts on its own (EV-107).
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

    /// The peer sends nothing more (EV-109). Readers of what can no longer come fail (EV-110).
    pub fn end_of_input(&mut self, now: Time) {
        if self.is_down() {
            // Who has said its last word does not come back (EV-940).
            self.abort_for(Reason::Cancelled, "the connection was lost");
        } else if self.phase == SessionPhase::Open {
            self.clock.received(now);
            self.half_close();
        }
    }

    /// The peer leaves in good order and says why, with everything sent that it had to send (EV-960). What has come
    /// whole stays readable; readers of the rest fail with `status`.
    pub fn close_with_status(&mut self, status: impl Into<Arc<Status>>, now: Time) {
        if self.phase == SessionPhase::Open {
            self.close_status = Some(status.into());
            self.end_of_input(now);
        }
    }

    /// Ends the session with `status`; the first abort wins and is returned. Everything is dropped, and
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

    /// The next thing for the shell to do.
    pub fn poll(&mut self) -> Option<SessionOutput> {
        if self.leaves_ready {
            self.read_leaves();
        }
        self.events.pop_front()
    }

    /// The next message for the peer, of at most `coalesce_bytes` unless a single fragment is larger. Call it when
    /// the transport can take one: what is not taken stays in the bounded queue, and producers wait (EV-803).
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

    /// Whether [`Self::next_message`] may give one.
    #[must_use]
    pub fn has_message(&self) -> bool {
        let sendable = if self.line() == LinkState::Up {
            self.outbound.is_sendable()
        } else {
            self.has_hello()
        };
        sendable && !self.is_closed()
    }

    /// The node with this id, mentioned by this call if it was not known.
    ///
    /// # Errors
    /// `BAD_ID`, `NODE_LIMIT` or `RETAINED_LIMIT`, and nothing is aborted; or the status of an aborted session.
    pub fn node(&mut self, id: &str) -> Result<NodeKey, Status> {
        if let SessionPhase::Aborted(status) = &self.phase {
            return Err(Status::clone(status));
        }
        let limits = Arc::clone(&self.config.limits);
        self.store.mention(id, &limits)
    }

    /// The id of a node; `None` once it is forgotten, or the session aborted.
    #[must_use]
    pub fn id(&self, node: NodeKey) -> Option<&NodeId> {
        self.store.has(node).then(|| &self.store.get(node).id)
    }

    /// Whether a node is complete (EV-208).
    #[must_use]
    pub fn is_complete(&self, node: NodeKey) -> bool {
        self.store.get(node).is_complete()
    }

    /// How the session was aborted, if it was.
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

    /// Whether the peer has said its last word (EV-109).
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        self.phase == SessionPhase::HalfClosed
    }

    /// Bytes held, as the retained quota counts them (EV-801).
    #[must_use]
    pub const fn retained_bytes(&self) -> u64 {
        self.store.retained()
    }

    /// Unfinished actions, the peer's and ours.
    #[must_use]
    pub const fn unfinished(&self) -> usize {
        self.actions.len()
    }

    /// What was counted so far (EV-904).
    #[must_use]
    pub const fn stats(&self) -> SessionStats {
        self.stats
    }

    /// How the session was configured.
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

    /// A node has grown: its waiting readers are woken.
    fn wake(&mut self, key: NodeKey) {
        if self.store.get(key).waiters.is_empty() {
            return;
        }
        for cursor in std::mem::take(&mut self.store.get_mut(key).waiters) {
            self.ready(cursor);
        }
    }

    /// A parked cursor may go on; its waiter entry is gone already.
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

    /// An output of an action that we asked for is complete.
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

    /// Tells the shell something, unless its last word was said.
    fn emit(&mut self, output: SessionOutput) {
        if !self.is_closed() {
            self.events.push_back(output);
        }
    }

    /// Aborts for a limit or rule found outside of `handle`.
    fn abort_for(&mut self, reason: Reason, message: &str) {
        self.abort(Status::new(reason, message));
    }
}

/// Payloads below this are copied out of the receive buffer (EV-805); copying so little costs less than keeping count.
const COPY_BELOW_BYTES: usize = 4096;

#[cfg(test)]
mod tests;
