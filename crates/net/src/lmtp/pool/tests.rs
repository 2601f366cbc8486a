//! Pools over in-memory peers that come and go, with virtual time.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex};
use tokio::time::sleep;

use super::super::keeper::DialPeer;
use super::super::wire::LmtpConnection;
use super::*;

/// How a peer behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Serves,
    /// Its connections stay open, but it sends nothing.
    Silent,
    /// It refuses new calls.
    Drains,
    /// Its engine fails.
    Fails,
    Closed,
}

/// A peer. Every stream has one token, which is the peer's number.
#[derive(Clone)]
struct Fake {
    number: u32,
    vocabulary: u32,
    mode: Arc<watch::Sender<Mode>>,
}

impl Fake {
    fn new(number: u32, mode: Mode) -> Self {
        Self {
            number,
            vocabulary: 100,
            mode: Arc::new(watch::Sender::new(mode)),
        }
    }

    fn becomes(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    async fn serve(self, io: DuplexStream) {
        let mut mode = self.mode.subscribe();
        let mut io = BufReader::new(io);
        loop {
            let mut line = String::new();
            // A half-read line may be dropped: the peer disconnects.
            tokio::select! {
                _ = mode.wait_for(|mode| *mode == Mode::Closed) => return,
                read = io.read_line(&mut line) => if read.unwrap_or(0) == 0 {
                    return;
                },
            }
            let mode = *self.mode.borrow();
            if let Some(answer) = self.answer(&line, mode) {
                io.write_all(answer.as_bytes()).await.unwrap();
            }
        }
    }

    fn answer(&self, line: &str, mode: Mode) -> Option<String> {
        let (word, payload) = line.split_once(' ').unwrap();
        let payload: Value = serde_json::from_str(payload).unwrap();
        let id = &payload["stream_id"];
        let (number, size) = (self.number, self.vocabulary);
        Some(match (word, mode) {
            (_, Mode::Silent | Mode::Closed) => return None,
            ("MODEL_INFO", _) => format!(
                "MSG [{{\"stream_id\":{id},\"model_info\":{{\"model\":\"m\",\"vocab_size\":{size}}}}}]\n"
            ),
            (_, Mode::Drains) => {
                format!("TOKEN [{{\"stream_id\":{id},\"error\":\"bye\",\"code\":\"draining\"}}]\n")
            }
            (_, Mode::Fails) => format!(
                "TOKEN [{{\"stream_id\":{id},\"error\":\"oh\",\"code\":\"engine_error\"}}]\n"
            ),
            (_, Mode::Serves) => format!(
                "TOKEN [{{\"stream_id\":{id},\"token\":{number},\"finish_reason\":\"stop\"}}]\n"
            ),
        })
    }
}

impl DialPeer for Fake {
    async fn dial(&self) -> Result<LmtpConnection, LmtpError> {
        if *self.mode.borrow() == Mode::Closed {
            return Err(lost("away"));
        }
        let (ours, theirs) = duplex(1 << 16);
        tokio::spawn(self.clone().serve(theirs));
        Ok(LmtpConnection::over(ours))
    }
}

async fn pool(fakes: &[&Fake]) -> Result<LmtpPool, LmtpError> {
    let mut linked = Vec::new();
    for fake in fakes {
        let (wire, away) = match fake.dial().await {
            Ok(wire) => (Some(wire), None),
            Err(error) => (None, Some(error)),
        };
        let client = LmtpClient::keeping((*fake).clone(), wire, ConnectOptions::default());
        let target = fake.number.to_string();
        linked.push((PeerLink::new(client, "m".into(), target), 1, away));
    }
    LmtpPool::over(
        linked,
        ConnectOptions::default(),
        machine::PoolOptions::default(),
    )
    .await
}

/// Sets the configured peers to these.
fn keep(pool: &LmtpPool, fakes: &[&Fake]) -> Vec<String> {
    let named = fakes.iter().map(|fake| {
        let fake = (*fake).clone();
        let target = fake.number.to_string();
        let link = move |target| {
            let client = LmtpClient::keeping(fake, None, ConnectOptions::default());
            PeerLink::new(client, "m".into(), target)
        };
        (target, 1, link)
    });
    pool.keep_those(named)
}

/// Returns which peer answered a stream, or how the stream failed.
async fn asked(pool: &LmtpPool) -> Result<u32, LmtpReason> {
    let wanted = GenerateRequest {
        prompt: vec![1],
        ..GenerateRequest::default()
    };
    let mut items = pool.generate(wanted, None);
    let item = items.next().await.expect("no stream ends silently");
    let received = item.map(|item| item.token.unwrap());
    assert_eq!(items.next().await, None);
    received.map_err(|error| error.reason)
}

async fn all(pool: &LmtpPool, count: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(asked(pool).await.unwrap());
    }
    all
}

