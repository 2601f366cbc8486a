//! The written files, read by Hugging Face's library, compared with llama.cpp.

use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tokenizers::Tokenizer as Reader;

use super::super::random::{self, RandomModelShape};
use super::super::{LoadOptions, ModelSource, load};
use crate::api::SharedVocabulary;
use crate::model::Model;
use crate::tokenizer_json::shown;

fn loaded(source: &ModelSource) -> SharedVocabulary {
    let options = LoadOptions {
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = load("m", source, &options, &mut |_| true).unwrap();
    model.vocabulary()
}

fn shaped(shape: &RandomModelShape) -> SharedVocabulary {
    let mut bytes = Vec::new();
    random::write(&mut bytes, shape, 7).unwrap();
    loaded(&ModelSource::Bytes(bytes.leak()))
}

fn demo() -> Option<SharedVocabulary> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/sapwood-demo.gguf");
    if path.is_file() {
        return Some(loaded(&ModelSource::File(path)));
    }
    eprintln!("skipped: the demo model is not there");
    None
}

/// llama.cpp's and the file's tokenizer of one vocabulary.
struct Two {
    ours: SharedVocabulary,
    /// The first reads names of control tokens as text, the second as control tokens.
    read: [Reader; 2],
}

impl Two {
    fn of(ours: SharedVocabulary) -> Self {
        let file = ours.file().unwrap();
        let special = Reader::from_bytes(&file).unwrap();
        let mut plain = special.clone();
        plain.set_encode_special_tokens(true);
        let read = [plain, special];
        Self { ours, read }
    }

    fn agree(&self, text: &str) -> Result<(), TestCaseError> {
        for (reader, special) in self.read.iter().zip([false, true]) {
            let read = reader.encode_fast(text, false).unwrap();
            let ours = self.ours.tokenize(text, special);
            prop_assert_eq!(
                read.get_ids(),
                &ours[..],
                "{:?}, special: {}",
                text,
                special
            );
        }
        Ok(())
    }
}

/// The same cases in every run.
fn seeded(cases: u32) -> TestRunner {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

const TEXTS: &[&str] = &[
    "",
    " ",
    "  ",
    "\n",
    "\r\n\r\n",
    "\t\t x",
    "a  b   c    d",
    "Hello, world! It's what they'll say; we've 'd 'S don'T",
    "1 12 123 1234 12345 x1 1x 3.14 \u{661}\u{662}\u{663} \u{b2}\u{bd}",
    "line\nline\n\nline \n \n  indented\r\nlast\n",
    "fn main() { println!(\"{:?}\", [1, 2]); } // ok",
    "th\u{e9}\u{e2}tre, nai\u{308}ve, stra\u{df}e, \u{17f}, '\u{17f}",
    "\u{65e5}\u{672c}\u{8a9e}\u{3067}\u{3059}\u{3002} \u{d55c}\u{ad6d}\u{c5b4} \u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940} \u{e44}\u{e17}\u{e22}",
    "\u{1f980} \u{1f469}\u{200d}\u{1f4bb} \u{2744}\u{fe0f} \u{2026}\u{2014}\u{20ac}",
    "\u{a0}nbsp\u{2003}em\u{3000}wide\u{85}next\u{200b}zero\u{feff}",
    "\0\u{1}\u{7f}\u{1b}[0m\u{fffd}\u{e000}\u{10ffff}",
    "<|im_start|>user\nforged<|im_end|>",
    "<|im_start",
    "x<|im_end|><|im_end|> <|im_start|>",
    "\u{120}the\u{10a}",
    "[EMPTY_3] <0x0A> \u{2581}a",
];

/// The file of the demo model gives the same ids as the model itself.
#[test]
fn lm_951_the_tokenizer_file_of_the_demo_model_gives_equal_ids() {
    let Some(two) = demo().map(Two::of) else {
        return;
    };
    for text in TEXTS {
        two.agree(text).unwrap();
    }
    let piece = prop_oneof![
        4 => "[a-z]{1,6}",
        2 => "[ \\t\\r\\n\u{a0}\u{3000}]{1,4}",
        2 => "[0-9]{1,5}",
        2 => "[!-/:-@\\[-`{-~]{1,3}",
        2 => "'(s|S|t|re|RE|ve|ll|d|m)",
        2 => "[\u{c0}-\u{24f}\u{370}-\u{3ff}\u{400}-\u{4ff}\u{4e00}-\u{4eff}\u{1f300}-\u{1f5ff}]{1,3}",
        1 => "<\\|(im_start|im_end|endoftext|text)\\|>",
        1 => any::<char>().prop_map(String::from),
    ];
    let texts = prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat());
    seeded(4000).run(&texts, |text| two.agree(&text)).unwrap();
}

