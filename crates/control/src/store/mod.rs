//! [`Store`]: modules, their compiled artefacts and their tags on disk (AI-321 to AI-323).
//!
//! ```text
//! ID.wasm            a module as it was uploaded; it is in the store if this file exists
//! ID-sys.json        who uploaded it and when, in the reference's form and with what listings need
//! ID-KEY.cwasm       its compiled artefact, which can be made again at any time
//! tags/TAG.json      one tag
//! .lock              locked while several files must agree
//! ```
//!
//! All runtimes and servers of a machine may share a folder, and each sees what another did: only the list of tags is cached,
//! as long as their folder has not changed.
//! Who may do what is not decided here but by [`Controllers`](crate::controllers::Controllers).
//!
//! Invariants, which hold after a crash at any point too:
//! - a tag names a module in the store when it is written (both under the lock), and such a module is not removed;
//! - `ID.wasm` is written after `ID-sys.json` and removed before it, so a module in the store has an owner;
//! - an artefact without its module is stale, like one with another key.

mod artefact;
mod error;
mod eviction;
mod folder;
mod record;
mod tag;
mod tag_index;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::SystemTime;

use sapwood_proto::steer::TagInfo;

pub use self::artefact::ArtefactKey;
pub use self::error::StoreError;
use self::eviction::NeededRoom;
use self::folder::Folder;
pub use self::record::{FoundInModule, ModuleRecord};
use self::tag::TagFile;
pub(crate) use self::tag::looks_hex;
pub use self::tag::{TagNameError, check_tag_name};
use self::tag_index::TagIndex;
use crate::host::Artefact;
use crate::module::ModuleId;

/// Where a store is and how large it may become.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The folder; created if it is missing.
    pub folder: PathBuf,
    /// Bytes of modules and artefacts together. One owner who is no admin has at most half of them.
    pub bytes_max: u64,
    /// Tags; of one user who is no admin at most half of them.
    pub tags_max: usize,
    /// Modules may go to make room. Not in a process that does not know which ones are in use: another that shares the folder
    /// does.
    pub evicts: bool,
}

impl StoreOptions {
    /// The default limits (AI-1090) for this folder.
    #[must_use]
    pub const fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            bytes_max: 10 << 30,
            tags_max: 100_000,
            evicts: true,
        }
    }
}

/// The files of one folder.
#[derive(Debug)]
pub struct Store {
    modules: Folder,
    tags: Folder,
    index: TagIndex,
    options: StoreOptions,
}

/// A module to be stored.
#[derive(Clone, Copy, Debug)]
pub struct NewModule<'a> {
    /// Of `bytes`.
    pub id: ModuleId,
    /// As uploaded.
    pub bytes: &'a [u8],
    /// What is noted beside it, unless the module is in the store already.
    pub record: &'a ModuleRecord,
    /// The compiled form, under `key`.
    pub artefact: &'a Artefact,
    /// What the artefact depends on.
    pub key: ArtefactKey,
}

/// New values of tags.
#[derive(Clone, Copy, Debug)]
pub struct TagChange<'a> {
    /// Their names, which [`check_tag_name`] has accepted.
    pub tags: &'a [String],
    /// The module that they name.
    pub module_id: ModuleId,
    /// Who sets them.
    pub updated_by: &'a str,
    /// When, in Unix seconds.
    pub updated_at: u64,
    /// Everybody may run them, because an admin sets them.
    pub public: bool,
    /// The artefact whose size is noted.
    pub key: ArtefactKey,
}

impl Store {
    /// Opens the folder, or creates it. Removes what processes have left behind that were killed while they wrote.
    ///
    /// # Errors
    /// It belongs to another user, or a system call fails.
    pub fn open(options: StoreOptions) -> Result<Self, StoreError> {
        let modules = Folder::open(options.folder.clone())?;
        let tags = Folder::open(modules.path().join("tags"))?;
        // Each file of both folders is written under this lock.
        let lock = modules.lock()?;
        modules.remove_temporaries()?;
        tags.remove_temporaries()?;
        drop(lock);
        Ok(Self {
            modules,
            tags,
            index: TagIndex::default(),
            options,
        })
    }

