//! A server of one model, and all of its state that a client can leave behind.

use sapwood_engine::scripted::{self, Script};
use sapwood_engine::stats::EngineStats;
use sapwood_engine::{Config, Engine};
use sapwood_kernel::{Kernel, model};
use sapwood_tests::{Faces, Running, scripted as played, until};
use tokio::runtime::Handle;

use super::{live_bytes, usual_growth};

/// Tokens in the model's KV cache, and in one stream.
const CELLS: u32 = 1 << 13;

pub(super) struct TestServer {
    pub(super) server: Running,
    engine: Engine,
    /// The number of tasks without clients.
    tasks: usize,
}

impl TestServer {
    /// Its model generates words until it is cancelled.
    pub(super) async fn open(faces: Faces) -> Self {
        let words = played(scripted::Config {
            name: "m".into(),
            script: Script::Tokens,
            context_tokens: CELLS,
            count: 1 << 16,
            // A small prefix cache, so that ended requests leave little.
            kept_prefixes: 0,
            cells: Some(CELLS),
            ..scripted::Config::default()
        });
        let config = Config {
            outbox_events: 8,
            ..Config::default()
        };
        let engine = Engine::spawn(words, config).unwrap();
        let kernel = Kernel::new();
        kernel.add(model("m", engine.clone())).unwrap();
        let server = Running::start_faces(Default::default(), kernel, faces, Vec::new()).await;
        Self {
            server,
            engine,
            tasks: tasks(),
        }
    }

    pub(super) fn stats(&self) -> &EngineStats {
        self.engine.stats()
    }

    /// Runs every way of leaving repeatedly: sequences, tasks and memory are the same after each round.
    pub(super) async fn keeps_nothing(&self, ways: usize, visit: impl AsyncFn(usize)) {
        let mut after = Vec::new();
        for _ in 0..25 {
            let mut bytes = 0;
            for way in 0..ways {
                visit(way).await;
                bytes = self.left().await;
            }
            after.push(bytes);
        }
        // The content of the prefix cache varies from round to round.
        assert!(usual_growth(&after) < 32 << 10, "{after:?}");
    }

    /// Waits until no state is left, and returns the live bytes.
    pub(super) async fn left(&self) -> isize {
        let numbers = &self.server.shared.metrics;
        until("all connections have closed", || {
            numbers.connections_open.get() == 0
        })
        .await;
        until("every LMTP connection has ended", || {
            numbers.lmtp.connections_open.get() == 0
        })
        .await;
        let open = ["lmtp", "generate"].map(|face| numbers.streams_open.with_label_values(&[face]));
        until("no stream is open", || {
            open.iter().all(|open| open.get() == 0)
        })
        .await;
        let stats = self.stats();
        until("the engine has nothing left", || {
            stats.requests_running.get() + stats.requests_waiting.get() + stats.streams_parked.get()
                == 0
        })
        .await;
        until("their tasks are gone", || tasks() <= self.tasks).await;
        assert_eq!(self.server.shared.drain.open(), 0);
        live_bytes()
    }
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}
