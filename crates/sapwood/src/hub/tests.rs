use std::time::UNIX_EPOCH;

use tempfile::TempDir;

use super::*;

#[path = "../../tests/cli/hub_server.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod hub_server;

use hub_server::{FakeHub, HttpServer, Reply, gguf, listing, ranged, sha256};

const Q4: &str = "m-Q4_K_M.gguf";

fn cache(dir: &Path, endpoint: &str) -> ModelCache {
    ModelCache::new(&HubConfig {
        dir: Some(dir.to_owned()),
        endpoint: endpoint.to_owned(),
        retries: 0,
        ..HubConfig::default()
    })
}

fn source(text: &str) -> ModelSource {
    ModelSource::read(Path::new(text)).unwrap()
}

/// Nothing listens at this port, which is reserved for `discard`.
const NOBODY: &str = "http://127.0.0.1:9";

#[tokio::test]
async fn a_model_is_downloaded_once_and_locked_while_it_is_loaded() {
    let hub = FakeHub::new(&[(Q4, gguf(5_000)), ("m-Q8_0.gguf", gguf(100))]);
    let folder = tempfile::tempdir().unwrap();
    let online = cache(folder.path(), &hub.hub.url);
    let named = source("hf:o/r");
    // Two models of one process, with one file.
    let (first, second) = futures::join!(
        online.acquire("first", &named),
        online.acquire("second", &named)
    );
    let path = first.unwrap();
    assert_eq!(second.unwrap(), path);
    assert_eq!(std::fs::read(&path).unwrap(), gguf(5_000));
    assert_eq!(hub.cdn.requests().len(), 1);
    online.release("first");
    let other = cache(folder.path(), NOBODY);
    let refused = other.remove("hf:o/r").unwrap_err();
    assert!(refused.message.contains("in use"), "{refused}");
    // Another process may load it at the same time, without a network.
    let long_ago = UNIX_EPOCH + Duration::from_secs(1_000);
    std::fs::File::open(&path)
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    assert_eq!(other.acquire("m", &named).await.unwrap(), path);
    assert!(other.models().unwrap()[0].used > long_ago);
    online.release("second");
    assert!(online.remove("hf:o/r").is_err());
    other.release("m");
    assert_eq!(online.remove("hf:o/r").unwrap(), 5_000);
    let missing = other.acquire("m", &named).await.unwrap_err();
    for part in ["127.0.0.1:9 does not answer", "not downloaded yet"] {
        assert!(missing.message.contains(part), "{missing}");
    }
    // The locks of what could not be had are none.
    assert!(other.0.loaded.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_file_that_was_copied_here_is_found_by_its_quantisation() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("hf/o/r/main");
    std::fs::create_dir_all(&below).unwrap();
    std::fs::write(below.join(Q4), gguf(10)).unwrap();
    std::fs::write(below.join("m-Q8_0.gguf.0123.part"), gguf(10)).unwrap();
    let cache = cache(folder.path(), NOBODY);
    for (text, there) in [
        ("hf:o/r:q4_k_m", true),
        ("hf:o/r:m-Q4_K_M.gguf", true),
        ("hf:o/r:Q8_0", false),
        ("hf:o/r", false),
        ("hf:o/r@v1:Q4_K_M", false),
        ("https://h/m.gguf", false),
    ] {
        assert_eq!(cache.has(&source(text)), there, "{text}");
    }
}

#[test]
fn the_name_of_a_file_names_it_again() {
    let folder = ModelFolder(PathBuf::from("/models"));
    for text in [
        "hf:o/r:m.gguf",
        "hf:o/r:a/b/m.gguf",
        "hf:o/r@refs/pr/3:m.gguf",
        "https://h/m.gguf",
        "https://h:8443/a%20b/m.gguf",
        "https://[::1]:8443/m.gguf",
        "http://h/m.gguf",
        "http://h/a/m.gguf?query-id=0123456789abcdef",
    ] {
        let path = match source(text) {
            ModelSource::Url(url) => folder.of_url(&url),
            ModelSource::Hub(hub) => match &hub.choice {
                ModelChoice::File(file) => folder.of_repo(&hub).join(file),
                _ => panic!("it names a file"),
            },
            ModelSource::File(_) => panic!("it has a scheme"),
        };
        assert!(path.starts_with("/models"), "{text}");
        assert_eq!(folder.name(&path), text);
    }
}

/// Servers load models in tasks that move between threads.
#[test]
fn loading_may_move_between_threads() {
    fn moves<T: Send + 'static>(_: T) {}
    let cache = cache(Path::new("/models"), NOBODY);
    moves(async move { cache.acquire("m", &source("hf:o/r")).await });
}

const PARTS: [&str; 2] = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];

