use std::sync::Arc;

use proptest::prelude::*;
use sapwood_proto::steer::Token;

use super::*;
use crate::api::{GenerationRequest, Prompt};
use crate::bad_words::TokenIndex;
use crate::model::Model;
use crate::owner::detokenizer::Detokenizer;
use crate::scripted::{Config as Script, Scripted};
use crate::submission::{RequestTerms, prepare};

/// Each byte is a token.
const TOKENS: u32 = 258;
const EOS: Token = 257;

/// What happens to an output.
#[derive(Clone, Debug)]
enum Operation {
    Sample(Token),
    Force(Vec<Token>),
    /// So many tokens, or all of them if there are fewer.
    RollBack(usize),
    /// Another sequence goes on with a copy.
    Fork,
}

/// An output with its text, as the engine has it.
#[derive(Clone, Default)]
struct Output {
    tokens: SteeredOutput,
    text: ChoiceText,
    /// The text as a client has it.
    received: String,
}

fn vocabulary() -> Detokenizer {
    let model = Scripted::new(Script::default()).unwrap();
    Detokenizer::new(model.vocabulary(), TOKENS)
}

fn terms(stop: &[&str]) -> RequestTerms {
    let model = Scripted::new(Script::default()).unwrap();
    let mut request = GenerationRequest::new(Prompt::Text("hello".to_owned()));
    request.params.stop = stop.iter().map(|&text| text.to_owned()).collect();
    let token_index = || Arc::new(TokenIndex::new(model.vocabulary(), TOKENS));
    let info = model.info();
    let prepared = prepare(request, &info, &*model.vocabulary(), 8, token_index, || 7);
    prepared.unwrap().terms
}

impl Output {
    fn append(&mut self, vocabulary: &Detokenizer, terms: &RequestTerms, id: Token, forced: bool) {
        let token = Sampled {
            forced,
            ..vocabulary.sampled(id)
        };
        if forced || !vocabulary.is_end(terms, id) {
            let bytes = terms.bytes(&*vocabulary.vocabulary, id);
            let (text, received) = (&mut self.text, &mut self.received);
            text.push(&bytes, &terms.stop, false, received);
        }
        self.tokens.push(token, &self.text);
    }

    /// Returns how many tokens were looked at again.
    fn roll_back(&mut self, vocabulary: &Detokenizer, terms: &RequestTerms, count: usize) -> usize {
        let left = self.tokens.len().saturating_sub(count);
        self.tokens.truncate(left);
        let (mut text, replayed) = self.tokens.since_checkpoint();
        vocabulary.replay(terms, replayed, &mut text, &mut String::new());
        let withdrawn = self.text.shown() - text.shown();
        self.received
            .truncate(self.received.len() - usize::try_from(withdrawn).unwrap());
        self.text = text;
        replayed.len()
    }

    fn check(&self, vocabulary: &Detokenizer, terms: &RequestTerms) {
        let (mut text, mut shown) = (ChoiceText::default(), String::new());
        vocabulary.replay(terms, &self.tokens, &mut text, &mut shown);
        assert_eq!(self.text, text);
        assert_eq!(self.received, shown);
    }
}

fn token() -> impl Strategy<Value = Token> {
    let byte = prop::sample::select("aabUser:\n\né€😀".as_bytes());
    prop_oneof![
        20 => byte.prop_map(Token::from),
        1 => 0..TOKENS,
        1 => Just(EOS),
    ]
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => token().prop_map(Operation::Sample),
        4 => prop::collection::vec(token(), 0..50).prop_map(Operation::Force),
        4 => (0_usize..80).prop_map(Operation::RollBack),
        1 => Just(Operation::Fork),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The text, what is held back of it, and what a client has of it are those of the same tokens from the start.
    #[test]
    fn ai_822_a_text_that_was_rolled_back_is_that_of_its_tokens(
        operations in prop::collection::vec(operation(), 1..40),
        stops in prop::sample::select(vec![&[][..], &["User:", "\n\n"], &["aaaaaaaaaaaab", "é😀"]]),
    ) {
        let (vocabulary, terms) = (vocabulary(), terms(stops));
        let mut output = Output::default();
        let mut others = Vec::new();
        for operation in operations {
            match operation {
                Operation::Sample(id) => output.append(&vocabulary, &terms, id, false),
                Operation::Force(tokens) => {
                    for id in tokens {
                        output.append(&vocabulary, &terms, id, true);
                    }
                }
                Operation::RollBack(count) => {
                    let replayed = output.roll_back(&vocabulary, &terms, count);
                    prop_assert!(replayed < CHECKPOINT_TOKENS);
                }
                Operation::Fork => {
                    others.push(output.clone());
                    let first = others.len() / 2;
                    std::mem::swap(&mut others[first], &mut output);
                }
            }
            output.check(&vocabulary, &terms);
        }
    }
}

/// The work of a rollback, and the memory for it, do not grow with the output.
#[test]
fn ai_822_a_rollback_of_a_long_output_looks_at_few_tokens() {
    let (vocabulary, terms) = (vocabulary(), terms(&["xxxxxxxxy"]));
    let mut output = Output::default();
    let mut replayed = 0;
    for _ in 0..1000 {
        // Something is held back after every token.
        for _ in 0..17 {
            output.append(&vocabulary, &terms, Token::from(b'x'), true);
        }
        replayed += output.roll_back(&vocabulary, &terms, 1);
    }
    assert_eq!(output.tokens.len(), 16_000);
    assert!(replayed < 1000 * CHECKPOINT_TOKENS, "{replayed}");
    assert_eq!(output.tokens.checkpoints.len(), 16_000 / CHECKPOINT_TOKENS);
    output.check(&vocabulary, &terms);
}
