//! What nearly every controller uses: `use sapwood_guest::prelude::*;`.
//!
//! It includes the parts of `alloc` that the standard prelude has, so that a controller without the standard library
//! reads like any other Rust.

pub use alloc::borrow::ToOwned;
pub use alloc::boxed::Box;
pub use alloc::string::{String, ToString};
pub use alloc::vec::Vec;
pub use alloc::{format, vec};

pub use crate::constraint::{ByteClass, Constraint, Pattern, Substring};
pub use crate::{
    Branch, ConditionalSplice, Controller, Decision, Grammar, Init, Mask, Matcher, Sample,
    SequenceId, Step, Temperature, Token, TokenSet, TokenTrie, Vars, arg, config, eos_token, log,
    self_id, tokenize, top_logits, trie, try_arg,
};
