//! Early ends of requests, at every face: the client disconnects, its key is revoked, the server drains. Also: a cached
//! prefix does not change the text.

use std::time::Duration;

use sapwood_engine::{Engine, EngineOwner};
use sapwood_proto::time::Time;
use sapwood_server::ops::drain::{self, DrainPhase};
use sapwood_server::server;
use sapwood_tests::{Faces, Running, by_hand, key, spawned, until, with_model};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{WAYS, Way};
use crate::lmtp::parrot;

/// Long enough to be interrupted.
const PROMPT: &str = "a prompt that is said again byte by byte, which takes a step each";

/// A request whose model is running.
struct Begun {
    owner: EngineOwner,
    engine: Engine,
    server: Running,
    asked: JoinHandle<Result<String, String>>,
    now: u64,
}

impl Begun {
    async fn by(way: Way) -> Self {
        let (owner, engine) = by_hand(parrot());
        let config = server::Config {
            drain: drain::Config {
                grace: Duration::ZERO,
                ..Default::default()
            },
            ..Default::default()
        };
        let kernel = with_model(engine.clone());
        let keys = vec![key("anna", "one"), key("ben", "two")];
        let server = Running::start_faces(config, kernel, Faces::default(), keys).await;
        let address = server.address;
        let asked = tokio::spawn(async move { way.ask_as(Some("one"), address, PROMPT).await });
        let mut begun = Self {
            owner,
            engine,
            server,
            asked,
            now: 0,
        };
        begun.runs(1).await;
        begun
    }

    /// Steps until `count` requests run.
    async fn runs(&mut self, count: u64) {
        until("the model runs them", || {
            self.now += 1;
            self.owner.step(Time::from_millis(self.now));
            self.engine.stats().requests_running.get() == count
        })
        .await;
    }
}

#[tokio::test]
async fn a_disconnect_cancels_the_request_at_every_face() {
    for way in WAYS {
        let mut begun = Begun::by(way).await;
        begun.asked.abort();
        begun.runs(0).await;
        let left = begun.engine.stats().cancelled_client.get();
        assert_eq!(left, 1, "{way:?}");
        let finished = &begun.engine.stats().finished;
        assert_eq!(
            finished.iter().map(|it| it.get()).sum::<u64>(),
            0,
            "{way:?}"
        );
    }
}

#[tokio::test]
async fn d_45_revoking_a_key_ends_its_requests_at_every_face() {
    for way in WAYS {
        let mut begun = Begun::by(way).await;
        begun.server.shared.auth.replace(vec![key("ben", "two")]);
        let reply = timeout(Duration::from_secs(20), &mut begun.asked).await;
        let reply = reply.expect("it ends in time").unwrap();
        assert!(reply.is_err(), "{way:?}: {reply:?}");
        begun.runs(0).await;
        let cancelled = &begun.server.shared.metrics.cancelled;
        let revoked = cancelled.with_label_values(&["revoked"]);
        until("it is counted", || revoked.get() > 0).await;
        let address = begun.server.address;
        assert!(way.ask_as(Some("one"), address, "Hi").await.is_err());
    }
}

#[tokio::test]
async fn oa_904_a_drain_refuses_new_requests_and_finishes_running_ones_at_every_face() {
    for way in WAYS {
        let mut begun = Begun::by(way).await;
        let drain = begun.server.shared.drain.clone();
        let running = drain.clone();
        let draining = tokio::spawn(async move { running.run().await });
        drain.reached(DrainPhase::Refusing).await;
        let address = begun.server.address;
        let late = timeout(
            Duration::from_secs(20),
            way.ask_as(Some("two"), address, "Hi"),
        )
        .await;
        assert!(late.expect("it is answered").is_err(), "{way:?}");
        begun.runs(0).await;
        let reply = timeout(Duration::from_secs(20), &mut begun.asked).await;
        let reply = reply.expect("it ends in time").unwrap();
        assert_eq!(reply.as_deref(), Ok(PROMPT), "{way:?}");
        draining.abort();
    }
}

#[tokio::test]
async fn d_48_a_cold_and_a_warm_cache_give_the_same_text_at_every_face() {
    for way in WAYS {
        let engine = spawned(parrot());
        let kernel = with_model(engine.clone());
        let server = Running::start(kernel, Default::default(), Vec::new()).await;
        let prompt = PROMPT.repeat(4);
        let cold = way.ask(server.address, &prompt).await;
        assert_eq!(engine.stats().prefix_hits.get(), 0, "{way:?}");
        let warm = way.ask(server.address, &prompt).await;
        assert_eq!(cold.as_deref(), Ok(&*prompt), "{way:?}");
        assert_eq!(cold, warm, "{way:?}");
        assert!(engine.stats().prefix_hits.get() > 0, "{way:?}");
    }
}
