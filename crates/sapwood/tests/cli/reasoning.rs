//! What `chat` and `run` show of a model that thinks before it answers.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::Signal;

use crate::chat::terminal;
use crate::process::{Serving, folder, interrupt, run, run_with, sapwood};

/// A model that thinks, and then answers, waits, or calls a tool.
const MODEL: &str = r#"
[client]
server = "here"
[[models]]
name = "thinker"
backend = "scripted"
[models.scripted]
script = "steps"
[[models.scripted.rules]]
match = "wait"
steps = [{ reasoning = "I look outside." }, { text = "" }, { hang = true }]
[[models.scripted.rules]]
match = "call"
steps = [{ reasoning = "I ask." }, { tool_call = { name = "weather", arguments = { city = "Bergen" } } }]
[[models.scripted.rules]]
steps = [{ reasoning = "I look outside." }, { text = "It rains." }]
"#;

fn with_thinker(name: &str) -> PathBuf {
    let here = folder(name);
    std::fs::write(here.join("sapwood.toml"), MODEL).unwrap();
    here
}

/// The lines of standard error, but for the last one of an answer, which is its cost.
fn lines(err: &str) -> Vec<&str> {
    err.lines()
        .filter(|line| !line.contains("tokens/s"))
        .collect()
}

#[test]
fn reasoning_goes_to_standard_error_and_the_answer_to_standard_output() {
    let here = with_thinker("reasoning-pipe");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let shown = ["--- thinking ---", "I look outside.", "--- answer ---"];
    for server in ["here", &serving.url] {
        for (flags, expect) in [(&[][..], &shown[..]), (&["--hide-reasoning"], &[])] {
            let flags = [&["chat", "--server", server], flags].concat();
            // Twice, because the second prompt has the first answer.
            let ended = run_with(sapwood(&here, &flags), "And?\nAnd now?\n/save all.json\n");
            assert_eq!(
                (ended.code, &*ended.out),
                (0, "It rains.\nIt rains.\n"),
                "{ended:?}"
            );
            let mut written = lines(&ended.err);
            assert_eq!(written.pop(), Some("Written to all.json."));
            assert_eq!(written, [expect, expect].concat(), "{ended:?}");
            let saved = std::fs::read_to_string(here.join("all.json")).unwrap();
            assert!(!saved.contains("outside"), "{saved}");
        }
    }
}

#[test]
fn reasoning_is_shown_while_the_model_thinks() {
    let here = with_thinker("reasoning-streams");
    let mut command = sapwood(&here, &["chat"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    child.stdin.as_ref().unwrap().write_all(b"wait\n").unwrap();
    let mut seen = String::new();
    let mut read_to = |end: &str| {
        while !seen.ends_with(end) {
            let mut byte = [0];
            assert_eq!(err.read(&mut byte).unwrap(), 1, "{seen}");
            seen.push(char::from(byte[0]));
        }
    };
    read_to("--- thinking ---\nI look outside.");
    interrupt(&child, Signal::INT);
    read_to("\n--- end ---\ncancelled\n");
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn an_answer_that_ends_within_the_reasoning_is_explained() {
    let here = with_thinker("reasoning-cut");
    // As many tokens as `<think>` and some of the text have: each byte is one.
    let ended = run_with(sapwood(&here, &["chat", "--max-tokens", "14"]), "And?\n");
    assert_eq!((ended.code, &*ended.out), (0, "\n"), "{ended:?}");
    let why = "The tokens of this answer ran out while the model was thinking.";
    let thought = ["--- thinking ---", "I look", "--- end ---", why];
    assert_eq!(lines(&ended.err), thought, "{ended:?}");
}

#[test]
fn run_shows_reasoning_unless_its_output_is_read_by_a_program() {
    let here = with_thinker("reasoning-run");
    let shown = "--- thinking ---\nI look outside.\n--- answer ---\n";
    let hidden = "--hide-reasoning";
    for (name, flags, out, err) in [
        ("GENERATE", &[][..], "It rains.", shown),
        ("thinker", &[], "It rains.", shown),
        ("GENERATE", &[hidden], "It rains.", ""),
        ("GENERATE", &["--port", "reasoning"], "I look outside.", ""),
        ("GENERATE", &["--port", "response"], "It rains.", ""),
    ] {
        let config = "config={\"prompt_mode\":\"chat\"}";
        let flags = [&["run", name, "-i", "prompt=And?", "-i", config], flags].concat();
        let ended = run(&here, &flags);
        assert_eq!(
            (ended.code, &*ended.out, &*ended.err),
            (0, out, err),
            "{flags:?}"
        );
    }
    let ended = run(&here, &["run", "GENERATE", "-i", "prompt=And?", "--json"]);
    assert!(
        ended.err.is_empty() && !ended.out.contains("outside"),
        "{ended:?}"
    );
}

#[test]
fn arguments_of_the_template_are_an_object() {
    let here = with_thinker("reasoning-arguments");
    let given = |args: &str| run(&here, &["chat", "--template-args", args]);
    assert_eq!(given("{\"enable_thinking\":false}").code, 0);
    for (args, why) in [("[1]", "it is no JSON object"), ("{", "EOF")] {
        let ended = given(args);
        assert!(ended.code == 2 && ended.err.contains(why), "{ended:?}");
    }
}

/// Without tools a call is text.
#[test]
fn a_call_of_a_tool_is_shown_in_a_chat() {
    let here = with_thinker("reasoning-call");
    let ended = run_with(sapwood(&here, &["chat"]), "call\n");
    assert!(
        ended.code == 0 && ended.out.contains("weather") && ended.out.contains("Bergen"),
        "{ended:?}"
    );
}

#[test]
fn reasoning_is_dimmed_on_a_terminal_with_colours() {
    let here = with_thinker("reasoning-dim");
    let styled = "\u{1b}[2mI look outside.\r\n\r\n\u{1b}[0m";
    for (colour, parts) in [
        ("", &["\u{1b}[2m", "\u{1b}[0m"][..]),
        (
            "1",
            &["--- thinking ---", "I look outside.", "--- answer ---"],
        ),
    ] {
        let written = on_terminal(&here, colour);
        for part in parts {
            assert!(written.contains(part), "{part:?} is missing in {written:?}");
        }
        assert_eq!(written.contains("--- thinking"), !colour.is_empty());
        // Each piece is dimmed for itself, the cost of the answer too.
        let joined = written.replace("\u{1b}[0m\u{1b}[2m", "");
        let reasoning = joined.replacen("\r\n\r\n", "\r\n\r\n\u{1b}[0m", 1);
        assert_eq!(reasoning.contains(styled), colour.is_empty(), "{written:?}");
    }
}

/// What a chat writes on a terminal as its standard error.
fn on_terminal(here: &Path, no_color: &str) -> String {
    let (ours, theirs) = terminal();
    let mut command = sapwood(here, &["chat"]);
    command.env("NO_COLOR", no_color).stdin(Stdio::piped());
    let mut child = command.stderr(theirs).spawn().unwrap();
    // The command holds our copy of its end, without which reading ends when the chat does.
    drop(command);
    child.stdin.take().unwrap().write_all(b"And?\n").unwrap();
    let written = read_all(&ours);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    written
}

/// Reads a terminal until nobody has its other end: Linux reports an error then.
fn read_all(terminal: &File) -> String {
    let mut written = Vec::new();
    let mut reader = BufReader::new(terminal);
    while let Ok(bytes) = reader.fill_buf() {
        let count = bytes.len();
        if count == 0 {
            break;
        }
        written.extend_from_slice(bytes);
        reader.consume(count);
    }
    String::from_utf8(written).unwrap()
}
