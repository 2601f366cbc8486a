//! References as a function reads them, over a scripted resolver.

use std::collections::HashMap;
use std::sync::Mutex;

use futures::future::BoxFuture;
use sapwood_proto::evergreen::{Reason, SessionLimits};

use super::*;
use crate::session::reference::{FoundContent, ReferenceFetch};

/// The content of a URI.
#[derive(Clone, Debug)]
enum Item {
    /// The whole content, with its length declared or not.
    Whole(Vec<Bytes>, Option<u64>),
    Refused(Reason),
    /// Opening never completes.
    Closed,
    /// It is opened, but never sends a byte.
    Silent,
    /// These bytes, and then it never ends.
    Stuck(&'static str),
    Panics,
}

/// A resolver with counters.
#[derive(Debug, Default)]
struct TestFiles {
    items: HashMap<String, Item>,
    opened: Mutex<Vec<String>>,
    live: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

/// One fetch in progress.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ReferenceFetch for TestFiles {
    fn open<'a>(&'a self, uri: &'a str) -> BoxFuture<'a, Result<FoundContent, Status>> {
        self.opened.lock().unwrap().push(uri.to_owned());
        let live = self.live.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(live, Ordering::SeqCst);
        let open = Open(Arc::clone(&self.live));
        let item = self.items[uri].clone();
        Box::pin(async move {
            let (bytes, pieces) = match item {
                Item::Whole(pieces, bytes) => (bytes, stream::iter(pieces).map(Ok).boxed()),
                Item::Refused(reason) => return Err(Status::new(reason, "refused")),
                Item::Closed => std::future::pending().await,
                Item::Silent => (None, stream::pending().boxed()),
                Item::Stuck(text) => {
                    let first = stream::iter([Ok(Bytes::from(text))]);
                    (None, first.chain(stream::pending()).boxed())
                }
                Item::Panics => panic!("on purpose"),
            };
            let pieces = pieces.inspect(move |_| _ = &open).boxed();
            Ok(FoundContent { bytes, pieces })
        })
    }
}

fn whole(text: &'static str) -> Item {
    Item::Whole(vec![Bytes::from(text)], None)
}

fn bytes(pieces: usize, each: usize, declared: Option<u64>) -> Item {
    Item::Whole(vec![Bytes::from(vec![b'x'; each]); pieces], declared)
}

fn options(
    items: impl IntoIterator<Item = (&'static str, Item)>,
    change: impl FnOnce(&mut SessionLimits),
) -> (SessionOptions, Arc<TestFiles>) {
    let items = items.into_iter();
    let models = Arc::new(TestFiles {
        items: items.map(|(uri, item)| (uri.to_owned(), item)).collect(),
        ..TestFiles::default()
    });
    let mut limits = SessionLimits::default();
    change(&mut limits);
    let resolve: Arc<dyn ReferenceFetch> = models.clone();
    let options = SessionOptions {
        partial_failure: true,
        limits: Arc::new(limits),
        references: Some(resolve),
        ..SessionOptions::default()
    };
    (options, models)
}

fn refers(id: &str, seq: i32, last: bool, uri: &str) -> Fragment {
    let mut fragment = leaf(id, seq, last, "");
    if let Some(chunk) = &mut fragment.chunk {
        chunk.payload = Some(Payload::Ref(uri.into()));
    }
    fragment
}

fn echo(input: &str, output: &str) -> Action {
    action("echo", &[("text", input)], &[("response", output)])
}

/// EV-403, EV-301
#[tokio::test(start_paused = true)]
async fn ev_410_a_function_reads_a_reference_as_if_its_content_had_been_sent() {
    let pieces = vec![Bytes::from("one "), Bytes::new(), Bytes::from("two ")];
    let (options, models) = options(
        [
            ("file:///a", Item::Whole(pieces, Some(8))),
            ("https://h/b?q", whole(" four")),
            ("s3://b/nothing", Item::Whole(Vec::new(), Some(0))),
        ],
        |_| {},
    );
    let mut probe = Probe::open([], options);
    let mixed = vec![
        refers("a", 0, false, "file:///a"),
        leaf("a", 1, false, "three"),
        refers("a", 2, true, "https://h/b?q"),
        refers("n", 0, true, "s3://b/nothing"),
        tree("t", &["n", "a", "n"]),
    ];
    probe.send(mixed, vec![echo("t", "r")]).await;
    let read = probe.complete("r").await;
    assert_eq!(
        (read.data.as_slice(), read.mime.as_str(), read.role.as_str()),
        (&b"one two three four"[..], "text/plain", "USER")
    );
    let opened = models.opened.lock().unwrap().clone();
    assert_eq!(opened, ["s3://b/nothing", "file:///a", "https://h/b?q"]);
    assert_eq!(reason(probe.end().await), "OK");
}

#[tokio::test(start_paused = true)]
async fn ev_410_a_reference_is_fetched_once_for_all_readers_and_never_if_nobody_reads_it() {
    let uris = [("file:///a", whole("a")), ("file:///b", whole("b"))];
    let (options, models) = options(uris, |_| {});
    let mut probe = Probe::open([], options);
    let nodes = vec![
        refers("a", 0, true, "file:///a"),
        refers("b", 0, true, "file:///b"),
    ];
    let twice = action("concat", &[("a", "a"), ("b", "a")], &[("response", "c")]);
    probe.send(nodes, vec![echo("a", "r"), twice]).await;
    assert_eq!(probe.complete("r").await.data, b"a");
    assert_eq!(probe.complete("c").await.data, b"aa");
    probe.send(vec![], vec![echo("a", "late")]).await;
    assert_eq!(probe.complete("late").await.data, b"a");
    assert_eq!(*models.opened.lock().unwrap(), ["file:///a"]);
    assert_eq!(reason(probe.end().await), "OK");
}

#[tokio::test(start_paused = true)]
async fn ev_410_a_failed_fetch_fails_the_action_that_reads_it() {
    for (uri, item, expect) in [
        ("file:///x", Item::Refused(Reason::RefDenied), "REF_DENIED"),
        (
            "s3://b/x",
            Item::Refused(Reason::RefNotFound),
            "REF_NOT_FOUND",
        ),
        ("https://h/", Item::Refused(Reason::RefFetch), "REF_FETCH"),
        ("http://h/", Item::Panics, "REF_FETCH"),
        ("ftp://h/", whole("never opened"), "REF_SCHEME"),
    ] {
        let (options, _) = options([(uri, item)], |_| {});
        let mut probe = Probe::open([], options);
        let nodes = vec![refers("a", 0, true, uri), leaf("b", 0, true, "b")];
        probe
            .send(nodes, vec![echo("a", "r"), echo("b", "s")])
            .await;
        let status = probe.complete("r").await.status.unwrap();
        assert_eq!(
            (&*status.reason, status.detail("node"), status.detail("seq")),
            (expect, Some("a"), Some("0"))
        );
        assert_eq!(probe.complete("s").await.data, b"b");
        assert_eq!(reason(probe.end().await), "OK");
    }
}

#[tokio::test(start_paused = true)]
async fn ev_410_without_a_resolver_references_are_denied() {
    let mut probe = Probe::plain();
    let nodes = vec![refers("a", 0, true, "file:///etc/passwd")];
    probe.send(nodes, vec![echo("a", "r")]).await;
    assert_eq!(reason(probe.failure().await), "REF_DENIED");
}

/// The result of an action that reads one reference after the other.
async fn outcome(
    items: Vec<(&'static str, Item)>,
    change: impl FnOnce(&mut SessionLimits),
) -> String {
    let uris: Vec<_> = items.iter().map(|(uri, _)| *uri).collect();
    let (options, models) = options(items, change);
    let mut probe = Probe::open([], options);
    let nodes = uris.iter().enumerate().map(|(at, uri)| {
        let seq = i32::try_from(at).unwrap();
        refers("a", seq, at + 1 == uris.len(), uri)
    });
    probe.send(nodes.collect(), vec![echo("a", "r")]).await;
    let read = probe.complete("r").await;
    assert_eq!(models.live.load(Ordering::SeqCst), 0, "nothing goes on");
    match &read.status {
        Some(status) => format!(
            "{} {}",
            status.reason,
            status.detail("limit").unwrap_or("-")
        ),
        None => format!("{}", read.data.len()),
    }
}

#[tokio::test(start_paused = true)]
async fn ev_416_bytes_of_a_reference_are_limited_exactly() {
    for (item, expect) in [
        (bytes(4, 250, Some(1000)), "1000"),
        (bytes(4, 250, None), "1000"),
        (bytes(1, 1001, Some(1001)), "REF_LIMIT max_ref_bytes"),
        (bytes(4, 251, None), "REF_LIMIT max_ref_bytes"),
        // Refused before anything is read.
        (
            Item::Whole(Vec::new(), Some(1001)),
            "REF_LIMIT max_ref_bytes",
        ),
    ] {
        let what = format!("{item:?}");
        let limited = |limits: &mut SessionLimits| limits.max_ref_bytes = 1000;
        let outcome = outcome(vec![("file:///a", item)], limited).await;
        assert_eq!(outcome, expect, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn ev_416_bytes_of_a_session_are_limited_exactly() {
    for (second, expect) in [
        (bytes(2, 200, Some(400)), "1000"),
        (bytes(2, 200, None), "1000"),
        (bytes(1, 401, Some(401)), "REF_LIMIT ref_bytes"),
        (bytes(1, 401, None), "REF_LIMIT ref_bytes"),
        // Pieces of a few bytes cost more than their bytes.
        (bytes(4, 1, None), "REF_LIMIT ref_bytes"),
    ] {
        let what = format!("{second:?}");
        let items = vec![("file:///a", bytes(3, 200, None)), ("file:///b", second)];
        let outcome = outcome(items, |limits| limits.ref_bytes = 1000).await;
        assert_eq!(outcome, expect, "{what}");
    }
}

/// EV-801
#[tokio::test(start_paused = true)]
async fn ev_416_dropped_references_release_their_bytes() {
    let items = [
        ("file:///a", bytes(1, 800, None)),
        ("file:///b", bytes(1, 800, None)),
    ];
    let (options, _) = options(items, |limits| limits.ref_bytes = 1000);
    let mut probe = Probe::open([], options);
    let nodes = vec![
        refers("a", 0, true, "file:///a"),
        refers("b", 0, true, "file:///b"),
    ];
    probe.send(nodes, vec![echo("a", "r")]).await;
    assert_eq!(probe.complete("r").await.data.len(), 800);
    let drop = action("DROP", &[("node", "a")], &[("result", "d")]);
    probe.send(vec![], vec![drop]).await;
    probe.complete("d").await;
    probe.send(vec![], vec![echo("b", "s")]).await;
    assert_eq!(probe.complete("s").await.data.len(), 800);
    assert_eq!(reason(probe.end().await), "OK");
}

#[tokio::test(start_paused = true)]
async fn ev_416_a_reference_that_does_not_begin_or_end_in_time_fails() {
    for (item, after) in [
        (Item::Closed, 10),
        (Item::Silent, 10),
        (Item::Stuck("some"), 60),
    ] {
        let began = tokio::time::Instant::now();
        let what = format!("{item:?}");
        let outcome = outcome(vec![("file:///a", item)], |_| {}).await;
        assert_eq!(outcome, "REF_FETCH -", "{what}");
        assert_eq!(began.elapsed().as_secs(), after, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn ev_416_concurrent_fetches_are_limited_and_others_wait() {
    let names: Vec<String> = (0..5).map(|at| format!("n{at}")).collect();
    let (options, models) = options([("file:///a", Item::Silent)], |limits| {
        limits.max_ref_fetches = 2;
    });
    let mut probe = Probe::open([], options);
    let nodes = names.iter().map(|name| refers(name, 0, true, "file:///a"));
    let actions = names.iter().map(|name| echo(name, &format!("r-{name}")));
    probe.send(nodes.collect(), actions.collect()).await;
    for name in &names {
        let status = probe.complete(&format!("r-{name}")).await.status.unwrap();
        assert_eq!(&*status.reason, "REF_FETCH");
    }
    assert_eq!(models.opened.lock().unwrap().len(), 5);
    assert_eq!(models.most.load(Ordering::SeqCst), 2);
}

/// EV-913
#[tokio::test(start_paused = true)]
async fn ev_410_a_cancelled_action_ends_its_fetch_unless_another_reads() {
    let (options, models) = options([("file:///a", Item::Stuck("some"))], |limits| {
        limits.ref_total = Duration::from_secs(3600);
    });
    let live = Arc::clone(&models.live);
    let mut probe = Probe::open([], options);
    let nodes = vec![refers("a", 0, true, "file:///a")];
    probe
        .send(nodes, vec![echo("a", "r"), echo("a", "s")])
        .await;
    probe.holds("r", "some").await;
    probe.holds("s", "some").await;
    assert_eq!(live.load(Ordering::SeqCst), 1);
    for (output, left) in [("r", 1), ("s", 0)] {
        let cancel = action("CANCEL", &[("action", output)], &[]);
        probe.send(vec![], vec![cancel]).await;
        assert_eq!(probe.complete(output).await.data, b"some");
        tokio::task::yield_now().await;
        assert_eq!(live.load(Ordering::SeqCst), left, "{output}");
    }
    // A later reader starts the fetch again; the end of the session ends that as well.
    probe.send(vec![], vec![echo("a", "t")]).await;
    probe.holds("t", "some").await;
    assert_eq!(
        (
            live.load(Ordering::SeqCst),
            models.opened.lock().unwrap().len()
        ),
        (1, 2)
    );
    drop(probe.send);
    probe.task.abort();
    let _ = probe.task.await;
    drop(probe.outgoing);
    tokio::task::yield_now().await;
    assert_eq!(live.load(Ordering::SeqCst), 0);
}

/// An action that waits for external content is not stuck, although its peer sends nothing more.
#[tokio::test(start_paused = true)]
async fn ev_110_a_fetch_goes_on_after_the_half_close() {
    let (options, _) = options([("file:///a", Item::Stuck("some"))], |_| {});
    let mut probe = Probe::open([], options);
    let nodes = vec![refers("a", 0, true, "file:///a")];
    let reader = action("concat", &[("a", "a"), ("b", "r")], &[("response", "c")]);
    probe.send(nodes, vec![echo("a", "r"), reader]).await;
    probe.send.close_channel();
    for output in ["r", "c"] {
        let status = probe.complete(output).await.status.unwrap();
        assert_eq!(&*status.reason, "REF_FETCH", "{output}");
    }
    assert_eq!(reason(probe.failure().await), "OK");
}

/// EV-801
#[tokio::test(start_paused = true)]
async fn ev_416_fetched_bytes_count_against_the_server_quota() {
    struct Most(Arc<AtomicUsize>);
    impl Observe for Most {
        fn retains(&mut self, bytes: u64) -> Result<(), Status> {
            self.0
                .fetch_max(usize::try_from(bytes).unwrap(), Ordering::SeqCst);
            Ok(())
        }
    }
    let (options, _) = options([("file:///a", bytes(1, 5000, None))], |_| {});
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let most = Arc::new(AtomicUsize::new(0));
    let (mut send, incoming) = mpsc::channel(4);
    let (session, outgoing) = open(kernel, options, Most(Arc::clone(&most)));
    let message = WireMessage {
        fragments: vec![refers("a", 0, true, "file:///a")].into(),
        actions: vec![action("echo", &[("text", "a")], &[])],
        ..WireMessage::default()
    };
    send.send(Ok(message)).await.unwrap();
    send.close_channel();
    let ended = session.run(incoming, stream::pending()).await;
    assert_eq!(reason(ended), "OK");
    drop(outgoing);
    assert!(most.load(Ordering::SeqCst) >= 5000);
}

#[tokio::test(start_paused = true)]
async fn ev_740_a_slice_of_a_reference_fetches_nothing_after_its_end() {
    let pieces = ["0123", "4567"].map(Bytes::from).to_vec();
    let uris = [
        ("file:///a", Item::Whole(pieces, None)),
        ("file:///stuck", Item::Stuck("0123456789")),
        ("file:///short", whole("01")),
    ];
    let (mut options, models) = options(uris, |_| {});
    options.dialect = Dialect::Msgpack;
    options.metadata = Dialect::Msgpack.metadata();
    let mut probe = Probe::open([], options);
    let part = |seq: i32, child: &str, range| Fragment {
        range: Some(Box::new(range)),
        seq,
        last: false,
        ..tree("m", &[child])
    };
    let nodes = vec![
        refers("a", 0, true, "file:///a"),
        refers("stuck", 0, true, "file:///stuck"),
        refers("short", 0, true, "file:///short"),
        part(0, "a", 2..6),
        part(1, "short", 7..9),
        part(2, "stuck", 5..7),
        Fragment {
            seq: 3,
            ..leaf("m", 0, true, ".")
        },
    ];
    probe.send(nodes, vec![echo("m", "r")]).await;
    let read = probe.complete("r").await;
    assert_eq!(read.data, b"234556.");
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        models.live.load(Ordering::SeqCst),
        0,
        "nobody waits for the rest"
    );
}
