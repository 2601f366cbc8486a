//! Admission: receives commands, gives sequences their slots, parks and resumes them.

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use slab::Slab;

use super::EngineOwner;
use super::sequence::{AwaitedPrefix, RequestJob, RunningSequence, Steering};
use crate::api::{ChoiceEnd, EngineError, FinishReason};
use crate::config::PrefixSharing;
use crate::inbox::EngineCommand;
use crate::model::{Model, SlotId, SlotPurpose};
use crate::outbox::ReaderRequest;
use crate::prefix_cache::{PrefixMatch, common_prefix};
use crate::sampling::TokenHistory;
use crate::scheduler::SequenceKey;
use crate::text::ChoiceText;

/// The minimum length of a common prefix for which a request waits while another computes it (LM-609); a shorter one is
/// computed twice.
const SHARED_TOKENS_MIN: usize = 32;

impl EngineOwner {
    /// Takes all commands from the inbox.
    pub(super) fn receive(&mut self, now: Time) {
        while let Ok(command) = self.inbox.commands.try_recv() {
            self.accept(*command, now);
        }
    }

    fn accept(&mut self, command: EngineCommand, now: Time) {
        let EngineCommand { submission, outbox } = command;
        let deadline = submission.timeout.map(|timeout| now + timeout);
        let queue_deadline = now + Duration::from_millis(self.config.queue_timeout_ms);
        let earliest = deadline.map_or(queue_deadline, |deadline| deadline.min(queue_deadline));
        self.next_deadline = Some(
            self.next_deadline
                .map_or(earliest, |next| next.min(earliest)),
        );
        self.observe_request(&submission);
        if submission.follower.is_some() {
            self.follow_from(now);
        }
        let nothing_wanted = submission.terms.max_tokens == 0;
        let job = self.jobs.insert(RequestJob {
            outbox,
            terms: submission.terms,
            prompt: submission.prompt,
            priority: submission.priority,
            turn: submission.turn,
            scope: match self.config.prefix_sharing {
                PrefixSharing::Scope => submission.prefix_scope,
                PrefixSharing::All => 0,
            },
            cache_key: submission.cache_key,
            follower: submission.follower,
            members: Vec::new(),
            next_choice: 0,
            arrived: now,
            deadline,
            started: None,
            first_token: None,
            completion_tokens: 0,
            cached_tokens: 0,
            suspended_steps: 0,
            ended: false,
        });
        let mut steerers = submission.steerers.into_iter();
        let mut first = None;
        for _ in 0..submission.choices {
            let steering = steerers.next().map(Steering::new);
            let key = self.enqueue(job, steering, first);
            first.get_or_insert(key);
        }
        if let Some(error) = self.dead.clone() {
            self.fail(job, error, false);
        } else if nothing_wanted {
            for key in self.jobs[job].members.clone() {
                self.finish(
                    key,
                    ChoiceEnd {
                        reason: FinishReason::Length,
                        stop: None,
                    },
                );
            }
        } else if self.jobs[job].is_score_only() {
            for key in self.jobs[job].members.clone() {
                self.score_only_step(key, now);
            }
        }
    }

