//! A server that sends nothing, with virtual time.

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;

/// The client's side of a connection, and the server's.
async fn connected(
    outgoing: impl Stream<Item = WireMessage> + Send + Unpin + 'static,
) -> (ServerMessages, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let (io, liveness) = LivenessFlag::of(Box::new(ours));
    let wire = WebSocketStream::from_raw_socket(io, Role::Client, None).await;
    (
        converse(wire, liveness, Dialect::Protobuf, outgoing),
        theirs,
    )
}

/// Yields a message every second.
fn talking() -> impl Stream<Item = WireMessage> + Send + Unpin {
    let every_second = futures::stream::repeat(()).then(|()| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        WireMessage::default()
    });
    every_second.boxed()
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_given_up_even_while_the_client_sends() {
    for outgoing in [futures::stream::pending().boxed(), talking().boxed()] {
        let (mut incoming, _theirs) = connected(outgoing).await;
        let began = Instant::now();
        let ended = timeout(PING * 10, incoming.next()).await;
        let status = ended.expect("it is noticed").unwrap().unwrap_err();
        // The status of a connection that was cut: a resumable session reconnects.
        assert_eq!((status.code, &*status.reason), (Code::Unavailable, ""));
        assert_eq!(began.elapsed().as_secs(), 60);
        assert!(incoming.next().await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_only_answers_pings_counts_as_alive() {
    for outgoing in [futures::stream::pending().boxed(), talking().boxed()] {
        let (mut incoming, theirs) = connected(outgoing).await;
        let mut server = WebSocketStream::from_raw_socket(theirs, Role::Server, None).await;
        let server = async { while server.next().await.is_some_and(|read| read.is_ok()) {} };
        tokio::select! {
            received = incoming.next() => panic!("{received:?}"),
            () = server => panic!("the connection was given up"),
            () = tokio::time::sleep(PING * 30) => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn slow_messages_and_slow_readers_do_not_end_the_connection() {
    let (mut incoming, mut theirs) = connected(futures::stream::pending()).await;
    // A binary frame of 100 bytes, of which one byte arrives now and then.
    theirs.write_all(&[0x82, 100]).await.unwrap();
    for _ in 0..20 {
        theirs.write_all(&[0]).await.unwrap();
        let waited = timeout(PING * 2, incoming.next()).await;
        assert!(waited.is_err(), "{waited:?}");
        // The receiver is not polled for a long time.
        tokio::time::sleep(PING * 10).await;
    }
}

#[tokio::test]
async fn oa_913_a_panic_of_the_sending_task_ends_the_session() {
    let broken = futures::stream::iter([()]).map(|()| -> WireMessage { panic!("on purpose") });
    let before = super::super::link::panics();
    let (mut incoming, _theirs) = connected(broken.boxed()).await;
    let received = incoming.next().await.unwrap().unwrap_err();
    assert_eq!(
        (received.code, &*received.reason),
        (Code::Internal, "FUNCTION")
    );
    assert!(super::super::link::panics() > before);
    assert!(incoming.next().await.is_none());
}

/// The head of the upgrade request for an address.
async fn requested(url: &str) -> String {
    let target = WebSocketTarget::new(url.parse().unwrap(), ServerAddress::new(url)).unwrap();
    let (ours, mut theirs) = tokio::io::duplex(1 << 16);
    let answering = async {
        let mut head = [0; 4096];
        let length = theirs.read(&mut head).await.unwrap();
        drop(theirs);
        String::from_utf8_lossy(&head[..length]).into_owned()
    };
    let upgrading = target.upgrade(Box::new(ours), HeaderMap::new());
    let (refused, head) = tokio::join!(upgrading, answering);
    assert!(refused.is_err());
    head
}

#[tokio::test]
async fn ev_704_the_query_of_an_address_is_sent_with_the_key_in_it() {
    for (url, line) in [
        ("ws://h", "GET /evergreen HTTP/1.1"),
        ("ws://h/?key=k", "GET /evergreen?key=k HTTP/1.1"),
        (
            "ws://h/p?key=k&dialect=json",
            "GET /p?key=k&dialect=json HTTP/1.1",
        ),
    ] {
        let head = requested(url).await;
        assert_eq!(head.lines().next(), Some(line), "{url}");
    }
}
