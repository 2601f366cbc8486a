//! The configuration of an engine.

/// Which requests share cached prefixes. A caller can tell from the time to the first token whether one was cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixSharing {
    /// Requests of the same scope: [`prefix_scope`](crate::api::GenerationRequest::prefix_scope).
    #[default]
    Scope,
    /// Every request.
    All,
}

/// The limits of an engine. Plain data; every number has its unit in its name.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Requests that may wait. One more is refused `ENGINE_BUSY`.
    pub queue_requests: usize,
    /// Prompt tokens that may wait, together. A request that finds the queue empty is always taken.
    pub queue_tokens: usize,
    /// Milliseconds that a request may wait before it fails `queue_timeout`.
    pub queue_timeout_ms: u64,
    /// Unread token events per choice at which its sequence is parked.
    pub outbox_events: u32,
    /// Prompt tokens computed in a step in which nothing is decoded. A newcomer waits for the pass that has begun, so
    /// a larger number costs time to the first token; raise it where a pass is fast (a GPU).
    pub prefill_tokens_alone: u32,
    /// Tokens of a step in which something is decoded: what decoding leaves of them is spent on prompts.
    pub step_tokens: u32,
    /// Prompt tokens computed at least for each prompt that waits, as far as the model's batch goes: one newcomer hardly
    /// slows those that run, and many do not wait for one another.
    pub prefill_tokens_min: u32,
    /// Milliseconds after the start of `mid` at which a steerer is late (AI-812).
    pub steer_ms: u64,
    /// Of so many requests that begin to run, one is of the priority of that which has waited longest, whatever others have;
    /// 0: none, so that those of low priority may wait for ever.
    pub ageing_turns: u32,
    /// Who shares computed prefixes (LM-609).
    pub prefix_sharing: PrefixSharing,
    /// Tokens that a request and a computed prefix have in common at least for the prefix to be used. Where slots have cells
    /// of their own, using one copies all cells of a slot, which costs about as much as computing so many tokens.
    pub prefix_tokens_min: u32,
    /// Seeds for requests that give none follow from this; `None`: from the operating system's randomness.
    pub seed: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            queue_requests: 1024,
            queue_tokens: 4_194_304,
            queue_timeout_ms: 60_000,
            outbox_events: 256,
            prefill_tokens_alone: 128,
            step_tokens: 128,
            prefill_tokens_min: 64,
            steer_ms: 25,
            ageing_turns: 8,
            prefix_sharing: PrefixSharing::default(),
            prefix_tokens_min: 16,
            seed: None,
        }
    }
}
