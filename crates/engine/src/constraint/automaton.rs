//! [`Automaton`]: where one sequence is in its grammar. All calls of `llguidance` that a sequence causes are here.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use llguidance::{CancellationHandle, TokenParser, panic_utils};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Mask, SharedMask, SteerFailure, Token};

use super::budget::{Budget, Charge, Excess};
use super::grammar::GrammarError;

/// What a sequence may do next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    /// Exactly these tokens follow.
    Forced(Vec<Token>),
    /// One of these follows.
    Allowed(SharedMask),
    /// The grammar is complete, nothing follows, and the vocabulary has no EOG token that could express it.
    Complete,
}

/// Why an automaton cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AutomatonError {
    /// No token is allowed, and the grammar is not complete.
    #[error("the constraint allows no token here")]
    Empty,
    /// A token that the grammar does not allow was appended.
    #[error("the constraint does not allow token {0} here")]
    Rejected(Token),
    /// A limit of the work in one step, or an error within the library.
    #[error("the constraint cannot be followed: {0}")]
    Failed(GrammarError),
    /// Its states take too much memory.
    #[error("the constraint takes too much memory; make it simpler")]
    TooLarge,
    /// The states of all automata take too much memory.
    #[error("the constraints of this model take too much memory; try again later")]
    Full,
    /// The sequence has ended meanwhile.
    #[error("the sequence has ended")]
    Cancelled,
    /// Its work on the engine's thread took too much of the time of all sequences, or that for a controller went on after the
    /// time of the callback.
    #[error("the constraint takes too long to follow; make it simpler")]
    Slow,
    /// More tokens were forced at once than it follows.
    #[error("{0} tokens are forced at once; a constraint follows {max}", max = super::steerer::FORCED_MAX)]
    TooMany(usize),
}

impl From<Excess> for AutomatonError {
    fn from(excess: Excess) -> Self {
        match excess {
            Excess::Single => Self::TooLarge,
            Excess::Total => Self::Full,
        }
    }
}

impl From<AutomatonError> for SteerFailure {
    fn from(error: AutomatonError) -> Self {
        let reason = match error {
            AutomatonError::TooLarge
            | AutomatonError::Full
            | AutomatonError::Slow
            | AutomatonError::TooMany(_) => ErrorReason::LIMIT,
            _ => ErrorReason::CONSTRAINT_FAILED,
        };
        Self {
            reason,
            message: error.to_string(),
        }
    }
}

type Outcome<T> = Result<T, AutomatonError>;

/// The state of one sequence in its grammar.
///
/// Nothing in it is shared with another one, not even caches: a library that has a lock on shared caches would make the
/// engine's thread wait for the mask of another sequence, and a panic would poison the lock for all.
pub(super) struct Automaton {
    parser: TokenParser,
    cancellation: CancellationHandle,
    charge: Charge,
    /// Items of the rows of the tokens that it has consumed. Those of tokens that were taken back count on: few are.
    kept_items: usize,
    /// Bytes of its rows that are not charged yet.
    uncharged: usize,
}

impl Automaton {
    /// Takes a parser that has not started. Its memory and that of its copies is charged to `budget`.
    pub(super) fn start(mut parser: TokenParser, budget: &Arc<Budget>) -> Outcome<Self> {
        let cancellation = parser.enable_cancellation();
        let mut automaton = Self {
            parser,
            cancellation,
            charge: Charge::new(Arc::clone(budget)),
            kept_items: 0,
            uncharged: 0,
        };
        automaton.fenced(|parser| {
            parser.start_without_prompt();
            Ok(())
        })?;
        automaton.charge()?;
        Ok(automaton)
    }

    /// Copies the state for a new sequence.
    pub(super) fn copy(&mut self) -> Outcome<Self> {
        self.copy_charged(Charge::set)
    }

    fn copy_charged(
        &mut self,
        charge: fn(&mut Charge, usize) -> Result<(), Excess>,
    ) -> Outcome<Self> {
        let mut parser = self.fenced(|parser| Ok(parser.deep_clone()))?;
        // A copy is cancelled on its own.
        let cancellation = parser.enable_cancellation();
        let mut copy = Self {
            parser,
            cancellation,
            charge: Charge::new(self.charge.budget()),
            kept_items: self.kept_items,
            uncharged: 0,
        };
        let bytes = copy.bytes()?;
        charge(&mut copy.charge, bytes)?;
        Ok(copy)
    }

