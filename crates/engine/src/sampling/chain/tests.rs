//! Every sampler against a table made by hand or a naive computation in double precision, and draws against their
//! distribution.

use proptest::prelude::*;
use sapwood_proto::params::{GenerationParams, SamplerOrder};

use super::*;
use crate::api::Sampling;
use crate::ranking::{RankedRow, ZipfDistribution};

/// A row whose softmax is these probabilities.
fn row(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

fn candidates(row: &[f32]) -> Vec<Candidate> {
    row.iter().copied().zip(0..).collect()
}

fn tokens(candidates: &[Candidate]) -> Vec<Token> {
    let mut tokens: Vec<_> = candidates.iter().map(|(_, token)| *token).collect();
    tokens.sort_unstable();
    tokens
}

/// Draws with these parameters; `count` tokens, each at the place after the last.
struct Draws {
    sampling: Sampling,
    mirostat: f32,
    sampler: Sampler,
}

impl Draws {
    fn new(params: &GenerationParams) -> Self {
        let sampling = Sampling::from(params);
        let mirostat = sampling.first_mirostat();
        Self {
            sampling,
            mirostat,
            sampler: Sampler::default(),
        }
    }

    fn params(&self, index: u32) -> SampleParams<'_> {
        SampleParams {
            sampling: &self.sampling,
            seed: 11,
            choice: 0,
            index,
            history: None,
            tokens: &[],
            mirostat: self.mirostat,
            forbidden: &[],
            mask: None,
            logit_bias: &self.sampling.logit_bias,
            bias: &[],
            temperature: None,
            top_logprobs: None,
        }
    }

    fn draw(&mut self, row: &[f32], index: u32) -> Token {
        let mut sampler = std::mem::take(&mut self.sampler);
        let sample = sampler.sample(&mut row.to_vec(), &self.params(index));
        self.sampler = sampler;
        let sample = sample.unwrap();
        self.mirostat = sample.mirostat.unwrap_or(self.mirostat);
        sample.token
    }

    /// Checks the shares of many draws with a chi-square test at about one in ten thousand; the seed is fixed.
    fn assert_shares(&mut self, row: &[f32], expected: &[f64]) {
        let mut counts = vec![0_u32; row.len()];
        for index in 0..DRAWS {
            counts[self.draw(row, index) as usize] += 1;
        }
        let mut square = 0.0;
        let mut freedom = -1.0;
        for (&count, &share) in counts.iter().zip(expected) {
            if share == 0.0 {
                assert_eq!(count, 0, "{counts:?} {expected:?}");
                continue;
            }
            let expected = share * f64::from(DRAWS);
            square += (f64::from(count) - expected).powi(2) / expected;
            freedom += 1.0;
        }
        // Mean k and variance 2k; 4 deviations, with room for few degrees of freedom.
        let limit = freedom + 4.0 * (2.0_f64 * freedom).sqrt() + 8.0;
        assert!(square <= limit, "{square} {limit} {counts:?} {expected:?}");
    }
}

const DRAWS: u32 = 20_000;

fn names(names: &[&str]) -> Option<SamplerOrder> {
    Some(SamplerOrder::of_names(names.iter().copied()).unwrap())
}

#[test]
fn typical_sampling_keeps_what_is_closest_to_the_entropy() {
    // The entropy is 1.208 nats. Distances from it: 0.515, 0.178, 0.689, 1.095.
    let row = row(&[0.5, 0.25, 0.15, 0.1]);
    for (p, kept) in [
        (0.2, &[1][..]),
        (0.3, &[0, 1]),
        (0.7, &[0, 1]),
        (0.8, &[0, 1, 2]),
        (0.95, &[0, 1, 2, 3]),
    ] {
        let mut list = candidates(&row);
        keep_typical(&mut list, p);
        assert_eq!(tokens(&list), kept, "{p}");
    }
    // The most likely token is not typical here.
    let params = GenerationParams {
        typical_p: Some(0.2),
        ..GenerationParams::default()
    };
    Draws::new(&params).assert_shares(&row, &[0.0, 1.0, 0.0, 0.0]);
}

