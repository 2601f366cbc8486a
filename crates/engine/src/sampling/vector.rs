//! Loops over a whole row of logits, written so that the compiler vectorises them.
//!
//! Ties go to the lowest token id everywhere, so results do not depend on the block size.

use sapwood_proto::steer::{Mask, Token};

use super::TemperatureScale;

/// A logit and its token.
pub(super) type Candidate = (f32, Token);

/// Tokens per block. One maximum per block lets the loops after the first skip nearly everything.
const BLOCK: usize = 32;
/// Number of terms summed in single precision before they are added to a double.
const SUM: usize = 1024;
const LANES: usize = 8;

/// The largest logit of each block of a row.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    maxima: Vec<f32>,
    scratch: Vec<f32>,
}

impl Blocks {
    /// Computes the maxima of a row. Returns false if it contains a NaN.
    pub(super) fn survey(&mut self, row: &[f32]) -> bool {
        self.maxima.clear();
        let mut sound = true;
        for block in row.chunks(BLOCK) {
            let mut max = f32::NEG_INFINITY;
            let mut ordered = true;
            for &logit in block {
                // A comparison instead of `f32::max`, whose rule for NaN costs several instructions.
                max = if logit > max { logit } else { max };
                ordered &= !logit.is_nan();
            }
            // Collected per block and without an early exit, so that the loop has no branch.
            sound &= ordered;
            self.maxima.push(max);
        }
        sound
    }

    /// Returns the largest logit with the lowest token id of the surveyed row; `None` if all are negative infinity.
    pub(super) fn best(&self, row: &[f32]) -> Option<Candidate> {
        let mut best = (f32::NEG_INFINITY, 0);
        for (&max, block) in self.maxima.iter().zip(0..) {
            // Strictly greater: of equal maxima the first block wins, which has the lower ids.
            best = if max > best.0 { (max, block) } else { best };
        }
        if best.0 == f32::NEG_INFINITY {
            return None;
        }
        let start = best.1 * BLOCK;
        let offset = row[start..].iter().position(|&logit| logit == best.0)?;
        Some((best.0, token(start + offset)))
    }

    /// Appends the best `count` tokens of the surveyed row, best first, lowest token id first among equals; fewer if
    /// fewer are above negative infinity.
    pub(super) fn top(&mut self, row: &[f32], count: usize, out: &mut Vec<Candidate>) {
        out.clear();
        if count == 0 {
            return;
        }
        // Lowers the number of candidates before the first comparison of single tokens.
        let floor = self.floor(count);
        self.reaching(row, floor, out);
        if out.len() > count {
            out.select_nth_unstable_by(count - 1, better);
            out.truncate(count);
        }
        sort(out);
    }

    /// Appends the tokens of the surveyed row whose logits reach `floor`, in order of their ids.
    pub(super) fn reaching(&self, row: &[f32], floor: f32, out: &mut Vec<Candidate>) {
        out.clear();
        for (index, block) in row.chunks(BLOCK).enumerate() {
            // The usual case: most blocks of a row have no token near the best one. With a mask that allows few tokens the
            // floor may be negative infinity, and most blocks have no token at all.
            let max = self.maxima[index];
            if max < floor || max == f32::NEG_INFINITY {
                continue;
            }
            let tokens = index * BLOCK..;
            let good = block
                .iter()
                .zip(tokens)
                .filter(|&(&logit, _)| logit >= floor && logit > f32::NEG_INFINITY);
            out.extend(good.map(|(&logit, index)| (logit, token(index))));
        }
    }

    /// Returns a logit that at least `count` tokens reach: each block whose maximum reaches it has one.
    fn floor(&mut self, count: usize) -> f32 {
        if count >= self.maxima.len() {
            return f32::NEG_INFINITY;
        }
        self.scratch.clone_from(&self.maxima);
        let descending = |left: &f32, right: &f32| right.total_cmp(left);
        *self.scratch.select_nth_unstable_by(count - 1, descending).1
    }
}

/// Sorts best first, lowest token id first among equals.
pub(super) fn sort(candidates: &mut [Candidate]) {
    candidates.sort_unstable_by(better);
}

/// Splits candidates into the best `count` and the rest, neither sorted; there are more than `count`.
pub(super) fn part(
    candidates: &mut [Candidate],
    count: usize,
) -> (&mut [Candidate], &mut [Candidate]) {
    candidates.select_nth_unstable_by(count, better);
    candidates.split_at_mut(count)
}

/// Compares candidates: larger logit first, then lower token id.
pub(super) fn better(left: &Candidate, right: &Candidate) -> std::cmp::Ordering {
    let by_logit = right
        .0
        .partial_cmp(&left.0)
        .unwrap_or(std::cmp::Ordering::Equal);
    by_logit.then(left.1.cmp(&right.1))
}

/// Converts an index of a row to a token; a vocabulary is smaller than 2^32.
fn token(index: usize) -> Token {
    Token::try_from(index).unwrap_or(Token::MAX)
}

