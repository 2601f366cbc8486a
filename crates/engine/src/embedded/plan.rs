//! [`LoadPlan`]: the sizes of a context, from the options and the header of a model.

use super::kind::architecture;
use super::llama::{self, ContextSize, ThreadLimits};
use super::load::LoadOptions;
use super::load_error::LoadError;
use super::memory::{self, CacheTypes, Estimate, MemoryReservation};
use super::window::SlidingWindow;
use crate::gguf::GgufHeader;
use crate::gguf::checks::CONTEXT_TOKENS_MAX;
use crate::llama_options::{BATCH_TOKENS_MAX, FlashAttention, GpuLayers, LlamaOptions};

/// The sizes that the options give for one model.
pub(super) struct LoadPlan {
    pub(super) context_tokens: u32,
    /// The size with a unified KV cache.
    pub(super) together: ContextSize,
    /// The size with a per-slot KV cache, if there are enough cells.
    pub(super) per_slot: Option<ContextSize>,
    /// It was chosen because there is memory to spare, not asked for.
    has_spare_cells: bool,
    pub(super) cache_types: CacheTypes,
    pub(super) batch: BatchReason,
    /// Layers of the model.
    layers: u32,
}

/// Why batches have the size that they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchReason {
    /// It was asked for.
    Configured,
    /// The CPU computes some of the layers, or all.
    Cpu,
    /// A GPU computes all layers, and prompts faster with more tokens at a time.
    WholeOnGpu,
}

impl BatchReason {
    /// The reason without a GPU.
    fn of(options: &LlamaOptions) -> Self {
        match options.batch_tokens.or(options.ubatch_tokens) {
            Some(_) => Self::Configured,
            None => Self::Cpu,
        }
    }

    /// Returns the tokens of a batch unless they are asked for.
    fn default_tokens(self) -> u32 {
        match self {
            Self::WholeOnGpu => BATCH_TOKENS_GPU,
            Self::Configured | Self::Cpu => BATCH_TOKENS_DEFAULT,
        }
    }
}

impl LoadPlan {
    pub(super) fn new(header: &GgufHeader, options: &LoadOptions) -> Result<Self, LoadError> {
        check_options(options)?;
        let cache_types = CacheTypes::new(&options.llama);
        check_blocks(header, cache_types)?;
        let layouts = CacheLayouts {
            header,
            options,
            cache_types,
            context_tokens: context_tokens(header, options),
            window: SlidingWindow::of(header),
            batch: BatchReason::of(&options.llama),
        };
        Ok(Self::of(&layouts))
    }

    fn of(layouts: &CacheLayouts<'_>) -> Self {
        Self {
            context_tokens: layouts.context_tokens,
            together: layouts.unified(),
            per_slot: layouts.per_slot(),
            has_spare_cells: layouts.affordable_slots() < layouts.options.parallel,
            cache_types: layouts.cache_types,
            batch: layouts.batch,
            layers: layers(layouts.header),
        }
    }

    /// Enlarges batches where a GPU, of whose memory another model will take so many bytes, computes all layers with those too.
    pub(super) fn suit_gpu(
        &mut self,
        header: &GgufHeader,
        options: &LoadOptions,
        adapter_bytes: u64,
        taken: u64,
    ) {
        let free = llama::gpu_memory(&options.llama).map(|free| free.saturating_sub(taken));
        self.suit_gpu_with(free, header, options, adapter_bytes);
    }

    /// The same with this much free memory of GPUs; `None` without one.
    fn suit_gpu_with(
        &mut self,
        free: Option<u64>,
        header: &GgufHeader,
        options: &LoadOptions,
        adapter_bytes: u64,
    ) {
        let Some(free) = free.filter(|_| self.batch == BatchReason::Cpu) else {
            return;
        };
        let larger = Self::of(&CacheLayouts {
            header,
            options,
            cache_types: self.cache_types,
            context_tokens: self.context_tokens,
            window: SlidingWindow::of(header),
            batch: BatchReason::WholeOnGpu,
        });
        let estimate = larger.estimate(header, options, adapter_bytes);
        let (asked, _) = offload_to(Some(free), estimate, self.layers, &options.llama);
        // As many as are asked for need not fit, and a larger batch would be one reason more.
        let fitting = estimate.layers_that_fit(self.layers, free);
        let is_whole = asked.min(fitting) > self.layers;
        if is_whole && !has_placements(&options.llama) {
            *self = larger;
        }
    }

