//! Headers made by hand, and that of the demo model. The embedded engine's tests compare vocabularies with llama.cpp's.

use proptest::prelude::*;

use super::*;

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A header with these tokens and types, and numbers below `tokenizer.ggml`.
fn header(model: &str, tokens: &[(&str, u32)], numbers: &[(&str, u32)]) -> Vec<u8> {
    let word = u32::to_le_bytes;
    let array = |key: &str, kind: u32| {
        let length = (tokens.len() as u64).to_le_bytes();
        [&text(key)[..], &word(9), &word(kind), &length].concat()
    };
    let mut pairs = vec![
        [&text("tokenizer.ggml.model")[..], &word(8), &text(model)].concat(),
        [&text("tokenizer.ggml.pre")[..], &word(8), &text("smollm")].concat(),
    ];
    let mut list = array("tokenizer.ggml.tokens", 8);
    list.extend(tokens.iter().flat_map(|(token, _)| text(token)));
    let mut types = array("tokenizer.ggml.token_type", 5);
    types.extend(tokens.iter().flat_map(|(_, kind)| word(*kind)));
    pairs.extend([list, types]);
    for (key, value) in numbers {
        let key = text(&format!("tokenizer.ggml.{key}"));
        pairs.push([&key[..], &word(4), &word(*value)].concat());
    }
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend((pairs.len() as u64).to_le_bytes());
    bytes.extend(pairs.concat());
    bytes
}

fn vocabulary(model: &str, tokens: &[(&str, u32)], numbers: &[(&str, u32)]) -> GgufVocabulary {
    GgufVocabulary::of_header(&header(model, tokens, numbers)[..]).unwrap()
}

#[test]
fn ai_102_tokens_of_a_byte_level_vocabulary_have_their_bytes() {
    let tokens = [
        ("<|endoftext|>", 3),
        ("\u{120}the", 1),
        ("\u{10a}", 1),
        ("\u{c3}", 1),
        ("<tool>", 4),
        ("<unk>", 2),
        ("<unused>", 5),
        // Not by its type, but by its text.
        ("<|im_end|>", 1),
        ("<0x41>", 6),
        ("\u{2581}", 1),
    ];
    let read = vocabulary("gpt2", &tokens, &[("eos_token_id", 7)]);
    let bytes: Vec<&[u8]> = (0..11).map(|token| read.bytes(token)).collect();
    let strange = "[UNK_BYTE_0xe29681\u{2581}]".as_bytes();
    assert_eq!(
        bytes,
        [
            &b""[..],
            b" the",
            b"\n",
            b"\xc3",
            b"<tool>",
            b"",
            b"",
            b"",
            b"A",
            strange,
            b""
        ]
    );
    let names: Vec<_> = (0..11).filter_map(|token| read.name(token)).collect();
    assert_eq!(names, ["<|endoftext|>", "<unk>", "<|im_end|>"]);
    let ends: Vec<Token> = (0..11).filter(|token| read.is_end(*token)).collect();
    assert_eq!((ends, read.eos(), read.bos()), (vec![0, 7], Some(7), None));
    assert_eq!(read.size(), tokens.len());
}

#[test]
fn ai_102_tokens_of_a_marked_vocabulary_have_their_bytes() {
    let tokens = [
        ("<unk>", 2),
        ("<s>", 3),
        ("</s>", 3),
        ("<0x0A>", 6),
        ("\u{2581}the", 1),
        ("a\u{2581}\u{2581}b", 1),
        ("\u{e9}", 1),
    ];
    let read = vocabulary("llama", &tokens, &[]);
    let bytes: Vec<&[u8]> = (0..7).map(|token| read.bytes(token)).collect();
    let accent = "\u{e9}".as_bytes();
    assert_eq!(bytes, [&b""[..], b"", b"", b"\n", b" the", b"a  b", accent]);
    assert_eq!((read.eos(), read.bos()), (Some(2), Some(1)));
    assert!(
        read.tokenize("the").is_none(),
        "only byte-level ones are known"
    );
    let without = vocabulary("llama", &tokens, &[("add_bos_token", 0)]);
    assert_eq!(without.bos(), None);
}