    /// Adds a new sequence to a job, with the prompt as its tokens.
    pub(super) fn enqueue(
        &mut self,
        job: usize,
        steering: Option<Steering>,
        after: Option<SequenceKey>,
    ) -> SequenceKey {
        let request = &self.jobs[job];
        let tokens = request.tokens();
        let after = match after {
            Some(key) => Some(AwaitedPrefix {
                key,
                number: self.sequences[key].number,
                tokens: request.prompt.len() - 1,
            }),
            // A steerer's branch has its parent's tokens, which are not known here yet. A request with prompt logprobs
            // computes its prompt itself.
            None if steering.is_none() && self.info.truncates && !request.terms.prompt_logprobs => {
                leader(&self.sequences, &self.jobs, request, &tokens)
            }
            None => None,
        };
        let score_only = usize::from(request.is_score_only());
        let request = &mut self.jobs[job];
        let choice = request.next_choice;
        request.next_choice += 1;
        let key = self.sequences.insert(RunningSequence {
            number: self.numbers,
            job,
            choice,
            tokens,
            prompt_tokens: request.prompt.len() - score_only,
            scored: request.terms.scored.is_some(),
            prompt_scores: (choice == 0 && request.terms.prompt_logprobs).then(Vec::new),
            computed: 0,
            slot: None,
            after,
            asleep_until: None,
            cached_row: None,
            appended: 0,
            text: ChoiceText::default(),
            history: TokenHistory::of(&request.prompt, &request.terms.sampling),
            steering,
            last_token_at: None,
            untold: None,
        });
        self.numbers += 1;
        request.members.push(key);
        self.scheduler.submit(key, request.priority, request.turn);
        key
    }

    /// Handles the requests of readers, if one woke the owner, and deadlines, if one has passed.
    pub(super) fn take_cancellations(&mut self, now: Time) {
        let rung = self.inbox.bell.is_observed();
        let due = self.next_deadline.is_some_and(|deadline| deadline <= now);
        if !rung && !due {
            return;
        }
        let queue_timeout = Duration::from_millis(self.config.queue_timeout_ms);
        self.next_deadline = None;
        let jobs: Vec<usize> = self.jobs.iter().map(|(index, _)| index).collect();
        for index in jobs {
            let job = &self.jobs[index];
            let queue_deadline = job.started.is_none().then_some(job.arrived + queue_timeout);
            if job.ended {
                continue;
            }
            match job.outbox.reader_request() {
                ReaderRequest::Closed => self.cancel(index),
                ReaderRequest::Stop => {
                    for key in job.members.clone() {
                        self.finish(
                            key,
                            ChoiceEnd {
                                reason: FinishReason::Cancelled,
                                stop: None,
                            },
                        );
                    }
                }
                ReaderRequest::GoOn if job.deadline.is_some_and(|deadline| deadline <= now) => {
                    self.inbox.stats.cancelled_timeout.add(1);
                    let message = "the time allowed for this request has passed";
                    self.fail(
                        index,
                        EngineError::new(Code::DeadlineExceeded, "timeout", message),
                        true,
                    );
                }
                ReaderRequest::GoOn if queue_deadline.is_some_and(|deadline| deadline <= now) => {
                    self.inbox.stats.cancelled_timeout.add(1);
                    let message = "the request waited too long for a place: try again later";
                    let error = EngineError::new(Code::Unavailable, "queue_timeout", message)
                        .after(self.inbox.queue.retry_after());
                    self.fail(index, error, true);
                }
                ReaderRequest::GoOn => {
                    let earliest = job.deadline.into_iter().chain(queue_deadline).min();
                    self.next_deadline = self.next_deadline.into_iter().chain(earliest).min();
                }
            }
        }
    }

    /// Parks sequences whose reader is slow, unparks those whose reader has caught up, and wakes sequences whose sleep
    /// is over.
    pub(super) fn park_and_resume(&mut self, now: Time) {
        let mut order = std::mem::take(&mut self.scratch.order);
        order.clear();
        order.extend(self.scheduler.parked());
        for &key in &order {
            let sequence = &self.sequences[key];
            if self.jobs[sequence.job].outbox.has_room(sequence.choice) {
                self.scheduler.unpark(key);
            }
        }
        order.clear();
        order.extend(self.scheduler.running());
        for &key in &order {
            let sequence = &mut self.sequences[key];
            if sequence.asleep_until.is_some_and(|until| until <= now) {
                sequence.asleep_until = None;
            }
            let outbox = &self.jobs[sequence.job].outbox;
            if !outbox.has_room(sequence.choice) {
                outbox.park();
                // The reader may have made room just before it could see the flag, and then it does not wake the owner.
                if !outbox.has_room(sequence.choice) {
                    self.scheduler.park(key);
                    self.report.parked.push(sequence.number);
                }
            }
        }
        self.scratch.order = order;
    }

