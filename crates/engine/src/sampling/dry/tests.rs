//! DRY against tables made by hand, and against a naive search that compares every place.

use proptest::prelude::*;

use super::*;
use crate::api::{ChatRequest, EngineError};

/// A vocabulary of these texts.
struct Pieces(Vec<&'static str>);

impl Vocabulary for Pieces {
    fn size(&self) -> usize {
        self.0.len()
    }

    fn tokenize(&self, _: &str, _: bool) -> Vec<Token> {
        Vec::new()
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0[token as usize].as_bytes()
    }

    fn is_special(&self, _: Token) -> bool {
        false
    }

    fn is_end(&self, _: Token) -> bool {
        false
    }

    fn bos(&self) -> Option<Token> {
        None
    }

    fn end_of_turn(&self) -> Option<Token> {
        None
    }

    fn chat(&self, _: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        Ok(Vec::new())
    }
}

/// `a` to `e`, a token that contains a breaker, the two halves of one, and a token without text.
fn pieces() -> Pieces {
    Pieces(vec!["a", "b", "c", "d", "e", "x\ny", "<", "|", ""])
}

fn dry(breakers: &[&str]) -> DrySampling {
    DrySampling {
        multiplier: 0.5,
        base: 2.0,
        allowed_length: 2,
        penalty_last_n: -1,
        sequence_breakers: breakers.iter().map(|&text| text.into()).collect(),
    }
}

/// The penalties after a prompt and an output that is appended token by token.
fn penalties(dry: &DrySampling, prompt: &[Token], output: &[Token]) -> Vec<(Token, f32)> {
    let vocabulary = pieces();
    let mut history = DryHistory::of(prompt, &Arc::new(dry.clone()), &vocabulary);
    let mut tokens = prompt.to_vec();
    for &token in output {
        tokens.push(token);
        history.append(&tokens, &vocabulary);
    }
    sorted(history.penalties(&tokens, &mut DryScratch::default()))
}

fn sorted(penalties: &[(Token, f32)]) -> Vec<(Token, f32)> {
    let mut penalties = penalties.to_vec();
    penalties.sort_by_key(|(token, _)| *token);
    penalties
}

#[test]
fn tokens_that_continue_a_repetition_are_penalised_by_its_length() {
    // a b c c b c y a b c: `a b c` repeats, after which came c; `b c` repeats, after which came y, here e.
    let text = [0, 1, 2, 2, 1, 2, 4, 0, 1, 2];
    let plain = dry(&[]);
    // 0.5 * 2^(3 - 2), and 0.5 * 2^(2 - 2); `c` alone is too short, so b after it is free.
    let both = [(2, 1.0), (4, 0.5)];
    for split in 0..=text.len() {
        assert_eq!(penalties(&plain, &text[..split], &text[split..]), both);
    }
    let longer = DrySampling {
        allowed_length: 3,
        ..plain.clone()
    };
    assert_eq!(penalties(&longer, &text, &[]), [(2, 0.5)]);
    let shorter = DrySampling {
        allowed_length: 1,
        ..plain.clone()
    };
    assert_eq!(
        penalties(&shorter, &text, &[]),
        [(1, 0.5), (2, 2.0), (4, 1.0)]
    );
    // The last 7: the first `a b c` is out of sight.
    let window = DrySampling {
        penalty_last_n: 7,
        ..plain.clone()
    };
    assert_eq!(penalties(&window, &text, &[]), [(4, 0.5)]);
    assert_eq!(penalties(&plain, &[], &[]), []);
    assert_eq!(penalties(&plain, &[0], &[]), []);
}

#[test]
fn no_repetition_crosses_a_breaker() {
    // a b < | a b c a b < | a b: without breakers six tokens repeat, and with `<|` two.
    let text = [0, 1, 6, 7, 0, 1, 2, 0, 1, 6, 7, 0, 1];
    assert_eq!(penalties(&dry(&[]), &text, &[]), [(2, 8.0), (6, 0.5)]);
    for split in 0..=text.len() {
        let found = penalties(&dry(&["<|"]), &text[..split], &text[split..]);
        assert_eq!(found, [(2, 0.5), (6, 0.5)], "{split}");
    }
    // `|` is a breaker of its own, and so is the token that starts a repetition: it is free.
    let single = dry(&["<"]);
    assert_eq!(penalties(&single, &text, &[]), [(2, 1.0)]);
    // A token without text between the halves changes nothing.
    let apart = [0, 1, 6, 8, 7, 0, 1, 2, 0, 1, 6, 8, 7, 0, 1];
    assert_eq!(penalties(&dry(&["<|"]), &apart, &[]), [(2, 0.5), (6, 0.5)]);
    // The breaker is in the middle of a token.
    let inside = [0, 1, 5, 0, 1, 2, 0, 1, 5];
    assert_eq!(penalties(&dry(&["\n"]), &inside, &[0, 1]), [(2, 0.5)]);
}

#[test]
fn rolling_back_forgets_the_breakers_of_the_output() {
    let vocabulary = pieces();
    let dry = Arc::new(dry(&["\n"]));
    let mut tokens = vec![0, 1, 2, 0, 1];
    let mut history = DryHistory::of(&tokens, &dry, &vocabulary);
    let mut scratch = DryScratch::default();
    let first = history.penalties(&tokens, &mut scratch).to_vec();
    assert_eq!(first, [(2, 0.5)]);
    tokens.push(5);
    history.append(&tokens, &vocabulary);
    assert_eq!(history.penalties(&tokens, &mut scratch), []);
    history.truncate(5);
    tokens.pop();
    assert_eq!(history.penalties(&tokens, &mut scratch), first);
}

/// The buffers are used again and again, by all sequences.
#[test]
fn a_computation_leaves_nothing_for_the_next() {
    let (vocabulary, dry) = (pieces(), Arc::new(dry(&[])));
    let mut scratch = DryScratch::default();
    for (text, penalised) in [
        (&[0, 1, 2, 0, 1][..], &[2][..]),
        (&[3, 4, 1, 3, 4], &[1]),
        (&[0, 1, 2], &[]),
    ] {
        let history = DryHistory::of(text, &dry, &vocabulary);
        let found = history.penalties(text, &mut scratch).to_vec();
        let tokens: Vec<_> = found.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, penalised);
        let marked: Vec<_> = (0..9)
            .filter(|&token| scratch.is_penalised(token))
            .collect();
        assert_eq!(marked, penalised);
        for (token, penalty) in found {
            assert_eq!(history.penalty(token, &scratch), penalty);
        }
    }
    scratch.clear();
    assert!((0..9).all(|token| !scratch.is_penalised(token)));
}

