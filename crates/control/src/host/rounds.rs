//! [`PreRounds`]: the rounds of one `pre` that appends tokens (AI-405).

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use super::callback::Callback;
use super::failure::CallFailure;
use super::result::check_count;

/// The tokens that the results of `pre` have appended, and how often.
#[derive(Clone, Debug, Default)]
pub(crate) struct PreRounds {
    count: u32,
    tokens: Vec<Token>,
}

impl PreRounds {
    /// Adds the tokens of a result. Returns the callback that reports them; then `pre` is called again.
    ///
    /// # Errors
    /// It was one round too many, or they have more tokens together than one result may have: the answer has them all.
    pub(crate) fn add(&mut self, tokens: Vec<Token>) -> Result<Callback, CallFailure> {
        self.count += 1;
        if self.count > ROUNDS_MAX {
            let text = "too many ff_tokens rounds from pre_process";
            return Err(CallFailure::new(ErrorReason::LIMIT, text));
        }
        check_count(self.tokens.len() + tokens.len())?;
        self.tokens.extend_from_slice(&tokens);
        let backtrack = 0;
        Ok(Callback::Post { backtrack, tokens })
    }

    /// Whether there are no tokens.
    pub(crate) const fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Ends the rounds. Returns the tokens of all of them.
    pub(crate) fn finish(&mut self) -> Vec<Token> {
        std::mem::take(self).tokens
    }
}

/// Rounds of one step.
const ROUNDS_MAX: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_1090_the_rounds_of_a_step_have_the_tokens_of_one_result() {
        let mut rounds = PreRounds::default();
        assert!(rounds.add(vec![7; 65_530]).is_ok());
        assert!(rounds.add(vec![7; 6]).is_ok());
        let refused = rounds.add(vec![7]).unwrap_err();
        assert_eq!(
            refused.message,
            "too many tokens in a result: 65537 > 65536"
        );
    }
}
