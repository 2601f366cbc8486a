//! [`SteerRounds`]: when steerers are called in a step, and what follows from `pre`.
//!
//! `pre` is called before the batch is planned, because it may fork or force tokens; `mid` starts before the decode
//! call and is collected after it, so that the mask is computed while the model computes (AI-811).

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::CHOICES_MAX;
use sapwood_proto::steer::{Pre, SteerFailure, Token, WAIT_TIME_MAX};
use sapwood_proto::time::Time;

use super::requests::Requests;
use super::steering::{SteerRules, Steering, check_splice};
use super::step_clock::StepClock;
use crate::api::FinishReason;
use crate::scheduler::SequenceKey;

/// The poll interval of a steerer while there is no other work (AI-813).
pub(super) const MIN_WAIT: Duration = Duration::from_millis(1);
/// Steps in a row in which all sequences of a request may be suspended.
const SUSPENDED_STEPS_MAX: u32 = 3;

/// Calls the steerers of running sequences.
#[derive(Debug)]
pub(super) struct SteerRounds {
    rules: SteerRules,
    /// Buffers that retain their allocations.
    order: Vec<SequenceKey>,
    missing: Vec<SequenceKey>,
}

impl SteerRounds {
    pub(super) fn new(rules: SteerRules) -> Self {
        Self {
            rules,
            order: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Calls `pre` of every running steerer whose round begins. Returns true if one of them forked or a sequence
    /// yielded its slot, so that sequences can be admitted again.
    pub(super) fn call_pre(
        &mut self,
        requests: &mut Requests,
        clock: &mut StepClock,
        now: Time,
    ) -> bool {
        let before = requests.added();
        // Selected first: `pre` may end, fork or suspend sequences while the list is walked. Forks made in this loop
        // are not in it, because they continue in their parent's round.
        self.select(requests, |requests, key| {
            requests.sequences[key].steering.is_some()
        });
        self.missing.clear();
        let rules = self.rules;
        for &key in &self.order {
            // A sibling may have ended the request in this loop.
            let sequence = requests.sequences.get(key);
            // A sequence that waits for its model has no row to steer.
            if sequence.is_some_and(|sequence| sequence.asleep_until.is_none())
                && call_pre_of(requests, key, rules, now) == PreCall::Missing
            {
                self.missing.push(key);
            }
        }
        flush(requests, self.order.iter().copied());
        while !self.missing.is_empty()
            && let Some(now) = clock.wait()
        {
            self.missing.retain(|&key| {
                requests.sequences.contains(key)
                    && call_pre_of(requests, key, rules, now) == PreCall::Missing
            });
            // A row of an earlier step begins its `mid` here, and perhaps no batch follows.
            flush(requests, self.order.iter().copied());
        }
        let yielded = self.review_skipped(requests, now);
        requests.added() > before || yielded
    }

    /// Looks at the sequences that skip this step: reports them, ends deadlocks, and lets suspended ones yield their
    /// slots. Returns true if one did.
    fn review_skipped(&mut self, requests: &mut Requests, now: Time) -> bool {
        let mut idle = false;
        for &key in &self.order {
            let Some(sequence) = requests.sequences.get(key) else {
                continue;
            };
            if let Some(steering) = &sequence.steering {
                if steering.is_idle() {
                    idle = true;
                } else {
                    // Here, because the search below is left out in steps without an idle sequence.
                    requests.jobs[sequence.job].suspended_steps = 0;
                }
                if steering.is_in_pre() {
                    requests.report.late.push(sequence.number);
                }
            }
        }
        if !idle {
            return false;
        }
        // Before slots are yielded: a request that ends frees its slots by itself.
        fail_deadlocked(requests, now);
        self.yield_slots(requests)
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
            // At the end of the step it no longer runs, and reports are taken from running sequences only.
            let sequence = &mut requests.sequences[key];
            let panics = &requests.stats.panics;
            requests.output.emit_report(sequence, panics);
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

/// What came of asking one steerer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreCall {
    /// It has answered, or its round is in progress.
    Settled,
    /// It is late: the step does not wait for it.
    Late,
    /// It has no result yet.
    Missing,
}

fn call_pre_of(requests: &mut Requests, key: SequenceKey, rules: SteerRules, now: Time) -> PreCall {
    let sequence = &mut requests.sequences[key];
    let Some(steering) = &mut sequence.steering else {
        return PreCall::Settled;
    };
    match steering.pre(now, rules, &requests.stats.panics) {
        Ok(None) if !steering.is_in_pre() => {}
        Ok(None) if steering.is_late() => return PreCall::Late,
        Ok(None) => return PreCall::Missing,
        Ok(Some(Pre::Run { fast_forward })) if fast_forward.is_empty() => {
            resume_cached_row(requests, key, now);
        }
        Ok(Some(Pre::Run { fast_forward })) => force_tokens(requests, key, &fast_forward, now),
        // No decode call is spent on it, and `pre` is asked again in the next step (AI-813).
        Ok(Some(Pre::Suspend | Pre::Wait)) => requests.report.suspended.push(sequence.number),
        Ok(Some(Pre::Fork(sequences))) => {
            for key in fork(requests, key, sequences).into_iter().flatten() {
                resume_cached_row(requests, key, now);
            }
        }
        Ok(Some(Pre::Stop)) => requests.finish(key, FinishReason::Controller, None),
        Err(failure) => requests.fail_choice(key, failure.into()),
    }
    PreCall::Settled
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
            requests.append_forced(key, (0, 0), tokens, now);
            requests.finish_if_full(key);
        }
        Err(failure) => requests.fail_choice(key, failure.into()),
    }
}

/// Makes `sequences` sequences of one: adds choices, each with a copy of its output so far. Returns all of them, the
/// parent first, and `None` for each whose copy failed (AI-714); nothing if the parent has failed.
pub(super) fn fork(
    requests: &mut Requests,
    key: SequenceKey,
    sequences: u32,
) -> Vec<Option<SequenceKey>> {
    let more = sequences.saturating_sub(1);
    let choices = requests.jobs[requests.sequences[key].job].next_choice;
    // `next_choice` never goes down, so ended choices count too. The outbox of a steered request has as many quotas.
    if choices.saturating_add(more) > CHOICES_MAX {
        let failure = SteerFailure {
            reason: ErrorReason::LIMIT,
            message: format!("a request may have {CHOICES_MAX} choices, forks included"),
        };
        requests.fail_choice(key, failure.into());
        return Vec::new();
    }
    let mut keys = vec![Some(key)];
    // The parent is branch 0 and keeps its choice; each branch takes the next free index (AI-933).
    for index in 1..=more {
        let panics = &requests.stats.panics;
        let Some(steering) = &mut requests.sequences[key].steering else {
            break;
        };
        keys.push(match steering.branch(index, panics) {
            Ok(branch) => Some(requests.add_branch(key, branch)),
            Err(failure) => {
                requests.add_failed_branch(key, failure.into());
                None
            }
        });
    }
    // Those whose copy failed are in the group, because a controller finds its branch by its place in it.
    let branches = (choices + 1..).take(keys.len() - 1);
    let group = number_of(requests, key).chain(branches).collect();
    name_siblings(requests, keys.iter().copied().flatten(), &group);
    keys
}

fn number_of(requests: &Requests, key: SequenceKey) -> impl Iterator<Item = u32> + use<> {
    let steering = requests.sequences[key].steering.as_ref();
    steering.map(Steering::number).into_iter()
}

/// Tells the sequences of a fork the numbers of all of them, the parent's first.
pub(super) fn name_siblings(
    requests: &mut Requests,
    keys: impl IntoIterator<Item = SequenceKey>,
    group: &Arc<[u32]>,
) {
    for key in keys {
        if let Some(steering) = &mut requests.sequences[key].steering {
            steering.set_group(Arc::clone(group));
        }
    }
}

/// Fails requests all of whose sequences have been suspended for too many steps. A late sequence is not suspended.
fn fail_deadlocked(requests: &mut Requests, now: Time) {
    let mut stuck = Vec::new();
    for (index, job) in &mut requests.jobs {
        let idle = |&key: &SequenceKey| {
            let steering = requests.sequences[key].steering.as_ref();
            steering.is_some_and(Steering::is_idle)
        };
        let all = !job.members.is_empty() && job.members.iter().all(idle);
        // `pre` is only called for sequences with a slot, so the limit grows by one step for each sequence without
        // one.
        let runs = |&&key: &&SequenceKey| requests.scheduler.is_running(key);
        let asked = job.members.iter().filter(runs).count();
        // Callbacks of those that wait run once in this time if nothing happens, and steps between prove nothing.
        let waits = |&key: &SequenceKey| {
            let steering = requests.sequences[key].steering.as_ref();
            steering.is_some_and(Steering::is_waiting)
        };
        let interval = if job.members.iter().any(waits) {
            WAIT_TIME_MAX
        } else {
            MIN_WAIT
        };
        // A step in which none of them had a slot proves nothing, so it neither counts nor resets the count; nor does
        // one that follows another at once, because the owner was woken for something else.
        let counts = asked > 0 && now.since(job.suspended_at) >= interval;
        job.suspended_steps = match (all, counts) {
            (false, _) => 0,
            (true, false) => job.suspended_steps,
            (true, true) => {
                job.suspended_at = now;
                job.suspended_steps + 1
            }
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

/// Tells steerers that the calls of this part of the step are made.
pub(super) fn flush(requests: &mut Requests, keys: impl Iterator<Item = SequenceKey>) {
    for key in keys {
        // A sequence of the list may have ended meanwhile.
        if let Some(sequence) = requests.sequences.get_mut(key)
            && let Some(steering) = &mut sequence.steering
        {
            steering.flush(&requests.stats.panics);
        }
    }
}

/// Starts `mid` of a sequence's steerer, if it has one and its turn has come.
pub(super) fn begin_mid(requests: &mut Requests, key: SequenceKey, now: Time) {
    if let Some(steering) = &mut requests.sequences[key].steering {
        steering.begin_mid(now, &requests.stats.panics);
    }
}