    /// Whether slots have cells of their own because there is memory to spare.
    pub(super) fn has_spare_cells(&self) -> bool {
        self.has_spare_cells
    }

    /// Takes back what was chosen because there is memory to spare.
    pub(super) fn save_memory(&mut self) {
        if self.has_spare_cells {
            self.per_slot = None;
        }
    }

    /// Returns the estimate of the memory that the model needs with adapters of so many bytes, that of GPUs too.
    pub(super) fn estimate(
        &self,
        header: &GgufHeader,
        options: &LoadOptions,
        adapter_bytes: u64,
    ) -> Estimate {
        let size = self.per_slot.unwrap_or(self.together);
        let mut estimate = Estimate::new(header, size, self.cache_types);
        // llama.cpp puts each of their tensors where the one is that it is added to.
        estimate.weights = estimate.weights.saturating_add(adapter_bytes);
        if options.llama.flash_attn == Some(FlashAttention::Off) {
            let scores = memory::score_bytes(header, size);
            estimate.pass = estimate.pass.saturating_add(scores);
        }
        estimate
    }

    /// Returns how many layers a GPU computes, where another model will take so many bytes of its memory, and the estimate of
    /// the memory that the model, with adapters of so many bytes, needs beside it.
    pub(super) fn offload(
        &self,
        header: &GgufHeader,
        options: &LoadOptions,
        adapter_bytes: u64,
        taken: u64,
    ) -> (u32, Estimate) {
        let free = llama::gpu_memory(&options.llama).map(|free| free.saturating_sub(taken));
        let estimate = self.estimate(header, options, adapter_bytes);
        offload_to(free, estimate, self.layers, &options.llama)
    }

    /// Reserves the memory that the model will need, until it is loaded and the system counts it. If models that are
    /// being loaded leave too little, waits for them.
    pub(super) fn reserve_memory(
        &self,
        estimate: Estimate,
        options: &LoadOptions,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<MemoryReservation, LoadError> {
        let size = self.per_slot.unwrap_or(self.together);
        reserve(estimate, size.cells, FEWER_CELLS, options, progress)
    }
}

/// The layouts of the KV cache that a model can have.
struct CacheLayouts<'a> {
    header: &'a GgufHeader,
    options: &'a LoadOptions,
    cache_types: CacheTypes,
    context_tokens: u32,
    window: Option<SlidingWindow>,
    batch: BatchReason,
}

