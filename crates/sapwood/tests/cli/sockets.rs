//! Listening on other sockets than a TCP port: Unix sockets, and sockets that systemd passes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::process::{Serving, run, sapwood};
use crate::server::with_echo;

fn asks(path: &Path) -> String {
    let mut socket = UnixStream::connect(path).unwrap();
    let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn oa_912_a_unix_socket_serves_without_a_key_and_is_removed_by_the_drain() {
    let here = with_echo("unix-socket", "[drain]\ngrace = \"0s\"");
    let path = here.join("s");
    let serving = Serving::of(sapwood(&here, &["serve", "--listen", "unix:s"]));
    assert_eq!(serving.url, "unix:s");
    assert!(asks(&path).starts_with("HTTP/1.1 200"));
    let second = run(&here, &["serve", "--listen", "unix:s"]);
    assert_eq!(second.code, 6, "{second:?}");
    assert!(
        second.err.contains("in use") && second.err.contains("unix:PATH"),
        "{second:?}"
    );
    assert!(
        asks(&path).starts_with("HTTP/1.1 200"),
        "the first one was not disturbed"
    );
    serving.signal(Signal::TERM);
    assert_eq!(serving.end().0, 0);
    assert!(!path.exists());
}

/// TR-1001: a port for metrics.
#[test]
fn tr_908_additional_ports_serve_one_purpose_and_the_common_port_everything() {
    let here = with_echo("own-ports", "");
    let port = "127.0.0.1:0";
    let own = ["--listen-grpc", port, "--listen-metrics", port];
    let mut serving = Serving::start(&here, &own);
    let [grpc, metrics] = ["gRPC", "metrics"].map(|purpose| {
        let line = serving.wait_for("listening too");
        assert_eq!(line["purpose"], purpose);
        line["url"].as_str().unwrap().to_owned()
    });
    let get = |url: &str, path: &str| {
        let mut socket = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
        write!(
            socket,
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer[9..12].to_owned()
    };
    for (url, path, status) in [
        (&metrics, "/metrics", "200"),
        (&metrics, "/livez", "200"),
        (&metrics, "/v2", "404"),
        (&grpc, "/metrics", "415"),
        (&grpc, "/", "415"),
        (&serving.url, "/metrics", "200"),
        (&serving.url, "/v2", "200"),
    ] {
        assert_eq!(get(url, path), status, "{url}{path}");
    }
    // Our own client uses gRPC.
    for (url, code) in [(&grpc, 0), (&serving.url, 0), (&metrics, 5)] {
        let ended = run(&here, &["models", "--server", url]);
        assert_eq!(ended.code != 0, code != 0, "{url}: {ended:?}");
    }
}

/// `sapwood serve --listen systemd` with `socket` as the third file, as systemd has it.
fn activated(here: &Path, socket: OwnedFd) -> Command {
    let mut command = Command::new("/bin/sh");
    let script = "exec 3<&0; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" serve --listen systemd";
    command.args(["-c", script, env!("CARGO_BIN_EXE_sapwood")]);
    command
        .current_dir(here)
        .env_clear()
        .stdin(Stdio::from(socket));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn oa_912_a_socket_that_systemd_passes_is_served() {
    let here = with_echo("activation", "");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let serving = Serving::of(activated(&here, tcp.into()));
    assert_eq!(serving.address(), address);
    assert!(serving.get("/livez", "").starts_with("HTTP/1.1 200"));
    drop(serving);
    let path = here.join("s");
    let unix = UnixListener::bind(&path).unwrap();
    let serving = Serving::of(activated(&here, unix.into()));
    assert!(asks(&path).starts_with("HTTP/1.1 200"));
    serving.signal(Signal::INT);
    drop(serving);
    assert!(path.exists(), "it is systemd's");
    let none = run(&here, &["serve", "--listen", "systemd"]);
    assert!(
        none.code == 6 && none.err.contains("LISTEN_FDS"),
        "{none:?}"
    );
}
