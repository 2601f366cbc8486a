//! A source of constraints for tests: the kind `options` over any vocabulary, without the crate that has real ones.

use std::sync::Arc;

use sapwood_proto::steer::{
    HostConstraint, HostConstraintCall, HostConstraintSource, Mask, SharedMask, SteerFailure,
    Steered, Token,
};

/// Opens constraints over a vocabulary.
pub(crate) struct OptionsSource {
    tokens: Arc<[Vec<u8>]>,
    eos: Token,
}

impl OptionsSource {
    /// The bytes of each token; of special ones none.
    pub(crate) fn new(tokens: impl IntoIterator<Item = Vec<u8>>, eos: Token) -> Self {
        Self {
            tokens: tokens.into_iter().collect(),
            eos,
        }
    }
}

impl HostConstraintSource for OptionsSource {
    fn open(&self, call: HostConstraintCall<'_>) -> Result<Box<dyn HostConstraint>, String> {
        if call.kind != "options" {
            return Err(format!("there is no constraint {}", call.kind));
        }
        let options: Vec<String> = serde_json::from_str(call.value)
            .map_err(|error| format!("invalid grammar: {error}"))?;
        if options.is_empty() {
            return Err("invalid grammar: there is no option".to_owned());
        }
        Ok(Box::new(OneOfThem {
            tokens: Arc::clone(&self.tokens),
            eos: self.eos,
            options: options.into_iter().map(String::into_bytes).collect(),
            lengths: vec![0],
            text: Vec::new(),
            ended: false,
        }))
    }
}

#[derive(Clone)]
struct OneOfThem {
    tokens: Arc<[Vec<u8>]>,
    eos: Token,
    options: Vec<Vec<u8>>,
    /// Of the text, before each token and at the end.
    lengths: Vec<usize>,
    text: Vec<u8>,
    ended: bool,
}

impl OneOfThem {
    fn allows(&self, token: Token) -> bool {
        if self.ended {
            return false;
        }
        if token == self.eos {
            return self.options.contains(&self.text);
        }
        let bytes = self
            .tokens
            .get(token as usize)
            .map_or(&[][..], Vec::as_slice);
        let fits = |option: &Vec<u8>| {
            option
                .strip_prefix(&self.text[..])
                .is_some_and(|rest| rest.starts_with(bytes))
        };
        !bytes.is_empty() && self.options.iter().any(fits)
    }
}

impl HostConstraint for OneOfThem {
    fn consume(&mut self, token: Token) -> Steered<bool> {
        if !self.allows(token) {
            return Ok(false);
        }
        self.ended = token == self.eos;
        if !self.ended {
            self.text.extend_from_slice(&self.tokens[token as usize]);
        }
        self.lengths.push(self.text.len());
        Ok(true)
    }

    fn rollback(&mut self, tokens: u32) -> Steered<()> {
        if tokens as usize >= self.lengths.len() {
            return Err(SteerFailure {
                reason: sapwood_proto::error_reason::ErrorReason::CONSTRAINT_FAILED,
                message: format!("backtrack {tokens} past the beginning"),
            });
        }
        self.lengths.truncate(self.lengths.len() - tokens as usize);
        self.text.truncate(self.lengths[self.lengths.len() - 1]);
        self.ended &= tokens == 0;
        Ok(())
    }

    fn mask(&mut self) -> Steered<SharedMask> {
        let mut mask = Mask::none(self.tokens.len());
        let ids = (0..).take(self.tokens.len());
        ids.filter(|id| self.allows(*id))
            .for_each(|id| mask.allow(id));
        Ok(Arc::new(mask))
    }

    fn forced(&mut self) -> Steered<Vec<Token>> {
        let mut ahead = self.clone();
        let mut forced = Vec::new();
        loop {
            let mask = ahead.mask()?;
            let ids = (0..).take(self.tokens.len());
            let mut allowed = ids.filter(|id| mask.allows(*id));
            match (allowed.next(), allowed.next()) {
                (Some(only), None) if only != self.eos => forced.push(only),
                _ => return Ok(forced),
            }
            ahead.consume(forced[forced.len() - 1])?;
        }
    }

    fn fork(&mut self) -> Steered<Box<dyn HostConstraint>> {
        Ok(Box::new(self.clone()))
    }

    fn bytes(&mut self) -> usize {
        let options: usize = self.options.iter().map(Vec::len).sum();
        1_000 + options + 100 * self.lengths.len()
    }
}
