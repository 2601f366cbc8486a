//! Loads a model: first all checks that do not need llama.cpp, then the model with llama.cpp, then a context.

use std::sync::Arc;

use super::draft::{self, DraftOptions};
use super::equal_answers::Circumstances;
use super::gpu_turn;
use super::identity::ModelOrigin;
use super::kind::{architecture, is_encoder};
use super::llama::ContextSize;
use super::load_error::LoadError;
use super::mapped::{self, MappedFile};
use super::memory;
use super::plan::LoadPlan;
use super::source::{ModelSource, StagedFile};
use super::start_line::StartLine;
use super::thread_log::ThreadLog;
use super::vocabulary::LlamaVocabulary;
use super::{Embedded, llama, lora};
use crate::api::ModelInfo;
use crate::gguf::GgufHeader;
use crate::llama_options::{LlamaOptions, LoraAdapter};
use crate::recommended::RecommendedSampling;

/// Options of loading a model. The defaults suit a small machine.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The maximum of tokens of a sequence. `None`: what the model was trained for, at most 8,192. More than it was
    /// trained for is reduced to that, with a warning, unless positions are scaled.
    pub context_tokens: Option<u32>,
    /// KV cells: tokens that all sequences and cached prefixes hold together. `None`: `context_tokens` for each of
    /// `parallel`, but at most 16,384 unless one sequence alone needs more, or the whole cache takes at most 128 MiB, or cells of their own for
    /// all of `parallel` take at most an eighth of the memory that is available, and 2 GiB.
    ///
    /// If this has room for `context_tokens` of each of `parallel` sequences, the KV cache is per slot: every sequence,
    /// and every cached prefix for which there is room, has its own cells, and a token attends over its own sequence's
    /// cells only. Otherwise the KV cache is unified: all sequences share all cells, and every token's attention scans
    /// the cells of all sequences, though cheaply.
    pub cache_tokens: Option<u32>,
    /// Sequences in one batch; 1 to 255.
    pub parallel: u32,
    /// The number of cached prefixes in addition to `parallel`, within 256 slots and, with a per-slot KV cache, the
    /// size of the cache. `None`: 32, or as many as there is room for, which may be none beside cells of their own for all of `parallel`; fewer than
    /// requested cause a warning.
    pub kept_prefixes: Option<u32>,
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
    /// The maximum of bytes of memory that may be used. `None`: what the system has available.
    pub memory_bytes: Option<u64>,
    /// What is passed on to llama.cpp.
    pub llama: LlamaOptions,
    /// LoRA adapters, of which requests may choose.
    pub lora: Vec<LoraAdapter>,
    /// The model that drafts for it, which is loaded with it.
    pub draft: Option<DraftOptions>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            context_tokens: None,
            cache_tokens: None,
            parallel: 16,
            kept_prefixes: None,
            threads: None,
            threads_batch: None,
            poll: 1,
            memory_bytes: None,
            llama: LlamaOptions::default(),
            lora: Vec::new(),
            draft: None,
        }
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
    // Before any function of ggml that computes: a missing instruction would end the process.
    llama::kernels()?;
    // Before the plan, which counts on what GPUs have free, and until that is taken.
    let _turn = gpu_turn::take(options, progress)?;
    let mut measured = MeasuredModel::new(source, options)?;
    let estimate = measured.estimate;
    // Held until this function returns: by then the memory is in use, and the system counts it itself.
    let _reserved = measured.plan.reserve_memory(estimate, options, progress)?;
    let draft = match (measured.draft.take(), &options.draft) {
        (Some(draft), Some(of_draft)) => {
            let own = of_draft.load_options(measured.plan.context_tokens, options);
            let name = format!("{name} (draft model)");
            let mut wait = |_| progress(0.0);
            let loaded = draft.load(&name, &of_draft.source, &own, &mut wait);
            let loaded = loaded.map_err(LoadError::of_draft)?;
            // The draft model has taken a part of the GPU's memory.
            let MeasuredModel { plan, header, .. } = &measured;
            measured.gpu_layers = plan.offload(header, options, measured.adapter_bytes, 0).0;
            Some(Box::new(loaded))
        }
        _ => None,
    };
    let mut model = measured.load(name, source, options, progress)?;
    model.draft = draft;
    Ok(model)
}

