//! [`Admission`]: receives commands, watches readers and deadlines, gives sequences their slots, parks and resumes
//! them.

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use super::checkpoints::{BRANCH_TOKENS_MIN, PromptMarks, turn_end};
use super::fuel::SpentFuel;
use super::kv_slots::FoundPrefix;
use super::opening::poll_opening;
use super::requests::Requests;
use super::scoring::score_first;
use super::sequence::{AwaitedPrefix, DiskLookup, RequestJob, RunningSequence};
use super::steering::Steering;
use crate::api::{EngineError, FinishReason};
use crate::config::{Config, PrefixSharing};
use crate::inbox::{EngineCommand, OwnerInbox};
use crate::model::SlotPurpose;
use crate::outbox::{OwnerWaker, ReaderRequest};
use crate::prefix_cache::common_prefix;
use crate::prefix_disk::DiskWait;
use crate::queue::QueuePace;
use crate::scheduler::SequenceKey;

/// The minimum length of a common prefix for which a request waits while another computes it (LM-609); a shorter one is
/// computed twice.
const SHARED_TOKENS_MIN: usize = 32;

/// How requests come in, wait and get their slots.
pub(super) struct Admission {
    inbox: OwnerInbox,
    prefix_sharing: PrefixSharing,
    /// `None`: a request may be queued as long as it takes.
    queue_timeout: Option<Duration>,
    /// Whether the model can shorten a slot, so that a running sequence's prefix can be shared.
    truncates: bool,
    /// Measures how fast requests leave the queue.
    pace: QueuePace,
    /// The earliest deadline of any request; it may have passed without effect if that request has ended.
    next_deadline: Option<Time>,
    /// Why the model is lost, if it is: then every request fails as it arrives.
    lost: Option<EngineError>,
    /// Buffer that retains its allocation.
    order: Vec<SequenceKey>,
    /// Running sequences that compute a prefix which others may wait for, in this round of admissions.
    leaders: Vec<SequenceKey>,
}

impl Admission {
    pub(super) fn new(inbox: OwnerInbox, config: &Config, truncates: bool) -> Self {
        Self {
            inbox,
            prefix_sharing: config.prefix_sharing,
            queue_timeout: config.queue_timeout(),
            truncates,
            pace: QueuePace::default(),
            next_deadline: None,
            lost: None,
            order: Vec::new(),
            leaders: Vec::new(),
        }
    }

    /// Starts a step: wake-ups of steerers from now on lead to another one.
    pub(super) fn begin_step(&self) {
        self.inbox.waker.begin_step();
    }

    /// Returns whether saved prefixes shall be dropped.
    pub(super) fn is_trimmed(&self) -> bool {
        self.inbox.waker.is_trimmed()
    }

    /// Returns whether the owner was woken for something that this step has not seen.
    pub(super) fn is_woken(&self) -> bool {
        self.inbox.waker.is_woken()
    }

    /// What steerers wake.
    pub(super) fn waker(&self) -> Arc<OwnerWaker> {
        Arc::clone(&self.inbox.waker)
    }

    /// Returns whether the engine was dropped.
    pub(super) fn is_closing(&self) -> bool {
        self.inbox.waker.is_closing()
    }

    /// The error of requests that lose their owner.
    pub(super) fn closed_error(&self) -> EngineError {
        self.inbox.waker.closed_error()
    }

