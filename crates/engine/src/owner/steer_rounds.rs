//! [`SteerRounds`]: when steerers are called in a step, and what follows from `pre`.
//!
//! `pre` is called before the batch is planned, because it may fork or force tokens; `mid` starts before the decode
//! call and is collected after it, so that the mask is computed while the model computes (AI-811).

use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::CHOICES_MAX;
use sapwood_proto::steer::{Pre, SteerFailure, Token};
use sapwood_proto::time::Time;

use super::requests::Requests;
use super::steering::check_splice;
use crate::api::FinishReason;
use crate::scheduler::SequenceKey;

/// The poll interval of a steerer while there is no other work (AI-813).
pub(super) const MIN_WAIT: Duration = Duration::from_millis(1);
/// Steps in a row in which all sequences of a request may be suspended.
const SUSPENDED_STEPS_MAX: u32 = 3;

/// Calls the steerers of running sequences.
#[derive(Debug, Default)]
pub(super) struct SteerRounds {
    /// Buffer that retains its allocation.
    order: Vec<SequenceKey>,
}

impl SteerRounds {
    /// Calls `pre` of every running steerer whose round begins. Returns true if one of them forked or a sequence
    /// yielded its slot, so that sequences can be admitted again.
    pub(super) fn call_pre(&mut self, requests: &mut Requests, now: Time) -> bool {
        let before = requests.added();
        // Selected first: `pre` may end, fork or suspend sequences while the list is walked. Forks made in this loop
        // are not in it, because they continue in their parent's round.
        self.select(requests, |requests, key| {
            requests.sequences[key].steering.is_some()
        });
        for &key in &self.order {
            // A sibling may have failed in this loop and ended its request.
            let sequence = requests.sequences.get(key);
            // A sequence that waits for its model has no row to steer.
            if sequence.is_some_and(|sequence| sequence.asleep_until.is_none()) {
                call_pre_of(requests, key, now);
            }
        }
        if requests.report.suspended.is_empty() {
            return requests.added() > before;
        }
        // Before slots are yielded: a request that ends frees its slots by itself.
        fail_deadlocked(requests);
        let yielded = self.yield_slots(requests);
        requests.added() > before || yielded
    }

    /// Suspended sequences yield their slots to waiting ones if no other slots are left: a parent may wait for the
    /// output of its own child (D-49). Returns true if one did.
    fn yield_slots(&mut self, requests: &mut Requests) -> bool {
        let missing = requests
            .scheduler
            .missing_slots(|key| requests.is_eligible(key));
        self.select(requests, |requests, key| {
            requests.sequences[key].is_suspended()
        });
        // The youngest first: it may wait for an older one.
        for &key in self.order.iter().rev().take(missing) {
            // It keeps its KV cells and gives up only its place in the batch, until another sequence needs the cells
            // too.
            requests.scheduler.yield_slot(key);
        }
        missing > 0 && !self.order.is_empty()
    }

    fn select(&mut self, requests: &Requests, wanted: impl Fn(&Requests, SequenceKey) -> bool) {
        self.order.clear();
        let running = requests.scheduler.running();
        self.order
            .extend(running.filter(|&key| wanted(requests, key)));
    }
}

fn call_pre_of(requests: &mut Requests, key: SequenceKey, now: Time) {
    let sequence = &mut requests.sequences[key];
    let Some(steering) = &mut sequence.steering else {
        return;
    };
    let Some(pre) = steering.pre(&requests.stats.panics) else {
        return;
    };
    match pre {
        Ok(Pre::Run { fast_forward }) if fast_forward.is_empty() => {
            resume_cached_row(requests, key, now);
        }
        Ok(Pre::Run { fast_forward }) => force_tokens(requests, key, &fast_forward, now),
        // No decode call is spent on it, and `pre` is asked again in the next step (AI-813).
        Ok(Pre::Suspend) => requests.report.suspended.push(sequence.number),
        Ok(Pre::Fork(branches)) => fork(requests, key, branches, now),
        Ok(Pre::Stop) => requests.finish(key, FinishReason::Controller, None),
        Err(failure) => requests.fail_request_of(key, failure.into()),
    }
}

