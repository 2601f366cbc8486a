//! Where the rows of the tokens lie in a state that llama.cpp has saved, so that saved prefixes can share them
//! ([`crate::saved_state`]).
//!
//! The form is that of `llama_state_seq_get_data` with one `llama_kv_cache`:
//!
//! ```text
//!   u32 0xaf143cd8, i32 slot | u32 streams | for each stream: u32 cells; if there are any:
//!     for each cell: i32 position, u32 1, i32 slot
//!     u32 values are transposed | u32 layers | u32, u32 sizes of rotations
//!     for each layer: i32 type, u64 bytes of a row, rows of keys
//!     for each layer: i32 type, u64 bytes of a row, rows of values; none of it in models without values
//! ```
//!
//! Where slots share cells, those of a slot may have been filled in another order than that of its tokens. Its rows are then put
//! in order, which is as good to llama.cpp.
//!
//! Whatever has another form (a cache with windows, recurrent layers, positions of several dimensions, transposed values) is kept
//! whole, which costs memory and nothing else.

use crate::model::{RowArea, StateRows};

/// `io_magic` of llama.cpp.
const MAGIC: u32 = 0xaf14_3cd8;

/// Bytes of what a state has of each cell before the rows: position, number of slots, slot.
const CELL_BYTES: usize = 12;

/// Finds the rows in a state of so many tokens: a [`crate::model::RowFinder`].
pub(super) fn find_rows(state: &[u8], tokens: usize) -> Option<StateRows<'_>> {
    let mut input = StateReader { state, at: 0 };
    let mut found = None;
    let (magic, _slot) = (input.u32()?, input.u32()?);
    if magic != MAGIC {
        return None;
    }
    let streams = input.u32()?;
    for stream in 0..streams {
        let cells = input.u32()? as usize;
        // A slot has its cells in one stream.
        match cells {
            0 => continue,
            _ if cells == tokens && found.is_none() => {}
            _ => return None,
        }
        // One number for each stream that follows.
        let behind = (streams - stream - 1) as usize * size_of::<u32>();
        found = Some(input.stream(cells, behind)?);
    }
    let (order, areas) = found.filter(|_| input.at == state.len())?;
    let state = match order.iter().enumerate().all(|(cell, &at)| cell == at) {
        true => state.into(),
        false => in_order(state, &order, &areas)?.into(),
    };
    // The first is of the cells themselves, which name the slot.
    let areas = areas.into_iter().skip(1).collect();
    Some(StateRows { state, areas })
}

/// Returns the state with the row of each cell at its place in the order.
fn in_order(state: &[u8], order: &[usize], areas: &[RowArea]) -> Option<Vec<u8>> {
    let mut ordered = Vec::new();
    ordered.try_reserve_exact(state.len()).ok()?;
    ordered.extend_from_slice(state);
    for area in areas {
        let row = |at: usize| {
            let start = area.start + at * area.row_bytes;
            start..start + area.row_bytes
        };
        for (cell, &at) in order.iter().enumerate() {
            ordered[row(at)].copy_from_slice(&state[row(cell)]);
        }
    }
    Some(ordered)
}

struct StateReader<'a> {
    state: &'a [u8],
    at: usize,
}

