//! Token counts of a sequence, for the penalties.

use std::collections::HashMap;

use sapwood_proto::steer::Token;

use crate::api::Sampling;

/// Counts of the tokens in prompt and output.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenHistory {
    seen: HashMap<Token, TokenCount>,
}

#[derive(Clone, Copy, Debug, Default)]
struct TokenCount {
    in_prompt: bool,
    in_output: u32,
}

impl TokenHistory {
    /// Returns the history of a prompt, or `None` if no penalty needs it.
    pub(crate) fn of(prompt: &[Token], sampling: &Sampling) -> Option<Self> {
        // Without a penalty nothing is counted: the map would grow with every token of every sequence.
        let repetition = sampling.repetition_penalty != 1.0;
        if !repetition && sampling.presence_penalty == 0.0 && sampling.frequency_penalty == 0.0 {
            return None;
        }
        let mut history = Self::default();
        // Only the repetition penalty looks at the prompt; presence and frequency are about the output, as in vLLM.
        if repetition {
            for &token in prompt {
                history.seen.entry(token).or_default().in_prompt = true;
            }
        }
        Some(history)
    }

    /// Adds a token of the output.
    pub(crate) fn append(&mut self, token: Token) {
        self.seen.entry(token).or_default().in_output += 1;
    }

    /// Removes a rolled-back token of the output.
    pub(crate) fn remove(&mut self, token: Token) {
        if let Some(seen) = self.seen.get_mut(&token) {
            // An entry of zero stays and changes nothing.
            seen.in_output = seen.in_output.saturating_sub(1);
        }
    }

    /// Applies the penalties to the logits of tokens seen, and records the original logits.
    pub(super) fn penalise(
        &self,
        row: &mut [f32],
        sampling: &Sampling,
        before: &mut Vec<(Token, f32)>,
    ) {
        for (&token, &seen) in &self.seen {
            let Some(logit) = row.get_mut(token as usize) else {
                continue;
            };
            before.push((token, *logit));
            *logit = penalised(*logit, seen, sampling);
        }
    }
}

fn penalised(logit: f32, seen: TokenCount, sampling: &Sampling) -> f32 {
    let mut logit = logit;
    if seen.in_prompt || seen.in_output > 0 {
        let penalty = sampling.repetition_penalty;
        // Dividing a negative logit would make the token more likely.
        logit = if logit > 0.0 {
            // Finite even for the smallest penalty: an infinite logit would be taken for a defect of the model.
            (logit / penalty).min(f32::MAX)
        } else {
            logit * penalty
        };
    }
    if seen.in_output > 0 {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a context has fewer than 2^24 tokens"
        )]
        let count = seen.in_output as f32;
        logit -= sampling.presence_penalty + sampling.frequency_penalty * count;
    }
    logit
}
