//! How long a draft should be: [`DraftLength`] learns what of a sequence's drafts is accepted, [`DraftCost`] what draft
//! tokens add to the time of a decode call, and [`DraftCalls`] what calls of the draft model take.
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
/// A sequence for which the draft model has no room pauses for so many steps.
const REFUSED_STEPS: u32 = 16;
/// The share of a token in the estimate of what is accepted.
const NEW_SHARE: f64 = 0.1;
/// The least of so many measurements counts: what else runs on a machine makes a call slower, at times many times, and
/// none faster than it is.
const MEASURED: usize = 6;
/// Drafts are made without a judgement until they were measured so often.
const MEASURED_MIN: usize = 3;
/// Drafts are made if they are expected to save so many times what they cost.
const WORTH: f64 = 1.15;
/// Drafts may make a step so many times longer for a sequence that they do not make faster.
pub(super) const SLOWER_MAX: f64 = 1.25;
/// A number of tokens that was not measured is expected to take this share of what the tokens of a smaller one took.
const UNKNOWN_SHARE: f64 = 0.5;
/// After so many steps with drafts, one without is measured: longer sequences take longer.
const PLAIN_STEPS: u32 = 64;
/// Where drafts do not pay, one step in so many tries again, as what they cost may have changed. The number doubles up to the
/// maximum with each trial that they do not pay after.
const TRIAL_STEPS: u32 = 16;
const TRIAL_STEPS_MAX: u32 = 1_024;

/// The length of the drafts of one sequence.
#[derive(Debug)]
pub(super) struct DraftLength {
    length: usize,
    max: usize,
    /// The share of draft tokens that were accepted among those that were compared.
    accepted: f64,
    /// The share of tokens that a draft has among those that it was to have: a draft model may be too unsure.
    offered: f64,
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
            offered: 1.0,
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

    /// Takes that there is no room for the drafts: it is asked for again some steps later.
    pub(super) fn leave_out(&mut self) {
        self.pause = REFUSED_STEPS;
    }

    /// Returns how many tokens of a draft that is to have so many are expected to be accepted.
    pub(super) fn expected(&self, planned: usize) -> f64 {
        powers(self.offered * self.accepted, planned)
    }

    /// Returns how many tokens it is expected to have.
    pub(super) fn expected_tokens(&self, planned: usize) -> f64 {
        powers(self.offered, planned)
    }

    /// Returns how many calls of a draft model it is expected to take: each token that it has, but the last, is followed by
    /// another call.
    pub(super) fn expected_calls(&self, planned: usize) -> f64 {
        1.0 + powers(self.offered, planned.saturating_sub(1))
    }

    /// Takes that a draft model gave so many tokens, and whether it was too unsure for more.
    pub(super) fn observe_offered(&mut self, tokens: usize, is_cut: bool) {
        for _ in 0..tokens {
            self.offered += (1.0 - self.offered) * NEW_SHARE;
        }
        if is_cut {
            self.offered -= self.offered * NEW_SHARE;
        }
    }

    /// Takes how many of the `drafted` tokens were accepted.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize) {
        // The tokens after the first rejected one were not compared with anything.
        let compared = (accepted + 1).min(drafted);
        for index in 0..compared {
            let hit = if index < accepted { 1.0 } else { 0.0 };
            self.accepted += (hit - self.accepted) * NEW_SHARE;
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

/// The sum of the first powers of a share.
fn powers(share: f64, count: usize) -> f64 {
    (0..count)
        .fold((0.0, 1.0), |(sum, power), _| {
            (sum + power * share, power * share)
        })
        .0
}

/// Classes of numbers, by their logarithm.
const CLASSES: usize = 12;

/// The drafts of a step, as they are judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepDrafts {
    pub(super) decoding: usize,
    /// Tokens of all drafts.
    pub(super) tokens: usize,
    /// How many of them are expected to be accepted.
    pub(super) accepted: f64,
    /// How many are expected of the sequence with the fewest: 0 if one of those that decode has no draft.
    pub(super) least: f64,
    /// How many times longer than one without drafts the step may be for a sequence that has none.
    pub(super) slower_max: f64,
    /// What the decoding sequences and the drafts may take, in seconds.
    pub(super) time_max: f64,
    /// What making the drafts takes, in seconds; `None`: that was not measured.
    pub(super) drafting: Option<f64>,
}

/// What draft tokens cost, for each class of numbers of decoding sequences and of draft tokens.
#[derive(Debug)]
pub(super) struct DraftCost {
    /// Not in place: owners are moved, and these are some ten kilobytes.
    costs: Box<[DecodeCost]>,
}

/// When drafts that do not pay are made nevertheless, to measure them again.
#[derive(Debug)]
pub(super) struct DraftTrials {
    /// Steps in a row in which drafts did not pay, since the last trial.
    declined: u32,
    /// Such steps until the next trial.
    interval: u32,
}

impl Default for DraftTrials {
    fn default() -> Self {
        Self {
            declined: 0,
            interval: TRIAL_STEPS,
        }
    }
}

impl DraftTrials {
    /// Takes that the drafts of a step pay.
    pub(super) fn paid(&mut self) {
        *self = Self::default();
    }

