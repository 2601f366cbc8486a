//! `sapwood chat`, fed from a pipe.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::process::{Serving, interrupt, run_with, sapwood};
use crate::server::{with_echo, with_slow_echo};

#[test]
fn a_piped_conversation_runs_in_the_process() {
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
        ended.err.contains("/system [TEXT]") && ended.err.contains("There is no /nonsense"),
        "{ended:?}"
    );
}

#[test]
fn a_full_context_drops_the_oldest_turn_with_a_notice() {
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

/// Asks for a long answer, interrupts it at its first letter, and continues the conversation.
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
fn ctrl_c_stops_only_the_running_answer() {
    let here = with_slow_echo("chat-cancel", "");
    interrupted(sapwood(&here, &["chat"]));
}

/// Both ends of a terminal: ours, and the one that a program is given.
pub(crate) fn terminal() -> (File, File) {
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
fn questions_are_stored_unless_disabled_or_impossible() {
    let here = with_echo("chat-history", "");
    let state = here.join("state");
    let file = state.join("sapwood").join("chat-history");
    for (arguments, question, retained) in [
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
            retained,
            "{arguments:?}"
        );
    }
    let in_the_way = here.join("sapwood.toml");
    let (code, out, err) = typed(&here, &in_the_way, &[], "all the same");
    assert!(code == 0 && out.contains("all the same"), "{out}{err}");
    let warnings = err.lines().filter(|line| line.contains("--no-history"));
    assert_eq!(warnings.count(), 1, "{err}");
}

#[test]
fn commands_see_and_change_the_conversation() {
    let more = "[[models]]\nname = \"cat\"\nbackend = \"scripted\"\nscripted = { script = \"text\", text = \"miaow\" }\n";
    let here = with_echo(
        "chat-commands",
        &format!("default_model = \"parrot\"\n{more}"),
    );
    let lines = "/system\n/retry\nHello!\n/retry\n/system Be brief.\n/system\n/model\n/model dog\n/model cat\nAnd you?\n\
                 /save said.json\n/save said.txt\n/save no/such/folder\n/temperature 0.2\n";
    let ended = run_with(sapwood(&here, &["chat"]), lines);
    assert_eq!(
        (ended.code, &*ended.out),
        (0, "Hello!\nHello!\nmiaow\n"),
        "{ended:?}"
    );
    for part in [
        "There is no system message.",
        "Nothing has been asked yet.",
        "\nBe brief.\n",
        "* parrot\n",
        "  cat\n",
        "There is no model dog",
        "Talking to cat in this process.",
        "cannot write no/such/folder",
        "The temperature is 0.2.",
    ] {
        assert!(ended.err.contains(part), "{part} is missing in {ended:?}");
    }
    let saved: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(here.join("said.json")).unwrap()).unwrap();
    assert_eq!(
        saved[2]["content"], "Hello!",
        "the question was asked again, not twice"
    );
    assert_eq!(saved[4]["content"], "miaow");
    let saved = std::fs::read_to_string(here.join("said.txt")).unwrap();
    assert!(
        saved.starts_with("system: Be brief.\n\nuser: Hello!\n"),
        "{saved}"
    );
}

/// D-52: wherever it runs. Ctrl-C while nothing is answered ends at once, as a key and as a signal.
#[test]
fn d_52_the_greeting_names_the_model_and_an_idle_ctrl_c_ends() {
    let here = with_echo("chat-greeting", "");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let there = format!("Talking to parrot at {}. /help", serving.url);
    for (server, term, greeting) in [
        ("here", "dumb", "Talking to parrot in this process. /help"),
        (&*serving.url, "xterm", &*there),
    ] {
        let (mut ours, theirs) = terminal();
        let mut command = sapwood(&here, &["chat", "--no-history", "--server", server]);
        command.env("TERM", term).stdin(theirs);
        let mut child = command.spawn().unwrap();
        let mut err = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        err.read_line(&mut line).unwrap();
        assert!(line.contains(greeting), "{line}");
        // The prompt: from here on the terminal is in the editor's hands, and signals are watched.
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0; 2]).unwrap();
        if term == "dumb" {
            interrupt(&child, Signal::INT);
        } else {
            ours.write_all(&[3]).unwrap();
        }
        assert_eq!(child.wait().unwrap().code(), Some(130), "{term}");
    }
}

/// With echo, text that is typed meanwhile would appear in the middle of the answer.
#[test]
fn a_terminal_does_not_echo_while_an_answer_is_written() {
    use rustix::termios::{LocalModes, tcgetattr};
    let here = with_slow_echo("chat-echo", "");
    let (mut ours, theirs) = terminal();
    let mut command = sapwood(&here, &["chat", "--no-history"]);
    command.env("TERM", "dumb").stdin(theirs);
    let echoes = |terminal: &File| {
        tcgetattr(terminal)
            .unwrap()
            .local_modes
            .contains(LocalModes::ECHO)
    };
    assert!(echoes(&ours));
    let mut child = command.spawn().unwrap();
    ours.write_all(b"velvet\n").unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut seen = String::new();
    while !seen.ends_with('v') {
        let mut letter = [0];
        out.read_exact(&mut letter).unwrap();
        seen.push(char::from(letter[0]));
    }
    assert!(!echoes(&ours), "{seen}");
    ours.write_all(b"/quit\n").unwrap();
    out.read_to_string(&mut seen).unwrap();
    assert!(seen.contains("velvet\n"), "{seen}");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(echoes(&ours));
}