impl CacheLayouts<'_> {
    /// The cells of all slots together.
    fn cells(&self) -> u32 {
        let all = self.context_tokens.saturating_mul(self.options.parallel);
        let wanted = self.options.cache_tokens;
        wanted
            .unwrap_or_else(|| all.min(CACHE_TOKENS_DEFAULT_MAX))
            // `Capacity` promises room for one sequence of full length; without it some requests could never run.
            .max(self.context_tokens)
            .min(CONTEXT_TOKENS_MAX)
    }

    /// Slots for running sequences and, unless it is set otherwise, so many cached prefixes.
    fn slots(&self, kept_prefixes: u32) -> u32 {
        let kept = self.options.kept_prefixes.unwrap_or(kept_prefixes);
        let slots = self.options.parallel.saturating_add(kept);
        slots.min(llama::SLOTS_MAX)
    }

    fn size(&self, cells: u32, per_slot: bool, slots: u32) -> ContextSize {
        let LoadOptions { llama, .. } = self.options;
        let (batch_tokens, ubatch_tokens) = batch_sizes(llama, self.batch.default_tokens());
        let size = ContextSize {
            cells,
            per_slot,
            // A batch is at most the cache, which would grow with it otherwise. llama.cpp asserts that either has room for
            // one row per slot.
            batch_tokens: batch_tokens.min(cells).max(slots),
            ubatch_tokens: ubatch_tokens.min(cells).max(slots),
            slots,
            threads: ThreadLimits {
                decode: self.options.threads,
                prefill: self.options.threads_batch.or(self.options.threads),
            },
            poll: self.options.poll,
            swa_full: true,
        };
        windowed(size, self.window, llama.swa_full)
    }

    /// All slots share the cells.
    fn unified(&self) -> ContextSize {
        let of = |kept_prefixes| self.size(self.cells(), false, self.slots(kept_prefixes));
        // Each cached prefix needs a window, and others are kept in memory.
        let few = of(KEPT_PREFIXES_WINDOWED);
        if few.swa_full || self.window.is_none() {
            of(KEPT_PREFIXES_DEFAULT)
        } else {
            few
        }
    }

    /// Every slot has cells of its own; `None` if that takes too many, or is no gain.
    fn per_slot(&self) -> Option<ContextSize> {
        // They have a state for each slot instead of cells, or of most of them.
        let has_cells = memory::state_bytes(self.header) == 0;
        let size = self.cells_for_each().filter(|_| has_cells);
        // Windows alone save more than cells of their own would gain.
        size.filter(|size| self.window.is_none() || !size.swa_full || self.unified().swa_full)
    }

    /// The size with cells for the whole context of every slot: a unified cache lets a long sequence use what short ones leave.
    fn cells_for_each(&self) -> Option<ContextSize> {
        let options = self.options;
        let of = |slots: u32| {
            let cells = self.slot_cells().saturating_mul(slots);
            self.size(cells, true, slots)
        };
        let affordable = self.affordable_slots();
        if affordable >= options.parallel {
            return Some(of(self.slots(KEPT_PREFIXES_DEFAULT).min(affordable)));
        }
        if options.cache_tokens.is_some() || options.kept_prefixes.is_some() {
            return None;
        }
        // Cached prefixes need no slots: where cells cost memory, they are saved and restored.
        let running = of(options.parallel);
        is_spare(self.header, options, running, self.cache_types).then_some(running)
    }

    /// How many slots can have cells of their own, without any that are chosen because there is memory to spare.
    fn affordable_slots(&self) -> u32 {
        let cell_bytes = memory::cell_bytes(self.header, self.cache_types).max(1);
        let small = u32::try_from(CACHE_BYTES_SMALL / cell_bytes).unwrap_or(CONTEXT_TOKENS_MAX);
        let cells = self.options.cache_tokens;
        cells.unwrap_or_else(|| self.cells().max(small)) / self.slot_cells()
    }

    /// llama.cpp rounds each slot up to this, so the number of slots is computed with the rounded size.
    fn slot_cells(&self) -> u32 {
        self.context_tokens.next_multiple_of(llama::CELLS_STEP)
    }
}

/// Returns a size with the cells of sliding-window layers, as `swa_full` asks for them or by their number.
fn windowed(
    size: ContextSize,
    window: Option<SlidingWindow>,
    swa_full: Option<bool>,
) -> ContextSize {
    let ubatch_tokens = match window {
        // Computed at once, see `ContextSize::computes_in_parts`.
        Some(_) if !size.per_slot => size.batch_tokens,
        _ => size.ubatch_tokens,
    };
    let size = ContextSize {
        ubatch_tokens,
        ..size
    };
    let few = match swa_full {
        Some(full) => !full && !size.computes_in_parts(),
        None => window.is_some_and(|window| window.is_small(size)),
    };
    ContextSize {
        swa_full: !few,
        ..size
    }
}

/// Returns how many of a model's layers a GPU computes, and the estimate of the memory that is needed beside it.
pub(super) fn offload(estimate: Estimate, layers: u32, options: &LlamaOptions) -> (u32, Estimate) {
    let free = llama::gpu_memory(options);
    offload_to(free, estimate, layers, options)
}