impl StateReader<'_> {
    /// Reads the contents of a stream, behind which are so many bytes of others. Returns the position of each cell, and all areas.
    fn stream(&mut self, cells: usize, behind: usize) -> Option<(Vec<usize>, Vec<RowArea>)> {
        let mut areas = vec![RowArea {
            start: self.at,
            row_bytes: CELL_BYTES,
        }];
        let order = self.order(cells)?;
        let (is_transposed, layers) = (self.u32()?, self.u32()?);
        if is_transposed != 0 || layers == 0 {
            return None;
        }
        let _rotations = (self.u32()?, self.u32()?);
        for _ in 0..layers {
            areas.push(self.area(cells)?);
        }
        if self.state.len() - self.at == behind {
            return Some((order, areas));
        }
        for _ in 0..layers {
            areas.push(self.area(cells)?);
        }
        Some((order, areas))
    }

    /// Reads the positions of the cells: each from 0 on, once.
    fn order(&mut self, cells: usize) -> Option<Vec<usize>> {
        // More than there can be, so that nothing is allocated for them.
        if cells > self.state.len() / CELL_BYTES {
            return None;
        }
        let mut is_there = vec![false; cells];
        let mut order = Vec::with_capacity(cells);
        for _ in 0..cells {
            let (position, slots, _slot) = (self.u32()? as usize, self.u32()?, self.u32()?);
            let seen = is_there.get_mut(position)?;
            if std::mem::replace(seen, true) || slots != 1 {
                return None;
            }
            order.push(position);
        }
        Some(order)
    }

    fn area(&mut self, cells: usize) -> Option<RowArea> {
        let _type = self.u32()?;
        let row_bytes = usize::try_from(u64::from_le_bytes(self.array()?)).ok()?;
        let start = self.at;
        let end = start.checked_add(cells.checked_mul(row_bytes)?)?;
        self.at = end;
        (row_bytes > 0 && end <= self.state.len()).then_some(RowArea { start, row_bytes })
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let array = self.state.get(self.at..)?.first_chunk()?;
        self.at += N;
        Some(*array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state of two layers in the second of three streams.
    fn state(tokens: u32, has_values: bool) -> Vec<u8> {
        let mut state = Vec::new();
        let numbers = |state: &mut Vec<u8>, numbers: &[u32]| {
            state.extend(numbers.iter().flat_map(|it| it.to_le_bytes()));
        };
        numbers(&mut state, &[MAGIC, 5, 3, 0, tokens]);
        for position in 0..tokens {
            numbers(&mut state, &[position, 1, 5]);
        }
        numbers(&mut state, &[0, 2, 64, 64]);
        for row_bytes in [6_u64, 8, 10, 12]
            .into_iter()
            .take(if has_values { 4 } else { 2 })
        {
            numbers(&mut state, &[1]);
            state.extend(row_bytes.to_le_bytes());
            state.extend((0..u64::from(tokens) * row_bytes).map(|at| at as u8));
        }
        numbers(&mut state, &[0]);
        state
    }

    #[test]
    fn the_rows_of_keys_and_values_are_found() {
        let (whole, keys) = (state(5, true), state(5, false));
        let found = find_rows(&whole, 5).unwrap();
        let (head, between) = (5 * 4 + 5 * 12 + 4 * 4, 4 + 8);
        let starts = [
            head + between,
            head + 2 * between + 30,
            head + 3 * between + 70,
            head + 4 * between + 120,
        ];
        let areas = starts.into_iter().zip([6, 8, 10, 12]);
        let areas: Vec<_> = areas
            .map(|(start, row_bytes)| RowArea { start, row_bytes })
            .collect();
        assert_eq!((found.areas, &*found.state), (areas.clone(), &*whole));
        assert_eq!(find_rows(&keys, 5).unwrap().areas, areas[..2]);
    }

    #[test]
    fn rows_are_put_in_the_order_of_the_tokens() {
        let ordered = state(5, true);
        let rows = find_rows(&ordered, 5).unwrap().areas;
        let mut areas = vec![RowArea {
            start: 5 * 4,
            row_bytes: CELL_BYTES,
        }];
        areas.extend(rows.clone());
        let mut mixed = ordered.clone();
        for (cell, at) in [3, 4, 0, 2, 1].into_iter().enumerate() {
            for area in &areas {
                let row = |at: usize| area.start + at * area.row_bytes;
                let bytes = &ordered[row(at)..row(at) + area.row_bytes];
                mixed[row(cell)..][..area.row_bytes].copy_from_slice(bytes);
            }
        }
        assert_ne!(mixed, ordered);
        let found = find_rows(&mixed, 5).unwrap();
        assert_eq!((&*found.state, found.areas), (&*ordered, rows));
    }

    #[test]
    fn no_other_form_is_taken_for_it() {
        let find = |state: &[u8], tokens| find_rows(state, tokens).map(|found| found.areas);
        let whole = state(5, true);
        assert_eq!(find(&whole, 4), None, "of other tokens");
        assert_eq!(find(&[&whole[..], &[0]].concat(), 5), None);
        for length in 0..whole.len() {
            assert_eq!(find(&whole[..length], 5), None, "{length} bytes");
        }
        let set = |at: usize, value: u32| {
            let mut state = whole.clone();
            state[at..at + 4].copy_from_slice(&value.to_le_bytes());
            find(&state, 5)
        };
        assert_eq!(set(0, 1), None, "of something else");
        assert_eq!(set(20, 1), None, "a position twice");
        assert_eq!(set(24, 2), None, "cells of two slots");
        let head = 5 * 4 + 5 * 12;
        assert_eq!(set(head, 1), None, "transposed values");
        assert_eq!(set(head + 4, u32::MAX), None, "more layers than there are");
        for row_bytes in [0, u32::MAX] {
            assert_eq!(set(head + 16 + 4, row_bytes), None);
            assert_eq!(set(head + 16 + 8, row_bytes.max(1)), None);
        }
    }
}