    /// Returns the bytes of a module's upload, `None` if it is not in the store.
    ///
    /// # Errors
    /// A system call fails.
    pub fn module_size(&self, id: ModuleId) -> Result<Option<u64>, StoreError> {
        let found = self.modules.file_use(&wasm_name(id));
        let found = found.map_err(|error| self.modules.error("read", error))?;
        Ok(found.map(|found| found.bytes))
    }

    /// Reads a module, and checks its bytes against its id. `None` if there is none, or it is damaged.
    ///
    /// # Errors
    /// A system call fails.
    pub fn read_module(&self, id: ModuleId, bytes_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let bytes = self.modules.read(&wasm_name(id), bytes_max);
        let bytes = bytes.map_err(|error| self.modules.error("read", error))?;
        let intact = |bytes: &Vec<u8>| {
            let intact = ModuleId::of(bytes) == id;
            if !intact {
                tracing::warn!(%id, "the stored module is damaged; upload it again");
            }
            intact
        };
        Ok(bytes.filter(intact))
    }

    /// Returns the size of a module's artefact, without checking its content. `None` if it has none under this key.
    ///
    /// # Errors
    /// A system call fails.
    pub fn artefact_size(&self, id: ModuleId, key: ArtefactKey) -> Result<Option<u64>, StoreError> {
        let found = self.modules.file_use(&artefact_name(id, key));
        let found = found.map_err(|error| self.modules.error("read", error))?;
        Ok(found.map(|found| found.bytes.saturating_sub(artefact::HEADER_BYTES as u64)))
    }

    /// Bytes of the file of an artefact; 0 if there is none.
    fn artefact_bytes(&self, id: ModuleId, key: ArtefactKey) -> Result<u64, StoreError> {
        let found = self.artefact_size(id, key)?;
        Ok(found.map_or(0, |bytes| bytes + artefact::HEADER_BYTES as u64))
    }

    /// Reads a module's artefact. `None` if there is none, or anything about it does not match (AI-321).
    ///
    /// # Errors
    /// A system call fails.
    pub fn read_artefact(
        &self,
        id: ModuleId,
        key: ArtefactKey,
    ) -> Result<Option<Artefact>, StoreError> {
        let file = self
            .modules
            .read_private(&artefact_name(id, key), self.options.bytes_max);
        let Some(mut file) = file.map_err(|error| self.modules.error("read", error))? else {
            return Ok(None);
        };
        if artefact::verified(&id, &key, &file).is_none() {
            tracing::warn!(%id, "the compiled artefact does not match; it is made again");
            return Ok(None);
        }
        file.drain(..artefact::HEADER_BYTES);
        // Written by this user, as the folder and the file show, and unchanged, as the checksum does.
        Ok(Some(Artefact::vouched_for(file)))
    }

    /// Stores a module, its record and its artefact; makes room for them first. `in_use` protects modules from that.
    ///
    /// # Errors
    /// There is no room, or a system call fails. Nothing is stored then that is seen.
    pub fn insert(
        &self,
        new: NewModule<'_>,
        in_use: &dyn Fn(ModuleId) -> bool,
    ) -> Result<(), StoreError> {
        let _lock = self.modules.lock()?;
        let needed = (new.bytes.len() + new.artefact.len() + artefact::HEADER_BYTES) as u64;
        let stored = self.module_size(new.id)?;
        let replaced = match stored {
            Some(bytes) => bytes + self.artefact_bytes(new.id, new.key)?,
            None => 0,
        };
        let room = NeededRoom {
            bytes: needed.saturating_sub(replaced),
            id: new.id,
            key: new.key,
            record: stored.is_none().then_some(new.record),
        };
        self.make_room(&room, in_use)?;
        let written = (|| {
            let artefact = new.artefact.as_ref();
            let header = artefact::header(&new.id, &new.key, artefact);
            let name = artefact_name(new.id, new.key);
            self.modules.write(&name, &[&header, artefact])?;
            let known = self.modules.file_use(&wasm_name(new.id))?.is_some();
            let recorded = self.modules.file_use(&record_name(new.id))?.is_some();
            // The first owner stays, also if the module was damaged and is now repaired.
            if !(known && recorded) {
                let record = new.record.json()?;
                self.modules.write(&record_name(new.id), &[&record])?;
            }
            // Last, because this makes the module exist.
            self.modules.write(&wasm_name(new.id), &[new.bytes])
        })();
        written.map_err(|error| self.modules.error("write", error))
    }

