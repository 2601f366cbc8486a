//! Stop sequences, for servers that do not support them (LM-704).

use crate::lmtp::GenerateRequest;
use crate::steer::Token;

/// Sequences of tokens that end a stream, watched for at our end.
#[derive(Debug)]
pub(super) struct Stops {
    sequences: Vec<Vec<Token>>,
    /// The last tokens, as many as the longest sequence has.
    last: Vec<Token>,
}

impl Stops {
    /// What of a request is to be watched for; `None` if that is nothing.
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
