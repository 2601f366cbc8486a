//! [`HeldOutput`]: the tokens and the text of a choice that a controller may still take back (AI-936).

use std::collections::VecDeque;

use sapwood_engine::api::Tokens;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use crate::Result;
use crate::error::Error;
use crate::steering::HoldPolicy;

/// What one choice has committed and not yet emitted, in the order of the steps.
///
/// Its size is bounded by the context: what is taken back is removed, and nothing beyond the context is appended.
#[derive(Debug, Default)]
pub(super) struct HeldOutput {
    steps: VecDeque<Tokens>,
    /// Tokens of all entries.
    tokens: usize,
}

impl HeldOutput {
    /// Takes back and adds what a step did. Returns what nothing can take back any more.
    ///
    /// # Errors
    /// `controller-failed` if the step takes back more than is held.
    pub(super) fn push(&mut self, mut step: Tokens, policy: HoldPolicy) -> Result<Option<Tokens>> {
        let (backtrack, withdrawn) = (
            std::mem::take(&mut step.backtrack),
            std::mem::take(&mut step.withdrawn),
        );
        self.take_back(backtrack as usize, withdrawn as usize)?;
        if is_empty(&step) {
            return Ok(None);
        }
        self.tokens += step.tokens.len();
        Ok(match (policy, self.steps.back_mut()) {
            // Nothing is released step by step, so one entry holds all.
            (HoldPolicy::End, Some(all)) => {
                append(all, step);
                None
            }
            (HoldPolicy::End, None) => {
                self.steps.push_back(step);
                None
            }
            (HoldPolicy::Tokens(hold), _) => {
                self.steps.push_back(step);
                self.release(hold as usize)
            }
        })
    }

    /// Everything that is held, at the end of the choice.
    pub(super) fn finish(&mut self) -> Option<Tokens> {
        self.tokens = 0;
        joined(self.steps.drain(..))
    }

    /// The steps behind which at least `hold` tokens follow.
    fn release(&mut self, hold: usize) -> Option<Tokens> {
        let mut released = Vec::new();
        while let Some(first) = self.steps.front() {
            // A step is released whole: its text belongs to its tokens together.
            let behind = self.tokens - first.tokens.len();
            if behind < hold {
                break;
            }
            self.tokens = behind;
            released.extend(self.steps.pop_front());
        }
        joined(released.into_iter())
    }

    /// Removes tokens and bytes of text from the end. The two are counted apart, because the text of a token may come
    /// with a later step.
    fn take_back(&mut self, mut tokens: usize, mut bytes: usize) -> Result<()> {
        self.tokens = self.tokens.checked_sub(tokens).ok_or_else(too_late)?;
        let mut kept = Vec::new();
        while (tokens > 0 || bytes > 0)
            && let Some(mut step) = self.steps.pop_back()
        {
            let fewer = step.tokens.len().min(tokens);
            step.tokens.truncate(step.tokens.len() - fewer);
            tokens -= fewer;
            let shorter = step.text.len().min(bytes);
            // The engine counts whole characters; cut at a border all the same, because `truncate` panics elsewhere.
            let end = step.text.floor_char_boundary(step.text.len() - shorter);
            step.text.truncate(end);
            bytes -= shorter;
            // Kept aside, because what is left of one may hide what has to be removed from an earlier one.
            if !is_empty(&step) {
                kept.push(step);
            }
        }
        self.steps.extend(kept.into_iter().rev());
        // Text that is out already cannot be taken back.
        if bytes > 0 { Err(too_late()) } else { Ok(()) }
    }
}

/// The steps as one; `None` if they have neither tokens nor text.
fn joined(steps: impl Iterator<Item = Tokens>) -> Option<Tokens> {
    let joined = steps.reduce(|mut all, step| {
        append(&mut all, step);
        all
    });
    joined.filter(|all| !is_empty(all))
}

fn is_empty(step: &Tokens) -> bool {
    step.tokens.is_empty() && step.text.is_empty() && step.prompt.is_none()
}

