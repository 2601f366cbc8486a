//! DRY ("don't repeat yourself"): a penalty on tokens that would continue a repetition.
//!
//! The tokens at the end of the text are compared with every place before: where the same n tokens stand, the token
//! after them would make it n + 1. From `allowed_length` tokens on its logit is lowered by
//! `multiplier * base^(n - allowed_length)`. Sequence breakers are texts that no repetition crosses, such as the quotes
//! and colons of a chat. Source: P. E. Weidmann, <https://github.com/oobabooga/text-generation-webui/pull/5677>, and
//! llama.cpp's sampler of this name.
//!
//! The comparison is the Z algorithm over the reversed text: at most two comparisons for each token of the window,
//! however repetitive it is. llama.cpp looks for breakers among the tokens that their texts may consist of; here they
//! are found in the bytes of the output, in whichever tokens they come.

use std::sync::Arc;

use aho_corasick::AhoCorasick;
use sapwood_proto::params::DRY_BREAKERS_MAX;
use sapwood_proto::steer::Token;

use crate::api::{DrySampling, Vocabulary};

/// What DRY knows of a sequence, beside its tokens.
#[derive(Clone, Debug)]
pub(super) struct DryHistory {
    request: Arc<DryRequest>,
    /// Where breakers end in the output, ascending: the number of tokens up to there, prompt included.
    ends: Vec<u32>,
    /// Tokens of the output that contain a breaker, ascending, without those of the prompt.
    breaking: Vec<Token>,
}

/// What the choices of a request share.
#[derive(Debug)]
struct DryRequest {
    dry: Arc<DrySampling>,
    breakers: Option<AhoCorasick>,
    /// Bytes of the longest breaker.
    longest: usize,
    /// Where the last breaker within the prompt's window ends, as in [`DryHistory::ends`]; 0 without one.
    prompt_end: u32,
    /// Tokens of the prompt's window that contain a breaker, ascending.
    breaking: Vec<Token>,
}

/// Buffers of one computation.
#[derive(Debug, Default)]
pub(super) struct DryScratch {
    /// For each place, counted from the end of the window, the tokens before it that the text ends with.
    repeats: Vec<u32>,
    /// By token: the length of the longest repetition that it would continue, 0 for most. Others are in `penalties`.
    longest: Vec<u32>,
    /// Penalties, each token once.
    penalties: Vec<(Token, f32)>,
}

impl DryScratch {
    /// Forgets the last computation.
    pub(super) fn clear(&mut self) {
        for (token, _) in self.penalties.drain(..) {
            self.longest[token as usize] = 0;
        }
    }

    /// Whether the last computation gave this token a penalty.
    pub(super) fn is_penalised(&self, token: Token) -> bool {
        self.longest(token) > 0
    }

    fn longest(&self, token: Token) -> u32 {
        self.longest.get(token as usize).copied().unwrap_or(0)
    }

    fn note(&mut self, token: Token, repeat: u32) {
        let at = token as usize;
        if at >= self.longest.len() {
            self.longest.resize(at + 1, 0);
        }
        if self.longest[at] == 0 {
            self.penalties.push((token, 0.0));
        }
        self.longest[at] = self.longest[at].max(repeat);
    }
}

impl DryHistory {
    pub(super) fn of(
        prompt: &[Token],
        dry: &Arc<DrySampling>,
        vocabulary: &dyn Vocabulary,
    ) -> Self {
        // Bounded texts, so the automaton is small; without it nothing breaks a repetition.
        let breakers = AhoCorasick::new(&dry.sequence_breakers).ok();
        let breakers = breakers.filter(|_| !dry.sequence_breakers.is_empty());
        let lengths = dry.sequence_breakers.iter().map(String::len);
        let mut request = DryRequest {
            dry: Arc::clone(dry),
            breakers,
            longest: lengths.max().unwrap_or(0),
            prompt_end: 0,
            breaking: Vec::new(),
        };
        // What is before the window is never looked at again: with the output it only moves on.
        let window = usize::try_from(dry.penalty_last_n).unwrap_or(prompt.len());
        let start = prompt.len().saturating_sub(window);
        let mut distinct = prompt[start..].to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.retain(|&token| request.contains_breaker(vocabulary.bytes(token)));
        request.breaking = distinct;
        // From the end: the last breaker alone counts.
        let end = (start + 1..=prompt.len())
            .rev()
            .find(|&end| request.breaker_ends(&prompt[..end], vocabulary));
        request.prompt_end = count(end.unwrap_or(0));
        Self {
            request: Arc::new(request),
            ends: Vec::new(),
            breaking: Vec::new(),
        }
    }

    /// Takes note of the last of `tokens`.
    pub(super) fn append(&mut self, tokens: &[Token], vocabulary: &dyn Vocabulary) {
        let Some(&token) = tokens.last() else {
            return;
        };
        if self.request.breaker_ends(tokens, vocabulary) {
            self.ends.push(count(tokens.len()));
            let contains = self.request.contains_breaker(vocabulary.bytes(token));
            if contains
                && self.request.breaking.binary_search(&token).is_err()
                && let Err(at) = self.breaking.binary_search(&token)
            {
                self.breaking.insert(at, token);
            }
        }
    }

