//! A server that serves files, or refuses.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// Returns the result of a request that is answered so, and what the server received.
async fn asked(path: &str, answer: &'static [u8]) -> (Result<Bytes, LmtpReason>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        let mut head = [0; 4096];
        let length = io.read(&mut head).await.unwrap();
        io.write_all(answer).await.unwrap();
        io.shutdown().await.unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    });
    let address = PeerAddress::parse(&format!("ws://{address}/lmtp?key=q")).unwrap();
    let got = address.with_key("k").fetch(path).await;
    let received = serving.await.unwrap();
    (got.map_err(|error| error.reason), received)
}

#[tokio::test]
async fn lm_712_a_file_is_fetched_from_the_server_of_the_streams() {
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
    let (file, received) = asked("/lmtp/tokenizer/m", answer).await;
    assert_eq!(file, Ok(Bytes::from_static(b"{}")));
    assert!(
        received.starts_with("GET /lmtp/tokenizer/m?key=q HTTP/1.1\r\n"),
        "{received}"
    );
    assert!(
        received.contains("authorization: Bearer k\r\n"),
        "{received}"
    );
}

#[tokio::test]
async fn lm_712_paths_of_other_servers_are_not_fetched() {
    let missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(asked("/x", missing).await.0, Err(LmtpReason::InvalidValue));
    let cut = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}";
    assert_eq!(asked("/x", cut).await.0, Err(LmtpReason::ConnectionLost));
    // No connection is made.
    for (target, path, reason) in [
        (
            "ws://127.0.0.1:9/",
            "http://elsewhere/",
            LmtpReason::InvalidValue,
        ),
        (
            "ws://127.0.0.1:9/",
            "//elsewhere/x",
            LmtpReason::InvalidValue,
        ),
        ("unix:/nowhere/s", "/x", LmtpReason::UnsupportedOperation),
    ] {
        let refused = PeerAddress::parse(target).unwrap().fetch(path).await;
        assert_eq!(refused.unwrap_err().reason, reason, "{path}");
    }
}
