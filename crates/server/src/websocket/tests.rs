use tokio::io::{DuplexStream, duplex};

use super::*;

const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(30),
    idle_timeout: Duration::from_secs(60),
};

/// Its end cannot be noticed without reading.
impl PeekConnection for DuplexStream {
    fn is_closed(&self) -> bool {
        false
    }
}

/// A masked frame of a client, the mask being zero.
fn frame(head: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![
        head,
        0x80 | u8::try_from(payload.len()).unwrap(),
        0,
        0,
        0,
        0,
    ];
    bytes.extend_from_slice(payload);
    bytes
}

#[tokio::test(start_paused = true)]
async fn ev_705_a_peer_is_pinged_every_30_seconds_and_dead_30_seconds_after_the_last_sign() {
    let (mut client, server) = duplex(1024);
    let mut socket = WebSocket::new(server, Vec::new(), 1024, KEEPALIVE);
    let began = Instant::now();
    let received = tokio::spawn(async move { socket.receive().await.unwrap_err() });
    let mut ping = [0; 2];
    client.read_exact(&mut ping).await.unwrap();
    assert_eq!((ping, began.elapsed().as_secs()), ([0x89, 0], 30));
    client.write_all(&frame(0x8a, b"")).await.unwrap();
    // The pong counts from when it came; pings go on.
    client.read_exact(&mut ping).await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 60);
    assert_eq!(received.await.unwrap(), SocketLoss::Closed);
    assert_eq!(began.elapsed().as_secs(), 90);
}

#[tokio::test(start_paused = true)]
async fn ev_705_a_paused_peer_is_not_considered_dead() {
    let (_client, server) = duplex(1024);
    let mut socket = WebSocket::new(server, Vec::new(), 1024, KEEPALIVE);
    let mut deaf = true;
    let began = Instant::now();
    let hour = tokio::time::sleep(Duration::from_secs(3600));
    tokio::pin!(hour);
    let ended = std::future::poll_fn(|cx| {
        if deaf && hour.as_mut().poll(cx).is_ready() {
            deaf = false;
        }
        socket.poll_alive(deaf, cx)
    });
    ended.await;
    assert!(began.elapsed().as_secs() >= 3600 + 30);
}

/// Pongs keep a connection alive, but not an incomplete message without progress: it is charged to the byte budget.
#[tokio::test(start_paused = true)]
async fn d_47_a_message_that_stalls_or_trickles_ends_the_connection() {
    // (how often some bytes of it come, how many, when the connection is given up)
    for (every, bytes, expect) in [(3600, 1, 90), (10, 1, 630), (1, 120, 90)] {
        let (mut client, server) = duplex(1024);
        let mut socket = WebSocket::new(server, Vec::new(), 1 << 20, KEEPALIVE);
        let began = Instant::now();
        let received = tokio::spawn(async move { socket.receive().await.unwrap_err() });
        // One that never ends, in small frames.
        let mut kind = 0x02;
        let mut second = tokio::time::interval(Duration::from_secs(1));
        let mut seconds = 0_u32;
        while !received.is_finished() {
            second.tick().await;
            if seconds.is_multiple_of(every) {
                let _ = client
                    .write_all(&frame(std::mem::take(&mut kind), &vec![b'x'; bytes]))
                    .await;
            }
            let _ = client.write_all(&frame(0x8a, b"")).await;
            seconds += 1;
        }
        assert_eq!(received.await.unwrap(), SocketLoss::Closed);
        let took = began.elapsed().as_secs();
        assert!((expect..expect + 3).contains(&took), "{took} s");
    }
}

