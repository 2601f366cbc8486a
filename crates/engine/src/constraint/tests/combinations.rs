//! Properties of constraints together with everything else that decides about tokens: another constraint, the bans, biases and
//! limits of a request, forks, and a controller that takes tokens back.
//!
//! Each constraint has an independent check of a whole text, and of the beginning of one.

use std::sync::OnceLock;

use proptest::prelude::*;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Appended, Combined, Post, Steer, SteerFailure, Token};
use serde_json::json;

use super::super::ConstraintSource;
use super::driver::{self, Random, Sequence, Step, open};
use super::vocabulary::small;

fn source() -> &'static ConstraintSource {
    static SOURCE: OnceLock<ConstraintSource> = OnceLock::new();
    SOURCE.get_or_init(driver::source)
}

/// A constraint whose texts are all those of a list, written in one of the kinds.
#[derive(Clone, Debug)]
struct Listed {
    kind: &'static str,
    arg: String,
    texts: Vec<String>,
}

impl Listed {
    /// The texts in the form of a kind. A substring has its own list.
    fn new(kind: &'static str, texts: &[String]) -> Self {
        let quoted: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
        let arg = match kind {
            "regex" => texts.join("|"),
            "lark" => format!("start: w\nw: {}", quoted.join(" | ")),
            "gbnf" => format!("root ::= w\nw ::= {}", quoted.join(" | ")),
            "options" => json!(texts).to_string(),
            "json-schema" => json!({ "enum": texts }).to_string(),
            "substring" => texts.concat(),
            other => panic!("{other}"),
        };
        let texts = match kind {
            // The output is the text as JSON.
            "json-schema" => quoted,
            "substring" => pieces(&arg),
            _ => texts.to_vec(),
        };
        Self { kind, arg, texts }
    }

    fn open(&self) -> Box<dyn Steer> {
        open(source(), &format!("sapwood:{}", self.kind), &self.arg).unwrap()
    }
}

fn pieces(text: &str) -> Vec<String> {
    let ends = |from: usize| (from + 1..=text.len()).map(move |to| (from, to));
    (0..text.len())
        .flat_map(ends)
        .map(|(from, to)| text[from..to].to_owned())
        .collect()
}

fn listed() -> impl Strategy<Value = Listed> {
    let kinds = [
        "regex",
        "lark",
        "gbnf",
        "options",
        "json-schema",
        "substring",
    ];
    let texts = prop::collection::vec("[abcn]{1,9}", 1..6);
    (prop::sample::select(kinds.to_vec()), texts)
        .prop_map(|(kind, texts)| Listed::new(kind, &texts))
}

/// Whether a text is the beginning of one of these, or all of it.
fn begins(texts: &[String], text: &str) -> bool {
    texts.iter().any(|whole| whole.starts_with(text))
}

/// What decides about the next token besides the constraint.
struct Sampler {
    random: Random,
    /// Tokens that may not come, as `bad_words` of one token and biases of minus infinity ban them.
    banned: Vec<Token>,
    /// No EOG token before so many tokens.
    min_tokens: usize,
    /// The token that a bias prefers, if it is allowed.
    preferred: Token,
}

impl Sampler {
    /// A token, or `None` where all are banned: the engine then ends the sequence with an error.
    fn choose(&mut self, sequence: &Sequence, allowed: &[Token]) -> Option<Token> {
        let few = sequence.tokens.len() < self.min_tokens;
        let mut left = allowed.to_vec();
        let too_early = |token| few && small().is_end(token);
        left.retain(|&token| !too_early(token) && !self.banned.contains(&token));
        if left.contains(&self.preferred) && self.random.below(2) == 0 {
            return Some(self.preferred);
        }
        (!left.is_empty()).then(|| left[self.random.below(left.len())])
    }
}

/// How a sequence went.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Its steerer or an EOG token ended it.
    Whole,
    /// `max_tokens` came first.
    Length,
    /// No token was left.
    Nothing,
}

