//! Variables, as controllers use them (AI-951 to AI-953).

use sapwood_proto::steer::VariableWrite;

use super::*;
use crate::host::group::MemberNumber;

/// Runs storage commands in `mid`, and returns what it prints of the responses.
fn run(commands: &[&str]) -> Outcome {
    let host = host();
    let program = load(&host, &commanding(commands));
    Sequence::start(&host, &program).begun().mid()
}

fn commanding(commands: &[&str]) -> String {
    let (mut data, mut mid) = (String::new(), String::new());
    for (command, at) in commands.iter().zip((8192..).step_by(512)) {
        let len = command.len();
        data += &format!(
            "(data (i32.const {at}) \"{}\")",
            command.replace('"', "\\\"")
        );
        mid += &format!(
            "(call $print (i32.const 2048) (call $blob
                (call $storage (i32.const {at}) (i32.const {len})) (i32.const 2048) (i32.const 2048)))"
        );
    }
    mid += "(call $ret (i32.const 64) (i32.const 21))";
    P1 {
        functions: &data,
        mid: &mid,
        ..P1::default()
    }
    .text()
}

#[test]
fn ai_951_commands_and_their_responses() {
    let outcome = run(&[
        r#"{"ReadVar":{"name":"x"}}"#,
        r#"{"WriteVar":{"name":"x","value":"00fF","op":"Set","when_version_is":1}}"#,
        r#"{"WriteVar":{"name":"x","value":"00fF","op":"Set","when_version_is":null}}"#,
        r#"{"WriteVar":{"name":"x","value":"01","op":"Append"}}"#,
        r#"{"WriteVar":{"name":"x","value":"","op":"Set","when_version_is":1}}"#,
        r#"{"ReadVar":{"name":"x"}}"#,
    ]);
    assert!(outcome.result.is_ok(), "{outcome:?}");
    assert_eq!(
        outcome.report.logs,
        "{\"VariableMissing\":{}}{\"VariableMissing\":{}}{\"WriteVar\":{\"version\":1}}\
         {\"WriteVar\":{\"version\":2}}{\"ReadVar\":{\"version\":2,\"value\":\"00ff01\"}}\
         {\"ReadVar\":{\"version\":2,\"value\":\"00ff01\"}}"
    );
    let writes: Vec<_> = outcome
        .report
        .storage
        .iter()
        .map(|write| (&*write.value, write.append))
        .collect();
    assert_eq!(writes, [(&[0, 0xFF][..], false), (&[1], true)]);
}

#[test]
fn ai_951_a_malformed_command_is_fatal() {
    for command in [
        r#"{"WriteVar":{"name":"x","value":"0","op":"Set","when_version_is":null}}"#,
        r#"{"WriteVar":{"name":"x","value":"0g","op":"Set","when_version_is":null}}"#,
        r#"{"WriteVar":{"name":"x","value":"00","op":"Swap","when_version_is":null}}"#,
        r#"{"DropVar":{"name":"x"}}"#,
        "x",
    ] {
        let outcome = run(&[command]);
        assert!(outcome.report.storage.is_empty());
        assert_eq!(
            failure(outcome).reason,
            ErrorReason::BAD_RESULT,
            "{command}"
        );
    }
}

