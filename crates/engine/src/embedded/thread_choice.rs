//! [`ThreadChoice`]: how many threads compute a batch, from how long batches took.
//!
//! The threads of a decode call wait for each other without sleeping, several hundred times per token. On a quiet
//! machine every processor helps. Where something else keeps one of the threads from its processor, all the others wait:
//! beside one busy process, two threads on two processors were 7 times slower than one. What else runs changes while a
//! model is served, so the number of threads is not decided when it is loaded: now and then another number is tried, and
//! taken if it was faster.

use std::time::Duration;

use crate::model::{BatchEntry, ThreadNumbers};

/// The calls of a trial, in which the tried number and the present one alternate.
const TRIAL_CALLS: usize = 6;
/// A trial is given up after so many calls of other sizes, which cannot be compared.
const SKIPPED_MAX: u32 = 64;
/// Another number is taken if its calls took at most this share of the time of the others, in two trials.
const FASTER: f64 = 0.93;
/// A trial ends after its first call if that took so much longer: two more of them would be felt.
const MUCH_SLOWER: f64 = 1.3;
/// Calls that took so much longer than usual may say that the machine has changed, and cause trials.
const UNUSUAL: f64 = 1.6;
/// So many of them in a row. On virtual processors, one call in a hundred takes that long without a reason; when each of them
/// brought trials, a stream lost four per cent of its speed to them.
const UNUSUAL_CALLS: u32 = 3;
/// Calls between two trials: at first and after a change, and at most. It doubles with each trial that changes nothing.
const CALLS_MIN: u32 = 8;
const CALLS_MAX: u32 = 1_024;
/// Where slow calls now and then mean nothing, the pause after them grows up to so many calls.
const CALLS_MIN_NOISY: u32 = 128;
/// A trial comes after so much time of calls at the latest: what is right may have changed without a sign.
const PAUSE_MAX: Duration = Duration::from_secs(120);
/// A call that takes longer is tried with fewer threads only after [`PAUSE_MAX`] if others have shown that all are best, and
/// nothing has changed.
const FELT: Duration = Duration::from_millis(50);
/// The share of a call in what is usual.
const NEW_SHARE: f64 = 0.1;

/// A number of threads that is learned from the times of calls of one kind.
#[derive(Debug)]
pub(super) struct ThreadChoice {
    /// What may be chosen, most first.
    numbers: Vec<u32>,
    current: usize,
    /// The place in `numbers` of the next trial.
    next: usize,
    trial: Option<Trial>,
    /// Calls until the next trial.
    pause: u32,
    interval: u32,
    /// The shortest interval.
    interval_min: u32,
    /// The time of calls since the last trial.
    untried: Duration,
    /// Trials in a row that have kept the current number.
    kept: usize,
    /// Calls in a row that took unusually long.
    unusual: u32,
    /// Calls took unusually long, and not all numbers were tried since.
    changed: bool,
    /// No trial with long calls while the first number is current: other calls have shown that it is the best.
    spared: bool,
    /// The usual time of an entry with the current number, for each class of batches; 0 where it is unknown.
    usual: [f64; CLASSES],
    /// What trials have found out and nobody has taken yet.
    verdict: Option<ThreadVerdict>,
    /// There was a verdict about the current number.
    is_judged: bool,
}

/// What trials have found out about a number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ThreadVerdict {
    pub(super) threads: u32,
    /// The number that was used before, and the share of its time that a call takes now. `None`: no other number was faster.
    pub(super) instead_of: Option<(u32, f64)>,
}

/// Batches of similar size, whose entries take a similar time: by the logarithm of their entries.
const CLASSES: usize = 16;

/// A comparison of two numbers of threads.
#[derive(Debug)]
struct Trial {
    tried: usize,
    class: usize,
    /// Times of an entry: of the tried number at even places, of the current one at odd places.
    times: Vec<f64>,
    /// Calls of other classes meanwhile.
    skipped: u32,
    /// Whether a trial before this one has found the same.
    confirms: bool,
}

