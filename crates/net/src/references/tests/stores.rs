//! Buckets: a local server that simulates S3.

use super::web::{answer, serve};
use super::*;

fn config(port: u16, stores: &[&str]) -> Config {
    let options = [
        ("aws_endpoint", format!("http://127.0.0.1:{port}")),
        ("aws_region", "here".to_owned()),
        ("aws_access_key_id", "id".to_owned()),
        ("aws_secret_access_key", "secret".to_owned()),
        ("azure_storage_account_name", "account".to_owned()),
        ("azure_storage_account_key", "a2V5".to_owned()),
        ("azure_storage_endpoint", format!("http://127.0.0.1:{port}")),
    ];
    Config {
        stores: stores.iter().map(ToString::to_string).collect(),
        store_options: options
            .map(|(name, value)| (name.to_owned(), value.into()))
            .into(),
        ..Config::default()
    }
}

#[tokio::test]
async fn ev_415_an_object_is_fetched_with_the_http_client_of_this_crate() {
    let (port, asked) = serve(|target, _| {
        let modified = ("last-modified", "Wed, 21 Oct 2015 07:28:00 GMT");
        match target {
            "/media/in/a%20b" => answer(200, &[modified, ("etag", "\"1\"")], "object"),
            "/media/in/moved" => answer(307, &[("location", "http://127.0.0.1:1/")], ""),
            "/media/in/denied" => answer(403, &[], ""),
            _ => answer(404, &[], ""),
        }
    })
    .await;
    let config = config(port, &["s3://media/in"]);
    let object = fetch(&config, "s3://media/in/a%20b").await;
    assert_eq!(object, Ok(("object".to_owned(), Some(6))));
    for (uri, reason) in [
        ("s3://media/in/missing", "REF_NOT_FOUND"),
        ("s3://media/in/denied", "REF_FETCH"),
        ("s3://media/in/moved", "REF_FETCH"),
    ] {
        let refused = fetch(&config, uri).await.unwrap_err().status();
        assert_eq!(refused.reason, reason, "{uri}");
        assert!(!refused.message.contains("secret"));
    }
    let asked = asked.lock().unwrap();
    let signed = asked[0].1["authorization"].to_str().unwrap();
    assert!(
        signed.starts_with("AWS4-HMAC-SHA256"),
        "with the server's credentials"
    );
    assert_eq!(asked[0].1["host"], format!("127.0.0.1:{port}"));
}

#[tokio::test]
async fn ev_413_only_listed_buckets_and_prefixes_are_read() {
    let (port, asked) = serve(|_, _| answer(200, &[], "leaked")).await;
    let config = config(port, &["s3://media/in", "gs://whole", "az://media/in/"]);
    for uri in [
        "s3://media/other",
        "s3://media/inner/key",
        "s3://media/i",
        "s3://other/in/key",
        "S3://MEDIA2/in/key",
        "gs://media/in/key",
        "az://media/out/key",
        "az://whole/key",
    ] {
        assert_eq!(denied_by(fetch(&config, uri).await), "stores", "{uri}");
    }
    for uri in [
        "s3://media/in/../other",
        "s3://media/in/%2e%2e/other",
        "s3://media/in//key",
        "s3://media/in/key?versionId=1",
        "s3://media/in/key#part",
        "s3://user@media/in/key",
        "s3://media:80/in/key",
        "s3:///in/key",
        "s3://media",
        "s3://media/",
    ] {
        let refused = fetch(&config, uri).await.unwrap_err();
        let kind = matches!(
            refused,
            Error::Malformed(_) | Error::Denied { key: "stores", .. }
        );
        assert!(kind, "{uri}: {refused:?}");
    }
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn ev_415_unknown_store_options_are_refused() {
    let mut config = config(1, &["s3://media"]);
    config
        .store_options
        .push(("aws_regoin".into(), "secret".into()));
    let error = ReferenceResolver::new(&config).unwrap_err().to_string();
    assert!(
        error.contains("references.store_options: `aws_regoin`"),
        "{error}"
    );
    assert!(!error.contains("secret"));
    assert!(!format!("{config:?}").contains("secret"));
}
