//! Masks as rows of numbers in shared memory (AI-231 to AI-237).
//!
//! Masks are bits everywhere else; they are widened here, eight tokens at a time by a table, straight into the region.

use sapwood_proto::steer::{Mask, Token};

use crate::wire::SharedRegion;

/// The type of a row's elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaskType {
    /// 32-bit floats.
    #[default]
    F32,
    /// 16-bit floats.
    F16,
    /// 16-bit floats with the exponent of 32-bit ones.
    Bf16,
    /// One bit each, 1 = allowed.
    Bool,
}

impl MaskType {
    /// Its name on the wire and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Bool => "bool",
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
            Self::Bf16 => 3,
            Self::Bool => 4,
        }
    }

    /// The element of a disallowed token, after the zeros of an allowed one.
    const fn disallowed(self) -> &'static [u8] {
        match self {
            Self::F32 => &[0, 0, 0x80, 0xff],
            Self::F16 => &[0, 0xfc],
            Self::Bf16 => &[0x80, 0xff],
            Self::Bool => &[],
        }
    }
}

/// The contents of a row.
#[derive(Clone, Copy, Debug)]
pub enum Row<'m> {
    /// Every token.
    All,
    /// No token.
    None,
    /// One token.
    Only(Token),
    /// The tokens of a mask.
    Mask(&'m Mask),
}

impl Row<'_> {
    /// The bits of tokens `32 * index` and up, without regard to the size of the vocabulary.
    fn word(self, index: usize) -> u32 {
        match self {
            Self::All => u32::MAX,
            Self::None => 0,
            Self::Only(token) if token as usize / 32 == index => 1 << (token % 32),
            Self::Only(_) => 0,
            Self::Mask(mask) => mask.words().get(index).copied().unwrap_or(0),
        }
    }
}

/// Widens the bits of a row into elements.
#[derive(Debug)]
struct Widener {
    vocabulary: usize,
    /// Elements of a row; those from `vocabulary` on are disallowed.
    elements: usize,
    /// For each byte of a mask its eight elements. Empty if rows are bits themselves.
    table: Vec<u8>,
    /// Bytes of eight elements.
    eight: usize,
}

impl Widener {
    fn new(vocabulary: usize, elements: usize, disallowed: &[u8]) -> Self {
        let size = disallowed.len();
        let mut table = Vec::with_capacity(256 * 8 * size);
        for bits in 0..=u8::MAX {
            for bit in 0..8 {
                if bits & (1 << bit) == 0 {
                    table.extend_from_slice(disallowed);
                } else {
                    table.resize(table.len() + size, 0);
                }
            }
        }
        Self {
            vocabulary,
            elements,
            table,
            eight: (8 * size).max(1),
        }
    }

    /// Bytes of a row. Rows of bits have a multiple of 64 elements.
    const fn row_bytes(&self) -> usize {
        self.elements * self.eight / 8
    }

    /// Writes a row; `false` if it is not inside of the region.
    fn write(&self, region: &SharedRegion, offset: usize, row: Row<'_>) -> bool {
        // With a length that the compiler knows, eight elements are copied by two instructions and not by a call.
        match self.eight {
            32 => self.write_sized::<32>(region, offset, row),
            16 => self.write_sized::<16>(region, offset, row),
            _ => self.write_bits(region, offset, row),
        }
    }

    /// Rows whose elements have `EIGHT / 8` bytes.
    fn write_sized<const EIGHT: usize>(
        &self,
        region: &SharedRegion,
        offset: usize,
        row: Row<'_>,
    ) -> bool {
        let (table, _) = self.table.as_chunks::<EIGHT>();
        let mut block = [[0; EIGHT]; BLOCK_EIGHTS];
        let mut written = 0;
        for first in (0..self.elements.div_ceil(32)).step_by(BLOCK_EIGHTS / 4) {
            let (words, _) = block.as_chunks_mut::<4>();
            for (index, eights) in (first..).zip(words) {
                let word = self.trimmed(index, row.word(index)).to_le_bytes();
                for (eight, bits) in eights.iter_mut().zip(word) {
                    *eight = table[usize::from(bits)];
                }
            }
            // The last block is longer than what is left of the row.
            let bytes = block.as_flattened();
            let bytes = &bytes[..bytes.len().min(self.row_bytes() - written)];
            if !region.write(offset + written, bytes) {
                return false;
            }
            written += bytes.len();
        }
        true
    }

