//! An upstream that comes and goes, on a virtual clock.

use std::sync::Mutex;

use futures::{FutureExt, StreamExt, stream};
use sapwood_kernel::{Chunk, Mime, OutputSpec, Port, raw};
use sapwood_server::ops::drain::Drain;
use sapwood_server::ops::health::Health;
use tokio::task::JoinHandle;

use super::*;

/// The models that the upstream serves; `None` while it is away.
type Serves = Option<&'static [&'static str]>;

/// A server that the test switches on and off.
struct Fake {
    serves: watch::Receiver<Serves>,
    tried: Arc<Mutex<Vec<Instant>>>,
    left: Arc<Mutex<bool>>,
    /// Number of links that have worn out.
    worn: watch::Receiver<usize>,
    /// Number of links that the server has ended while it was running.
    ended: watch::Receiver<usize>,
    /// The server accepts connections and sends nothing.
    mute: watch::Receiver<bool>,
}

impl DialUpstream for Fake {
    async fn dial(&self) -> Result<UpstreamLink, Status> {
        self.tried.lock().unwrap().push(Instant::now());
        if *self.mute.borrow() {
            std::future::pending::<()>().await;
        }
        let Some(names) = *self.serves.borrow() else {
            return Err(Status::other(Code::Unavailable, "", "nobody there"));
        };
        let (mut worn, mut ended) = (self.worn.clone(), self.ended.clone());
        worn.mark_unchanged();
        ended.mark_unchanged();
        let (mut serves, left) = (self.serves.clone(), Arc::clone(&self.left));
        Ok(UpstreamLink {
            functions: names.iter().copied().map(sends_hello).collect(),
            worn: async move { drop(worn.changed().await) }.boxed(),
            over: async move {
                tokio::select! {
                    _ = ended.changed() => {}
                    _ = serves.wait_for(Option::is_none) => {}
                }
            }
            .boxed(),
            leave: async move { *left.lock().unwrap() = true }.boxed(),
            served: None,
        })
    }
}

fn sends_hello(name: &'static str) -> Fun {
    let spec = Spec::new(name, "").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
    raw(spec, |_| stream::iter([Ok(Chunk::text("hello"))]).boxed())
}

