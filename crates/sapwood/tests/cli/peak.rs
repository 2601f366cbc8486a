//! The most memory that a server takes while it is sent what is small and grows, and whether it still answers others (D-47).

mod rows;
mod wire;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use self::wire::{Http2, Way, frame, grpc, gzip, post, upgraded, zstd_of_zeros};
use crate::process::Serving;
use crate::server::with_echo;

/// What a server may take beyond what it takes idle.
const MOST: usize = 256 << 20;
/// What others may have to wait. The bound of a release on a machine of its own is 100 ms; this is a debug build, beside which
/// others are built and tested. What was measured is printed.
const LIVE: Duration = Duration::from_secs(10);

const GENERATE: &str = "/v2/models/parrot/generate";
const INFER: &str = "/v2/models/parrot/infer";
const MODEL_INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const SESSION: &str = "/evergreen.v2.EvergreenService/StartSession";

struct Victim {
    serving: Serving,
    idle: usize,
}

impl Victim {
    fn start(name: &str) -> Self {
        let here = with_echo(name, "[limits]\nbody_bytes_wait = \"1s\"");
        let serving = Serving::start(&here, &[]);
        // What is set up once, at each face.
        Way::Http(GENERATE, "").send(serving.address(), br#"{"text_input":"x"}"#);
        let idle = status(&serving, "VmRSS");
        Self { serving, idle }
    }

    fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// Runs `attack` and looks at what it costs.
    #[expect(clippy::print_stdout, reason = "the figures are for whoever runs it")]
    fn under(&self, what: &str, attack: impl FnOnce()) {
        std::fs::write(self.file("clear_refs"), "5").unwrap();
        let over = AtomicBool::new(false);
        let slowest = thread::scope(|scope| {
            let probe = scope.spawn(|| {
                let mut slowest = Duration::ZERO;
                while !over.load(Ordering::Relaxed) {
                    slowest = slowest.max(alive(self.address()));
                }
                slowest
            });
            attack();
            over.store(true, Ordering::Relaxed);
            probe.join().unwrap()
        });
        let peak = status(&self.serving, "VmHWM").saturating_sub(self.idle);
        println!(
            "{what}: {} MiB above idle, /livez within {slowest:?}",
            peak >> 20
        );
        assert!(peak < MOST, "{what}: {} MiB above idle", peak >> 20);
        assert!(slowest < LIVE, "{what}: /livez after {slowest:?}");
    }

    fn file(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.serving.id())
    }
}

fn status(serving: &Serving, name: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{}/status", serving.id())).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    let kib = line.split_whitespace().nth(1).unwrap();
    kib.parse::<usize>().unwrap() << 10
}

/// How long `/livez` takes.
fn alive(address: SocketAddr) -> Duration {
    let began = Instant::now();
    let mut socket = TcpStream::connect(address).unwrap();
    let request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    socket.write_all(request).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    began.elapsed()
}

