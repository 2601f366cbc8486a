//! Tags on disk.

use std::fs;
use std::sync::atomic::Ordering;

use tempfile::tempdir;

use super::super::{StoreError, TagNameError, check_tag_name};
use super::*;

#[test]
fn ai_312_names_of_tags() {
    let bad = |name: &str| check_tag_name(name).unwrap_err();
    let good = |name: &str| assert_eq!(check_tag_name(name), Ok(()), "{name}");
    good("a");
    good("Anna.my-controller_2.x");
    good(&"x".repeat(50));
    assert_eq!(bad(&"x".repeat(51)), TagNameError::TooLong);
    good(&"a".repeat(20));
    assert_eq!(bad(&"a".repeat(21)), TagNameError::TooHex);
    assert_eq!(bad("0123456789abcdefABCDE"), TagNameError::TooHex);
    good("abcdefabcdefabcdefabcg");
    for name in [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a b",
        "1a",
        "_a",
        "-a",
        ".a",
        "é",
        "aé",
        "a\0",
        "a\n",
        "sapwood:regex",
    ] {
        assert_eq!(bad(name), TagNameError::NotIdentifier, "{name:?}");
    }
    // The order: too long comes before the others, hex before identifier.
    assert_eq!(bad(&"/".repeat(51)), TagNameError::TooLong);
    assert_eq!(bad(&"1".repeat(21)), TagNameError::TooHex);
    let texts = [
        TagNameError::TooLong,
        TagNameError::TooHex,
        TagNameError::NotIdentifier,
    ];
    assert_eq!(
        texts.map(|error| error.to_string()),
        [
            "tag name too long",
            "tag name looks too hex",
            "tag name not identifier"
        ]
    );
}

/// Makes the folder of tags look as if nothing in it had changed for a time.
fn settle(folder: &TempDir) {
    let tags = fs::File::open(folder.path().join("cache").join("tags")).unwrap();
    tags.set_modified(SystemTime::now() - Duration::from_secs(60))
        .unwrap();
}

#[test]
fn ai_321_a_listing_has_what_other_processes_have_changed() {
    let folder = tempdir().unwrap();
    let (store, other) = (open(&folder), open(&folder));
    let id = insert(&store, b"one").unwrap();
    tag(&store, id, &["a", "b"]).unwrap();
    let names = |store: &Store| {
        let tags = store.listed_tags().unwrap();
        tags.into_iter().map(|info| info.tag).collect::<Vec<_>>()
    };
    // Within one tick of the clock of the file system.
    for round in 0..20 {
        let name = format!("t{round:02}");
        tag(&other, id, &[&name]).unwrap();
        assert!(names(&store).contains(&name), "{round}");
    }
    let removed: Vec<String> = (0..20).map(|round| format!("t{round:02}")).collect();
    other.remove_tags(&removed).unwrap();
    assert_eq!(names(&store), ["a", "b"]);
    settle(&folder);
    assert_eq!(names(&store), ["a", "b"]);
    // Nothing is read again as long as the folder is as it was: a file that is broken in place does not show.
    fs::write(folder.path().join("cache/tags/a.json"), b"broken").unwrap();
    assert_eq!(names(&store), ["a", "b"]);
    assert_eq!(store.tags().unwrap().len(), 1);
    tag(&other, id, &["c"]).unwrap();
    assert_eq!(names(&store), ["b", "c"]);
    settle(&folder);
    assert_eq!(names(&store), ["b", "c"]);
    other.remove_tags(&["b".to_owned()]).unwrap();
    assert_eq!(names(&store), ["c"]);
}

#[test]
fn ai_322_broken_files_of_tags_are_skipped() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    tag(&store, id, &["good", "truncated", "other"]).unwrap();
    let tags = folder.path().join("cache/tags");
    let file = |name: &str| tags.join(format!("{name}.json"));
    let whole = fs::read_to_string(file("good")).unwrap();
    fs::write(file("truncated"), &whole[..whole.len() - 2]).unwrap();
    fs::write(file("other"), &whole).unwrap();
    fs::write(file("empty"), "").unwrap();
    fs::write(
        file("id"),
        whole.replace("good", "id").replace(&id.to_string(), "xyz"),
    )
    .unwrap();
    fs::write(file("huge"), whole.replace("anna", &"a".repeat(300_000))).unwrap();
    fs::write(file(".hidden"), &whole).unwrap();
    fs::write(tags.join("readme.txt"), &whole).unwrap();
    fs::create_dir(file("folder")).unwrap();
    let names: Vec<String> = store
        .tags()
        .unwrap()
        .into_iter()
        .map(|tag| tag.tag)
        .collect();
    assert_eq!(names, ["good"]);
    assert_eq!(store.tag("truncated").unwrap(), None);
    // It can be set again.
    tag(&store, id, &["truncated"]).unwrap();
    assert!(store.tag("truncated").unwrap().is_some());
    // A name that is a path reaches no file.
    fs::write(
        folder.path().join("cache/outside.json"),
        whole.replace("good", "../outside"),
    )
    .unwrap();
    assert_eq!(store.tag("../outside").unwrap(), None);
}

