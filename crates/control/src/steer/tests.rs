//! Controllers steer as the interface says. An engine is played step by step.

use std::sync::Arc;

use sapwood_proto::steer::{Branch, ConditionalSplice, Mask, Splice};

use super::*;
use crate::host::tests::{Bell, P1, host, load, model, p2_returning, token_42};
use crate::host::{ReturnedBranch, ReturnedSplice};

/// One sequence, and the waker of its request.
struct Player {
    steer: Box<dyn Steer>,
    bell: Arc<Bell>,
}

fn source(text: &str, limits: RequestLimits) -> ModelControllers {
    let host = host();
    let program = load(&host, text);
    let find = move |user: SteerUser<'_>, name: &str| {
        assert_eq!(user.name, "ada");
        if name == "it" {
            return Ok(program.clone());
        }
        Err(SteerRefusal {
            code: Code::NotFound,
            reason: ErrorReason::UNKNOWN_CONTROLLER,
            message: format!("tag {name} not found"),
        })
    };
    ModelControllers::new(host, Arc::new(find), model(), Capabilities::ALL, limits)
}

const CALL: SteerCall<'static> = SteerCall {
    user: SteerUser {
        name: "ada",
        is_admin: false,
        may_control: true,
    },
    controller: "it",
    arg: "",
    watched: true,
    stops: false,
    sharer: None,
};

impl Player {
    fn open(text: &str) -> Self {
        let steer = source(text, RequestLimits::default()).open(CALL).unwrap();
        let bell = Arc::new(Bell::default());
        Self { steer, bell }
    }

    fn begin(&mut self) -> Steered<Begun> {
        let waker: Arc<dyn StepWaker> = Arc::clone(&self.bell) as _;
        self.steer.begin(&[0, 50], &waker);
        let begun = self.bell.wait(|| self.steer.begin_poll().transpose());
        self.steer.bind(3);
        begun
    }

    fn begun(text: &str) -> Self {
        let mut player = Self::open(text);
        assert_eq!(player.begin(), Ok(Begun::default()));
        player
    }

    fn pre(&mut self) -> Steered<Pre> {
        self.bell.wait(|| self.steer.pre().transpose())
    }

    fn mid(&mut self, group: &[u32]) -> Steered<Mid> {
        self.steer.mid_begin(group);
        self.bell.wait(|| self.steer.mid_poll().transpose())
    }

    fn sampled(&mut self, token: Token) {
        let tokens = &[token];
        let post = self.steer.post(Appended {
            backtrack: 0,
            tokens,
            sampled: Some(token),
        });
        assert_eq!(post, Ok(Post::Continue));
    }

    fn fork(&mut self, index: u32, number: u32) -> Self {
        let mut steer = self.steer.fork(index).unwrap();
        steer.bind(number);
        let bell = Arc::clone(&self.bell);
        Self { steer, bell }
    }

    fn logs(&mut self) -> String {
        self.steer.take_report().unwrap_or_default().logs
    }
}

fn run(tokens: &[Token]) -> Steered<Pre> {
    let fast_forward = tokens.to_vec();
    Ok(Pre::Run { fast_forward })
}

fn json(at: u32, text: &str) -> String {
    format!("(data (i32.const {at}) \"{}\")", text.replace('"', "\\\""))
}

/// Sorting each row is for requests alone whose controller wants it.
#[test]
fn ai_1009_a_module_that_imports_them_is_shown_the_best_tokens() {
    let body = "(call $hex (call $top (i32.const 1) (i32.const 5000))) (call $hex (i32.load (i32.const 5000)))";
    let noop = r#"{"branches":[{"splices":[{}]}]}"#;
    let import =
        r#"(import "sapwood" "top_logits" (func $top (param i32 i32) (result i32))) (memory"#;
    let text = p2_returning("", body, noop).replacen("(memory", import, 1);
    let mut player = Player::begun(&text);
    assert_eq!(player.steer.best_tokens_wanted(), 64);
    player.pre().unwrap();
    player.steer.show_best_tokens(&[(77, -0.5), (3, -2.0)]);
    player.mid(&[3]).unwrap();
    assert_eq!(player.logs(), "00000001 0000004d ");
    assert_eq!(Player::begun(&token_42()).steer.best_tokens_wanted(), 0);
}

