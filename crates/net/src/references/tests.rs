//! Real files, and real servers on this machine.

mod files;
#[cfg(feature = "stores")]
mod stores;
mod web;

use futures::TryStreamExt;
use proptest::prelude::*;

use super::{Config, Error, ReferenceResolver};

/// Returns the whole content of `uri`, and its declared length.
async fn fetch(config: &Config, uri: &str) -> Result<(String, Option<u64>), Error> {
    let references = ReferenceResolver::new(config).unwrap();
    let found = references.open(uri).await?;
    let pieces: Vec<_> = found.pieces.try_collect().await?;
    Ok((String::from_utf8(pieces.concat()).unwrap(), found.bytes))
}

/// Returns the configuration key that would allow a denied reference.
fn denied_by(outcome: Result<(String, Option<u64>), Error>) -> &'static str {
    match outcome {
        Err(Error::Denied { key, .. }) => key,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn ev_413_everything_is_off_by_default() {
    for (uri, key) in [
        ("file:///etc/passwd", "files"),
        ("https://example.com/", "hosts"),
        ("HTTP://127.0.0.1/", "hosts"),
        ("s3://bucket/key", "stores"),
        ("gs://bucket/key", "stores"),
        ("az://bucket/key", "stores"),
    ] {
        let outcome = fetch(&Config::default(), uri).await;
        assert_eq!(denied_by(outcome), key, "{uri}");
    }
    let outcome = fetch(&Config::default(), "ftp://h/").await;
    assert!(matches!(outcome, Err(Error::Malformed(_))));
}

proptest! {
    /// Only an empty directory and a host that does not exist are listed, so nothing can be read, however the URI is
    /// written.
    #[test]
    fn ev_413_no_uri_gets_past_the_lists(
        scheme in "file|FILE|https?|s3|gs|az|data|[a-z]{0,3}",
        rest in "(//|///|////)?[ -~]{0,60}",
    ) {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            files: vec![dir.path().to_owned()],
            hosts: vec!["nowhere.invalid".into()],
            ..Config::default()
        };
        let references = ReferenceResolver::new(&config).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let opened = runtime.block_on(references.open(&format!("{scheme}:{rest}")));
        prop_assert!(opened.is_err());
    }
}

#[test]
fn ev_410_errors_have_their_reasons_and_a_remedy() {
    let denied = Error::Denied {
        what: "a reference to this host and port is",
        key: "hosts",
    };
    for (error, reason, states) in [
        (denied, "REF_DENIED", "references.hosts"),
        (Error::Refused("because"), "REF_DENIED", "because"),
        (Error::Malformed("because"), "REF_SCHEME", "because"),
        (Error::NotFound, "REF_NOT_FOUND", "does not exist"),
        (Error::Failed("because"), "REF_FETCH", "because"),
        (Error::Answered(503), "REF_FETCH", "503"),
    ] {
        let status = error.status();
        assert_eq!(status.reason, reason);
        assert!(status.message.contains(states), "{}", status.message);
    }
}

#[test]
fn ev_413_invalid_entries_are_reported() {
    let strings = |entry: &str| vec![entry.to_owned()];
    for (config, states) in [
        (
            Config {
                files: vec!["relative".into()],
                ..Config::default()
            },
            "references.files: `relative`",
        ),
        (
            Config {
                files: vec!["/nowhere/at/all".into()],
                ..Config::default()
            },
            "references.files: `/nowhere/at/all`",
        ),
        (
            Config {
                private_hosts: strings("http://h"),
                ..Config::default()
            },
            "references.private_hosts: `http://h`",
        ),
        (
            Config {
                stores: strings("bucket"),
                ..Config::default()
            },
            "references.stores: `bucket`",
        ),
    ] {
        let error = ReferenceResolver::new(&config).unwrap_err().to_string();
        assert!(error.starts_with(states), "{error}");
    }
}
