//! A deterministic model without weights, for tests, demonstrations and load tests.

use std::sync::Arc;

use sapwood_proto::steer::Token;

use super::model::{EmbeddingInfo, EmbeddingModel, EncodeStop, Pooling, TextLayout};
use crate::api::SharedVocabulary;
use crate::ranking::mix;
use crate::scripted::{Config, ScriptedVocabulary};

/// A scripted model that embeds.
#[derive(Clone, Debug)]
pub struct ScriptedEmbeddingConfig {
    /// The name under which it is served.
    pub name: String,
    /// [`Pooling::Rank`] makes it score pairs.
    pub pooling: Pooling,
    /// Numbers of a row, 1 to 65,536.
    pub dimensions: u32,
    /// Tokens of a text.
    pub context_tokens: u32,
    /// Tokens of a batch.
    pub batch_tokens: u32,
    /// Texts of a batch.
    pub parallel: u32,
    /// Rows have length 1 unless a request says otherwise.
    pub normalize: bool,
}

impl Default for ScriptedEmbeddingConfig {
    fn default() -> Self {
        Self {
            name: "scripted".to_owned(),
            pooling: Pooling::Mean,
            dimensions: 8,
            context_tokens: 512,
            batch_tokens: 512,
            parallel: 16,
            normalize: true,
        }
    }
}

/// The model. The row of a text is the sum of pseudo-random rows, one for each of its tokens, so texts that share many tokens
/// are similar. A score is the share of the query's tokens that are in the document.
#[derive(Debug)]
pub struct ScriptedEmbedding {
    info: EmbeddingInfo,
    vocabulary: Arc<ScriptedVocabulary>,
}

impl ScriptedEmbedding {
    /// Creates the model that a configuration describes. Each byte of a text is a token.
    #[must_use]
    pub fn new(config: ScriptedEmbeddingConfig) -> Self {
        let script = Config {
            chat: false,
            ..Config::default()
        };
        let vocabulary = Arc::new(ScriptedVocabulary::new(&script));
        let (begin, end) = ScriptedVocabulary::around();
        let ranks = config.pooling == Pooling::Rank;
        Self {
            info: EmbeddingInfo {
                description: format!("scripted: {}", config.pooling.name()),
                name: config.name,
                architecture: "scripted".to_owned(),
                pooling: config.pooling,
                dimensions: if ranks {
                    1
                } else {
                    config.dimensions.clamp(1, 1 << 16)
                },
                context_tokens: config.context_tokens.max(4),
                batch_tokens: config.batch_tokens.max(1),
                parallel: config.parallel.max(1),
                vocabulary_tokens: vocabulary.len(),
                parameters: 0,
                weight_bytes: 0,
                normalize: config.normalize,
                layout: TextLayout {
                    begin: vec![begin],
                    end: vec![end],
                    separator: vec![end, end],
                    rerank: None,
                },
            },
            vocabulary,
        }
    }

    fn score(&self, text: &[Token]) -> f32 {
        let separator = self.info.layout.separator.as_slice();
        let place = text.windows(separator.len()).position(|it| it == separator);
        let Some(place) = place else { return 0.0 };
        let (query, document) = (&text[1..place.max(1)], &text[place + separator.len()..]);
        let found = query.iter().filter(|token| document.contains(token));
        found.count() as f32 / query.len().max(1) as f32
    }
}

/// A pseudo-random number from -1 to 1.
#[expect(clippy::cast_precision_loss, reason = "24 bits")]
fn number(token: Token, index: u32) -> f32 {
    let bits = mix(u64::from(token) << 32 | u64::from(index)) >> 40;
    bits as f32 / (1_u64 << 23) as f32 - 1.0
}

impl EmbeddingModel for ScriptedEmbedding {
    fn info(&self) -> EmbeddingInfo {
        self.info.clone()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        Arc::clone(&self.vocabulary) as SharedVocabulary
    }

    fn encode(&mut self, texts: &[&[Token]], rows: &mut Vec<f32>) -> Result<(), EncodeStop> {
        for text in texts {
            if self.info.ranks() {
                rows.push(self.score(text));
                continue;
            }
            for index in 0..self.info.dimensions {
                rows.push(text.iter().map(|&token| number(token, index)).sum());
            }
        }
        Ok(())
    }
}