    /// Charges what it takes now.
    fn charge(&mut self) -> Outcome<()> {
        let bytes = self.bytes()?;
        self.uncharged = 0;
        self.charge.set(bytes).map_err(AutomatonError::from)
    }

    /// As [`Automaton::charge`], on the engine's thread, which drops no grammars: that takes long.
    fn charge_quickly(&mut self) -> Outcome<()> {
        let bytes = self.bytes()?;
        self.uncharged = 0;
        self.charge.set_quickly(bytes).map_err(AutomatonError::from)
    }

    /// As [`Automaton::copy`], for a fork that a controller or a request makes: a large state is refused, and no grammar is
    /// dropped for it, since that takes long and this may be the engine's thread.
    pub(super) fn fork(&mut self) -> Result<Self, SteerFailure> {
        // A copy has all the states of the lexer, and a request may have 64 of them.
        if self.cache_bytes()? > FORK_BYTES_MAX {
            return Err(SteerFailure {
                reason: ErrorReason::LIMIT,
                message: "the constraint is too large to copy".to_owned(),
            });
        }
        Ok(self.copy_charged(Charge::set_quickly)?)
    }

    /// Stops a computation that runs on another thread.
    pub(super) fn cancellation(&self) -> CancellationHandle {
        self.cancellation.clone()
    }

    /// Bytes of the caches that grow while it is used.
    pub(super) fn cache_bytes(&mut self) -> Outcome<usize> {
        self.fenced(|parser| Ok(parser.parser.lexer_stats().num_bytes))
    }

    /// Bytes that it takes, about.
    pub(super) fn bytes(&mut self) -> Outcome<usize> {
        let mask = self.vocabulary() / 8;
        let rows = self.text().len() * TEXT_BYTES + self.kept_items * ITEM_BYTES;
        let caches = self.cache_bytes()?.saturating_mul(CACHE_FACTOR);
        Ok(PARSER_BYTES + mask + rows + caches)
    }

    /// Items of all rows that were ever made, those that masks tried included.
    fn items(&self) -> usize {
        self.parser.parser_stats().all_items
    }

    /// The matched bytes.
    pub(super) fn text(&self) -> &[u8] {
        self.parser.final_bytes()
    }

    /// Tokens of the vocabulary.
    pub(super) fn vocabulary(&self) -> usize {
        self.parser.token_env.tok_trie().vocab_size()
    }

    /// The bytes that a token adds to the text.
    pub(super) fn spelled(&self, token: Token) -> Vec<u8> {
        self.parser.token_env.tok_trie().decode_raw(&[token])
    }

    /// Whether the grammar may end here.
    pub(super) fn is_complete(&mut self) -> Outcome<bool> {
        self.fenced(|parser| Ok(parser.is_accepting()))
    }

    /// Goes on by one token, which is not an EOG token.
    pub(super) fn consume(&mut self, token: Token) -> Outcome<()> {
        let (items, bytes) = (self.items(), self.text().len());
        let consumed = self.fenced(|parser| {
            let backtrack = parser.consume_token(token).map_err(shown)?;
            Ok(backtrack == 0)
        });
        let items = self.items() - items;
        self.kept_items += items;
        let bytes = self.text().len().saturating_sub(bytes);
        self.uncharged += items * ITEM_BYTES + bytes * TEXT_BYTES;
        match consumed {
            Ok(true) if self.uncharged >= UNCHARGED_MAX => self.charge_quickly(),
            Ok(true) => Ok(()),
            // Without the capability to take back tokens the library never asks for it.
            Ok(false) | Err(AutomatonError::Failed(_)) => Err(AutomatonError::Rejected(token)),
            Err(error) => Err(error),
        }
    }

    /// Takes back the last `tokens` tokens.
    pub(super) fn rollback(&mut self, tokens: usize) -> Outcome<()> {
        self.fenced(|parser| parser.rollback(tokens).map_err(shown))
    }

