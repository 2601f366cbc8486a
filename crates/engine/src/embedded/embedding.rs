//! The embedded model that embeds: implements [`EmbeddingModel`] with llama.cpp.
//!
//! Encoders (BERT and its kind) and decoders that were trained to embed are computed alike: each text is a sequence of one
//! ubatch, whose rows llama.cpp pools.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use super::gpu_turn;
use super::identity::ModelOrigin;
use super::kind::{
    architecture, default_pooling, is_embedding, is_encoder, pooling, rotates_positions,
};
use super::llama;
use super::llama::{DecodeError, EncoderContext, EncoderSize, SLOTS_MAX, ThreadLimits};
use super::load::{LoadOptions, shared_weights, weights};
use super::load_error::LoadError;
use super::memory::{CacheTypes, Estimate};
use super::plan::{batch_tokens, check_blocks, check_options, layers, offload, reserve};
use super::source::ModelSource;
use super::vocabulary::LlamaVocabulary;
use crate::api::{EngineError, SharedVocabulary};
use crate::embedding::{EmbeddingInfo, EmbeddingModel, EncodeStop, Pooling, TextLayout};
use crate::gguf::{GgufHeader, checks};
use crate::llama_options::LlamaOptions;
use crate::model::Interrupt;
use crate::template::RerankTemplate;

/// The maximum of tokens of a text by default: llama.cpp's buffers grow with the tokens of a batch times the vocabulary.
const CONTEXT_TOKENS_DEFAULT_MAX: u32 = 2048;

/// What makes such a model need less memory.
const SHORTER_TEXTS: &str = "or a shorter context (--ctx)";

/// Options of a model that embeds, beside [`LoadOptions`].
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingOptions {
    /// How rows are made. `None`: as the file says; if it says nothing, the mean, or the last token where tokens attend only to
    /// those before them.
    pub pooling: Option<Pooling>,
    /// Rows have length 1 unless a request says otherwise.
    pub normalize: bool,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        Self {
            pooling: None,
            normalize: true,
        }
    }
}

/// A loaded model that embeds.
#[derive(Debug)]
pub struct EmbeddedEncoder {
    info: EmbeddingInfo,
    vocabulary: Arc<LlamaVocabulary>,
    context: EncoderContext,
    /// What the context has computed, whose rows may be wider than the scores that are taken from them.
    rows: Vec<f32>,
}

/// Returns whether a file is of a model that embeds: by its architecture, or because it says how to pool, with the metadata
/// that the options replace.
///
/// # Errors
/// [`LoadError`], if its header cannot be read or is damaged.
pub fn embeds(source: &ModelSource, options: &LlamaOptions) -> Result<bool, LoadError> {
    Ok(is_embedding(&source.header(options)?))
}

/// As [`super::lacks_memory`], for a model that embeds.
#[must_use]
pub fn lacks_memory_embedding(
    source: &ModelSource,
    options: &LoadOptions,
    embedding: EmbeddingOptions,
) -> bool {
    if options.memory_bytes.is_some() {
        return false;
    }
    let Ok(model) = MeasuredEncoder::new(source, options, embedding) else {
        return false;
    };
    // Stopped where it would wait for the memory of other loads.
    let reserved = reserve(
        model.estimate,
        model.size.tokens,
        SHORTER_TEXTS,
        options,
        &mut |_| false,
    );
    matches!(reserved, Err(LoadError::Memory { .. }))
}

/// A model whose header was read and checked, and what it will need.
struct MeasuredEncoder {
    header: GgufHeader,
    origin: ModelOrigin,
    size: EncoderSize,
    /// Those of the context.
    llama: LlamaOptions,
    backend: llama::LlamaBackend,
    gpu_layers: u32,
    estimate: Estimate,
}

impl MeasuredEncoder {
    fn new(
        source: &ModelSource,
        options: &LoadOptions,
        embedding: EmbeddingOptions,
    ) -> Result<Self, LoadError> {
        let header = source.header(&options.llama)?;
        let origin = ModelOrigin::of_header(source, &header, options);
        let size = size(&header, options, embedding)?;
        if !options.lora.is_empty() {
            let why = "lora: adapters are not supported for models that embed: merge them into the file, or leave them out";
            return Err(LoadError::Option(why.to_owned()));
        }
        let mut llama = options.llama.clone();
        let is_encoder = is_encoder(&header);
        if is_encoder {
            // It has no KV cache, and llama.cpp would check types that are not used.
            (llama.cache_type_k, llama.cache_type_v) = (None, None);
        }
        let cache_types = CacheTypes::new(&llama);
        if !is_encoder {
            check_blocks(&header, cache_types)?;
        }
        let estimate = Estimate::of_encoder(&header, size, is_encoder, cache_types);
        let backend = llama::LlamaBackend::start(options.llama.numa)?;
        let (gpu_layers, mut estimate) = offload(estimate, layers(&header), &options.llama);
        let shared = shared_weights(source, &header, options, gpu_layers);
        estimate.weights = estimate.weights.saturating_sub(shared);
        Ok(Self {
            header,
            origin,
            size,
            llama,
            backend,
            gpu_layers,
            estimate,
        })
    }
}

