//! The session of a server, run by lists of operations: what the engine and the connection would do, and what must hold after each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytestring::ByteString;
use serde_json::Value;
use serde_json::value::RawValue;

use super::super::{
    BranchEvent, Config, ConnectionLimits, LmtpClose, LmtpError, LmtpOutput, LmtpReason,
    LmtpSession, MessageFraming, StreamDemand, StreamFinish, StreamKey, StreamPiece, StreamUpdate,
    TokenItem, Unreadable, WireLine,
};
use super::FuzzModels;
use crate::time::Time;

const OUTBOX_BYTES: usize = 600;
/// Bytes that one client message, or one step of three streams, may add to a full outbox, end items included.
const ROOM_BYTES: usize = 2_000;

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
pub(super) struct FuzzedServer {
    session: LmtpSession,
    carrier: MessageFraming,
    running: Vec<(StreamKey, StreamDemand)>,
    /// Accepted ids as JSON, with the number of ends not received yet: an id may be reused before that.
    open: BTreeMap<String, usize>,
    /// Streams that ended before the shell looked, or whose id it does not know: their first item shows it.
    brief: usize,
    pub(super) sent: Vec<String>,
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

impl FuzzedServer {
    pub(super) fn new(carrier: MessageFraming) -> Self {
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

    pub(super) fn operate(&mut self, op: u8, with: u8) {
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

    pub(super) fn client(&mut self, line: WireLine) {
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

    pub(super) fn receive_text(&mut self, text: ByteString) {
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

    pub(super) fn close(&mut self) {
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
    pub(super) fn check_streams(&self) {
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
    pub(super) fn poll(&mut self) -> bool {
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
