//! How long a draft should be: [`DraftLength`] learns what of a sequence's drafts is accepted, and [`DraftCost`] what
//! draft tokens add to the time of a decode call.
//!
//! Where one token of one sequence is decoded, most of the time goes to reading the weights, and some more tokens cost
//! little. Beside many sequences they cost nearly as much as their share of the step, and drafting ends by itself.

use std::time::Duration;

/// The first draft of a sequence.
const FIRST_TOKENS: usize = 3;
/// After so many rejected drafts in a row a sequence pauses, at first for as many steps; each further one doubles the pause.
const FAILURES: u32 = 3;
/// The longest pause.
const PAUSE_MAX: u32 = 64;
/// The share of a new measurement in an estimate.
const NEW_SHARE: f64 = 0.2;
/// A measurement counts as at most so many times the estimate: a machine that slept says nothing about its speed.
const CHANGE_MAX: f64 = 2.0;
/// Drafts are made if they are expected to save so many times what they cost.
const WORTH: f64 = 1.15;
/// Where drafts do not pay, one step in so many tries again: what they cost may have changed.
const TRIAL_STEPS: u32 = 64;

/// The length of the drafts of one sequence.
#[derive(Debug)]
pub(super) struct DraftLength {
    length: usize,
    max: usize,
    /// The share of draft tokens that were accepted among those that were compared.
    accepted: f64,
    /// Rejected drafts in a row.
    failures: u32,
    /// Steps until the next draft.
    pause: u32,
}

impl DraftLength {
    /// At most `max` tokens, which are at least 1.
    pub(super) fn new(max: usize) -> Self {
        Self {
            length: FIRST_TOKENS,
            max,
            accepted: 0.5,
            failures: 0,
            pause: 0,
        }
    }

    /// Returns how many tokens the draft of this step may have.
    pub(super) fn next(&mut self) -> usize {
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        self.length.min(self.max)
    }

    /// Returns how many tokens of a draft of this length are expected to be accepted.
    pub(super) fn expected(&self, drafted: usize) -> f64 {
        let rate = self.accepted;
        (1..=drafted)
            .fold((0.0, 1.0), |(sum, all), _| (sum + all * rate, all * rate))
            .0
    }

    /// Takes how many of the `drafted` tokens were accepted.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize) {
        // The tokens after the first rejected one were not compared with anything.
        let compared = (accepted + 1).min(drafted);
        for index in 0..compared {
            let hit = if index < accepted { 1.0 } else { 0.0 };
            self.accepted += (hit - self.accepted) * NEW_SHARE / 2.0;
        }
        self.length = if accepted == drafted {
            // Up from its real length: the text may have ended there, or the budget.
            self.length.max(drafted * 2)
        } else {
            accepted + 1
        }
        .clamp(1, self.max.max(1));
        if accepted > 0 {
            self.failures = 0;
            return;
        }
        self.failures += 1;
        if let Some(over) = self.failures.checked_sub(FAILURES) {
            self.pause = FAILURES.saturating_mul(1 << over.min(10)).min(PAUSE_MAX);
        }
    }
}

/// Classes of numbers, by their logarithm.
const CLASSES: usize = 12;

/// What draft tokens cost, for each class of numbers of decoding sequences and of draft tokens.
#[derive(Debug, Default)]
pub(super) struct DraftCost {
    costs: [DecodeCost; CLASSES],
    /// Steps in a row in which drafts did not pay.
    declined: u32,
}

/// The cost of a step of so many decoding sequences.
#[derive(Clone, Copy, Debug, Default)]
struct DecodeCost {
    /// Seconds without drafts; `None`: not measured.
    plain: Option<f64>,
    /// Steps with drafts since that was measured.
    drafted: u32,
    /// What so many draft tokens add, in such steps; `None`: not measured.
    added: [Option<f64>; CLASSES],
}

impl DraftCost {
    /// Returns whether a step without drafts is to be measured: longer sequences take longer without them too.
    pub(super) fn needs_plain(&self, decoding: usize) -> bool {
        let cost = &self.costs[class(decoding)];
        cost.plain.is_none() || cost.drafted >= TRIAL_STEPS
    }

    /// Returns whether drafts of so many tokens, of which so many are expected to be accepted, make the sequences of a
    /// step faster, all together.
    pub(super) fn pays(&self, decoding: usize, drafted: usize, accepted: f64) -> bool {
        let cost = &self.costs[class(decoding)];
        // Not measured: it is tried.
        let Some(added) = cost.added[class(drafted)] else {
            return true;
        };
        accepted / count(decoding) > added * WORTH
    }

    /// Takes that no draft of this step pays. Returns whether one is made nevertheless, to measure it again.
    pub(super) fn tries_again(&mut self) -> bool {
        self.declined += 1;
        self.declined.is_multiple_of(TRIAL_STEPS)
    }

    /// Takes the time of a decode call without prompt tokens.
    pub(super) fn observe(&mut self, decoding: usize, drafted: usize, took: Duration) {
        let cost = &mut self.costs[class(decoding)];
        let took = took.as_secs_f64();
        if drafted == 0 {
            cost.plain = Some(average(cost.plain, took));
            cost.drafted = 0;
        } else if let Some(plain) = cost.plain {
            self.declined = 0;
            cost.drafted += 1;
            // A step with drafts that was faster than one without says that the latter was slow by chance.
            let added = &mut cost.added[class(drafted)];
            let whole = average(added.map(|added| added + 1.0), took / plain.max(1e-9));
            *added = Some((whole - 1.0).max(0.0));
        }
    }
}

/// The estimate with a new measurement; the first one is taken as it is.
fn average(estimate: Option<f64>, new: f64) -> f64 {
    let Some(old) = estimate else { return new };
    // An estimate of nothing could never grow.
    let old = old.max(1e-9);
    // What is rare takes longer, not less long.
    let share = if new < old {
        2.0 * NEW_SHARE
    } else {
        NEW_SHARE
    };
    old + (new.clamp(old / CHANGE_MAX, old * CHANGE_MAX) - old) * share
}

/// The class of a number.
fn class(number: usize) -> usize {
    (number.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a batch are few")]
fn count(number: usize) -> f64 {
    number.max(1) as f64
}
