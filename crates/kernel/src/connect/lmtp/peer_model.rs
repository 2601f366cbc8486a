//! The facts of a model that an LMTP server reports (LM-331, LM-712).

use std::sync::Arc;

use sapwood_engine::api::{ChatRequest, EngineError, ModelInfo, SharedVocabulary, Vocabulary};
use sapwood_engine::recommended::RecommendedSampling;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;
use serde_json::Value;

use super::LmtpModelTerms;
use crate::facts::{ModelFacts, UNKNOWN};

/// The facts that the server reports of its model.
#[derive(Default)]
pub(super) struct PeerModel {
    pub(super) context: Option<u32>,
    pub(super) vocabulary: Option<u32>,
    bos: Option<Token>,
    pub(super) ends: Vec<Token>,
}

impl PeerModel {
    /// Decodes `model_info`. Anything but a JSON object gives no facts.
    pub(super) fn of(facts: &str) -> Self {
        // Some peers send a text such as `<unavailable>` instead of an object; that is as good as no report.
        let facts: Value = serde_json::from_str(facts).unwrap_or_default();
        let whole = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let number = |key: &str| whole(facts.get(key)?);
        let ends = facts.get("eos").and_then(Value::as_array);
        Self {
            context: number("max_context"),
            // A larger number is a mistake, and would cost a list of that many tokens.
            vocabulary: number("vocab_size").filter(|size| *size <= VOCABULARY_MAX),
            bos: number("bos"),
            ends: ends.into_iter().flatten().filter_map(whole).collect(),
        }
    }

    /// The facts of the model called `name`, from the server's report and from `terms`.
    pub(super) fn facts(&self, name: &str, terms: &LmtpModelTerms) -> ModelFacts {
        let tokens = |vocabulary: &SharedVocabulary| u32::try_from(vocabulary.size()).ok();
        let vocabulary_tokens = terms.vocabulary.as_ref().and_then(tokens);
        let vocabulary_tokens = vocabulary_tokens.or(self.vocabulary).unwrap_or(UNKNOWN);
        let info = ModelInfo {
            name: name.to_owned(),
            architecture: "lmtp".to_owned(),
            description: "a model of an upstream".to_owned(),
            context_tokens: self.context.or(terms.context).unwrap_or(UNKNOWN),
            vocabulary_tokens,
            parameters: 0,
            weight_bytes: 0,
            parallel: 1,
            chat: terms.chat,
            truncates: true,
            deterministic: None,
            adapters: Arc::new([]),
            // Peers of version 1 refuse min_p, which is sent by default unless other sampling values are recommended.
            sampling: RecommendedSampling {
                temperature: Some(0.7),
                top_p: Some(0.95),
                ..RecommendedSampling::default()
            },
        };
        let numbers = || {
            Arc::new(Numbers {
                size: vocabulary_tokens,
                bos: self.bos,
                ends: self.ends.clone(),
            })
        };
        let vocabulary = terms.vocabulary.clone();
        ModelFacts {
            info,
            vocabulary: vocabulary.unwrap_or_else(|| numbers()),
            defaults: terms.defaults.clone(),
        }
    }
}

/// Largest accepted vocabulary: many times the largest that exists.
const VOCABULARY_MAX: u32 = 1 << 24;

/// Tokens of which only the numbers are known.
struct Numbers {
    size: u32,
    bos: Option<Token>,
    ends: Vec<Token>,
}

impl Vocabulary for Numbers {
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
        self.bos == Some(token) || self.is_end(token)
    }

    fn is_end(&self, token: Token) -> bool {
        self.ends.contains(&token)
    }

    fn bos(&self) -> Option<Token> {
        self.bos
    }

    fn end_of_turn(&self) -> Option<Token> {
        None
    }

    fn chat(&self, _: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        let why = "the tokenizer of this model is not known here";
        Err(EngineError::new(
            Code::Unimplemented,
            ErrorReason::NO_TEMPLATE,
            why,
        ))
    }
}
