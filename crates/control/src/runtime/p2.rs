//! The main channel in P2: `mid_process` with branches and splices (AI-501 to AI-508).

mod turn;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::steer::StepReport;
use serde::Deserialize;

use self::turn::{Ended, P2Live, StepInput};
use super::answer::{EMPTY_MASK, Label, SeqResult, SeqResults, SeqValue, StepAnswer};
use super::answer::{WireBranch, WireSplice};
use super::envelope::RequestError;
use super::pending::Pending;
use super::rows::{MaskType, P2Rows, Row};
use super::sequence::{Capabilities, ReturnedBranch, ReturnedSplice, Sequence};
use super::table::{
    Entry, Failure, LIST_MAX, OpError, StepClock, StepConfig, Table, check_ids, check_unique,
    controller_id,
};
use crate::wire::SharedRegion;

/// The sequences of an engine that speaks P2.
#[derive(Debug)]
pub(crate) struct P2<S> {
    table: Table<P2Live<S>>,
    config: StepConfig,
    capabilities: Capabilities,
    rows: P2Rows,
}

/// `mid_process`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ProcessRequest {
    ops: Vec<ProcessOp>,
    freed: Vec<u64>,
}

#[derive(Debug, Deserialize)]
struct ProcessOp {
    id: u64,
    /// The first op of a request.
    #[serde(default)]
    req_id: Option<String>,
    /// The first op of a branch.
    #[serde(default)]
    clone_id: Option<u64>,
    #[serde(default)]
    clone_idx: Option<u32>,
    #[serde(flatten)]
    input: StepInput,
}

impl<S: Sequence> P2<S> {
    pub(crate) fn new(config: StepConfig, capabilities: Capabilities, rows: P2Rows) -> Self {
        Self {
            table: Table::default(),
            config,
            capabilities,
            rows,
        }
    }

    /// See [`Table::fail`].
    pub(crate) fn fail(&mut self, ids: &[u64]) {
        self.table.fail(ids);
    }

    /// From now on rows are bits (AI-1002).
    pub(crate) fn use_bits(&mut self, logits: usize, masks: &SharedRegion) {
        if self.rows.are_bits() {
            return;
        }
        // They are never longer than those that fitted.
        if let Some(rows) = P2Rows::new(MaskType::Bool, self.config.vocabulary, logits, masks) {
            self.rows = rows;
        }
    }

    /// Binds, clones, and asks the listed sequences what happens next.
    ///
    /// # Errors
    /// The request is wrong; nothing was done (AI-305).
    pub(crate) fn mid_process(
        &mut self,
        request: ProcessRequest,
        pending: &Arc<Pending<S>>,
        masks: &SharedRegion,
        clock: StepClock<'_>,
    ) -> Result<StepAnswer, RequestError> {
        let ProcessRequest { ops, freed } = request;
        check_ids(ops.iter().map(|op| op.id))?;
        check_ids(ops.iter().filter_map(|op| op.clone_id))?;
        check_ids(freed.iter().copied())?;
        check_unique(ops.iter().map(|op| op.id))?;
        for op in &ops {
            op.input.check()?;
        }
        clock.pace.begin();
        // The rows of the last answer were valid until now (AI-236).
        self.rows.clear();
        let mut indices = HashSet::new();
        // Bound first, whatever the order of the list, so that a clone's parent may be bound in the same request.
        let bound: Vec<_> = ops.iter().map(|op| self.bind(op, pending)).collect();
        let refusals: Vec<_> = ops
            .iter()
            .zip(bound)
            .map(|(op, refused)| refused.or_else(|| self.admit(op, &mut indices)))
            .collect();
        let accepted = ops.iter().zip(&refusals);
        let accepted = accepted.filter(|(_, refused)| refused.is_none());
        let groups = fork_groups(accepted.map(|(op, _)| op));
        let mut ids = Vec::with_capacity(ops.len());
        for (op, refused) in ops.into_iter().zip(refusals) {
            if refused.is_none()
                && let Some(live) = self.table.live(op.id)
            {
                let parent = op.clone_id.unwrap_or(op.id);
                let group = groups.get(&parent).cloned();
                live.begin(op.id, op.input, group, clock.arrival);
            }
            ids.push((op.id, refused));
        }
        self.table
            .gather(clock, clock.arrival + self.config.step_time);
        let now = clock.pace.now();
        let mut ended: Vec<_> = ids
            .into_iter()
            .map(|(id, refused)| {
                (
                    id,
                    refused.map_or_else(|| self.end(id, now), OpEnd::Answered),
                )
            })
            .collect();
        share_rows(&mut ended, self.rows.free());
        let mut seqs = SeqResults::default();
        for (id, end) in ended {
            let result = match end {
                OpEnd::Answered(answer) => answer,
                OpEnd::Decided(decided) => self.write(id, decided, masks),
            };
            seqs.push(id, result);
        }
        for id in freed {
            self.table.entries.remove(&id);
        }
        Ok(StepAnswer::Process {
            seqs,
            rows: self.rows.layout(),
        })
    }

