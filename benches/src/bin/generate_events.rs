//! Compares events of `generate_stream` with a bare handler that sends the same (TR-1601).
//!
//! Both run in processes of their own; one client drives them in turn, each stream over a connection of its own.
//!
//! ```text
//! generate_events [--quick] [--json] [--gate] [--streams N] [--rounds N] [--seconds S]
//! generate_events --serve generate | bare
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;
use sapwood_benches::child::{self, Server};
use sapwood_benches::generate::load::Load;
use sapwood_benches::generate::{bare, face};
use sapwood_benches::measure::{Rounds, median};
use sapwood_benches::report::Report;
use sapwood_benches::scripted;
use serde_json::json;

/// Events of `generate_stream` against a bare handler that sends the same
#[derive(Debug, Parser)]
struct Args {
    /// Run as one of the servers: `generate` or `bare`
    #[arg(long, value_name = "SERVER")]
    serve: Option<String>,
    /// Concurrent streams
    #[arg(long, default_value = "128")]
    streams: u32,
    #[command(flatten)]
    rounds: Rounds,
    #[command(flatten)]
    report: Report,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(which) = &args.serve {
        let listener = child::listener().await?;
        match which.as_str() {
            "generate" => face::serve(listener, scripted::kernel()?).await?,
            "bare" => bare::serve(listener, None).await?,
            other => bail!("no server is called {other}"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    events(&args).await
}

/// Figures of one server, one per round.
#[derive(Default)]
struct Figures {
    rates: Vec<f64>,
    cpu_us: Vec<f64>,
    bytes: Vec<f64>,
}

async fn events(args: &Args) -> Result<ExitCode> {
    let servers = [
        Server::start(&["--serve", "bare"])?,
        Server::start(&["--serve", "generate"])?,
    ];
    let mut figures = [Figures::default(), Figures::default()];
    for _ in 0..args.rounds.rounds {
        for (server, figures) in servers.iter().zip(&mut figures) {
            round(server, args, figures).await?;
        }
    }
    let [bare, ours] = figures.map(|f| (median(f.rates), median(f.cpu_us), median(f.bytes)));
    let ratio = ours.0 / bare.0;
    if args.report.json {
        let named = |(rate, cpu_us, bytes): (f64, f64, f64)| json!({"events_per_s": rate, "cpu_us_per_event": cpu_us, "bytes_per_event": bytes});
        let report = json!({"streams": args.streams, "rounds": args.rounds.rounds, "seconds": args.rounds.seconds,
            "bare": named(bare), "generate": named(ours), "ratio": ratio, "goal": GOAL});
        writeln!(std::io::stdout(), "{report}")?;
    } else {
        writeln!(
            std::io::stdout(),
            "{} streams: bare {:.0} events/s {:.2} us cpu {:.0} bytes   generate {:.0} events/s {:.2} us cpu {:.0} bytes   \
             ratio {ratio:.3} (goal {GOAL})",
            args.streams,
            bare.0,
            bare.1,
            bare.2,
            ours.0,
            ours.1,
            ours.2,
        )?;
    }
    Ok(args.report.exit(ratio >= GOAL))
}

/// TR-1601.
const GOAL: f64 = 0.8;

/// One round: a tenth of the time to warm up, then counts divided by the time they took.
async fn round(server: &Server, args: &Args, figures: &mut Figures) -> Result<()> {
    let mut load = Load::begin(server.address, args.streams).await?;
    let span = args.rounds.span();
    tokio::time::sleep(span / 10).await;
    let seen =
        |load: &Load| [&load.count.events, &load.count.bytes].map(|n| n.load(Ordering::Relaxed));
    let (began, cpu, before) = (Instant::now(), server.cpu()?, seen(&load));
    tokio::time::sleep(span).await;
    let (took, used, after) = (began.elapsed(), server.cpu()? - cpu, seen(&load));
    load.check()?;
    #[allow(
        clippy::cast_precision_loss,
        reason = "counts of a few seconds are far below 2^52"
    )]
    let [events, bytes] = [0, 1].map(|n: usize| (after[n] - before[n]) as f64);
    figures.rates.push(events / took.as_secs_f64());
    figures.cpu_us.push(used.as_secs_f64() * 1e6 / events);
    figures.bytes.push(bytes / events);
    Ok(())
}