/// Two constraints may have no text in common, or none that begins as this one does.
fn nothing(failure: &SteerFailure) -> End {
    assert_eq!(failure.reason, ErrorReason::CONSTRAINT_FAILED, "{failure}");
    End::Nothing
}

/// One step. Returns how the sequence ended, if it has.
fn step(sequence: &mut Sequence, sampler: &mut Sampler, max_tokens: usize) -> Option<End> {
    match sequence.forced() {
        Ok(forced) => sequence.tokens.extend(forced),
        // Another constraint does not allow what one forces.
        Err(failure) => return Some(nothing(&failure)),
    }
    if sequence.ended {
        return Some(End::Whole);
    }
    let mask = match sequence.mid() {
        Ok(Step::Mask(mask)) => mask,
        Ok(Step::Stop) => return Some(End::Whole),
        Err(failure) => return Some(nothing(&failure)),
    };
    let allowed: Vec<Token> = (0..)
        .take(mask.vocabulary())
        .filter(|&token| mask.allows(token))
        .collect();
    let Some(token) = sampler.choose(sequence, &allowed) else {
        return Some(End::Nothing);
    };
    sequence.append(0, &[token], Some(token)).unwrap();
    match sequence.ended {
        true => Some(End::Whole),
        false => (sequence.tokens.len() >= max_tokens).then_some(End::Length),
    }
}

/// Checks that a text is one of the texts if it is whole, and else the beginning of one.
fn check(end: End, text: &str, texts: &[String]) {
    match end {
        End::Whole => assert!(
            texts.iter().any(|whole| whole == text),
            "{text:?} of {texts:?}"
        ),
        End::Length | End::Nothing => assert!(begins(texts, text), "{text:?} of {texts:?}"),
    }
}

fn sampler() -> impl Strategy<Value = (u64, Vec<Token>, usize, Token)> {
    let letters = || (u32::from(b'a')..=u32::from(b'n')).prop_map(|letter| letter);
    (
        0..1000_u64,
        prop::collection::vec(letters(), 0..2),
        0..4_usize,
        letters(),
    )
}

