//! The state of one sequence, and of the request that it belongs to.
//!
//! A sequence is its tokens and the number of them that are computed. Prompts, forced tokens, recomputation after a
//! preemption and plain decoding are the same: known tokens that are not computed. Only when none is left is there an
//! output row after the last token, from which a further token is sampled.

use std::ops::Deref;
use std::sync::Arc;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::SequenceId;
use super::checkpoints::PromptMarks;
use super::fuel::SpentFuel;
use super::kv_slots::disk::DiskRead;
use super::speculation::Drafting;
use super::steering::Steering;
use crate::api::{Sampled, Tokens, Vocabulary};
use crate::model::SlotId;
use crate::outbox::Sender;
use crate::ranking::RankedRow;
use crate::sampling::TokenHistory;
use crate::scheduler::SequenceKey;
use crate::stats::EngineStats;
use crate::submission::Submission;
use crate::text::ChoiceText;

/// A request in progress.
pub(super) struct RequestJob {
    pub(super) outbox: Sender,
    /// What was submitted, without its steerer, which belongs to the sequences.
    pub(super) submission: Submission,
    /// Its steerer, until that has begun; there are no sequences before.
    pub(super) opening: Option<Steering>,
    pub(super) steered: bool,
    /// Its sequences that have not ended.
    pub(super) members: Vec<SequenceKey>,
    pub(super) next_choice: u32,
    pub(super) arrived: Time,
    pub(super) deadline: Option<Time>,
    /// When its first sequence got a slot; `None`: it is still charged to the queue.
    pub(super) started: Option<Time>,
    pub(super) first_token: Option<Time>,
    pub(super) completion_tokens: u32,
    pub(super) cached_tokens: u32,
    /// Steps in a row in which all its sequences were suspended.
    pub(super) suspended_steps: u32,
    /// When the last of these steps was counted.
    pub(super) suspended_at: Time,
    pub(super) spent: SpentFuel,
    /// One of its choices has ended without an error.
    pub(super) has_finished: bool,
    /// Its last event is queued; the job is removed when that is published.
    pub(super) ended: bool,
}

impl RequestJob {
    /// Returns the tokens known at the start: the prompt, and the tokens to be scored except the last, after which
    /// nothing is computed.
    pub(super) fn tokens(&self) -> KnownTokens {
        let mut tokens = self.submission.prompt.to_vec();
        if let Some(scored) = &self.submission.terms.scored {
            // `scored.tokens` is not empty (checked at submission). With an empty prompt its first token is the prompt,
            // and for a single token the range is reversed, for which `get` returns nothing.
            let rest = usize::from(scored.score_only)..scored.tokens.len() - 1;
            tokens.extend(scored.tokens.get(rest).unwrap_or_default());
        }
        KnownTokens {
            shared: Some(Arc::new(tokens)),
            own: Vec::new(),
        }
    }

    /// Records the durations of the request and its phases.
    pub(super) fn observe_end(&self, stats: &EngineStats, now: Time) {
        stats.request_seconds.observe_span(now.since(self.arrived));
        if let Some(started) = self.started {
            stats.inference_seconds.observe_span(now.since(started));
        }
        let Some(first) = self.first_token else {
            return;
        };
        let decode = now.since(first);
        stats.decode_seconds.observe_span(decode);
        // The first token of each choice belongs to the prefill time.
        let choices = self.next_choice;
        let gaps = self.completion_tokens.saturating_sub(choices);
        if gaps > 0 {
            let mean = decode.as_secs_f64() * f64::from(choices) / f64::from(gaps);
            stats.output_token_seconds.observe(mean);
        }
    }
}

/// An output row that is retained until its steerer is ready.
#[derive(Clone, Debug)]
pub(super) enum CachedRow {
    Logits(Vec<f32>),
    Ranked(RankedRow),
}

/// A prefix that another sequence is computing.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwaitedPrefix {
    pub(super) key: SequenceKey,
    /// Keys are reused; numbers are not, so the number tells whether the key still means that sequence.
    pub(super) number: SequenceId,
    /// Length of the common prefix.
    pub(super) tokens: usize,
}

/// Whether a sequence's prefix was looked for on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum DiskLookup {
    #[default]
    Pending,
    Reads(DiskRead),
    Done,
}

/// The known tokens of a sequence. The choices of a request share those of its start until they append to them: a queue
/// full of requests for many choices would hold each prompt a hundred times.
///
/// Not an `Arc` that is copied on write, which would cost each token two atomic operations.
#[derive(Clone, Debug)]
pub(super) struct KnownTokens {
    /// `None`: they are in `own`.
    shared: Option<Arc<Vec<Token>>>,
    own: Vec<Token>,
}

impl KnownTokens {
    /// The tokens, to be changed; the last sequence that shares them takes them without a copy.
    #[inline]
    pub(super) fn to_mut(&mut self) -> &mut Vec<Token> {
        if let Some(shared) = self.shared.take() {
            self.own = Arc::unwrap_or_clone(shared);
        }
        &mut self.own
    }
}

impl Deref for KnownTokens {
    type Target = [Token];

    #[inline]
    fn deref(&self) -> &[Token] {
        self.shared.as_deref().unwrap_or(&self.own).as_slice()
    }
}

