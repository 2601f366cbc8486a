//! Allocations, counted (KE-P2): none per chunk on the steady path, at most 64 per call.
//!
//! A program of its own, because the counting allocator is global. What is compared is 10,000 against 20,000 chunks:
//! equal but for the growth of what is folded.

use std::alloc::System;

use futures::executor::block_on;
use futures::{StreamExt, stream};
use sapwood_kernel::{Call, Chunk, Chunks, FromChunks, Kernel, Next, Run, Spec, Text, raw};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static GLOBAL: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Doublings of a buffer that grows to the longer of the two lengths.
const GROWTH: usize = 8;

fn kernel(chunks: usize) -> Kernel {
    let kernel = Kernel::new();
    let spec = Spec::new("f", "");
    kernel
        .add(raw(spec, move |_| {
            stream::iter((0..chunks).map(|_| Ok(Chunk::text(Text::from_static("abcd"))))).boxed()
        }))
        .expect("a legal name");
    // The stream passes through a layer that keeps it as it is.
    kernel.layer(|call: Call, next: Next| -> Chunks { next.call(call) });
    kernel
}

/// Allocations of `work`, reallocations included.
fn counted(work: impl FnOnce()) -> usize {
    let region = Region::new(GLOBAL);
    work();
    let change = region.change();
    change.allocations + change.reallocations
}

fn items<T: FromChunks>(chunks: usize) -> usize {
    let kernel = kernel(chunks);
    counted(|| {
        let mut run: Run<T> = kernel.run("f", ());
        while let Some(item) = block_on(run.next()) {
            assert!(item.is_ok());
        }
    })
}

fn folded<T: FromChunks>(chunks: usize) -> usize {
    let kernel = kernel(chunks);
    counted(|| {
        let run: Run<T> = kernel.run("f", ());
        assert!(block_on(run.finish()).is_ok());
    })
}

/// One test, because two at once would count each other's.
#[test]
fn ke_p2_no_allocation_per_chunk() {
    let once = |measure: fn(usize) -> usize| {
        measure(10);
        (measure(10_000), measure(20_000))
    };
    for (name, (short, long)) in [
        ("items of Chunk", once(items::<Chunk>)),
        ("items of Bytes", once(items::<bytes::Bytes>)),
        ("items of Text", once(items::<Text>)),
        ("fold of String", once(folded::<String>)),
        ("fold of Text", once(folded::<Text>)),
        ("fold of Bytes", once(folded::<bytes::Bytes>)),
    ] {
        assert!(
            long <= short + GROWTH,
            "{name}: {short} at 10,000 and {long} at 20,000"
        );
        assert!(short <= 64 + 4 * GROWTH, "{name}: {short}");
    }
    assert_eq!(items::<Chunk>(10_000), items::<Chunk>(20_000));
    // A streamed String costs its own buffer and nothing else.
    let strings = items::<String>(20_000) - items::<String>(10_000);
    assert!((10_000..=10_000 + GROWTH).contains(&strings), "{strings}");
    let per_call = items::<Chunk>(1);
    assert!(per_call <= 64, "{per_call} allocations per call");
    let node_readers = {
        let node = kernel(10_000).node("f", ());
        let mut first = node.read();
        while block_on(first.next()).is_some() {}
        let mut second = node.read();
        counted(|| while block_on(second.next()).is_some() {})
    };
    assert_eq!(node_readers, 0, "a second reader of a node copies nothing");
}
