//! The configuration of an engine.

use std::time::Duration;

/// Which requests share cached prefixes. A caller can measure from the time to the first token whether a prefix was
/// cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixSharing {
    /// Requests with the same [`prefix_scope`](crate::api::GenerationRequest::prefix_scope).
    #[default]
    Scope,
    /// Every request.
    All,
}

/// A folder of saved prefixes. Its files contain the tokens of prompts, so only their owner can read them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct PrefixDiskConfig {
    /// The folder, which is created. One engine has it at a time; a second one keeps its prefixes in memory alone.
    pub folder: std::path::PathBuf,
    /// The maximum of bytes of its files.
    pub bytes: u64,
}

impl PrefixDiskConfig {
    /// How long [`crate::Engine::drop_saved_prefixes`] keeps memory for what is not written yet.
    pub const MOVE_MAX: Duration = Duration::from_secs(3);
}

/// What drafts the next tokens of a sequence, so that one decode call gives several of them (speculative decoding). The
/// output is the same with and without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpeculationMode {
    /// Nothing: each decode call gives one token of each sequence.
    #[default]
    Off,
    /// Prompt lookup: what followed the last tokens where they occurred before, in the prompt or the output.
    Lookup,
    /// Prompt lookup, which costs nothing, and where that finds nothing a draft model
    /// ([`Engine::spawn_drafting`](crate::Engine::spawn_drafting)).
    Draft,
}

/// The limits of an engine. Plain data; every number has its unit in its name.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Requests that may be queued. One more is refused with `ENGINE_BUSY`.
    pub queue_requests: usize,
    /// Prompt tokens that may be queued, all requests together. A request that finds the queue empty is always
    /// accepted.
    pub queue_tokens: usize,
    /// Milliseconds that a request may be queued before it fails with `queue_timeout`; 0: as long as it takes.
    pub queue_timeout_ms: u64,
    /// Unread token events per choice at which its sequence is parked.
    pub outbox_events: u32,
    /// Milliseconds that a step should take at most beside streams, twice as many where none waits, and four times as many for a
    /// prompt that is alone: a step computes as many prompt tokens as fit in this time, by what earlier steps took, and beside streams
    /// no more than a third of those that wait, or what a third of the time has room for. Streams and new requests wait for the end
    /// of a step. Where decoding alone takes longer, prompts get half as much time in addition.
    pub step_ms: u64,
    /// Milliseconds after the start of `mid` at which a steerer is late (AI-812).
    pub steer_ms: u64,
    /// Bounds 2 x sampled + processed tokens of a steered request, forks included (AI-825). `None`: ten times the context.
    pub fuel_tokens: Option<u64>,
    /// Ageing: of this many admissions of a caller, one goes to the priority of its oldest request that waits, one that was
    /// preempted included, whatever the priorities of the others. 0 disables it, and requests of low priority may wait forever.
    pub ageing_turns: u32,
    /// Which requests share cached prefixes (LM-609).
    pub prefix_sharing: PrefixSharing,
    /// The minimum of tokens that a request and a cached prefix must have in common for the prefix to be used. With a
    /// per-slot KV cache, using a prefix copies all KV cells of a slot, which costs about as much as computing this
    /// many tokens.
    pub prefix_tokens_min: u32,
    /// Bytes of memory for prefixes that have lost their KV cells, from where they are copied back when a prompt begins
    /// with them. `None`: what the model recommends, for an embedded one an eighth of the memory that was available when
    /// it was loaded, at most 8 GiB. 0: they are dropped.
    pub prefix_ram_bytes: Option<usize>,
    /// Where prefixes are written that are evicted from memory, and all when the engine ends, and from where they are read when a
    /// prompt begins with them. `None`: they end with the engine. A model whose prefixes cannot be saved has no files.
    pub prefix_disk: Option<PrefixDiskConfig>,
    /// What drafts tokens. Models that cannot truncate a slot decode without drafts.
    pub speculation: SpeculationMode,
    /// The maximum of tokens of a draft. Drafts are shorter where less is accepted, and where they would take more time than
    /// they save.
    pub draft_tokens_max: u32,
    /// Threads that sample the output rows of a step, where there are enough of them; at most 16, shared by all engines of the
    /// process. `None`: as many as there are processors. 1: the engine's own.
    pub sample_threads: Option<u32>,
    /// Requests without a seed get one derived from this number. `None`: derived from the operating system's
    /// randomness.
    pub seed: Option<u64>,
}

impl Config {
    /// How long a request may be queued, if that is limited.
    pub(crate) fn queue_timeout(&self) -> Option<Duration> {
        let limit = Duration::from_millis(self.queue_timeout_ms);
        Some(limit).filter(|limit| !limit.is_zero())
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            queue_requests: 1024,
            queue_tokens: 4_194_304,
            queue_timeout_ms: 60_000,
            outbox_events: 256,
            step_ms: 100,
            steer_ms: 25,
            fuel_tokens: None,
            ageing_turns: 8,
            prefix_sharing: PrefixSharing::default(),
            prefix_tokens_min: 16,
            prefix_ram_bytes: None,
            prefix_disk: None,
            speculation: SpeculationMode::default(),
            draft_tokens_max: 16,
            sample_threads: None,
            seed: None,
        }
    }
}
