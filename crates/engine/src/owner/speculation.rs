//! [`Speculation`]: drafts the next tokens of sequences, so that one decode call gives several tokens of each.
//!
//! ```text
//!   plan ─► draft: copied from where the last tokens occurred before ─► decode: last token and draft, a row after each
//!        ─► verify: sample each row as always; while the token is that of the draft, the next row is the right one
//!        ─► accept those, truncate the slot behind them
//! ```
//!
//! Every token is sampled from the row that follows the tokens before it, with the draw of its position. So the output is
//! that of decoding without drafts: not only its distribution, but the tokens themselves, for each seed. A draft decides
//! which rows are computed before they are needed, and nothing else.
//!
//! Drafts take what a step has to spare: free KV cells, output rows, room of the batch and time. A sequence is left out
//! whose steerer decides after each token, or whose tokens are given and scored.

use std::time::Duration;

use sapwood_proto::steer::Token;

use super::draft_pace::{DraftCost, DraftLength, StepDrafts};
use super::requests::Requests;
use crate::prompt_lookup::PromptLookup;
use crate::scheduler::{SequenceKey, StepShare};

/// Tokens of the output for which a lookup has room, beside the prompt.
const OUTPUT_TOKENS: usize = 2_048;

/// What a sequence drafts.
#[derive(Debug)]
pub(super) struct Drafting {
    /// `None` until the first draft, and after a preemption.
    lookup: Option<PromptLookup>,
    length: DraftLength,
    /// The draft of this step, which follows the last known token.
    draft: Vec<Token>,
    /// How many tokens of it were accepted.
    accepted: usize,
    /// The slot could not be truncated: nothing is drafted any more.
    pub(super) off: bool,
}

impl Drafting {
    fn new(max: usize) -> Self {
        Self {
            lookup: None,
            length: DraftLength::new(max),
            draft: Vec::new(),
            accepted: 0,
            off: false,
        }
    }

    /// Returns the draft of this step.
    pub(super) fn draft(&self) -> &[Token] {
        &self.draft
    }

    /// Returns whether this is the next token of the draft.
    pub(super) fn proposes(&self, token: Token) -> bool {
        self.draft.get(self.accepted) == Some(&token)
    }

    /// Drafts at most so many tokens behind those that are known.
    fn propose(&mut self, tokens: &[Token], most: usize) {
        let most = self.length.next().min(most);
        if most > 0 && !self.off {
            let lookup = self
                .lookup
                .get_or_insert_with(|| PromptLookup::new(tokens.len() + OUTPUT_TOKENS));
            lookup.draft(tokens, most, &mut self.draft);
        }
    }

    /// Compares a sampled token with the next one of the draft; returns whether it is accepted.
    pub(super) fn accepts(&mut self, sampled: Option<&Token>) -> bool {
        let is_same = sampled.is_some() && self.draft.get(self.accepted) == sampled;
        self.accepted += usize::from(is_same);
        is_same
    }

    /// Ends the draft after a token that is not in it.
    pub(super) fn finish(&mut self) {
        self.length.observe(self.draft.len(), self.accepted);
        self.clear();
    }

    /// Frees the memory of the lookup, which is made again from the tokens: sequences without a slot may be many.
    pub(super) fn release(&mut self) {
        self.lookup = None;
        self.clear();
    }

    /// Drops the draft.
    pub(super) fn clear(&mut self) {
        self.draft.clear();
        self.accepted = 0;
    }
}

/// What a step has to spare for drafts.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftBudget {
    /// Tokens: the least of the entries, output rows, free KV cells and prompt tokens that are left.
    pub(super) tokens: usize,
    /// Prompt tokens of the step.
    pub(super) prompt_tokens: usize,
    /// What the decoding sequences and their drafts may take, in seconds.
    pub(super) time_max: f64,
    /// Time passes within a step, so that what drafts cost is measured.
    pub(super) timed: bool,
}

/// Drafts for the sequences of a step.
#[derive(Debug)]
pub(super) struct Speculation {
    /// The maximum of tokens of a draft; 0: nothing is drafted.
    max: usize,
    cost: DraftCost,
    /// Sequences with a draft in this step. A buffer that retains its allocation.
    drafting: Vec<SequenceKey>,
    /// Which of them gets first what cannot be divided; moves on with each step.
    turn: usize,
}

