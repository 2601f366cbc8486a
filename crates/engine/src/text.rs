//! Turns token bytes into text that can be sent: whole characters, with the possible start of a stop string held back.
//!
//! ```text
//!   bytes ──► unfinished character (at most 3 bytes) ──► held back (may begin a stop) ──► shown
//! ```
//!
//! Bytes that can never become a character turn into U+FFFD at once, so that output that is not text cannot stall it.

use compact_str::CompactString;

/// The text of one choice, as far as it goes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChoiceText {
    /// The beginning of a character.
    unfinished: Vec<u8>,
    /// Whole characters that may be the beginning of a stop text.
    held_back: String,
    /// Bytes shown so far.
    shown: u64,
}

impl ChoiceText {
    /// Adds a token's bytes, if nothing is held back and nothing can be: then they are the text to show. `None`: they
    /// have to be pushed.
    pub(crate) fn pass(&mut self, bytes: &[u8], stops: &[String]) -> Option<CompactString> {
        let waits = !self.unfinished.is_empty() || !self.held_back.is_empty();
        if waits || !stops.is_empty() {
            return None;
        }
        let text = CompactString::from_utf8(bytes).ok()?;
        self.shown += text.len() as u64;
        Some(text)
    }

    /// Adds bytes and appends to `out` what may be shown. If a stop text is complete, gives its index among `stops`;
    /// the text before it was shown, it and what follows never will be, and nothing more may be added. Below the
    /// minimum of tokens `stopping` is false: stop texts then pass as text.
    pub(crate) fn push(
        &mut self,
        bytes: &[u8],
        stops: &[String],
        stopping: bool,
        out: &mut String,
    ) -> Option<usize> {
        let before = self.held_back.len();
        if self.unfinished.is_empty() && bytes.is_ascii() {
            // The usual token: nothing to join, and every byte is a character.
            self.held_back
                .push_str(std::str::from_utf8(bytes).unwrap_or_default());
        } else {
            self.unfinished.extend_from_slice(bytes);
            self.finish_characters();
        }
        if stops.is_empty() {
            self.show(self.held_back.len(), out);
            return None;
        }
        if stopping && let Some((at, index)) = first_stop(&self.held_back, before, stops) {
            self.show(at, out);
            self.held_back.clear();
            self.unfinished.clear();
            return Some(index);
        }
        let safe = self.held_back.len() - longest_beginning(&self.held_back, stops);
        self.show(safe, out);
        None
    }

    /// Shows what was held back: no stop text can follow any more. An unfinished character becomes U+FFFD.
    pub(crate) fn flush(&mut self, out: &mut String) {
        if !self.unfinished.is_empty() {
            self.held_back.push(char::REPLACEMENT_CHARACTER);
            self.unfinished.clear();
        }
        self.show(self.held_back.len(), out);
    }

    /// Bytes shown so far.
    pub(crate) fn shown(&self) -> u64 {
        self.shown
    }

    fn show(&mut self, bytes: usize, out: &mut String) {
        out.push_str(&self.held_back[..bytes]);
        self.held_back.drain(..bytes);
        self.shown += bytes as u64;
    }

    /// Moves whole characters from the unfinished bytes to the held text.
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

/// Where the first complete stop text begins, and which it is; the longest of those that begin there.
fn first_stop(retained: &str, fresh: usize, stops: &[String]) -> Option<(usize, usize)> {
    let mut first: Option<(usize, usize)> = None;
    for (index, stop) in stops.iter().enumerate() {
        // What was held before did not contain it, so it ends in what is fresh.
        let mut from = (fresh + 1).saturating_sub(stop.len());
        while !retained.is_char_boundary(from) {
            from -= 1;
        }
        let Some(offset) = retained[from..].find(stop.as_str()) else {
            continue;
        };
        let at = from + offset;
        let better = first.is_none_or(|(best_at, best)| {
            at < best_at || at == best_at && stop.len() > stops[best].len()
        });
        if better {
            first = Some((at, index));
        }
    }
    first
}

/// Bytes at the end of `held` that may be the beginning of a stop text.
fn longest_beginning(retained: &str, stops: &[String]) -> usize {
    let mut longest = 0;
    for stop in stops {
        let most = retained.len().min(stop.len() - 1);
        for length in (longest + 1..=most).rev() {
            if retained.as_bytes().ends_with(&stop.as_bytes()[..length]) {
                longest = length;
                break;
            }
        }
    }
    // A stop text begins with a character's first byte, so this is a character boundary.
    longest
}

#[cfg(test)]
mod tests;
