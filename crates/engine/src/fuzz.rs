//! Fuzz entry points: arbitrary bytes as a GGUF header, as a chat template and as a constraint.
//!
//! Invariants: a header is parsed alike however its bytes are split into reads, and a rendering stays within its
//! limits. Built for tests and fuzzing only.

use std::io::{self, Read};
use std::time::UNIX_EPOCH;

use crate::api::{ChatMessage, ChatRequest};
use crate::gguf::GgufHeader;
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

/// Renders the text before the first NUL byte as a template, with the rest as the content of its messages.
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
    let message = |role: &str| ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..ChatMessage::default()
    };
    for continue_last in [false, true] {
        let chat = ChatRequest {
            messages: ["system", "user", "assistant"].map(message).into(),
            continue_last,
            ..ChatRequest::default()
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
