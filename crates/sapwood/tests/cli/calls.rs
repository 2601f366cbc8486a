//! `sapwood run` and `sapwood models`.

use serde_json::Value;

use crate::process::{run, run_with, sapwood};
use crate::server::with_echo;

/// The lines of `--json`.
fn objects(out: &str) -> Vec<Value> {
    out.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_call_without_a_server_runs_in_the_process() {
    let here = with_echo("run-here", "");
    std::fs::write(here.join("question.txt"), "from a file").unwrap();
    std::fs::write(here.join("few.json"), "{\"max_tokens\": 4}").unwrap();
    let generate = ["run", "GENERATE", "--input"];
    for (inputs, stdin, expect) in [
        (&["prompt=straight"][..], "", "straight"),
        (&["prompt=a=b"], "", "a=b"),
        (&["prompt=@question.txt"], "", "from a file"),
        (&["prompt=-"], "piped ünïcode", "piped ünïcode"),
        (
            &["prompt=straight", "--input", "config=@few.json"],
            "",
            "stra",
        ),
        (
            &["prompt=straight", "--input", "target=parrot"],
            "",
            "straight",
        ),
    ] {
        let ended = run_with(sapwood(&here, &[&generate, inputs].concat()), stdin);
        assert_eq!(
            (ended.code, ended.out.as_str()),
            (0, expect),
            "{inputs:?}: {ended:?}"
        );
    }
    let ended = run(
        &here,
        &[&generate[..], &["prompt=data", "--output", "out.txt"]].concat(),
    );
    assert_eq!((ended.code, ended.out.as_str()), (0, ""), "{ended:?}");
    assert_eq!(
        std::fs::read_to_string(here.join("out.txt")).unwrap(),
        "data"
    );
}

#[test]
fn a_suffix_is_an_input() {
    let more =
        "[[models]]\nname = \"filler\"\nbackend = \"scripted\"\nscripted = { infill = true }\n";
    let here = with_echo("run-suffix", more);
    let call = [
        "run",
        "GENERATE",
        "--input",
        "prompt=ab",
        "--input",
        "suffix=cd",
        "--target",
    ];
    for (target, code, out, error) in [
        ("filler", 0, "abcd", ""),
        ("parrot", 1, "", "no tokens for fill in the middle"),
    ] {
        let ended = run(&here, &[&call[..], &[target]].concat());
        assert_eq!((ended.code, &*ended.out), (code, out), "{ended:?}");
        assert!(ended.err.contains(error), "{ended:?}");
    }
}

#[test]
fn the_target_can_be_set_by_a_flag() {
    let more = "default_model = \"cat\"\n[[models]]\nname = \"cat\"\nbackend = \"scripted\"\n\
                scripted = { script = \"text\", text = \"miaow\" }\n";
    let here = with_echo("run-target", more);
    let call = ["run", "GENERATE", "--input", "prompt=straight"];
    for (target, code, states) in [
        (&[][..], 0, "miaow"),
        (&["--target", "parrot"], 0, "straight"),
        (
            &[
                "--target",
                "parrot",
                "--input",
                "config={\"max_tokens\": 4}",
            ],
            0,
            "stra",
        ),
        (&["--target", "dog"], 1, ""),
        (&["--target", "cat", "--input", "target=cat"], 2, ""),
    ] {
        let ended = run(&here, &[&call[..], target].concat());
        assert_eq!(
            (ended.code, &*ended.out),
            (code, states),
            "{target:?}: {ended:?}"
        );
    }
}

#[test]
fn json_output_ends_with_the_usage() {
    let here = with_echo("run-json", "");
    let ended = run(
        &here,
        &["run", "GENERATE", "--json", "--input", "prompt=abc"],
    );
    let lines = objects(&ended.out);
    let (end, pieces) = lines.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|piece| piece["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "abc");
    assert_eq!(
        (&end["end"]["model"], &end["end"]["finish"]),
        (&"parrot".into(), &serde_json::json!(["stop"]))
    );
    assert!(
        end["end"]["usage"]["completion_tokens"].as_u64().unwrap() >= 3,
        "{end}"
    );
}

#[test]
fn an_impossible_call_is_explained() {
    let here = with_echo("run-wrong", "");
    for (arguments, code, part) in [
        (&["run", "DANCE"][..], 1, "GENERATE"),
        (&["run", "GENERATE"], 1, "MISSING_INPUT"),
        (&["run", "GENERATE", "--input", "promt=x"], 1, "promt"),
        (&["run", "GENERATE", "--input", "prompt"], 2, "NAME=TEXT"),
        (&["run", "GENERATE", "--input", "prompt=@none"], 2, "none"),
        (
            &["run", "GENERATE", "--port", "smell", "--input", "prompt=x"],
            2,
            "response",
        ),
        (
            &[
                "run",
                "GENERATE",
                "--input",
                "prompt=x",
                "--input",
                "config={\"top_p\": 7}",
            ],
            1,
            "top_p",
        ),
    ] {
        let ended = run(&here, arguments);
        assert_eq!(
            (ended.code, ended.out.as_str()),
            (code, ""),
            "{arguments:?}: {ended:?}"
        );
        assert_eq!(ended.err.lines().count(), 1, "{arguments:?}: {ended:?}");
        assert!(
            ended.err.contains(part),
            "{arguments:?}: {part} is missing in {ended:?}"
        );
    }
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let here = with_echo("run-pipe", "");
    let mut child = sapwood(&here, &["run", "GENERATE", "--input", "prompt=much"])
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!(
        (ended.status.code(), ended.stderr.as_slice()),
        (Some(0), &b""[..])
    );
}
