//! The file of a model as the tokenizer of the runtime.

use std::path::Path;

use sapwood_control::wire::Synchronisation;
use serde_json::{Value, json};

use super::engine::{Engine, EngineSetup};
use crate::process::{Ended, folder, run};

/// The demo model, of which only the header is read.
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo/sapwood-demo.gguf");

/// Saves the trie of a tokenizer.
fn save(folder: &Path, tokenizer: &str, file: &str) -> Ended {
    let arguments = ["aicirt", "-t", tokenizer, "--save-tokenizer", file];
    run(folder, &arguments)
}

/// The bytes of the tokens of a saved trie.
fn tokens(trie: &[u8]) -> Vec<Vec<u8>> {
    let word = |at: usize| u32::from_le_bytes(trie[at..at + 4].try_into().unwrap()) as usize;
    let places = word(4) + word(8);
    let data = places + word(12);
    let token = |id: usize| {
        let place = word(places + 4 * id);
        let start = data + (place >> 8);
        trie[start..start + (place & 255)].to_vec()
    };
    (0..word(20)).map(token).collect()
}

/// AI-630, AI-631
#[test]
fn ai_102_the_vocabulary_of_a_model_file_is_saved_as_a_trie() {
    let folder = folder("aicirt_gguf_trie");
    let saved = save(&folder, DEMO, "demo.bin");
    assert_eq!((saved.code, &*saved.out), (0, ""), "{}", saved.err);
    let trie = std::fs::read(folder.join("demo.bin")).unwrap();
    let tokens = tokens(&trie);
    assert_eq!(tokens.len(), 2048);
    assert_eq!(&tokens[2], b"\xff<|im_end|>");
    assert_eq!(
        u32::from_le_bytes(trie[24..28].try_into().unwrap()),
        2,
        "EOS"
    );
    for byte in 0..=u8::MAX {
        let found = tokens.iter().filter(|token| token[..] == [byte]).count();
        assert_eq!(found, 1, "the byte {byte}");
    }
    let is_word = |token: &Vec<u8>| token.len() > 2 && token[0] == b' ';
    assert!(tokens.iter().any(is_word), "spaces are spaces");
    let again = save(&folder, "demo.bin", "again.bin");
    assert_eq!(again.code, 0, "{}", again.err);
    assert_eq!(std::fs::read(folder.join("again.bin")).unwrap(), trie);
}

/// AI-314: a text is tokenised as the model does, not by the longest token.
#[test]
fn ai_102_a_model_file_tokenises_prompts_and_constrains() {
    let folder = folder("aicirt_gguf");
    assert_eq!(save(&folder, DEMO, "demo.bin").code, 0);
    let tokens = tokens(&std::fs::read(folder.join("demo.bin")).unwrap());
    let setup = EngineSetup {
        flags: &["-t", DEMO, "--dialect", "p2", "--bias-dtype", "bool"],
        ..EngineSetup::new(Synchronisation::Futex)
    };
    let mut engine = Engine::start(&folder, &setup);
    let size = engine.main_json(&json!({"op": "tokens"}));
    assert_eq!(size["data"], json!({"vocab_size": 2048, "eos_token_id": 2}));
    let text = "Is water wet? <|im_end|> Na\u{ef}ve 12345";
    let answer = engine.side_json(&json!({
        "op": "instantiate", "req_id": "r", "prompt": text, "module_id": "sapwood:regex",
        "module_arg": "(yes|no)!",
    }));
    let prompt: Vec<u64> = answer["data"]["result"]["prompt"]
        .as_array()
        .unwrap_or_else(|| panic!("{answer}"))
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    let spelled: Vec<u8> = prompt
        .iter()
        .flat_map(|&token| tokens[token as usize].clone())
        .collect();
    assert_eq!(String::from_utf8(spelled).unwrap(), text);
    assert!(prompt.len() < text.len(), "{prompt:?}");
    let op = json!({"id": 1, "req_id": "r", "tokens": []});
    let answer = engine.main_json(&json!({"op": "mid_process", "ops": [op], "freed": []}));
    let number = |name: &str| answer["data"][name].as_u64().unwrap() as usize;
    let row = engine.masks(number("first_mask_byte_offset"), number("mask_num_bytes"));
    let allowed = (0..tokens.len()).filter(|id| row[id / 8] >> (id % 8) & 1 == 1);
    let expected = tokens.iter().enumerate().filter(|(_, token)| {
        !token.is_empty() && (b"yes!".starts_with(token) || b"no!".starts_with(token))
    });
    assert_eq!(
        allowed.collect::<Vec<_>>(),
        expected.map(|(id, _)| id).collect::<Vec<_>>()
    );
}

#[test]
fn ai_102_a_model_file_without_a_usable_vocabulary_is_refused() {
    let folder = folder("aicirt_gguf_refused");
    let demo = std::fs::read(DEMO).unwrap();
    // The kind of the vocabulary is replaced by one of the same length.
    let mut other = demo.clone();
    let at = other.windows(4).position(|bytes| bytes == b"gpt2").unwrap();
    other[at..at + 4].copy_from_slice(b"bert");
    for (name, bytes, message) in [
        ("short.gguf", &demo[..4000], "ends within its header"),
        ("other.gguf", &other[..], "tokenizer.json"),
        ("text.gguf", b"{}", "tokenizer.json"),
    ] {
        std::fs::write(folder.join(name), bytes).unwrap();
        let refused = save(&folder, name, "out.bin");
        assert_eq!(refused.code, 2, "{name}: {}", refused.err);
        assert!(refused.err.contains(message), "{name}: {}", refused.err);
    }
}
