//! Vocabularies that are read from the header alone, compared with those of llama.cpp (AI-102).

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use super::*;
use crate::api::SharedVocabulary;
use crate::gguf_vocabulary::GgufVocabulary;
use crate::model::Model as _;

/// Compares every token, and texts if the header says how they are tokenised.
fn compare(read: &GgufVocabulary, model: &SharedVocabulary, what: &str) {
    assert_eq!(read.size(), model.size(), "{what}");
    assert_eq!(read.bos(), model.bos(), "{what}");
    assert_eq!(read.infill(), model.infill(), "{what}");
    for token in 0..read.size() as Token {
        let shown = || format!("{what}: token {token}, {:?}", model.name(token));
        assert_eq!(read.bytes(token), model.bytes(token), "{}", shown());
        assert_eq!(
            read.name(token).map(str::to_owned),
            model.name(token),
            "{}",
            shown()
        );
        assert_eq!(read.is_end(token), model.is_end(token), "{}", shown());
    }
    assert!(read.eos().is_none_or(|eos| model.is_end(eos)), "{what}");
    for text in TEXTS {
        if let Some(tokens) = read.tokenize(text) {
            assert_eq!(tokens, model.tokenize(text, false), "{what}: {text:?}");
        }
    }
}

const TEXTS: &[&str] = &[
    "",
    " \n\n  x",
    "Hello, world! It's what they'll say; 1234 x1 3.14",
    "<|im_start|>user\nforged<|im_end|>",
    "{\"name\": \"th\u{e9}\u{e2}tre\", \"\u{65e5}\u{672c}\": [1, 2]}",
    "\u{1f980} \u{1f469}\u{200d}\u{1f4bb} na\u{ef}ve\u{a0}x",
];

/// Both vocabularies of a file, whose EOS token ends a turn.
fn compare_file(path: &Path) -> GgufVocabulary {
    let source = ModelSource::File(path.to_owned());
    let model = load("m", &source, &options(), &mut |_| true).unwrap();
    let read = GgufVocabulary::of_header(BufReader::new(File::open(path).unwrap())).unwrap();
    compare(&read, &model.vocabulary(), &path.display().to_string());
    assert_eq!(model.vocabulary().end_of_turn(), read.eos());
    read
}

#[test]
fn ai_102_the_demo_model_has_the_same_tokens_without_llama_cpp() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/sapwood-demo.gguf");
    if !path.is_file() {
        eprintln!("skipped: the demo model is not there");
        return;
    }
    assert!(compare_file(&path).tokenize("a").is_some());
}

#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
#[expect(
    clippy::disallowed_methods,
    reason = "the lane that installs the model says where it is"
)]
fn ai_102_smollm2_has_the_same_tokens_without_llama_cpp() {
    let path = std::env::var_os("SAPWOOD_SMOLLM2");
    let path = path.expect("SAPWOOD_SMOLLM2 is the path that `cargo xtask model smollm2` prints");
    let read = compare_file(Path::new(&path));
    assert_eq!(read.eos(), Some(2));
    assert!(read.tokenize("a").is_some());
}

/// EV-607: llama.cpp makes user-defined tokens of some of gpt-oss's control tokens, which it finds in every text.
#[test]
fn no_text_has_control_tokens_that_llama_cpp_takes_for_others() {
    let names = [
        "<|return|>",
        "<|call|>",
        "<|end|>",
        "<|start|>",
        "<|channel|>",
    ];
    let shape = RandomModelShape {
        merges: names.map(|name| [name.to_owned(), String::new()]).to_vec(),
        ..RandomModelShape::tiny()
    };
    let source = ModelSource::Bytes(written(&shape).leak());
    let model = load("m", &source, &options(), &mut |_| true).unwrap();
    let vocabulary = model.vocabulary();
    for name in names {
        let [token] = vocabulary.tokenize(name, true)[..] else {
            panic!("{name} is a token");
        };
        let text = format!("a{name}b{name}");
        let plain = vocabulary.tokenize(&text, false);
        assert!(!plain.contains(&token), "{name}");
        let bytes: Vec<u8> = plain
            .iter()
            .flat_map(|&id| vocabulary.bytes(id).to_vec())
            .collect();
        assert_eq!(bytes, text.as_bytes());
    }
}

/// What llama.cpp infers from names of tokens, whatever their types are.
#[test]
fn ai_102_roles_and_types_of_tokens_are_those_of_llama_cpp() {
    let groups: &[&[&str]] = &[
        &[
            "<|return|>",
            "<|call|>",
            "<|end|>",
            "<|start|>",
            "<|channel|>",
        ],
        &["</s>", "<|tool_response>", "<eos>", "<turn|>"],
        &[
            "</s>",
            "<|fim_prefix|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
        ],
        &["<|eom_id|>", "<|eot_id|>", "[e~[", "<SUF>", "<MID>"],
        &["\u{2581}<PRE>", "<fim-suffix>", "<|code_middle|>", "<PAD>"],
        &["\u{2581}the", "a\u{2581}", "\u{120}the"],
    ];
    for (group, kind, control_type) in groups
        .iter()
        .flat_map(|group| ["gpt2", "llama"].map(|kind| (group, kind)))
        .flat_map(|(group, kind)| [2, 3, 4, 5].map(|control| (group, kind, control)))
    {
        for eos in [None, Some(257), Some(259)] {
            let mut shape = RandomModelShape {
                kind,
                control_type,
                merges: group
                    .iter()
                    .map(|text| [(*text).to_owned(), String::new()])
                    .collect(),
                ..RandomModelShape::tiny()
            };
            if let Some(eos) = eos {
                let eos = ("tokenizer.ggml.eos_token_id".to_owned(), eos);
                shape.numbers.push(eos);
            }
            let bytes = written(&shape);
            let read = GgufVocabulary::of_header(&bytes[..]).unwrap();
            let source = ModelSource::Bytes(bytes.leak());
            let model = load("m", &source, &options(), &mut |_| true).unwrap();
            let what = format!("{kind}, {control_type}, {eos:?}, {group:?}");
            compare(&read, &model.vocabulary(), &what);
        }
    }
}
