//! Tests of runs.

use std::sync::Arc;
use std::sync::Mutex;
use std::task::Waker;

use futures::executor::block_on;
use futures::stream;
use serde_json::json;

use super::*;
use crate::call::Call;
use crate::from_chunks::Json;
use crate::handler::raw;
use crate::kernel::Kernel;
use crate::limits;
use crate::meta::{ChoiceFinish, RunUsage};
use crate::name::Mime;
use crate::probe::{Count, Woken, endless, paused, played, poll_once, source, texts, whole};
use crate::spec::{OutputSpec, Spec};
use crate::want::{RequestedPorts, Want};

mod endings;

fn oks(chunks: Vec<Chunk>) -> impl Iterator<Item = Result<Chunk>> {
    chunks.into_iter().map(Ok)
}

/// A kernel with one function `f` that plays these chunks.
fn playing(spec: Spec, chunks: Vec<Chunk>) -> (Kernel, Arc<Count>) {
    let (kernel, count) = (Kernel::new(), Count::new());
    let counted = count.clone();
    kernel
        .add(source(spec, move || played(&counted, oks(chunks.clone()))))
        .unwrap();
    (kernel, count)
}

fn spec() -> Spec {
    Spec::new("f", "")
}

fn many_ports() -> Spec {
    let ports = ["", "reasoning", "progress"].map(|port| OutputSpec::new(port, Mime::ANY).many());
    spec().outputs(ports)
}

fn codes<T: FromChunks>(run: Run<T>) -> Vec<&'static str> {
    let codes = run.map(|item| item.map_or_else(|error| error.code().name(), |_| "ok"));
    block_on(codes.collect())
}

/// KE-R21
#[test]
fn ke_101_a_run_is_the_stream_itself() {
    let (kernel, count) = playing(spec(), texts(["a", "b"]));
    let mut run = kernel.run::<String>("f", ());
    assert_eq!((count.polls(), run.is_terminated()), (0, false));
    assert_eq!(block_on(run.next()).unwrap().unwrap(), "a");
    assert_eq!(*run.meta(), Meta::default());
    assert_eq!(
        block_on(run.by_ref().map(Result::unwrap).collect::<Vec<_>>()),
        ["b"]
    );
    assert!(run.is_terminated());
    fn is<T: FusedStream + Unpin + Send + IntoFuture>(_: &T) {}
    is(&run);
}

#[test]
fn ke_r21_the_call_returns_the_stream_and_runs_nothing() {
    ke_101_a_run_is_the_stream_itself();
}

/// None of these is `Serialize`: a type that were would make the call ambiguous.
#[test]
fn ke_103_nothing_here_is_serialisable() {
    trait Wire<Marker> {
        fn is_not() {}
    }
    struct Serialisable;
    impl<T: ?Sized> Wire<()> for T {}
    impl<T: ?Sized + serde::Serialize> Wire<Serialisable> for T {}
    <Chunk as Wire<_>>::is_not();
    <Meta as Wire<_>>::is_not();
    <Node as Wire<_>>::is_not();
    <Error as Wire<_>>::is_not();
    <Spec as Wire<_>>::is_not();
    <Name as Wire<_>>::is_not();
    <Run as Wire<_>>::is_not();
    <Json<u8> as Wire<_>>::is_not();
}

#[test]
fn ke_r2_without_a_type_items_are_chunks() {
    let (kernel, _) = playing(
        many_ports(),
        vec![Chunk::text("a"), Chunk::text("t").on("reasoning")],
    );
    let run: Run = kernel.run("f", ());
    let chunks: Vec<Chunk> = block_on(run.map(Result::unwrap).collect());
    assert_eq!(
        chunks
            .iter()
            .map(|chunk| chunk.port.as_str())
            .collect::<Vec<_>>(),
        ["", "reasoning"]
    );
}

#[test]
fn ke_r3_bytes_are_the_pieces_and_their_concatenation_the_whole() {
    let (kernel, _) = playing(spec(), texts(["ab", "", "c"]));
    let items: Vec<_> = block_on(
        kernel
            .run::<bytes::Bytes>("f", ())
            .map(Result::unwrap)
            .collect(),
    );
    assert_eq!(items, ["ab", "c"]);
    assert_eq!(whole(kernel.run::<bytes::Bytes>("f", ())).unwrap(), "abc");
}

