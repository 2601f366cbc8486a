//! A sequence of parts, each of which takes as many bytes as it can.

use alloc::vec::Vec;
use core::ops::{Bound, RangeBounds, RangeInclusive};

use super::Constraint;

/// Parts in a sequence: `Pattern::new().text("Age: ").some_of(ByteClass::DIGIT, 1..=3)`.
///
/// Each part takes as many bytes as it can before the next one begins, and none of them gives any back: a part that takes
/// digits should not be before one that begins with a digit.
#[derive(Clone, Debug, Default)]
pub struct Pattern {
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
enum Part {
    Text(Vec<u8>),
    OneOf(Vec<Vec<u8>>),
    SomeOf {
        class: ByteClass,
        min: u32,
        max: u32,
    },
}

/// Where one is in a [`Pattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatternState {
    part: u32,
    /// Bytes taken by this part.
    taken: u32,
    /// The texts of a choice that are still possible, as bits.
    possible: u64,
}

/// Texts of one choice.
const CHOICES_MAX: usize = 64;

impl Pattern {
    /// Nothing: only the empty text.
    #[must_use]
    pub const fn new() -> Self {
        Self { parts: Vec::new() }
    }

    /// Adds a text.
    #[must_use]
    pub fn text(mut self, text: impl AsRef<[u8]>) -> Self {
        let text = text.as_ref();
        if !text.is_empty() {
            self.parts.push(Part::Text(text.to_vec()));
        }
        self
    }

    /// Adds a choice of texts. Where one is the beginning of another, the longer one is taken if the bytes fit.
    ///
    /// # Panics
    /// There is no text, an empty text, or more than 64.
    #[must_use]
    pub fn one_of<T: AsRef<[u8]>>(mut self, texts: impl IntoIterator<Item = T>) -> Self {
        let texts: Vec<Vec<u8>> = texts
            .into_iter()
            .map(|text| text.as_ref().to_vec())
            .collect();
        let fits = (1..=CHOICES_MAX).contains(&texts.len());
        assert!(
            fits && texts.iter().all(|text| !text.is_empty()),
            "a choice has 1 to {CHOICES_MAX} texts"
        );
        self.parts.push(Part::OneOf(texts));
        self
    }

    /// Adds bytes of a class: `1..=3` of them, `0..` for any number.
    #[must_use]
    pub fn some_of(mut self, class: ByteClass, count: impl RangeBounds<u32>) -> Self {
        let min = match count.start_bound() {
            Bound::Included(&min) => min,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let max = match count.end_bound() {
            Bound::Included(&max) => max,
            Bound::Excluded(&after) => after.saturating_sub(1),
            Bound::Unbounded => u32::MAX,
        };
        if max > 0 {
            self.parts.push(Part::SomeOf { class, min, max });
        }
        self
    }
}

impl PatternState {
    const fn at(part: u32) -> Self {
        Self {
            part,
            taken: 0,
            possible: u64::MAX,
        }
    }

    const fn taking(self) -> Self {
        Self {
            taken: self.taken.saturating_add(1),
            ..self
        }
    }
}

impl Part {
    /// The state after this part took the byte; `None` if it cannot.
    fn take(&self, state: PatternState, byte: u8) -> Option<PatternState> {
        let taken = state.taken as usize;
        let after = state.taking();
        let (after, is_full) = match self {
            Self::Text(text) => {
                (text.get(taken) == Some(&byte)).then_some((after, taken + 1 == text.len()))?
            }
            Self::OneOf(texts) => {
                let fits = |(index, text): &(usize, &Vec<u8>)| {
                    state.possible >> index & 1 == 1 && text.get(taken) == Some(&byte)
                };
                let fitting = || texts.iter().enumerate().filter(fits);
                let possible = fitting().fold(0, |bits, (index, _)| bits | 1 << index);
                let is_full = fitting().all(|(_, text)| text.len() == taken + 1);
                (possible != 0).then_some((PatternState { possible, ..after }, is_full))?
            }
            Self::SomeOf { class, max, .. } => class
                .contains(byte)
                .then_some((after, after.taken == *max))?,
        };
        Some(if is_full {
            PatternState::at(state.part + 1)
        } else {
            after
        })
    }

    /// Whether this part may end here.
    fn may_end(&self, state: PatternState) -> bool {
        match self {
            Self::Text(_) => false,
            Self::OneOf(texts) => {
                let ends = |(index, text): (usize, &Vec<u8>)| {
                    state.possible >> index & 1 == 1 && text.len() == state.taken as usize
                };
                texts.iter().enumerate().any(ends)
            }
            Self::SomeOf { min, .. } => state.taken >= *min,
        }
    }
}

impl Constraint for Pattern {
    type State = PatternState;

    fn start(&self) -> PatternState {
        PatternState::at(0)
    }

    fn next(&self, state: &PatternState, byte: u8) -> Option<PatternState> {
        let mut state = *state;
        loop {
            let part = self.parts.get(state.part as usize)?;
            if let Some(after) = part.take(state, byte) {
                return Some(after);
            }
            if !part.may_end(state) {
                return None;
            }
            state = PatternState::at(state.part + 1);
        }
    }

    fn is_complete(&self, state: &PatternState) -> bool {
        let mut state = *state;
        while let Some(part) = self.parts.get(state.part as usize) {
            if !part.may_end(state) {
                return false;
            }
            state = PatternState::at(state.part + 1);
        }
        true
    }
}

/// A set of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteClass([u64; 4]);

impl ByteClass {
    /// `A` to `Z`.
    pub const UPPER: Self = Self::range(b'A'..=b'Z');
    /// `a` to `z`.
    pub const LOWER: Self = Self::range(b'a'..=b'z');
    /// `0` to `9`.
    pub const DIGIT: Self = Self::range(b'0'..=b'9');
    /// Printable ASCII, with the space and without line ends.
    pub const PRINTABLE: Self = Self::range(b' '..=b'~');
    /// What can stand in a JSON string as it is, of ASCII.
    pub const JSON_TEXT: Self = Self::PRINTABLE.without(Self::of(b"\"\\"));

    /// These bytes.
    #[must_use]
    pub const fn of(bytes: &[u8]) -> Self {
        let mut class = Self([0; 4]);
        let mut index = 0;
        while index < bytes.len() {
            let byte = bytes[index];
            class.0[(byte / 64) as usize] |= 1 << (byte % 64);
            index += 1;
        }
        class
    }

    /// All bytes from one to another.
    #[must_use]
    pub const fn range(bytes: RangeInclusive<u8>) -> Self {
        let mut class = Self([0; 4]);
        let mut byte = *bytes.start() as usize;
        while byte <= *bytes.end() as usize {
            class.0[byte / 64] |= 1 << (byte % 64);
            byte += 1;
        }
        class
    }

    /// The bytes of both classes.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
        Self([a | e, b | f, c | g, d | h])
    }

    /// The bytes that are not in the other class.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
        Self([a & !e, b & !f, c & !g, d & !h])
    }

    /// Whether the byte is in the class.
    #[must_use]
    pub const fn contains(&self, byte: u8) -> bool {
        self.0[(byte / 64) as usize] >> (byte % 64) & 1 == 1
    }
}