fn split(first: usize, second: usize) -> [(&'static str, Vec<u8>); 2] {
    [(PARTS[0], gguf(first)), (PARTS[1], gguf(second))]
}

/// All files below a folder.
fn names(below: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![below.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    names
}

/// A folder that has a split model, with parts of 5,000 and 6,000 bytes, and the model's source.
async fn pulled_split() -> (TempDir, ModelSource) {
    let folder = tempfile::tempdir().unwrap();
    let named = source("hf:o/r");
    let hub = FakeHub::new(&split(5_000, 6_000));
    let cache = cache(folder.path(), &hub.hub.url);
    cache.pull(&named).await.unwrap();
    (folder, named)
}

#[tokio::test]
async fn a_split_model_is_never_one_of_two_versions() {
    let (folder, named) = pulled_split().await;
    let file = |part| folder.path().join("hf/o/r/main").join(part);
    // Only the first part of the newer version can be received.
    let lacks = FakeHub::with(
        &split(7_000, 8_000),
        |_| None,
        |request| (request.path.contains(PARTS[1])).then(|| Reply::new(404, "")),
    );
    let second = cache(folder.path(), &lacks.hub.url);
    assert!(second.pull(&named).await.is_err());
    assert_eq!(std::fs::read(file(PARTS[0])).unwrap(), gguf(5_000));
    assert!(second.has(&named));
    // One of the old parts is in use: neither is replaced.
    let whole = FakeHub::new(&split(7_000, 8_000));
    let third = cache(folder.path(), &whole.hub.url);
    let lock = FileLock::shared(&file(PARTS[1])).unwrap();
    assert!(third.pull(&named).await.is_err());
    assert_eq!(std::fs::read(file(PARTS[0])).unwrap(), gguf(5_000));
    drop(lock);
    third.pull(&named).await.unwrap();
    assert_eq!(std::fs::read(file(PARTS[0])).unwrap(), gguf(7_000));
    assert_eq!(std::fs::read(file(PARTS[1])).unwrap(), gguf(8_000));
    // As if a process had ended between two of its records.
    let other = FileRecord {
        commit: Some("ab".into()),
        ..FileRecord::read(&file(PARTS[0])).unwrap()
    };
    other.write(&file(PARTS[0])).unwrap();
    assert!(!third.has(&named));
    assert!(!third.pull(&named).await.unwrap().1, "nothing is received");
    assert!(third.has(&named));
}

#[tokio::test]
async fn a_file_of_another_length_than_recorded_is_downloaded_again() {
    let hub = FakeHub::new(&[(Q4, gguf(5_000))]);
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), &hub.hub.url);
    let named = source("hf:o/r");
    let path = cache.pull(&named).await.unwrap().0.remove(0);
    std::fs::write(&path, &gguf(5_000)[..4_000]).unwrap();
    assert!(!cache.has(&named));
    assert!(cache.pull(&named).await.unwrap().1);
    assert_eq!(std::fs::read(&path).unwrap(), gguf(5_000));
}

#[tokio::test]
async fn the_last_use_is_noted_beside_the_model() {
    let hub = FakeHub::new(&[(Q4, gguf(5_000))]);
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), &hub.hub.url);
    let path = cache.pull(&source("hf:o/r")).await.unwrap().0.remove(0);
    let long_ago = UNIX_EPOCH + Duration::from_secs(1_000);
    let file = std::fs::File::open(&path).unwrap();
    file.set_modified(long_ago).unwrap();
    assert_eq!(cache.models().unwrap()[0].used, long_ago);
    cache.acquire("m", &source("hf:o/r")).await.unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), long_ago);
    assert!(cache.models().unwrap()[0].used > long_ago);
    cache.release("m");
    cache.remove("hf:o/r").unwrap();
    assert_eq!(names(folder.path()), [""; 0]);
}

