//! Calls and conversations with a server, and what happens when there is none.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;

use crate::chat::interrupted;
use crate::process::{Serving, folder, interrupt, run, run_with, sapwood};
use crate::server::{with_echo, with_slow_echo};

#[test]
fn a_call_to_a_server_gives_the_same_as_one_here() {
    let here = with_echo("run-there", "[auth]\nkey = \"one\"");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let away = folder("run-there-client");
    let call = [
        "run",
        "GENERATE",
        "--server",
        &serving.url,
        "--input",
        "prompt=over the wire",
    ];
    let ended = run(&away, &[&call[..], &["--api-key", "one"]].concat());
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (0, "over the wire"),
        "{ended:?}"
    );
    let ended = run(&away, &call);
    assert!(
        ended.code == 1 && ended.err.contains("--api-key"),
        "{ended:?}"
    );
    let ended = run(
        &away,
        &[
            "models",
            "--json",
            "--server",
            &serving.url,
            "--api-key",
            "one",
        ],
    );
    let listed: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(listed["models"], serde_json::json!(["parrot"]), "{ended:?}");
    let functions = listed["functions"].as_array().unwrap();
    assert!(
        functions.iter().any(|function| function["name"] == "echo"),
        "{listed}"
    );
}

#[test]
fn a_conversation_on_a_server_reuses_earlier_turns() {
    let here = with_echo("chat-there", "");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let away = folder("chat-there-client");
    let command = sapwood(&away, &["chat", "--server", &serving.url]);
    let ended = run_with(command, "Hello there.\nWho are you?\n");
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (0, "Hello there.\nWho are you?\n"),
        "{ended:?}"
    );
    let cached: Vec<&str> = ended
        .err
        .lines()
        .filter(|line| line.contains("cached"))
        .collect();
    assert!(cached[0].contains("; 0 of "), "{ended:?}");
    assert!(
        !cached[1].contains("; 0 of "),
        "the second turn pays for its new tokens only: {ended:?}"
    );
    assert!(
        serving
            .get("/metrics", "")
            .contains("sapwood_evergreen_sessions_open 0\n")
    );
}

#[test]
fn where_no_server_answers_the_exit_code_is_4() {
    let here = with_echo("remote-none", "");
    // Bound and released, so nothing listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let url = format!("http://{free}");
    for command in [
        &["run", "GENERATE", "--input", "prompt=x"][..],
        &["chat"],
        &["models"],
    ] {
        let ended = run(&here, &[command, &["--server", &url]].concat());
        assert_eq!(
            (ended.code, ended.out.as_str()),
            (4, ""),
            "{command:?}: {ended:?}"
        );
        assert!(
            ended.err.contains("sapwood serve") && ended.err.lines().count() == 1,
            "{ended:?}"
        );
    }
    let ended = run(&here, &["models", "--server", "ftp://x"]);
    assert_eq!(ended.code, 2, "{ended:?}");
    let ended = run(
        &here,
        &["doctor", "--server", &url, "--listen", "127.0.0.1:0"],
    );
    assert!(
        ended.code == 1 && ended.out.contains("FAIL  server"),
        "{ended:?}"
    );
}