/// The sequence of one choice.
#[derive(Debug)]
pub(super) struct RunningSequence {
    pub(super) number: SequenceId,
    /// The key of its request.
    pub(super) job: usize,
    pub(super) choice: u32,
    /// Prompt and output, as the model sees them.
    pub(super) tokens: KnownTokens,
    pub(super) prompt_tokens: usize,
    /// Its output is given and scored (LM-312): `tokens` contains all of it except the last token, from the start.
    pub(super) scored: bool,
    /// Log-probabilities of the tokens of the prompt after the first, as far as they were scored; `None`: not
    /// requested, or already reported.
    pub(super) prompt_scores: Option<Vec<f32>>,
    /// How many of `tokens` its slot holds; 0 without a slot. While a draft is verified, the slot holds the rest of it too.
    pub(super) computed: usize,
    /// Steps in a row in which its prompt was the oldest and others were first.
    pub(super) passed_over: u32,
    pub(super) slot: Option<SlotId>,
    /// The key of the adapters that compute for it.
    pub(super) adapters: u64,
    /// When its adapters have their next turn, in virtual time; `None`: they had none beside others since it got its slot.
    pub(super) due: Option<u64>,
    /// Where in its prompt other prompts may go on differently.
    pub(super) marks: PromptMarks,
    /// It waits until another sequence, which has a slot, has computed the common prefix.
    pub(super) after: Option<AwaitedPrefix>,
    pub(super) disk: DiskLookup,
    pub(super) asleep_until: Option<Time>,
    pub(super) cached_row: Option<CachedRow>,
    /// Tokens ever appended to the output, rolled-back ones included (AI-824).
    pub(super) appended: u32,
    /// Sampled tokens that a splice dropped; they move the random draws on.
    pub(super) dropped: u32,
    /// How many of `tokens` were counted as processed (AI-825); never reset by a preemption.
    pub(super) charged: usize,
    pub(super) text: ChoiceText,
    pub(super) history: Option<TokenHistory>,
    /// The state of mirostat: the surprise above which tokens are dropped, in bits.
    pub(super) mirostat: f32,
    pub(super) steering: Option<Steering>,
    pub(super) last_token_at: Option<Time>,
    /// Tokens that are not reported yet, because they go with the next one ([`crate::model::Model::joins`]).
    pub(super) unreported: Option<Box<Tokens>>,
    /// What it drafts; `None` until its first draft.
    pub(super) drafting: Option<Box<Drafting>>,
}

impl RunningSequence {
    /// Returns the number of known tokens that are not computed.
    pub(super) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Returns the draft of this step, which its slot holds behind the known tokens until it is verified.
    pub(super) fn draft(&self) -> &[Token] {
        self.drafting
            .as_ref()
            .map_or(&[], |drafting| drafting.draft())
    }

    /// Appends a token to the output; its text was added before. `context` is the token that the model sees.
    #[inline]
    pub(super) fn record(
        &mut self,
        sampled: &Sampled,
        context: Token,
        vocabulary: &dyn Vocabulary,
    ) {
        self.tokens.to_mut().push(context);
        if let Some(history) = &mut self.history {
            history.append(sampled.id, &self.tokens, vocabulary);
        }
        if let Some(steering) = &mut self.steering {
            steering.output.push(sampled.clone(), &self.text);
        }
    }

    /// Returns the index of the first token whose output row is still needed. The tokens before it may come from a
    /// cached prefix.
    pub(super) fn first_row(&self) -> usize {
        let next = self.next_in_prompt().map(|next| next - 1);
        next.unwrap_or_else(|| self.first_output_row())
    }

    /// Returns whether the output row of this token is needed.
    pub(super) fn wants_row(&self, index: usize) -> bool {
        let in_prompt = || {
            let next = self.next_in_prompt();
            next.is_some_and(|next| (next..self.prompt_tokens).contains(&(index + 1)))
        };
        index >= self.first_output_row() || in_prompt()
    }

    /// Returns the index of the prompt token that is scored next.
    pub(super) fn next_in_prompt(&self) -> Option<usize> {
        let next = self.prompt_scores.as_ref()?.len() + 1;
        (next < self.prompt_tokens).then_some(next)
    }

    /// Takes the prompt logprobs once they are complete; only the first call returns them.
    pub(super) fn take_prompt_scores(&mut self) -> Option<Arc<[f32]>> {
        if self.next_in_prompt().is_some() {
            return None;
        }
        self.prompt_scores.take().map(Arc::from)
    }

    /// Returns the index of the first token whose row is needed for the output.
    pub(super) fn first_output_row(&self) -> usize {
        if self.scored {
            // The row before the next scored token; `appended` counts the scores reported so far.
            (self.prompt_tokens + self.appended as usize).saturating_sub(1)
        } else {
            self.tokens.len() - 1
        }
    }

    /// Returns the output from its end: the tokens themselves, not their replacements in the context (AI-804).
    pub(super) fn emitted(&self) -> impl Iterator<Item = Token> + '_ {
        // Without a steerer the context is the output, and no second copy of it is kept.
        let (steered, plain) = match &self.steering {
            Some(steering) => (&steering.output[..], &[][..]),
            None => (&[][..], &self.tokens[self.prompt_tokens..]),
        };
        let steered = steered.iter().rev().map(|sampled| sampled.id);
        steered.chain(plain.iter().rev().copied())
    }

    /// Returns whether the prompt is computed except its last token, which every sharer computes itself.
    pub(super) fn can_share_prompt(&self) -> bool {
        self.computed + 1 >= self.prompt_tokens
    }

    /// Returns whether the sequence skips this step, because its steerer suspends it or has no result of `pre` yet.
    pub(super) fn skips_step(&self) -> bool {
        let steering = self.steering.as_ref();
        steering.is_some_and(|steering| steering.is_suspended() || steering.is_in_pre())
    }

    /// Returns whether the steerer suspends it in this step.
    pub(super) fn is_suspended(&self) -> bool {
        self.steering.as_ref().is_some_and(Steering::is_suspended)
    }

    /// Returns whether `mid` of its steerer has begun and has no result yet.
    pub(super) fn is_in_mid(&self) -> bool {
        self.steering.as_ref().is_some_and(Steering::is_in_mid)
    }
}
