//! [`LlamaContext`]: the KV cache and the decode calls. Its `SAFETY` comments refer to the arguments in [`super`].

mod state;

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llama_cpp_sys_2 as sys;

use super::super::guard::{guarded, throwing};
use super::super::thread_choice::{ThreadChoice, ThreadChoices, ThreadVerdict, worth_trying};
use super::batch::LlamaBatch;
use super::compute_pool::{self, ComputePool, THREADS_MAX};
use super::model::{LlamaFacts, LlamaModel};
use super::params::set_context_params;
use super::{LAST_ERROR, take_last_error};
use crate::llama_options::LlamaOptions;
use crate::model::{BatchEntry, DecodeSignals, Interrupt, ThreadNumbers};
use crate::processors;

/// The result of a decode call that threw an exception; distinct from llama.cpp's own codes.
pub(super) const THROWN: i32 = i32::MIN;

/// The number of KV cells, or of those of each slot with a per-slot KV cache, is a multiple of this.
pub(in super::super) const CELLS_STEP: u32 = 256;

/// The maximum of slots (sequences) of llama.cpp.
pub(in super::super) const SLOTS_MAX: u32 = 256;

/// Output rows of a batch for scored tokens, in addition to one for each slot.
pub(in super::super) const SCORED_ROWS: u32 = 64;

/// The numbers of threads that were asked for, each at least 1; `None`: whichever is fastest.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct ThreadLimits {
    /// Of a call that computes one token of each sequence.
    pub(in super::super) decode: Option<u32>,
    /// Of a call with prompt tokens.
    pub(in super::super) prefill: Option<u32>,
}

impl ThreadLimits {
    /// The maximum of threads of any call.
    pub(in super::super) fn most(self) -> u32 {
        let most = |asked: Option<u32>| asked.unwrap_or_else(compute_pool::processors);
        most(self.decode)
            .max(most(self.prefill))
            .clamp(1, THREADS_MAX)
    }

    /// The choices of a context with so many output rows.
    fn choices(self, rows: u32) -> ThreadChoices {
        ThreadChoices {
            decode: choice(self.decode),
            prefill: self.prefill_choice(),
            few: self.prefill_choice(),
            few_max: rows as usize,
        }
    }

    /// The choice for calls with prompt tokens alone.
    pub(super) fn prefill_choice(self) -> ThreadChoice {
        choice(self.prefill)
    }
}

fn choice(asked: Option<u32>) -> ThreadChoice {
    let numbers = match asked {
        Some(asked) => vec![asked.clamp(1, THREADS_MAX)],
        None => worth_trying(processors::usable().min(THREADS_MAX)),
    };
    ThreadChoice::among(numbers)
}

impl fmt::Display for ThreadLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |asked: Option<u32>| match asked {
            Some(asked) => format!("{asked} as configured"),
            None => {
                let first = choice(None).present();
                format!("{first}, or fewer where calls are then faster")
            }
        };
        let (decode, prefill) = (number(self.decode), number(self.prefill));
        match decode == prefill {
            true => f.write_str(&decode),
            false => write!(f, "{decode}; for prompts {prefill}"),
        }
    }
}

/// The size of a context.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct ContextSize {
    /// KV cells of all slots together.
    pub(in super::super) cells: u32,
    /// Per-slot KV: each slot has an equal part of the cells to itself. Otherwise unified KV: all slots share all
    /// cells.
    pub(in super::super) per_slot: bool,
    pub(in super::super) batch_tokens: u32,
    /// Tokens of a batch that are computed at a time.
    pub(in super::super) ubatch_tokens: u32,
    pub(in super::super) slots: u32,
    pub(in super::super) threads: ThreadLimits,
    /// How long idle worker threads spin before they sleep, 0 to 100.
    pub(in super::super) poll: u32,
    /// Sliding-window layers have as many cells as the others, instead of those of the windows alone.
    pub(in super::super) swa_full: bool,
}

impl ContextSize {
    /// Returns the number of cells that a token attends over.
    pub(in super::super) fn reach(self) -> u32 {
        if self.per_slot {
            self.cells / self.slots.max(1)
        } else {
            self.cells
        }
    }