/// Masks the tokens that the mask does not allow.
pub(super) fn apply(row: &mut [f32], mask: &Mask) {
    let allowed = row.len().min(mask.vocabulary());
    let (blocks, rest) = row.as_chunks_mut::<32>();
    for (block, &word) in blocks.iter_mut().zip(mask.words()) {
        match word {
            u32::MAX => {}
            // Most words of a grammar's mask, where few tokens fit.
            0 => block.fill(f32::NEG_INFINITY),
            word => apply_word(block, word),
        }
    }
    if let Some(&word) = mask.words().get(blocks.len()) {
        apply_word(rest, word);
    }
    // A mask that is shorter than the row allows nothing beyond its end.
    row[allowed..].fill(f32::NEG_INFINITY);
}

#[inline]
fn apply_word(block: &mut [f32], word: u32) {
    for (logit, bit) in block.iter_mut().zip(0..) {
        // A constant for each lane, once the loop is vectorised; a shift of the word would not be.
        let keep = word & (1 << bit) != 0;
        *logit = if keep { *logit } else { f32::NEG_INFINITY };
    }
}

/// Returns `ln Σ e^(logit - max)` over a row.
pub(super) fn exp_total(row: &[f32], max: f32) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "log-probabilities are f32 by contract"
    )]
    let log = scaled_total(row, TemperatureScale { max, scale: 1.0 }).ln() as f32;
    log
}

/// Returns the sum of a row's weights.
pub(super) fn scaled_total(row: &[f32], temperature: TemperatureScale) -> f64 {
    row.chunks(SUM)
        .map(|chunk| f64::from(chunk_total(chunk, temperature)))
        .sum()
}

fn chunk_total(chunk: &[f32], temperature: TemperatureScale) -> f32 {
    // Several sums, because floating-point addition is not associative and the compiler must not reorder a single one.
    let mut lanes = [0.0_f32; LANES];
    let groups = chunk.chunks_exact(LANES);
    let rest: f32 = groups
        .remainder()
        .iter()
        .map(|&logit| exp((logit - temperature.max) * temperature.scale))
        .sum();
    for group in groups {
        for (lane, &logit) in lanes.iter_mut().zip(group) {
            *lane += exp((logit - temperature.max) * temperature.scale);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Draws from every token of a row: `best` first, then by id.
pub(super) fn draw_from_all(
    row: &[f32],
    best: Token,
    temperature: TemperatureScale,
    uniform: f64,
) -> Token {
    let totals: Vec<f64> = row
        .chunks(SUM)
        .map(|chunk| f64::from(chunk_total(chunk, temperature)))
        .collect();
    // The best token's weight is e^0 = 1: a smaller target selects it, and the loop below skips it.
    let target = uniform * totals.iter().sum::<f64>();
    if target < 1.0 {
        return best;
    }
    let mut left = target - 1.0;
    for (index, (chunk, total)) in row.chunks(SUM).zip(totals).enumerate() {
        let first = index * SUM;
        // The best token was visited first, so its weight is not part of its chunk's share.
        let own = if (first..first + chunk.len()).contains(&(best as usize)) {
            1.0
        } else {
            0.0
        };
        if left >= total - own {
            left -= total - own;
            continue;
        }
        for (offset, &logit) in chunk.iter().enumerate() {
            let at = token(first + offset);
            if at != best {
                left -= temperature.weight(logit);
                if left < 0.0 {
                    return at;
                }
            }
        }
    }
    // Reached only through rounding.
    best
}

/// Draws from candidates, best first.
pub(super) fn draw_from_sorted(
    sorted: &[Candidate],
    temperature: TemperatureScale,
    uniform: f64,
) -> Token {
    let mut left = uniform * temperature.total(sorted);
    for &(logit, token) in sorted {
        left -= temperature.weight(logit);
        if left < 0.0 {
            return token;
        }
    }
    // Reached only through rounding. There is always a candidate: the row has a best token.
    sorted[0].1
}

/// Below minus this, [`exp`] returns 0.
pub(super) const EXP_REACH: f32 = 87.0;

/// Returns `e^x` for `x` at most 0, within 3e-7; 0 below -87, near the end of single precision.
pub(super) fn exp(x: f32) -> f32 {
    // Adding this number rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let bounded = if x > -EXP_REACH { x } else { -EXP_REACH };
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = bounded - whole * LN_2_HIGH - whole * LN_2_LOW;
    // The first seven terms of the series, innermost first.
    let sum = 1.0 / 720.0 * rest + 1.0 / 120.0;
    let sum = (sum * rest + 1.0 / 24.0) * rest + 1.0 / 6.0;
    let sum = ((sum * rest + 0.5) * rest + 1.0) * rest + 1.0;
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    let power = sum * f32::from_bits(exponent << 23);
    if x > -EXP_REACH { power } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_ends_at_zero() {
        for step in 0..=u16::MAX {
            let x = -f32::from(step) / 753.3;
            let exact = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) - exact).abs() <= exact * 3e-7,
                "{x}: {} {exact}",
                exp(x)
            );
        }
        assert_eq!(
            (exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)),
            (1.0, 0.0, 0.0)
        );
    }
}
