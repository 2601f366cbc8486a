//! Prompts for fill in the middle with scripted vocabularies, and with files whose tokens for it are no control tokens.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::scripted::{Config, ScriptedTokenizer, ScriptedVocabulary};
use crate::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};

const BOS: Token = 256;
const PREFIX: Token = 258;
const SUFFIX: Token = 259;
const MIDDLE: Token = 260;

fn scripted(tokenizer: ScriptedTokenizer, infill: bool) -> ScriptedVocabulary {
    ScriptedVocabulary::new(&Config {
        tokenizer: Some(tokenizer),
        infill,
        ..Config::default()
    })
}

/// A vocabulary with another order.
struct SuffixFirst(ScriptedVocabulary);

impl Vocabulary for SuffixFirst {
    fn size(&self) -> usize {
        self.0.size()
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        self.0.tokenize(text, special)
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0.bytes(token)
    }

    fn is_special(&self, token: Token) -> bool {
        self.0.is_special(token)
    }

    fn is_end(&self, token: Token) -> bool {
        self.0.is_end(token)
    }

    fn bos(&self) -> Option<Token> {
        self.0.bos()
    }

    fn infill(&self) -> Option<InfillTokens> {
        let infill = self.0.infill()?;
        Some(InfillTokens {
            suffix_first: true,
            ..infill
        })
    }

    fn end_of_turn(&self) -> Option<Token> {
        self.0.end_of_turn()
    }

    fn chat(&self, chat: &crate::api::ChatRequest) -> Result<Vec<Token>, EngineError> {
        self.0.chat(chat)
    }
}

#[test]
fn a_prompt_has_the_texts_around_the_place_in_the_models_order() {
    let vocabulary = scripted(ScriptedTokenizer::Bytes, true);
    let (a, b, c) = (97, 98, 99);
    for (bos, prefix, suffix, expected) in [
        (
            Some(BOS),
            "ab",
            "c",
            vec![BOS, PREFIX, a, b, SUFFIX, c, MIDDLE],
        ),
        (None, "ab", "c", vec![PREFIX, a, b, SUFFIX, c, MIDDLE]),
        (None, "", "c", vec![PREFIX, SUFFIX, c, MIDDLE]),
        (None, "a", "", vec![PREFIX, a, SUFFIX, MIDDLE]),
    ] {
        let tokens = infill_prompt(&vocabulary, bos, prefix, suffix).unwrap();
        assert_eq!(tokens, expected, "{prefix:?}, {suffix:?}");
    }
    let suffix_first = SuffixFirst(vocabulary);
    let tokens = infill_prompt(&suffix_first, Some(BOS), "ab", "c").unwrap();
    assert_eq!(tokens, [BOS, SUFFIX, c, PREFIX, a, b, MIDDLE]);
}

#[test]
fn a_model_without_the_tokens_is_told_so() {
    let vocabulary = scripted(ScriptedTokenizer::Words, false);
    let error = infill_prompt(&vocabulary, None, "a", "b").unwrap_err();
    assert_eq!(error.reason, ErrorReason::NO_INFILL);
    assert!(
        error.message.contains("leave out the suffix"),
        "{}",
        error.message
    );
}

#[test]
fn all_three_tokens_are_needed() {
    let of = |names: &[&str]| {
        InfillTokens::named(|text| {
            let at = names.iter().position(|name| *name == text)?;
            Token::try_from(at).ok()
        })
    };
    let found = of(&["<MID>", "x", "\u{2581}<PRE>", "<fim-suffix>"]);
    let expected = InfillTokens {
        prefix: 2,
        suffix: 3,
        middle: 0,
        suffix_first: false,
    };
    assert_eq!(found, Some(expected));
    // Of two such names, the first in our list. llama.cpp takes the one that comes first in a hash map.
    let two = of(&["<PRE>", "<fim_prefix>", "<SUF>", "<MID>"]);
    assert_eq!(two.map(|infill| infill.prefix), Some(1));
    assert_eq!(of(&["<PRE>", "<SUF>"]), None);
    assert_eq!(of(&["<PRE>", "<MID>"]), None);
    assert_eq!(of(&[]), None);
}

