//! [`Speculation`]: drafts the next tokens of sequences, so that one decode call gives several tokens of each.
//!
//! ```text
//!   plan ─► draft: copied from where the last tokens occurred before, or else given by the draft model
//!        ─► decode: last token and draft, a row after each
//!        ─► verify: sample each row as always; while the token is that of the draft, the next row is the right one
//!        ─► accept those, truncate the slot behind them
//! ```
//!
//! Looking up costs nothing, so it comes first. The draft model takes time ([`super::drafter`]), which counts in whether a
//! draft pays: so the lengths of its drafts are planned before it is asked.
//!
//! Every token is sampled from the row that follows the tokens before it, with the draw of its position. So the output is
//! that of decoding without drafts: not only its distribution, but the tokens themselves, for each seed. A draft decides
//! which rows are computed before they are needed, and nothing else.
//!
//! Drafts take what a step has to spare: free KV cells, output rows, room of the batch and time. A sequence is left out
//! whose steerer decides after each token, or whose tokens are given and scored.

use std::time::Duration;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::draft_pace::{DraftCost, DraftLength, DraftTrials, SLOWER_MAX, StepDrafts};
use super::drafter::{BEHIND_MAX, CatchUpBudget, DraftTask, Drafter};
use super::requests::Requests;
use super::step_clock::StepClock;
use crate::prompt_lookup::PromptLookup;
use crate::scheduler::{SequenceKey, StepShare};

/// Tokens of the output for which a lookup has room, beside the prompt.
const OUTPUT_TOKENS: usize = 2_048;

/// What a sequence drafts.
#[derive(Debug)]
pub(super) struct Drafting {
    /// `None` until the first draft, and after a preemption.
    lookup: Option<PromptLookup>,
    looked_up: DraftLength,
    modelled: DraftLength,
    /// The draft of this step is the draft model's.
    is_modelled: bool,
    /// How many tokens the draft of this step may have; that of the draft model is made last.
    planned: usize,
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
            looked_up: DraftLength::new(max),
            modelled: DraftLength::new(max),
            is_modelled: false,
            planned: 0,
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

    /// Looks up at most so many tokens behind those that are known; returns whether there are some.
    fn look_up(&mut self, tokens: &[Token], most: usize) -> bool {
        if most == 0 || self.off {
            return false;
        }
        let length = self.looked_up.next().min(most);
        if length > 0 {
            let lookup = self
                .lookup
                .get_or_insert_with(|| PromptLookup::new(tokens.len() + OUTPUT_TOKENS));
            lookup.draft(tokens, length, &mut self.draft);
        }
        self.planned = self.draft.len();
        self.is_modelled = false;
        self.planned > 0
    }

    /// Plans a draft of the draft model, of at most so many tokens; returns whether it has any.
    fn plan_modelled(&mut self, most: usize) -> bool {
        if most == 0 || self.off {
            return false;
        }
        self.is_modelled = true;
        self.planned = self.modelled.next().min(most);
        self.planned > 0
    }

    /// Shortens what is planned.
    fn shorten(&mut self, most: usize) {
        self.planned = self.planned.min(most);
        self.draft.truncate(self.planned);
    }

    /// What is known of drafts like that of this step.
    fn length(&self) -> &DraftLength {
        if self.is_modelled {
            &self.modelled
        } else {
            &self.looked_up
        }
    }

