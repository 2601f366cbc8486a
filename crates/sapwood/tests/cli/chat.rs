//! `sapwood chat`, fed from a pipe.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::process::{interrupt, run_with, sapwood};
use crate::server::{with_echo, with_slow_echo};

#[test]
fn a_conversation_goes_line_by_line_in_the_process() {
    let here = with_echo("chat-here", "");
    let ended = run_with(
        sapwood(&here, &["chat"]),
        "Hello!\n\n/help\n/nonsense\nAgain?\n/quit\nnever\n",
    );
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (0, "Hello!\nAgain?\n"),
        "{ended:?}"
    );
    assert!(
        ended.err.contains("/system TEXT") && ended.err.contains("There is no /nonsense"),
        "{ended:?}"
    );
}

#[test]
fn a_full_context_leaves_the_oldest_turn_out_and_says_so() {
    let here = with_echo("chat-full", "[engine]\nctx = 100");
    let lines = "The first question.\nThe second question.\nThe third question.\n";
    let ended = run_with(sapwood(&here, &["chat"]), lines);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(
        ended.err.contains("the oldest turn is left out"),
        "{ended:?}"
    );
    assert!(ended.out.ends_with("The third question.\n"), "{ended:?}");
    let long = "x".repeat(200);
    let ended = run_with(sapwood(&here, &["chat"]), &format!("{long}\nshort\n"));
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(
        ended.err.contains("ask a shorter one") && ended.out.ends_with("short\n"),
        "{ended:?}"
    );
}

/// Asks for a long answer, interrupts it at its first letter, and goes on talking.
pub(crate) fn interrupted(mut command: std::process::Command) {
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    stdin
        .write_all(b"what would take a minute and more to repeat\n")
        .unwrap();
    let mut first = [0; 1];
    out.read_exact(&mut first).unwrap();
    interrupt(&child, Signal::INT);
    let mut line = String::new();
    while line.trim() != "cancelled" {
        line.clear();
        assert_ne!(
            err.read_line(&mut line).unwrap(),
            0,
            "the chat ended instead of the answer"
        );
    }
    stdin.write_all(b"ok\n").unwrap();
    drop(stdin);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!((child.wait().unwrap().code(), first), (Some(0), *b"w"));
    assert!(
        rest.ends_with("\nok\n") && !rest.contains("minute and more"),
        "{rest}"
    );
}

#[test]
fn ctrl_c_stops_an_answer_and_neither_the_program_nor_the_conversation() {
    let here = with_slow_echo("chat-cancel", "");
    interrupted(sapwood(&here, &["chat"]));
}

/// Both ends of a terminal: ours, and the one that a program is given.
fn terminal() -> (File, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = ptsname(&ours, Vec::new()).unwrap();
    let theirs = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path.to_str().unwrap());
    (ours.into(), theirs.unwrap())
}

/// A chat on a terminal: what is typed is asked, then left.
fn typed(folder: &Path, state: &Path, arguments: &[&str], question: &str) -> (i32, String, String) {
    let (mut ours, theirs) = terminal();
    let mut command = sapwood(folder, &[&["chat"], arguments].concat());
    // A terminal that knows no tricks: lines come as they are.
    command
        .env("TERM", "dumb")
        .env("XDG_STATE_HOME", state)
        .env("HOME", folder)
        .stdin(theirs);
    let child = command.spawn().unwrap();
    ours.write_all(format!("{question}\n/quit\n").as_bytes())
        .unwrap();
    let ended = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        ended.status.code().unwrap(),
        text(ended.stdout),
        text(ended.stderr),
    )
}

#[test]
fn questions_are_remembered_unless_that_is_unwanted_or_impossible() {
    let here = with_echo("chat-history", "");
    let state = here.join("state");
    let file = state.join("sapwood").join("chat-history");
    for (arguments, question, kept) in [
        (&[][..], "the first", "#V2\nthe first\n/quit\n"),
        (&["--no-history"], "the second", "#V2\nthe first\n/quit\n"),
        (
            &[],
            "the third",
            "#V2\nthe first\n/quit\nthe third\n/quit\n",
        ),
    ] {
        let (code, out, err) = typed(&here, &state, arguments, question);
        assert!(code == 0 && out.contains(question), "{out}{err}");
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            kept,
            "{arguments:?}"
        );
    }
    let in_the_way = here.join("sapwood.toml");
    let (code, out, err) = typed(&here, &in_the_way, &[], "all the same");
    assert!(code == 0 && out.contains("all the same"), "{out}{err}");
    let warnings = err.lines().filter(|line| line.contains("--no-history"));
    assert_eq!(warnings.count(), 1, "{err}");
}
