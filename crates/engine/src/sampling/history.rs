//! Token counts of a sequence, for the penalties.

use std::collections::HashMap;
use std::sync::Arc;

use sapwood_proto::steer::Token;

use crate::api::Sampling;

/// Counts of the tokens in prompt and output.
#[derive(Clone, Debug)]
pub(crate) struct TokenHistory {
    /// The tokens of the prompt, each once, in order. Shared by all choices of a request.
    prompt: Arc<[Token]>,
    output: HashMap<Token, u32>,
}

impl TokenHistory {
    /// Returns the history of a prompt, or `None` if no penalty needs it. This takes milliseconds for a long prompt.
    pub(crate) fn of(prompt: &[Token], sampling: &Sampling) -> Option<Self> {
        // Without a penalty nothing is counted: the map would grow with every token of every sequence.
        let repetition = sampling.repetition_penalty != 1.0;
        if !repetition && sampling.presence_penalty == 0.0 && sampling.frequency_penalty == 0.0 {
            return None;
        }
        // Only the repetition penalty looks at the prompt; presence and frequency are about the output, as in vLLM.
        let mut tokens = if repetition {
            prompt.to_vec()
        } else {
            Vec::new()
        };
        tokens.sort_unstable();
        tokens.dedup();
        Some(Self {
            prompt: tokens.into(),
            output: HashMap::new(),
        })
    }

    /// Adds a token of the output.
    pub(crate) fn append(&mut self, token: Token) {
        *self.output.entry(token).or_default() += 1;
    }

    /// Removes a rolled-back token of the output.
    pub(crate) fn remove(&mut self, token: Token) {
        if let Some(count) = self.output.get_mut(&token) {
            // An entry of zero stays and changes nothing.
            *count = count.saturating_sub(1);
        }
    }

    /// Applies the penalties to the logits of tokens seen, and records the original logits, once for each token.
    pub(super) fn penalise(
        &self,
        row: &mut [f32],
        sampling: &Sampling,
        before: &mut Vec<(Token, f32)>,
    ) {
        for &token in &*self.prompt {
            if let Some(logit) = row.get_mut(token as usize) {
                before.push((token, *logit));
                *logit = repeated(*logit, sampling);
            }
        }
        for (&token, &count) in self.output.iter().filter(|(_, count)| **count > 0) {
            let Some(logit) = row.get_mut(token as usize) else {
                continue;
            };
            if self.prompt.binary_search(&token).is_err() {
                before.push((token, *logit));
                *logit = repeated(*logit, sampling);
            }
            #[expect(
                clippy::cast_precision_loss,
                reason = "a context has fewer than 2^24 tokens"
            )]
            let count = count as f32;
            *logit -= sampling.presence_penalty + sampling.frequency_penalty * count;
        }
    }
}

/// Applies the repetition penalty.
fn repeated(logit: f32, sampling: &Sampling) -> f32 {
    let penalty = sampling.repetition_penalty;
    // Dividing a negative logit would make the token more likely.
    if logit > 0.0 {
        // Finite even for the smallest penalty: an infinite logit would be taken for a defect of the model.
        (logit / penalty).min(f32::MAX)
    } else {
        logit * penalty
    }
}
