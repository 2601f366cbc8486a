//! [`ArtefactCompiler`] for the Wasm host.

use super::ArtefactCompiler;
use crate::host::{Artefact, Host, Program};
use crate::module::{CheckedModule, ModuleError};
use crate::store::ArtefactKey;

impl ArtefactCompiler for Host {
    type Program = Program;

    fn key(&self) -> ArtefactKey {
        ArtefactKey::of(self.artefact_key())
    }

    fn compile(&self, module: &CheckedModule) -> Result<Artefact, ModuleError> {
        Self::compile(self, module)
    }

    fn load(&self, module: &CheckedModule, artefact: &Artefact) -> Result<Program, ModuleError> {
        Self::load(self, module, artefact)
    }

    fn in_use(program: &Program) -> bool {
        program.is_shared()
    }
}