impl ThreadChoice {
    /// A choice among the given numbers, which are not empty, most first. It begins with the first.
    pub(super) fn among(numbers: Vec<u32>) -> Self {
        Self {
            numbers,
            current: 0,
            next: 1,
            trial: None,
            pause: CALLS_MIN,
            interval: CALLS_MIN,
            interval_min: CALLS_MIN,
            untried: Duration::ZERO,
            kept: 0,
            unusual: 0,
            changed: false,
            spared: false,
            usual: [0.0; CLASSES],
            verdict: None,
            is_judged: false,
        }
    }

    /// Returns the number of threads of calls outside of trials.
    pub(super) fn present(&self) -> u32 {
        self.numbers.get(self.current).copied().unwrap_or(1)
    }

    /// Returns what was found out since the last call.
    pub(super) fn take_verdict(&mut self) -> Option<ThreadVerdict> {
        self.verdict.take()
    }

    /// Returns the number of threads of the next call, which computes so many entries.
    pub(super) fn threads(&self, entries: usize) -> u32 {
        let index = match &self.trial {
            Some(trial) if trial.class == class(entries) && trial.times.len().is_multiple_of(2) => {
                trial.tried
            }
            _ => self.current,
        };
        self.numbers.get(index).copied().unwrap_or(1)
    }

    /// Returns whether nothing speaks against the first number.
    fn prefers_first(&self) -> bool {
        self.current == 0 && !self.changed
    }

    /// Returns the most threads that may be chosen.
    pub(super) fn most(&self) -> u32 {
        self.numbers.iter().copied().max().unwrap_or(1)
    }

    /// Takes the time of the call for which [`ThreadChoice::threads`] was asked.
    pub(super) fn observe(&mut self, entries: usize, took: Duration) {
        if self.numbers.len() < 2 || entries == 0 {
            return;
        }
        let class = class(entries);
        #[expect(clippy::cast_precision_loss, reason = "entries of a batch are few")]
        let entry = took.as_secs_f64() / entries as f64;
        match self.trial.take() {
            Some(trial) if trial.class == class => self.go_on(trial, entry),
            Some(trial) if trial.skipped < SKIPPED_MAX => {
                self.trial = Some(Trial {
                    skipped: trial.skipped + 1,
                    ..trial
                });
            }
            // Such batches have become rare; a later trial is of others.
            Some(_) => self.pause = self.interval,
            None => self.watch(class, entry, took),
        }
    }

    fn go_on(&mut self, mut trial: Trial, entry: f64) {
        trial.times.push(entry);
        let usual = self.usual[trial.class];
        if trial.times.len() == 1 && usual > 0.0 && entry > usual * MUCH_SLOWER {
            return self.end_trial(false);
        }
        if trial.times.len() < TRIAL_CALLS {
            self.trial = Some(trial);
            return;
        }
        let of = |parity: usize| median(trial.times.iter().skip(parity).step_by(2));
        let faster = of(0) < of(1) * FASTER;
        if faster && !trial.confirms {
            trial.times.clear();
            trial.confirms = true;
            self.trial = Some(trial);
            return;
        }
        if faster {
            let before = self.present();
            self.current = trial.tried;
            self.usual = [0.0; CLASSES];
            self.judge(Some((before, of(0) / of(1))));
        }
        self.end_trial(faster);
    }

    fn end_trial(&mut self, taken: bool) {
        if taken {
            self.kept = 0;
            self.interval_min = CALLS_MIN;
            self.interval = CALLS_MIN;
            self.changed = false;
        } else {
            self.kept += 1;
            self.interval = (self.interval * 2).min(CALLS_MAX);
        }
        if self.tried_all() && !self.is_judged {
            self.judge(None);
        }
        if self.changed && self.tried_all() {
            self.changed = false;
            self.interval_min = (self.interval_min * 2).min(CALLS_MIN_NOISY);
        }
        self.pause = self.interval;
        self.untried = Duration::ZERO;
        // All of them in turn: a step to a neighbour may gain too little to be noticed where a longer one gains much.
        self.next = (self.next + 1) % self.numbers.len();
    }

