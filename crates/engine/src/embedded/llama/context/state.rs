//! Copies of a slot's state as bytes: the whole, or a checkpoint of what the slot loses as it goes on. Its `SAFETY` comments
//! refer to the arguments in [`super::super`].
//!
//! # Windows of their own
//! Where sliding-window layers have few cells, llama.cpp reuses those that have left the window of their slot, but only
//! while no other slot holds them. Slots that were forked would therefore fill these layers. So at most two slots share
//! cells there, and not for long: the window of one is saved and restored, which gives it cells of its own. A slot then
//! occupies no more cells than its window has, and there are enough for the windows of all slots and the tokens that are
//! computed at a time.

use llama_cpp_sys_2 as sys;

use super::super::super::guard::{guarded, throwing};
use super::LlamaContext;
use crate::model::CheckpointTerms;

/// The part of a slot's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatePart {
    /// All of it.
    Whole,
    /// The last window of sliding-window layers, or the state of recurrent layers.
    Checkpoint,
}

impl StatePart {
    fn flags(self) -> sys::llama_state_seq_flags {
        match self {
            Self::Whole => 0,
            Self::Checkpoint => PARTIAL_ONLY,
        }
    }
}

/// `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` of llama.cpp's header, which the bindings lack.
const PARTIAL_ONLY: sys::llama_state_seq_flags = 1;

impl LlamaContext {
    /// Returns how a slot returns to an earlier length; `None` if it can be truncated.
    pub(in super::super::super) fn checkpoint_terms(&self) -> Option<CheckpointTerms> {
        if self.recurrent {
            return Some(CheckpointTerms {
                kept_tokens: 0,
                slack: 0,
            });
        }
        // llama.cpp saves the window of the last token, and so one position more than the next token attends to.
        self.few_window_cells.then(|| CheckpointTerms {
            kept_tokens: self.window.saturating_sub(1),
            slack: 1,
        })
    }

    /// Returns how many bytes the state of a slot has; 0 if it cannot be saved.
    pub(in super::super::super) fn saved_size(&self, slot: u32) -> usize {
        self.part_size(slot, StatePart::Whole)
    }

    /// Returns the state of a slot.
    pub(in super::super::super) fn save(&self, slot: u32) -> Option<Vec<u8>> {
        self.save_part(slot, StatePart::Whole)
    }

    /// Returns how many bytes a checkpoint of a slot has; 0 if there can be none.
    pub(in super::super::super) fn checkpoint_size(&self, slot: u32) -> usize {
        self.part_size(slot, StatePart::Checkpoint)
    }

    /// Returns a checkpoint of a slot.
    pub(in super::super::super) fn checkpoint(&self, slot: u32) -> Option<Vec<u8>> {
        self.save_part(slot, StatePart::Checkpoint)
    }

    fn part_size(&self, slot: u32, part: StatePart) -> usize {
        match self.is_copied_later(slot) {
            true => 0,
            false => self.part_bytes(slot, part),
        }
    }

    fn part_bytes(&self, slot: u32, part: StatePart) -> usize {
        let (context, seq) = (self.context.as_ptr(), slot.cast_signed());
        if self.cells_held(slot) == 0 {
            return 0;
        }
        let flags = part.flags();
        // SAFETY: the context is live and not computing, and a slot that holds tokens is in range.
        let size =
            guarded(|| unsafe { throwing::llama_state_seq_get_size_ext(context, seq, flags) });
        size.unwrap_or(0)
    }

    fn save_part(&self, slot: u32, part: StatePart) -> Option<Vec<u8>> {
        let (context, seq) = (self.context.as_ptr(), slot.cast_signed());
        let (size, flags) = (self.part_size(slot, part), part.flags());
        let mut state: Vec<u8> = Vec::new();
        // Without the memory the prefix is computed again.
        state.try_reserve_exact(size).ok().filter(|()| size > 0)?;
        let buffer = state.as_mut_ptr();
        // SAFETY: as above, and the buffer has room for `size` bytes.
        let copy =
            || unsafe { throwing::llama_state_seq_get_data_ext(context, buffer, size, seq, flags) };
        let written = guarded(copy).ok().filter(|&written| written == size)?;
        // SAFETY: so many bytes were reserved, and llama.cpp has written them.
        unsafe { state.set_len(written) };
        Some(state)
    }

