//! Tests of the LMTP face over real sockets.

mod abuse;
mod affinity;
mod extended;
mod flow;
mod models;
mod pool;
mod resume;
mod streams;
mod transports;
mod upstream;

use sapwood_engine::scripted::{self, Script};
use sapwood_engine::{Engine, EngineOwner};
use sapwood_kernel::{Kernel, model};
use sapwood_server::faces::lmtp;
use sapwood_server::server;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Faces, Running, by_hand, spawned};
use serde_json::Value;

/// A model that repeats its prompt, byte by byte, and then ends.
pub(crate) fn parrot() -> scripted::Config {
    scripted::Config {
        name: "parrot".into(),
        ..scripted::Config::default()
    }
}

/// A model that generates pseudo-random words without end.
pub(crate) fn chatter() -> scripted::Config {
    scripted::Config {
        name: "chatter".into(),
        script: Script::Tokens,
        count: 1 << 20,
        ..scripted::Config::default()
    }
}

/// A kernel with this engine as the model `name`.
pub(crate) fn kernel(name: &'static str, engine: Engine) -> Kernel {
    let kernel = Kernel::new();
    kernel.add(model(name, engine)).unwrap();
    kernel
}

/// A server of one parrot.
pub(crate) async fn of_parrot() -> Running {
    Running::start(
        kernel("parrot", spawned(parrot())),
        Default::default(),
        Vec::new(),
    )
    .await
}

/// A server of one model that the test steps.
pub(crate) async fn stepped(config: scripted::Config) -> (EngineOwner, Running) {
    let (owner, engine) = by_hand(config);
    let kernel = kernel("parrot", engine);
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    (owner, server)
}

/// A server over `kernel` with settings for LMTP.
pub(crate) async fn with_config(kernel: Kernel, config: lmtp::Config) -> Running {
    let faces = Faces {
        lmtp: config,
        ..Faces::default()
    };
    Running::start_faces(server::Config::default(), kernel, faces, Vec::new()).await
}

/// A client on `/lmtp`.
pub(crate) async fn client(server: &Running) -> Socket {
    Socket::open(server, "/lmtp", &[]).await.unwrap()
}

/// The items of the next message, and its type.
pub(crate) async fn message(socket: &mut Socket) -> (String, Vec<Value>) {
    match socket.received().await {
        SocketReply::Text(text) => parsed(&text),
        other => panic!("no message: {other:?}"),
    }
}

pub(crate) fn parsed(text: &str) -> (String, Vec<Value>) {
    let (word, payload) = text.split_once(' ').unwrap();
    (word.to_owned(), serde_json::from_str(payload).unwrap())
}

/// All items of one stream, to its end.
pub(crate) async fn stream(socket: &mut Socket, id: impl Into<Value>) -> Vec<Value> {
    let id = id.into();
    let mut all = Vec::new();
    loop {
        let (_, items) = message(socket).await;
        for item in items.into_iter().filter(|item| item["stream_id"] == id) {
            let over = !item["finish_reason"].is_null() || item.get("error").is_some();
            all.push(item);
            if over {
                return all;
            }
        }
    }
}

/// The tokens of items, and how they end.
pub(crate) fn tokens_and_end(items: &[Value]) -> (Vec<u64>, String) {
    let tokens = items.iter().filter_map(|item| item["token"].as_u64());
    let last = items.last().map_or(&Value::Null, |item| {
        item.get("code").unwrap_or_else(|| &item["finish_reason"])
    });
    (
        tokens.collect(),
        last.as_str().unwrap_or_default().to_owned(),
    )
}
