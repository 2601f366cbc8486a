//! [`Program`]: a loaded module, ready to be instantiated.

use std::fmt;
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use wasmparser::{DataKind, Operator, Parser, Payload};
use wasmtime::{Engine, InstancePre, Linker};

use super::artefact::{self, Artefact};
#[cfg(target_os = "linux")]
use super::failure::Abort;
use super::state::ControllerState;
use crate::module::{Abi, CheckedModule, ForkLayout, MainExport, ModuleError, ModuleId};

/// A loaded module. Cheap to clone; the code is freed with the last clone and instance.
#[derive(Clone)]
pub struct Program(Arc<ProgramParts>);

struct ProgramParts {
    id: ModuleId,
    abi: Abi,
    steers: bool,
    wants_best_tokens: bool,
    #[cfg(target_os = "linux")]
    opens_constraints: bool,
    main: Option<MainExport>,
    layout: ForkLayout,
    engine: Engine,
    code: ProgramCode,
}

enum ProgramCode {
    /// Runs in this process.
    Loaded {
        initialised: Range<usize>,
        instance: InstancePre<ControllerState>,
    },
    /// Runs in processes of its own; this is its artefact, in memory that is given to them.
    #[cfg(target_os = "linux")]
    Remote(OwnedFd),
}

impl Program {
    pub(super) fn load(
        engine: &Engine,
        linker: &Linker<ControllerState>,
        module: &CheckedModule,
        artefact: &Artefact,
    ) -> Result<Self, ModuleError> {
        let failed = |error: wasmtime::Error| {
            tracing::error!(module = %module.id, error = %format_args!("{error:#}"), "a controller cannot be loaded");
            ModuleError::Host("the compiled module does not fit this host".to_owned())
        };
        let compiled = artefact.load(engine).map_err(failed)?;
        Ok(Self(Arc::new(ProgramParts {
            id: module.id,
            abi: module.abi,
            steers: module.steers,
            wants_best_tokens: module.imports.iter().any(|name| name == TOP_LOGITS),
            #[cfg(target_os = "linux")]
            opens_constraints: false,
            main: module.main,
            layout: module.layout.clone(),
            engine: engine.clone(),
            code: ProgramCode::Loaded {
                initialised: initialised(&module.instrumented),
                instance: linker.instantiate_pre(&compiled).map_err(failed)?,
            },
        })))
    }

    /// A program that this process cannot run, only hand on.
    #[cfg(target_os = "linux")]
    pub(super) fn remote(
        engine: &Engine,
        module: &CheckedModule,
        artefact: &Artefact,
    ) -> Result<Self, ModuleError> {
        let artefact = memory_file(artefact.as_ref()).map_err(|error| {
            tracing::error!(%error, "no memory for an artefact");
            ModuleError::Host("the compiled module cannot be kept".to_owned())
        })?;
        Ok(Self(Arc::new(ProgramParts {
            id: module.id,
            abi: module.abi,
            steers: module.steers,
            wants_best_tokens: false,
            opens_constraints: false,
            main: module.main,
            layout: module.layout.clone(),
            engine: engine.clone(),
            code: ProgramCode::Remote(artefact),
        })))
    }

    /// A program of the template: what [`Program::remote`] has handed on.
    #[cfg(target_os = "linux")]
    pub(super) fn handed_on(
        linker: &Linker<ControllerState>,
        (id, abi, start): (ModuleId, Abi, Option<String>),
        artefact: &[u8],
    ) -> wasmtime::Result<Self> {
        let compiled = artefact::deserialize(linker.engine(), artefact)?;
        Ok(Self(Arc::new(ProgramParts {
            id,
            abi,
            steers: true,
            wants_best_tokens: false,
            opens_constraints: compiled.imports().any(|import| {
                (import.module(), import.name()) == (crate::module::SAPWOOD, CONSTRAINT_NEW)
            }),
            main: None,
            // A fork clones the process, so nothing else of it is needed.
            layout: ForkLayout {
                start,
                ..ForkLayout::default()
            },
            engine: linker.engine().clone(),
            code: ProgramCode::Loaded {
                initialised: 0..usize::MAX,
                instance: linker.instantiate_pre(&compiled)?,
            },
        })))
    }

