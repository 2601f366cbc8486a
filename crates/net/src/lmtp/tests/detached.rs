//! Streams that outlive their connection, and streams that do not.

use super::*;

const AGREED: &str = r#","lmtp":{"version":2,"features":["cancel","resume"],"session":"s_1"}"#;

/// A client with a stream of nine tokens, of which one was received; its peer can be dialled again if `again`.
async fn begun(peer: &ReturningPeer, again: bool) -> (LmtpClient, StreamItems, Option<Fake>) {
    let pipe = || duplex(1 << 16);
    let (ours, theirs) = pipe();
    let wire = Some(LmtpConnection::over(ours));
    let client = LmtpClient::keeping(peer.clone(), wire, ConnectOptions::default());
    let mut items = client.generate("m", wanted(9)).await.unwrap();
    let mut fake = Fake(BufReader::new(theirs));
    agree(&mut fake, AGREED).await;
    fake.received().await;
    fake.send(r#"TOKEN [{"stream_id":2,"token":4,"seq":0}]"#)
        .await;
    assert_eq!(items.next().await.unwrap().unwrap().token, Some(4));
    let next = again.then(|| {
        let (ours, theirs) = pipe();
        peer.0.lock().unwrap().1 = Some(LmtpConnection::over(ours));
        Fake(BufReader::new(theirs))
    });
    (client, items, next)
}

/// Receives the negotiation on the second connection.
async fn negotiates(fake: &mut Fake, id: u64) {
    let incoming = fake.received().await;
    assert!(incoming.starts_with("MODEL_INFO"), "{incoming}");
    let agreed = AGREED.replace("s_1", "s_2");
    fake.send(&format!(
        r#"MSG [{{"stream_id":{id},"model_info":{{}}{agreed}}}]"#
    ))
    .await;
}

#[tokio::test(start_paused = true)]
async fn lm_965_a_detached_stream_resumes_on_the_next_connection() {
    let peer = ReturningPeer::default();
    let (client, mut items, fake) = begun(&peer, true).await;
    let mut fake = fake.unwrap();
    // A call made meanwhile is sent afterwards.
    let asking = async {
        negotiates(&mut fake, 3).await;
        let resume = r#"RESUME {"model":"m","stream_id":4,"session":"s_1","streams":[{"stream_id":2,"after_seq":0}]}"#;
        assert_eq!(fake.received().await, resume);
        let other = client.generate("m", wanted(1)).await.unwrap();
        assert!(fake.received().await.contains("\"stream_id\":5"));
        for reply in [
            r#"MSG [{"stream_id":4,"resumed":[2],"gone":[],"conflict":[]}]"#,
            r#"TOKEN [{"stream_id":2,"token":5,"seq":1},{"stream_id":2,"token":6,"seq":2,"finish_reason":"stop"}]"#,
            r#"TOKEN [{"stream_id":5,"token":7,"seq":0}]"#,
        ] {
            fake.send(reply).await;
        }
        assert_eq!(all(other).await, Ok((vec![7], StreamFinish::Length)));
    };
    let reading = async {
        let mut tokens = Vec::new();
        while let Some(item) = items.next().await {
            tokens.extend(item.unwrap().token);
        }
        tokens
    };
    let (tokens, ()) = tokio::join!(reading, asking);
    assert_eq!(tokens, [5, 6]);
    assert_eq!(client.outstanding(), 0);
}

/// The first attempt decides: if the peer is not there, the stream is lost.
#[tokio::test(start_paused = true)]
async fn lm_965_a_detached_stream_fails_if_the_first_reconnection_fails() {
    let peer = ReturningPeer::default();
    let began = Instant::now();
    let (_client, items, _) = begun(&peer, false).await;
    assert_eq!(reason(all(items).await), LmtpReason::ConnectionLost);
    assert_eq!(peer.0.lock().unwrap().0.len(), 1);
    assert!(began.elapsed() < Duration::from_secs(1));
}

/// LM-702: a stream that is abandoned while it is detached leaves no state.
#[tokio::test(start_paused = true)]
async fn lm_965_a_dropped_stream_is_not_resumed() {
    let peer = ReturningPeer::default();
    let (client, items, fake) = begun(&peer, true).await;
    let mut fake = fake.unwrap();
    tokio::task::yield_now().await;
    drop(items);
    negotiates(&mut fake, 3).await;
    let incoming = fake.received().await;
    assert!(
        incoming.ends_with(r#""session":"s_1","streams":[]}"#),
        "{incoming}"
    );
    fake.send(r#"MSG [{"stream_id":4,"resumed":[],"gone":[],"conflict":[]}]"#)
        .await;
    let _next = client.generate("m", wanted(1)).await.unwrap();
    assert!(fake.received().await.starts_with("GENERATE"));
    assert_eq!(client.outstanding(), 1);
}

/// LM-964: a client that closes normally tells the peer to drop its streams.
#[tokio::test]
async fn lm_964_a_closed_client_sends_a_normal_close() {
    let (address, accepted) = socket().await;
    let address = PeerAddress::parse(&address).unwrap();
    let connecting = LmtpClient::connect(address, ConnectOptions::base());
    let (client, mut peer) = tokio::join!(connecting, accepted);
    drop(client);
    let Some(Ok(Message::Close(Some(close)))) = peer.next().await else {
        panic!("no goodbye");
    };
    assert_eq!(u16::from(close.code), 1000);
}
