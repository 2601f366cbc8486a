//! [`SeededRandom`]: the random bytes of one instance, reproducible from the seed of its request (AI-1010).

use sha2::{Digest, Sha256};

/// A stream of bytes: block n is the hash of the key and n. How it is divided into calls makes no difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeededRandom {
    /// Determined by the seed and the path of forks that leads to the instance.
    key: [u8; KEY_BYTES],
    /// Bytes that were drawn.
    position: u64,
    /// Forks that were made of the instance.
    forks: u64,
}

impl SeededRandom {
    /// The stream of the first instance of a request.
    pub(super) fn new(seed: u64) -> Self {
        Self::of_key(hashed(SEED, &[], seed))
    }

    const fn of_key(key: [u8; KEY_BYTES]) -> Self {
        Self {
            key,
            position: 0,
            forks: 0,
        }
    }

    /// The stream of the next fork, which nothing drawn here changes.
    pub(super) fn fork(&mut self) -> Self {
        self.forks += 1;
        Self::of_key(hashed(FORK, &self.key, self.forks))
    }

    /// Draws bytes.
    pub(super) fn fill(&mut self, mut target: &mut [u8]) {
        const BLOCK: u64 = KEY_BYTES as u64;
        while !target.is_empty() {
            let block = hashed(BYTES, &self.key, self.position / BLOCK);
            let block = &block[(self.position % BLOCK) as usize..];
            let count = block.len().min(target.len());
            let (now, later) = target.split_at_mut(count);
            now.copy_from_slice(&block[..count]);
            self.position += count as u64;
            target = later;
        }
    }
}

fn hashed(purpose: u8, key: &[u8], number: u64) -> [u8; KEY_BYTES] {
    let hash = Sha256::new().chain_update([purpose]);
    let hash = hash.chain_update(key).chain_update(number.to_le_bytes());
    hash.finalize().into()
}

const KEY_BYTES: usize = 32;
/// What a hash is for, so that no key is also bytes of a stream.
const SEED: u8 = 0;
const FORK: u8 = 1;
const BYTES: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(random: &mut SeededRandom, bytes: usize) -> Vec<u8> {
        let mut drawn = vec![0; bytes];
        random.fill(&mut drawn);
        drawn
    }

    #[test]
    fn ai_1010_a_stream_is_the_same_however_it_is_divided() {
        let whole = drawn(&mut SeededRandom::new(7), 1_000);
        for size in [1, 7, 31, 32, 33, 500] {
            let mut random = SeededRandom::new(7);
            let parts = (0..1_000_usize.div_ceil(size)).flat_map(|_| drawn(&mut random, size));
            assert_eq!(parts.take(1_000).collect::<Vec<_>>(), whole, "{size}");
        }
        assert_ne!(drawn(&mut SeededRandom::new(8), 1_000), whole);
    }

    #[test]
    fn ai_1010_the_path_of_forks_determines_the_stream() {
        let paths = |drawn_before: usize| {
            let mut root = SeededRandom::new(7);
            drawn(&mut root, drawn_before);
            let (mut first, mut second) = (root.fork(), root.fork());
            let mut grandchild = first.fork();
            [&mut first, &mut second, &mut grandchild].map(|random| drawn(random, 64))
        };
        let streams = paths(0);
        assert_eq!(streams, paths(100));
        let root = drawn(&mut SeededRandom::new(7), 64);
        let all: std::collections::BTreeSet<_> = streams.into_iter().chain([root]).collect();
        assert_eq!(all.len(), 4);
    }
}