    /// Rows of bits.
    fn write_bits(&self, region: &SharedRegion, offset: usize, row: Row<'_>) -> bool {
        let words =
            (0..self.elements.div_ceil(32)).map(|index| self.trimmed(index, row.word(index)));
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        region.write(offset, &bytes[..self.row_bytes()])
    }

    /// Clears the bits from the end of the vocabulary on.
    const fn trimmed(&self, index: usize, word: u32) -> u32 {
        let first = index * 32;
        if first + 32 <= self.vocabulary {
            word
        } else if first >= self.vocabulary {
            0
        } else {
            word & !(u32::MAX << (self.vocabulary - first))
        }
    }
}

/// The rows of P1: one per op, without a header. Numbers that the engine adds, or bits (AI-1002).
#[derive(Debug)]
pub struct P1Rows {
    widener: Widener,
    /// Rows are bits.
    bits: bool,
}

impl P1Rows {
    /// Rows over so many tokens.
    #[must_use]
    pub fn new(vocabulary: usize) -> Self {
        Self {
            // -100, not minus infinity: with all tokens disallowed the softmax is still that of the logits.
            widener: Widener::new(vocabulary, vocabulary, &(-100.0_f32).to_le_bytes()),
            bits: false,
        }
    }

    /// Rows of bits, for an engine whose logits are padded to `logits`.
    pub(crate) fn of_bits(vocabulary: usize, logits: usize) -> Self {
        let elements = padded_elements(vocabulary, logits);
        Self {
            widener: Widener::new(vocabulary, elements, MaskType::Bool.disallowed()),
            bits: true,
        }
    }

    /// Whether rows are bits.
    pub(crate) const fn are_bits(&self) -> bool {
        self.bits
    }

    /// The description of rows of bits in an answer; the engine knows what other rows are.
    pub(crate) fn layout(&self) -> Option<BitLayout> {
        self.bits.then(|| BitLayout {
            dtype: MaskType::Bool.name(),
            first_mask_byte_offset: 0,
            mask_num_bytes: self.widener.row_bytes(),
        })
    }

    /// Whether this many rows fit (AI-232).
    pub(crate) fn fit(&self, region: &SharedRegion, rows: usize) -> bool {
        self.widener
            .row_bytes()
            .checked_mul(rows)
            .is_some_and(|bytes| bytes <= region.bytes())
    }

    /// Writes row `index`, which fits.
    pub fn write(&self, region: &SharedRegion, index: usize, row: Row<'_>) {
        let offset = index * self.widener.row_bytes();
        // Numbers that are all alike allow everything, after the softmax; bits mean what they say.
        let row = match row {
            Row::None if self.bits => Row::All,
            row => row,
        };
        self.widener.write(region, offset, row);
    }
}

/// The elements of a row that describes itself: engines compare with their padded logits, so the surplus of 1,000 is part of
/// the protocol (AI-234).
fn padded_elements(vocabulary: usize, logits: usize) -> usize {
    ((vocabulary + 1_000) & !63).max(logits.next_multiple_of(64))
}

/// The rows of P2: slots behind a header, as many as fit; the answer names those in use.
#[derive(Debug)]
pub(crate) struct P2Rows {
    kind: MaskType,
    widener: Widener,
    slots: usize,
    used: usize,
}

impl P2Rows {
    /// Lays out the region and writes its header. `None`: not even one row fits.
    pub(crate) fn new(
        kind: MaskType,
        vocabulary: usize,
        logits: usize,
        region: &SharedRegion,
    ) -> Option<Self> {
        let elements = padded_elements(vocabulary, logits);
        let widener = Widener::new(vocabulary, elements, kind.disallowed());
        let space = region.bytes().checked_sub(FIRST_ROW)?;
        let slots = space / widener.row_bytes();
        if slots == 0 {
            return None;
        }
        let header = [
            MAGIC,
            u32::try_from(widener.row_bytes()).ok()?,
            u32::try_from(slots).ok()?,
            kind.number(),
        ];
        region.write(0, &header.map(u32::to_le_bytes).concat());
        Some(Self {
            kind,
            widener,
            slots,
            used: 0,
        })
    }

