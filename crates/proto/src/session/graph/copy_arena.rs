//! Copies small payloads into shared blocks, so that each needs no allocation of its own.

use bytes::{Bytes, BytesMut};

/// The block that the next small copies go to.
#[derive(Debug, Default)]
pub(in crate::session) struct CopyArena {
    open: BytesMut,
    /// Size with which the open block was created.
    block: usize,
}

impl CopyArena {
    /// Returns a copy of `data`.
    pub(in crate::session) fn copy(&mut self, data: &[u8]) -> Bytes {
        if data.len() > SMALL_BYTES {
            return Bytes::copy_from_slice(data);
        }
        if self.open.capacity() < data.len() {
            // Blocks grow with use, so that a session with little content allocates little.
            self.block = (self.block * 2).clamp(SMALL_BYTES, BLOCK_BYTES);
            self.open = BytesMut::with_capacity(self.block);
        }
        self.open.extend_from_slice(data);
        // `split` hands out what was written; the rest of the block stays for the next copies.
        self.open.split().freeze()
    }
}

/// Larger payloads get an allocation of their own.
const SMALL_BYTES: usize = 256;
/// Size of a block, once a session has filled smaller ones.
const BLOCK_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_985_small_payloads_share_blocks_and_are_never_mixed_up() {
        let mut packer = CopyArena::default();
        let lengths: Vec<usize> = (0..2_000)
            .map(|index| index * 7 % (SMALL_BYTES + 40))
            .collect();
        let wanted = |index: usize| vec![u8::try_from(index % 251).unwrap(); lengths[index]];
        let copies: Vec<Bytes> = (0..lengths.len())
            .map(|index| packer.copy(&wanted(index)))
            .collect();
        for (index, copy) in copies.iter().enumerate() {
            assert_eq!(copy, &wanted(index), "{index}");
        }
        let mut tight = CopyArena::default();
        let (first, second) = (tight.copy(b"one"), tight.copy(b"two"));
        assert_eq!(first.as_ptr_range().end, second.as_ptr());
    }
}
