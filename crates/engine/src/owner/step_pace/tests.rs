//! The pace of steps on machines of all speeds.

use super::*;

/// A machine: the time of a step whatever is in it, of each decoding sequence, and of each prompt token.
#[derive(Clone, Copy, Debug)]
struct Machine {
    fixed_ms: u64,
    sequence_ms: u64,
    token_us: u64,
}

impl Machine {
    fn takes(self, decoding: usize, prompt_tokens: usize) -> Duration {
        let of = |count: usize| u32::try_from(count).unwrap();
        Duration::from_millis(self.fixed_ms)
            + Duration::from_millis(self.sequence_ms) * of(decoding)
            + Duration::from_micros(self.token_us) * of(prompt_tokens)
    }

    /// Steps until the pace is steady, with prompts waiting all the time; returns the tokens and the time of the last.
    fn steady(self, pace: &mut StepPace, decoding: usize) -> (usize, Duration) {
        self.steps(pace, decoding, usize::MAX)
    }

    /// The same where one step in so many has the rest of a prompt, which is half as many tokens.
    fn steps(self, pace: &mut StepPace, decoding: usize, rests: usize) -> (usize, Duration) {
        (0..60).fold((0, Duration::ZERO), |_, step| {
            begin(pace, waiting(decoding), Duration::ZERO, 4_096);
            let tokens = pace.prefill_tokens(decoding).min(4_096);
            let is_rest = step % rests == rests / 2;
            let tokens = if is_rest { tokens.div_ceil(2) } else { tokens };
            (tokens, self.step(pace, decoding, tokens))
        })
    }

    /// A step; as in a batch, a single prompt token is computed as a decoding sequence is.
    fn step(self, pace: &mut StepPace, decoding: usize, tokens: usize) -> Duration {
        let time = self.takes(decoding, tokens);
        match tokens {
            1 => observe(pace, decoding + 1, 0, time),
            _ => observe(pace, decoding, tokens, time),
        }
        time
    }
}

const STEP: Duration = Duration::from_millis(200);
const USUAL: Machine = Machine {
    fixed_ms: 10,
    sequence_ms: 5,
    token_us: 2_000,
};

fn waiting(decoding: usize) -> StepWaiting {
    match decoding {
        0 => StepWaiting::Prompts,
        _ => StepWaiting::Streams,
    }
}

/// Takes the time of a step with so many prompt tokens, of one prompt.
fn observe(pace: &mut StepPace, decoding: usize, prompt_tokens: usize, took: Duration) {
    let work = StepWork {
        decoding,
        prompts: prompt_tokens.min(1),
        prompt_tokens,
    };
    pace.observe(work, took);
}

fn begin(pace: &mut StepPace, waiting: StepWaiting, spent: Duration, prompt_tokens: usize) {
    pace.begin_step(StepStart {
        waiting,
        turns: 1,
        spent,
        prompt_tokens,
    });
}

/// How long a step takes beside so many streams.
fn step_ms(decoding: usize) -> u64 {
    if decoding == 0 { 400 } else { 200 }
}

fn assert_near(time: Duration, expected_ms: u64, what: &dyn std::fmt::Debug) {
    let expected = Duration::from_millis(expected_ms);
    let range = expected * 7 / 10..=expected * 12 / 10;
    assert!(range.contains(&time), "{what:?}: {time:?} for {expected:?}");
}

/// A stream of one set of adapters waits for the steps of the others.
#[test]
fn steps_that_take_turns_share_the_time_of_one() {
    for (turns, expected_ms) in [(1, 200), (2, 100), (4, 50)] {
        let mut pace = StepPace::new(STEP, None, true);
        USUAL.steady(&mut pace, 1);
        let start = StepStart {
            turns,
            ..pace.start
        };
        pace.begin_step(start);
        let time = USUAL.takes(1, pace.prefill_tokens(1));
        assert_near(time, expected_ms, &turns);
    }
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
        for known in [false, true] {
            let machine = Machine { token_us, ..USUAL };
            let known = known.then_some(WarmTimes {
                decode: machine.takes(1, 0),
                token: Duration::from_micros(token_us / 2),
            });
            let mut pace = StepPace::new(STEP, known, true);
            for _ in 0..10 {
                observe(&mut pace, decoding, 0, machine.takes(decoding, 0));
            }
            let (_, time) = machine.steady(&mut pace, decoding);
            assert_near(time, step_ms(decoding), &(decoding, token_us));
        }
    }
}

