//! Tokenizers of both encodings, created here.

use serde_json::json;

use super::*;
use crate::api::ChatMessage;
use crate::tokenize_continuation;

/// Bytes, two merges, a control token and an added word.
fn byte_level() -> Value {
    let mut vocab = serde_json::Map::new();
    let mut moved = 256..;
    for byte in 0..=255_u8 {
        let plain = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let shown = if plain {
            char::from(byte)
        } else {
            char::from_u32(moved.next().unwrap()).unwrap()
        };
        vocab.insert(shown.to_string(), json!(byte));
    }
    vocab.insert("he".into(), json!(256));
    vocab.insert("Ġhe".into(), json!(257));
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special})
    };
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null,
        "added_tokens": [added(258, "<s>", true), added(259, "</s>", true), added(260, "<own>", false)],
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": [["h", "e"], ["Ġ", "he"]]},
    })
}

fn files(tokenizer: &Value) -> TokenizerFiles {
    TokenizerFiles {
        tokenizer: tokenizer.to_string().into(),
        ..TokenizerFiles::default()
    }
}

fn bytes(tokenizer: &FileTokenizer, tokens: &[Token]) -> Vec<u8> {
    let bytes = tokens.iter().map(|token| tokenizer.bytes(*token).to_vec());
    bytes.collect::<Vec<_>>().concat()
}

/// The written file of a scripted model gives the same ids as the model.
#[test]
fn lm_951_tokenizer_files_of_scripted_models_give_equal_ids() {
    use crate::model::Model;
    use crate::scripted::{self, Scripted};
    for kind in [
        scripted::ScriptedTokenizer::Bytes,
        scripted::ScriptedTokenizer::Words,
    ] {
        let config = scripted::Config {
            tokenizer: Some(kind),
            vocab: 2000,
            ..scripted::Config::default()
        };
        let ours = Scripted::new(config).unwrap().vocabulary();
        let tokenizer = ours.file().unwrap();
        let files = TokenizerFiles {
            tokenizer,
            ..TokenizerFiles::default()
        };
        let read = FileTokenizer::new(&files, SpecialTokens::default()).unwrap();
        assert_eq!((read.size(), read.bos()), (ours.size(), ours.bos()));
        for token in 0..ours.size() as Token {
            assert_eq!(read.bytes(token), ours.bytes(token), "{token}");
            assert_eq!(read.name(token), ours.name(token), "{token}");
        }
        for text in [
            "",
            " ",
            "the capital of Japan  is Tokyo",
            "I  I\n\nI'm\tthe-the the\u{e9} the1 2the, wörter <s>the</s> nobody",
            "\u{65e5}\u{672c} \u{1f980}\0\u{a0}the  ",
        ] {
            assert_eq!(
                read.tokenize(text, false),
                ours.tokenize(text, false),
                "{text:?}"
            );
        }
    }
}

#[test]
fn lm_712_tokens_of_a_byte_level_file_are_the_bytes_of_its_texts() {
    let tokenizer = FileTokenizer::new(&files(&byte_level()), SpecialTokens::default()).unwrap();
    assert_eq!(tokenizer.size(), 261);
    assert_eq!(tokenizer.tokenize("he he", false), [256, 257]);
    for text in ["he hehe, wörter\n \t€", "<s> is text", "<own>", ""] {
        let tokens = tokenizer.tokenize(text, false);
        assert!(tokens.iter().all(|token| !tokenizer.is_special(*token)));
        assert_eq!(bytes(&tokenizer, &tokens), text.as_bytes());
    }
    assert!(tokenizer.is_special(258) && tokenizer.bytes(258).is_empty());
    assert_eq!(tokenizer.name(258).as_deref(), Some("<s>"));
    assert!(!tokenizer.is_special(260) && tokenizer.bytes(1000).is_empty());
    assert_eq!(tokenizer.file(), Some(byte_level().to_string().into()));
    assert_eq!(tokenizer.bos(), None);
    let no_chat = tokenizer.chat(&ChatRequest::default()).unwrap_err();
    assert_eq!(no_chat.reason, "NO_TEMPLATE");
}

#[test]
fn lm_712_the_configuration_files_give_bos_and_eog_tokens() {
    let beside = |config: Value, generation: Value| TokenizerFiles {
        config,
        generation,
        ..files(&byte_level())
    };
    let config =
        || json!({"add_bos_token": true, "bos_token": {"content": "<s>"}, "eos_token": "</s>"});
    let reply = FileTokenizer::new(
        &beside(config(), json!({"eos_token_id": [3, 900]})),
        SpecialTokens::default(),
    );
    let reply = reply.unwrap();
    assert_eq!(reply.bos(), Some(258));
    assert!(reply.is_end(259) && reply.is_end(3) && !reply.is_end(900));
    assert_eq!(reply.end_of_turn(), Some(259));
    let received = SpecialTokens {
        bos: Some(None),
        ends: vec![7],
        infill: None,
    };
    let received = FileTokenizer::new(&beside(config(), Value::Null), received).unwrap();
    assert_eq!(received.bos(), None);
    assert!(received.is_end(7) && received.is_end(259));
}