    /// The earliest deadline of any request.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.next_deadline
    }

    /// Measures how fast requests leave the queue.
    pub(super) fn pace(&self) -> &QueuePace {
        &self.pace
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Refuses every later request with this error: the model is lost.
    pub(super) fn lose(&mut self, error: EngineError) {
        self.inbox.stats.dead.set(1);
        self.lost = Some(error);
    }

    /// Takes all commands from the inbox. Returns whether one has a follower.
    pub(super) fn receive(&mut self, requests: &mut Requests, now: Time) -> bool {
        let mut followed = false;
        // Without a count: the inbox is bounded, and a command stays charged to the queue until its request starts.
        while let Ok(command) = self.inbox.commands.try_recv() {
            followed |= command.submission.follower.is_some();
            self.accept(requests, *command, now);
        }
        followed
    }

    fn accept(&mut self, requests: &mut Requests, command: EngineCommand, now: Time) {
        let EngineCommand {
            mut submission,
            outbox,
        } = command;
        let deadline = submission.timeout.map(|timeout| now + timeout);
        // Every request is watched for the queue timeout although most start long before: a look at the deadlines that
        // finds nothing costs little.
        self.watch(self.queue_timeout.map(|limit| now + limit));
        self.watch(deadline);
        submission.observe(&requests.stats);
        if self.prefix_sharing == PrefixSharing::All {
            // Equal scopes share prefixes, so one constant shares them among all.
            submission.prefix_scope = SCOPE_OF_ALL;
        }
        if let Some(adapters) = &submission.adapters {
            submission.prefix_scope = adapters.prefix_scope(submission.prefix_scope);
        }
        let nothing_wanted = submission.terms.max_tokens == 0;
        // Without a token there is nothing to steer.
        let steer = submission.steer.take().filter(|_| !nothing_wanted);
        let (steered, watched) = (steer.is_some(), submission.watched);
        let panics = &requests.stats.panics;
        // A request gets its job even if it ends at once below, because its end passes through `Requests` like any
        // other: events, refund of the queue, metrics.
        let job = requests.jobs.insert(RequestJob {
            outbox,
            submission,
            opening: steer.map(|steer| Steering::new(steer, watched, panics)),
            steered,
            members: Vec::new(),
            next_choice: 0,
            arrived: now,
            deadline,
            started: None,
            first_token: None,
            completion_tokens: 0,
            cached_tokens: 0,
            suspended_steps: 0,
            suspended_at: Time::ZERO,
            spent: SpentFuel::default(),
            has_finished: false,
            ended: false,
        });
        if steered {
            requests.opening.push(job);
        } else {
            requests.start(job, None);
        }
        // After the sequences were added, so that a request to a lost model ends by the same path as one that was
        // running.
        if let Some(error) = self.lost.clone() {
            requests.fail(job, error, false);
        } else if steered {
            // At once, so that a steerer that needs no time does not change the order of requests.
            poll_opening(requests, job);
        } else if nothing_wanted {
            requests.finish_all(job, FinishReason::Length);
        } else if requests.jobs[job].submission.given_prompt().is_empty() {
            // The first of the scored tokens takes the place of the prompt and needs no output row, so it is reported
            // before anything is computed. That may already end the request.
            for key in requests.jobs[job].members.clone() {
                score_first(requests, key, now);
            }
        }
    }

    /// Moves the next look at the deadlines to this time, if it is earlier.
    fn watch(&mut self, deadline: Option<Time>) {
        self.next_deadline = self.next_deadline.into_iter().chain(deadline).min();
    }

    /// Handles the requests of readers, if one woke the owner, and deadlines, if one has passed.
    pub(super) fn take_cancellations(&mut self, requests: &mut Requests, now: Time) {
        // The requests of readers are flags in their outboxes (D-7). They are scanned only after a wake-up, so that a
        // step costs nothing for each request that merely runs.
        let woken = self.inbox.waker.is_observed();
        let due = self.next_deadline.is_some_and(|deadline| deadline <= now);
        if !woken && !due {
            return;
        }
        // The loop below sets it again from the requests that remain.
        self.next_deadline = None;
        let open = requests.jobs.iter().filter(|(_, job)| !job.ended);
        // Collected first, because requests are removed in the loop. An ended request is skipped: its last event is
        // already queued.
        let jobs: Vec<usize> = open.map(|(index, _)| index).collect();
        for index in jobs {
            let job = &requests.jobs[index];
            let limit = self.queue_timeout.filter(|_| job.started.is_none());
            let queue_deadline = limit.map(|limit| job.arrived + limit);
            let passed = |deadline: Option<Time>| deadline.is_some_and(|deadline| deadline <= now);
            match job.outbox.reader_request() {
                // Before the deadlines: without a reader, the error of a timeout would reach no client.
                ReaderRequest::Closed => requests.cancel(index),
                ReaderRequest::Stop => requests.finish_all(index, FinishReason::Cancelled),
                ReaderRequest::Continue if passed(job.deadline) => {
                    let message = "the time allowed for this request has passed";
                    let error =
                        EngineError::new(Code::DeadlineExceeded, ErrorReason::TIMEOUT, message);
                    time_out(requests, index, error);
                }
                ReaderRequest::Continue if passed(queue_deadline) => {
                    let message = "the request waited too long for a slot: try again later";
                    let error =
                        EngineError::new(Code::Unavailable, ErrorReason::QUEUE_TIMEOUT, message);
                    // Faces answer 503, which carries a retry time (OA-202, OA-910).
                    let error = error.after(requests.queue.retry_after());
                    time_out(requests, index, error);
                }
                ReaderRequest::Continue => {
                    let deadline = job.deadline;
                    self.watch(deadline);
                    self.watch(queue_deadline);
                }
            }
        }
    }

    /// Parks sequences whose reader is slow, unparks those whose reader has caught up, and wakes sequences whose sleep
    /// is over.
    pub(super) fn park_and_resume(&mut self, requests: &mut Requests, now: Time) {
        self.order.clear();
        // Resumed sequences first: otherwise those that park below would be checked twice.
        self.order.extend(requests.scheduler.parked());
        for &key in &self.order {
            let sequence = &requests.sequences[key];
            let outbox = &requests.jobs[sequence.job].outbox;
            if !outbox.has_room(sequence.choice) {
                // The reader may have woken the owner for another choice, and then it would not for this one.
                outbox.park();
                if !outbox.has_room(sequence.choice) {
                    continue;
                }
            }
            requests.scheduler.unpark(key);
        }
        self.order.clear();
        self.order.extend(requests.scheduler.running());
        for &key in &self.order {
            let sequence = &mut requests.sequences[key];
            if sequence.asleep_until.is_some_and(|until| until <= now) {
                sequence.asleep_until = None;
            }
            let outbox = &requests.jobs[sequence.job].outbox;
            if !outbox.has_room(sequence.choice) {
                // Nothing is dropped: the sequence leaves the batch before it could produce another event (LM-607,
                // TR-609).
                outbox.park();
                // The reader may have made room just before it could see the flag, and then it does not wake the owner.
                if !outbox.has_room(sequence.choice) {
                    requests.scheduler.park(key);
                    requests.report.parked.push(sequence.number);
                }
            }
        }
    }

    /// Gives slots to waiting sequences, in their order, until the next one does not fit.
    ///
    /// Without a free slot it costs nothing. Otherwise it looks once at each sequence that is passed over, and at those that become
    /// next: each of these is admitted or passed over, and passed over for the rest of the step. A look costs the
    /// logarithm of the queue, and a comparison with each prompt that is being computed, of which there are fewer than slots.
    pub(super) fn admit(&mut self, requests: &mut Requests, now: Time) {
        if !requests.scheduler.has_slot() {
            return;
        }
        self.begin_round(requests);
        while let Some(key) = requests.scheduler.next() {
            requests.report.looked_at += 1;
            if !requests.is_eligible(key) || self.pass_over(requests, key) {
                requests.scheduler.set_aside(key);
                continue;
            }
            // A parked sequence keeps its slot unless another one needed it.
            if requests.sequences[key].slot.is_none() && !acquire_slot(requests, key) {
                // If the next one does not fit, no smaller one overtakes it: a stream of small requests would starve a
                // large one.
                return;
            }
            requests.scheduler.admit(key);
            let sequence = &requests.sequences[key];
            if may_lead(sequence) {
                self.leaders.push(key);
            }
            requests.report.admitted.push(sequence.number);
            let job = &mut requests.jobs[sequence.job];
            // A preempted or parked sequence is admitted again, and only the first admission leaves the queue. With
            // several choices the first of them counts for the request.
            if job.started.is_none() {
                job.started = Some(now);
                requests.queue.refund(&job.submission);
                self.pace.departed(job.arrived, now);
                requests.queue.publish(&self.pace);
                let queued = now.since(job.arrived);
                requests.stats.queue_seconds.observe_span(queued);
            }
        }
    }

    /// Restores the sequences whose reason to be passed over has ended, and lists those that compute a prefix.
    fn begin_round(&mut self, requests: &mut Requests) {
        self.order.clear();
        self.order.extend(requests.scheduler.aside());
        requests.report.looked_at += self.order.len();
        for &key in &self.order {
            if requests.is_eligible(key) {
                requests.scheduler.restore(key);
            }
        }
        self.leaders.clear();
        let running = requests.scheduler.running();
        self.leaders
            .extend(running.filter(|&key| may_lead(&requests.sequences[key])));
    }

    /// Passes a sequence over if another one is computing its prefix: until that has computed it or loses its slot. Or if its
    /// prefix is read from the disk: until it is there, or that takes too long. Returns whether it did.
    fn pass_over(&self, requests: &mut Requests, key: SequenceKey) -> bool {
        // One that was parked has a slot already, unless another one needed it.
        if requests.sequences[key].slot.is_some() {
            return false;
        }
        requests.report.looked_at += self.leaders.len();
        let after = self.prefix_in_progress(requests, key);
        if after.is_some() {
            requests.sequences[key].after = after;
            return true;
        }
        waits_for_disk(requests, key)
    }

    /// Finds the sequence that is computing the longest prefix of a sequence whose turn has come, if that is worth
    /// waiting for.
    fn prefix_in_progress(&self, requests: &Requests, key: SequenceKey) -> Option<AwaitedPrefix> {
        let sequence = &requests.sequences[key];
        // A model that cannot truncate shares whole slots only, so the beginning of a running one is of no use to
        // others.
        if sequence.steering.is_some() || !self.truncates {
            return None;
        }
        let request = &requests.jobs[sequence.job].submission;
        // The token of the first row is always computed by the sequence itself.
        let usable = &sequence.tokens[..sequence.first_row()];
        let leads = |other: &RunningSequence| {
            let theirs = &requests.jobs[other.job].submission;
            theirs.prefix_scope == request.prefix_scope
                // Of one caller, the lower priority is the first to be preempted.
                && (theirs.priority >= request.priority || theirs.turn.caller != request.turn.caller)
        };
        let common = |key: SequenceKey| {
            let other = &requests.sequences[key];
            let common = common_prefix(&other.tokens, usable).min(other.first_output_row());
            // A prefix that is computed already needs no waiting: `KvSlots::find` shares it from the running slot.
            let worth = common >= SHARED_TOKENS_MIN && common > other.computed;
            worth.then_some(AwaitedPrefix {
                key,
                number: other.number,
                tokens: common,
            })
        };
        let leaders = self.leaders.iter().copied();
        leaders
            .filter(|&key| leads(&requests.sequences[key]))
            .filter_map(common)
            .max_by_key(|after| after.tokens)
    }
}