    /// Returns whether one batch may be computed in several parts. Sliding-window layers then need as many cells as the others:
    /// llama.cpp chooses the cells of all parts beforehand, and drops positions from which the last part has moved on, although
    /// the first one still attends to them (`llama_kv_cache::prepare`).
    pub(in super::super) fn computes_in_parts(self) -> bool {
        self.per_slot && self.slots > 1 || self.ubatch_tokens < self.batch_tokens
    }

    /// Returns the size of the context of a model: within what llama.cpp takes, and with [`ContextSize::swa_full`] unless
    /// sliding-window layers have fewer cells than the others.
    fn of_model(self, facts: &LlamaFacts) -> Self {
        let slots = self.slots.clamp(1, SLOTS_MAX);
        // llama.cpp asserts that a batch has room for one row per slot, and pads the number of cells itself.
        let batch_tokens = self.batch_tokens.max(slots);
        let cells = self.cells.max(batch_tokens).next_multiple_of(CELLS_STEP);
        let is_windowed = !facts.recurrent && facts.sliding_window > 0;
        let size = Self {
            cells,
            batch_tokens,
            slots,
            ..self
        };
        let size = size.with_parts(is_windowed);
        let few_window_cells = is_windowed
            && !size.computes_in_parts()
            && size.window_cells(facts.sliding_window) < cells;
        Self {
            // A cache that is as large either way is used as the others are.
            swa_full: !few_window_cells,
            ..size
        }
    }

    /// Limits the parts of a batch to what the context allows. Slots that share cells have theirs in any order, and then
    /// [`ContextSize::computes_in_parts`] matters in a full cache too.
    fn with_parts(self, is_windowed: bool) -> Self {
        let ubatch_tokens = match is_windowed && !self.per_slot {
            true => self.batch_tokens,
            false => self.ubatch_tokens.clamp(self.slots, self.batch_tokens),
        };
        Self {
            ubatch_tokens,
            ..self
        }
    }

    /// Returns how many cells each sliding-window layer has, for a window of so many tokens: without
    /// [`ContextSize::swa_full`], those of each slot's window and of the tokens that are computed at a time.
    pub(in super::super) fn window_cells(self, window: u32) -> u32 {
        if self.swa_full {
            return self.cells;
        }
        // As in llama.cpp (`llama_kv_cache_iswa`).
        let needed = window
            .saturating_mul(self.slots)
            .saturating_add(self.ubatch_tokens);
        let cells = needed.min(self.cells);
        cells
            .checked_next_multiple_of(CELLS_STEP)
            .unwrap_or(u32::MAX)
    }

    /// The parameters of a context of exactly this size.
    fn params(self, rows: u32, options: &LlamaOptions) -> sys::llama_context_params {
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::llama_context_default_params() };
        params.n_ctx = self.cells;
        params.n_batch = self.batch_tokens;
        params.n_ubatch = self.ubatch_tokens;
        params.n_seq_max = self.slots;
        params.n_outputs_max = rows;
        params.n_outputs_max_per_seq = rows;
        // With a unified KV cache a fork copies nothing, but every token attends over all cells.
        params.kv_unified = !self.per_slot;
        // With as many cells for sliding-window layers as for the others, most prefixes of such models can be truncated and
        // forked. It is no guarantee: llama.cpp reuses cells that have left their sequence's window, hence `can_resume`.
        params.swa_full = self.swa_full;
        params.no_perf = true;
        set_context_params(&mut params, options);
        #[cfg(test)]
        super::super::guard::set_throwing_graphs(&mut params);
        params
    }
}

/// Why a batch was not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum DecodeError {
    /// No room in the KV cache; nothing changed.
    Full,
    /// The interrupt was seen while others computed; nothing changed.
    NotBegun,
    /// The interrupt was seen.
    Aborted,
    /// An argument is out of range: a defect of the caller. Nothing was computed.
    Invalid(&'static str),
    /// llama.cpp failed, with its code.
    Broken(i32),
}

