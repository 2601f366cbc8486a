//! Lost connections lose no items (LM-964 to LM-966).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// What the client of the recorded run does, in order; the engine steps once after each.
const SCRIPT: &[&str] = &[
    r#"GENERATE {"model":"tiny","prompt":[1,2],"stream_id":1,"max_tokens":9,"top_logprobs":2}"#,
    r#"GENERATE {"model":"tiny","prompt_text":"Hi","stream_id":"two","n":2,"max_tokens":5}"#,
    r#"SCORE {"model":"tiny","prompt":[1],"scored":[7,8,9,10],"stream_id":3}"#,
    "",
    r#"GENERATE {"model":"tiny","prompt":[900],"stream_id":4}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":5,"max_tokens":1}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":6,"max_tokens":12}"#,
];
const FEATURES: &str = r#"["text","usage","resume","samples"]"#;

/// A connection is lost when its client has read so many messages more; so many more of them were on their way; and the
/// engine steps so often before the client is back.
type Cut = (usize, usize, usize);

/// An engine whose tokens depend on nothing but the stream's place in the script.
#[derive(Default)]
struct Playing {
    /// The stream's first letter, its sample, and how many tokens it has given.
    running: BTreeMap<StreamKey, (String, u32, u32)>,
    parked: BTreeSet<StreamKey>,
}

/// Both ends of the recorded run.
struct Play {
    session: LmtpSession,
    engine: Playing,
    /// Raw items by id, in the order read.
    received: BTreeMap<String, Vec<String>>,
    ended: BTreeSet<String>,
    asked: Vec<String>,
    sessions: u32,
    name: String,
    now: Time,
}

impl Play {
    fn new() -> Self {
        let mut play = Self {
            session: LmtpSession::new(Config::default()),
            engine: Playing::default(),
            received: BTreeMap::new(),
            ended: BTreeSet::new(),
            asked: Vec::new(),
            sessions: 0,
            name: String::new(),
            now: Time::ZERO,
        };
        play.negotiate();
        play
    }

    fn negotiate(&mut self) {
        self.sessions += 1;
        self.name = format!("s_{}", self.sessions);
        let ask = format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"tiny","data":{{"lmtp":{{"version":2,"features":{FEATURES}}}}}}}"#
        );
        self.send(&ask);
        let answer = self.session.next_message(self.now).unwrap();
        let answer = String::from_utf8(answer.to_vec()).unwrap();
        let session = format!(r#""session":"{}""#, self.name);
        assert!(answer.contains(&session), "{answer}");
    }

    fn send(&mut self, text: &str) {
        if !text.is_empty() {
            assert_eq!(
                self.session.handle(text.into(), &FuzzModels, self.now),
                None
            );
        }
        self.poll();
    }

    fn poll(&mut self) {
        while let Some(output) = self.session.poll() {
            match output {
                LmtpOutput::Start(start) => {
                    let id = self.session.id(start.stream).unwrap().as_json().to_owned();
                    let playing = (id, start.sample, 0);
                    self.engine.running.insert(start.stream, playing);
                }
                LmtpOutput::Cancel(stream) => {
                    self.engine.running.remove(&stream);
                }
                LmtpOutput::ParkStream(stream) => {
                    self.engine.parked.insert(stream);
                }
                LmtpOutput::UnparkStream(stream) => {
                    self.engine.parked.remove(&stream);
                }
                LmtpOutput::Name => self.session.named(Some(self.name.as_str().into())),
                LmtpOutput::Park | LmtpOutput::Unpark | LmtpOutput::Resume(_) => {}
                LmtpOutput::Close(_) | LmtpOutput::Reset => panic!("nobody closes"),
            }
        }
    }

    fn step(&mut self) {
        let mut pieces = Vec::new();
        for (stream, (id, sample, given)) in &mut self.engine.running {
            if !self.engine.parked.contains(stream) {
                let letter = u32::from(id.as_bytes()[0]);
                let token = (letter * 31 + *sample * 7 + *given) % 256;
                pieces.push((*stream, piece(token)));
                *given += 1;
            }
        }
        self.session.step(pieces, self.now);
        self.poll();
    }

    /// Reads one message, if there is one.
    fn read(&mut self) -> bool {
        let message = self.session.next_message(self.now);
        self.poll();
        let Some(message) = message else {
            return false;
        };
        let message = String::from_utf8(message.to_vec()).unwrap();
        let Some(items) = message.strip_prefix("TOKEN ") else {
            return true;
        };
        let items: Vec<&serde_json::value::RawValue> = serde_json::from_str(items).unwrap();
        for raw in items {
            let item: serde_json::Value = serde_json::from_str(raw.get()).unwrap();
            let id = item["stream_id"].to_string();
            let incoming = self.received.entry(id.clone()).or_default();
            assert_eq!(
                item["seq"],
                incoming.len(),
                "each once, in order: {message}"
            );
            incoming.push(raw.get().to_owned());
            if item.get("code").is_some() || !item["finish_reason"].is_null() {
                assert!(self.ended.insert(id), "one end: {message}");
            }
        }
        true
    }

    /// The connection is lost, and the client resumes every stream whose end it has not received.
    fn cut(&mut self, in_flight: usize, steps: usize) {
        for _ in 0..in_flight {
            let _ = self.session.next_message(self.now);
            self.poll();
        }
        assert!(self.session.lose(self.now));
        self.poll();
        for _ in 0..steps {
            self.now = self.now + Duration::from_secs(1);
            self.step();
        }
        let old = std::mem::replace(&mut self.session, LmtpSession::new(Config::default()));
        let name = self.name.clone();
        self.negotiate();
        let open = self.asked.iter().filter(|id| !self.ended.contains(*id));
        let wanted: Vec<_> = open
            .map(|id| {
                let after = self.received.get(id).map_or(0, Vec::len) as i64 - 1;
                format!(r#"{{"stream_id":{id},"after_seq":{after}}}"#)
            })
            .collect();
        let streams = wanted.join(",");
        self.send(&format!(
            r#"RESUME {{"stream_id":99,"model":"tiny","session":"{name}","streams":[{streams}]}}"#
        ));
        let moved = self.session.resumed(Some(old), self.now);
        let mut engine = std::mem::take(&mut self.engine);
        for (from, to) in moved {
            let playing = engine.running.remove(&from).unwrap();
            self.engine.running.insert(to, playing);
            if engine.parked.remove(&from) {
                self.engine.parked.insert(to);
            }
        }
        self.poll();
        let answer = self.session.next_message(self.now).unwrap();
        let answer = String::from_utf8(answer.to_vec()).unwrap();
        let expect = r#""gone":[],"conflict":[]}]"#;
        assert!(answer.ends_with(expect), "{answer}");
    }
}