    /// Takes that no draft of this step pays. Returns whether one is to be made nevertheless, until one [is](Self::tried), but
    /// for a fifth of the steps at most: sequences that were not drafted for have to catch up first.
    pub(super) fn are_due(&mut self) -> bool {
        self.declined = self.declined.saturating_add(1);
        if self.declined > self.interval + self.interval / 4 {
            self.tried();
        }
        self.declined >= self.interval
    }

    /// Takes that a draft is made.
    pub(super) fn tried(&mut self) {
        if self.declined >= self.interval {
            self.declined = 0;
            self.interval = (self.interval * 2).min(TRIAL_STEPS_MAX);
        }
    }
}

/// The times of steps with so many decoding sequences.
#[derive(Clone, Copy, Debug, Default)]
struct DecodeCost {
    /// Without drafts.
    plain: RecentTimes,
    /// With so many draft tokens.
    drafting: [RecentTimes; CLASSES],
    /// Steps with drafts since one without was measured.
    drafted: u32,
}

impl DecodeCost {
    /// Returns the time of a step with so many draft tokens, in seconds; `None`: nothing is known of it.
    fn drafting_time(&self, plain: f64, drafted: usize) -> Option<f64> {
        let class = class(drafted);
        if let Some(time) = self.drafting[class].least_with(plain, drafted) {
            return Some(time);
        }
        // More tokens take more time, though each of them often less.
        let fewer = (0..class).rev();
        let mut known = fewer.filter_map(|fewer| {
            let drafted = (2 << fewer) - 1;
            Some((fewer, self.drafting[fewer].least_with(plain, drafted)?))
        });
        let (fewer, time) = known.next()?;
        let times = count(1 << (class - fewer)) * UNKNOWN_SHARE;
        Some(plain + (time - plain).max(0.0) * times.max(1.0))
    }
}

/// The last times of the same kind, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct RecentTimes {
    times: [f64; MEASURED],
    /// The draft tokens of each.
    drafted: [usize; MEASURED],
    /// How many there ever were; the oldest is replaced.
    count: usize,
}

impl RecentTimes {
    fn push(&mut self, time: Duration, drafted: usize) {
        let oldest = self.count % MEASURED;
        (self.times[oldest], self.drafted[oldest]) = (time.as_secs_f64(), drafted);
        self.count += 1;
    }

    /// The least of them; `None`: too few for a judgement.
    fn least(&self) -> Option<f64> {
        self.least_with(0.0, 0)
    }

    /// The least time with so many draft tokens, where a step without takes `plain`. A class has numbers that differ up to two
    /// times: more tokens than were measured take as much more time.
    fn least_with(&self, plain: f64, drafted: usize) -> Option<f64> {
        let times = self.times.iter().zip(&self.drafted).take(self.count);
        let times = times.map(|(&time, &measured)| {
            let more = count(drafted) / count(measured) - 1.0;
            time + (time - plain).max(0.0) * more.max(0.0)
        });
        times
            .reduce(f64::min)
            .filter(|_| self.count >= MEASURED_MIN)
    }
}

impl Default for DraftCost {
    fn default() -> Self {
        Self {
            costs: vec![DecodeCost::default(); CLASSES].into(),
        }
    }
}

impl DraftCost {
    /// Returns whether a step without drafts is to be measured first.
    pub(super) fn needs_plain(&self, decoding: usize) -> bool {
        let cost = &self.costs[class(decoding)];
        cost.plain.least().is_none() || cost.drafted >= PLAIN_STEPS
    }

    /// Returns whether the drafts make the sequences of a step faster, all together, and none of them much slower. `None`: that
    /// was not measured.
    pub(super) fn pays(&self, drafts: StepDrafts) -> Option<bool> {
        let cost = &self.costs[class(drafts.decoding)];
        let plain = cost.plain.least()?;
        let time = self.time(drafts)?;
        // In a step without drafts each sequence gets one token.
        let saves = drafts.accepted / count(drafts.decoding) * plain > (time - plain) * WORTH;
        let is_fair = time <= plain * drafts.slower_max.max(1.0 + drafts.least);
        Some(saves && is_fair && time <= drafts.time_max)
    }

    /// Returns the time of a step with these drafts, in seconds; `None`: that was not measured.
    pub(super) fn time(&self, drafts: StepDrafts) -> Option<f64> {
        let cost = &self.costs[class(drafts.decoding)];
        let plain = cost.plain.least()?;
        Some(cost.drafting_time(plain, drafts.tokens)? + drafts.drafting?)
    }

