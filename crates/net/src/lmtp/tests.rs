//! A client against scripted peers: over lines in memory with a made-up clock, and over real sockets.

mod apart;

use std::sync::Mutex;

use futures::{SinkExt, StreamExt};
use sapwood_proto::lmtp::{Finish, Reason};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, accept_async};

use super::*;

/// A peer at the other end of a pipe.
struct Fake(BufReader<DuplexStream>);

impl Fake {
    async fn heard(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        line.trim_end().to_owned()
    }

    async fn say(&mut self, line: &str) {
        self.0.write_all(line.as_bytes()).await.unwrap();
        self.0.write_all(b"\n").await.unwrap();
    }
}

fn pair(options: Options) -> (Client, Fake) {
    let (ours, theirs) = duplex(1 << 20);
    (Client::over(ours, options), Fake(BufReader::new(theirs)))
}

/// Asks for a stream, and lets the peer hear it.
async fn ask(client: &Client, fake: &mut Fake, max_tokens: u32) -> Items {
    let items = client.generate("m", wanted(max_tokens)).await.unwrap();
    fake.heard().await;
    items
}

/// Asks what a model is; the peer answers this.
async fn info(client: &Client, fake: &mut Fake, answer: &str) -> Result<String, Fault> {
    let answering = async {
        fake.heard().await;
        fake.say(answer).await;
    };
    tokio::join!(client.model_info("m"), answering).0
}

fn wanted(max_tokens: u32) -> Generate {
    Generate {
        prompt: vec![1, 2],
        max_tokens,
        ..Generate::default()
    }
}

type Ending = Result<(Vec<u32>, Finish), (Vec<u32>, Reason, String)>;

/// The tokens of a stream, and how it ended; after its end there is nothing.
async fn all(mut items: Items) -> Ending {
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
            Err(fault) => {
                assert_eq!(items.next().await, None);
                return Err((tokens, fault.reason, fault.message.into_owned()));
            }
        }
    }
}

fn reason(ending: Ending) -> Reason {
    ending.expect_err("it fails").1
}

