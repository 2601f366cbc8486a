//! Many clients against the server's session task, in memory and on a virtual clock: cuts, stalls, cancels.
//!
//! A failure prints its seed; the same seed gives the same run.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use sapwood_engine::{Engine, scripted};
use sapwood_kernel::Kernel;
use sapwood_kernel::session::{self, OutgoingMessages, test_functions};
use sapwood_proto::evergreen::{Metadata, Status, WireMessage};
use sapwood_proto::session::{
    ActionKey, ActionRequest, Config, CursorRead, NodeKey, SessionMachine, Side,
};
use sapwood_proto::time::Time;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;

use sapwood_tests::{by_hand, with_model};

/// Pseudo-random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// A call, and what its output has to be.
struct Expected {
    action: ActionKey,
    input: NodeKey,
    output: NodeKey,
    written: Vec<u8>,
    ended: bool,
    cancelled: bool,
}

struct Client {
    dice: Dice,
    machine: SessionMachine,
    origin: Instant,
    send: Option<mpsc::Sender<Result<WireMessage, Status>>>,
    outgoing: OutgoingMessages,
    server: JoinHandle<Option<Arc<Status>>>,
    calls: Vec<Expected>,
    text: Arc<Metadata>,
}

impl Client {
    fn new(seed: u64, kernel: Kernel) -> Self {
        let (send, receive) = mpsc::channel(3);
        let options = session::SessionOptions {
            partial_failure: true,
            entropy: seed,
            ..session::SessionOptions::default()
        };
        let (session, outgoing) = session::open(kernel, options, ());
        let server = tokio::spawn(session.run(ReceiverStream::new(receive), stream::pending()));
        let config = Config {
            entropy: !seed,
            ..Config::default()
        };
        Self {
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            machine: SessionMachine::new(Side::Client, config, Time::ZERO),
            origin: Instant::now(),
            send: Some(send),
            outgoing,
            server,
            calls: Vec::new(),
            text: Arc::new(Metadata::of("text/plain")),
        }
    }

    fn now(&self) -> Time {
        Time::new(self.origin.elapsed())
    }

    fn call(&mut self) {
        let name = ["echo", "GENERATE", "echo", "slow"][self.dice.roll(4) as usize];
        let input = self.machine.nodes().make(None).unwrap();
        let output = self
            .machine
            .nodes()
            .node(&format!("o{}", self.calls.len()))
            .unwrap();
        let port = if name == "GENERATE" { "prompt" } else { "text" };
        let inputs = if name == "slow" {
            vec![]
        } else {
            vec![(port.into(), input)]
        };
        let outputs = vec![("response".into(), output)];
        let call = ActionRequest {
            name: name.into(),
            inputs,
            outputs,
            ..ActionRequest::default()
        };
        let action = self.machine.calls().call(call).unwrap();
        let slow = name == "slow";
        self.calls.push(Expected {
            action,
            input,
            output,
            written: vec![],
            ended: slow,
            cancelled: slow,
        });
        if slow {
            // It never ends by itself.
            self.machine.calls().cancel(action);
        }
    }

    fn write(&mut self) {
        let open: Vec<usize> = (0..self.calls.len())
            .filter(|&index| !self.calls[index].ended)
            .collect();
        if open.is_empty() {
            return;
        }
        let index = open[self.dice.roll(open.len() as u64) as usize];
        let size = 1 + self.dice.roll(40) as usize;
        let data = vec![b'a' + self.dice.roll(26) as u8; size];
        let last = self.dice.roll(4) == 0;
        let call = &mut self.calls[index];
        if self
            .machine
            .nodes()
            .write(call.input, &self.text, Bytes::from(data.clone()))
            .is_ok()
        {
            call.written.extend(data);
        }
        if last {
            self.end(index);
        }
    }

    fn end(&mut self, index: usize) {
        let call = &mut self.calls[index];
        if !call.ended {
            self.machine.nodes().end(call.input, &self.text).unwrap();
            call.ended = true;
        }
    }

