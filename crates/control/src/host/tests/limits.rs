//! Limits of results, memory, tables, output and pointers: at each limit it works, one further it fails.

use super::*;

fn bad(outcome: Outcome) -> String {
    let failure = failure(outcome);
    assert_eq!(failure.reason, ErrorReason::BAD_RESULT, "{failure}");
    failure.message
}

/// The `mid` of a P1 module that returns `json`.
fn returns(json: &str) -> Outcome {
    let data = format!("(data (i32.const 4096) \"{}\")", json.replace('"', "\\\""));
    mid_of(P1 {
        functions: &data,
        mid: &format!("(call $ret (i32.const 4096) (i32.const {}))", json.len()),
        ..P1::default()
    })
}

#[test]
fn ai_414_results_of_mid_are_checked() {
    let splice = |backtrack, ff_tokens: &[Token]| {
        let ff_tokens = ff_tokens.to_vec();
        Ok(Returned::Mid(MidReturned::Splice {
            backtrack,
            ff_tokens,
        }))
    };
    assert_eq!(
        returns(r#""Stop""#).result,
        Ok(Returned::Mid(MidReturned::Stop))
    );
    let more = r#"{"Splice":{"backtrack":2,"ff_tokens":[99],"more":[{}]}}"#;
    assert_eq!(returns(more).result, splice(2, &[99]));
    assert_eq!(
        returns(r#"{"Splice":{"backtrack":1}}"#).result,
        splice(1, &[])
    );
    let range = bad(returns(r#"{"Splice":{"backtrack":0,"ff_tokens":[1,100]}}"#));
    assert_eq!(range, "ff_token out of range (100 >= 100 at 1)");
    let empty = bad(returns(r#"{"Splice":{"backtrack":0,"ff_tokens":[]}}"#));
    assert_eq!(
        empty,
        "empty Splice (both backtrack == 0 and ff_tokens == [])"
    );
    for wrong in [
        "",
        "{",
        "[]",
        "null",
        r#""Go""#,
        "{}",
        r#"{"Splice":{"backtrack":-1}}"#,
        "\u{e9}",
    ] {
        let text = bad(returns(wrong));
        assert!(
            text.starts_with("the result of the callback cannot be read: "),
            "{text}"
        );
    }
    let nothing = mid_of(P1 {
        mid: "",
        ..P1::default()
    });
    assert_eq!(bad(nothing), "aici_host_return_process_result not called");
}

#[test]
fn ai_405_results_of_pre_may_not_contradict_themselves() {
    let host = host();
    let pre = |json: &str| {
        let data = format!("(data (i32.const 4096) \"{}\")", json.replace('"', "\\\""));
        let module = P1 {
            functions: &data,
            pre: &format!("(call $ret (i32.const 4096) (i32.const {}))", json.len()),
            ..P1::default()
        };
        Sequence::start(&host, &load(&host, &module.text()))
            .begun()
            .pre()
    };
    let forks = bad(pre(r#"{"num_forks":2,"suspend":false,"ff_tokens":[1]}"#));
    assert_eq!(forks, "can't fork when returning ff_tokens");
    let stop = bad(pre(r#"{"num_forks":0,"suspend":false,"ff_tokens":[1]}"#));
    assert_eq!(stop, "can't fork when returning ff_tokens");
    let suspend = bad(pre(r#"{"num_forks":1,"suspend":true,"ff_tokens":[1]}"#));
    assert_eq!(suspend, "can't suspend when returning ff_tokens");
    let both = bad(pre(r#"{"num_forks":2,"suspend":true,"ff_tokens":[]}"#));
    assert_eq!(both, "can't fork when suspending");
    let range = bad(pre(r#"{"ff_tokens":[100]}"#));
    assert_eq!(range, "ff_token out of range (100 >= 100 at 0)");
    for (json, num_forks, suspend) in [
        (
            r#"{"num_forks":0,"suspend":false,"ff_tokens":[]}"#,
            0,
            false,
        ),
        (
            r#"{"num_forks":9,"suspend":false,"ff_tokens":[]}"#,
            9,
            false,
        ),
        (r#"{"num_forks":1,"suspend":true,"ff_tokens":[]}"#, 1, true),
    ] {
        let ff_tokens = Vec::new();
        let returned = Returned::Pre {
            num_forks,
            suspend,
            ff_tokens,
            wait: None,
        };
        assert_eq!(pre(json).result, Ok(returned));
    }
}

/// AI-742, AI-1090: nothing is made for forks that can never be.
#[test]
fn ai_413_pre_asks_for_as_many_forks_as_a_request_may_have() {
    let host = host();
    let group = Group::new(16, VariablesLimits::default());
    let pre = |forks: u32| {
        let json = format!("{{\"num_forks\":{forks}}}");
        let data = format!("(data (i32.const 4096) \"{}\")", json.replace('"', "\\\""));
        let module = P1 {
            functions: &data,
            pre: &format!("(call $ret (i32.const 4096) (i32.const {}))", json.len()),
            ..P1::default()
        };
        let program = load(&host, &module.text());
        Sequence::start_in(&host, &program, &group).begun().pre()
    };
    assert!(matches!(
        pre(16).result,
        Ok(Returned::Pre { num_forks: 16, .. })
    ));
    for forks in [17, u32::MAX] {
        let refused = failure(pre(forks));
        assert_eq!(refused.reason, ErrorReason::LIMIT);
        assert_eq!(refused.message, "too many forks (max=16)");
    }
}

fn branches(json: &str) -> Result<Returned, CallFailure> {
    let mask = Arc::new(sapwood_proto::steer::Mask::all(100));
    let raw = result::RawResult {
        json: Some(json.as_bytes().to_vec()),
        masks: vec![mask],
    };
    let limits = result::ResultLimits {
        vocabulary: 100,
        branches: 16,
    };
    let member = Group::new(1, VariablesLimits::default()).enter()?;
    let waits = result::Waits {
        member: &member,
        mark: member.group().mark(),
    };
    raw.branches(limits, &waits)
}

/// AI-1090
#[test]
fn ai_1005_only_what_does_nothing_waits_and_for_64_variables_at_most() {
    let noop = r#""splices":[{"when_sampled":[],"backtrack":0,"ff_tokens":[]}]"#;
    let of = |branch: &str| branches(&format!("{{\"branches\":[{{{branch}}}]}}"));
    let names = |branch: &str| {
        let Ok(Returned::Branches(branches)) = of(branch) else {
            panic!("{branch}");
        };
        let wait = branches[0].wait.as_ref();
        wait.map(|wait| wait.names().to_vec())
    };
    let two = format!(r#"{noop},"wait":["a","b"]"#);
    assert_eq!(names(&two), Some(vec!["a".into(), "b".into()]));
    assert_eq!(names(&format!(r#"{noop},"wait":[]"#)), Some(vec![]));
    assert_eq!(names(&format!(r#"{noop},"wait":null"#)), None);
    assert_eq!(names(r#""sample_mask":0,"wait":["a"]"#), None);
    let many = |count: usize| format!(r#"{noop},"wait":[{}]"#, vec!["\"x\""; count].join(","));
    assert_eq!(names(&many(64)).map(|names| names.len()), Some(64));
    let refused = of(&many(65)).unwrap_err().message;
    assert_eq!(refused, "waits for too many variables: 65 > 64");
}

fn refused(json: &str) -> String {
    branches(json).unwrap_err().message
}

#[test]
fn ai_508_branches_are_checked() {
    let of = |branch: &str| format!("{{\"branches\":[{branch}]}}");
    assert!(branches(&of(r#"{"sample_mask":0}"#)).is_ok());
    assert_eq!(
        refused(&of(r#"{"sample_mask":1}"#)),
        "sample_mask 1 was not returned in this callback"
    );
    assert_eq!(
        refused(&of("{}")),
        "a branch has neither sample_mask nor splices"
    );
    let splice = r#"{"when_sampled":[],"backtrack":0,"ff_tokens":[99]}"#;
    assert!(branches(&of(&format!("{{\"splices\":[{splice}]}}"))).is_ok());
    let two = refused(&of(&format!("{{\"splices\":[{splice},{splice}]}}")));
    assert!(two.contains("exactly one splice"), "{two}");
    let condition = refused(&of(
        r#"{"splices":[{"when_sampled":[1],"backtrack":0,"ff_tokens":[]}]}"#,
    ));
    assert!(condition.contains("without when_sampled"), "{condition}");
    let token = refused(&of(
        r#"{"sample_mask":0,"splices":[{"when_sampled":[100]}]}"#,
    ));
    assert_eq!(token, "when_sampled token out of range (100 >= 100 at 0)");
    for heat in ["-1", "100.5"] {
        let text = refused(&of(&format!(
            "{{\"sample_mask\":0,\"temperature\":{heat}}}"
        )));
        assert!(text.starts_with("temperature"), "{text}");
    }
    let deep = "[".repeat(200);
    assert!(refused(&of(&format!("{{\"x\":{deep}}}"))).contains("cannot be read"));
}

/// AI-508
#[test]
fn ai_1090_numbers_of_branches_splices_and_tokens() {
    let list = |item: &str, count: usize| vec![item; count].join(",");
    let many = |count| format!("{{\"branches\":[{}]}}", list(r#"{"sample_mask":0}"#, count));
    assert!(branches(&many(16)).is_ok());
    assert_eq!(refused(&many(17)), "too many branches: 17 > 16");
    let splices = |count| {
        let splices = list("{}", count);
        format!("{{\"branches\":[{{\"sample_mask\":0,\"splices\":[{splices}]}}]}}")
    };
    assert!(branches(&splices(64)).is_ok());
    assert_eq!(refused(&splices(65)), "too many splices: 65 > 64");
    let tokens = |count| {
        let tokens = list("7", count);
        format!("{{\"branches\":[{{\"splices\":[{{\"ff_tokens\":[{tokens}]}}]}}]}}")
    };
    assert!(branches(&tokens(65_536)).is_ok());
    assert_eq!(
        refused(&tokens(65_537)),
        "too many tokens in a result: 65537 > 65536"
    );
}

#[test]
fn ai_605_a_result_may_have_so_many_bytes() {
    let host = new_host(HostConfig {
        result_bytes: 1000,
        ..small()
    });
    let data = format!("(data (i32.const 4096) \"{:1001}\")", "\\22Stop\\22");
    let data = data.replace("\\22Stop\\22", "\\22Stop\\22      ");
    let check = |len: u32| {
        let module = P1 {
            functions: &data,
            mid: &format!("(call $ret (i32.const 4096) (i32.const {len}))"),
            ..P1::default()
        };
        Sequence::start(&host, &load(&host, &module.text()))
            .begun()
            .mid()
    };
    assert_eq!(check(1000).result, Ok(Returned::Mid(MidReturned::Stop)));
    assert_eq!(
        bad(check(1001)).lines().last(),
        Some("the result of the callback has 1001 bytes, the limit is 1000")
    );
}

#[test]
fn ai_606_pointers_at_the_end_of_memory_work_and_one_further_trap() {
    // Two pages: 131072 bytes.
    assert!(
        mid("(drop (call $blob (i32.const 1) (i32.const 131069) (i32.const 3)))")
            .result
            .is_ok()
    );
    assert!(mid("(call $bias (i32.const 131056))").result.is_ok());
    for (call, name) in [
        (
            "(drop (call $blob (i32.const 1) (i32.const 131070) (i32.const 3)))",
            "aici_host_read_blob",
        ),
        (
            "(drop (call $blob (i32.const 1) (i32.const -1) (i32.const -1)))",
            "aici_host_read_blob",
        ),
        (
            "(call $bias (i32.const 131057))",
            "aici_host_return_logit_bias",
        ),
        ("(call $bias (i32.const -4))", "aici_host_return_logit_bias"),
        (
            "(call $ret (i32.const 131072) (i32.const 1))",
            "aici_host_return_process_result",
        ),
        (
            "(drop (call $tokenize (i32.const -1) (i32.const 2)))",
            "aici_host_tokenize",
        ),
        (
            "(drop (call $storage (i32.const -1) (i32.const 9)))",
            "aici_host_storage_cmd",
        ),
        (
            "(drop (call $config (i32.const -1) (i32.const -1)))",
            "aici_host_get_config",
        ),
        (
            "(drop (call $write (i32.const 1) (i32.const -1) (i32.const 1) (i32.const 0)))",
            "fd_write",
        ),
        (
            "(drop (call $write (i32.const 1) (i32.const -8) (i32.const 2) (i32.const 0)))",
            "fd_write",
        ),
        (
            "(drop (call $write (i32.const 1) (i32.const 0) (i32.const 0) (i32.const -3)))",
            "fd_write",
        ),
        (
            "(i32.store (i32.const 604) (i32.const -1))
          (drop (call $write (i32.const 1) (i32.const 600) (i32.const 1) (i32.const 0)))",
            "fd_write",
        ),
        (
            "(drop (call $fdstat (i32.const 0) (i32.const 131049)))",
            "fd_fdstat_get",
        ),
        (
            "(drop (call $args (i32.const 0) (i32.const 131069)))",
            "args_sizes_get",
        ),
    ] {
        let failure = failure(mid(call));
        let expected = format!("out of bounds pointer passed to {name}");
        assert!(failure.message.ends_with(&expected), "{call}: {failure}");
        assert_eq!(failure.reason, ErrorReason::TRAP);
    }
}

#[test]
fn ai_606_tokenize_takes_a_mebibyte() {
    // As many tokens as bytes here, four times as large.
    let host = new_host(HostConfig {
        memory_bytes: 8 << 20,
        ..small()
    });
    let check = |len: u32| {
        let module = P1 {
            globals: "(memory (export \"memory\") 20)",
            mid: &format!(
                "(drop (call $tokenize (i32.const 0) (i32.const {len})))
                 (call $ret (i32.const 64) (i32.const 21))"
            ),
            ..P1::default()
        };
        Sequence::start(&host, &load(&host, &module.text()))
            .begun()
            .mid()
    };
    assert!(check(1 << 20).result.is_ok());
    let failure = failure(check((1 << 20) + 1));
    assert!(
        failure
            .message
            .ends_with("tokenize: more than 1048576 bytes"),
        "{failure}"
    );
}

/// AI-741
#[test]
fn ai_608_memory_grows_to_the_limit_and_then_traps() {
    // 4 MiB are 64 pages, of which two are there.
    let grow = |pages| mid(&format!("(call $hex (memory.grow (i32.const {pages})))"));
    assert_eq!(grow(62).report.logs, "00000002 ");
    let failure = failure(grow(63));
    assert_eq!(failure.reason, ErrorReason::MEMORY);
    assert!(
        failure
            .message
            .ends_with("memory limit: more than 4194304 bytes"),
        "{failure}"
    );
    let own = mid_of(P1 {
        globals: "(memory (export \"memory\") 2 3)",
        mid: "(call $hex (memory.grow (i32.const 1))) (call $hex (memory.grow (i32.const 1)))
              (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    });
    assert_eq!(own.report.logs, "00000002 ffffffff ");
}

#[test]
fn ai_608_tables_grow_to_the_limit_and_then_trap() {
    let host = new_host(HostConfig {
        table_elements: 50,
        ..small()
    });
    let grow = |count: u32| {
        let module = P1 {
            globals: "(memory (export \"memory\") 2) (table $t 10 funcref)",
            mid: &format!(
                "(call $hex (table.grow $t (ref.null func) (i32.const {count})))
                 (call $ret (i32.const 64) (i32.const 21))"
            ),
            ..P1::default()
        };
        Sequence::start(&host, &load(&host, &module.text()))
            .begun()
            .mid()
    };
    assert_eq!(grow(40).report.logs, "0000000a ");
    let failure = failure(grow(41));
    assert!(
        failure
            .message
            .ends_with("table limit: more than 50 elements"),
        "{failure}"
    );
}

#[test]
fn ai_741_all_instances_together_have_a_limit() {
    let memory_total_bytes = 3 * 2 * 65536;
    let host = new_host(HostConfig {
        memory_total_bytes,
        ..small()
    });
    let program = load(&host, &token_42());
    let group = Group::new(16, VariablesLimits::default());
    let mut three: Vec<_> = (0..3)
        .map(|_| Sequence::start_in(&host, &program, &group).begun())
        .collect();
    assert_eq!(host.memory_bytes(), memory_total_bytes);
    let refused = failure(Sequence::start_in(&host, &program, &group).outcome());
    assert_eq!(
        (refused.reason, &*refused.message),
        (ErrorReason::MEMORY, "controller memory exhausted")
    );
    // A failed fork is an error of the new sequence; the parent goes on (AI-714).
    let forked = failure(three[0].fork().outcome());
    assert_eq!(forked.reason, ErrorReason::MEMORY);
    assert!(three[0].mid().result.is_ok());
    three.pop();
    Bell::default().wait(|| {
        let outcome = Sequence::start_in(&host, &program, &group).outcome();
        outcome.result.is_ok().then_some(())
    });
    three.clear();
    wait_until_free(&host);
}

/// Of a start, and more than a socket takes at once.
#[test]
fn ai_1090_a_prompt_may_have_a_mebi_of_tokens() {
    let host = host();
    let module = P1 {
        init_prompt: "(call $hex (call $blob (i32.const 4) (i32.const 0) (i32.const 0)))
            (call $ret (i32.const 0) (i32.const 2))",
        ..P1::default()
    };
    let bell = Arc::new(Bell::default());
    let start = Start {
        model: model(),
        arg: "a".repeat(1 << 20).into(),
        prompt: vec![7; 1 << 20],
        group: Group::new(1, VariablesLimits::default()),
        capabilities: Capabilities::ALL,
        waker: Arc::clone(&bell) as _,
    };
    let instance = Instance::start(&host, &load(&host, &module.text()), start);
    let outcome = Sequence { instance, bell }.outcome();
    assert!(outcome.result.is_ok(), "{outcome:?}");
    // `{"prompt":[7,7, and so on.
    assert_eq!(outcome.report.logs, format!("{:08x} ", 12 + 2 * (1 << 20)));
}

/// AI-413
#[test]
fn ai_1090_live_sequences_of_a_request_and_of_a_host() {
    let host = new_host(HostConfig {
        instances: 5,
        ..small()
    });
    let program = load(&host, &token_42());
    let group = Group::new(3, VariablesLimits::default());
    let mut parent = Sequence::start_in(&host, &program, &group).begun();
    let first = parent.fork();
    let second = parent.fork();
    let refused = parent.instance.fork().unwrap_err();
    assert_eq!(
        (refused.reason, &*refused.message),
        (ErrorReason::LIMIT, "too many forks (max=3)")
    );
    let other = Group::new(16, VariablesLimits::default());
    let mut others = [(); 2].map(|()| Sequence::start_in(&host, &program, &other).begun());
    let refused = failure(Sequence::start_in(&host, &program, &other).outcome());
    assert_eq!(refused.message, "too many sequences");
    assert!(others[0].instance.fork().is_err());
    drop((first, second));
    Bell::default().wait(|| (host.live() == 3).then_some(()));
    assert!(parent.fork().mid().result.is_ok());
}

#[test]
fn ai_733_fuel_is_counted_instead_of_time() {
    let host = new_host(HostConfig {
        fuel: Some(10_000),
        ..small()
    });
    let check = |rounds: u32| {
        let module = P1 {
            mid: &format!(
                "(local $i i32) (loop $l (br_if $l (i32.lt_u (local.tee $i
                 (i32.add (local.get $i) (i32.const 1))) (i32.const {rounds}))))
                 (call $ret (i32.const 64) (i32.const 21))"
            ),
            ..P1::default()
        };
        let mut sequence = Sequence::start(&host, &load(&host, &module.text())).begun();
        // The count begins anew at each callback.
        assert!(sequence.pre().result.is_ok());
        sequence.mid()
    };
    assert!(check(100).result.is_ok());
    let failure = failure(check(100_000_000));
    assert_eq!(failure.reason, ErrorReason::FUEL);
    assert!(failure.message.ends_with("fuel exhausted"), "{failure}");
}

#[test]
fn ai_733_beside_fuel_there_is_a_limit_of_time() {
    let endless = Some(u64::MAX >> 1);
    let host = new_host(HostConfig {
        fuel: endless,
        init_time: Duration::from_millis(20),
        ..small()
    });
    let module = P1 {
        init_prompt: "(loop $l (br $l))",
        ..P1::default()
    };
    let mut sequence = Sequence::start(&host, &load(&host, &module.text()));
    assert_eq!(failure(sequence.outcome()).reason, ErrorReason::TIMEOUT);
    drop(sequence);
    wait_until_free(&host);
    let host = new_host(HostConfig {
        fuel: endless,
        step_time: Duration::from_millis(2),
        ..small()
    });
    let module = P1 {
        mid: "(loop $l (br $l))",
        ..P1::default()
    };
    let mut sequence = Sequence::start(&host, &load(&host, &module.text())).begun();
    let begun = Instant::now();
    assert_eq!(failure(sequence.mid()).reason, ErrorReason::TIMEOUT);
    // Ten late steps are 40 ms, with the grace; it is ten times as far away.
    assert!(begun.elapsed() >= Duration::from_millis(400));
}

/// The check of uploads refuses them first; here the engine itself is asked.
#[test]
fn ai_603_the_engine_compiles_no_other_features() {
    let host = host();
    let valid = wat::parse_str(token_42()).unwrap();
    let mut module = check(&valid, &ModuleLimits::default()).unwrap();
    let mut compiles = |text: &str| {
        module.instrumented = wat::parse_str(format!("(module {text})")).unwrap();
        host.compile(&module).is_ok()
    };
    for accepted in [
        "(func (param i32) (result i32) (i32.extend8_s (local.get 0)))",
        "(func (param f32) (result i32) (i32.trunc_sat_f32_s (local.get 0)))",
        "(memory 1) (func (memory.fill (i32.const 0) (i32.const 0) (i32.const 0)))",
        "(func (result i32 i32) (i32.const 0) (i32.const 0))",
        "(func (result v128) (v128.const i64x2 0 0))",
        "(table 1 externref) (func (result externref) (table.get (i32.const 0)))",
        "(global i32 (i32.add (i32.const 1) (i32.const 2)))",
    ] {
        assert!(compiles(accepted), "{accepted}");
    }
    for refused in [
        "(memory 1 1 shared)",
        "(memory i64 1)",
        "(memory 1) (memory 1)",
        "(func $f (return_call $f))",
        "(tag)",
        "(type (struct))",
        "(func (param v128 v128) (result v128) (i8x16.relaxed_swizzle (local.get 0) (local.get 1)))",
        "(type $f (func)) (func (param (ref $f)))",
    ] {
        assert!(!compiles(refused), "{refused}");
    }
}