struct Bench {
    kernel: Kernel,
    serves: watch::Sender<Serves>,
    tried: Arc<Mutex<Vec<Instant>>>,
    left: Arc<Mutex<bool>>,
    worn: watch::Sender<usize>,
    ended: watch::Sender<usize>,
    mute: watch::Sender<bool>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Bench {
    fn start(jitter: u64) -> Self {
        let kernel = Kernel::new();
        let (serves, served) = watch::channel(None);
        let (stop, stopped) = watch::channel(false);
        let (worn, wears) = watch::channel(0);
        let (ended, ends) = watch::channel(0);
        let (mute, muted) = watch::channel(false);
        let (tried, left) = (Arc::default(), Arc::default());
        let fake = Fake {
            serves: served,
            tried: Arc::clone(&tried),
            left: Arc::clone(&left),
            worn: wears,
            ended: ends,
            mute: muted,
        };
        let health = Arc::new(Health::new(Drain::default(), Duration::from_secs(30)));
        let standing = UpstreamStatus::of_server(&health, 1);
        let upstream =
            UpstreamTask::new("evergreen+http://there:1", fake, kernel.clone(), standing);
        let (failed, _) = mpsc::channel(1);
        let task = tokio::spawn(upstream.keep(failed, jitter, stopped));
        Self {
            kernel,
            serves,
            tried,
            left,
            worn,
            ended,
            mute,
            stop,
            task,
        }
    }

    async fn call(&self, name: &str) -> Result<String, Error> {
        self.kernel.run::<String>(name, ()).await
    }

    /// The delay before each try.
    fn waits(&self, began: Instant) -> Vec<f64> {
        let tried = self.tried.lock().unwrap();
        let before = std::iter::once(&began).chain(&*tried);
        before
            .zip(&*tried)
            .map(|(before, tried)| (*tried - *before).as_secs_f64())
            .collect()
    }
}

#[tokio::test(start_paused = true)]
async fn delays_double_up_to_a_maximum_with_jitter() {
    let mut all = Vec::new();
    for jitter in [1, 1, 2] {
        let (bench, began) = (Bench::start(jitter), Instant::now());
        sleep(Duration::from_secs(200)).await;
        let mut waits = bench.waits(began);
        assert_eq!(waits.remove(0), 0.0, "it is tried at once");
        assert!(waits.len() >= 8, "{waits:?}");
        for (wait, base) in waits
            .iter()
            .zip([1.0, 2.0, 4.0, 8.0].into_iter().chain([15.0; 20]))
        {
            assert!(
                (base..=2.0 * base + 0.002).contains(wait),
                "{wait} for {base}: {waits:?}"
            );
        }
        all.push(waits);
    }
    assert!(all[0] == all[1] && all[1] != all[2], "{all:?}");
}

#[tokio::test(start_paused = true)]
async fn functions_are_unavailable_while_their_upstream_is_lost() {
    let bench = Bench::start(7);
    let settle = || sleep(Duration::from_secs(31));
    bench.kernel.add(sends_hello("taken")).unwrap();
    assert_eq!(bench.call("far").await.unwrap_err().code(), Code::NotFound);
    bench.serves.send_replace(Some(&["far", "taken"]));
    settle().await;
    assert_eq!(bench.call("far").await.unwrap(), "hello");
    for _ in 0..2 {
        bench.serves.send_replace(None);
        sleep(Duration::from_millis(1)).await;
        let error = bench.call("far").await.unwrap_err();
        assert!(
            error.code() == Code::Unavailable && error.retryable(),
            "{error}"
        );
        assert!(error.to_string().contains("not connected"), "{error}");
        assert!(!error.to_string().contains("there:1"), "{error}");
        assert_eq!(
            bench.call("taken").await.unwrap(),
            "hello",
            "it never was the upstream's"
        );
        bench.serves.send_replace(Some(&["far", "more"]));
        settle().await;
        assert_eq!(bench.call("far").await.unwrap(), "hello");
        assert_eq!(bench.call("more").await.unwrap(), "hello");
    }
    bench.serves.send_replace(None);
    sleep(Duration::from_millis(1)).await;
    bench.serves.send_replace(Some(&["more"]));
    settle().await;
    assert_eq!(
        bench.call("far").await.unwrap_err().code(),
        Code::NotFound,
        "it has gone"
    );
    bench.stop.send_replace(true);
    bench.task.await.unwrap();
    assert!(*bench.left.lock().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_flapping_upstream_is_retried_with_growing_delays() {
    let bench = Bench::start(3);
    sleep(Duration::from_secs(100)).await;
    let tries = || bench.tried.lock().unwrap().len();
    for (retained, soon) in [(5, false), (60, true)] {
        bench.serves.send_replace(Some(&["far"]));
        sleep(Duration::from_secs(31 + retained)).await;
        bench.serves.send_replace(None);
        let before = tries();
        sleep(Duration::from_secs(3)).await;
        assert_eq!(tries() > before, soon, "after {retained} s");
        sleep(Duration::from_secs(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_worn_session_is_replaced_without_interruption() {
    let bench = Bench::start(5);
    let moment = || sleep(Duration::from_millis(1));
    let tries = || bench.tried.lock().unwrap().len();
    bench.serves.send_replace(Some(&["far"]));
    sleep(Duration::from_secs(3)).await;
    for _ in 0..3 {
        let before = tries();
        bench.serves.send_replace(Some(&["far", "new"]));
        bench.worn.send_modify(|worn| *worn += 1);
        moment().await;
        assert_eq!(tries(), before + 1);
        assert_eq!(bench.call("far").await.unwrap(), "hello");
        assert_eq!(
            bench.call("new").await.unwrap(),
            "hello",
            "it was listed anew"
        );
    }
    // If no replacement can be connected yet, the worn link stays in use, and is replaced as soon as that is possible.
    let before = tries();
    bench.mute.send_replace(true);
    bench.worn.send_modify(|worn| *worn += 1);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(bench.call("far").await.unwrap(), "hello");
    assert!(tries() > before + 1, "{before}");
    bench.mute.send_replace(false);
    sleep(Duration::from_secs(41)).await;
    let before = tries();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(tries(), before, "it was followed");
}

/// A server ends a session that was idle for half an hour.
#[tokio::test(start_paused = true)]
async fn ev_111_an_idle_session_is_replaced_at_once() {
    let bench = Bench::start(3);
    bench.serves.send_replace(Some(&["far"]));
    sleep(Duration::from_secs(1_800)).await;
    let before = bench.tried.lock().unwrap().len();
    bench.ended.send_modify(|ended| *ended += 1);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(bench.call("far").await.unwrap(), "hello");
    assert_eq!(bench.tried.lock().unwrap().len(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_silent_upstream_is_not_waited_for() {
    let bench = Bench::start(3);
    bench.mute.send_replace(true);
    sleep(Duration::from_secs(15)).await;
    bench.mute.send_replace(false);
    bench.serves.send_replace(Some(&["far"]));
    sleep(Duration::from_secs(31)).await;
    assert_eq!(bench.call("far").await.unwrap(), "hello");
}
