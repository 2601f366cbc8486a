//! Tests of the server's state machine against the rules.

mod cancel;
mod detached;
mod flow;
mod loading;
mod negotiation;
mod resume;
mod samples;
mod steered;
mod streams;
mod text;
mod transcripts;
mod window;

use std::sync::Arc;

use bytestring::ByteString;

use super::fuzz::FuzzModels;
use super::*;
use crate::time::Time;

/// A session with a shell that records its outputs.
pub(super) struct Server {
    pub(super) session: LmtpSession,
    pub(super) started: Vec<StreamStart>,
    pub(super) outputs: Vec<LmtpOutput>,
    pub(super) now: Time,
}

impl Server {
    pub(super) fn new() -> Self {
        Self::with(Config::default())
    }

    pub(super) fn lines() -> Self {
        Self::with(Config {
            carrier: MessageFraming::Lines,
            ..Config::default()
        })
    }

    pub(super) fn limited(limits: ConnectionLimits) -> Self {
        Self::with(Config {
            limits: Arc::new(limits),
            ..Config::default()
        })
    }

    pub(super) fn with(config: Config) -> Self {
        Self {
            session: LmtpSession::new(config),
            started: Vec::new(),
            outputs: Vec::new(),
            now: Time::ZERO,
        }
    }

    /// Sends a message; returns the part for which there was no room.
    pub(super) fn send(&mut self, text: &str) -> Option<ByteString> {
        let rest = self.session.handle(text.into(), &FuzzModels, self.now);
        self.poll();
        rest
    }

    /// Takes all messages.
    pub(super) fn received(&mut self) -> Vec<String> {
        let mut incoming = Vec::new();
        while let Some(message) = self.session.next_message(self.now) {
            incoming.push(String::from_utf8(message.to_vec()).unwrap());
        }
        assert!(!self.session.has_message());
        self.poll();
        incoming
    }

    /// The answer to one message.
    pub(super) fn ask(&mut self, text: &str) -> String {
        assert_eq!(self.send(text), None);
        self.received().join("\n")
    }

    /// The only items of one step.
    pub(super) fn step(&mut self, pieces: Vec<(StreamKey, StreamPiece)>) -> Vec<String> {
        self.session.step(pieces, self.now);
        self.poll();
        self.received()
    }

    /// Opens a stream that must be accepted.
    pub(super) fn open(&mut self, text: &str) -> StreamKey {
        let before = self.started.len();
        assert_eq!(self.ask(text), "");
        assert_eq!(self.started.len(), before + 1);
        self.started[before].stream
    }

    pub(super) fn poll(&mut self) {
        while let Some(output) = self.session.poll() {
            match output {
                LmtpOutput::Start(start) => self.started.push(*start),
                LmtpOutput::Name => self.session.named(Some("s_1".into())),
                other => self.outputs.push(other),
            }
        }
    }

    /// A server with which these features were negotiated.
    pub(super) fn agreed(features: &str) -> Self {
        let mut server = Self::new();
        let answer = server.ask(&format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"tiny","data":{{"lmtp":{{"version":2,"features":{features}}}}}}}"#
        ));
        assert!(answer.contains(r#""lmtp":{"version":2"#), "{answer}");
        server
    }

    /// The outputs other than `Start`, in short.
    pub(super) fn outputs(&mut self) -> Vec<String> {
        let outputs = std::mem::take(&mut self.outputs);
        let short = outputs.into_iter().map(|output| match output {
            LmtpOutput::Cancel(stream) => format!("cancel {}", stream.0),
            LmtpOutput::ParkStream(stream) => format!("park {}", stream.0),
            LmtpOutput::UnparkStream(stream) => format!("unpark {}", stream.0),
            LmtpOutput::Resume(name) => format!("resume {name}"),
            LmtpOutput::Close(close) => format!("close {}", close.code),
            other => format!("{other:?}").to_lowercase(),
        });
        short.collect()
    }
}

pub(super) fn item(token: u32, logprob: f32, finish: Option<StreamFinish>) -> TokenItem {
    TokenItem {
        token,
        logprob,
        top: vec![(token, logprob)],
        finish,
        ..TokenItem::default()
    }
}

/// What follows the first of these names in a message, up to its end.
pub(super) fn after<'a>(message: &'a str, name: &str) -> &'a str {
    let rest = message.split_once(name);
    rest.unwrap_or_else(|| panic!("no {name} in {message}")).1
}

pub(super) fn piece(token: u32) -> StreamPiece {
    StreamPiece::Item(item(token, -0.5, None))
}
