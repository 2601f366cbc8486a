//! [`Controllers`]: uploaded controllers, from their bytes to a program that can be instantiated (AI-311 to AI-331).
//!
//! Brings together the check of modules, the compiler, the store on disk and the programs in memory, and decides who may
//! do what (AI-902). All methods may wait for the disk and the compiler.
//!
//! ```text
//! upload ─► check ─► compile (a child) ─► load ─► store ─┐
//!                                                        ├─► programs in memory ─► find
//! find ─► store ─► check ─► artefact, or compile ─► load ┘
//! ```
//!
//! Each module is loaded at most once at a time, and accepted at most once: others that want the same wait for its result.
//! Not for that of the other one: a load may find none where an upload brings one.

mod access;
mod loaded;
mod manage;
mod name;
mod once;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use sapwood_proto::steer::{SteerRefusal, SteerUser, UploadedModule};

use self::loaded::{LoadedLimits, LoadedModules, LoadedProgram};
use self::name::ControllerName;
pub use self::name::tag_of_release;
use self::once::Once;
use crate::compiler::{ArtefactCompiler, Compiler, CompilerOptions};
use crate::module::{self, CheckedModule, ModuleError, ModuleId, ModuleLimits};
use crate::store::{ArtefactKey, ModuleRecord, NewModule, Store, StoreError, StoreOptions};

/// Returns the time of day; tests have another one.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// What [`Controllers`] is made of.
#[derive(Clone)]
pub struct ControllersOptions {
    /// The folder and its limits.
    pub store: StoreOptions,
    /// How modules are compiled.
    pub compiler: CompilerOptions,
    /// Limits of modules.
    pub limits: ModuleLimits,
    /// Bytes of compiled programs in memory that nothing uses; what is in use is not counted against it.
    pub loaded_bytes_max: u64,
    /// Bytes of compiled programs that requests run, together. At the limit only those programs are started again.
    pub used_bytes_max: u64,
    /// The time of day.
    pub clock: Clock,
}

impl ControllersOptions {
    /// The default limits.
    #[must_use]
    pub fn new(store: StoreOptions, compiler: CompilerOptions) -> Self {
        Self {
            store,
            compiler,
            limits: ModuleLimits::default(),
            loaded_bytes_max: 512 << 20,
            used_bytes_max: 2 << 30,
            clock: Arc::new(SystemTime::now),
        }
    }
}

type Prepared<C> = Once<ModuleId, Result<LoadedProgram<C>, SteerRefusal>>;

/// Uploaded controllers. `C` is the Wasm host.
pub struct Controllers<C: ArtefactCompiler> {
    host: C,
    key: ArtefactKey,
    store: Store,
    compiler: Compiler,
    limits: ModuleLimits,
    clock: Clock,
    loaded: Mutex<LoadedModules<C>>,
    loading: Prepared<C>,
    accepting: Prepared<C>,
}

impl<C: ArtefactCompiler> Controllers<C> {
    /// Opens the store.
    ///
    /// # Errors
    /// The folder belongs to another user, or cannot be used.
    pub fn open(host: C, options: ControllersOptions) -> Result<Self, StoreError> {
        Ok(Self {
            key: host.key(),
            host,
            store: Store::open(options.store)?,
            compiler: Compiler::new(options.compiler),
            limits: options.limits,
            clock: options.clock,
            loaded: Mutex::new(LoadedModules::new(LoadedLimits {
                unused_bytes_max: options.loaded_bytes_max,
                used_bytes_max: options.used_bytes_max,
            })),
            loading: Once::default(),
            accepting: Once::default(),
        })
    }

    /// The Wasm host.
    pub const fn host(&self) -> &C {
        &self.host
    }

    /// Returns the program that a request names: by module id, tag, or `gh:` reference (AI-313, AI-331). A tag is
    /// resolved now; a request that runs keeps its program whatever is done to the tag.
    ///
    /// # Errors
    /// There is no such controller, the user may not run it, it cannot steer, or it cannot be compiled any more.
    pub fn find(&self, user: SteerUser<'_>, name: &str) -> Result<C::Program, SteerRefusal> {
        self.prepare(self.resolve(user, name)?)
    }

    /// Returns the program of a module that can steer; afterwards its artefact is stored, for who shares the folder. The
    /// module is in use as long as somebody has the program.
    ///
    /// # Errors
    /// There is no such module, it cannot steer, or it cannot be compiled any more.
    pub fn prepare(&self, id: ModuleId) -> Result<C::Program, SteerRefusal> {
        let found = self.program(id)?;
        if !found.steers {
            return Err(ModuleError::invalid(
                "it has no callbacks, so it can only be run by itself",
            )
            .into());
        }
        Ok(found.program)
    }