/// What the client reads of each stream in the recorded run, whatever happens to its connections.
fn play(cuts: &[Cut]) -> BTreeMap<String, Vec<String>> {
    let mut play = Play::new();
    let mut cuts = cuts.iter().copied().peekable();
    let mut read = 0;
    let mut script = SCRIPT.iter();
    loop {
        let reply = script.next();
        if let Some(text) = reply {
            play.send(text);
            let value: Option<serde_json::Value> = text
                .split_once(' ')
                .map(|(_, payload)| serde_json::from_str(payload).unwrap());
            play.asked
                .extend(value.map(|value| value["stream_id"].to_string()));
            // A refused stream cannot be resumed.
            if play.session.has_message() && text.contains("900") {
                while play.read() {}
            }
        }
        play.step();
        loop {
            if let Some((_, in_flight, steps)) = cuts.next_if(|(after, ..)| *after <= read) {
                read = 0;
                play.cut(in_flight, steps);
            }
            if !play.read() {
                break;
            }
            read += 1;
        }
        if reply.is_none() && play.engine.running.is_empty() && !play.session.has_message() {
            assert_eq!(play.ended.len(), play.received.len());
            return play.received;
        }
    }
}

/// LM-963: with numbers.
#[test]
fn lm_966_a_run_cut_at_any_message_equals_the_uncut_run() {
    let whole = play(&[]);
    assert_eq!(whole.len(), 6);
    assert_eq!(whole["1"].len(), 9);
    assert_eq!(whole["\"two\""].len(), 10);
    for after in 0..30 {
        for (in_flight, steps) in [(0, 0), (1, 0), (0, 3), (2, 3), (0, 20)] {
            let cut = (after, in_flight, steps);
            assert_eq!(play(&[cut]), whole, "{cut:?}");
        }
    }
}

proptest! {
    /// Several cuts at any messages.
    #[test]
    fn lm_966_any_number_of_cuts_changes_nothing(
        cuts in prop::collection::vec((0_usize..8, 0_usize..3, 0_usize..5), 0..6),
    ) {
        prop_assert_eq!(play(&cuts), play(&[]));
    }
}

