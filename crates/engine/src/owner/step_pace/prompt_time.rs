//! [`PromptTime`]: what prompts take of a step, learned from steps of all sizes.

use super::{CHANGE_MAX, ENOUGH_TOKENS, NEW_SHARE, TOKENS_MIN, count};

/// A pass is not known better than this share of a step of streams. Where prompts seemed to need none, their tokens would have to
/// explain all that is observed.
const PASS_UNKNOWN: f64 = 1.0 / 4.0;
/// A pass takes so many times what a step of streams does, at most: weights may be copied to another device for a prompt that are
/// computed in place for streams. More than this is a machine that was held up.
const PASS_MAX: f64 = 4.0;

/// A straight line: each prompt of a step needs a pass over the weights, and each token of it some time more. All times are in
/// nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PromptTime {
    /// A pass over the weights besides that of the streams.
    pub(super) pass: f64,
    /// One prompt token.
    pub(super) token: f64,
}

/// What prompts took in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptStep {
    /// How many passes over the weights they needed besides that of the streams.
    pub(super) passes: f64,
    /// How many tokens they were.
    pub(super) tokens: f64,
    /// The time of the prompts: that of the step without its streams.
    pub(super) took: f64,
    /// The time of a step of streams alone.
    pub(super) streams: f64,
}

impl PromptTime {
    /// Returns what so many tokens of one prompt take.
    pub(super) fn of(self, tokens: f64) -> f64 {
        self.pass + self.token * tokens
    }

    /// Returns the time of a token as if no other step were known.
    pub(super) fn token_of(self, step: PromptStep) -> f64 {
        // A pass that seems to take longer than it does makes no token free.
        (step.took - self.pass * step.passes).max(step.took / 4.0) / step.tokens
    }

    /// Takes a step into account.
    ///
    /// A part of the difference between what it took and what was expected goes to both estimates, by the square of what was expected
    /// of each: a step with few tokens says what a pass takes, and one with many what a token does. Steps of one size leave open what
    /// the shares are, but for such steps it does not matter.
    pub(super) fn learn(&mut self, step: PromptStep) {
        // An estimate of nothing could never grow.
        let tokens = self.token.max(1.0) * step.tokens;
        let expected = self.pass * step.passes + tokens;
        let difference = step
            .took
            .clamp(expected / CHANGE_MAX, expected * CHANGE_MAX)
            - expected;
        let pass_part = self.pass.max(step.streams * PASS_UNKNOWN) * step.passes;
        // So few tokens cost hardly more than one. If they took the blame, they would stay few, and never show that they are cheap.
        let few = count(TOKENS_MIN);
        let known = (step.tokens - few).max(0.0) / (count(ENOUGH_TOKENS) - few);
        let token_part = tokens * known.min(1.0);
        let squares = (pass_part * pass_part + token_part * token_part).max(1.0);
        let change = difference * NEW_SHARE / squares;
        let pass = self.pass + change * pass_part * pass_part / step.passes;
        self.pass = pass.clamp(0.0, self.pass.max(step.streams * PASS_MAX));
        let token = self.token + change * token_part * token_part / step.tokens;
        self.token = token.max(1.0);
    }
}
