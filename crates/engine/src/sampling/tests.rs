//! The sampler against a naive one that sorts everything in double precision.

use std::sync::Arc;

use proptest::prelude::*;
use sapwood_proto::params::{GenerationParams, SamplerOrder};

use super::*;
use crate::model::Model;
use crate::ranking::ZipfDistribution;
use crate::scripted::{Config, Scripted};

/// The data that a draw borrows.
#[derive(Clone, Debug, Default)]
struct Case {
    sampling: Sampling,
    history: Option<TokenHistory>,
    tokens: Vec<Token>,
    mirostat: f32,
    forbidden: Vec<Token>,
    mask: Option<Mask>,
    bias: Vec<(Token, f32)>,
    top_logprobs: Option<u32>,
}

impl Case {
    fn draw(&self, index: u32) -> SampleParams<'_> {
        SampleParams {
            sampling: &self.sampling,
            seed: 11,
            choice: 0,
            index,
            history: self.history.as_ref(),
            tokens: &self.tokens,
            mirostat: self.mirostat,
            forbidden: &self.forbidden,
            mask: self.mask.as_ref(),
            logit_bias: &self.sampling.logit_bias,
            bias: &self.bias,
            temperature: None,
            top_logprobs: self.top_logprobs,
        }
    }
}

/// Logits after bias and masks in token order, on which log-probabilities are based.
fn constrained(row: &[f32], case: &Case) -> Vec<f64> {
    let allowed = |token: Token| {
        !case.forbidden.contains(&token) && case.mask.as_ref().is_none_or(|mask| mask.allows(token))
    };
    let logit = |(token, &logit): (u32, &f32)| {
        let biases = case.sampling.logit_bias.iter().chain(&case.bias);
        let all = biases.filter(|bias| bias.0 == token).map(|bias| bias.1);
        if !allowed(token) {
            f64::NEG_INFINITY
        } else {
            f64::from(all.fold(logit, |sum, bias| sum + bias))
        }
    };
    (0..).zip(row).map(logit).collect()
}

/// Log-probabilities of every token (D-22).
fn reference_logprobs(row: &[f32], case: &Case) -> Vec<f64> {
    let logits = constrained(row, case);
    let total = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.iter().map(|logit| logit - total).collect()
}

/// The tokens that may be drawn with their probabilities, best first.
fn reference_distribution(row: &[f32], case: &Case) -> Vec<(Token, f64)> {
    let sampling = &case.sampling;
    let temperature = f64::from(sampling.temperature);
    let mut all: Vec<(Token, f64)> = (0..)
        .zip(constrained(row, case))
        .filter(|(_, logit)| logit.is_finite())
        .collect();
    all.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
    if sampling.temperature == 0.0 {
        return vec![(all[0].0, 1.0)];
    }
    if sampling.top_k > 0 {
        all.truncate(sampling.top_k as usize);
    }
    let max = all[0].1;
    for entry in &mut all {
        entry.1 = ((entry.1 - max) / temperature).exp();
    }
    let total: f64 = all.iter().map(|entry| entry.1).sum();
    if sampling.top_p < 1.0 {
        let mut sum = 0.0;
        let cached = all.iter().position(|entry| {
            sum += entry.1;
            sum >= f64::from(sampling.top_p) * total
        });
        all.truncate(cached.map_or(all.len(), |index| index + 1));
    }
    all.retain(|entry| entry.1 >= f64::from(sampling.min_p));
    let total: f64 = all.iter().map(|entry| entry.1).sum();
    all.iter()
        .map(|&(token, weight)| (token, weight / total))
        .collect()
}

