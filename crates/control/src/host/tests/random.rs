//! `random_get` with a seed (AI-1010). Without one it is with the other functions of WASI.

use super::*;

/// Draws 12 bytes in two calls, and prints 8 of them.
const DRAW: &str = r#"
    (call $hex (call $random (i32.const 5000) (i32.const 5)))
    (drop (call $random (i32.const 5005) (i32.const 7)))
    (call $hex (i32.load (i32.const 5000))) (call $hex (i32.load (i32.const 5008)))"#;

fn seeded() -> Host {
    new_host(HostConfig {
        random: ControllerRandom::Seeded,
        ..small()
    })
}

fn start(host: &Host, body: &str, seed: Option<u64>) -> Sequence {
    let group = Group::new(16, VariablesLimits::default());
    if let Some(seed) = seed {
        group.set_seed(seed);
        group.set_seed(seed + 1);
    }
    let program = load(
        host,
        &p2_returning("", body, r#"{"branches":[{"splices":[{}]}]}"#),
    );
    Sequence::start_in(host, &program, &group).begun()
}

fn drawn(sequence: &mut Sequence) -> String {
    let outcome = sequence.process();
    assert!(outcome.result.is_ok(), "{outcome:?}");
    outcome.report.logs
}

#[test]
fn ai_1010_random_numbers_are_those_of_the_seed() {
    let host = seeded();
    let mut first = start(&host, DRAW, Some(7));
    let (one, two) = (drawn(&mut first), drawn(&mut first));
    assert!(one.starts_with("00000000 ") && one != two, "{one} {two}");
    let mut again = start(&host, DRAW, Some(7));
    assert_eq!([drawn(&mut again), drawn(&mut again)], [one.clone(), two]);
    assert_ne!(drawn(&mut start(&host, DRAW, Some(8))), one);
    // A request without a seed has the seed 0.
    let none = drawn(&mut start(&host, DRAW, None));
    assert_eq!(none, drawn(&mut start(&host, DRAW, Some(0))));
}

/// AI-711: what a parent has drawn is not drawn again, and what its forks draw is their own.
#[test]
fn ai_1010_forks_have_streams_of_their_own() {
    let run = || {
        let host = seeded();
        let mut parent = start(&host, DRAW, Some(7));
        let mut all = vec![drawn(&mut parent)];
        let mut first = parent.fork();
        let mut second = parent.fork();
        let mut grandchild = first.fork();
        for sequence in [&mut second, &mut parent, &mut grandchild, &mut first] {
            all.extend([drawn(sequence), drawn(sequence)]);
        }
        all
    };
    let all = run();
    let different: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!(different.len(), 9, "{all:?}");
    assert_eq!(all, run());
    // The parent goes on where it was, as if it had not forked.
    let mut unforked = start(&seeded(), DRAW, Some(7));
    assert_eq!(
        [drawn(&mut unforked), drawn(&mut unforked)],
        [all[0].clone(), all[3].clone()]
    );
}

/// AI-606
#[test]
fn ai_1010_bytes_past_the_memory_trap() {
    let host = seeded();
    let body = "(drop (call $random (i32.const 131071) (i32.const 1)))
        (drop (call $random (i32.const 131071) (i32.const 2)))";
    let failure = failure(start(&host, body, Some(7)).process());
    assert_eq!(failure.reason, ErrorReason::TRAP);
    let text = "out of bounds pointer passed to random_get";
    assert!(failure.message.ends_with(text), "{failure}");
}

/// AI-731
#[test]
fn ai_1010_drawing_for_ever_ends_with_the_callback() {
    let host = new_host(HostConfig {
        random: ControllerRandom::Seeded,
        step_time: Duration::from_millis(20),
        late_steps: 1,
        ..small()
    });
    let body = "(drop (memory.grow (i32.const 60)))
        (loop $l (drop (call $random (i32.const 0) (i32.const 4000000))) (br $l))";
    let failure = failure(start(&host, body, Some(7)).process());
    assert_eq!(failure.reason, ErrorReason::TIMEOUT);
}