#[test]
fn ke_r4_text_items_join_to_the_whole_and_split_no_character() {
    let pieces =
        [&b"\xe2"[..], b"\x82", b"\xac!"].map(|piece| Chunk::bytes(piece).with_mime("text/plain"));
    let (kernel, _) = playing(spec(), pieces.to_vec());
    let items: Vec<_> = block_on(kernel.run::<String>("f", ()).map(Result::unwrap).collect());
    assert_eq!(items, ["\u{20ac}!"]);
    assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "\u{20ac}!");
}

#[test]
fn ke_113_parts_rise_by_one_and_keep_their_type() {
    let text = |part| Chunk::text("x").with_part(part);
    let image = |part| {
        Chunk::bytes(&b"i"[..])
            .with_mime("image/png")
            .with_part(part)
    };
    let cases: [(Vec<Chunk>, bool); 8] = [
        (vec![text(0), image(1), text(2)], true),
        (vec![text(0), image(1).with_choice(1)], false),
        (vec![text(0), text(0).with_choice(1), text(1)], true),
        (vec![text(1)], false),
        (vec![text(0), text(2)], false),
        (vec![text(0), text(1), text(0)], false),
        (vec![text(0), image(0)], false),
        (vec![text(0), text(0).on("reasoning"), text(1)], true),
    ];
    for (chunks, legal) in cases {
        let (kernel, _) = playing(many_ports(), chunks.clone());
        let result = whole(kernel.run::<Chunk>("f", ()));
        assert_eq!(result.is_ok(), legal, "{chunks:?}");
        assert!(legal || matches!(result, Err(Error::Protocol { .. })));
    }
    let (kernel, _) = playing(spec(), vec![text(0), text(1)]);
    assert_eq!(
        codes(kernel.run::<Chunk>("f", ())),
        ["ok", "internal"],
        "without `many` there is one part"
    );
}

/// A remote function's metadata comes as empty text on the main port, before or after chunks of another type.
#[test]
fn ke_304_metadata_says_nothing_of_the_type_of_a_port() {
    let line = |part| Chunk::bytes("1\n").with_mime(Mime::NDJSON).with_part(part);
    let usage = RunUsage::of(5, 0);
    let metadata = || Chunk::empty().with_meta(Meta::default().with_usage(0, usage));
    let outputs = || [OutputSpec::new(Port::MAIN, Mime::NDJSON).many()];
    for chunks in [
        vec![line(0), metadata()],
        vec![metadata(), line(0)],
        vec![line(0), line(1), metadata()],
    ] {
        let (kernel, _) = playing(spec().outputs(outputs()), chunks.clone());
        let (_, meta) = block_on(kernel.run::<Chunk>("f", ()).finish()).expect("no violation");
        assert_eq!(meta.usage, usage, "{chunks:?}");
    }
    // Of another type it is a chunk like others.
    let image = Chunk::empty().with_mime("image/png");
    let (kernel, _) = playing(spec().outputs(outputs()), vec![line(0), image]);
    assert_eq!(codes(kernel.run::<Chunk>("f", ())), ["ok", "internal"]);
}

/// Limit: `chunk_bytes_max`.
#[test]
fn ke_134_a_spec_is_a_promise() {
    let cases: [(Chunk, &str); 4] = [
        (Chunk::text("a").on("elsewhere"), "internal"),
        (Chunk::bytes(&b"a"[..]).with_mime("image/png"), "internal"),
        (
            Chunk::bytes(vec![0; limits::CHUNK_BYTES_MAX]).with_mime("text/plain"),
            "ok",
        ),
        (
            Chunk::bytes(vec![0; limits::CHUNK_BYTES_MAX + 1]).with_mime("text/plain"),
            "limit-exceeded",
        ),
    ];
    for (chunk, expect) in cases {
        let (kernel, count) = playing(spec(), vec![chunk, Chunk::text("b")]);
        assert_eq!(codes(kernel.run::<Chunk>("f", ()))[0], expect);
        assert_eq!(count.dropped(), 1);
    }
}

#[test]
fn ke_135_unwanted_ports_are_dropped() {
    let chunks = vec![
        Chunk::text("r").on("reasoning"),
        Chunk::text("a"),
        Chunk::text("p").on("progress"),
    ];
    let (kernel, _) = playing(many_ports(), chunks);
    let want = Want::from(RequestedPorts::Only(vec!["progress".into()]));
    let seen: Vec<Chunk> = block_on(
        kernel
            .run::<Chunk>("f", ())
            .wanting(want)
            .map(Result::unwrap)
            .collect(),
    );
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].port, "progress");
    assert_eq!(
        whole(kernel.run::<String>("f", ()).port("reasoning")).unwrap(),
        "r"
    );
}

