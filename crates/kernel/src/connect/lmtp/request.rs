//! Builds the LMTP requests of a call, one for each choice.

use sapwood_engine::Transcript;
use sapwood_net::lmtp::pool::{LmtpPool, PooledItems};
use sapwood_proto::lmtp::{GenerateRequest, Score};
use sapwood_proto::steer::Token;

use crate::call::Instant;

/// The LMTP requests of one call.
pub(super) struct LmtpRequest {
    pub(super) pool: LmtpPool,
    /// Everything but the prompt and the token limit.
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
        Self {
            pool,
            prompt: transcript.prompt().to_vec(),
            max_tokens: transcript.max_tokens(),
            wanted,
            scored,
            deadline,
        }
    }

    /// The stream of a choice.
    pub(super) fn stream(&self, choice: u32) -> PooledItems {
        match &self.scored {
            None => self.generate(choice),
            Some(scored) => self.pool.score(Score {
                prompt: self.prompt.clone(),
                scored: scored.clone(),
                ..Score::default()
            }),
        }
    }

    /// A choice is a stream of its own: sample *i* is what a request with `seed + i` gives (LM-973).
    fn generate(&self, choice: u32) -> PooledItems {
        let wanted = GenerateRequest {
            prompt: self.prompt.clone(),
            max_tokens: self.max_tokens,
            // The token limit may have been cut to the room in the context, and a minimum above it could not be
            // reached.
            min_tokens: self.wanted.min_tokens.min(self.max_tokens),
            seed: self
                .wanted
                .seed
                .map(|seed| seed.wrapping_add(choice.into())),
            ..self.wanted.clone()
        };
        self.pool.generate(wanted, self.deadline)
    }
}
