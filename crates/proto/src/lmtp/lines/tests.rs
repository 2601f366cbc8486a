use super::*;

fn cut(max: usize, pieces: &[&[u8]]) -> Vec<String> {
    let mut lines = LineSplitter::new(max);
    let mut all = Vec::new();
    for piece in pieces {
        lines.push(piece);
        while let Some(line) = lines.next_line() {
            all.push(line);
        }
    }
    all.extend(lines.last_line());
    let shown = all.into_iter().map(|line| match line {
        WireLine::Text(text) => text.to_string(),
        other => format!("{other:?}"),
    });
    shown.collect()
}

/// LM-110
#[test]
fn lm_101_lines_end_with_lf_or_crlf_and_blank_lines_are_skipped() {
    assert_eq!(cut(9, &[b"a\nb\r\n\n  \r\nc"]), ["a", "b", "c"]);
    assert_eq!(cut(9, &[b"a", b"b\r", b"\nc\r", b"d\n"]), ["ab", "c\rd"]);
    assert_eq!(cut(9, &[b"\xff\na\n"]), ["BadText", "a"]);
}

/// LM-1201: a line at the limit is accepted, a longer one is not, however the bytes are split.
#[test]
fn lm_112_a_long_line_is_skipped_and_the_next_is_read() {
    for pieces in [
        &[&b"1234\r\n12345\n12345678\r\nab\n"[..]][..],
        &[b"1234\r", b"\n12345", b"\n123", b"45678", b"\r\na", b"b\n"],
    ] {
        assert_eq!(cut(4, pieces), ["1234", "TooLong", "TooLong", "ab"]);
    }
    let mut lines = LineSplitter::new(4);
    lines.push(b"123456");
    assert_eq!(lines.next_line(), Some(WireLine::TooLong), "told at once");
    for _ in 0..100 {
        lines.push(&[b'x'; 1_000]);
        assert_eq!(lines.next_line(), None);
        assert!(lines.buffer.is_empty(), "what is skipped is not held");
    }
}