#[test]
fn ke_136_a_missing_finish_is_truncation() {
    let mut promising = many_ports();
    promising.finishes = true;
    let finish =
        |choice| Chunk::empty().with_meta(Meta::default().with_finish(choice, ChoiceFinish::Stop));
    for (chunks, expect) in [
        (vec![Chunk::text("a"), finish(0)], vec!["ok", "ok"]),
        (vec![Chunk::text("a")], vec!["ok", "truncated"]),
        (
            vec![Chunk::text("a"), Chunk::text("b").with_choice(1), finish(0)],
            vec!["ok", "ok", "ok", "truncated"],
        ),
        (vec![], vec![]),
    ] {
        let (kernel, _) = playing(promising.clone(), chunks);
        assert_eq!(codes(kernel.run::<Chunk>("f", ())), expect);
    }
}

/// KE-313: a local stream's own end is its marker; one that promised a finish and lacks it is truncated.
#[test]
fn ke_313_a_stream_without_its_marker_is_truncated() {
    ke_136_a_missing_finish_is_truncation();
}

#[test]
fn ke_142_a_type_that_does_not_fit_fails_before_work() {
    let image = spec().outputs([
        OutputSpec::new("", "image/png"),
        OutputSpec::new("notes", "text/*"),
    ]);
    let (kernel, count) = playing(image, vec![Chunk::bytes(&b"i"[..]).with_mime("image/png")]);
    for run in [
        kernel.run::<String>("f", ()).check(),
        kernel.run::<Json<u8>>("f", ()).check(),
    ] {
        assert!(matches!(run, Err(Error::Unsupported { .. })));
    }
    assert_eq!(codes(kernel.run::<String>("f", ())), ["invalid-request"]);
    assert_eq!(count.polls(), 0);
    assert!(
        kernel.run::<String>("f", ()).port("notes").check().is_ok(),
        "a pattern matches"
    );
    assert!(kernel.run::<bytes::Bytes>("f", ()).check().is_ok());
    assert!(kernel.run::<()>("f", ()).check().is_ok());
    assert!(whole(kernel.run::<Chunk>("f", ())).is_ok());
}

#[test]
fn ke_142_unknown_outputs_are_checked_at_the_first_chunk() {
    let unknown = spec().outputs([]);
    let (kernel, _) = playing(
        unknown,
        vec![Chunk::bytes(&b"i"[..]).with_mime("image/png")],
    );
    assert!(kernel.run::<String>("f", ()).check().is_ok());
    assert!(matches!(
        whole(kernel.run::<String>("f", ())),
        Err(Error::Unsupported { .. })
    ));
}

#[test]
fn ke_r7_an_unsupported_type_fails_before_work() {
    ke_142_a_type_that_does_not_fit_fails_before_work();
}

#[tokio::test(start_paused = true)]
async fn ke_143_a_timeout_counts_from_the_first_poll_and_cannot_be_set_later() {
    let count = Count::new();
    let kernel = Kernel::new();
    let counted = count.clone();
    kernel
        .add(source(spec(), move || endless(&counted, texts(["a"]))))
        .unwrap();
    let mut run = kernel
        .run::<String>("f", ())
        .timeout(Duration::from_secs(5));
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
    let began = Instant::now();
    assert!(matches!(run.next().await, Some(Err(Error::Deadline))));
    assert_eq!(began.elapsed().as_secs(), 5);
    assert_eq!(count.dropped(), 1);
    let mut begun = kernel.run::<String>("f", ());
    assert!(begun.next().await.is_some());
    let mut begun = begun
        .timeout(Duration::from_secs(1))
        .port("nowhere")
        .context("k", 1);
    tokio::time::advance(Duration::from_secs(60)).await;
    assert!(
        poll_once(&mut begun, Waker::noop()).is_pending(),
        "no effect"
    );
}

