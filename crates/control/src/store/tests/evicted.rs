//! AI-323: what goes when the store is full.

use tempfile::tempdir;

use super::*;

/// A module of 1,000 bytes with an artefact of 1,000: its number, spaces, and the header of an artefact.
fn bytes(number: u8) -> Vec<u8> {
    vec![number; 1000]
}

const MODULE_BYTES: u64 = 2000 + 112;

/// A store with room for `modules`, some bytes more or less, and these modules in it, the first used longest ago.
struct Full {
    store: Store,
    ids: Vec<ModuleId>,
    _folder: TempDir,
}

fn full(modules: u8, room: u64) -> Full {
    let folder = tempdir().unwrap();
    let mut options = options(&folder);
    assert_eq!(options.bytes_max, 10 << 30);
    options.bytes_max = room;
    let store = Store::open(options).unwrap();
    let mut ids = Vec::new();
    for number in 0..modules {
        let id = put(&store, number, key(), UNUSED).unwrap();
        store.touch(id, key(), at(u64::from(number)));
        ids.push(id);
    }
    assert_eq!(store.module_ids().unwrap().len(), usize::from(modules));
    Full {
        store,
        ids,
        _folder: folder,
    }
}

fn put(
    store: &Store,
    number: u8,
    key: ArtefactKey,
    in_use: &dyn Fn(ModuleId) -> bool,
) -> Result<ModuleId, StoreError> {
    let bytes = bytes(number);
    let id = ModuleId::of(&bytes);
    let artefact = Artefact::vouched_for(bytes.clone());
    let new = NewModule {
        id,
        bytes: &bytes,
        record: &record("anna"),
        artefact: &artefact,
        key,
    };
    store.insert(new, in_use).map(|()| id)
}

impl Full {
    fn there(&self) -> Vec<bool> {
        let there = |id: &ModuleId| self.store.module_size(*id).unwrap().is_some();
        self.ids.iter().map(there).collect()
    }
}

#[test]
fn ai_323_the_least_recently_used_module_goes_first() {
    let full = full(3, 3 * MODULE_BYTES);
    // Used again, so the second is now the oldest.
    full.store.touch(full.ids[0], key(), at(100));
    put(&full.store, 9, key(), UNUSED).unwrap();
    assert_eq!(full.there(), [true, false, true]);
    assert_eq!(full.store.artefact_size(full.ids[1], key()).unwrap(), None);
    assert_eq!(
        full.store.record(full.ids[1]).unwrap(),
        ModuleRecord::default()
    );
}

/// AI-1090
#[test]
fn ai_323_nothing_goes_before_the_limit() {
    let exact = full(2, 3 * MODULE_BYTES);
    put(&exact.store, 9, key(), UNUSED).unwrap();
    assert_eq!(exact.there(), [true, true]);
    let below = full(2, 3 * MODULE_BYTES - 1);
    put(&below.store, 9, key(), UNUSED).unwrap();
    assert_eq!(below.there(), [false, true]);
}

#[test]
fn ai_323_tagged_modules_and_those_in_use_stay() {
    let full = full(3, 3 * MODULE_BYTES);
    tag(&full.store, full.ids[0], &["t"]).unwrap();
    let used = full.ids[1];
    put(&full.store, 9, key(), &|id| id == used).unwrap();
    assert_eq!(full.there(), [true, true, false]);
    // Now nothing may go, and then nothing does.
    let nine = ModuleId::of(&bytes(9));
    let in_use = |id| id == used || id == nine;
    let error = put(&full.store, 10, key(), &in_use).unwrap_err();
    assert!(matches!(error, StoreError::Full), "{error}");
    assert_eq!(full.there(), [true, true, false]);
    assert_eq!(full.store.module_ids().unwrap().len(), 3);
}

#[test]
fn ai_323_stale_artefacts_go_and_their_modules_stay() {
    let full = full(2, 2 * MODULE_BYTES + 1112);
    tag(&full.store, full.ids[0], &["t"]).unwrap();
    tag(&full.store, full.ids[1], &["u"]).unwrap();
    let newer = ArtefactKey::of("engine 2");
    let artefact = Artefact::vouched_for(bytes(0));
    full.store
        .insert_artefact(full.ids[0], newer, &artefact, UNUSED)
        .unwrap();
    // There is no room for the next one, and for the engine of today the other two are stale.
    full.store
        .insert_artefact(full.ids[1], newer, &artefact, UNUSED)
        .unwrap();
    assert_eq!(full.there(), [true, true]);
    assert_eq!(full.store.artefact_size(full.ids[0], key()).unwrap(), None);
    assert_eq!(
        full.store.artefact_size(full.ids[1], key()).unwrap(),
        Some(1000)
    );
    assert_eq!(
        full.store.artefact_size(full.ids[0], newer).unwrap(),
        Some(1000)
    );
    assert_eq!(
        full.store.artefact_size(full.ids[1], newer).unwrap(),
        Some(1000)
    );
}

#[test]
fn ai_323_an_artefact_without_its_module_is_stale() {
    let full = full(1, 2 * MODULE_BYTES);
    tag(&full.store, full.ids[0], &["t"]).unwrap();
    let orphan = ModuleId::of(b"gone");
    full.store
        .insert_artefact(orphan, key(), &Artefact::vouched_for(bytes(1)), UNUSED)
        .unwrap();
    put(&full.store, 9, key(), UNUSED).unwrap();
    assert_eq!(full.store.artefact_size(orphan, key()).unwrap(), None);
    assert_eq!(full.there(), [true]);
}

#[test]
fn ai_323_what_is_replaced_makes_room_for_its_successor() {
    let full = full(2, 2 * MODULE_BYTES);
    let keeps_all: &dyn Fn(ModuleId) -> bool = &|_| true;
    put(&full.store, 0, key(), keeps_all).unwrap();
    let artefact = Artefact::vouched_for(bytes(0));
    let again = full
        .store
        .insert_artefact(full.ids[0], key(), &artefact, keeps_all);
    again.unwrap();
    assert_eq!(full.there(), [true, true]);
}

#[test]
fn ai_323_a_store_that_evicts_nothing_is_full_instead() {
    let folder = tempdir().unwrap();
    let options = StoreOptions {
        bytes_max: 2 * MODULE_BYTES,
        evicts: false,
        ..options(&folder)
    };
    let store = Store::open(options).unwrap();
    for number in 0..2 {
        put(&store, number, key(), UNUSED).unwrap();
    }
    let refused = put(&store, 2, key(), UNUSED);
    assert!(matches!(refused, Err(StoreError::Full)), "{refused:?}");
    assert_eq!(store.module_ids().unwrap().len(), 2);
}
