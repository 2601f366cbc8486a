//! Headers made by hand, damaged ones, and the limits.

use proptest::prelude::*;

use super::*;

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn header(pairs: &[Vec<u8>], tensors: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((pairs.len() as u64).to_le_bytes());
    bytes.extend(pairs.concat());
    bytes.extend(tensors.concat());
    bytes
}

fn number(key: &str, value: u32) -> Vec<u8> {
    [
        text(key),
        4_u32.to_le_bytes().into(),
        value.to_le_bytes().into(),
    ]
    .concat()
}

fn tensor_of(dimensions: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text("t");
    bytes.extend((dimensions.len() as u32).to_le_bytes());
    bytes.extend(
        dimensions
            .iter()
            .flat_map(|dimension| dimension.to_le_bytes()),
    );
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

#[test]
fn reads_numbers_texts_and_the_expected_file_length() {
    let architecture = [
        text("general.architecture"),
        STRING.to_le_bytes().into(),
        text("llama"),
    ]
    .concat();
    let bytes = header(
        &[architecture, number("llama.block_count", 7)],
        &[tensor_of(&[64, 2], 8, 0), tensor_of(&[10], 0, 160)],
    );
    let read = GgufHeader::read(&bytes[..]).unwrap();
    assert_eq!(read.text("general.architecture"), Some("llama"));
    assert_eq!(read.number("llama.block_count"), Some(7));
    assert_eq!(read.tensor_bytes, 4 * 34 + 40);
    assert_eq!(
        read.file_bytes,
        (bytes.len() as u64).next_multiple_of(32) + 200
    );
}

#[test]
fn the_id_of_a_token_is_replaced_by_an_integer_alone() {
    let key = "tokenizer.ggml.fim_pre_token_id";
    let mut header = GgufHeader::default();
    for value in [
        OverrideValue::Text("5".to_owned()),
        OverrideValue::Bool(true),
        OverrideValue::Float(5.0),
    ] {
        let why = header.replace(key, value).unwrap_err();
        assert!(why.contains(key) && why.contains("of type int"), "{why}");
    }
    header.replace(key, OverrideValue::Int(5)).unwrap();
    assert_eq!(header.number(key), Some(5));
}

#[test]
fn malformed_headers_give_specific_errors() {
    let damaged = |bytes: &[u8]| GgufHeader::read(bytes).unwrap_err().to_string();
    assert!(matches!(GgufHeader::read(&b""[..]), Err(Error::Magic)));
    assert!(matches!(
        GgufHeader::read(&b"PK\x03\x04 and more"[..]),
        Err(Error::Magic)
    ));
    assert!(matches!(
        GgufHeader::read(&b"GGUF\x01\0\0\0"[..]),
        Err(Error::Version(1))
    ));
    assert!(matches!(
        GgufHeader::read(&b"GGUF\0\0\0\x03"[..]),
        Err(Error::BigEndian)
    ));
    assert!(matches!(
        GgufHeader::read(&b"GGUF\x03\0\0\0"[..]),
        Err(Error::Short)
    ));
    let many = [&b"GGUF\x03\0\0\0"[..], &u64::MAX.to_le_bytes()].concat();
    assert!(damaged(&many).contains("18446744073709551615 tensors"));
    let nested = header(
        &[[
            text("a"),
            ARRAY.to_le_bytes().into(),
            ARRAY.to_le_bytes().into(),
            1_u64.to_le_bytes().into(),
        ]
        .concat()],
        &[],
    );
    assert!(damaged(&nested).contains("arrays"));
    let huge = header(&[], &[tensor_of(&[u64::MAX, 2], 0, 0)]);
    assert!(damaged(&huge).contains("counted"));
    let far = header(&[], &[tensor_of(&[1], 0, u64::MAX)]);
    assert!(damaged(&far).contains("beyond any file"));
}

#[test]
fn limits_hold_at_the_limit_and_one_past_it() {
    let array = |length: u64| {
        let head = [
            text("a"),
            ARRAY.to_le_bytes().into(),
            0_u32.to_le_bytes().into(),
        ]
        .concat();
        header(
            &[[head, length.to_le_bytes().into(), vec![0; 8]].concat()],
            &[],
        )
    };
    assert!(matches!(
        GgufHeader::read(&array(ARRAY_MAX)[..]),
        Err(Error::Short)
    ));
    assert!(matches!(
        GgufHeader::read(&array(ARRAY_MAX + 1)[..]),
        Err(Error::Excessive(_))
    ));
    let merges = |count: u64| {
        let head = [
            text("tokenizer.ggml.merges"),
            ARRAY.to_le_bytes().into(),
            STRING.to_le_bytes().into(),
            count.to_le_bytes().into(),
        ];
        let bytes = header(
            &[[head.concat(), text("").repeat(count as usize)].concat()],
            &[],
        );
        GgufHeader::read(&bytes[..]).unwrap().merges().len() as u64
    };
    assert_eq!(merges(MERGES_MAX), MERGES_MAX);
    assert_eq!(merges(MERGES_MAX + 1), 0);
    let dimensions = |count: usize| header(&[], &[tensor_of(&vec![1; count], 0, 0)]);
    assert!(GgufHeader::read(&dimensions(4)[..]).is_ok());
    assert!(matches!(
        GgufHeader::read(&dimensions(5)[..]),
        Err(Error::Excessive(_))
    ));
}

/// Two equal tokens ended the process (`GGML_ASSERT`).
#[test]
fn equal_tokens_are_refused() {
    let vocabulary = |tokens: &[&str]| {
        let head = [
            text("tokenizer.ggml.tokens"),
            ARRAY.to_le_bytes().into(),
            STRING.to_le_bytes().into(),
            (tokens.len() as u64).to_le_bytes().into(),
        ];
        let tokens: Vec<u8> = tokens.iter().flat_map(|token| text(token)).collect();
        GgufHeader::read(&header(&[[head.concat(), tokens].concat()], &[])[..])
    };
    let read = vocabulary(&["a", "b", "", "[EMPTY_1]", ""]).unwrap();
    assert_eq!(read.length("tokenizer.ggml.tokens"), Some(5));
    // llama.cpp reads up to the first NUL, and names empty tokens by their ids.
    for (tokens, expected) in [
        (
            &["a", "b", "a"][..],
            "tokens 0 and 2 have the same text \"a\"",
        ),
        (&["a\0b", "a\0c"], "tokens 0 and 1 have the same text \"a\""),
        (
            &["[EMPTY_1]", ""],
            "tokens 0 and 1 have the same text \"[EMPTY_1]\"",
        ),
    ] {
        let error = vocabulary(tokens).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let long = "x".repeat(1000);
    let error = vocabulary(&[&long, &long]).unwrap_err().to_string();
    assert!(error.len() < 120, "{error}");
}

proptest! {
    #[test]
    fn any_bytes_parse_or_fail_without_a_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..512), like in any::<bool>()) {
        if like && bytes.len() >= 24 {
            bytes[..8].copy_from_slice(b"GGUF\x03\0\0\0");
            bytes[9..16].fill(0);
            bytes[17..24].fill(0);
        }
        let _ = GgufHeader::read(&bytes[..]);
    }

    #[test]
    fn damaged_headers_parse_or_fail_without_a_panic(at in 8_usize..120, value in any::<u8>(), cut in 0_usize..160) {
        let mut bytes = header(
            &[number("general.alignment", 64), number("llama.block_count", 7)],
            &[tensor_of(&[64, 2], 8, 0)],
        );
        if at < bytes.len() {
            bytes[at] = value;
        }
        bytes.truncate(cut.max(8));
        let _ = GgufHeader::read(&bytes[..]);
    }
}
