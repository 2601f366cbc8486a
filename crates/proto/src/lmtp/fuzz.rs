//! Fuzz entry points: arbitrary bytes and lists of operations for both state machines.
//!
//! Invariants for every input: every message is one line with a list in strict JSON, every accepted stream ends exactly
//! once, splitting the bytes differently changes nothing, and a client's call ends exactly once. Built for tests and
//! fuzzing only.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytestring::ByteString;
use serde_json::Value;

use super::{
    ClientEvent, ClientMachine, ClientTimeouts, Feature, Features, GenerateRequest, LineSplitter,
    LmtpError, LmtpModelInfo, LmtpReason, Load, MessageFraming, ModelLookup, Score, TextCodec,
    TokenizerInfo,
};
use crate::params::GenerationParams;
use crate::steer::Token;
use crate::time::Time;

mod server;

use server::FuzzedServer;

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

/// Small, so that a fuzzer finds lines that are too long.
const LINE_BYTES: usize = 512;

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
        let mut server = FuzzedServer::new(MessageFraming::Frames);
        server.receive_text(ByteString::from(text));
        server.close();
    }
}

fn lines(bytes: &[u8], cut: usize) -> Vec<String> {
    let mut server = FuzzedServer::new(MessageFraming::Lines);
    let mut lines = LineSplitter::new(LINE_BYTES);
    for piece in bytes.chunks(cut) {
        lines.push(piece);
        while let Some(line) = lines.next_line() {
            server.client(line);
        }
    }
    if let Some(line) = lines.last_line() {
        server.client(line);
    }
    server.close();
    server.sent
}

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
    let mut server = FuzzedServer::new(carrier);
    while let Some(op) = input.next() {
        server.operate(op, input.next().unwrap_or(0));
        server.poll();
        server.check_streams();
    }
    server.close();
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
