//! Measures further patterns of LMTP clients: tokens at a given pace (LM-1303), and connections that come and go
//! (LM-1305).
//!
//! ```text
//! lmtp_patterns paced [--quick] [--json] [--gate] [--rounds N] [--seconds S]
//! lmtp_patterns cycles [--count N] [--json] [--gate]
//! lmtp_patterns serve paced | endless
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Parser, Subcommand, ValueEnum};
use futures::{SinkExt, StreamExt};
use sapwood_benches::child::Server;
use sapwood_benches::lmtp::items::{generate, items};
use sapwood_benches::lmtp::{face, load};
use sapwood_benches::measure::{Rounds, median, percentile};
use sapwood_benches::report::Report;
use sapwood_benches::scripted;
use sapwood_engine::scripted::Config as Script;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Message;

/// Patterns of LMTP clients besides reading as fast as possible
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// 128 streams of 100 tokens per second each
    Paced {
        #[command(flatten)]
        rounds: Rounds,
        #[command(flatten)]
        report: Report,
    },
    /// Connections that are opened, used once and closed
    Cycles {
        /// Number of connections
        #[arg(long, default_value = "10000")]
        count: u32,
        #[command(flatten)]
        report: Report,
    },
    /// Run as the server
    #[command(hide = true)]
    Serve { model: Model },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Model {
    Paced,
    Endless,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    match Args::parse().what {
        What::Paced { rounds, report } => paced(rounds, report).await,
        What::Cycles { count, report } => cycles(count, report).await,
        What::Serve { model } => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
            let model = match model {
                Model::Endless => scripted::endless(),
                Model::Paced => Script {
                    tokens_per_s: PACE,
                    ..scripted::endless()
                },
            };
            face::serve(listener, model).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Tokens of one stream in a second.
const PACE: f64 = 100.0;
const STREAMS: usize = 128;
/// LM-1303: the share of the model's tokens that must arrive.
const GOAL_SHARE: f64 = 0.95;
const GOAL_BETWEEN_US: u128 = 15_000;
/// Two steps.
const GOAL_FIRST_US: u128 = 20_000;

/// The arrival times of the tokens of one round.
#[derive(Default)]
struct Arrivals {
    first: Vec<Duration>,
    between: Vec<Duration>,
    tokens: u32,
}

async fn paced(rounds: Rounds, report: Report) -> Result<ExitCode> {
    let server = Server::start(&["serve", "paced"])?;
    let (mut shares, mut all) = (Vec::new(), Arrivals::default());
    for _ in 0..rounds.rounds {
        let round = arrivals(&server, rounds.span()).await?;
        let ideal = PACE * rounds.span().as_secs_f64() * f64::from(u32::try_from(STREAMS)?);
        shares.push(f64::from(round.tokens) / ideal);
        all.first.extend(round.first);
        all.between.extend(round.between);
    }
    let share = median(shares);
    let (first, between) = (percentile(&all.first, 99), percentile(&all.between, 99));
    let reply = json!({
        "streams": STREAMS, "share_of_pace": share, "goal_share": GOAL_SHARE,
        "between_p50_us": percentile(&all.between, 50), "between_p99_us": between, "goal_between_us": GOAL_BETWEEN_US,
        "first_p50_us": percentile(&all.first, 50), "first_p99_us": first, "goal_first_us": GOAL_FIRST_US,
    });
    let text = format!(
        "{STREAMS} streams at {PACE} tokens/s: {share:.3} of the pace (goal {GOAL_SHARE}), p99 {between} us between tokens \
         (goal {GOAL_BETWEEN_US}), p99 {first} us to the first (goal {GOAL_FIRST_US})"
    );
    report.print(&text, &reply)?;
    let passed = share >= GOAL_SHARE && between < GOAL_BETWEEN_US && first < GOAL_FIRST_US;
    Ok(report.exit(passed))
}

/// One round on one connection, from the first GENERATE to the end of the time.
async fn arrivals(server: &Server, span: Duration) -> Result<Arrivals> {
    let mut socket = load::connect(server.address).await?;
    let mut seen = Arrivals::default();
    let began = Instant::now();
    let mut last = vec![None; STREAMS];
    for (stream, sent) in last.iter_mut().enumerate() {
        *sent = Some((Instant::now(), false));
        let text = generate(stream, 1 << 16);
        socket.send(Message::text(text)).await?;
    }
    while began.elapsed() < span {
        let Some(message) = socket.next().await.transpose()? else {
            bail!("the server closed the connection");
        };
        let Message::Text(text) = message else {
            continue;
        };
        let now = Instant::now();
        for item in items(&text) {
            let Some(Some((before, going))) = last.get_mut(item.stream) else {
                bail!("nobody asked for stream {}", item.stream);
            };
            let times = if *going {
                &mut seen.between
            } else {
                &mut seen.first
            };
            times.push(now - *before);
            (*before, *going) = (now, true);
            seen.tokens += 1;
        }
    }
    Ok(seen)
}

/// LM-1305: allowed growth of memory from a tenth of the cycles to the last.
const GOAL_GROWTH_BYTES: u64 = 1 << 20;

async fn cycles(count: u32, report: Report) -> Result<ExitCode> {
    let server = Server::start(&["serve", "endless"])?;
    let tenth = (count / 10).max(1);
    let mut before = 0;
    let began = Instant::now();
    for cycle in 1..=count {
        let mut socket = load::connect(server.address).await?;
        socket.send(Message::text(generate(1, 1 << 16))).await?;
        // Half of them receive something before they disconnect.
        if cycle % 2 == 0 {
            let _reply = socket.next().await.transpose()?;
        }
        drop(socket);
        if cycle == tenth {
            alone(&server).await?;
            before = server.resident()?;
        }
    }
    let took = began.elapsed();
    let freed = alone(&server).await?;
    let after = server.resident()?;
    let grown = after.saturating_sub(before);
    let reply = json!({
        "cycles": count, "seconds": took.as_secs_f64(), "resident_bytes_after_a_tenth": before, "resident_bytes": after,
        "goal_growth_bytes": GOAL_GROWTH_BYTES, "last_row_freed_after_us": freed.as_micros(),
    });
    let text = format!(
        "{count} cycles in {:.1} s: {after} bytes resident, {grown} more than after {tenth} (goal {GOAL_GROWTH_BYTES}); \
         no row in use {} us after the last",
        took.as_secs_f64(),
        freed.as_micros()
    );
    report.print(&text, &reply)?;
    Ok(report.exit(grown <= GOAL_GROWTH_BYTES))
}

/// Waits until no sequence is running and no connection but our own is open.
async fn alone(server: &Server) -> Result<Duration> {
    let began = Instant::now();
    loop {
        let mut left = 0.0;
        for name in [
            "sapwood_requests_running{",
            "sapwood_requests_waiting{",
            "sapwood_lmtp_connections_open",
        ] {
            left += face::metric(server.address, name).await?;
        }
        if left == 0.0 {
            return Ok(began.elapsed());
        }
        if began.elapsed() > Duration::from_secs(10) {
            bail!("{left} rows, requests and connections are left ten seconds later");
        }
    }
}
