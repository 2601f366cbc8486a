//! Modules that do what they can to harm others: each ends its own sequence, with its cause, and 39 others have exact
//! results.

use super::*;

/// One thread, so that a loop would stop everything, and a limit after which a loop ends.
fn strict() -> Host {
    new_host(HostConfig {
        late_steps: 1,
        step_time: Duration::from_millis(500),
        ..small()
    })
}

/// Runs three steps of 39 good sequences while `hostile` makes one call.
fn beside_39(hostile: P1<'_>) -> Outcome {
    beside_39_on(&strict(), hostile)
}

fn beside_39_on(host: &Host, hostile: P1<'_>) -> Outcome {
    let limits = VariablesLimits::default();
    let good = load(host, &token_42());
    let group = Group::new(39, limits);
    let bad = load(host, &hostile.text());
    let mut others: Vec<_> = (0..39)
        .map(|_| Sequence::start_in(host, &good, &group).begun())
        .collect();
    let mut attacker = Sequence::start(host, &bad).begun();
    let fork_group = vec![1];
    attacker.instance.call(Callback::Mid { fork_group });
    for round in 1..=3 {
        for other in &mut others {
            let fork_group = vec![1];
            other
                .instance
                .call_all([Callback::Pre, Callback::Mid { fork_group }]);
        }
        for other in &mut others {
            assert!(matches!(
                other.outcome().result,
                Ok(Returned::Pre { num_forks: 1, .. })
            ));
            let Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) = other.outcome().result else {
                panic!("a mask is expected");
            };
            assert_eq!((mask.count(), mask.allows(42)), (1, true));
            let stop = round == 3;
            assert_eq!(other.post(&[42]).result, Ok(Returned::Post { stop }));
        }
    }
    let outcome = attacker.outcome();
    drop((attacker, others));
    wait_until_free(host);
    outcome
}

fn attack(mid: &str) -> Outcome {
    beside_39(P1 {
        mid,
        ..P1::default()
    })
}

/// AI-441, AI-742
#[test]
fn ai_731_an_endless_loop_is_interrupted_at_its_limit() {
    let failure = failure(attack("(loop $l (br $l))"));
    assert_eq!(failure.reason, ErrorReason::TIMEOUT);
    assert!(failure.message.ends_with("timeout"), "{failure}");
}

#[test]
fn ai_731_endless_recursion_ends_at_the_stack() {
    let failure = failure(beside_39(P1 {
        functions: "(func $r (param i32) (result i32) (i32.add (i32.const 1) (call $r (local.get 0))))",
        mid: "(drop (call $r (i32.const 1)))",
        ..P1::default()
    }));
    assert_eq!(failure.reason, ErrorReason::TRAP);
    assert!(
        failure.message.contains("call stack exhausted"),
        "{failure}"
    );
    // A backtrace of 100,000 frames would fill an answer.
    assert!(failure.message.len() < 4096);
}

#[test]
fn ai_731_a_memory_bomb_ends_at_the_memory_limit() {
    let bomb = attack("(loop $l (drop (memory.grow (i32.const 1))) (br $l))");
    assert_eq!(failure(bomb).reason, ErrorReason::MEMORY);
}

#[test]
fn ai_608_a_log_flood_keeps_its_end_and_is_interrupted() {
    let flood = attack("(loop $l (call $print (i32.const 0) (i32.const 131072)) (br $l))");
    assert!(
        flood.report.logs.len() <= 3 * 65_536,
        "lossy text of at most 64 KiB"
    );
    assert_eq!(failure(flood).reason, ErrorReason::TIMEOUT);
}

#[test]
fn ai_608_one_print_of_all_memory_many_times_is_short() {
    // 1,024 vectors, each over all the memory.
    let print = attack(
        "(local $i i32)
         (loop $l
            (i32.store (i32.add (i32.const 65536) (i32.shl (local.get $i) (i32.const 3))) (i32.const 0))
            (i32.store (i32.add (i32.const 65540) (i32.shl (local.get $i) (i32.const 3))) (i32.const 131072))
            (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 1024))))
         (call $hex (call $write (i32.const 1) (i32.const 65536) (i32.const 1024) (i32.const 700)))
         (call $hex (i32.load (i32.const 700)))
         (call $hex (call $write (i32.const 1) (i32.const 65536) (i32.const 1025) (i32.const 700)))
         (call $ret (i32.const 64) (i32.const 21))",
    );
    assert!(print.result.is_ok());
    // After a mebibyte the call returns; one vector more than are accepted is an error.
    assert!(print.report.logs.ends_with("00000000 00100000 0000001c "));
}

#[test]
fn ai_953_a_flood_of_variables_ends_at_the_limit() {
    let command = r#"{"WriteVar":{"name":"x","value":"00","op":"Append","when_version_is":null}}"#;
    let data = format!(
        "(data (i32.const 4096) \"{}\")",
        command.replace('"', "\\\"")
    );
    let mid = format!(
        "(loop $l (drop (call $storage (i32.const 4096) (i32.const {}))) (br $l))",
        command.len()
    );
    // A thousand questions of one process to another may take longer than a step on a busy machine.
    let host = new_host(HostConfig {
        step_time: Duration::from_secs(30),
        ..small()
    });
    let flood = beside_39_on(
        &host,
        P1 {
            functions: &data,
            mid: &mid,
            ..P1::default()
        },
    );
    assert_eq!(flood.report.storage.len(), 1024);
    let failure = failure(flood);
    assert_eq!(failure.reason, ErrorReason::LIMIT);
    assert!(
        failure.message.ends_with("storage limit: writes per step"),
        "{failure}"
    );
}

