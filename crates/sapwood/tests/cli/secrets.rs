//! D-46: what goes over the wire and into the log, seen from outside.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use rustix::process::Signal;

use crate::process::{Ended, Serving, folder, run, run_with, sapwood};
use crate::server::with_echo;

/// The head of the first request that comes, whose connection is then closed.
fn head(listener: &TcpListener) -> String {
    let (socket, _) = listener.accept().unwrap();
    let mut lines = BufReader::new(socket);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(lines.read_line(&mut head).unwrap(), 0, "{head}");
    }
    head
}

/// The request that an upstream at an address of this kind receives from a server with `keys` and these variables.
fn shown(name: &str, scheme: &str, path: &str, keys: &str, variables: &[(&str, &str)]) -> String {
    let here = folder(name);
    let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("{scheme}://{}{path}", upstream.local_addr().unwrap());
    let text = format!("[[upstreams]]\nurl = \"{url}\"\n{keys}\n");
    std::fs::write(here.join("sapwood.toml"), text).unwrap();
    let mut command = sapwood(&here, &["serve", "--listen", "127.0.0.1:0"]);
    command.envs(variables.iter().copied());
    let mut child = command.spawn().unwrap();
    let head = head(&upstream);
    child.kill().unwrap();
    child.wait().unwrap();
    head
}

#[test]
fn d_46_the_servers_own_key_is_sent_to_no_upstream() {
    let own = ("SAPWOOD_API_KEY", "hush-own");
    let shared = ("SAPWOOD_CLIENT_KEY", "hush-shared");
    let line = |key: &str| format!("authorization: Bearer {key}\r\n");
    for (name, scheme, path) in [
        ("wire-triton", "triton+http", ""),
        ("wire-socket", "evergreen+ws", ""),
        ("wire-lmtp", "lmtp", "/m"),
    ] {
        let head = shown(name, scheme, path, "", &[own]);
        assert!(!head.contains("hush"), "{head}");
        assert!(!head.to_lowercase().contains("authorization"), "{head}");
        let head = shown(name, scheme, path, "", &[own, shared]);
        assert!(head.contains(&line("hush-shared")), "{head}");
        assert!(!head.contains("hush-own"), "{head}");
        let head = shown(name, scheme, path, "key = \"hush-its\"", &[own, shared]);
        assert!(head.contains(&line("hush-its")), "{head}");
        assert!(
            !head.contains("hush-own") && !head.contains("hush-shared"),
            "{head}"
        );
    }
    // A key in the address is the only one that is sent.
    let head = shown("wire-query", "lmtp", "/m?key=hush-its", "", &[own, shared]);
    assert!(head.starts_with("GET /?key=hush-its "), "{head}");
    assert!(
        !head.contains("hush-own") && !head.contains("hush-shared"),
        "{head}"
    );
}

/// Over gRPC headers are compressed, so a server shows what it received: it refuses callers without its key.
#[test]
fn d_46_the_servers_own_key_is_not_sent_over_grpc() {
    let back = Serving::start(&with_echo("grpc-back", "[auth]\nkey = \"hush\""), &[]);
    let here = folder("grpc-front");
    let serve = |keys: &str, variable: &str| {
        let text = format!("[[upstreams]]\nurl = \"evergreen+{}\"\n{keys}\n", back.url);
        std::fs::write(here.join("sapwood.toml"), text).unwrap();
        let mut command = sapwood(&here, &["serve", "--listen", "127.0.0.1:0"]);
        command.env(variable, "hush");
        command
    };
    let ended = run_with(serve("", "SAPWOOD_API_KEY"), "");
    assert!(ended.code == 1, "{ended:?}");
    assert!(ended.err.contains("refused access"), "{ended:?}");
    for (keys, variable) in [
        ("", "SAPWOOD_CLIENT_KEY"),
        ("key = \"hush\"", "SAPWOOD_API_KEY"),
        ("key_file = \"key\"", "SAPWOOD_API_KEY"),
    ] {
        std::fs::write(here.join("key"), "hush\n").unwrap();
        Serving::of(serve(keys, variable)).wait_for("joined an upstream");
    }
    let mut call = sapwood(&here, &["models", "--server", &back.url]);
    call.env("SAPWOOD_API_KEY", "hush");
    let ended = run_with(call, "");
    assert!(
        ended.code == 1 && ended.err.contains("SAPWOOD_CLIENT_KEY"),
        "{ended:?}"
    );
    let mut call = sapwood(&here, &["models", "--server", &back.url]);
    call.env("SAPWOOD_CLIENT_KEY", "hush");
    assert_eq!(run_with(call, "").code, 0);
}