/// The pooling of a model.
fn chosen(header: &GgufHeader, options: EmbeddingOptions) -> Result<Pooling, LoadError> {
    let own = pooling(header);
    match (options.pooling, own) {
        // A head that is not there, or that is the only output that was trained.
        (Some(Pooling::Rank), own) if own != Some(Pooling::Rank) => Err(LoadError::Option(
            "pooling = \"rank\" needs a model with a classification head, and this one has none"
                .to_owned(),
        )),
        (Some(asked), _) => Ok(asked),
        (None, Some(own)) => Ok(own),
        (None, None) => Ok(default_pooling(header)),
    }
}

/// Loads a model under a name, for embeddings or, if its file says so, for reranking. Of `options` those of the KV cache do not
/// apply to encoders, and adapters are refused. `progress` is called with fractions from 0 to 1, and stops the loading by returning false.
///
/// # Errors
/// [`LoadError`].
pub fn load_embedding(
    name: &str,
    source: &ModelSource,
    options: &LoadOptions,
    embedding: EmbeddingOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<EmbeddedEncoder, LoadError> {
    llama::kernels()?;
    let _turn = gpu_turn::take(options, progress)?;
    let MeasuredEncoder {
        header,
        origin,
        size,
        llama,
        backend,
        gpu_layers,
        estimate,
    } = MeasuredEncoder::new(source, options, embedding)?;
    // Held until this function returns: by then the memory is in use, and the system counts it itself.
    let _reserved = reserve(estimate, size.tokens, SHORTER_TEXTS, options, progress)?;
    origin.check_names()?;
    let model = Arc::new(weights(
        source, &header, options, backend, gpu_layers, progress,
    )?);
    let facts = model.facts();
    let architecture = architecture(&header).to_owned();
    // A sequence of these may be computed in several ubatches, each of which would be pooled alone. Encoders with a decoder
    // have two kinds of outputs.
    if facts.recurrent || !facts.generates && !facts.encodes {
        return Err(LoadError::NotEmbedding(architecture));
    }
    // Before the vocabulary, which shares the model with other threads: creating a context may still modify the model.
    let context = EncoderContext::new(Arc::clone(&model), size, &llama);
    let context = context.map_err(LoadError::Llama)?;
    let vocabulary = Arc::new(LlamaVocabulary::new(Arc::clone(&model), &header)?);
    let layout = layout(&model, &vocabulary, size.pooling)?;
    let dimensions = match size.pooling {
        Pooling::Rank => 1,
        _ => facts.embedding_numbers,
    };
    let batch_tokens = batch_tokens(&options.llama);
    tracing::info!(
        model = name,
        pooling = size.pooling.name(),
        dimensions,
        context = size.tokens,
        batch = batch_tokens,
        kernels = %llama::kernels()?,
        configured = options.llama.described(),
        "chose settings for this model and this machine"
    );
    let mut encoder = EmbeddedEncoder {
        info: EmbeddingInfo {
            name: name.to_owned(),
            architecture,
            description: facts.description,
            pooling: size.pooling,
            dimensions,
            context_tokens: size.tokens,
            batch_tokens: batch_tokens.min(size.tokens),
            parallel: size.texts,
            vocabulary_tokens: model.size(),
            parameters: facts.parameters,
            weight_bytes: facts.weight_bytes,
            normalize: embedding.normalize,
            layout,
        },
        vocabulary,
        context,
        rows: Vec::new(),
    };
    // The first call brings the weights into memory. What a model cannot do is said by its first request, or by a trial.
    let warm = encoder.try_out();
    tracing::debug!(?warm, model = name, "computed a first batch");
    Ok(encoder)
}

fn size(
    header: &GgufHeader,
    options: &LoadOptions,
    embedding: EmbeddingOptions,
) -> Result<EncoderSize, LoadError> {
    check_options(options)?;
    let key = format!("{}.context_length", architecture(header));
    let trained = header.number(&key).unwrap_or(u64::MAX);
    let trained = u32::try_from(trained).unwrap_or(u32::MAX);
    let wanted = options
        .context_tokens
        .unwrap_or_else(|| trained.min(CONTEXT_TOKENS_DEFAULT_MAX));
    // Of positions that are looked up in a table there are as many as it has.
    let most = match options.llama.scales_positions() && rotates_positions(header) {
        true => checks::CONTEXT_TOKENS_MAX,
        false => trained.min(checks::CONTEXT_TOKENS_MAX),
    };
    if wanted > most {
        tracing::warn!(
            wanted,
            used = most,
            "the configured context is longer than the model was trained for: using the shorter one"
        );
    }
    let tokens = wanted.min(most);
    Ok(EncoderSize {
        tokens,
        // As many as there can be tokens: each text has one.
        texts: options.parallel.min(SLOTS_MAX).min(tokens).max(1),
        pooling: chosen(header, embedding)?,
        threads: ThreadLimits {
            decode: options.threads,
            prefill: options.threads_batch.or(options.threads),
        },
        poll: options.poll,
    })
}

/// The tokens around texts.
fn layout(
    model: &llama::LlamaModel,
    vocabulary: &LlamaVocabulary,
    pooling: Pooling,
) -> Result<TextLayout, LoadError> {
    let ends = model.special_ends();
    // Two texts are `CLS a SEP b SEP` for WordPiece, and `BOS a EOS SEP b EOS` for others, as far as they have these.
    let between = if ends.is_word_piece {
        [ends.separator, None]
    } else {
        [ends.end, ends.separator]
    };
    let template = match pooling {
        Pooling::Rank => model.rerank_template(),
        _ => None,
    };
    let template = template.map(|source| RerankTemplate::new(&source, vocabulary.special_texts()));
    Ok(TextLayout {
        begin: ends.begin.into_iter().collect(),
        end: ends.end.into_iter().collect(),
        separator: between.into_iter().flatten().collect(),
        rerank: template.transpose()?,
    })
}

impl EmbeddedEncoder {
    /// Computes two short texts at once. It may end the process instead of returning.
    ///
    /// # Errors
    /// Why the model cannot be used, for people.
    pub fn try_out(&mut self) -> Result<(), String> {
        let size = self.info.vocabulary_tokens.max(1);
        let most = self.info.batch_tokens / 2;
        let text: Vec<Token> = (0..most.clamp(1, 4)).map(|token| token % size).collect();
        let texts = [&text[..], &text[..]];
        let texts = &texts[..texts.len().min(self.info.parallel as usize)];
        let mut rows = Vec::new();
        match self.encode(texts, &mut rows) {
            Ok(()) if rows.iter().all(|number| number.is_finite()) => Ok(()),
            Ok(()) => Err("its embeddings are not numbers".to_owned()),
            Err(EncodeStop::Aborted) => Err("it was interrupted at its first texts".to_owned()),
            Err(EncodeStop::Failed(error)) => Err(error.to_string()),
        }
    }
}

impl EmbeddingModel for EmbeddedEncoder {
    fn info(&self) -> EmbeddingInfo {
        self.info.clone()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        Arc::clone(&self.vocabulary) as SharedVocabulary
    }

    fn interrupt(&mut self, flag: Interrupt) {
        self.context.set_interrupt(flag);
    }

    fn encode(&mut self, texts: &[&[Token]], rows: &mut Vec<f32>) -> Result<(), EncodeStop> {
        let failed = |message: &str| {
            let error = EngineError::internal(ErrorReason::NONE, message);
            Err(EncodeStop::Failed(error))
        };
        self.rows.clear();
        match self.context.encode(texts, &mut self.rows) {
            Ok(()) => {
                // Of a classification head with several classes the first is the one that says yes.
                for row in self.rows.chunks_exact(self.context.width().max(1)) {
                    let kept = row.len().min(self.info.dimensions as usize);
                    rows.extend_from_slice(&row[..kept]);
                }
                Ok(())
            }
            Err(DecodeError::Aborted | DecodeError::NotBegun) => Err(EncodeStop::Aborted),
            Err(DecodeError::Invalid(what)) => {
                tracing::error!(what, "the batch is invalid, and its requests fail");
                failed("the model refused the batch")
            }
            Err(DecodeError::Full) => failed("the model has no room for the batch"),
            Err(DecodeError::Broken(code)) => {
                tracing::error!(code, "llama.cpp failed to encode a batch");
                failed("the model failed")
            }
        }
    }
}
