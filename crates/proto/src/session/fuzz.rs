//! Fuzz entry point: arbitrary bytes as a list of operations on a session.
//!
//! Built for tests and fuzzing alone.

use std::sync::Arc;

use bytes::Bytes;
use prost_types::Any;

use super::calls::input_leaf::InputLeaf;
use super::readers::cursor::TreeCursor;
use super::{
    ActionKey, ActionRequest, CancelledBy, Config, CursorId, CursorRead, NodeKey, RetentionPolicy,
    SessionMachine, SessionOutput, Side,
};
use crate::evergreen::{
    Action, Chunk, Dialect, Fragment, Metadata, MetadataMode, NodeId, Param, Payload, Reason,
    SessionLimits, Status, WireMessage,
};
use crate::time::Time;

/// Runs `bytes` as operations on a server's session, with a client that receives what it sends.
///
/// # Panics
/// If an invariant of the machine does not hold.
pub fn ops(bytes: &[u8]) {
    let mut play = Play::new(InputBytes(bytes));
    while !play.input.0.is_empty() {
        play.step();
        play.settle();
        play.check();
    }
    play.nothing_was_slept_through();
}

/// The remaining input bytes; zeros after the end.
struct InputBytes<'a>(&'a [u8]);

impl InputBytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        first
    }

    fn below(&mut self, most: u8) -> u8 {
        self.next() % most
    }

    fn flag(&mut self) -> bool {
        self.next() & 1 == 1
    }

    fn id(&mut self) -> NodeId {
        let at = self.below(18);
        // Two of the ids are bad, and one looks like a generated one.
        match at {
            16 => NodeId::new(),
            17 => NodeId::from("~5a9da00d.0"),
            at => NodeId::from(format!("n{at}")),
        }
    }
}

/// A cursor with the content that it has yielded so far.
struct Reader {
    id: CursorId,
    root: NodeKey,
    bytes: usize,
    pending: bool,
}

struct Play<'a> {
    input: InputBytes<'a>,
    server: SessionMachine,
    client: SessionMachine,
    now: Time,
    running: Vec<(ActionKey, Vec<NodeKey>)>,
    /// Actions sent to the client, and the ids of their outputs.
    asked: Vec<(ActionKey, Vec<NodeId>)>,
    readers: Vec<Reader>,
    closed: bool,
}

impl<'a> Play<'a> {
    fn new(mut bytes: InputBytes<'a>) -> Self {
        let modes = [
            MetadataMode::Strict,
            MetadataMode::Lenient,
            MetadataMode::PerChunk,
        ];
        let dialects = [Dialect::Grpc, Dialect::Json, Dialect::Msgpack];
        let limits = SessionLimits {
            max_nodes: 64,
            max_depth: 6,
            max_visits: 64,
            max_early_fragments: 4,
            max_actions: 4,
            retained_bytes: 20_000,
            outbound_queue_bytes: 600,
            coalesce_bytes: 200,
            inbound_high_bytes: 100,
            inbound_low_bytes: 20,
            cycle_visits: u32::from(bytes.below(8)),
            ..SessionLimits::default()
        };
        let (mode, partial_failure, sending) = (bytes.below(3), bytes.flag(), bytes.next());
        let deadline = bytes.flag().then(|| Time::from_millis(500_000));
        let dialect = dialects[usize::from(bytes.below(3))];
        let config = Config {
            limits: Arc::new(limits),
            metadata: modes[usize::from(mode)],
            partial_failure,
            coalesce: sending & 1 == 1,
            resume: sending & 4 == 4,
            references: sending & 8 == 8,
            retain: [RetentionPolicy::Session, RetentionPolicy::Unread]
                [usize::from(sending >> 1 & 1)],
            deadline,
            ..Config::for_client_of(dialect)
        };
        Self {
            server: SessionMachine::new(Side::Server, config, Time::ZERO),
            client: SessionMachine::new(Side::Client, Config::default(), Time::ZERO),
            input: bytes,
            now: Time::ZERO,
            running: Vec::new(),
            asked: Vec::new(),
            readers: Vec::new(),
            closed: false,
        }
    }

    fn step(&mut self) {
        match self.input.below(16) {
            0..4 => self.send_fragment(),
            4 | 5 => self.send_action(),
            6 => self.open(),
            7 | 8 => self.read(),
            9 => {
                if let Some(at) = self.pick(self.readers.len()) {
                    let reader = self.readers.swap_remove(at);
                    self.server.nodes().close(reader.id);
                }
            }
            10 | 11 => self.produce(),
            12 => self.end_action(),
            13 => self.deliver(),
            14 => self.pass_time(),
            _ => match self.input.below(8) {
                0 => self.server.end_of_input(self.now),
                1 => self.server.calls().drain(),
                2 => self.server.calls().finish_sending(),
                3 => self.server.lost(self.now),
                4 => {
                    self.server.returned(self.now);
                    // The session may be resumed, so an earlier close is reset here.
                    self.closed = self.server.is_closed();
                }
                5 => self.ask(),
                _ => {
                    if let Some(at) = self.pick(self.running.len()) {
                        let waiting = self.input.flag();
                        self.server.calls().waiting(self.running[at].0, waiting);
                    }
                }
            },
        }
    }