#[test]
fn oa_804_the_access_log_of_a_session_has_its_usage_and_no_content() {
    let here = with_echo("access-line", "[auth]\nkey = \"hush-hush\"");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let server = ["--server", &serving.url, "--api-key", "hush-hush"];
    let call = ["run", "GENERATE", "--input", "prompt=velvet"];
    let ended = run(&here, &[&call[..], &server].concat());
    assert_eq!((ended.code, ended.out.as_str()), (0, "velvet"), "{ended:?}");
    let line = serving.wait_for("request");
    let expect = serde_json::json!({
        "face": "evergreen", "model": "parrot", "key": "default", "method": "POST", "status": 200, "grpc": 0,
        "route": "/evergreen.v2.EvergreenService/StartSession", "cached_tokens": 0, "end": "sent",
    });
    for (field, value) in expect.as_object().unwrap() {
        assert_eq!(&line[field], value, "{field} of {line}");
    }
    let number = |field: &str| {
        line[field]
            .as_u64()
            .unwrap_or_else(|| panic!("{field} of {line}"))
    };
    assert!(
        number("prompt_tokens") >= 6 && number("completion_tokens") >= 6,
        "{line}"
    );
    assert!(number("ttft_ms") <= number("ms"), "{line}");
    let text = line.to_string();
    assert!(!text.contains("velvet") && !text.contains("hush"), "{line}");
    // No model, no numbers.
    serving.get("/livez", "");
    let line = serving.wait_for("request");
    assert_eq!(
        (&line["face"], &line["key"]),
        (&"http".into(), &"anonymous".into())
    );
    assert!(
        line.get("model").is_none() && line.get("prompt_tokens").is_none(),
        "{line}"
    );
}

