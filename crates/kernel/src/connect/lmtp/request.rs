//! Builds the LMTP request of a call, from its start or from any token within it.

use std::sync::Arc;

use sapwood_engine::Transcript;
use sapwood_net::lmtp::pool::{LmtpPool, PooledItems};
use sapwood_proto::lmtp::{GenerateRequest, Score};
use sapwood_proto::steer::{Mask, Token};

use crate::call::Instant;

/// The LMTP requests of one call.
pub(super) struct LmtpRequest {
    pub(super) pool: LmtpPool,
    /// Everything but the prompt and the token limit. Bad words of a single token are forbidden by logit biases.
    wanted: GenerateRequest,
    prompt: Vec<Token>,
    max_tokens: u32,
    /// If set, these tokens are scored instead of generating any.
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

    /// The stream of a whole choice.
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

    /// The stream that continues a choice after `output`.
    pub(super) fn rest(&self, choice: u32, output: &[Token]) -> PooledItems {
        let bias = Arc::clone(&self.wanted.logit_bias);
        self.generate(choice, output, bias, u32::MAX)
    }

    /// The next token of a choice, out of the allowed ones.
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
        // Seeds follow the samples of one stream (LM-973), and no draw of a choice repeats: there are at most 64
        // choices.
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

/// The biases, with every token that is not allowed forbidden; ascending, each token once.
fn forbidding(bias: &[(Token, f32)], allowed: &Mask) -> Arc<[(Token, f32)]> {
    let tokens = 0..u32::try_from(allowed.vocabulary()).unwrap_or(u32::MAX);
    let forbidden = tokens.filter(|token| !allowed.allows(*token));
    let biased = bias.iter().filter(|(token, _)| allowed.allows(*token));
    let mut all: Vec<_> = biased.copied().collect();
    all.extend(forbidden.map(|token| (token, f32::NEG_INFINITY)));
    all.sort_by_key(|(token, _)| *token);
    all.into()
}