fn row_and_case() -> impl Strategy<Value = (Vec<f32>, Case)> {
    let logits = prop::collection::vec((-80_i32..80).prop_map(|logit| logit as f32 / 8.0), 1..400);
    let sampling = (
        prop_oneof![Just(0.0_f32), Just(0.7), Just(1.0), Just(3.0)],
        prop_oneof![Just(0_u32), 1..8_u32, 20..500_u32],
        prop_oneof![Just(1.0_f32), Just(0.9), Just(0.3)],
        prop_oneof![Just(0.0_f32), Just(0.05), Just(0.5)],
        prop::collection::btree_map(
            0..400_u32,
            prop_oneof![Just(f32::NEG_INFINITY), -5.0..5.0_f32],
            0..4,
        ),
    );
    let extras = (
        prop::option::of(any::<u64>()),
        prop::collection::vec(0..400_u32, 0..3),
        prop::option::of(0..20_u32),
    );
    (logits, sampling, extras).prop_map(|(row, sampling, (mask, forbidden, top_logprobs))| {
        let (temperature, top_k, top_p, min_p, bias) = sampling;
        let size = row.len() as u32;
        let logit_bias = bias
            .into_iter()
            .filter(|(token, _)| *token < size && *token > 0)
            .collect();
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            logit_bias,
            ..Sampling::default()
        };
        // Token 0 is always allowed, so that a token can be drawn.
        let mask = mask.map(|bits| {
            let mut mask = Mask::none(row.len());
            (0..size)
                .filter(|token| *token == 0 || bits >> (token % 64) & 1 == 1)
                .for_each(|token| mask.allow(token));
            mask
        });
        let forbidden = forbidden
            .into_iter()
            .filter(|token| *token < size && *token > 0)
            .collect();
        (
            row,
            Case {
                sampling,
                forbidden,
                mask,
                top_logprobs,
                ..Case::default()
            },
        )
    })
}

proptest! {
    /// D-22, KE-614.
    #[test]
    fn lm_411_logprobs_are_those_of_the_whole_vocabulary((mut row, case) in row_and_case()) {
        let exact = reference_logprobs(&row, &case);
        let case = Case { top_logprobs: Some(case.top_logprobs.unwrap_or(5)), ..case };
        let sample = Sampler::default().sample(&mut row, &case.draw(0)).unwrap();
        let near = |token: Token, logprob: f32| (exact[token as usize] - f64::from(logprob)).abs() < 1e-3;
        prop_assert!(near(sample.token, sample.logprob) && sample.logprob <= 0.0);
        let mut best: Vec<(Token, f64)> = (0..).zip(exact.iter().copied()).filter(|entry| entry.1.is_finite()).collect();
        best.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
        let slot = best.iter().position(|entry| entry.0 == sample.token).unwrap();
        prop_assert_eq!(sample.rank, Some(slot as u32 + 1));
        best.truncate(case.top_logprobs.unwrap() as usize);
        let tokens = |list: &[(Token, f32)]| list.iter().map(|entry| entry.0).collect::<Vec<_>>();
        prop_assert_eq!(tokens(&sample.top), best.iter().map(|entry| entry.0).collect::<Vec<_>>());
        prop_assert!(sample.top.iter().all(|&(token, logprob)| near(token, logprob)));
    }

    /// A drawn token is allowed by the naive sampler, and a token that is nearly certain there is drawn.
    #[test]
    fn draws_are_within_the_reference_distribution((row, case) in row_and_case(), index in 0..1000_u32) {
        let expected = reference_distribution(&row, &case);
        let sample = Sampler::default().sample(&mut row.clone(), &case.draw(index)).unwrap();
        // At the border of a nucleus rounding may include one token more or fewer: only clear cases are checked.
        let generous = Case { sampling: Sampling {
            top_p: (case.sampling.top_p * 1.0001).min(1.0), min_p: case.sampling.min_p * 0.9999, ..case.sampling.clone()
        }, ..case };
        let possible = reference_distribution(&row, &generous);
        prop_assert!(possible.iter().any(|entry| entry.0 == sample.token), "{:?} {:?}", sample, possible);
        if expected[0].1 > 0.999_999 {
            prop_assert_eq!(sample.token, expected[0].0);
        }
    }

    #[test]
    fn selection_by_threshold_equals_selection_by_sorting(
        row in prop::collection::vec((-20_i32..20).prop_map(|logit| logit as f32), 1..3000),
        count in 1..3000_usize,
    ) {
        let mut blocks = Blocks::default();
        prop_assert!(blocks.survey(&row));
        let mut found = Vec::new();
        blocks.top(&row, count, &mut found);
        let mut sorted: Vec<Candidate> = row.iter().copied().zip(0..).collect();
        sorted.sort_by(|left, right| right.0.total_cmp(&left.0).then(left.1.cmp(&right.1)));
        sorted.truncate(count);
        prop_assert_eq!(blocks.best(&row), Some(sorted[0]));
        prop_assert_eq!(found, sorted);
    }

    /// D-11: the closed form gives the same result as the whole row.
    #[test]
    fn a_ranked_row_samples_like_its_full_row((_, case) in row_and_case(), key: u64, gap in 0..3_u8, index in 0..50_u32) {
        let distribution = ZipfDistribution::new(400, [0.0, 3.0, 40.0][gap as usize]);
        let ranking = RankedRow::new(&distribution, key, Some(77));
        let case = Case { mask: None, sampling: Sampling { logit_bias: Arc::default(), ..case.sampling }, ..case };
        let mut row = Vec::new();
        ranking.fill(&mut row);
        let whole = Sampler::default().sample(&mut row, &case.draw(index)).unwrap();
        let short = Sampler::default().sample_ranked(&ranking, &case.draw(index)).unwrap();
        prop_assert_eq!(whole.token, short.token);
        prop_assert!(whole.logprob.is_nan() == short.logprob.is_nan());
        prop_assert!(whole.logprob.is_nan() || (whole.logprob - short.logprob).abs() < 1e-3);
        let tokens = |sample: &Sample| sample.top.iter().map(|entry| entry.0).collect::<Vec<_>>();
        prop_assert_eq!(tokens(&whole), tokens(&short));
    }
}