/// EV-913, EV-974: the answer is cancelled on the server, and the session continues.
#[test]
fn ctrl_c_cancels_an_answer_on_the_server_too() {
    let here = with_slow_echo("remote-cancel", "");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let away = folder("remote-cancel-client");
    interrupted(sapwood(&away, &["chat", "--server", &serving.url]));
    ended_in_order(&mut serving);
    let metrics = serving.get("/metrics", "");
    for line in [
        "sapwood_requests_total{code=\"cancelled\",face=\"evergreen\",model=\"parrot\"} 1\n",
        "sapwood_requests_total{code=\"ok\",face=\"evergreen\",model=\"parrot\"} 1\n",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
}

#[test]
fn oa_804_the_access_log_of_a_websocket_is_written_at_its_close() {
    let here = with_echo("access-websocket", "");
    let mut serving = Serving::start(&here, &[]);
    let mut socket = TcpStream::connect(serving.address()).unwrap();
    let ask = "GET /evergreen HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
               sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n";
    socket.write_all(ask.as_bytes()).unwrap();
    let mut head = String::new();
    BufReader::new(&socket).read_line(&mut head).unwrap();
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    // Another request's line comes first: that of the session is not due yet.
    serving.get("/livez", "");
    assert_eq!(serving.wait_for("request")["route"], "/livez");
    // A masked Close without a reason.
    socket.write_all(&[0x88, 0x80, 0, 0, 0, 0]).unwrap();
    let line = serving.wait_for("request");
    let (face, route) = (&line["face"], &line["route"]);
    assert_eq!(
        (face, route),
        (&"evergreen".into(), &"/evergreen".into()),
        "{line}"
    );
    assert_eq!(
        (&line["status"], &line["end"]),
        (&101.into(), &"sent".into()),
        "{line}"
    );
}

/// The access line of the session that a client has just closed.
fn ended_in_order(serving: &mut Serving) {
    let line = serving.wait_for("request");
    assert_eq!(
        (&line["grpc"], &line["end"]),
        (&0.into(), &"sent".into()),
        "{line}"
    );
}

/// EV-109: the session is half-closed and read to its end, whatever became of the call.
#[test]
fn a_command_closes_its_session_on_every_exit() {
    let here = with_slow_echo("remote-leave", "");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let url = serving.url.clone();
    for (command, code) in [
        (&["models"][..], 0),
        (&["run", "echo", "--input", "text=x"], 0),
        (
            &[
                "run",
                "echo",
                "--input",
                "text=x",
                "--output",
                "no/such/folder",
            ],
            1,
        ),
        (&["run", "fail"], 1),
    ] {
        let ended = run(&here, &[command, &["--server", &url]].concat());
        assert_eq!(ended.code, code, "{command:?}: {ended:?}");
        ended_in_order(&mut serving);
    }
    let call = [
        "run",
        "GENERATE",
        "--input",
        "prompt=a minute and more",
        "--server",
        &url,
    ];
    let mut child = sapwood(&here, &call).spawn().unwrap();
    let mut first = [0; 1];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    interrupt(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    ended_in_order(&mut serving);
}

/// EV-960, D-31.
#[test]
fn oa_904_a_running_answer_is_finished_in_the_drain_or_cut_with_exit_code_3() {
    for (deadline, code) in [("1h", 0), ("0s", 3)] {
        let drain = format!("[drain]\ngrace = \"0s\"\ndeadline = \"{deadline}\"");
        let here = with_slow_echo(&format!("remote-drain-{code}"), &drain);
        let mut serving = Serving::start(&here, &[]);
        serving.wait_for("loaded");
        let call = [
            "run",
            "GENERATE",
            "--server",
            &serving.url,
            "--input",
            "prompt=a dozen words",
        ];
        let mut child = sapwood(&here, &call).spawn().unwrap();
        let mut first = [0; 1];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut first)
            .unwrap();
        serving.signal(Signal::TERM);
        let ended = child.wait_with_output().unwrap();
        let (served, log) = serving.end();
        assert_eq!(served, code, "{log}");
        let text = String::from_utf8(ended.stdout).unwrap();
        let received = String::from_utf8(ended.stderr).unwrap();
        if code == 0 {
            assert_eq!(
                (ended.status.code(), &*text),
                (Some(0), " dozen words"),
                "{received}"
            );
        } else {
            assert!(
                ended.status.code() == Some(1) && received.contains("GOING_AWAY"),
                "{received}"
            );
            // OA-804: what is logged of a session can be found by the request that opened it.
            let lines: Vec<Value> = log.lines().flat_map(serde_json::from_str).collect();
            let line = |message: &str| lines.iter().find(|line| line["message"] == message);
            let (session, access) = (line("session aborted").unwrap(), line("request").unwrap());
            assert!(access["request"].is_string(), "{log}");
            assert_eq!(session["span"]["request"], access["request"], "{log}");
        }
    }
}

/// D-5: models of another server are models here.
#[test]
fn an_upstreams_models_and_functions_are_served() {
    let mut back = Serving::start(&with_echo("upstream-back", ""), &[]);
    back.wait_for("loaded");
    let here = folder("upstream-front");
    std::fs::write(here.join("sapwood.toml"), "drain.grace = \"0s\"\n").unwrap();
    let upstream = format!("evergreen+{}", back.url);
    let mut front = Serving::start(&here, &["--upstream", &upstream]);
    front.wait_for("joined an upstream");
    let url = front.url.clone();
    let call = [
        "run",
        "GENERATE",
        "--server",
        &url,
        "--input",
        "prompt=through two",
    ];
    let ended = run(&here, &call);
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (0, "through two"),
        "{ended:?}"
    );
    let ended = run(
        &here,
        &["run", "echo", "--server", &url, "--input", "text=and back"],
    );
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (0, "and back"),
        "{ended:?}"
    );
    // It goes away in the middle of a call.
    let echo = ["run", "echo", "--server", &url, "--input", "text=-"];
    let mut running = sapwood(&here, &echo).stdin(Stdio::piped()).spawn().unwrap();
    let mut typed = running.stdin.take().unwrap();
    typed.write_all(b"x").unwrap();
    let mut first = [0; 1];
    running
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    drop(back);
    let ended = running.wait_with_output().unwrap();
    let received = String::from_utf8(ended.stderr).unwrap();
    assert!(
        received.contains("the connection to the server was lost"),
        "{received}"
    );
    drop(typed);
    // Later calls fail too, and a server starts without the upstream.
    front.wait_for("lost an upstream; it is joined again when it answers");
    let ended = run(&here, &call);
    assert!(ended.code == 1 && ended.out.is_empty(), "{ended:?}");
    assert!(ended.err.contains("not connected"), "{ended:?}");
    drop(front);
    let front = Serving::start(&here, &["--upstream", &upstream]);
    assert!(front.get("/livez", "").contains("\"ok\""));
    assert!(front.get("/readyz", "").contains("upstream_away"));
    front.signal(Signal::TERM);
    let (code, log) = front.end();
    assert_eq!(code, 0, "{log}");
}

