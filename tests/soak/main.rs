//! The soak: many clients of all kinds against a server in a process of its own, for minutes or hours.
//!
//! ```text
//! soak --server ADDRESS --pid PID [--minutes N] [--clients N] [--seed N]
//! ```

mod client;
mod dice;
mod victim;
mod wire;

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::Parser;
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::client::{Client, Totals};
use self::victim::{Polls, Sample, Victim};

/// Many clients of all kinds against a running server
#[derive(Parser)]
struct Args {
    /// Address of the server
    #[arg(long)]
    server: SocketAddr,
    /// Process id of the server, whose memory is watched
    #[arg(long)]
    pid: u32,
    /// Duration in minutes
    #[arg(long, default_value = "10")]
    minutes: f64,
    /// Number of concurrent clients
    #[arg(long, default_value = "16")]
    clients: u64,
    /// Seed of the clients' choices; default: the clock
    #[arg(long)]
    seed: Option<u64>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let seed = args.seed.unwrap_or_else(|| u64::from(now.subsec_nanos()));
    send(&format!(
        "seed {seed}, {} clients, {} min",
        args.clients, args.minutes
    ))?;
    let verdict = soak(&args, seed).await;
    if let Err(error) = &verdict {
        send(&format!("FAILED with --seed {seed}: {error:#}"))?;
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

async fn soak(args: &Args, seed: u64) -> Result<()> {
    let victim = Victim::new(args.server, args.pid);
    victim.ready(WAIT_LIMIT).await?;
    let span = Duration::from_secs_f64(args.minutes * 60.0);
    let end = Instant::now() + span;
    let mut clients = JoinSet::new();
    for number in 0..args.clients {
        clients.spawn(Client::new(args.server, seed, number).run(end));
    }
    let samples = watch(&victim, &mut clients, end).await?;
    let mut totals = Totals::default();
    while let Some(ended) = clients.join_next().await {
        totals.add(&ended??);
    }
    send(&format!("{totals}"))?;
    victim.empty(WAIT_LIMIT).await?;
    send("nothing is open any more")?;
    judge_polls(&victim.polls().await?)?;
    judge(&samples, span)
}

/// No task may block a thread of the server for long. The clients keep the machine busy, so a thread may be preempted
/// in the middle of a poll: a few polls may seem long.
fn judge_polls(polls: &Polls) -> Result<()> {
    let Polls { all, long, longest } = polls;
    send(&format!(
        "{all} polls, {long} longer than 50 ms, {longest} longer than a second"
    ))?;
    if *longest > 0 || *long > all / LONG_POLLS {
        bail!("tasks hold the server's threads for too long");
    }
    Ok(())
}

/// Checks the server every few seconds; stops as soon as a client has failed.
async fn watch(
    victim: &Victim,
    clients: &mut JoinSet<Result<Totals>>,
    end: Instant,
) -> Result<Vec<Sample>> {
    let began = Instant::now();
    let mut samples = Vec::new();
    let mut received = 0;
    while Instant::now() < end {
        tokio::time::sleep(EVERY).await;
        let sample = victim.sample(began.elapsed())?;
        if sample.at.as_secs() / 30 > received {
            received = sample.at.as_secs() / 30;
            send(&format!(
                "{:>6} s {:>8} KiB",
                sample.at.as_secs(),
                sample.resident / 1024
            ))?;
        }
        samples.push(sample);
        // A client that has ended early has failed.
        if Instant::now() < end
            && let Some(ended) = clients.try_join_next()
        {
            ended??;
        }
    }
    Ok(samples)
}

/// Compares the medians of resident memory in the first and in the last third after the warm-up.
fn judge(samples: &[Sample], span: Duration) -> Result<()> {
    let warm = (span / 3).min(WARM_UP);
    let after: Vec<&Sample> = samples.iter().filter(|sample| sample.at >= warm).collect();
    let third = after.len() / 3;
    if third == 0 {
        bail!("too short to judge memory: run it for at least a minute");
    }
    let (first, last) = (
        middle(&after[..third]),
        middle(&after[after.len() - third..]),
    );
    let minutes = (span - warm).as_secs_f64() / 60.0 * 2.0 / 3.0;
    #[allow(clippy::cast_precision_loss, reason = "memory is far below 2^52 bytes")]
    let growth = (last as f64 - first as f64) / 1024.0 / minutes;
    // Rounding and caching of allocators do not depend on the length of the run.
    let most = GROWTH_KIB.max(ROUNDING_KIB / minutes);
    send(&format!(
        "resident after the warm-up {} KiB, at the end {} KiB: {growth:+.0} KiB per minute (at most {most:.0})",
        first / 1024,
        last / 1024
    ))?;
    if growth > most {
        bail!("memory grows by {growth:.0} KiB per minute");
    }
    Ok(())
}

fn middle(samples: &[&Sample]) -> u64 {
    let mut resident: Vec<u64> = samples.iter().map(|sample| sample.resident).collect();
    resident.sort_unstable();
    resident[resident.len() / 2]
}

fn send(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Interval of the checks.
const EVERY: Duration = Duration::from_secs(1);
/// Warm-up, in which buffers and caches may grow.
const WARM_UP: Duration = Duration::from_secs(120);
/// How long models may take to load, and how long something may stay open after the last client: detached sessions wait
/// for their grace.
const WAIT_LIMIT: Duration = Duration::from_secs(40);
/// One in this many polls may seem to last longer than 50 ms.
const LONG_POLLS: u64 = 100;
/// Allowed growth, in a run that is long enough.
const GROWTH_KIB: f64 = 256.0;
/// Allowed growth besides, once.
const ROUNDING_KIB: f64 = 2_048.0;
