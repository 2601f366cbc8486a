//! Turns of callers whose requests wait for a model (D-54).

use std::net::Ipv4Addr;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use sapwood_engine::api::{GenerationRequest, Prompt};
use sapwood_engine::{Config, Engine, EngineOwner, RequestHandle, scripted};
use sapwood_proto::time::Time;
use sapwood_tests::proxy::Proxy;
use sapwood_tests::{Running, until, with_model};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{WAYS, Way};
use crate::lmtp::parrot;

/// Requests of the caller with ten connections, and of the one with few.
const MANY: usize = 10;
const FEW: usize = 3;

/// A model with one slot, so that requests end in the order of their turns, and the request that holds the slot.
struct BusyEngine {
    owner: EngineOwner,
    engine: Engine,
    taken: Option<RequestHandle>,
    now: u64,
}

impl BusyEngine {
    /// A model whose slot is taken until it is released.
    fn taken(config: Config) -> Self {
        let model = scripted::Config {
            parallel: 1,
            ..parrot()
        };
        let (owner, engine) = Engine::by_hand(sapwood_tests::scripted(model), config);
        let mut request = GenerationRequest::new(Prompt::Tokens(vec![7]));
        (request.params.ignore_eos, request.params.max_tokens) = (Some(true), Some(4_000));
        let taken = Some(engine.submit(request).unwrap());
        let mut slot = Self {
            owner,
            engine,
            taken,
            now: 0,
        };
        slot.step();
        slot
    }

    fn step(&mut self) {
        self.now += 1;
        self.owner.step(Time::from_millis(self.now));
        if let Some(taken) = &mut self.taken {
            // A reader keeps it from being parked, which would free its slot.
            while let Some(Some(_)) = taken.next().now_or_never() {}
        }
    }

    /// Waits until `count` requests wait.
    async fn waits_for(&mut self, count: u64) {
        until("the request waits", || {
            self.step();
            self.engine.stats().requests_waiting.get() == count
        })
        .await;
    }

    /// Releases the slot, steps until `count` requests have ended, and returns their callers in that order.
    async fn ended(
        &mut self,
        answers: &mut mpsc::Receiver<&'static str>,
        count: usize,
    ) -> Vec<&'static str> {
        self.taken = None;
        let mut order = Vec::new();
        while order.len() < count {
            let finished = &self.engine.stats().finished;
            let done: u64 = finished.iter().map(|it| it.get()).sum();
            if done > order.len() as u64 {
                let answer = timeout(Duration::from_secs(20), answers.recv()).await;
                order.extend(answer.expect("the ended request is answered"));
            } else {
                self.step();
            }
        }
        order
    }
}

/// The order in which ten connections of one caller and three of another are served, each by its own way.
async fn shared(many: (Way, &'static str), few: (Way, &'static str)) -> Vec<&'static str> {
    let mut slot = BusyEngine::taken(Config::default());
    let kernel = with_model(slot.engine.clone());
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    let other = Proxy::from(Ipv4Addr::new(127, 0, 0, 2), server.address).await;
    let (sender, mut answers) = mpsc::channel(1024);
    let mut waiting = 0_u8;
    for (way, name, address, count) in [
        (many.0, many.1, server.address, MANY),
        (few.0, few.1, other.address, FEW),
    ] {
        for index in 0..count {
            // Prompts differ from the start: a request with the prompt of another would wait for it.
            let first = char::from(b'a' + waiting);
            let (sender, prompt) = (sender.clone(), format!("{first}{index}"));
            tokio::spawn(async move {
                let reply = way.ask(address, &prompt).await;
                assert_eq!(reply, Ok(prompt), "{way:?}");
                let _ = sender.send(name).await;
            });
            waiting += 1;
            slot.waits_for(u64::from(waiting)).await;
        }
    }
    slot.ended(&mut answers, MANY + FEW).await
}

/// Each way against another: a caller with ten connections gets no more than one with few.
#[tokio::test]
async fn d_54_ten_connections_of_one_address_get_the_share_of_one() {
    for (index, &many) in WAYS.iter().enumerate() {
        let few = WAYS[(index + 3) % WAYS.len()];
        let order = shared((many, "many"), (few, "few")).await;
        let last = order.iter().rposition(|name| *name == "few").unwrap();
        assert!(last <= 2 * FEW, "{many:?} beside {few:?}: {order:?}");
    }
}

/// OA-910: a request that waits too long fails, at every face, and leaves the queue.
#[tokio::test]
async fn oa_910_a_queued_request_times_out_at_every_face() {
    const QUEUE_TIMEOUT_MS: u64 = 5_000;
    for way in WAYS {
        let config = Config {
            queue_timeout_ms: QUEUE_TIMEOUT_MS,
            ..Config::default()
        };
        let mut slot = BusyEngine::taken(config);
        let kernel = with_model(slot.engine.clone());
        let server = Running::start(kernel, Default::default(), Vec::new()).await;
        let address = server.address;
        let mut asked = tokio::spawn(async move { way.ask(address, "Hi").await });
        slot.waits_for(1).await;
        let timed_out = |slot: &BusyEngine| slot.engine.stats().cancelled_timeout.get();
        let arrived = slot.now;
        slot.now = arrived + QUEUE_TIMEOUT_MS - 2;
        slot.step();
        assert_eq!(timed_out(&slot), 0, "{way:?}");
        slot.now = arrived + QUEUE_TIMEOUT_MS;
        slot.step();
        assert_eq!(timed_out(&slot), 1, "{way:?}");
        assert_eq!(slot.engine.stats().requests_waiting.get(), 0, "{way:?}");
        let reply = timeout(Duration::from_secs(20), &mut asked).await;
        let reply = reply.expect("it is answered").unwrap().unwrap_err();
        assert!(reply.contains("waited too long"), "{way:?}: {reply}");
    }
}
