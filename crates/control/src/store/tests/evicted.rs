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

/// As an admin, who has no share of its own.
fn put(
    store: &Store,
    number: u8,
    key: ArtefactKey,
    in_use: &dyn Fn(ModuleId) -> bool,
) -> Result<ModuleId, StoreError> {
    let record = ModuleRecord {
        by_admin: true,
        ..record("root")
    };
    put_of(&record, store, number, key, in_use)
}

fn put_of(
    record: &ModuleRecord,
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
        record,
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

/// A store with room for some modules, which several users share.
struct Shared {
    store: Store,
    folder: TempDir,
}

impl Shared {
    fn new(room: u64) -> Self {
        let folder = tempdir().unwrap();
        let options = StoreOptions {
            bytes_max: room * MODULE_BYTES,
            ..options(&folder)
        };
        let store = Store::open(options).unwrap();
        Self { store, folder }
    }

    /// Uploads a module, which was used at that time.
    fn put(&self, owner: &str, number: u8) -> Result<ModuleId, StoreError> {
        let put = put_of(&record(owner), &self.store, number, key(), UNUSED);
        put.inspect(|id| self.store.touch(*id, key(), at(u64::from(number))))
    }

    fn numbers(&self) -> Vec<u8> {
        let there = |number: &u8| {
            let id = ModuleId::of(&bytes(*number));
            self.store.module_size(id).unwrap().is_some()
        };
        (0..100).filter(there).collect()
    }
}

/// AI-1090
#[test]
fn ai_323_one_owner_has_at_most_half_of_the_store() {
    let shared = Shared::new(4);
    for number in [1, 2] {
        let id = shared.put("anna", number).unwrap();
        tag(&shared.store, id, &[&format!("anna.{number}")]).unwrap();
    }
    let error = shared.put("anna", 3).unwrap_err();
    assert!(matches!(error, StoreError::ShareFull), "{error}");
    shared.put("bert", 4).unwrap();
    assert_eq!(shared.numbers(), [1, 2, 4]);
    // One module may go now, and the owner's next one takes its place, though there is room for it elsewhere.
    shared.store.remove_tags(&["anna.2".to_owned()]).unwrap();
    shared.put("anna", 5).unwrap();
    assert_eq!(shared.numbers(), [1, 4, 5]);
    // Whoever uploads what is there already has no more by it.
    shared.put("anna", 4).unwrap();
    assert_eq!(shared.numbers(), [1, 4, 5]);
    // An admin may have all of it.
    let admin = Shared::new(4);
    for number in 0..4 {
        put(&admin.store, number, key(), UNUSED).unwrap();
    }
    assert_eq!(admin.numbers(), [0, 1, 2, 3]);
}

#[test]
fn ai_323_who_has_most_gives_first() {
    let shared = Shared::new(6);
    // Used longest ago.
    shared.put("bert", 0).unwrap();
    shared.put("carl", 1).unwrap();
    shared.put("carl", 2).unwrap();
    for number in 10..20 {
        shared.put("anna", number).unwrap();
    }
    assert_eq!(shared.numbers(), [0, 1, 2, 17, 18, 19]);
    // Anna has more than whoever uploads now.
    shared.put("dora", 30).unwrap();
    assert_eq!(shared.numbers(), [0, 1, 2, 18, 19, 30]);
    // What has a tag stays, and then the next largest owner gives.
    for number in [18, 19] {
        let id = ModuleId::of(&bytes(number));
        tag(&shared.store, id, &[&format!("anna.{number}")]).unwrap();
    }
    shared.put("dora", 31).unwrap();
    assert_eq!(shared.numbers(), [0, 2, 18, 19, 30, 31]);
}

/// Another process may have a smaller limit, and then it does not evict for its own owner either.
#[test]
fn ai_323_a_store_that_evicts_nothing_refuses_at_the_share() {
    let shared = Shared::new(4);
    shared.put("anna", 1).unwrap();
    shared.put("anna", 2).unwrap();
    let store = Store::open(StoreOptions {
        bytes_max: 4 * MODULE_BYTES,
        evicts: false,
        ..options(&shared.folder)
    });
    let refused = put_of(&record("anna"), &store.unwrap(), 3, key(), UNUSED);
    assert!(matches!(refused, Err(StoreError::ShareFull)), "{refused:?}");
    assert_eq!(shared.numbers(), [1, 2]);
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