#[test]
fn draws_follow_the_distribution() {
    let row: Vec<f32> = [0.3_f32, 0.1, 0.05, 0.4, 0.15]
        .iter()
        .map(|p| p.ln())
        .collect();
    let cases = [
        (Sampling::default(), [0.3, 0.1, 0.05, 0.4, 0.15]),
        (
            Sampling {
                top_k: 2,
                ..Sampling::default()
            },
            [3.0 / 7.0, 0.0, 0.0, 4.0 / 7.0, 0.0],
        ),
        (
            Sampling {
                top_p: 0.8,
                ..Sampling::default()
            },
            [0.3 / 0.85, 0.0, 0.0, 0.4 / 0.85, 0.15 / 0.85],
        ),
        (
            Sampling {
                min_p: 0.5,
                ..Sampling::default()
            },
            [3.0 / 7.0, 0.0, 0.0, 4.0 / 7.0, 0.0],
        ),
    ];
    let mut sampler = Sampler::default();
    for (sampling, expected) in cases {
        let case = Case {
            sampling,
            ..Case::default()
        };
        let mut counts = [0_u32; 5];
        for index in 0..20_000 {
            counts[sampler
                .sample(&mut row.clone(), &case.draw(index))
                .unwrap()
                .token as usize] += 1;
        }
        for (count, share) in counts.into_iter().zip(expected) {
            assert!(
                (f64::from(count) / 20_000.0 - share).abs() < 0.015,
                "{counts:?} {expected:?}"
            );
        }
    }
}

#[test]
fn penalties_count_seen_tokens_and_do_not_change_logprobs() {
    let sampling = Sampling {
        temperature: 0.0,
        repetition_penalty: 2.0,
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        ..Sampling::default()
    };
    let history = history_of(&sampling, &[4, 0, 4, 9], &[1, 1, 2], 2, &[4]).unwrap();
    // 4 / 2 = 2; 6 / 2 - 1 - 2 x 0.5 = 1; 1.9 as it is; -1 x 1; 5 / 2 - 1 - 0.5 = 1.
    let case = Case {
        sampling,
        history: Some(history),
        top_logprobs: Some(1),
        ..Case::default()
    };
    let mut row = vec![4.0, 6.0, 1.9, -1.0, 5.0];
    let before = reference_logprobs(&row, &case);
    let sample = Sampler::default().sample(&mut row, &case.draw(0)).unwrap();
    assert_eq!((sample.token, row), (0, vec![2.0, 1.0, 1.9, -1.0, 1.0]));
    // After the tokens 1 and 4, by the logits before the penalties.
    assert_eq!(sample.rank, Some(3));
    assert!((f64::from(sample.logprob) - before[0]).abs() < 1e-5);
    assert_eq!(sample.top[0].0, 1);
    assert!(history_of(&Sampling::default(), &[0], &[], 0, &[]).is_none());
}