fn conditions(pool: &LmtpPool) -> Vec<Condition> {
    let slots = pool.peers().into_iter();
    slots.map(|slot| slot.condition).collect()
}

#[tokio::test(start_paused = true)]
async fn lm_801_streams_are_distributed_over_all_peers() {
    let (one, two) = (Fake::new(1, Mode::Serves), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    assert!(pool.facts().unwrap().contains("\"vocab_size\":100"));
    assert_eq!(all(&pool, 4).await, [1, 2, 1, 2]);
    assert_eq!(pool.moved(), 0);
}

#[tokio::test(start_paused = true)]
async fn lm_804_a_peer_that_is_away_at_the_start_joins_later() {
    let (one, two) = (Fake::new(1, Mode::Closed), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    assert_eq!(all(&pool, 3).await, [2, 2, 2]);
    one.becomes(Mode::Serves);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(conditions(&pool), [Condition::Serving; 2]);
    assert_eq!(all(&pool, 2).await, [1, 2]);
    let none = self::pool(&[&Fake::new(3, Mode::Closed)])
        .await
        .unwrap_err();
    assert_eq!(none.reason, LmtpReason::ConnectionLost);
}

/// LM-805: a draining server announces it, and streams move without an error.
#[tokio::test(start_paused = true)]
async fn lm_804_a_lost_connection_takes_a_peer_out_until_it_answers() {
    let (one, two) = (Fake::new(1, Mode::Serves), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    for mode in [Mode::Closed, Mode::Drains] {
        one.becomes(mode);
        assert_eq!(all(&pool, 3).await, [2, 2, 2], "{mode:?}");
        one.becomes(Mode::Closed);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(conditions(&pool)[0], Condition::Away, "{mode:?}");
        one.becomes(Mode::Serves);
        sleep(Duration::from_secs(120)).await;
        assert_eq!(conditions(&pool), [Condition::Serving; 2], "{mode:?}");
        let mut both = all(&pool, 2).await;
        both.sort_unstable();
        assert_eq!(both, [1, 2], "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn lm_804_a_peer_that_misses_two_probes_gets_no_streams() {
    let (one, two) = (Fake::new(1, Mode::Serves), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    one.becomes(Mode::Silent);
    // One probe after 10 s, with a limit of 5 s; the next 1 s later, with the same limit.
    sleep(Duration::from_secs(20)).await;
    assert_eq!(conditions(&pool)[0], Condition::Serving);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(conditions(&pool)[0], Condition::Away);
    assert_eq!(all(&pool, 2).await, [2, 2]);
    one.becomes(Mode::Serves);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(conditions(&pool), [Condition::Serving; 2]);
}

#[tokio::test(start_paused = true)]
async fn lm_804_a_peer_with_repeated_engine_errors_gets_no_streams() {
    let (one, two) = (Fake::new(1, Mode::Fails), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    let mut failed = 0;
    for _ in 0..10 {
        match asked(&pool).await {
            Ok(number) => assert_eq!(number, 2),
            Err(reason) => {
                assert_eq!(reason, LmtpReason::EngineError);
                failed += 1;
            }
        }
    }
    assert_eq!(failed, 3);
    assert_eq!(conditions(&pool), [Condition::Away, Condition::Serving]);
}

/// The first back-off is one second; the probe that was due anyway would come after ten.
#[tokio::test(start_paused = true)]
async fn lm_804_a_peer_taken_out_by_engine_errors_is_probed_after_the_back_off() {
    let (one, two) = (Fake::new(1, Mode::Fails), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    while conditions(&pool)[0] == Condition::Serving {
        let _ = asked(&pool).await;
    }
    sleep(Duration::from_secs(2)).await;
    assert_eq!(conditions(&pool), [Condition::Serving; 2]);
}

#[tokio::test(start_paused = true)]
async fn lm_712_peers_of_different_vocabularies_are_refused() {
    let (one, mut two) = (Fake::new(1, Mode::Serves), Fake::new(2, Mode::Serves));
    two.vocabulary = 99;
    let refused = pool(&[&one, &two]).await.unwrap_err();
    assert_eq!(refused.reason, LmtpReason::InvalidValue);
    // A peer that was away when the pool was created is just not used.
    two.becomes(Mode::Closed);
    let pool = pool(&[&one, &two]).await.unwrap();
    two.becomes(Mode::Serves);
    sleep(Duration::from_secs(120)).await;
    assert_eq!(conditions(&pool), [Condition::Serving, Condition::Away]);
}

/// LM-331: a reference server that loads a model sends nothing meanwhile.
#[tokio::test(start_paused = true)]
async fn lm_804_a_connected_peer_that_has_not_answered_yet_gets_streams() {
    let one = Fake::new(1, Mode::Silent);
    let pool = pool(&[&one]).await.unwrap();
    assert_eq!(
        (pool.facts(), conditions(&pool)),
        (None, vec![Condition::Serving])
    );
    one.becomes(Mode::Serves);
    assert_eq!(asked(&pool).await, Ok(1));
}

#[tokio::test(start_paused = true)]
async fn lm_702_a_dropped_stream_releases_its_place() {
    let one = Fake::new(1, Mode::Serves);
    let pool = pool(&[&one]).await.unwrap();
    one.becomes(Mode::Silent);
    let mut items = pool.generate(GenerateRequest::default(), None);
    assert!(items.next().now_or_never().is_none());
    assert_eq!(pool.peers()[0].streams, 1);
    drop(items);
    assert_eq!(pool.peers()[0].streams, 0);
}

#[tokio::test(start_paused = true)]
async fn lm_805_a_removed_peer_is_drained_and_restored_when_it_is_configured_again() {
    let (one, two) = (Fake::new(1, Mode::Serves), Fake::new(2, Mode::Serves));
    let pool = pool(&[&one, &two]).await.unwrap();
    assert!(keep(&pool, &[&two]).is_empty());
    assert_eq!(conditions(&pool), [Condition::Draining, Condition::Serving]);
    assert_eq!(all(&pool, 3).await, [2, 2, 2]);
    // However often it answers.
    sleep(Duration::from_secs(60)).await;
    assert_eq!(all(&pool, 3).await, [2, 2, 2]);
    assert!(keep(&pool, &[&one, &two]).is_empty());
    sleep(Duration::from_millis(1)).await;
    assert_eq!(conditions(&pool), [Condition::Serving; 2]);
    let mut both = all(&pool, 2).await;
    both.sort_unstable();
    assert_eq!(both, [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn lm_805_an_added_peer_joins_the_pool() {
    let (one, two) = (Fake::new(1, Mode::Serves), Fake::new(2, Mode::Closed));
    let pool = pool(&[&one]).await.unwrap();
    assert_eq!(keep(&pool, &[&one, &two]), ["2"]);
    assert_eq!(conditions(&pool), [Condition::Serving, Condition::Away]);
    assert_eq!(all(&pool, 2).await, [1, 1]);
    two.becomes(Mode::Serves);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(conditions(&pool), [Condition::Serving; 2]);
    let mut both = all(&pool, 2).await;
    both.sort_unstable();
    assert_eq!(both, [1, 2]);
    // It replaces another peer; a peer with another model is not used.
    let mut three = Fake::new(3, Mode::Serves);
    three.vocabulary = 7;
    assert_eq!(keep(&pool, &[&two, &three]), ["3"]);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(
        conditions(&pool),
        [Condition::Draining, Condition::Serving, Condition::Away]
    );
    assert_eq!(all(&pool, 3).await, [2, 2, 2]);
    assert!(keep(&pool, &[&two, &three]).is_empty());
    assert_eq!(pool.peers().len(), 3);
}