/// A server between a client and four upstreams, each with a key of its own, everything logged: no key and no prompt shows.
#[test]
fn d_46_no_key_is_in_the_most_detailed_log_or_in_an_error() {
    let key =
        |key: &str| format!("[auth]\nkey = \"{key}\"\nquery_key = true\n[drain]\ngrace = \"0s\"");
    let loud = ["--log", "trace"];
    // Over LMTP comes a model of its own: it takes no prompt of text, and a name is the first's that joins with it.
    let models = format!(
        "{}\n[[models]]\nname = \"crow\"\nbackend = \"scripted\"\nscripted = {{ script = \"echo\" }}\n",
        key("hush-1")
    );
    let mut back = Serving::start(&with_echo("loud-back", &models), &loud);
    back.wait_for("loaded");
    back.wait_for("loaded");
    let here = folder("loud-front");
    let address = back.address();
    let text = format!(
        "{}\n[[upstreams]]\nurl = \"evergreen+{}\"\nkey = \"hush-1\"\n[[upstreams]]\nurl = \"lmtp://{address}/crow?key=hush-1\"\n\
         [[upstreams]]\nurl = \"triton+http://{address}\"\nkey = \"hush-1\"\n[[upstreams]]\nurl = \"evergreen+ws://{address}\"\n\
         key = \"hush-1\"\n",
        key("hush-2"),
        back.url,
    );
    std::fs::write(here.join("sapwood.toml"), text).unwrap();
    let mut front = Serving::start(&here, &loud);
    // Each of the four has shown its key.
    for _ in 0..4 {
        front.wait_for("joined an upstream");
    }
    let away = folder("loud-client");
    for (secret, code) in [("hush-2", 0), ("hush-3", 1)] {
        let call = [
            "run",
            "GENERATE",
            "--input",
            "prompt=whispered",
            "--target",
            "parrot",
            "--server",
            &front.url,
        ];
        let mut call = sapwood(&away, &[&call[..], &loud].concat());
        call.env("SAPWOOD_CLIENT_KEY", secret);
        let ended = run_with(call, "");
        assert_eq!(ended.code, code, "{ended:?}");
        no_secret(&ended);
        assert!(!ended.err.contains("whispered"), "{ended:?}");
    }
    front.get("/lmtp?key=hush-2", "");
    let (_, logs) = [front, back]
        .map(end)
        .into_iter()
        .fold((0, String::new()), |all, one| {
            (all.0.max(one.0), all.1 + &one.1)
        });
    assert!(logs.len() > 10_000 && logs.contains("TRACE"), "{logs}");
    assert!(!logs.contains("hush"), "{}", around(&logs));
    assert!(!logs.contains("whispered"), "{logs}");
}

fn end(serving: Serving) -> (i32, String) {
    serving.signal(Signal::TERM);
    serving.end()
}

fn around(text: &str) -> &str {
    text.lines()
        .find(|line| line.contains("hush"))
        .unwrap_or_default()
}

fn no_secret(ended: &Ended) {
    let all = [&*ended.out, &*ended.err].concat();
    assert!(!all.contains("hush"), "{}", around(&all));
}

#[test]
fn d_46_errors_and_listings_show_no_key_of_an_address() {
    let here = folder("quiet");
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let server = |url: &str| url.replace("ADDRESS", &free.to_string());
    for url in [
        "http://hush@ADDRESS",
        "ws://ADDRESS/?key=hush",
        "ftp://hush@ADDRESS",
    ] {
        let ended = run(&here, &["models", "--server", &server(url)]);
        assert_ne!(ended.code, 0, "{ended:?}");
        no_secret(&ended);
        let ended = run(&here, &["config", "show", "--server", &server(url)]);
        assert_eq!(ended.code, 0, "{ended:?}");
        no_secret(&ended);
        let ended = run(
            &here,
            &[
                "doctor",
                "--listen",
                "127.0.0.1:0",
                "--server",
                &server(url),
            ],
        );
        no_secret(&ended);
    }
    for url in ["lmtp://ADDRESS/m?key=hush&hush", "x://ADDRESS?key=hush"] {
        let serve = ["serve", "--listen", "127.0.0.1:0", "--upstream"];
        let ended = run(&here, &[&serve[..], &[&server(url)]].concat());
        assert_eq!(ended.code, 2, "{ended:?}");
        no_secret(&ended);
    }
    let ended = run(
        &here,
        &["lmtp", "--connect", &server("ws://ADDRESS/lmtp?key=hush")],
    );
    assert_eq!(ended.code, 4, "{ended:?}");
    no_secret(&ended);
}