#[test]
fn a_step_for_which_nobody_waits_is_longer() {
    let mut pace = StepPace::new(STEP, None, true);
    USUAL.steady(&mut pace, 0);
    begin(&mut pace, StepWaiting::Nobody, Duration::ZERO, 4_096);
    let tokens = pace.prefill_tokens(0);
    assert_near(USUAL.takes(0, tokens), 800, &tokens);
}

/// A second turn is a few tokens beside other streams. They are not worth a step of the whole time.
#[test]
fn a_step_that_finds_few_prompt_tokens_beside_streams_is_short() {
    let mut pace = StepPace::new(STEP, None, true);
    observe(&mut pace, 8, 0, USUAL.takes(8, 0));
    USUAL.steady(&mut pace, 8);
    for (found, expected_ms) in [(1, 80), (50, 85), (150, 145), (300, 200), (5_000, 200)] {
        begin(&mut pace, StepWaiting::Streams, Duration::ZERO, found);
        assert_near(USUAL.takes(8, pace.prefill_tokens(8)), expected_ms, &found);
    }
    // Drafts have the whole time where no prompt waits.
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 0);
    assert_near(USUAL.takes(8, pace.prefill_tokens(8)), 200, &"none");
    for (waiting, expected_ms) in [(StepWaiting::Prompts, 400), (StepWaiting::Nobody, 800)] {
        begin(&mut pace, waiting, Duration::ZERO, 10);
        assert_near(
            USUAL.takes(0, pace.prefill_tokens(0)),
            expected_ms,
            &waiting,
        );
    }
}

/// What few tokens add to a step is mostly the pass over the weights that their prompt needs, where a batch is computed sequence
/// by sequence.
#[test]
fn steps_with_few_prompt_tokens_say_nothing_about_many() {
    for (fixed_ms, token_us) in [(10, 2_000), (30, 500)] {
        let machine = Machine {
            fixed_ms,
            sequence_ms: 1,
            token_us,
        };
        let pass = Duration::from_millis(fixed_ms + 20);
        for few in [2, 5, 10, 20] {
            let mut pace = StepPace::new(STEP, None, true);
            observe(&mut pace, 8, 0, machine.takes(8, 0));
            let (before, _) = machine.steady(&mut pace, 8);
            for _ in 0..1_000 {
                begin(&mut pace, StepWaiting::Streams, Duration::ZERO, few);
                let tokens = pace.prefill_tokens(8).min(few);
                match tokens {
                    1 => observe(&mut pace, 9, 0, machine.takes(9, 0)),
                    _ => observe(&mut pace, 8, tokens, machine.takes(8, tokens) + pass),
                }
            }
            begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
            let after = pace.prefill_tokens(8);
            assert!(after >= before / 2, "{few}, {machine:?}: {after}, {before}");
        }
    }
}

#[test]
fn a_machine_that_slept_in_a_step_with_few_prompt_tokens_makes_later_ones_little_shorter() {
    for slept in [Duration::from_millis(300), Duration::from_secs(20)] {
        for few in [2, 10] {
            let mut pace = StepPace::new(STEP, None, true);
            observe(&mut pace, 8, 0, USUAL.takes(8, 0));
            let (before, _) = USUAL.steady(&mut pace, 8);
            begin(&mut pace, StepWaiting::Streams, Duration::ZERO, few);
            let tokens = pace.prefill_tokens(8).min(few);
            observe(&mut pace, 8, tokens, slept);
            begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
            let after = pace.prefill_tokens(8);
            assert!(after >= before / 3, "{few}, {slept:?}: {after}, {before}");
        }
    }
}

/// Where only few tokens are ever found, they are what the estimate comes from.
#[test]
fn few_prompt_tokens_that_take_too_long_become_fewer() {
    let slower = Machine {
        token_us: 40_000,
        ..USUAL
    };
    let mut pace = StepPace::new(STEP, None, true);
    observe(&mut pace, 1, 0, USUAL.takes(1, 0));
    USUAL.steady(&mut pace, 1);
    let mut tokens = 0;
    for _ in 0..20 {
        begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 25);
        tokens = pace.prefill_tokens(1).min(25);
        slower.step(&mut pace, 1, tokens);
    }
    assert_eq!(tokens, TOKENS_MIN);
}