#[tokio::test]
async fn the_usual_model_stays_the_same_one_offline() {
    let folder = tempfile::tempdir().unwrap();
    let named = source("hf:o/r");
    let q8 = ("m-Q8_0.gguf", gguf(100));
    let early = FakeHub::new(std::slice::from_ref(&q8));
    let early = cache(folder.path(), &early.hub.url);
    let path = early.pull(&named).await.unwrap().0;
    let all = [q8, (Q4, gguf(200)), ("m-Q6_K.gguf", gguf(300))];
    let later = FakeHub::new(&all);
    let later = cache(folder.path(), &later.hub.url);
    later.pull(&source("hf:o/r:Q6_K")).await.unwrap();
    let nobody = cache(folder.path(), NOBODY);
    assert_eq!(nobody.acquire("m", &named).await.unwrap(), path[0]);
    nobody.release("m");
    // Until it is pulled itself.
    let newer = later.pull(&named).await.unwrap().0;
    assert!(newer[0].ends_with(Q4));
    assert_eq!(nobody.acquire("m", &named).await.unwrap(), newer[0]);
}

#[tokio::test]
async fn a_list_is_stored_only_with_what_it_names() {
    let hub = FakeHub::with(&[(Q4, gguf(200))], |_| None, |_| Some(Reply::new(404, "")));
    let folder = tempfile::tempdir().unwrap();
    let online = cache(folder.path(), &hub.hub.url);
    let named = source("hf:o/r");
    assert!(online.pull(&named).await.is_err());
    let left = names(folder.path());
    assert!(!left.contains(&"listing.json".to_owned()), "{left:?}");
    // What was copied here is better than nothing.
    let copied = folder.path().join("hf/o/r/main/m-Q2_K.gguf");
    std::fs::write(&copied, gguf(10)).unwrap();
    assert_eq!(online.acquire("m", &named).await.unwrap(), copied);
}

#[test]
fn urls_with_another_scheme_or_query_are_other_files() {
    let folder = ModelFolder(PathBuf::from("/models"));
    let of = |text: &str| match source(text) {
        ModelSource::Url(url) => folder.of_url(&url),
        _ => panic!("it is a URL"),
    };
    let all = [
        "https://h/m.gguf",
        "http://h/m.gguf",
        "https://h/m.gguf?a",
        "https://h/m.gguf?b",
    ];
    let paths: std::collections::BTreeSet<_> = all.into_iter().map(of).collect();
    assert_eq!(paths.len(), 4);
    let path = of("https://h/m.gguf?sig=hush");
    assert!(!path.to_string_lossy().contains("hush"));
    assert_eq!(of(&folder.name(&path)), path);
}

#[tokio::test]
async fn a_model_that_is_being_downloaded_is_not_removed_by_halves() {
    let folder = tempfile::tempdir().unwrap();
    let hub = FakeHub::new(&split(5_000, 6_000));
    let cache = cache(folder.path(), &hub.hub.url);
    cache.pull(&source("hf:o/r")).await.unwrap();
    let below = folder.path().join("hf/o/r/main");
    let part = folder::part_path(&below.join(PARTS[1]), "0123");
    let lock = FileLock::part(&part).unwrap();
    let refused = cache.remove("hf:o/r").unwrap_err();
    assert!(refused.message.contains("being downloaded"), "{refused}");
    assert!(cache.has(&source("hf:o/r")));
    drop(lock);
    cache.remove("hf:o/r").unwrap();
    assert_eq!(names(folder.path()), [""; 0]);
}

/// Each part alone would fit.
#[tokio::test]
async fn a_model_whose_parts_do_not_fit_together_is_refused_first() {
    let folder = tempfile::tempdir().unwrap();
    let free = folder::free_bytes(folder.path()).unwrap();
    let files = split(100, 100).map(|(name, bytes)| (name.to_owned(), bytes));
    let mut list = listing(&files);
    for part in 0..2 {
        list["siblings"][part]["lfs"]["size"] = (free / 5 * 3).into();
    }
    let body = list.to_string();
    let of_hub = move |request: &hub_server::Request| {
        let is_list = request.path.starts_with("/api");
        is_list.then(|| Reply::new(200, &*body))
    };
    let hub = FakeHub::with(&split(100, 100), of_hub, |_| None);
    let cache = cache(folder.path(), &hub.hub.url);
    let refused = cache.pull(&source("hf:o/r")).await.unwrap_err();
    assert!(refused.message.contains("it needs"), "{refused}");
    assert_eq!(hub.hub.requests().len(), 1);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[tokio::test]
async fn a_repository_is_removed_with_all_its_revisions_and_folders() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), NOBODY);
    let put = |path: &str| {
        let path = folder.path().join("hf/o/r").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, gguf(10)).unwrap();
    };
    for path in [
        "main/a/b/m.gguf",
        "main/mmproj.gguf",
        "v1/m.gguf",
        "v2/m.gguf",
    ] {
        put(path);
    }
    cache.remove("hf:o/r@v1").unwrap();
    cache.remove("hf:o/r:mmproj.gguf").unwrap();
    let left: Vec<_> = cache
        .models()
        .unwrap()
        .into_iter()
        .map(|one| one.name)
        .collect();
    assert_eq!(left, ["hf:o/r:a/b/m.gguf", "hf:o/r@v2:m.gguf"]);
    assert_eq!(cache.remove("hf:o/r").unwrap(), 20);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[tokio::test]