    /// Binds the instance of an op's request. Returns the answer of an op that cannot run.
    fn bind(&mut self, op: &ProcessOp, pending: &Pending<S>) -> Option<SeqResult> {
        let request = op.req_id.as_ref()?;
        if op.clone_id.is_some() || op.clone_idx.is_some() {
            return Some(self.refuse(op.id, Failure::op_error("both req_id and clone_id")));
        }
        if self.table.entries.contains_key(&op.id) {
            // The sequence that has this id goes on.
            return Some(Failure::worker(format!("duplicate id {}", op.id)).1);
        }
        let Some((mut sequence, member)) = pending.take(request) else {
            let refused = Failure::op_error(format!("invalid req_id {request}"));
            return Some(self.refuse(op.id, refused));
        };
        sequence.bind(controller_id(op.id));
        let live = P2Live::new(sequence, member);
        self.table.entries.insert(op.id, Entry::Live(live));
        None
    }

    /// Makes the clone of an op if it wants one. Returns the answer of an op that cannot run.
    fn admit(&mut self, op: &ProcessOp, indices: &mut HashSet<(u64, u32)>) -> Option<SeqResult> {
        let (parent, index) = match (op.clone_id, op.clone_idx) {
            (None, None) => {
                return match self.table.entries.get(&op.id) {
                    Some(Entry::Live(_)) => None,
                    Some(Entry::Failed(failure)) => Some(failure.answer(Label::Mid)),
                    None => Some(Failure::worker(format!("invalid id {}", op.id)).1),
                };
            }
            (Some(parent), Some(index)) => (parent, index),
            _ => {
                let refused = Failure::op_error("clone_id and clone_idx need each other");
                return Some(self.refuse(op.id, refused));
            }
        };
        if self.table.entries.contains_key(&op.id) {
            let message = format!("duplicate id {} (cloning {parent})", op.id);
            return Some(Failure::worker(message).1);
        }
        // No result has more branches than a request may have sequences.
        let forks = self.config.forks.min(LIST_MAX);
        let is_branch = (1..forks).contains(&(index as usize));
        if !is_branch || !indices.insert((parent, index)) {
            let refused =
                Failure::op_error(format!("invalid clone_idx {index} (cloning {parent})"));
            return Some(self.refuse(op.id, refused));
        }
        let cloned = match self.table.entries.get_mut(&parent) {
            None => Err(Failure::op_error(format!("invalid id {parent}"))),
            Some(Entry::Failed(failure)) => {
                Err(OpError::of((failure.clone(), failure.answer(Label::Mid))))
            }
            Some(Entry::Live(live)) => live.fork(parent, (op.id, index), &self.config),
        };
        match cloned {
            Ok(clone) => {
                self.table.entries.insert(op.id, Entry::Live(clone));
                None
            }
            Err(refused) => Some(self.refuse(op.id, refused)),
        }
    }

    /// Leaves a tombstone, so that later ops of the id are answered one by one; an id in use is not harmed.
    fn refuse(&mut self, id: u64, refused: OpError) -> SeqResult {
        let (failure, answer) = refused.into_parts();
        self.table
            .entries
            .entry(id)
            .or_insert(Entry::Failed(failure));
        answer
    }

    fn end(&mut self, id: u64, now: Instant) -> OpEnd {
        let Some(live) = self.table.live(id) else {
            // `admit` reports ids that are not live.
            return OpEnd::Answered(Failure::worker(format!("invalid id {id}")).1);
        };
        let decided = match live.end(&self.config, now) {
            Ok(Ended::Skips(answer)) => return OpEnd::Answered(answer),
            Ok(Ended::Decided { branches, report }) => allowed(&branches, self.capabilities)
                .map(|()| DecidedOp::new(branches, report))
                .map_err(Failure::op_error),
            Err(refused) => Err(refused),
        };
        match decided {
            Ok(decided) => OpEnd::Decided(decided),
            Err(refused) => OpEnd::Answered(self.fail_op(id, refused)),
        }
    }

    fn fail_op(&mut self, id: u64, refused: OpError) -> SeqResult {
        let (failure, answer) = refused.into_parts();
        self.table.entries.insert(id, Entry::Failed(failure));
        answer
    }

    /// Answers with what a callback decided, and writes its rows.
    fn write(&mut self, id: u64, decided: DecidedOp, masks: &SharedRegion) -> SeqResult {
        let written = decided
            .has_rows
            .then(|| self.branches(&decided.branches, masks));
        let Some((branches, was_empty)) = written.flatten() else {
            return self.fail_op(id, Failure::op_error("no free slots"));
        };
        let mut result = SeqResult::new(Some(SeqValue::Branches { branches }), decided.report);
        if was_empty {
            result.log(EMPTY_MASK);
        }
        result
    }