    fn judge(&mut self, instead_of: Option<(u32, f64)>) {
        self.is_judged = true;
        self.verdict = Some(ThreadVerdict {
            threads: self.present(),
            instead_of,
        });
    }

    /// Returns whether the current number was kept against all others.
    fn tried_all(&self) -> bool {
        self.kept + 1 >= self.numbers.len()
    }

    /// Looks at a call outside of a trial, and starts one if it is time.
    fn watch(&mut self, class: usize, entry: f64, took: Duration) {
        self.pause = self.pause.saturating_sub(1);
        self.untried = self.untried.saturating_add(took);
        if self.is_change(class, entry) && !self.changed {
            self.changed = true;
            self.kept = 0;
            self.interval = self.interval_min;
            self.pause = self.pause.min(self.interval);
        }
        let spared = self.spared && self.current == 0 && took > FELT && !self.changed;
        let due = self.pause == 0 && !spared;
        if due || self.untried > PAUSE_MAX {
            // Only the current one has its own place; the next after it is another.
            let tried = if self.next == self.current {
                self.next + 1
            } else {
                self.next
            };
            self.trial = Some(Trial {
                tried: tried % self.numbers.len(),
                class,
                times: Vec::with_capacity(TRIAL_CALLS),
                skipped: 0,
                confirms: false,
            });
        }
    }

    /// Takes the time of an entry; returns whether times have changed.
    fn is_change(&mut self, class: usize, entry: f64) -> bool {
        let usual = &mut self.usual[class];
        if *usual == 0.0 {
            *usual = entry;
        }
        if entry <= *usual * UNUSUAL {
            self.unusual = 0;
            *usual += (entry - *usual) * NEW_SHARE;
            return false;
        }
        // Slow calls leave alone what is usual until there are enough of them, and then they are it: trials are compared with
        // it.
        self.unusual += 1;
        if self.unusual < UNUSUAL_CALLS {
            return false;
        }
        self.unusual = 0;
        *usual = entry;
        true
    }
}

/// The numbers of threads of the kinds of decode calls, which differ in what limits them: memory, and arithmetic.
#[derive(Debug)]
pub(super) struct ThreadChoices {
    pub(super) decode: ThreadChoice,
    pub(super) prefill: ThreadChoice,
    /// Of calls of at most `few_max` entries with several of a slot: drafts, and short prompts. There are many of them between
    /// two long prompts, and what is right for them would decide for those.
    pub(super) few: ThreadChoice,
    /// The output rows of the model: with drafts alone, each entry has one.
    pub(super) few_max: usize,
}

impl ThreadChoices {
    /// The choice for a batch.
    pub(super) fn of(&mut self, entries: &[BatchEntry]) -> &mut ThreadChoice {
        let single = entries.windows(2).all(|pair| pair[0].slot != pair[1].slot);
        // A step with prompt tokens takes as long as streams may wait, and with fewer threads a multiple of that. Decoding
        // is tried often and is over soon; where it is fastest on all threads, or was not tried yet, nothing keeps them from
        // their processors as far as is known, and prompts, which are bound by arithmetic, gain even more by each.
        let spared = self.decode.prefers_first();
        (self.prefill.spared, self.few.spared) = (spared, spared);
        if single {
            &mut self.decode
        } else if entries.len() <= self.few_max {
            &mut self.few
        } else {
            &mut self.prefill
        }
    }

    /// The numbers of calls outside of trials.
    pub(super) fn present(&self) -> ThreadNumbers {
        ThreadNumbers {
            decode: self.decode.present(),
            prefill: self.prefill.present(),
            few: self.few.present(),
        }
    }

    /// What was found out since the last call about each kind, in the order of [`ThreadNumbers`].
    pub(super) fn take_verdicts(&mut self) -> [Option<ThreadVerdict>; 3] {
        [&mut self.decode, &mut self.prefill, &mut self.few].map(ThreadChoice::take_verdict)
    }