async fn a_path_in_the_folder_is_locked_too() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), NOBODY);
    let below = folder.path().join("hf/o/r/main");
    std::fs::create_dir_all(&below).unwrap();
    for part in PARTS {
        std::fs::write(below.join(part), gguf(10)).unwrap();
    }
    let path = below.join(PARTS[0]);
    assert!(cache.covers(&path) && !cache.covers(Path::new("/etc/hostname")));
    assert!(!cache.covers(&below.join("none.gguf")));
    let loaded = cache.acquire("m", &ModelSource::File(path.clone())).await;
    assert_eq!(loaded.unwrap(), path);
    assert!(FileLock::exclusive(&below.join(PARTS[1])).is_err());
    assert!(cache.remove("hf:o/r").is_err());
}

/// A model and its draft model.
#[tokio::test]
async fn what_is_acquired_under_one_name_is_locked_until_it_is_released() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path(), NOBODY);
    let below = folder.path().join("hf/o/r/main");
    std::fs::create_dir_all(&below).unwrap();
    let files = [Q4, "m-Q8_0.gguf"].map(|name| below.join(name));
    for path in &files {
        std::fs::write(path, gguf(10)).unwrap();
        let source = ModelSource::File(path.clone());
        cache.acquire("m", &source).await.unwrap();
    }
    let is_locked = |path: &PathBuf| FileLock::exclusive(path).is_err();
    assert_eq!(files.each_ref().map(is_locked), [true; 2]);
    cache.release("m");
    assert_eq!(files.each_ref().map(is_locked), [false; 2]);
}

/// A page in place of the file, as of a network that wants a login.
#[tokio::test]
async fn a_part_survives_an_answer_of_another_length() {
    let folder = tempfile::tempdir().unwrap();
    let page = |_: &hub_server::Request| {
        Some(Reply {
            chunked: false,
            ..Reply::new(200, "<html>")
        })
    };
    // From the hub itself: it says nothing of the file's length.
    let of_hub = move |request: &hub_server::Request| {
        let is_file = request.path.contains("resolve");
        is_file.then(|| page(request)).flatten()
    };
    let hub = FakeHub::with(&[(Q4, gguf(5_000))], of_hub, |_| None);
    let below = folder.path().join("hf/o/r/main");
    std::fs::create_dir_all(&below).unwrap();
    let part = folder::part_path(&below.join(Q4), &sha256(&gguf(5_000))[..16]);
    std::fs::write(&part, &gguf(5_000)[..1_000]).unwrap();
    let online = cache(folder.path(), &hub.hub.url);
    let refused = online.pull(&source("hf:o/r")).await.unwrap_err();
    assert!(refused.message.contains("before stays"), "{refused}");
    assert_eq!(std::fs::metadata(part).unwrap().len(), 1_000);
}