/// A short step that took longer than planned, and not too long for the streams, is no sign that long ones are too long.
#[test]
fn a_short_step_that_is_late_shortens_no_long_one() {
    let mut pace = StepPace::new(STEP, None, true);
    observe(&mut pace, 4, 0, USUAL.takes(4, 0));
    USUAL.steady(&mut pace, 4);
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 10);
    let tokens = pace.prefill_tokens(4);
    observe(&mut pace, 4, tokens, USUAL.takes(4, tokens) * 3 / 2);
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
    assert_near(USUAL.takes(4, pace.prefill_tokens(4)), 200, &tokens);
}

#[test]
fn what_a_step_took_before_is_left_out_of_its_prompts() {
    let mut pace = StepPace::new(STEP, None, true);
    observe(&mut pace, 4, 0, USUAL.takes(4, 0));
    USUAL.steady(&mut pace, 4);
    for (spent_ms, expected_ms) in [(0, 200), (100, 100), (1_000, 45)] {
        begin(
            &mut pace,
            StepWaiting::Streams,
            Duration::from_millis(spent_ms),
            4_096,
        );
        let tokens = pace.prefill_tokens(4);
        // Of a step that is late, prompts have their part nevertheless.
        assert_near(USUAL.takes(4, tokens), expected_ms, &spent_ms);
        observe(&mut pace, 4, tokens, USUAL.takes(4, tokens));
        begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
        assert_near(
            USUAL.takes(4, pace.prefill_tokens(4)),
            200,
            &"the step after it",
        );
    }
}

/// A second turn is a few tokens, and its prefix is copied in the same step. The short step has the time for both.
#[test]
fn what_a_step_took_before_is_no_part_of_a_short_one() {
    let mut pace = StepPace::new(STEP, None, true);
    observe(&mut pace, 1, 0, USUAL.takes(1, 0));
    USUAL.steady(&mut pace, 1);
    for (spent_ms, expected_ms) in [(0, 45), (50, 45), (100, 45), (150, 31), (1_000, 31)] {
        begin(
            &mut pace,
            StepWaiting::Streams,
            Duration::from_millis(spent_ms),
            30,
        );
        let took = USUAL.takes(1, pace.prefill_tokens(1));
        assert_near(took, expected_ms, &spent_ms);
    }
}

#[test]
fn steps_that_are_late_before_anything_is_known_make_no_later_ones_short() {
    let mut pace = StepPace::new(STEP, None, true);
    for step in 0..40 {
        let spent = Duration::from_millis(if step % 4 == 0 { 180 } else { 0 });
        begin(&mut pace, StepWaiting::Streams, spent, 4_096);
        let tokens = pace.prefill_tokens(8);
        let took = USUAL.step(&mut pace, 8, tokens);
        if step > 20 && step % 4 != 0 && tokens > 1 {
            assert!(took > STEP * 6 / 10, "{step}: {took:?}");
        }
    }
}

#[test]
fn a_further_prompt_counts_as_a_pass_over_the_weights() {
    let mut pace = StepPace::new(STEP, None, false);
    assert_eq!(pace.pass_tokens(), 0, "unknown");
    observe(&mut pace, 1, 0, Duration::from_millis(20));
    observe(&mut pace, 0, 100, Duration::from_millis(200));
    assert_eq!(pace.pass_tokens(), 11);
}

#[test]
fn what_one_sequence_takes_says_little_about_many() {
    for (fixed_ms, sequence_ms, token_us) in [(100, 4, 16_000), (40, 2, 5_000), (10, 5, 2_000)] {
        let machine = Machine {
            fixed_ms,
            sequence_ms,
            token_us,
        };
        let mut pace = StepPace::new(STEP, None, true);
        for _ in 0..10 {
            observe(&mut pace, 1, 0, machine.takes(1, 0));
        }
        let (tokens, time) = machine.steady(&mut pace, 7);
        assert!(time < STEP * 16 / 10, "{machine:?}: {time:?}");
        assert!(tokens >= TOKENS_MIN);
    }
    // Nothing but steps with both.
    let (_, time) = USUAL.steady(&mut StepPace::new(STEP, None, true), 6);
    assert_near(time, 200, &"unknown");
}

