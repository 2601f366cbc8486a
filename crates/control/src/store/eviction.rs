//! Eviction: keeps the store within its bytes (AI-323).
//!
//! What goes: stale artefacts, which are those of another key or without a module, and modules without a tag, with all
//! their artefacts. What is in use stays. Of whoever has most bytes in the store something goes first, and of each owner what
//! was used longest ago: so nobody pushes out the modules of those who have less.
//!
//! One owner has at most half of the bytes, unless it is an admin, who may delete what all others have.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::time::SystemTime;

use super::folder::FileUse;
use super::{ArtefactKey, ModuleRecord, Store, StoreError};
use crate::module::ModuleId;

/// What room is made for.
pub(super) struct NeededRoom<'a> {
    /// Bytes beyond what is replaced.
    pub(super) bytes: u64,
    /// The module that they belong to, which stays.
    pub(super) id: ModuleId,
    /// The key of artefacts that are not stale.
    pub(super) key: ArtefactKey,
    /// Who uploads the module; `None` if it is in the store already, as its first owner's.
    pub(super) record: Option<&'a ModuleRecord>,
}

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

/// What one owner has in the store.
#[derive(Default)]
struct OwnedBytes {
    bytes: u64,
    /// What may go, the least recently used first.
    candidates: VecDeque<Candidate>,
}

/// By the owner's name, which is empty where it is unknown.
type Owners = BTreeMap<String, OwnedBytes>;

enum Removal {
    Artefact(String),
    Module(ModuleId),
}

impl Store {
    /// Removes what may go until what is needed fits. Called under the lock.
    ///
    /// # Errors
    /// [`StoreError::Full`] or [`StoreError::ShareFull`]: it does not fit even so, and nothing was removed. Or a system call fails.
    pub(super) fn make_room(
        &self,
        needed: &NeededRoom<'_>,
        in_use: &dyn Fn(ModuleId) -> bool,
    ) -> Result<(), StoreError> {
        let files = self.files(needed.key)?;
        let total = needed.bytes + files.values().map(ModuleFiles::total).sum::<u64>();
        let limited = needed.record.filter(|record| !record.by_admin);
        let share = limited.map_or(u64::MAX, |_| self.options.bytes_max / 2);
        // Then the owner has no more than that either, and the owners of all modules need not be read.
        if total <= self.options.bytes_max.min(share) {
            return Ok(());
        }
        let (mut owners, owner_of_new) = self.owners(files, needed, in_use)?;
        let excess = total.saturating_sub(self.options.bytes_max);
        let own = owners.entry(owner_of_new.clone()).or_default();
        own.bytes += needed.bytes;
        let own_excess = own.bytes.saturating_sub(share);
        let evictable =
            |owned: &OwnedBytes| -> u64 { owned.candidates.iter().map(|one| one.bytes).sum() };
        if own_excess > 0 && (!self.options.evicts || own_excess > evictable(own)) {
            return Err(StoreError::ShareFull);
        }
        let evictable: u64 = owners.values().map(evictable).sum();
        if excess > 0 && (!self.options.evicts || excess > evictable) {
            return Err(StoreError::Full);
        }
        for removal in chosen(owners, &owner_of_new, own_excess, excess) {
            match removal {
                Removal::Module(id) => {
                    tracing::info!(%id, "evicts a module: the controller store is full");
                    self.remove_files(id)?;
                }
                Removal::Artefact(name) => {
                    let removed = self.modules.remove(&name);
                    removed.map_err(|error| self.modules.error("write", error))?;
                }
            }
        }
        Ok(())
    }

    /// What each owner has, and the owner of what room is made for.
    fn owners(
        &self,
        files: BTreeMap<ModuleId, ModuleFiles>,
        needed: &NeededRoom<'_>,
        in_use: &dyn Fn(ModuleId) -> bool,
    ) -> Result<(Owners, String), StoreError> {
        let tags = self.listed_tags()?;
        let tagged: HashSet<String> = tags.into_iter().map(|tag| tag.module_id).collect();
        let mut owners = Owners::new();
        let mut owner_of_new = needed.record.map(|record| record.owner.clone());
        for (id, files) in files {
            // What an eviction or a crash has left behind of a record is of no module.
            let owner = if files.stored {
                self.record(id)?.owner
            } else {
                String::new()
            };
            if id == needed.id {
                owner_of_new.get_or_insert_with(|| owner.clone());
            }
            let owned = owners.entry(owner).or_default();
            owned.bytes += files.total();
            let stays =
                !files.stored || id == needed.id || in_use(id) || tagged.contains(&id.to_string());
            owned.candidates.extend(files.into_candidates(id, stays));
        }
        for owned in owners.values_mut() {
            let candidates = owned.candidates.make_contiguous();
            candidates.sort_by_key(|candidate| candidate.used);
        }
        Ok((owners, owner_of_new.unwrap_or_default()))
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

    /// The whole module, or where that stays its stale artefacts.
    fn into_candidates(self, id: ModuleId, stays: bool) -> Vec<Candidate> {
        if !stays {
            return vec![Candidate {
                used: self.used.unwrap_or(SystemTime::UNIX_EPOCH),
                bytes: self.total(),
                what: Removal::Module(id),
            }];
        }
        let stale = self.stale.into_iter().map(|(name, file)| Candidate {
            used: file.used,
            bytes: file.bytes,
            what: Removal::Artefact(name),
        });
        stale.collect()
    }
}

/// Chooses what goes: first what `owner_of_new` has beyond its share, then what the store has beyond its limit.
fn chosen(
    mut owners: Owners,
    owner_of_new: &str,
    mut own_excess: u64,
    mut excess: u64,
) -> Vec<Removal> {
    let mut removals = Vec::new();
    while own_excess > 0 || excess > 0 {
        let next = if own_excess > 0 {
            owners.get_mut(owner_of_new)
        } else {
            let with_some = owners
                .values_mut()
                .filter(|owned| !owned.candidates.is_empty());
            with_some.max_by_key(|owned| {
                let oldest = owned.candidates.front().map(|candidate| candidate.used);
                (owned.bytes, Reverse(oldest))
            })
        };
        // The caller has found enough that may go.
        let Some((owned, candidate)) = next.and_then(|owned| {
            let candidate = owned.candidates.pop_front()?;
            Some((owned, candidate))
        }) else {
            break;
        };
        owned.bytes -= candidate.bytes;
        own_excess = own_excess.saturating_sub(candidate.bytes);
        excess = excess.saturating_sub(candidate.bytes);
        removals.push(candidate.what);
    }
    removals
}

/// The id and the key in an artefact's name.
fn artefact_parts(name: &str) -> Option<(ModuleId, &str)> {
    let (id, key) = name.strip_suffix(".cwasm")?.split_once('-')?;
    Some((ModuleId::parse(id)?, key))
}
