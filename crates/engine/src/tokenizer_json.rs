//! Writes `tokenizer.json` files, in the format of Hugging Face's `tokenizers`.

use std::sync::LazyLock;

use bytes::Bytes;
use sapwood_proto::steer::Token;
use serde_json::{Map, Value, json};

/// A vocabulary whose tokens are made of bytes.
///
/// A reader of the file gets the tokens of a text as they are here without special tokens: those stand for their names only where
/// the reader wants them to, and what begins a text is put there only where the reader asks for such.
#[derive(Debug, Default)]
pub(crate) struct ByteLevel {
    /// The tokens in the order of their ids: as [`shown`] writes them, and those of `added` as they are.
    pub(crate) tokens: Vec<String>,
    /// The tokens that are found in a text before it is split.
    pub(crate) added: Vec<AddedToken>,
    /// Matches of the first of these are pieces of the text, and so is what is between them; these pieces are split by the
    /// second, and so on.
    pub(crate) patterns: Vec<&'static str>,
    /// Pairs of tokens within a piece that become one, the most urgent first; a space is between the two.
    pub(crate) merges: Vec<String>,
    /// What bytes are shown as that have no token: they are left out of a text, and nothing is merged across them.
    pub(crate) lacking: Vec<char>,
    /// A piece that is a token is that token, whatever would be merged.
    pub(crate) whole_pieces: bool,
    /// What the model wants before a text.
    pub(crate) bos: Option<Token>,
}

/// A token that is found in a text before it is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddedToken {
    pub(crate) token: Token,
    /// It is found only where control tokens are wanted.
    pub(crate) control: bool,
    /// The white space before it belongs to it.
    pub(crate) takes_left: bool,
    /// The white space behind it belongs to it.
    pub(crate) takes_right: bool,
}

impl ByteLevel {
    /// The bytes of the file.
    pub(crate) fn file(self) -> Bytes {
        let split = |pattern: &&str| {
            json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
            })
        };
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
        });
        let mut steps: Vec<Value> = self.patterns.iter().map(split).collect();
        steps.push(bytes.clone());
        if !self.lacking.is_empty() {
            // Behind the step that shows bytes: readers drop what is no token too, but merge across it.
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

    /// What puts the beginning before a text.
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

/// How these bytes are shown.
pub(crate) fn shown(bytes: &[u8]) -> String {
    static ALPHABET: LazyLock<Vec<char>> = LazyLock::new(|| alphabet().collect());
    bytes.iter().map(|&byte| ALPHABET[byte as usize]).collect()
}

/// How each byte is shown: those that print as themselves, the others as characters from 256 on.
pub(crate) fn alphabet() -> impl Iterator<Item = char> {
    let mut moved = 256..;
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        // There are fewer of them than would leave the characters.
        _ => moved.next().and_then(char::from_u32).unwrap_or_default(),
    })
}