/// The same with this much free memory of GPUs; `None` without one.
fn offload_to(
    free: Option<u64>,
    estimate: Estimate,
    layers: u32,
    options: &LlamaOptions,
) -> (u32, Estimate) {
    let all = layers.saturating_add(1);
    let offloaded = match (options.gpu_layers.unwrap_or(GpuLayers::Auto), free) {
        // Whatever is asked for: the CPU computes all of it.
        (_, None) => 0,
        (GpuLayers::Auto, Some(free)) => estimate.layers_that_fit(layers, free),
        (GpuLayers::All, Some(_)) => all,
        (GpuLayers::Number(number), Some(_)) => number.min(all),
    };
    let mut beside = estimate.without_layers(offloaded, layers);
    // Any tensor of a layer may be in the memory of the machine.
    if has_placements(options) {
        beside.weights = estimate.weights;
    }
    (offloaded, beside)
}

/// Whether tensors are placed by their names.
fn has_placements(options: &LlamaOptions) -> bool {
    let placed = options.override_tensor.as_ref();
    placed.is_some_and(|placed| !placed.is_empty())
}

/// Reserves what a model is estimated to need, `cells` of it KV cells. If models that are being loaded leave too little, waits
/// for them. `smaller`: what would make it need less, for the error.
pub(super) fn reserve(
    estimate: Estimate,
    cells: u32,
    smaller: &'static str,
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<MemoryReservation, LoadError> {
    // While it waits for memory, a load reports no progress, but it can be stopped.
    let mut wait = || progress(0.0);
    let available = || options.memory_bytes.or_else(memory::available);
    match MemoryReservation::take(estimate.total(), available, &mut wait) {
        Ok(reserved) => Ok(reserved),
        Err(memory::OutOfMemory::Stopped) => Err(LoadError::Stopped),
        Err(memory::OutOfMemory::Of(available)) => Err(LoadError::Memory {
            need: estimate.total(),
            weights: estimate.weights,
            cache: estimate.cache,
            cells,
            available,
            smaller,
        }),
    }
}

/// The context alone would change nothing: slots share as many cells, unless `ctx` for each of them is less.
const FEWER_CELLS: &str = "fewer KV cells (--cache-tokens, at least the context) or a smaller type of them (--cache-type-k q8_0 \
                           --cache-type-v q8_0)";

/// Checks what does not depend on the model.
pub(super) fn check_options(options: &LoadOptions) -> Result<(), LoadError> {
    let refused = |why: &str| Err(LoadError::Option(why.to_owned()));
    if options.parallel == 0 || options.parallel >= llama::SLOTS_MAX {
        return refused("parallel must be from 1 to 255");
    }
    if options.context_tokens == Some(0)
        || options.threads == Some(0)
        || options.threads_batch == Some(0)
    {
        return refused("context and threads must be at least 1");
    }
    options.llama.check().map_err(LoadError::Option)
}

/// Checks that the numbers of a head are whole blocks of the KV cache's types, as ggml asserts.
pub(super) fn check_blocks(header: &GgufHeader, types: CacheTypes) -> Result<(), LoadError> {
    let Some((key, value)) = memory::head_sizes(header) else {
        return Ok(());
    };
    for (name, kind, numbers) in [
        ("cache_type_k", types.keys, key),
        ("cache_type_v", types.values, value),
    ] {
        let (block, _) = kind.block();
        if !numbers.is_multiple_of(block) {
            return Err(LoadError::Option(format!(
                "{name}: {} has blocks of {block} numbers, and a head of this model has {numbers}: choose f16, bf16 or f32",
                kind.name()
            )));
        }
    }
    Ok(())
}

/// Returns the context of a sequence.
fn context_tokens(header: &GgufHeader, options: &LoadOptions) -> u32 {
    let trained = header.number(&format!("{}.context_length", architecture(header)));
    // If the model does not state its context length, the requested one is used.
    let trained = trained
        .and_then(|tokens| u32::try_from(tokens).ok())
        .filter(|&tokens| tokens > 0);
    let trained = trained.unwrap_or(u32::MAX).min(CONTEXT_TOKENS_MAX);
    // Not the whole trained context by default: its cache would not fit on a small machine.
    let wanted = options.context_tokens.unwrap_or_else(|| trained.min(8192));
    // Output at positions that a model was not trained for is useless, so a longer context is offered only if positions
    // are scaled.
    let most = match options.llama.scales_positions() {
        true => CONTEXT_TOKENS_MAX,
        false => trained,
    };
    if wanted > most {
        tracing::warn!(
            wanted,
            used = most,
            "the configured context is longer than the model was trained for: using the shorter one; rope_scaling extends it"
        );
    }
    wanted.min(most)
}

/// Returns the sizes of a batch, and of the part of it that is computed at a time.
fn batch_sizes(options: &LlamaOptions, default: u32) -> (u32, u32) {
    let batch = options
        .batch_tokens
        .unwrap_or_else(|| default.max(options.ubatch_tokens.unwrap_or(0)))
        .min(BATCH_TOKENS_MAX);
    (batch, options.ubatch_tokens.unwrap_or(batch).min(batch))
}

/// Returns the tokens of a batch of a model that embeds.
pub(super) fn batch_tokens(options: &LlamaOptions) -> u32 {
    batch_sizes(options, BATCH_TOKENS_DEFAULT).0
}

/// Returns the number of layers.
pub(super) fn layers(header: &GgufHeader) -> u32 {
    let layers = header.number(&format!("{}.block_count", architecture(header)));
    layers
        .and_then(|layers| u32::try_from(layers).ok())
        .unwrap_or(0)
}

const KEPT_PREFIXES_DEFAULT: u32 = 32;
/// The same where each needs cells of its own in sliding-window layers.
const KEPT_PREFIXES_WINDOWED: u32 = 8;
const CACHE_TOKENS_DEFAULT_MAX: u32 = 16_384;

/// What a KV cache may take so that every slot has cells of its own.
struct SpareBytes {
    cache: u64,
    /// Of the machine, for the whole model.
    available: u64,
}

/// Returns the size up to which a KV cache is enlarged by default, so that every slot has cells of its own. Attention over a
/// unified cache scans the cells of all sequences: with a model of 135 million parameters and eight streams that was 7 to 25 %
/// of their speed. Models whose cells are too large for this spend a smaller part of their time there.
fn spare_bytes(options: &LoadOptions) -> SpareBytes {
    let available = options.memory_bytes.or_else(memory::available);
    let available = available.unwrap_or(0);
    let cache = match llama::gpu_memory(&options.llama) {
        // The cache would take the memory of layers there.
        Some(_) => 0,
        None => (available / CACHE_MEMORY_SHARE).min(CACHE_BYTES_SPARE),
    };
    SpareBytes { cache, available }
}

/// Returns whether there is so much memory to spare for a cache of this size, and for the model with it.
fn is_spare(
    header: &GgufHeader,
    options: &LoadOptions,
    size: ContextSize,
    types: CacheTypes,
) -> bool {
    let spare = spare_bytes(options);
    let cells = spare.cache / memory::cell_bytes(header, types).max(1);
    let estimate = Estimate::new(header, size, types);
    u64::from(size.cells) <= cells && estimate.total() <= spare.available
}

/// A KV cache is enlarged to at most one part in so many of the memory that is available.
const CACHE_MEMORY_SHARE: u64 = 8;
/// And to as much as this, whatever the machine has: all of it is resident once every slot has had a context of full length.
const CACHE_BYTES_SPARE: u64 = 2 << 30;
/// So small a KV cache is no burden to any machine.
const CACHE_BYTES_SMALL: u64 = 128 << 20;
const BATCH_TOKENS_DEFAULT: u32 = 512;
/// The same where a GPU computes everything: with few tokens at a time it waits for its memory.
const BATCH_TOKENS_GPU: u32 = 2_048;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::random::{RandomModelShape, write};
    use super::super::work_buffer::product_bytes;
    use super::*;
    use crate::gguf::checks;
    use crate::llama_options::OverrideValue;

    fn header() -> GgufHeader {
        let mut bytes = Vec::new();
        write(&mut bytes, &RandomModelShape::tiny(), 1).unwrap();
        GgufHeader::read(&bytes[..]).unwrap()
    }

    fn options(text: &str) -> LoadOptions {
        LoadOptions {
            llama: serde_json::from_str(text).unwrap(),
            context_tokens: Some(256),
            cache_tokens: Some(1024),
            kept_prefixes: Some(0),
            parallel: 4,
            ..LoadOptions::default()
        }
    }

    #[test]
    fn layers_leave_the_memory_of_the_machine_only_for_a_gpu() {
        let whole = Estimate {
            weights: 3000,
            cache: 300,
            pass: 50,
            copies: 0,
            work: 0,
        };
        let of = |free, text: &str| {
            let (layers, beside) = offload_to(free, whole, 2, &options(text).llama);
            (layers, beside.weights, beside.cache)
        };
        for text in ["{}", r#"{"gpu_layers": "all"}"#, r#"{"gpu_layers": 99}"#] {
            assert_eq!(of(None, text), (0, 3000, 300), "{text}");
            assert_eq!(of(Some(1 << 40), text), (3, 0, 0), "{text}");
        }
        assert_eq!(of(Some(0), r#"{"gpu_layers": 1}"#), (1, 2000, 200));
        let placed = r#"{"gpu_layers": "all", "override_tensor": ["exps=CPU"]}"#;
        assert_eq!(of(Some(1 << 40), placed), (3, 3000, 0));
    }

    #[test]
    fn slots_have_cells_of_their_own_where_these_are_a_small_part_of_the_memory() {
        let header = header();
        let options = |memory_bytes| LoadOptions {
            memory_bytes: Some(memory_bytes),
            // Positions are scaled, so that even a tiny model has a cache of some size.
            context_tokens: Some(1 << 17),
            llama: serde_json::from_str(r#"{"rope_scaling": "linear"}"#).unwrap(),
            parallel: 8,
            ..LoadOptions::default()
        };
        let plan = |memory_bytes| LoadPlan::new(&header, &options(memory_bytes)).unwrap();
        let cell = memory::cell_bytes(&header, plan(0).cache_types);
        let all = cell * 8 * u64::from(plan(0).context_tokens);
        assert!(
            (CACHE_BYTES_SMALL..CACHE_BYTES_SPARE).contains(&all),
            "{all}"
        );
        let of = |memory_bytes| plan(memory_bytes).per_slot.map(|size| size.cells);
        assert_eq!(of(all * CACHE_MEMORY_SHARE - cell * 8), None);
        assert_eq!(of(all * CACHE_MEMORY_SHARE), Some(8 << 17));
        let slots = plan(u64::MAX).per_slot.map(|size| size.slots);
        assert_eq!(slots, Some(8), "saved prefixes need none");
        assert_eq!(spare_bytes(&options(u64::MAX)).cache, CACHE_BYTES_SPARE);
        let whole = |change: fn(&mut LoadOptions)| {
            let mut options = options(u64::MAX);
            change(&mut options);
            LoadPlan::new(&header, &options).unwrap().per_slot.is_some()
        };
        assert!(whole(|_| {}));
        assert!(
            !whole(|options| options.kept_prefixes = Some(4)),
            "as asked"
        );
        assert!(!whole(|options| options.cache_tokens = Some(1 << 18)));
        let mut spare = plan(u64::MAX);
        spare.save_memory();
        assert!(spare.per_slot.is_none());
        let mut asked = LoadPlan::new(&header, &self::options("{}")).unwrap();
        asked.save_memory();
        assert!(asked.per_slot.is_some(), "as asked");
    }

    #[test]
    fn without_flash_attention_the_scores_of_every_head_count() {
        let of = |text| {
            let options = options(text);
            let plan = LoadPlan::new(&header(), &options).unwrap();
            plan.offload(&header(), &options, 0, 0).1.pass
        };
        let (heads, plan) = (
            u64::from(RandomModelShape::tiny().heads),
            LoadPlan::new(&header(), &options("{}")).unwrap(),
        );
        let size = plan.per_slot.unwrap_or(plan.together);
        let scores = u64::from(size.ubatch_tokens) * u64::from(size.reach()) * heads * 4;
        let fused = of(r#"{"flash_attn": "on"}"#);
        assert_eq!(of(r#"{"flash_attn": "off"}"#) - fused, scores);
        assert_eq!(of("{}"), fused);
    }

    #[test]
    fn the_work_buffer_for_a_default_ubatch_of_the_widest_rows_counts() {
        let shape = RandomModelShape {
            inner: 2048,
            ..RandomModelShape::tiny()
        };
        let mut bytes = Vec::new();
        write(&mut bytes, &shape, 1).unwrap();
        let header = GgufHeader::read(&bytes[..]).unwrap();
        let of = |text| {
            let options = LoadOptions {
                threads: Some(3),
                ..options(text)
            };
            let plan = LoadPlan::new(&header, &options).unwrap();
            plan.estimate(&header, &options, 0).work
        };
        assert_eq!(of("{}"), product_bytes(2048, 512, 3));
        let fewer = of(r#"{"ubatch_tokens": 128}"#);
        assert_eq!(fewer, product_bytes(2048, 128, 3));
    }

    /// `cache_tokens` and `kept_prefixes`, the option; whether windowed layers have all cells, and the slots.
    #[test]
    fn windows_alone_are_kept_where_that_saves_a_quarter_of_the_cells() {
        let mut bytes = Vec::new();
        let shape = RandomModelShape {
            sliding_window: 128,
            ..RandomModelShape::tiny_windowed()
        };
        write(&mut bytes, &shape, 1).unwrap();
        let windowed = GgufHeader::read(&bytes[..]).unwrap();
        let of = |header: &GgufHeader, cells, kept, swa_full| {
            let options = LoadOptions {
                cache_tokens: Some(cells),
                kept_prefixes: kept,
                llama: LlamaOptions {
                    swa_full,
                    ..LlamaOptions::default()
                },
                context_tokens: Some(512),
                parallel: 4,
                ..LoadOptions::default()
            };
            let plan = LoadPlan::new(header, &options).unwrap();
            let size = plan.per_slot.unwrap_or(plan.together);
            (size.swa_full, size.slots)
        };
        // 12 windows and the batch, in a cache for all slots; with cells of their own these would have as many as the others.
        assert_eq!(of(&windowed, 4096, None, None), (false, 12));
        assert_eq!(of(&windowed, 4096, None, Some(true)), (true, 8));
        assert_eq!(of(&windowed, 2047, None, None), (true, 36));
        assert_eq!(of(&windowed, 2047, Some(0), None), (false, 4));
        assert_eq!(of(&windowed, 2047, None, Some(false)), (false, 12));
        assert_eq!(of(&windowed, 2047, Some(0), Some(true)), (true, 4));
        assert_eq!(of(&header(), 2047, None, None), (true, 36));
        // What has no window is not laid out otherwise.
        assert_eq!(of(&header(), 2047, None, Some(false)), (false, 36));
    }

    /// Free memory of the GPU, options; tokens of a batch and of its parts.
    #[test]
    fn batches_are_larger_where_a_gpu_computes_all_layers() {
        let of = |free, text: &str| {
            let options = LoadOptions {
                cache_tokens: None,
                context_tokens: Some(512),
                parallel: 8,
                ..options(text)
            };
            let mut plan = LoadPlan::new(&header(), &options).unwrap();
            plan.suit_gpu_with(free, &header(), &options, 0);
            let size = plan.per_slot.unwrap_or(plan.together);
            (size.batch_tokens, size.ubatch_tokens, plan.batch)
        };
        let (cpu, asked) = (BatchReason::Cpu, BatchReason::Configured);
        let (much, whole) = (Some(1 << 40), (2048, 2048, BatchReason::WholeOnGpu));
        assert_eq!(of(None, "{}"), (512, 512, cpu), "no GPU");
        assert_eq!(of(much, "{}"), whole);
        assert_eq!(of(much, r#"{"gpu_layers": "all"}"#), whole);
        assert_eq!(of(much, r#"{"gpu_layers": 99}"#), whole);
        assert_eq!(of(much, r#"{"gpu_layers": 2}"#), (512, 512, cpu));
        assert_eq!(of(Some(0), "{}"), (512, 512, cpu));
        assert_eq!(of(Some(0), r#"{"gpu_layers": "all"}"#), (512, 512, cpu));
        let placed = r#"{"override_tensor": ["exps=CPU"]}"#;
        assert_eq!(of(much, placed), (512, 512, cpu));
        for free in [None, much] {
            assert_eq!(of(free, r#"{"batch_tokens": 256}"#), (256, 256, asked));
            assert_eq!(of(free, r#"{"ubatch_tokens": 128}"#), (512, 128, asked));
            assert_eq!(of(free, r#"{"ubatch_tokens": 1024}"#), (1024, 1024, asked));
        }
    }

    #[test]
    fn a_batch_does_not_enlarge_the_cache() {
        let plan = LoadPlan::new(&header(), &options(r#"{"batch_tokens": 16384}"#)).unwrap();
        assert_eq!(
            (plan.together.cells, plan.together.batch_tokens),
            (1024, 1024)
        );
        let separate = plan.per_slot.unwrap();
        assert_eq!(separate.batch_tokens, separate.cells);
    }

    /// Keys whose numbers a plan reads, behind the name of the architecture.
    const KEYS: [&str; 18] = [
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "feed_forward_length",
        "shortconv.l_cache",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "token_shift_count",
        "wkv.head_size",
    ];

    fn number() -> impl Strategy<Value = i64> {
        prop_oneof![
            3 => 0..9_i64,
            3 => (0..63_u32).prop_map(|bit| 1 << bit),
            1 => any::<i64>(),
        ]
    }

    fn size() -> impl Strategy<Value = Option<u32>> {
        let size = prop_oneof![1..600_u32, any::<u32>()];
        prop::option::of(size)
    }

    proptest! {
        /// In these builds a sum that wraps around panics.
        #[test]
        fn any_numbers_give_a_plan_or_an_error(
            of in 0..5_usize,
            numbers in prop::collection::vec((0..KEYS.len(), number()), 0..4),
            parts in number(),
            sizes in (size(), size(), size(), size()),
            free in any::<u64>(),
        ) {
            let shapes = [
                RandomModelShape::tiny(),
                RandomModelShape::tiny_windowed(),
                RandomModelShape::tiny_recurrent(),
                RandomModelShape::tiny_hybrid(),
                RandomModelShape::tiny_experts(),
            ];
            let mut bytes = Vec::new();
            write(&mut bytes, &shapes[of], 1).unwrap();
            let mut header = GgufHeader::read(&bytes[..]).unwrap();
            for (key, number) in numbers {
                let key = format!("{}.{}", shapes[of].architecture, KEYS[key]);
                // A list stays as it is.
                let _ = header.replace(&key, OverrideValue::Int(number));
            }
            header.replace("split.count", OverrideValue::Int(parts)).unwrap();
            let (context_tokens, parallel, cache_tokens, kept_prefixes) = sizes;
            let options = LoadOptions {
                context_tokens,
                parallel: parallel.unwrap_or(1),
                cache_tokens,
                kept_prefixes,
                ..LoadOptions::default()
            };
            if checks::check(&header).is_ok() && let Ok(plan) = LoadPlan::new(&header, &options) {
                let estimate = plan.estimate(&header, &options, free);
                prop_assert!(estimate.total() >= header.tensor_bytes);
                let (_, beside) = offload_to(Some(free), estimate, plan.layers, &options.llama);
                prop_assert!(beside.total() <= estimate.total());
            }
        }
    }
}