/// An error that no retry can mend is reported at the start.
#[test]
fn an_upstream_that_refuses_the_key_prevents_the_start() {
    let back = Serving::start(&with_echo("upstream-closed", "[auth]\nkey = \"one\""), &[]);
    let here = folder("upstream-keyless");
    let upstream = format!("evergreen+{}", back.url);
    let ended = run(
        &here,
        &["serve", "--listen", "127.0.0.1:0", "--upstream", &upstream],
    );
    assert!(
        ended.code == 1 && ended.err.contains("refused access"),
        "{ended:?}"
    );
}

/// A folder whose configuration sets `listen`, and has a model.
fn beside(name: &str, serving: &Serving) -> std::path::PathBuf {
    let here = folder(name);
    let text = format!(
        "listen = \"{}\"\n[[models]]\nname = \"near\"\nbackend = \"scripted\"\n",
        serving.address()
    );
    std::fs::write(here.join("sapwood.toml"), text).unwrap();
    here
}

/// The server of a folder is the one that its configuration starts.
#[test]
fn d_52_flags_that_name_an_engine_mean_one_in_this_process() {
    let mut serving = Serving::start(&with_echo("flags-back", ""), &[]);
    serving.wait_for("loaded");
    let here = beside("flags-front", &serving);
    let listed = |arguments: &[&str]| {
        let ended = run(&here, &[&["models", "--json"], arguments].concat());
        let listed: Value = serde_json::from_str(&ended.out).unwrap_or_default();
        (ended, listed["models"].clone())
    };
    let (ended, models) = listed(&[]);
    assert_eq!(models, serde_json::json!(["parrot"]), "{ended:?}");
    for flags in [
        &["--ctx", "64"][..],
        &["--threads", "1"],
        &["--parallel", "1"],
        &["--default-model", "near"],
        &["--server", "here"],
        &["--server", "here", "--ctx", "64"],
    ] {
        let (ended, models) = listed(flags);
        assert_eq!(models, serde_json::json!(["near"]), "{flags:?}: {ended:?}");
    }
    for flag in ["--model", "--ctx", "--threads", "--parallel"] {
        for command in [&["models"][..], &["chat"], &["run", "GENERATE"]] {
            let server = ["--server", &serving.url, flag, "1"];
            let ended = run(&here, &[command, &server].concat());
            assert_eq!((ended.code, &*ended.out), (2, ""), "{ended:?}");
            assert!(
                ended.err.contains(flag) && ended.err.contains("--server"),
                "{ended:?}"
            );
        }
    }
}

/// D-53: the temperature that is shown is the one that is asked for.
#[test]
fn d_53_a_model_of_a_server_recommends_how_to_sample() {
    let recommends = "echo\", sampling = { temperature = 0.25, top_k = 40 }, text = \"";
    let here = with_echo("recommends", "");
    let text = std::fs::read_to_string(here.join("sapwood.toml")).unwrap();
    std::fs::write(here.join("sapwood.toml"), text.replace("echo", recommends)).unwrap();
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    // Through another server as well.
    let front = folder("recommends-front");
    let upstream = format!("evergreen+{}", serving.url);
    let mut front = Serving::start(&front, &["--upstream", &upstream]);
    front.wait_for("joined an upstream");
    let away = folder("recommends-client");
    for (url, expect) in [(&serving.url, "0.25"), (&front.url, "0.25")] {
        let command = sapwood(&away, &["chat", "--server", url]);
        let ended = run_with(
            command,
            "/temperature\n/temperature 0.5\n/temperature -\n/temperature x\nhello\n",
        );
        assert_eq!((ended.code, &*ended.out), (0, "hello\n"), "{ended:?}");
        let received = format!("The temperature is {expect}.");
        let lines: Vec<&str> = ended.err.lines().take(3).collect();
        assert_eq!(
            lines,
            [&*received, "The temperature is 0.5.", &*received],
            "{ended:?}"
        );
    }
    let command = sapwood(
        &away,
        &["chat", "--server", &serving.url, "--temperature", "1.5"],
    );
    let ended = run_with(command, "/temperature\n");
    assert!(ended.err.contains("The temperature is 1.5."), "{ended:?}");
    let usual = with_echo("recommends-not", "");
    let ended = run_with(sapwood(&usual, &["chat"]), "/temperature\n");
    assert!(ended.err.contains("The temperature is 0.7."), "{ended:?}");
}