    /// Sends an action to the client, or abandons one (EV-811). The fuzz client does not answer; fragments for its
    /// outputs come from the input bytes.
    fn ask(&mut self) {
        if self.input.flag() {
            if let Some(at) = self.pick(self.asked.len()) {
                let notify = self.input.flag();
                self.server
                    .calls()
                    .abandon(self.asked.swap_remove(at).0, notify);
            }
            return;
        }
        let (Ok(input), Ok(output)) =
            (self.server.nodes().make(None), self.server.calls().expect())
        else {
            return;
        };
        let id = self.server.id(output).cloned();
        let call = ActionRequest {
            name: "look".into(),
            inputs: vec![("q".into(), input)],
            outputs: vec![("a".into(), output)],
            ..ActionRequest::default()
        };
        if let Ok(action) = self.server.calls().call(call) {
            self.asked.push((action, id.into_iter().collect()));
            let metadata = Arc::new(Metadata::of("text/plain"));
            let _ = self
                .server
                .nodes()
                .write(input, &metadata, Bytes::from_static(b"q"));
            if self.input.flag() {
                let _ = self.server.nodes().end(input, &metadata);
            }
        }
    }

    fn pick(&mut self, len: usize) -> Option<usize> {
        let at = usize::from(self.input.next());
        (len > 0).then(|| at % len)
    }

    fn send_fragment(&mut self) {
        let theirs = self.pick(self.asked.len() * 2);
        let theirs = theirs.and_then(|at| self.asked.get(at)?.1.first().cloned());
        let bytes = &mut self.input;
        let (id, seq, last) = (
            theirs.unwrap_or_else(|| bytes.id()),
            i32::from(bytes.below(7)) - i32::from(bytes.below(50) == 0),
            bytes.flag(),
        );
        let shape = bytes.below(8);
        let children = if shape < 3 {
            (0..=shape).map(|_| bytes.id()).collect()
        } else {
            Vec::new()
        };
        let chunk = (2..7).contains(&shape).then(|| chunk(bytes, seq));
        let fragment = Fragment {
            id,
            seq,
            last,
            // Derived from other values instead of an input byte, so that existing corpus entries keep their meaning.
            range: (shape == 0 && seq == 6).then(|| Box::new(1..3)),
            children,
            chunk,
        };
        let message = WireMessage {
            fragments: vec![fragment].into(),
            ..WireMessage::default()
        };
        let _ = self.server.handle(message, self.now);
    }

    fn send_action(&mut self) {
        let bytes = &mut self.input;
        let name = [
            "f",
            "g",
            "CANCEL",
            "LIST_ACTIONS",
            "DROP",
            "",
            "FINISH",
            "SET_TTL",
            "RESUME",
            "OFFER_ACTIONS",
        ][usize::from(bytes.below(10))];
        let mut params = |most: u8| -> Vec<Param> {
            let count = bytes.below(most);
            let names = [
                "action",
                "result",
                "__status__",
                "a",
                "b",
                "node",
                "tree",
                "node.1",
                "ttl",
                "have",
            ];
            (0..count)
                .map(|_| Param::new(names[usize::from(bytes.below(10))], bytes.id()))
                .collect()
        };
        let action = Action {
            name: name.into(),
            inputs: params(4),
            outputs: params(4),
            configs: lifetimes(bytes),
            ..Action::default()
        };
        let message = WireMessage {
            actions: vec![action],
            ..WireMessage::default()
        };
        let _ = self.server.handle(message, self.now);
    }

    fn open(&mut self) {
        let id = self.input.id();
        let reader = self
            .pick(self.running.len() + 1)
            .and_then(|at| self.running.get(at))
            .map(|(key, _)| *key);
        if let Ok(root) = self.server.nodes().node(&id) {
            let id = self.server.nodes().open(root, reader);
            self.readers.push(Reader {
                id,
                root,
                bytes: 0,
                pending: false,
            });
        }
    }

    fn read(&mut self) {
        let Some(at) = self.pick(self.readers.len()) else {
            return;
        };
        let reader = &mut self.readers[at];
        for _ in 0..8 {
            match self.server.nodes().read(reader.id) {
                CursorRead::Piece(piece) => reader.bytes += piece.data.len(),
                CursorRead::Reference(_) => self.server.nodes().end_reference(reader.id),
                CursorRead::Pending => reader.pending = true,
                CursorRead::Busy => self.server.nodes().begin_turn(),
                CursorRead::End | CursorRead::Failed(_) => return,
            }
        }
    }

