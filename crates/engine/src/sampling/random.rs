//! Random numbers as a pure function of a sequence's seed and the token's index.

use crate::ranking::mix;

/// Returns a number in [0, 1), the same for the same three arguments.
#[expect(clippy::cast_precision_loss, reason = "53 bits are exact in an f64")]
pub(super) fn uniform(seed: u64, choice: u32, index: u32) -> f64 {
    // No state is carried from token to token, so a preempted or resumed sequence draws the same numbers again.
    let position = u64::from(choice) << 32 | u64::from(index);
    let bits = mix(mix(seed) ^ mix(position.wrapping_add(0x5ee_d0f0_5a9e)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_spread_evenly_and_differ_by_seed_choice_and_index() {
        let mut counts = [0; 10];
        for index in 0..10_000 {
            counts[(uniform(7, 3, index) * 10.0) as usize] += 1;
        }
        assert!(
            counts.iter().all(|&count| (850..1150).contains(&count)),
            "{counts:?}"
        );
        let base = uniform(1, 2, 3);
        assert!(base != uniform(2, 2, 3) && base != uniform(1, 3, 3) && base != uniform(1, 2, 4));
    }
}
