//! `sapwood chat`, fed from a pipe.

use std::io::{BufRead, BufReader, Read, Write};

use rustix::process::Signal;

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
