//! The main channel in P1: `post_pre_process` and `mid_process` (AI-401 to AI-441).

mod turn;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::steer::Token;
use serde::Deserialize;

use self::turn::{MidRow, P1Live};
use super::answer::{Label, SeqResult, SeqResults, StepAnswer};
use super::envelope::RequestError;
use super::pending::Pending;
use super::rows::{P1Rows, Row};
use super::sequence::Sequence;
use super::table::{
    Entry, Failure, OpError, StepClock, StepConfig, Table, check_ids, check_tokens, check_unique,
    controller_id,
};
use crate::wire::SharedRegion;

/// The sequences of an engine that speaks P1.
#[derive(Debug)]
pub(crate) struct P1<S> {
    table: Table<P1Live<S>>,
    config: StepConfig,
    rows: P1Rows,
}

/// `post_pre_process`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PostPreRequest {
    post_ops: Vec<PostOp>,
    pre_ops: Vec<PreOp>,
    freed: Vec<u64>,
}

/// What was appended to a sequence.
#[derive(Debug, Deserialize)]
struct PostOp {
    id: u64,
    #[serde(default)]
    tokens: Vec<Token>,
    #[serde(default)]
    backtrack: u32,
}

/// Binds the instance of a request to an id.
#[derive(Debug, Deserialize)]
struct PreOp {
    id: u64,
    req_id: String,
}

/// `mid_process`.
#[derive(Debug, Deserialize)]
pub(crate) struct MidRequest {
    #[serde(default)]
    ops: Vec<MidOp>,
}

#[derive(Debug, Deserialize)]
struct MidOp {
    id: u64,
    #[serde(default)]
    clone_id: Option<u64>,
}

impl<S: Sequence> P1<S> {
    pub(crate) fn new(config: StepConfig) -> Self {
        Self {
            table: Table::default(),
            config,
            rows: P1Rows::new(config.vocabulary),
        }
    }

    /// See [`Table::fail`].
    pub(crate) fn fail(&mut self, ids: &[u64]) {
        self.table.fail(ids);
    }

    /// From now on rows are bits (AI-1002).
    pub(crate) fn use_bits(&mut self, logits: usize) {
        if !self.rows.are_bits() {
            self.rows = P1Rows::of_bits(self.config.vocabulary, logits);
        }
    }

    /// Reports to the controllers what was appended, and asks each of them about the next step.
    ///
    /// # Errors
    /// The request is wrong; nothing was done (AI-305).
    pub(crate) fn post_pre_process(
        &mut self,
        request: PostPreRequest,
        pending: &Arc<Pending<S>>,
        clock: StepClock<'_>,
    ) -> Result<StepAnswer, RequestError> {
        self.check(&request, pending)?;
        clock.pace.begin();
        for op in request.pre_ops {
            self.bind(op, pending);
        }
        let mut posts: HashMap<u64, PostOp> =
            request.post_ops.into_iter().map(|op| (op.id, op)).collect();
        let (mut post_seqs, mut pre_seqs) = (SeqResults::default(), SeqResults::default());
        for (id, entry) in &mut self.table.entries {
            let post = posts.remove(id);
            match entry {
                Entry::Live(live) => {
                    let post = post.map(|op| (op.backtrack, op.tokens));
                    live.begin(*id, post, clock.arrival);
                }
                Entry::Failed(failure) => {
                    if post.is_some() {
                        post_seqs.push(*id, failure.answer(Label::Post));
                    }
                    pre_seqs.push(*id, failure.answer(Label::Pre));
                }
            }
        }
        self.table
            .gather(clock, clock.arrival + self.config.pre_wait());
        if self.table.lives().any(P1Live::is_awaited_for_mid) {
            let until = clock.arrival + self.config.mid_wait();
            self.table
                .gather_of(clock, until, P1Live::is_awaited_for_mid);
        }
        let now = clock.pace.now();
        for (id, entry) in &mut self.table.entries {
            let Entry::Live(live) = entry else { continue };
            let turn = live.end(&self.config, now);
            if let Some(post) = turn.post {
                post_seqs.push(*id, post);
            }
            if let Some(pre) = turn.pre {
                pre_seqs.push(*id, pre);
            }
            if let Some(failure) = turn.failure {
                *entry = Entry::Failed(failure);
            }
        }
        // Last: a freed sequence has its results in this answer (AI-401).
        for id in request.freed {
            self.table.entries.remove(&id);
        }
        Ok(StepAnswer::PostPre {
            post_seqs,
            pre_seqs,
        })
    }

    fn check(&self, request: &PostPreRequest, pending: &Pending<S>) -> Result<(), RequestError> {
        check_ids(request.post_ops.iter().map(|op| op.id))?;
        check_ids(request.pre_ops.iter().map(|op| op.id))?;
        check_ids(request.freed.iter().copied())?;
        check_unique(request.post_ops.iter().map(|op| op.id))?;
        check_unique(request.pre_ops.iter().map(|op| op.id))?;
        for op in &request.post_ops {
            check_tokens(&op.tokens)?;
            if !self.table.entries.contains_key(&op.id) {
                return Err(RequestError::user(format!("invalid id {}", op.id)));
            }
        }
        let mut requests = HashSet::new();
        for PreOp { id, req_id } in &request.pre_ops {
            if self.table.entries.contains_key(id) {
                return Err(RequestError::user(format!("duplicate id {id}")));
            }
            if !requests.insert(req_id) || !pending.is_ready(req_id) {
                return Err(RequestError::user(format!("invalid req_id {req_id}")));
            }
        }
        Ok(())
    }