    /// As [`Controllers::find`], also for a module that has a main function alone (AI-604).
    ///
    /// # Errors
    /// Those of [`Controllers::find`].
    pub fn find_to_run(&self, user: SteerUser<'_>, name: &str) -> Result<C::Program, SteerRefusal> {
        Ok(self.find_loaded(user, name)?.program)
    }

    /// Returns the id of the module that a request names, for a runtime in another process. As [`Controllers::find`].
    ///
    /// # Errors
    /// There is no such controller, or the user may not run it.
    pub fn find_module(&self, user: SteerUser<'_>, name: &str) -> Result<ModuleId, SteerRefusal> {
        let id = self.resolve(user, name)?;
        if self.store.module_size(id)?.is_none() {
            return Err(StoreError::ModuleNotFound.into());
        }
        self.store.touch(id, self.key, (self.clock)());
        Ok(id)
    }

    /// Returns the bytes of a module as they were uploaded.
    ///
    /// # Errors
    /// There is no such module, or it cannot be read.
    pub fn module_bytes(&self, id: ModuleId) -> Result<Vec<u8>, SteerRefusal> {
        let bytes_max = self.limits.module_bytes as u64;
        let stored = self.store.read_module(id, bytes_max)?;
        Ok(stored.ok_or(StoreError::ModuleNotFound)?)
    }

    fn find_loaded(
        &self,
        user: SteerUser<'_>,
        name: &str,
    ) -> Result<LoadedProgram<C>, SteerRefusal> {
        self.program(self.resolve(user, name)?)
    }

    /// The id of the module that a name means now.
    fn resolve(&self, user: SteerUser<'_>, name: &str) -> Result<ModuleId, SteerRefusal> {
        Ok(match ControllerName::parse(name)? {
            ControllerName::Id(id) => {
                access::may_run_by_id(user)?;
                id
            }
            ControllerName::Tag(tag) => self
                .tagged(user, &tag)?
                .ok_or_else(|| name::unknown_tag(&tag))?,
            ControllerName::Github { tag } => {
                self.tagged(user, &tag)?.ok_or_else(name::github_disabled)?
            }
        })
    }

    /// The module of a tag that the user may run.
    fn tagged(&self, user: SteerUser<'_>, tag: &str) -> Result<Option<ModuleId>, SteerRefusal> {
        let Some(info) = self.store.tag(tag)? else {
            return Ok(None);
        };
        access::may_run(user, &info)?;
        Ok(ModuleId::parse(&info.module_id))
    }

    /// Returns a module's program, from memory or from the store.
    fn program(&self, id: ModuleId) -> Result<LoadedProgram<C>, SteerRefusal> {
        // Another process may have deleted it, and then it is gone here too.
        if self.store.module_size(id)?.is_none() {
            return Err(StoreError::ModuleNotFound.into());
        }
        let claimed = self.loaded().claim(&id)?;
        let found = match claimed {
            Some(found) => found,
            None => {
                // What this call has is not evicted, so that it is gone only if the module was deleted.
                let _loaded = self.loading.get(id, || self.load(id))?;
                let claimed = self.loaded().claim(&id)?;
                claimed.ok_or(StoreError::ModuleNotFound)?
            }
        };
        let now = (self.clock)();
        if self.loaded().was_used(&id, now) {
            self.store.touch(id, self.key, now);
        }
        Ok(found)
    }

    /// Loads a stored module; compiles it if its artefact is missing or of another compiler.
    fn load(&self, id: ModuleId) -> Result<LoadedProgram<C>, SteerRefusal> {
        let stored = self
            .store
            .read_module(id, self.limits.module_bytes as u64)?;
        let bytes = stored.ok_or(StoreError::ModuleNotFound)?;
        let checked = module::check(&bytes, &self.limits)?;
        if let Some(loaded) = self.load_stored(&checked)? {
            return Ok(loaded);
        }
        let job = self.compiler.start_job(id)?;
        let artefact = self.compiler.compile(&job, &self.host, &checked, &bytes)?;
        // With the job, which bounds how many are loaded at once as it does how many are compiled.
        let program = self.host.load(&checked, &artefact)?;
        drop(job);
        let in_use = |id| self.loaded().in_use(&id);
        // It serves to be faster the next time alone.
        if let Err(error) = self.store.insert_artefact(id, self.key, &artefact, &in_use) {
            tracing::warn!(%id, %error, "cannot store an artefact");
        }
        Ok(self.retain(&checked, program, artefact.len()))
    }

    /// Loads a module's stored artefact. `None` if there is none of this compiler, or it does not load.
    fn load_stored(
        &self,
        module: &CheckedModule,
    ) -> Result<Option<LoadedProgram<C>>, SteerRefusal> {
        let Some(bytes) = self.store.artefact_size(module.id, self.key)? else {
            return Ok(None);
        };
        let _room = LoadingRoom::reserve(&self.loaded, bytes)?;
        let Some(artefact) = self.store.read_artefact(module.id, self.key)? else {
            return Ok(None);
        };
        match self.host.load(module, &artefact) {
            Ok(program) => Ok(Some(self.retain(module, program, artefact.len()))),
            Err(error) => {
                tracing::warn!(id = %module.id, %error, "the stored artefact does not load");
                Ok(None)
            }
        }
    }

