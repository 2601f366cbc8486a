//! Tests of controllers over real sockets: the routes of their face, runs, and streams of LMTP.

mod access;
mod lmtp;
mod run;
mod stored;
mod variables;

use std::sync::Arc;

use sapwood_engine::scripted;
use sapwood_kernel::{Kernel, Targets, steered_model};
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::scopes::KeyScope;
use sapwood_server::faces::controllers::Config;
use sapwood_server::server;
use sapwood_tests::gate::CallGate;
use sapwood_tests::http::{Answer, Wire, head};
use sapwood_tests::steerers::{MemoryStore, MoveSource, steering};
use sapwood_tests::{Faces, Running, spawned, until};
use serde_json::Value;

/// A server with these models, all steered by one source, and a store.
async fn server(models: &[&'static str], keys: Vec<ApiKey>) -> (Running, Arc<MoveSource>) {
    let config = Config {
        store: Some(Arc::new(MemoryStore::default())),
        ..Config::default()
    };
    configured(models, keys, config).await
}

async fn configured(
    models: &[&'static str],
    keys: Vec<ApiKey>,
    controllers: Config,
) -> (Running, Arc<MoveSource>) {
    let kernel = Kernel::new();
    let (steering, source) = steering();
    kernel
        .add(sapwood_kernel::generate(Targets::default()))
        .unwrap();
    for name in models {
        let config = scripted::Config {
            name: (*name).into(),
            ..scripted::Config::default()
        };
        kernel
            .add(steered_model(*name, spawned(config), steering.clone()))
            .unwrap();
    }
    let faces = Faces {
        controllers,
        ..Faces::default()
    };
    let server = Running::start_faces(server::Config::default(), kernel, faces, keys).await;
    (server, source)
}

/// A key, which is its own secret.
fn key(name: &str, scopes: &[KeyScope]) -> ApiKey {
    ApiKey::new(name, name, scopes.iter().copied().collect())
}

fn keys() -> Vec<ApiKey> {
    vec![
        key("root", &KeyScope::ALL),
        key("anna", &[KeyScope::Infer, KeyScope::Control]),
        key("app", &[KeyScope::Infer]),
    ]
}

/// A request with the key of this name; none if it is empty.
async fn ask(server: &Running, who: &str, method: &str, path: &str, body: &[u8]) -> Answer {
    let length = format!("content-length: {}", body.len());
    let key = format!("api-key: {who}");
    let mut headers = vec![&*length];
    headers.extend((!who.is_empty()).then_some(&*key));
    let mut request = head(method, path, &headers).into_bytes();
    request.extend_from_slice(body);
    Wire::connect(server.address).await.ask(request).await
}

/// The error of an answer: its status and its code; the message stands in both places (AI-901).
fn error(answer: &Answer) -> (u16, String) {
    let json = answer.json();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    assert_eq!(json["error"]["message"], json["message"], "{json}");
    assert!(!text(&json["message"]).is_empty(), "{json}");
    assert!(json["error"].get("param").is_some() && json["error"].get("type").is_some());
    (answer.head.status, text(&json["error"]["code"]))
}
