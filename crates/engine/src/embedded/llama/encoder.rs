//! [`EncoderSize`]: the size of a context that pools, and the batches that fit in it.

use sapwood_proto::steer::Token;

use super::ThreadLimits;
use super::context::DecodeError;
use super::model::LlamaModel;
use crate::embedding::Pooling;
use crate::model::BatchEntry;

/// The size of a context.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct EncoderSize {
    /// Tokens of a batch, and so of a text: it is computed at once, because a token may attend to those after it.
    pub(in super::super) tokens: u32,
    /// Texts of a batch; at least 1.
    pub(in super::super) texts: u32,
    pub(in super::super) pooling: Pooling,
    pub(in super::super) threads: ThreadLimits,
    /// How long idle worker threads spin before they sleep, 0 to 100.
    pub(in super::super) poll: u32,
}

impl EncoderSize {
    /// The entries of a batch, each text a sequence of its own. Every number in them is within the limits of the context and
    /// of the model.
    pub(super) fn entries(
        self,
        texts: &[&[Token]],
        model: &LlamaModel,
    ) -> Result<Vec<BatchEntry>, DecodeError> {
        let tokens: usize = texts.iter().map(|text| text.len()).sum();
        if texts.is_empty() || texts.len() > self.texts as usize {
            return Err(DecodeError::Invalid("a batch has no texts, or too many"));
        }
        if tokens > self.tokens as usize || texts.iter().any(|text| text.is_empty()) {
            return Err(DecodeError::Invalid(
                "a batch is too large, or has an empty text",
            ));
        }
        let mut entries = Vec::with_capacity(tokens);
        for (slot, text) in (0..).zip(texts) {
            for (position, &token) in (0..).zip(*text) {
                model
                    .id(token)
                    .ok_or(DecodeError::Invalid("a token is not in the vocabulary"))?;
                entries.push(BatchEntry {
                    slot,
                    position,
                    token,
                    row: true,
                });
            }
        }
        Ok(entries)
    }
}
