//! Loads a model: first all checks that do not need llama.cpp, then the model with llama.cpp, then a context.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checks::CONTEXT_TOKENS_MAX;
use super::kind::{architecture, is_encoder};
use super::llama::{ContextSize, ThreadLimits};
use super::load_error::LoadError;
use super::memory::{self, Estimate, MemoryReservation, readable};
use super::vocabulary::LlamaVocabulary;
use super::{Embedded, checks, llama};
use crate::api::ModelInfo;
use crate::gguf::{self, GgufHeader};
use crate::recommended::RecommendedSampling;

/// The source of a model.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A GGUF file.
    File(PathBuf),
    /// A GGUF file embedded in the program.
    Bytes(&'static [u8]),
}

impl ModelSource {
    /// Returns the path that messages name.
    fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Bytes(_) => Path::new("the model in this program"),
        }
    }

    /// Reads and checks the header.
    pub(super) fn header(&self) -> Result<GgufHeader, LoadError> {
        match self {
            Self::File(path) => header_of_file(path),
            Self::Bytes(bytes) => header_of(*bytes, bytes.len() as u64, self.path()),
        }
    }
}

/// Options of loading a model. The defaults suit a small machine.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The maximum of tokens of a sequence. `None`: what the model was trained for, at most 8,192. More than it was
    /// trained for is reduced to that, with a warning.
    pub context_tokens: Option<u32>,
    /// KV cells: tokens that all sequences and cached prefixes hold together. `None`: `context_tokens` for each of
    /// `parallel`, but at most 16,384 unless one sequence alone needs more, or the whole cache takes at most 128 MiB.
    ///
    /// If this has room for `context_tokens` of each of `parallel` sequences, the KV cache is per slot: every sequence,
    /// and every cached prefix for which there is room, has its own cells, and a token attends over its own sequence's
    /// cells only. Otherwise the KV cache is unified: all sequences share all cells, and every token's attention scans
    /// the cells of all sequences, though cheaply.
    pub cache_tokens: Option<u32>,
    /// Sequences in one batch; 1 to 255.
    pub parallel: u32,
    /// The number of cached prefixes in addition to `parallel`, within 256 slots and, with a per-slot KV cache, the
    /// size of the cache. `None`: 32, or as many as there is room for; fewer than requested cause a warning.
    pub kept_prefixes: Option<u32>,
    /// The maximum of tokens of one batch.
    pub batch_tokens: u32,
    /// Threads of a decode call that computes the last token of each sequence. `None`: as many as are fastest, by what
    /// calls took; at most the processor cores that this process may use. With a fixed number, equal batches give equal
    /// logits.
    pub threads: Option<u32>,
    /// Threads of a decode call with prompt tokens. `None`: `threads` if that is given, else as for `threads`.
    pub threads_batch: Option<u32>,
    /// How long idle worker threads spin before they sleep: from 0, not at all, to 100. By default 1, some milliseconds:
    /// they then stay awake from one step to the next of a stream, and each keeps its processor. A thread that has slept is
    /// often woken on the processor of the thread that waits for it.
    pub poll: u32,
    /// Layers to compute on a GPU; needs a cargo feature for one.
    pub gpu_layers: u32,
    /// Map the file instead of reading it: faster to start, and shared between processes.
    pub mmap: bool,
    /// The maximum of bytes of memory that may be used. `None`: what the system has available.
    pub memory_bytes: Option<u64>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            context_tokens: None,
            cache_tokens: None,
            parallel: 16,
            kept_prefixes: None,
            batch_tokens: 512,
            threads: None,
            threads_batch: None,
            poll: 1,
            gpu_layers: 0,
            mmap: true,
            memory_bytes: None,
        }
    }
}