    /// The artefact of a program that runs in other processes.
    #[cfg(target_os = "linux")]
    pub(super) fn artefact(&self) -> Option<BorrowedFd<'_>> {
        match &self.0.code {
            ProgramCode::Remote(artefact) => Some(artefact.as_fd()),
            ProgramCode::Loaded { .. } => None,
        }
    }

    /// The module's id.
    #[must_use]
    pub fn id(&self) -> ModuleId {
        self.0.id
    }

    /// The interface of its callbacks.
    #[must_use]
    pub fn abi(&self) -> Abi {
        self.0.abi
    }

    /// Whether it has the callbacks that steer a sequence.
    #[must_use]
    pub fn steers(&self) -> bool {
        self.0.steers
    }

    /// Whether it imports `top_logits`: then the engine sorts each of its output rows (AI-1009).
    pub(crate) fn wants_best_tokens(&self) -> bool {
        self.0.wants_best_tokens
    }

    /// Whether it imports `constraint_new`. Known in the template alone, which prepares for it.
    #[cfg(target_os = "linux")]
    pub(super) fn opens_constraints(&self) -> bool {
        self.0.opens_constraints
    }

    /// Whether there is another clone, which an instance may have.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(super) fn main(&self) -> Option<MainExport> {
        self.0.main
    }

    pub(super) fn layout(&self) -> &ForkLayout {
        &self.0.layout
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.0.engine
    }

    /// What is instantiated.
    ///
    /// # Errors
    /// It runs in other processes.
    pub(super) fn instance(&self) -> wasmtime::Result<&InstancePre<ControllerState>> {
        match &self.0.code {
            ProgramCode::Loaded { instance, .. } => Ok(instance),
            #[cfg(target_os = "linux")]
            ProgramCode::Remote(_) => {
                Err(Abort::trap("this program runs in other processes").into())
            }
        }
    }

    /// The part of a new instance's memory that may differ from zero.
    pub(super) fn initialised(&self) -> Range<usize> {
        match &self.0.code {
            ProgramCode::Loaded { initialised, .. } => initialised.clone(),
            #[cfg(target_os = "linux")]
            ProgramCode::Remote(_) => 0..usize::MAX,
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program")
            .field("id", &self.0.id)
            .field("abi", &self.0.abi)
            .finish_non_exhaustive()
    }
}

/// As the imports of a module are written.
const TOP_LOGITS: &str = "sapwood.top_logits";
#[cfg(target_os = "linux")]
const CONSTRAINT_NEW: &str = "constraint_new";

/// Memory with these bytes, that other processes can map.
#[cfg(target_os = "linux")]
fn memory_file(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    use std::io::Write as _;

    let file = rustix::fs::memfd_create("controller", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(file);
    file.write_all(bytes)?;
    Ok(file.into())
}

/// From the first to the last byte that active data segments write. Everything, where that cannot be read.
fn initialised(module: &[u8]) -> Range<usize> {
    segments(module).unwrap_or(0..usize::MAX)
}

fn segments(module: &[u8]) -> Option<Range<usize>> {
    let mut extent: Option<Range<usize>> = None;
    for payload in Parser::new(0).parse_all(module) {
        let Payload::DataSection(section) = payload.ok()? else {
            continue;
        };
        for segment in section {
            let segment = segment.ok()?;
            let DataKind::Active { offset_expr, .. } = segment.kind else {
                continue;
            };
            let mut operators = offset_expr.get_operators_reader();
            let Operator::I32Const { value } = operators.read().ok()? else {
                return None;
            };
            // Extended constants go on after the first number.
            if !matches!(operators.read().ok()?, Operator::End) {
                return None;
            }
            let start = usize::try_from(value.cast_unsigned()).ok()?;
            let end = start.checked_add(segment.data.len())?;
            extent = Some(extent.map_or(start..end, |extent| {
                extent.start.min(start)..extent.end.max(end)
            }));
        }
    }
    Some(extent.unwrap_or(0..0))
}
