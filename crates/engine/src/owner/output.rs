//! [`StepOutput`]: the events of a step, until the step is complete.
//!
//! Events are published together at the end of a step, and each reader is woken once after all of them are published
//! (D-6): a reader that runs on another core must not find half a step, and must not compete with the owner for it.

use slab::Slab;

use super::fenced;
use super::sequence::{RequestJob, RunningSequence};
use crate::api::{EngineEvent, EventKind, Sampled, Tokens};
use crate::stats::Counter;

/// The unpublished events of a step, in order, each with the key of its request.
#[derive(Debug, Default)]
pub(super) struct StepOutput {
    step: u64,
    events: Vec<(usize, EngineEvent)>,
    /// Buffer of [`StepOutput::publish`], which retains its allocation.
    readers: Vec<usize>,
}

impl StepOutput {
    /// Sets the number of the step that events carry from now on.
    pub(super) fn begin(&mut self, step: u64) {
        self.step = step;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Adds an event.
    pub(super) fn emit(&mut self, job: usize, choice: u32, kind: EventKind) {
        let step = self.step;
        self.events.push((job, EngineEvent { step, choice, kind }));
    }

    /// Emits tokens of a sequence.
    pub(super) fn emit_tokens(&mut self, sequence: &mut RunningSequence, mut tokens: Tokens) {
        // They are complete by now: output rows come in order, and those of the prompt precede the first of the output.
        tokens.prompt = sequence.take_prompt_scores();
        self.emit(sequence.job, sequence.choice, EventKind::Tokens(tokens));
    }

    /// Emits tokens together with the unreported ones before them; with `joins`, retains all of them for the next
    /// event.
    pub(super) fn emit_or_join(
        &mut self,
        sequence: &mut RunningSequence,
        tokens: Tokens,
        joins: bool,
    ) {
        let tokens = match sequence.unreported.take() {
            Some(earlier) => earlier.followed_by(tokens),
            None => tokens,
        };
        if joins {
            sequence.unreported = Some(Box::new(tokens));
        } else {
            self.emit_tokens(sequence, tokens);
        }
    }

    /// Emits what the steerer of a sequence printed and wrote since the last report.
    pub(super) fn emit_report(&mut self, sequence: &mut RunningSequence, panics: &Counter) {
        let steering = sequence.steering.as_mut();
        if let Some(report) = steering.and_then(|steering| steering.take_report(panics)) {
            self.emit(sequence.job, sequence.choice, EventKind::Report(report));
        }
    }

    /// Emits all that a sequence still retains, because nothing follows it. With `drop_held`, the text that was held
    /// back as the possible start of a stop string is not sent.
    pub(super) fn emit_rest(
        &mut self,
        sequence: &mut RunningSequence,
        drop_held: bool,
        panics: &Counter,
    ) {
        // Tokens before held-back text, which follows them in the output.
        if let Some(tokens) = sequence.unreported.take() {
            self.emit_tokens(sequence, *tokens);
        }
        let mut held = String::new();
        if !drop_held {
            sequence.text.flush(&mut held);
        }
        if !held.is_empty() {
            self.append_text(sequence.job, sequence.choice, held);
        }
        self.emit_report(sequence, panics);
    }

    /// Adds text to the last token event of a choice, or emits it as an event of its own.
    pub(super) fn append_text(&mut self, job: usize, choice: u32, text: String) {
        let last = self
            .events
            .iter_mut()
            .rev()
            .find(|(to, event)| *to == job && event.choice == choice);
        // Only if that is the choice's last event: text must not come before an event that was emitted after the
        // tokens.
        if let Some((_, event)) = last
            && let EventKind::Tokens(tokens) = &mut event.kind
        {
            tokens.text.push_str(&text);
            return;
        }
        let tokens = Tokens {
            text: text.into(),
            ..Tokens::default()
        };
        self.emit(job, choice, EventKind::Tokens(tokens));
    }

    /// Adds a token to the event that was emitted last, if that holds tokens of the same request; returns the token
    /// otherwise.
    pub(super) fn append_token(
        &mut self,
        job: usize,
        token: Sampled,
        text: &str,
    ) -> Result<(), Sampled> {
        match self.events.last_mut() {
            Some((to, event)) if *to == job => match &mut event.kind {
                EventKind::Tokens(tokens) => {
                    tokens.tokens.push(token);
                    tokens.text.push_str(text);
                    Ok(())
                }
                _ => Err(token),
            },
            _ => Err(token),
        }
    }

    /// Drops the events of a request that has no reader any more.
    pub(super) fn discard(&mut self, job: usize) {
        self.events.retain(|(to, _)| *to != job);
    }

    pub(super) fn clear(&mut self) {
        self.events.clear();
        self.readers.clear();
    }

    /// Publishes every event to its reader, then wakes each reader once, and removes the requests that have ended.
    pub(super) fn publish(&mut self, jobs: &mut Slab<RequestJob>, panics: &Counter) {
        self.readers.clear();
        for (job, event) in self.events.drain(..) {
            // Every event of the step before the first wake-up: a face that serves several streams on one connection
            // would otherwise send half a step (LM-601).
            jobs[job].outbox.publish(event);
            self.readers.push(job);
        }
        // One wake-up for each reader, however many events it gets.
        self.readers.sort_unstable();
        self.readers.dedup();
        for &job in &self.readers {
            // Wakers and the values that a request holds are foreign code, so their panics are caught here.
            let woken = if jobs[job].ended {
                // Dropping the outbox wakes its reader.
                let job = jobs.remove(job);
                job.outbox.end();
                fenced(move || drop(job))
            } else {
                fenced(|| jobs[job].outbox.wake())
            };
            if !woken {
                panics.add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::api::{ChoiceEnd, FinishReason};

    fn token(id: u32) -> Sampled {
        Sampled {
            id,
            logprob: 0.0,
            rank: None,
            top: Vec::new(),
            special: false,
            forced: false,
        }
    }

    fn tokens(id: u32, text: &str) -> EventKind {
        EventKind::Tokens(Tokens {
            tokens: smallvec![token(id)],
            text: text.into(),
            ..Tokens::default()
        })
    }

    fn texts(output: &StepOutput) -> Vec<(usize, u32, String)> {
        let text = |(job, event): &(usize, EngineEvent)| match &event.kind {
            EventKind::Tokens(tokens) => (*job, event.choice, tokens.text.to_string()),
            _ => (*job, event.choice, "end".to_owned()),
        };
        output.events.iter().map(text).collect()
    }

    #[test]
    fn held_back_text_joins_the_last_tokens_of_its_own_choice() {
        let mut output = StepOutput::default();
        output.emit(1, 0, tokens(10, "a"));
        output.emit(1, 1, tokens(11, "b"));
        output.append_text(1, 0, "!".to_owned());
        assert_eq!(
            texts(&output),
            [(1, 0, "a!".to_owned()), (1, 1, "b".to_owned())]
        );
    }

    #[test]
    fn text_after_another_event_is_an_event_of_its_own() {
        let mut output = StepOutput::default();
        let (reason, stop) = (FinishReason::Stop, None);
        output.emit(1, 0, EventKind::Finish(ChoiceEnd { reason, stop }));
        output.append_text(1, 0, "!".to_owned());
        assert_eq!(
            texts(&output),
            [(1, 0, "end".to_owned()), (1, 0, "!".to_owned())]
        );
    }

    #[test]
    fn scored_tokens_of_one_request_form_one_event() {
        let mut output = StepOutput::default();
        assert!(output.append_token(1, token(10), "a").is_err());
        output.emit(1, 0, tokens(10, "a"));
        assert!(output.append_token(1, token(11), "b").is_ok());
        assert!(output.append_token(2, token(12), "c").is_err());
        assert_eq!(texts(&output), [(1, 0, "ab".to_owned())]);
    }

    #[test]
    fn a_cancelled_request_publishes_nothing() {
        let mut output = StepOutput::default();
        output.emit(1, 0, tokens(10, "a"));
        output.emit(2, 0, tokens(10, "b"));
        output.discard(1);
        assert_eq!(texts(&output), [(2, 0, "b".to_owned())]);
    }
}