impl Speculation {
    /// Drafts at most `max` tokens of a sequence; 0: none.
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            cost: DraftCost::default(),
            drafting: Vec::new(),
            turn: 0,
        }
    }

    /// Drafts for the sequences of a plan, after dropping what is left of other drafts.
    pub(super) fn draft(
        &mut self,
        requests: &mut Requests,
        shares: &[StepShare],
        budget: DraftBudget,
    ) {
        self.clear(requests);
        let decoding = shares.iter().filter(|share| share.tokens == 1).count();
        if self.max == 0 || decoding == 0 || budget.tokens == 0 {
            return;
        }
        // The time of a step with prompt tokens says nothing about drafts, so nothing is tried or left out to measure it.
        let measures = budget.timed && budget.prompt_tokens == 0;
        if measures && self.cost.needs_plain(decoding) {
            return;
        }
        for share in shares.iter().filter(|share| share.tokens == 1) {
            let most = most_tokens(requests, share.key).min(budget.tokens);
            if most == 0 {
                continue;
            }
            let sequence = &mut requests.sequences[share.key];
            let drafting = sequence
                .drafting
                .get_or_insert_with(|| Box::new(Drafting::new(self.max)));
            drafting.propose(&sequence.tokens, most);
            if !drafting.draft.is_empty() {
                self.drafting.push(share.key);
            }
        }
        self.divide(requests, budget.tokens);
        if budget.timed && !self.drafting.is_empty() {
            self.shorten(requests, decoding, budget);
        }
    }

    /// Shortens the drafts to so many tokens together: each has an equal part, and in turn what others leave of theirs.
    fn divide(&mut self, requests: &mut Requests, tokens: usize) {
        let sequences = &mut requests.sequences;
        let length = |key: &SequenceKey| sequences[*key].draft().len();
        let all: usize = self.drafting.iter().map(length).sum();
        if all <= tokens {
            return;
        }
        let part = tokens / self.drafting.len();
        let parts = self.drafting.iter().map(|key| length(key).min(part));
        let mut left = tokens - parts.sum::<usize>();
        self.turn = (self.turn + 1) % self.drafting.len();
        self.drafting.rotate_left(self.turn);
        self.drafting.retain(|&key| {
            let Some(drafting) = &mut sequences[key].drafting else {
                return false;
            };
            let more = drafting.draft.len().saturating_sub(part).min(left);
            left -= more;
            drafting.draft.truncate(part + more);
            !drafting.draft.is_empty()
        });
    }

    /// Shortens the drafts to where they save more time than they take and hold nobody up for long, or drops them. What was not
    /// measured is tried.
    fn shorten(&mut self, requests: &mut Requests, decoding: usize, budget: DraftBudget) {
        let measures = budget.prompt_tokens == 0;
        let mut most = self.max;
        while !self
            .cost
            .pays(self.step_drafts(requests, decoding, most, budget.time_max))
            .unwrap_or(measures)
        {
            most /= 2;
            if most == 0 {
                if !measures || !self.cost.tries_again() {
                    self.clear(requests);
                }
                return;
            }
        }
        self.cost.paid();
        for &key in &self.drafting {
            if let Some(drafting) = &mut requests.sequences[key].drafting {
                drafting.draft.truncate(most);
            }
        }
    }

    /// Returns the drafts of this step, each of at most `most` tokens.
    fn step_drafts(
        &self,
        requests: &Requests,
        decoding: usize,
        most: usize,
        time_max: f64,
    ) -> StepDrafts {
        let all_draft = self.drafting.len() == decoding;
        let mut step = StepDrafts {
            decoding,
            tokens: 0,
            accepted: 0.0,
            least: if all_draft { f64::INFINITY } else { 0.0 },
            time_max,
        };
        let drafts = self.drafting.iter();
        for drafting in drafts.filter_map(|&key| requests.sequences[key].drafting.as_ref()) {
            let tokens = drafting.draft.len().min(most);
            let accepted = drafting.length.expected(tokens);
            step.tokens += tokens;
            step.accepted += accepted;
            step.least = step.least.min(accepted);
        }
        step
    }

    /// Drops the drafts of this step.
    pub(super) fn clear(&mut self, requests: &mut Requests) {
        for key in self.drafting.drain(..) {
            // It may have ended since, and its key may be that of another one.
            if let Some(sequence) = requests.sequences.get_mut(key)
                && let Some(drafting) = &mut sequence.drafting
            {
                drafting.clear();
            }
        }
    }

    /// Takes the time of a decode call without prompt tokens.
    pub(super) fn observe(&mut self, decoding: usize, drafted: usize, took: Duration) {
        if decoding > 0 && self.max > 0 {
            self.cost.observe(decoding, drafted, took);
        }
    }
}

/// Returns how many draft tokens a sequence can use, as far as its own limits go; 0 if it has none to sample.
fn most_tokens(requests: &Requests, key: SequenceKey) -> usize {
    let sequence = &requests.sequences[key];
    // Between two tokens of a steered sequence its steerer is asked, and scored tokens are known.
    if sequence.steering.is_some() || sequence.scored || sequence.pending() != 1 {
        return 0;
    }
    let terms = requests.terms(key);
    // The token of the last row is no part of the draft.
    let output = terms.max_tokens.saturating_sub(sequence.appended + 1) as usize;
    let context = requests
        .context_tokens
        .saturating_sub(sequence.tokens.len() + 1);
    let outbox = &requests.jobs[sequence.job].outbox;
    let events = outbox.room(sequence.choice).saturating_sub(1) as usize;
    output.min(context).min(events)
}