    /// Writes the rows of the branches. Returns them, and whether a mask was empty; `None`: they do not fit.
    fn branches(
        &mut self,
        branches: &[ReturnedBranch],
        masks: &SharedRegion,
    ) -> Option<(Vec<WireBranch>, bool)> {
        let first = self.rows.used();
        let mut shared: Vec<(*const _, usize)> = Vec::new();
        let mut was_empty = false;
        let mut encoded = Vec::with_capacity(branches.len());
        for branch in branches {
            let sample_mask = match &branch.mask {
                None => None,
                Some(mask) => {
                    let known = shared.iter().find(|(it, _)| *it == Arc::as_ptr(mask));
                    let index = known.map(|(_, index)| *index).or_else(|| {
                        let empty = mask.count() == 0;
                        was_empty |= empty;
                        let row = if empty {
                            Row::Only(self.config.eos)
                        } else {
                            Row::Mask(mask)
                        };
                        self.rows.push(masks, row)
                    });
                    let Some(index) = index else {
                        self.rows.truncate(first);
                        return None;
                    };
                    shared.push((Arc::as_ptr(mask), index));
                    Some(index)
                }
            };
            encoded.push(WireBranch {
                sample_mask,
                temperature: branch.temperature,
                splices: branch.splices.iter().map(wire_splice).collect(),
                wait: branch.wait.clone(),
            });
        }
        Some((encoded, was_empty))
    }
}

/// How an op ended, before rows are written.
#[derive(Debug)]
enum OpEnd {
    Answered(SeqResult),
    Decided(DecidedOp),
}

/// What a callback decided.
#[derive(Debug)]
struct DecidedOp {
    branches: Vec<ReturnedBranch>,
    report: StepReport,
    /// How many rows its branches need: those with the same mask share one.
    rows: usize,
    /// It gets them.
    has_rows: bool,
}

impl DecidedOp {
    fn new(branches: Vec<ReturnedBranch>, report: StepReport) -> Self {
        let masks = branches.iter().filter_map(|branch| branch.mask.as_ref());
        let rows = masks.map(Arc::as_ptr).collect::<HashSet<_>>().len();
        Self {
            branches,
            report,
            rows,
            has_rows: false,
        }
    }
}

/// Decides who gets rows if not all can. Those who need the fewest come first: so each sequence has one before any has a
/// second, and the forks of one sequence cost no other its step.
fn share_rows(ended: &mut [(u64, OpEnd)], free: usize) {
    let decided = ended.iter_mut().filter_map(|(_, end)| match end {
        OpEnd::Decided(decided) => Some(decided),
        OpEnd::Answered(_) => None,
    });
    let mut decided: Vec<_> = decided.collect();
    decided.sort_by_key(|it| it.rows);
    let mut left = free;
    for it in decided {
        it.has_rows = it.rows <= left;
        if it.has_rows {
            left -= it.rows;
        }
    }
}

fn wire_splice(splice: &ReturnedSplice) -> WireSplice {
    WireSplice {
        when_sampled: splice.when_sampled.clone(),
        backtrack: splice.backtrack,
        ff_tokens: splice.ff_tokens.clone(),
    }
}

/// Whether the engine can do what the branches ask for (AI-506).
fn allowed(branches: &[ReturnedBranch], capabilities: Capabilities) -> Result<(), String> {
    let refuse = |what: &str| Err(format!("{what} not enabled in this host"));
    if branches.len() > 1 && !capabilities.fork {
        return refuse("forking");
    }
    for branch in branches {
        // Where a token is sampled, the first that is removed is that one.
        let sampled = u32::from(branch.mask.is_some());
        for splice in &branch.splices {
            if splice.backtrack > sampled && !capabilities.backtrack {
                return refuse("backtracking");
            }
            let nothing = splice.backtrack <= sampled && splice.ff_tokens.is_empty();
            if !nothing && !capabilities.ff_tokens {
                return refuse("ff_tokens");
            }
        }
    }
    Ok(())
}

/// For each parent of clones: its id, and theirs at their indices. Of ops that were accepted, because a controller counts
/// on each of its siblings (AI-503). Where there is none of an index, the parent's id stands in its place.
fn fork_groups<'o>(accepted: impl Iterator<Item = &'o ProcessOp>) -> HashMap<u64, Vec<u32>> {
    let mut groups: HashMap<u64, Vec<u32>> = HashMap::new();
    for op in accepted {
        if let (Some(parent), Some(index)) = (op.clone_id, op.clone_idx) {
            let (group, index) = (groups.entry(parent).or_default(), index as usize);
            if group.len() <= index {
                group.resize(index + 1, controller_id(parent));
            }
            if let Some(place) = group.get_mut(index) {
                *place = controller_id(op.id);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests;
