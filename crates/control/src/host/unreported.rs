//! [`Unreported`]: what happened to the sequence of a P2 module since its last callback.

use sapwood_proto::steer::Token;

use super::callback::Callback;

/// Changes of a text, joined into the one that the next [`Callback::Process`] reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unreported {
    pub(crate) backtrack: u32,
    pub(crate) tokens: Vec<Token>,
    pub(crate) sampled: Option<Token>,
}

impl Unreported {
    /// Whether nothing has happened.
    pub(crate) const fn is_empty(&self) -> bool {
        self.backtrack == 0 && self.tokens.is_empty() && self.sampled.is_none()
    }

    /// Adds a later change: it takes back tokens that are not reported yet before those that are.
    pub(crate) fn add(&mut self, backtrack: u32, tokens: &[Token], sampled: Option<Token>) {
        let unreported = self.tokens.len().min(backtrack as usize);
        self.tokens.truncate(self.tokens.len() - unreported);
        let reported = backtrack.saturating_sub(u32::try_from(unreported).unwrap_or(backtrack));
        self.backtrack = self.backtrack.saturating_add(reported);
        self.tokens.extend_from_slice(tokens);
        // Tokens that were forced after the sample come without one.
        self.sampled = sampled.or(self.sampled);
    }

    /// Adds tokens that nobody sampled.
    pub(crate) fn append(&mut self, tokens: &[Token]) {
        self.add(0, tokens, None);
    }

    /// The callback that reports everything.
    pub(crate) fn report(&mut self, fork_group: Vec<u32>) -> Callback {
        let Self {
            backtrack,
            tokens,
            sampled,
        } = std::mem::take(self);
        Callback::Process {
            backtrack,
            tokens,
            sampled,
            fork_group,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(changes: &[(u32, &[Token], Option<Token>)]) -> (u32, Vec<Token>, Option<Token>) {
        let mut unreported = Unreported::default();
        for (backtrack, tokens, sampled) in changes {
            unreported.add(*backtrack, tokens, *sampled);
        }
        let Callback::Process {
            backtrack,
            tokens,
            sampled,
            ..
        } = unreported.report(vec![1])
        else {
            panic!("the callback of P2 modules");
        };
        assert_eq!(unreported, Unreported::default(), "it is reported once");
        (backtrack, tokens, sampled)
    }

    #[test]
    fn ai_502_changes_are_reported_as_one() {
        let check = |changes: &[(u32, &[Token], Option<Token>)], expected| {
            assert_eq!(reported(changes), expected, "{changes:?}");
        };
        check(&[], (0, vec![], None));
        check(
            &[(0, &[5], Some(5)), (0, &[6, 7], None)],
            (0, vec![5, 6, 7], Some(5)),
        );
        // Of three tokens that are taken back, two were reported before.
        check(
            &[(0, &[5], Some(5)), (3, &[8], Some(9))],
            (2, vec![8], Some(9)),
        );
        check(
            &[(1, &[], None), (u32::MAX, &[4], None)],
            (u32::MAX, vec![4], None),
        );
    }
}