    /// The maximum of threads of any.
    pub(super) fn most(&self) -> u32 {
        let numbers = [&self.decode, &self.prefill, &self.few].map(ThreadChoice::most);
        numbers.into_iter().max().unwrap_or(1)
    }
}

fn class(entries: usize) -> usize {
    (entries.max(1).ilog2() as usize).min(CLASSES - 1)
}

/// Returns the numbers of threads that are worth trying with so many processors, most first. Not less than half of them: a
/// trial is felt by every stream, and may take as many times longer as it has fewer threads.
pub(super) fn worth_trying(processors: u32) -> Vec<u32> {
    let most = processors.max(1);
    let mut numbers: Vec<u32> = [most, most - 1, most * 3 / 4, most / 2]
        .into_iter()
        .filter(|&number| number > 0)
        .collect();
    // Already sorted, except where the machine is so small that some are equal or change places.
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    numbers.dedup();
    numbers
}

fn median<'a>(times: impl Iterator<Item = &'a f64>) -> f64 {
    let mut times: Vec<f64> = times.copied().collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes calls of 8 entries on a machine where `time` gives the microseconds for a number of threads; returns the
    /// time of all of them.
    fn run(choice: &mut ThreadChoice, calls: u32, time: impl Fn(u32) -> u64) -> u64 {
        (0..calls)
            .map(|_| {
                let took = time(choice.threads(8));
                choice.observe(8, Duration::from_micros(took));
                took
            })
            .sum()
    }

    /// All of the processors are free.
    fn quiet(threads: u32) -> u64 {
        40_000 / u64::from(threads)
    }

    /// One of two processors is busy with something else.
    fn busy(threads: u32) -> u64 {
        if threads == 1 { 40_000 } else { 150_000 }
    }

    #[test]
    fn every_processor_is_used_on_a_quiet_machine_at_little_cost() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        assert_eq!(choice.threads(8), 2);
        run(&mut choice, 5_000, quiet);
        let all = run(&mut choice, 10_000, quiet);
        assert!(all < 10_000 * quiet(2) * 101 / 100, "{all}");
    }

    #[test]
    fn a_processor_that_becomes_busy_is_left_and_one_that_becomes_free_is_taken_again() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        run(&mut choice, 5_000, quiet);
        let change = run(&mut choice, 32, busy);
        assert!(change < 26 * busy(2), "noticed within {change}");
        let all = run(&mut choice, 10_000, busy);
        assert!(all < 10_000 * busy(1) * 102 / 100, "{all}");
        let back = run(&mut choice, 2_200, quiet);
        assert!(
            back < 2_200 * quiet(1),
            "tried within two of the longest pauses"
        );
        let all = run(&mut choice, 10_000, quiet);
        assert!(all < 10_000 * quiet(2) * 102 / 100, "{all}");
    }

    #[test]
    fn what_trials_find_out_is_told_once() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        assert_eq!((choice.present(), choice.take_verdict()), (2, None));
        run(&mut choice, 5_000, quiet);
        let kept = ThreadVerdict {
            threads: 2,
            instead_of: None,
        };
        assert_eq!(choice.take_verdict(), Some(kept));
        run(&mut choice, 5_000, quiet);
        assert_eq!(choice.take_verdict(), None, "kept again");
        run(&mut choice, 5_000, busy);
        let taken = choice.take_verdict().unwrap();
        let (before, share) = taken.instead_of.unwrap();
        assert_eq!((taken.threads, before, choice.present()), (1, 2, 1));
        assert!((share - 40.0 / 150.0).abs() < 1e-6, "{share}");
        run(&mut choice, 5_000, busy);
        assert_eq!(choice.take_verdict(), None);
        let mut fixed = ThreadChoice::among(vec![3]);
        run(&mut fixed, 100, quiet);
        assert_eq!((fixed.present(), fixed.take_verdict()), (3, None));
    }

    #[test]
    fn calls_that_are_slow_now_and_then_cause_no_trials() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        run(&mut choice, 5_000, quiet);
        let mut tried = 0;
        for call in 0..10_000 {
            let threads = choice.threads(8);
            tried += u32::from(threads == 1);
            // Two in a row of every hundred.
            let slow = if call % 100 < 2 { 3 } else { 1 };
            choice.observe(8, Duration::from_micros(quiet(threads) * slow));
        }
        assert!(tried < 30, "{tried}");
    }

    /// Calls in rows of three that are slow for no reason bring trials, but ever fewer.
    #[test]
    fn noise_that_looks_like_a_change_is_soon_distrusted() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        run(&mut choice, 5_000, quiet);
        let mut tried = 0;
        for call in 0..10_000 {
            let threads = choice.threads(8);
            tried += u32::from(threads == 1);
            let slow = if call % 50 < 3 { 2 } else { 1 };
            choice.observe(8, Duration::from_micros(quiet(threads) * slow));
        }
        assert!(tried < 100, "{tried}");
    }

    /// Where only prompts come, that the first of them was slow, or that it became slow by and by, is no sign of a change.
    #[test]
    fn long_calls_are_tried_after_a_while_without_a_sign() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        choice.spared = true;
        let long_busy = |threads| 5 * busy(threads);
        let before = run(&mut choice, 160, long_busy);
        assert_eq!(before, 160 * long_busy(2));
        run(&mut choice, 20, long_busy);
        assert_eq!(choice.current, 1);
        // And back again.
        choice.spared = false;
        run(&mut choice, 700, |threads| 5 * quiet(threads));
        assert_eq!(choice.current, 0);
    }

    /// What one of many processors loses is noticed too.
    #[test]
    fn a_slowdown_by_two_thirds_is_a_change() {
        let mut choice = ThreadChoice::among(worth_trying(16));
        let long = |threads: u32| 20 * quiet(threads);
        run(&mut choice, 2_000, long);
        choice.spared = true;
        assert_eq!(choice.current, 0);
        // The sixteenth thread has half a processor.
        let slow = |threads| long(threads) * if threads == 16 { 17 } else { 10 } / 10;
        run(&mut choice, 400, slow);
        assert_ne!(choice.current, 0);
    }

    #[test]
    fn the_best_of_many_numbers_is_found() {
        assert_eq!(worth_trying(16), [16, 15, 12, 8]);
        assert_eq!(worth_trying(3), [3, 2, 1]);
        assert_eq!((worth_trying(1), worth_trying(0)), (vec![1], vec![1]));
        for best in worth_trying(16) {
            let mut choice = ThreadChoice::among(worth_trying(16));
            let slower = |threads: u32| 10_000 + 3_000 * u64::from(threads.abs_diff(best));
            run(&mut choice, 20_000, slower);
            let of_1000 = run(&mut choice, 1_000, slower);
            assert!(of_1000 < 1_000 * 10_200, "{best}: {of_1000}");
        }
    }

    #[test]
    fn slow_calls_now_and_then_change_nothing() {
        for every in [3_u32, 20] {
            let mut choice = ThreadChoice::among(worth_trying(16));
            let mut calls = 0_u32;
            let mut noisy = |threads: u32| {
                calls += 1;
                let slow = crate::ranking::mix(u64::from(calls)).is_multiple_of(u64::from(every));
                quiet(threads) * if slow { 2 } else { 1 }
            };
            let (mut all, mut best) = (0, 0);
            for call in 0..30_000 {
                let threads = choice.threads(8);
                let took = noisy(threads);
                choice.observe(8, Duration::from_micros(took));
                if call > 10_000 {
                    all += took;
                    best += took * u64::from(threads) / 16;
                }
            }
            assert!(all < best * 107 / 100, "{every}: {all} for {best}");
        }
    }

    #[test]
    fn batches_of_all_sizes_are_compared_with_their_like() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        for call in 0..2_000_u64 {
            let entries = 20 + usize::try_from(crate::ranking::mix(call) % 180).unwrap();
            let took = busy(choice.threads(entries)) * entries as u64;
            choice.observe(entries, Duration::from_micros(took));
        }
        assert_eq!(choice.threads(1), 1);
    }

    fn entry(slot: u32) -> BatchEntry {
        BatchEntry {
            slot,
            position: 0,
            token: 0,
            row: false,
        }
    }

    #[test]
    fn long_prompts_are_not_tried_with_fewer_threads_where_decoding_is_fastest_with_all() {
        let (tokens, few, many) = ([1, 2, 3].map(entry), [entry(2); 6], [entry(2); 64]);
        let long = |threads| 5 * quiet(threads);
        let long_busy = |threads| 5 * busy(threads);
        for prompt in [&few[..], &many] {
            let choice = || ThreadChoice::among(worth_trying(2));
            let mut choices = ThreadChoices {
                decode: choice(),
                prefill: choice(),
                few: choice(),
                few_max: 8,
            };
            let mut run = |calls: u32, entries: &[BatchEntry], time: fn(u32) -> u64| {
                let mut fewer = 0;
                for _ in 0..calls {
                    let choice = choices.of(entries);
                    let threads = choice.threads(entries.len());
                    fewer += u32::from(threads == 1);
                    choice.observe(entries.len(), Duration::from_micros(time(threads)));
                }
                fewer
            };
            assert_eq!(run(60, prompt, long), 0, "before the first answer");
            assert!(run(500, &tokens, quiet) > 0);
            assert_eq!(run(60, prompt, long), 0);
            // However many there are in two minutes: each trial would be a gap of two steps in every stream.
            assert_eq!(run(1_000, prompt, long), 0);
            assert_eq!(run(1_000, prompt, long), 1);
            let fewer = run(200, prompt, long_busy);
            assert!(fewer > 150, "a processor became busy meanwhile: {fewer}");
            run(2_200, prompt, long);
            run(2_200, &tokens, quiet);
            assert_eq!(run(60, prompt, long), 0);
            assert!(run(500, &tokens, busy) > 400);
            let fewer = run(200, prompt, long_busy);
            assert!(fewer > 150, "one processor became busy: {fewer}");
        }
    }

    #[test]
    fn nobody_feels_a_trial_with_a_short_prompt() {
        let mut choice = ThreadChoice::among(worth_trying(2));
        choice.spared = true;
        let mut trials = 0;
        for _ in 0..60 {
            let threads = choice.threads(8);
            trials += u32::from(threads == 1);
            choice.observe(8, Duration::from_micros(quiet(threads)));
        }
        assert!(trials > 0);
    }

    /// Drafts are fastest on few threads, prompts on many.
    #[test]
    fn drafts_do_not_decide_for_prompts() {
        let choice = || ThreadChoice::among(worth_trying(16));
        let mut choices = ThreadChoices {
            decode: choice(),
            prefill: choice(),
            few: choice(),
            few_max: 72,
        };
        let (drafts, prompt) = ([entry(1); 10], [entry(2); 128]);
        for call in 0..12_000 {
            let is_prompt = call % 300 < 16;
            let entries = if is_prompt { &prompt[..] } else { &drafts };
            let choice = choices.of(entries);
            let threads = u64::from(choice.threads(entries.len()));
            let took = if is_prompt {
                2_048_000 / threads
            } else {
                20_000 + 1_000 * threads
            };
            choice.observe(entries.len(), Duration::from_micros(took));
        }
        assert_eq!(choices.of(&prompt).current, 0);
        assert_eq!(choices.of(&drafts).threads(1), 8);
        let singles = [1, 2, 3].map(entry);
        assert_eq!(choices.of(&singles).threads(3), 16, "no call yet");
    }

    #[test]
    fn a_single_number_is_never_changed() {
        let mut choice = ThreadChoice::among(vec![3]);
        run(&mut choice, 100, quiet);
        assert_eq!((choice.threads(8), choice.most()), (3, 3));
    }
}