/// The seed that the engine has drawn, or the request has given.
#[test]
fn ai_1010_a_controller_draws_from_the_seed_of_its_request() {
    use crate::host::tests::small;
    use crate::host::{ControllerRandom, HostConfig};
    let host = Host::new(HostConfig {
        random: ControllerRandom::Seeded,
        ..small()
    })
    .unwrap();
    let draw = "(drop (call $random (i32.const 5000) (i32.const 4))) (call $hex (i32.load (i32.const 5000)))";
    let noop = r#"{"branches":[{"splices":[{}]}]}"#;
    let program = load(&host, &p2_returning("", draw, noop));
    let find = move |_: SteerUser<'_>, _: &str| Ok(program.clone());
    let limits = RequestLimits::default();
    let source = ModelControllers::new(host, Arc::new(find), model(), Capabilities::ALL, limits);
    let drawn = |seed| {
        let mut steer = source.open(CALL).unwrap();
        steer.seed(seed);
        let bell = Arc::default();
        let mut player = Player { steer, bell };
        player.begin().unwrap();
        player.pre().unwrap();
        player.mid(&[3]).unwrap();
        player.logs()
    };
    assert_eq!((drawn(5), drawn(5) == drawn(6)), (drawn(5), false));
}

#[test]
fn ai_801_a_p1_controller_steers_until_it_stops() {
    let mut player = Player::begun(&token_42());
    assert!(!player.steer.ends_at_eos() && player.steer.may_backtrack());
    for _ in 0..3 {
        assert_eq!(player.pre(), run(&[]));
        let Ok(Mid::One(Branch::Sample(sample))) = player.mid(&[3]) else {
            panic!("a mask is expected");
        };
        let mask = sample.mask.unwrap();
        assert_eq!((mask.count(), mask.allows(42)), (1, true));
        player.sampled(42);
    }
    assert_eq!(player.pre(), Ok(Pre::Stop));
}

/// Counts the calls of `pre` in `$n`, and prints what `post` gets.
fn p1_with(pre: &str, data: &str) -> String {
    P1 {
        globals: "(memory (export \"memory\") 2) (global $n (mut i32) (i32.const 0))",
        functions: data,
        pre: &format!("(global.set $n (i32.add (global.get $n) (i32.const 1))) {pre}"),
        mid: "(call $print (i32.const 2048) (call $blob (i32.const 4) (i32.const 2048) (i32.const 99)))
              (call $ret (i32.const 64) (i32.const 21))",
        post: "(call $print (i32.const 2048) (call $blob (i32.const 4) (i32.const 2048) (i32.const 99)))
               (call $ret (i32.const 96) (i32.const 14))",
        ..P1::default()
    }
    .text()
}

#[test]
fn ai_405_fast_forward_rounds_are_reported_to_the_controller_and_joined() {
    let some = r#"{"ff_tokens":[5,6]}"#;
    let pre = format!(
        "(if (i32.le_u (global.get $n) (i32.const 2))
           (then (call $ret (i32.const 3000) (i32.const {})))
           (else (call $ret (i32.const 8) (i32.const 46))))",
        some.len()
    );
    let mut player = Player::begun(&p1_with(&pre, &json(3000, some)));
    assert_eq!(player.pre(), run(&[5, 6, 5, 6]));
    let post = r#"{"tokens":[5,6],"backtrack":0}"#;
    assert_eq!(player.logs(), [post, post].concat());
    assert!(player.mid(&[3]).is_ok());
    assert_eq!(player.logs(), r#"{"fork_group":[3]}"#);
    player.sampled(9);
    assert_eq!(player.pre(), run(&[]));
    assert_eq!(player.logs(), r#"{"tokens":[9],"backtrack":0}"#);
}

#[test]
fn ai_405_the_eleventh_round_fails() {
    let some = r#"{"ff_tokens":[5]}"#;
    let rounds = |count: u32| {
        let pre = format!(
            "(if (i32.le_u (global.get $n) (i32.const {count}))
               (then (call $ret (i32.const 3000) (i32.const {})))
               (else (call $ret (i32.const 8) (i32.const 46))))",
            some.len()
        );
        Player::begun(&p1_with(&pre, &json(3000, some))).pre()
    };
    assert_eq!(rounds(10), run(&[5; 10]));
    let failure = rounds(11).unwrap_err();
    assert_eq!(failure.reason, ErrorReason::LIMIT);
    assert_eq!(
        failure.message,
        "too many ff_tokens rounds from pre_process"
    );
}

