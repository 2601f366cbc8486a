//! [`LoadedModules`]: programs in memory, so that requests do not load them each time.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use crate::compiler::ArtefactCompiler;
use crate::module::{ModuleError, ModuleId};

/// A program and what is known of its module.
pub(super) struct LoadedProgram<C: ArtefactCompiler> {
    pub(super) program: C::Program,
    pub(super) steers: bool,
    pub(super) compiled_bytes: u64,
}

// Derived, it would ask for a host that is `Clone`.
impl<C: ArtefactCompiler> Clone for LoadedProgram<C> {
    fn clone(&self) -> Self {
        Self {
            program: self.program.clone(),
            ..*self
        }
    }
}

/// The least recently used program goes first, except those in use, which would stay in memory all the same. They have
/// a limit of their own: at it, only what runs already is started again.
pub(super) struct LoadedModules<C: ArtefactCompiler> {
    entries: HashMap<ModuleId, LoadedEntry<C>>,
    /// No longer found, since their module was deleted or loaded anew; requests that run keep them in memory.
    replaced: Vec<LoadedProgram<C>>,
    /// What loads in progress take.
    loading_bytes: u64,
    /// Counts uses.
    tick: u64,
    limits: LoadedLimits,
}

/// Bytes of compiled programs.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadedLimits {
    pub(super) unused_bytes_max: u64,
    pub(super) used_bytes_max: u64,
}

struct LoadedEntry<C: ArtefactCompiler> {
    loaded: LoadedProgram<C>,
    /// A request has it, or had it last. Who prepares a program has it for a moment too, and is no request.
    claimed: bool,
    used: u64,
    /// When the store was last notified of its use.
    noted: Option<SystemTime>,
}

impl<C: ArtefactCompiler> LoadedModules<C> {
    pub(super) fn new(limits: LoadedLimits) -> Self {
        Self {
            entries: HashMap::new(),
            replaced: Vec::new(),
            loading_bytes: 0,
            tick: 0,
            limits,
        }
    }

    /// Returns a program for a request. It is in use until the request drops it.
    ///
    /// # Errors
    /// With it, the programs in use would take more memory than they may.
    pub(super) fn claim(&mut self, id: &ModuleId) -> Result<Option<LoadedProgram<C>>, ModuleError> {
        let Some(entry) = self.entries.get(id) else {
            return Ok(None);
        };
        if !entry.is_claimed() {
            self.check_room(entry.loaded.compiled_bytes)?;
        }
        self.tick += 1;
        let tick = self.tick;
        Ok(self.entries.get_mut(id).map(|entry| {
            entry.used = tick;
            entry.claimed = true;
            entry.loaded.clone()
        }))
    }

    /// Reserves memory in which a program is loaded, until [`LoadedModules::end_loading`].
    ///
    /// # Errors
    /// The programs in use leave too little.
    pub(super) fn begin_loading(&mut self, bytes: u64) -> Result<(), ModuleError> {
        self.check_room(bytes)?;
        self.loading_bytes += bytes;
        Ok(())
    }

    pub(super) fn end_loading(&mut self, bytes: u64) {
        self.loading_bytes -= bytes;
    }

    fn check_room(&mut self, bytes: u64) -> Result<(), ModuleError> {
        self.replaced.retain(|loaded| C::in_use(&loaded.program));
        let claimed = self.entries.values().filter(|entry| entry.is_claimed());
        let used = claimed.map(|entry| &entry.loaded).chain(&self.replaced);
        let used = used.map(|loaded| loaded.compiled_bytes).sum::<u64>() + self.loading_bytes;
        if used.saturating_add(bytes) > self.limits.used_bytes_max {
            return Err(ModuleError::ProgramsInUse);
        }
        Ok(())
    }

    pub(super) fn insert(&mut self, id: ModuleId, loaded: LoadedProgram<C>) {
        self.remove(&id);
        self.tick += 1;
        let entry = LoadedEntry {
            loaded,
            claimed: false,
            used: self.tick,
            noted: None,
        };
        self.entries.insert(id, entry);
        self.evict(id);
    }

    fn evict(&mut self, newest: ModuleId) {
        loop {
            let unused = self
                .entries
                .iter()
                .filter(|(id, entry)| **id != newest && !C::in_use(&entry.loaded.program));
            let (mut bytes, mut count, mut oldest) = (0, 0, None);
            for (id, entry) in unused {
                bytes += entry.loaded.compiled_bytes;
                count += 1;
                if oldest.is_none_or(|(used, _)| entry.used < used) {
                    oldest = Some((entry.used, *id));
                }
            }
            match oldest {
                Some((_, id)) if bytes > self.limits.unused_bytes_max || count > UNUSED_MAX => {
                    self.entries.remove(&id);
                }
                _ => return,
            }
        }
    }

    pub(super) fn remove(&mut self, id: &ModuleId) {
        let removed = self.entries.remove(id).filter(LoadedEntry::is_claimed);
        self.replaced.extend(removed.map(|entry| entry.loaded));
        self.replaced.retain(|loaded| C::in_use(&loaded.program));
    }

    /// Whether a request runs the module.
    pub(super) fn in_use(&self, id: &ModuleId) -> bool {
        let entry = self.entries.get(id);
        entry.is_some_and(|entry| C::in_use(&entry.loaded.program))
    }

    /// Notes a use; returns whether the store should be notified of it, which is seldom enough not to cost anything.
    pub(super) fn was_used(&mut self, id: &ModuleId, now: SystemTime) -> bool {
        let Some(entry) = self.entries.get_mut(id) else {
            return false;
        };
        let recent = entry.noted.is_some_and(|noted| {
            now.duration_since(noted)
                .is_ok_and(|since| since < NOTED_EVERY)
        });
        if !recent {
            entry.noted = Some(now);
        }
        !recent
    }
}

impl<C: ArtefactCompiler> LoadedEntry<C> {
    /// Whether a request runs it.
    fn is_claimed(&self) -> bool {
        self.claimed && C::in_use(&self.loaded.program)
    }
}

/// Programs that nothing uses, however small.
const UNUSED_MAX: usize = 1024;

const NOTED_EVERY: Duration = Duration::from_secs(60);
