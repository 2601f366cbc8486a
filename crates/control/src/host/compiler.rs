//! The host as the compiler and the loader of the controller store.

use std::fmt::Write as _;
use std::sync::Arc;

use wasmtime::Engine;

use super::Host;
use super::config::HostConfig;
use super::engine;
use super::program::Program;
use crate::compiler::ArtefactCompiler;
use crate::module::{CheckedModule, ModuleError};

impl ArtefactCompiler for Host {
    type Program = Program;

    fn key(&self) -> String {
        hex(&self.artefact_key())
    }

    fn compile(&self, instrumented: &[u8]) -> Result<Vec<u8>, ModuleError> {
        engine::compile_bytes(&self.0.engine, instrumented)
    }

    fn load(&self, module: &CheckedModule, artefact: &[u8]) -> Result<Program, ModuleError> {
        Self::load(self, module, artefact)
    }

    fn in_use(program: &Program) -> bool {
        program.is_shared()
    }
}

/// Compiles and cannot load: what a compiler child needs of a host with this configuration. Reserves no memory for
/// instances, so that the limits of the child are the compiler's.
pub struct HostCompiler(Engine);

impl HostCompiler {
    /// A compiler for hosts with this configuration.
    ///
    /// # Errors
    /// The Wasm engine cannot be started.
    pub fn new(config: &HostConfig) -> Result<Self, ModuleError> {
        engine::compiling(config).map(Self)
    }
}

impl ArtefactCompiler for HostCompiler {
    type Program = Arc<()>;

    fn key(&self) -> String {
        hex(&engine::artefact_key(&self.0))
    }

    fn compile(&self, instrumented: &[u8]) -> Result<Vec<u8>, ModuleError> {
        engine::compile_bytes(&self.0, instrumented)
    }

    fn load(&self, _: &CheckedModule, _: &[u8]) -> Result<Arc<()>, ModuleError> {
        Err(ModuleError::Host(
            "a compiler child runs nothing".to_owned(),
        ))
    }

    fn in_use(program: &Arc<()>) -> bool {
        Arc::strong_count(program) > 1
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
