//! AI-322: a crash at any point leaves the old or the new state.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

use tempfile::tempdir;

use super::*;

/// Runs `change` again and again in fresh folders, each time with one step more before the crash, and `check`s what a
/// process finds afterwards. Returns how many steps a whole change has.
fn crash_everywhere(
    prepare: impl Fn(&Store),
    change: impl Fn(&Store) -> Result<(), StoreError>,
    check: impl Fn(&Store, bool),
) -> usize {
    for steps in 0.. {
        let folder = tempdir().unwrap();
        let store = open(&folder);
        prepare(&store);
        // Both folders are of one process, so both stop; a change uses one after the other.
        *store.modules.steps_left.lock().unwrap() = Some(steps);
        *store.tags.steps_left.lock().unwrap() = Some(steps);
        let done = change(&store).is_ok();
        drop(store);
        check(&open(&folder), done);
        if done {
            return steps;
        }
    }
    unreachable!("the loop has no end");
}

#[test]
fn ai_322_a_crash_in_an_upload_leaves_nothing_or_all() {
    let id = ModuleId::of(b"new");
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let steps = crash_everywhere(
        |store| drop(insert(store, b"old")),
        |store| insert(store, b"new").map(|_| ()),
        |store, done| {
            let old = ModuleId::of(b"old");
            assert_eq!(store.read_module(old, 9).unwrap().unwrap(), b"old");
            assert!(store.read_artefact(old, key()).unwrap().is_some());
            let ids = store.module_ids().unwrap();
            let stored = store.read_module(id, 9).unwrap();
            assert_eq!(ids.contains(&id), stored.is_some());
            assert!(!done || stored.is_some());
            if stored.is_some() {
                // One that exists has everything.
                assert_eq!(store.record(id).unwrap(), record("anna"));
                let artefact = store.read_artefact(id, key()).unwrap();
                assert_eq!(artefact.unwrap().as_ref(), b"compiled new");
            }
            seen.borrow_mut().insert(stored.is_some());
            // What is left over does not stand in the way.
            insert(store, b"new").unwrap();
            assert!(store.read_module(id, 9).unwrap().is_some());
        },
    );
    assert!(steps >= 15, "three files, each of five steps: {steps}");
    assert_eq!(seen.into_inner().len(), 2);
}

#[test]
fn ai_322_a_crash_in_set_tags_leaves_each_tag_old_or_new() {
    let steps = crash_everywhere(
        |store| {
            let old = insert(store, b"old").unwrap();
            insert(store, b"new").unwrap();
            tag(store, old, &["a", "b"]).unwrap();
        },
        |store| tag(store, ModuleId::of(b"new"), &["b", "c"]),
        |store, done| {
            let id = |name| store.tag(name).unwrap().map(|info| info.module_id);
            let (old, new) = (ModuleId::of(b"old"), ModuleId::of(b"new"));
            assert_eq!(id("a"), Some(old.to_string()));
            let b = id("b").unwrap();
            assert!(b == new.to_string() || (!done && b == old.to_string()));
            // They are set in order.
            match id("c") {
                Some(c) => assert_eq!((c, b), (new.to_string(), new.to_string())),
                None => assert!(!done),
            }
        },
    );
    assert!(steps >= 10, "{steps}");
}

#[test]
fn ai_322_a_crash_in_a_deletion_leaves_a_whole_module_or_none() {
    let id = ModuleId::of(b"old");
    let steps = crash_everywhere(
        |store| drop(insert(store, b"old")),
        |store| store.remove_module(id),
        |store, done| {
            let exists = store.module_size(id).unwrap().is_some();
            assert!(!(done && exists));
            if exists {
                assert_eq!(store.record(id).unwrap(), record("anna"));
            }
            // The next one has its own owner, whatever is left of the earlier one.
            insert(store, b"old").unwrap();
            assert!(store.read_artefact(id, key()).unwrap().is_some());
        },
    );
    assert!(steps >= 5, "{steps}");
}

#[test]
fn ai_322_a_write_that_fails_leaves_no_temporary_file() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    // A folder of the file's name: the rename fails.
    let id = ModuleId::of(b"module");
    let cache = folder.path().join("cache");
    std::fs::create_dir(cache.join(format!("{id}-sys.json"))).unwrap();
    let error = insert(&store, b"module").unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Io {
                action: "write",
                ..
            }
        ),
        "{error}"
    );
    let names = std::fs::read_dir(&cache).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        !names
            .iter()
            .any(|name| name.to_str().unwrap().starts_with(".tmp")),
        "{names:?}"
    );
    assert_eq!(store.module_size(id).unwrap(), None);
}

/// Two stores on one folder stand for two processes: nothing is shared but the files.
#[test]
fn ai_322_processes_that_tag_at_once_lose_nothing() {
    let folder = Arc::new(tempdir().unwrap());
    let id = insert(&open(&folder), b"module").unwrap();
    let mut limited = options(&folder);
    limited.tags_max = 40;
    let set = |process: usize| {
        let store = Store::open(limited.clone()).unwrap();
        move || -> Vec<bool> {
            let set = |number: usize| tag(&store, id, &[&format!("p{process}.n{number}")]);
            (0..25).map(|number| set(number).is_ok()).collect()
        }
    };
    let threads: Vec<_> = (0..2).map(|process| thread::spawn(set(process))).collect();
    let set: Vec<bool> = threads
        .into_iter()
        .flat_map(|thread| thread.join().unwrap())
        .collect();
    // Without the lock both could take the last place.
    let store = open(&folder);
    assert_eq!(set.iter().filter(|set| **set).count(), 40);
    assert_eq!(store.tags().unwrap().len(), 40);
}
