//! [`LlamaBatch`]: the arrays of a `llama_batch`, reused for every batch.

use std::ptr;

use llama_cpp_sys_2 as sys;

use crate::model::BatchEntry;

/// The arrays of a `llama_batch`, reused for every batch; sorted by slot, because each slot's cells are adjacent.
#[derive(Debug)]
pub(super) struct LlamaBatch {
    /// The indices of the entries, sorted by slot.
    order: Vec<usize>,
    /// The position of each entry in that order.
    ranks: Vec<i32>,
    tokens: Vec<sys::llama_token>,
    positions: Vec<sys::llama_pos>,
    slots: Vec<sys::llama_seq_id>,
    counts: Vec<i32>,
    lists: Vec<*mut sys::llama_seq_id>,
    rows: Vec<i8>,
}

impl LlamaBatch {
    pub(super) fn new(room: usize) -> Self {
        Self {
            order: Vec::with_capacity(room),
            ranks: vec![0; room],
            tokens: Vec::with_capacity(room),
            positions: Vec::with_capacity(room),
            slots: Vec::with_capacity(room),
            counts: vec![1; room],
            lists: Vec::with_capacity(room),
            rows: Vec::with_capacity(room),
        }
    }

    pub(super) fn clear(&mut self) {
        self.order.clear();
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.lists.clear();
        self.rows.clear();
    }

    pub(super) fn fill(&mut self, entries: &[BatchEntry]) {
        self.order.extend(0..entries.len());
        // Entries of one slot stay in their order.
        self.order.sort_by_key(|&index| entries[index].slot);
        for (location, &index) in (0..).zip(&self.order) {
            let entry = entries[index];
            self.ranks[index] = location;
            self.tokens.push(entry.token.cast_signed());
            self.positions.push(entry.position.cast_signed());
            self.slots.push(entry.slot.cast_signed());
            self.rows.push(i8::from(entry.row));
        }
        // Each token belongs to one slot: a list of length one, in place. Built last, because pushing to `slots` may
        // move it.
        self.lists
            .extend(self.slots.iter_mut().map(|slot| &raw mut *slot));
    }

    /// Returns the position of an entry in the batch, if it requested an output row.
    pub(super) fn wanted(&self, index: usize) -> Option<i32> {
        let position = *self.ranks.get(..self.order.len())?.get(index)?;
        let row = *self.rows.get(usize::try_from(position).ok()?)?;
        (row != 0).then_some(position)
    }

    /// Returns the batch as llama.cpp reads it; the pointers are valid until the batch is filled again.
    pub(super) fn raw(&mut self) -> sys::llama_batch {
        sys::llama_batch {
            n_tokens: self.tokens.len() as i32,
            token: self.tokens.as_mut_ptr(),
            embd: ptr::null_mut(),
            pos: self.positions.as_mut_ptr(),
            n_seq_id: self.counts.as_mut_ptr(),
            seq_id: self.lists.as_mut_ptr(),
            logits: self.rows.as_mut_ptr(),
        }
    }
}
