//! What a constraint may cost the engine's thread.

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SteerFailure, Token};

use super::super::ConstraintConfig;
use super::super::steerer::FORCED_MAX;
use super::driver::{Sequence, config, open, source, source_of};
use super::vocabulary::{END, small};

const A: Token = b'a' as Token;
/// The n-th byte costs as much as the square of n: each part of the text is an `s` in as many ways as it can be halved.
const AMBIGUOUS: &str = "start: s\ns: s s | \"a\"";

#[track_caller]
fn check_is_slow(failure: &SteerFailure) {
    assert_eq!(
        (failure.reason, failure.message.as_str()),
        (
            ErrorReason::LIMIT,
            "the constraint takes too long to follow; make it simpler"
        )
    );
}

#[test]
fn ai_841_forced_tokens_are_followed_for_a_limited_time() {
    let source = source();
    let mut sequence = Sequence::new(open(&source, "sapwood:lark", AMBIGUOUS).unwrap());
    sequence.append(0, &[A; 8], None).unwrap();
    let forced = vec![A; FORCED_MAX];
    check_is_slow(&sequence.steer.would_accept(0, &forced).unwrap_err());
    // It is over, and not tried again and again.
    check_is_slow(&sequence.append(0, &[A], None).unwrap_err());

    // So is the copy for what replaces some of the output, and the sequence itself.
    let mut sequence = Sequence::new(open(&source, "sapwood:lark", AMBIGUOUS).unwrap());
    sequence.append(0, &[A; 8], None).unwrap();
    check_is_slow(&sequence.steer.would_accept(1, &forced).unwrap_err());
    // Others are not.
    let mut other = Sequence::new(open(&source, "sapwood:lark", AMBIGUOUS).unwrap());
    other.append(0, &[A; 8], None).unwrap();
    assert!(other.steer.would_accept(1, &[A, A, END]).unwrap());
}

#[test]
fn ai_841_a_limited_number_of_tokens_is_forced_at_once() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "a*").unwrap());
    let forced = vec![A; FORCED_MAX + 1];
    let failure = sequence.steer.would_accept(0, &forced).unwrap_err();
    assert_eq!(
        (failure.reason, failure.message.as_str()),
        (
            ErrorReason::LIMIT,
            "1025 tokens are forced at once; a constraint follows 1024"
        )
    );
    assert!(sequence.steer.would_accept(0, &forced[1..]).unwrap());
    assert!(sequence.append(0, &forced, None).is_err());
    sequence.append(0, &forced[1..], None).unwrap();
}

/// Without a controller too: each token alone is short at first.
#[test]
fn ai_841_tokens_are_followed_for_a_limited_part_of_the_time() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:lark", AMBIGUOUS).unwrap());
    let failure = (0..5000).find_map(|_step| sequence.append(0, &[A], Some(A)).err());
    check_is_slow(&failure.expect("each takes longer than those before"));
}

/// Masks are charged, and here are none.
#[test]
fn ai_841_what_is_appended_is_charged() {
    let config = ConstraintConfig {
        memory_bytes: 8 << 20,
        ..config()
    };
    let source = source_of(small(), config);
    let ways: Vec<String> = (0..200).map(|way| format!("\"a\" \"b{way}\"")).collect();
    let grammar = format!("start: x*\nx: \"a\" | {}", ways.join(" | "));
    let mut sequence = Sequence::new(open(&source, "sapwood:lark", &grammar).unwrap());
    let failure = (0..2000).find_map(|_step| sequence.append(0, &[A], Some(A)).err());
    let failure = failure.expect("it takes more and more");
    assert_eq!(
        (failure.reason, failure.message.as_str()),
        (
            ErrorReason::LIMIT,
            "the constraint takes too much memory; make it simpler"
        )
    );
}
