//! [`Artefact`]: a compiled module. Loading one is the only `unsafe` code of the host in this process.

use std::fmt;

use wasmtime::{Engine, Module};

/// A compiled module: machine code, which [`Host::load`](super::Host::load) makes executable.
///
/// There is none of bytes that a caller chooses. It comes from a compiler of this process, from a compiler child, or from
/// the store, whose files belong to this user alone and carry a checksum (AI-321).
#[derive(Clone, PartialEq, Eq)]
pub struct Artefact(Vec<u8>);

impl Artefact {
    /// An artefact of bytes that this machine's compiler made from a checked module, and that nobody else could have
    /// changed since. Whoever calls this vouches for it: other bytes could be any machine code.
    pub(crate) const fn vouched_for(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// Its size in bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "what a compiler returns is not empty"
    )]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Loads it.
    pub(super) fn load(&self, engine: &Engine) -> wasmtime::Result<Module> {
        deserialize(engine, &self.0)
    }
}

impl AsRef<[u8]> for Artefact {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Artefact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Artefact")
            .field("bytes", &self.0.len())
            .finish()
    }
}

/// Loads what [`Engine::precompile_module`] returned. In a template the bytes are those that its runtime has handed on:
/// an [`Artefact`] of that process, over a socket that nobody else has.
pub(super) fn deserialize(engine: &Engine, bytes: &[u8]) -> wasmtime::Result<Module> {
    // SAFETY: the bytes are those of `precompile_module`, unchanged: `Artefact::vouched_for` demands it of the few places
    // in this crate that call it, and nobody outside can. The engine itself compares version, compile options and CPU
    // features, which the header of the artefact names, and refuses others.
    unsafe { Module::deserialize(engine, bytes) }
}
