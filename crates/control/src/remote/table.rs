//! [`RemoteTable`]: the sequences that one runtime process steers, what they ask for, and what it has answered.
//!
//! ```text
//!   ask ─► Queued ── flush ──► Ready ── next_request ──► Sent ── take_results ──► outcome ── poll
//! ```
//!
//! Pure: one message at a time goes out (`next_request`) and its answer comes back (`take_results`); the times are given.
//!
//! A clone is made by its first op, from the state that its parent has when that op arrives. So the clones of a sequence
//! travel with its next op at the latest, whether the engine has asked for them or not; what they answer is kept until it
//! does. In P1 `pre` runs for every live sequence in each exchange; what it answers unasked is kept as well.

mod entry;
mod p1;
mod p2;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Appended, StepReport, StepWaker};
use sapwood_proto::time::Time;

use self::entry::{AskState, SequencePlace, TableEntry};
use super::numbers::{CountedSequence, RemoteNumbers};
use super::reply::{CallResult, ReplyError, StepResults};
use super::request::MainRequest;
use crate::host::{CallFailure, Returned};
use crate::module::Abi;
use crate::runtime::LIST_MAX;
use crate::steer::add_report;

/// The sequences of one runtime process.
pub(super) struct RemoteTable {
    dialect: Abi,
    /// Ops of one request, for which the region of masks has rows.
    ops_max: usize,
    numbers: Arc<RemoteNumbers>,
    entries: BTreeMap<u64, TableEntry>,
    last_id: u64,
    queued_since: Option<Time>,
    /// An entry may be [`AskState::Ready`].
    ready: bool,
    /// Ids that the runtime does not know to be gone.
    freed: Vec<u64>,
    freed_since: Option<Time>,
    sent: Option<SentRequest>,
    /// Requests whose instance no sequence was ever bound to.
    abandoned: Vec<String>,
    lost: Option<CallFailure>,
}

/// The request that is being answered.
struct SentRequest {
    ids: Vec<u64>,
    /// The instances that it binds.
    bound: Vec<String>,
    freed: Vec<u64>,
    /// Every sequence that the runtime has meanwhile.
    live: Vec<u64>,
}

/// Whom to wake, without the lock that guards the table.
pub(super) type Wakers = Vec<Arc<dyn StepWaker>>;

impl RemoteTable {
    /// A table of a runtime that speaks `dialect`.
    pub(super) fn new(dialect: Abi, ops_max: usize, numbers: Arc<RemoteNumbers>) -> Self {
        Self {
            dialect,
            ops_max,
            numbers,
            entries: BTreeMap::new(),
            last_id: 0,
            queued_since: None,
            ready: false,
            freed: Vec::new(),
            freed_since: None,
            sent: None,
            abandoned: Vec::new(),
            lost: None,
        }
    }

    pub(super) const fn dialect(&self) -> Abi {
        self.dialect
    }

    /// Adds the sequence of an instance.
    pub(super) fn insert(&mut self, request: String, waker: Arc<dyn StepWaker>) -> u64 {
        self.add(SequencePlace::Pending(request), waker)
    }

    /// Adds a clone of a sequence; `index` is its number among the clones of this fork.
    pub(super) fn fork(&mut self, parent: u64, index: u32) -> Option<u64> {
        let of = self.entries.get(&parent)?;
        let (waker, watched) = (Arc::clone(&of.waker), of.watched);
        // What its parent was not told yet is true of the clone as well.
        let happened = of.happened.clone();
        let id = self.add(SequencePlace::Clone { parent, index }, waker);
        if let Some(entry) = self.entries.get_mut(&id) {
            (entry.happened, entry.watched) = (happened, watched);
        }
        Some(id)
    }

    fn add(&mut self, place: SequencePlace, waker: Arc<dyn StepWaker>) -> u64 {
        self.last_id += 1;
        let entry = TableEntry::new(place, waker, CountedSequence::new(&self.numbers));
        self.entries.insert(self.last_id, entry);
        self.last_id
    }