/// A server with which resume was negotiated.
fn agreed(limits: ConnectionLimits) -> Server {
    let mut server = Server::limited(limits);
    let answer = server.ask(
        r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":"all"}}}"#,
    );
    assert!(answer.contains(r#""session":"s_1""#), "{answer}");
    server
}

fn generate(id: u32) -> String {
    format!(r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":{id},"max_tokens":100}}"#)
}

/// A new connection resumes streams of `old`; returns what it receives.
fn back(old: Server, streams: &str) -> (Server, String, usize) {
    let mut server = agreed(ConnectionLimits::default());
    server.now = old.now;
    assert_eq!(
        server.send(&format!(
            r#"RESUME {{"stream_id":2,"model":"tiny","session":"s_x","streams":{streams}}}"#
        )),
        None
    );
    assert_eq!(server.outputs(), ["resume s_x"]);
    assert!(!server.session.wants_input(), "what follows waits");
    let moved = server.session.resumed(Some(old.session), server.now).len();
    let incoming = server.received().join("\n");
    (server, incoming, moved)
}

#[test]
fn lm_963_every_item_is_numbered_including_the_last_and_errors() {
    let request = generate(3);
    let mut server = Server::agreed(r#"["resume","cancel","usage"]"#);
    let stream = server.open(&request);
    for seq in 0..3 {
        let reply = server.step(vec![(stream, piece(seq))]);
        assert!(
            reply[0].ends_with(&format!(r#","seq":{seq}}}]"#)),
            "{reply:?}"
        );
    }
    let error = LmtpError::new(LmtpReason::EngineError, "x");
    let reply = server.step(vec![(stream, StreamPiece::Failed(error))]);
    assert!(
        reply[0].contains(r#""retryable":true,"seq":3,"usage""#),
        "{reply:?}"
    );
    let refused = server.ask(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[900]}"#);
    assert!(
        refused.ends_with(r#""retryable":false,"seq":0}]"#),
        "{refused}"
    );
    server.open(&request);
    let cancelled = server.ask(r#"CANCEL {"stream_id":1,"model":"tiny","streams":[3]}"#);
    assert!(
        cancelled.contains(r#""finish_reason":"cancelled","seq":0,"#),
        "{cancelled}"
    );
    // Without `resume` they have none.
    let mut other = Server::agreed(r#"["usage"]"#);
    let stream = other.open(&request);
    assert!(!other.step(vec![(stream, piece(1))])[0].contains("seq"));
}

/// LM-207: `retry_of` is a member like any other that is unknown; the request is new work beside the stream that it
/// names.
#[test]
fn lm_963_retry_of_is_ignored_and_the_request_runs_afresh() {
    let mut server = Server::agreed(r#"["resume"]"#);
    let stream = server.open(&generate(3));
    let again = server.open(r#"GENERATE {"stream_id":8,"retry_of":3,"model":"tiny","prompt":[1]}"#);
    assert_eq!(server.session.live(), 2);
    assert_eq!(server.session.stats().unknown_parameters, 1);
    let reply = server.step(vec![(stream, piece(66)), (again, piece(67))]);
    let reply = reply.join("\n");
    assert!(reply.contains(r#""token":66,"stream_id":3,"#), "{reply}");
    assert!(reply.contains(r#""token":67,"stream_id":8,"#), "{reply}");
}

/// A stream that began without `resume` replaces the retained items under its id: a client that resumes that id must
/// not be sent the items of another stream.
#[test]
fn lm_965_a_stream_without_numbers_is_not_mistaken_for_the_retained_one_under_its_id() {
    let negotiate = |server: &mut Server, features: &str| {
        server.ask(&format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"tiny","data":{{"lmtp":{{"version":2,"features":{features}}}}}}}"#
        ))
    };
    for features in ["[]", r#"["usage"]"#] {
        let mut old = agreed(ConnectionLimits::default());
        let stream = old.open(&generate(3));
        let last = item(65, -0.5, Some(StreamFinish::Stop));
        old.step(vec![(stream, StreamPiece::Item(last))]);
        negotiate(&mut old, features);
        old.open(&generate(3));
        negotiate(&mut old, r#"["resume"]"#);
        assert!(old.session.lose(old.now));
        let (_, reply, _) = back(old, r#"[{"stream_id":3}]"#);
        assert!(reply.contains(r#""gone":[3]"#), "{features}: {reply}");
        assert!(!reply.contains(r#""token":65"#), "{reply}");
    }
}

#[test]
fn lm_964_a_detached_session_runs_until_its_replay_buffers_are_full() {
    for (limits, room) in [
        (
            ConnectionLimits {
                resume_items: 3,
                ..ConnectionLimits::default()
            },
            3,
        ),
        (
            ConnectionLimits {
                resume_bytes: 300,
                ..ConnectionLimits::default()
            },
            3,
        ),
        (
            ConnectionLimits {
                resume_session_bytes: 300,
                ..ConnectionLimits::default()
            },
            3,
        ),
    ] {
        let mut server = agreed(limits);
        let stream = server.open(&generate(1));
        assert!(server.session.lose(server.now));
        assert!(server.session.is_detached());
        for given in 1..=room {
            assert_eq!(server.outputs(), Vec::<String>::new(), "{given} fit");
            assert!(server.step(vec![(stream, piece(given))]).is_empty());
        }
        assert_eq!(server.outputs(), ["park 0"], "a full ring stands still");
        let (mut server, received, moved) = back(server, r#"[{"stream_id":1,"after_seq":-1}]"#);
        assert!(
            received.starts_with(r#"MSG [{"stream_id":2,"resumed":[1],"gone":[],"conflict":[]}]"#)
        );
        assert_eq!(
            (received.matches("token").count(), moved),
            (3, 1),
            "{received}"
        );
        assert_eq!(server.outputs(), ["unpark 0"]);
        assert_eq!(server.session.stats().resumed, 1);
    }
}

#[test]
fn lm_964_a_detached_session_is_cancelled_after_the_grace() {
    let mut server = agreed(ConnectionLimits::default());
    server.open(&generate(1));
    server.session.lose(server.now);
    let end = Time::ZERO + Duration::from_secs(30);
    assert_eq!(server.session.wake_at(), Some(end));
    server.session.tick(end);
    server.poll();
    assert_eq!(server.outputs(), ["cancel 0"]);
    assert!(server.session.is_closed());
}

/// LM-506: without `resume` all streams end with the connection.
#[test]
fn lm_964_streams_without_the_feature_end_with_their_connection() {
    let mut base = Server::new();
    base.open(&generate(1));
    assert!(!base.session.lose(base.now));
    base.poll();
    assert_eq!(base.outputs(), ["cancel 0"]);
    let mut mixed = Server::new();
    mixed.open(&generate(1));
    let agree = |features| {
        format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"tiny","data":{{"lmtp":{{"version":2,"features":{features}}}}}}}"#
        )
    };
    mixed.ask(&agree(r#"["resume"]"#));
    mixed.open(&generate(2));
    mixed.ask(&agree(r#"["usage"]"#));
    mixed.open(&generate(3));
    assert!(mixed.session.lose(mixed.now));
    mixed.poll();
    assert_eq!(mixed.outputs(), ["cancel 0", "cancel 2"]);
    // A session gets no name if the registry has no room.
    let mut full = LmtpSession::new(Config::default());
    let ask = agree(r#"["usage","resume"]"#);
    assert_eq!(
        full.handle(ask.as_str().into(), &FuzzModels, Time::ZERO),
        None
    );
    assert!(matches!(full.poll(), Some(LmtpOutput::Name)));
    full.named(None);
    let answer = full.next_message(Time::ZERO).unwrap();
    let answer = String::from_utf8(answer.to_vec()).unwrap();
    assert!(
        answer.contains(r#""features":["usage"],"limits""#),
        "{answer}"
    );
    assert!(!full.lose(Time::ZERO));
}

#[test]
fn lm_965_named_streams_resume_and_the_others_are_reported() {
    let limits = ConnectionLimits {
        resume_items: 2,
        ..ConnectionLimits::default()
    };
    let mut server = agreed(limits);
    let streams: Vec<_> = (1..=4).map(|id| server.open(&generate(id))).collect();
    for token in 0..3 {
        server.step(
            streams
                .iter()
                .map(|stream| (*stream, piece(token)))
                .collect(),
        );
    }
    server.ask(r#"BUFFER {"stream_id":5,"model":"tiny","buffer":"b","append":[1,2]}"#);
    server.ask(r#"MASK {"stream_id":5,"model":"tiny","mask":"k","allow":[[1,9]]}"#);
    // Item 0 was evicted, 4 is not named, 7 does not exist, and no client can have received unsent items.
    let wanted = r#"[{"stream_id":1,"after_seq":0},{"stream_id":2,"after_seq":2},{"stream_id":3},{"stream_id":7},{"stream_id":1}]"#;
    let (mut server, received, moved) = back(server, wanted);
    let (answer, items) = received.split_once('\n').unwrap();
    assert_eq!(
        answer,
        r#"MSG [{"stream_id":2,"resumed":[1,2],"gone":[3,7],"conflict":[1]}]"#
    );
    assert_eq!((items.matches("token").count(), moved), (2, 2));
    assert!(
        items.contains(r#""seq":1"#) && items.contains(r#""seq":2"#),
        "{items}"
    );
    // Buffers and masks have moved along, and ids are in use.
    assert!(server.ask(&generate(2)).contains("duplicate_stream"));
    server.open(
        r#"GENERATE {"model":"tiny","prefix":{"buffer":"b"},"mask":"k","stream_id":8,"max_tokens":1}"#,
    );
    assert_eq!(server.session.live(), 3);
}

#[test]
fn lm_965_all_missing_sessions_get_the_same_answer() {
    let removed = r#""code":"stream_gone","retryable":true"#;
    let mut server = agreed(ConnectionLimits::default());
    let ask = |session: &str| {
        format!(r#"RESUME {{"stream_id":2,"model":"tiny","session":{session},"streams":[]}}"#)
    };
    // Its own name.
    assert!(server.ask(&ask("\"s_1\"")).contains(removed));
    assert_eq!(server.send(&ask("\"s_2\"")), None);
    assert_eq!(server.session.resumed(None, server.now), []);
    assert!(server.received()[0].contains(removed));
    // A session that cannot be resumed.
    assert_eq!(server.send(&ask("\"s_3\"")), None);
    let base = LmtpSession::new(Config::default());
    assert_eq!(server.session.resumed(Some(base), server.now), []);
    assert!(server.received()[0].contains(removed));
    for (bad, code) in [
        (r#""streams":[]"#, "missing_required_parameter"),
        (r#""session":7,"streams":[]"#, "invalid_value"),
        (r#""session":"s""#, "invalid_value"),
        (r#""session":"s","streams":[1]"#, "invalid_value"),
        (r#""session":"s","streams":[{}]"#, "invalid_value"),
        (
            r#""session":"s","streams":[{"stream_id":1,"after_seq":-2}]"#,
            "invalid_value",
        ),
        (
            r#""session":"s","streams":[{"stream_id":1,"after_seq":"x"}]"#,
            "invalid_value",
        ),
    ] {
        let answer = server.ask(&format!(r#"RESUME {{"stream_id":2,"model":"tiny",{bad}}}"#));
        assert!(answer.contains(code), "{bad}: {answer}");
    }
    // A close answers the RESUME that waits for the shell.
    assert_eq!(server.send(&ask("\"s_4\"")), None);
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    let last = server.received().join("\n");
    assert!(last.contains(r#"MSG [{"stream_id":2,"error":"#), "{last}");
}

/// LM-607: replayed items wait for room as all others do.
#[test]
fn lm_965_replayed_items_wait_for_room() {
    let mut server = agreed(ConnectionLimits::default());
    let stream = server.open(&generate(1));
    for token in 0..90 {
        server.step(vec![(stream, piece(token))]);
    }
    let old = server;
    let limits = ConnectionLimits {
        outbox_bytes: 4_000,
        outbox_low_bytes: 1_000,
        ..ConnectionLimits::default()
    };
    let mut server = agreed(limits);
    server.send(
        r#"RESUME {"stream_id":2,"model":"tiny","session":"s_x","streams":[{"stream_id":1}]}"#,
    );
    server.session.resumed(Some(old.session), server.now);
    let mut seen = 0;
    loop {
        assert!(server.session.unsent_bytes() < 1_300);
        let Some(message) = server.session.next_message(server.now) else {
            break;
        };
        seen += String::from_utf8(message.to_vec())
            .unwrap()
            .matches("\"seq\"")
            .count();
    }
    assert_eq!(seen, 90);
}

/// An ended stream is retained for the grace period, and its items are evicted before those of running ones.
#[test]
fn lm_965_an_end_that_was_not_received_is_replayed_within_the_grace() {
    let limits = ConnectionLimits {
        resume_session_bytes: 200,
        ..ConnectionLimits::default()
    };
    for (wait, limits, known) in [
        (29, ConnectionLimits::default(), true),
        (30, ConnectionLimits::default(), false),
        (0, limits, false),
    ] {
        let mut server = agreed(limits);
        let stream = server.open(&generate(1));
        let end = StreamPiece::Item(item(7, -0.5, Some(StreamFinish::Stop)));
        server.step(vec![(stream, end)]);
        let other = server.open(&generate(2));
        for token in 0..3 {
            server.step(vec![(other, piece(token))]);
        }
        server.now = server.now + Duration::from_secs(wait);
        server.session.tick(server.now);
        let (_, received, _) = back(server, r#"[{"stream_id":1}]"#);
        assert_eq!(received.contains(r#""resumed":[1]"#), known, "{received}");
        assert_eq!(received.contains(r#""token":7"#), known);
    }
}
