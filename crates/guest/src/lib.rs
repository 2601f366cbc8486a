//! Write controllers in Rust that steer decoding token by token.
//!
//! A controller is a small program beside a language model: before each token it decides which tokens are allowed, what
//! text is appended without asking the model, what is taken back, and whether the sequence forks or ends. It is
//! compiled to WebAssembly and uploaded to a server, or linked into a Rust program and tested natively ([`native`],
//! [`testing`]).
//!
//! ```
//! #![cfg_attr(target_arch = "wasm32", no_std)]
//! use sapwood_guest::prelude::*;
//!
//! /// Answers "yes", whatever the prompt is.
//! #[derive(Clone, Default)]
//! struct Yes {
//!     done: bool,
//! }
//!
//! impl Controller for Yes {
//!     fn step(&mut self, _step: Step<'_>) -> Decision {
//!         if self.done {
//!             return Decision::Stop;
//!         }
//!         self.done = true;
//!         Decision::fast_forward(tokenize("yes"))
//!     }
//! }
//!
//! sapwood_guest::export!(Yes);
//! # fn main() {
//! # let run = sapwood_guest::testing::run::<Yes>("", "Is water wet? ", "no");
//! # assert_eq!(run.texts(), ["yes"]);
//! # }
//! ```
//!
//! # Targets and features
//! `wasm32-unknown-unknown` and `wasm32-wasip1`, with stable Rust and without linker flags. There the crate needs no
//! standard library and brings an allocator and a panic handler; so the controller's crate must be `no_std` too, unless
//! the feature `std` is on. On other targets the same source runs natively, with the standard library.
//!
//! The feature `p1` compiles a controller for runtimes of the seed's generation, with three callbacks; see [`abi::p1`]
//! for what differs.
//!
//! The feature `host` lets the host compute what a [`Grammar`] and a [`TokenSet`] are: such a module is smaller and quicker,
//! but runs on Sapwood only.

#![cfg_attr(all(target_arch = "wasm32", not(feature = "std")), no_std)]

extern crate alloc;

#[doc(hidden)]
pub mod abi;
#[cfg(any(target_arch = "wasm32", test))]
mod allocator;
mod argument;
pub mod constraint;
mod controller;
mod grammar;
pub mod json;
mod log;
mod mask;
mod matcher;
pub mod prelude;
mod trie;
mod vars;

#[cfg(not(target_arch = "wasm32"))]
pub mod native;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;
#[cfg(target_arch = "wasm32")]
mod wasm;

/// Compiles the examples of the guide to controllers.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/controllers.md")]
struct Guide;

/// The functions of the host: those of the module's imports, or of the native run that is in progress.
#[cfg(not(target_arch = "wasm32"))]
use native::host;
#[cfg(target_arch = "wasm32")]
use wasm::host;

use alloc::vec::Vec;

pub use argument::{Argument, ArgumentError, arg, try_arg};
pub use constraint::Constraint;
pub use controller::{
    Branch, ConditionalSplice, Controller, Decision, Init, Sample, Step, Temperature,
};
pub use grammar::{Allowed, Grammar, GrammarError, TokenSet};
#[doc(hidden)]
pub use log::write_line;
pub use mask::Mask;
pub use matcher::Matcher;
pub use trie::{TokenTrie, TrieError};
pub use vars::{Value, Vars};

/// A token id of the model's vocabulary.
pub type Token = u32;

/// The number of a sequence in its request: what [`self_id`] and [`Step::fork_group`] contain.
pub type SequenceId = u32;

/// The model's tokens for a text; no special tokens, no added space.
///
/// Tokenise a text as a whole: the tokens of "ab" are seldom those of "a" and then "b".
#[must_use]
pub fn tokenize(text: impl AsRef<[u8]>) -> Vec<Token> {
    host::tokenize(text.as_ref())
}

/// The vocabulary's trie. The first call copies it from the host, megabytes for large vocabularies, so a controller that
/// does not need it should not call this.
#[must_use]
pub fn trie() -> TokenTrie {
    host::trie()
}

/// How many tokens the vocabulary has.
#[must_use]
pub fn vocabulary_size() -> usize {
    host::vocabulary_size()
}

/// The end-of-sequence token.
#[must_use]
pub fn eos_token() -> Token {
    host::eos_token()
}

/// The number of this sequence; 0 before the first step.
#[must_use]
pub fn self_id() -> SequenceId {
    host::sequence_id()
}

/// The model's best tokens of the last step with their log-probabilities, best first and before all masks: at most 64. A
/// controller that calls this makes its requests slower. None before the first step, and without the feature `host`.
#[must_use]
pub fn top_logits(count: usize) -> Vec<(Token, f32)> {
    #[cfg(all(feature = "host", target_arch = "wasm32"))]
    return host::constraints::top_logits(count);
    #[cfg(not(all(feature = "host", target_arch = "wasm32")))]
    {
        let _ = count;
        Vec::new()
    }
}

/// A setting of the host: `fork`, `backtrack` and `ff_tokens` are 1 where the engine can do that and 0 where it cannot.
/// Unknown names are 0.
#[must_use]
pub fn config(name: &str) -> i32 {
    host::config(name)
}
