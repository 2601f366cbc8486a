//! The pace at which answers are shown. The demo model answers faster than a reader can see it stream, so on a
//! terminal its answers appear at reading speed.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::answer::AnswerPiece;

/// What waits to be shown.
pub(super) struct ReadingPace {
    words: VecDeque<AnswerPiece>,
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

    /// Adds what was received.
    pub(super) fn push(&mut self, piece: AnswerPiece) {
        let words = |text: &str, of: fn(String) -> AnswerPiece| {
            let words = text.split_inclusive(' ').map(str::to_owned);
            words.map(of).collect::<Vec<_>>()
        };
        match (self.letter, piece) {
            (Some(_), AnswerPiece::Text(text)) => {
                self.words.extend(words(&text, AnswerPiece::Text))
            }
            (Some(_), AnswerPiece::Reasoning(text)) => {
                self.words.extend(words(&text, AnswerPiece::Reasoning));
            }
            (_, piece) => self.words.push_back(piece),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns what to show next, when it is due. Cancel safe: nothing is lost.
    pub(super) async fn next(&mut self) -> Option<AnswerPiece> {
        if self.words.is_empty() {
            return None;
        }
        let Some(letter) = self.letter else {
            return self.words.pop_front();
        };
        sleep_until(self.next_at).await;
        let word = self.words.pop_front()?;
        let letters = match &word {
            AnswerPiece::Reasoning(text) | AnswerPiece::Text(text) => text.chars().count(),
            AnswerPiece::Call(_) => 0,
        };
        let letters = u32::try_from(letters).unwrap_or(u32::MAX);
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
            pace.push(AnswerPiece::Reasoning("One two ".into()));
            pace.push(AnswerPiece::Text("three".into()));
            let mut shown = Vec::new();
            while let Some(AnswerPiece::Reasoning(text) | AnswerPiece::Text(text)) =
                pace.next().await
            {
                shown.push(text);
            }
            assert_eq!(shown, expect);
            assert!(pace.is_empty());
            assert_eq!(began.elapsed(), Duration::from_millis(millis));
        }
    }
}