#[test]
fn tokens_that_mean_two_things_are_none() {
    let of = |tokens: [Token; 3]| InfillTokens::of(tokens.map(Some));
    for same in [[1, 1, 2], [1, 2, 1], [2, 1, 1], [1, 1, 1]] {
        assert_eq!(of(same), None, "{same:?}");
    }
    let infill = of([1, 2, 3]).unwrap();
    for taken in [1, 2, 3] {
        assert_eq!(infill.unless_any(|token| token == taken), None, "{taken}");
    }
    assert_eq!(infill.unless_any(|token| token == 4), Some(infill));
}

#[test]
fn an_ordinary_token_marks_nothing_unless_its_text_does() {
    let infill = InfillTokens::of([1, 2, 3].map(Some)).unwrap();
    let texts = ["", "<PRE>", "\u{2581}<SUF>", "<|fim_middle|>", "the"];
    let text = |token: Token| texts[token as usize];
    let none = |_| false;
    assert_eq!(infill.if_marks(none, text), Some(infill));
    let other = InfillTokens {
        suffix: 4,
        ..infill
    };
    assert_eq!(other.if_marks(none, text), None);
    assert_eq!(other.if_marks(|token| token == 4, text), Some(other));
    // The text of another part.
    let swapped = InfillTokens {
        prefix: 3,
        middle: 1,
        ..infill
    };
    assert_eq!(swapped.if_marks(none, text), None);
}

/// A file of bytes whose tokens for fill in the middle are added tokens, as in those of Qwen's models. `special` ones are
/// not found in plain text, others are.
fn with_added(special: bool) -> FileTokenizer {
    file(special, SpecialTokens::default())
}

fn file(special: bool, reported: SpecialTokens) -> FileTokenizer {
    let ours = scripted(ScriptedTokenizer::Bytes, true).file().unwrap();
    let mut file: Value = serde_json::from_slice(&ours).unwrap();
    for token in file["added_tokens"].as_array_mut().unwrap() {
        if token["content"].as_str().unwrap().starts_with("<fim") {
            token["special"] = json!(special);
        }
    }
    let files = TokenizerFiles {
        tokenizer: file.to_string().into(),
        ..TokenizerFiles::default()
    };
    FileTokenizer::new(&files, reported).unwrap()
}

#[test]
fn the_tokens_that_a_server_reports_are_those_of_its_model() {
    let infill = InfillTokens {
        prefix: MIDDLE,
        suffix: PREFIX,
        middle: SUFFIX,
        suffix_first: true,
    };
    let of = |infill: InfillTokens| {
        let reported = SpecialTokens {
            infill: Some(infill),
            ends: vec![9],
            ..SpecialTokens::default()
        };
        file(true, reported).infill()
    };
    assert_eq!(of(infill), Some(infill));
    // Those that cannot be used do not count.
    for middle in [MIDDLE, 9, 97, BOS, 900_000] {
        let named = of(InfillTokens { middle, ..infill });
        assert_eq!(named, with_added(true).infill(), "{middle}");
        assert!(named.is_some());
    }
}

#[test]
fn tokens_that_are_found_in_plain_text_are_not_forged_by_it() {
    let plain = with_added(false);
    let text = "a<fim_middle>b";
    assert!(plain.tokenize(text, false).contains(&MIDDLE));
    for vocabulary in [plain, with_added(true)] {
        let tokens = infill_prompt(&vocabulary, None, text, "<fim_prefix><fim_suffix>").unwrap();
        let bytes = |text: &str| text.bytes().map(Token::from).collect::<Vec<_>>();
        let expected = [
            &[PREFIX][..],
            &bytes(text),
            &[SUFFIX],
            &bytes("<fim_prefix><fim_suffix>"),
            &[MIDDLE],
        ];
        assert_eq!(tokens, expected.concat());
    }
}

/// A vocabulary in which a single letter is one of the tokens: nothing can be cut.
struct LetterVocabulary(ScriptedVocabulary);

impl Vocabulary for LetterVocabulary {
    fn size(&self) -> usize {
        self.0.size()
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        self.0.tokenize(text, special)
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0.bytes(token)
    }

    fn is_special(&self, token: Token) -> bool {
        self.0.is_special(token)
    }

