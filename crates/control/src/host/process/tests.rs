//! Processes that say what no controller's process would: each ends its sequence and no other.

use std::io::stdin;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sapwood_proto::error_reason::ErrorReason;

use super::bytes::ByteWriter;
use super::message::{self, StartMessage};
use super::outcome::write_outcome;
use super::stream::{MessageInbox, MessageOutbox, RECEIVED_BYTES};
use crate::host::controller::Outcome;
use crate::host::result::Returned;
use crate::host::tests::{Sequence, load, small, template_command, token_42};
use crate::host::{Group, Host, VariablesLimits};

/// Not a test: started with a socket as standard input, it is a template whose processes do what their argument says.
#[test]
fn a_rogue_template() {
    if crate::host::tests::is_template() {
        let mut processes = Vec::new();
        serve_rogue(&mut processes);
        for mut process in processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        std::process::exit(0);
    }
}

fn serve_rogue(processes: &mut Vec<Child>) {
    let control = stdin().as_fd().try_clone_to_owned().unwrap();
    let mut inbox = MessageInbox::default();
    let mut sockets = Vec::new();
    while let Some(message) = receive(&control, &mut inbox) {
        if message[0] == message::LAUNCH {
            drop(inbox.descriptor());
            sockets.extend(serve_one(inbox.descriptor().unwrap(), processes));
        }
    }
}

/// The next message, if there is one to come.
fn receive(socket: &OwnedFd, inbox: &mut MessageInbox) -> Option<Vec<u8>> {
    loop {
        if let Some(message) = inbox.next(usize::MAX).unwrap() {
            return Some(message);
        }
        let mut buffer = vec![0; RECEIVED_BYTES];
        if !matches!(inbox.receive(socket.as_fd(), &mut buffer), Ok(1..)) {
            return None;
        }
    }
}

/// Says hello, with a process that can be killed, and then what the argument asks for.
fn serve_one(socket: OwnedFd, processes: &mut Vec<Child>) -> Option<OwnedFd> {
    let start = receive(&socket, &mut MessageInbox::default())?;
    let start = StartMessage::read(&start[1..]).unwrap();
    let process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let pidfd = pidfd_open(Pid::from_child(&process), PidfdFlags::empty()).unwrap();
    processes.push(process);
    let mut outbox = MessageOutbox::default();
    if &*start.arg != "no hello" {
        outbox.push_with(message::bare(message::HELLO), vec![pidfd]);
    }
    let begun = |prompt| {
        let (result, report) = (Ok(Returned::Begun { prompt }), Default::default());
        write_outcome(&Outcome { result, report })
    };
    match &*start.arg {
        "refuses forks" => {
            outbox.push(begun(None));
            let _ = outbox.send(socket.as_fd(), usize::MAX);
            let fork = receive(&socket, &mut MessageInbox::default())?;
            assert_eq!(fork, [message::FORK]);
            outbox.push(message::forked(Some("there are too many")));
        }
        "ends" => {
            let _ = outbox.send(socket.as_fd(), usize::MAX);
            return None;
        }
        "no hello" | "well" => outbox.push(begun(None)),
        "unknown kind" => outbox.push(message::bare(200)),
        "empty" => outbox.push(vec![0; 4]),
        "too long" => outbox.push(vec![0xff, 0xff, 0xff, 0x7f, 1]),
        "no outcome" => outbox.push(message::bare(message::OUTCOME)),
        "more than an outcome" => {
            let mut long = begun(None);
            long.push(0);
            long[0] += 1;
            outbox.push(long);
        }
        "a token beyond" => outbox.push(begun(Some(vec![100]))),
        "another callback's" => {
            let (result, report) = (Ok(Returned::Post { stop: true }), Default::default());
            outbox.push(write_outcome(&Outcome { result, report }));
        }
        "hello twice" => outbox.push(message::bare(message::HELLO)),
        "forked" => outbox.push(message::forked(None)),
        "no text" => {
            let mut message = ByteWriter::of_kind(message::READ);
            message.bytes(&[0xff]);
            outbox.push(message.finish());
        }
        "writes for ever" => {
            let write = sapwood_proto::steer::VariableWrite {
                name: "x".to_owned(),
                value: vec![1],
                append: false,
                when_version_is: None,
            };
            for _ in 0..=1_024 {
                outbox.push(message::write_variable(&write));
            }
        }
        "reads for ever" => {
            for _ in 0..100 {
                outbox.push(message::read_variable("large"));
            }
        }
        other => panic!("{other}"),
    }
    let _ = outbox.send(socket.as_fd(), usize::MAX);
    Some(socket)
}

#[test]
fn ai_742_what_cannot_be_understood_ends_its_sequence_and_no_other() {
    let command = template_command("host::process::tests::a_rogue_template");
    let host = Host::in_processes(small(), command).unwrap();
    let program = load(&host, &token_42());
    let group = Group::new(64, VariablesLimits::default());
    let large = sapwood_proto::steer::VariableWrite {
        name: "large".to_owned(),
        value: vec![0; 1 << 20],
        append: false,
        when_version_is: None,
    };
    let other = group.enter().unwrap();
    group.variables().write(&large, other.number()).unwrap();
    let start = |arg| Sequence::start_with(&host, &program, &group, arg);
    let mut good = vec![start("well").begun()];
    for arg in [
        "unknown kind",
        "empty",
        "too long",
        "no outcome",
        "more than an outcome",
        "a token beyond",
        "another callback's",
        "hello twice",
        "forked",
        "no text",
        "writes for ever",
        "reads for ever",
    ] {
        let mut sequence = start(arg);
        let failure = sequence.outcome().result.unwrap_err();
        assert_eq!(
            (failure.reason, &*failure.message),
            (ErrorReason::TRAP, "the controller could not be run"),
            "{arg}"
        );
        let again = sequence.pre().result.unwrap_err();
        assert_eq!(again.message, "Previous WASM Error", "{arg}");
        good.push(start("well").begun());
    }
    // A fork that the system refuses is an error of the new sequence (AI-714).
    let mut parent = start("refuses forks").begun();
    let refused = parent.fork().outcome().result.unwrap_err();
    assert_eq!(
        (refused.reason, &*refused.message),
        (
            ErrorReason::LIMIT,
            "no process for the controller: there are too many"
        )
    );
    good.push(parent);
    let ended = start("ends").outcome().result.unwrap_err();
    assert_eq!(ended.reason, ErrorReason::RUNTIME_LOST);
    assert_eq!(group.variables().read("x").unwrap().version, 1_024);
    for sequence in &mut good {
        assert!(sequence.instance.poll().is_none());
    }
    // Nobody closes the sockets of this template's processes, but the template, at its end.
    drop((good, program, host));
}
