//! Pseudo-random numbers from a seed.

/// A generator; the same seed gives the same numbers.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `count`.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        // The remainder is below `count`.
        usize::try_from(self.next() % count.max(1) as u64).unwrap_or(0)
    }

    /// One of these.
    pub(crate) fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A text of `count` letters.
    pub(crate) fn letters(&mut self, count: usize) -> String {
        (0..count)
            .map(|_| char::from(b'a' + (self.next() % 26) as u8))
            .collect()
    }
}