    /// Carries messages both ways, as far as possible without waiting.
    async fn carry(&mut self) -> bool {
        let now = self.now();
        if let Some(send) = &self.send
            && let Ok(position) = send.try_reserve()
            && let Some(message) = self.machine.next_message(now)
        {
            position.send(Ok(message));
        }
        tokio::task::yield_now().await;
        while let Some(answer) = self.outgoing.next().now_or_never() {
            match answer {
                Some(Ok(message)) => self.machine.handle(message, now).unwrap(),
                Some(Err(status)) => panic!("the server aborted: {status}"),
                None => return false,
            }
        }
        while self.machine.poll().is_some() {}
        true
    }

    async fn live(mut self) {
        for _ in 0..60 {
            match self.dice.roll(20) {
                0..4 if self.calls.len() < 12 => self.call(),
                0..12 => self.write(),
                12 => {
                    if let Some(call) = self.calls.last_mut() {
                        call.cancelled = true;
                        self.machine.calls().cancel(call.action);
                    }
                }
                13 => sleep(Duration::from_secs(self.dice.roll(4))).await,
                // The connection is cut; the server's work for it must end.
                14 if self.dice.roll(8) == 0 => return self.cut().await,
                _ => sleep(Duration::from_micros(self.dice.roll(3_000))).await,
            }
            self.carry().await;
        }
        self.finish().await;
    }

    async fn cut(self) {
        drop((self.send, self.outgoing));
        self.server.abort();
        let _ = self.server.await;
    }

    /// Ends all inputs, waits for the outputs, and compares them.
    async fn finish(mut self) {
        (0..self.calls.len()).for_each(|index| self.end(index));
        let deadline = Instant::now() + Duration::from_secs(50);
        let complete = |client: &Self| {
            client
                .calls
                .iter()
                .all(|call| client.machine.is_complete(call.output))
        };
        while !complete(&self) {
            assert!(self.carry().await, "the session ended before its outputs");
            assert!(Instant::now() < deadline, "an output did not end");
            sleep(Duration::from_millis(1)).await;
        }
        for call in std::mem::take(&mut self.calls) {
            let read = self.read(call.output);
            if call.cancelled {
                assert!(
                    call.written.starts_with(&read),
                    "a cancelled output is a prefix of the whole"
                );
            } else {
                assert_eq!(
                    String::from_utf8_lossy(&read),
                    String::from_utf8_lossy(&call.written)
                );
            }
        }
        self.send = None;
        while self.carry().await {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(self.server.await.unwrap(), None);
    }

    fn read(&mut self, node: NodeKey) -> Vec<u8> {
        let cursor = self.machine.nodes().open(node, None);
        let mut all = Vec::new();
        loop {
            match self.machine.nodes().read(cursor) {
                CursorRead::Piece(piece) => all.extend_from_slice(&piece.data),
                CursorRead::End => return all,
                other => panic!("a complete node reads as {other:?}"),
            }
        }
    }
}

/// One simulation: an engine stepped in virtual time, and clients that connect and leave.
async fn world(seed: u64) {
    let (mut owner, engine): (_, Engine) = by_hand(scripted::Config::default());
    let kernel = with_model(engine.clone());
    kernel.add_all(test_functions()).unwrap();
    let stepping = tokio::spawn(async move {
        let origin = Instant::now();
        loop {
            let report = owner.step(Time::new(origin.elapsed()));
            // An idle engine is stepped less often, so that hours of stalls are cheap.
            let pause = if report.batch().next().is_some() {
                1
            } else {
                50
            };
            sleep(Duration::from_millis(pause)).await;
        }
    });
    let clients =
        (0..8).map(|index| tokio::spawn(Client::new(seed * 100 + index, kernel.clone()).live()));
    for client in clients.collect::<Vec<_>>() {
        client
            .await
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    sleep(Duration::from_millis(200)).await;
    let left = (
        engine.stats().requests_running.get(),
        engine.stats().requests_waiting.get(),
    );
    assert_eq!(left, (0, 0), "seed {seed}: the engine still has requests");
    stepping.abort();
}

#[tokio::test(start_paused = true)]
async fn clients_with_cuts_stalls_and_cancels_receive_their_outputs() {
    for seed in 1..=6 {
        world(seed).await;
    }
}