/// AI-1090
#[test]
fn ai_312_there_are_at_most_so_many_tags() {
    let folder = tempdir().unwrap();
    let mut options = options(&folder);
    assert_eq!(options.tags_max, 100_000);
    options.tags_max = 3;
    let store = Store::open(options).unwrap();
    let id = insert(&store, b"module").unwrap();
    tag(&store, id, &["a", "b"]).unwrap();
    // Neither is set, and one of them would be too many.
    let error = tag(&store, id, &["c", "d"]).unwrap_err();
    assert_eq!(error.to_string(), "too many tags");
    assert_eq!(store.tags().unwrap().len(), 2);
    tag(&store, id, &["c"]).unwrap();
    // Those that are there can always be set.
    tag(&store, id, &["c", "a", "c"]).unwrap();
    store.remove_tags(&["a".to_owned()]).unwrap();
    tag(&store, id, &["d"]).unwrap();
    assert_eq!(store.tags().unwrap().len(), 3);
}

/// AI-1090
#[test]
fn ai_312_one_user_has_at_most_half_of_the_tags() {
    let folder = tempdir().unwrap();
    let mut options = options(&folder);
    options.tags_max = 7;
    let store = Store::open(options).unwrap();
    let id = insert(&store, b"module").unwrap();
    tag(&store, id, &["anna.a", "anna.b"]).unwrap();
    // Of others.
    tag(&store, id, &["annabel.a"]).unwrap();
    let error = tag(&store, id, &["anna.c", "anna.d"]).unwrap_err();
    assert!(matches!(error, StoreError::TagShareFull), "{error}");
    tag(&store, id, &["anna.c", "anna.a"]).unwrap();
    tag(&store, id, &["anna.d"]).unwrap_err();
    assert_eq!(store.tags().unwrap().len(), 4);
    // An admin sets any.
    let names = ["anna.d", "anna.e", "x"].map(str::to_owned);
    let change = TagChange {
        tags: &names,
        module_id: id,
        updated_by: "anna",
        updated_at: 1_790_000_001,
        public: true,
        key: key(),
    };
    store.set_tags(change).unwrap();
    assert_eq!(store.tags().unwrap().len(), 7);
}

#[test]
fn ai_1003_tags_are_removed_all_or_none() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"module").unwrap();
    tag(&store, id, &["a", "b"]).unwrap();
    let error = store
        .remove_tags(&["a".to_owned(), "x".to_owned()])
        .unwrap_err();
    assert_eq!(error.to_string(), "tag x not found");
    assert_eq!(store.tags().unwrap().len(), 2);
    let error = store.remove_module(id).unwrap_err();
    assert_eq!(error.to_string(), "the module has tags: delete a first");
    store
        .remove_tags(&["a".to_owned(), "b".to_owned()])
        .unwrap();
    store.remove_module(id).unwrap();
    assert!(matches!(
        store.remove_module(id),
        Err(StoreError::ModuleNotFound)
    ));
    assert!(matches!(
        tag(&store, id, &["a"]),
        Err(StoreError::ModuleNotFound)
    ));
    // Nothing but the lock is left.
    let files = fs::read_dir(folder.path().join("cache")).unwrap();
    assert_eq!(
        files
            .filter(|entry| entry.as_ref().unwrap().path().is_file())
            .count(),
        1
    );
}

/// It is asked for under the lock, which everybody else waits for.
#[test]
fn ai_321_removing_a_module_does_not_read_all_tags_again() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"one").unwrap();
    tag(&store, id, &["a"]).unwrap();
    settle(&folder);
    assert_eq!(store.listed_tags().unwrap().len(), 1);
    // Broken in place, which shows only to those who read the file.
    fs::write(folder.path().join("cache/tags/a.json"), b"broken").unwrap();
    let refused = store.remove_module(id).unwrap_err();
    assert!(matches!(refused, StoreError::ModuleTagged(tag) if tag == "a"));
}

/// So that tagging, which anybody may repeat, holds the lock for one wait for the disk per tag and not for two.
#[test]
fn ai_322_tags_of_one_call_are_made_to_last_at_once() {
    let folder = tempdir().unwrap();
    let store = open(&folder);
    let id = insert(&store, b"one").unwrap();
    let names: Vec<String> = (0..10).map(|number| format!("t{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    tag(&store, id, &names).unwrap();
    assert_eq!(store.tags.syncs.load(Ordering::Relaxed), 1);
}
