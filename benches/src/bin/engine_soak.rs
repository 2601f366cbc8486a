//! The soak of an engine with a real model: many clients of all kinds, few slots, little memory. Every answer is compared
//! with the one that the same request has alone.
//!
//! `cargo xtask soak --engine` builds the server, installs a model and runs this.
//!
//! ```text
//! engine_soak --sapwood PROGRAM --model FILE [--minutes N] [--clients N] [--seed N] [--setting N]
//! ```

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use sapwood_benches::child::Server;
use sapwood_benches::side::{Side, metric};
use sapwood_benches::soak::client::SoakClient;
use sapwood_benches::soak::question::Dice;
use sapwood_benches::soak::reference::SoakReference;
use sapwood_benches::soak::verdict::SoakTotals;
use tokio::task::JoinSet;

/// Many clients of all kinds against a server with a real model
#[derive(Debug, Parser)]
struct Args {
    /// Our binary, with embedded models
    #[arg(long, value_name = "PROGRAM")]
    sapwood: PathBuf,
    /// The model
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Duration in minutes
    #[arg(long, default_value = "30")]
    minutes: f64,
    /// Number of concurrent clients
    #[arg(long, default_value = "6")]
    clients: u64,
    /// Seed of the clients' choices and of the server's settings; default: the clock
    #[arg(long)]
    seed: Option<u64>,
    /// The server's settings, 1 to 5, in place of those that the seed chooses
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=SETTINGS.len() as i64))]
    setting: Option<u8>,
}

/// The settings of a server.
#[derive(Clone, Copy, Debug)]
struct Setting {
    engine: &'static [(&'static str, &'static str)],
    /// The model drafts for itself.
    drafts: bool,
    /// Each slot has cells of its own, so that answers are equal to the last bit.
    exact: bool,
    /// What has to be counted at the end, or the soak has not reached what the setting is for.
    reaches: &'static [&'static str],
}

/// The settings of the soak's server, one of which the seed chooses.
const SETTINGS: [Setting; 5] = [
    // All slots share few cells: sequences are preempted, and prefixes evicted to memory.
    Setting {
        engine: &[("CACHE_TOKENS", "768"), ("PREFIX_RAM_BYTES", "12000000")],
        drafts: false,
        exact: false,
        reaches: &[PREEMPTIONS, "sapwood_prefix_cache_restored_tokens_total"],
    },
    // Cells of its own for each slot.
    Setting {
        engine: &[("CACHE_TOKENS", "3584"), ("PREFIX_RAM_BYTES", "12000000")],
        drafts: false,
        exact: true,
        reaches: &["sapwood_prefix_cache_hits_total"],
    },
    // No memory for evicted prefixes.
    Setting {
        engine: &[("CACHE_TOKENS", "768"), ("PREFIX_RAM_BYTES", "1")],
        drafts: false,
        exact: false,
        reaches: &[PREEMPTIONS],
    },
    // Several tokens in one decode call.
    Setting {
        engine: &[
            ("CACHE_TOKENS", "3584"),
            ("PREFIX_RAM_BYTES", "12000000"),
            ("SPECULATION", "lookup"),
        ],
        drafts: false,
        exact: true,
        reaches: &[ACCEPTED],
    },
    // The same, with a draft model.
    Setting {
        engine: &[("CACHE_TOKENS", "3584"), ("PREFIX_RAM_BYTES", "12000000")],
        drafts: true,
        exact: true,
        reaches: &[ACCEPTED],
    },
];

const PREEMPTIONS: &str = "sapwood_preemptions_total";
const ACCEPTED: &str = "sapwood_accepted_tokens_total";

/// The settings that all have.
const COMMON: [(&str, &str); 5] = [
    ("CTX", "512"),
    ("PARALLEL", "3"),
    ("KEPT_PREFIXES", "4"),
    ("THREADS", "1"),
    ("STEP_MS", "100"),
];

/// Without huge pages for the allocator: after some time the kernel gathers small pages into them, those that nothing has touched too,
/// and a server seems to grow by 30 MiB at once.
const SMALL_PAGES: (&str, &str) = ("MIMALLOC_ALLOW_THP", "0");

