//! Any bytes at both machines, for the fuzzer and for tests.
//!
//! Owns: what has to hold whatever comes: every message is one line of a list in strict JSON, every accepted stream ends
//! exactly once, how bytes are cut changes nothing, and a client's call ends exactly once. Built for tests and fuzzing
//! alone.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytestring::ByteString;
use serde_json::Value;

use super::{
    Carrier, Client, Close, Config, Event, Finish, Generate, Item, Limits, Line, Lines, Model,
    Models, Options, Output, Piece, Reason, Score, Session, StreamKey, Tokenizer, Unreadable, Work,
};
use crate::time::Time;

/// The models `tiny`, and `bare` without tokenizer, BOS and EOS; the key may not use `secret`.
#[derive(Debug)]
pub struct Shelf;

impl Models for Shelf {
    fn find(&self, name: &str) -> Result<Arc<Model>, Reason> {
        let tiny = Model {
            constructor: "sapwood:mock tokens".to_owned(),
            model_type: "mock".to_owned(),
            vocab_size: 258,
            max_context: 4_096,
            bos: Some(256),
            eos: vec![257],
            tokenizer: Some(Tokenizer {
                kind: "bytes".to_owned(),
                vocab_size: 258,
                sha256: "9f".to_owned(),
            }),
            version: "0.1.0".to_owned(),
        };
        match name {
            "tiny" => Ok(Arc::new(tiny)),
            "bare" => Ok(Arc::new(Model {
                bos: None,
                eos: Vec::new(),
                tokenizer: None,
                ..tiny
            })),
            "secret" => Err(Reason::InsufficientScope),
            _ => Err(Reason::ModelNotFound),
        }
    }
}

/// Plays `bytes` into a server, as lines and as one frame.
///
/// # Panics
/// If an invariant does not hold.
pub fn serve(bytes: &[u8]) {
    let (cut, bytes) = bytes.split_first().unwrap_or((&0, bytes));
    let whole = lines(bytes, bytes.len().max(1));
    let pieces = lines(bytes, usize::from(*cut) % 16 + 1);
    assert_eq!(whole, pieces, "how bytes are cut changes nothing");
    if let Ok(text) = std::str::from_utf8(bytes) {
        let mut desk = Desk::new(Carrier::Frames);
        desk.say(ByteString::from(text));
        desk.close();
    }
}

fn lines(bytes: &[u8], cut: usize) -> Vec<String> {
    let mut desk = Desk::new(Carrier::Lines);
    let mut lines = Lines::new(LINE_BYTES);
    for piece in bytes.chunks(cut) {
        lines.push(piece);
        while let Some(line) = lines.next_line() {
            desk.hear(line);
        }
    }
    if let Some(line) = lines.last_line() {
        desk.hear(line);
    }
    desk.close();
    desk.sent
}

/// Short, so that a fuzzer finds long lines.
const LINE_BYTES: usize = 512;

/// What streams that were accepted end with here; requests are refused with anything else.
const FAILURES: &[&str] = &["engine_error", "draining", "malformed"];

/// A session with an engine that gives every stream a piece a step, and everything it said.
#[derive(Debug)]
struct Desk {
    session: Session,
    running: Vec<(StreamKey, Work)>,
    /// Ids that were accepted and have not ended, as JSON.
    open: BTreeSet<String>,
    sent: Vec<String>,
    steps: u32,
}

impl Desk {
    fn new(carrier: Carrier) -> Self {
        let limits = Limits {
            // Small, so that parking happens.
            outbox_bytes: 600,
            outbox_low_bytes: 200,
            max_frame_out: 300,
            max_streams: 3,
            ..Limits::default()
        };
        Self {
            session: Session::new(Config {
                limits: Arc::new(limits),
                carrier,
                ..Config::default()
            }),
            running: Vec::new(),
            open: BTreeSet::new(),
            sent: Vec::new(),
            steps: 0,
        }
    }

    fn hear(&mut self, line: Line) {
        match line {
            Line::Text(text) => self.say(text),
            Line::BadText => self.unreadable(Unreadable::BadText),
            Line::TooLong => self.unreadable(Unreadable::TooLarge),
        }
    }

    fn unreadable(&mut self, what: Unreadable) {
        self.session.handle_unreadable(what, Time::ZERO);
        self.settle();
    }