/// Streams begin and end one after the other while prompts wait all the time, so that no step is without them.
#[test]
fn what_streams_take_is_measured_beside_prompts_without_end() {
    for (fixed_ms, sequence_ms, token_us) in [(10, 40, 2_000), (225, 200, 20_000)] {
        let machine = Machine {
            fixed_ms,
            sequence_ms,
            token_us,
        };
        let mut pace = StepPace::new(STEP, None, true);
        observe(&mut pace, 1, 0, machine.takes(1, 0));
        for decoding in [1, 2, 4, 8, 4, 1, 8, 1, 0, 8, 0] {
            // What seemed to be a pass of the prompts is recognised as that of the streams, but not soon.
            let steps = (0..12).map(|_| machine.steps(&mut pace, decoding, 8));
            let (_, time) = steps.last().unwrap();
            let alone = fixed_ms + sequence_ms * decoding as u64;
            let expected_ms = match decoding {
                0 => (STEP * 2).as_millis().max(3 * u128::from(fixed_ms)),
                _ => STEP.as_millis().max(u128::from(alone) * 3 / 2),
            };
            assert_near(
                time,
                u64::try_from(expected_ms).unwrap(),
                &(machine, decoding),
            );
        }
    }
}

#[test]
fn prompts_advance_where_a_step_takes_longer_than_it_should_without_them() {
    let machine = Machine {
        fixed_ms: 300,
        sequence_ms: 0,
        token_us: 5_000,
    };
    for (decoding, expected_ms) in [(1, 450), (0, 900)] {
        let mut pace = StepPace::new(STEP, None, true);
        observe(&mut pace, 1, 0, machine.takes(1, 0));
        let (_, time) = machine.steady(&mut pace, decoding);
        assert_near(time, expected_ms, &decoding);
    }
}

/// 8 tokens take almost as long as 500 then.
#[test]
fn a_prompt_whose_pass_takes_as_long_as_a_step_has_many_tokens_in_it() {
    let pass = Duration::from_millis(200);
    for known in [false, true] {
        let machine = Machine {
            fixed_ms: 200,
            sequence_ms: 0,
            token_us: 400,
        };
        let known = known.then_some(WarmTimes {
            decode: pass,
            token: Duration::from_micros(400),
        });
        let mut pace = StepPace::new(STEP, known, false);
        observe(&mut pace, 1, 0, pass);
        let mut tokens = 0;
        for _ in 0..200 {
            begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
            tokens = pace.prefill_tokens(1);
            match tokens {
                1 => observe(&mut pace, 2, 0, pass),
                _ => observe(&mut pace, 1, tokens, machine.takes(1, tokens) + pass),
            }
        }
        // Where a pass is not known, a step that measures two sequences says that it takes half as long.
        let expected = if known.is_some() {
            400..=600
        } else {
            100..=600
        };
        assert!(expected.contains(&tokens), "{known:?}: {tokens}");
    }
}

/// Computes a prompt of so many tokens, each step with tokens of it `pass_ms` longer, and then 20 steps of the streams alone.
/// Returns the steps of the prompt, and the longest of them.
fn prompt_beside(
    pace: &mut StepPace,
    machine: Machine,
    pass_ms: u64,
    decoding: usize,
    total: usize,
) -> (u32, Duration) {
    let (mut left, mut steps, mut longest) = (total, 0, Duration::ZERO);
    while left > 0 {
        begin(pace, StepWaiting::Streams, Duration::ZERO, left);
        let tokens = pace.prefill_tokens(decoding).min(left);
        let (decoding, prompt, pass_ms) = match tokens {
            1 => (decoding + 1, 0, 0),
            _ => (decoding, tokens, pass_ms),
        };
        let took = machine.takes(decoding, prompt) + Duration::from_millis(pass_ms);
        observe(pace, decoding, prompt, took);
        (left, steps, longest) = (left - tokens, steps + 1, longest.max(took));
    }
    for _ in 0..20 {
        begin(pace, StepWaiting::Streams, Duration::ZERO, 0);
        observe(pace, decoding, 0, machine.takes(decoding, 0));
    }
    (steps, longest)
}