    /// Stores an artefact that was made again.
    ///
    /// # Errors
    /// There is no room, or a system call fails.
    pub fn insert_artefact(
        &self,
        id: ModuleId,
        key: ArtefactKey,
        artefact: &Artefact,
        in_use: &dyn Fn(ModuleId) -> bool,
    ) -> Result<(), StoreError> {
        let _lock = self.modules.lock()?;
        let needed = (artefact.len() + artefact::HEADER_BYTES) as u64;
        let replaced = match self.module_size(id)? {
            Some(_) => self.artefact_bytes(id, key)?,
            // It is one of those that may go.
            None => 0,
        };
        let room = NeededRoom {
            bytes: needed.saturating_sub(replaced),
            id,
            key,
            record: None,
        };
        self.make_room(&room, in_use)?;
        let header = artefact::header(&id, &key, artefact.as_ref());
        let written = self
            .modules
            .write(&artefact_name(id, key), &[&header, artefact.as_ref()]);
        written.map_err(|error| self.modules.error("write", error))
    }

    /// Notes that a module was used, so that it is evicted later.
    pub fn touch(&self, id: ModuleId, key: ArtefactKey, now: SystemTime) {
        for name in [wasm_name(id), artefact_name(id, key)] {
            if let Err(error) = self.modules.touch(&name, now) {
                tracing::debug!(%id, %error, "cannot note the use of a module");
            }
        }
    }

    /// Returns what is noted beside a module; an unknown owner if that is missing or broken.
    ///
    /// # Errors
    /// A system call fails.
    pub fn record(&self, id: ModuleId) -> Result<ModuleRecord, StoreError> {
        let json = self.modules.read(&record_name(id), JSON_BYTES_MAX);
        let json = json.map_err(|error| self.modules.error("read", error))?;
        Ok(json
            .and_then(|json| ModuleRecord::parse(&json))
            .unwrap_or_default())
    }

    /// Lists the ids of all modules, sorted.
    ///
    /// # Errors
    /// A system call fails.
    pub fn module_ids(&self) -> Result<Vec<ModuleId>, StoreError> {
        let mut ids = Vec::new();
        let listed = self.modules.for_each(|name, _| {
            ids.extend(name.strip_suffix(".wasm").and_then(ModuleId::parse));
        });
        listed.map_err(|error| self.modules.error("list", error))?;
        ids.sort_unstable();
        Ok(ids)
    }

    /// Removes a module that no tag names, and everything about it.
    ///
    /// # Errors
    /// There is no such module, a tag names it, or a system call fails.
    pub fn remove_module(&self, id: ModuleId) -> Result<(), StoreError> {
        let _lock = self.modules.lock()?;
        if self.module_size(id)?.is_none() {
            return Err(StoreError::ModuleNotFound);
        }
        let text = id.to_string();
        // Those of the listing: what others have set under the lock shows in them, and 100,000 files are not opened under it.
        let tags = self.listed_tags()?;
        if let Some(tag) = tags.into_iter().find(|tag| tag.module_id == text) {
            return Err(StoreError::ModuleTagged(tag.tag));
        }
        self.remove_files(id)
    }

    /// Reads one tag. `None` if there is none, it is broken, or the name cannot be that of a tag.
    ///
    /// # Errors
    /// A system call fails.
    pub fn tag(&self, name: &str) -> Result<Option<TagInfo>, StoreError> {
        // Also keeps paths out of file names.
        if check_tag_name(name).is_err() {
            return Ok(None);
        }
        let json = self.tags.read(&tag_name(name), JSON_BYTES_MAX);
        let Some(json) = json.map_err(|error| self.tags.error("read", error))? else {
            return Ok(None);
        };
        let info = TagFile::parse(name, &json);
        if info.is_none() {
            tracing::warn!(tag = name, "the file of a tag is broken; it is skipped");
        }
        Ok(info)
    }

