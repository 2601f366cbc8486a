//! Fuzz entry points: arbitrary bytes and lists of operations for both state machines.
//!
//! Invariants for every input: every message is one line with a list in strict JSON, every accepted stream ends exactly
//! once, splitting the bytes differently changes nothing, and a client's call ends exactly once. Built for tests and
//! fuzzing only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytestring::ByteString;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{
    BranchEvent, ClientEvent, ClientMachine, ClientTimeouts, Config, ConnectionLimits, Feature,
    Features, GenerateRequest, LineSplitter, LmtpClose, LmtpError, LmtpModelInfo, LmtpOutput,
    LmtpReason, LmtpSession, Load, MessageFraming, ModelLookup, Score, StreamDemand, StreamFinish,
    StreamKey, StreamPiece, StreamUpdate, TextCodec, TokenItem, TokenizerInfo, Unreadable,
    WireLine,
};
use crate::params::GenerationParams;
use crate::steer::Token;
use crate::time::Time;

/// The models `tiny`; `bare`, without tokenizer, BOS and EOS; and `far`, of which only the name is known. The key may
/// not use `secret`.
#[derive(Debug)]
pub struct FuzzModels;

impl ModelLookup for FuzzModels {
    fn find(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason> {
        let tiny = LmtpModelInfo {
            constructor: "sapwood:mock tokens".to_owned(),
            model_type: "mock".to_owned(),
            vocab_size: Some(258),
            max_context: Some(4_096),
            bos: Some(256),
            eos: vec![257],
            tokenizer: Some(TokenizerInfo {
                kind: "bytes".to_owned(),
                vocab_size: 258,
                ends: None,
                sha256: "9f".to_owned(),
                special: Vec::new(),
                url: None,
            }),
            version: "0.1.0".to_owned(),
            deterministic: None,
            loading: false,
            default_max_tokens: None,
            default_seed: None,
        };
        match name {
            "tiny" => Ok(Arc::new(tiny)),
            "bare" => Ok(Arc::new(LmtpModelInfo {
                bos: None,
                eos: Vec::new(),
                tokenizer: None,
                ..tiny
            })),
            "far" => Ok(Arc::new(LmtpModelInfo {
                vocab_size: None,
                max_context: None,
                bos: None,
                eos: Vec::new(),
                tokenizer: None,
                ..tiny
            })),
            "secret" => Err(LmtpReason::InsufficientScope),
            _ => Err(LmtpReason::ModelNotFound),
        }
    }

    fn vocabulary(&self, name: &str) -> Option<Arc<dyn TextCodec>> {
        (name == "tiny")
            .then(|| Arc::new(ByteTokens((0..=u8::MAX).collect())) as Arc<dyn TextCodec>)
    }

    fn load(&self) -> Load {
        Load {
            running: 1,
            queued: 2,
            parked: 0,
        }
    }
}

/// A codec with one token per byte; token 256 is BOS. What is filled in has its place in `<prefix|suffix>`.
#[derive(Debug)]
struct ByteTokens(Vec<u8>);

impl TextCodec for ByteTokens {
    fn tokenize(&self, text: &str) -> Vec<Token> {
        text.bytes().map(Token::from).collect()
    }

    fn bos(&self) -> Option<Token> {
        Some(256)
    }

    fn bytes(&self, token: Token) -> &[u8] {
        let at = token as usize;
        self.0.get(at..=at).unwrap_or_default()
    }

    fn infill(
        &self,
        bos: Option<Token>,
        prefix: &str,
        suffix: &str,
    ) -> Result<Vec<Token>, LmtpError> {
        let text = self.tokenize(&format!("<{prefix}|{suffix}>"));
        Ok(bos.into_iter().chain(text).collect())
    }