    /// Gives slots to waiting sequences, in their order, until the next one does not fit.
    pub(super) fn admit(&mut self, now: Time) {
        while let Some(key) = self.scheduler.next(|key| self.is_eligible(key)) {
            if !self.admit_to_slot(key) {
                return;
            }
            self.scheduler.admit(key);
            let sequence = &self.sequences[key];
            self.report.admitted.push(sequence.number);
            let job = &mut self.jobs[sequence.job];
            if job.started.is_none() {
                job.started = Some(now);
                self.inbox.queue.leave(job.turn.caller, job.prompt.len());
                self.pace.departed(job.arrived, now);
                self.inbox.queue.publish(&self.pace);
                self.inbox
                    .stats
                    .queue_seconds
                    .observe_span(now.since(job.arrived));
            }
        }
    }

    /// Returns whether a waiting sequence may be admitted: one that shares a prefix waits until another has computed
    /// it.
    pub(super) fn is_eligible(&self, key: SequenceKey) -> bool {
        let Some(after) = self.sequences[key].after else {
            return true;
        };
        let first = self.sequences.get(after.key);
        first.is_none_or(|first| first.number != after.number || first.computed >= after.tokens)
    }

    /// Gives the sequence a slot, with as much of its prefix as is cached. Returns false if it does not fit now.
    fn admit_to_slot(&mut self, key: SequenceKey) -> bool {
        if self.sequences[key].slot.is_some() {
            // It was parked, and no other sequence needed its slot.
            return true;
        }
        let Some(shared) = self.free_slot(key) else {
            return false;
        };
        if !self.cache.has_free_slot() {
            // Evicts another cached prefix before the one that this sequence needs, unless only one slot is left.
            let evicted = self.cache.evict(shared.map(|shared| shared.slot));
            let evicted = evicted.or_else(|| self.cache.evict(None));
            if let Some(slot) = evicted {
                self.model.release(slot);
            }
        }
        if let Some((cached, free)) = self.cache.in_the_way(shared.map(|shared| shared.slot)) {
            self.shift(cached, free);
        }
        let scope = self.jobs[self.sequences[key].job].scope;
        let Some(slot) = self.cache.take(scope) else {
            return false;
        };
        let shared = shared
            .filter(|shared| self.cache.holds(shared.slot, shared.tokens) && shared.slot != slot);
        self.open(key, slot, shared);
        true
    }

    fn shift(&mut self, cached: SlotId, free: SlotId) {
        // The sequence of a cached slot has ended, so only its tokens matter.
        let opening = SlotPurpose {
            prompt: &[],
            seed: 0,
            choice: 0,
            max_tokens: None,
        };
        // A slot holds fewer tokens than the context, which is a u32.
        let tokens = u32::try_from(self.cache.len(cached)).unwrap_or(u32::MAX);
        self.model.open(free, &opening);
        self.model.fork(cached, free, tokens);
        self.model.release(cached);
        self.cache.shift(cached, free);
    }

    /// Makes room for a sequence's tokens, one more cell for each running sequence, and a slot. Preempts only sequences
    /// that do not run. Returns the shared prefix, if any; `None` if the sequence does not fit.
    fn free_slot(&mut self, key: SequenceKey) -> Option<Option<PrefixMatch>> {
        loop {
            let sequence = &self.sequences[key];
            let tokens = &sequence.tokens;
            let scope = self.jobs[sequence.job].scope;
            let model = &*self.model;
            let shared = self.cache.find(
                scope,
                &tokens[..=sequence.first_row()],
                self.config.prefix_tokens_min as usize,
                |slot, tokens| can_resume(model, slot, tokens),
            );
            let saved = shared.map_or(0, |shared| {
                shared.tokens - self.cache.unpinned(shared.slot, shared.tokens)
            });
            let need = tokens.len() - saved + self.scheduler.running_count();
            if self.cache.room() >= need && self.cache.has_slot() {
                return Some(shared);
            }
            let sequences = &self.sequences;
            let holds = |other: SequenceKey| other != key && sequences[other].slot.is_some();
            let victim = self.scheduler.victim(false, holds)?;
            self.preempt(victim);
        }
    }

