//! Measures the cost that the kernel adds to a stream of small chunks (KE-P1), and that of a reader of a shared node
//! (KE-P4).
//!
//! KE-P1 compares a bare boxed stream whose bytes are appended with the kernel, one pass-through layer and
//! `run::<String>().finish()` over the same chunks.
//!
//! ```text
//! kernel_run [--chunks N] [--rounds N] [--json] [--gate]
//! ```

use std::io::Write;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll};
use std::time::Instant;

use clap::Parser;
use futures::executor::block_on;
use futures::{Stream, StreamExt};
use sapwood_benches::report::Report;
use sapwood_kernel::{Call, Chunk, Chunks, Kernel, Next, Node, Result, Spec, Text, raw};
use serde_json::json;

/// KE-P1: the nanoseconds per chunk that the kernel may add, and the maximum ratio to the bare stream.
const ADDED_NS_MAX: f64 = 150.0;
const TIMES_MAX: f64 = 6.0;
/// KE-P4: nanoseconds per chunk and reader.
const READER_NS_MAX: f64 = 120.0;
const READERS: usize = 8;

/// Chunks of four bytes whose creation costs nothing.
struct Source(usize);

impl Stream for Source {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        self.0 -= 1;
        Poll::Ready(Some(Ok(Chunk::text(Text::from_static("abcd")))))
    }
}

/// The stream of a layer that passes everything through.
struct Through(Chunks);

impl Stream for Through {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(cx)
    }
}

fn ns_per_chunk(chunks: usize, work: impl FnOnce() -> usize) -> f64 {
    let began = Instant::now();
    let bytes = work();
    let took = began.elapsed();
    assert_eq!(bytes, 4 * chunks, "every byte arrived");
    took.as_secs_f64() * 1e9 / chunks as f64
}

fn bare(chunks: usize) -> f64 {
    ns_per_chunk(chunks, || {
        let mut stream: Chunks = Source(chunks).boxed();
        block_on(async {
            let mut whole = Vec::new();
            while let Some(Ok(chunk)) = stream.next().await {
                whole.extend_from_slice(&chunk.data);
            }
            whole.len()
        })
    })
}

fn through_kernel(kernel: &Kernel, chunks: usize) -> f64 {
    ns_per_chunk(chunks, || {
        let finished = block_on(kernel.run::<String>("source", ()).finish());
        finished.map_or(0, |(whole, _)| whole.len())
    })
}

/// Several readers of one node in turn: the first polls the source, the others replay.
fn fan_out(chunks: usize) -> f64 {
    let node = Node::new(Source(chunks));
    let total = ns_per_chunk(chunks * READERS, || {
        let mut readers: Vec<Chunks> = (0..READERS).map(|_| node.read()).collect();
        block_on(async {
            let mut bytes = 0;
            for _ in 0..chunks {
                for reader in &mut readers {
                    if let Some(Ok(chunk)) = reader.next().await {
                        bytes += chunk.data.len();
                    }
                }
            }
            bytes
        })
    });
    drop(node);
    total
}

/// The minimum and the median.
fn summary(mut rounds: Vec<f64>) -> (f64, f64) {
    rounds.sort_by(f64::total_cmp);
    (rounds[0], rounds[rounds.len() / 2])
}

/// Cost of the kernel for a stream of small chunks
#[derive(Parser)]
struct Args {
    /// Chunks of a stream
    #[arg(long, default_value = "1000000")]
    chunks: NonZeroUsize,
    /// Measured rounds
    #[arg(long, default_value = "7")]
    rounds: NonZeroUsize,
    #[command(flatten)]
    report: Report,
}

fn kernel(chunks: usize) -> Result<Kernel> {
    let kernel = Kernel::new();
    kernel.add(raw(Spec::new("source", "Four-byte chunks."), move |_| {
        Source(chunks).boxed()
    }))?;
    kernel.layer(|call: Call, next: Next| -> Chunks { Through(next.call(call)).boxed() });
    Ok(kernel)
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let (chunks, rounds) = (args.chunks.get(), args.rounds.get());
    let kernel = kernel(chunks)?;
    // A node retains every chunk, so fewer of them are used.
    let shared = chunks.min(200_000);
    let (mut plain, mut ours, mut readers) = (vec![], vec![], vec![]);
    // The first round warms up and is not counted.
    for round in 0..=rounds {
        let figures = (
            bare(chunks),
            through_kernel(&kernel, chunks),
            fan_out(shared),
        );
        if round > 0 {
            plain.push(figures.0);
            ours.push(figures.1);
            readers.push(figures.2);
        }
    }
    let (plain, ours, readers) = (summary(plain), summary(ours), summary(readers));
    let (added, times) = (ours.1 - plain.1, ours.1 / plain.1);
    let passed = added <= ADDED_NS_MAX && times <= TIMES_MAX && readers.1 <= READER_NS_MAX;
    let mut out = std::io::stdout().lock();
    if args.report.json {
        let figures = json!({
            "bare_ns": {"min": plain.0, "median": plain.1},
            "kernel_ns": {"min": ours.0, "median": ours.1},
            "added_ns": added,
            "times": times,
            "reader_ns": {"min": readers.0, "median": readers.1},
            "passed": passed,
        });
        writeln!(out, "{figures}")?;
    } else {
        writeln!(out, "ns per chunk           min   median")?;
        writeln!(out, "bare boxed stream   {:6.1}   {:6.1}", plain.0, plain.1)?;
        writeln!(out, "kernel, layer, fold {:6.1}   {:6.1}", ours.0, ours.1)?;
        writeln!(
            out,
            "added {added:.1} (goal {ADDED_NS_MAX}), {times:.1} times (goal {TIMES_MAX})"
        )?;
        writeln!(
            out,
            "each of {READERS} readers   {:6.1}   {:6.1} (goal {READER_NS_MAX})",
            readers.0, readers.1
        )?;
        writeln!(
            out,
            "semantic-kernel 1.45 (Python), as measured for the specification: 630 bare, 85,000 merged"
        )?;
    }
    Ok(args.report.exit(passed))
}