/// EV-607
#[test]
fn lm_712_conversations_need_a_template_and_forge_no_control_tokens() {
    let source = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}<s>";
    for config in [
        json!({"chat_template": source}),
        json!({"chat_template": [{"name": "other", "template": "x"}, {"name": "default", "template": source}]}),
    ] {
        let files = TokenizerFiles {
            config,
            ..files(&byte_level())
        };
        let tokenizer = FileTokenizer::new(&files, SpecialTokens::default()).unwrap();
        assert!(tokenizer.has_template());
        let chat = ChatRequest {
            messages: vec![ChatMessage {
                role: "user".into(),
                content: "he</s>".into(),
                ..ChatMessage::default()
            }],
            ..ChatRequest::default()
        };
        let plain = b"</s>".map(Token::from);
        let expect = [&[258, 256], &plain[..], &[259, 258]].concat();
        assert_eq!(tokenizer.chat(&chat).unwrap(), expect);
    }
}

/// EV-607: as in files of DeepSeek, which do not call the tokens of roles special.
#[test]
fn added_tokens_that_look_like_control_tokens_are_not_found_in_texts() {
    let mut file = byte_level();
    let added = file["added_tokens"].as_array_mut().unwrap();
    for (id, content) in [(261, "<|user|>"), (262, "<think>")] {
        added.push(
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": false}),
        );
    }
    let tokenizer = FileTokenizer::new(&files(&file), SpecialTokens::default()).unwrap();
    assert_eq!(tokenizer.tokenize("<|user|><think>", true), [261, 262]);
    // In outputs they are what the file says.
    assert_eq!(tokenizer.bytes(261), b"<|user|>");
    let plain = tokenizer.tokenize("<|user|><think>", false);
    assert!(!plain.contains(&261) && plain.contains(&262), "{plain:?}");
}

/// Pieces that begin with `▁` for a space, bytes as texts, and `<s>` as id 1.
fn sentencepiece(normalizer: &Value) -> Value {
    let mut vocab = serde_json::Map::new();
    vocab.insert("<unk>".into(), json!(0));
    vocab.insert("<s>".into(), json!(1));
    for byte in 0..=255_u32 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(2 + byte));
    }
    for (id, piece) in (258..).zip(["▁", "a", "b", "▁a"]) {
        vocab.insert(piece.into(), json!(id));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>")],
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["▁", "a"]]},
    })
}

fn spaces_to_marks() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

#[test]
fn lm_712_sentencepiece_files_mark_spaces_and_write_bytes_as_texts() {
    let file = sentencepiece(&spaces_to_marks());
    let tokenizer = FileTokenizer::new(&files(&file), SpecialTokens::default()).unwrap();
    assert_eq!(tokenizer.bos(), Some(1));
    let tokens = tokenizer.tokenize("b a\n", false);
    assert_eq!(tokens, [260, 261, 2 + 10]);
    assert_eq!(bytes(&tokenizer, &tokens), b"b a\n");
}

/// As the files of Llama 2 and Mistral do.
#[test]
fn ai_605_no_space_is_put_before_text_that_is_appended() {
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let file =
        sentencepiece(&json!({"type": "Sequence", "normalizers": [prepend, spaces_to_marks()]}));
    let tokenizer = FileTokenizer::new(&files(&file), SpecialTokens::default()).unwrap();
    let (space, a, b, space_a) = (258, 259, 260, 261);
    assert_eq!(tokenizer.tokenize("a", false), [space_a]);
    let appended = |text, special| tokenize_continuation(&tokenizer, text, special).unwrap();
    assert_eq!(appended("a", false), [a]);
    assert_eq!(appended(" ab", false), [space_a, b]);
    assert!(appended("", false).is_empty());
    assert_eq!(appended("b<s>a <s>", true), [b, 1, a, space, 1]);
    assert!(!appended("<s>", false).contains(&1));
}

#[test]
fn lm_712_files_that_are_not_tokenizers_are_refused() {
    let read = |tokenizer: &str| {
        let files = TokenizerFiles {
            tokenizer: tokenizer.to_owned().into(),
            ..TokenizerFiles::default()
        };
        FileTokenizer::new(&files, SpecialTokens::default()).unwrap_err()
    };
    assert!(matches!(read("{}"), VocabularyError::Syntax(_)));
    assert!(matches!(read("no json"), VocabularyError::Syntax(_)));
    let mut odd = byte_level();
    odd["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    assert_eq!(read(&odd.to_string()), VocabularyError::Kind);
}

#[test]
fn lm_712_files_are_read_from_a_folder_or_alone() {
    let folder = tempfile::tempdir().unwrap();
    let missing = TokenizerFiles::read(folder.path()).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, byte_level().to_string()).unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), "x").unwrap();
    std::fs::write(
        folder.path().join("tokenizer_config.json"),
        "{\"eos_token\":\"</s>\"}",
    )
    .unwrap();
    let all = TokenizerFiles::read(folder.path()).unwrap();
    assert_eq!(all.template.as_deref(), Some("x"));
    assert_eq!(all.named("eos_token"), Some("</s>"));
    let alone = TokenizerFiles::read(&path).unwrap();
    assert_eq!(alone.tokenizer, all.tokenizer);
    assert_eq!(alone.template, None);
    std::fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    assert!(TokenizerFiles::read(folder.path()).is_err());
}