/// A slow client is kept as long as its messages make progress.
#[tokio::test(start_paused = true)]
async fn d_47_messages_that_make_progress_are_waited_for() {
    let (mut client, server) = duplex(1024);
    let mut socket = WebSocket::new(server, Vec::new(), 1 << 20, KEEPALIVE);
    let client = tokio::spawn(async move {
        for message in 0..30_u8 {
            for (part, head) in [0x02, 0x00, 0x80].into_iter().enumerate() {
                client
                    .write_all(&frame(head, &[message; 100][part..]))
                    .await
                    .unwrap();
                tokio::time::sleep(Duration::from_secs(29)).await;
            }
        }
        client
    });
    for message in 0..30_u8 {
        let SocketMessage::Binary(bytes) = socket.receive().await.unwrap() else {
            panic!("no bytes");
        };
        assert_eq!((bytes[0], bytes.len()), (message, 297));
    }
    client.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn ev_705_causes_of_a_loss_are_distinguished() {
    let long = [b'x'; 100];
    let mut cut = frame(0x02, &long);
    cut.extend(frame(0x80, &long));
    for (bytes, expect) in [
        (frame(0x82, &long), None),
        (frame(0x82, &[b'x'; 101]), Some(SocketLoss::TooLarge)),
        // 16-byte pieces count together.
        (cut, Some(SocketLoss::TooLarge)),
        (frame(0x81, b"\xff"), Some(SocketLoss::NotText)),
        (frame(0x83, b""), Some(SocketLoss::Broken)),
        (frame(0xc2, b""), Some(SocketLoss::Broken)),
        (vec![0x82, 0x01, b'x'], Some(SocketLoss::Broken)),
        (frame(0x88, b"\x03\xe8"), Some(SocketLoss::Left)),
        (frame(0x88, b""), Some(SocketLoss::Left)),
        // EV-940: these are lost, and may come back.
        (frame(0x88, b"\x03\xe9"), Some(SocketLoss::Closed)),
        (frame(0x88, b"\x0f\xa0"), Some(SocketLoss::Closed)),
    ] {
        let (mut client, server) = duplex(1024);
        let mut socket = WebSocket::new(server, Vec::new(), 100, KEEPALIVE);
        client.write_all(&bytes).await.unwrap();
        assert_eq!(socket.receive().await.err(), expect, "{bytes:02x?}");
    }
}

#[tokio::test(start_paused = true)]
async fn ev_705_a_close_follows_queued_messages_and_later_input_is_discarded() {
    let (mut client, server) = duplex(64);
    let mut socket = WebSocket::new(server, Vec::new(), 10, KEEPALIVE);
    client.write_all(&frame(0x82, &[b'x'; 11])).await.unwrap();
    assert_eq!(socket.receive().await.err(), Some(SocketLoss::TooLarge));
    socket.send(Bytes::from_static(b"sorry"), false).unwrap();
    let limit = Duration::from_secs(1);
    let closing = tokio::spawn(Box::new(socket).close(1009, "TOO_LARGE".into(), limit));
    // More than the pipe holds, so it is read and discarded.
    client.write_all(&[0; 500]).await.unwrap();
    let mut reply = [0; 7 + 13];
    client.read_exact(&mut reply).await.unwrap();
    assert_eq!(reply, *b"\x82\x05sorry\x88\x0b\x03\xf1TOO_LARGE");
    drop(client);
    closing.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn ev_705_bytes_read_ahead_of_the_upgrade_come_first() {
    let (mut client, server) = duplex(1024);
    let mut message = frame(0x82, b"hello");
    let rest = message.split_off(3);
    let mut socket = WebSocket::new(server, message, 1024, KEEPALIVE);
    client.write_all(&rest).await.unwrap();
    let received = socket.receive().await.unwrap();
    assert!(matches!(received, SocketMessage::Binary(bytes) if bytes == "hello"));
}

#[tokio::test(start_paused = true)]
async fn ev_705_pings_are_answered_and_a_close_is_echoed() {
    let (mut client, server) = duplex(1024);
    let mut socket = WebSocket::new(server, Vec::new(), 1024, KEEPALIVE);
    let received = tokio::spawn(async move { socket.receive().await.unwrap_err() });
    client.write_all(&frame(0x89, b"there?")).await.unwrap();
    let mut pong = [0; 8];
    client.read_exact(&mut pong).await.unwrap();
    assert_eq!(pong, *b"\x8a\x06there?");
    let close = frame(0x88, b"\x03\xe8bye");
    client.write_all(&close).await.unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"\x88\x02\x03\xe8");
    assert_eq!(received.await.unwrap(), SocketLoss::Left);
}

#[tokio::test]
async fn ev_705_a_ping_between_fragments_is_answered_before_their_message() {
    let (mut client, server) = duplex(1024);
    let mut socket = WebSocket::new(server, Vec::new(), 1024, KEEPALIVE);
    let fragments = [
        frame(0x01, b"frag"),
        frame(0x89, b"p"),
        frame(0x80, b"ment"),
    ];
    client.write_all(&fragments.concat()).await.unwrap();
    let SocketMessage::Text(text) = socket.receive().await.unwrap() else {
        panic!("it is text")
    };
    socket.send(text, true).unwrap();
    std::future::poll_fn(|cx| socket.poll_sent(cx))
        .await
        .unwrap();
    drop(socket);
    let mut answers = Vec::new();
    client.read_to_end(&mut answers).await.unwrap();
    assert_eq!(answers, b"\x8a\x01p\x81\x08fragment");
}

#[tokio::test]
async fn ev_705_a_failed_write_is_reported_to_every_caller() {
    let (client, server) = duplex(64);
    let mut socket = WebSocket::new(server, Vec::new(), 1024, KEEPALIVE);
    socket.send(Bytes::from_static(b"hello"), false).unwrap();
    drop(client);
    for _ in 0..2 {
        let sent = std::future::poll_fn(|cx| socket.poll_sent(cx)).await;
        assert_eq!(sent, Err(SocketLoss::Closed));
    }
}

/// A client that sends pings and reads nothing does not fill memory with pongs.
#[tokio::test(start_paused = true)]
async fn ev_705_only_the_last_of_many_pings_is_answered() {
    let (mut client, server) = duplex(64);
    let mut socket = WebSocket::new(server, Vec::new(), 1024, KEEPALIVE);
    let mut pings = frame(0x89, &[b'x'; 60]).repeat(1000);
    pings.extend(frame(0x89, b"last"));
    pings.extend(frame(0x82, b"hello"));
    let received = tokio::spawn(async move {
        client.write_all(&pings).await.unwrap();
        client
    });
    assert!(matches!(
        socket.receive().await.unwrap(),
        SocketMessage::Binary(_)
    ));
    let waiting = socket.writer.len();
    assert!(waiting <= WRITE_BYTES + 62, "{waiting}");
    let mut client = received.await.unwrap();
    let sent = tokio::spawn(async move {
        std::future::poll_fn(|cx| socket.poll_sent(cx))
            .await
            .unwrap();
        std::future::poll_fn(|cx| socket.poll_sent(cx))
            .await
            .unwrap();
    });
    let mut answers = Vec::new();
    client.read_to_end(&mut answers).await.unwrap();
    sent.await.unwrap();
    assert!(answers.ends_with(b"\x8a\x04last"));
    assert!(answers.len() <= WRITE_BYTES + 3 * 64, "{}", answers.len());
}

/// EV-802
#[tokio::test]
async fn ev_109_the_disconnect_of_a_paused_peer_is_noticed() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    let (server, _) = listener.accept().await.unwrap();
    let io: SocketIo = Box::new(server);
    let mut socket = WebSocket::new(io, Vec::new(), 1024, KEEPALIVE);
    // Many unread bytes come before the end.
    client.write_all(&[0; 10_000]).await.unwrap();
    tokio::time::pause();
    let began = Instant::now();
    let hour = Duration::from_secs(3600);
    let alive = timeout(hour, std::future::poll_fn(|cx| socket.poll_alive(true, cx)));
    assert!(alive.await.is_err(), "it is there");
    client.shutdown().await.unwrap();
    std::future::poll_fn(|cx| socket.poll_alive(true, cx)).await;
    let noticed = began.elapsed() - hour;
    assert!(noticed <= LOOK * 3, "{noticed:?}");
}