    /// All tags, sorted by name, for a listing. They are read again only if somebody has changed one since.
    ///
    /// # Errors
    /// A system call fails.
    pub fn listed_tags(&self) -> Result<Vec<TagInfo>, StoreError> {
        // Both before the files: what changes meanwhile is then a later change.
        let begun = SystemTime::now();
        let changed = self.tags.changed();
        let changed = changed.map_err(|error| self.tags.error("read", error))?;
        if let Some(tags) = self.index.get(changed) {
            return Ok(tags);
        }
        let tags = self.tags()?;
        self.index.set(changed, begun, &tags);
        Ok(tags)
    }

    /// Reads all tags, sorted by name.
    ///
    /// # Errors
    /// A system call fails.
    pub fn tags(&self) -> Result<Vec<TagInfo>, StoreError> {
        let mut tags = Vec::new();
        for name in self.tag_names()? {
            tags.extend(self.tag(&name)?);
        }
        Ok(tags)
    }

    /// Sets tags, each atomically. Returns them in the order asked for.
    ///
    /// # Errors
    /// There is no such module, there are too many tags, or a system call fails; only then may some be set.
    pub fn set_tags(&self, change: TagChange<'_>) -> Result<Vec<TagInfo>, StoreError> {
        let _lock = self.modules.lock()?;
        let Some(wasm_size) = self.module_size(change.module_id)? else {
            return Err(StoreError::ModuleNotFound);
        };
        let mut names = self.tag_names()?;
        names.extend(change.tags.iter().cloned());
        names.sort_unstable();
        names.dedup();
        if names.len() > self.options.tags_max {
            return Err(StoreError::TooManyTags);
        }
        // All tags that others than admins set begin so. Their files, which say who has set them, are not read under the lock.
        let own = |name: &&String| {
            let rest = name.strip_prefix(change.updated_by);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        if !change.public && names.iter().filter(own).count() > self.options.tags_max / 2 {
            return Err(StoreError::TagShareFull);
        }
        let compiled_size = self.artefact_size(change.module_id, change.key)?;
        let info = |tag: &String| TagInfo {
            tag: tag.clone(),
            module_id: change.module_id.to_string(),
            updated_at: change.updated_at,
            updated_by: change.updated_by.to_owned(),
            wasm_size,
            compiled_size: compiled_size.unwrap_or_default(),
            public: change.public,
        };
        let infos: Vec<TagInfo> = change.tags.iter().map(info).collect();
        for info in &infos {
            let written = TagFile::from(info.clone())
                .json()
                .map_err(Into::into)
                .and_then(|json| self.tags.put(&tag_name(&info.tag), &[&json]));
            written.map_err(|error| self.tags.error("write", error))?;
        }
        // Once for all, because others wait for the lock.
        let lasting = self.tags.sync();
        lasting.map_err(|error| self.tags.error("write", error))?;
        Ok(infos)
    }

    /// Removes tags.
    ///
    /// # Errors
    /// One is missing, and then none is removed; or a system call fails.
    pub fn remove_tags(&self, tags: &[String]) -> Result<(), StoreError> {
        let _lock = self.modules.lock()?;
        for tag in tags {
            if self.tag(tag)?.is_none() {
                return Err(StoreError::TagNotFound(tag.clone()));
            }
        }
        let removed = tags
            .iter()
            .try_for_each(|tag| self.tags.remove(&tag_name(tag)))
            .and_then(|()| self.tags.sync());
        removed.map_err(|error| self.tags.error("write", error))
    }

    /// Names of all files of tags that can be names of tags, sorted.
    fn tag_names(&self) -> Result<Vec<String>, StoreError> {
        let mut names = Vec::new();
        let listed = self.tags.for_each_name(|file| {
            let name = file.strip_suffix(".json");
            names.extend(
                name.filter(|name| check_tag_name(name).is_ok())
                    .map(str::to_owned),
            );
        });
        listed.map_err(|error| self.tags.error("list", error))?;
        names.sort_unstable();
        Ok(names)
    }
}

fn wasm_name(id: ModuleId) -> String {
    format!("{id}.wasm")
}

fn record_name(id: ModuleId) -> String {
    format!("{id}-sys.json")
}

fn artefact_name(id: ModuleId, key: ArtefactKey) -> String {
    format!("{id}-{key}.cwasm")
}

fn tag_name(tag: &str) -> String {
    format!("{tag}.json")
}

/// Bytes of the JSON files; ours are far smaller.
const JSON_BYTES_MAX: u64 = 256 << 10;
