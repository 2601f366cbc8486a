//! [`ArtefactCompiler`] for the Wasm host.

use super::ArtefactCompiler;
use crate::host::{Host, Program};
use crate::module::{CheckedModule, ModuleError};
use crate::store::ArtefactKey;

impl ArtefactCompiler for Host {
    type Program = Program;

    fn key(&self) -> ArtefactKey {
        ArtefactKey::of(self.artefact_key())
    }

    fn compile(&self, module: &CheckedModule) -> Result<Vec<u8>, ModuleError> {
        Self::compile(self, module)
    }

    fn load(&self, module: &CheckedModule, artefact: &[u8]) -> Result<Program, ModuleError> {
        Self::load(self, module, artefact)
    }

    fn in_use(program: &Program) -> bool {
        program.is_shared()
    }
}
