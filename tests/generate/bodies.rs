//! How a body arrives: too large, in pieces, compressed, refused before it was needed (TR-208, TR-209, TR-315, TR-316).

use std::io::Write;
use std::time::Duration;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use sapwood_engine::scripted::Script;
use sapwood_proto::generate::RequestLimits;
use sapwood_server::faces::generate::Config;
use sapwood_server::server;
use sapwood_tests::http::{Wire, head, post};
use sapwood_tests::{Faces, Running, in_time, until};

use super::{demo, error, kernel, script};

const PATH: &str = "/v2/models/m/generate";

async fn limited(config: Config) -> Running {
    Running::generating(kernel(&[("m", script(Script::Echo))]), config).await
}

fn small() -> Config {
    Config {
        limits: RequestLimits {
            input_bytes: 1_000,
            ..RequestLimits::default()
        },
        ..Config::default()
    }
}

/// A body of exactly `bytes` bytes.
fn body(bytes: usize) -> Vec<u8> {
    let text = "x".repeat(bytes - r#"{"text_input":""}"#.len());
    format!(r#"{{"text_input":"{text}"}}"#).into_bytes()
}

fn too_large(bytes: usize) -> String {
    format!(
        "request JSON size of {bytes} bytes exceeds the maximum allowed input size of 1000 bytes. Use \
         --http-max-input-size to increase the limit."
    )
}

/// The same bytes in chunks of `size`.
fn chunked(path: &str, headers: &[&str], body: &[u8], size: usize) -> Vec<u8> {
    let lines: Vec<&str> = headers
        .iter()
        .copied()
        .chain(["transfer-encoding: chunked"])
        .collect();
    let mut request = head("POST", path, &lines).into_bytes();
    for chunk in body.chunks(size) {
        request.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        request.extend_from_slice(chunk);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"0\r\n\r\n");
    request
}

/// TR-207
#[tokio::test]
async fn tr_208_a_body_that_is_too_large_is_drained_and_the_connection_stays_open() {
    let server = limited(small()).await;
    let mut wire = Wire::connect(server.address).await;
    assert_eq!(
        wire.ask(post(PATH, &[], &body(1_000))).await.summary().0,
        200
    );
    for bytes in [1_001, 3_000_000] {
        let answer = wire.ask(post(PATH, &[], &body(bytes))).await;
        assert_eq!(
            (answer.summary().0, error(&answer)),
            (400, too_large(bytes))
        );
        let answer = wire.ask(chunked(PATH, &[], &body(bytes), 10_000)).await;
        assert_eq!(
            (answer.summary().0, error(&answer)),
            (400, too_large(bytes))
        );
    }
    // Refused before the body was needed.
    for (path, status) in [
        ("/v2/models/x/generate", 400),
        ("/v2/none", 404),
        ("/v2/models/m", 405),
    ] {
        assert_eq!(
            wire.ask(post(path, &[], &body(3_000_000)))
                .await
                .summary()
                .0,
            status,
            "{path}"
        );
    }
    assert_eq!(
        wire.ask(post(PATH, &[], &body(1_000))).await.summary().0,
        200
    );
}

#[tokio::test]
async fn tr_208_above_the_drain_limit_the_connection_closes_after_the_response() {
    let faces = Faces {
        generate: small(),
        ..Faces::default()
    };
    let config = server::Config {
        drain_bytes: 10_000,
        ..server::Config::default()
    };
    let echo = kernel(&[("m", script(Script::Echo))]);
    let server = Running::start_faces(config, echo, faces, Vec::new()).await;
    let mut wire = Wire::connect(server.address).await;
    let answer = wire.ask(post(PATH, &[], &body(10_000))).await;
    assert_eq!(answer.summary().0, 400);
    let mut wire = Wire::connect(server.address).await;
    wire.send(head("POST", PATH, &["content-length: 50000000"]))
        .await;
    while wire.try_send(&[b'x'; 10_000]).await {
        // It is enough to show that the server stops reading.
        if wire.answered().await {
            break;
        }
    }
    assert_eq!(wire.answer().await.summary().0, 400);
    // A client that waits for `100 Continue` gets the error at once.
    let mut wire = Wire::connect(server.address).await;
    let asking = ["content-length: 50000000", "expect: 100-continue"];
    let answer = wire.ask(head("POST", PATH, &asking)).await;
    assert_eq!(
        (answer.summary().0, error(&answer)),
        (400, too_large(50_000_000))
    );
}

fn packed(kind: &str, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let level = Compression::default();
    match kind {
        "gzip" => GzEncoder::new(&mut out, level).write_all(bytes).unwrap(),
        "zstd" => out = compress_to_vec(bytes, CompressionLevel::Fastest),
        "deflate" => ZlibEncoder::new(&mut out, level).write_all(bytes).unwrap(),
        _ => DeflateEncoder::new(&mut out, level)
            .write_all(bytes)
            .unwrap(),
    }
    out
}

#[tokio::test]
async fn tr_209_bodies_may_be_compressed_within_the_same_limit() {
    let server = limited(small()).await;
    let mut wire = Wire::connect(server.address).await;
    for (kind, name) in [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("raw", "Deflate"),
        ("gzip", "x-gzip"),
        ("zstd", "zstd"),
    ] {
        let encoding = format!("content-encoding: {name}");
        let small = wire
            .ask(post(PATH, &[&encoding], &packed(kind, &body(1_000))))
            .await;
        assert_eq!(small.summary().0, 200, "{kind}: {}", small.text());
        let large = wire
            .ask(post(PATH, &[&encoding], &packed(kind, &body(100_000))))
            .await;
        assert_eq!(
            (large.summary().0, error(&large)),
            (400, too_large(1_001)),
            "{kind}"
        );
        let corrupt = wire.ask(post(PATH, &[&encoding], b"\x1f\x8bnothing")).await;
        assert_eq!(corrupt.summary().0, 400, "{kind}");
        assert!(error(&corrupt).starts_with("the request body is not valid"));
    }
    let answer = wire
        .ask(post(PATH, &["content-encoding: br"], &body(100)))
        .await;
    let received = "Unsupported content-encoding 'br', supported: identity, gzip, deflate, zstd.";
    assert_eq!(
        (answer.summary().0, error(&answer).as_str()),
        (400, received)
    );
    let infer = post("/v2/models/m/infer", &["content-encoding: br"], b"{}");
    let answer = wire.ask(infer).await;
    let received = answer.head.header("accept-encoding");
    assert_eq!(
        (answer.summary().0, received.as_deref()),
        (501, Some("gzip, deflate, zstd"))
    );
    let server = limited(Config {
        compat: true,
        ..Config::default()
    })
    .await;
    let mut wire = Wire::connect(server.address).await;
    let answer = wire
        .ask(post(
            PATH,
            &["content-encoding: gzip"],
            &packed("gzip", &body(100)),
        ))
        .await;
    assert_eq!(
        error(&answer),
        "Unsupported content-encoding, only 'identity' is supported."
    );
    assert_eq!(
        wire.ask(post(PATH, &["content-encoding: identity"], &body(100)))
            .await
            .summary()
            .0,
        200
    );
}

#[tokio::test]
async fn tr_315_a_compressed_binary_body_that_is_too_large_is_refused_as_a_body() {
    let server = limited(small()).await;
    let mut wire = Wire::connect(server.address).await;
    let headers = [
        "content-encoding: gzip",
        "inference-header-content-length: 20",
    ];
    let path = "/v2/models/m/infer";
    let answer = wire
        .ask(post(path, &headers, &packed("gzip", &body(3_000))))
        .await;
    assert_eq!(answer.summary().0, 400);
    let text = error(&answer);
    assert!(
        text.starts_with("request body size of 1001 bytes exceeds"),
        "{text}"
    );
}

#[tokio::test]
async fn tr_316_a_body_of_too_many_chunks_is_refused() {
    let server = limited(Config {
        http_chunks: 100,
        ..Config::default()
    })
    .await;
    let mut wire = Wire::connect(server.address).await;
    assert_eq!(
        wire.ask(chunked(PATH, &[], &body(100), 1))
            .await
            .summary()
            .0,
        200
    );
    let answer = wire.ask(chunked(PATH, &[], &body(101), 1)).await;
    let received = "Chunked request body exceeds maximum of 100 non-empty chunks. Send fewer or larger HTTP chunks.";
    assert_eq!(
        (answer.summary().0, error(&answer).as_str()),
        (400, received)
    );
}

/// The response does not depend on how a request is split; no body gives a status of 500 or above.
#[tokio::test]
async fn tr_301_any_split_of_a_body_gives_the_same_response() {
    let server = demo().await;
    let path = "/v2/models/demo/generate";
    for (body, status) in [
        (r#"{"id":"1","text_input":"ä tea"}"#, 200),
        ("{\"a\":}", 400),
        ("", 400),
        ("[]", 400),
    ] {
        let request = post(path, &[], body.as_bytes());
        let whole = Wire::connect(server.address).await.ask(&request).await;
        assert_eq!(whole.summary().0, status);
        for size in [1, 7, 64] {
            let mut wire = Wire::connect(server.address).await;
            for piece in request.chunks(size) {
                wire.send(piece).await;
            }
            assert_eq!(wire.answer().await.body, whole.body);
        }
    }
}

/// A request with every fault: each error is reported once the checks before it pass.
#[tokio::test]
async fn tr_203_the_first_check_that_fails_decides_the_error() {
    let server = limited(small()).await;
    let long = format!("/v2/models/x/versions/{}/generate", "9".repeat(30));
    let large = body(2_000);
    let mut wire = Wire::connect(server.address).await;
    let odd = ["content-encoding: br"];
    let members = r#"{"text_input":1,"id":2,"top_p":7}"#;
    for (request, expect) in [
        (head("GET", &long, &odd), "Method Not Allowed"),
        (
            String::from_utf8(post(&long, &odd, &large)).unwrap(),
            "failed to get model version",
        ),
        (
            String::from_utf8(post("/v2/models/x/generate", &odd, &large)).unwrap(),
            "Request for unknown model",
        ),
        (
            String::from_utf8(post(PATH, &odd, &large)).unwrap(),
            "Unsupported content-encoding",
        ),
        (
            String::from_utf8(post(PATH, &[], &vec![b'{'; 2_000])).unwrap(),
            "request JSON size",
        ),
        (
            String::from_utf8(post(PATH, &[], &members.as_bytes()[1..])).unwrap(),
            "failed to parse the request JSON",
        ),
        (
            String::from_utf8(post(PATH, &[], members.as_bytes())).unwrap(),
            "Unable to parse 'id'",
        ),
        (
            String::from_utf8(post(PATH, &[], br#"{"text_input":1,"top_p":7}"#)).unwrap(),
            "Unable to parse JSON bytes",
        ),
        (
            String::from_utf8(post(PATH, &[], br#"{"top_p":7}"#)).unwrap(),
            "[request id: <id_unknown>] expected",
        ),
        (
            String::from_utf8(post(PATH, &[], br#"{"text_input":"a","top_p":7}"#)).unwrap(),
            "parameter 'top_p'",
        ),
    ] {
        let answer = wire.ask(request).await;
        assert!(
            error(&answer).starts_with(expect),
            "{expect}: {}",
            answer.text()
        );
    }
}

/// TR-206, OA-911: and the connection closes.
#[tokio::test]
async fn tr_205_a_body_that_stops_arriving_gets_a_408_in_tritons_format() {
    let server = demo().await;
    let open = &server.shared.metrics.connections_open;
    for coming in ["content-length: 100", "transfer-encoding: chunked"] {
        let mut wire = Wire::connect(server.address).await;
        wire.send(head("POST", "/v2/models/demo/generate", &[coming]))
            .await;
        wire.send("7\r\n{\"text_\r\n").await;
        until("it has begun", || open.get() == 1).await;
        let limit = Duration::from_secs(120);
        let took = in_time("it is answered", limit, || open.get() == 0).await;
        assert!(took >= Duration::from_secs(15), "{took:?}");
        let answer = wire.answer().await;
        let (status, kind, _) = answer.summary();
        assert_eq!((status, kind.as_str()), (408, "application/json"));
        assert_eq!(error(&answer), "The body of this request stopped arriving.");
        let code = answer.head.header("sapwood-error");
        assert_eq!(code.as_deref(), Some("invalid-request"));
        assert!(wire.closes().await);
    }
}
