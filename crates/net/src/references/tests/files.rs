//! Files below a root, and paths that lead outside.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::*;

fn config(root: &Path) -> Config {
    Config {
        files: vec![root.to_owned()],
        ..Config::default()
    }
}

/// A root with every kind of entry, beside a directory that must not be read.
fn context() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("inner")).unwrap();
    std::fs::create_dir(dir.path().join("root2")).unwrap();
    std::fs::write(dir.path().join("secret"), "secret").unwrap();
    std::fs::write(dir.path().join("root2/secret"), "secret").unwrap();
    std::fs::write(root.join("plain"), "plain").unwrap();
    std::fs::write(root.join("empty"), "").unwrap();
    std::fs::write(root.join("a b#c?d%"), "odd").unwrap();
    std::fs::write(root.join("inner/deep"), "deep").unwrap();
    symlink("inner/deep", root.join("link")).unwrap();
    symlink("..", root.join("inner/up")).unwrap();
    symlink("../secret", root.join("out")).unwrap();
    symlink("..", root.join("parent")).unwrap();
    symlink(dir.path().join("secret"), root.join("absolute")).unwrap();
    symlink("/nowhere/at/all", root.join("dangling")).unwrap();
    symlink("round", root.join("round")).unwrap();
    let pipe = root.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    drop(UnixListener::bind(root.join("socket")).unwrap());
    (dir, root)
}

#[tokio::test]
async fn ev_412_regular_files_below_a_root_are_read() {
    let (_dir, root) = context();
    for (path, text) in [
        ("plain", "plain"),
        ("empty", ""),
        ("a%20b%23c%3Fd%25", "odd"),
        ("inner/deep", "deep"),
        ("inner/../plain", "plain"),
        ("link", "deep"),
        ("inner/up/plain", "plain"),
    ] {
        let uri = format!("FILE://{}/{path}", root.display());
        let read = fetch(&config(&root), &uri).await;
        assert_eq!(
            read,
            Ok((text.to_owned(), Some(text.len() as u64))),
            "{path}"
        );
    }
}

#[tokio::test]
async fn ev_412_no_path_leads_outside_a_root() {
    let (_dir, root) = context();
    for path in [
        "out",
        "parent/secret",
        "parent/root2/secret",
        "absolute",
        "dangling",
        "../secret",
        "../root2/secret",
        "..%2Fsecret",
        "inner/..%2F..%2Fsecret",
        "../root2",
        "",
        ".",
    ] {
        let uri = format!("file://{}/{path}", root.display());
        let outcome = fetch(&config(&root), &uri).await;
        assert_eq!(denied_by(outcome), "files", "{path}");
    }
}

#[tokio::test]
async fn ev_412_only_regular_files_are_read_and_opening_does_not_block() {
    let (_dir, root) = context();
    for (path, expect) in [
        ("pipe", Err("REF_DENIED")),
        ("socket", Err("REF_DENIED")),
        ("inner", Err("REF_DENIED")),
        ("parent", Err("REF_DENIED")),
        ("missing", Err("REF_NOT_FOUND")),
        ("plain/below", Err("REF_NOT_FOUND")),
        ("round", Err("REF_FETCH")),
    ] {
        let uri = format!("file://{}/{path}", root.display());
        let outcome = fetch(&config(&root), &uri).await;
        let outcome = outcome.map_err(|error| error.status().reason.to_string());
        assert_eq!(outcome, expect.map_err(str::to_owned), "{path}");
    }
}

#[tokio::test]
async fn ev_412_only_one_form_of_uri_is_accepted() {
    let (_dir, root) = context();
    let root_path = root.display();
    for uri in [
        format!("file:{root_path}/plain"),
        format!("file://localhost{root_path}/plain"),
        format!("file://host{root_path}/plain"),
        "file:plain".to_owned(),
        format!("file://{root_path}/plain?query"),
        format!("file://{root_path}/plain#fragment"),
        "file://".to_owned(),
        "file:///é".chars().take(8).chain("\u{0}".chars()).collect(),
    ] {
        let status = fetch(&config(&root), &uri).await.unwrap_err().status();
        assert!(
            ["REF_SCHEME", "REF_DENIED"].contains(&&*status.reason),
            "{uri}"
        );
        assert!(!status.message.contains("plain"), "{}", status.message);
    }
    let uri = format!("file://{root_path}/plain?query");
    let outcome = fetch(&config(&root), &uri).await;
    assert!(matches!(outcome, Err(Error::Malformed(_))));
}

/// A root is the directory that was opened, not what its path refers to later.
#[tokio::test]
async fn ev_412_a_root_is_opened_once() {
    let (dir, root) = context();
    let references = ReferenceResolver::new(&config(&root)).unwrap();
    std::fs::rename(&root, dir.path().join("moved")).unwrap();
    symlink(dir.path().join("root2"), &root).unwrap();
    let uri = |name: &str| format!("file://{}/{name}", root.display());
    let secret = references.open(&uri("secret")).await;
    assert_eq!(secret.unwrap_err(), Error::NotFound);
    let plain = references.open(&uri("plain")).await;
    assert_eq!(plain.unwrap().bytes, Some(5));
}
