//! Builds the LMTP request of a call, from its start or from any token within it.

use std::sync::Arc;

use sapwood_engine::Transcript;
use sapwood_net::lmtp::pool::{LmtpPool, PooledItems};
use sapwood_proto::lmtp::{GenerateRequest, Score};
use sapwood_proto::steer::{Mask, Token};

use crate::call::Instant;

/// The request of one call.
pub(super) struct LmtpRequest {
    pub(super) pool: LmtpPool,
    /// But for its prompt and its limit; bad words that lie within one token are forbidden by their biases.
    wanted: GenerateRequest,
    prompt: Vec<Token>,
    max_tokens: u32,
    /// Instead of asking for tokens: how likely these are.
    scored: Option<Vec<Token>>,
    deadline: Option<Instant>,
}

impl LmtpRequest {
    pub(super) fn new(
        pool: LmtpPool,
        wanted: GenerateRequest,
        transcript: &Transcript,
        scored: Option<Vec<Token>>,
        deadline: Option<Instant>,
    ) -> Self {
        let allowed = transcript.allowed(0);
        let bias = allowed.map(|allowed| forbidding(&wanted.logit_bias, &allowed));
        Self {
            pool,
            prompt: transcript.prompt().to_vec(),
            max_tokens: transcript.max_tokens(),
            wanted: GenerateRequest {
                logit_bias: bias.unwrap_or_else(|| Arc::clone(&wanted.logit_bias)),
                ..wanted
            },
            scored,
            deadline,
        }
    }

    /// All of a choice.
    pub(super) fn whole(&self, choice: u32) -> PooledItems {
        match &self.scored {
            None => self.rest(choice, &[]),
            Some(scored) => self.pool.score(Score {
                prompt: self.prompt.clone(),
                scored: scored.clone(),
                ..Score::default()
            }),
        }
    }

    /// What follows this output of a choice.
    pub(super) fn rest(&self, choice: u32, output: &[Token]) -> PooledItems {
        let bias = Arc::clone(&self.wanted.logit_bias);
        self.generate(choice, output, bias, u32::MAX)
    }

    /// The next token of a choice, out of those that are allowed there.
    pub(super) fn one(&self, choice: u32, output: &[Token], allowed: &Mask) -> PooledItems {
        let bias = forbidding(&self.wanted.logit_bias, allowed);
        self.generate(choice, output, bias, 1)
    }

    fn generate(
        &self,
        choice: u32,
        output: &[Token],
        logit_bias: Arc<[(Token, f32)]>,
        most: u32,
    ) -> PooledItems {
        let given = u32::try_from(output.len()).unwrap_or(u32::MAX);
        let max_tokens = self.max_tokens.saturating_sub(given).min(most);
        let min_tokens = self.wanted.min_tokens.saturating_sub(given);
        // As samples of one stream have them (LM-973), and no draw of a choice twice: there are 64 choices at most.
        let drawn = (u64::from(given) << 6).wrapping_add(choice.into());
        let wanted = GenerateRequest {
            prompt: [&self.prompt, output].concat(),
            max_tokens,
            min_tokens: min_tokens.min(max_tokens),
            seed: self.wanted.seed.map(|seed| seed.wrapping_add(drawn)),
            logit_bias,
            ..self.wanted.clone()
        };
        self.pool.generate(wanted, self.deadline)
    }
}

/// The biases, and what is not allowed forbidden; ascending, each token once.
fn forbidding(bias: &[(Token, f32)], allowed: &Mask) -> Arc<[(Token, f32)]> {
    let tokens = 0..u32::try_from(allowed.vocabulary()).unwrap_or(u32::MAX);
    let forbidden = tokens.filter(|token| !allowed.allows(*token));
    let biased = bias.iter().filter(|(token, _)| allowed.allows(*token));
    let mut all: Vec<_> = biased.copied().collect();
    all.extend(forbidden.map(|token| (token, f32::NEG_INFINITY)));
    all.sort_by_key(|(token, _)| *token);
    all.into()
}