    fn bind(&mut self, op: PreOp, pending: &Pending<S>) {
        let entry = match pending.take(&op.req_id) {
            Some((mut sequence, member)) => {
                sequence.bind(controller_id(op.id));
                Entry::Live(P1Live::new(sequence, member))
            }
            // It was there when the request was checked, but its time was over just then.
            None => Entry::Failed(Failure::Worker(format!("invalid req_id {}", op.req_id))),
        };
        self.table.entries.insert(op.id, entry);
    }

    /// Makes the clones, and asks the listed sequences for masks.
    ///
    /// # Errors
    /// The request is wrong; nothing was done (AI-305).
    pub(crate) fn mid_process(
        &mut self,
        request: &MidRequest,
        masks: &SharedRegion,
        clock: StepClock<'_>,
    ) -> Result<StepAnswer, RequestError> {
        let ops = &request.ops;
        check_ids(ops.iter().map(|op| op.id))?;
        check_ids(ops.iter().filter_map(|op| op.clone_id))?;
        check_unique(ops.iter().map(|op| op.id))?;
        if !self.rows.fit(masks, ops.len()) {
            return Err(RequestError::user("shm size too small"));
        }
        clock.pace.begin();
        // All clones before any callback, so that each has its parent's state of now (AI-412).
        let refusals: Vec<_> = ops.iter().map(|op| self.admit(op)).collect();
        let groups = fork_groups(ops);
        for (op, refused) in ops.iter().zip(&refusals) {
            if refused.is_none()
                && let Some(live) = self.table.live(op.id)
            {
                let parent = op.clone_id.unwrap_or(op.id);
                live.begin_mid(op.id, groups.get(&parent).cloned().unwrap_or_default());
            }
        }
        self.table
            .gather(clock, clock.arrival + self.config.mid_wait());
        let now = clock.pace.now();
        let mut seqs = SeqResults::default();
        for (index, (op, refused)) in ops.iter().zip(refusals).enumerate() {
            let (result, row) = match refused {
                Some(refused) => (refused, MidRow::All),
                None => self.end_mid(op.id, now),
            };
            // Every row is written: those of the last step would be added a second time (AI-231).
            self.write(masks, index, &row);
            seqs.push(op.id, result);
        }
        Ok(StepAnswer::Mid {
            seqs,
            num_seqs: ops.len(),
            rows: self.rows.layout(),
        })
    }

    fn end_mid(&mut self, id: u64, now: Instant) -> (SeqResult, MidRow) {
        match self.table.entries.get_mut(&id) {
            Some(Entry::Live(live)) => {
                let turn = live.end_mid(&self.config, now);
                if let Some(failure) = turn.failure {
                    self.table.entries.insert(id, Entry::Failed(failure));
                }
                (turn.result, turn.row)
            }
            Some(Entry::Failed(failure)) => (failure.answer(Label::Mid), MidRow::All),
            // `admit` reports ids that are not bound.
            None => (Failure::worker(format!("invalid id {id}")).1, MidRow::All),
        }
    }

    fn write(&self, masks: &SharedRegion, index: usize, row: &MidRow) {
        let row = match row {
            MidRow::All => Row::All,
            MidRow::None => Row::None,
            MidRow::End => Row::Only(self.config.eos),
            MidRow::Only(token) => Row::Only(*token),
            MidRow::Mask(mask) => Row::Mask(mask),
        };
        self.rows.write(masks, index, row);
    }

    /// Makes the clone of an op if it wants one. Returns the answer of an op that cannot run.
    fn admit(&mut self, op: &MidOp) -> Option<SeqResult> {
        let Some(parent) = op.clone_id else {
            return match self.table.entries.get(&op.id) {
                Some(Entry::Live(_)) => None,
                Some(Entry::Failed(failure)) => Some(failure.answer(Label::Mid)),
                None => Some(Failure::worker(format!("invalid id {}", op.id)).1),
            };
        };
        if self.table.entries.contains_key(&op.id) {
            // The sequence that has this id goes on; only the clone is refused (AI-413).
            let message = format!("duplicate id {} (cloning {parent})", op.id);
            return Some(Failure::worker(message).1);
        }
        let cloned = match self.table.entries.get_mut(&parent) {
            None => Err(Failure::op_error(format!("invalid id {parent}"))),
            Some(Entry::Failed(failure)) => {
                Err(OpError::of((failure.clone(), failure.answer(Label::Mid))))
            }
            Some(Entry::Live(live)) => live.fork(parent, op.id, &self.config),
        };
        let (entry, answer) = match cloned {
            Ok(clone) => (Entry::Live(clone), None),
            // A tombstone: later ops of this id are answered one by one and do not fail whole requests.
            Err(refused) => {
                let (failure, answer) = refused.into_parts();
                (Entry::Failed(failure), Some(answer))
            }
        };
        self.table.entries.insert(op.id, entry);
        answer
    }
}

/// For each parent the ids of all ops that come from it, itself included, in order (AI-412).
fn fork_groups(ops: &[MidOp]) -> HashMap<u64, Vec<u32>> {
    let mut groups: HashMap<u64, Vec<u32>> = HashMap::new();
    for op in ops {
        let group = groups.entry(op.clone_id.unwrap_or(op.id)).or_default();
        group.push(controller_id(op.id));
    }
    groups
}

#[cfg(test)]
mod tests;