    fn open(&mut self, key: SequenceKey, slot: SlotId, shared: Option<PrefixMatch>) {
        let sequence = &mut self.sequences[key];
        let job = &mut self.jobs[sequence.job];
        let terms = Arc::clone(&job.terms);
        let opening = SlotPurpose {
            prompt: &job.prompt,
            seed: terms.seed,
            choice: sequence.choice,
            max_tokens: terms.asked_max_tokens,
        };
        self.model.open(slot, &opening);
        let common = shared.map_or(0, |shared| shared.tokens);
        if let Some(shared) = shared {
            // A slot holds fewer tokens than the context, which is a u32.
            self.model
                .fork(shared.slot, slot, u32::try_from(common).unwrap_or(u32::MAX));
            self.cache.fork(shared.slot, slot, common);
            if shared.cached && shared.whole {
                // A prompt with this prefix can use the new slot instead.
                self.cache.discard(shared.slot);
                self.model.release(shared.slot);
            }
        }
        if let Some(key) = job.cache_key {
            self.cache.warm(job.scope, key);
        }
        if job.started.is_none() {
            job.cached_tokens = u32::try_from(common).unwrap_or(u32::MAX);
            self.inbox.stats.prefix_queries.add(job.prompt.len() as u64);
            self.inbox.stats.prefix_hits.add(common as u64);
        }
        sequence.slot = Some(slot);
        sequence.computed = common;
        sequence.after = None;
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "counts of tokens are exact below 2^53"
    )]
    fn observe_request(&self, submission: &crate::submission::Submission) {
        let stats = &self.inbox.stats;
        stats.prompt_tokens.add(submission.prompt.len() as u64);
        stats
            .request_prompt_tokens
            .observe(submission.prompt.len() as f64);
        stats.request_n.observe(f64::from(submission.choices));
        stats
            .request_max_tokens
            .observe(f64::from(submission.terms.max_tokens));
    }
}

/// Returns whether the model can continue after the first `tokens` tokens of a slot.
pub(super) fn can_resume(model: &dyn Model, slot: SlotId, tokens: usize) -> bool {
    u32::try_from(tokens).is_ok_and(|tokens| model.can_resume(slot, tokens))
}

/// Finds the sequence that computes, or will compute, the longest prefix that is worth waiting for. A sequence that may
/// be suspended before it has computed that much, that has lower priority, or whose prefixes are in another scope, is
/// not waited for.
fn leader(
    sequences: &Slab<RunningSequence>,
    jobs: &Slab<RequestJob>,
    request: &RequestJob,
    tokens: &[Token],
) -> Option<AwaitedPrefix> {
    let leads = |other: &RunningSequence| {
        other.after.is_none()
            && other.steering.is_none()
            && jobs[other.job].scope == request.scope
            && jobs[other.job].priority >= request.priority
    };
    let common = |(key, other): (SequenceKey, &RunningSequence)| {
        let usable = request.prompt.len().saturating_sub(1);
        let common = common_prefix(&other.tokens, &tokens[..usable]).min(other.first_output_row());
        let worth = common >= SHARED_TOKENS_MIN && common > other.computed;
        worth.then_some(AwaitedPrefix {
            key,
            number: other.number,
            tokens: common,
        })
    };
    sequences
        .iter()
        .filter(|(_, other)| leads(other))
        .filter_map(common)
        .max_by_key(|after| after.tokens)
}
