//! Loads compiled modules. The only `unsafe` code of the host.

use wasmtime::{Engine, Module};

/// Loads what [`Engine::precompile_module`] returned.
///
/// The caller passes bytes that this machine's compiler made from a checked module and that nobody else could change:
/// the store keeps artefacts in a folder of mode 0700, takes none from another producer, and compares a checksum
/// (AI-321). That is the contract of [`Host::load`](super::Host::load).
pub(super) fn deserialize(engine: &Engine, artefact: &[u8]) -> wasmtime::Result<Module> {
    // SAFETY: by the contract above the bytes are those of `precompile_module`, unchanged. The engine itself compares
    // version, compile options and CPU features, which the header of the artefact names, and refuses others.
    unsafe { Module::deserialize(engine, artefact) }
}
