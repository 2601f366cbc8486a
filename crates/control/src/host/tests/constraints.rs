//! The functions of `sapwood`: constraints and masks in the host (AI-1007), in both modes.

#[path = "../../../tests/options/mod.rs"]
mod options;

use sapwood_proto::steer::Mask;

use self::options::OptionsSource;
use super::*;

const SAPWOOD: &str = r#"
    (import "sapwood" "constraint_new" (func $new (param i32 i32 i32 i32) (result i32)))
    (import "sapwood" "constraint_consume" (func $consume (param i32 i32) (result i32)))
    (import "sapwood" "constraint_rollback" (func $rollback (param i32 i32)))
    (import "sapwood" "constraint_mask" (func $mask (param i32) (result i32)))
    (import "sapwood" "constraint_ff" (func $ff (param i32) (result i32)))
    (import "sapwood" "mask_and" (func $and (param i32 i32) (result i32)))
    (import "sapwood" "mask_or" (func $or (param i32 i32) (result i32)))
    (import "sapwood" "mask_not" (func $not (param i32) (result i32)))
    (import "sapwood" "mask_return" (func $return (param i32) (result i32)))
    (import "sapwood" "prefix_mask" (func $prefix (param i32 i32) (result i32)))
    (import "sapwood" "token_bytes" (func $token (param i32 i32 i32) (result i32)))
    (import "sapwood" "free" (func $free (param i32)))
    (import "sapwood" "top_logits" (func $top (param i32 i32) (result i32)))
"#;

/// Texts at places of the memory, and functions over them.
const FIELDS: &str = r#"
    (data (i32.const 3000) "options") (data (i32.const 3020) "[\"10\",\"12\",\"2\",\"3456\"]")
    (data (i32.const 3100) "nothing") (data (i32.const 3120) "[\"1") (data (i32.const 3140) "\ff")
    (data (i32.const 3160) "1") (global $h (mut i32) (i32.const 0))
    (func $open (result i32) (call $new (i32.const 3000) (i32.const 7) (i32.const 3020) (i32.const 22)))
    (func $blob_text (param $id i32)
        (call $print (i32.const 4000) (call $blob (local.get $id) (i32.const 4000) (i32.const 400))))
    (func $start (param $h i32) (if (i32.eqz (global.get $h)) (then (global.set $h (call $open)))))
"#;