/// Returns whether others may wait for the prefix that a running sequence computes. One that waits may do so for long, at the end of
/// its caller's queue or because its reader is slow.
fn may_lead(sequence: &RunningSequence) -> bool {
    // A steerer may suspend its sequence before that has computed the prefix.
    sequence.steering.is_none() && sequence.computed < sequence.first_output_row()
}

/// Starts to read the prefix of a sequence from the disk, once. Returns whether it waits for that.
fn waits_for_disk(requests: &mut Requests, key: SequenceKey) -> bool {
    let sequence = &requests.sequences[key];
    let now = requests.now;
    let looks = match sequence.disk {
        DiskLookup::Pending => true,
        // Now it is known which files there are.
        DiskLookup::Reads(read) => read.wait == DiskWait::Opening && now < read.until,
        DiskLookup::Done => false,
    };
    if let DiskLookup::Reads(read) = sequence.disk
        && requests.slots.tiers().is_reading(read.wait)
    {
        requests.stats.prefix_disk_failures.add(1);
    }
    let first = match sequence.disk {
        DiskLookup::Reads(read) => Some(read.until),
        _ => None,
    };
    let read = looks
        .then(|| {
            let scope = requests.jobs[sequence.job].submission.prefix_scope;
            let usable = &sequence.tokens[..=sequence.first_row()];
            requests.slots.read_from_disk(scope, usable, now, first)
        })
        .flatten();
    requests.sequences[key].disk = read.map_or(DiskLookup::Done, DiskLookup::Reads);
    read.is_some()
}

