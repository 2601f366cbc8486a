//! Writes `tokenizer.json` files, in the format of Hugging Face's `tokenizers`.

use std::sync::LazyLock;

use bytes::Bytes;
use sapwood_proto::steer::Token;
use serde_json::{Map, Value, json};

/// A byte-level vocabulary.
///
/// A reader of the file tokenises a text as this vocabulary does without special tokens: the names of special tokens
/// become those tokens only if the reader requests it, and the BOS token is added only if the reader requests it.
#[derive(Debug, Default)]
pub(crate) struct ByteLevel {
    /// The tokens in the order of their ids: encoded as by [`shown`], those of `added` as they are.
    pub(crate) tokens: Vec<String>,
    /// The added tokens, which are found in a text before it is split.
    pub(crate) added: Vec<AddedToken>,
    /// The pre-tokenizer's patterns. The first splits the text into its matches and the parts between them; each of
    /// these pieces is split by the second, and so on.
    pub(crate) patterns: Vec<&'static str>,
    /// Merges: pairs of tokens within a piece that become one, highest priority first; a space separates the two.
    pub(crate) merges: Vec<String>,
    /// The characters of bytes that have no token: they are dropped from a text, and nothing is merged across them.
    pub(crate) lacking: Vec<char>,
    /// A piece that is a token becomes that token, without merges.
    pub(crate) whole_pieces: bool,
    /// The BOS token that the model wants before a text.
    pub(crate) bos: Option<Token>,
}

/// A token that is found in a text before it is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddedToken {
    pub(crate) token: Token,
    /// It is found only if control tokens are requested.
    pub(crate) control: bool,
    /// It includes the white space before it.
    pub(crate) takes_left: bool,
    /// It includes the white space after it.
    pub(crate) takes_right: bool,
}

impl ByteLevel {
    /// Returns the bytes of the file.
    pub(crate) fn file(self) -> Bytes {
        // `Isolated`: the matches and the parts between them are pieces, as in llama.cpp.
        let split = |pattern: &&str| {
            json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
            })
        };
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
        });
        let mut steps: Vec<Value> = self.patterns.iter().map(split).collect();
        // After the patterns, which are written for text and not for byte-level characters.
        steps.push(bytes.clone());
        if !self.lacking.is_empty() {
            // After the byte-level step: readers drop characters without a token too, but merge across them.
            let any: String = self
                .lacking
                .iter()
                .map(|shown| regex::escape(&shown.to_string()))
                .collect();
            steps.push(json!({
                "type": "Split", "pattern": {"Regex": format!("[{any}]")}, "behavior": "Removed", "invert": false,
            }));
        }
        let added: Vec<Value> = self.added.iter().map(|added| self.added(added)).collect();
        // Before `self.tokens` is moved below.
        let bos = self.bos();
        let tokens = self.tokens.into_iter().zip(0_u32..);
        let tokens: Map<String, Value> = tokens.map(|(text, id)| (text, json!(id))).collect();
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": bos, "decoder": bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": self.whole_pieces, "vocab": tokens, "merges": self.merges,
            },
        });
        file.to_string().into()
    }

    fn text(&self, token: Token) -> &str {
        self.tokens.get(token as usize).map_or("", String::as_str)
    }

    fn added(&self, added: &AddedToken) -> Value {
        json!({
            "id": added.token, "content": self.text(added.token), "single_word": false,
            "lstrip": added.takes_left, "rstrip": added.takes_right, "normalized": false,
            "special": added.control,
        })
    }

    /// Returns the post-processor that adds the BOS token.
    fn bos(&self) -> Option<Value> {
        let token = self.bos?;
        let text = self.text(token);
        let begun = |kind: u8| json!({"SpecialToken": {"id": text, "type_id": kind}});
        let text_of = |name: &str, kind: u8| json!({"Sequence": {"id": name, "type_id": kind}});
        Some(json!({
            "type": "TemplateProcessing",
            "single": [begun(0), text_of("A", 0)],
            "pair": [begun(0), text_of("A", 0), begun(1), text_of("B", 1)],
            "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
        }))
    }
}

/// Returns the byte-level characters of these bytes.
pub(crate) fn shown(bytes: &[u8]) -> String {
    static ALPHABET: LazyLock<Vec<char>> = LazyLock::new(|| alphabet().collect());
    bytes.iter().map(|&byte| ALPHABET[byte as usize]).collect()
}

/// Returns the character of each byte: printable ones are themselves, the others are characters from U+0100 on.
pub(crate) fn alphabet() -> impl Iterator<Item = char> {
    let mut moved = 256..;
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        // There are too few of them to run out of characters.
        _ => moved.next().and_then(char::from_u32).unwrap_or_default(),
    })
}
