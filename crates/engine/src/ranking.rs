//! A closed form of a logits row for scripted models: a keyed permutation of the vocabulary under a Zipf distribution.
//!
//! The best `k` tokens cost O(k). Only [`RankedRow::fill`] builds the whole vector, for masks, bias and broad sampling
//! (D-11).
//!
//! Rank `r` has the logit `-1.5 ln(r + 1)`; if a token is chosen for rank 0, every other rank has
//! [`ZipfDistribution::gap`] less. The spread stays below 100 for any vocabulary, so that a `logit_bias` of 100 always
//! wins.

use std::sync::Arc;

use sapwood_proto::steer::Token;

/// The exponent of the Zipf distribution.
const STEEPNESS: f64 = 1.5;

/// The logits of all ranks; computed once per vocabulary and shared by all its rows.
#[derive(Clone, Debug)]
pub struct ZipfDistribution(Arc<Table>);

#[derive(Debug)]
struct Table {
    /// The logit of each rank, without the gap.
    logits: Box<[f32]>,
    gap: f64,
    /// Logarithms of the sums of probabilities, without and with the gap.
    log_total: [f64; 2],
}

impl ZipfDistribution {
    /// The distribution over `vocabulary` tokens (at least 1). A chosen token is `gap` nats above all others.
    #[must_use]
    pub fn new(vocabulary: u32, gap: f32) -> Self {
        let gap = f64::from(gap);
        // In double precision, because the sum over a large vocabulary has many small terms.
        let exact = |rank: u32| -STEEPNESS * (f64::from(rank) + 1.0).ln();
        let total: f64 = (0..vocabulary.max(1)).map(|rank| exact(rank).exp()).sum();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "logits are f32 by contract"
        )]
        let logits = (0..vocabulary.max(1)).map(|rank| exact(rank) as f32);
        Self(Arc::new(Table {
            logits: logits.collect(),
            gap,
            log_total: [total.ln(), ((-gap).exp() * (total - 1.0)).ln_1p()],
        }))
    }

    /// Returns how many nats a chosen token is above all others.
    #[must_use]
    pub fn gap(&self) -> f64 {
        self.0.gap
    }

    /// Returns the number of tokens ranked.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        // The length comes from a u32 in `new`.
        u32::try_from(self.0.logits.len()).unwrap_or(u32::MAX)
    }
}

/// One row: every token of the vocabulary has exactly one rank.
#[derive(Clone, Debug)]
pub struct RankedRow {
    distribution: ZipfDistribution,
    key: u64,
    chosen: Option<Token>,
}

impl RankedRow {
    /// The row of `key`, with `chosen` moved to rank 0. A chosen token outside the vocabulary is ignored.
    #[must_use]
    pub fn new(distribution: &ZipfDistribution, key: u64, chosen: Option<Token>) -> Self {
        let chosen = chosen.filter(|&token| token < distribution.vocabulary());
        Self {
            distribution: distribution.clone(),
            key,
            chosen,
        }
    }

    /// Returns the number of tokens ranked.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        self.distribution.vocabulary()
    }

    /// Returns the token of rank 0.
    #[must_use]
    pub fn first(&self) -> Token {
        self.chosen.unwrap_or_else(|| self.start())
    }

    /// Returns the most likely tokens with their log-probabilities, best first; at most `k`.
    #[must_use]
    pub fn best(&self, k: usize) -> Vec<(Token, f32)> {
        let k = k.min(self.distribution.0.logits.len());
        let mut best = Vec::with_capacity(k);
        if k == 0 {
            return best;
        }
        best.push((self.first(), self.logprob(0)));
        if k == 1 {
            // Starting the walk over the others has a cost of its own.
            return best;
        }
        best.extend(
            self.others()
                .take(k - 1)
                .zip(1..)
                .map(|(token, rank)| (token, self.logprob(rank))),
        );
        best
    }

    /// Returns the log-probability of a rank below the vocabulary's size; never above 0.
    #[must_use]
    pub fn logprob(&self, rank: usize) -> f32 {
        let gap = if self.chosen.is_some() && rank > 0 {
            self.distribution.gap()
        } else {
            0.0
        };
        let total = self.distribution.0.log_total[usize::from(self.chosen.is_some())];
        #[expect(
            clippy::cast_possible_truncation,
            reason = "log-probabilities are f32 by contract"
        )]
        let logprob = (f64::from(self.distribution.0.logits[rank]) - gap - total) as f32;
        logprob.min(0.0)
    }

    /// Returns the rank of a token of the vocabulary.
    #[must_use]
    pub fn rank(&self, token: Token) -> usize {
        let size = u64::from(self.vocabulary());
        let (stride, start) = (self.stride(), self.start());
        let inverse = inverse(u64::from(stride), size);
        // The position of the token on the walk. All factors are below 2^32.
        let position =
            |token: Token| (u64::from(token) + size - u64::from(start)) % size * inverse % size;
        let (own, first) = (position(token), position(self.first()));
        // Tokens before the chosen one on the walk move down by one rank, because it takes rank 0.
        let rank = match own.cmp(&first) {
            std::cmp::Ordering::Less => own + 1,
            std::cmp::Ordering::Equal => 0,
            std::cmp::Ordering::Greater => own,
        };
        // Below the vocabulary's size, which is a u32.
        usize::try_from(rank).unwrap_or(usize::MAX)
    }

    /// Returns a lower bound of the first token's probability at this temperature (above 0), without building the row.
    #[must_use]
    pub fn certainty(&self, temperature: f32) -> f64 {
        if self.chosen.is_none() {
            return 0.0;
        }
        let others = f64::from(self.vocabulary() - 1);
        // As if every other token were exactly the gap below the first; each is at least that far.
        1.0 / (1.0 + others * (-self.distribution.gap() / f64::from(temperature)).exp())
    }

    /// Writes every token's logit; the row has the vocabulary's size afterwards.
    pub fn fill(&self, row: &mut Vec<f32>) {
        let logits = &self.distribution.0.logits;
        row.clear();
        row.resize(logits.len(), 0.0);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "logits are f32 by contract"
        )]
        let gap = if self.chosen.is_some() {
            self.distribution.gap() as f32
        } else {
            0.0
        };
        // Rank 0 has logit 0, chosen or not.
        row[self.first() as usize] = 0.0;
        for (token, &logit) in self.others().zip(&logits[1..]) {
            row[token as usize] = logit - gap;
        }
    }

    /// The tokens of ranks 1, 2, … in order.
    fn others(&self) -> impl Iterator<Item = Token> {
        let size = self.vocabulary();
        let stride = self.stride();
        let first = self.first();
        let mut at = self.start();
        // The walk visits every token once, beginning at its start. The chosen token is skipped where the walk meets
        // it; unless it is the walk's own first token, that one moves down to rank 1 as the walk's first step.
        (0..size)
            .map(move |_| {
                let token = at;
                at = step(at, stride, size);
                token
            })
            .filter(move |&token| token != first)
    }

    /// Returns the token where the walk over all tokens begins.
    fn start(&self) -> Token {
        self.below(mix(self.key) & 0xffff_ffff)
    }

    /// Returns the step width of the walk, which is coprime to the vocabulary's size.
    fn stride(&self) -> u32 {
        let mut stride = self.below(mix(self.key) >> 32).max(1);
        // Ends at 1 at the latest, which is coprime to everything.
        while gcd(stride, self.vocabulary()) != 1 {
            stride = if stride + 1 < self.vocabulary() {
                stride + 1
            } else {
                1
            };
        }
        stride
    }

    fn below(&self, bits: u64) -> u32 {
        // A remainder of division by a u32.
        u32::try_from(bits % u64::from(self.vocabulary())).unwrap_or(0)
    }
}

