//! Grammars and sets that are in the host, by their handles.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::Token;
use crate::host::constraints as host;

/// A handle, freed with its last owner. A fork of the sequence has handles of the same numbers.
#[derive(Debug, PartialEq)]
struct Handle(u32);

impl Drop for Handle {
    fn drop(&mut self) {
        host::free(self.0);
    }
}

/// Where one is in a grammar.
#[derive(Debug)]
pub(super) struct Place {
    handle: Handle,
    // To open it again: the host copies handles for forks alone.
    kind: String,
    pattern: String,
}

impl Place {
    pub(super) fn new(kind: &str, pattern: &str) -> Result<Self, String> {
        Ok(Self {
            handle: Handle(host::open(kind, pattern)?),
            kind: kind.to_owned(),
            pattern: pattern.to_owned(),
        })
    }

    pub(super) fn consume(&self, token: Token) -> bool {
        host::consume(self.handle.0, token)
    }

    pub(super) fn rollback(&self, taken_back: &[Token]) {
        // Handles of the host count the end of a text as a token.
        host::rollback(self.handle.0, taken_back.len() as u32);
    }

    pub(super) fn allowed(&self, _has_ended: bool) -> Set {
        Set::of(host::mask(self.handle.0))
    }

    pub(super) fn forced(&self) -> Vec<Token> {
        host::forced(self.handle.0)
    }

    pub(super) fn copy(&self, consumed: &[Token]) -> Self {
        let copy = match Self::new(&self.kind, &self.pattern) {
            Ok(copy) => copy,
            Err(error) => panic!("{error}"),
        };
        for &token in consumed {
            copy.consume(token);
        }
        copy
    }
}

/// A set of tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Set(Arc<Handle>);

impl Set {
    fn of(handle: u32) -> Self {
        Self(Arc::new(Handle(handle)))
    }

    pub(super) fn prefix(prefix: &[u8]) -> Self {
        Self::of(host::prefix_mask(prefix))
    }

    pub(super) fn and(self, other: &Self) -> Self {
        Self::of(host::and(self.0.0, other.0.0))
    }

    pub(super) fn or(self, other: &Self) -> Self {
        Self::of(host::or(self.0.0, other.0.0))
    }

    pub(super) fn not(self) -> Self {
        Self::of(host::not(self.0.0))
    }

    pub(super) fn return_to_host(&self) -> u32 {
        host::return_held(self.0.0)
    }
}
