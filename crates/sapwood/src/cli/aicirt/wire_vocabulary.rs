//! [`WireVocabulary`]: the tokens of the engine on the wire, for constraints and controllers.

use sapwood_engine::api::{ChatRequest, EngineError, Vocabulary};
use sapwood_engine::gguf_vocabulary::GgufVocabulary;
use sapwood_engine::template::no_template;
use sapwood_engine::tokenizer::FileTokenizer;
use sapwood_proto::steer::Token;

use super::longest_tokens::LongestTokens;
use super::saved_trie::SavedTrie;

/// A tokenizer, padded to the size that the engine gives.
pub(super) struct WireVocabulary {
    tokens: Tokens,
    size: usize,
    /// The one end of a text that the protocol knows; the tokenizer may have others.
    eos: Token,
}

/// Where the tokens are from.
pub(super) enum Tokens {
    File(Box<FileTokenizer>),
    Trie(SavedTrie),
    Gguf(GgufTokens),
}

/// The tokens of a model's file.
pub(super) struct GgufTokens {
    tokens: GgufVocabulary,
    /// Only where the file's own rules are not known.
    longest: Option<LongestTokens>,
}

impl GgufTokens {
    pub(super) fn new(tokens: GgufVocabulary) -> Self {
        let longest = tokens.tokenize("").is_none().then(|| {
            let ids = 0..Token::try_from(tokens.size()).unwrap_or(Token::MAX);
            LongestTokens::new(ids.map(|id| (id, tokens.bytes(id))))
        });
        Self { tokens, longest }
    }

    fn tokenize(&self, text: &str) -> Vec<Token> {
        match &self.longest {
            Some(longest) => longest.tokenize(text.as_bytes()),
            None => self.tokens.tokenize(text).unwrap_or_default(),
        }
    }
}

impl WireVocabulary {
    /// `None`: nothing says which token ends a text.
    pub(super) fn new(tokens: Tokens, padded: Option<usize>) -> Option<Self> {
        let (own_size, eos) = match &tokens {
            Tokens::File(file) => (file.size(), end_of(file)?),
            Tokens::Trie(trie) => (trie.size(), trie.eos),
            Tokens::Gguf(gguf) => (gguf.tokens.size(), gguf.tokens.eos()?),
        };
        Some(Self {
            tokens,
            size: padded.map_or(own_size, |padded| {
                padded.clamp(own_size, TOKENS_MAX.max(own_size))
            }),
            eos,
        })
    }
}

impl Vocabulary for WireVocabulary {
    fn size(&self) -> usize {
        self.size
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        match &self.tokens {
            Tokens::File(file) => file.tokenize(text, special),
            Tokens::Trie(trie) => trie.tokenize(text.as_bytes()),
            // Names of control tokens are text here, as in a saved trie.
            Tokens::Gguf(gguf) => gguf.tokenize(text),
        }
    }

    fn bytes(&self, token: Token) -> &[u8] {
        match &self.tokens {
            Tokens::File(file) => file.bytes(token),
            Tokens::Trie(trie) => trie.bytes(token),
            Tokens::Gguf(gguf) => gguf.tokens.bytes(token),
        }
    }

    fn is_special(&self, token: Token) -> bool {
        match &self.tokens {
            Tokens::File(file) => file.is_special(token),
            Tokens::Trie(trie) => trie.name(token).is_some(),
            Tokens::Gguf(gguf) => gguf.tokens.name(token).is_some(),
        }
    }

    fn name(&self, token: Token) -> Option<String> {
        match &self.tokens {
            Tokens::File(file) => file.name(token),
            Tokens::Trie(trie) => trie.name(token),
            Tokens::Gguf(gguf) => gguf.tokens.name(token).map(str::to_owned),
        }
    }

    fn is_end(&self, token: Token) -> bool {
        token == self.eos
    }

    fn bos(&self) -> Option<Token> {
        match &self.tokens {
            Tokens::File(file) => file.bos(),
            Tokens::Trie(_) => None,
            Tokens::Gguf(gguf) => gguf.tokens.bos(),
        }
    }

    fn end_of_turn(&self) -> Option<Token> {
        Some(self.eos)
    }

    fn chat(&self, _chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        // Prompts come from the engine.
        Err(no_template())
    }
}

/// The token that ends a text: what the configuration names, else the first of the known names, for a file without one.
fn end_of(file: &FileTokenizer) -> Option<Token> {
    let ids = 0..Token::try_from(file.size()).unwrap_or(Token::MAX);
    let named = |end: &&str| {
        let is_named = |id: &Token| file.is_special(*id) && file.name(*id).as_deref() == Some(end);
        ids.clone().find(is_named)
    };
    let named = ENDS.iter().find_map(named);
    file.end_of_turn().or(named)
}

/// Names of tokens that end a text. Those that the reference runtime looks for come first: its engines choose theirs in
/// the same way, and go on behind any other.
const ENDS: [&str; 7] = [
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<eos>",
    "<|end|>",
];
/// The most tokens that a trie can name (AI-631).
const TOKENS_MAX: usize = (1 << 24) - 2;