    fn chat(&self, messages: &Value, generation: bool) -> Result<Vec<Token>, LmtpError> {
        let texts = messages.as_array().into_iter().flatten();
        let texts = texts.filter_map(|message| message["content"].as_str());
        let mut tokens = self.tokenize(&texts.collect::<Vec<_>>().join("|"));
        if tokens.is_empty() {
            return Err(LmtpError::new(
                LmtpReason::InvalidValue,
                "'messages' say nothing",
            ));
        }
        tokens.extend(generation.then_some(Token::from(b'>')));
        Ok(tokens)
    }
}

/// Feeds `bytes` to a server, as lines and as one frame.
///
/// # Panics
/// If an invariant does not hold.
pub fn serve(bytes: &[u8]) {
    let (cut, bytes) = bytes.split_first().unwrap_or((&0, bytes));
    let whole = lines(bytes, bytes.len().max(1));
    let pieces = lines(bytes, usize::from(*cut) % 16 + 1);
    assert_eq!(whole, pieces, "how bytes are cut changes nothing");
    if let Ok(text) = std::str::from_utf8(bytes) {
        let mut desk = Desk::new(MessageFraming::Frames);
        desk.receive_text(ByteString::from(text));
        desk.close();
    }
}

fn lines(bytes: &[u8], cut: usize) -> Vec<String> {
    let mut desk = Desk::new(MessageFraming::Lines);
    let mut lines = LineSplitter::new(LINE_BYTES);
    for piece in bytes.chunks(cut) {
        lines.push(piece);
        while let Some(line) = lines.next_line() {
            desk.client(line);
        }
    }
    if let Some(line) = lines.last_line() {
        desk.client(line);
    }
    desk.close();
    desk.sent
}

/// Small, so that a fuzzer finds lines that are too long.
const LINE_BYTES: usize = 512;
const OUTBOX_BYTES: usize = 600;
/// Bytes that one client message, or one step of three streams, may add to a full outbox, end items included.
const ROOM_BYTES: usize = 2_000;

/// Runs `bytes` as operations on a server's session, with a client that may be slow or disconnected.
///
/// # Panics
/// If an invariant does not hold.
pub fn ops(bytes: &[u8]) {
    let mut input = bytes.iter().copied();
    let carrier = match input.next() {
        Some(0..128) => MessageFraming::Lines,
        _ => MessageFraming::Frames,
    };
    let mut desk = Desk::new(carrier);
    while let Some(op) = input.next() {
        desk.operate(op, input.next().unwrap_or(0));
        desk.poll();
        desk.check_streams();
    }
    desk.close();
}

/// Client messages for lists of operations.
const MESSAGES: &[&str] = &[
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1,"max_tokens":4}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":2}"#,
    r#"SCORE {"model":"tiny","prompt":[],"scored":[1,2,3],"stream_id":"s"}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":4,"top_logprobs":2}"#,
    r#"GENERATE {"model":"nope","prompt":[1],"stream_id":2}"#,
    r#"MODEL_INFO {"model":"tiny","stream_id":1}"#,
    "GENERATE {",
    "FROB {}",
    r#"MODEL_INFO {"model":"tiny","stream_id":1,"data":{"lmtp":{"version":2,"features":"all"}}}"#,
    r#"MODEL_INFO {"model":"tiny","stream_id":1,"data":{"lmtp":{"version":2,"features":[]}}}"#,
    r#"GENERATE {"model":"tiny","prompt_text":"a","stream_id":5,"n":3,"max_tokens":3,"deadline_ms":9000}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":6,"ttft_ms":20,"keep":"b","text":"bytes"}"#,
    r#"SCORE {"model":"tiny","prefix":{"buffer":"b"},"scored_many":[[1],[2,3]],"stream_id":7}"#,
    r#"CANCEL {"model":"tiny","stream_id":8,"streams":[1,5,6,77]}"#,
    r#"CANCEL {"model":"tiny","stream_id":8,"streams":"all"}"#,
    r#"BUFFER {"model":"tiny","stream_id":8,"buffer":"b","append":[1,2],"ttl_s":30}"#,
    r#"MASK {"model":"tiny","stream_id":8,"mask":"k","allow":[[1,9]]}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":9,"mask":"k","zzz":1}"#,
    r#"TOKENIZE {"model":"tiny","stream_id":8,"text":"abc"}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":10,"max_tokens":4}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1,"max_tokens":4}"#,
    r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":11,"window":1}"#,
    r#"ACK {"model":"tiny","stream_id":11,"seq":0}"#,
    r#"ACK {"model":"tiny","stream_id":11,"seq":1}"#,
    r#"RESUME {"model":"tiny","stream_id":8,"session":"s_0","streams":[{"stream_id":1}]}"#,
];

