//! Model facts from the header of a file, available while the model is still loading (LM-332).

use std::sync::Arc;

use sapwood_proto::steer::Token;

use super::kind::architecture;
use super::load::{LoadOptions, recommended};
use super::load_error::LoadError;
use super::lora;
use super::plan::LoadPlan;
use super::source::ModelSource;
use crate::api::{ChatRequest, EngineError, ModelInfo, SharedVocabulary, Vocabulary};
use crate::gguf::GgufHeader;
use crate::template::no_template;

/// Returns what a model will be once it is loaded, as far as its file's header tells: architecture, size and EOG
/// tokens. The vocabulary cannot tokenise. Reads the whole header, which takes a fraction of a second.
///
/// # Errors
/// [`LoadError`], if the file is not one that could be loaded.
pub fn outline(
    name: &str,
    source: &ModelSource,
    options: &LoadOptions,
) -> Result<(ModelInfo, SharedVocabulary), LoadError> {
    let header = source.header(&options.llama)?;
    let plan = LoadPlan::new(&header, options)?;
    // Numbers only: the tokenizer is part of llama.cpp, which needs the loaded model for it.
    let vocabulary = OutlineVocabulary::of(&header);
    let info = ModelInfo {
        name: name.to_owned(),
        // llama.cpp composes the description of a loaded model; this is the nearest that the header has.
        description: header.text("general.name").unwrap_or_default().to_owned(),
        context_tokens: plan.context_tokens,
        vocabulary_tokens: vocabulary.size,
        parameters: header.number("general.parameter_count").unwrap_or(0),
        weight_bytes: header.tensor_bytes,
        parallel: options.parallel,
        chat: header.text("tokenizer.chat_template").is_some(),
        // Unknown before the model is loaded. Nothing runs on an outline, so the usual case is stated.
        truncates: true,
        deterministic: None,
        adapters: lora::infos(options),
        sampling: recommended(&header),
        architecture: architecture(&header).to_owned(),
    };
    Ok((info, Arc::new(vocabulary)))
}

/// A vocabulary of which only the size and the EOG tokens are known.
struct OutlineVocabulary {
    size: u32,
    bos: Option<Token>,
    /// Sorted.
    ends: Vec<Token>,
}

impl OutlineVocabulary {
    fn of(header: &GgufHeader) -> Self {
        let token = |key: &str| {
            let number = header.number(&format!("tokenizer.ggml.{key}_token_id"));
            number.and_then(|number| Token::try_from(number).ok())
        };
        let size = header.length("tokenizer.ggml.tokens").unwrap_or(0);
        // llama.cpp's default for vocabularies that do not specify it.
        let is_spm = header.text("tokenizer.ggml.model") == Some("llama");
        let adds_bos = match header.number("tokenizer.ggml.add_bos_token") {
            Some(sent) => sent != 0,
            None => is_spm,
        };
        let mut ends: Vec<Token> = ["eos", "eot", "eom"]
            .into_iter()
            .filter_map(token)
            .collect();
        ends.sort_unstable();
        ends.dedup();
        Self {
            size: u32::try_from(size).unwrap_or(u32::MAX),
            bos: token("bos").filter(|_| adds_bos),
            ends,
        }
    }
}

impl Vocabulary for OutlineVocabulary {
    fn size(&self) -> usize {
        self.size as usize
    }

    fn has_text(&self) -> bool {
        false
    }

    fn tokenize(&self, _: &str, _: bool) -> Vec<Token> {
        Vec::new()
    }

    fn bytes(&self, _: Token) -> &[u8] {
        &[]
    }

    fn is_special(&self, token: Token) -> bool {
        self.is_end(token) || self.bos == Some(token)
    }

    fn is_end(&self, token: Token) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    fn bos(&self) -> Option<Token> {
        self.bos
    }

    fn end_of_turn(&self) -> Option<Token> {
        None
    }

    fn chat(&self, _: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        Err(no_template())
    }
}
