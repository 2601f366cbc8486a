//! The store alone, with bytes that need not be modules.

mod crashes;
mod evicted;
mod files;
mod tags;

use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::{ArtefactKey, ModuleRecord, NewModule, Store, StoreError, StoreOptions, TagChange};
use crate::host::Artefact;
use crate::module::ModuleId;

/// Nothing is in use.
const UNUSED: &dyn Fn(ModuleId) -> bool = &|_| false;

fn options(folder: &TempDir) -> StoreOptions {
    StoreOptions::new(folder.path().join("cache"))
}

fn open(folder: &TempDir) -> Store {
    Store::open(options(folder)).unwrap()
}

fn key() -> ArtefactKey {
    ArtefactKey::of("engine 1")
}

fn record(owner: &str) -> ModuleRecord {
    ModuleRecord {
        created: 1_790_000_000,
        owner: owner.to_owned(),
        by_admin: false,
        found: None,
    }
}

fn insert(store: &Store, bytes: &[u8]) -> Result<ModuleId, StoreError> {
    let id = ModuleId::of(bytes);
    let artefact = Artefact::vouched_for([b"compiled ", bytes].concat());
    let new = NewModule {
        id,
        bytes,
        record: &record("anna"),
        artefact: &artefact,
        key: key(),
    };
    store.insert(new, UNUSED).map(|()| id)
}

fn tag(store: &Store, id: ModuleId, tags: &[&str]) -> Result<(), StoreError> {
    let tags: Vec<String> = tags.iter().map(|tag| (*tag).to_owned()).collect();
    let change = TagChange {
        tags: &tags,
        module_id: id,
        updated_by: "anna",
        updated_at: 1_790_000_001,
        public: false,
        key: key(),
    };
    store.set_tags(change).map(|_| ())
}

/// A time of last use, in the past.
fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 + seconds)
}