/// A KV cache, and the llama.cpp context that computes in it.
///
/// With a unified KV cache, one batch is one ubatch, unless `ubatch_tokens` is less. With a per-slot KV cache, it is one
/// ubatch for each run of neighbouring slots with the same number of tokens. Either way a batch that fails leaves every
/// slot of a model that can be truncated as it was.
#[derive(Debug)]
pub(in super::super) struct LlamaContext {
    context: NonNull<sys::llama_context>,
    memory: NonNull<sys::llama_memory_i>,
    /// Number of tokens in each slot.
    cells_held: Vec<u32>,
    /// Slots from or to which llama.cpp copies at the next decode call: until then they can be neither saved nor restored.
    uncopied: Vec<u32>,
    /// Two slots that share cells of sliding-window layers, if those are few: the second gets its own before anything else needs
    /// cells there.
    shared_window: Option<(u32, u32)>,
    /// Sliding-window layers have cells for the windows of all slots alone.
    few_window_cells: bool,
    /// The number of the last batch that had entries of each slot.
    named: Vec<u64>,
    batches: u64,
    cells: u32,
    /// KV cells of each slot, with a per-slot KV cache.
    cells_per_slot: Option<u32>,
    /// A batch may be computed in several parts.
    is_split: bool,
    batch_tokens: u32,
    rows: u32,
    batch: LlamaBatch,
    interrupt: Interrupt,
    threads: ThreadChoices,
    /// How long the last decode call waited for those of other models.
    waited: Duration,
    /// Tokens that a sliding-window layer attends to; 0 if every layer attends to all.
    window: u32,
    /// Its state is recurrent, not a list of KV cells.
    recurrent: bool,
    model: Arc<LlamaModel>,
    /// Declared last: dropped after the context that uses it.
    pool: Arc<ComputePool>,
}

// SAFETY: see "Threads" above. The batch's pointers are filled and used within one call.
unsafe impl Send for LlamaContext {}