/// Runs `each` so many times at once.
fn at_once<T>(count: usize, each: impl Fn(usize) -> T + Sync) -> Vec<T>
where
    T: Send,
{
    thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = (0..count)
            .map(|index| scope.spawn(move || each(index)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn rows_under(name: &str, rows: Vec<rows::Row>) {
    let victim = Victim::start(name);
    for (what, way, bytes) in rows {
        victim.under(&format!("{what} ({} bytes, {way:?})", bytes.len()), || {
            at_once(4, |_| way.send(victim.address(), &bytes));
        });
    }
}

#[test]
fn d_47_lists_and_nesting_of_json_requests_take_little_memory() {
    rows_under("peak-http", rows::http());
}

#[test]
fn d_47_lists_of_grpc_messages_take_little_memory() {
    rows_under("peak-grpc", rows::grpc());
}

#[test]
fn d_47_lists_and_nesting_of_lmtp_messages_take_little_memory() {
    rows_under("peak-lmtp", rows::lmtp());
}

#[test]
fn d_47_lists_and_nesting_of_evergreen_messages_take_little_memory() {
    rows_under("peak-evergreen", rows::evergreen());
}

/// What the bombs unpack to; a body may have a little more.
const UNPACKED: usize = 63 << 20;

#[test]
fn d_47_thirty_two_bombs_of_bodies_at_once_take_little_memory() {
    let victim = Victim::start("peak-bombs");
    for (way, bytes) in [
        (
            Way::Http(GENERATE, "content-encoding: gzip\r\n"),
            gzip(&vec![b' '; UNPACKED]),
        ),
        (
            Way::Http(INFER, "content-encoding: zstd\r\n"),
            zstd_of_zeros(UNPACKED),
        ),
    ] {
        let what = format!("32 bombs of {} bytes, {way:?}", bytes.len());
        victim.under(&what, || {
            at_once(32, |_| way.send(victim.address(), &bytes));
        });
    }
}

#[test]
fn d_47_thirty_two_bombs_of_one_text_at_once_take_little_memory() {
    let mut text = vec![0x12, 0x80, 0x80, 0x80, 0x1f];
    text.resize(text.len() + (62 << 20), b'x');
    grpc_bombs("peak-texts", &grpc(&text, true));
}

#[test]
fn d_47_thirty_two_bombs_of_unknown_fields_take_little_memory() {
    let zeros = gzip(&vec![0; UNPACKED]);
    let length = u32::try_from(zeros.len()).unwrap().to_be_bytes();
    grpc_bombs("peak-fields", &[&[1][..], &length, &zeros].concat());
}

fn grpc_bombs(name: &str, message: &[u8]) {
    let victim = Victim::start(name);
    for path in [MODEL_INFER, SESSION] {
        let what = format!("32 bombs of {} bytes, {path}", message.len());
        victim.under(&what, || {
            at_once(32, |_| {
                let mut http2 = Http2::connect(victim.address());
                http2.open(1, path, true);
                http2.data(1, message, true);
                http2.wait();
            });
        });
    }
}

#[test]
fn d_47_incomplete_bodies_take_no_more_than_the_budget() {
    const BYTES: usize = 20_000_000;
    let victim = Victim::start("peak-slow");
    let part = vec![b' '; 1 << 20];
    victim.under("40 bodies without their last byte", || {
        let open = at_once(40, |_| {
            let mut socket = post(victim.address(), GENERATE, "", BYTES);
            let mut left = BYTES - 1;
            while left > 0 {
                let now = left.min(part.len());
                // Those who are refused are not read on.
                if socket.write_all(&part[..now]).is_err() {
                    break;
                }
                left -= now;
            }
            socket
        });
        // All of them have sent everything that they send.
        alive(victim.address());
        drop(open);
    });
}

#[test]
fn d_47_incomplete_messages_take_no_more_than_the_budget() {
    let victim = Victim::start("peak-slow-messages");
    let part = vec![b' '; 1 << 20];
    victim.under("40 messages of WebSockets without their last byte", || {
        let open = at_once(40, |_| {
            let mut socket = upgraded(victim.address(), "/evergreen", "evergreen.v2.json");
            let length = 15 << 20;
            let _ = socket.write_all(&frame(0x81, length));
            for _ in 0..14 {
                if socket.write_all(&part).is_err() {
                    break;
                }
            }
            socket
        });
        drop(open);
    });
}

#[test]
fn d_47_waiting_http2_streams_take_little_memory() {
    let victim = Victim::start("peak-streams");
    victim.under("10 connections with 100 streams that wait", || {
        let open = at_once(10, |_| {
            let mut http2 = Http2::connect(victim.address());
            for stream in 0..100 {
                let path = [MODEL_INFER, SESSION][stream as usize % 2];
                http2.open(1 + 2 * stream, path, false);
                // A message of 60 MB begins.
                let begun = [&[0, 3, 0x93, 0x87, 0][..], &[0; 40_000]].concat();
                http2.data(1 + 2 * stream, &begun, false);
            }
            http2
        });
        alive(victim.address());
        drop(open);
    });
}

#[test]
fn d_47_many_headers_take_little_memory() {
    let victim = Victim::start("peak-headers");
    let headers = "a: b\r\n".repeat(10_000);
    let long = format!("{}: {}\r\n", "n".repeat(30_000), "v".repeat(30_000));
    victim.under("many and long headers", || {
        at_once(64, |index| {
            let headers = [&headers, &long][index % 2];
            let mut socket = TcpStream::connect(victim.address()).unwrap();
            let head = format!("POST {GENERATE} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
            let _ = socket.write_all(head.as_bytes());
            let _ = socket.set_read_timeout(Some(Duration::from_secs(5)));
            let _ = socket.read(&mut [0; 1024]);
        });
    });
}
