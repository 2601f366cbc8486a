//! [`PromptTime`]: what prompts take of a step, learned from steps of all sizes.

use super::CHANGE_MAX;

/// A pass is not known better than this share of a step of streams. Where prompts seemed to need none, their tokens would have to
/// explain all that is observed.
const PASS_UNKNOWN: f64 = 1.0 / 4.0;
/// A pass takes so many times what a step of streams does, at most: weights may be copied to another device for a prompt that are
/// computed in place for streams. More than this is a machine that was held up.
const PASS_MAX: f64 = 4.0;
/// A token takes at most so many times what a step takes for each of its tokens: it cannot take longer than the whole, but noise makes
/// a step now and then shorter than it should be.
const TOKEN_MAX: f64 = 2.0;
/// What a step adds to the doubt about both: in the long run a new measurement has about a quarter of the weight.
const DOUBT_GROWS: f64 = 0.05;
const DOUBT_MAX: f64 = 4.0;
/// How alike the doubts may be. If they were the same, no step could tell a pass from tokens any more.
const ALIKE_MAX: f64 = 0.98;

/// A straight line: each prompt of a step needs a pass over the weights, and each token of it some time more. All times are in
/// nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PromptTime {
    /// A pass over the weights besides that of the streams.
    pub(super) pass: f64,
    /// One prompt token.
    pub(super) token: f64,
    /// How little is known of both.
    pub(super) doubt: Doubt,
}

/// Variances of the shares by which a pass and a token may differ from their estimates, and the covariance of these. The variance of a
/// measurement is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Doubt {
    pass: f64,
    token: f64,
    both: f64,
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

    /// Takes a step into account, as a Kalman filter does.
    ///
    /// The difference between what it took and what was expected goes to both estimates, by what was expected of each and by how little
    /// is known of it: a step with few tokens says what a pass takes, one with many what a token does, and steps of several sizes
    /// tell one from the other.
    pub(super) fn learn(&mut self, step: PromptStep) {
        let pass = self.pass.max(step.streams * PASS_UNKNOWN);
        // An estimate of nothing could never grow.
        let token = self.token.max(1.0);
        let expected = self.pass * step.passes + token * step.tokens;
        let took = step
            .took
            .clamp(expected / CHANGE_MAX, expected * CHANGE_MAX);
        let difference = took / expected - 1.0;
        let pass_share = pass * step.passes / expected;
        let token_share = token * step.tokens / expected;
        let (pass_gain, token_gain) = self.doubt.gains(pass_share, token_share);
        let longer = (self.pass + pass * pass_gain * difference)
            .clamp(0.0, self.pass.max(step.streams * PASS_MAX));
        // Neither takes longer than the whole.
        self.pass = longer.min(step.took / step.passes);
        let longer = token * (1.0 + (token_gain * difference).max(-0.5));
        let most = TOKEN_MAX * step.took / step.tokens;
        self.token = longer.min(most).max(1.0);
    }
}

impl Doubt {
    /// Nothing is known.
    pub(super) const ALL: Self = Self {
        pass: DOUBT_MAX,
        token: DOUBT_MAX,
        both: 0.0,
    };

    /// Returns which parts of the difference between the measured and the expected time of a step are those of a pass and of a token,
    /// which have these shares of the expected time. The step makes the doubt smaller.
    fn gains(&mut self, pass_share: f64, token_share: f64) -> (f64, f64) {
        // The machine, and the length of sequences, have changed meanwhile.
        let pass = (self.pass + DOUBT_GROWS).min(DOUBT_MAX);
        let token = (self.token + DOUBT_GROWS).min(DOUBT_MAX);
        let most = ALIKE_MAX * (pass * token).sqrt();
        let both = self.both.clamp(-most, most);
        let pass_part = pass * pass_share + both * token_share;
        let token_part = both * pass_share + token * token_share;
        let all = pass_share * pass_part + token_share * token_part + 1.0;
        let (pass_gain, token_gain) = (pass_part / all, token_part / all);
        *self = Self {
            pass: pass - pass_gain * pass_part,
            token: token - token_gain * token_part,
            both: both - pass_gain * token_part,
        };
        (pass_gain, token_gain)
    }
}