    fn say(&mut self, text: ByteString) {
        let mut rest = Some(text);
        while let Some(text) = rest {
            rest = self.session.handle(text, &Shelf, Time::ZERO);
            self.settle();
            self.step();
        }
    }

    fn step(&mut self) {
        self.steps += 1;
        let mut pieces = Vec::new();
        // Backwards, because order is the session's to keep.
        for (stream, work) in self.running.iter().rev() {
            let dice = self.steps.wrapping_mul(31) + stream.0 as u32 * 7;
            let piece = match (work, dice % 23) {
                (_, 3) => Piece::Failed(super::Fault::new(Reason::EngineError, "a step failed")),
                (Work::Score(_), _) | (_, 0..12) => Piece::Item(item(dice, None)),
                (_, 12) => Piece::Item(Item {
                    logprob: f32::NAN,
                    ..item(dice, None)
                }),
                _ => Piece::Item(item(dice, Some(Finish::Stop))),
            };
            pieces.push((*stream, piece));
        }
        self.session.step(pieces, Time::ZERO);
        self.settle();
    }

    fn close(&mut self) {
        self.session.close(Close::SHUTDOWN, Time::ZERO);
        self.settle();
        assert!(self.open.is_empty(), "every stream ends: {:?}", self.open);
        assert!(self.session.is_closed());
        assert_eq!(self.session.unsent_bytes(), 0);
        assert_eq!(self.session.live(), 0);
    }

    fn settle(&mut self) {
        loop {
            let mut idle = true;
            while let Some(output) = self.session.poll() {
                idle = false;
                match output {
                    Output::Start(start) => {
                        // What failed at once was open all the same.
                        if let Some(id) = self.session.id(start.stream) {
                            assert!(self.open.insert(id.as_json().to_owned()));
                        }
                        self.running.push((start.stream, start.work));
                    }
                    Output::Cancel(stream) => self.running.retain(|(key, _)| *key != stream),
                    Output::Park | Output::Unpark | Output::Close(_) => {}
                    Output::Reset => panic!("time stands still"),
                }
            }
            if let Some(message) = self.session.next_message(Time::ZERO) {
                idle = false;
                let message = String::from_utf8(message.to_vec()).expect("UTF-8");
                self.check(message.trim_end_matches('\n'));
                self.sent.push(message);
            }
            if idle {
                return;
            }
        }
    }

    /// A list in strict JSON, without raw control characters, and no item of a stream behind its end.
    fn check(&mut self, message: &str) {
        assert!(message.bytes().all(|byte| byte >= b' '));
        let (word, payload) = message.split_once(' ').expect("a type and a space");
        let items: Vec<&serde_json::value::RawValue> =
            serde_json::from_str(payload).expect("a list");
        assert!(!items.is_empty());
        for raw in items {
            let item: Value = serde_json::from_str(raw.get()).expect("JSON");
            assert!(item.is_object());
            if word == "MSG" {
                assert!(item.get("error").is_some() || item.get("model_info").is_some());
                continue;
            }
            assert_eq!(word, "TOKEN");
            let id = super::json::value(raw.get())
                .expect("JSON")
                .0
                .members()
                .expect("an object")
                .find(|(name, _)| name == "stream_id")
                .expect("an id")
                .1
                .as_str()
                .to_owned();
            let code = item.get("code").and_then(Value::as_str);
            // What is refused never was open, whatever else its id stands for.
            let refused = code.is_some_and(|code| !FAILURES.contains(&code));
            if code.is_some() || !item["finish_reason"].is_null() {
                assert!(refused || self.open.remove(&id), "nothing follows an end");
            } else {
                assert!(self.open.contains(&id), "nothing follows an end");
            }
        }
    }
}

fn item(token: u32, finish: Option<Finish>) -> Item {
    Item {
        token: token % 258,
        logprob: -0.5,
        top: vec![(1, -0.25), (2, -0.5)],
        finish,
    }
}

/// Plays `bytes` into a client with three calls.
///
/// # Panics
/// If an invariant does not hold.
pub fn hear(bytes: &[u8]) {
    let mut client = Client::new(Options::default());
    let generate = Generate {
        prompt: vec![1],
        max_tokens: 3,
        ..Generate::default()
    };
    let score = Score {
        prompt: vec![1],
        scored: vec![2, 3],
    };
    let calls = [
        client.model_info("tiny", Time::ZERO),
        client.generate("tiny", &generate, Time::ZERO),
        client.score("tiny", &score, Time::ZERO),
    ];
    let mut open: BTreeSet<_> = calls
        .into_iter()
        .map(|call| call.expect("a small message").0)
        .collect();
    for text in String::from_utf8_lossy(bytes).split('\0') {
        client.handle(text, Time::ZERO);
        ends(&mut client, &mut open);
        assert_eq!(client.outstanding(), open.len());
    }
    client.lost();
    ends(&mut client, &mut open);
    assert!(open.is_empty(), "every call ends");
    assert_eq!(client.outstanding(), 0);
}

