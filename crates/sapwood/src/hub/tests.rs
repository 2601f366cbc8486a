use std::time::UNIX_EPOCH;

use super::*;

#[path = "../../tests/cli/hub_server.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod hub_server;

use hub_server::{FakeHub, gguf};

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