/// With more candidates than are sorted at once.
#[test]
fn typical_sampling_of_a_whole_vocabulary_is_that_of_a_sorted_one() {
    let mut state = 7_u32;
    let row: Vec<f32> = (0..5_000)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) as f32 / 6_000.0
        })
        .collect();
    let weights: Vec<f64> = row.iter().map(|logit| f64::from(*logit).exp()).collect();
    let total: f64 = weights.iter().sum();
    let entropy: f64 = weights.iter().map(|w| -w / total * (w / total).ln()).sum();
    let distance = |at: &usize| (-(weights[*at] / total).ln() - entropy).abs();
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|left, right| distance(left).total_cmp(&distance(right)));
    for p in [0.01, 0.2, 0.5, 0.9, 0.99] {
        let mut sum = 0.0;
        let last = order.iter().position(|at| {
            sum += weights[*at] / total;
            sum > f64::from(p)
        });
        let count = last.unwrap() + 1;
        let mut list = candidates(&row);
        keep_typical(&mut list, p);
        // Weights are of single precision there, so a few at the border may differ.
        let near = list.len().abs_diff(count);
        assert!(near <= 2, "{p}: {} {count}", list.len());
        let common = count.min(list.len());
        let found = list[..common].iter().map(|(_, token)| *token as usize);
        let strange = found.filter(|at| !order[..count + 2].contains(at)).count();
        assert_eq!(strange, 0, "{p}");
    }
}

#[test]
fn top_n_sigma_does_not_count_what_dry_has_penalised() {
    let mut list = candidates(&[5.0, 3.0, 1.0, 1.0, 0.0, 6.0_f32]);
    list[5].0 -= 1e32;
    let mut kept = list.clone();
    keep_top_n_sigma(&mut kept, 1.2, |token| token != 5);
    // As without it; with it the deviation is 3e31.
    assert_eq!(tokens(&kept), [0, 1]);
    let mut all = list[..1].to_vec();
    keep_top_n_sigma(&mut all, 1.2, |_| false);
    assert_eq!(tokens(&all), [0]);
}

#[test]
fn top_n_sigma_keeps_what_is_near_the_best_logit() {
    // The mean is 2, the standard deviation 1.789.
    let row = [5.0, 3.0, 1.0, 1.0, 0.0_f32];
    for (n, kept) in [
        (0.5, &[0][..]),
        (1.2, &[0, 1]),
        (2.3, &[0, 1, 2, 3]),
        (3.0, &[0, 1, 2, 3, 4]),
    ] {
        let mut list = candidates(&row);
        keep_top_n_sigma(&mut list, n, |_| true);
        assert_eq!(tokens(&list), kept, "{n}");
    }
    // It does not depend on the temperature.
    for temperature in [0.2, 1.0, 7.0] {
        let params = GenerationParams {
            top_n_sigma: Some(0.5),
            temperature: Some(temperature),
            ..GenerationParams::default()
        };
        Draws::new(&params).assert_shares(&row, &[1.0, 0.0, 0.0, 0.0, 0.0]);
    }
}

#[test]
fn xtc_drops_all_but_the_last_of_the_top_choices() {
    let row = row(&[0.4, 0.3, 0.15, 0.1, 0.05]);
    for (threshold, kept) in [
        (0.35, &[0, 1, 2, 3, 4][..]),
        (0.25, &[1, 2, 3, 4]),
        (0.12, &[2, 3, 4]),
        (0.0, &[4]),
        (0.5, &[0, 1, 2, 3, 4]),
    ] {
        let mut list = candidates(&row);
        exclude_top_choices(&mut list, threshold);
        assert_eq!(tokens(&list), kept, "{threshold}");
    }
    // In half of the draws 0 and 1 are dropped, and the others share what they had.
    let params = GenerationParams {
        xtc_probability: Some(0.5),
        xtc_threshold: Some(0.12),
        ..GenerationParams::default()
    };
    let exact = [
        0.5 * 0.4,
        0.5 * 0.3,
        0.5 * 0.15 + 0.5 * 0.5,
        0.5 * 0.1 + 0.5 / 3.0,
        0.5 * 0.05 + 0.5 / 6.0,
    ];
    Draws::new(&params).assert_shares(&row, &exact);
    let always = GenerationParams {
        xtc_probability: Some(1.0),
        ..params
    };
    Draws::new(&always).assert_shares(&row, &[0.0, 0.0, 0.5, 1.0 / 3.0, 1.0 / 6.0]);
}