fn sampled((seed, banned, min_tokens, preferred): (u64, Vec<Token>, usize, Token)) -> Sampler {
    Sampler {
        random: Random::new(seed),
        banned,
        min_tokens,
        preferred,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Every kind, whatever is banned and preferred, and whenever `max_tokens` ends it.
    #[test]
    fn ai_840_any_output_fits_its_constraint(
        listed in listed(), sampler in sampler(), max_tokens in 1..12_usize,
    ) {
        let mut sampler = sampled(sampler);
        let mut sequence = Sequence::new(listed.open());
        let end = (0..100).find_map(|_| step(&mut sequence, &mut sampler, max_tokens));
        let end = end.expect("it ends");
        check(end, &sequence.text(), &listed.texts);
    }

    /// Two constraints: what comes out is a text of both. AI-803
    #[test]
    fn ai_840_any_output_fits_both_constraints(
        mut texts in prop::collection::vec("[abcn]{1,6}", 2..6), kinds in (0..5_usize, 0..5_usize),
        sampler in sampler(), max_tokens in 1..12_usize,
    ) {
        let kind = |index| ["regex", "lark", "gbnf", "options", "substring"][index];
        let first = Listed::new(kind(kinds.0), &texts);
        // Some of them are in both.
        texts.remove(0);
        texts.push("ab".to_owned());
        let second = Listed::new(kind(kinds.1), &texts);
        let both: Vec<String> =
            first.texts.iter().filter(|text| second.texts.contains(text)).cloned().collect();
        let mut sampler = sampled(sampler);
        let parts = vec![first.open(), second.open()];
        let mut sequence = Sequence::new(Combined::new(parts));
        let end = (0..100).find_map(|_| step(&mut sequence, &mut sampler, max_tokens));
        let end = end.expect("it ends");
        let text = sequence.text();
        if end == End::Whole {
            check(end, &text, &both);
        }
        prop_assert!(begins(&first.texts, &text) && begins(&second.texts, &text), "{text:?}");
    }

    /// Each fork is a sequence of its own, as the choices of `n` are.
    #[test]
    fn ai_843_any_fork_fits_the_constraint(
        listed in listed(), sampler in sampler(), at in 0..4_usize,
    ) {
        let mut sampler = sampled(sampler);
        let mut first = Sequence::new(listed.open());
        let mut ended = (0..at).find_map(|_| step(&mut first, &mut sampler, 100));
        if ended.is_none() {
            let mut second = first.fork();
            let end = (0..100).find_map(|_| step(&mut second, &mut sampler, 100));
            check(end.expect("it ends"), &second.text(), &listed.texts);
            ended = (0..100).find_map(|_| step(&mut first, &mut sampler, 100));
        }
        check(ended.expect("it ends"), &first.text(), &listed.texts);
    }

    /// A controller takes tokens back at any time. What follows is as if they had never been there.
    #[test]
    fn ai_843_any_output_fits_after_tokens_were_taken_back(
        listed in listed(), sampler in sampler(),
        backtracks in prop::collection::vec((1..6_usize, 1..8_u32), 0..4),
    ) {
        let mut sampler = sampled(sampler);
        let mut sequence = Sequence::new(listed.open());
        let mut ended = None;
        for (steps, tokens) in backtracks {
            ended = (0..steps).find_map(|_| step(&mut sequence, &mut sampler, 100));
            let tokens = tokens.min(u32::try_from(sequence.tokens.len()).unwrap());
            if ended.is_some() || tokens == 0 {
                break;
            }
            sequence.append(tokens, &[], None).unwrap();
        }
        let ended = ended.or_else(|| (0..100).find_map(|_| step(&mut sequence, &mut sampler, 100)));
        check(ended.expect("it ends"), &sequence.text(), &listed.texts);
    }

    /// `stop` ends the output at the token in which the matched text first contains it, and not before.
    #[test]
    fn ai_840_any_output_stops_at_its_stop_text(
        texts in prop::collection::vec("[abn]{1,9}", 1..6), stop in "[abn]{1,2}",
        sampler in sampler(),
    ) {
        let listed = Listed::new("regex", &texts);
        let arg = json!({"value": listed.arg, "stop": stop}).to_string();
        let mut sampler = sampled(sampler);
        let mut sequence = Sequence::new(open(source(), "sapwood:regex", &arg).unwrap());
        let end = (0..100).find_map(|_| step(&mut sequence, &mut sampler, 100)).expect("it ends");
        let text = sequence.text();
        prop_assert!(begins(&texts, &text), "{text:?}");
        match text.find(&stop) {
            None => check(end, &text, &texts),
            // What is left of the last token may follow it.
            Some(at) => {
                let last = sequence.tokens.iter().rev().map(|&token| small().bytes(token).len());
                let last = last.clone().find(|&bytes| bytes > 0).unwrap_or(0);
                prop_assert!(at + stop.len() > text.len() - last, "{text:?} goes on after {stop:?}");
            }
        }
    }
}

/// A controller may append tokens itself, and those that the constraint does not allow fail the sequence at once.
#[test]
fn ai_843_a_token_that_is_not_allowed_fails_the_sequence() {
    for kind in ["regex", "lark", "gbnf", "options", "substring"] {
        let listed = Listed::new(kind, &["ab".to_owned()]);
        let mut steer = listed.open();
        let tokens = [u32::from(b'a'), u32::from(b'c')];
        let appended = |tokens| Appended {
            backtrack: 0,
            tokens,
            sampled: None,
        };
        assert_eq!(steer.post(appended(&tokens[..1])), Ok(Post::Continue));
        let failure = steer.post(appended(&tokens[1..])).unwrap_err();
        assert!(
            failure.message.contains("does not allow"),
            "{}",
            failure.message
        );
    }
}