    /// Frees all rows: those of the last answer are valid until the next request (AI-236).
    pub(crate) const fn clear(&mut self) {
        self.used = 0;
    }

    /// Writes a row into the next free slot and returns its index; `None` if there is none.
    pub(crate) fn push(&mut self, region: &SharedRegion, row: Row<'_>) -> Option<usize> {
        if self.used == self.slots {
            return None;
        }
        let index = self.used;
        let offset = FIRST_ROW + index * self.widener.row_bytes();
        self.used += 1;
        self.widener.write(region, offset, row).then_some(index)
    }

    /// Whether rows are bits.
    pub(crate) fn are_bits(&self) -> bool {
        self.kind == MaskType::Bool
    }

    /// How many rows are in use.
    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    /// How many rows are free.
    pub(crate) const fn free(&self) -> usize {
        self.slots - self.used
    }

    /// Gives back the rows from `used` on, of a sequence that failed after all.
    pub(crate) const fn truncate(&mut self, used: usize) {
        self.used = used;
    }

    /// The description of the rows in an answer.
    pub(crate) fn layout(&self) -> RowLayout {
        RowLayout {
            dtype: self.kind.name(),
            first_mask_byte_offset: FIRST_ROW,
            mask_num_bytes: self.widener.row_bytes(),
            mask_num_elts: self.widener.elements,
            // Never 0: clients build an array of so many rows, and an empty one is an error (AI-504).
            num_masks: self.used.max(1),
        }
    }
}

/// Where the rows of an answer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct RowLayout {
    dtype: &'static str,
    first_mask_byte_offset: usize,
    mask_num_bytes: usize,
    mask_num_elts: usize,
    num_masks: usize,
}

/// Where the rows of a P1 answer are, if they are bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct BitLayout {
    dtype: &'static str,
    first_mask_byte_offset: usize,
    mask_num_bytes: usize,
}