#[test]
fn ke_144_whole_finish_one_and_settle() {
    let usage = Chunk::empty().with_meta(Meta::default().with_usage(0, RunUsage::of(3, 2)));
    let (kernel, _) = playing(spec(), vec![Chunk::text("a"), Chunk::text("b"), usage]);
    assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "ab");
    let (text, meta) = block_on(kernel.run::<String>("f", ()).finish()).unwrap();
    assert_eq!((text.as_str(), meta.usage), ("ab", RunUsage::of(3, 2)));
    assert!(
        matches!(
            block_on(kernel.run::<String>("f", ()).one()),
            Err(Error::Decode { .. })
        ),
        "two items"
    );
    let (none, _) = playing(spec(), vec![]);
    assert!(matches!(
        block_on(none.run::<String>("f", ()).one()),
        Err(Error::Decode { .. })
    ));
    let (one, _) = playing(spec(), texts(["x"]));
    assert_eq!(block_on(one.run::<String>("f", ()).one()).unwrap(), "x");
}

#[test]
fn ke_144_settle_never_discards_what_arrived() {
    let kernel = Kernel::new();
    let usage = || Chunk::text("a").with_meta(Meta::default().with_usage(0, RunUsage::of(1, 1)));
    kernel
        .add(raw(spec(), move |_| {
            stream::iter([Ok(usage()), Err(Error::Released)]).boxed()
        }))
        .unwrap();
    let settled = block_on(kernel.run::<String>("f", ()).settle());
    assert_eq!(settled.whole.as_deref(), Some("a"));
    assert_eq!(settled.meta.usage, RunUsage::of(1, 1));
    assert!(matches!(settled.error, Some(Error::Released)));
    assert!(matches!(
        block_on(kernel.run::<String>("f", ()).finish()),
        Err(Error::Released)
    ));
}

#[test]
fn ke_144_a_fold_yields_once_every_256_chunks() {
    let (kernel, count) = playing(spec(), texts(std::iter::repeat_n("x", 1000)));
    let mut folding = IntoFuture::into_future(kernel.run::<String>("f", ()));
    let (woken, waker) = Woken::new();
    let mut polls = 0;
    let whole = loop {
        polls += 1;
        match Pin::new(&mut folding).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(whole) => break whole.unwrap(),
            Poll::Pending => assert!(count.polls() <= 256 * polls && woken.count() == polls),
        }
    };
    assert_eq!((whole.len(), polls), (1000, 4));
}

#[test]
fn ke_145_a_run_prefetches_nothing() {
    let (kernel, count) = playing(spec(), texts(["a", "b", "c", "d"]));
    let mut run = kernel.run::<String>("f", ());
    for taken in 1..=3 {
        assert!(block_on(run.next()).is_some());
        assert_eq!(count.polls(), taken);
    }
}

#[tokio::test]
async fn ke_145_a_driven_run_goes_ahead_by_its_capacity_and_ends_with_its_drop() {
    let (kernel, count) = playing(spec(), texts(std::iter::repeat_n("x", 100)));
    let mut run = kernel.run::<String>("f", ()).driven(4);
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
    assert_eq!(count.given(), 5, "four buffered, one waiting for room");
    assert!(run.next().await.is_some());
    drop(run);
    for _ in 0..5 {
        tokio::task::yield_now().await;
    }
    assert_eq!(count.dropped(), 1);
    assert_eq!(
        kernel.run::<String>("f", ()).driven(2).await.unwrap().len(),
        100
    );
}

