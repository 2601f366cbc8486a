//! [`TokenCounts`]: the tokens that the penalties look at, counted.

use std::collections::HashMap;
use std::sync::Arc;

use sapwood_proto::steer::Token;

use super::token_set::TokenSet;
use super::vector::Candidate;
use crate::api::Sampling;

/// Counts of the tokens in prompt and output.
#[derive(Clone, Debug)]
pub(super) enum TokenCounts {
    /// Of all of them.
    Whole {
        /// The tokens of the prompt, each once, in order. Shared by all choices of a request.
        prompt: Arc<[Token]>,
        output: HashMap<Token, u32>,
    },
    /// Of the last ones.
    Window(Window),
}

/// Counts of the last tokens.
///
/// They follow the window as tokens come and go, so that a token costs the same however long the window is.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// The size of the window.
    most: usize,
    prompt_tokens: usize,
    /// Occurrences within the window, of at least one. Shared with the other choices of a request until the first token
    /// of one of them: a choice that has not started takes no memory.
    counts: Arc<HashMap<Token, Occurrences>>,
}

/// How often a token occurs.
#[derive(Clone, Copy, Debug, Default)]
struct Occurrences {
    all: u32,
    /// Those in the output.
    output: u32,
}

impl TokenCounts {
    /// Returns the counts of a prompt, or `None` if no penalty needs them. This takes milliseconds for a long prompt.
    pub(super) fn of(prompt: &[Token], sampling: &Sampling) -> Option<Self> {
        // Without a penalty nothing is counted: the map would grow with every token of every sequence.
        let repetition = sampling.repetition_penalty != 1.0;
        if !repetition && sampling.presence_penalty == 0.0 && sampling.frequency_penalty == 0.0 {
            return None;
        }
        match usize::try_from(sampling.penalty_last_n) {
            Ok(0) => return None,
            Ok(most) => return Some(Self::Window(Window::of(prompt, most))),
            // All tokens.
            Err(_) => {}
        }
        // Only the repetition penalty looks at the prompt; presence and frequency are about the output, as in vLLM.
        let mut tokens = if repetition {
            prompt.to_vec()
        } else {
            Vec::new()
        };
        tokens.sort_unstable();
        tokens.dedup();
        Some(Self::Whole {
            prompt: tokens.into(),
            output: HashMap::new(),
        })
    }

    /// Applies the penalties to the logits of tokens seen, and records the original logits, once for each token.
    pub(super) fn penalise(
        &self,
        row: &mut [f32],
        sampling: &Sampling,
        before: &mut Vec<(Token, f32)>,
    ) {
        match self {
            Self::Whole { prompt, output } => {
                for &token in &**prompt {
                    if let Some(logit) = row.get_mut(token as usize) {
                        before.push((token, *logit));
                        *logit = repeated(*logit, sampling);
                    }
                }
                for (&token, &count) in output.iter().filter(|(_, count)| **count > 0) {
                    let Some(logit) = row.get_mut(token as usize) else {
                        continue;
                    };
                    if prompt.binary_search(&token).is_err() {
                        before.push((token, *logit));
                        *logit = repeated(*logit, sampling);
                    }
                    *logit = generated(*logit, count, sampling);
                }
            }
            Self::Window(window) => {
                for (&token, &occurrences) in &*window.counts {
                    if let Some(logit) = row.get_mut(token as usize) {
                        before.push((token, *logit));
                        *logit = occurrences.penalised(*logit, sampling);
                    }
                }
            }
        }
    }

    /// Applies the penalties to candidates in any order. `marked` is empty before and after.
    pub(super) fn penalise_candidates(
        &self,
        candidates: &mut [Candidate],
        sampling: &Sampling,
        marked: &mut TokenSet,
    ) {
        // A bit for each candidate instead of a lookup in the counts: nearly none of a vocabulary has been seen.
        self.for_each_token(|token| marked.insert(token));
        for (logit, token) in candidates {
            if marked.contains(*token) {
                *logit = self.penalised(*token, *logit, sampling);
            }
        }
        self.for_each_token(|token| marked.remove(token));
    }

    fn for_each_token(&self, mut visit: impl FnMut(Token)) {
        match self {
            Self::Whole { prompt, output } => {
                let tokens = prompt.iter().chain(output.keys());
                tokens.for_each(|&token| visit(token));
            }
            Self::Window(window) => window.counts.keys().for_each(|&token| visit(token)),
        }
    }

    /// Returns what the penalties make of one logit.
    fn penalised(&self, token: Token, logit: f32, sampling: &Sampling) -> f32 {
        let occurrences = match self {
            Self::Whole { prompt, output } => {
                let output = output.get(&token).copied().unwrap_or(0);
                let prompt = u32::from(prompt.binary_search(&token).is_ok());
                Occurrences {
                    all: prompt + output,
                    output,
                }
            }
            Self::Window(window) => window.counts.get(&token).copied().unwrap_or_default(),
        };
        if occurrences.all == 0 {
            return logit;
        }
        occurrences.penalised(logit, sampling)
    }
}

impl Occurrences {
    fn penalised(self, logit: f32, sampling: &Sampling) -> f32 {
        let logit = repeated(logit, sampling);
        if self.output == 0 {
            return logit;
        }
        generated(logit, self.output, sampling)
    }
}

impl Window {
    fn of(prompt: &[Token], most: usize) -> Self {
        let mut window = Self {
            most,
            prompt_tokens: prompt.len(),
            counts: Arc::default(),
        };
        let start = prompt.len().saturating_sub(most);
        for at in start..prompt.len() {
            window.enter(prompt, at);
        }
        window
    }

    /// Moves the window on to the last of `tokens`, which is new.
    pub(super) fn append(&mut self, tokens: &[Token]) {
        self.enter(tokens, tokens.len() - 1);
        if let Some(left) = tokens.len().checked_sub(self.most + 1) {
            self.leave(tokens, left);
        }
    }

    /// Moves the window back to the first `left` of `tokens`.
    pub(super) fn truncate(&mut self, tokens: &[Token], left: usize) {
        for len in (left + 1..=tokens.len()).rev() {
            self.leave(tokens, len - 1);
            if let Some(entered) = len.checked_sub(self.most + 1) {
                self.enter(tokens, entered);
            }
        }
    }

    fn enter(&mut self, tokens: &[Token], at: usize) {
        let counts = Arc::make_mut(&mut self.counts);
        let occurrences = counts.entry(tokens[at]).or_default();
        occurrences.all += 1;
        occurrences.output += u32::from(at >= self.prompt_tokens);
    }

    fn leave(&mut self, tokens: &[Token], at: usize) {
        let token = tokens[at];
        let counts = Arc::make_mut(&mut self.counts);
        if let Some(occurrences) = counts.get_mut(&token) {
            occurrences.all = occurrences.all.saturating_sub(1);
            let output = u32::from(at >= self.prompt_tokens);
            occurrences.output = occurrences.output.saturating_sub(output);
            if occurrences.all == 0 {
                counts.remove(&token);
            }
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

/// Applies the penalties for a token that the output has `count` times.
fn generated(logit: f32, count: u32, sampling: &Sampling) -> f32 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a context has fewer than 2^24 tokens"
    )]
    let count = count as f32;
    logit - (sampling.presence_penalty + sampling.frequency_penalty * count)
}