/// The row of an earlier step is still there, so `mid` does not wait for a decode call.
fn resume_cached_row(requests: &mut Requests, key: SequenceKey, now: Time) {
    if requests.sequences[key].cached_row.is_some() {
        begin_mid(requests, key, now);
    }
}

fn force_tokens(requests: &mut Requests, key: SequenceKey, tokens: &[Token], now: Time) {
    let sequence = &mut requests.sequences[key];
    // The row is that of a position which a forced token now follows.
    sequence.cached_row = None;
    match check_splice(sequence, 0, tokens, requests.vocabulary_tokens) {
        Ok(()) => {
            requests.append_forced(key, 0, 0, tokens, now);
            requests.finish_if_full(key);
        }
        Err(failure) => requests.fail_request_of(key, failure.into()),
    }
}

/// Forks a sequence: adds choices, each with a copy of its output so far.
fn fork(requests: &mut Requests, key: SequenceKey, branches: u32, now: Time) {
    let more = branches.saturating_sub(1);
    let choices = requests.jobs[requests.sequences[key].job].next_choice;
    // `next_choice` never goes down, so ended choices count too. The outbox of a steered request has as many quotas.
    if choices.saturating_add(more) > CHOICES_MAX {
        let failure = SteerFailure {
            reason: ErrorReason::LIMIT,
            message: format!("a request may have {CHOICES_MAX} choices, forks included"),
        };
        return requests.fail_request_of(key, failure.into());
    }
    // The parent is branch 0 and keeps its choice; each branch takes the next free index (AI-933).
    for index in 1..=more {
        let Some(steering) = &mut requests.sequences[key].steering else {
            return;
        };
        match steering.branch(index, &requests.stats.panics) {
            Ok(branch) => requests.add_branch(key, branch),
            Err(failure) => return requests.fail_request_of(key, failure.into()),
        }
    }
    if let Some(steering) = &mut requests.sequences[key].steering {
        steering.forked();
    }
    resume_cached_row(requests, key, now);
}

/// Fails requests all of whose sequences have been suspended for too many steps.
fn fail_deadlocked(requests: &mut Requests) {
    let mut stuck = Vec::new();
    for (index, job) in &mut requests.jobs {
        let suspended = |&key: &SequenceKey| requests.sequences[key].is_suspended();
        let all = !job.members.is_empty() && job.members.iter().all(suspended);
        // `pre` is only called for sequences with a slot, so the limit grows by one step for each sequence without
        // one.
        let runs = |&&key: &&SequenceKey| requests.scheduler.is_running(key);
        let asked = job.members.iter().filter(runs).count();
        // A step in which none of them had a slot proves nothing, so it neither counts nor resets the count.
        job.suspended_steps = match (all, asked) {
            (false, _) => 0,
            (true, 0) => job.suspended_steps,
            (true, _) => job.suspended_steps + 1,
        };
        let unasked = u32::try_from(job.members.len() - asked).unwrap_or(u32::MAX);
        if job.suspended_steps > SUSPENDED_STEPS_MAX.saturating_add(unasked) {
            stuck.push(index);
        }
    }
    for job in stuck {
        let failure = SteerFailure {
            reason: ErrorReason::DEADLOCK,
            message: format!(
                "every sequence was suspended in more than {SUSPENDED_STEPS_MAX} steps in a row"
            ),
        };
        requests.fail(job, failure.into(), true);
    }
}

/// Starts `mid` of a sequence's steerer, if it has one and its turn has come.
pub(super) fn begin_mid(requests: &mut Requests, key: SequenceKey, now: Time) {
    if let Some(steering) = &mut requests.sequences[key].steering {
        steering.begin_mid(now, &requests.stats.panics);
    }
}
