//! The ops of the main channel, and how the dialect is decided.

use std::time::Duration;

use super::super::scripted::*;
use super::super::sequence::{MidReturned, Returned, ReturnedBranch, ReturnedSplice};
use super::*;
use crate::host::{Group, VariablesLimits, Waiting};

const ROOM: AnswerRoom = AnswerRoom {
    bytes_max: 60_000,
    room: 60_004,
};

fn channel(world: &World, dialect: Dialect) -> MainChannel<Scripted> {
    let config = MainConfig {
        steps: config(),
        capabilities: Capabilities {
            fork: true,
            backtrack: true,
            ff_tokens: true,
            logits: false,
        },
        mask_type: MaskType::F32,
        logits: 0,
        p2_step_time: Duration::from_millis(25),
    };
    let pending = Arc::clone(&world.pending);
    let masks = world.masks_again();
    let agreed = (DialectCell::new(dialect), WireFeatures::new());
    MainChannel::new(config, agreed, pending, masks).unwrap()
}

fn ask(channel: &mut MainChannel<Scripted>, world: &World, message: &str) -> String {
    match channel.handle(message.as_bytes(), ROOM, world.step()) {
        MainReply::Answer(answer) => String::from_utf8(answer).unwrap(),
        MainReply::Stop => "stopped".into(),
    }
}

