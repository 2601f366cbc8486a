//! What an OpenTelemetry collector receives from a server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;

use rustix::process::Signal;

use crate::process::{Serving, run};
use crate::server::with_echo;

/// Accepts exports until one has spans; returns its head and body.
fn spans(collector: &TcpListener) -> (String, Vec<u8>) {
    loop {
        let (socket, _) = collector.accept().unwrap();
        let mut reader = BufReader::new(socket);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(reader.read_line(&mut head).unwrap(), 0, "{head}");
        }
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.unwrap().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        reader.get_mut().write_all(answer.as_bytes()).unwrap();
        if head.starts_with("POST /v1/traces ") {
            return (head, body);
        }
    }
}

#[test]
fn oa_803_remaining_spans_are_exported_before_the_server_ends() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = collector.local_addr().unwrap();
    let trace = format!(
        "[trace]\nendpoint = \"http://{address}\"\nprotocol = \"http\"\nheaders = [\"x-key: hush\"]\n[drain]\ngrace = \"0s\""
    );
    let here = with_echo("traces", &trace);
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let call = [
        "run",
        "GENERATE",
        "--input",
        "prompt=velvet",
        "--server",
        &serving.url,
    ];
    let ended = run(&here, &call);
    assert_eq!((ended.code, ended.out.as_str()), (0, "velvet"), "{ended:?}");
    serving.signal(Signal::TERM);
    let (head, body) = spans(&collector);
    assert!(head.contains("x-key: hush\r\n"), "{head}");
    let holds = |text: &str| body.windows(text.len()).any(|part| part == text.as_bytes());
    assert!(holds("chat parrot") && holds("gen_ai.usage.output_tokens"));
    assert!(
        !holds("velvet"),
        "content is told only where that is switched on"
    );
    // Later exports find the port closed, and delay nothing.
    drop(collector);
    assert_eq!(serving.end().0, 0);
}