#[test]
fn ai_605_a_flood_of_masks_ends_at_the_limit() {
    let host = strict();
    let process = "(loop $l (drop (call $bias (i32.const 1024))) (br $l))";
    let failure = failure(
        Sequence::start(&host, &load(&host, &p2("", process)))
            .begun()
            .process(),
    );
    assert_eq!(failure.reason, ErrorReason::LIMIT);
    assert!(
        failure
            .message
            .ends_with("more than 256 masks in one callback"),
        "{failure}"
    );
}

/// AI-703: callbacks have threads of their own.
#[test]
fn ai_441_several_loops_at_once_do_not_stop_the_others() {
    let host = strict();
    let text = P1 {
        mid: "(loop $l (br $l))",
        ..P1::default()
    };
    let looping = load(&host, &text.text());
    let good = load(&host, &token_42());
    let mut loops: Vec<_> = (0..8)
        .map(|_| Sequence::start(&host, &looping).begun())
        .collect();
    let mut other = Sequence::start(&host, &good).begun();
    for sequence in &mut loops {
        let fork_group = vec![1];
        sequence.instance.call(Callback::Mid { fork_group });
    }
    assert!(other.mid().result.is_ok());
    for mut sequence in loops {
        assert_eq!(failure(sequence.outcome()).reason, ErrorReason::TIMEOUT);
    }
    assert!(other.mid().result.is_ok());
}

#[test]
fn ai_731_init_has_one_limit_and_fails_the_start() {
    let host = new_host(HostConfig {
        init_time: Duration::from_millis(20),
        ..small()
    });
    for module in [
        P1 {
            functions: "(func $s (loop $l (br $l))) (start $s)",
            ..P1::default()
        },
        P1 {
            create: "(loop $l (br $l)) (i32.const 1)",
            ..P1::default()
        },
        P1 {
            init_prompt: "(loop $l (br $l))",
            ..P1::default()
        },
    ] {
        let mut sequence = Sequence::start(&host, &load(&host, &module.text()));
        assert_eq!(failure(sequence.outcome()).reason, ErrorReason::TIMEOUT);
    }
    wait_until_free(&host);
}

#[test]
fn dropping_an_instance_interrupts_its_callback_and_frees_it() {
    // Limits that the test would not survive.
    let host = new_host(HostConfig {
        step_time: Duration::from_secs(3600),
        ..small()
    });
    let text = P1 {
        mid: "(loop $l (br $l))",
        ..P1::default()
    };
    let program = load(&host, &text.text());
    let mut sequence = Sequence::start(&host, &program).begun();
    let fork_group = vec![1];
    sequence.instance.call(Callback::Mid { fork_group });
    let bell = Bell::default();
    bell.wait(|| sequence.instance.running_since());
    drop(sequence);
    wait_until_free(&host);
    // While it starts, and before it starts.
    drop(Sequence::start(&host, &program));
    wait_until_free(&host);
}

#[test]
fn a_child_is_made_although_its_parent_is_dropped_at_once() {
    let host = host();
    let program = load(&host, &token_42());
    let mut parent = Sequence::start(&host, &program).begun();
    let mut children = [parent.fork(), parent.fork()];
    drop(parent);
    for child in &mut children {
        assert!(child.mid().result.is_ok());
    }
    let orphan = children[0].fork();
    drop(orphan);
    drop(children);
    wait_until_free(&host);
}

#[test]
fn ai_413_a_fork_storm_ends_at_the_limit_of_the_request() {
    let host = host();
    let program = load(&host, &token_42());
    let group = Group::new(16, VariablesLimits::default());
    let mut all = vec![Sequence::start_in(&host, &program, &group).begun()];
    loop {
        let last = all.len() - 1;
        match all[last].instance.fork() {
            Ok(instance) => {
                let bell = Arc::clone(&all[last].bell);
                all.push(Sequence { instance, bell });
            }
            Err(failure) => break assert_eq!(failure.message, "too many forks (max=16)"),
        }
    }
    assert_eq!(all.len(), 16);
    for sequence in &mut all {
        assert!(sequence.mid().result.is_ok());
    }
    drop(all);
    wait_until_free(&host);
}

/// AI-703
#[test]
fn ai_441_starts_that_take_long_do_not_hold_up_the_steps_of_others() {
    let host = new_host(HostConfig {
        init_time: Duration::from_secs(600),
        spare_threads: 4,
        ..small()
    });
    let mut other = Sequence::start(&host, &load(&host, &token_42())).begun();
    let endless = P1 {
        init_prompt: "(loop $l (br $l))",
        ..P1::default()
    };
    let endless = load(&host, &endless.text());
    let starting: Vec<_> = (0..20).map(|_| Sequence::start(&host, &endless)).collect();
    for _ in 0..20 {
        let fork_group = vec![1];
        let mid = other.call(Callback::Mid { fork_group });
        assert!(matches!(mid.result, Ok(Returned::Mid(_))), "{mid:?}");
        let post = other.post(&[42]);
        assert!(matches!(post.result, Ok(Returned::Post { .. })), "{post:?}");
    }
    // Whoever starts now waits, and starts when the others have gone.
    drop(starting);
    drop(Sequence::start(&host, &load(&host, &token_42())).begun());
    drop(other);
    wait_until_free(&host);
}