impl LlamaContext {
    /// Creates a context. Must be called before the model is shared: llama.cpp may still modify the model here.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(in super::super) fn new(
        model: Arc<LlamaModel>,
        size: ContextSize,
        options: &LlamaOptions,
    ) -> Result<Self, String> {
        let facts = model.facts();
        let size = size.of_model(&facts);
        // One output row per slot, and some for slots with several scored tokens.
        let rows = size.slots.saturating_add(SCORED_ROWS);
        let rows = rows.min(size.batch_tokens);
        let threads = size.threads.choices(rows);
        let pool = model.compute_pool(threads.most(), size.poll)?;
        let params = size.params(rows, options);
        let _ = LAST_ERROR.take();
        // SAFETY: the model is live and stays so through the `Arc`; the parameters hold no pointers of ours.
        let init = || unsafe { throwing::llama_init_from_model(model.model.as_ptr(), params) };
        let context = guarded(init)?;
        let context = NonNull::new(context).ok_or_else(take_last_error)?;
        let interrupt = Interrupt::default();
        // SAFETY: the context is live; the flag and the pool live as long as it does (fields of the same value).
        let (memory, cells, slot_cells, batch_tokens) = unsafe {
            let raw = context.as_ptr();
            pool.attach(context);
            sys::llama_set_abort_callback(
                raw,
                Some(on_poll),
                Arc::as_ptr(&interrupt).cast_mut().cast(),
            );
            (
                sys::llama_get_memory(raw),
                sys::llama_n_ctx(raw),
                sys::llama_n_ctx_seq(raw),
                sys::llama_n_batch(raw),
            )
        };
        let Some(memory) = NonNull::new(memory) else {
            // SAFETY: the only owner frees it, before the pool.
            unsafe { sys::llama_free(context.as_ptr()) };
            return Err("the model keeps no state between tokens".to_owned());
        };
        Ok(Self {
            context,
            memory,
            cells_held: vec![0; size.slots as usize],
            uncopied: Vec::new(),
            shared_window: None,
            few_window_cells: !size.swa_full,
            named: vec![0; size.slots as usize],
            batches: 0,
            cells,
            cells_per_slot: size.per_slot.then_some(slot_cells),
            is_split: size.per_slot || size.ubatch_tokens < batch_tokens,
            batch_tokens,
            rows,
            batch: LlamaBatch::new(batch_tokens as usize),
            interrupt,
            threads,
            waited: Duration::ZERO,
            window: facts.sliding_window,
            recurrent: facts.recurrent,
            model,
            pool,
        })
    }

    /// Returns the number of KV cells.
    pub(in super::super) fn cells(&self) -> u32 {
        self.cells
    }

    /// Returns the KV cells that one sequence can have, which llama.cpp takes for the length of the context (`n_ctx_seq`).
    pub(in super::super) fn sequence_cells(&self) -> u32 {
        self.cells_per_slot.unwrap_or(self.cells)
    }

    /// Returns the number of KV caches of their own.
    pub(in super::super) fn caches(&self) -> u32 {
        match self.cells_per_slot {
            Some(_) => self.slots(),
            None => 1,
        }
    }

    /// Returns whether the tokens of each sequence are in the KV cache in their order. In cells that slots share they lie where
    /// there was room, and those of windows alone are used in a circle.
    pub(in super::super) fn orders_cells(&self) -> bool {
        self.cells_per_slot.is_some() && !self.few_window_cells
    }

    /// Returns whether a batch is one pass over the weights. Otherwise llama.cpp divides it by the numbers of tokens of its
    /// sequences.
    pub(in super::super) fn computes_together(&self) -> bool {
        self.cells_per_slot.is_none() && !self.recurrent
    }

    /// Returns whether a decode call may move the states of slots without an entry in its batch. llama.cpp does that for
    /// recurrent models, so that the states of a batch are adjacent, one layer after the other: if it ends early, each of
    /// these slots may have layers of another one.
    pub(in super::super) fn moves_states(&self) -> bool {
        self.recurrent
    }

    /// Returns the number of KV cells of each slot, with a per-slot KV cache.
    #[cfg(test)]
    pub(in super::super) fn cells_per_slot(&self) -> Option<u32> {
        self.cells_per_slot
    }

    /// Returns the maximum of entries of a batch.
    pub(in super::super) fn batch_tokens(&self) -> u32 {
        self.batch_tokens
    }

    /// Returns the maximum of output rows of a batch.
    pub(in super::super) fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns the present numbers of threads.
    pub(in super::super) fn thread_numbers(&self) -> ThreadNumbers {
        self.threads.present()
    }

    /// Returns what was found out about the numbers of threads since the last call.
    pub(in super::super) fn take_thread_verdicts(&mut self) -> [Option<ThreadVerdict>; 3] {
        self.threads.take_verdicts()
    }

    /// Returns how long the last decode call waited for those of other models.
    pub(in super::super) fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns the number of slots.
    pub(in super::super) fn slots(&self) -> u32 {
        self.cells_held.len() as u32
    }

    /// Sets the flag that aborts a running decode call; it is polled between the nodes of the graph.
    pub(in super::super) fn set_interrupt(&mut self, flag: Interrupt) {
        // SAFETY: the context is live and not computing. The old flag is dropped only after the new one is in place.
        unsafe {
            let data = Arc::as_ptr(&flag).cast_mut().cast();
            sys::llama_set_abort_callback(self.context.as_ptr(), Some(on_poll), data);
        }
        self.interrupt = flag;
    }

    /// Computes with these factors of the model's LoRA adapters from the next decode call on, which lays out its graph
    /// anew if they differ from those before.
    #[expect(
        clippy::needless_pass_by_ref_mut,
        reason = "llama.cpp changes the context behind its pointer"
    )]
    pub(in super::super) fn set_adapters(&mut self, scales: &[f32]) {
        self.model.apply_adapters(self.context, scales);
    }

    /// Decodes a batch. After an error other than [`DecodeError::Broken`] the slots of a model that can be truncated
    /// are unchanged.
    pub(in super::super) fn decode(&mut self, entries: &[BatchEntry]) -> Result<(), DecodeError> {
        self.batch.clear();
        self.finish_fork();
        self.check(entries)?;
        self.batch.fill(entries);
        let Some(turn) = self.pool.turn(&self.interrupt) else {
            self.batch.clear();
            return Err(DecodeError::NotBegun);
        };
        self.waited = turn.waited;
        let (context, batch) = (self.context.as_ptr(), self.batch.raw());
        let choice = self.threads.of(entries);
        let threads = choice.threads(entries.len()).cast_signed();
        // SAFETY: the context is live and not computing. llama.cpp takes the second number for every batch of more than
        // one token.
        unsafe { sys::llama_set_n_threads(context, threads, threads) };
        let began = Instant::now();
        // SAFETY: `check` has compared every number with the context's limits; the batch's arrays are as long as it
        // says and live during the call, which copies them.
        let decode = || unsafe { throwing::llama_decode(context, batch) };
        let code = guarded(decode).unwrap_or_else(|thrown| {
            tracing::error!(
                thrown,
                "llama.cpp threw an exception while decoding a batch"
            );
            THROWN
        });
        // A call that fails before it computes leaves them for the next one.
        if code != -1 && code != THROWN {
            self.uncopied.clear();
        }
        if code == 0 {
            // Rows are read at once, so nothing is lost by waiting for a device that computes by itself, and times are
            // those of the work.
            // SAFETY: the context is live.
            unsafe { sys::llama_synchronize(context) };
            drop(turn);
            choice.observe(entries.len(), began.elapsed());
            for entry in entries {
                self.cells_held[entry.slot as usize] += 1;
            }
            return Ok(());
        }
        drop(turn);
        self.batch.clear();
        // Of a ubatch that fails, llama.cpp removes the tokens itself, but not of one that throws.
        if self.is_split || code == THROWN {
            self.roll_back(entries);
        }
        Err(match code {
            1 => DecodeError::Full,
            2 => DecodeError::Aborted,
            -1 => DecodeError::Invalid("llama.cpp refused the batch"),
            code => DecodeError::Broken(code),
        })
    }

    /// Rolls back the slots of a failed batch: ubatches before the failed one have added tokens to them.
    fn roll_back(&mut self, entries: &[BatchEntry]) {
        for entry in entries {
            let held = self.cells_held[entry.slot as usize].cast_signed();
            // SAFETY: the memory lives with its context, and `check` has found the slot in range.
            unsafe {
                let memory = self.memory.as_ptr();
                sys::llama_memory_seq_rm(memory, entry.slot.cast_signed(), held, -1);
            }
        }
    }

    fn check(&mut self, entries: &[BatchEntry]) -> Result<(), DecodeError> {
        self.batches += 1;
        if entries.is_empty() || entries.len() > self.batch_tokens as usize {
            return Err(DecodeError::Invalid("a batch is empty or too large"));
        }
        let (mut rows, reach) = (0, self.sequence_cells());
        for (index, entry) in entries.iter().enumerate() {
            let Some(&held) = self.cells_held.get(entry.slot as usize) else {
                return Err(DecodeError::Invalid("a slot is out of range"));
            };
            if self.model.id(entry.token).is_none() {
                return Err(DecodeError::Invalid("a token is outside the vocabulary"));
            }
            let expected = match index.checked_sub(1).map(|before| entries[before]) {
                Some(before) if before.slot == entry.slot => before.position + 1,
                _ if self.named[entry.slot as usize] == self.batches => {
                    return Err(DecodeError::Invalid(
                        "the entries of a slot are not adjacent",
                    ));
                }
                _ => held,
            };
            self.named[entry.slot as usize] = self.batches;
            if entry.position != expected || entry.position >= reach {
                return Err(DecodeError::Invalid(
                    "a position does not follow its slot's last",
                ));
            }
            rows += usize::from(entry.row);
        }
        if rows > self.rows as usize {
            Err(DecodeError::Invalid(
                "a batch has more output rows than the context",
            ))
        } else {
            Ok(())
        }
    }

    /// Returns the logits after the entry at `index` of the last batch, if that batch succeeded and the entry requested
    /// an output row. The caller may overwrite them: the next batch writes them anew.
    pub(in super::super) fn row(&mut self, index: usize) -> Option<&mut [f32]> {
        let index = self.batch.wanted(index)?;
        // SAFETY: the last decode succeeded and its batch wanted a row at this index.
        let row = unsafe { sys::llama_get_logits_ith(self.context.as_ptr(), index) };
        let row = NonNull::new(row)?;
        // SAFETY: a row has one float per token of the vocabulary, in a buffer that the context owns and does not touch
        // before its next call; `&mut self` is borrowed for as long.
        Some(unsafe { std::slice::from_raw_parts_mut(row.as_ptr(), self.model.size() as usize) })
    }

    /// Returns the same for several entries at once.
    pub(in super::super) fn rows_of(&mut self, indexes: &[usize]) -> Vec<Option<&mut [f32]>> {
        let tokens = self.model.size() as usize;
        let pointer = |(place, &index): (usize, &usize)| {
            let index = self.batch.wanted(index)?;
            // SAFETY: the last decode succeeded and its batch wanted a row at this index.
            let row = unsafe { sys::llama_get_logits_ith(self.context.as_ptr(), index) };
            NonNull::new(row).map(|row| (row, place))
        };
        // All pointers first: the first call brings the rows into the order of llama.cpp's batch.
        let mut pointers: Vec<_> = indexes.iter().enumerate().filter_map(pointer).collect();
        pointers.sort_unstable();
        let mut rows = Vec::new();
        rows.resize_with(indexes.len(), || None);
        let mut end = 0;
        for (pointer, place) in pointers {
            let start = pointer.addr().get();
            // Only where an index came twice.
            if start < end {
                continue;
            }
            end = start + tokens * size_of::<f32>();
            // SAFETY: a row has one float per token of the vocabulary, in a buffer that the context owns and does not touch
            // before its next call; `&mut self` is borrowed for as long. It begins behind the end of the row before it, so
            // no two of them overlap.
            rows[place] = Some(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), tokens) });
        }
        rows
    }

    /// Copies the first `tokens` tokens of `from` into the empty slot `to`.
    pub(in super::super) fn fork(
        &mut self,
        from: u32,
        to: u32,
        tokens: u32,
    ) -> Result<(), DecodeError> {
        let (Some(&source), Some(&target)) = (
            self.cells_held.get(from as usize),
            self.cells_held.get(to as usize),
        ) else {
            return Err(DecodeError::Invalid("a slot is out of range"));
        };
        if from == to || target != 0 || tokens > source {
            return Err(DecodeError::Invalid(
                "a fork needs an empty slot, and at most the tokens of its source",
            ));
        }
        if tokens == 0 {
            return Ok(());
        }
        if self.cells_per_slot.is_some() && !self.forks_later() {
            return self.copy(from, to, tokens);
        }
        self.finish_fork();
        // A whole copy is requested as such, because recurrent models support only that, and so does a per-slot KV cache.
        let whole = tokens == source || self.cells_per_slot.is_some();
        if self.cells_per_slot.is_some() {
            self.uncopied.extend([from, to]);
        }
        let until = if whole { -1 } else { tokens.cast_signed() };
        // SAFETY: the memory lives with its context, and both slots are in range.
        unsafe {
            let memory = self.memory.as_ptr();
            sys::llama_memory_seq_cp(memory, from.cast_signed(), to.cast_signed(), -1, until);
        }
        self.cells_held[to as usize] = if whole { source } else { tokens };
        if self.few_window_cells && self.cells_per_slot.is_none() {
            self.shared_window = Some((from, to));
        }
        if self.truncate(to, tokens) {
            Ok(())
        } else {
            Err(DecodeError::Invalid("this model cannot truncate a slot"))
        }
    }

    /// Returns whether llama.cpp makes the copy of a fork in its next decode call. Of a slot with a window, a saved state has only the
    /// last one: a copy by way of that could not be truncated as its source can.
    pub(in super::super) fn forks_later(&self) -> bool {
        self.cells_per_slot.is_some() && self.window != 0
    }

    /// Returns whether the next decode call copies from this slot, or to it.
    pub(in super::super) fn is_copied_later(&self, slot: u32) -> bool {
        self.uncopied.contains(&slot)
    }

    /// Copies a slot between KV caches of their own. llama.cpp's own copy is made by the next decode call, from and to whatever
    /// the two slots then hold, and it copies the cells that are not in use too.
    fn copy(&mut self, from: u32, to: u32, tokens: u32) -> Result<(), DecodeError> {
        let source = self.cells_held(from);
        let copied = self.save(from);
        let copied = copied.is_some_and(|state| self.restore(to, &state, source));
        if copied && self.truncate(to, tokens) {
            Ok(())
        } else {
            self.clear(to);
            Err(DecodeError::Invalid("a slot cannot be copied"))
        }
    }

    /// Returns whether a slot truncated to its first `tokens` tokens holds every position that the token after them
    /// attends to (D-48).
    pub(in super::super) fn can_resume(&self, slot: u32, tokens: u32) -> bool {
        let Some(&held) = self.cells_held.get(slot as usize) else {
            return false;
        };
        if tokens == 0 || tokens >= held {
            // Nothing is attended to, or nothing is truncated: llama.cpp retains the window at the end of a sequence
            // itself.
            return tokens <= held;
        }
        if self.recurrent || self.window == 0 {
            return !self.recurrent;
        }
        // SAFETY: the memory lives with its context, and the slot is in range; the call only reads.
        let oldest =
            unsafe { sys::llama_memory_seq_pos_min(self.memory.as_ptr(), slot.cast_signed()) };
        // The token at position `tokens` attends to itself and the `window - 1` before it; layers that attend to chunks
        // or to half of the window on either side attend to fewer.
        let first = (tokens + 1).saturating_sub(self.window);
        u32::try_from(oldest).is_ok_and(|oldest| oldest <= first)
    }

    /// Truncates a slot to its first `tokens` tokens; returns false if this model cannot.
    pub(in super::super) fn truncate(&mut self, slot: u32, tokens: u32) -> bool {
        let Some(held) = self.cells_held.get_mut(slot as usize) else {
            return false;
        };
        if tokens >= *held {
            return tokens == *held;
        }
        // Removing everything never fails, even on models where removing a part does.
        let from = if tokens == 0 {
            -1
        } else {
            tokens.cast_signed()
        };
        // SAFETY: the memory lives with its context, and the slot is in range.
        let done =
            unsafe { sys::llama_memory_seq_rm(self.memory.as_ptr(), slot.cast_signed(), from, -1) };
        if done {
            *held = tokens;
            self.forget_shared_window(slot);
        }
        done
    }

    /// Returns whether every decoded token scans the cells of all slots.
    pub(in super::super) fn scans_all_cells(&self) -> bool {
        self.cells_per_slot.is_none() && !self.recurrent
    }

    /// Returns how often a token looks at each cell: once for each head of each layer.
    pub(in super::super) fn scan_steps(&self) -> u64 {
        self.model.facts().heads
    }

    /// Returns whether a restored slot can be truncated to any number of tokens and continue there. The window of
    /// sliding-window layers is saved where it stands.
    pub(in super::super) fn restores_in_part(&self) -> bool {
        !self.recurrent && self.window == 0
    }

    /// Empties a slot, whatever state llama.cpp left there after a failure.
    pub(in super::super) fn clear(&mut self, slot: u32) {
        if let Some(held) = self.cells_held.get_mut(slot as usize) {
            *held = 0;
            // SAFETY: as in `truncate`.
            unsafe { sys::llama_memory_seq_rm(self.memory.as_ptr(), slot.cast_signed(), -1, -1) };
        }
        self.forget_shared_window(slot);
    }

    /// Returns the number of tokens in a slot.
    pub(in super::super) fn cells_held(&self, slot: u32) -> u32 {
        self.cells_held.get(slot as usize).copied().unwrap_or(0)
    }
}

impl Drop for LlamaContext {
    fn drop(&mut self) {
        // SAFETY: the only owner; model, flag and pool are dropped afterwards.
        unsafe { sys::llama_free(self.context.as_ptr()) };
    }
}

/// Called by ggml's first thread before each node of the graph; returns true to abort.
pub(super) unsafe extern "C" fn on_poll(data: *mut c_void) -> bool {
    // SAFETY: the address of the context's `DecodeSignals`, which its `Arc` keeps alive.
    unsafe { &*data.cast::<DecodeSignals>() }.pulse()
}
