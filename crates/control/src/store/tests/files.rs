//! Layout, modes and checks of files.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use tempfile::tempdir;

use super::super::StoreError;
use super::super::folder::Folder;
use super::*;
use crate::module::Abi;
use crate::store::FoundInModule;

#[test]
fn ai_321_the_layout_is_the_references() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    tag(&store, id, &["anna.first"]).unwrap();

    let cache = folder.path().join("cache");
    let mut names: Vec<String> = fs::read_dir(&cache)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    let mut expected = vec![
        ".lock".to_owned(),
        format!("{id}-sys.json"),
        format!("{id}-{}.cwasm", key()),
        format!("{id}.wasm"),
        "tags".to_owned(),
    ];
    expected.sort_unstable();
    assert_eq!(names, expected);
    let read = |name: &str| fs::read_to_string(cache.join(name)).unwrap();
    assert_eq!(read(&format!("{id}.wasm")), "module");
    assert_eq!(
        read(&format!("{id}-sys.json")),
        r#"{"created":1790000000,"auth":{"user":"anna","is_admin":false}}"#
    );
    assert_eq!(
        read("tags/anna.first.json"),
        format!(
            r#"{{"tag":"anna.first","module_id":"{id}","updated_at":1790000001,"updated_by":"anna","wasm_size":6,"compiled_size":15}}"#
        )
    );
}

#[test]
fn ai_321_a_folder_of_the_reference_works() {
    let folder = tempdir().unwrap();
    let id = ModuleId::of(b"theirs");
    let cache = folder.path().join("cache");
    fs::create_dir_all(cache.join("tags")).unwrap();
    fs::write(cache.join(format!("{id}.wasm")), "theirs").unwrap();
    fs::write(cache.join(format!("{id}.elf")), "machine code").unwrap();
    let record = r#"{"created":12,"auth":{"user":"bob","is_admin":true},"more":1}"#;
    fs::write(cache.join(format!("{id}-sys.json")), record).unwrap();
    let file = format!(
        r#"{{"tag":"t","module_id":"{id}","updated_at":7,"updated_by":"bob","wasm_size":6,"compiled_size":3}}"#
    );
    fs::write(cache.join("tags/t.json"), file).unwrap();

    let store = open(&folder);
    assert_eq!(store.read_module(id, 100).unwrap().unwrap(), b"theirs");
    assert_eq!(store.read_artefact(id, key()).unwrap(), None);
    let record = store.record(id).unwrap();
    assert_eq!(
        (record.created, &record.owner[..], record.by_admin),
        (12, "bob", true)
    );
    let tags = store.tags().unwrap();
    assert_eq!(
        (&tags[0].tag[..], tags[0].updated_at, tags[0].public),
        ("t", 7, false)
    );
}

#[test]
fn ai_321_a_record_has_what_listings_need() {
    let found = FoundInModule {
        abi: Abi::P1,
        imports: vec!["env.x".to_owned()],
    };
    let whole = ModuleRecord {
        found: Some(found),
        by_admin: true,
        ..record("anna")
    };
    let json = whole.json().unwrap();
    assert_eq!(ModuleRecord::parse(&json), Some(whole));
    for broken in ["", "{}", "[]", r#"{"created":"x"}"#] {
        assert_eq!(ModuleRecord::parse(broken.as_bytes()), None);
    }
    let folder = tempdir().unwrap();
    assert_eq!(
        open(&folder).record(ModuleId::of(b"none")).unwrap(),
        ModuleRecord::default()
    );
}

#[test]
fn ai_321_artefacts_are_handed_out_only_if_everything_matches() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    let artefact = Artefact::vouched_for(b"compiled module".to_vec());
    let read = || store.read_artefact(id, key()).unwrap();
    assert_eq!(read(), Some(artefact.clone()));
    assert_eq!(store.artefact_size(id, key()).unwrap(), Some(15));
    let other = ArtefactKey::of("engine 2");
    assert_eq!(store.read_artefact(id, other).unwrap(), None);

    let path = folder.path().join(format!("cache/{id}-{}.cwasm", key()));
    let good = fs::read(&path).unwrap();
    // Any single byte, in the header and in the artefact.
    for position in 0..good.len() {
        let mut damaged = good.clone();
        damaged[position] ^= 1;
        fs::write(&path, damaged).unwrap();
        assert_eq!(read(), None, "byte {position}");
    }
    for length in [0, 10, good.len() - 1] {
        fs::write(&path, &good[..length]).unwrap();
        assert_eq!(read(), None, "{length} bytes");
    }
    fs::write(&path, [&good[..], b"x"].concat()).unwrap();
    assert_eq!(read(), None);
    fs::write(&path, &good).unwrap();
    assert_eq!(read(), Some(artefact));

    // Whole, but of another module or key.
    let another = insert(&store, b"another").unwrap();
    fs::copy(
        &path,
        folder
            .path()
            .join(format!("cache/{another}-{}.cwasm", key())),
    )
    .unwrap();
    assert_eq!(store.read_artefact(another, key()).unwrap(), None);
    fs::copy(
        &path,
        folder.path().join(format!("cache/{id}-{other}.cwasm")),
    )
    .unwrap();
    assert_eq!(store.read_artefact(id, other).unwrap(), None);
}