fn ends(client: &mut Client, open: &mut BTreeSet<super::Call>) {
    while let Some(event) = client.poll() {
        match event {
            Event::Item(call, item) if item.finish.is_none() => {
                assert!(open.contains(&call), "nothing follows an end");
            }
            Event::Item(call, _) | Event::ModelInfo(call, _) | Event::Failed(call, _) => {
                assert!(open.remove(&call), "a call ends once");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn replay(target: &str, run: fn(&[u8])) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fuzz/corpus")
            .join(target);
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("a committed corpus") {
            run(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files > 0);
    }

    #[test]
    fn the_corpus_is_replayed() {
        replay("lmtp_serve", super::serve);
        replay("lmtp_hear", super::hear);
    }

    /// What clients say, whole and broken.
    const SAID: &[&str] = &[
        r#"GENERATE {"model":"tiny","prompt":[1,2],"stream_id":1}"#,
        r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":2,"max_tokens":2}"#,
        r#"GENERATE {"model":"nope","prompt":[1],"stream_id":3}"#,
        r#"GENERATE {"model":"tiny","prompt":[900],"stream_id":"x"}"#,
        r#"SCORE {"model":"tiny","prompt":[],"scored":[1,2,3],"stream_id":[4, 5]}"#,
        r#"MODEL_INFO {"model":"tiny","stream_id":1}"#,
        r#"CANCEL {"model":"tiny","stream_id":9,"streams":[1]}"#,
        r#"FROB {"stream_id":1}"#,
        "GENERATE {",
        "",
        "\u{e9}\u{1f333}",
        r#"SCORE {"stream_id":NaN}"#,
    ];

    /// What servers say.
    const HEARD: &[&str] = &[
        r#"TOKEN [{"token":1,"stream_id":2,"logprob":-1.5,"finish_reason":null,"top_logprobs":{"1":-1.5}}]"#,
        r#"TOKEN {"token":1,"stream_id":3,"logprob":NaN,"finish_reason":null}"#,
        r#"TOKEN [{"stream_id":2,"finish_reason":"cancelled"}]"#,
        r#"TOKEN [{"stream_id":3,"error":{"a":1}},{"token":7,"stream_id":2}]"#,
        r#"MSG [{"stream_id":2,"error":"stream_id is in use","code":"duplicate_stream"}]"#,
        r#"MSG {"stream_id":1,"model_info":{"model":"tiny"}}"#,
        r#"MSG [{"stream_id":3,"error":"'scored'"}]"#,
        "TOKEN [",
        "\0",
        "STATUS [{}]",
    ];

    fn texts(of: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
        let lines = prop::collection::vec(prop::sample::select(of), 0..24);
        lines.prop_map(|lines| lines.join("\n").into_bytes())
    }

    proptest! {
        /// LM-101, LM-201: nothing that is sent upsets a session.
        #[test]
        fn lm_501_any_bytes_leave_every_stream_ended_once(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            super::serve(&bytes);
            super::hear(&bytes);
        }

        /// LM-405, LM-601: any interleaving of requests and steps, in any cut.
        #[test]
        fn lm_501_any_interleaving_ends_every_stream_exactly_once(cut in any::<u8>(), text in texts(SAID)) {
            let bytes: Vec<u8> = std::iter::once(cut).chain(text).collect();
            super::serve(&bytes);
        }

        /// Near what is sent, where the interesting mistakes are.
        #[test]
        fn lm_501_messages_with_some_bytes_changed_end_every_stream_exactly_once(
            text in texts(SAID),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        ) {
            let mut bytes = text;
            bytes.insert(0, 7);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            super::serve(&bytes);
        }

        /// LM-705, LM-706: whatever servers send.
        #[test]
        fn lm_709_any_answers_end_every_call_exactly_once(text in texts(HEARD)) {
            super::hear(&text);
        }
    }
}