/// The scope of all callers where they share prefixes. It is that of no caller: files may be read by an engine where they share
/// none.
const SCOPE_OF_ALL: u64 = u64::from_be_bytes(*b"all keys");

fn time_out(requests: &mut Requests, job: usize, error: EngineError) {
    requests.stats.cancelled_timeout.add(1);
    // The slots hold valid tokens, so they are retained as cached prefixes: a client that retries finds its prompt
    // computed.
    requests.fail(job, error, true);
}

/// Gives a sequence a slot, with as much of its prefix as is cached. Returns false if it does not fit now.
fn acquire_slot(requests: &mut Requests, key: SequenceKey) -> bool {
    let Some(shared) = make_room_for(requests, key) else {
        return false;
    };
    let marks = marks_of(requests, key);
    let sequence = &mut requests.sequences[key];
    let job = &mut requests.jobs[sequence.job];
    let request = &job.submission;
    let purpose = SlotPurpose {
        prompt: &request.prompt,
        seed: request.terms.seed,
        choice: sequence.choice,
        max_tokens: request.terms.asked_max_tokens,
    };
    let scope = request.prefix_scope;
    // `acquire` returns fewer tokens than were found if it had to evict the shared prefix itself.
    let Some((slot, computed)) = requests.slots.acquire(scope, shared, &purpose) else {
        return false;
    };
    if let Some(cache_key) = request.cache_key {
        requests.slots.warm(scope, cache_key);
    }
    // Only the first admission counts as a use of the cache: a preempted sequence finds its own tokens.
    if job.started.is_none() {
        job.cached_tokens = u32::try_from(computed).unwrap_or(u32::MAX);
        let stats = &requests.stats;
        stats.prefix_queries.add(request.prompt.len() as u64);
        stats.prefix_hits.add(computed as u64);
        if matches!(shared, Some(FoundPrefix::Saved(_))) {
            stats.prefix_restored.add(computed as u64);
        }
    }
    sequence.slot = Some(slot);
    sequence.due = None;
    sequence.computed = computed;
    sequence.marks = marks.after(computed);
    sequence.after = None;
    true
}

