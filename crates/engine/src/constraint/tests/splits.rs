//! AI-843: equal results under any split of the steps, and rollback.

use sapwood_proto::steer::{SharedMask, Token};

use super::super::ConstraintConfig;
use super::driver::{Random, Sequence, Step, config, open, open_for, source, source_of};
use super::vocabulary::{END, small};

const SCHEMA: &str = r#"{"type":"object","properties":{"name":{"enum":["hello world","abc","né"]},
    "age":{"type":"integer"},"ab":{"type":"null"}},"required":["name","age","ab"],
    "additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}"#;

const CASES: [(&str, &str); 5] = [
    ("sapwood:json-schema", SCHEMA),
    ("sapwood:regex", "(hello world|abcabc){1,3}(né)?"),
    (
        "sapwood:lark",
        "start: \"ab\" x* \"c\"\nx: \"hello\" | \"(\" x \")\"",
    ),
    (
        "sapwood:gbnf",
        "root ::= \"hello \" root | \"abc\" [a-c] \"hello\"",
    ),
    (
        "sapwood:options",
        r#"{"value":["hello world","hello","abc né"],"prefix":"name: "}"#,
    ),
];

fn without_fast_forward() -> ConstraintConfig {
    ConstraintConfig {
        fast_forward: false,
        ..config()
    }
}

/// The choice depends on the position and the allowed tokens alone.
fn choose(position: usize, allowed: &[Token], seed: u64) -> Token {
    if position > 30 && allowed.contains(&END) {
        return END;
    }
    let seed = seed.wrapping_mul(1_000_003).wrapping_add(position as u64);
    allowed[Random::new(seed).below(allowed.len())]
}

fn finish(sequence: &mut Sequence, seed: u64) -> Vec<Token> {
    for _round in 0..2000 {
        sequence.pre();
        if sequence.ended {
            break;
        }
        let position = sequence.tokens.len();
        sequence.step(|allowed| choose(position, allowed, seed));
        if sequence.ended {
            break;
        }
    }
    assert!(sequence.ended);
    sequence.tokens.clone()
}

#[test]
fn ai_843_single_tokens_and_fast_forward_are_equal() {
    let (fast, slow) = (source(), source_of(small(), without_fast_forward()));
    for (controller, arg) in CASES {
        for seed in 0..8 {
            let mut fast = Sequence::new(open(&fast, controller, arg).unwrap());
            let mut slow = Sequence::new(open(&slow, controller, arg).unwrap());
            assert_eq!(
                finish(&mut fast, seed),
                finish(&mut slow, seed),
                "{controller} {seed}"
            );
        }
    }
}

/// Stops are looked for in sampled tokens alone.
#[test]
fn ai_843_with_stops_nothing_is_appended_unsampled() {
    let (fast, slow) = (source(), source_of(small(), without_fast_forward()));
    let mut forced = 0;
    for (controller, arg) in CASES {
        let mut plain = Sequence::new(open(&fast, controller, arg).unwrap());
        plain.pre();
        forced += plain.tokens.len();
        let mut stops = Sequence::new(open_for(&fast, controller, arg, true).unwrap());
        stops.pre();
        assert!(stops.tokens.is_empty(), "{controller}");
        let mut slow = Sequence::new(open(&slow, controller, arg).unwrap());
        assert_eq!(finish(&mut stops, 1), finish(&mut slow, 1), "{controller}");
    }
    assert!(forced > 0, "some begin with a forced text");
}

#[test]
fn ai_843_forks_go_on_like_the_original() {
    let sources = [source(), source_of(small(), without_fast_forward())];
    for source in &sources {
        for (controller, arg) in CASES {
            for seed in 0..4_u64 {
                let mut whole = Sequence::new(open(source, controller, arg).unwrap());
                let expected = finish(&mut whole, seed);
                let mut original = Sequence::new(open(source, controller, arg).unwrap());
                while !original.ended && original.tokens.len() < expected.len() / 2 {
                    let position = original.tokens.len();
                    original.pre();
                    assert!(position <= original.tokens.len());
                    let position = original.tokens.len();
                    original.step(|allowed| choose(position, allowed, seed));
                }
                let mut fork = original.fork();
                // The fork goes another way first, and leaves the original alone.
                let mut other = original.fork();
                finish(&mut other, seed + 100);
                assert_eq!(finish(&mut fork, seed), expected, "{controller}");
                assert_eq!(finish(&mut original, seed), expected, "{controller}");
            }
        }
    }
}

fn mask(sequence: &mut Sequence) -> Option<SharedMask> {
    match sequence.mid().unwrap() {
        Step::Mask(mask) => Some(mask),
        Step::Stop => None,
    }
}

/// After a rollback everything is as it was before.
#[test]
fn ai_843_rollback_restores_the_masks() {
    let source = source_of(small(), without_fast_forward());
    for (controller, arg) in CASES {
        let mut sequence = Sequence::new(open(&source, controller, arg).unwrap());
        let mut masks = vec![mask(&mut sequence)];
        while !sequence.ended {
            let position = sequence.tokens.len();
            sequence.step(|allowed| choose(position, allowed, 3));
            let now = if sequence.ended {
                None
            } else {
                mask(&mut sequence)
            };
            masks.push(now);
        }
        let tokens = sequence.tokens.clone();
        for kept in (0..tokens.len()).rev() {
            let back = u32::try_from(sequence.tokens.len() - kept).unwrap();
            sequence.append(back, &[], None).unwrap();
            assert_eq!(mask(&mut sequence), masks[kept], "{controller} at {kept}");
            // And forth again, all at once.
            sequence.append(0, &tokens[kept..], None).unwrap();
        }
        let all = u32::try_from(tokens.len()).unwrap();
        sequence.append(all, &tokens, None).unwrap();
        assert_eq!(sequence.tokens, tokens);
    }
}

#[test]
fn ai_843_a_rollback_past_the_beginning_fails() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "a+").unwrap());
    let a = u32::from(b'a');
    sequence.append(0, &[a], None).unwrap();
    sequence.tokens.push(a);
    let failure = sequence.append(2, &[], None).unwrap_err();
    assert_eq!(failure.message, "backtrack 2 past the beginning");
}

/// AI-803
#[test]
fn ai_843_would_accept_changes_nothing() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "[ab]{3}c?").unwrap());
    let [a, b, c] = [b'a', b'b', b'c'].map(u32::from);
    sequence.append(0, &[a, b], None).unwrap();
    let before = mask(&mut sequence);
    let steer = &mut sequence.steer;
    for (backtrack, tokens, accepted) in [
        (0, &[][..], true),
        (0, &[a], true),
        (0, &[a, c, END], true),
        (0, &[c], false),
        (0, &[END], false),
        (0, &[a, END, a], false),
        (2, &[b, b, b], true),
        (2, &[b, b, b, b], false),
        (1, &[a, a], true),
        (2, &[], true),
        (2, &[END], false),
    ] {
        assert_eq!(
            steer.would_accept(backtrack, tokens),
            Ok(accepted),
            "{backtrack} {tokens:?}"
        );
    }
    assert!(steer.would_accept(3, &[]).is_err());
    assert_eq!(mask(&mut sequence), before);
    sequence.append(0, &[a, END], None).unwrap();
    assert_eq!(sequence.steer.would_accept(0, &[a]), Ok(false));
    assert_eq!(sequence.steer.would_accept(1, &[c]), Ok(true));
}