fn append(all: &mut Tokens, step: Tokens) {
    all.tokens.extend(step.tokens);
    all.text.push_str(&step.text);
    all.prompt = all.prompt.take().or(step.prompt);
    all.fork_of = all.fork_of.or(step.fork_of);
    all.inherited += step.inherited;
}

/// The error of a controller that takes back text which a reader has.
pub(super) fn too_late() -> Error {
    Error::Engine {
        code: Code::ControllerFailed,
        reason: ErrorReason::BAD_RESULT,
        message:
            "the controller took back text that was sent already: set controllers.hold to \"end\""
                .into(),
        retry_after: None,
    }
}

#[cfg(test)]
mod tests {
    use sapwood_engine::api::Sampled;

    use super::*;

    /// A step that takes back so much, and appends one token for each letter.
    fn step(backtrack: u32, text: &str) -> Tokens {
        let sampled = |byte: u8| Sampled {
            id: byte.into(),
            logprob: f32::NAN,
            rank: None,
            top: Vec::new(),
            special: false,
            forced: false,
        };
        Tokens {
            backtrack,
            withdrawn: backtrack,
            tokens: text.bytes().map(sampled).collect(),
            text: text.into(),
            ..Tokens::default()
        }
    }

    fn shown(tokens: Option<Tokens>) -> String {
        let Some(tokens) = tokens else {
            return String::new();
        };
        let ids: Vec<u8> = tokens.tokens.iter().map(|token| token.id as u8).collect();
        assert_eq!(ids, tokens.text.as_bytes(), "text and tokens agree");
        tokens.text.into()
    }

    #[test]
    fn ai_936_held_text_comes_at_the_end_without_what_was_taken_back() {
        let mut held = HeldOutput::default();
        for next in [step(0, "ab"), step(1, "c"), step(2, "x"), step(0, "yz")] {
            assert_eq!(held.push(next, HoldPolicy::End).unwrap(), None);
        }
        assert_eq!(held.steps.len(), 1, "one entry, however many steps");
        assert_eq!(shown(held.finish()), "xyz");
        assert_eq!(held.finish(), None);
    }

    #[test]
    fn ai_936_text_is_released_when_enough_tokens_follow_it() {
        let mut held = HeldOutput::default();
        let mut push = |step| held.push(step, HoldPolicy::Tokens(2)).map(shown);
        assert_eq!(push(step(0, "a")).unwrap(), "");
        assert_eq!(push(step(0, "b")).unwrap(), "");
        assert_eq!(push(step(0, "c")).unwrap(), "a");
        // As many as are held, and then one more.
        assert_eq!(push(step(2, "de")).unwrap(), "");
        assert_eq!(push(step(0, "fg")).unwrap(), "de");
        let error = push(step(3, "")).unwrap_err();
        assert_eq!(
            (error.code(), error.reason()),
            (Code::ControllerFailed, "bad-result")
        );
        assert!(
            HeldOutput::default()
                .push(step(1, ""), HoldPolicy::End)
                .is_err()
        );
    }

    /// The text of a token may come with a later step than the token, so the two are removed independently.
    #[test]
    fn ai_822_tokens_and_text_are_taken_back_independently() {
        let mut held = HeldOutput::default();
        let bare = |backtrack, withdrawn, ids: &str, text: &str| Tokens {
            backtrack,
            withdrawn,
            text: text.into(),
            ..step(0, ids)
        };
        let steps = [
            bare(0, 0, "a", ""),
            bare(0, 0, "b", "a"),
            bare(0, 0, "c", "b"),
            bare(2, 1, "x", "x"),
        ];
        for next in steps {
            held.push(next, HoldPolicy::Tokens(9)).unwrap();
        }
        assert_eq!(shown(held.finish()), "ax");
    }

    #[test]
    fn ai_936_a_controller_that_rewinds_for_ever_holds_no_more_memory() {
        let mut held = HeldOutput::default();
        for _ in 0..1_000 {
            held.push(step(0, "abc"), HoldPolicy::Tokens(64)).unwrap();
            held.push(step(3, ""), HoldPolicy::Tokens(64)).unwrap();
        }
        assert!(held.steps.len() <= 1, "{}", held.steps.len());
    }
}
