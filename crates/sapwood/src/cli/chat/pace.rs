//! The pace at which answers are shown. The demo model answers faster than a reader can see it stream, so on a
//! terminal its answers appear at reading speed.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Text that waits to be shown.
pub(super) struct ReadingPace {
    words: VecDeque<String>,
    /// The delay for each letter; `None`: no delay.
    letter: Option<Duration>,
    next_at: Instant,
}

impl ReadingPace {
    pub(super) fn new(slow: bool) -> Self {
        Self {
            words: VecDeque::new(),
            letter: slow.then_some(LETTER),
            next_at: Instant::now(),
        }
    }

    /// Adds received text.
    pub(super) fn push(&mut self, text: String) {
        match self.letter {
            Some(_) => self
                .words
                .extend(text.split_inclusive(' ').map(str::to_owned)),
            None => self.words.push_back(text),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the next text to show, when it is due. Cancel safe: nothing is lost.
    pub(super) async fn next(&mut self) -> Option<String> {
        if self.words.is_empty() {
            return None;
        }
        let Some(letter) = self.letter else {
            return self.words.pop_front();
        };
        sleep_until(self.next_at).await;
        let word = self.words.pop_front()?;
        let letters = u32::try_from(word.chars().count()).unwrap_or(u32::MAX);
        self.next_at = Instant::now() + letter.saturating_mul(letters);
        Some(word)
    }
}

/// Some 65 letters a second: faster than most people read, slow enough to see the text stream.
const LETTER: Duration = Duration::from_millis(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn words_come_one_by_one_or_at_once() {
        for (slow, expect, millis) in [
            (true, vec!["One ", "two ", "three"], 4 * 15 + 4 * 15),
            (false, vec!["One two ", "three"], 0),
        ] {
            let began = Instant::now();
            let mut pace = ReadingPace::new(slow);
            pace.push("One two ".into());
            pace.push("three".into());
            let mut shown = Vec::new();
            while let Some(text) = pace.next().await {
                shown.push(text);
            }
            assert_eq!(shown, expect);
            assert!(pace.is_empty());
            assert_eq!(began.elapsed(), Duration::from_millis(millis));
        }
    }
}