    /// Fills an empty slot with a saved state of this context, which held so many tokens. Returns false, with an empty slot,
    /// if llama.cpp cannot.
    pub(in super::super::super) fn restore(
        &mut self,
        slot: u32,
        state: &[u8],
        tokens: u32,
    ) -> bool {
        if self.cells_held.get(slot as usize) != Some(&0) || self.is_copied_later(slot) {
            return false;
        }
        self.finish_fork();
        if self.read(slot, state, StatePart::Whole, tokens) {
            self.cells_held[slot as usize] = tokens;
            return true;
        }
        tracing::warn!(
            slot,
            tokens,
            "a saved prefix cannot be restored, and is computed again"
        );
        self.clear(slot);
        false
    }

    /// Shortens a slot to its first `tokens` tokens, of which the checkpoint is. Returns false, with an empty slot, if llama.cpp
    /// cannot.
    pub(in super::super::super) fn rewind(
        &mut self,
        slot: u32,
        checkpoint: &[u8],
        tokens: u32,
    ) -> bool {
        let held = self.cells_held(slot);
        if tokens == 0 || tokens > held || self.is_copied_later(slot) {
            return false;
        }
        // The other slot of the pair keeps the cells that this one gives up.
        if self
            .shared_window
            .is_some_and(|(from, to)| slot == from || slot == to)
        {
            self.shared_window = None;
        }
        self.finish_fork();
        let read = self.read(slot, checkpoint, StatePart::Checkpoint, tokens);
        // SAFETY: the memory lives with its context, and the slot is in range.
        let cut = || unsafe {
            let from = tokens.cast_signed();
            sys::llama_memory_seq_rm(self.memory.as_ptr(), slot.cast_signed(), from, -1)
        };
        if read && cut() {
            self.cells_held[slot as usize] = tokens;
            return true;
        }
        tracing::warn!(
            slot,
            tokens,
            "a checkpoint cannot be used, and the prompt is computed again"
        );
        self.clear(slot);
        false
    }

    /// Reads a state into a slot; returns whether it is of so many tokens.
    fn read(&mut self, slot: u32, state: &[u8], part: StatePart, tokens: u32) -> bool {
        let (context, seq, flags) = (self.context.as_ptr(), slot.cast_signed(), part.flags());
        let (data, size) = (state.as_ptr(), state.len());
        // SAFETY: the context is live and not computing, the slot is in range, and llama.cpp reads no more than `size` bytes.
        let copy =
            || unsafe { throwing::llama_state_seq_set_data_ext(context, data, size, seq, flags) };
        let read = guarded(copy).unwrap_or(0);
        // SAFETY: the memory lives with its context; the call only reads.
        let last = unsafe { sys::llama_memory_seq_pos_max(self.memory.as_ptr(), seq) };
        read == size && i64::from(last) + 1 == i64::from(tokens)
    }

    /// Returns how many bytes a fork of a slot copies.
    pub(in super::super::super) fn fork_bytes(&self, from: u32) -> usize {
        match (self.cells_per_slot, self.few_window_cells) {
            (Some(cells), _) => {
                let used = self.part_bytes(from, StatePart::Whole);
                let unused = match self.forks_later() {
                    // llama.cpp's own copy.
                    true => cells.saturating_sub(self.cells_held(from)) as usize,
                    false => 0,
                };
                used + used / (self.cells_held(from).max(1) as usize) * unused
            }
            (None, true) => self.part_bytes(from, StatePart::Checkpoint),
            (None, false) => 0,
        }
    }

    /// Gives a slot that was forked window cells of its own; leaves it empty if that fails.
    pub(in super::super::super) fn finish_fork(&mut self) {
        let Some((_, to)) = self.shared_window.take() else {
            return;
        };
        let tokens = self.cells_held(to);
        let window = self.checkpoint(to);
        let parted =
            window.is_some_and(|window| self.read(to, &window, StatePart::Checkpoint, tokens));
        if !parted {
            tracing::warn!(
                slot = to,
                "the window of a forked slot cannot be copied, and its prompt is computed again"
            );
            self.clear(to);
        }
    }

    /// Called when a slot has lost all its tokens: it shares none with another one.
    pub(super) fn forget_shared_window(&mut self, slot: u32) {
        let is_empty = self.cells_held(slot) == 0;
        if self
            .shared_window
            .is_some_and(|(from, to)| is_empty && (slot == from || slot == to))
        {
            self.shared_window = None;
        }
    }
}
