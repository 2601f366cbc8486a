//! Sapwood's engine: submits requests to one owner thread per model, which batches, decodes and samples. It is the only
//! crate with model code.
//!
//! ```text
//!   Engine (any thread) ── inbox ──► EngineOwner (one thread) ─► Model: decode, output rows
//!                                         │  scheduler, prefix cache, sampling: pure
//!                                         │  steerers: pre, mid, post
//!                                         └─ outbox ──► RequestHandle
//! ```

pub mod adapters;
pub mod api;
mod bad_words;
#[cfg(any(feature = "embedded", feature = "tokenizer", fuzzing))]
mod byte_pairs;
mod config;
#[cfg(feature = "constraints")]
pub mod constraint;
mod continuation;
#[cfg_attr(
    not(any(feature = "embedded", feature = "tokenizer")),
    allow(dead_code, reason = "asked where vocabularies are read")
)]
mod control_names;
mod draft_model;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod embedding;
mod engine;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(any(feature = "embedded", feature = "tokenizer", test, fuzzing))]
#[cfg_attr(
    not(feature = "embedded"),
    allow(
        dead_code,
        reason = "some of a header is asked for where models are loaded"
    )
)]
mod gguf;
#[cfg(feature = "tokenizer")]
pub mod gguf_vocabulary;
mod inbox;
pub mod infill;
pub mod llama_options;
pub mod model;
mod outbox;
mod owner;
mod owner_thread;
mod prefix_cache;
mod prefix_disk;
mod prefix_entry;
mod prefix_folder;
mod prefix_store;
mod processors;
mod prompt_lookup;
mod queue;
pub mod ranking;
pub mod recommended;
pub mod request_phase;
mod samplers;
mod sampling;
mod saved_state;
mod scheduler;
pub mod scripted;
pub mod stats;
mod steerer_wait;
pub mod stop;
mod submission;
pub mod template;
mod text;
mod token_bytes;
#[cfg(feature = "tokenizer")]
pub mod tokenizer;
mod tokenizer_json;
mod transcript;

pub use config::{Config, PrefixDiskConfig, PrefixSharing, SpeculationMode};
pub use continuation::tokenize_continuation;
pub use draft_model::{DraftMismatch, DraftModel};
pub use engine::Engine;
pub use outbox::RequestHandle;
pub use owner::{EngineOwner, SequenceId, StepReport};
pub use processors::usable as usable_processors;
pub use steerer_wait::SteererWait;
pub use transcript::Transcript;