#[test]
fn ai_953_over_a_limit_the_callback_fails_and_nothing_is_written() {
    let name = "n".repeat(257);
    let command = format!(r#"{{"WriteVar":{{"name":"{name}","value":"","op":"Set"}}}}"#);
    let failed = run(&[&command]);
    assert!(failed.report.storage.is_empty());
    let failed = failure(failed);
    assert_eq!(failed.reason, ErrorReason::LIMIT);
    assert!(failed.message.ends_with("storage limit: name"), "{failed}");
    let command = command.replacen('n', "", 1).replace(&name, &name[1..]);
    let command = command.replace("{\"WriteVar\":{\"ame", "{\"WriteVar\":{\"name");
    assert!(run(&[&command]).result.is_ok(), "{command}");
}

/// AI-952
#[test]
fn ai_952_forks_share_one_set_which_outlives_a_failed_sequence() {
    let host = new_host(HostConfig {
        threads: Some(3),
        ..small()
    });
    let append = r#"{"WriteVar":{"name":"x","value":"01","op":"Append"}}"#;
    let program = load(&host, &commanding(&[append; 4]));
    let group = Group::new(16, VariablesLimits::default());
    let mut all = vec![Sequence::start_in(&host, &program, &group).begun()];
    for _ in 1..10 {
        let fork = all[0].fork();
        all.push(fork);
    }
    for sequence in &mut all {
        let fork_group = vec![1];
        let mid = || Callback::Mid {
            fork_group: fork_group.clone(),
        };
        sequence.instance.call_all([mid(), mid(), mid()]);
    }
    let mut versions = Vec::new();
    for sequence in &mut all {
        let mut last = 0;
        for _ in 0..3 {
            let logs = sequence.outcome().report.logs;
            for part in logs.split("{\"WriteVar\":{\"version\":").skip(1) {
                let version: u64 = part.trim_end_matches('}').parse().unwrap();
                assert!(version > last);
                last = version;
                versions.push(version);
            }
        }
    }
    versions.sort_unstable();
    assert_eq!(versions, (1..=120).collect::<Vec<_>>());
    drop(all);
    let value = group.variables().read("x").unwrap();
    assert_eq!((value.version, value.value.len()), (120, 120));
}

/// A thousand requests with 16 MiB each would otherwise be memory that nobody counts.
#[test]
fn ai_741_variables_are_charged_to_the_memory_of_all_controllers() {
    let host = new_host(HostConfig {
        memory_total_bytes: 3 << 20,
        ..small()
    });
    let group = Group::new(4, VariablesLimits::default());
    let write = |name: &str, bytes: usize| {
        let write = VariableWrite {
            name: name.to_owned(),
            value: vec![0; bytes],
            append: false,
            when_version_is: None,
        };
        let written = group.variables().write(&write, MemberNumber::OUTSIDE);
        written.map_err(|abort| abort.reason)
    };
    // Before there is a controller, and charged when there is one.
    write("a", 1 << 20).unwrap();
    assert_eq!(host.memory_bytes(), 0);
    let one = Sequence::start_in(&host, &load(&host, &token_42()), &group).begun();
    let with_one = host.memory_bytes();
    assert!(with_one > 1 << 20, "{with_one}");
    write("b", 1 << 20).unwrap();
    assert!(host.memory_bytes() > with_one + (1 << 20));
    assert_eq!(write("c", 1 << 20).unwrap_err(), ErrorReason::MEMORY);
    write("b", 0).unwrap();
    write("c", 1 << 20).unwrap();
    drop((one, group));
    wait_until_free(&host);
}

#[test]
fn ai_741_blobs_are_charged_to_the_memory_of_all_controllers() {
    let host = new_host(HostConfig {
        memory_total_bytes: 2 << 20,
        ..small()
    });
    // 256 KiB of text are as many tokens here, of four bytes each.
    let module = P1 {
        globals: "(memory (export \"memory\") 8)",
        mid: "(drop (call $tokenize (i32.const 65536) (i32.const 262144)))
              (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    };
    let program = load(&host, &module.text());
    let mut one = Sequence::start(&host, &program).begun();
    let before = host.memory_bytes();
    assert!(one.mid().result.is_ok());
    let blob = host.memory_bytes() - before;
    assert!(blob >= 1 << 20, "{blob}");
    // A fork has a copy of it.
    let forked = failure(one.fork().outcome());
    assert_eq!(forked.reason, ErrorReason::MEMORY);
    drop(one);
    wait_until_free(&host);
}

/// Of a sequence whose three callbacks each append to a variable.
#[test]
fn ai_953_writes_are_counted_over_all_callbacks_of_a_step() {
    let host = host();
    let append = r#"{"WriteVar":{"name":"x","value":"01","op":"Append"}}"#;
    let data = append.replace('"', "\\\"");
    let data = format!("(data (i32.const 8192) \"{data}\")");
    let write = format!(
        "(drop (call $storage (i32.const 8192) (i32.const {})))",
        append.len()
    );
    let default = P1::default();
    let [pre, mid, post] =
        [default.pre, default.mid, default.post].map(|body| format!("{write} {body}"));
    let module = P1 {
        functions: &data,
        pre: &pre,
        mid: &mid,
        post: &post,
        ..P1::default()
    };
    let program = load(&host, &module.text());
    let of_step = |writes_per_step| {
        let limits = VariablesLimits {
            writes_per_step,
            ..VariablesLimits::default()
        };
        Sequence::start_in(&host, &program, &Group::new(1, limits)).begun()
    };
    let mut enough = of_step(3);
    for _ in 0..3 {
        for outcome in [enough.pre(), enough.mid(), enough.post(&[5])] {
            assert!(outcome.result.is_ok(), "{outcome:?}");
            assert_eq!(outcome.report.storage.len(), 1);
        }
    }
    let mut few = of_step(2);
    assert!(few.pre().result.is_ok());
    assert!(few.mid().result.is_ok());
    let failed = few.post(&[5]);
    assert!(failed.report.storage.is_empty());
    let failed = failure(failed);
    assert_eq!(failed.reason, ErrorReason::LIMIT);
    assert!(
        failed.message.ends_with("storage limit: writes per step"),
        "{failed}"
    );
}