/// The history after a prompt and these tokens of the output, of which only `kept` stay before the `later` ones.
fn history_of(
    sampling: &Sampling,
    prompt: &[Token],
    output: &[Token],
    kept: usize,
    later: &[Token],
) -> Option<TokenHistory> {
    let vocabulary = Scripted::new(Config::default()).unwrap().vocabulary();
    let mut history = TokenHistory::of(prompt, sampling, &*vocabulary)?;
    let mut tokens = prompt.to_vec();
    for &token in output {
        tokens.push(token);
        history.append(token, &tokens, &*vocabulary);
    }
    let removed = output[kept..].iter().copied();
    history.truncate(&tokens, prompt.len() + kept, removed);
    tokens.truncate(prompt.len() + kept);
    for &token in later {
        tokens.push(token);
        history.append(token, &tokens, &*vocabulary);
    }
    Some(history)
}

/// What a naive count over the window makes of a row.
fn naively_penalised(
    row: &[f32],
    sampling: &Sampling,
    prompt: &[Token],
    output: &[Token],
) -> Vec<f32> {
    let all: Vec<_> = prompt.iter().chain(output).copied().collect();
    let size = usize::try_from(sampling.penalty_last_n).unwrap_or(all.len());
    let start = all.len().saturating_sub(size);
    let window = &all[start..];
    let output = &all[start.max(prompt.len())..];
    let logit = |(token, &logit): (Token, &f32)| {
        let count = |tokens: &[Token]| tokens.iter().filter(|&&seen| seen == token).count();
        let mut logit = match (count(window), logit > 0.0) {
            (0, _) => logit,
            (_, true) => logit / sampling.repetition_penalty,
            (_, false) => logit * sampling.repetition_penalty,
        };
        let times = count(output);
        if times > 0 {
            logit -= sampling.presence_penalty + sampling.frequency_penalty * times as f32;
        }
        logit
    };
    (0..).zip(row).map(logit).collect()
}

proptest! {
    /// Whatever comes into the window, leaves it and is rolled back.
    #[test]
    fn penalties_look_at_the_last_tokens(
        penalty_last_n in prop_oneof![Just(-1), 0..12_i32],
        prompt in prop::collection::vec(0..6_u32, 1..10),
        output in prop::collection::vec(0..6_u32, 0..10),
        kept in 0..10_usize,
        later in prop::collection::vec(0..6_u32, 0..10),
        row in prop::collection::vec(-8..8_i32, 6),
        repetition_penalty in prop_oneof![Just(1.0_f32), Just(2.0)],
    ) {
        let sampling = Sampling {
            temperature: 0.0,
            repetition_penalty,
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            penalty_last_n,
            ..Sampling::default()
        };
        let kept = kept.min(output.len());
        let history = history_of(&sampling, &prompt, &output, kept, &later);
        prop_assert_eq!(history.is_none(), penalty_last_n == 0);
        let row: Vec<f32> = row.into_iter().map(|logit| logit as f32).collect();
        let output: Vec<_> = output[..kept].iter().chain(&later).copied().collect();
        let expected = naively_penalised(&row, &sampling, &prompt, &output);
        let case = Case { sampling, history, top_logprobs: Some(6), ..Case::default() };
        let mut changed = row.clone();
        let sample = Sampler::default().sample(&mut changed, &case.draw(0)).unwrap();
        prop_assert_eq!(&changed, &expected);
        // The rank is that of the row before penalties, in which a token is changed once at most.
        let better = (0..).zip(&row).filter(|&(token, &logit)| {
            let own = row[sample.token as usize];
            logit > own || logit == own && token < sample.token
        });
        prop_assert_eq!(sample.rank, Some(better.count() as u32 + 1));
        // As a step that comes later, over candidates.
        let mut candidates: Vec<Candidate> = row.iter().copied().zip(0..).collect();
        if let Some(history) = &case.history {
            history.penalise_candidates(&mut candidates, &case.sampling, &mut TokenSet::default());
        }
        let candidates: Vec<f32> = candidates.iter().map(|(logit, _)| *logit).collect();
        prop_assert_eq!(candidates, expected);
    }
}