/// Loads the weights and the vocabulary.
pub(super) fn weights(
    source: &ModelSource,
    header: &GgufHeader,
    options: &LoadOptions,
    backend: llama::LlamaBackend,
    gpu_layers: u32,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<llama::LlamaModel, LoadError> {
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
    let mapped = match source {
        ModelSource::File(path) => MappedFile::new(path, &options.llama, gpu_layers),
        ModelSource::Bytes(_) => None,
    };
    let params = llama::ModelParams::new(backend, &options.llama, gpu_layers);
    let params = params.map_err(LoadError::Option)?;
    let loaded = llama::LlamaModel::load(path, params, &mut received);
    match loaded {
        Ok(mut model) => {
            model.keep(mapped);
            Ok(model)
        }
        Err(_) if stopped => Err(LoadError::Stopped),
        // llama.cpp has no code for this, only its log message.
        Err(why) if why.contains("unknown model architecture") => {
            Err(LoadError::Architecture(architecture(header).to_owned()))
        }
        Err(why) => Err(LoadError::Llama(why)),
    }
}

/// Returns how many bytes of its weights a model shares with those that are loaded.
pub(super) fn shared_weights(
    source: &ModelSource,
    header: &GgufHeader,
    options: &LoadOptions,
    gpu_layers: u32,
) -> u64 {
    match source {
        // A configured limit is for the model by itself.
        ModelSource::File(path) if options.memory_bytes.is_none() => {
            mapped::shared_bytes(path, header, &options.llama, gpu_layers)
        }
        _ => 0,
    }
}

/// Returns whether a model would be refused now because the memory that is available is too little for it. What models that
/// are being loaded will use counts as available. False also for a file that cannot be loaded for another reason, and if
/// [`LoadOptions::memory_bytes`] is the limit, which nobody can make room below.
#[must_use]
pub fn lacks_memory(source: &ModelSource, options: &LoadOptions) -> bool {
    if options.memory_bytes.is_some() {
        return false;
    }
    let Ok(model) = MeasuredModel::new(source, options) else {
        return false;
    };
    // Stopped where it would wait for the memory of other loads.
    let reserved = model
        .plan
        .reserve_memory(model.estimate, options, &mut |_| false);
    matches!(reserved, Err(LoadError::Memory { .. }))
}

/// A model whose header was read and checked, and what it will need.
struct MeasuredModel {
    header: GgufHeader,
    origin: ModelOrigin,
    plan: LoadPlan,
    backend: llama::LlamaBackend,
    gpu_layers: u32,
    adapter_bytes: u64,
    /// Of the draft model too.
    estimate: memory::Estimate,
    /// What it takes of the memory of GPUs.
    gpu_bytes: u64,
    draft: Option<Box<Self>>,
}

impl MeasuredModel {
    fn new(source: &ModelSource, options: &LoadOptions) -> Result<Self, LoadError> {
        let header = source.header(&options.llama)?;
        let origin = ModelOrigin::of_header(source, &header, options);
        // The plan asks for the GPUs, which are known from here on.
        let backend = llama::LlamaBackend::start(options.llama.numa)?;
        // All that the header decides comes before llama.cpp sees the model: its own errors are less clear, and some of them
        // end the process.
        let mut plan = LoadPlan::new(&header, options)?;
        let adapter_bytes = lora::check(&header, options)?;
        let draft = match &options.draft {
            Some(draft) => {
                let options = draft.load_options(plan.context_tokens, options);
                let measured = Self::new(&draft.source, &options).map_err(LoadError::of_draft)?;
                draft::check(&measured.header, &header)
                    .map_err(|why| LoadError::from(why).of_draft())?;
                Some(Box::new(measured))
            }
            None => None,
        };
        // The draft model is loaded first.
        let taken = draft.as_ref().map_or(0, |draft| draft.gpu_bytes);
        plan.suit_gpu(&header, options, adapter_bytes, taken);
        let measure = |plan: &LoadPlan| {
            let (gpu_layers, mut own) = plan.offload(&header, options, adapter_bytes, taken);
            let gpu_bytes = plan.estimate(&header, options, adapter_bytes).total();
            let gpu_bytes = gpu_bytes.saturating_sub(own.total());
            let shared = shared_weights(source, &header, options, gpu_layers);
            own.weights = own.weights.saturating_sub(shared);
            let mut estimate = own;
            if let Some(draft) = &draft {
                estimate = estimate.with(draft.estimate);
            }
            // Buffers of a decode call are in both memories.
            let pass = if gpu_layers > 0 { own.pass } else { 0 };
            (gpu_layers, estimate, gpu_bytes.saturating_add(pass))
        };
        let (mut gpu_layers, mut estimate, mut gpu_bytes) = measure(&plan);
        let available = options.memory_bytes.or_else(memory::available);
        if draft.is_some() && available.is_some_and(|it| estimate.total() > it) {
            // The plan of each knows nothing of the other.
            plan.save_memory();
            (gpu_layers, estimate, gpu_bytes) = measure(&plan);
        }
        Ok(Self {
            header,
            origin,
            plan,
            backend,
            gpu_layers,
            adapter_bytes,
            estimate,
            gpu_bytes,
            draft,
        })
    }

    /// Loads it, in memory that is reserved.
    fn load(
        self,
        name: &str,
        source: &ModelSource,
        options: &LoadOptions,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Embedded, LoadError> {
        let Self {
            header,
            mut origin,
            plan,
            backend,
            gpu_layers,
            ..
        } = self;
        origin.check_names()?;
        let mut model = weights(source, &header, options, backend, gpu_layers, progress)?;
        for adapter in &options.lora {
            let added = model.add_adapter(&adapter.path);
            added.map_err(|why| lora::refused(&adapter.path, &why))?;
        }
        if origin.is_replaced() {
            origin.forget();
        }
        serve(name, &header, Arc::new(model), &plan, options, origin)
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
        max_tokens: None,
    };
    recommended.valid()
}

fn size(name: &str, plan: &LoadPlan, options: &LoadOptions, recurrent: bool) -> ContextSize {
    // Recurrent models have no KV cells.
    let size = match plan.per_slot {
        Some(separate) if !recurrent => separate,
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
    size
}

fn serve(
    name: &str,
    header: &GgufHeader,
    model: Arc<llama::LlamaModel>,
    plan: &LoadPlan,
    options: &LoadOptions,
    origin: ModelOrigin,
) -> Result<Embedded, LoadError> {
    let architecture = architecture(header).to_owned();
    let facts = model.facts();
    // Asked of llama.cpp, which knows the kind of each architecture.
    if !facts.generates || is_encoder(header) {
        return Err(LoadError::NotGenerative(architecture));
    }
    let size = size(name, plan, options, facts.recurrent);
    // Before the vocabulary, which shares the model with other threads: creating a context may still modify the model.
    let context = llama::LlamaContext::new(Arc::clone(&model), size, &options.llama);
    let context = context.map_err(LoadError::Llama)?;
    let long_rope = u64::from(context.sequence_cells()) > short_rope_tokens(header);
    let choices = lora::infos(options);
    let vocabulary = LlamaVocabulary::new(Arc::clone(&model), header)?;
    let suffix_first = options.llama.spm_infill.unwrap_or(false);
    let vocabulary = Arc::new(vocabulary.with_suffix_first(suffix_first));
    let saved_slots = memory::SavedSlotsLimit::take(options.memory_bytes, facts.weight_bytes);
    let obstacle = Circumstances {
        header,
        options,
        own_attention: llama::has_own_attention(),
        has_gpu: llama::has_gpu(),
        orders_cells: context.orders_cells(),
    }
    .obstacle();
    let deterministic = Some(obstacle.is_none());
    let line = StartLine {
        name,
        header,
        plan,
        size,
        options,
        recurrent: facts.recurrent,
        sliding_window: facts.sliding_window,
        gpu_layers: model.gpu_layers(),
        saved_slots: &saved_slots,
        obstacle,
    };
    line.log()?;
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
        deterministic,
        adapters: Arc::clone(&choices),
        sampling: recommended(header),
    };
    let mut embedded = Embedded {
        info,
        vocabulary,
        context,
        warm_times: None,
        thread_log: ThreadLog::default(),
        saved_slots,
        origin,
        long_rope,
        draft: None,
    };
    let tried = embedded.try_adapters(&choices);
    tried.map_err(LoadError::Llama)?;
    embedded.warm_up();
    Ok(embedded)
}

/// Returns the longest context for which llama.cpp takes the position factors for short ones (`llama_model::get_rope_factors`).
fn short_rope_tokens(header: &GgufHeader) -> u64 {
    let architecture = architecture(header);
    ["rope.scaling.original_context_length", "context_length"]
        .into_iter()
        .find_map(|key| header.number(&format!("{architecture}.{key}")))
        .unwrap_or(u64::MAX)
}

/// Returns how many KV cells are missing for the requested cached prefixes, with a per-slot KV cache.
fn missing_prefixes(options: &LoadOptions, size: ContextSize) -> Option<u32> {
    let asked = options.parallel.saturating_add(options.kept_prefixes?);
    // More than `SLOTS_MAX` is not missing cells: no cache would be large enough.
    let missing = asked.min(llama::SLOTS_MAX).saturating_sub(size.slots);
    (missing > 0).then(|| missing.saturating_mul(size.cells / size.slots.max(1)))
}

#[cfg(test)]
mod tests {
    use super::super::random::{RandomModelShape, write};
    use super::*;

    #[test]
    fn a_second_model_of_a_file_needs_no_memory_for_its_weights() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        write(
            std::fs::File::create(&path).unwrap(),
            &RandomModelShape::tiny(),
            1,
        )
        .unwrap();
        let source = ModelSource::File(path);
        let options = LoadOptions {
            context_tokens: Some(64),
            parallel: 1,
            ..LoadOptions::default()
        };
        let of = |options: &LoadOptions| MeasuredModel::new(&source, options).unwrap().estimate;
        let first = of(&options);
        let loaded = load("m", &source, &options, &mut |_| true).unwrap();
        let second = of(&options);
        let header = source.header(&options.llama).unwrap();
        let shared = shared_weights(&source, &header, &options, 0);
        assert!(shared > 0);
        assert_eq!(first.weights - second.weights, shared);
        assert_eq!((first.cache, first.pass), (second.cache, second.pass));
        let limited = LoadOptions {
            memory_bytes: Some(1 << 30),
            ..options.clone()
        };
        assert_eq!(of(&limited).weights, first.weights);
        drop(loaded);
        assert_eq!(of(&options), first);
    }
}
