//! Limits of request heads, and what is counted of malformed requests.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sapwood_server::http::body_budget;
use sapwood_server::server;
use sapwood_tests::http::{Wire, head, post};
use sapwood_tests::{Running, key, spawned, until, with_model};
use tokio::net::TcpStream;

use crate::lmtp::{of_parrot, parrot};

/// The limit of header lines.
const MOST: usize = 100;

#[tokio::test]
async fn oa_911_the_limit_of_header_lines_is_the_same_over_each_version_of_http() {
    let server = of_parrot().await;
    for (count, status) in [(MOST, 200), (MOST + 1, 431)] {
        let names: Vec<_> = (0..count).map(|index| format!("x-{index}")).collect();
        let bare = head("GET", "/version", &[]).matches("\r\n").count() - 2;
        let lines: Vec<_> = names[bare..]
            .iter()
            .map(|name| format!("{name}: 1"))
            .collect();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let mut wire = Wire::connect(server.address).await;
        let answer = wire.ask(head("GET", "/version", &lines)).await;
        assert_eq!(answer.head.status, status, "HTTP/1, {count}");
        if status == 431 {
            assert!(
                answer.text().contains("limits.headers"),
                "{}",
                answer.text()
            );
            assert!(answer.head.header("x-request-id").is_some());
        }
        let socket = TokioIo::new(TcpStream::connect(server.address).await.unwrap());
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), socket)
            .await
            .unwrap();
        tokio::spawn(connection);
        let uri = format!("http://{}/version", server.address);
        let request = names.iter().fold(http::Request::get(uri), |request, name| {
            request.header(name, "1")
        });
        let answer = sender
            .send_request(request.body(Empty::<Bytes>::new()).unwrap())
            .await
            .unwrap();
        assert_eq!(answer.status().as_u16(), status, "HTTP/2, {count}");
        assert!(answer.headers().contains_key("x-request-id"));
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(
            String::from_utf8_lossy(&body).contains("limits.headers"),
            status == 431
        );
    }
}

#[tokio::test]
async fn malformed_requests_are_counted() {
    let server = of_parrot().await;
    let rejected = server
        .shared
        .metrics
        .rejected
        .with_label_values(&["malformed"]);
    let many: String = (0..3 * MOST)
        .map(|index| format!("x-{index}: 1\r\n"))
        .collect();
    let many = format!("GET / HTTP/1.1\r\nhost: localhost\r\n{many}\r\n");
    for (count, (sent, status)) in [("GET  / HTTP/1.1\r\n\r\n", 400), (&*many, 431)]
        .into_iter()
        .enumerate()
    {
        let answer = Wire::connect(server.address).await.ask(sent).await;
        assert_eq!(answer.head.status, status);
        until("it is counted", || rejected.get() == count as u64 + 1).await;
    }
}

/// The body of a refused request is read, so that the client gets the response and the connection stays usable: up to
/// the limit for a caller with a key, and up to 1 MiB for others.
#[tokio::test]
async fn d_35_the_body_of_a_refused_request_is_drained() {
    const STRANGER: usize = 1 << 20;
    const MOST: usize = 3 << 20;
    let kernel = with_model(spawned(parrot()));
    let config = server::Config {
        drain_bytes: MOST as u64,
        body_budget: body_budget::Config {
            total: 100_000,
            each: 100_000,
            wait: Duration::ZERO,
        },
        ..server::Config::default()
    };
    let server = Running::start_with(config, kernel, Default::default(), vec![key("anna", "one")]);
    let server = server.await;
    let generate = "/v2/models/parrot/generate";
    let wrong = "authorization: Bearer wrong";
    let anna = "authorization: Bearer one";
    for (path, headers, status, most) in [
        (generate, [wrong, "x: y"], 401, STRANGER),
        (generate, [anna, "origin: http://evil"], 403, STRANGER),
        ("/lmtp", [wrong, "x: y"], 401, STRANGER),
        ("/none", [wrong, "x: y"], 401, STRANGER),
        ("/none", [anna, "x: y"], 404, MOST),
        ("/v2/none", [anna, "x: y"], 404, MOST),
        ("/livez", [anna, "x: y"], 405, MOST),
        ("/v2/models/none/generate", [anna, "x: y"], 400, MOST),
        (generate, [anna, "content-encoding: br"], 400, MOST),
        (generate, [anna, "x: y"], 503, MOST),
        ("/lmtp", [anna, "content-type: application/json"], 503, MOST),
    ] {
        for (bytes, goes_on) in [(most, true), (most + (64 << 10), false)] {
            let mut wire = Wire::connect(server.address).await;
            wire.try_send(&post(path, &headers, &vec![b'x'; bytes]))
                .await;
            let answer = wire.answer().await;
            let asked = format!("{path} {headers:?} {bytes}");
            assert_eq!(answer.head.status, status, "{asked}");
            assert!(!answer.text().is_empty(), "{asked}");
            if goes_on {
                assert_eq!(wire.get("/livez").await.head.status, 200, "{asked}");
            }
        }
    }
}
