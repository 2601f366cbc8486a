//! Fuzz entry points: arbitrary bytes as a GGUF header, as a chat template and as a constraint.
//!
//! Invariants: a header is parsed alike however its bytes are split into reads, and a rendering stays within its
//! limits, those of a thread's stack among them. Built for tests and fuzzing only.

use std::io::{self, Read};
use std::thread;
use std::time::UNIX_EPOCH;

use serde_json::{Value, json};

use crate::api::{ChatMessage, ChatRequest};
use crate::gguf::{GgufHeader, checks};
use crate::template::{SpecialTexts, Template, TemplatePiece};

#[cfg(feature = "constraints")]
pub use crate::constraint::fuzz::constraint;

/// Parses `bytes` as the header of a GGUF file.
///
/// # Panics
/// If an invariant does not hold.
pub fn gguf(bytes: &[u8]) {
    let reported = |header: GgufHeader| {
        let key = "tokenizer.ggml.tokens";
        let tokens = (header.length(key), header.array(key));
        let name = header.text("general.architecture").map(str::to_owned);
        let alignment = header.number("general.alignment");
        let merges = header.merges().to_vec();
        let sizes = (header.tensor_bytes, header.file_bytes);
        (sizes, tokens, name, alignment, merges)
    };
    let whole = GgufHeader::read(bytes)
        .map(reported)
        .map_err(|it| it.to_string());
    let slow = GgufHeader::read(OneByOne(bytes)).map(reported);
    let slow = slow.map_err(|it| it.to_string());
    assert_eq!(whole, slow, "the split into reads changed the result");
    if let Ok((header, tokens)) = GgufHeader::read_vocabulary(bytes) {
        let length = header.length("tokenizer.ggml.tokens").unwrap_or(0);
        assert_eq!(
            length,
            tokens.texts.len() as u64,
            "not every token was kept"
        );
        #[cfg(any(feature = "embedded", feature = "tokenizer", fuzzing))]
        write_tokenizer(&header, &tokens);
    }
    if let Ok(header) = GgufHeader::read(bytes) {
        // Either way; what it refuses is for llama.cpp to know.
        let _ = checks::check(&header);
    }
}

/// Writes the `tokenizer.json` of a vocabulary.
#[cfg(any(feature = "embedded", feature = "tokenizer", fuzzing))]
fn write_tokenizer(header: &GgufHeader, tokens: &crate::gguf::TokenList) {
    use crate::byte_pairs::{self, PairTokens};
    let texts = tokens.texts.iter();
    let texts = texts.map(|text| String::from_utf8_lossy(text).into_owned());
    let written = byte_pairs::file(header, || PairTokens {
        texts: texts.collect(),
        added: Vec::new(),
        bos: None,
    });
    if let Ok(file) = written {
        let read = serde_json::from_slice::<serde::de::IgnoredAny>(&file);
        assert!(read.is_ok(), "it is not JSON: {read:?}");
    }
}

/// A reader that returns one byte per call.
struct OneByOne<'a>(&'a [u8]);

impl Read for OneByOne<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(1);
        self.0.read(&mut into[..most])
    }
}

/// The maximum of bytes that a rendering may yield, with the marks around covered texts.
const RENDERED_BYTES_MAX: usize = 17 << 20;

/// The stack of a thread that renders: tokio's workers, on which a server does, have as much.
const STACK_BYTES: usize = 2 << 20;

/// Renders the text before the first NUL byte as a template, with the rest as the content of its messages; as the arguments of calls
/// and of the template too, if it is JSON.
///
/// # Panics
/// If an invariant does not hold.
pub fn template(bytes: &[u8]) {
    let at = bytes.iter().position(|byte| *byte == 0);
    let (source, content) = bytes.split_at(at.unwrap_or(bytes.len()));
    let (Ok(source), Ok(content)) = (std::str::from_utf8(source), std::str::from_utf8(content))
    else {
        return;
    };
    // The thread that fuzzes has more stack, and would not show a recursion that is too deep.
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        let rendering = thread.spawn_scoped(scope, || render(source, content));
        let rendered = rendering.expect("there are few threads").join();
        rendered.expect("no invariant is broken");
    });
}

fn render(source: &str, content: &str) {
    let special = SpecialTexts {
        bos: "<s>".to_owned(),
        end: "</s>".to_owned(),
        all: ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
            .map(str::to_owned)
            .into(),
    };
    let Ok(template) = Template::new(source, &special, || UNIX_EPOCH) else {
        return;
    };
    for continue_last in [false, true] {
        for chat in [plain_chat(content), calling_chat(content)] {
            let chat = ChatRequest {
                continue_last,
                ..chat
            };
            let Ok(pieces) = template.render(&chat) else {
                continue;
            };
            let len = |piece: &TemplatePiece| match piece {
                TemplatePiece::Template(text) | TemplatePiece::Plain(text) => text.len(),
            };
            let rendered: usize = pieces.iter().map(len).sum();
            assert!(rendered <= RENDERED_BYTES_MAX, "{rendered} bytes");
        }
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..ChatMessage::default()
    }
}

fn plain_chat(content: &str) -> ChatRequest {
    ChatRequest {
        messages: ["system", "user", "assistant"]
            .map(|role| message(role, content))
            .into(),
        ..ChatRequest::default()
    }
}

/// A conversation with tools, of which one is called after some reasoning, and arguments of the template.
fn calling_chat(content: &str) -> ChatRequest {
    let given = content.trim_start_matches('\0');
    let value = serde_json::from_str(given).unwrap_or_else(|_| Value::from(given));
    let call = json!({
        "id": "call", "type": "function", "function": {"name": "look", "arguments": {"value": value}}
    });
    let tool = json!({
        "type": "function",
        "function": {"name": "look", "description": given, "parameters": value}
    });
    let calling = ChatMessage {
        reasoning: Some(content.to_owned()),
        tool_calls: json!([call]),
        ..message("assistant", "")
    };
    let result = ChatMessage {
        name: Some("look".to_owned()),
        tool_call_id: Some("call".to_owned()),
        ..message("tool", content)
    };
    let messages = vec![
        message("user", content),
        calling,
        result,
        message("assistant", content),
    ];
    ChatRequest {
        messages,
        tools: json!([tool]),
        template_args: match value {
            Value::Object(_) => value,
            _ => json!({"enable_thinking": true, "value": value}),
        },
        ..ChatRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn replay(target: &str, run: fn(&[u8])) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
        let files = std::fs::read_dir(format!("{folder}{target}")).expect("a committed corpus");
        let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty());
        for file in files {
            run(&std::fs::read(file).unwrap());
        }
    }

    #[test]
    fn the_corpus_is_replayed() {
        replay("gguf_header", super::gguf);
        replay("chat_template", super::template);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            super::gguf(&bytes);
            super::gguf(&[b"GGUF\x03\0\0\0", &bytes[..]].concat());
        }

        #[test]
        fn any_template_renders_or_is_refused(text in "([{}%\\-# a-z0-9.'|()\\[\\]+=*~]|for |message|content|endfor|if |set |macro ){0,40}") {
            super::template(text.as_bytes());
        }
    }
}
