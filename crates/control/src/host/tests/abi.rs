//! Every callback and every host function, of both generations.

use super::*;
use crate::module::HOST_FUNCTIONS;

const RUN: Returned = Returned::Pre {
    num_forks: 1,
    suspend: false,
    ff_tokens: Vec::new(),
    wait: None,
};

fn words(mask: &sapwood_proto::steer::Mask) -> Vec<u32> {
    mask.words().to_vec()
}

/// AI-605, AI-414
#[test]
fn ai_604_the_smallest_controller_allows_42_three_times() {
    let host = host();
    let mut sequence = Sequence::start(&host, &load(&host, &token_42())).begun();
    for round in 1..=3 {
        assert_eq!(sequence.pre().result, Ok(RUN));
        let Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) = sequence.mid().result else {
            panic!("a mask is expected");
        };
        assert_eq!((mask.count(), mask.allows(42)), (1, true));
        let stop = round == 3;
        assert_eq!(sequence.post(&[42]).result, Ok(Returned::Post { stop }));
    }
}

#[test]
fn ai_605_a_p2_controller_returns_branches_with_masks_by_handle() {
    let data = r#"(data (i32.const 1024) "\10") (data (i32.const 1044) "\20")"#;
    let process =
        "(call $hex (call $bias (i32.const 1024))) (call $hex (call $bias (i32.const 1040)))";
    let second = r#"{"when_sampled":[4],"backtrack":1,"ff_tokens":[5,6]}"#;
    let first = r#"{"sample_mask":1,"temperature":0.5}"#;
    let json = format!(r#"{{"branches":[{first},{{"sample_mask":0,"splices":[{second}]}}]}}"#);
    let text = p2_returning(data, process, &json);
    let host = host();
    let mut sequence = Sequence::start(&host, &load(&host, &text)).begun();
    let Outcome { result, report } = sequence.process();
    assert_eq!(report.logs, "00000000 00000001 ");
    let Ok(Returned::Branches(branches)) = result else {
        panic!("{result:?}");
    };
    assert_eq!(words(branches[0].mask.as_ref().unwrap()), [0, 0x20, 0, 0]);
    assert_eq!(words(branches[1].mask.as_ref().unwrap()), [0x10, 0, 0, 0]);
    assert_eq!(branches[0].temperature, Some(0.5));
    let splice = ReturnedSplice {
        when_sampled: vec![4],
        backtrack: 1,
        ff_tokens: vec![5, 6],
    };
    assert_eq!(branches[1].splices, [splice]);
}

#[test]
fn ai_606_blobs_have_the_arguments_and_reserved_ones_are_empty() {
    let outcome = mid(
        "(call $hex (call $blob (call $module_arg) (i32.const 1024) (i32.const 99)))
         (call $print (i32.const 1024) (i32.const 3))
         (call $hex (call $blob (call $process_arg) (i32.const 1024) (i32.const 4)))
         (call $print (i32.const 1024) (i32.const 8))
         (call $hex (call $blob (i32.const 4) (i32.const -1) (i32.const 0)))
         (call $hex (call $blob (call $tokens) (i32.const 0) (i32.const 99)))
         (call $hex (call $blob (i32.const 19) (i32.const 0) (i32.const 99)))",
    );
    assert!(outcome.result.is_ok(), "{outcome:?}");
    // Of `{"fork_group":[3]}` four bytes are read; the others at 1028 are still 0.
    let expected = "00000003 arg00000012 {\"fo\x00\x00\x00\x0000000012 00000000 00000000 ";
    assert_eq!(outcome.report.logs, expected);
}

/// AI-630
#[test]
fn ai_606_the_trie_is_blob_100() {
    let outcome = mid(
        "(call $hex (call $blob (call $trie) (i32.const 4096) (i32.const 28)))
         (call $hex (i32.load (i32.const 4096)))
         (call $hex (i32.load (i32.const 4116)))
         (call $hex (i32.load (i32.const 4120)))",
    );
    let trie = model().trie(crate::trie::TokenView::Plain).len();
    let expected = format!("{trie:08x} 558b6fd3 00000064 00000001 ");
    assert_eq!(outcome.report.logs, expected);
}

#[test]
fn ai_606_other_blobs_are_fatal_and_the_panic_handler_runs() {
    let outcome = mid_of(P1 {
        globals: "(memory (export \"memory\") 2) (data (i32.const 500) \"last words\")",
        functions: "(func (export \"aici_panic\") (call $print (i32.const 500) (i32.const 10)))",
        mid: "(call $print (i32.const 64) (i32.const 2))
              (drop (call $blob (i32.const 20) (i32.const 0) (i32.const 0)))",
        ..P1::default()
    });
    assert_eq!(outcome.report.logs, "{\"last words");
    let failure = failure(outcome);
    assert_eq!(failure.reason, ErrorReason::TRAP);
    assert!(
        failure.message.starts_with("{\"\nguest backtrace:"),
        "{failure}"
    );
    assert!(
        failure.message.ends_with("FATAL ERROR: invalid blob_id"),
        "{failure}"
    );
    assert!(!failure.without_log().contains("{\""));
}

#[test]
fn ai_605_tokenize_ids_config_and_eos() {
    let outcome = mid(
        "(i32.store8 (i32.const 1024) (i32.const 1)) (i32.store8 (i32.const 1025) (i32.const 9))
         (call $hex (call $blob (call $tokenize (i32.const 1024) (i32.const 2)) (i32.const 2048) (i32.const 64)))
         (call $hex (i32.load (i32.const 2048))) (call $hex (i32.load (i32.const 2052)))
         (call $hex (call $id)) (call $hex (call $eos))
         (i32.store (i32.const 1024) (i32.const 0x6b726f66))
         (call $hex (call $config (i32.const 1024) (i32.const 4)))
         (call $hex (call $config (i32.const 1024) (i32.const 3)))",
    );
    let expected = "00000008 00000003 0000000b 00000000 00000001 00000001 00000000 ";
    assert_eq!(outcome.report.logs, expected);
}

#[test]
fn ai_605_the_sequence_id_is_that_of_the_binding() {
    let host = host();
    let module = P1 {
        mid: "(call $hex (call $id)) (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    };
    let mut sequence = Sequence::start(&host, &load(&host, &module.text())).begun();
    assert_eq!(sequence.mid().report.logs, "00000000 ");
    sequence.instance.bind(77);
    assert_eq!(sequence.mid().report.logs, "0000004d ");
    let mut child = sequence.fork();
    child.instance.bind(78);
    assert_eq!(child.mid().report.logs, "0000004e ");
    assert_eq!(sequence.mid().report.logs, "0000004d ");
}

#[test]
fn ai_607_wasi_prints_and_knows_neither_time_nor_files() {
    let outcome = mid(
        "(call $hex (call $write (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 0)))
         (i32.store (i32.const 600) (i32.const 64)) (i32.store (i32.const 604) (i32.const 2))
         (i32.store (i32.const 608) (i32.const 9)) (i32.store (i32.const 612) (i32.const 4))
         (call $hex (call $write (i32.const 2) (i32.const 600) (i32.const 2) (i32.const 700)))
         (call $hex (i32.load (i32.const 700)))
         (call $hex (call $clock (i32.const 1) (i64.const 0) (i32.const 700)))
         (call $hex (call $random (i32.const 700) (i32.const 4))) (call $hex (i32.load (i32.const 700)))
         (call $hex (call $fdstat (i32.const 2) (i32.const 704))) (call $hex (i32.load (i32.const 704)))
         (call $hex (call $fdstat (i32.const 3) (i32.const 704)))
         (call $hex (call $args (i32.const 700) (i32.const 704))) (call $hex (i32.load (i32.const 700)))
         (call $hex (call $seek (i32.const 0) (i64.const 0) (i32.const 0) (i32.const 0)))
         (call $hex (call $tell (i32.const 0) (i32.const 0)))",
    );
    let expected = "00000008 {\"\"num00000000 00000006 00000008 00000000 00000006 \
                    00000000 00000002 00000008 00000000 00000000 00000008 00000034 ";
    assert_eq!(outcome.report.logs, expected);
}

#[test]
fn ai_607_the_clock_of_p2_stands_still_by_default() {
    let data = "(data (i32.const 700) \"xxxxxxxx\")";
    let process = "(call $hex (call $clock (i32.const 0) (i64.const 0) (i32.const 700)))
        (call $hex (call $clock (i32.const 1) (i64.const 0) (i32.const 700)))
        (call $hex (i32.load (i32.const 700))) (call $hex (i32.load (i32.const 704)))";
    let text = p2_returning(data, process, r#"{"branches":[]}"#);
    let host = host();
    let mut sequence = Sequence::start(&host, &load(&host, &text)).begun();
    let outcome = sequence.process();
    assert_eq!(outcome.report.logs, "0000003f 00000000 00000000 00000000 ");
    assert_eq!(outcome.result, Ok(Returned::Branches(Vec::new())));
}

#[test]
fn ai_607_the_clock_of_p2_moves_in_steps_of_its_resolution() {
    let resolution = 3_000_000_u64;
    let host = new_host(HostConfig {
        timer_resolution: Duration::from_nanos(resolution),
        ..small()
    });
    // It waits until the clock has moved.
    let process = "(local $first i64)
        (drop (call $clock (i32.const 1) (i64.const 0) (i32.const 704)))
        (local.set $first (i64.load (i32.const 704)))
        (loop $l (drop (call $clock (i32.const 1) (i64.const 0) (i32.const 712)))
            (br_if $l (i64.eq (i64.load (i32.const 712)) (local.get $first))))
        (call $hex (i32.load (i32.const 708))) (call $hex (i32.load (i32.const 704)))
        (call $hex (i32.load (i32.const 716))) (call $hex (i32.load (i32.const 712)))";
    let text = p2_returning("", process, r#"{"branches":[]}"#);
    let mut sequence = Sequence::start(&host, &load(&host, &text)).begun();
    let mut last = 0;
    for _ in 0..3 {
        let outcome = sequence.process();
        assert!(outcome.result.is_ok(), "{outcome:?}");
        let words = outcome.report.logs.split_whitespace();
        let words: Vec<_> = words
            .map(|it| u64::from_str_radix(it, 16).unwrap())
            .collect();
        let &[high, low, later_high, later_low] = &words[..] else {
            panic!("{words:?}");
        };
        for now in [high << 32 | low, later_high << 32 | later_low] {
            assert_eq!(now % resolution, 0);
            assert!(now >= last, "{now} {last}");
            last = now;
        }
    }
    // Three waits for the next step, and no time of another clock.
    assert!(
        (3 * resolution..3_600_000_000_000).contains(&last),
        "{last}"
    );
}

/// AI-607
#[test]
fn ai_605_stop_and_exit_end_the_callback_without_a_backtrace() {
    let stopped = failure(mid("(call $stop)"));
    assert_eq!(stopped.message, "*** aici_host_stop()");
    let exited = failure(mid("(call $exit (i32.const 3))"));
    assert_eq!(
        (exited.reason, &*exited.message),
        (ErrorReason::TRAP, "proc_exit: 3")
    );
}

/// AI-414
#[test]
fn ai_605_p1_masks_of_one_callback_are_united_and_the_last_result_counts() {
    let outcome = mid("(call $ret (i32.const 0) (i32.const 1))
         (i32.store (i32.const 1024) (i32.const 1)) (call $bias (i32.const 1024))
         (i32.store (i32.const 1024) (i32.const 2)) (i32.store (i32.const 1036) (i32.const -1))
         (call $bias (i32.const 1024))");
    let Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) = outcome.result else {
        panic!("{outcome:?}");
    };
    // Bits from 100 on are ignored.
    assert_eq!(words(&mask), [3, 0, 0, 0xF]);
}

#[test]
fn ai_237_an_empty_mask_becomes_eos_alone() {
    let outcome = mid("(call $bias (i32.const 1024))");
    assert_eq!(outcome.report.logs, "empty mask: only EOS allowed\n");
    let Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) = outcome.result else {
        panic!("{outcome:?}");
    };
    assert_eq!(words(&mask), [2, 0, 0, 0]);
    let text = p2_returning(
        "",
        "(drop (call $bias (i32.const 1024)))",
        r#"{"branches":[{"sample_mask":0}]}"#,
    );
    let host = host();
    let outcome = Sequence::start(&host, &load(&host, &text))
        .begun()
        .process();
    assert_eq!(outcome.report.logs, "empty mask: only EOS allowed\n");
    let Ok(Returned::Branches(branches)) = outcome.result else {
        panic!("{:?}", outcome.result);
    };
    assert_eq!(words(branches[0].mask.as_ref().unwrap()), [2, 0, 0, 0]);
}

/// AI-421, AI-422
#[test]
fn ai_742_a_trap_in_each_callback_ends_the_sequence_with_its_cause() {
    let host = host();
    let check = |module: P1<'_>, step: &dyn Fn(&mut Sequence) -> Outcome, reason| {
        let mut sequence = Sequence::start(&host, &load(&host, &module.text()));
        let failure = failure(step(&mut sequence));
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(
            failure.message.contains("wasm trap: wasm `unreachable`"),
            "{failure}"
        );
        assert!(
            failure.message.contains("guest backtrace:\n  0: function "),
            "{failure}"
        );
        let again = self::failure(sequence.pre());
        assert_eq!(again.message, "Previous WASM Error");
    };
    let create = "unreachable";
    check(
        P1 {
            create,
            ..P1::default()
        },
        &Sequence::outcome,
        ErrorReason::INIT,
    );
    let init_prompt = "unreachable";
    check(
        P1 {
            init_prompt,
            ..P1::default()
        },
        &Sequence::outcome,
        ErrorReason::INIT,
    );
    let after = |step: fn(&mut Sequence) -> Outcome| {
        move |sequence: &mut Sequence| {
            assert!(sequence.outcome().result.is_ok());
            step(sequence)
        }
    };
    let pre = "unreachable";
    check(
        P1 {
            pre,
            ..P1::default()
        },
        &after(Sequence::pre),
        ErrorReason::TRAP,
    );
    let mid = "unreachable";
    check(
        P1 {
            mid,
            ..P1::default()
        },
        &after(Sequence::mid),
        ErrorReason::TRAP,
    );
    let post = "unreachable";
    check(
        P1 {
            post,
            ..P1::default()
        },
        &after(|sequence| sequence.post(&[2])),
        ErrorReason::TRAP,
    );
    wait_until_free(&host);
}

#[test]
fn ai_604_the_start_function_runs_once_and_init_before_create() {
    let host = host();
    let module = P1 {
        globals: "(memory (export \"memory\") 2) (global $n (mut i32) (i32.const 0))",
        functions: "(func $start (global.set $n (i32.add (global.get $n) (i32.const 1))))
            (start $start)
            (func (export \"aici_init\") (global.set $n (i32.add (i32.mul (global.get $n) (i32.const 16)) (i32.const 2))))",
        create: "(global.set $n (i32.add (i32.mul (global.get $n) (i32.const 16)) (i32.const 3))) (i32.const 9)",
        mid: "(call $hex (global.get $n)) (call $hex (local.get 0)) (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    };
    let mut sequence = Sequence::start(&host, &load(&host, &module.text())).begun();
    let mut child = sequence.fork();
    assert_eq!(sequence.mid().report.logs, "00000123 00000009 ");
    assert_eq!(child.mid().report.logs, "00000123 00000009 ");
}

#[test]
fn a_main_runs_once_and_prints() {
    let host = Host::new(small()).unwrap();
    let text = format!(
        "(module {IMPORTS} (memory (export \"memory\") 1) (data (i32.const 0) \"done\") {PRINT}
         (func (export \"main\") (param i32 i32) (result i32) (call $print (i32.const 0) (i32.const 4)) (i32.const 0)))"
    );
    let program = load(&host, &text);
    assert!(!program.steers());
    let start = || Start {
        model: model(),
        arg: "".into(),
        prompt: Vec::new(),
        group: Group::new(1, VariablesLimits::default()),
        capabilities: Capabilities::ALL,
        waker: Arc::new(Bell::default()),
    };
    let (result, report) = host.run_main(&program, start());
    assert_eq!((result, &*report.logs), (Ok(()), "done"));
    let mut instance = Instance::start(&host, &program, start());
    let failed = instance.poll().unwrap();
    assert_eq!(failure(failed).reason, ErrorReason::INIT);
}

/// Whatever `module::check` lets through must link, with the same types.
#[test]
fn ai_607_every_function_that_may_be_imported_links() {
    let host = host();
    for (abi, bias) in [(Abi::P1, ""), (Abi::P2, "i")] {
        let mut imports = String::new();
        for function in HOST_FUNCTIONS {
            if function.name == "aici_host_return_logit_bias" && function.results != bias {
                continue;
            }
            let types = |letters: &str| {
                let names = letters.chars().map(|letter| match letter {
                    'I' => " i64",
                    _ => " i32",
                });
                names.collect::<String>()
            };
            imports += &format!(
                "(import \"{}\" \"{}\" (func (param{}) (result{})))",
                function.module,
                function.name,
                types(function.params),
                types(function.results)
            );
        }
        let text = format!(
            "(module {imports} (memory (export \"memory\") 1)
             (func (export \"main\") (param i32 i32) (result i32) (i32.const 0)))"
        );
        let program = load(&host, &text);
        assert_eq!(program.abi(), abi);
    }
}

#[test]
fn ai_742_a_panic_of_the_host_ends_its_sequence_alone() {
    let host = host();
    // The tokenizer of tests has a defect.
    let module = P1 {
        functions: "(data (i32.const 500) \"defect\")",
        mid: "(drop (call $tokenize (i32.const 500) (i32.const 6))) unreachable",
        ..P1::default()
    };
    let program = load(&host, &module.text());
    let mut sequence = Sequence::start(&host, &program).begun();
    let failure = failure(sequence.mid());
    assert_eq!(failure.message, "the controller could not be run");
    assert!(
        Sequence::start(&host, &program)
            .begun()
            .pre()
            .result
            .is_ok()
    );
    drop(sequence);
    wait_until_free(&host);
}
