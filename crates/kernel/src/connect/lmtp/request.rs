//! Builds the LMTP requests of a call, one for each choice.

use sapwood_engine::Transcript;
use sapwood_net::lmtp::pool::{LmtpPool, PooledItems};
use sapwood_proto::lmtp::{GenerateRequest, Score};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::steer::Token;

use crate::call::Instant;

/// The LMTP requests of one call.
pub(super) struct LmtpRequest {
    pub(super) pool: LmtpPool,
    params: GenerationParams,
    prompt: Vec<Token>,
    /// If set, these tokens are scored instead of generating any.
    scored: Option<Vec<Token>>,
    deadline: Option<Instant>,
}

impl LmtpRequest {
    pub(super) fn new(
        pool: LmtpPool,
        mut params: GenerationParams,
        transcript: &Transcript,
        scored: Option<Vec<Token>>,
        deadline: Option<Instant>,
    ) -> Self {
        // The token limit may have been cut to the room in the context, and a minimum above it could not be reached.
        let max_tokens = transcript.max_tokens();
        params.max_tokens = Some(max_tokens);
        params.min_tokens = params.min_tokens.map(|min| min.min(max_tokens));
        Self {
            pool,
            prompt: transcript.prompt().to_vec(),
            params,
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
                lora: self.params.lora.clone(),
                ..Score::default()
            }),
        }
    }

    /// A choice is a stream of its own: sample *i* is what a request with `seed + i` gives (LM-973).
    fn generate(&self, choice: u32) -> PooledItems {
        let mut params = self.params.clone();
        params.seed = params.seed.map(|seed| seed.wrapping_add(choice.into()));
        let prompt = self.prompt.clone();
        let wanted = GenerateRequest {
            prompt,
            params,
            ..GenerateRequest::default()
        };
        self.pool.generate(wanted, self.deadline)
    }
}
