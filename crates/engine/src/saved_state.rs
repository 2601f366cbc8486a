//! [`SavedState`]: the state of a slot as bytes, in which states of prompts that begin alike share the memory of their
//! beginnings.
//!
//! A state is written layer by layer, so what belongs to its first tokens lies all over it. It is therefore cut into
//! blocks, each with the rows that all layers have of [`BLOCK_TOKENS`] tokens, and what is left.
//!
//! ```text
//!   whole:  head | layer 0: row 0 .. row n | layer 1: row 0 .. row n | ...
//!   cut:    block 0: rows 0 .. 63 of layer 0, of layer 1, ... | block 1: rows 64 .. 127 of ... | rest: head, last rows
//! ```
//!
//! A block is shared only if it has the same bytes, so a state is always restored as it was saved.
//!
//! Cutting a state copies it, and so does putting it together again, on the thread of the engine. A state that has nothing
//! in common with another one is therefore not cut.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::model::RowArea;

/// Tokens of a block. With fewer, less of a common prefix is stored twice; with more, longer pieces are copied at a time.
pub(crate) const BLOCK_TOKENS: usize = 64;

/// The table of areas takes at most one in so many bytes of a state.
const AREAS_SHARE: usize = 8;

/// The rows of [`BLOCK_TOKENS`] tokens, area by area.
pub(crate) type StateBlock = Arc<Vec<u8>>;

/// The state of a slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct SavedState {
    /// Bytes of the whole.
    bytes: usize,
    /// Where the blocks belong. Without any, `rest` is the whole.
    areas: Box<[RowArea]>,
    blocks: Vec<StateBlock>,
    /// What is in no block.
    rest: Vec<u8>,
}

impl From<Vec<u8>> for SavedState {
    fn from(whole: Vec<u8>) -> Self {
        Self {
            bytes: whole.len(),
            rest: whole,
            ..Self::default()
        }
    }
}

impl SavedState {
    /// Cuts a state of so many tokens. Blocks of the first `common` tokens that `like` has too are shared with it. `None`
    /// if there is no block, no memory, the areas are not in the state, or are too many.
    pub(crate) fn cut(
        state: &[u8],
        areas: Vec<RowArea>,
        tokens: usize,
        like: Option<(&Self, usize)>,
    ) -> Option<Self> {
        let count = tokens / BLOCK_TOKENS;
        // A model has two areas for each layer. A file could have a row of one byte in each of millions.
        if count == 0 || areas.is_empty() || size_of_val(&*areas) > state.len() / AREAS_SHARE {
            return None;
        }
        let rest = rest_of(state, &areas, count)?;
        let like = like.filter(|(like, _)| like.has_rows_as(&areas));
        let mut blocks = Vec::with_capacity(count);
        for index in 0..count {
            let pieces: Option<Vec<&[u8]>> = areas
                .iter()
                .map(|area| state.get(rows(area, index)))
                .collect();
            let pieces = pieces?;
            let same = like
                .filter(|(_, common)| (index + 1) * BLOCK_TOKENS <= *common)
                .and_then(|(like, _)| like.blocks.get(index))
                .filter(|block| is_made_of(block, &pieces));
            blocks.push(match same {
                Some(block) => Arc::clone(block),
                None => Arc::new(joined(&pieces)?),
            });
        }
        Some(Self {
            bytes: state.len(),
            areas: areas.into(),
            blocks,
            rest,
        })
    }

    /// Returns the bytes of the whole.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Returns the state if it is not cut.
    pub(crate) fn as_uncut(&self) -> Option<&[u8]> {
        self.areas.is_empty().then_some(&*self.rest)
    }

    /// Returns the state as it was saved. `None` if there is no memory for it.
    pub(crate) fn whole(&self) -> Option<Cow<'_, [u8]>> {
        match self.as_uncut() {
            Some(state) => Some(Cow::Borrowed(state)),
            None => joined(&self.pieces()).map(Cow::Owned),
        }
    }

    /// Returns the state as it was saved, piece after piece.
    pub(crate) fn pieces(&self) -> Vec<&[u8]> {
        let mut pieces = Vec::with_capacity(1 + self.areas.len() * (1 + self.blocks.len()));
        let (mut rest, mut at) = (&*self.rest, 0);
        let mut taken = 0;
        for area in &self.areas {
            // The rows behind the last block of the area before, and what lies between the two.
            let (before, behind) = rest.split_at(area.start - at);
            pieces.push(before);
            rest = behind;
            let piece = taken..taken + BLOCK_TOKENS * area.row_bytes;
            taken = piece.end;
            let of_area = self.blocks.iter().map(|block| &block[piece.clone()]);
            pieces.extend(of_area);
            at = rows(area, self.blocks.len()).start;
        }
        pieces.push(rest);
        pieces
    }

    /// Returns what other states may have in common with this one.
    pub(crate) fn blocks(&self) -> &[StateBlock] {
        &self.blocks
    }

    /// Returns the bytes that are of this state alone.
    pub(crate) fn own_bytes(&self) -> usize {
        self.rest.len() + size_of_val(&*self.areas) + size_of_val(&*self.blocks)
    }

    /// Returns whether blocks of this state have rows of these sizes.
    fn has_rows_as(&self, areas: &[RowArea]) -> bool {
        let sizes = self.areas.iter().map(|area| area.row_bytes);
        sizes.eq(areas.iter().map(|area| area.row_bytes))
    }
}

/// Returns where the rows of a block lie in an area.
fn rows(area: &RowArea, block: usize) -> Range<usize> {
    let bytes = BLOCK_TOKENS * area.row_bytes;
    let start = area.start + block * bytes;
    start..start + bytes
}

/// Returns what is in none of the first blocks.
fn rest_of(state: &[u8], areas: &[RowArea], blocks: usize) -> Option<Vec<u8>> {
    let mut rest = Vec::with_capacity(1 + areas.len());
    let mut at = 0;
    for area in areas {
        rest.push(state.get(at..area.start)?);
        at = rows(area, blocks).start;
    }
    rest.push(state.get(at..)?);
    joined(&rest)
}

fn is_made_of(block: &[u8], pieces: &[&[u8]]) -> bool {
    let mut left = block;
    let all = pieces.iter().all(|piece| {
        let rest = left.strip_prefix(*piece);
        left = rest.unwrap_or_default();
        rest.is_some()
    });
    all && left.is_empty()
}

/// Returns the pieces one after another; `None` if there is no memory for that.
fn joined(pieces: &[&[u8]]) -> Option<Vec<u8>> {
    let mut joined = Vec::new();
    let bytes = pieces.iter().map(|piece| piece.len()).sum();
    joined.try_reserve_exact(bytes).ok()?;
    for piece in pieces {
        joined.extend_from_slice(piece);
    }
    Some(joined)
}

#[cfg(test)]
mod tests;