    fn upload_module(
        &self,
        user: SteerUser<'_>,
        bytes: &Bytes,
    ) -> Result<UploadedModule, SteerRefusal> {
        let started = Instant::now();
        access::may_upload(user)?;
        let limit = self.limits.module_bytes;
        if bytes.len() > limit {
            return Err(ModuleError::TooLarge { limit }.into());
        }
        let id = ModuleId::of(bytes);
        let compiled_size = match self.stored_artefact_size(id, bytes)? {
            Some(size) => size,
            None => {
                self.accepting
                    .get(id, || self.accept(user, id, bytes))?
                    .compiled_bytes
            }
        };
        Ok(UploadedModule {
            module_id: id.to_string(),
            wasm_size: bytes.len() as u64,
            compiled_size,
            time_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// The size of the artefact, if the same module is stored with it. A damaged one is not the same.
    fn stored_artefact_size(&self, id: ModuleId, bytes: &[u8]) -> Result<Option<u64>, StoreError> {
        if self.store.module_size(id)? != Some(bytes.len() as u64) {
            return Ok(None);
        }
        let intact = self.store.read_module(id, bytes.len() as u64)?.is_some();
        match self.store.artefact_size(id, self.key)? {
            Some(size) if intact => {
                // Otherwise the next upload that needs room may evict it before its user has set a tag.
                self.store.touch(id, self.key, (self.clock)());
                Ok(Some(size))
            }
            _ => Ok(None),
        }
    }

    /// Checks, compiles and stores a module that is new here.
    fn accept(
        &self,
        user: SteerUser<'_>,
        id: ModuleId,
        bytes: &[u8],
    ) -> Result<LoadedProgram<C>, SteerRefusal> {
        // Checking a hostile module takes seconds too.
        let job = self.compiler.start_job(id)?;
        let checked = module::check(bytes, &self.limits)
            .inspect_err(|error| self.compiler.note(id, error))?;
        let artefact = self.compiler.compile(&job, &self.host, &checked, bytes)?;
        // What cannot be loaded must not be stored: the request that runs it would fail instead.
        let program = self.host.load(&checked, &artefact)?;
        drop(job);
        let record = ModuleRecord {
            created: self.unix_seconds(),
            owner: user.name.to_owned(),
            by_admin: user.is_admin,
            found: Some((&checked).into()),
        };
        let new = NewModule {
            id,
            bytes,
            record: &record,
            artefact: &artefact,
            key: self.key,
        };
        self.store.insert(new, &|id| self.loaded().in_use(&id))?;
        Ok(self.retain(&checked, program, artefact.len()))
    }

    /// Keeps a program in memory for the requests to come.
    fn retain(
        &self,
        module: &CheckedModule,
        program: C::Program,
        compiled_bytes: usize,
    ) -> LoadedProgram<C> {
        let loaded = LoadedProgram {
            program,
            steers: module.steers,
            compiled_bytes: compiled_bytes as u64,
        };
        self.loaded().insert(module.id, loaded.clone());
        loaded
    }

    fn loaded(&self) -> MutexGuard<'_, LoadedModules<C>> {
        lock(&self.loaded)
    }

    fn unix_seconds(&self) -> u64 {
        let since = (self.clock)().duration_since(UNIX_EPOCH);
        since.unwrap_or_default().as_secs()
    }
}

/// Memory in which a program is loaded.
struct LoadingRoom<'a, C: ArtefactCompiler> {
    loaded: &'a Mutex<LoadedModules<C>>,
    bytes: u64,
}

impl<'a, C: ArtefactCompiler> LoadingRoom<'a, C> {
    fn reserve(
        loaded: &'a Mutex<LoadedModules<C>>,
        artefact_bytes: u64,
    ) -> Result<Self, ModuleError> {
        // The artefact, and the code that is made of it.
        let bytes = artefact_bytes.saturating_mul(2);
        lock(loaded).begin_loading(bytes)?;
        Ok(Self { loaded, bytes })
    }
}

impl<C: ArtefactCompiler> Drop for LoadingRoom<'_, C> {
    fn drop(&mut self) {
        lock(self.loaded).end_loading(self.bytes);
    }
}

fn lock<C: ArtefactCompiler>(loaded: &Mutex<LoadedModules<C>>) -> MutexGuard<'_, LoadedModules<C>> {
    // Its operations leave nothing half done.
    loaded.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C: ArtefactCompiler> fmt::Debug for Controllers<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controllers")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}