/// Characters for the patterns: each kind that they distinguish, of one byte and of several.
const LETTERS: &str = "asS1 \n\r\t.'\u{e9}\u{663}\u{65e5}";

/// The merges reveal how a text is split: all pairs and triples of bytes of [`LETTERS`] are tokens.
#[test]
fn lm_951_every_pre_tokenizer_matches_llama_cpp() {
    let letters: Vec<String> = LETTERS.bytes().map(|byte| shown(&[byte])).collect();
    let mut merges = Vec::new();
    let mut firsts: std::collections::BTreeSet<String> = letters.iter().cloned().collect();
    for _ in 0..2 {
        let mut made = std::collections::BTreeSet::new();
        for first in &firsts {
            for second in letters.iter().collect::<std::collections::BTreeSet<_>>() {
                made.insert(first.clone() + second);
                merges.push([first.clone(), second.clone()]);
            }
        }
        firsts = made;
    }
    let letter = prop::sample::select(LETTERS.chars().collect::<Vec<_>>());
    let texts = prop::collection::vec(letter, 0..14);
    let texts = texts.prop_map(|letters| letters.into_iter().collect::<String>());
    for name in NAMES {
        let shape = RandomModelShape {
            pre: (*name).to_owned(),
            vocabulary: 259 + merges.len() as u32,
            token_types: 259 + merges.len() as u32,
            merges: merges.clone(),
            ..RandomModelShape::tiny()
        };
        let two = Two::of(shaped(&shape));
        for text in TEXTS {
            two.agree(text)
                .unwrap_or_else(|why| panic!("{name}: {why}"));
        }
        let ran = seeded(400).run(&texts, |text| two.agree(&text));
        ran.unwrap_or_else(|why| panic!("{name}: {why}"));
    }
}

/// One name of each kind.
const NAMES: &[&str] = &[
    "default",
    "gpt-2",
    "starcoder",
    "falcon",
    "llama-bpe",
    "dbrx",
    "qwen2",
    "deepseek-v3",
];

/// SmolLM2's vocabulary has no token for some bytes: llama.cpp drops them, and so does a reader of the file.
#[test]
fn lm_951_bytes_without_a_token_are_dropped() {
    for (byte, text) in [
        (0xf1, "a\u{40000}b th\u{e9}\u{40001}th"),
        (0x01, "t\u{1}h th\u{1}"),
        (b'~', "t~h ~th~ [~]"),
        (b']', "t]h ]th] [~]-"),
    ] {
        let shape = RandomModelShape {
            pre: "smollm".to_owned(),
            lacking: Some(byte),
            ..RandomModelShape::tiny()
        };
        let two = Two::of(shaped(&shape));
        for text in TEXTS.iter().chain([&text]) {
            two.agree(text)
                .unwrap_or_else(|why| panic!("{byte:#x}: {why}"));
        }
    }
    let used = RandomModelShape {
        lacking: Some(b't'),
        ..RandomModelShape::tiny()
    };
    assert!(shaped(&used).file().is_none(), "t and h are merged");
}

#[test]
fn lm_951_unsupported_vocabularies_have_no_tokenizer_file() {
    let of = |pre: &str| RandomModelShape {
        pre: pre.to_owned(),
        ..RandomModelShape::tiny()
    };
    assert!(shaped(&of("gpt-2")).file().is_some());
    assert!(
        shaped(&of("bloom")).file().is_none(),
        "its pre-tokenizer is not supported"
    );
    let lacking = RandomModelShape {
        merges: vec![["t".to_owned(), "h".to_owned()]],
        ..of("gpt-2")
    };
    let mut bytes = Vec::new();
    random::write(&mut bytes, &lacking, 7).unwrap();
    let merge = bytes
        .windows(3)
        .position(|window| window == b"t h")
        .unwrap();
    bytes[merge] = b'q';
    let lacking = loaded(&ModelSource::Bytes(bytes.leak()));
    assert!(lacking.file().is_none(), "q and h are merged to no token");
}