/// The same page without its length.
#[tokio::test]
async fn a_part_survives_a_page_of_no_known_length() {
    let folder = tempfile::tempdir().unwrap();
    let of_hub = |request: &hub_server::Request| {
        let is_file = request.path.contains("resolve");
        is_file.then(|| Reply {
            chunked: true,
            ..Reply::new(200, "<html>".repeat(300))
        })
    };
    let hub = FakeHub::with(&[(Q4, gguf(5_000))], of_hub, |_| None);
    let below = folder.path().join("hf/o/r/main");
    std::fs::create_dir_all(&below).unwrap();
    let part = folder::part_path(&below.join(Q4), &sha256(&gguf(5_000))[..16]);
    std::fs::write(&part, &gguf(5_000)[..1_000]).unwrap();
    let online = cache(folder.path(), &hub.hub.url);
    let refused = online.pull(&source("hf:o/r")).await.unwrap_err();
    for what in ["not a GGUF file", "before stays"] {
        assert!(refused.message.contains(what), "{refused}");
    }
    assert_eq!(std::fs::read(&part).unwrap(), gguf(5_000)[..1_000]);
    // It never becomes a part itself.
    std::fs::remove_file(&part).unwrap();
    let refused = online.pull(&source("hf:o/r")).await.unwrap_err();
    assert!(refused.message.contains("not a GGUF file"), "{refused}");
    assert!(!part.exists());
}

/// A server that takes no notice of `if-range`, and whose file was replaced by one of the same length.
#[tokio::test]
async fn the_rest_of_another_version_is_not_appended() {
    let newer: Vec<u8> = gguf(6_000).split_off(1_000);
    let newer = [b"GGUF", &newer[4..]].concat();
    let expect = newer.clone();
    let web = HttpServer::start(move |request| match request.before {
        0 => Reply {
            cut: Some(2_500),
            ..Reply::new(200, gguf(5_000)).header("etag", "\"v1\"")
        },
        _ => ranged(request, &newer).header("etag", "\"v2\""),
    });
    let folder = tempfile::tempdir().unwrap();
    let cache = ModelCache::new(&HubConfig {
        dir: Some(folder.path().to_owned()),
        retries: 2,
        retry_wait: Duration::from_millis(1),
        ..HubConfig::default()
    });
    let url = source(&format!("{}/m.gguf", web.url));
    let path = cache.pull(&url).await.unwrap().0.remove(0);
    assert_eq!(std::fs::read(path).unwrap(), expect);
    assert_eq!(web.requests()[1].headers["range"], "bytes=2500-");
}

/// As on a disk that is full at the second record, or where the first part cannot be moved.
#[tokio::test]
async fn a_model_stays_usable_if_it_cannot_be_replaced() {
    let (folder, named) = pulled_split().await;
    let file = |part| folder.path().join("hf/o/r/main").join(part);
    let newer = FakeHub::new(&split(7_000, 8_000));
    let online = cache(folder.path(), &newer.hub.url);
    // Files that were copied here; a folder in the place of a record cannot be replaced by one.
    let copied = FileRecord {
        commit: None,
        ..FileRecord::read(&file(PARTS[0])).unwrap()
    };
    copied.write(&file(PARTS[0])).unwrap();
    let record = folder::record_path(&file(PARTS[1]));
    std::fs::remove_file(&record).unwrap();
    std::fs::create_dir(&record).unwrap();
    assert!(online.has(&named));
    let refused = online.pull(&named).await.unwrap_err();
    assert!(refused.message.contains("cannot write"), "{refused}");
    assert!(online.has(&named), "it is the old one");
    assert_eq!(FileRecord::read(&file(PARTS[0])), Some(copied));
    std::fs::remove_dir(&record).unwrap();
    online.pull(&named).await.unwrap();
    assert_eq!(std::fs::read(file(PARTS[0])).unwrap(), gguf(7_000));
}

#[tokio::test]
async fn texts_of_a_hub_have_no_control_characters() {
    let folder = tempfile::tempdir().unwrap();
    let text = "a\u{9b}2J\u{202e}b\u{2028}c";
    let answer = move |_: &_| Some(Reply::new(404, "").header("x-error-message", text));
    let hub = FakeHub::with(&[], answer, |_| None);
    let cache = cache(folder.path(), &hub.hub.url);
    let refused = cache.pull(&source("hf:o/r")).await.unwrap_err();
    assert!(
        refused.message.contains("a\u{fffd}2J\u{fffd}b\u{fffd}c"),
        "{refused}"
    );
}

#[tokio::test]
async fn an_endpoint_with_a_query_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (endpoint, why) in [
        ("http://h/?a=b", "has a query"),
        ("http://h/#a", "has a query"),
        ("mirror", "not a URL"),
    ] {
        let refused = cache(folder.path(), endpoint).pull(&source("hf:o/r")).await;
        let refused = refused.unwrap_err();
        assert!(refused.message.contains(why), "{refused}");
        assert!(refused.message.contains("HF_ENDPOINT"), "{refused}");
    }
}