#[tokio::test(start_paused = true)]
async fn ke_503_a_driven_run_drops_its_source_on_time() {
    let (kernel, count) = playing(spec(), texts(["a", "b", "c"]));
    let mut run = kernel
        .run::<String>("f", ())
        .timeout(Duration::from_secs(1))
        .driven(1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(count.dropped(), 1, "although nobody polled");
    assert!(run.next().await.unwrap().is_ok() && run.next().await.unwrap().is_ok());
    assert!(matches!(run.next().await, Some(Err(Error::Deadline))));
    assert!(run.next().await.is_none());
}

#[test]
fn ke_145_driving_without_a_runtime_is_an_error() {
    let (kernel, _) = playing(spec(), texts(["a"]));
    assert!(matches!(
        whole(kernel.run::<String>("f", ()).driven(1)),
        Err(Error::Unavailable { .. })
    ));
}

/// KE-R12
#[test]
fn ke_304_meta_is_live_and_usage_may_come_last() {
    let meta = |completion| Meta::default().with_usage(0, RunUsage::of(5, completion));
    let chunks = vec![
        Chunk::text("a").with_meta(meta(1)),
        Chunk::text("b"),
        Chunk::empty().with_meta(meta(2).with_finish(0, ChoiceFinish::Stop)),
    ];
    let (kernel, _) = playing(spec(), chunks);
    let mut run = kernel.run::<String>("f", ());
    assert!(block_on(run.next()).is_some());
    assert_eq!(run.meta().usage, RunUsage::of(5, 1));
    assert!(block_on(run.next()).is_some());
    assert_eq!(
        run.meta().usage,
        RunUsage::of(5, 1),
        "not ahead of the items"
    );
    assert!(block_on(run.next()).is_none());
    assert_eq!(
        (run.meta().usage, run.meta().finish[&0].clone()),
        (RunUsage::of(5, 2), ChoiceFinish::Stop)
    );
}

#[test]
fn ke_r12_request_metadata_is_on_chunks_and_on_the_run() {
    ke_304_meta_is_live_and_usage_may_come_last();
}

#[test]
fn ke_r10_every_port_appends_as_bytes() {
    let line = |text: &'static str| Chunk::text(text).with_mime(Mime::NDJSON).on("progress");
    let (kernel, _) = playing(
        many_ports(),
        vec![line("{\"id\":1}\n"), line("{\"id\""), line(":2}\n")],
    );
    let run = kernel.run::<Json<Value>>("f", ()).port("progress");
    assert_eq!(whole(run).unwrap(), [json!({"id": 1}), json!({"id": 2})]);
}

#[test]
fn ke_301_reserved_ports_and_own_ones_may_be_declared() {
    for (port, legal) in [
        ("reasoning", true),
        ("tool_calls", true),
        ("events", true),
        ("meta", true),
        ("tokens", true),
        ("logprobs", true),
        ("progress", true),
        ("structured", true),
        ("own_2", true),
        ("Own", false),
        ("2own", false),
        ("a-b", false),
    ] {
        let declared = spec().outputs([
            OutputSpec::new("", Mime::TEXT),
            OutputSpec::new(port, Mime::TEXT),
        ]);
        assert_eq!(declared.check().is_ok(), legal, "{port}");
    }
    let order = vec![
        Chunk::text("1").on("progress"),
        Chunk::text("2"),
        Chunk::text("3").on("progress"),
    ];
    let (kernel, _) = playing(many_ports(), order);
    assert_eq!(
        crate::probe::drain(kernel.node("f", ()).read()),
        ["1", "2", "3"]
    );
}

/// Pauses in the source change nothing, and everything runs under a bare executor.
#[test]
fn ke_102_no_runtime_is_needed() {
    let count = Count::new();
    let kernel = Kernel::new();
    kernel
        .add(source(spec(), move || {
            paused(
                &count,
                [None, Some(Chunk::text("a")), None, Some(Chunk::text("b"))],
            )
        }))
        .unwrap();
    assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "ab");
}

#[tokio::test]
async fn ke_p3_a_thousand_open_runs_spawn_no_task() {
    let (kernel, _) = playing(spec(), texts(["a", "b"]));
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    let before = tasks();
    let mut runs: Vec<Run<String>> = (0..1000).map(|_| kernel.run("f", ())).collect();
    for run in &mut runs {
        assert!(run.next().await.is_some());
    }
    assert_eq!(tasks(), before);
}

#[test]
fn ke_115_inner_is_asked_for_only_by_chunks() {
    let asked: Arc<Mutex<Vec<bool>>> = Arc::default();
    let seen = asked.clone();
    let kernel = Kernel::new();
    kernel
        .add(raw(spec(), move |call| {
            seen.lock().unwrap().push(call.want.inner);
            stream::iter([Ok(Chunk::text("a").with_inner(7_u8))]).boxed()
        }))
        .unwrap();
    let chunks = whole(kernel.run::<Chunk>("f", ())).unwrap();
    assert_eq!(chunks[0].inner::<u8>(), Some(&7));
    assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "a");
    assert_eq!(*asked.lock().unwrap(), [true, false]);
}

#[tokio::test]
async fn ke_502_a_driven_run_whose_buffer_is_full_drops_its_source_when_it_is_cancelled() {
    let (kernel, count) = playing(spec(), texts(["a", "b", "c", "d"]));
    let mut run = kernel.run::<String>("f", ()).driven(1);
    while count.given() < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(count.dropped(), 0, "it waits for room");
    run.cancel().cancel();
    while count.dropped() == 0 {
        tokio::task::yield_now().await;
    }
    // What was buffered comes first, and with it what waited for room.
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
    assert_eq!(run.next().await.unwrap().unwrap(), "b");
    assert!(matches!(run.next().await, Some(Err(Error::Cancelled))));
    assert!(run.next().await.is_none());
}