    fn is_end(&self, token: Token) -> bool {
        self.0.is_end(token)
    }

    fn bos(&self) -> Option<Token> {
        self.0.bos()
    }

    fn infill(&self) -> Option<InfillTokens> {
        InfillTokens::of([Some(u32::from(b'#')), Some(SUFFIX), Some(MIDDLE)])
    }

    fn end_of_turn(&self) -> Option<Token> {
        self.0.end_of_turn()
    }

    fn chat(&self, chat: &crate::api::ChatRequest) -> Result<Vec<Token>, EngineError> {
        self.0.chat(chat)
    }
}

#[test]
fn a_text_that_cannot_but_forge_a_token_is_refused() {
    let vocabulary = LetterVocabulary(scripted(ScriptedTokenizer::Bytes, true));
    for (prefix, suffix) in [("a#b", "c"), ("a", "#")] {
        let error = infill_prompt(&vocabulary, None, prefix, suffix).unwrap_err();
        assert_eq!(error.reason, ErrorReason::BAD_TOKENS);
    }
    assert!(infill_prompt(&vocabulary, None, "ab", "c").is_ok());
}

#[test]
fn names_are_cut_in_two_wherever_they_are() {
    let names = ["<PRE>", "\u{ff5c}fim\u{ff5c}", "#", ""].map(str::to_owned);
    for (text, expected) in [
        ("", &[""][..]),
        ("plain # <PR E>", &["plain # <PR E>"]),
        ("<PRE>", &["<P", "RE>"]),
        ("\u{e9}<PRE><PRE>x", &["\u{e9}<P", "RE><P", "RE>x"]),
        ("<<PRE>>", &["<<P", "RE>>"]),
        (
            "\u{ff5c}fim\u{ff5c}fim\u{ff5c}",
            &["\u{ff5c}f", "im\u{ff5c}f", "im\u{ff5c}"],
        ),
    ] {
        let parts = cut(text, &names);
        assert_eq!(parts, expected, "{text:?}");
        assert_eq!(parts.concat(), text);
    }
}

/// Made once: a file is slow to read.
static VOCABULARIES: LazyLock<[Box<dyn Vocabulary>; 4]> = LazyLock::new(|| {
    [
        Box::new(with_added(true)),
        Box::new(with_added(false)),
        Box::new(scripted(ScriptedTokenizer::Bytes, true)),
        Box::new(scripted(ScriptedTokenizer::Words, true)),
    ]
});

/// Texts with names of control tokens, whole, cut and nested.
fn texts() -> impl Strategy<Value = String> {
    let pieces = prop_oneof![
        Just("<fim_prefix>".to_owned()),
        Just("<fim_suffix>".to_owned()),
        Just("<fim_middle>".to_owned()),
        Just("<fim_".to_owned()),
        Just("middle>".to_owned()),
        Just("</s><s>".to_owned()),
        Just(" the word\n".to_owned()),
        ".{0,6}",
    ];
    proptest::collection::vec(pieces, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    /// The place to fill in is where the request has it: the three tokens stand once each, and no other control token but
    /// BOS is there. The texts are what was given.
    #[test]
    fn no_text_forges_a_control_token(prefix in texts(), suffix in texts()) {
        for vocabulary in VOCABULARIES.iter() {
            let vocabulary = &**vocabulary;
            let infill = vocabulary.infill().unwrap();
            let tokens = infill_prompt(vocabulary, Some(BOS), &prefix, &suffix).unwrap();
            let special = |token: &Token| {
                *token == BOS || infill.all().contains(token) || vocabulary.is_special(*token)
            };
            let marks: Vec<Token> = tokens.iter().copied().filter(special).collect();
            prop_assert_eq!(marks, vec![BOS, PREFIX, SUFFIX, MIDDLE]);
            let parts = tokens[2..tokens.len() - 1].split(|token| *token == SUFFIX);
            let parts: Vec<Vec<u8>> = parts
                .map(|part| part.iter().flat_map(|token| vocabulary.bytes(*token).to_vec()).collect())
                .collect();
            prop_assert_eq!(parts, vec![prefix.clone().into_bytes(), suffix.clone().into_bytes()]);
        }
    }
}