/// A P1 controller that has just forced the token 5, and becomes three sequences next.
fn forwards_and_forks() -> Player {
    let (some, forks) = (r#"{"ff_tokens":[5]}"#, r#"{"num_forks":3}"#);
    let pre = format!(
        "(if (i32.eq (global.get $n) (i32.const 1))
           (then (call $ret (i32.const 3000) (i32.const {})))
           (else (if (i32.eq (global.get $n) (i32.const 2))
             (then (call $ret (i32.const 3100) (i32.const {})))
             (else (call $ret (i32.const 8) (i32.const 46))))))",
        some.len(),
        forks.len()
    );
    let data = json(3000, some) + &json(3100, forks);
    let mut player = Player::begun(&p1_with(&pre, &data));
    assert_eq!(player.pre(), run(&[5]));
    player
}

#[test]
fn ai_405_what_follows_fast_forwarded_tokens_waits_a_step() {
    let mut player = forwards_and_forks();
    assert_eq!(player.mid(&[3]), Ok(Mid::One(Branch::Noop)));
    assert_eq!(player.pre(), Ok(Pre::Fork(3)));
    player.logs();
    let mut child = player.fork(1, 4);
    assert!(matches!(
        child.mid(&[3, 4]),
        Ok(Mid::One(Branch::Sample(_)))
    ));
    assert_eq!(child.logs(), r#"{"fork_group":[3,4]}"#);
    assert!(matches!(
        player.mid(&[3, 4]),
        Ok(Mid::One(Branch::Sample(_)))
    ));
    child.sampled(7);
    assert_eq!(child.pre(), run(&[]));
}

#[test]
fn ai_405_other_tokens_than_the_forced_ones_end_what_was_to_follow() {
    let mut player = forwards_and_forks();
    // A constraint beside it forces more.
    player.sampled(6);
    assert_eq!(player.pre(), run(&[]), "the answer to that");
    let mut child = player.fork(1, 4);
    for steered in [&mut player, &mut child] {
        let mid = steered.mid(&[3, 4]);
        assert!(matches!(mid, Ok(Mid::One(Branch::Sample(_)))), "{mid:?}");
    }
}

#[test]
fn ai_413_more_forks_than_a_request_may_have_fail() {
    let check = |forks: u32| {
        let forks = format!("{{\"num_forks\":{forks}}}");
        let pre = format!("(call $ret (i32.const 3000) (i32.const {}))", forks.len());
        Player::begun(&p1_with(&pre, &json(3000, &forks))).pre()
    };
    assert_eq!(check(16), Ok(Pre::Fork(16)));
    let failure = check(17).unwrap_err();
    assert_eq!(
        (failure.reason, &*failure.message),
        (ErrorReason::LIMIT, "too many forks (max=16)")
    );
    assert_eq!(check(0), Ok(Pre::Stop));
}

#[test]
fn ai_813_a_suspended_controller_is_asked_again() {
    let suspend = r#"{"num_forks":1,"suspend":true}"#;
    let pre = format!(
        "(if (i32.le_u (global.get $n) (i32.const 2))
           (then (call $ret (i32.const 3000) (i32.const {})))
           (else (call $ret (i32.const 8) (i32.const 46))))",
        suspend.len()
    );
    let mut player = Player::begun(&p1_with(&pre, &json(3000, suspend)));
    assert_eq!(player.pre(), Ok(Pre::Suspend));
    assert_eq!(player.pre(), Ok(Pre::Suspend));
    assert_eq!(player.pre(), run(&[]));
}

