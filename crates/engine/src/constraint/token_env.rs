//! [`LazyFactory`]: a model's vocabulary in the form that the automata walk, built when it is first needed.

use std::sync::{Arc, OnceLock};

use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
};
use llguidance::{ParserFactory, panic_utils};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SteerRefusal, Token};

use super::compile::parser_limits;
use crate::api::SharedVocabulary;
use crate::continuation::tokenize_continuation;

/// Builds the token trie of a vocabulary once, on the first use of a constraint: it takes longer than loading a small
/// model, and most models never need it.
pub(super) struct LazyFactory {
    vocabulary: SharedVocabulary,
    built: OnceLock<Result<Arc<Factory>, SteerRefusal>>,
}

/// What all constraints of a model share.
pub(super) struct Factory {
    pub(super) parsers: ParserFactory,
    /// The EOG tokens.
    pub(super) ends: Vec<Token>,
}

impl LazyFactory {
    pub(super) const fn new(vocabulary: SharedVocabulary) -> Self {
        Self {
            vocabulary,
            built: OnceLock::new(),
        }
    }

    pub(super) fn get(&self) -> Result<Arc<Factory>, SteerRefusal> {
        let built = self.built.get_or_init(|| self.build().map(Arc::new));
        built.clone()
    }

    fn build(&self) -> Result<Factory, SteerRefusal> {
        if !self.vocabulary.has_text() {
            return Err(unusable(
                Code::Unimplemented,
                "the vocabulary of this model is not known here, so its output cannot be constrained",
            ));
        }
        let built = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let env = VocabularyEnv::new(Arc::clone(&self.vocabulary));
            let ends = env.ends.clone();
            let env: TokEnv = Arc::new(env);
            let forces = InferenceCapabilities {
                ff_tokens: true,
                ..InferenceCapabilities::default()
            };
            let slices = SlicedBiasComputer::general_slices();
            let mut parsers = ParserFactory::new(&env, forces, &slices)?;
            parsers.quiet();
            *parsers.limits_mut() = parser_limits();
            Ok(Factory { parsers, ends })
        }));
        built.map_err(|error| {
            tracing::error!(%error, "the token trie of a model cannot be built");
            unusable(
                Code::Internal,
                "the vocabulary of this model cannot be constrained",
            )
        })
    }
}

fn unusable(code: Code, message: &str) -> SteerRefusal {
    SteerRefusal {
        code,
        reason: ErrorReason::CONTROLLERS_UNAVAILABLE,
        message: message.to_owned(),
    }
}

/// A vocabulary with its trie.
struct VocabularyEnv {
    vocabulary: SharedVocabulary,
    trie: TokTrie,
    ends: Vec<Token>,
}

impl VocabularyEnv {
    fn new(vocabulary: SharedVocabulary) -> Self {
        let size = Token::try_from(vocabulary.size()).unwrap_or(Token::MAX);
        let words: Vec<Vec<u8>> = (0..size).map(|token| word(&vocabulary, token)).collect();
        let ends: Vec<Token> = (0..size)
            .filter(|&token| vocabulary.is_end(token))
            .collect();
        let first = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(size, first), &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(&ends);
        }
        Self {
            vocabulary,
            trie,
            ends,
        }
    }

    /// Tokenises text in the middle of a sequence.
    fn tokenize_text(&self, text: &str) -> Vec<TokenId> {
        // Whatever the tokenizer does with this text, the tokens must spell it.
        tokenize_continuation(&*self.vocabulary, text, false)
            .unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
    }
}

/// The bytes of a token in the trie. Control tokens have a name there, behind a byte that UTF-8 does not use.
fn word(vocabulary: &SharedVocabulary, token: Token) -> Vec<u8> {
    if !vocabulary.is_special(token) {
        return vocabulary.bytes(token).to_vec();
    }
    match vocabulary.name(token) {
        Some(name) if !name.is_empty() => {
            let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            word.extend_from_slice(name.as_bytes());
            word
        }
        _ => Vec::new(),
    }
}

impl TokenizerEnv for VocabularyEnv {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // Forced bytes may end within a character.
        let tokenize = |text: &str| self.tokenize_text(text);
        self.trie.tokenize_with_greedy_fallback(bytes, tokenize)
    }
}
