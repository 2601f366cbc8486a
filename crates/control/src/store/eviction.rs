//! Eviction: keeps the store within its bytes (AI-323).
//!
//! What goes, least recently used first: stale artefacts, which are those of another key or without a module, and
//! modules without a tag, with all their artefacts. What is in use stays.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::time::SystemTime;

use super::folder::FileUse;
use super::{ArtefactKey, Store, StoreError};
use crate::module::ModuleId;

/// The files of one module.
#[derive(Default)]
struct ModuleFiles {
    stored: bool,
    bytes: u64,
    used: Option<SystemTime>,
    /// Names and uses of artefacts that are not of the current key.
    stale: Vec<(String, FileUse)>,
}

/// Something that may go.
struct Candidate {
    used: SystemTime,
    bytes: u64,
    what: Removal,
}

enum Removal {
    Artefact(String),
    Module(ModuleId),
}

impl Store {
    /// Removes what may go until `needed` bytes more fit. Called under the lock.
    ///
    /// # Errors
    /// [`StoreError::Full`]: they do not fit even so, and nothing was removed. Or a system call fails.
    pub(super) fn make_room(
        &self,
        needed: u64,
        protected: ModuleId,
        key: ArtefactKey,
        in_use: &dyn Fn(ModuleId) -> bool,
    ) -> Result<(), StoreError> {
        let files = self.files(key)?;
        let total: u64 = files.values().map(ModuleFiles::total).sum();
        let Some(mut excess) = (total + needed)
            .checked_sub(self.options.bytes_max)
            .filter(|excess| *excess > 0)
        else {
            return Ok(());
        };
        if !self.options.evicts {
            return Err(StoreError::Full);
        }
        let mut candidates = self.candidates(files, protected, in_use)?;
        candidates.sort_by_key(|candidate| candidate.used);
        let evictable: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        if evictable < excess {
            return Err(StoreError::Full);
        }
        for candidate in candidates {
            match candidate.what {
                Removal::Module(id) => {
                    tracing::info!(%id, "evicts a module: the controller store is full");
                    self.remove_files(id)?;
                }
                Removal::Artefact(name) => {
                    let removed = self.modules.remove(&name);
                    removed.map_err(|error| self.modules.error("write", error))?;
                }
            }
            excess = excess.saturating_sub(candidate.bytes);
            if excess == 0 {
                break;
            }
        }
        Ok(())
    }

    fn candidates(
        &self,
        files: BTreeMap<ModuleId, ModuleFiles>,
        protected: ModuleId,
        in_use: &dyn Fn(ModuleId) -> bool,
    ) -> Result<Vec<Candidate>, StoreError> {
        let tags = self.listed_tags()?;
        let tagged: HashSet<String> = tags.into_iter().map(|tag| tag.module_id).collect();
        let mut candidates = Vec::new();
        for (id, files) in files {
            let stays =
                !files.stored || id == protected || in_use(id) || tagged.contains(&id.to_string());
            if !stays {
                candidates.push(Candidate {
                    used: files.used.unwrap_or(SystemTime::UNIX_EPOCH),
                    bytes: files.total(),
                    what: Removal::Module(id),
                });
                continue;
            }
            candidates.extend(files.stale.into_iter().map(|(name, file)| Candidate {
                used: file.used,
                bytes: file.bytes,
                what: Removal::Artefact(name),
            }));
        }
        Ok(candidates)
    }

    /// The files of all modules.
    fn files(&self, key: ArtefactKey) -> Result<BTreeMap<ModuleId, ModuleFiles>, StoreError> {
        let mut modules: BTreeMap<ModuleId, ModuleFiles> = BTreeMap::new();
        let current = key.to_string();
        let listed = self.modules.for_each(|name, file| {
            if let Some(id) = name.strip_suffix(".wasm").and_then(ModuleId::parse) {
                let files = modules.entry(id).or_default();
                files.stored = true;
                files.add(file);
            } else if let Some((id, key)) = artefact_parts(name) {
                let files = modules.entry(id).or_default();
                if key == current {
                    files.add(file);
                } else {
                    files.stale.push((name.to_owned(), file));
                }
            }
        });
        listed.map_err(|error| self.modules.error("list", error))?;
        // Without its module an artefact is of no use under any key.
        for (id, files) in modules.iter_mut().filter(|(_, files)| !files.stored) {
            if let Some(used) = files.used.take() {
                let bytes = std::mem::take(&mut files.bytes);
                files
                    .stale
                    .push((super::artefact_name(*id, key), FileUse { bytes, used }));
            }
        }
        Ok(modules)
    }

    /// Removes a module's files: first the one that makes it exist.
    pub(super) fn remove_files(&self, id: ModuleId) -> Result<(), StoreError> {
        let removed = (|| {
            self.modules.remove(&super::wasm_name(id))?;
            self.modules.sync()?;
            self.modules.remove(&super::record_name(id))?;
            for name in self.artefact_names(id)? {
                self.modules.remove(&name)?;
            }
            self.modules.sync()
        })();
        removed.map_err(|error| self.modules.error("write", error))
    }

    fn artefact_names(&self, id: ModuleId) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        self.modules.for_each_name(|name| {
            if artefact_parts(name).is_some_and(|(of, _)| of == id) {
                names.push(name.to_owned());
            }
        })?;
        Ok(names)
    }
}

impl ModuleFiles {
    fn add(&mut self, file: FileUse) {
        self.bytes += file.bytes;
        self.used = self.used.max(Some(file.used));
    }

    fn total(&self) -> u64 {
        self.bytes + self.stale.iter().map(|(_, file)| file.bytes).sum::<u64>()
    }
}

/// The id and the key in an artefact's name.
fn artefact_parts(name: &str) -> Option<(ModuleId, &str)> {
    let (id, key) = name.strip_suffix(".cwasm")?.split_once('-')?;
    Some((ModuleId::parse(id)?, key))
}