    /// Returns the time of a step without drafts, in seconds; `None`: too little was measured.
    pub(super) fn plain_time(&self, decoding: usize) -> Option<f64> {
        self.costs[class(decoding)].plain.least()
    }

    /// Takes the time of a decode call without prompt tokens.
    pub(super) fn observe(&mut self, decoding: usize, drafted: usize, took: Duration) {
        let cost = &mut self.costs[class(decoding)];
        if drafted == 0 {
            cost.plain.push(took, 0);
            cost.drafted = 0;
        } else {
            cost.drafting[class(drafted)].push(took, drafted);
            cost.drafted += 1;
        }
    }
}

/// What calls of the draft model take.
#[derive(Debug, Default)]
pub(super) struct DraftCalls {
    /// With a token or two of so many sequences.
    calls: [RecentTimes; CLASSES],
    /// Each of many tokens.
    token: RecentTimes,
}

impl DraftCalls {
    /// Returns the time of a call for so many sequences, in seconds, or else for the number next to it that was measured; `None`:
    /// too little was.
    pub(super) fn seconds(&self, sequences: usize) -> Option<f64> {
        let class = class(sequences);
        let known = self.calls.iter().enumerate();
        let known = known.filter_map(|(of, calls)| Some((of.abs_diff(class), calls.least()?)));
        known.min_by_key(|&(distance, _)| distance).map(|it| it.1)
    }

    /// Returns the time of a token among many, in seconds; `None`: too little was measured.
    pub(super) fn token_seconds(&self) -> Option<f64> {
        self.token.least()
    }

    /// Returns how many tokens can be computed in so many seconds; 0 if too little was measured.
    pub(super) fn tokens_in(&self, seconds: f64) -> usize {
        let token = self.token.least();
        // A cast saturates, and the batch limits the number.
        token.map_or(0, |token| (seconds / token.max(1e-9)).max(0.0) as usize)
    }

    /// Takes the time of a call with so many tokens for the next ones of so many sequences.
    pub(super) fn observe(&mut self, sequences: usize, tokens: usize, took: Duration) {
        // More are catching up.
        if tokens <= 2 * sequences {
            self.calls[class(sequences)].push(took, 0);
        }
    }

    /// Takes the time of a call with so many tokens that catch up.
    pub(super) fn observe_catch_up(&mut self, tokens: usize, took: Duration) {
        self.token.push(took.div_f64(count(tokens)), 0);
    }
}