    /// Takes what the draft model gave.
    fn take(&mut self, task: DraftTask) {
        self.draft = task.draft;
        self.planned = self.draft.len();
        if task.is_refused {
            self.modelled.leave_out();
        }
        if task.is_asked {
            self.modelled.observe_offered(self.planned, task.is_cut);
            if self.draft.is_empty() {
                // A draft that fails before it is verified.
                self.modelled.observe(0, 0);
            }
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
        let (drafted, accepted) = (self.draft.len(), self.accepted);
        if self.is_modelled {
            self.modelled.observe(drafted, accepted);
        } else {
            self.looked_up.observe(drafted, accepted);
        }
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
        (self.planned, self.accepted) = (0, 0);
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
    /// There are streams for which this step computes nothing, and that wait for it.
    pub(super) others_wait: bool,
    /// Time passes within a step, so that what drafts cost is measured.
    pub(super) timed: bool,
}

/// Drafts for the sequences of a step.
#[derive(Debug)]
pub(super) struct Speculation {
    /// The maximum of tokens of a draft; 0: nothing is drafted.
    max: usize,
    cost: DraftCost,
    trials: DraftTrials,
    drafter: Option<Drafter>,
    model_trials: DraftTrials,
    /// Sequences with a draft in this step. A buffer that retains its allocation.
    drafting: Vec<SequenceKey>,
    /// Sequences that would have one of the draft model if it were not many tokens behind: it catches up. Another such buffer.
    behind: Vec<SequenceKey>,
    /// Which of them gets first what cannot be divided; moves on with each step.
    turn: usize,
}

impl Speculation {
    /// Drafts at most `max` tokens of a sequence; 0: none.
    pub(super) fn new(max: usize, drafter: Option<Drafter>) -> Self {
        Self {
            max,
            cost: DraftCost::default(),
            trials: DraftTrials::default(),
            drafter,
            model_trials: DraftTrials::default(),
            drafting: Vec::new(),
            behind: Vec::new(),
            turn: 0,
        }
    }

    /// Drafts for the sequences of a plan, after dropping what is left of other drafts.
    pub(super) fn draft(
        &mut self,
        requests: &mut Requests,
        shares: &[StepShare],
        budget: DraftBudget,
        clock: &StepClock,
        now: Time,
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
            if most > 0 {
                self.propose(requests, share.key, most);
            }
        }
        self.divide(requests, budget.tokens);
        if budget.timed && !(self.drafting.is_empty() && self.behind.is_empty()) {
            self.leave_behind(requests, decoding, budget);
            self.shorten(requests, decoding, budget);
        }
        self.ask(requests, decoding, budget, clock, now);
    }

    /// Looks up at most so many tokens for a sequence, or else plans a draft of the draft model, if it can make one.
    fn propose(&mut self, requests: &mut Requests, key: SequenceKey, most: usize) {
        let sequence = &mut requests.sequences[key];
        let drafting = sequence
            .drafting
            .get_or_insert_with(|| Box::new(Drafting::new(self.max)));
        if drafting.look_up(&sequence.tokens, most) {
            self.drafting.push(key);
            return;
        }
        let drafter = self.drafter.as_ref().filter(|drafter| drafter.is_on());
        let Some(behind) = drafter.and_then(|drafter| drafter.behind(requests, key)) else {
            return;
        };
        let drafting = &mut requests.sequences[key].drafting;
        if drafting.as_mut().is_some_and(|it| it.plan_modelled(most)) {
            match behind <= BEHIND_MAX {
                true => self.drafting.push(key),
                false => self.behind.push(key),
            }
        }
    }

    /// Shortens the drafts to so many tokens together: each has an equal part, and in turn what others leave of theirs.
    fn divide(&mut self, requests: &mut Requests, tokens: usize) {
        let planned = |key: &SequenceKey| planned(requests, *key);
        let all: usize = self.drafting.iter().map(planned).sum();
        if all <= tokens || self.drafting.is_empty() {
            return;
        }
        let part = tokens / self.drafting.len();
        let parts = self.drafting.iter().map(|key| planned(key).min(part));
        let mut left = tokens - parts.sum::<usize>();
        self.turn = (self.turn + 1) % self.drafting.len();
        self.drafting.rotate_left(self.turn);
        self.drafting.retain(|&key| {
            let Some(drafting) = &mut requests.sequences[key].drafting else {
                return false;
            };
            let more = drafting.planned.saturating_sub(part).min(left);
            left -= more;
            drafting.shorten(part + more);
            drafting.planned > 0
        });
    }

    /// Drops the sequences for which catching up takes longer than their drafts can save, and all in a step with prompts, which
    /// come first.
    fn leave_behind(&mut self, requests: &mut Requests, decoding: usize, budget: DraftBudget) {
        if budget.prompt_tokens > 0 {
            return self.drop_behind(requests);
        }
        let plain = self.cost.plain_time(decoding);
        let drafter = self.drafter.as_ref();
        let token = drafter.and_then(|drafter| drafter.calls().token_seconds());
        let (Some(drafter), Some(plain), Some(token)) = (drafter, plain, token) else {
            return;
        };
        self.behind.retain(|&key| {
            let behind = drafter.behind(requests, key).unwrap_or(0);
            let sequence = &requests.sequences[key];
            let output = requests.terms(key).max_tokens;
            let output = output.saturating_sub(sequence.appended);
            let drafting = sequence.drafting.as_ref();
            let accepted = drafting.map_or(0.0, |it| it.length().expected(it.planned));
            let saved = f64::from(output) * plain * accepted / (1.0 + accepted);
            let is_worth_it = seconds(behind, token) < saved;
            if !is_worth_it && let Some(drafting) = &mut requests.sequences[key].drafting {
                drafting.clear();
            }
            is_worth_it
        });
    }

    /// Shortens the drafts to where they save more time than they take and hold nobody up for long, or drops them: first those
    /// of the draft model, which take time to make. What was not measured is tried.
    fn shorten(&mut self, requests: &mut Requests, decoding: usize, budget: DraftBudget) {
        let measures = budget.prompt_tokens == 0;
        // Those that catch up are judged as if they had.
        let all = Judged {
            decoding,
            budget,
            with_behind: true,
            slower_max: SLOWER_MAX,
        };
        let has_behind = !self.behind.is_empty();
        let behind_pays = has_behind && self.paying(requests, all).is_some();
        let ready = Judged {
            with_behind: false,
            slower_max: match behind_pays {
                // Catching up takes its part.
                true => f64::midpoint(1.0, SLOWER_MAX),
                false => SLOWER_MAX,
            },
            ..all
        };
        let are_modelled = self.drafting.iter().any(|&key| is_modelled(requests, key));
        let paying = self.paying(requests, ready).filter(|_| are_modelled);
        let declines = are_modelled && paying.is_none() || has_behind && !behind_pays;
        let is_trial = declines && measures && self.model_trials.are_due();
        if !behind_pays && !is_trial {
            self.drop_behind(requests);
        }
        if are_modelled {
            if let Some(most) = paying {
                self.model_trials.paid();
                self.trials.paid();
                return self.shorten_to(requests, most);
            }
            if is_trial {
                return;
            }
            self.drop_modelled(requests);
        }
        if self.drafting.is_empty() {
            return;
        }
        if let Some(most) = self.paying(requests, ready) {
            self.trials.paid();
            self.shorten_to(requests, most);
        } else if measures && self.trials.are_due() {
            self.trials.tried();
        } else {
            self.drop_drafts(requests);
        }
    }

    /// Returns the length to which drafts have to be shortened to pay; `None` if they do not.
    fn paying(&self, requests: &Requests, judged: Judged) -> Option<usize> {
        let unknown = judged.budget.prompt_tokens == 0;
        let lengths = std::iter::successors(Some(self.max), |most| Some(most / 2));
        lengths.take_while(|&most| most > 0).find(|&most| {
            let drafts = self.step_drafts(requests, judged, most);
            self.cost.pays(drafts).unwrap_or(unknown)
        })
    }

    fn shorten_to(&self, requests: &mut Requests, most: usize) {
        for &key in &self.drafting {
            if let Some(drafting) = &mut requests.sequences[key].drafting {
                drafting.shorten(most);
            }
        }
    }

    /// Returns the drafts of this step, each of at most `most` tokens.
    fn step_drafts(&self, requests: &Requests, judged: Judged, most: usize) -> StepDrafts {
        let Judged {
            decoding, budget, ..
        } = judged;
        let behind = match judged.with_behind {
            true => &*self.behind,
            false => &[],
        };
        let all_draft = self.drafting.len() + behind.len() == decoding && !budget.others_wait;
        let mut step = StepDrafts {
            decoding,
            tokens: 0,
            accepted: 0.0,
            least: if all_draft { f64::INFINITY } else { 0.0 },
            slower_max: judged.slower_max,
            time_max: budget.time_max,
            drafting: Some(0.0),
        };
        let (mut tokens, mut calls, mut modelled) = (0.0, 0.0_f64, 0);
        let drafts = self.drafting.iter().chain(behind);
        for drafting in drafts.filter_map(|&key| requests.sequences[key].drafting.as_ref()) {
            let (planned, length) = (drafting.planned.min(most), drafting.length());
            let accepted = length.expected(planned);
            tokens += length.expected_tokens(planned);
            step.accepted += accepted;
            step.least = step.least.min(accepted);
            if drafting.is_modelled {
                modelled += 1;
                calls = calls.max(length.expected_calls(planned));
            }
        }
        // Drafts are short.
        step.tokens = tokens.ceil() as usize;
        if modelled > 0 {
            let drafter = self.drafter.as_ref();
            let call = drafter.and_then(|drafter| drafter.calls().seconds(modelled));
            step.drafting = call.map(|call| call * calls);
        }
        step
    }

    /// Lets the draft model make the drafts that are planned for it, and catch up.
    fn ask(
        &mut self,
        requests: &mut Requests,
        decoding: usize,
        budget: DraftBudget,
        clock: &StepClock,
        now: Time,
    ) {
        let catch_up = CatchUpBudget {
            seconds: self.catch_up_seconds(requests, decoding, budget),
            is_timed: budget.timed,
        };
        let Some(drafter) = &mut self.drafter else {
            return;
        };
        let task = |&key: &SequenceKey| {
            let drafting = requests.sequences[key].drafting.as_mut();
            let drafting = drafting.filter(|drafting| drafting.is_modelled)?;
            let buffer = std::mem::take(&mut drafting.draft);
            Some(DraftTask::new(key, drafting.planned, buffer))
        };
        let mut tasks: Vec<DraftTask> = self.drafting.iter().filter_map(task).collect();
        tasks.extend(self.behind.drain(..).map(DraftTask::catch_up));
        if tasks.is_empty() {
            return;
        }
        drafter.draft(&mut tasks, requests, catch_up, clock, now);
        // Without room nothing is measured: a trial would go on for ever.
        if tasks.iter().any(|task| task.is_asked || task.is_refused) {
            self.model_trials.tried();
        }
        for task in tasks {
            if let Some(drafting) = &mut requests.sequences[task.key].drafting {
                drafting.take(task);
            }
        }
        self.drafting.retain(|&key| planned(requests, key) > 0);
    }

    /// Returns how long sequences may catch up in this step: what its drafts leave of the time that they may take, unless all
    /// have one.
    fn catch_up_seconds(&self, requests: &Requests, decoding: usize, budget: DraftBudget) -> f64 {
        let Some(plain) = self.cost.plain_time(decoding) else {
            return 0.0;
        };
        let most = plain * SLOWER_MAX;
        let ready = Judged {
            decoding,
            budget,
            with_behind: false,
            slower_max: SLOWER_MAX,
        };
        let time = match self.drafting.is_empty() {
            true => plain,
            false => {
                let drafts = self.step_drafts(requests, ready, self.max);
                self.cost.time(drafts).unwrap_or(most).max(plain)
            }
        };
        (most.min(budget.time_max) - time).max(0.0)
    }

    /// Drops the drafts that the draft model was to make.
    fn drop_modelled(&mut self, requests: &mut Requests) {
        self.drafting.retain(|&key| {
            let is_modelled = is_modelled(requests, key);
            if is_modelled && let Some(drafting) = &mut requests.sequences[key].drafting {
                drafting.clear();
            }
            !is_modelled
        });
    }

    /// Lets nobody catch up in this step.
    fn drop_behind(&mut self, requests: &mut Requests) {
        drop_all(requests, &mut self.behind);
    }

    fn drop_drafts(&mut self, requests: &mut Requests) {
        drop_all(requests, &mut self.drafting);
    }

    /// Drops the drafts of this step.
    pub(super) fn clear(&mut self, requests: &mut Requests) {
        self.drop_behind(requests);
        self.drop_drafts(requests);
    }

    /// Takes the time of a decode call without prompt tokens.
    pub(super) fn observe(&mut self, decoding: usize, drafted: usize, took: Duration) {
        if decoding > 0 && self.max > 0 {
            self.cost.observe(decoding, drafted, took);
        }
    }
}

/// Which drafts of a step are judged, and how.
#[derive(Clone, Copy, Debug)]
struct Judged {
    decoding: usize,
    budget: DraftBudget,
    /// Also those of the sequences that have to catch up first.
    with_behind: bool,
    slower_max: f64,
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a sequence are few")]
fn seconds(tokens: usize, each: f64) -> f64 {
    tokens as f64 * each
}

fn drop_all(requests: &mut Requests, keys: &mut Vec<SequenceKey>) {
    for key in keys.drain(..) {
        // It may have ended since, and its key may be that of another one.
        if let Some(sequence) = requests.sequences.get_mut(key)
            && let Some(drafting) = &mut sequence.drafting
        {
            drafting.clear();
        }
    }
}

/// Returns how many tokens the draft of a sequence may have.
fn planned(requests: &Requests, key: SequenceKey) -> usize {
    let drafting = requests.sequences[key].drafting.as_ref();
    drafting.map_or(0, |drafting| drafting.planned)
}

fn is_modelled(requests: &Requests, key: SequenceKey) -> bool {
    let drafting = requests.sequences[key].drafting.as_ref();
    drafting.is_some_and(|drafting| drafting.is_modelled)
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
