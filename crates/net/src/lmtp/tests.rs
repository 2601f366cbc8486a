//! A client with scripted peers: over in-memory lines with virtual time, and over real sockets.

mod detached;

use std::sync::Mutex;

use futures::{SinkExt, StreamExt};
use sapwood_proto::lmtp::{LmtpReason, StreamFinish};
use sapwood_proto::params::GenerationParams;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, accept_async};

use super::*;

/// A peer at the other end of a pipe.
struct Fake(BufReader<DuplexStream>);

impl Fake {
    async fn received(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        line.trim_end().to_owned()
    }

    async fn send(&mut self, line: &str) {
        self.0.write_all(line.as_bytes()).await.unwrap();
        self.0.write_all(b"\n").await.unwrap();
    }
}

fn pair(options: ConnectOptions) -> (LmtpClient, Fake) {
    let (ours, theirs) = duplex(1 << 20);
    (
        LmtpClient::over(ours, options),
        Fake(BufReader::new(theirs)),
    )
}

/// Starts a stream, and lets the peer receive the call.
async fn ask(client: &LmtpClient, fake: &mut Fake, max_tokens: u32) -> StreamItems {
    let items = client.generate("m", wanted(max_tokens)).await.unwrap();
    fake.received().await;
    items
}

/// Requests the facts of a model; the peer sends this answer.
async fn info(client: &LmtpClient, fake: &mut Fake, answer: &str) -> Result<String, LmtpError> {
    let answering = async {
        fake.received().await;
        fake.send(answer).await;
    };
    tokio::join!(client.model_info("m"), answering).0
}

fn wanted(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: vec![1, 2],
        params: GenerationParams {
            max_tokens: Some(max_tokens),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    }
}

type Ending = Result<(Vec<u32>, StreamFinish), (Vec<u32>, LmtpReason, String)>;

/// Collects the tokens of a stream, and how it ended; after its end it yields nothing.
async fn all(mut items: StreamItems) -> Ending {
    let mut tokens = Vec::new();
    loop {
        match items.next().await.expect("no stream ends silently") {
            Ok(item) => {
                tokens.extend(item.token);
                if let Some(finish) = item.finish {
                    assert_eq!(items.next().await, None);
                    return Ok((tokens, finish));
                }
            }
            Err(error) => {
                assert_eq!(items.next().await, None);
                return Err((tokens, error.reason, error.message.into_owned()));
            }
        }
    }
}

fn reason(ending: Ending) -> LmtpReason {
    ending.expect_err("it fails").1
}

