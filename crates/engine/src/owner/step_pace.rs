//! [`StepPace`]: how many prompt tokens a step may compute, so that it ends in time.
//!
//! Streams wait for the end of a step, and so does a request that arrives meanwhile. How long a number of tokens takes
//! depends on the model, the machine, what else runs there and how long the sequences are, by a factor of thousands. So
//! the pace is measured, and the limit is a time.

use std::time::Duration;

/// Prompt tokens of a step before anything was measured.
const UNMEASURED_TOKENS: usize = 128;
/// Prompt tokens of a step, however slow they are. Where memory is what limits a step, so few cost hardly more than one.
const TOKENS_MIN: usize = 8;
/// The share of a new measurement in an estimate. One step that was kept from its processor says little.
const NEW_SHARE: f64 = 0.25;

/// Estimates what a decoding sequence and a prompt token add to the time of a step.
#[derive(Debug)]
pub(super) struct StepPace {
    /// The time of a step, in nanoseconds, as all times here.
    step: f64,
    /// One decoding sequence; `None` before a step without prompt tokens.
    decode: Option<f64>,
    /// One prompt token.
    prefill: Option<f64>,
}

impl StepPace {
    /// Aims at steps of at most `step`. `token` is the time of a prompt token, if it is known already.
    pub(super) fn new(step: Duration, token: Option<Duration>) -> Self {
        Self {
            step: nanoseconds(step),
            decode: None,
            prefill: token.map(nanoseconds),
        }
    }

    /// Returns how many prompt tokens a step may compute beside this many decoding sequences.
    pub(super) fn prefill_tokens(&self, decoding: usize) -> usize {
        let Some(token) = self.prefill else {
            return UNMEASURED_TOKENS;
        };
        let decodes = self.decode.unwrap_or(token) * count(decoding);
        // Where decoding alone takes longer than a step should, a third of the step is for prompts nevertheless: they
        // would never be computed otherwise.
        let left = (self.step - decodes).max(decodes / 2.0);
        // A cast saturates: a token that takes no time gives a number that the model's batch limits.
        ((left / token.max(1.0)) as usize).max(TOKENS_MIN)
    }

    /// Takes the time of a decode call with so many decoding sequences and prompt tokens.
    pub(super) fn observe(&mut self, decoding: usize, prompt_tokens: usize, took: Duration) {
        let took = nanoseconds(took);
        if prompt_tokens == 0 {
            if decoding > 0 {
                average(&mut self.decode, took / count(decoding));
            }
            return;
        }
        let equal = took / count(decoding + prompt_tokens);
        // What decoding takes is known from steps without prompts, but not exactly for as many sequences as these. The
        // minimum keeps an estimate that is too large from making prompt tokens look free.
        let beside = self.decode.unwrap_or(equal) * count(decoding);
        let token = ((took - beside) / count(prompt_tokens)).max(equal / 4.0);
        average(&mut self.prefill, token);
    }
}

fn average(estimate: &mut Option<f64>, new: f64) {
    *estimate = Some(estimate.map_or(new, |old| old + (new - old) * NEW_SHARE));
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a batch are few")]
fn count(tokens: usize) -> f64 {
    tokens as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a step takes 10 ms, 5 ms for each decoding sequence, and this many microseconds for each
    /// prompt token.
    fn took(decoding: usize, prompt_tokens: usize, token_us: u64) -> Duration {
        let tokens = Duration::from_micros(token_us) * u32::try_from(prompt_tokens).unwrap();
        Duration::from_millis(10)
            + Duration::from_millis(5) * u32::try_from(decoding).unwrap()
            + tokens
    }

    /// Steps until the pace is steady, and returns the time of the last step.
    fn steady(pace: &mut StepPace, decoding: usize, token_us: u64) -> Duration {
        (0..40).fold(Duration::ZERO, |_, _| {
            let tokens = pace.prefill_tokens(decoding).min(4_096);
            let time = took(decoding, tokens, token_us);
            pace.observe(decoding, tokens, time);
            time
        })
    }

    #[test]
    fn a_step_takes_as_long_as_it_may_whatever_a_token_costs() {
        for (decoding, token_us) in [
            (0, 100),
            (0, 9_000),
            (1, 100),
            (8, 1_000),
            (8, 9_000),
            (20, 500),
        ] {
            for known in [None, Some(Duration::from_micros(token_us / 2))] {
                let mut pace = StepPace::new(Duration::from_millis(200), known);
                for _ in 0..10 {
                    pace.observe(decoding, 0, took(decoding, 0, token_us));
                }
                let time = steady(&mut pace, decoding, token_us);
                // Never fewer than the least, which takes 72 ms here at most.
                let range = Duration::from_millis(170)..=Duration::from_millis(215);
                assert!(range.contains(&time), "{decoding}, {token_us}: {time:?}");
            }
        }
    }

    #[test]
    fn a_step_without_known_decodes_is_as_long_too() {
        let mut pace = StepPace::new(Duration::from_millis(200), None);
        let time = steady(&mut pace, 6, 2_000);
        let range = Duration::from_millis(150)..=Duration::from_millis(250);
        assert!(range.contains(&time), "{time:?}");
    }

    #[test]
    fn prompts_advance_beside_decodes_that_take_longer_than_a_step_should() {
        let mut pace = StepPace::new(Duration::from_millis(200), None);
        for _ in 0..10 {
            pace.observe(100, 0, took(100, 0, 0));
        }
        // 510 ms for the decodes, and half of that for prompts.
        let time = steady(&mut pace, 100, 1_000);
        let range = Duration::from_millis(700)..=Duration::from_millis(800);
        assert!(range.contains(&time), "{time:?}");
    }

    #[test]
    fn a_single_slow_step_changes_little_and_a_slower_machine_much() {
        let mut pace = StepPace::new(Duration::from_millis(200), None);
        steady(&mut pace, 0, 1_000);
        let before = pace.prefill_tokens(0);
        pace.observe(0, before, took(0, before, 4_000));
        assert!(pace.prefill_tokens(0) > before / 2);
        steady(&mut pace, 0, 4_000);
        assert!(pace.prefill_tokens(0) < before / 3);
    }

    #[test]
    fn the_number_of_tokens_has_bounds() {
        let mut pace = StepPace::new(Duration::from_millis(200), None);
        assert_eq!(pace.prefill_tokens(3), UNMEASURED_TOKENS);
        pace.observe(0, 100, Duration::ZERO);
        assert!(pace.prefill_tokens(0) > 1_000_000);
        let mut slow = StepPace::new(Duration::from_millis(200), None);
        slow.observe(0, 1, Duration::from_secs(1_000));
        assert_eq!(slow.prefill_tokens(0), TOKENS_MIN);
    }
}