#[test]
fn ai_102_tokens_for_fill_in_the_middle_are_named_or_found() {
    let tokens = [
        ("<fim_middle>", 1),
        ("<fim_prefix>", 1),
        ("<fim_suffix>", 1),
        ("x", 3),
        ("<fim_pad>", 1),
    ];
    let infill = |numbers: &[(&str, u32)]| {
        let read = vocabulary("gpt2", &tokens, numbers).infill().unwrap();
        assert!(!read.suffix_first);
        [read.prefix, read.suffix, read.middle]
    };
    assert_eq!(infill(&[]), [1, 2, 0]);
    assert_eq!(infill(&[("fim_pre_token_id", 3)]), [3, 2, 0]);
    assert_eq!(infill(&[("suffix_token_id", 3)]), [1, 3, 0]);
    assert_eq!(
        infill(&[("middle_token_id", 3), ("fim_mid_token_id", 4)]),
        [1, 2, 3]
    );
    // Beyond the vocabulary.
    assert_eq!(infill(&[("middle_token_id", 9)]), [1, 2, 0]);
    let read = vocabulary("gpt2", &tokens, &[]);
    assert!(
        read.is_end(4) && !read.is_end(0),
        "padding ends a text, and the middle does not"
    );
    // An ordinary token is named by mistake, unless its text says that it marks a part.
    let mut ordinary = tokens;
    ordinary[3].1 = 1;
    for (numbers, expected) in [
        (&[("fim_pre_token_id", 3)], None),
        (&[("fim_pre_token_id", 1)], Some(1)),
    ] {
        let read = vocabulary("gpt2", &ordinary, numbers).infill();
        assert_eq!(read.map(|infill| infill.prefix), expected);
    }
    // Found by its text, it is no text of an output.
    assert_eq!(
        (read.bytes(0), read.name(0)),
        (&b""[..], Some("<fim_middle>"))
    );
    assert_eq!(vocabulary("gpt2", &tokens[1..], &[]).infill(), None);
}

#[test]
fn ends_that_are_no_ends_beside_others() {
    let tokens = [
        ("<|return|>", 3),
        ("<|call|>", 3),
        ("<|end|>", 3),
        ("<|start|>", 3),
    ];
    let read = vocabulary("gpt2", &tokens, &[]);
    let ends: Vec<Token> = (0..4).filter(|token| read.is_end(*token)).collect();
    assert_eq!(ends, [0, 1]);
    assert_eq!(
        (read.bytes(2), read.bytes(3)),
        (&b"<|end|>"[..], &b"<|start|>"[..])
    );
    let tokens = [("</s>", 3), ("<|tool_response>", 3)];
    let read = vocabulary("llama", &tokens, &[("eos_token_id", 1)]);
    assert_eq!((read.is_end(0), read.bytes(0)), (false, &b"</s>"[..]));
}

#[test]
fn what_is_no_vocabulary_is_refused() {
    let why = |bytes: &[u8]| GgufVocabulary::of_header(bytes).unwrap_err().to_string();
    assert!(why(b"{}").contains("GGUF"));
    let kind = why(&header("bert", &[("a", 1)], &[]));
    assert!(
        kind.contains("\"bert\"") && kind.contains("tokenizer.json"),
        "{kind}"
    );
    assert!(why(&header("gpt2", &[], &[])).contains("no tokens"));
    let long = |bytes: usize| header("gpt2", &[("a", 1), (&" ".repeat(bytes), 1)], &[]);
    // A space is no byte of such a text.
    assert!(GgufVocabulary::of_header(&long(TOKEN_BYTES_MAX / 2)[..]).is_ok());
    assert!(why(&long(64 << 10)).contains("its token 1 has 65536 bytes, and 4096 is the most"));
    assert!(why(&long(TOKEN_BYTES_MAX)).contains("letters that are no bytes"));
    let usual = header("gpt2", &[("a", 1), (&"\u{120}".repeat(512), 1)], &[]);
    let usual = GgufVocabulary::of_header(&usual[..]).unwrap();
    assert_eq!(usual.bytes(1), " ".repeat(512).as_bytes());
    let whole = header("gpt2", &[("a", 1), ("b", 1)], &[]);
    let short = &whole[..whole.len() - 1];
    assert!(why(short).contains("ends within its header"));
}

#[test]
fn ai_102_the_demo_model_tokenises_from_its_header() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/sapwood-demo.gguf");
    if !path.is_file() {
        eprintln!("skipped: the demo model is not there");
        return;
    }
    assert!(is_gguf(&path).unwrap());
    let read = GgufVocabulary::read(&path).unwrap();
    assert_eq!((read.size(), read.eos(), read.bos()), (2048, Some(2), None));
    let text = "Is water wet? Na\u{ef}ve <|im_end|>\n\u{1f980}";
    let tokens = read.tokenize(text).unwrap();
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| read.bytes(*token).to_vec())
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
    assert!(tokens.len() < text.len(), "merged");
    assert!(!tokens.contains(&2), "a name in a text is no control token");
}

proptest! {
    #[test]
    fn damaged_headers_give_a_vocabulary_or_an_error(at in 8_usize..300, value in any::<u8>(), cut in 0_usize..400) {
        let tokens = [("<|im_end|>", 3), ("\u{120}the", 1), ("<0x41>", 6)];
        let mut bytes = header("llama", &tokens, &[("eos_token_id", 0), ("fim_pad_token_id", 2)]);
        if at < bytes.len() {
            bytes[at] = value;
        }
        bytes.truncate(cut.max(8));
        let _ = GgufVocabulary::of_header(&bytes[..]);
    }
}