    /// Goes back to the start, from which `tokens` tokens were consumed. Fails if something went wrong before.
    pub(super) fn reset(&mut self, tokens: usize) -> Outcome<()> {
        self.fenced(|parser| {
            parser.rollback(tokens).map_err(shown)?;
            // A token that was consumed and then found too expensive is not among those that the caller counts.
            if !parser.final_bytes().is_empty() {
                return Err("it is not at its start".to_owned());
            }
            // Taking back nothing succeeds in every state.
            let error = parser.parser.get_error().map(|error| error.message());
            match (error, parser.stop_reason()) {
                (None, StopReason::NotStopped) => Ok(()),
                (error, reason) => Err(error.unwrap_or_else(|| reason.to_string())),
            }
        })?;
        self.kept_items = 0;
        self.uncharged = 0;
        // This may be the engine's thread, which drops no grammars.
        let bytes = self.bytes()?;
        self.charge.refund_to(bytes);
        Ok(())
    }

    /// Whether all of `tokens` could follow.
    pub(super) fn accepts(&mut self, tokens: &[Token]) -> Outcome<bool> {
        self.fenced(|parser| {
            let valid = parser.validate_tokens_raw(tokens).map_err(shown)?;
            Ok(valid == tokens.len())
        })
    }

    /// Returns the tokens that must follow, as the model would have tokenised the text.
    pub(super) fn forced(&mut self) -> Outcome<Vec<Token>> {
        let tokens = self.fenced(|parser| {
            let tokens = parser.compute_ff_tokens();
            // It returns no error, but the next call would.
            match parser.parser.get_error() {
                Some(error) => Err(error.message()),
                None => Ok(tokens),
            }
        })?;
        self.charge()?;
        Ok(tokens)
    }

    /// Computes what may follow. `forced`: look for forced tokens first.
    pub(super) fn next(&mut self, forced: bool, ends: &[Token]) -> Outcome<Next> {
        if forced {
            let tokens = self.forced()?;
            if !tokens.is_empty() {
                return Ok(Next::Forced(tokens));
            }
        }
        let vocabulary = self.vocabulary();
        if ends.is_empty() && self.is_complete()? {
            // No token can end the output here, so it goes on as long as it can.
            return Ok(match self.mask(vocabulary) {
                Err(AutomatonError::Empty) => Next::Complete,
                mask => Next::Allowed(mask?),
            });
        }
        Ok(Next::Allowed(self.mask(vocabulary)?))
    }

    fn mask(&mut self, vocabulary: usize) -> Outcome<SharedMask> {
        let set = self.fenced(|parser| parser.compute_mask().map_err(shown));
        if set.is_ok() {
            self.charge()?;
        }
        match set {
            Ok(set) => to_mask(&set, vocabulary).ok_or(AutomatonError::Empty),
            Err(_) if self.parser.stop_reason() == StopReason::NoExtensionBias => {
                Err(AutomatonError::Empty)
            }
            Err(error) => Err(error),
        }
    }

    /// Calls the library. A panic in it is an error of this automaton, which then fails in every later call too.
    fn fenced<T>(
        &mut self,
        call: impl FnOnce(&mut TokenParser) -> Result<T, String>,
    ) -> Outcome<T> {
        let parser = &mut self.parser;
        let called = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(call(parser))));
        let result = called.unwrap_or_else(|panic| Err(panic.to_string()));
        if self.cancellation.is_cancelled() {
            return Err(AutomatonError::Cancelled);
        }
        result.map_err(|text| AutomatonError::Failed(GrammarError::from_compiler(&text)))
    }
}

/// The library's errors have a type that this crate does not depend on.
fn shown(error: impl fmt::Display) -> String {
    error.to_string()
}

/// The words of the library's set are those of a mask; it has one word more for some sizes.
fn to_mask(set: &SimpleVob, vocabulary: usize) -> Option<SharedMask> {
    let words = set.as_slice().get(..vocabulary.div_ceil(32))?.to_vec();
    Mask::from_words(words, vocabulary).map(SharedMask::new)
}

/// What may be appended without being charged: a mask charges it soon, except where a controller forces many tokens.
const UNCHARGED_MAX: usize = 64 << 10;
/// What a parser takes at its start, about.
const PARSER_BYTES: usize = 16 << 10;
/// What it keeps for each byte of the text: a lexer state, a row, the byte and its token.
const TEXT_BYTES: usize = 64;
/// What it keeps for each item of a row.
const ITEM_BYTES: usize = 16;
/// What the caches of a lexer take, for each byte that the library counts: it leaves out its tables of hashes, and what the
/// search for dead states keeps.
const CACHE_FACTOR: usize = 2;
/// Bytes of the states of a constraint that forks.
const FORK_BYTES_MAX: usize = 8 << 20;
