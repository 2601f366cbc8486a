use proptest::prelude::*;

use super::*;
use crate::api::{ChatRequest, EngineError, Vocabulary};
use crate::model::Model;
use crate::scripted::{Config, Script, Scripted};

/// Tokens of any bytes; the last one has none and is EOG.
struct Pieces(Vec<Vec<u8>>);

impl Vocabulary for Pieces {
    fn size(&self) -> usize {
        self.0.len() + 1
    }

    fn tokenize(&self, _text: &str, _special: bool) -> Vec<Token> {
        Vec::new()
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0.get(token as usize).map_or(&[], |piece| &piece[..])
    }

    fn is_special(&self, token: Token) -> bool {
        self.is_end(token)
    }

    fn is_end(&self, token: Token) -> bool {
        token as usize == self.0.len()
    }

    fn bos(&self) -> Option<Token> {
        None
    }

    fn end_of_turn(&self) -> Option<Token> {
        None
    }

    fn chat(&self, _chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        Ok(Vec::new())
    }
}

fn over(pieces: &[&str], words: &[&str]) -> BadWords {
    let pieces = pieces.iter().map(|piece| piece.as_bytes().to_vec());
    let vocabulary = Pieces(pieces.collect());
    let size = u32::try_from(vocabulary.size()).unwrap();
    let token_index = TokenIndex::new(Arc::new(vocabulary), size);
    let words = words.iter().map(|word| (*word).to_owned()).collect();
    BadWords::new(words, Arc::new(token_index))
}

/// A word may be a whole token, split over tokens, within longer tokens, and begun more than once at the same time.
#[test]
fn tr_401_tokens_that_would_complete_a_bad_word_are_masked() {
    let pieces = ["c", "a", "t", "ca", "at", "cat", "scatter", "ts", " ", "tt"];
    let reply = |text: &[Token]| text.to_vec();
    for (words, output, forbidden) in [
        (&["cat"][..], reply(&[]), &[5, 6][..]),
        (&["cat"], reply(&[0]), &[4, 5, 6]),
        (&["cat"], reply(&[0, 1]), &[2, 5, 6, 7, 9]),
        (&["cat"], reply(&[3]), &[2, 5, 6, 7, 9]),
        (&["cat"], reply(&[3, 8]), &[5, 6]),
        (&["cat"], reply(&[8, 3, 10, 10]), &[2, 5, 6, 7, 9]),
        (&["tt", "t ca", "a t"], reply(&[4]), &[2, 6, 7, 9]),
        (&["tt", "t ca", "a t"], reply(&[1, 8]), &[2, 6, 7, 9]),
        (&["tt", "t ca", "a t"], reply(&[2, 8]), &[3, 5, 6, 9]),
        // A token of one letter is a word, too.
        (&["t"], reply(&[3]), &[2, 4, 5, 6, 7, 9]),
        (&["nowhere"], reply(&[3]), &[]),
    ] {
        let mask = over(&pieces, words).mask(output.iter().rev().copied());
        let seen: Vec<Token> = (0..11).filter(|&token| !mask.allows(token)).collect();
        assert_eq!(seen, forbidden, "{words:?} after {output:?}");
    }
}

/// A word that contains another word adds no work.
#[test]
fn tr_401_words_that_contain_another_bad_word_are_dropped() {
    let words = ["stop it", "stop", "stop", "a stop", "it"].map(str::to_owned);
    assert_eq!(shortest(words.into()), ["it", "stop"]);
}

#[test]
fn tr_401_a_vocabulary_of_bytes_forbids_the_last_byte_of_a_word() {
    let model = Scripted::new(Config {
        script: Script::Echo,
        ..Config::default()
    })
    .unwrap();
    let token_index = Arc::new(TokenIndex::new(model.vocabulary(), 258));
    let longest = "é".repeat(512);
    let bad = BadWords::new(vec![longest.clone()], token_index);
    let output = &longest.as_bytes()[..longest.len() - 1];
    let mask = bad.mask(output.iter().rev().map(|&byte| Token::from(byte)));
    assert_eq!((mask.count(), mask.allows(0xa9)), (257, false));
    let mask = bad.mask(output[1..].iter().rev().map(|&byte| Token::from(byte)));
    assert_eq!(mask.count(), 258);
}

fn bytes(length: Range<usize>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(b'a'..b'd', length)
}

proptest! {
    /// The mask equals a search of the whole text, wherever the words are split into tokens.
    #[test]
    fn tr_401_a_token_is_forbidden_if_and_only_if_a_word_ends_within_it(
        pieces in prop::collection::vec(bytes(0..6), 1..24),
        words in prop::collection::vec(bytes(1..8), 1..5),
        output in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let words: Vec<String> = words.into_iter().map(|word| String::from_utf8(word).unwrap()).collect();
        let size = pieces.len() + 1;
        let text = |output: &[usize]| -> String {
            let pieces = output.iter().filter_map(|&token| pieces.get(token));
            String::from_utf8(pieces.flatten().copied().collect()).unwrap()
        };
        let ends = |text: &str| words.iter().map(|word| {
            (0..text.len()).filter(|&at| text[at..].starts_with(word.as_str())).count()
        }).sum::<usize>();
        // Only outputs that contain no word yet.
        let mut reply = Vec::new();
        for index in &output {
            reply.push(index.index(size));
            if ends(&text(&reply)) > 0 {
                reply.pop();
            }
        }
        let token_index = TokenIndex::new(Arc::new(Pieces(pieces.clone())), size as u32);
        let bad = BadWords::new(words.clone(), Arc::new(token_index));
        let mask = bad.mask(reply.iter().rev().map(|&token| token as Token));
        for token in 0..size {
            let completes = ends(&text(&[&reply[..], &[token]].concat())) > 0;
            prop_assert_eq!(!mask.allows(token as Token), completes, "token {}", token);
        }
    }
}
