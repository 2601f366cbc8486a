//! References over a real socket: files, and HTTP (to the server under test itself).

use std::sync::Arc;

use futures::stream;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_net::references::{Config, ReferenceResolver};
use sapwood_proto::evergreen::wire::{NodeFragment, Payload};
use sapwood_server::faces::evergreen;
use sapwood_tests::Running;
use sapwood_tests::raw::{action, call, code_and_reason, end, fragments, leaf};

use super::extensions::finished;

async fn reading(config: &Config) -> Running {
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let config = evergreen::Config {
        references: Some(Arc::new(ReferenceResolver::new(config).unwrap())),
        ..evergreen::Config::default()
    };
    Running::start(kernel, config, Vec::new()).await
}

fn refers(id: &str, seq: i32, uri: &str) -> NodeFragment {
    let mut fragment = leaf(id, seq, 0);
    if let Some(chunk) = &mut fragment.chunk_fragment {
        chunk.payload = Some(Payload::Ref(uri.into()));
    }
    fragment
}

/// EV-412, EV-413
#[tokio::test]
async fn ev_410_file_and_http_references_are_read_as_inline_content() {
    let dir = tempfile::tempdir().unwrap();
    let file = "a file, ".repeat(20_000);
    std::fs::write(dir.path().join("file"), &file).unwrap();
    let server = reading(&Config {
        files: vec![dir.path().to_owned()],
        private_hosts: vec!["127.0.0.1:*".into()],
        allow_http: true,
        ..Config::default()
    })
    .await;
    let mut first = refers("p", 0, &format!("file://{}/file", dir.path().display()));
    first.continued = true;
    let second = refers("p", 1, &format!("http://{}/version?whole", server.address));
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    let messages = stream::iter([fragments(vec![first, second]), echo]);
    let mut answers = call(&server, messages, &[]).await.unwrap();
    let read = finished(&mut answers, "r").await;
    let version = read.strip_prefix(&file).expect("the file comes first");
    assert!(version.contains("version"), "{version}");
    assert_eq!(end(answers).await, None);
}

#[tokio::test]
async fn ev_410_a_refused_reference_names_its_reason_and_the_setting_that_allows_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = reading(&Config {
        files: vec![dir.path().to_owned()],
        hosts: vec!["*:*".into()],
        allow_http: true,
        ..Config::default()
    })
    .await;
    let missing = format!("file://{}/missing", dir.path().display());
    let inside = format!("http://{}/version", server.address);
    for (uri, expect, states) in [
        ("file:///etc/passwd", (7, "REF_DENIED"), "references.files"),
        (&*missing, (5, "REF_NOT_FOUND"), "does not exist"),
        (&*inside, (7, "REF_DENIED"), "references.private_hosts"),
        ("s3://bucket/key", (7, "REF_DENIED"), "references.stores"),
        ("ftp://host/", (3, "REF_SCHEME"), "data, file, http"),
    ] {
        let echo = action("echo", &[("text", "p")], &[("response", "r")]);
        let messages = stream::iter([fragments(vec![refers("p", 0, uri)]), echo]);
        let ended = end(call(&server, messages, &[]).await.unwrap()).await;
        let message = ended.as_ref().map(|status| status.message.clone());
        assert_eq!(
            code_and_reason(ended),
            (expect.0, expect.1.to_owned()),
            "{uri}"
        );
        assert!(
            message.is_some_and(|message| message.contains(states)),
            "{uri}"
        );
    }
}