/// Weights in main memory that are copied to a GPU for a prompt, and computed in place for streams. If the pass counted as time of
/// the tokens, a step would have eight of them, and a prompt would take fifty steps.
#[test]
fn a_pass_that_takes_longer_for_prompts_than_for_streams_is_learned() {
    for (computes_together, pass_ms) in [(false, 120), (true, 120), (true, 200)] {
        for noise_percent in [0, 30, 100] {
            let machine = Machine {
                fixed_ms: 60,
                sequence_ms: 2,
                token_us: 400,
            };
            let known = WarmTimes {
                decode: machine.takes(1, 0),
                // A prompt of 32 tokens less one token, whose pass is shorter.
                token: Duration::from_micros(2_300),
            };
            let mut pace = StepPace::new(STEP, Some(known), computes_together);
            let mut noise = Noise(7);
            let (mut prompts, mut steps) = (0, 0);
            for round in 0..300 {
                let decoding = 1 + noise.below(8);
                for _ in 0..5 {
                    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 0);
                    let took = machine.takes(decoding, 0);
                    observe(&mut pace, decoding, 0, took + noise.of(took, noise_percent));
                }
                let mut left = 200 + noise.below(600);
                prompts += usize::from(round >= 100);
                while left > 0 {
                    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, left);
                    let tokens = pace.prefill_tokens(decoding).min(left);
                    let (decoding, prompt, pass_ms) = match tokens {
                        1 => (decoding + 1, 0, 0),
                        _ => (decoding, tokens, pass_ms),
                    };
                    let took = machine.takes(decoding, prompt) + Duration::from_millis(pass_ms);
                    observe(
                        &mut pace,
                        decoding,
                        prompt,
                        took + noise.of(took, noise_percent),
                    );
                    left -= tokens;
                    steps += usize::from(round >= 100);
                }
            }
            assert!(
                steps <= prompts * 5,
                "{computes_together}, {pass_ms} ms, {noise_percent} %: {steps} steps of {prompts} prompts"
            );
        }
    }
}

/// Something else begins on the machine that was idle when the model was loaded.
#[test]
fn a_pass_becomes_longer_with_the_machine() {
    let idle = Machine {
        fixed_ms: 20,
        sequence_ms: 2,
        token_us: 1_000,
    };
    let busy = Machine {
        fixed_ms: 60,
        sequence_ms: 6,
        token_us: 3_000,
    };
    let known = WarmTimes {
        decode: idle.takes(1, 0),
        token: Duration::from_millis(1),
    };
    let mut pace = StepPace::new(STEP, Some(known), false);
    for (machine, pass_ms) in [(idle, 20), (busy, 60), (idle, 20)] {
        for _ in 0..20 {
            prompt_beside(&mut pace, machine, pass_ms, 4, 500);
        }
        let (_, longest) = prompt_beside(&mut pace, machine, pass_ms, 4, 500);
        let most = Duration::from_millis(if pass_ms == 60 { 260 } else { 220 });
        assert!(longest <= most, "{machine:?}: {longest:?}");
    }
}

/// Seeded random numbers.
struct Noise(u64);

impl Noise {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % most
    }

    /// Up to so many percent of a time.
    fn of(&mut self, time: Duration, percent: u32) -> Duration {
        let share = u32::try_from(self.below(1_000)).unwrap();
        time * percent * share / 100_000
    }
}

#[test]
fn short_prompts_beside_long_steps_take_few_of_them() {
    for (fixed_ms, pass_ms) in [(200, 0), (150, 0), (100, 0), (200, 200)] {
        for decoding in [1, 8] {
            let machine = Machine {
                fixed_ms,
                sequence_ms: 2,
                token_us: 400,
            };
            let known = WarmTimes {
                decode: machine.takes(1, 0),
                token: Duration::from_micros(400),
            };
            let mut pace = StepPace::new(STEP, Some(known), pass_ms == 0);
            for _ in 0..20 {
                let (steps, _) = prompt_beside(&mut pace, machine, pass_ms, decoding, 100);
                assert!(steps <= 2, "{fixed_ms}, {pass_ms}, {decoding}: {steps}");
            }
        }
    }
}