/// The settings of the server that answers each request alone.
const ALONE: [(&str, &str); 4] = [
    ("CTX", "512"),
    ("PARALLEL", "1"),
    ("KEPT_PREFIXES", "0"),
    ("THREADS", "1"),
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let seed = args.seed.unwrap_or_else(|| u64::from(now.subsec_nanos()));
    let setting = match args.setting {
        Some(number) => SETTINGS[usize::from(number) - 1],
        None => *Dice::new(seed).pick(&SETTINGS),
    };
    print(&format!(
        "seed {seed}, {} clients, {} min, {setting:?}",
        args.clients, args.minutes
    ))?;
    if let Err(error) = soak(&args, seed, setting).await {
        print(&format!("FAILED with --seed {seed}: {error:#}"))?;
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

async fn soak(args: &Args, seed: u64, setting: Setting) -> Result<()> {
    let start = async |settings: &[(&str, &str)], arguments: &[&str]| {
        let named: Vec<_> = settings
            .iter()
            .map(|(name, value)| (format!("SAPWOOD_ENGINE__{name}"), *value))
            .collect();
        let named: Vec<_> = named
            .iter()
            .map(|(name, value)| (&**name, *value))
            .chain([SMALL_PAGES])
            .collect();
        Side::sapwood(&args.sapwood, &args.model, arguments, &named).await
    };
    let reference = Arc::new(SoakReference::new(start(&ALONE, &[]).await?));
    let model = args.model.to_str().context("the path is no text")?;
    let arguments = ["--draft-model", model];
    let arguments = if setting.drafts { &arguments[..] } else { &[] };
    let side = start(&[&COMMON, setting.engine].concat(), arguments).await?;
    let span = Duration::from_secs_f64(args.minutes * 60.0);
    let end = Instant::now() + span;
    let mut clients = JoinSet::new();
    for number in 0..args.clients {
        let (address, reference) = (side.server.address, Arc::clone(&reference));
        clients.spawn(SoakClient::new(address, side.path, reference, seed, number).run(end));
    }
    let mut totals = SoakTotals::default();
    let samples = watch(&side.server, &mut clients, &mut totals, end).await?;
    print(&format!("{totals}"))?;
    print(&format!(
        "{} different questions",
        reference.questions().await
    ))?;
    // A minute may be over before slots are short.
    let reaches = if args.minutes < REACHES_MINUTES {
        &[]
    } else {
        setting.reaches
    };
    closed(&side.server, reaches).await?;
    if setting.exact {
        totals.judge_exact().map_err(|why| anyhow!(why))?;
    }
    judge_memory(&samples)?;
    side.server.stop().await
}

/// Checks the server every second until all clients have ended; fails as soon as one has failed. Returns the samples of its
/// own memory, in bytes.
async fn watch(
    server: &Server,
    clients: &mut JoinSet<Result<SoakTotals>>,
    totals: &mut SoakTotals,
    end: Instant,
) -> Result<Vec<u64>> {
    let mut samples = Vec::new();
    loop {
        // Either may be cancelled: a client that has ended is still there, and the pause has no effect.
        tokio::select! {
            ended = clients.join_next() => match ended {
                Some(ended) => totals.add(ended??),
                None => return Ok(samples),
            },
            () = tokio::time::sleep(EVERY) => {
                let alive = tokio::time::timeout(ALIVE_LIMIT, server.fetch("/livez", None)).await;
                let (status, body) = alive.context("/livez does not answer")??;
                ensure!(status == 200, "/livez: {status} {body}");
                let over = end + OVERTIME;
                ensure!(Instant::now() < over, "clients go on {OVERTIME:?} after the end");
                if Instant::now() < end {
                    samples.push(server.anonymous()?);
                }
            }
        }
    }
}

/// Waits until nothing is open, and checks that nothing has panicked and that these were counted.
async fn closed(server: &Server, reaches: &[&str]) -> Result<()> {
    let began = Instant::now();
    loop {
        let (_, scrape) = server.fetch("/metrics", None).await?;
        let mut left = Vec::new();
        for (name, most) in OPEN {
            let value = metric(&scrape, name)?;
            if value > most {
                left.push(format!("{name} is {value}"));
            }
        }
        if left.is_empty() {
            let panics = metric(&scrape, "sapwood_panics_total")?;
            ensure!(panics < 1.0, "{panics} panics");
            for name in REPORTED {
                print(&format!("{name} {}", metric(&scrape, name)?))?;
            }
            for name in reaches {
                let reached = metric(&scrape, name)?;
                ensure!(reached > 0.0, "{name} is 0, which the setting is for");
            }
            return Ok(());
        }
        if began.elapsed() > CLOSE_LIMIT {
            bail!("{CLOSE_LIMIT:?} after the last client: {}", left.join(", "));
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Compares the medians of the server's own memory in the second and in the last quarter.
fn judge_memory(samples: &[u64]) -> Result<()> {
    let quarter = samples.len() / 4;
    ensure!(
        quarter > 0,
        "too short to judge memory: run it for a minute"
    );
    let middle = |samples: &[u64]| {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        sorted[sorted.len() / 2] >> 20
    };
    let before = middle(&samples[quarter..2 * quarter]);
    let after = middle(&samples[samples.len() - quarter..]);
    print(&format!(
        "memory in the second quarter {before} MiB, in the last {after} MiB"
    ))?;
    ensure!(after <= before + GROWTH_MIB, "memory grows");
    Ok(())
}

fn print(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// A soak of so many minutes must have reached what its setting is for.
const REACHES_MINUTES: f64 = 5.0;
/// Interval of the checks.
const EVERY: Duration = Duration::from_secs(1);
/// The longest that the server may take to say that it is alive, on a busy machine.
const ALIVE_LIMIT: Duration = Duration::from_secs(20);
/// How long the last errands may take: each of their requests has a limit, and they wait for the reference in turn.
const OVERTIME: Duration = Duration::from_secs(1_800);
/// How long something may stay open after the last client.
const CLOSE_LIMIT: Duration = Duration::from_secs(40);
/// Allowed growth of memory: what allocators keep.
const GROWTH_MIB: u64 = 24;
/// The gauges that must go down, and to what: our own scrape is a connection.
const OPEN: [(&str, f64); 4] = [
    ("sapwood_connections_open", 1.0),
    ("sapwood_requests_running", 0.0),
    ("sapwood_requests_waiting", 0.0),
    ("sapwood_streams_parked", 0.0),
];
/// What tells whether the soak has reached what it is for.
const REPORTED: [&str; 5] = [
    "sapwood_prefix_cache_queries_total",
    "sapwood_prefix_cache_hits_total",
    "sapwood_prefix_cache_restored_tokens_total",
    PREEMPTIONS,
    ACCEPTED,
];