#[test]
fn the_dynamic_temperature_follows_the_entropy() {
    let chain = |range, exponent| {
        let params = GenerationParams {
            dynatemp_range: Some(range),
            dynatemp_exponent: Some(exponent),
            ..GenerationParams::default()
        };
        Sampling::from(&params).chain.unwrap()
    };
    let temperature = |row: &[f32], range, exponent| {
        let mut list = candidates(row);
        apply_temperature(&mut list, &chain(range, exponent), 1.0);
        (row[0] - row[1]) / (list[0].0 - list[1].0)
    };
    let row = row(&[0.6, 0.3, 0.1]);
    // The entropy is 0.8979 nats of ln 3 = 1.0986: 0.8173.
    for (range, exponent, expected) in [
        (0.5, 1.0, 0.5 + 0.8173),
        (0.5, 2.0, 0.5 + 0.8173 * 0.8173),
        (0.5, 0.0, 1.5),
        // Below 0 it is 0.
        (3.0, 1.0, 4.0 * 0.8173),
    ] {
        let found = temperature(&row, range, exponent);
        assert!((found - expected).abs() < 2e-3, "{found} {expected}");
    }
    // Equal logits have the largest entropy, and a certain token none.
    let mut flat = candidates(&[1.0, 1.0]);
    apply_temperature(&mut flat, &chain(1.0, 1.0), 1.0);
    assert_eq!(flat[0].0, 0.5);
    let mut certain = candidates(&[500.0, 0.0, 0.0]);
    apply_temperature(&mut certain, &chain(1.0, 1.0), 1.0);
    assert_eq!(tokens(&certain), [0]);
}

#[test]
fn mirostat_moves_its_threshold_against_the_error() {
    let row = row(&[0.5, 0.25, 0.125, 0.0625, 0.0625]);
    let mirostat = MirostatSampling { tau: 1.0, eta: 0.5 };
    // A threshold of 2 bits keeps 0.5 and 0.25, which become 2/3 and 1/3.
    for (uniform, token, surprise) in [(0.0, 0, 1.5_f32.log2()), (0.9, 1, 3.0_f32.log2())] {
        let mut list = candidates(&row);
        let (drawn, next) = draw_mirostat(&mut list, &mirostat, 2.001, uniform);
        assert_eq!((drawn, tokens(&list)), (token, vec![0, 1]));
        let expected = 2.001 - 0.5 * (surprise - 1.0);
        assert!((next - expected).abs() < 1e-4, "{next} {expected}");
    }
    // Below the surprise of every token the best one is left, which is no surprise then.
    let mut list = candidates(&row);
    let (drawn, next) = draw_mirostat(&mut list, &mirostat, 0.5, 0.99);
    assert_eq!((drawn, list.len()), (0, 1));
    assert!((next - 1.0).abs() < 1e-5);
}

#[test]
fn mirostat_reaches_the_surprise_that_it_aims_at() {
    let row: Vec<f32> = (0..2_000)
        .map(|rank| -1.1 * (rank as f32 + 1.0).ln())
        .collect();
    for tau in [2.0, 5.0] {
        let params = GenerationParams {
            mirostat: Some(2),
            mirostat_tau: Some(tau),
            mirostat_eta: Some(0.05),
            // Mirostat replaces these.
            top_k: Some(1),
            xtc_probability: Some(1.0),
            ..GenerationParams::default()
        };
        let mut draws = Draws::new(&params);
        assert_eq!(draws.mirostat, 2.0 * tau);
        let mut sum = 0.0;
        for index in 0..3_000 {
            let before = draws.mirostat;
            draws.draw(&row, index);
            let error = (before - draws.mirostat) / 0.05;
            sum += error + tau;
        }
        let mean = sum / 3_000.0;
        assert!((mean - tau).abs() < 0.1, "{mean} {tau}");
    }
}

