//! Makes untrusted text safe to print on a terminal.
//!
//! A terminal executes control sequences within the text that it shows: to set its title, to write the clipboard, to
//! hide or move text. Untrusted text (from a model that repeats its input, or from another server) must not contain
//! any, so control characters and those that change the direction of text are replaced by visible symbols.

use std::borrow::Cow;
use std::fmt::Write;

/// `text` without control sequences.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    // Most text has none, and is not copied.
    if !text.contains(is_order) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        push(&mut out, c);
    }
    Cow::Owned(out)
}

/// The same for bytes in pieces, whose borders may lie within characters.
#[derive(Debug, Default)]
pub(crate) struct PrintableBytes {
    /// The first bytes of a character whose rest has not arrived.
    begun: Vec<u8>,
}

impl PrintableBytes {
    /// Returns the text that can be shown now.
    pub(crate) fn next(&mut self, piece: &[u8]) -> String {
        let mut bytes = std::mem::take(&mut self.begun);
        bytes.extend_from_slice(piece);
        let mut out = String::with_capacity(bytes.len());
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            chunk.valid().chars().for_each(|c| push(&mut out, c));
            let invalid = chunk.invalid();
            // Only bytes that may still become a character wait for the next piece.
            if chunks.peek().is_none() && is_begun(invalid) {
                self.begun = invalid.to_vec();
            } else if !invalid.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
        out
    }
}

/// Whether these bytes, which are no character, are the start of one.
fn is_begun(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

fn push(out: &mut String, c: char) {
    match c {
        '\n' | '\t' => out.push(c),
        // Symbols that look like "ESC" and so on.
        '\0'..='\u{1f}' => out.push(char::from_u32(0x2400 + u32::from(c)).unwrap_or(' ')),
        '\u{7f}' => out.push('\u{2421}'),
        // Writing into a string cannot fail.
        _ if is_order(c) => drop(write!(out, "<U+{:04X}>", u32::from(c))),
        _ => out.push(c),
    }
}

// C0 without tab and line feed, DEL, C1 (an 8-bit terminal takes U+009B for ESC `[`), and the bidirectional controls,
// with which text can be shown in another order than it has.
const fn is_order(c: char) -> bool {
    matches!(c, '\0'..='\u{8}' | '\u{b}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced_and_text_is_unchanged() {
        assert!(matches!(plain("Grüße,\n\t世界 🌲"), Cow::Borrowed(_)));
        assert_eq!(
            plain("a\u{1b}]0;b\u{7}c\r"),
            "a\u{241b}]0;b\u{2407}c\u{240d}"
        );
        assert_eq!(
            plain("\u{9b}31m\u{202e}x\u{7f}"),
            "<U+009B>31m<U+202E>x\u{2421}"
        );
    }

    #[test]
    fn a_control_sequence_split_over_pieces_is_replaced() {
        let mut pieces = PrintableBytes::default();
        assert_eq!(pieces.next(b"a\xc2"), "a");
        assert_eq!(pieces.next(b"\x9b2J"), "<U+009B>2J");
        assert_eq!(pieces.next("é".as_bytes()), "é");
        assert_eq!(pieces.next(b"\xf0\x9f"), "");
        assert_eq!(pieces.next(b"\x8c\xb2\xff\x1b"), "🌲\u{fffd}\u{241b}");
        assert_eq!(pieces.next(b"\xe2x"), "\u{fffd}x");
    }
}