    fn produce(&mut self) {
        let Some(at) = self.pick(self.running.len()) else {
            return;
        };
        let (action, outputs) = &self.running[at];
        let (action, outputs) = (*action, outputs.clone());
        let Some(node) = self.pick(outputs.len()).map(|at| outputs[at]) else {
            return;
        };
        let metadata = Arc::new(Metadata::of("text/plain"));
        match self.input.below(4) {
            0 | 1 => {
                let data = Bytes::from(vec![b'x'; usize::from(self.input.next())]);
                let _ = self.server.nodes().write(node, &metadata, data);
            }
            2 => {
                if let Ok(child) = self.server.nodes().make(Some(action)) {
                    let listed = self.server.nodes().list(node, &[child]).is_ok();
                    if listed {
                        self.running[at].1.push(child);
                    }
                }
            }
            _ => {
                let _ = self.server.nodes().end(node, &metadata);
            }
        }
    }

    fn end_action(&mut self) {
        let Some(at) = self.pick(self.running.len()) else {
            return;
        };
        let (action, _) = self.running.swap_remove(at);
        let reasons = [Reason::BadConfig, Reason::SeqPastFinal, Reason::GoingAway];
        match self.input.below(6) {
            at @ 0..3 => self
                .server
                .calls()
                .fail(action, Status::new(reasons[usize::from(at)], "made up")),
            _ => self.server.calls().finish(action),
        }
    }

    fn deliver(&mut self) {
        for _ in 0..=self.input.below(4) {
            let Some(message) = self.server.next_message(self.now) else {
                return;
            };
            let mut bytes = Vec::new();
            crate::evergreen::protobuf::encode(&message, &mut bytes);
            assert_eq!(
                bytes.len(),
                crate::evergreen::protobuf::encoded_len(&message),
                "the encoded length is exact"
            );
            let message =
                crate::evergreen::protobuf::decode(&*bytes).expect("we send what can be decoded");
            let taken = self.client.handle(message, self.now);
            assert!(taken.is_ok(), "a client takes what we send: {taken:?}");
        }
    }

    fn pass_time(&mut self) {
        self.now = self.now + std::time::Duration::from_secs(u64::from(self.input.next()));
        let _ = self.server.wake_at(self.now);
        self.server.tick(self.now);
    }

    /// Handles the outputs of the machine.
    fn settle(&mut self) {
        while let Some(output) = self.server.poll() {
            assert!(!self.closed, "nothing follows a close: {output:?}");
            match output {
                SessionOutput::Start(start) => {
                    self.running.push((
                        start.action,
                        start.outputs.iter().map(|(_, node)| *node).collect(),
                    ));
                }
                SessionOutput::Cancel {
                    action,
                    by: CancelledBy::Peer,
                } => {
                    self.running.retain(|(key, _)| *key != action);
                    self.server.calls().finish(action);
                }
                SessionOutput::Cancel {
                    action,
                    by: CancelledBy::Deadline,
                } => {
                    self.running.retain(|(key, _)| *key != action);
                }
                SessionOutput::Ready(id) => {
                    let ready = self.readers.iter_mut().find(|reader| reader.id == id);
                    ready.into_iter().for_each(|reader| reader.pending = false);
                }
                SessionOutput::Close(_) => self.closed = true,
                SessionOutput::Writable
                | SessionOutput::Resume
                | SessionOutput::Timed
                | SessionOutput::Done(_)
                | SessionOutput::Refused(_)
                | SessionOutput::HalfClose => {}
            }
        }
    }

    fn check(&mut self) {
        let session = &self.server;
        assert_eq!(
            self.closed,
            session.is_closed(),
            "a close is reported at once"
        );
        if session.aborted().is_some() {
            let retained = session.retained_bytes();
            assert_eq!(retained, 0, "an aborted session holds nothing");
            assert!(self.server.next_message(self.now).is_none());
            return;
        }
        self.check_readers();
        self.check_quota();
        self.check_actions();
    }

    fn check_readers(&self) {
        let session = &self.server;
        let (graph, readers) = (&session.calls.nodes.graph, &session.calls.nodes.readers);
        let cursors = readers.iter().map(|(_, cursor)| cursor);
        let parked = cursors.clone().filter(|cursor| cursor.parked.is_some());
        let parked = parked.count();
        assert_eq!(readers.parked(), parked, "parked cursors are counted");
        let nodes = graph.keys().map(|key| graph.get(key));
        let waiters: usize = nodes.clone().map(|node| node.waiters.len()).sum();
        assert_eq!(waiters, parked, "each parked cursor waits at one node");
        if session.config().retention() == RetentionPolicy::Unread {
            let inside: usize = nodes.map(|node| node.inside()).sum();
            let positions: usize = cursors.map(TreeCursor::depth).sum();
            assert_eq!(
                inside, positions,
                "readers are where nodes believe them to be"
            );
        }
        if session.inbound.is_paused() {
            assert_eq!(parked, 0, "no pause while a reader waits");
        }
    }