    /// Forgets all but the first `left` tokens, the prompt included.
    pub(super) fn truncate(&mut self, left: usize) {
        let kept = self.ends.partition_point(|&end| end as usize <= left);
        self.ends.truncate(kept);
        // What a token contains remains true.
    }

    /// Returns the penalties of the tokens that would continue a repetition, each token once.
    pub(super) fn penalties<'s>(
        &self,
        tokens: &[Token],
        scratch: &'s mut DryScratch,
    ) -> &'s [(Token, f32)] {
        let dry = &*self.request.dry;
        scratch.clear();
        let end = self.ends.last().copied().unwrap_or(self.request.prompt_end);
        let after_breaker = tokens.len().saturating_sub(end as usize);
        let window = usize::try_from(dry.penalty_last_n).unwrap_or(tokens.len());
        let tokens = &tokens[tokens.len().saturating_sub(window)..];
        // No repetition goes back beyond the last breaker.
        let limit = count(after_breaker.min(tokens.len()));
        if limit < dry.allowed_length {
            return &scratch.penalties;
        }
        repeats(tokens, &mut scratch.repeats);
        // The first of the repeats is that of the text with itself. From the second on, each belongs to the token that
        // follows the place, and these are the tokens from the last one on backwards.
        let lengths = std::mem::take(&mut scratch.repeats);
        for (&token, &repeat) in tokens.iter().rev().zip(&lengths[1..]) {
            if repeat >= dry.allowed_length {
                scratch.note(token, repeat.min(limit));
            }
        }
        scratch.repeats = lengths;
        let longest = &mut scratch.longest;
        scratch.penalties.retain_mut(|(token, penalty)| {
            let repeat = &mut longest[*token as usize];
            // A breaker ends the repetition, so it is always welcome.
            if self.is_breaking(*token) {
                *repeat = 0;
                return false;
            }
            *penalty = dry.penalty(*repeat);
            true
        });
        &scratch.penalties
    }

    /// Returns the penalty of a token that has one, of which the last computation was.
    pub(super) fn penalty(&self, token: Token, scratch: &DryScratch) -> f32 {
        self.request.dry.penalty(scratch.longest(token))
    }

    fn is_breaking(&self, token: Token) -> bool {
        let own = self.breaking.binary_search(&token);
        own.is_ok() || self.request.breaking.binary_search(&token).is_ok()
    }
}

impl DryRequest {
    /// Whether a breaker ends within the last of `tokens`.
    fn breaker_ends(&self, tokens: &[Token], vocabulary: &dyn Vocabulary) -> bool {
        let (Some(breakers), Some((&last, earlier))) = (&self.breakers, tokens.split_last()) else {
            return false;
        };
        let last = vocabulary.bytes(last);
        if last.is_empty() {
            return false;
        }
        // The bytes before the token, from the end, as far back as a breaker can reach. Tokens without bytes are counted
        // too, so that many of them are not walked over again for each token.
        let reach = self.longest - 1;
        let mut bytes = Vec::with_capacity(reach + last.len());
        for &token in earlier.iter().rev().take(DRY_BREAKERS_MAX) {
            let left = reach - bytes.len();
            bytes.extend(vocabulary.bytes(token).iter().rev().take(left));
            if bytes.len() == reach {
                break;
            }
        }
        bytes.reverse();
        let before = bytes.len();
        bytes.extend_from_slice(last);
        let mut found = breakers.find_overlapping_iter(&bytes);
        found.any(|found| found.end() > before)
    }

    fn contains_breaker(&self, bytes: &[u8]) -> bool {
        let breakers = self.breakers.as_ref();
        breakers.is_some_and(|breakers| breakers.is_match(bytes))
    }
}

impl DrySampling {
    /// Returns the penalty of a token that would continue a repetition of this many tokens, of at least
    /// `allowed_length`.
    fn penalty(&self, repeat: u32) -> f32 {
        let exponent = repeat.saturating_sub(self.allowed_length);
        // In double precision and bounded: an infinite logit would be taken for a defect of the model.
        let exponent = i32::try_from(exponent).unwrap_or(i32::MAX);
        let penalty = f64::from(self.multiplier) * f64::from(self.base).powi(exponent);
        #[expect(clippy::cast_possible_truncation, reason = "within the range of f32")]
        let penalty = penalty.min(PENALTY_MAX) as f32;
        penalty
    }
}

/// Larger penalties are this one, beyond the reach of any bias.
const PENALTY_MAX: f64 = 1e32;

/// Writes, for each k, how many tokens at the end of the text also stand before its last k tokens: the Z algorithm over
/// the reversed text.
fn repeats(tokens: &[Token], out: &mut Vec<u32>) {
    let len = tokens.len();
    let reversed = |at: usize| tokens[len - 1 - at];
    out.clear();
    out.resize(len, 0);
    if let Some(first) = out.first_mut() {
        *first = count(len);
    }
    // The match that reaches furthest so far: it covers the places from `left` up to `right`.
    let (mut left, mut right) = (0, 0);
    for at in 1..len {
        // Within that match the text is the same as at its beginning, whose repeats are known.
        let mut length = if at < right {
            (out[at - left] as usize).min(right - at)
        } else {
            0
        };
        while at + length < len && reversed(length) == reversed(at + length) {
            length += 1;
        }
        if at + length > right {
            (left, right) = (at, at + length);
        }
        out[at] = count(length);
    }
}

/// A number of tokens; a context is a u32.
fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