/// What a long sequence takes is mostly its attention, which no prompt needs a second time.
#[test]
fn what_sequences_take_is_no_pass_over_the_weights() {
    for (sequence_ms, decoding, is_known, most_ms) in [(100, 1, true, 320), (10, 8, false, 240)] {
        let machine = Machine {
            fixed_ms: 10,
            sequence_ms,
            token_us: 1_000,
        };
        let known = is_known.then_some(WarmTimes {
            decode: Duration::from_millis(10),
            token: Duration::from_millis(1),
        });
        let mut pace = StepPace::new(STEP, known, false);
        for _ in 0..3 {
            observe(&mut pace, decoding, 0, machine.takes(decoding, 0));
        }
        prompt_beside(&mut pace, machine, 10, decoding, 20_000);
        let (_, longest) = prompt_beside(&mut pace, machine, 10, decoding, 2_000);
        assert!(longest.as_millis() <= most_ms, "{sequence_ms}: {longest:?}");
    }
}

/// A model that was loaded on an idle machine, which is busy now.
#[test]
fn a_first_step_beside_streams_has_not_all_tokens_that_the_loading_promises() {
    let known = WarmTimes {
        decode: Duration::from_millis(10),
        token: Duration::from_micros(100),
    };
    let mut pace = StepPace::new(STEP, Some(known), true);
    begin(&mut pace, StepWaiting::Nobody, Duration::ZERO, 4_096);
    assert!(pace.prefill_tokens(0) > 4_096);
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
    assert_eq!(pace.prefill_tokens(1), UNMEASURED_TOKENS);
    observe(&mut pace, 1, UNMEASURED_TOKENS, Duration::from_millis(22));
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
    assert!(pace.prefill_tokens(1) > 1_000);
}

/// Weights that are read from a disk when the first request needs them.
#[test]
fn a_first_step_that_took_very_long_makes_later_ones_short_for_a_while_only() {
    for first in [Duration::from_secs(2), Duration::from_secs(3_600)] {
        let known = WarmTimes {
            decode: USUAL.takes(1, 0),
            token: Duration::from_millis(2),
        };
        let mut pace = StepPace::new(STEP, Some(known), true);
        begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
        let tokens = pace.prefill_tokens(1);
        observe(&mut pace, 1, tokens, first);
        let (_, time) = USUAL.steady(&mut pace, 1);
        assert_near(time, 200, &first);
    }
}

#[test]
fn a_first_step_tells_more_than_the_loading_of_the_model() {
    let known = WarmTimes {
        decode: USUAL.takes(1, 0),
        token: Duration::from_millis(20),
    };
    let mut pace = StepPace::new(STEP, Some(known), true);
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
    let tokens = pace.prefill_tokens(1);
    assert!(tokens < 10, "{tokens}");
    USUAL.step(&mut pace, 1, tokens);
    begin(&mut pace, StepWaiting::Streams, Duration::ZERO, 4_096);
    assert_near(USUAL.takes(1, pace.prefill_tokens(1)), 200, &tokens);
}

#[test]
fn a_machine_that_slept_changes_little_and_a_slower_one_much() {
    for slept in [Duration::from_secs(20), Duration::from_secs(3_600)] {
        for decoding in [0, 1, 8] {
            let mut pace = StepPace::new(STEP, None, true);
            observe(&mut pace, 1, 0, USUAL.takes(1, 0));
            let (before, _) = USUAL.steady(&mut pace, decoding);
            observe(&mut pace, decoding.max(1), 0, slept);
            begin(&mut pace, waiting(decoding), Duration::ZERO, 4_096);
            observe(&mut pace, decoding, before, slept);
            assert!(pace.prefill_tokens(decoding) >= before / 3, "{decoding}");
            let (_, time) = USUAL.steady(&mut pace, decoding);
            assert_near(time, step_ms(decoding), &(slept, decoding));
            let slower = Machine {
                token_us: 8_000,
                ..USUAL
            };
            let (_, time) = slower.steady(&mut pace, decoding);
            assert_near(time, step_ms(decoding), &(slept, decoding));
        }
    }
}

#[test]
fn the_number_of_tokens_has_bounds() {
    let mut pace = StepPace::new(STEP, None, true);
    assert_eq!(pace.prefill_tokens(3), UNMEASURED_TOKENS);
    observe(&mut pace, 0, 100, Duration::ZERO);
    assert!(pace.prefill_tokens(0) > 1_000_000);
    let mut slow = StepPace::new(STEP, None, true);
    observe(&mut slow, 0, 1, Duration::from_secs(1_000));
    assert_eq!(slow.prefill_tokens(0), TOKENS_MIN);
}