#[tokio::test(start_paused = true)]
async fn lm_702_one_connection_carries_many_calls_and_a_dropped_stream_counts_until_its_end() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let first = client.generate("m", wanted(2)).await.unwrap();
    let second = client.generate("m", wanted(3)).await.unwrap();
    let scored = Score {
        prompt: vec![1],
        scored: vec![7, 8],
        top_logprobs: 1,
        ..Score::default()
    };
    let third = client.score("m", scored).await.unwrap();
    for id in 1..=3 {
        let incoming = fake.received().await;
        assert!(
            incoming.contains(&format!("\"stream_id\":{id}")),
            "{incoming}"
        );
    }
    drop(second);
    fake.send(r#"TOKEN [{"stream_id":2,"token":5,"logprob":-1.0},{"stream_id":1,"token":4,"logprob":-1.0},{"stream_id":3,"token":7,"logprob":-1.0}]"#).await;
    fake.send(r#"TOKEN [{"stream_id":3,"token":8,"logprob":-1.0,"finish_reason":"stop"},{"stream_id":1,"token":9,"logprob":-1.0,"finish_reason":"length"}]"#).await;
    assert_eq!(all(first).await, Ok((vec![4, 9], StreamFinish::Length)));
    assert_eq!(all(third).await, Ok((vec![7, 8], StreamFinish::Stop)));
    assert_eq!(client.outstanding(), 1);
    fake.send(r#"TOKEN [{"stream_id":2,"token":5,"finish_reason":"stop"}]"#)
        .await;
    // Everything sent before its answer was handled before it.
    let answer = r#"MSG [{"stream_id":4,"model_info":{"model":"m"}}]"#;
    let facts = info(&client, &mut fake, answer).await;
    assert_eq!(facts.unwrap(), r#"{"model":"m"}"#);
    assert_eq!(client.outstanding(), 0);
}

#[tokio::test(start_paused = true)]
async fn lm_703_only_base_messages_are_sent_to_a_base_peer() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let _items = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(
        fake.received().await,
        r#"GENERATE {"max_tokens":2,"temperature":0.0,"top_logprobs":1,"model":"m","prompt":[1,2],"stream_id":1}"#
    );
    let large = GenerateRequest {
        prompt: vec![1_000_000; 600_000],
        ..wanted(2)
    };
    let refused = client.generate("m", large).await.unwrap();
    assert_eq!(reason(all(refused).await), LmtpReason::MessageTooLarge);
    let _items = client.generate("m", wanted(1)).await.unwrap();
    assert!(
        fake.received().await.contains("\"stream_id\":2"),
        "nothing was sent"
    );
}

#[tokio::test(start_paused = true)]
async fn lm_704_unsupported_parameters_are_refused_before_sending() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let unset = GenerationParams::default;
    for params in [
        GenerationParams {
            seed: Some(1),
            ..unset()
        },
        GenerationParams {
            stop: vec!["x".into()],
            ..unset()
        },
        GenerationParams {
            min_tokens: Some(1),
            ..unset()
        },
    ] {
        let wanted = GenerateRequest {
            params,
            ..wanted(1)
        };
        let refused = client.generate("m", wanted).await.unwrap();
        assert_eq!(reason(all(refused).await), LmtpReason::UnsupportedOperation);
    }
    let _items = client.generate("m", wanted(1)).await.unwrap();
    assert!(
        fake.received().await.contains("\"stream_id\":1"),
        "nothing was sent"
    );
}

#[tokio::test(start_paused = true)]
async fn lm_705_deviations_of_real_servers_are_accepted() {
    let ended = |tokens: &[u32], finish| Ok((tokens.to_vec(), finish));
    let failed = |tokens: &[u32], message: &str| {
        Err((
            tokens.to_vec(),
            LmtpReason::UpstreamError,
            message.to_owned(),
        ))
    };
    for (what, reply, expect) in [
        (
            "an object instead of a list",
            r#"TOKEN {"stream_id":1,"token":3,"logprob":-1,"finish_reason":"stop"}"#,
            ended(&[3], StreamFinish::Stop),
        ),
        (
            "types and members that are unknown, and lines without a space",
            "HELLO\nNEWS {\"a\":1}\nTOKEN [{\"stream_id\":1,\"token\":3,\"new\":{},\"finish_reason\":\"stop\"}]",
            ended(&[3], StreamFinish::Stop),
        ),
        (
            "items of streams that there are not",
            "TOKEN [{\"stream_id\":77,\"token\":3},{\"token\":4}]\nTOKEN [{\"stream_id\":1,\"token\":3,\"finish_reason\":\"stop\"}]",
            ended(&[3], StreamFinish::Stop),
        ),
        (
            "any reason, and an end without a token",
            "TOKEN [{\"stream_id\":1,\"token\":3,\"error\":null}]\nTOKEN [{\"stream_id\":1,\"finish_reason\":\"tired\"}]",
            ended(&[3], StreamFinish::Other("tired".into())),
        ),
        (
            "an error of any type",
            "TOKEN [{\"stream_id\":1,\"token\":3}]\nTOKEN [{\"stream_id\":1,\"error\":{ \"a\": [1] }}]",
            failed(&[3], r#"{"a":[1]}"#),
        ),
    ] {
        let (client, mut fake) = pair(ConnectOptions::base());
        let items = client.generate("m", wanted(9)).await.unwrap();
        fake.received().await;
        fake.send(reply).await;
        assert_eq!(all(items).await, expect, "{what}");
    }
}

/// LM-705
#[tokio::test(start_paused = true)]
async fn lm_706_bare_words_are_parsed_as_numbers_and_unreadable_items_fail_streams() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let mut items = ask(&client, &mut fake, 9).await;
    let other = ask(&client, &mut fake, 9).await;
    fake.send(r#"TOKEN [{"stream_id":1,"token":3,"logprob":-Infinity,"top_logprobs":{"3":-Infinity,"4":NaN}}]"#).await;
    let item = items.next().await.unwrap().unwrap();
    assert_eq!(
        (item.logprob, item.top),
        (Some(f32::NEG_INFINITY), vec![(3, f32::NEG_INFINITY)])
    );
    fake.send(r#"TOKEN [{"stream_id":1,"token":3,"logprob":NaN}]"#)
        .await;
    assert_eq!(items.next().await.unwrap().unwrap().logprob, None);
    // It belongs to no stream.
    fake.send("MSG [{").await;
    fake.send(r#"TOKEN [{"stream_id":1,"token":3}]"#).await;
    assert!(items.next().await.unwrap().is_ok());
    fake.send("TOKEN [{").await;
    assert_eq!(reason(all(items).await), LmtpReason::UpstreamError);
    assert_eq!(reason(all(other).await), LmtpReason::UpstreamError);
}

#[tokio::test(start_paused = true)]
async fn lm_707_items_after_the_end_of_a_stream_are_dropped() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let short = ask(&client, &mut fake, 2).await;
    let ended = ask(&client, &mut fake, 9).await;
    for _ in 0..3 {
        fake.send(
            r#"TOKEN [{"stream_id":1,"token":3},{"stream_id":2,"token":5,"finish_reason":"stop"}]"#,
        )
        .await;
    }
    assert_eq!(all(short).await, Ok((vec![3, 3], StreamFinish::Length)));
    assert_eq!(all(ended).await, Ok((vec![5], StreamFinish::Stop)));
}

#[tokio::test(start_paused = true)]
async fn lm_708_a_message_with_an_error_ends_its_stream_or_request() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let items = ask(&client, &mut fake, 2).await;
    let other = ask(&client, &mut fake, 1).await;
    fake.send(r#"MSG [{"stream_id":1,"error":"Missing required parameter 'x'"}]"#)
        .await;
    let received = "Missing required parameter 'x'".to_owned();
    assert_eq!(
        all(items).await,
        Err((Vec::new(), LmtpReason::UpstreamError, received))
    );
    let answer = r#"MSG [{"stream_id":3,"error":"no","code":"model_not_found"}]"#;
    let refused = info(&client, &mut fake, answer).await.unwrap_err();
    assert_eq!(refused.reason, LmtpReason::ModelNotFound);
    fake.send(r#"TOKEN [{"stream_id":2,"token":4}]"#).await;
    assert_eq!(all(other).await, Ok((vec![4], StreamFinish::Length)));
}

/// LM-710: a reference server that cannot load a model sends nothing.
#[tokio::test(start_paused = true)]
async fn lm_709_every_call_times_out() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let began = Instant::now();
    let silent = client.generate("absent", wanted(2)).await.unwrap();
    fake.received().await;
    let stuck = ask(&client, &mut fake, 2).await;
    fake.send(r#"TOKEN [{"stream_id":2,"token":4}]"#).await;
    let refused = client.model_info("m").await.unwrap_err();
    assert_eq!(
        (refused.reason, began.elapsed().as_secs()),
        (LmtpReason::Timeout, 5)
    );
    assert_eq!(reason(all(stuck).await), LmtpReason::Timeout);
    assert_eq!(began.elapsed().as_secs(), 60);
    let (_, why, message) = all(silent).await.unwrap_err();
    assert_eq!((why, began.elapsed().as_secs()), (LmtpReason::Timeout, 300));
    assert!(message.contains("absent"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn lm_709_limits_can_be_turned_off() {
    let options = ConnectOptions {
        first_item_timeout: None,
        item_timeout: None,
        ..ConnectOptions::base()
    };
    let (client, mut fake) = pair(options);
    let items = ask(&client, &mut fake, 2).await;
    for _ in 0..2 {
        tokio::time::advance(Duration::from_secs(100_000)).await;
        fake.send(r#"TOKEN [{"stream_id":1,"token":4}]"#).await;
    }
    assert_eq!(all(items).await, Ok((vec![4, 4], StreamFinish::Length)));
}

#[tokio::test(start_paused = true)]
async fn lm_709_a_lost_connection_fails_every_call_at_once() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let mut items = client.generate("m", wanted(2)).await.unwrap();
    let info = tokio::spawn({
        let client = client.clone();
        async move { client.model_info("m").await }
    });
    fake.received().await;
    fake.send(r#"TOKEN [{"stream_id":1,"token":4}]"#).await;
    assert!(items.next().await.unwrap().is_ok());
    fake.received().await;
    let began = Instant::now();
    drop(fake);
    let error = items.next().await.unwrap().unwrap_err();
    assert_eq!(error.reason, LmtpReason::ConnectionLost);
    assert!(error.reason.is_retryable());
    assert_eq!(
        info.await.unwrap().unwrap_err().reason,
        LmtpReason::ConnectionLost
    );
    client.closed().await;
    let refused = client.generate("m", wanted(2)).await.unwrap_err();
    assert_eq!(refused.reason, LmtpReason::ConnectionLost);
    assert_eq!(began.elapsed(), Duration::ZERO);
}

/// A reader that does not read is cut off when other streams wait, and delays none of them.
#[tokio::test(start_paused = true)]
async fn lm_702_a_slow_reader_does_not_delay_other_streams() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let slow = ask(&client, &mut fake, 1_000_000).await;
    let quick = ask(&client, &mut fake, 2).await;
    let item = r#"{"stream_id":1,"token":4}"#;
    let step = format!("TOKEN [{}]", vec![item; 128].join(","));
    for _ in 0..=ITEMS_MAX / 128 {
        fake.send(&step).await;
    }
    fake.send(r#"TOKEN [{"stream_id":2,"token":1},{"stream_id":2,"token":2}]"#)
        .await;
    assert_eq!(all(quick).await, Ok((vec![1, 2], StreamFinish::Length)));
    let (tokens, why, _) = all(slow).await.unwrap_err();
    assert_eq!((tokens.len(), why), (ITEMS_MAX - 1, LmtpReason::Stalled));
}

/// Answers the negotiation with these features.
async fn agree(fake: &mut Fake, features: &str) {
    let incoming = fake.received().await;
    let asked = r#"MODEL_INFO {"model":"m","stream_id":1,"data":{"model":"m","lmtp":{"version":2,"features":["status","cancel","usage","resume","lora"]}}}"#;
    assert_eq!(incoming, asked);
    fake.send(&format!(
        r#"MSG [{{"stream_id":1,"model_info":{{"model":"m"}}{features}}}]"#
    ))
    .await;
}

const AGREED: &str = r#","lmtp":{"version":2,"features":["cancel","usage"],"load":{"running":2,"queued":1,"parked":0}}"#;

/// LM-961, LM-962: an abandoned call is cancelled at once, whether it has begun or not, and a deadline is sent to the
/// peer.
#[tokio::test(start_paused = true)]
async fn lm_702_a_dropped_stream_is_cancelled_at_a_peer_of_version_2() {
    let (client, mut fake) = pair(ConnectOptions::default());
    let deadline = Instant::now() + Duration::from_secs(7);
    let until = Some(deadline);
    let items = client.generate_until("m", wanted(9), until).await.unwrap();
    agree(&mut fake, AGREED).await;
    let incoming = fake.received().await;
    assert!(
        incoming.ends_with(r#""stream_id":2,"deadline_ms":7000}"#),
        "{incoming}"
    );
    assert_eq!((client.load(), client.is_draining()), (Some(3), false));
    drop(items);
    let cancel = r#"CANCEL {"model":"m","stream_id":3,"streams":[2]}"#;
    assert_eq!(fake.received().await, cancel);
    // It counts until its end is received.
    assert_eq!(client.outstanding(), 1);
    fake.send(r#"TOKEN [{"stream_id":2,"finish_reason":"cancelled"}]"#)
        .await;
    fake.send(r#"MSG [{"stream_id":3,"cancelled":[2],"unknown":[]}]"#)
        .await;
    let mut items = client.generate("m", wanted(1)).await.unwrap();
    fake.received().await;
    assert_eq!(client.outstanding(), 1);
    let usage = r#"{"prompt_tokens":2,"cached_tokens":1,"completion_tokens":1}"#;
    fake.send(&format!(
        r#"TOKEN [{{"stream_id":4,"token":5,"finish_reason":"stop","usage":{usage}}}]"#
    ))
    .await;
    let item = items.next().await.unwrap().unwrap();
    assert_eq!(item.usage.unwrap().cached_tokens, 1);
    drop(items);
    // A stream that has ended is not cancelled.
    let _next = client.generate("m", wanted(1)).await.unwrap();
    assert!(fake.received().await.starts_with("GENERATE"));
}

/// LM-703: a peer that has not agreed gets no messages of version 2, and calls do not wait for one that does not
/// answer.
#[tokio::test(start_paused = true)]
async fn lm_901_a_peer_without_version_2_gets_the_base_protocol() {
    for answers in [true, false] {
        let (client, mut fake) = pair(ConnectOptions::default());
        let began = Instant::now();
        let items = client.generate("m", wanted(2)).await.unwrap();
        if answers {
            agree(&mut fake, "").await;
        } else {
            fake.received().await;
        }
        assert_eq!(
            fake.received().await,
            r#"GENERATE {"max_tokens":2,"temperature":0.0,"top_logprobs":1,"model":"m","prompt":[1,2],"stream_id":2}"#
        );
        assert_eq!(began.elapsed().as_secs(), if answers { 0 } else { 5 });
        drop(items);
        let _next = client.generate("m", wanted(2)).await.unwrap();
        assert!(fake.received().await.starts_with("GENERATE"), "no CANCEL");
    }
}

/// LM-903: a MODEL_INFO call of the client also negotiates, and later calls wait for its answer.
#[tokio::test(start_paused = true)]
async fn lm_901_model_info_also_negotiates_features() {
    let (client, mut fake) = pair(ConnectOptions::default());
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.model_info("m").await }
    });
    tokio::task::yield_now().await;
    let _items = client.generate("m", wanted(2)).await.unwrap();
    agree(&mut fake, AGREED).await;
    assert_eq!(asking.await.unwrap().unwrap(), r#"{"model":"m"}"#);
    assert!(fake.received().await.contains("\"stream_id\":2"));
}

/// A peer that sends this many items of stream 1, as fast as they are read.
fn flood(mut fake: Fake, count: usize) {
    tokio::spawn(async move {
        let item = r#"{"stream_id":1,"token":4}"#;
        let step = format!("TOKEN [{}]", vec![item; 128].join(","));
        for _ in 0..count / 128 {
            fake.send(&step).await;
        }
        fake.received().await;
    });
}

#[tokio::test(start_paused = true)]
async fn lm_702_a_single_slow_reader_pauses_the_connection_and_loses_nothing() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let count = 16 * ITEMS_MAX;
    let mut items = ask(&client, &mut fake, 1_000_000).await;
    flood(fake, count);
    let mut read = 0;
    while read < count {
        // Longer than any limit between two items; the unread ones had arrived in time.
        if read % ITEMS_MAX == 0 {
            tokio::time::sleep(Duration::from_secs(40)).await;
        }
        let item = items.next().await.unwrap();
        assert_eq!(item.map(|item| item.token), Ok(Some(4)), "{read}");
        read += 1;
    }
}

#[tokio::test(start_paused = true)]
async fn lm_702_a_stream_that_is_never_read_fails_as_stalled() {
    let (client, mut fake) = pair(ConnectOptions::base());
    let items = ask(&client, &mut fake, 1_000_000).await;
    flood(fake, 2 * ITEMS_MAX);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let (tokens, why, message) = all(items).await.unwrap_err();
    assert_eq!((tokens.len(), why), (ITEMS_MAX - 1, LmtpReason::Stalled));
    assert!(message.contains("not read"), "{message}");
}

/// LM-411
#[tokio::test(start_paused = true)]
async fn lm_711_invalid_logprobs_are_detected() {
    for (logprob, raw) in [("0.04", false), ("0.06", true)] {
        let (client, mut fake) = pair(ConnectOptions::base());
        let items = ask(&client, &mut fake, 1).await;
        fake.send(&format!(
            r#"TOKEN [{{"stream_id":1,"token":4,"logprob":{logprob}}}]"#
        ))
        .await;
        all(items).await.unwrap();
        assert_eq!(client.raw_logprobs(), raw, "{logprob}");
    }
}

/// A peer that accepts a connection whenever one is put here.
#[derive(Clone, Default)]
struct ReturningPeer(Arc<Mutex<(Vec<Instant>, Option<LmtpConnection>)>>);

impl DialPeer for ReturningPeer {
    async fn dial(&self) -> Result<LmtpConnection, LmtpError> {
        let mut state = self.0.lock().unwrap();
        state.0.push(Instant::now());
        state.1.take().ok_or_else(|| lost("away"))
    }
}

#[tokio::test(start_paused = true)]
async fn lm_713_a_lost_connection_is_restored_and_no_call_is_repeated() {
    let peer = ReturningPeer::default();
    let (ours, theirs) = duplex(1 << 16);
    let client = LmtpClient::keeping(
        peer.clone(),
        Some(LmtpConnection::over(ours)),
        ConnectOptions::base(),
    );
    let items = client.generate("m", wanted(2)).await.unwrap();
    let mut fake = Fake(BufReader::new(theirs));
    fake.received().await;
    let began = Instant::now();
    drop(fake);
    assert_eq!(reason(all(items).await), LmtpReason::ConnectionLost);
    // Away: a call waits as long as connecting may take, and no longer.
    let late = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(reason(all(late).await), LmtpReason::ConnectionLost);
    assert_eq!(began.elapsed().as_secs(), 5);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let tries = peer.0.lock().unwrap().0.clone();
    let mut before = began;
    for (index, at) in tries.iter().enumerate() {
        let most = Duration::from_millis(100 << index.min(7)).min(Duration::from_secs(10));
        let span = *at - before;
        let millisecond = Duration::from_millis(1);
        assert!(
            span + millisecond >= most / 2 && span <= most + millisecond,
            "{index}: {span:?}"
        );
        before = *at;
    }
    // Connected again: only calls that still wait are sent.
    let (ours, theirs) = duplex(1 << 16);
    peer.0.lock().unwrap().1 = Some(LmtpConnection::over(ours));
    tokio::time::sleep(Duration::from_secs(6)).await;
    let items = client.generate("m", wanted(1)).await.unwrap();
    let mut fake = Fake(BufReader::new(theirs));
    assert!(fake.received().await.contains("\"max_tokens\":1,"));
    fake.send(r#"TOKEN [{"stream_id":1,"token":4}]"#).await;
    assert_eq!(all(items).await, Ok((vec![4], StreamFinish::Length)));
}

#[tokio::test(start_paused = true)]
async fn lm_713_calls_above_the_limit_wait_in_their_callers() {
    let client = LmtpClient::keeping(ReturningPeer::default(), None, ConnectOptions::base());
    let mut queued = Vec::new();
    // `WAITING_MAX` in the keeper and `ASKS_MAX` in the channel.
    for _ in 0..128 {
        queued.push(client.generate("m", wanted(2)).await.unwrap());
        tokio::task::yield_now().await;
    }
    let began = Instant::now();
    let refused = client.generate("m", wanted(2)).await.unwrap_err();
    assert_eq!(
        refused.message,
        "too many calls wait for the upstream: try again later"
    );
    for items in queued {
        assert_eq!(reason(all(items).await), LmtpReason::ConnectionLost);
    }
    assert_eq!(began.elapsed().as_secs(), 5);
}

/// A peer that accepts one WebSocket.
async fn socket() -> (String, impl Future<Output = WebSocketStream<TcpStream>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accepted = async move {
        let (io, _) = listener.accept().await.unwrap();
        accept_async(io).await.unwrap()
    };
    (address, accepted)
}

#[tokio::test]
async fn lm_701_a_websocket_carries_a_frame_for_each_message() {
    let (address, accepted) = socket().await;
    let address = PeerAddress::parse(&address).unwrap();
    let connecting = LmtpClient::connect(address, ConnectOptions::base());
    let (client, mut peer) = tokio::join!(connecting, accepted);
    let client = client.unwrap();
    let items = client.generate("m", wanted(2)).await.unwrap();
    let received = peer.next().await.unwrap().unwrap().into_text().unwrap();
    assert!(
        received.starts_with("GENERATE {") && received.ends_with('}'),
        "{received}"
    );
    // Binary frames are ignored, and one text frame may contain several messages.
    peer.send(Message::binary(&b"TOKEN"[..])).await.unwrap();
    let two = "TOKEN [{\"stream_id\":1,\"token\":4}]\nTOKEN [{\"stream_id\":1,\"token\":5}]";
    peer.send(Message::text(two)).await.unwrap();
    assert_eq!(all(items).await, Ok((vec![4, 5], StreamFinish::Length)));
    let items = client.generate("m", wanted(2)).await.unwrap();
    peer.close(None).await.unwrap();
    assert_eq!(reason(all(items).await), LmtpReason::ConnectionLost);
}

#[tokio::test]
async fn lm_709_a_silent_peer_is_pinged_and_then_given_up() {
    let (address, accepted) = socket().await;
    let options = ConnectOptions {
        ping: Some(Duration::from_millis(1)),
        idle_timeout: Some(Duration::from_millis(20)),
        ..ConnectOptions::base()
    };
    let address = PeerAddress::parse(&address).unwrap();
    let connecting = LmtpClient::connect(address, options);
    let (client, mut peer) = tokio::join!(connecting, accepted);
    let items = client.unwrap().generate("m", wanted(2)).await.unwrap();
    let mut pinged = false;
    while !pinged {
        // Reading also sends pongs.
        pinged = matches!(peer.next().await, Some(Ok(Message::Ping(_))));
    }
    // From here on nothing is read, so no pongs are sent.
    assert_eq!(reason(all(items).await), LmtpReason::ConnectionLost);
    drop(peer);
}

#[tokio::test]
async fn lm_701_a_unix_socket_and_the_pipes_of_a_program_carry_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let answer = r#"TOKEN [{"stream_id":1,"token":4,"finish_reason":"stop"}]"#;
    let served = tokio::spawn(async move {
        let (io, _) = listener.accept().await.unwrap();
        let mut io = BufReader::new(io);
        let mut line = String::new();
        io.read_line(&mut line).await.unwrap();
        io.write_all(format!("{answer}\r\n").as_bytes())
            .await
            .unwrap();
        line
    });
    let url = format!("unix:{}", path.display());
    let address = PeerAddress::parse(&url).unwrap();
    let client = LmtpClient::connect(address, ConnectOptions::base())
        .await
        .unwrap();
    let items = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(all(items).await, Ok((vec![4], StreamFinish::Stop)));
    assert!(served.await.unwrap().starts_with("GENERATE {"));

    let (script, pid) = (folder.path().join("p"), folder.path().join("pid"));
    let program = format!(
        "echo $$ > {}\nread line\necho '{answer}'\nread more\n",
        pid.display()
    );
    std::fs::write(&script, program).unwrap();
    let url = format!("stdio:sh {}", script.display());
    let address = PeerAddress::parse(&url).unwrap();
    let client = LmtpClient::connect(address, ConnectOptions::base())
        .await
        .unwrap();
    let items = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(all(items).await, Ok((vec![4], StreamFinish::Stop)));
    let pid = std::fs::read_to_string(pid).unwrap();
    let process = std::path::Path::new("/proc").join(pid.trim());
    assert!(process.exists(), "it waits for more");
    drop(client);
    // The child is killed on drop; it disappears once the runtime has reaped it.
    while std::fs::read_to_string(process.join("cmdline")).is_ok_and(|line| !line.is_empty()) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn lm_701_an_absent_peer_and_a_refused_upgrade_are_distinguished() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let refusing = tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        let answer = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n";
        io.write_all(answer).await.unwrap();
        io.shutdown().await.unwrap();
        // Reads the request to its end, because closing with unread data would reset the connection and lose the
        // answer.
        let _ = tokio::io::copy(&mut io, &mut tokio::io::sink()).await;
    });
    let refused = async |url: &str| {
        let address = PeerAddress::parse(url).unwrap().with_key("k");
        let client = LmtpClient::connect(address, ConnectOptions::base()).await;
        client.err().map(|error| error.reason)
    };
    assert_eq!(refused(&address).await, Some(LmtpReason::InsufficientScope));
    refusing.await.unwrap();
    assert_eq!(refused(&address).await, Some(LmtpReason::ConnectionLost));
    assert_eq!(
        refused("unix:/nowhere/s").await,
        Some(LmtpReason::ConnectionLost)
    );
    assert_eq!(
        refused("stdio:/nowhere/program").await,
        Some(LmtpReason::ConnectionLost)
    );
}
