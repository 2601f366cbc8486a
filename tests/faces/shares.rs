//! Limits of one caller within those of all callers (D-45): at the limit, and one past it.

use std::net::Ipv4Addr;
use std::time::Duration;

use sapwood_kernel::Kernel;
use sapwood_server::faces::evergreen;
use sapwood_server::faces::lmtp;
use sapwood_server::listener;
use sapwood_server::server;
use sapwood_tests::http::Wire;
use sapwood_tests::proxy::Proxy;
use sapwood_tests::raw::{call, code_and_reason, end, fragments, leaf};
use sapwood_tests::socket::Socket;
use sapwood_tests::{Faces, Running, spawned, until, with_model};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use super::{WAYS, Way};
use crate::lmtp::parrot;

/// A server, and a proxy to it from another address.
async fn limited(config: server::Config, faces: Faces) -> (Running, Proxy) {
    let kernel = with_model(spawned(parrot()));
    let server = Running::start_faces(config, kernel, faces, Vec::new()).await;
    let other = Proxy::from(Ipv4Addr::new(127, 0, 0, 2), server.address).await;
    (server, other)
}

/// The receive windows of HTTP/2 are in no budget, so thousands of connections must not have megabytes each.
#[tokio::test]
async fn d_47_http2_connections_beside_the_first_32_have_a_small_window() {
    let server = Running::with_test_functions().await;
    let mut open = Vec::new();
    // HTTP/1 connections have no windows and do not count.
    for _ in 0..32 {
        let mut wire = Wire::connect(server.address).await;
        wire.send("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await;
        assert_eq!(wire.bytes(12).await, b"HTTP/1.1 200");
        open.push(wire);
    }
    for index in 0..34 {
        let mut wire = Wire::connect(server.address).await;
        // The preface, and empty SETTINGS.
        let hello = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            &[0, 0, 0, 4, 0, 0, 0, 0, 0][..],
        ];
        wire.send(hello.concat()).await;
        let head = wire.bytes(9).await;
        assert_eq!(head[3..], [4, 0, 0, 0, 0, 0], "SETTINGS");
        let settings = wire.bytes(usize::from(head[2])).await;
        let window = settings.chunks(6).find(|it| it[..2] == [0, 4]);
        let window = window.map_or(65_535, |it| u32::from_be_bytes(it[2..].try_into().unwrap()));
        let expect = if index < 32 { 1 << 20 } else { 65_535 };
        assert_eq!(window, expect, "{index}");
        open.push(wire);
    }
}

#[tokio::test]
async fn d_45_one_caller_cannot_use_all_sessions_or_connections() {
    let faces = Faces {
        evergreen: evergreen::Config {
            sessions_each: 2,
            ..Default::default()
        },
        lmtp: lmtp::Config {
            connections_each: 2,
            ..Default::default()
        },
        ..Faces::default()
    };
    let (server, remote) = limited(Default::default(), faces).await;
    let one = (
        Socket::open(&server, "/evergreen", &[]).await.unwrap(),
        Socket::open(&server, "/lmtp", &[]).await.unwrap(),
    );
    // With the last session or connection, and without one. Triton's requests need none.
    let takes = |way: Way| {
        !matches!(
            way.face(),
            sapwood_server::ops::metrics::FaceLabel::Generate
        )
    };
    for way in WAYS {
        let reply = way.ask(server.address, "Hi").await;
        assert_eq!(reply.as_deref(), Ok("Hi"), "{way:?}");
        let left = || {
            let numbers = &server.shared.metrics;
            (
                numbers.evergreen.sessions_open.get(),
                numbers.connections_open.get(),
            ) == (0, 2)
        };
        until("its connection has gone", left).await;
    }
    let other = (
        Socket::open(&server, "/evergreen", &[]).await.unwrap(),
        Socket::open(&server, "/lmtp", &[]).await.unwrap(),
    );
    for way in WAYS {
        let reply = way.ask(server.address, "Hi").await;
        if takes(way) {
            let refused = reply.unwrap_err();
            let named = refused.contains("_each") || refused.contains("503");
            assert!(named, "{way:?}: {refused}");
        } else {
            assert_eq!(reply.as_deref(), Ok("Hi"), "{way:?}");
        }
        let reply = way.ask(remote.address, "Hi").await;
        assert_eq!(reply.as_deref(), Ok("Hi"), "{way:?}, from elsewhere");
    }
    let rejected = server.shared.metrics.rejected.with_label_values(&["share"]);
    let taking = WAYS.into_iter().filter(|way| takes(*way)).count();
    assert_eq!(rejected.get(), taking as u64);
    drop((one, other));
}

