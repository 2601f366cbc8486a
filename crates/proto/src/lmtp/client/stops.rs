//! Stop sequences, for servers that do not support them (LM-704).

use crate::lmtp::GenerateRequest;
use crate::steer::Token;

/// Token stop sequences that are checked on the client side.
#[derive(Debug)]
pub(super) struct Stops {
    sequences: Vec<Vec<Token>>,
    /// The most recent tokens, as many as the longest sequence has.
    last: Vec<Token>,
}

impl Stops {
    /// The sequences of a request to check; `None` if there are none.
    pub(super) fn of(wanted: &GenerateRequest) -> Option<Self> {
        let sequences = wanted.stop_tokens.iter().filter(|stop| !stop.is_empty());
        let sequences: Vec<_> = sequences.cloned().collect();
        (!sequences.is_empty()).then_some(Self {
            sequences,
            last: Vec::new(),
        })
    }

    /// Whether this token completes one of them.
    pub(super) fn end_with(&mut self, token: Token) -> bool {
        let longest = self.sequences.iter().map(Vec::len).max().unwrap_or(0);
        if self.last.len() == longest {
            self.last.remove(0);
        }
        self.last.push(token);
        let mut sequences = self.sequences.iter();
        sequences.any(|sequence| self.last.ends_with(sequence))
    }
}
