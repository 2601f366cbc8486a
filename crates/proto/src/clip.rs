//! Truncates untrusted text for error messages (D-47).
//!
//! Without that, a client could decide how large an error that quotes its input is, and what it costs. All quoted input
//! passes through this module.

use std::fmt::{self, Write};

/// Maximum bytes of untrusted text shown in a message.
pub const SHOWN_BYTES_MAX: usize = 256;

/// Returns the part of `text` that a message shows: at most [`SHOWN_BYTES_MAX`] bytes, in whole characters, with an
/// ellipsis if it is truncated.
#[must_use]
pub fn shown(text: impl fmt::Display) -> String {
    let mut shown = Clipped(String::new());
    // The only possible error is from `Clipped`: the limit was reached, and the rest of the text is not formatted.
    if write!(shown, "{text}").is_err() {
        shown.0.push(ELLIPSIS);
    }
    shown.0
}

/// Accepts text up to the limit and then fails, so that formatting stops.
struct Clipped(String);

impl Write for Clipped {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = SHOWN_BYTES_MAX - self.0.len();
        if text.len() <= room {
            self.0.push_str(text);
            return Ok(());
        }
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        // Makes room for the ellipsis, which earlier text may have used.
        let retained = SHOWN_BYTES_MAX - ELLIPSIS.len_utf8();
        self.0.truncate(self.0.floor_char_boundary(retained));
        Err(fmt::Error)
    }
}

/// Maximum bytes of a complete error message, in every protocol: messages of functions and upstream servers are bounded
/// as well.
pub const MESSAGE_BYTES_MAX: usize = 4096;

/// Returns a message truncated to at most [`MESSAGE_BYTES_MAX`] bytes, in whole characters.
#[must_use]
pub fn message(mut text: String) -> String {
    if text.len() > MESSAGE_BYTES_MAX {
        let retained = MESSAGE_BYTES_MAX - ELLIPSIS.len_utf8();
        text.truncate(text.floor_char_boundary(retained));
        text.push(ELLIPSIS);
        text.shrink_to_fit();
    }
    text
}

const ELLIPSIS: char = '…';

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_47_client_text_is_truncated_to_256_bytes_at_a_character_boundary() {
        let whole = "x".repeat(256);
        assert_eq!(shown(&whole), whole);
        let cut = shown("x".repeat(257));
        assert_eq!(cut, "x".repeat(253) + "…");
        assert_eq!(cut.len(), 256);
        let wide = shown("é".repeat(200));
        assert_eq!(wide, "é".repeat(126) + "…");
        let (first, second) = ("x".repeat(255), "yy");
        assert_eq!(shown(format_args!("{first}{second}")), cut);
    }

    #[test]
    fn d_47_a_message_is_truncated_to_4096_bytes() {
        let whole = "x".repeat(4096);
        assert_eq!(message(whole.clone()), whole);
        let cut = message(whole + "x");
        assert_eq!(cut, "x".repeat(4093) + "…");
        assert!(message("é".repeat(4096)).len() <= 4096);
    }

    #[test]
    fn d_47_formatting_stops_at_the_limit() {
        struct Endless;
        impl fmt::Display for Endless {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                loop {
                    f.write_str("more ")?;
                }
            }
        }
        assert!(shown(Endless).len() <= SHOWN_BYTES_MAX);
    }
}