/// DRY beside the other penalties, before and after the steps that drop tokens.
#[test]
fn dry_lowers_the_token_that_would_repeat() {
    let params = |order: &[&str], temperature: f32| GenerationParams {
        temperature: Some(temperature),
        repetition_penalty: Some(2.0),
        dry_multiplier: Some(3.0),
        dry_base: Some(2.0),
        top_k: Some(2),
        samplers: Some(SamplerOrder::of_names(order.iter().copied()).unwrap()),
        ..GenerationParams::default()
    };
    // After 1 2 came 3.
    let tokens = vec![1, 2, 3, 1, 2];
    let row = [0.5, 1.0, 1.0, 8.0, 3.0];
    for (order, temperature, token, changed) in [
        // 8 / 2 - 3 = 1, so 4 is the best.
        (
            &["penalties", "dry", "top_k"][..],
            0.0,
            4,
            [0.5, 0.5, 0.5, 1.0, 3.0],
        ),
        (
            &["penalties", "dry", "top_k"],
            0.001,
            4,
            [0.5, 0.5, 0.5, 1.0, 3.0],
        ),
        // (8 - 3) / 2 = 2.5.
        (
            &["dry", "penalties", "temperature"],
            0.001,
            4,
            [0.5, 0.5, 0.5, 2.5, 3.0],
        ),
        // Without the other penalties 5 is enough.
        (&["dry", "temperature"], 0.001, 3, [0.5, 1.0, 1.0, 5.0, 3.0]),
        // The row stays as it is, and top_k leaves 3 and 4, of which 3 is lowered to 1.
        (&["top_k", "penalties", "dry", "temperature"], 0.001, 4, row),
    ] {
        let sampling = Sampling::from(&params(order, temperature));
        let history = history_of(&sampling, &tokens, &[], 0, &[]);
        let case = Case {
            sampling,
            history,
            tokens: tokens.clone(),
            top_logprobs: Some(1),
            ..Case::default()
        };
        let mut after = row;
        let sample = Sampler::default()
            .sample(&mut after, &case.draw(0))
            .unwrap();
        assert_eq!((sample.token, after), (token, changed), "{order:?}");
        let rank = if token == 4 { 2 } else { 1 };
        assert_eq!((sample.rank, sample.top[0].0), (Some(rank), 3), "{order:?}");
    }
}

/// A request must not make a row that looks like a defect of the model, and so count as one of its failures.
#[test]
fn the_smallest_and_largest_parameters_leave_a_row_that_can_be_sampled() {
    for repetition_penalty in [f32::from_bits(1), 1e-30, 10.0] {
        for temperature in [0.0, f32::from_bits(1), 1.0, 100.0] {
            for (top_p, top_k, min_p) in [(1.0, 0, 0.0), (f32::from_bits(1), 0, 0.0), (1.0, 2, 0.9)]
            {
                let sampling = Sampling {
                    temperature,
                    repetition_penalty,
                    presence_penalty: -100.0,
                    frequency_penalty: 100.0,
                    top_p,
                    top_k,
                    min_p,
                    logit_bias: Arc::from([(1, 1e30), (2, -1e30)]),
                    ..Sampling::default()
                };
                let history = history_of(&sampling, &[0, 1, 2], &[1], 1, &[]).unwrap();
                let case = Case {
                    sampling,
                    history: Some(history),
                    top_logprobs: Some(2),
                    ..Case::default()
                };
                let mut row = vec![4.0, 6.0, 1.9, -1.0];
                let sampled = Sampler::default().sample(&mut row, &case.draw(0));
                let sample = sampled.unwrap_or_else(|error| panic!("{error}: {case:?}"));
                assert!(sample.logprob <= 0.0, "{case:?}");
            }
        }
    }
}

#[test]
fn rows_that_cannot_be_sampled_are_errors() {
    let mut sampler = Sampler::default();
    let greedy = Case {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        ..Case::default()
    };
    let cases = [
        (vec![1.0, f32::NAN], Err(SampleError::NotANumber)),
        (vec![1.0, f32::INFINITY], Err(SampleError::NotANumber)),
        (
            vec![f32::NEG_INFINITY; 40],
            Err(SampleError::NothingAllowed),
        ),
        (vec![1.0, f32::NEG_INFINITY, 1.0], Ok(0)),
    ];
    for (row, expected) in cases {
        let sampled = sampler
            .sample(&mut row.clone(), &greedy.draw(0))
            .map(|sample| sample.token);
        assert_eq!(sampled, expected, "{row:?}");
    }
}