/// Names of files in `folder`: a certificate for `localhost` of its own making, and its key.
fn certificate(folder: &std::path::Path) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
}

#[test]
fn an_untrusted_certificate_is_reported_with_a_remedy() {
    let here = with_echo("untrusted", "");
    certificate(&here);
    let tls = ["--tls-cert", "cert.pem", "--tls-key", "key.pem"];
    let serving = Serving::start(&here, &tls);
    let port = serving.url.rsplit(':').next().unwrap();
    let plain = Serving::start(&with_echo("untrusted-plain", ""), &[]);
    let trusted = ["--ca", "cert.pem"];
    for (url, more, code, why) in [
        (format!("https://localhost:{port}"), &trusted[..], 0, ""),
        (
            format!("https://localhost:{port}"),
            &[],
            4,
            "not signed by a trusted authority",
        ),
        (
            format!("wss://localhost:{port}"),
            &[],
            4,
            "not signed by a trusted authority",
        ),
        (
            format!("https://127.0.0.1:{port}"),
            &trusted,
            4,
            "for another name",
        ),
        (
            format!("https://{}", plain.address()),
            &[],
            4,
            "does not speak TLS",
        ),
    ] {
        let ended = run(&here, &[&["models", "--server", &url], more].concat());
        assert_eq!(ended.code, code, "{url}: {ended:?}");
        assert!(ended.err.contains(why), "{url}: {ended:?}");
        assert_eq!(
            ended.err.contains("--ca FILE"),
            code != 0,
            "{url}: {ended:?}"
        );
        assert!(!ended.err.contains("start one"), "{url}: {ended:?}");
    }
}

/// The upstream accepts connections but does not answer: the server starts, reports that it is not ready, and ends on a signal.
#[test]
fn oa_902_a_silent_upstream_does_not_delay_the_server() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap();
    let here = folder("upstream-silent");
    for upstream in [
        format!("evergreen+http://{at}"),
        format!("evergreen+ws://{at}"),
        format!("triton+http://{at}"),
        format!("lmtp://{at}/far"),
    ] {
        let front = Serving::start(&here, &["--upstream", &upstream]);
        // It is connected to, and so its turn has come.
        let connection = silent.accept().unwrap();
        assert!(front.get("/livez", "").contains("\"ok\""), "{upstream}");
        assert!(front.get("/readyz", "").contains("upstream_away"));
        front.signal(Signal::TERM);
        let (code, log) = front.end();
        assert_eq!(code, 0, "{upstream}: {log}");
        drop(connection);
    }
}

/// Who starts another server where one answers is no further.
#[test]
fn another_kind_of_server_is_not_reported_as_absent() {
    let here = with_echo("remote-else", "");
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", other.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        let (mut socket, _) = other.accept().unwrap();
        let _ = socket.read(&mut [0; 100]);
        socket
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            .unwrap();
    });
    let ended = run(&here, &["models", "--server", &url]);
    serving.join().unwrap();
    assert_eq!((ended.code, &*ended.out), (4, ""), "{ended:?}");
    assert!(ended.err.contains("cannot be used"), "{ended:?}");
    assert!(!ended.err.contains("start one"), "{ended:?}");
}