#[tokio::test]
async fn d_45_one_address_cannot_use_all_connections() {
    let config = server::Config {
        listener: listener::Config {
            connections_each: 2,
            ..Default::default()
        },
        ..Default::default()
    };
    let (server, other) = limited(config, Faces::default()).await;
    let mut first = Wire::connect(server.address).await;
    let mut second = Wire::connect(server.address).await;
    for wire in [&mut first, &mut second] {
        assert_eq!(wire.get("/livez").await.head.status, 200);
    }
    let third = Wire::connect(server.address).await.answer().await;
    assert_eq!(third.head.status, 503);
    assert!(
        third.text().contains("limits.connections_each"),
        "{}",
        third.text()
    );
    let answer = Wire::connect(other.address).await.get("/livez").await;
    assert_eq!(answer.head.status, 200);
    // A closed connection makes room.
    drop(first);
    until("a connection has gone", || {
        server.shared.metrics.connections_open.get() == 1
    })
    .await;
    let answer = Wire::connect(server.address).await.get("/livez").await;
    assert_eq!(answer.head.status, 200);
}

#[tokio::test]
async fn d_45_one_caller_cannot_use_all_retained_bytes() {
    let faces = Faces {
        evergreen: evergreen::Config {
            retained_bytes: 150_000,
            retained_bytes_each: 100_000,
            ..Default::default()
        },
        ..Faces::default()
    };
    let mut server =
        Running::start_faces(Default::default(), Kernel::new(), faces, Vec::new()).await;
    let other = Proxy::from(Ipv4Addr::new(127, 0, 0, 2), server.address).await;
    let overhead = 1 + 64 + 10;
    // Inputs that are never ended.
    let (hold, retained) = mpsc::channel(1);
    let first = call(&server, ReceiverStream::new(retained), &[])
        .await
        .unwrap();
    hold.send(fragments(vec![leaf("p", 0, 60_000 - overhead)]))
        .await
        .unwrap();
    let numbers = server.shared.metrics.clone();
    until("its bytes are counted", || {
        numbers.evergreen.retained_bytes.get() == 60_000
    })
    .await;
    for (more, past) in [(40_000, false), (40_001, true)] {
        let message = fragments(vec![leaf("p", 0, more - overhead)]);
        let sent = call(&server, futures::stream::iter([message]), &[])
            .await
            .unwrap();
        let ended = timeout(Duration::from_secs(20), end(sent)).await.unwrap();
        if past {
            let status = ended.unwrap();
            let limit = (status.detail("limit"), status.detail("value"));
            assert_eq!(limit, (Some("retained_bytes_each"), Some("100001")));
            assert!(status.message.contains("end inputs"), "{}", status.message);
            assert_eq!(code_and_reason(Some(status)), (8, "RETAINED_LIMIT".into()));
        } else {
            assert_eq!(code_and_reason(ended), (0, String::new()));
        }
    }
    // Other callers may use the rest.
    server.address = other.address;
    let message = fragments(vec![leaf("p", 0, 90_000 - overhead)]);
    let sent = call(&server, futures::stream::iter([message]), &[])
        .await
        .unwrap();
    assert_eq!(code_and_reason(end(sent).await), (0, String::new()));
    drop(hold);
    assert!(end(first).await.is_none());
}
