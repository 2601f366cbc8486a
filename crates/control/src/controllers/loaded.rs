//! [`LoadedModules`]: programs in memory, so that requests do not load them each time.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use crate::compiler::ArtefactCompiler;
use crate::module::ModuleId;

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

/// The least recently used program goes first, except those in use, which would stay in memory all the same.
pub(super) struct LoadedModules<C: ArtefactCompiler> {
    entries: HashMap<ModuleId, LoadedEntry<C>>,
    /// Counts uses.
    tick: u64,
    bytes_max: u64,
}

struct LoadedEntry<C: ArtefactCompiler> {
    loaded: LoadedProgram<C>,
    used: u64,
    /// When the store was last notified of its use.
    noted: Option<SystemTime>,
}

impl<C: ArtefactCompiler> LoadedModules<C> {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self {
            entries: HashMap::new(),
            tick: 0,
            bytes_max,
        }
    }

    pub(super) fn get(&mut self, id: &ModuleId) -> Option<LoadedProgram<C>> {
        let entry = self.entries.get_mut(id)?;
        self.tick += 1;
        entry.used = self.tick;
        Some(entry.loaded.clone())
    }

    pub(super) fn insert(&mut self, id: ModuleId, loaded: LoadedProgram<C>) {
        self.tick += 1;
        let entry = LoadedEntry {
            loaded,
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
                Some((_, id)) if bytes > self.bytes_max || count > UNUSED_MAX => {
                    self.entries.remove(&id);
                }
                _ => return,
            }
        }
    }

    pub(super) fn remove(&mut self, id: &ModuleId) {
        self.entries.remove(id);
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

/// Programs that nothing uses, however small.
const UNUSED_MAX: usize = 1024;

const NOTED_EVERY: Duration = Duration::from_secs(60);