impl LoadOptions {
    /// Checks what any model needs.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        if self.parallel == 0 || self.parallel >= llama::SLOTS_MAX {
            return Err(LoadError::Option("parallel must be from 1 to 255"));
        }
        if self.context_tokens == Some(0)
            || self.threads == Some(0)
            || self.threads_batch == Some(0)
            || self.batch_tokens == 0
        {
            return Err(LoadError::Option(
                "context, threads and batch must be at least 1",
            ));
        }
        Ok(())
    }
}

/// Loads a model under a name. `progress` is called with fractions from 0 to 1, and stops the loading by returning
/// false.
///
/// A file embedded in the program is first written to an unnamed file in memory, because llama.cpp reads files. Mapped
/// from there it is shared like any other, and never written to a disk.
///
/// # Errors
/// [`LoadError`].
pub fn load(
    name: &str,
    source: &ModelSource,
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Embedded, LoadError> {
    // Before any function of ggml that uses the instructions: a missing one would end the process with an illegal
    // instruction.
    check_processor()?;
    let header = source.header()?;
    // All that the header decides comes before llama.cpp is involved: its own errors are less clear, and some of them
    // end the process.
    let plan = LoadPlan::new(&header, options)?;
    // Held until this function returns: by then the memory is in use, and the system counts it itself.
    let _reserved = plan.reserve_memory(&header, options, progress)?;
    let model = weights(source, &header, options, progress)?;
    serve(name, &header, model, &plan, options)
}

/// Loads the weights and the vocabulary.
pub(super) fn weights(
    source: &ModelSource,
    header: &GgufHeader,
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Arc<llama::LlamaModel>, LoadError> {
    let backend = llama::LlamaBackend::start();
    let mut stopped = false;
    // llama.cpp reports a stopped load like any other failure, so the reason is kept here.
    let mut received = |fraction: f32| {
        stopped = !progress(fraction);
        !stopped
    };
    let staged;
    let path = match source {
        ModelSource::File(path) => path.as_path(),
        ModelSource::Bytes(bytes) => {
            let path = source.path().to_owned();
            staged =
                StagedFile::new(bytes).map_err(|error| LoadError::Unreadable { path, error })?;
            &staged.path
        }
    };
    let loaded = llama::LlamaModel::load(
        backend,
        path,
        options.gpu_layers,
        options.mmap,
        &mut received,
    );
    match loaded {
        Ok(model) => Ok(Arc::new(model)),
        Err(_) if stopped => Err(LoadError::Stopped),
        // llama.cpp has no code for this, only its log message.
        Err(why) if why.contains("unknown model architecture") => {
            Err(LoadError::Architecture(architecture(header).to_owned()))
        }
        Err(why) => Err(LoadError::Llama(why)),
    }
}

/// Reads the recommended sampling parameters (D-53).
pub(super) fn recommended(header: &GgufHeader) -> RecommendedSampling {
    let fraction = |name: &str| header.fraction(&format!("general.sampling.{name}"));
    let number = |name: &str| header.number(&format!("general.sampling.{name}"));
    let recommended = RecommendedSampling {
        temperature: fraction("temp"),
        top_k: number("top_k").and_then(|top_k| u32::try_from(top_k).ok()),
        top_p: fraction("top_p"),
        min_p: fraction("min_p"),
        repetition_penalty: fraction("penalty_repeat"),
        // -1, all tokens, is what it is without a recommendation.
        penalty_last_n: number("penalty_last_n").and_then(|last| i32::try_from(last).ok()),
        xtc_probability: fraction("xtc_probability"),
        xtc_threshold: fraction("xtc_threshold"),
        mirostat: number("mirostat").and_then(|version| u32::try_from(version).ok()),
        mirostat_tau: fraction("mirostat_tau"),
        mirostat_eta: fraction("mirostat_eta"),
    };
    recommended.valid()
}

fn serve(
    name: &str,
    header: &GgufHeader,
    model: Arc<llama::LlamaModel>,
    plan: &LoadPlan,
    options: &LoadOptions,
) -> Result<Embedded, LoadError> {
    let architecture = architecture(header).to_owned();
    let facts = model.facts();
    // Asked of llama.cpp, which knows the kind of each architecture.
    if !facts.generates || is_encoder(header) {
        return Err(LoadError::NotGenerative(architecture));
    }
    // Recurrent models have no KV cells.
    let size = match plan.per_slot {
        Some(separate) if !facts.recurrent => separate,
        _ => plan.together,
    };
    if let Some(missing) = missing_prefixes(options, size) {
        tracing::warn!(
            model = name,
            asked = options.kept_prefixes,
            kept = size.slots - options.parallel,
            "the cache has room for fewer cached prefixes than configured: raise cache_tokens by {missing}, or lower \
             kept_prefixes"
        );
    }
    // Before the vocabulary, which shares the model with other threads: creating a context may still modify the model.
    let context = llama::LlamaContext::new(Arc::clone(&model), size).map_err(LoadError::Llama)?;
    let vocabulary = Arc::new(LlamaVocabulary::new(Arc::clone(&model), header)?);
    let saved_slots = memory::SavedSlotsLimit::take(options.memory_bytes, facts.weight_bytes);
    // Whether the model is served is decided when it is registered; this line tells how it was loaded, and why so.
    tracing::info!(
        model = name,
        kv_cache = %layout(header, plan, size, facts.recurrent),
        kv_type = "f16",
        flash_attention = "where it is supported",
        sliding_window = facts.sliding_window,
        batch = size.batch_tokens,
        threads = %size.threads,
        saved_prefixes = readable(saved_slots.bytes() as u64),
        "chose settings for this model and this machine"
    );
    let info = ModelInfo {
        name: name.to_owned(),
        architecture,
        description: facts.description,
        context_tokens: plan.context_tokens,
        vocabulary_tokens: model.size(),
        parameters: facts.parameters,
        weight_bytes: facts.weight_bytes,
        parallel: options.parallel,
        chat: vocabulary.has_template(),
        truncates: !facts.recurrent,
        deterministic: false,
        sampling: recommended(header),
    };
    let mut embedded = Embedded {
        info,
        vocabulary,
        context,
        warm_times: None,
        saved_slots,
    };
    embedded.warm_up();
    Ok(embedded)
}

/// Describes the KV cache, and why it was laid out so.
fn layout(header: &GgufHeader, plan: &LoadPlan, size: ContextSize, recurrent: bool) -> String {
    let ContextSize { cells, slots, .. } = size;
    if recurrent {
        return format!("a state for each of {slots} slots");
    }
    let each = plan.context_tokens;
    let bytes = memory::cell_bytes(header);
    if size.per_slot {
        let all = readable(bytes.saturating_mul(u64::from(cells)));
        return format!("{each} cells for each of {slots} slots, {all}");
    }
    let own = bytes
        .saturating_mul(u64::from(each))
        .saturating_mul(u64::from(slots));
    let (shared, own) = (
        readable(bytes.saturating_mul(u64::from(cells))),
        readable(own),
    );
    format!("{cells} cells for all of {slots} slots, {shared}: {each} for each would take {own}")
}

/// Returns how many KV cells are missing for the requested cached prefixes, with a per-slot KV cache.
fn missing_prefixes(options: &LoadOptions, size: ContextSize) -> Option<u32> {
    let asked = options.parallel.saturating_add(options.kept_prefixes?);
    // More than `SLOTS_MAX` is not missing cells: no cache would be large enough.
    let missing = asked.min(llama::SLOTS_MAX).saturating_sub(size.slots);
    (missing > 0).then(|| missing.saturating_mul(size.cells / size.slots.max(1)))
}

/// The sizes that the options give for one model.
pub(super) struct LoadPlan {
    pub(super) context_tokens: u32,
    /// The size with a unified KV cache.
    together: ContextSize,
    /// The size with a per-slot KV cache, if there are enough cells.
    per_slot: Option<ContextSize>,
}

impl LoadPlan {
    pub(super) fn new(header: &GgufHeader, options: &LoadOptions) -> Result<Self, LoadError> {
        options.check()?;
        let trained = header.number(&format!("{}.context_length", architecture(header)));
        // If the model does not state its context length, the requested one is used.
        let trained = trained
            .and_then(|tokens| u32::try_from(tokens).ok())
            .filter(|&tokens| tokens > 0);
        // Output at positions that a model was not trained for is useless, so a longer context is not offered.
        let most = trained.unwrap_or(u32::MAX).min(CONTEXT_TOKENS_MAX);
        // Not the whole trained context by default: its cache would not fit on a small machine.
        let wanted = options.context_tokens.unwrap_or_else(|| most.min(8192));
        if wanted > most {
            tracing::warn!(
                wanted,
                used = most,
                "the configured context is longer than the model was trained for: using the shorter one"
            );
        }
        let context_tokens = wanted.min(most);
        let all = context_tokens
            .saturating_mul(options.parallel)
            .min(CACHE_TOKENS_DEFAULT_MAX);
        let cells = options
            .cache_tokens
            .unwrap_or(all)
            // `Capacity` promises room for one sequence of full length; without it some requests could never run.
            .max(context_tokens)
            .min(CONTEXT_TOKENS_MAX);
        let kept_prefixes = options.kept_prefixes.unwrap_or(KEPT_PREFIXES_DEFAULT);
        let slots = options
            .parallel
            .saturating_add(kept_prefixes)
            .min(llama::SLOTS_MAX);
        let size = |cells, per_slot, slots| ContextSize {
            cells,
            per_slot,
            batch_tokens: options.batch_tokens.clamp(slots, BATCH_TOKENS_MAX),
            slots,
            threads: ThreadLimits {
                decode: options.threads,
                prefill: options.threads_batch.or(options.threads),
            },
            poll: options.poll,
        };
        // llama.cpp rounds each slot up to this, so the number of slots is computed with the rounded size.
        let slot_cells = context_tokens.next_multiple_of(llama::CELLS_STEP);
        let small = CACHE_BYTES_SMALL / memory::cell_bytes(header).max(1);
        let small = u32::try_from(small).unwrap_or(CONTEXT_TOKENS_MAX);
        let allowed = options.cache_tokens.unwrap_or_else(|| cells.max(small));
        let affordable = allowed / slot_cells;
        // Only if every sequence can have its full context: a unified cache lets a long one use what short ones leave.
        let per_slot = (affordable >= options.parallel).then(|| {
            let slots = slots.min(affordable);
            size(slot_cells.saturating_mul(slots), true, slots)
        });
        Ok(Self {
            context_tokens,
            together: size(cells, false, slots),
            per_slot,
        })
    }

    /// Reserves the memory that the model will need, until it is loaded and the system counts it. If models that are
    /// being loaded leave too little, waits for them.
    fn reserve_memory(
        &self,
        header: &GgufHeader,
        options: &LoadOptions,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Option<MemoryReservation>, LoadError> {
        let size = self.per_slot.unwrap_or(self.together);
        reserve(Estimate::new(header, size), size.cells, options, progress)
    }
}

/// Reserves what a model is estimated to need, `cells` of it KV cells. If models that are being loaded leave too little, waits
/// for them.
pub(super) fn reserve(
    estimate: Estimate,
    cells: u32,
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Option<MemoryReservation>, LoadError> {
    // The memory of a GPU is not known here.
    if options.gpu_layers > 0 {
        return Ok(None);
    }
    // While it waits for memory, a load reports no progress, but it can be stopped.
    let mut wait = || progress(0.0);
    let available = || options.memory_bytes.or_else(memory::available);
    match MemoryReservation::take(estimate.total(), available, &mut wait) {
        Ok(reserved) => Ok(Some(reserved)),
        Err(memory::OutOfMemory::Stopped) => Err(LoadError::Stopped),
        Err(memory::OutOfMemory::Of(available)) => Err(LoadError::Memory {
            need: estimate.total(),
            weights: estimate.weights,
            cache: estimate.cache,
            cells,
            available,
        }),
    }
}

const KEPT_PREFIXES_DEFAULT: u32 = 32;
const CACHE_TOKENS_DEFAULT_MAX: u32 = 16_384;
/// The size up to which a KV cache is enlarged by default.
const CACHE_BYTES_SMALL: u64 = 128 << 20;
const BATCH_TOKENS_MAX: u32 = 16_384;

pub(super) fn check_processor() -> Result<(), LoadError> {
    let missing: Vec<&str> = llama::compiled_for()
        .filter(|feature| !has(feature))
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(LoadError::Processor(missing.join(", ")))
    }
}

#[cfg(target_arch = "x86_64")]
fn has(feature: &str) -> bool {
    match feature {
        "AVX" => std::is_x86_feature_detected!("avx"),
        "AVX2" => std::is_x86_feature_detected!("avx2"),
        "BMI2" => std::is_x86_feature_detected!("bmi2"),
        "F16C" => std::is_x86_feature_detected!("f16c"),
        "FMA" => std::is_x86_feature_detected!("fma"),
        "AVX512F" => std::is_x86_feature_detected!("avx512f"),
        _ => true,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn has(_: &str) -> bool {
    true
}

fn header_of_file(path: &Path) -> Result<GgufHeader, LoadError> {
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => LoadError::Missing(path.to_owned()),
        _ => LoadError::Unreadable {
            path: path.to_owned(),
            error,
        },
    };
    // Checked before the file is opened: opening a pipe blocks until it has a writer.
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(LoadError::NotAFile(path.to_owned()));
    }
    let file = File::open(path).map_err(unreadable)?;
    header_of(BufReader::new(file), metadata.len(), path)
}

fn header_of(bytes: impl Read, length: u64, path: &Path) -> Result<GgufHeader, LoadError> {
    let path = path.to_owned();
    match GgufHeader::read(bytes) {
        // Checked here, because a mapped file that is too short ends the process when its missing pages are read.
        Ok(header) if header.file_bytes > length => Err(LoadError::Truncated {
            path,
            have: length,
            need: header.file_bytes,
        }),
        Ok(header) if header.text("general.architecture").is_none() => Err(LoadError::Damaged {
            path,
            why: "it names no architecture".to_owned(),
        }),
        Ok(header) => match checks::check(&header) {
            Ok(()) => Ok(header),
            Err(why) => Err(LoadError::Damaged { path, why }),
        },
        Err(gguf::Error::Magic) => Err(LoadError::NotGguf(path)),
        Err(error) => Err(LoadError::Damaged {
            path,
            why: error.to_string(),
        }),
    }
}

/// A copy of an embedded model as a file that is removed when this value is dropped. A mapping of it stays valid.
struct StagedFile {
    #[cfg(target_os = "linux")]
    _file: File,
    #[cfg(not(target_os = "linux"))]
    _file: tempfile::NamedTempFile,
    path: PathBuf,
}

impl StagedFile {
    #[cfg(target_os = "linux")]
    fn new(bytes: &[u8]) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        let descriptor =
            // The descriptor has no name that another process could open, and does not outlive this process.
            rustix::fs::memfd_create("sapwood-model", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(descriptor);
        file.write_all(bytes)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Self { _file: file, path })
    }

    #[cfg(not(target_os = "linux"))]
    fn new(bytes: &[u8]) -> io::Result<Self> {
        // Under a name of its own: other models may be loading, and a process that crashed may have left its file.
        let mut file = tempfile::NamedTempFile::with_suffix(".gguf")?;
        file.write_all(bytes)?;
        let path = file.path().to_owned();
        Ok(Self { _file: file, path })
    }
}