/// A P2 module that imports the functions. `process`: the body of its callback, which ends by sampling without a mask.
pub(super) fn module(process: &str) -> String {
    returning(process, r#"{"branches":[{"splices":[{}]}]}"#)
}

pub(super) fn returning(process: &str, json: &str) -> String {
    p2_returning(FIELDS, process, json).replacen("(memory", &format!("{SAPWOOD} (memory"), 1)
}

/// The byte of a digit is two places after it in the vocabulary of tests.
const fn digit(digit: u8) -> Token {
    digit as Token + 2
}

pub(super) fn options_model() -> Arc<HostModel> {
    let bytes = (0..98_u8).map(|byte| vec![byte]);
    let tokens = [vec![], vec![]].into_iter().chain(bytes);
    let source = OptionsSource::new(tokens, 1);
    Arc::new(bare_model().with_constraints(Arc::new(source)))
}

pub(super) fn start(host: &Host, model: &Arc<HostModel>, text: &str) -> Sequence {
    let group = Group::new(16, VariablesLimits::default());
    let program = load(host, text);
    Sequence::start_of(host, &program, &group, (Arc::clone(model), "")).begun()
}

/// What one call of a P2 module does.
fn process(body: &str) -> Outcome {
    start(&host(), &options_model(), &module(body)).process()
}

pub(super) fn logs(outcome: Outcome) -> String {
    outcome.result.unwrap();
    outcome.report.logs
}

fn fails(body: &str) -> CallFailure {
    failure(process(body))
}

fn tokens(mask: &Mask) -> Vec<Token> {
    let ids = 0..Token::try_from(mask.vocabulary()).unwrap();
    ids.filter(|id| mask.allows(*id)).collect()
}

/// The tokens of the mask of the first branch.
fn allowed(outcome: Outcome) -> Vec<Token> {
    let Ok(Returned::Branches(branches)) = outcome.result else {
        panic!("{outcome:?}");
    };
    tokens(branches[0].mask.as_ref().unwrap())
}

/// Consumes the tokens that were appended, which are digits, and returns the mask.
fn following(json: &str) -> String {
    returning(
        r#"(local $i i32) (local $c i32) (local $m i32)
        (call $start (i32.const 0))
        ;; {"backtrack":0,"tokens":[51]… : the first token is at 25, with two digits
        (drop (call $blob (i32.const 4) (i32.const 5000) (i32.const 100)))
        (local.set $c (i32.load8_u (i32.const 5025)))
        (if (i32.ne (local.get $c) (i32.const 93)) (then
            (call $hex (call $consume (global.get $h) (i32.add
                (i32.mul (i32.sub (local.get $c) (i32.const 48)) (i32.const 10))
                (i32.sub (i32.load8_u (i32.const 5026)) (i32.const 48)))))))
        (local.set $m (call $mask (global.get $h)))
        (drop (call $return (local.get $m)))
        (call $free (local.get $m))"#,
        json,
    )
}

fn appended(sequence: &mut Sequence, token: Token) -> Outcome {
    sequence.call(Callback::Process {
        backtrack: 0,
        tokens: vec![token],
        sampled: None,
        fork_group: vec![3],
    })
}

const SAMPLE: &str = r#"{"branches":[{"sample_mask":0}]}"#;

#[test]
fn ai_1007_a_controller_follows_a_constraint_in_the_host() {
    let host = host();
    let mut sequence = start(&host, &options_model(), &following(SAMPLE));
    assert_eq!(allowed(sequence.process()), [b'1', b'2', b'3'].map(digit));
    let outcome = appended(&mut sequence, digit(b'9'));
    assert_eq!(outcome.report.logs, "00000000 ");
    assert_eq!(allowed(outcome), [b'1', b'2', b'3'].map(digit));
    let outcome = appended(&mut sequence, digit(b'1'));
    assert_eq!(outcome.report.logs, "00000001 ");
    assert_eq!(allowed(outcome), [b'0', b'2'].map(digit));
    assert_eq!(allowed(appended(&mut sequence, digit(b'2'))), [1]);
}

/// AI-711: handles are part of an instance's state.
#[test]
fn ai_1007_handles_fork_with_the_instance() {
    let host = host();
    let mut parent = start(&host, &options_model(), &following(SAMPLE));
    parent.process();
    let before = host.memory_bytes();
    let mut child = parent.fork();
    assert_eq!(allowed(appended(&mut child, digit(b'3'))), [digit(b'4')]);
    // The tokens of the child, and masks that it may have freed: a process gives nothing back before it ends.
    let more = host.memory_bytes() - 2 * before;
    assert!((100..=200).contains(&more), "{more} bytes more");
    assert_eq!(allowed(appended(&mut parent, digit(b'2'))), [1]);
    assert_eq!(allowed(appended(&mut child, digit(b'4'))), [digit(b'5')]);
    drop((parent, child));
    wait_until_free(&host);
}

/// AI-414: several masks of a callback are a union.
#[test]
fn ai_1007_a_module_with_three_callbacks_returns_masks_of_the_host_too() {
    let text = P1 {
        mid: r#"(drop (call $return (call $prefix (i32.const 3160) (i32.const 1))))
                (drop (call $return (call $mask (call $open))))
                (call $ret (i32.const 64) (i32.const 21))"#,
        functions: FIELDS,
        ..P1::default()
    }
    .text();
    let text = text.replacen("(memory", &format!("{SAPWOOD} (memory"), 1);
    let outcome = start(&host(), &options_model(), &text).mid();
    let Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) = outcome.result else {
        panic!("{outcome:?}");
    };
    assert_eq!(tokens(&mask), [b'1', b'2', b'3'].map(digit));
}

#[test]
fn ai_1007_masks_combine_and_begin_with_bytes() {
    let of = |mask: &str| {
        let body = format!("(drop (call $return {mask}))");
        allowed(start(&host(), &options_model(), &returning(&body, SAMPLE)).process())
    };
    let options = "(call $mask (call $open))";
    let one = "(call $prefix (i32.const 3160) (i32.const 1))";
    assert_eq!(of(one), [digit(b'1')]);
    assert_eq!(of(&format!("(call $and {options} {one})")), [digit(b'1')]);
    let others = format!("(call $and {options} (call $not {one}))");
    assert_eq!(of(&others), [b'2', b'3'].map(digit));
    let both = format!("(call $or {others} {one})");
    assert_eq!(of(&both), [b'1', b'2', b'3'].map(digit));
    assert_eq!(of(&format!("(call $not {one})")).len(), 99);
    // Tokens that are the start of the bytes: here the same, as every token is one byte.
    assert_eq!(
        of("(call $prefix (i32.const 3020) (i32.const 22))"),
        [digit(b'[')]
    );
    // Any token of text begins with nothing.
    assert_eq!(
        of("(call $prefix (i32.const 3020) (i32.const 0))").len(),
        98
    );
    // AI-237
    let nothing = format!("(call $and {one} (call $not {one}))");
    assert_eq!(of(&nothing), [1]);
}

#[test]
fn ai_1007_forced_tokens_are_blob_7() {
    let body = r#"
        (call $start (i32.const 0))
        (call $hex (call $ff (global.get $h)))
        (call $hex (call $blob (i32.const 7) (i32.const 5000) (i32.const 100)))
        (call $hex (call $consume (global.get $h) (i32.const 53)))
        (drop (call $ff (global.get $h)))
        (call $hex (call $blob (i32.const 7) (i32.const 5000) (i32.const 100)))
        (call $hex (i32.load (i32.const 5000))) (call $hex (i32.load (i32.const 5008)))
        (call $rollback (global.get $h) (i32.const 1))
        (call $hex (call $consume (global.get $h) (i32.const 52)))"#;
    assert_eq!(
        logs(process(body)),
        "00000007 00000000 00000001 0000000c 00000036 00000038 00000001 "
    );
}

#[test]
fn ai_1007_bytes_of_tokens_need_no_trie() {
    let body = r#"
        (call $hex (call $token (i32.const 51) (i32.const 5000) (i32.const 10)))
        (call $hex (call $token (i32.const 1) (i32.const 5001) (i32.const 3)))
        (call $print (i32.const 5000) (i32.const 6))
        (call $hex (call $token (i32.const 100) (i32.const -1) (i32.const 10)))
        (call $hex (call $token (i32.const 51) (i32.const -1) (i32.const 0)))"#;
    // As in the trie, a special token is 0xFF and its name; three bytes of it fit.
    assert_eq!(
        logs(process(body)),
        "00000001 00000005 1\u{fffd}</\0\u{0}00000000 00000001 "
    );
}

/// The controller is told, since a pattern may be one of its request.
#[test]
fn ai_1007_what_is_no_constraint_is_0_with_a_text_in_blob_6() {
    let opened = |kind: &str, value: &str| {
        let body =
            format!("(call $hex (call $new {kind} {value})) (call $blob_text (i32.const 6))");
        logs(process(&body))
    };
    let options = "(i32.const 3000) (i32.const 7)";
    let all = "(i32.const 3020) (i32.const 22)";
    assert_eq!(
        opened("(i32.const 3100) (i32.const 7)", all),
        "00000000 there is no constraint nothing"
    );
    // Of a name of 100,000 bytes not all are quoted.
    let long = opened("(i32.const 3100) (i32.const 100000)", all);
    assert!(long.len() < 400, "{long}");
    let broken = opened(options, "(i32.const 3120) (i32.const 3)");
    assert!(
        broken.starts_with("00000000 invalid grammar: EOF"),
        "{broken}"
    );
    assert_eq!(
        opened(options, "(i32.const 3140) (i32.const 1)"),
        "00000000 the pattern is not UTF-8"
    );
    // What went well leaves no text.
    assert_eq!(opened(options, all), "00000001 ");
}

#[test]
fn ai_1007_a_handle_that_is_none_traps() {
    for (body, text) in [
        (
            "(drop (call $consume (i32.const 0) (i32.const 51)))",
            "constraint_consume: 0 is not a handle of a constraint",
        ),
        (
            "(drop (call $mask (i32.const 1)))",
            "constraint_mask: 1 is not a handle of a constraint",
        ),
        (
            "(drop (call $ff (i32.const -1)))",
            "constraint_ff: 4294967295 is not a handle of a constraint",
        ),
        (
            "(call $rollback (i32.const 65) (i32.const 0))",
            "constraint_rollback: 65 is not a handle of a constraint",
        ),
        ("(call $free (i32.const 0))", "free: 0 is not a handle"),
        (
            "(call $free (call $open)) (call $free (i32.const 1))",
            "free: 1 is not a handle",
        ),
        (
            "(drop (call $mask (call $mask (call $open))))",
            "constraint_mask: 2 is not a handle of a constraint",
        ),
        (
            "(drop (call $not (call $open)))",
            "mask_not: 1 is not a handle of a mask",
        ),
        (
            "(drop (call $and (call $mask (call $open)) (i32.const 3)))",
            "mask_and: 3 is not a handle of a mask",
        ),
        (
            "(drop (call $or (i32.const 3) (i32.const 3)))",
            "mask_or: 3 is not a handle of a mask",
        ),
        (
            "(drop (call $return (i32.const 0)))",
            "mask_return: 0 is not a handle of a mask",
        ),
    ] {
        let failure = fails(body);
        assert_eq!(failure.reason, ErrorReason::TRAP, "{body}");
        assert!(failure.message.ends_with(text), "{body}: {failure}");
    }
}

/// AI-606
#[test]
fn ai_1007_a_pointer_past_the_memory_traps() {
    for (body, name) in [
        (
            "(drop (call $new (i32.const -1) (i32.const 2) (i32.const 0) (i32.const 0)))",
            "constraint_new",
        ),
        (
            "(drop (call $new (i32.const 3000) (i32.const 7) (i32.const 131071) (i32.const 2)))",
            "constraint_new",
        ),
        (
            "(drop (call $prefix (i32.const 131072) (i32.const 1)))",
            "prefix_mask",
        ),
        (
            "(drop (call $prefix (i32.const 1) (i32.const -1)))",
            "prefix_mask",
        ),
        (
            "(drop (call $token (i32.const 51) (i32.const 131072) (i32.const 1)))",
            "token_bytes",
        ),
    ] {
        let text = format!("out of bounds pointer passed to {name}");
        assert!(fails(body).message.ends_with(&text), "{body}");
    }
}

/// AI-1090
#[test]
fn ai_1007_an_instance_has_64_handles() {
    let open = |count: u32| {
        format!(
            "(local $i i32) (loop $l
                (if (i32.and (local.get $i) (i32.const 1))
                    (then (drop (call $prefix (i32.const 3160) (i32.const 1))))
                    (else (drop (call $open))))
                (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const {count}))))"
        )
    };
    // One that is freed makes room, and its number comes again.
    let again = "(call $free (i32.const 7)) (call $hex (call $open)) (call $free (i32.const 64))
        (call $hex (call $mask (i32.const 1)))";
    assert_eq!(
        logs(process(&format!("{} {again}", open(64)))),
        "00000007 00000040 "
    );
    let full = open(64);
    for one_more in [
        "(drop (call $open))",
        "(drop (call $mask (i32.const 1)))",
        "(drop (call $not (i32.const 2)))",
        "(drop (call $prefix (i32.const 3160) (i32.const 1)))",
    ] {
        let failure = fails(&format!("{full} {one_more}"));
        assert_eq!(failure.reason, ErrorReason::LIMIT);
        let text = "more than 64 host handles; free those that are not needed";
        assert!(failure.message.ends_with(text), "{failure}");
    }
}

#[test]
fn ai_1007_a_rollback_past_the_beginning_fails_the_sequence() {
    let failure = fails("(call $rollback (call $open) (i32.const 1))");
    assert_eq!(failure.reason, ErrorReason::CONSTRAINT_FAILED);
    let text = "constraint_rollback: backtrack 1 past the beginning";
    assert!(failure.message.ends_with(text), "{failure}");
}