#[test]
fn ai_321_artefacts_that_others_could_write_are_not_taken() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    let path = folder.path().join(format!("cache/{id}-{}.cwasm", key()));
    let read = || store.read_artefact(id, key()).unwrap();
    for mode in [0o620, 0o602, 0o640] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        assert_eq!(read(), None, "mode {mode:o}");
    }
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    assert!(read().is_some());
    // A link leads elsewhere.
    let target = folder.path().join("target");
    fs::rename(&path, &target).unwrap();
    symlink(&target, &path).unwrap();
    assert_eq!(read(), None);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(read(), None);
}

#[test]
fn ai_321_a_damaged_module_is_not_read() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    assert_eq!(store.read_module(id, 6).unwrap().unwrap(), b"module");
    assert_eq!(store.read_module(id, 5).unwrap(), None);
    fs::write(folder.path().join(format!("cache/{id}.wasm")), "Module").unwrap();
    assert_eq!(store.read_module(id, 6).unwrap(), None);
    assert_eq!(store.read_module(ModuleId::of(b"none"), 6).unwrap(), None);
    // Uploaded again it is whole, and its owner stays.
    insert(&store, b"module").unwrap();
    assert_eq!(store.read_module(id, 6).unwrap().unwrap(), b"module");
}

#[test]
fn ai_323_folders_and_files_are_private() {
    let folder = tempdir().unwrap();
    let cache = folder.path().join("cache");
    fs::create_dir(&cache).unwrap();
    fs::set_permissions(&cache, Permissions::from_mode(0o777)).unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    tag(&store, id, &["t"]).unwrap();
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(cache.clone()), 0o700);
    assert_eq!(mode(cache.join("tags")), 0o700);
    let names = fs::read_dir(&cache)
        .unwrap()
        .chain(fs::read_dir(cache.join("tags")).unwrap());
    let mut files = 0;
    for entry in names
        .map(Result::unwrap)
        .filter(|entry| entry.path().is_file())
    {
        assert_eq!(mode(entry.path()), 0o600, "{}", entry.path().display());
        files += 1;
    }
    assert_eq!(files, 5);
}

#[test]
fn ai_323_a_folder_of_another_user_is_refused() {
    // Everybody has this folder, and nobody but root owns it; root is refused nothing, so it tests another one.
    let foreign = PathBuf::from("/proc/1");
    let error = if rustix::process::geteuid().is_root() {
        let folder = tempdir().unwrap();
        std::os::unix::fs::chown(folder.path(), Some(12_345), None).unwrap();
        Folder::open(folder.path().to_owned()).unwrap_err()
    } else {
        Folder::open(foreign).unwrap_err()
    };
    assert!(matches!(error, StoreError::ForeignOwner(_)), "{error}");
    assert!(
        error
            .to_string()
            .ends_with("belongs to another user: choose a folder of your own")
    );
    // A file is no folder.
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("cache"), "").unwrap();
    let error = Store::open(options(&folder)).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Io {
                action: "create",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn ai_322_temporary_files_of_crashed_processes_are_removed() {
    let folder = tempdir().unwrap();
    let cache = folder.path().join("cache");
    let store = open(&folder);
    let left = [cache.join(".tmp-1-0"), cache.join("tags/.tmp-1-0")];
    for left in &left {
        fs::write(left, "x").unwrap();
    }
    let there = || left.each_ref().map(|left| left.exists());
    // Who writes one holds the lock, so they are left alone until that is released.
    let lock = store.modules.lock().unwrap();
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| drop(open(&folder)));
        assert_eq!(there(), [true; 2]);
        drop(lock);
        opening.join().unwrap();
    });
    assert_eq!(there(), [false; 2]);
}