#[test]
fn the_order_of_the_steps_is_the_requests() {
    let row = row(&[0.5, 0.3, 0.2]);
    let params = |order: &[&str]| GenerationParams {
        samplers: names(order),
        temperature: Some(0.25),
        top_p: Some(0.75),
        ..GenerationParams::default()
    };
    // At this temperature the first token has 0.868 of the probability, enough for top_p; before it, it has not.
    Draws::new(&params(&["temperature", "top_p"])).assert_shares(&row, &[1.0, 0.0, 0.0]);
    let second = 0.3_f64.powi(4) / (0.5_f64.powi(4) + 0.3_f64.powi(4));
    Draws::new(&params(&["top_p", "temperature"]))
        .assert_shares(&row, &[1.0 - second, second, 0.0]);
    // What is left out is off.
    Draws::new(&params(&["temperature"])).assert_shares(&row, &{
        let weights = [0.5_f64, 0.3, 0.2].map(|p| p.powi(4));
        weights.map(|weight| weight / weights.iter().sum::<f64>())
    });
    Draws::new(&params(&[])).assert_shares(&row, &[0.5, 0.3, 0.2]);
    // But 0 is greedy without the step.
    let greedy = GenerationParams {
        temperature: Some(0.0),
        ..params(&["top_p"])
    };
    Draws::new(&greedy).assert_shares(&row, &[1.0, 0.0, 0.0]);
}

#[test]
fn requests_that_use_nothing_of_it_have_no_chain() {
    let neutral = GenerationParams {
        penalty_last_n: Some(-1),
        dry_multiplier: Some(0.0),
        xtc_probability: Some(0.0),
        typical_p: Some(1.0),
        top_n_sigma: Some(-1.0),
        mirostat: Some(0),
        dynatemp_range: Some(0.0),
        samplers: Some(SamplerOrder::default()),
        ..GenerationParams::default()
    };
    assert_eq!(Sampling::from(&neutral), Sampling::default());
    // llama.cpp's order differs only for requests that drop tokens.
    let llama = names(&[
        "penalties",
        "dry",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    ]);
    let plain = GenerationParams {
        samplers: llama,
        temperature: Some(0.5),
        ..GenerationParams::default()
    };
    assert!(Sampling::from(&plain).chain.is_none());
    let dropping = GenerationParams {
        min_p: Some(0.1),
        ..plain
    };
    assert!(Sampling::from(&dropping).chain.is_some());
    // XTC above a half has no two top choices.
    let never = GenerationParams {
        xtc_probability: Some(1.0),
        xtc_threshold: Some(0.51),
        ..GenerationParams::default()
    };
    assert!(Sampling::from(&never).chain.is_none());
}

