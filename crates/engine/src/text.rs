//! Turns token bytes into text that can be sent: whole characters, with the possible start of a stop string held back.
//!
//! ```text
//!   bytes ──► unfinished character (at most 3 bytes) ──► held back (may begin a stop) ──► shown
//! ```
//!
//! Bytes that can never become a character turn into U+FFFD at once, so that invalid output cannot stall the text.

use compact_str::CompactString;

use crate::api::{MARK_CLOSE, MARK_OPEN};

/// The decoder of one choice's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChoiceText {
    /// The first bytes of an incomplete character.
    unfinished: Vec<u8>,
    /// Whole characters that may be the start of a stop string.
    held_back: String,
    /// Bytes of text returned so far.
    shown: u64,
}

impl ChoiceText {
    /// Fast path: returns a token's bytes as the text to send, if nothing is held back and nothing has to be. `None`:
    /// call [`ChoiceText::push`] instead.
    pub(crate) fn pass(&mut self, bytes: &[u8], stops: &[String]) -> Option<CompactString> {
        let waits = !self.unfinished.is_empty() || !self.held_back.is_empty();
        if waits || !stops.is_empty() {
            return None;
        }
        // An incomplete character fails here and goes to `push`, which holds it back.
        let text = CompactString::from_utf8(bytes).ok()?;
        self.shown += text.len() as u64;
        Some(text)
    }

    /// Adds bytes and appends to `out` the text that is ready to be sent. If a stop string is complete, returns its
    /// index among `stops`: the text before it is in `out`, it and what follows are dropped, and nothing more may be
    /// added. If `stopping` is false (below the minimum of tokens), stop strings pass as text.
    pub(crate) fn push(
        &mut self,
        bytes: &[u8],
        stops: &[String],
        stopping: bool,
        out: &mut String,
    ) -> Option<usize> {
        // Where the new text begins: a stop string that is complete now was not before, so it ends after this point.
        let before = self.held_back.len();
        self.decode(bytes);
        self.release(before, stops, stopping, out)
    }

    /// As [`ChoiceText::push`], for texts that may have marks: those in the text of ordinary tokens become U+FFFD, which
    /// has as many bytes, so that no text forges a control token.
    pub(crate) fn push_beside_marks(
        &mut self,
        bytes: &[u8],
        stops: &[String],
        stopping: bool,
        out: &mut String,
    ) -> Option<usize> {
        let before = self.held_back.len();
        self.decode(bytes);
        if self.held_back[before..].contains([MARK_OPEN, MARK_CLOSE]) {
            let fresh = self.held_back.split_off(before);
            self.held_back.push_str(&without_marks(&fresh));
        }
        self.release(before, stops, stopping, out)
    }

    /// Appends what is held back and then the name of a control token, between its marks. It is no text, so no stop string
    /// is searched in it, and none goes on behind it.
    pub(crate) fn push_mark(&mut self, mark: &[u8], out: &mut String) {
        self.flush(out);
        let mark = String::from_utf8_lossy(mark);
        out.push_str(&mark);
        self.shown += mark.len() as u64;
    }

    /// Adds bytes to the text that is held back.
    fn decode(&mut self, bytes: &[u8]) {
        if self.unfinished.is_empty() && bytes.is_ascii() {
            // The common case: no incomplete character before, and every byte belongs to a whole one.
            self.held_back
                .push_str(std::str::from_utf8(bytes).unwrap_or_default());
        } else {
            self.unfinished.extend_from_slice(bytes);
            self.finish_characters();
        }
    }

    /// Appends to `out` what need not be held back; `before` is where the new text begins.
    fn release(
        &mut self,
        before: usize,
        stops: &[String],
        stopping: bool,
        out: &mut String,
    ) -> Option<usize> {
        if stops.is_empty() {
            self.show(self.held_back.len(), out);
            return None;
        }
        if stopping && let Some((at, index)) = first_stop(&self.held_back, before, stops) {
            self.show(at, out);
            // The text after the stop string is not part of the output, and neither is an incomplete character.
            self.held_back.clear();
            self.unfinished.clear();
            return Some(index);
        }
        // Also while stop strings pass as text: one that begins below the minimum may end above it.
        let safe = self.held_back.len() - longest_beginning(&self.held_back, stops);
        self.show(safe, out);
        None
    }

    /// Appends the stop string that [`ChoiceText::push`] has found, for requests that keep it.
    pub(crate) fn show_stop(&mut self, stop: &str, out: &mut String) {
        out.push_str(stop);
        self.shown += stop.len() as u64;
    }

    /// Appends the held-back text to `out`, because no stop string can follow any more. An incomplete character becomes
    /// U+FFFD.
    pub(crate) fn flush(&mut self, out: &mut String) {
        if !self.unfinished.is_empty() {
            self.held_back.push(char::REPLACEMENT_CHARACTER);
            self.unfinished.clear();
        }
        self.show(self.held_back.len(), out);
    }

    /// Returns the bytes of text returned so far.
    pub(crate) fn shown(&self) -> u64 {
        self.shown
    }

    fn show(&mut self, bytes: usize, out: &mut String) {
        out.push_str(&self.held_back[..bytes]);
        self.held_back.drain(..bytes);
        self.shown += bytes as u64;
    }

    /// Moves whole characters from the unfinished bytes to the held-back text.
    fn finish_characters(&mut self) {
        let bytes = std::mem::take(&mut self.unfinished);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.held_back.push_str(text);
                    return;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.held_back
                        .push_str(std::str::from_utf8(valid).unwrap_or_default());
                    // No length: the bytes are only incomplete, and the next token may complete the character.
                    let Some(invalid) = error.error_len() else {
                        self.unfinished = after.to_vec();
                        return;
                    };
                    self.held_back.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        }
    }
}

/// Returns the text with U+FFFD in place of the characters that mark names of control tokens.
pub(crate) fn without_marks(text: &str) -> String {
    text.replace([MARK_OPEN, MARK_CLOSE], "\u{fffd}")
}

/// Returns where the first complete stop string begins, and its index; the longest of those that begin there.
fn first_stop(text: &str, fresh: usize, stops: &[String]) -> Option<(usize, usize)> {
    let mut first: Option<(usize, usize)> = None;
    for (index, stop) in stops.iter().enumerate() {
        // In the text held back before none is complete that still counts, so it ends within the fresh bytes.
        let mut from = (fresh + 1).saturating_sub(stop.len());
        // A stop string begins with a character. Going back instead would find one that has passed as text before, below
        // the minimum of tokens, and is held back as the beginning of another.
        while !text.is_char_boundary(from) {
            from += 1;
        }
        let Some(offset) = text[from..].find(stop.as_str()) else {
            continue;
        };
        let at = from + offset;
        // The earliest match decides where the text ends. Of several that begin there, the longest is reported,
        // whatever their order in the request.
        let better = first.is_none_or(|(best_at, best)| {
            at < best_at || at == best_at && stop.len() > stops[best].len()
        });
        if better {
            first = Some((at, index));
        }
    }
    first
}

/// Returns the number of bytes at the end of `text` that may be the start of a stop string.
fn longest_beginning(text: &str, stops: &[String]) -> usize {
    let mut longest = 0;
    for stop in stops {
        let most = text.len().min(stop.len() - 1);
        // Only longer beginnings than the best so far are of interest, and the longest possible comes first.
        for length in (longest + 1..=most).rev() {
            if text.as_bytes().ends_with(&stop.as_bytes()[..length]) {
                longest = length;
                break;
            }
        }
    }
    // A stop string begins with a character's first byte, so this is a character boundary.
    longest
}

#[cfg(test)]
mod tests;