/// Finds where in a sequence's prompt a checkpoint serves other prompts, before it gets a slot: its own tokens are no earlier prompt.
fn marks_of(requests: &Requests, key: SequenceKey) -> PromptMarks {
    if !requests.slots.tiers().makes_checkpoints() {
        return PromptMarks::default();
    }
    let sequence = &requests.sequences[key];
    let prompt = &sequence.tokens[..sequence.prompt_tokens];
    // As much as such a prompt may begin with.
    let usable = &prompt[..prompt.len().min(sequence.first_row() + 1)];
    let scope = requests.jobs[sequence.job].submission.prefix_scope;
    let branch = match usable.len() > BRANCH_TOKENS_MIN {
        true => requests.slots.common_tokens(scope, usable),
        false => 0,
    };
    PromptMarks {
        turn_end: turn_end(prompt, &requests.tokens.ends),
        branch,
    }
}

/// Makes room for a sequence's tokens, one more cell for each running sequence, and a slot. Preempts only sequences
/// that do not run. Returns the shared prefix, if any; `None` if the sequence does not fit.
fn make_room_for(requests: &mut Requests, key: SequenceKey) -> Option<Option<FoundPrefix>> {
    loop {
        let sequence = &requests.sequences[key];
        // Looked up anew in each round: preempting a victim may have released the very slot that held the shared
        // prefix.
        let scope = requests.jobs[sequence.job].submission.prefix_scope;
        let usable = &sequence.tokens[..=sequence.first_row()];
        let found = requests.slots.find(scope, usable);
        if !requests.slots.may_copy(found) {
            return None;
        }
        // Without the cell for each running sequence, the next step would preempt what is admitted now.
        let cells = sequence.tokens.len() + requests.scheduler.running_count();
        if requests.slots.fits(cells, found) {
            return Some(found);
        }
        // A shared one needs fewer cells than a longer one that is copied.
        let in_cells = requests.slots.find_in_cells(scope, usable);
        let in_cells = in_cells.map(FoundPrefix::Slot);
        if in_cells != found && requests.slots.fits(cells, in_cells) {
            return Some(in_cells);
        }
        // A running sequence is never preempted for one that waits: they would displace each other in turn, and compute
        // their prompts again each time.
        let victim = requests.victim(false, Some(key))?;
        requests.preempt(victim);
    }
}