#[tokio::test(start_paused = true)]
async fn lm_702_one_connection_carries_many_calls_and_a_dropped_stream_counts_until_its_end() {
    let (client, mut fake) = pair(Options::base());
    let first = client.generate("m", wanted(2)).await.unwrap();
    let second = client.generate("m", wanted(3)).await.unwrap();
    let scored = Score {
        prompt: vec![1],
        scored: vec![7, 8],
        top_logprobs: 1,
    };
    let third = client.score("m", scored).await.unwrap();
    for id in 1..=3 {
        let heard = fake.heard().await;
        assert!(heard.contains(&format!("\"stream_id\":{id}")), "{heard}");
    }
    drop(second);
    fake.say(r#"TOKEN [{"stream_id":2,"token":5,"logprob":-1.0},{"stream_id":1,"token":4,"logprob":-1.0},{"stream_id":3,"token":7,"logprob":-1.0}]"#).await;
    fake.say(r#"TOKEN [{"stream_id":3,"token":8,"logprob":-1.0,"finish_reason":"stop"},{"stream_id":1,"token":9,"logprob":-1.0,"finish_reason":"length"}]"#).await;
    assert_eq!(all(first).await, Ok((vec![4, 9], Finish::Length)));
    assert_eq!(all(third).await, Ok((vec![7, 8], Finish::Stop)));
    assert_eq!(client.outstanding(), 1);
    fake.say(r#"TOKEN [{"stream_id":2,"token":5,"finish_reason":"stop"}]"#)
        .await;
    // What was said before its answer was heard before it.
    let answer = r#"MSG [{"stream_id":4,"model_info":{"model":"m"}}]"#;
    let facts = info(&client, &mut fake, answer).await;
    assert_eq!(facts.unwrap(), r#"{"model":"m"}"#);
    assert_eq!(client.outstanding(), 0);
}

#[tokio::test(start_paused = true)]
async fn lm_703_only_what_a_base_peer_knows_goes_out() {
    let (client, mut fake) = pair(Options::base());
    let _items = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(
        fake.heard().await,
        r#"GENERATE {"max_tokens":2,"temperature":0.0,"top_logprobs":1,"model":"m","prompt":[1,2],"stream_id":1}"#
    );
    let large = Generate {
        prompt: vec![1_000_000; 600_000],
        ..wanted(2)
    };
    let refused = client.generate("m", large).await.unwrap();
    assert_eq!(reason(all(refused).await), Reason::MessageTooLarge);
    let _items = client.generate("m", wanted(1)).await.unwrap();
    assert!(
        fake.heard().await.contains("\"stream_id\":2"),
        "nothing was sent"
    );
}

#[tokio::test(start_paused = true)]
async fn lm_704_what_the_peer_lacks_is_refused_before_it_is_sent() {
    let (client, mut fake) = pair(Options::base());
    for wanted in [
        Generate {
            seed: Some(1),
            ..wanted(1)
        },
        Generate {
            stop: vec!["x".into()],
            ..wanted(1)
        },
        Generate {
            min_tokens: 1,
            ..wanted(1)
        },
    ] {
        let refused = client.generate("m", wanted).await.unwrap();
        assert_eq!(reason(all(refused).await), Reason::UnsupportedOperation);
    }
    let _items = client.generate("m", wanted(1)).await.unwrap();
    assert!(
        fake.heard().await.contains("\"stream_id\":1"),
        "nothing was sent"
    );
}

#[tokio::test(start_paused = true)]
async fn lm_705_what_servers_really_send_is_understood() {
    let ended = |tokens: &[u32], finish| Ok((tokens.to_vec(), finish));
    let failed = |tokens: &[u32], message: &str| {
        Err((tokens.to_vec(), Reason::UpstreamError, message.to_owned()))
    };
    for (what, said, expect) in [
        (
            "an object instead of a list",
            r#"TOKEN {"stream_id":1,"token":3,"logprob":-1,"finish_reason":"stop"}"#,
            ended(&[3], Finish::Stop),
        ),
        (
            "types and members that are unknown, and lines without a space",
            "HELLO\nNEWS {\"a\":1}\nTOKEN [{\"stream_id\":1,\"token\":3,\"new\":{},\"finish_reason\":\"stop\"}]",
            ended(&[3], Finish::Stop),
        ),
        (
            "items of streams that there are not",
            "TOKEN [{\"stream_id\":77,\"token\":3},{\"token\":4}]\nTOKEN [{\"stream_id\":1,\"token\":3,\"finish_reason\":\"stop\"}]",
            ended(&[3], Finish::Stop),
        ),
        (
            "any reason, and an end without a token",
            "TOKEN [{\"stream_id\":1,\"token\":3,\"error\":null}]\nTOKEN [{\"stream_id\":1,\"finish_reason\":\"tired\"}]",
            ended(&[3], Finish::Other("tired".into())),
        ),
        (
            "an error of any type",
            "TOKEN [{\"stream_id\":1,\"token\":3}]\nTOKEN [{\"stream_id\":1,\"error\":{ \"a\": [1] }}]",
            failed(&[3], r#"{"a":[1]}"#),
        ),
    ] {
        let (client, mut fake) = pair(Options::base());
        let items = client.generate("m", wanted(9)).await.unwrap();
        fake.heard().await;
        fake.say(said).await;
        assert_eq!(all(items).await, expect, "{what}");
    }
}

/// LM-705
#[tokio::test(start_paused = true)]
async fn lm_706_bare_words_are_numbers_and_the_unreadable_fails_streams_rather_than_hangs() {
    let (client, mut fake) = pair(Options::base());
    let mut items = ask(&client, &mut fake, 9).await;
    let other = ask(&client, &mut fake, 9).await;
    fake.say(r#"TOKEN [{"stream_id":1,"token":3,"logprob":-Infinity,"top_logprobs":{"3":-Infinity,"4":NaN}}]"#).await;
    let item = items.next().await.unwrap().unwrap();
    assert_eq!(
        (item.logprob, item.top),
        (Some(f32::NEG_INFINITY), vec![(3, f32::NEG_INFINITY)])
    );
    fake.say(r#"TOKEN [{"stream_id":1,"token":3,"logprob":NaN}]"#)
        .await;
    assert_eq!(items.next().await.unwrap().unwrap().logprob, None);
    // Not one of a stream's messages.
    fake.say("MSG [{").await;
    fake.say(r#"TOKEN [{"stream_id":1,"token":3}]"#).await;
    assert!(items.next().await.unwrap().is_ok());
    fake.say("TOKEN [{").await;
    assert_eq!(reason(all(items).await), Reason::UpstreamError);
    assert_eq!(reason(all(other).await), Reason::UpstreamError);
}

#[tokio::test(start_paused = true)]
async fn lm_707_a_peer_that_runs_on_is_cut_off() {
    let (client, mut fake) = pair(Options::base());
    let short = ask(&client, &mut fake, 2).await;
    let ended = ask(&client, &mut fake, 9).await;
    for _ in 0..3 {
        fake.say(
            r#"TOKEN [{"stream_id":1,"token":3},{"stream_id":2,"token":5,"finish_reason":"stop"}]"#,
        )
        .await;
    }
    assert_eq!(all(short).await, Ok((vec![3, 3], Finish::Length)));
    assert_eq!(all(ended).await, Ok((vec![5], Finish::Stop)));
}

#[tokio::test(start_paused = true)]
async fn lm_708_a_message_with_an_error_ends_its_stream_or_request() {
    let (client, mut fake) = pair(Options::base());
    let items = ask(&client, &mut fake, 2).await;
    let other = ask(&client, &mut fake, 1).await;
    fake.say(r#"MSG [{"stream_id":1,"error":"Missing required parameter 'x'"}]"#)
        .await;
    let told = "Missing required parameter 'x'".to_owned();
    assert_eq!(
        all(items).await,
        Err((Vec::new(), Reason::UpstreamError, told))
    );
    let answer = r#"MSG [{"stream_id":3,"error":"no","code":"model_not_found"}]"#;
    let refused = info(&client, &mut fake, answer).await.unwrap_err();
    assert_eq!(refused.reason, Reason::ModelNotFound);
    fake.say(r#"TOKEN [{"stream_id":2,"token":4}]"#).await;
    assert_eq!(all(other).await, Ok((vec![4], Finish::Length)));
}

/// LM-710: a reference server that cannot load a model says nothing.
#[tokio::test(start_paused = true)]
async fn lm_709_nothing_waits_for_ever() {
    let (client, mut fake) = pair(Options::base());
    let began = Instant::now();
    let silent = client.generate("absent", wanted(2)).await.unwrap();
    fake.heard().await;
    let stuck = ask(&client, &mut fake, 2).await;
    fake.say(r#"TOKEN [{"stream_id":2,"token":4}]"#).await;
    let refused = client.model_info("m").await.unwrap_err();
    assert_eq!(
        (refused.reason, began.elapsed().as_secs()),
        (Reason::Timeout, 5)
    );
    assert_eq!(reason(all(stuck).await), Reason::Timeout);
    assert_eq!(began.elapsed().as_secs(), 60);
    let (_, why, message) = all(silent).await.unwrap_err();
    assert_eq!((why, began.elapsed().as_secs()), (Reason::Timeout, 300));
    assert!(message.contains("absent"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn lm_709_limits_can_be_turned_off() {
    let options = Options {
        first_item_timeout: None,
        item_timeout: None,
        ..Options::base()
    };
    let (client, mut fake) = pair(options);
    let items = ask(&client, &mut fake, 2).await;
    for _ in 0..2 {
        tokio::time::advance(Duration::from_secs(100_000)).await;
        fake.say(r#"TOKEN [{"stream_id":1,"token":4}]"#).await;
    }
    assert_eq!(all(items).await, Ok((vec![4, 4], Finish::Length)));
}

#[tokio::test(start_paused = true)]
async fn lm_709_a_lost_connection_fails_every_call_at_once() {
    let (client, mut fake) = pair(Options::base());
    let mut items = client.generate("m", wanted(2)).await.unwrap();
    let info = tokio::spawn({
        let client = client.clone();
        async move { client.model_info("m").await }
    });
    fake.heard().await;
    fake.say(r#"TOKEN [{"stream_id":1,"token":4}]"#).await;
    assert!(items.next().await.unwrap().is_ok());
    fake.heard().await;
    let began = Instant::now();
    drop(fake);
    let fault = items.next().await.unwrap().unwrap_err();
    assert_eq!(fault.reason, Reason::ConnectionLost);
    assert!(fault.reason.is_retryable());
    assert_eq!(
        info.await.unwrap().unwrap_err().reason,
        Reason::ConnectionLost
    );
    client.closed().await;
    let refused = client.generate("m", wanted(2)).await.unwrap_err();
    assert_eq!(refused.reason, Reason::ConnectionLost);
    assert_eq!(began.elapsed(), Duration::ZERO);
}

/// Who does not read is cut off when others wait, and holds nobody up.
#[tokio::test(start_paused = true)]
async fn lm_702_a_slow_reader_slows_only_itself() {
    let (client, mut fake) = pair(Options::base());
    let slow = ask(&client, &mut fake, 1_000_000).await;
    let quick = ask(&client, &mut fake, 2).await;
    let item = r#"{"stream_id":1,"token":4}"#;
    let step = format!("TOKEN [{}]", vec![item; 128].join(","));
    for _ in 0..=ITEMS_MAX / 128 {
        fake.say(&step).await;
    }
    fake.say(r#"TOKEN [{"stream_id":2,"token":1},{"stream_id":2,"token":2}]"#)
        .await;
    assert_eq!(all(quick).await, Ok((vec![1, 2], Finish::Length)));
    let (tokens, why, _) = all(slow).await.unwrap_err();
    assert_eq!((tokens.len(), why), (ITEMS_MAX - 1, Reason::Stalled));
}

/// An answer to what is asked first, and what was agreed on.
async fn agree(fake: &mut Fake, features: &str) {
    let heard = fake.heard().await;
    let asked = r#"MODEL_INFO {"model":"m","stream_id":1,"data":{"model":"m","lmtp":{"version":2,"features":["status","cancel","usage","resume"]}}}"#;
    assert_eq!(heard, asked);
    fake.say(&format!(
        r#"MSG [{{"stream_id":1,"model_info":{{"model":"m"}}{features}}}]"#
    ))
    .await;
}

const AGREED: &str = r#","lmtp":{"version":2,"features":["cancel","usage"],"load":{"running":2,"queued":1,"parked":0}}"#;

/// LM-961, LM-962: what is given up is cancelled at once, whether it has begun or not, and a deadline is passed on.
#[tokio::test(start_paused = true)]
async fn lm_702_a_dropped_stream_is_cancelled_at_a_peer_that_knows_how() {
    let (client, mut fake) = pair(Options::default());
    let deadline = Instant::now() + Duration::from_secs(7);
    let until = Some(deadline);
    let items = client.generate_until("m", wanted(9), until).await.unwrap();
    agree(&mut fake, AGREED).await;
    let heard = fake.heard().await;
    assert!(
        heard.ends_with(r#""stream_id":2,"deadline_ms":7000}"#),
        "{heard}"
    );
    assert_eq!((client.load(), client.is_draining()), (Some(3), false));
    drop(items);
    let cancel = r#"CANCEL {"model":"m","stream_id":3,"streams":[2]}"#;
    assert_eq!(fake.heard().await, cancel);
    // It counts until its end is seen.
    assert_eq!(client.outstanding(), 2);
    fake.say(r#"TOKEN [{"stream_id":2,"finish_reason":"cancelled"}]"#)
        .await;
    fake.say(r#"MSG [{"stream_id":3,"cancelled":[2],"unknown":[]}]"#)
        .await;
    let mut items = client.generate("m", wanted(1)).await.unwrap();
    fake.heard().await;
    assert_eq!(client.outstanding(), 1);
    let usage = r#"{"prompt_tokens":2,"cached_tokens":1,"completion_tokens":1}"#;
    fake.say(&format!(
        r#"TOKEN [{{"stream_id":4,"token":5,"finish_reason":"stop","usage":{usage}}}]"#
    ))
    .await;
    let item = items.next().await.unwrap().unwrap();
    assert_eq!(item.usage.unwrap().cached_tokens, 1);
    drop(items);
    // What has ended is not given up.
    let _next = client.generate("m", wanted(1)).await.unwrap();
    assert!(fake.heard().await.starts_with("GENERATE"));
}

/// LM-703: nothing new is said to a peer that has not agreed, and nothing waits for one that says nothing.
#[tokio::test(start_paused = true)]
async fn lm_901_a_peer_that_does_not_know_version_2_is_spoken_to_in_the_base_protocol() {
    for answers in [true, false] {
        let (client, mut fake) = pair(Options::default());
        let began = Instant::now();
        let items = client.generate("m", wanted(2)).await.unwrap();
        if answers {
            agree(&mut fake, "").await;
        } else {
            fake.heard().await;
        }
        assert_eq!(
            fake.heard().await,
            r#"GENERATE {"max_tokens":2,"temperature":0.0,"top_logprobs":1,"model":"m","prompt":[1,2],"stream_id":2}"#
        );
        assert_eq!(began.elapsed().as_secs(), if answers { 0 } else { 5 });
        drop(items);
        let _next = client.generate("m", wanted(2)).await.unwrap();
        assert!(fake.heard().await.starts_with("GENERATE"), "no CANCEL");
    }
}

/// LM-903: a question of its own agrees, too, and calls wait for the answer.
#[tokio::test(start_paused = true)]
async fn lm_901_what_a_model_is_and_what_is_agreed_on_is_one_question() {
    let (client, mut fake) = pair(Options::default());
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.model_info("m").await }
    });
    tokio::task::yield_now().await;
    let _items = client.generate("m", wanted(2)).await.unwrap();
    agree(&mut fake, AGREED).await;
    assert_eq!(asking.await.unwrap().unwrap(), r#"{"model":"m"}"#);
    assert!(fake.heard().await.contains("\"stream_id\":2"));
}

/// A peer that says so many items of stream 1, as fast as they are taken.
fn speaks(mut fake: Fake, count: usize) {
    tokio::spawn(async move {
        let item = r#"{"stream_id":1,"token":4}"#;
        let step = format!("TOKEN [{}]", vec![item; 128].join(","));
        for _ in 0..count / 128 {
            fake.say(&step).await;
        }
        fake.heard().await;
    });
}

#[tokio::test(start_paused = true)]
async fn lm_702_a_reader_that_is_slow_and_alone_holds_its_peer_up_and_loses_nothing() {
    let (client, mut fake) = pair(Options::base());
    let count = 16 * ITEMS_MAX;
    let mut items = ask(&client, &mut fake, 1_000_000).await;
    speaks(fake, count);
    let mut read = 0;
    while read < count {
        // Slower than any limit between two items, were they not there already.
        if read % ITEMS_MAX == 0 {
            tokio::time::sleep(Duration::from_secs(40)).await;
        }
        let item = items.next().await.unwrap();
        assert_eq!(item.map(|item| item.token), Ok(Some(4)), "{read}");
        read += 1;
    }
}

#[tokio::test(start_paused = true)]
async fn lm_702_a_reader_that_does_not_read_at_all_is_told_why_it_lost_its_stream() {
    let (client, mut fake) = pair(Options::base());
    let items = ask(&client, &mut fake, 1_000_000).await;
    speaks(fake, 2 * ITEMS_MAX);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let (tokens, why, message) = all(items).await.unwrap_err();
    assert_eq!((tokens.len(), why), (ITEMS_MAX - 1, Reason::Stalled));
    assert!(message.contains("not read"), "{message}");
}

/// LM-411
#[tokio::test(start_paused = true)]
async fn lm_711_logprobs_that_are_none_are_noticed() {
    for (logprob, raw) in [("0.04", false), ("0.06", true)] {
        let (client, mut fake) = pair(Options::base());
        let items = ask(&client, &mut fake, 1).await;
        fake.say(&format!(
            r#"TOKEN [{{"stream_id":1,"token":4,"logprob":{logprob}}}]"#
        ))
        .await;
        all(items).await.unwrap();
        assert_eq!(client.raw_logprobs(), raw, "{logprob}");
    }
}

/// A peer that is there each time one is put here.
#[derive(Clone, Default)]
struct Comes(Arc<Mutex<(Vec<Instant>, Option<Wire>)>>);

impl Dial for Comes {
    async fn dial(&self) -> Result<Wire, Fault> {
        let mut state = self.0.lock().unwrap();
        state.0.push(Instant::now());
        state.1.take().ok_or_else(|| lost("away"))
    }
}

#[tokio::test(start_paused = true)]
async fn lm_713_a_lost_connection_is_made_anew_and_nothing_is_repeated() {
    let comes = Comes::default();
    let (ours, theirs) = duplex(1 << 16);
    let client = Client::keeping(comes.clone(), Some(Wire::over(ours)), Options::base());
    let items = client.generate("m", wanted(2)).await.unwrap();
    let mut fake = Fake(BufReader::new(theirs));
    fake.heard().await;
    let began = Instant::now();
    drop(fake);
    assert_eq!(reason(all(items).await), Reason::ConnectionLost);
    // Away: a call waits for as long as connecting may take, and no longer.
    let late = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(reason(all(late).await), Reason::ConnectionLost);
    assert_eq!(began.elapsed().as_secs(), 5);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let tries = comes.0.lock().unwrap().0.clone();
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
    // There again: what waits is asked, and only that.
    let (ours, theirs) = duplex(1 << 16);
    comes.0.lock().unwrap().1 = Some(Wire::over(ours));
    tokio::time::sleep(Duration::from_secs(6)).await;
    let items = client.generate("m", wanted(1)).await.unwrap();
    let mut fake = Fake(BufReader::new(theirs));
    assert!(fake.heard().await.contains("\"max_tokens\":1,"));
    fake.say(r#"TOKEN [{"stream_id":1,"token":4}]"#).await;
    assert_eq!(all(items).await, Ok((vec![4], Finish::Length)));
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
    let address = Address::parse(&address).unwrap();
    let connecting = Client::connect(address, Options::base());
    let (client, mut peer) = tokio::join!(connecting, accepted);
    let client = client.unwrap();
    let items = client.generate("m", wanted(2)).await.unwrap();
    let heard = peer.next().await.unwrap().unwrap().into_text().unwrap();
    assert!(
        heard.starts_with("GENERATE {") && heard.ends_with('}'),
        "{heard}"
    );
    // Binary means nothing, and one frame may hold several messages.
    peer.send(Message::binary(&b"TOKEN"[..])).await.unwrap();
    let two = "TOKEN [{\"stream_id\":1,\"token\":4}]\nTOKEN [{\"stream_id\":1,\"token\":5}]";
    peer.send(Message::text(two)).await.unwrap();
    assert_eq!(all(items).await, Ok((vec![4, 5], Finish::Length)));
    let items = client.generate("m", wanted(2)).await.unwrap();
    peer.close(None).await.unwrap();
    assert_eq!(reason(all(items).await), Reason::ConnectionLost);
}

#[tokio::test]
async fn lm_709_a_peer_is_pinged_and_given_up_when_it_is_silent() {
    let (address, accepted) = socket().await;
    let options = Options {
        ping: Some(Duration::from_millis(1)),
        silence: Some(Duration::from_millis(20)),
        ..Options::base()
    };
    let address = Address::parse(&address).unwrap();
    let connecting = Client::connect(address, options);
    let (client, mut peer) = tokio::join!(connecting, accepted);
    let items = client.unwrap().generate("m", wanted(2)).await.unwrap();
    let mut pinged = false;
    while !pinged {
        // Reading also answers.
        pinged = matches!(peer.next().await, Some(Ok(Message::Ping(_))));
    }
    // From here on nothing is read, and so nothing is answered.
    assert_eq!(reason(all(items).await), Reason::ConnectionLost);
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
    let address = Address::parse(&url).unwrap();
    let client = Client::connect(address, Options::base()).await.unwrap();
    let items = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(all(items).await, Ok((vec![4], Finish::Stop)));
    assert!(served.await.unwrap().starts_with("GENERATE {"));

    let (script, pid) = (folder.path().join("p"), folder.path().join("pid"));
    let program = format!(
        "echo $$ > {}\nread line\necho '{answer}'\nread more\n",
        pid.display()
    );
    std::fs::write(&script, program).unwrap();
    let url = format!("stdio:sh {}", script.display());
    let address = Address::parse(&url).unwrap();
    let client = Client::connect(address, Options::base()).await.unwrap();
    let items = client.generate("m", wanted(2)).await.unwrap();
    assert_eq!(all(items).await, Ok((vec![4], Finish::Stop)));
    let pid = std::fs::read_to_string(pid).unwrap();
    let process = std::path::Path::new("/proc").join(pid.trim());
    assert!(process.exists(), "it waits for more");
    drop(client);
    // Killed on drop; it is gone once it is reaped, which the runtime does.
    while std::fs::read_to_string(process.join("cmdline")).is_ok_and(|line| !line.is_empty()) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn lm_701_nobody_there_and_no_upgrade_are_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let refusing = tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        let answer = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n";
        io.write_all(answer).await.unwrap();
        io.shutdown().await.unwrap();
        // What it sent is read, lest the answer be thrown away.
        let _ = tokio::io::copy(&mut io, &mut tokio::io::sink()).await;
    });
    let refused = async |url: &str| {
        let address = Address::parse(url).unwrap().with_key("k");
        let client = Client::connect(address, Options::base()).await;
        client.err().map(|fault| fault.reason)
    };
    assert_eq!(refused(&address).await, Some(Reason::InsufficientScope));
    refusing.await.unwrap();
    assert_eq!(refused(&address).await, Some(Reason::ConnectionLost));
    assert_eq!(
        refused("unix:/nowhere/s").await,
        Some(Reason::ConnectionLost)
    );
    assert_eq!(
        refused("stdio:/nowhere/program").await,
        Some(Reason::ConnectionLost)
    );
}