    fn check_quota(&self) {
        let session = &self.server;
        let graph = &session.calls.nodes.graph;
        let nodes = graph.keys().map(|key| graph.get(key));
        let unread: u64 = nodes.clone().map(|node| node.unread).sum();
        assert_eq!(graph.unread, unread, "unread bytes are counted");
        let retained: u64 = nodes
            .map(|node| node.id.len() as u64 + node.content_cost())
            .sum();
        let actions = session.calls.table.iter();
        let configs: u64 = actions.map(|(_, entry)| entry.aside_bytes).sum();
        let being_read: u64 = session.calls.leaves.iter().map(InputLeaf::text_bytes).sum();
        let ttls = session.calls.nodes.lifetime.ttl_bytes();
        assert_eq!(
            session.retained_bytes(),
            retained + configs + being_read + ttls + session.calls.link.asked_bytes(),
            "what is held is counted"
        );
    }

    fn check_actions(&self) {
        let session = &self.server;
        let table = &session.calls.table;
        let mut waiting = session.calls.nodes.readers.waiting_actions();
        assert!(
            waiting.all(|action| table.get(action).is_some()),
            "only unfinished actions wait"
        );
        let served = table.iter().filter(|(_, entry)| entry.served);
        assert_eq!(
            table.served(),
            served.count(),
            "actions of the client's are counted"
        );
        if session.is_half_closed() {
            assert_eq!(table.asked().count(), 0, "no peer is left to answer");
        }
    }

    /// Checks that a reader that still waits has yielded all content that there is.
    fn nothing_was_slept_through(&mut self) {
        for reader in std::mem::take(&mut self.readers) {
            // Released content cannot be read again.
            let retained = self.server.config().retention() == RetentionPolicy::Session;
            if !reader.pending || !retained || self.server.is_closed() {
                continue;
            }
            let again = self.server.nodes().open(reader.root, None);
            let mut bytes = 0;
            let stop = loop {
                match self.server.nodes().read(again) {
                    CursorRead::Piece(piece) => bytes += piece.data.len(),
                    CursorRead::Reference(_) => self.server.nodes().end_reference(again),
                    stop => break stop,
                }
            };
            // A reader that starts after a drop yields less.
            let dropped = matches!(&stop, CursorRead::Failed(status)
                if status.known() == Some(Reason::NodeReleased));
            assert!(
                self.server.is_closed() || dropped || bytes == reader.bytes,
                "{bytes} bytes, {} seen",
                reader.bytes
            );
            self.server.nodes().close(again);
        }
    }
}

fn lifetimes(input: &mut InputBytes<'_>) -> Vec<Any> {
    let seconds = i64::from(input.below(8)) - 1;
    let config = prost_types::Duration { seconds, nanos: 0 };
    let any = Any {
        type_url: "type.googleapis.com/google.protobuf.Duration".into(),
        value: prost::Message::encode_to_vec(&config),
    };
    (seconds < 5).then_some(any).into_iter().collect()
}

fn chunk(input: &mut InputBytes<'_>, seq: i32) -> Chunk {
    let mimetypes = ["text/plain", "TEXT/plain", "image/png", ""];
    let metadata = (seq == 0 || input.below(8) == 0).then(|| {
        Arc::new(Metadata::of(
            mimetypes[usize::from(input.below(4) * input.below(2))],
        ))
    });
    let payload = match input.below(10) {
        0 => None,
        1 => Some(Payload::Ref("data:,abc".into())),
        2 => Some(Payload::Ref("file:///x".into())),
        3 => Some(Payload::Status(Some(Arc::new(Status::new(
            Reason::Function,
            "theirs",
        ))))),
        4 => Some(Payload::Data(Bytes::from_static(b"\"2s\""))),
        5 => Some(Payload::Data(Bytes::from_static(
            br#"{"nodes":{"n1":1,"n2":9},"actions":1}"#,
        ))),
        _ => Some(Payload::Data(Bytes::from(vec![
            b'y';
            usize::from(input.below(40))
        ]))),
    };
    Chunk { metadata, payload }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::corpus::replay;

    #[test]
    fn the_corpus_is_replayed() {
        replay("session_ops", super::ops);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        /// EV-110, EV-303, EV-505, EV-706, EV-802, EV-901
        #[test]
        fn any_list_of_operations_keeps_the_invariants(bytes in prop::collection::vec(any::<u8>(), 0..900)) {
            super::ops(&bytes);
        }
    }
}