/// The message of a client that negotiates resume.
const ALL: &str = MESSAGES[8];

/// Errors that end accepted streams here; requests are refused with other codes.
const FAILURES: &[&str] = &[
    "engine_error",
    "draining",
    "malformed",
    "message_too_large",
    "timeout",
    "stalled",
];

/// A session with an engine that produces a piece for every stream in each step, and all messages sent.
#[derive(Debug)]
struct Desk {
    session: LmtpSession,
    carrier: MessageFraming,
    running: Vec<(StreamKey, StreamDemand)>,
    /// Accepted ids as JSON, with the number of ends not received yet: an id may be reused before that.
    open: BTreeMap<String, usize>,
    /// Streams that ended before the shell looked, or whose id it does not know: their first item shows it.
    brief: usize,
    sent: Vec<String>,
    steps: u32,
    now: Time,
    parked: bool,
    /// Streams that are parked individually.
    standing: BTreeSet<StreamKey>,
    /// Number of the next item of each stream, by id.
    next: BTreeMap<String, u64>,
    /// Ids that were reused before their end was received: their items cannot be assigned to a stream.
    blurred: BTreeSet<String>,
    /// The client receives nothing any more.
    disconnected: bool,
}

impl Desk {
    fn new(carrier: MessageFraming) -> Self {
        Self {
            session: Self::session(carrier),
            carrier,
            running: Vec::new(),
            open: BTreeMap::new(),
            brief: 0,
            sent: Vec::new(),
            steps: 0,
            now: Time::ZERO,
            parked: false,
            standing: BTreeSet::new(),
            next: BTreeMap::new(),
            blurred: BTreeSet::new(),
            disconnected: false,
        }
    }

    fn session(carrier: MessageFraming) -> LmtpSession {
        let limits = ConnectionLimits {
            // Small, so that streams are parked.
            outbox_bytes: OUTBOX_BYTES,
            outbox_low_bytes: 200,
            max_frame_out: 300,
            max_streams: 3,
            resume_items: 4,
            resume_bytes: 500,
            resume_session_bytes: 900,
            ..ConnectionLimits::default()
        };
        LmtpSession::new(Config {
            limits: Arc::new(limits),
            carrier,
            ..Config::default()
        })
    }