/// The first word of a P2 region.
const MAGIC: u32 = 0xF012_91B7;
/// Offset of the first row; what is before it but for the header is ours.
const FIRST_ROW: usize = 4096;
/// Groups of eight elements that are widened before they are copied: they stay in the first-level cache.
const BLOCK_EIGHTS: usize = 128;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::wire::unlink_region;

    fn region(bytes: usize) -> SharedRegion {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("/swr{}.{number}-bin-shm", std::process::id());
        let region = SharedRegion::create(&name, bytes).unwrap();
        unlink_region(&name).unwrap();
        region
    }

    fn bytes(region: &SharedRegion, offset: usize, bytes: usize) -> Vec<u8> {
        let mut read = Vec::new();
        assert!(region.read(offset, bytes, &mut read));
        read
    }

    #[test]
    fn ai_231_rows_of_p1_are_zeros_and_minus_hundreds() {
        let vocabulary = 70;
        let region = region(4 * 70 * 3 + 4);
        let rows = P1Rows::new(vocabulary);
        let mut mask = Mask::none(vocabulary);
        mask.allow(0);
        mask.allow(69);
        rows.write(&region, 1, Row::Mask(&mask));
        let row = bytes(&region, 280, 280);
        for (token, element) in row.chunks(4).enumerate() {
            let expected: &[u8] = match token {
                0 | 69 => &[0, 0, 0, 0],
                _ => &[0, 0, 0xc8, 0xc2],
            };
            assert_eq!(element, expected, "token {token}");
        }
        // Neighbours are untouched.
        assert_eq!(bytes(&region, 276, 4), [0; 4]);
        assert_eq!(bytes(&region, 560, 4), [0; 4]);
        rows.write(&region, 2, Row::Only(33));
        assert_eq!(bytes(&region, 560 + 33 * 4, 4), [0; 4]);
        assert_eq!(bytes(&region, 560 + 34 * 4, 4), [0, 0, 0xc8, 0xc2]);
        assert!(
            bytes(&region, 840, 4) == [0; 4],
            "a row ends with the vocabulary"
        );
    }

    #[test]
    fn ai_232_as_many_rows_fit_as_the_region_has_space_for() {
        let region = region(4 * 100 * 3);
        let rows = P1Rows::new(100);
        assert!(rows.fit(&region, 3) && !rows.fit(&region, 4));
        assert!(!rows.fit(&region, usize::MAX));
    }

    #[test]
    fn rows_longer_than_a_block_are_whole() {
        let vocabulary = 32_003;
        let region = region(4 * vocabulary);
        let mut mask = Mask::none(vocabulary);
        for token in (0..32_003).step_by(7) {
            mask.allow(token);
        }
        P1Rows::new(vocabulary).write(&region, 0, Row::Mask(&mask));
        let row = bytes(&region, 0, 4 * vocabulary);
        for (token, element) in (0..).zip(row.chunks(4)) {
            assert_eq!(element == [0; 4], mask.allows(token), "token {token}");
        }
    }

    #[test]
    fn ai_233_the_header_and_ai_234_the_size_of_a_row() {
        let region = region(4096 + 3 * 131_840 + 1);
        let rows = P2Rows::new(MaskType::F32, 32_003, 0, &region).unwrap();
        assert_eq!(
            bytes(&region, 0, 16),
            [
                [0xb7, 0x91, 0x12, 0xf0],
                131_840_u32.to_le_bytes(),
                3_u32.to_le_bytes(),
                1_u32.to_le_bytes()
            ]
            .concat()
        );
        let layout = rows.layout();
        assert_eq!(
            serde_json::to_string(&layout).unwrap(),
            r#"{"dtype":"f32","first_mask_byte_offset":4096,"mask_num_bytes":131840,"mask_num_elts":32960,"num_masks":1}"#
        );
    }

    #[test]
    fn ai_234_padded_logits_make_rows_longer() {
        let region = region(1 << 20);
        let rows = P2Rows::new(MaskType::F32, 100, 1_101, &region).unwrap();
        assert_eq!(rows.layout().mask_num_elts, 1_152);
        let rows = P2Rows::new(MaskType::F32, 100, 1_088, &region).unwrap();
        assert_eq!(rows.layout().mask_num_elts, 1_088);
    }

    #[test]
    fn ai_235_disallowed_is_minus_infinity_in_each_type() {
        for (kind, disallowed) in [
            (MaskType::F32, vec![0, 0, 0x80, 0xff]),
            (MaskType::F16, vec![0, 0xfc]),
            (MaskType::Bf16, vec![0x80, 0xff]),
        ] {
            let region = region(1 << 20);
            let mut rows = P2Rows::new(kind, 100, 0, &region).unwrap();
            assert_eq!(rows.push(&region, Row::All), Some(0));
            assert_eq!(rows.push(&region, Row::Only(3)), Some(1));
            let size = disallowed.len();
            let row = bytes(&region, 4096 + 1_088 * size, 1_088 * size);
            for (token, element) in row.chunks(size).enumerate() {
                let expected = if token == 3 {
                    vec![0; size]
                } else {
                    disallowed.clone()
                };
                assert_eq!(element, expected, "{kind:?} {token}");
            }
            // Beyond the vocabulary nothing is allowed, in a row of all tokens neither.
            let row = bytes(&region, 4096, 1_088 * size);
            let allowed = row
                .chunks(size)
                .filter(|it| it.iter().all(|b| *b == 0))
                .count();
            assert_eq!(allowed, 100, "{kind:?}");
        }
    }

    #[test]
    fn ai_234_bits_are_least_significant_first() {
        let region = region(1 << 20);
        let mut rows = P2Rows::new(MaskType::Bool, 100, 0, &region).unwrap();
        assert_eq!(rows.push(&region, Row::Only(10)), Some(0));
        assert_eq!(rows.layout().mask_num_bytes, 136);
        let row = bytes(&region, 4096, 136);
        assert_eq!((row[1], row.iter().filter(|b| **b != 0).count()), (4, 1));
        rows.clear();
        rows.push(&region, Row::All);
        assert_eq!(bytes(&region, 4096, 14)[11..], [0xff, 0x0f, 0]);
    }

    #[test]
    fn ai_236_there_are_as_many_rows_as_slots() {
        let region = region(4096 + 2 * 1_088 * 4);
        let mut rows = P2Rows::new(MaskType::F32, 100, 0, &region).unwrap();
        assert_eq!(rows.push(&region, Row::All), Some(0));
        assert_eq!(rows.push(&region, Row::All), Some(1));
        assert_eq!(rows.push(&region, Row::All), None);
        rows.clear();
        assert_eq!(rows.push(&region, Row::All), Some(0));
    }
}
