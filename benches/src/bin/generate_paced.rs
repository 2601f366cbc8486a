//! Compares events of paced streams with a bare handler that sends the same at the same pace (TR-1602): the cost of an
//! event, and its delay.
//!
//! ```text
//! generate_paced [--quick] [--json] [--gate] [--streams N] [--pace TOKENS_PER_S] [--rounds N] [--seconds S]
//! generate_paced --serve generate | bare
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use sapwood_benches::child::{self, Server};
use sapwood_benches::generate::{arrivals, bare, face};
use sapwood_benches::measure::{Rounds, median, percentile};
use sapwood_benches::report::Report;
use sapwood_benches::scripted;
use serde_json::json;

/// Paced events of `generate_stream` against a bare handler that sends the same
#[derive(Debug, Parser)]
struct Args {
    /// Run as one of the servers: `generate` or `bare`
    #[arg(long, value_name = "SERVER")]
    serve: Option<String>,
    /// Concurrent streams
    #[arg(long, default_value = "128")]
    streams: u32,
    /// Tokens per second of each stream
    #[arg(long, default_value = "50")]
    pace: f64,
    #[command(flatten)]
    rounds: Rounds,
    #[command(flatten)]
    report: Report,
}

impl Args {
    fn period(&self) -> Duration {
        Duration::from_secs_f64(1.0 / self.pace)
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(which) = &args.serve {
        let listener = child::listener().await?;
        match which.as_str() {
            "generate" => face::serve(listener, scripted::paced(args.pace)?).await?,
            "bare" => bare::serve(listener, Some(args.period())).await?,
            other => bail!("no server is called {other}"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    events(&args).await
}

/// Figures of one server, one per round.
#[derive(Default)]
struct Figures {
    cpu_us: Vec<f64>,
    late_us: Vec<f64>,
    rates: Vec<f64>,
}

async fn events(args: &Args) -> Result<ExitCode> {
    let pace = args.pace.to_string();
    let servers = [
        Server::start(&["--serve", "bare", "--pace", &pace])?,
        Server::start(&["--serve", "generate", "--pace", &pace])?,
    ];
    let mut figures = [Figures::default(), Figures::default()];
    for _ in 0..args.rounds.rounds {
        for (server, figures) in servers.iter().zip(&mut figures) {
            round(server, args, figures).await?;
        }
    }
    let [bare, ours] = figures.map(|f| (median(f.rates), median(f.cpu_us), median(f.late_us)));
    let cost = ours.1 / bare.1;
    let allowed_us = LATE_RATIO * bare.2 + LATE_US;
    if args.report.json {
        let named = |(rate, cpu_us, late_us): (f64, f64, f64)| json!({"events_per_s": rate, "cpu_us_per_event": cpu_us, "late_p99_us": late_us});
        let report = json!({"streams": args.streams, "tokens_per_s": args.pace, "rounds": args.rounds.rounds,
            "seconds": args.rounds.seconds, "bare": named(bare), "generate": named(ours), "cpu_ratio": cost,
            "cpu_ratio_goal": COST_RATIO, "late_p99_us_goal": allowed_us});
        writeln!(std::io::stdout(), "{report}")?;
    } else {
        writeln!(
            std::io::stdout(),
            "{} streams of {} tokens/s: bare {:.0} events/s {:.2} us cpu, p99 {:.0} us late   generate {:.0} events/s \
             {:.2} us cpu, p99 {:.0} us late   cpu ratio {cost:.2} (goal {COST_RATIO}), p99 goal {allowed_us:.0} us",
            args.streams,
            args.pace,
            bare.0,
            bare.1,
            bare.2,
            ours.0,
            ours.1,
            ours.2,
        )?;
    }
    let passed = cost <= COST_RATIO && ours.2 <= allowed_us;
    Ok(args.report.exit(passed))
}

/// TR-1602: processor time per event, against the bare server's.
const COST_RATIO: f64 = 1.5;
/// TR-1602: delay relative to the bare server's, plus microseconds.
const LATE_RATIO: f64 = 1.5;
const LATE_US: f64 = 500.0;

/// One round: some time for all streams to start, then arrivals are recorded.
async fn round(server: &Server, args: &Args, figures: &mut Figures) -> Result<()> {
    let span = args.rounds.span();
    let begin = Instant::now() + BEGINNING;
    let end = begin + span;
    let listening = tokio::spawn(arrivals::listen(server.address, args.streams, begin, end));
    tokio::time::sleep_until(begin.into()).await;
    let cpu = server.cpu()?;
    tokio::time::sleep_until(end.into()).await;
    let used = server.cpu()? - cpu;
    let all = listening.await??;
    let events: usize = all.iter().map(Vec::len).sum();
    let late = all
        .iter()
        .flat_map(|arrivals| arrivals::lateness(arrivals, args.period()));
    let late: Vec<Duration> = late.collect();
    #[allow(
        clippy::cast_precision_loss,
        reason = "counts and times of a few seconds are far below 2^52"
    )]
    let (events, late_us) = (events as f64, percentile(&late, 99) as f64);
    figures.rates.push(events / span.as_secs_f64());
    figures.cpu_us.push(used.as_secs_f64() * 1e6 / events);
    figures.late_us.push(late_us);
    Ok(())
}

/// Time for all streams to start.
const BEGINNING: Duration = Duration::from_millis(500);