/// 0.0.0.0 is this machine too, but not by its name.
#[test]
fn d_46_a_key_that_goes_unencrypted_to_another_machine_is_warned_of() {
    let mut back = Serving::start(&with_echo("clear-back", "[auth]\nkey = \"hush\""), &[]);
    back.wait_for("loaded");
    let here = folder("clear-client");
    for (host, key, warned) in [
        ("0.0.0.0", "hush", true),
        ("127.0.0.1", "hush", false),
        ("0.0.0.0", "", false),
    ] {
        let url = format!("http://{host}:{}", back.address().port());
        let ended = run(&here, &["models", "--server", &url, "--api-key", key]);
        assert_eq!(ended.code, i32::from(key.is_empty()), "{ended:?}");
        assert_eq!(ended.err.contains("unencrypted"), warned, "{ended:?}");
        no_secret(&ended);
    }
}

/// What Kubernetes defines for a service that is called `sapwood`, and a slip of the pen.
#[test]
fn d_46_unknown_variables_do_not_prevent_the_start() {
    let here = with_echo("kubernetes", "[drain]\ngrace = \"0s\"");
    let mut command = sapwood(&here, &["serve", "--listen", "127.0.0.1:0"]);
    for (name, value) in [
        ("SAPWOOD_SERVICE_HOST", "10.96.0.7"),
        ("SAPWOOD_SERVICE_PORT", "8000"),
        ("SAPWOOD_PORT", "tcp://10.96.0.7:8000"),
        ("SAPWOOD_PORT_8000_TCP", "tcp://10.96.0.7:8000"),
        ("SAPWOOD_PORT_8000_TCP_ADDR", "10.96.0.7"),
        ("SAPWOOD_LIMITS__CONECTIONS", "hush"),
    ] {
        command.env(name, value);
    }
    let mut child = command.spawn().unwrap();
    let mut log = String::new();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    while !log.contains("\"listening\"") {
        assert_ne!(lines.read_line(&mut log).unwrap(), 0, "{log}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        log.contains("did you mean SAPWOOD_LIMITS__CONNECTIONS?"),
        "{log}"
    );
    assert_eq!(log.matches("\"WARN\"").count(), 1, "{log}");
    assert!(!log.contains("hush"), "{log}");
}

#[test]
fn d_46_a_key_of_digits_is_read_as_text() {
    let here = with_echo("digits", "");
    let mut command = sapwood(&here, &["serve", "--listen", "127.0.0.1:0"]);
    command.env("SAPWOOD_API_KEY", "0123");
    let serving = Serving::of(command);
    for (key, status) in [("0123", "200"), ("123", "401"), ("83", "401")] {
        let answer = serving.get("/version", &format!("authorization: Bearer {key}\r\n"));
        assert_eq!(&answer[9..12], status, "{key}");
    }
}

/// The log is a pipe without a reader: the server keeps answering, and ends on a signal.
#[test]
fn c_5_an_unread_log_does_not_block_the_server() {
    let here = with_echo("stalled-log", "[drain]\ngrace = \"0s\"");
    let serving = Serving::start(&here, &["--log", "trace"]);
    let ask = |path: &str| {
        let mut socket = TcpStream::connect(serving.address()).unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    };
    let dropped = || {
        let text = ask("/metrics");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("sapwood_log_lines_dropped_total "));
        line.unwrap().parse::<u64>().unwrap()
    };
    // A pipe takes 64 KiB and the queue 1 MiB.
    while dropped() == 0 {
        for _ in 0..50 {
            assert!(ask("/livez").starts_with("HTTP/1.1 200"));
        }
    }
    serving.signal(Signal::TERM);
    // A reader that returns learns how many lines are missing.
    let (code, log) = serving.end();
    assert_eq!(code, 0);
    assert!(log.contains("log lines were dropped"), "{}", log.len());
}

/// The shell's limits hold for what it starts.
fn limited(folder: &Path, files: u32) -> std::process::Command {
    let mut command = std::process::Command::new("/bin/sh");
    let script = format!("ulimit -n {files}; exec \"$0\" serve --listen 127.0.0.1:0");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_sapwood")]);
    command.current_dir(folder).env_clear();
    command.stdout(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::piped());
    command
}

#[test]
fn d_31_few_file_descriptors_are_shared_out_or_refused() {
    let here = with_echo("few-files", "");
    let ended = run_with(limited(&here, 40), "");
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(
        ended.err.contains("ulimit -n") && ended.err.lines().count() == 1,
        "{ended:?}"
    );
    let serving = Serving::of(limited(&here, 256));
    // More than one at a time.
    let retained: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(serving.address()).unwrap())
        .collect();
    assert!(serving.get("/livez", "").starts_with("HTTP/1.1 200"));
    drop(retained);
}