#[test]
fn a_prompt_is_searched_for_breakers_within_the_window_only() {
    let window = DrySampling {
        penalty_last_n: 4,
        ..dry(&["\n", "<"])
    };
    let history = DryHistory::of(&[6, 5, 0, 1, 0, 1], &Arc::new(window), &pieces());
    assert_eq!(history.request.prompt_end, 0);
    assert!(history.request.breaking.is_empty());
    let window = DrySampling {
        penalty_last_n: 5,
        ..dry(&["\n", "<"])
    };
    let history = DryHistory::of(&[6, 5, 0, 1, 0, 1], &Arc::new(window), &pieces());
    assert_eq!(history.request.prompt_end, 2);
    assert_eq!(history.request.breaking, [5]);
}

#[test]
fn a_penalty_is_never_infinite() {
    let steep = DrySampling {
        multiplier: 100.0,
        base: 100.0,
        ..dry(&[])
    };
    let text = vec![0; 2_000];
    let found = penalties(&steep, &text, &[]);
    assert_eq!(found, [(0, 1e32)]);
    let flat = DrySampling { base: 1.0, ..steep };
    assert_eq!(penalties(&flat, &text, &[]), [(0, 100.0)]);
}

/// A search that compares every place with the end would need 2^39 comparisons here, which no test could wait for.
#[test]
fn a_long_repetitive_text_costs_no_more_than_its_length() {
    let text = vec![0; 1 << 20];
    let mut out = Vec::new();
    repeats(&text, &mut out);
    assert!((1..text.len()).all(|at| out[at] as usize == text.len() - at));
}

proptest! {
    #[test]
    fn repeats_are_those_of_a_naive_search(text in prop::collection::vec(0..3_u32, 0..80)) {
        let mut found = Vec::new();
        repeats(&text, &mut found);
        let naive: Vec<u32> = (0..text.len())
            .map(|back| {
                let earlier = &text[..text.len() - back];
                let pairs = text.iter().rev().zip(earlier.iter().rev());
                pairs.take_while(|(left, right)| left == right).count() as u32
            })
            .collect();
        prop_assert_eq!(found, naive);
    }

    /// However the text is split into prompt and output, and whatever was rolled back in between.
    #[test]
    fn penalties_depend_on_the_text_alone(
        text in prop::collection::vec(0..9_u32, 0..60),
        split in 0..60_usize,
        detour in prop::collection::vec(0..9_u32, 0..8),
    ) {
        let vocabulary = pieces();
        let split = split.min(text.len());
        let dry = Arc::new(DrySampling { allowed_length: 1, ..dry(&["\n", "<|", "ab"]) });
        let mut tokens = text[..split].to_vec();
        let mut history = DryHistory::of(&tokens, &dry, &vocabulary);
        for &token in &detour {
            tokens.push(token);
            history.append(&tokens, &vocabulary);
        }
        history.truncate(split);
        tokens.truncate(split);
        for &token in &text[split..] {
            tokens.push(token);
            history.append(&tokens, &vocabulary);
        }
        let found = sorted(history.penalties(&tokens, &mut DryScratch::default()));
        prop_assert_eq!(found, penalties(&dry, &text, &[]));
    }
}