    /// Keeps what the sequence and its clones print and write, for their reports.
    pub(super) fn watch(&mut self, id: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.watched = true;
        }
    }

    /// Notes what was done to a sequence, for its next op. `false`: that is more than an op may have, which would cost every
    /// sequence of its request (AI-305).
    #[must_use]
    pub(super) fn happened(&mut self, id: u64, appended: Appended<'_>) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else {
            return true;
        };
        let Appended {
            backtrack,
            tokens,
            sampled,
        } = appended;
        entry.happened.add(backtrack, tokens, sampled);
        entry.forget_mid();
        entry.happened.tokens.len() <= LIST_MAX
    }

    /// Asks for the next step of a sequence (P1).
    pub(super) fn ask_pre(&mut self, id: u64, now: Time) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.pre == AskState::None
            && entry.pre_result.is_none()
        {
            entry.pre = AskState::Queued;
            self.queued_since.get_or_insert(now);
        }
    }

    /// Asks for what to sample.
    pub(super) fn ask_mid(&mut self, id: u64, now: Time) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        // A clone may have an answer already.
        let wanted = match entry.mid {
            AskState::None => entry.mid_result.is_none(),
            AskState::Sent => entry.mid_is_stale,
            AskState::Queued | AskState::Ready => false,
        };
        if wanted {
            entry.mid = AskState::Queued;
            self.queued_since.get_or_insert(now);
        }
    }

    /// Everything that was asked for may be sent. Returns whether that is anything.
    pub(super) fn flush(&mut self) -> bool {
        if self.queued_since.take().is_none() {
            return false;
        }
        for entry in self.entries.values_mut() {
            for ask in [&mut entry.pre, &mut entry.mid] {
                if *ask == AskState::Queued {
                    *ask = AskState::Ready;
                }
            }
        }
        self.ready = true;
        true
    }

    /// Whether anything may be asked soon.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The answer to [`RemoteTable::ask_pre`]; in P1 also one that nobody asked for.
    pub(super) fn poll_pre(&mut self, id: u64) -> Option<CallResult> {
        if let Some(lost) = &self.lost {
            return Some(Err(lost.clone()));
        }
        self.entries.get_mut(&id)?.pre_result.take()
    }

    /// The answer to [`RemoteTable::ask_mid`].
    pub(super) fn poll_mid(&mut self, id: u64) -> Option<CallResult> {
        if let Some(lost) = &self.lost {
            return Some(Err(lost.clone()));
        }
        self.entries.get_mut(&id)?.mid_result.take()
    }

    /// Why the runtime is gone, if it is.
    pub(super) const fn lost(&self) -> Option<&CallFailure> {
        self.lost.as_ref()
    }

    /// What was printed and written since the last call.
    pub(super) fn take_report(&mut self, id: u64) -> StepReport {
        let entry = self.entries.get_mut(&id);
        entry.map_or_else(StepReport::default, |entry| {
            std::mem::take(&mut entry.report)
        })
    }

    /// The sequence has ended.
    pub(super) fn free(&mut self, id: u64, now: Time) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.dropped = true;
            entry.pre = AskState::None;
        }
        self.sweep(now);
    }

    /// Removes sequences that nobody steers by and no clone waits for.
    fn sweep(&mut self, now: Time) {
        if self.lost.is_some() {
            self.entries.retain(|_, entry| !entry.dropped);
            return;
        }
        // Clones have larger ids than their parents, so one pass from the end removes whole families.
        let dropped: Vec<u64> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.dropped)
            .map(|(id, _)| *id)
            .collect();
        for id in dropped.into_iter().rev() {
            if self.has_clones(id) {
                continue;
            }
            match self.entries.remove(&id).map(|entry| entry.place) {
                Some(SequencePlace::Live) => {
                    self.freed.push(id);
                    self.freed_since.get_or_insert(now);
                }
                Some(SequencePlace::Pending(request)) => self.abandoned.push(request),
                Some(SequencePlace::Clone { .. }) | None => {}
            }
        }
    }

    fn has_clones(&self, id: u64) -> bool {
        self.entries.range(id + 1..).any(
            |(_, entry)| matches!(entry.place, SequencePlace::Clone { parent, .. } if parent == id),
        )
    }

    /// Instances that the runtime may drop.
    pub(super) fn take_abandoned(&mut self) -> Vec<String> {
        std::mem::take(&mut self.abandoned)
    }

    /// When [`RemoteTable::next_request`] has something; `None`: not before something is asked.
    pub(super) fn due(&self) -> Option<Time> {
        if self.sent.is_some() || self.lost.is_some() {
            return None;
        }
        if self.ready {
            return Some(Time::ZERO);
        }
        let queued = self.queued_since.map(|since| since + FLUSH_AFTER);
        let freed = self.freed_since.map(|since| since + FREE_AFTER);
        [queued, freed].into_iter().flatten().min()
    }

    /// The next message, if it is time for one. [`RemoteTable::take_results`] or [`RemoteTable::refused`] follows.
    pub(super) fn next_request(&mut self, now: Time) -> Option<MainRequest> {
        if self.due()? > now {
            return None;
        }
        if self
            .queued_since
            .is_some_and(|since| since + FLUSH_AFTER <= now)
        {
            self.flush();
        }
        let frees = self
            .freed_since
            .is_some_and(|since| since + FREE_AFTER <= now);
        let request = match self.dialect {
            Abi::P1 => self.next_p1(frees),
            Abi::P2 => self.next_p2(frees),
        };
        let Some((request, freed)) = request else {
            self.ready = false;
            return None;
        };
        if self.freed.is_empty() {
            self.freed_since = None;
        }
        let live = self.entries.iter();
        let live = live.filter(|(_, entry)| entry.place == SequencePlace::Live);
        self.sent = Some(SentRequest {
            ids: request.ids(),
            bound: request.bound(),
            freed,
            live: live.map(|(id, _)| *id).collect(),
        });
        Some(request)
    }

    /// The sequences whose results the answer has.
    pub(super) fn sent_live(&self) -> &[u64] {
        self.sent.as_ref().map_or(&[], |sent| &sent.live)
    }

    /// Takes what the runtime answered.
    pub(super) fn take_results(&mut self, results: StepResults, now: Time) -> Wakers {
        self.sent = None;
        let mut woken = Wakers::new();
        for (id, report) in results.reports {
            if let Some(entry) = self.entries.get_mut(&id)
                && entry.watched
            {
                add_report(&mut entry.report, report);
            }
        }
        for (id, result) in results.post {
            self.take_post(id, result, &mut woken);
        }
        for (id, result) in results.pre {
            self.take_pre(id, result, now, &mut woken);
        }
        for (id, result) in results.mid {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.take_mid(result, &mut woken);
            }
        }
        for entry in self.entries.values_mut() {
            if entry.pre == AskState::Sent || entry.mid == AskState::Sent {
                let text = "the runtime did not answer for this sequence";
                entry.fail(CallFailure::new(ErrorReason::BAD_RESULT, text), &mut woken);
            }
        }
        // A clone that was waited for may be there now.
        self.sweep(now);
        woken
    }

    /// The runtime refused the request as a whole: that costs the sequences that it lists. `false`: it lists none, so
    /// there is nobody whose fault it could be.
    pub(super) fn refused(&mut self, error: &ReplyError, now: Time) -> (bool, Wakers) {
        let Some(sent) = self.sent.take() else {
            return (false, Wakers::new());
        };
        let mut woken = Wakers::new();
        let text = format!("the runtime refused a step: {}", error.text);
        for id in &sent.ids {
            if let Some(entry) = self.entries.get_mut(id) {
                let failure = CallFailure::new(ErrorReason::BAD_RESULT, text.clone());
                entry.fail(failure, &mut woken);
            }
        }
        // Nothing was done (AI-305), so these are still there, and those are not bound: nobody else would drop them.
        self.abandoned.extend(sent.bound);
        if !sent.freed.is_empty() {
            self.freed.extend(sent.freed);
            self.freed_since.get_or_insert(now);
        }
        (!sent.ids.is_empty(), woken)
    }

    /// The runtime is gone: every sequence ends with this failure.
    pub(super) fn lose(&mut self, failure: CallFailure) -> Wakers {
        self.lost = Some(failure);
        self.sent = None;
        let mut woken = Wakers::new();
        for entry in self.entries.values() {
            add_waker(&mut woken, &entry.waker);
        }
        woken
    }
}

/// Sequences of one engine have one waker.
fn add_waker(woken: &mut Wakers, waker: &Arc<dyn StepWaker>) {
    if !woken.iter().any(|known| Arc::ptr_eq(known, waker)) {
        woken.push(Arc::clone(waker));
    }
}

/// The result that ends a sequence in P1.
const STOP: Returned = Returned::Pre {
    num_forks: 0,
    suspend: false,
    ff_tokens: Vec::new(),
    wait: None,
};

/// Asks are sent at the latest after this time, should the engine not say that they are complete.
const FLUSH_AFTER: Duration = Duration::from_millis(2);
/// Freed sequences are reported alone after this time (AI-854).
const FREE_AFTER: Duration = Duration::from_millis(50);