/// `(at + stride) mod size`, where both are below `size`.
const fn step(at: u32, stride: u32, size: u32) -> u32 {
    let room = size - at;
    // Without an intermediate sum, which may exceed 32 bits.
    if stride < room {
        at + stride
    } else {
        stride - room
    }
}

/// Returns the inverse of `a` modulo `size`, to which it is coprime; 0 if `size` is 1.
const fn inverse(a: u64, size: u64) -> u64 {
    // Euclid's algorithm; the coefficients are kept modulo `size`, so that they need no sign.
    let (mut r, mut next_r) = (size, a % size);
    let (mut t, mut next_t) = (0, 1 % size);
    while next_r != 0 {
        let quotient = r / next_r;
        (t, next_t) = (next_t, (t + size - quotient % size * next_t % size) % size);
        (r, next_r) = (next_r, r % next_r);
    }
    t
}

const fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Spreads the bits of a key (the finaliser of splitmix64).
#[must_use]
pub(crate) const fn mix(key: u64) -> u64 {
    let mut bits = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(row: &[f32]) -> f64 {
        row.iter().map(|&logit| f64::from(logit).exp()).sum()
    }

    #[test]
    fn every_token_has_one_rank_and_the_closed_form_is_the_vector() {
        for (size, key, chosen) in [
            (1, 3, None),
            (2, 9, Some(1)),
            (258, 7, Some(65)),
            (258, 8, None),
            (1000, 1, Some(9999)),
        ] {
            let ranking = RankedRow::new(&ZipfDistribution::new(size, 5.0), key, chosen);
            let best = ranking.best(size as usize);
            let mut tokens: Vec<_> = best.iter().map(|&(token, _)| token).collect();
            tokens.sort_unstable();
            assert_eq!(tokens, (0..size).collect::<Vec<_>>());
            for (rank, &(token, _)) in best.iter().enumerate() {
                assert_eq!(ranking.rank(token), rank, "{size} {key} {token}");
            }
            let mut row = Vec::new();
            ranking.fill(&mut row);
            let log_total = total(&row).ln();
            for (token, logprob) in best {
                let exact = f64::from(row[token as usize]) - log_total;
                assert!(
                    (exact - f64::from(logprob)).abs() < 1e-4,
                    "{token}: {exact} {logprob}"
                );
            }
        }
    }

    #[test]
    fn certainty_is_a_lower_bound() {
        let ranking = RankedRow::new(&ZipfDistribution::new(300, 6.0), 5, Some(17));
        let mut row = Vec::new();
        ranking.fill(&mut row);
        for temperature in [0.3_f32, 1.0, 2.0, 10.0] {
            let cooled: Vec<_> = row.iter().map(|logit| logit / temperature).collect();
            let exact = 1.0 / total(&cooled);
            let bound = ranking.certainty(temperature);
            assert!(
                bound > 0.0 && bound <= exact,
                "{temperature}: {bound} {exact}"
            );
        }
    }

    #[test]
    fn a_bias_of_100_beats_the_chosen_token_in_a_large_vocabulary() {
        let ranking = RankedRow::new(&ZipfDistribution::new(256_000, 40.0), 5, Some(17));
        let mut row = Vec::new();
        ranking.fill(&mut row);
        assert!(row.iter().all(|&logit| logit + 100.0 > 0.0));
    }
}