/// The class of a number.
fn class(number: usize) -> usize {
    (number.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a batch are few")]
fn count(number: usize) -> f64 {
    number.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a machine takes: for a step, for each further token up to a number, and for each beyond.
    #[derive(Clone, Copy, Debug)]
    struct Machine {
        step_us: u64,
        free: usize,
        token_us: u64,
    }

    impl Machine {
        fn takes(self, tokens: usize) -> Duration {
            let more = tokens.saturating_sub(self.free.max(1)) as u64;
            Duration::from_micros(self.step_us + self.token_us * more)
        }
    }

    /// Every sequence has a draft, and nothing else limits the step.
    fn all_draft(decoding: usize, tokens: usize, accepted: f64) -> StepDrafts {
        StepDrafts {
            decoding,
            tokens: tokens * decoding,
            accepted: accepted * (tokens * decoding) as f64,
            least: accepted * tokens as f64,
            slower_max: SLOWER_MAX,
            time_max: f64::INFINITY,
            drafting: Some(0.0),
        }
    }

    /// Steps in which every sequence has a draft of 4 tokens, all of which are accepted or none; returns in how many of the
    /// last hundred they are decoded.
    fn drafted(
        (cost, trials): &mut (DraftCost, DraftTrials),
        machine: Machine,
        decoding: usize,
        accepted: f64,
    ) -> usize {
        let step = |_| {
            let tokens = 4 * decoding;
            if cost.needs_plain(decoding) {
                cost.observe(decoding, 0, machine.takes(decoding));
                return false;
            }
            let pays = cost.pays(all_draft(decoding, 4, accepted)) != Some(false);
            if pays {
                trials.paid();
            }
            let drafts = pays || trials.are_due();
            if drafts {
                trials.tried();
            }
            let drafted = if drafts { tokens } else { 0 };
            cost.observe(decoding, drafted, machine.takes(decoding + drafted));
            drafts
        };
        let steps: Vec<bool> = (0..400).map(step).collect();
        steps[300..].iter().filter(|&&drafts| drafts).count()
    }

    #[test]
    fn drafts_are_made_where_they_pay() {
        // Reading the weights takes the time, and some more tokens are nearly free.
        let memory = Machine {
            step_us: 10_000,
            free: 8,
            token_us: 2_000,
        };
        let compute = Machine {
            step_us: 1_000,
            free: 1,
            token_us: 1_000,
        };
        for (machine, decoding, accepted, expected) in [
            (memory, 1, 0.9, true),
            (memory, 1, 0.3, true),
            (memory, 16, 0.5, false),
            (compute, 1, 0.9, false),
            (compute, 16, 0.9, false),
        ] {
            let steps = drafted(&mut Default::default(), machine, decoding, accepted);
            let right = if expected { steps >= 95 } else { steps <= 10 };
            assert!(right, "{machine:?} {decoding} {accepted}: {steps}");
        }
    }

    #[test]
    fn a_machine_that_changes_is_measured_again() {
        let slow = Machine {
            step_us: 1_000,
            free: 1,
            token_us: 1_000,
        };
        let fast = Machine {
            token_us: 100,
            ..slow
        };
        let mut cost = Default::default();
        assert!(drafted(&mut cost, slow, 1, 0.9) <= 10);
        let steps = (0..16).map(|_| drafted(&mut cost, fast, 1, 0.9)).max();
        assert!(steps >= Some(95), "{steps:?}");
        assert!(drafted(&mut cost, slow, 1, 0.9) <= 10);
    }

    #[test]
    fn one_call_that_was_held_up_changes_nothing() {
        let mut cost = DraftCost::default();
        for _ in 0..MEASURED_MIN {
            cost.observe(1, 0, Duration::from_millis(10));
            cost.observe(1, 4, Duration::from_millis(11));
        }
        for _ in 0..MEASURED - 1 {
            cost.observe(1, 4, Duration::from_secs(1));
        }
        assert_eq!(cost.pays(all_draft(1, 4, 0.25)), Some(true));
        cost.observe(1, 4, Duration::from_secs(1));
        let pays = cost.pays(all_draft(1, 4, 0.25));
        assert_eq!(pays, Some(false), "a machine that is slower");
    }

    /// 4 sequences whose step takes 100 ms, and 10 ms more for each draft token.
    fn four() -> DraftCost {
        let mut cost = DraftCost::default();
        for _ in 0..MEASURED_MIN {
            for drafted in [0, 2, 16] {
                cost.observe(4, drafted, Duration::from_millis(100 + 10 * drafted as u64));
            }
        }
        cost
    }

    #[test]
    fn a_sequence_without_a_draft_is_not_made_much_slower() {
        let cost = four();
        for (tokens, least, expected) in [
            (2, 0.0, true),
            (3, 0.0, false),
            (16, 0.0, false),
            (16, 1.5, false),
            (16, 1.7, true),
        ] {
            let drafts = StepDrafts {
                tokens,
                accepted: tokens as f64,
                least,
                ..all_draft(4, 1, 1.0)
            };
            assert_eq!(cost.pays(drafts), Some(expected), "{tokens} {least}");
        }
    }

    #[test]
    fn drafts_end_in_the_time_of_a_step() {
        let cost = four();
        for (tokens, time_max, expected) in [
            (4, 0.265, true),
            (4, 0.255, false),
            (5, 0.295, false),
            (5, 0.305, true),
        ] {
            let drafts = StepDrafts {
                time_max,
                ..all_draft(4, tokens, 1.0)
            };
            let pays = cost.pays(drafts);
            assert_eq!(
                pays,
                Some(expected),
                "{tokens} {time_max}: more of one class"
            );
        }
        assert_eq!(cost.pays(all_draft(16, 1, 1.0)), None);
    }

    #[test]
    fn the_length_follows_what_is_accepted() {
        let mut length = DraftLength::new(16);
        let mut lengths = Vec::new();
        for _ in 0..5 {
            let next = length.next();
            lengths.push(next);
            length.observe(next, next);
        }
        assert_eq!(lengths, [3, 6, 12, 16, 16]);
        assert!(length.expected(16) > 8.0);
        length.observe(16, 5);
        assert_eq!(length.next(), 6);
        length.observe(6, 0);
        assert_eq!(length.next(), 1);
    }

    #[test]
    fn a_sequence_whose_drafts_are_rejected_pauses() {
        let mut length = DraftLength::new(16);
        let steps: Vec<bool> = (0..600)
            .map(|_| {
                let next = length.next();
                if next > 0 {
                    length.observe(next, 0);
                }
                next > 0
            })
            .collect();
        let drafts = |steps: &[bool]| steps.iter().filter(|&&drafts| drafts).count();
        assert_eq!(drafts(&steps[..3]), 3);
        assert!(drafts(&steps[300..]) <= 6, "{}", drafts(&steps[300..]));
        assert!(length.expected(4) < 0.5);
        length.observe(1, 1);
        assert!((0..3).all(|_| length.next() > 0) || length.pause > 0);
    }
}