#[test]
fn ai_1005_a_controller_that_waits_is_not_run_until_a_sibling_ends() {
    let wait = r#"{"num_forks":1,"suspend":true,"wait":["x"]}"#;
    let pre = format!(
        "(if (i32.le_u (global.get $n) (i32.const 1))
           (then (call $ret (i32.const 3000) (i32.const {})))
           (else (call $ret (i32.const 8) (i32.const 46))))",
        wait.len()
    );
    let mut player = Player::begun(&p1_with(&pre, &json(3000, wait)));
    let mut sibling = player.fork(1, 4);
    assert_eq!(player.pre(), Ok(Pre::Wait));
    // Three more calls would be one that goes on.
    for _ in 0..4 {
        assert_eq!(player.pre(), Ok(Pre::Wait));
    }
    assert_eq!(sibling.pre(), Ok(Pre::Wait));
    drop(sibling);
    let next = std::iter::repeat_with(|| player.pre()).find(|pre| *pre != Ok(Pre::Wait));
    assert_eq!(next, Some(run(&[])));
}

#[test]
fn ai_1005_a_branch_without_effect_waits() {
    let noop = r#"{"splices":[{"backtrack":0,"ff_tokens":[]}],"wait":["x"]}"#;
    let text = p2_returning("", "", &format!(r#"{{"branches":[{noop}]}}"#));
    let mut player = Player::begun(&text);
    assert_eq!(player.pre(), run(&[]));
    assert_eq!(player.mid(&[3]), Ok(Mid::One(Branch::Noop)));
    assert_eq!(player.pre(), Ok(Pre::Wait));
    // Another steerer of the sequence appends tokens.
    player.sampled(5);
    assert_eq!(player.pre(), run(&[]));
    let text = p2_returning("", "", &format!(r#"{{"branches":[{noop},{noop}]}}"#));
    let mut player = Player::begun(&text);
    assert_eq!(player.pre(), run(&[]));
    let both = Mid::Fork(vec![Branch::Noop, Branch::Noop]);
    assert_eq!(player.mid(&[3]), Ok(both));
    let mut child = player.fork(1, 4);
    assert_eq!((player.pre(), child.pre()), (Ok(Pre::Wait), Ok(Pre::Wait)));
}

/// AI-932
#[test]
fn ai_421_a_failure_has_its_reason_and_its_cause_without_the_log() {
    let text = P1 {
        mid: "(call $print (i32.const 64) (i32.const 3)) unreachable",
        ..P1::default()
    };
    let mut player = Player::begun(&text.text());
    assert_eq!(player.pre(), run(&[]));
    let failure = player.mid(&[3]).unwrap_err();
    assert_eq!(failure.reason, ErrorReason::TRAP);
    assert!(failure.message.starts_with("guest backtrace:"), "{failure}");
    assert_eq!(player.logs(), "{\"S");
    assert!(player.steer.fork(1).is_err());
    assert!(player.steer.pre().is_err());
    let create = "unreachable";
    let mut player = Player::open(
        &P1 {
            create,
            ..P1::default()
        }
        .text(),
    );
    assert_eq!(player.begin().unwrap_err().reason, ErrorReason::INIT);
}

/// A P2 module that prints its argument and returns `json`.
fn p2_echo(json: &str) -> Player {
    let process =
        "(call $print (i32.const 4096) (call $blob (i32.const 4) (i32.const 4096) (i32.const 999)))
        (drop (call $bias (i32.const 1024))) (drop (call $bias (i32.const 1024)))";
    let data = "(data (i32.const 1024) \"\\ff\")";
    Player::begun(&p2_returning(data, process, json))
}

#[test]
fn ai_505_p2_splices_that_keep_the_sampled_token() {
    let mut player = p2_echo(
        r#"{"branches":[{"sample_mask":0,"temperature":0.5,"splices":[{"when_sampled":[2],"backtrack":3,"ff_tokens":[8]},{"when_sampled":[3,4],"backtrack":0,"ff_tokens":[9]},{"when_sampled":[],"backtrack":0,"ff_tokens":[6,7]},{"when_sampled":[5],"backtrack":1,"ff_tokens":[]}]}]}"#,
    );
    assert_eq!(player.pre(), run(&[]));
    let Ok(Mid::One(Branch::Sample(sample))) = player.mid(&[3]) else {
        panic!("a sample is expected");
    };
    assert_eq!(sample.temperature, Some(0.5));
    let splice = |when: &[Token], keeps_sampled, backtrack, tokens: &[Token]| ConditionalSplice {
        when_sampled: when.to_vec(),
        keeps_sampled,
        splice: Splice {
            backtrack,
            tokens: tokens.to_vec(),
        },
    };
    // What comes after a splice that always applies is never reached.
    assert_eq!(
        sample.splices,
        [splice(&[2], false, 2, &[8]), splice(&[3, 4], true, 0, &[9])]
    );
    // An ordinary sample is followed by what applies always.
    player.sampled(5);
    assert_eq!(player.pre(), run(&[6, 7]));
    player.logs();
    assert!(player.mid(&[3]).is_ok());
    assert_eq!(
        player.logs(),
        r#"{"backtrack":0,"tokens":[5,6,7],"sampled":5,"fork_group":[3]}"#
    );
    // A splice is not.
    player.sampled(3);
    assert_eq!(player.pre(), run(&[]));
}

/// Each of them would be a copy of the tokens that follow.
#[test]
fn ai_505_p2_splices_after_many_tokens_take_no_more_than_they_were_written_with() {
    let returned = ReturnedSplice {
        when_sampled: (0..1000).collect(),
        backtrack: 0,
        ff_tokens: (0..1000).collect(),
    };
    let splices = vec![returned; 32];
    let mask = Some(Arc::new(Mask::all(1000)));
    let branch = ReturnedBranch {
        mask,
        temperature: None,
        splices,
        wait: None,
    };
    let mid = p2::decide(vec![branch], &mut Vec::new()).unwrap();
    let Mid::One(Branch::Sample(sample)) = mid else {
        panic!("a sample is expected");
    };
    let sizes = sample
        .splices
        .iter()
        .map(|it| (it.when_sampled.len(), it.splice.tokens.len()));
    assert_eq!(sizes.collect::<Vec<_>>(), [(1000, 1000); 32]);
}

#[test]
fn ai_502_a_p2_controller_is_told_what_happened() {
    let mut player = p2_echo(r#"{"branches":[{"splices":[{"backtrack":2,"ff_tokens":[8]}]}]}"#);
    let splice = Splice {
        backtrack: 2,
        tokens: vec![8],
    };
    assert_eq!(player.mid(&[3]), Ok(Mid::One(Branch::Splice(splice))));
    assert_eq!(
        player.logs(),
        r#"{"backtrack":0,"tokens":[],"sampled":null,"fork_group":[3]}"#
    );
    let spliced = Appended {
        backtrack: 2,
        tokens: &[8, 9],
        sampled: None,
    };
    player.steer.post(spliced).unwrap();
    // A later step takes back more than is reported so far.
    let again = Appended {
        backtrack: 3,
        tokens: &[7],
        sampled: Some(6),
    };
    player.steer.post(again).unwrap();
    assert!(player.mid(&[3]).is_ok());
    assert_eq!(
        player.logs(),
        r#"{"backtrack":3,"tokens":[7],"sampled":6,"fork_group":[3]}"#
    );
}

#[test]
fn ai_505_p2_branches_are_a_fork_and_each_goes_its_way() {
    let mut player = p2_echo(
        r#"{"branches":[{"sample_mask":0},{"sample_mask":1,"splices":[{"backtrack":0,"ff_tokens":[6]}]},{"splices":[{}]}]}"#,
    );
    assert_eq!(player.pre(), run(&[]));
    let Ok(Mid::Fork(branches)) = player.mid(&[3]) else {
        panic!("a fork is expected");
    };
    assert_eq!(branches.len(), 3);
    assert!(matches!(branches[1], Branch::Sample(_)));
    assert_eq!(branches[2], Branch::Noop);
    player.logs();
    let mut first = player.fork(1, 4);
    let mut second = player.fork(2, 5);
    player.sampled(2);
    first.sampled(3);
    assert_eq!(player.pre(), run(&[]));
    assert_eq!(first.pre(), run(&[6]));
    assert_eq!(second.pre(), run(&[]));
    for (player, happened) in [
        (&mut player, r#""tokens":[2],"sampled":2"#),
        (&mut first, r#""tokens":[3,6],"sampled":3"#),
        (&mut second, r#""tokens":[],"sampled":null"#),
    ] {
        assert!(player.mid(&[3, 4, 5]).is_ok());
        let expected = format!(r#"{{"backtrack":0,{happened},"fork_group":[3,4,5]}}"#);
        assert_eq!(player.logs(), expected);
    }
    let mut stopping = p2_echo(r#"{"branches":[]}"#);
    assert_eq!(stopping.mid(&[3]), Ok(Mid::Stop));
}

/// AI-313
#[test]
fn ai_1090_an_argument_has_at_most_a_mebibyte() {
    let source = source(&token_42(), RequestLimits::default());
    let at = "x".repeat(1 << 20);
    assert!(source.open(SteerCall { arg: &at, ..CALL }).is_ok());
    let over = at + "x";
    let refusal = source.open(SteerCall { arg: &over, ..CALL }).err().unwrap();
    assert_eq!(
        (refusal.code, refusal.reason),
        (Code::InvalidRequest, ErrorReason::BAD_CONFIG)
    );
    let unknown = SteerCall {
        controller: "other",
        ..CALL
    };
    let refusal = source.open(unknown).err().unwrap();
    assert_eq!(refusal.message, "tag other not found");
}

#[test]
fn reports_are_made_only_for_those_who_watch() {
    let text = P1 {
        mid: "(call $print (i32.const 64) (i32.const 3)) (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    };
    let source = source(&text.text(), RequestLimits::default());
    let unwatched = SteerCall {
        watched: false,
        stops: false,
        ..CALL
    };
    let mut player = Player {
        steer: source.open(unwatched).unwrap(),
        bell: Arc::default(),
    };
    player.begin().unwrap();
    player.pre().unwrap();
    player.mid(&[3]).unwrap();
    assert_eq!(player.steer.take_report(), None);
}

#[test]
fn a_report_of_many_callbacks_keeps_its_end() {
    let mut total = StepReport::default();
    for text in ["a", "\u{e9}"] {
        let logs = text.repeat(40_000);
        add_report(
            &mut total,
            StepReport {
                logs,
                ..StepReport::default()
            },
        );
    }
    assert!(total.logs.len() <= REPORT_LOG_BYTES_MAX);
    assert!(total.logs.starts_with('\u{e9}'));
}

#[test]
fn the_writes_of_many_callbacks_are_bounded_in_bytes() {
    let mut total = StepReport::default();
    let write = |name: &str, bytes: usize| VariableWrite {
        name: name.to_owned(),
        value: vec![0; bytes],
        append: false,
        when_version_is: None,
    };
    let most = REPORT_BYTES_MAX - write("a", 0).held_bytes();
    let half = REPORT_BYTES_MAX / 2 - write("a", 0).held_bytes();
    for (name, bytes, expect) in [
        ("a", half, "a"),
        ("b", half, "ab"),
        ("c", 0, "bc"),
        ("d", most + 1, ""),
        ("e", most, "e"),
    ] {
        add_report(
            &mut total,
            StepReport {
                storage: vec![write(name, bytes)],
                ..StepReport::default()
            },
        );
        let kept: String = total.storage.iter().map(|write| &*write.name).collect();
        assert_eq!(kept, expect, "{name}");
    }
}
