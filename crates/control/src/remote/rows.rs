//! Masks as a runtime writes them, read into bits (AI-231 to AI-235).

use std::collections::HashMap;
use std::sync::Arc;

use sapwood_proto::steer::{Mask, SharedMask};
use serde::Deserialize;

use super::reply::Broken;
use crate::wire::SharedRegion;

/// The region of masks.
pub(super) trait RowSource {
    /// Copies `bytes` bytes at `offset`; `None` if they are not all there.
    fn bytes(&self, offset: usize, bytes: usize) -> Option<Vec<u8>>;

    /// The size of the region.
    fn size(&self) -> usize;

    /// Reads row `index` of P1. `None`: no mask, which a row without an allowed token means there (AI-231).
    fn p1_row(&self, index: usize, vocabulary: usize) -> Option<SharedMask> {
        // The engine lists as many sequences as there are rows.
        let row = self.bytes(index * 4 * vocabulary, 4 * vocabulary)?;
        let mask = Element::F32.mask(&row, vocabulary)?;
        (mask.count() > 0).then(|| Arc::new(mask))
    }
}

impl RowSource for SharedRegion {
    fn bytes(&self, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        let mut row = Vec::new();
        self.read(offset, bytes, &mut row).then_some(row)
    }

    fn size(&self) -> usize {
        Self::bytes(self)
    }
}

/// Where the rows of a P2 answer are.
#[derive(Debug, Deserialize)]
pub(super) struct RowLayout {
    dtype: Element,
    first_mask_byte_offset: usize,
    mask_num_bytes: usize,
    mask_num_elts: usize,
    num_masks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Element {
    F32,
    F16,
    Bf16,
    Bool,
}

impl Element {
    /// The bytes of a row.
    const fn row_bytes(self, vocabulary: usize) -> usize {
        match self {
            Self::F32 => 4 * vocabulary,
            Self::F16 | Self::Bf16 => 2 * vocabulary,
            Self::Bool => vocabulary.div_ceil(8),
        }
    }

    /// The bits of a row, which is added to logits: whatever is far below zero is not allowed, nor is what is no number.
    fn mask(self, row: &[u8], vocabulary: usize) -> Option<Mask> {
        let mut words = vec![0_u32; vocabulary.div_ceil(32)];
        match self {
            Self::F32 => set_bits(&mut words, row.as_chunks::<4>().0, |it| {
                f32::from_le_bytes(*it) > DISALLOWED
            }),
            Self::Bf16 => set_bits(&mut words, row.as_chunks::<2>().0, |&[low, high]| {
                f32::from_le_bytes([0, 0, low, high]) > DISALLOWED
            }),
            // Below `DISALLOWED`, or no number: by its bits, since there is no such type.
            Self::F16 => set_bits(&mut words, row.as_chunks::<2>().0, |it| {
                let bits = u16::from_le_bytes(*it);
                let magnitude = bits & 0x7fff;
                magnitude <= 0x7c00 && (bits & 0x8000 == 0 || magnitude < DISALLOWED_F16)
            }),
            Self::Bool => {
                for (word, bytes) in words.iter_mut().zip(row.chunks(4)) {
                    let mut whole = [0; 4];
                    whole[..bytes.len()].copy_from_slice(bytes);
                    *word = u32::from_le_bytes(whole);
                }
            }
        }
        Mask::from_words(words, vocabulary)
    }
}

fn set_bits<T>(words: &mut [u32], elements: &[T], allowed: impl Fn(&T) -> bool) {
    for (word, elements) in words.iter_mut().zip(elements.chunks(32)) {
        for (bit, element) in elements.iter().enumerate() {
            *word |= u32::from(allowed(element)) << bit;
        }
    }
}

/// The rows of a P2 answer. Each is read once, however many branches share it.
pub(super) struct MaskRows<'r> {
    source: &'r dyn RowSource,
    layout: RowLayout,
    vocabulary: usize,
    read: HashMap<usize, SharedMask>,
}

impl<'r> MaskRows<'r> {
    /// The rows of an answer. Where they are is checked when one is read: an answer without a mask may say anything.
    pub(super) fn new(source: &'r dyn RowSource, layout: RowLayout, vocabulary: usize) -> Self {
        Self {
            source,
            layout,
            vocabulary,
            read: HashMap::new(),
        }
    }

    /// Reads row `index`.
    pub(super) fn mask(&mut self, index: usize) -> Result<SharedMask, Broken> {
        if let Some(mask) = self.read.get(&index) {
            return Ok(Arc::clone(mask));
        }
        let layout = &self.layout;
        let bytes = layout.dtype.row_bytes(self.vocabulary);
        let row = (index < layout.num_masks
            && layout.mask_num_elts >= self.vocabulary
            && layout.mask_num_bytes >= bytes)
            .then(|| {
                let offset = index.checked_mul(layout.mask_num_bytes)?;
                let offset = offset.checked_add(layout.first_mask_byte_offset)?;
                let end = offset.checked_add(layout.mask_num_bytes)?;
                (end <= self.source.size()).then(|| self.source.bytes(offset, bytes))?
            });
        let mask = row
            .flatten()
            .and_then(|row| layout.dtype.mask(&row, self.vocabulary))
            .ok_or_else(|| Broken(format!("its mask {index} is outside of the region")))?;
        let mask = Arc::new(mask);
        self.read.insert(index, Arc::clone(&mask));
        Ok(mask)
    }
}

/// Between 0, which allows, and -100, which disallows in P1; P2 has minus infinity.
const DISALLOWED: f32 = -50.0;
/// The magnitude of [`DISALLOWED`] as a 16-bit float.
const DISALLOWED_F16: u16 = 0x5240;
