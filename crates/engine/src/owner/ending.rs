//! Ends sequences and requests, and takes KV cells from sequences that are preempted.

use std::time::Duration;

use super::EngineOwner;
use super::admission::can_resume;
use crate::api::{
    ChoiceEnd, EngineError, EngineEvent, EventKind, FinishReason, StopCause, TokenUsage, Tokens,
};
use crate::scheduler::SequenceKey;

impl EngineOwner {
    /// Ends a sequence; its output so far stands. The last sequence of a request ends the request.
    pub(super) fn finish(&mut self, key: SequenceKey, finish: ChoiceEnd) {
        self.emit_unreported(key);
        let sequence = &self.sequences[key];
        let (job, choice) = (sequence.job, sequence.choice);
        // After a complete stop string the remaining text is dropped; after any other end no stop string can follow, so
        // it is sent.
        if !matches!(finish.stop, Some(StopCause::Text(_))) {
            self.flush_text(key);
        }
        let reason = match finish.reason {
            FinishReason::Stop => 0,
            FinishReason::Length => 1,
            FinishReason::Controller => 2,
            FinishReason::Cancelled => 3,
        };
        self.inbox.stats.finished[reason].add(1);
        self.emit(job, choice, EventKind::Finish(finish));
        self.report.finished.push(self.sequences[key].number);
        self.leave(key, true);
        if self.jobs[job].members.is_empty() {
            self.conclude(job);
        }
    }

    /// Emits the text that was held back as the possible start of a stop string.
    fn flush_text(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key];
        let mut text = String::new();
        sequence.text.flush(&mut text);
        if !text.is_empty() {
            let (job, choice) = (sequence.job, sequence.choice);
            self.release_text(job, choice, text);
        }
    }

    /// Adds the text to the choice's last token event of this step, or emits it as an event of its own.
    fn release_text(&mut self, job: usize, choice: u32, text: String) {
        let last = self
            .outgoing
            .iter_mut()
            .rev()
            .find(|(to, event)| *to == job && event.choice == choice);
        if let Some((
            _,
            EngineEvent {
                kind: EventKind::Tokens(tokens),
                ..
            },
        )) = last
        {
            tokens.text.push_str(&text);
            return;
        }
        self.emit(
            job,
            choice,
            EventKind::Tokens(Tokens {
                text: text.into(),
                ..Tokens::default()
            }),
        );
    }

    /// Ends a request with an error. `sound`: the contents of its slots are valid, so they can be cached as prefixes.
    pub(super) fn fail(&mut self, job: usize, error: EngineError, sound: bool) {
        for key in self.jobs[job].members.clone() {
            self.emit_unreported(key);
            // The tokens of the held-back text have been reported, so the text is sent too.
            self.flush_text(key);
            self.report.finished.push(self.sequences[key].number);
            self.leave(key, sound);
        }
        self.inbox.stats.failed.add(1);
        self.emit(job, 0, EventKind::Error(error));
        self.close(job);
    }

    /// Ends a request whose reader was dropped.
    pub(super) fn cancel(&mut self, job: usize) {
        for key in self.jobs[job].members.clone() {
            self.report.cancelled.push(self.sequences[key].number);
            self.leave(key, true);
        }
        self.inbox.stats.cancelled_client.add(1);
        self.close(job);
        // Drops its events of this step: it has no reader.
        self.outgoing.retain(|(to, _)| *to != job);
        let job = self.jobs.remove(job);
        job.outbox.end();
    }

    fn conclude(&mut self, job: usize) {
        let request = &self.jobs[job];
        let usage = TokenUsage {
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX)
                - u32::from(request.is_score_only()),
            completion_tokens: request.completion_tokens,
            cached_tokens: request.cached_tokens,
            seed: request.terms.seed,
            queued: request.started.unwrap_or(self.now).since(request.arrived),
            prefill: match (request.started, request.first_token) {
                (Some(started), Some(first)) => first.since(started),
                _ => Duration::ZERO,
            },
        };
        self.inbox
            .stats
            .request_generation_tokens
            .observe(f64::from(request.completion_tokens));
        self.emit(job, 0, EventKind::Usage(usage));
        self.close(job);
    }

    /// Marks a request as ended: its last event is queued for publishing.
    fn close(&mut self, job: usize) {
        let request = &mut self.jobs[job];
        request.ended = true;
        if request.started.is_none() {
            let caller = request.turn.caller;
            self.inbox.queue.leave(caller, request.prompt.len());
        }
        self.observe_end(job);
    }

    /// Records the durations of the request and its phases.
    fn observe_end(&self, job: usize) {
        let (job, now, stats) = (&self.jobs[job], self.now, &self.inbox.stats);
        stats.request_seconds.observe_span(now.since(job.arrived));
        if let Some(started) = job.started {
            stats.inference_seconds.observe_span(now.since(started));
        }
        let Some(first) = job.first_token else { return };
        let decode = now.since(first);
        stats.decode_seconds.observe_span(decode);
        // The first token of each choice belongs to the prefill time.
        let choices = job.next_choice;
        let gaps = job.completion_tokens.saturating_sub(choices);
        if gaps > 0 {
            let mean = decode.as_secs_f64() * f64::from(choices) / f64::from(gaps);
            stats.output_token_seconds.observe(mean);
        }
    }

    /// Removes a sequence everywhere. `keep`: its tokens stay cached in its slot as a prefix for later prompts.
    fn leave(&mut self, key: SequenceKey, keep: bool) {
        let sequence = self.sequences.remove(key);
        self.scheduler.remove(key);
        let job = &mut self.jobs[sequence.job];
        job.members.retain(|&member| member != key);
        let Some(slot) = sequence.slot else { return };
        // A prefix shorter than the minimum is never used, so it is not cached.
        let min = self.config.prefix_tokens_min.max(1) as usize;
        if !keep || self.cache.len(slot) < min {
            self.cache.release(slot);
            self.model.release(slot);
            return;
        }
        let model = &*self.model;
        let resumes = |slot, tokens| can_resume(model, slot, tokens);
        let prompt = sequence.prompt_tokens;
        for slot in self.cache.keep(slot, prompt, job.cache_key, resumes) {
            self.model.release(slot);
        }
    }

    /// Preempts a sequence: frees its KV cells; its tokens are computed again after it is admitted again.
    pub(super) fn preempt(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key];
        sequence.computed = 0;
        sequence.cached_row = None;
        if let Some(slot) = sequence.slot.take() {
            self.cache.release(slot);
            self.model.release(slot);
        }
        self.report.preempted.push(sequence.number);
        self.scheduler.preempt(key);
    }

    /// Truncates a sequence's slot to its first `tokens` tokens; later ones are computed again.
    pub(super) fn cut_back(&mut self, key: SequenceKey, tokens: usize) {
        let sequence = &mut self.sequences[key];
        sequence.cached_row = None;
        if sequence.computed <= tokens {
            return;
        }
        let Some(slot) = sequence.slot else { return };
        // A slot holds fewer tokens than the context, which is a u32.
        let cached = u32::try_from(tokens).unwrap_or(u32::MAX);
        if self.info.truncates && self.model.can_resume(slot, cached) {
            sequence.computed = tokens;
            self.cache.truncate(slot, tokens);
            self.model.truncate(slot, cached);
        } else {
            self.preempt(key);
        }
    }

    /// Queues an event of this step; it is published when the step is complete.
    pub(super) fn emit(&mut self, job: usize, choice: u32, kind: EventKind) {
        let step = self.report.step;
        self.outgoing
            .push((job, EngineEvent { step, choice, kind }));
    }
}