/// The transcript of the page: "yes" is token 82 here. AI-401 to AI-404, AI-411
#[test]
fn ai_441_the_transcript_of_the_page() {
    let world = World::new();
    let mut channel = channel(&world, Dialect::Auto);
    let script = [runs(), mid(only(82)), post(true), runs()];
    world.instance("r7", script);
    let pre = r#"{"error":"","result":{"suspend":false,"num_forks":1,"ff_tokens":[]},"storage":[],"logs":"","micros":10}"#;
    for (request, expected) in [
        (
            r#"{"op":"post_pre_process","post_ops":[],"pre_ops":[{"id":4,"req_id":"r7"}],"freed":[]}"#,
            format!(r#"{{"type":"ok","data":{{"post_seqs":{{}},"pre_seqs":{{"4":{pre}}}}}}}"#),
        ),
        (
            r#"{"op":"mid_process","ops":[{"id":4}]}"#,
            r#"{"type":"ok","data":{"seqs":{"4":{"error":"","result":null,"storage":[],"logs":"","micros":10}},"num_seqs":1}}"#.into(),
        ),
        (
            r#"{"op":"post_pre_process","post_ops":[{"id":4,"tokens":[82],"backtrack":0}],"pre_ops":[],"freed":[]}"#,
            format!(
                r#"{{"type":"ok","data":{{"post_seqs":{{"4":{{"error":"","result":{{"stop":true}},"storage":[],"logs":"","micros":10}}}},"pre_seqs":{{"4":{pre}}}}}}}"#
            ),
        ),
        (
            r#"{"op":"post_pre_process","post_ops":[{"id":99,"tokens":[1]}],"pre_ops":[],"freed":[4]}"#,
            r#"{"type":"error","error":"invalid id 99","is_user_error":true}"#.into(),
        ),
    ] {
        assert_eq!(ask(&mut channel, &world, request), expected);
    }
    assert_eq!(world.row(0), [82]);
}

#[test]
fn ai_303_ping_and_tokens() {
    let world = World::with_masks(1 << 16);
    let mut p1 = channel(&world, Dialect::Auto);
    let pong = r#"{"type":"ok","data":{"pong":1}}"#;
    assert_eq!(ask(&mut p1, &world, r#"{"op":"ping"}"#), pong);
    let tokens = r#"{"$rid":"a","type":"ok","data":{"vocab_size":100}}"#;
    assert_eq!(
        ask(&mut p1, &world, r#"{"op":"tokens","$rid":"a"}"#),
        tokens
    );
    let mut p2 = channel(&world, Dialect::P2);
    let tokens = r#"{"type":"ok","data":{"vocab_size":100,"eos_token_id":2}}"#;
    assert_eq!(ask(&mut p2, &world, r#"{"op":"tokens"}"#), tokens);
}

#[test]
fn ai_301_what_is_no_op_and_no_request() {
    let world = World::new();
    let mut channel = channel(&world, Dialect::Auto);
    let bad_op = r#"{"type":"error","error":"bad op","is_user_error":true}"#;
    for request in [
        r#"{"op":"dance"}"#,
        "{}",
        r#"{"op":1}"#,
        r#"{"op":"mk_module"}"#,
    ] {
        assert_eq!(ask(&mut channel, &world, request), bad_op);
    }
    let unread = ask(&mut channel, &world, r#"{"op":"ping""#);
    assert!(
        unread.starts_with(r#"{"type":"json-error","error":"#),
        "{unread}"
    );
    for request in [
        r#"{"op":"mid_process","ops":[{"id":-1}]}"#,
        r#"{"op":"mid_process","ops":7}"#,
        r#"{"op":"post_pre_process","post_ops":[{"id":1,"tokens":[4294967296]}]}"#,
        r#"{"op":"ping","$auth":{"user":1}}"#,
    ] {
        let answer = ask(&mut channel, &world, request);
        assert!(answer.starts_with(r#"{"type":"error""#), "{answer}");
        assert!(answer.ends_with(r#""is_user_error":true}"#), "{answer}");
    }
    assert_eq!(ask(&mut channel, &world, r#"{"op":"stop"}"#), "stopped");
}

#[test]
fn ai_104_the_first_op_decides_the_dialect() {
    let bad_op = r#"{"type":"error","error":"bad op","is_user_error":true}"#;
    let (p1_op, plain) = (
        r#"{"op":"post_pre_process"}"#,
        r#"{"op":"mid_process","ops":[{"id":1}]}"#,
    );
    let p2_ops = [
        r#"{"op":"mid_process","ops":[],"freed":[]}"#,
        r#"{"op":"mid_process","ops":[{"id":1,"tokens":[]}]}"#,
        r#"{"op":"mid_process","ops":[{"id":1,"sampled":null}]}"#,
        r#"{"op":"mid_process","ops":[{"id":1,"req_id":"x"}]}"#,
    ];
    for p2_op in p2_ops {
        let world = World::with_masks(1 << 16);
        let mut p2 = channel(&world, Dialect::Auto);
        // A plain mid decides nothing and is answered as in P1.
        assert!(ask(&mut p2, &world, plain).contains(r#""num_seqs":1"#));
        assert!(ask(&mut p2, &world, p2_op).contains("first_mask_byte_offset"));
        assert_eq!(ask(&mut p2, &world, p1_op), bad_op);
        assert!(ask(&mut p2, &world, plain).contains("first_mask_byte_offset"));
        let mut p1 = channel(&world, Dialect::Auto);
        assert!(ask(&mut p1, &world, p1_op).contains("pre_seqs"));
        assert_eq!(ask(&mut p1, &world, p2_op), bad_op);
    }
}

#[test]
fn ai_1001_hello_accepts_what_there_is() {
    let world = World::new();
    let mut channel = channel(&world, Dialect::Auto);
    let answer = ask(
        &mut channel,
        &world,
        r#"{"op":"hello","features":["manage","bitmask","x"]}"#,
    );
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["data"]["runtime"], "sapwood");
    assert_eq!(answer["data"]["features"], json!(["bitmask", "manage"]));
    assert_eq!(answer["data"]["dialects"], json!(["p1", "p1i", "p2"]));
    assert_eq!(answer["data"]["limits"], json!({"side_pending": 256}));
    let members: Vec<_> = answer["data"].as_object().unwrap().keys().collect();
    assert_eq!(
        members,
        ["runtime", "version", "dialects", "features", "limits"]
    );
}

/// AI-1090, AI-305
#[test]
fn ai_222_a_list_of_tokens_has_at_most_65536() {
    let nothing = || Line::Returns(Returned::Branches(Vec::new()));
    for (dialect, script, bind, op) in [
        (
            Dialect::P1,
            vec![runs(), post(false), runs()],
            BIND,
            r#"{"op":"post_pre_process","post_ops":[{"id":4,"tokens":[TOKENS]}]}"#,
        ),
        (
            Dialect::P2,
            vec![nothing(), nothing()],
            r#"{"op":"mid_process","ops":[{"id":4,"req_id":"r"}]}"#,
            r#"{"op":"mid_process","ops":[{"id":4,"tokens":[TOKENS]}]}"#,
        ),
    ] {
        let world = World::with_masks(1 << 16);
        let mut channel = channel(&world, dialect);
        world.instance("r", script);
        ask(&mut channel, &world, bind);
        world.take_calls();
        let of = |tokens: usize| op.replace("TOKENS", &vec!["7"; tokens].join(","));
        assert_eq!(
            ask(&mut channel, &world, &of(65_537)),
            r#"{"type":"error","error":"more than 65536 entries","is_user_error":true}"#
        );
        assert_eq!(world.take_calls(), []);
        let answer = ask(&mut channel, &world, &of(65_536));
        assert!(answer.contains(r#""4":{"error":"","#), "{answer}");
        assert!(!world.take_calls().is_empty());
    }
}

/// AI-742
#[test]
fn ai_441_a_result_that_does_not_fit_fails_its_sequence_alone() {
    for dialect in [Dialect::P1, Dialect::P2] {
        let world = World::with_masks(1 << 16);
        let mut channel = channel(&world, dialect);
        let many = [7; 31_000];
        let (ask_all, ask_again) = if dialect == Dialect::P1 {
            world.instance("a", [pre(1, false, &many), post(false), runs()]);
            world.instance("b", [pre(1, false, &[5]), post(false), runs(), runs()]);
            (
                r#"{"op":"post_pre_process","pre_ops":[{"id":4,"req_id":"a"},{"id":5,"req_id":"b"}]}"#,
                r#"{"op":"post_pre_process"}"#,
            )
        } else {
            let forced = |tokens: &[Token]| {
                let ff_tokens = tokens.to_vec();
                Line::Returns(Returned::Branches(vec![ReturnedBranch {
                    mask: None,
                    temperature: None,
                    splices: vec![ReturnedSplice {
                        when_sampled: Vec::new(),
                        backtrack: 0,
                        ff_tokens,
                    }],
                    wait: None,
                }]))
            };
            world.instance("a", [forced(&many)]);
            world.instance("b", [forced(&[5]), forced(&[6])]);
            (
                r#"{"op":"mid_process","ops":[{"id":4,"req_id":"a"},{"id":5,"req_id":"b"}]}"#,
                r#"{"op":"mid_process","ops":[{"id":4},{"id":5}],"freed":[]}"#,
            )
        };
        let seqs = |answer: &str| {
            let mut answer: Value = serde_json::from_str(answer).unwrap();
            let member = ["pre_seqs", "seqs"][usize::from(dialect == Dialect::P2)];
            answer["data"][member].take()
        };
        let first = seqs(&ask(&mut channel, &world, ask_all));
        assert_eq!(first["4"]["error"], "Worker: result too large");
        assert_eq!(first["5"]["error"], "", "{first}");
        assert!(
            first["5"]["result"]
                .to_string()
                .contains("\"ff_tokens\":[5]")
        );
        let second = seqs(&ask(&mut channel, &world, ask_again));
        assert_eq!(second["4"]["error"], "Worker: result too large");
        assert_eq!(second["5"]["error"], "", "{second}");
    }
}

const BIND: &str = r#"{"op":"post_pre_process","pre_ops":[{"id":4,"req_id":"r"}]}"#;

#[test]
fn ai_314_an_instance_that_was_not_bound_in_time_is_gone() {
    let ttl = Duration::from_secs(300);
    let world = World::new();
    let mut channel = channel(&world, Dialect::P1);
    // Although no other one starts.
    world.instance("r", [runs()]);
    world.clock.advance(ttl);
    let refused = ask(&mut channel, &world, BIND);
    assert!(refused.contains("invalid req_id r"), "{refused}");
    assert_eq!(world.pending.counts(), (0, 0));
    // Although nobody asks for it.
    world.instance("r", [runs()]);
    world.clock.advance(ttl - Duration::from_millis(1));
    ask(&mut channel, &world, r#"{"op":"ping"}"#);
    assert_eq!(world.pending.counts(), (1, 1));
    world.clock.advance(Duration::from_millis(1));
    ask(&mut channel, &world, r#"{"op":"ping"}"#);
    assert_eq!(world.pending.counts(), (0, 0));
}

#[test]
fn ai_1002_bits_in_p1_follow_each_other_from_the_start_of_the_region() {
    // One row of numbers has 400 bytes, one of bits 136.
    let world = World::with_masks(400);
    let mut channel = channel(&world, Dialect::P1);
    let script = [
        runs(),
        mid(only(82)),
        mid(only(10)),
        // No mask: everything is allowed, which in numbers is a row of nothing.
        mid(MidReturned::Sample(None)),
        mid(MidReturned::Stop),
    ];
    world.instance("r", script);
    ask(&mut channel, &world, BIND);
    let mid = r#"{"op":"mid_process","ops":[{"id":4}]}"#;
    let answer = ask(&mut channel, &world, mid);
    assert!(answer.ends_with(r#""num_seqs":1}}"#), "{answer}");
    let hello = r#"{"op":"hello","features":["bitmask"]}"#;
    ask(&mut channel, &world, hello);
    let expected =
        r#""num_seqs":1,"dtype":"bool","first_mask_byte_offset":0,"mask_num_bytes":136}}"#;
    let allowed = |count: usize| -> Vec<Token> {
        let mut bytes = Vec::new();
        assert!(world.masks.read(0, 136 * count, &mut bytes));
        let bits = (0..8 * bytes.len()).filter(|bit| bytes[bit / 8] >> (bit % 8) & 1 == 1);
        bits.map(|bit| bit as Token).collect()
    };
    for row in [vec![10], (0..100).collect(), vec![EOS]] {
        let answer = ask(&mut channel, &world, mid);
        assert!(answer.ends_with(expected), "{answer}");
        assert_eq!(allowed(1), row);
    }
    // Two rows of bits fit where two of numbers did not.
    let two = r#"{"op":"mid_process","ops":[{"id":8},{"id":9}]}"#;
    let answer = ask(&mut channel, &world, two);
    assert!(answer.contains(r#""num_seqs":2"#), "{answer}");
    assert_eq!(
        allowed(2).len(),
        200,
        "rows of unknown ids allow everything"
    );
    let three = r#"{"op":"mid_process","ops":[{"id":7},{"id":8},{"id":9}]}"#;
    assert!(ask(&mut channel, &world, three).contains("shm size too small"));
}

#[test]
fn ai_1002_bits_in_p2_have_another_header() {
    let world = World::with_masks(1 << 16);
    let mut channel = channel(&world, Dialect::P2);
    let branch = |token| ReturnedBranch {
        mask: match only(token) {
            MidReturned::Sample(mask) => mask,
            _ => None,
        },
        temperature: None,
        splices: vec![],
        wait: None,
    };
    let returns = |token| Line::Returns(Returned::Branches(vec![branch(token)]));
    world.instance("r", [returns(7), returns(8)]);
    let first = r#"{"op":"mid_process","ops":[{"id":4,"req_id":"r"}]}"#;
    let answer = ask(&mut channel, &world, first);
    assert!(answer.contains(r#""dtype":"f32""#), "{answer}");
    ask(
        &mut channel,
        &world,
        r#"{"op":"hello","features":["bitmask"]}"#,
    );
    let answer = ask(
        &mut channel,
        &world,
        r#"{"op":"mid_process","ops":[{"id":4}]}"#,
    );
    let layout = r#""dtype":"bool","first_mask_byte_offset":4096,"mask_num_bytes":136,"mask_num_elts":1088,"num_masks":1"#;
    assert!(answer.contains(layout), "{answer}");
    let mut bytes = Vec::new();
    assert!(world.masks.read(0, 4096 + 136, &mut bytes));
    assert_eq!(bytes[12..16], 4_u32.to_le_bytes(), "the type of the header");
    assert_eq!(bytes[4096..4096 + 3], [0, 1, 0]);
}

#[test]
fn ai_1002_what_is_empty_is_left_out_of_compact_answers() {
    let world = World::new();
    let mut channel = channel(&world, Dialect::P1);
    let script = [
        runs(),
        mid(only(82)),
        post(false),
        pre(1, true, &[]),
        mid(MidReturned::Sample(None)),
        post(true),
        pre(2, false, &[]),
    ];
    world.add("r", Scripted::new(&world, script).in_no_time());
    ask(
        &mut channel,
        &world,
        r#"{"op":"hello","features":["compact"]}"#,
    );
    let post = r#"{"op":"post_pre_process","post_ops":[{"id":4,"tokens":[82]}]}"#;
    let mid = r#"{"op":"mid_process","ops":[{"id":4}]}"#;
    for (request, data) in [
        (BIND, r#"{"post_seqs":{},"pre_seqs":{"4":{}}}"#),
        (mid, r#"{"seqs":{"4":{}},"num_seqs":1}"#),
        (
            post,
            r#"{"post_seqs":{"4":{}},"pre_seqs":{"4":{"result":{"suspend":true,"num_forks":1,"ff_tokens":[]}}}}"#,
        ),
        (mid, r#"{"seqs":{"4":{}},"num_seqs":1}"#),
        (
            post,
            r#"{"post_seqs":{"4":{"result":{"stop":true}}},"pre_seqs":{"4":{"result":{"suspend":false,"num_forks":2,"ff_tokens":[]}}}}"#,
        ),
        (
            r#"{"op":"mid_process","ops":[{"id":9}]}"#,
            r#"{"seqs":{"9":{"error":"Worker: invalid id 9","logs":"Worker: invalid id 9"}},"num_seqs":1}"#,
        ),
    ] {
        let expected = format!(r#"{{"type":"ok","data":{data}}}"#);
        assert_eq!(ask(&mut channel, &world, request), expected);
    }
}

/// AI-1001
#[test]
fn ai_1005_what_a_sequence_waits_for_is_shown_to_those_who_ask() {
    let group = Group::new(4, VariablesLimits::default());
    let suspends = || {
        Line::Returns(Returned::Pre {
            num_forks: 1,
            suspend: true,
            ff_tokens: vec![],
            wait: Some(Waiting::of_test(&group, &["go"])),
        })
    };
    let world = World::new();
    let mut channel = channel(&world, Dialect::P1);
    world.instance("r", [suspends()]);
    let plain = r#""result":{"suspend":true,"num_forks":1,"ff_tokens":[]},"#;
    let answer = ask(&mut channel, &world, BIND);
    assert!(answer.contains(plain), "{answer}");
    ask(
        &mut channel,
        &world,
        r#"{"op":"hello","features":["wait"]}"#,
    );
    let answer = ask(&mut channel, &world, r#"{"op":"post_pre_process"}"#);
    let shown = r#""result":{"suspend":true,"num_forks":1,"ff_tokens":[],"wait":["go"]},"#;
    assert!(answer.contains(shown), "{answer}");
}

#[test]
fn ai_316_tokens_of_pre_are_answered_until_the_next_mid_or_post() {
    let world = World::new();
    let mut channel = channel(&world, Dialect::P1i);
    let forward = || [pre(1, false, &[5]), post(false), runs()];
    let script = forward().into_iter().chain([mid(only(7))]);
    let script = script.chain(forward()).chain([post(false), runs(), runs()]);
    world.instance("r", script);
    let tokens = |answer: &str| answer.contains(r#""ff_tokens":[5]"#);
    let again = r#"{"op":"post_pre_process"}"#;
    assert!(tokens(&ask(&mut channel, &world, BIND)));
    assert!(tokens(&ask(&mut channel, &world, again)));
    assert_eq!(world.take_calls().len(), 3, "asked once");
    ask(
        &mut channel,
        &world,
        r#"{"op":"mid_process","ops":[{"id":4}]}"#,
    );
    assert!(tokens(&ask(&mut channel, &world, again)));
    assert!(tokens(&ask(&mut channel, &world, again)));
    let posted = r#"{"op":"post_pre_process","post_ops":[{"id":4,"tokens":[7]}]}"#;
    assert!(!tokens(&ask(&mut channel, &world, posted)));
    assert!(!tokens(&ask(&mut channel, &world, again)));
}

/// AI-305: whatever comes, the runtime answers, and the sequence that no request names is as it was.
#[test]
fn ai_305_no_request_changes_a_sequence_that_it_does_not_name() {
    use proptest::prelude::*;
    let piece = prop::sample::select(vec![
        r#"{"op":"mid_process","ops":[{"id":7}]}"#,
        r#"{"op":"mid_process","ops":[{"id":7,"clone_id":8},{"id":8,"clone_id":7}]}"#,
        r#"{"op":"mid_process","ops":[{"id":7},{"id":7}]}"#,
        r#"{"op":"post_pre_process","post_ops":[{"id":7,"tokens":[1]}]}"#,
        r#"{"op":"post_pre_process","pre_ops":[{"id":7,"req_id":"none"}],"freed":[4]}"#,
        r#"{"op":"post_pre_process","freed":[7,8,9]}"#,
        r#"{"op":"mid_process","ops":[],"freed":[4]}"#,
        r#"{"op":"tokens"}"#,
        r#"{"op":"#,
        "\u{0}",
    ]);
    proptest!(ProptestConfig::with_cases(64), |(requests in prop::collection::vec(piece, 0..12))| {
        let world = World::new();
        let mut channel = channel(&world, Dialect::P1);
        let endless = std::iter::repeat_n(runs(), 20).chain([mid(MidReturned::Stop)]);
        world.instance("r", endless);
        ask(&mut channel, &world, r#"{"op":"post_pre_process","pre_ops":[{"id":4,"req_id":"r"}]}"#);
        for request in requests {
            let answer = ask(&mut channel, &world, request);
            prop_assert_eq!(answer.as_bytes()[0], b'{');
        }
        let answer = ask(&mut channel, &world, r#"{"op":"post_pre_process"}"#);
        prop_assert!(answer.contains(r#""4":{"error":"","#), "{answer}");
    });
}

#[test]
fn ai_224_an_answer_is_shortened_to_its_region() {
    let world = World::new();
    let mut channel = channel(&world, Dialect::P1);
    let sequence = Scripted::new(
        &world,
        [Line::Returns(Returned::Pre {
            num_forks: 1,
            suspend: false,
            ff_tokens: Vec::new(),
            wait: None,
        })],
    );
    world.add("r", sequence.printing(&"x".repeat(5_000)));
    let room = AnswerRoom {
        bytes_max: 996,
        room: 1_000,
    };
    let request = r#"{"op":"post_pre_process","pre_ops":[{"id":4,"req_id":"r"}]}"#;
    let MainReply::Answer(answer) = channel.handle(request.as_bytes(), room, world.step()) else {
        panic!("it is answered");
    };
    let answer = String::from_utf8(answer).unwrap();
    assert!(
        answer.len() <= 996 && answer.contains(&"x".repeat(500)),
        "{answer}"
    );
}
