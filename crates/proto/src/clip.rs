//! Shortens untrusted text for messages (D-47).
//!
//! An error that quotes what a client sent makes the client decide how large the error is, and what it costs. Whatever is
//! quoted passes here.

use std::fmt::{self, Write};

/// Bytes of untrusted text that a message shows.
pub const SHOWN_BYTES_MAX: usize = 256;

/// As much of `text` as a message shows, at most [`SHOWN_BYTES_MAX`] bytes and whole characters; what is missing is an
/// ellipsis.
#[must_use]
pub fn shown(text: impl fmt::Display) -> String {
    let mut shown = Clipped(String::new());
    // The only error is our own: the text went on, and is not written any further.
    if write!(shown, "{text}").is_err() {
        shown.0.push(ELLIPSIS);
    }
    shown.0
}

/// Takes as much as is shown, and fails then, so that nobody goes on writing.
struct Clipped(String);

impl Write for Clipped {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = SHOWN_BYTES_MAX - self.0.len();
        if text.len() <= room {
            self.0.push_str(text);
            return Ok(());
        }
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        // What came before may have taken the ellipsis' place.
        let retained = SHOWN_BYTES_MAX - ELLIPSIS.len_utf8();
        self.0.truncate(self.0.floor_char_boundary(retained));
        Err(fmt::Error)
    }
}

/// Bytes of an error's message as a whole, at any face: what a function or a server elsewhere says is bounded as well.
pub const MESSAGE_BYTES_MAX: usize = 4096;

/// As much of a message as is sent, at most [`MESSAGE_BYTES_MAX`] bytes and whole characters.
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
    fn d_47_text_of_a_client_is_cut_at_256_bytes_on_the_border_of_a_character() {
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
    fn d_47_a_message_is_cut_at_4096_bytes() {
        let whole = "x".repeat(4096);
        assert_eq!(message(whole.clone()), whole);
        let cut = message(whole + "x");
        assert_eq!(cut, "x".repeat(4093) + "…");
        assert!(message("é".repeat(4096)).len() <= 4096);
    }

    #[test]
    fn d_47_what_is_not_shown_is_not_written_either() {
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