    fn operate(&mut self, op: u8, with: u8) {
        match op % 16 {
            0..5 if self.session.wants_input() => {
                let message = MESSAGES[usize::from(with) % MESSAGES.len()];
                let resumed = self.session.stats().resumed;
                let rest = self.session.handle(message.into(), &FuzzModels, self.now);
                assert_eq!(rest, None, "one message is taken whole");
                if self.session.stats().resumed > resumed {
                    let id = if message.ends_with("10}") { "1" } else { "10" };
                    self.opens(id.to_owned());
                }
            }
            5..9 if !self.parked => self.give(),
            9 | 10 => drop(self.take()),
            11 => while self.take() {},
            12 => {
                self.now = self.now + Duration::from_secs(u64::from(with) / 4);
                let (unsent, retained) = (self.session.unsent_bytes(), self.session.is_detached());
                self.session.tick(self.now);
                // A client that was too slow, or did not reconnect, has not received everything.
                self.disconnected |= self.session.unsent_bytes() < unsent;
                self.disconnected |= retained && self.session.is_closed();
            }
            13 if with < 64 => self.session.drain(),
            13 if with < 96 => self.session.end_of_input(),
            14 => {
                let at = usize::from(with) % self.running.len().max(1);
                if at < self.running.len() {
                    let (stream, _) = self.running.remove(at);
                    self.standing.remove(&stream);
                    self.session.finished(stream, self.now);
                }
            }
            15 => match with {
                0..16 => {
                    self.disconnected |= self.session.is_detached();
                    self.session.close(LmtpClose::INTERNAL, self.now);
                }
                128..176 => {
                    self.disconnected |=
                        !self.session.is_detached() && !self.session.lose(self.now);
                }
                176..224 if self.session.is_detached() => self.come_back(),
                16..32 => {
                    self.disconnected = true;
                    self.session.hang_up();
                }
                64..96 => {
                    if let Some((stream, _)) = self.running.first() {
                        let update = StreamUpdate::Prefill { progress: 0.5 };
                        self.session.status(*stream, &update, self.now);
                    }
                }
                32..64 if self.session.wants_input() => {
                    let what = Unreadable::TooLarge;
                    self.session.handle_unreadable(what, self.now);
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// Reconnects the client, which asks for the items that it has not received.
    fn come_back(&mut self) {
        let fresh = Self::session(self.carrier);
        let old = std::mem::replace(&mut self.session, fresh);
        self.parked = false;
        assert_eq!(self.session.handle(ALL.into(), &FuzzModels, self.now), None);
        self.poll();
        while self.take() {}
        let known = self.open.keys().filter(|id| !self.blurred.contains(*id));
        let streams: Vec<_> = known
            .take(6)
            .map(|id| {
                let next = self.next.get(id).copied().unwrap_or(0);
                format!(
                    r#"{{"stream_id":{id},"after_seq":{}}}"#,
                    i128::from(next) - 1
                )
            })
            .collect();
        let resume = format!(
            r#"RESUME {{"model":"tiny","stream_id":8,"session":"s_1","streams":[{}]}}"#,
            streams.join(",")
        );
        // Replaces the session's name with a wrong one.
        let resume = resume.replace("s_1", "s_9");
        assert_eq!(
            self.session.handle(resume.into(), &FuzzModels, self.now),
            None
        );
        assert!(matches!(self.session.poll(), Some(LmtpOutput::Resume(name)) if name == "s_9"));
        let moved: BTreeMap<_, _> = self
            .session
            .resumed(Some(old), self.now)
            .into_iter()
            .collect();
        let running = std::mem::take(&mut self.running).into_iter();
        let running = running.filter_map(|(key, work)| Some((*moved.get(&key)?, work)));
        self.running = running.collect();
        self.running.sort_by_key(|(key, _)| *key);
        let standing = std::mem::take(&mut self.standing).into_iter();
        self.standing = standing
            .filter_map(|key| moved.get(&key).copied())
            .collect();
        self.poll();
        let message = self.session.next_message(self.now).expect("an answer");
        let message = String::from_utf8(message.to_vec()).expect("UTF-8");
        self.check(message.trim_end_matches('\n'));
        let resumed = message.split_once("\"gone\"").expect("what is gone").0;
        let resumed = resumed.split_once(":[").expect("a list").1;
        let resumed: BTreeSet<_> = resumed.trim_end_matches("],").split(',').collect();
        self.open.retain(|id, _| resumed.contains(&**id));
        self.open.values_mut().for_each(|count| *count = 1);
        self.next.retain(|id, _| resumed.contains(&**id));
        self.blurred.clear();
        self.brief = 0;
    }

    fn opens(&mut self, id: String) {
        let count = self.open.entry(id.clone()).or_default();
        *count += 1;
        if *count > 1 {
            self.blurred.insert(id);
        } else {
            self.next.insert(id, 0);
        }
    }

    fn client(&mut self, line: WireLine) {
        match line {
            WireLine::Text(text) => self.receive_text(text),
            WireLine::BadText => self.unreadable(Unreadable::BadText),
            WireLine::TooLong => self.unreadable(Unreadable::TooLarge),
        }
    }

    fn unreadable(&mut self, what: Unreadable) {
        self.session.handle_unreadable(what, self.now);
        self.settle();
    }

    fn receive_text(&mut self, text: ByteString) {
        let mut rest = Some(text);
        while let Some(text) = rest {
            let resumed = self.session.stats().resumed;
            rest = self.session.handle(text, &FuzzModels, self.now);
            // The id of a resumed stream is not reported to the shell.
            self.brief += usize::try_from(self.session.stats().resumed - resumed).expect("few");
            self.settle();
            self.step();
        }
    }

    fn step(&mut self) {
        self.give();
        self.settle();
    }

    /// Produces one piece for every stream.
    fn give(&mut self) {
        self.steps += 1;
        let mut pieces = Vec::new();
        let mut over = BTreeSet::new();
        // In reverse, because keeping the order is the session's task.
        let going = self.running.iter().rev();
        for (stream, work) in going.filter(|(stream, _)| !self.standing.contains(stream)) {
            let dice = self.steps.wrapping_mul(31) + stream.0 as u32 * 7;
            let piece = match (work, dice % 23) {
                (_, 3) => {
                    StreamPiece::Failed(LmtpError::new(LmtpReason::EngineError, "a step failed"))
                }
                (StreamDemand::Score(_), _) | (_, 0..12) => StreamPiece::Item(item(dice, None)),
                (_, 12) => StreamPiece::Item(TokenItem {
                    logprob: f32::NAN,
                    ..item(dice, None)
                }),
                (_, 13) => StreamPiece::Branch(dice % 2, BranchEvent::Backtrack(dice)),
                (_, 14) => StreamPiece::Status(StreamUpdate::Log {
                    branch: dice % 2,
                    message: "hello".into(),
                }),
                _ => StreamPiece::Item(item(dice, Some(StreamFinish::Stop))),
            };
            let ends = match &piece {
                StreamPiece::Item(item) => item.finish.is_some() && !item.logprob.is_nan(),
                StreamPiece::Failed(_) => true,
                StreamPiece::Branch(..) | StreamPiece::Status(_) => false,
            };
            if ends {
                over.insert(*stream);
            }
            pieces.push((*stream, piece));
        }
        self.session.step(pieces, self.now);
        self.running.retain(|(stream, _)| !over.contains(stream));
    }

    fn close(&mut self) {
        self.disconnected |= self.session.is_detached();
        self.session.close(LmtpClose::SHUTDOWN, self.now);
        self.settle();
        assert!(self.session.is_closed());
        self.check_streams();
        assert!(
            self.disconnected || self.open.is_empty() && self.brief == 0,
            "every stream ends: {:?}",
            self.open
        );
    }

    /// The shell and the session agree on the live streams, and no state of ended streams is left.
    fn check_streams(&self) {
        assert_eq!(self.session.live(), self.running.len());
        for (stream, _) in &self.running {
            assert!(self.session.id(*stream).is_some());
        }
        if self.session.is_closed() {
            assert_eq!((self.session.live(), self.session.unsent_bytes()), (0, 0));
            assert_eq!(self.session.wake_at(), None);
        }
        assert!(self.session.unsent_bytes() < OUTBOX_BYTES + ROOM_BYTES);
        assert!(self.session.wake_at().is_none_or(|at| at > self.now));
    }

    fn settle(&mut self) {
        loop {
            let polled = self.poll();
            if !self.take() && !polled {
                return;
            }
        }
    }

    /// Handles the outputs of the session.
    fn poll(&mut self) -> bool {
        let mut any = false;
        while let Some(output) = self.session.poll() {
            any = true;
            match output {
                LmtpOutput::Start(start) => {
                    match self.session.id(start.stream) {
                        _ if start.sample > 0 => {}
                        Some(id) => self.opens(id.as_json().to_owned()),
                        None => self.brief += 1,
                    }
                    self.running.push((start.stream, start.work));
                }
                LmtpOutput::Cancel(stream) => {
                    self.standing.remove(&stream);
                    self.running.retain(|(key, _)| *key != stream);
                }
                LmtpOutput::ParkStream(stream) => {
                    assert!(self.standing.insert(stream), "it went before");
                }
                LmtpOutput::UnparkStream(stream) => {
                    assert!(self.standing.remove(&stream), "it stood before");
                }
                LmtpOutput::Name => self.session.named(Some("s_1".into())),
                LmtpOutput::Resume(_) => {
                    assert!(self.session.resumed(None, self.now).is_empty());
                }
                LmtpOutput::Park => self.parked = true,
                LmtpOutput::Unpark => self.parked = false,
                LmtpOutput::Close(_) | LmtpOutput::Reset => {
                    assert!(self.session.is_closed() && self.session.poll().is_none());
                }
            }
        }
        any
    }

    /// Takes one message from the session.
    fn take(&mut self) -> bool {
        let Some(message) = self.session.next_message(self.now) else {
            return false;
        };
        let message = String::from_utf8(message.to_vec()).expect("UTF-8");
        self.check(message.trim_end_matches('\n'));
        self.sent.push(message);
        true
    }

    fn ends(&mut self, id: &str) -> bool {
        let Some(count) = self.open.get_mut(id) else {
            return false;
        };
        *count -= 1;
        if *count == 0 {
            self.open.remove(id);
            self.next.remove(id);
            self.blurred.remove(id);
        }
        true
    }

    /// Checks that a message is a list in strict JSON without raw control characters, and that no item follows the end
    /// of its stream.
    fn check(&mut self, message: &str) {
        assert!(message.bytes().all(|byte| byte >= b' '));
        let (word, payload) = message.split_once(' ').expect("a type and a space");
        let items: Vec<&RawValue> = serde_json::from_str(payload).expect("a list");
        assert!(!items.is_empty());
        for raw in items {
            // The id is echoed as it was sent and may hold a number that no float can (LM-206), so it stays unread here.
            let mut item: BTreeMap<&str, &RawValue> =
                serde_json::from_str(raw.get()).expect("an object in JSON");
            let id = item.remove("stream_id").map(RawValue::get);
            let item = serde_json::to_value(item).expect("JSON");
            if word == "MSG" {
                let answers = [
                    "error",
                    "model_info",
                    "cancelled",
                    "buffer",
                    "mask",
                    "tokens",
                    "resumed",
                ];
                assert!(answers.iter().any(|name| item.get(name).is_some()));
                continue;
            }
            if word == "STATUS" {
                assert!(item["event"].is_string());
                continue;
            }
            assert_eq!(word, "TOKEN");
            let id = id.expect("an id").to_owned();
            let code = item.get("code").and_then(Value::as_str);
            // A refused request never opened a stream, whatever other stream has its id.
            let refused = code.is_some_and(|code| !FAILURES.contains(&code))
                || item["error"] == "the server is shutting down; ask another";
            if !refused && self.brief > 0 && !self.open.contains_key(&id) {
                self.brief -= 1;
                self.opens(id.clone());
            }
            if let Some(seq) = item
                .get("seq")
                .filter(|_| !refused && !self.blurred.contains(&id))
                && let Some(next) = self.next.get_mut(&id)
            {
                assert_eq!(*seq, *next, "each item once, in order");
                *next += 1;
            }
            if code.is_some() || !item["finish_reason"].is_null() {
                let known = refused || self.ends(&id);
                assert!(known, "nothing follows an end");
            } else {
                assert!(self.open.contains_key(&id), "nothing follows an end");
            }
        }
    }
}

fn item(token: u32, finish: Option<StreamFinish>) -> TokenItem {
    TokenItem {
        token: token % 258,
        logprob: -0.5,
        top: vec![(1, -0.25), (2, -0.5)],
        finish,
        ..TokenItem::default()
    }
}

/// Feeds `bytes` to a client with three calls. A text of the single byte 1 means that its connection is lost, of the
/// single byte 2 that it resumes what waits for the next connection.
///
/// # Panics
/// If an invariant does not hold.
pub fn client(bytes: &[u8]) {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    let generate = GenerateRequest {
        prompt: vec![1],
        params: GenerationParams {
            max_tokens: Some(3),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    let score = Score {
        prompt: vec![1],
        scored: vec![2, 3],
        ..Score::default()
    };
    let negotiate =
        |client: &mut ClientMachine| client.negotiate("tiny", Features::ALL, Time::ZERO);
    let asked = negotiate(&mut client).expect("a small message").0;
    let mut open = BTreeSet::from([asked]);
    if bytes.len().is_multiple_of(2) {
        client.handle(AGREED, Time::ZERO);
        ends(&mut client, &mut open);
    }
    let calls = [
        client.generate("tiny", &generate, Time::ZERO),
        client.score("tiny", &score, Time::ZERO),
    ];
    open.extend(
        calls
            .into_iter()
            .map(|call| call.expect("a small message").0),
    );
    // A RESUME is not one of the calls.
    let mut ours = 0;
    for text in String::from_utf8_lossy(bytes).split('\0') {
        match text.trim() {
            "\u{1}" => {
                let waits = client.part();
                assert_eq!(waits, client.detached_session().is_some());
                ends(&mut client, &mut open);
                assert_eq!(waits, !open.is_empty(), "what is over is told");
                let again = negotiate(&mut client).expect("a small message");
                open.insert(again.0);
                ours = 0;
            }
            "\u{2}" => ours += usize::from(client.come_back(Time::ZERO).is_some()),
            _ => client.handle(text, Time::ZERO),
        }
        ends(&mut client, &mut open);
        let left = client.outstanding() - open.len();
        assert!(left <= ours && ours <= 1, "{left} of {ours}");
    }
    if bytes.first().is_some_and(|byte| byte % 2 == 1) {
        // An abandoned call gets no event.
        for call in std::mem::take(&mut open) {
            let cancel = client.abandon(call);
            assert!(cancel.is_none() || client.features().has(Feature::Cancel));
        }
    }
    client.lost();
    ends(&mut client, &mut open);
    assert!(open.is_empty(), "every call ends");
    assert_eq!(client.outstanding(), 0);
}

/// A server with which resume was negotiated.
const AGREED: &str = r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["resume","cancel"],"session":"s"}}]"#;

fn ends(client: &mut ClientMachine, open: &mut BTreeSet<super::ClientCallId>) {
    while let Some(event) = client.poll() {
        match event {
            ClientEvent::Item(call, item) if item.finish.is_none() => {
                assert!(open.contains(&call), "nothing follows an end");
            }
            ClientEvent::Item(call, _)
            | ClientEvent::ModelInfo(call, _)
            | ClientEvent::Failed(call, _) => {
                assert!(open.remove(&call), "a call ends once");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::corpus::replay;

    #[test]
    fn the_corpus_is_replayed() {
        replay("lmtp_ops", super::ops);
        replay("lmtp_serve", super::serve);
        replay("lmtp_hear", super::client);
    }

    /// Client messages, well-formed and broken.
    const SENT: &[&str] = &[
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
        r#"MODEL_INFO {"model":"tiny","stream_id":1,"data":{"lmtp":{"version":2,"features":"all"}}}"#,
        r#"GENERATE {"model":"tiny","prompt":[1,2],"stream_id":7}"#,
        r#"GENERATE {"model":"tiny","prompt":[1,2],"stream_id":1}"#,
        r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":8,"window":2}"#,
        r#"ACK {"model":"tiny","stream_id":8,"seq":1}"#,
        r#"RESUME {"model":"tiny","stream_id":9,"session":"s","streams":[{"stream_id":1,"after_seq":0}]}"#,
    ];

    /// Server messages.
    const RECEIVED: &[&str] = &[
        r#"TOKEN [{"token":1,"stream_id":2,"logprob":-1.5,"finish_reason":null,"top_logprobs":{"1":-1.5}}]"#,
        r#"TOKEN {"token":1,"stream_id":3,"logprob":NaN,"finish_reason":null}"#,
        r#"TOKEN [{"stream_id":2,"finish_reason":"cancelled"}]"#,
        r#"TOKEN [{"stream_id":3,"error":{"a":1}},{"token":7,"stream_id":2}]"#,
        r#"MSG [{"stream_id":2,"error":"stream_id is in use","code":"duplicate_stream"}]"#,
        r#"MSG {"stream_id":1,"model_info":{"model":"tiny"}}"#,
        r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["cancel",7]}}]"#,
        r#"TOKEN [{"token":7,"stream_id":2,"text":"a","usage":{"prompt_tokens":-1},"sample_end":"stop"}]"#,
        r#"MSG [{"stream_id":4,"cancelled":[2],"unknown":[]}]"#,
        r#"MSG [{"stream_id":3,"error":"'scored'"}]"#,
        "TOKEN [",
        "\0",
        "STATUS [{}]",
        "\0\u{1}\0",
        "\0\u{2}\0",
        r#"MSG [{"stream_id":4,"model_info":{},"lmtp":{"version":2,"features":["resume"],"session":"t"}}]"#,
        r#"MSG [{"stream_id":5,"resumed":[2],"gone":[3,7],"conflict":[]}]"#,
        r#"MSG [{"stream_id":5,"error":"gone","code":"stream_gone"}]"#,
        r#"MSG [{"stream_id":5,"model_info":{}}]"#,
        r#"TOKEN [{"token":1,"stream_id":2,"seq":0},{"token":1,"stream_id":3,"seq":0}]"#,
        r#"TOKEN [{"token":1,"stream_id":2,"seq":1}]"#,
    ];

    fn texts(of: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
        let lines = prop::collection::vec(prop::sample::select(of), 0..24);
        lines.prop_map(|lines| lines.join("\n").into_bytes())
    }

    proptest! {
        /// LM-101, LM-201: no input breaks a session.
        #[test]
        fn lm_501_any_bytes_leave_every_stream_ended_once(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            super::serve(&bytes);
            super::client(&bytes);
        }

        /// LM-405, LM-601: any interleaving of requests and steps, split in any way.
        #[test]
        fn lm_501_any_interleaving_ends_every_stream_exactly_once(cut in any::<u8>(), text in texts(SENT)) {
            let bytes: Vec<u8> = std::iter::once(cut).chain(text).collect();
            super::serve(&bytes);
        }

        /// Inputs close to valid messages, where interesting errors are.
        #[test]
        fn lm_501_messages_with_some_bytes_changed_end_every_stream_exactly_once(
            text in texts(SENT),
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

        /// LM-505, LM-506, LM-607: any order of client, engine, shell and timer events.
        #[test]
        fn lm_501_any_list_of_operations_leaves_nothing_behind(ops in prop::collection::vec(any::<u8>(), 0..400)) {
            super::ops(&ops);
        }

        /// LM-705, LM-706: any server messages.
        #[test]
        fn lm_709_any_answers_end_every_call_exactly_once(text in texts(RECEIVED)) {
            super::client(&text);
        }
    }
}