fn any_params() -> impl Strategy<Value = GenerationParams> {
    let numbers = (
        prop_oneof![Just(0.0_f32), Just(1e-30), Just(0.7), Just(100.0)],
        prop_oneof![Just(1.0_f32), Just(0.9), Just(1e-6)],
        prop_oneof![Just(0.0_f32), Just(0.1), Just(0.99)],
        prop_oneof![Just(1.0_f32), Just(0.5), Just(1e-6)],
        prop_oneof![Just(0.0_f32), Just(1.0), Just(100.0)],
        prop_oneof![Just(0.0_f32), Just(0.5), Just(1.0)],
        prop_oneof![Just(0.0_f32), Just(0.1), Just(0.5)],
    );
    let more = (
        prop_oneof![Just(0_u32), Just(2)],
        prop_oneof![Just(0.0_f32), Just(5.0), Just(100.0)],
        prop_oneof![Just(0.0_f32), Just(0.5), Just(100.0)],
        prop_oneof![Just(0.0_f32), Just(1.0), Just(100.0)],
        0..5_u32,
        Just(SamplerStep::ALL.to_vec()).prop_shuffle(),
        0..=9_usize,
    );
    (numbers, more).prop_map(|(numbers, more)| {
        let (temperature, top_p, min_p, typical_p, sigma, probability, threshold) = numbers;
        let (mirostat, tau, range, exponent, top_k, mut order, len) = more;
        order.truncate(len);
        GenerationParams {
            temperature: Some(temperature),
            top_p: Some(top_p),
            min_p: Some(min_p),
            typical_p: Some(typical_p),
            top_n_sigma: Some(sigma),
            xtc_probability: Some(probability),
            xtc_threshold: Some(threshold),
            mirostat: Some(mirostat),
            mirostat_tau: Some(tau),
            dynatemp_range: Some(range),
            dynatemp_exponent: Some(exponent),
            top_k: Some(top_k),
            samplers: SamplerOrder::new(order),
            ..GenerationParams::default()
        }
    })
}

proptest! {
    /// In any order and at the ends of the ranges a token is drawn, one that is allowed, and the same one again.
    #[test]
    fn any_chain_draws_an_allowed_token(
        params in any_params(),
        row in prop::collection::vec(
            prop_oneof![Just(f32::NEG_INFINITY), Just(0.0), Just(-1e30), Just(1e30), -30.0..30.0_f32], 1..200
        ),
        index in 0..100_u32,
    ) {
        prop_assume!(row.iter().any(|logit| logit.is_finite()));
        let token = Draws::new(&params).draw(&row, index);
        prop_assert!(row[token as usize].is_finite());
        prop_assert_eq!(Draws::new(&params).draw(&row, index), token);
    }

    /// D-11: a row in closed form gives what the whole row gives.
    #[test]
    fn a_ranked_row_goes_through_the_chain_like_its_full_row(
        params in any_params(), key: u64, gap in 0..3_usize, index in 0..50_u32
    ) {
        let distribution = ZipfDistribution::new(300, [0.0, 3.0, 40.0][gap]);
        let ranking = RankedRow::new(&distribution, key, Some(77));
        let mut row = Vec::new();
        ranking.fill(&mut row);
        let whole = Draws::new(&params).draw(&row, index);
        let ranked = Draws::new(&params);
        let short = Sampler::default().sample_ranked(&ranking, &ranked.params(index)).unwrap();
        prop_assert_eq!(whole, short.token);
    }

    /// The steps of today's order, forced through the list of candidates by one that keeps all, leave the same tokens.
    #[test]
    fn the_default_steps_leave_the_same_tokens(
        temperature in 0.1..3.0_f32, top_k in 0..40_u32, top_p in 0.05..1.0_f32, min_p in 0.0..0.9_f32, index in 0..50_u32,
        row in prop::collection::vec(-8.0..8.0_f32, 50..300),
    ) {
        let plain = GenerationParams {
            temperature: Some(temperature),
            top_k: Some(top_k),
            top_p: Some(top_p),
            min_p: Some(min_p),
            ..GenerationParams::default()
        };
        let forced = GenerationParams { top_n_sigma: Some(100.0), ..plain.clone() };
        let (mut fast, mut slow) = (Draws::new(&plain), Draws::new(&forced));
        prop_assert!(fast.sampling.chain.is_none() && slow.sampling.chain.is_some());
        fast.draw(&row, index);
        slow.draw(&row, index);
        let left = |draws: &Draws| tokens(&draws.sampler.candidates);
        let (fast, slow) = (left(&fast), left(&slow));
        // Rounding may move the border of the nucleus by one.
        prop_assert!(fast.len().abs_diff(slow.len()) <= 1, "{fast:?} {slow:?}");
        let both = fast.iter().filter(|token| slow.contains(token)).count();
        prop_assert!(both + 1 >= fast.len().max(slow.len()), "{fast:?} {slow:?}");
    }
}
