//! [`DraftOptions`]: the model that drafts for another one, and how it is loaded with it.

use super::kind::architecture;
use super::load::LoadOptions;
use super::source::ModelSource;
use super::{Embedded, memory};
use crate::draft_model::{DraftMismatch, compare_sizes};
use crate::gguf::GgufHeader;
use crate::llama_options::{GpuLayers, LlamaOptions};

/// A draft model.
#[derive(Clone, Debug)]
pub struct DraftOptions {
    /// Its weights.
    pub source: ModelSource,
    /// Its layers that a GPU computes. `None`: as many as fit.
    pub gpu_layers: Option<GpuLayers>,
    /// The maximum of tokens of a sequence for which it drafts. `None`: the context of the model for which it drafts.
    pub context_tokens: Option<u32>,
}

impl DraftOptions {
    /// Returns how it is loaded for a model with this context, which is loaded with these options: for as many sequences, and
    /// on the same machine. What describes a model is its own.
    pub(super) fn load_options(&self, context_tokens: u32, options: &LoadOptions) -> LoadOptions {
        let machine = &options.llama;
        LoadOptions {
            context_tokens: Some(self.context_tokens.unwrap_or(context_tokens)),
            // The slots of ended sequences are kept as long as no other one needs them.
            kept_prefixes: Some(0),
            llama: LlamaOptions {
                gpu_layers: self.gpu_layers,
                split_mode: machine.split_mode,
                tensor_split: machine.tensor_split.clone(),
                main_gpu: machine.main_gpu,
                mmap: machine.mmap,
                mlock: machine.mlock,
                numa: machine.numa,
                flash_attn: machine.flash_attn,
                batch_tokens: machine.batch_tokens,
                ubatch_tokens: machine.ubatch_tokens,
                ..LlamaOptions::default()
            },
            // Its slots are never saved.
            memory_bytes: Some(0),
            lora: Vec::new(),
            draft: None,
            ..options.clone()
        }
    }
}

/// Compares what the headers of a draft model and of the model tell, before anything is loaded; their tokens are compared then.
pub(super) fn check(draft: &GgufHeader, target: &GgufHeader) -> Result<(), DraftMismatch> {
    for (header, mismatch) in [
        (target, DraftMismatch::Target as fn(String) -> _),
        (draft, DraftMismatch::Draft),
    ] {
        if memory::state_bytes(header) > 0 {
            return Err(mismatch(architecture(header).to_owned()));
        }
    }
    let tokens = |header: &GgufHeader| {
        let tokens = header.length("tokenizer.ggml.tokens")?;
        usize::try_from(tokens).ok()
    };
    if let (Some(draft), Some(target)) = (tokens(draft), tokens(target)) {
        compare_sizes(draft, target)?;
    }
    let bos = |header: &GgufHeader| header.number("tokenizer.ggml.bos_token_id");
    match (bos(draft), bos(target)) {
        (Some(own), Some(other)) if own != other => Err(DraftMismatch::Special("BOS")),
        _ => Ok(()),
    }
}

impl Embedded {
    /// Returns the draft model that was loaded with this one, if there is one. Once.
    pub fn take_draft(&mut self) -> Option<Self> {
        self.draft.take().map(|draft| *draft)
    }
}
