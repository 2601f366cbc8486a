//! Compares a session echo with a bare echo of the same messages, over gRPC or WebSockets (EV-981, EV-982, EV-984).
//!
//! Both run in processes of their own with the same settings. One client drives them in turn, with one fragment per
//! message (`--coalesced`: the session joins ready fragments, as it does by default).
//!
//! ```text
//! evergreen_echo [--quick] [--json] [--gate] [--websocket | --msgpack] [--coalesced] [--rounds N] [--seconds S] [--case WORDS] [--idle SESSIONS]
//! evergreen_echo --latency [--websocket | --msgpack] [--seconds S]
//! evergreen_echo --serve SERVER
//! evergreen_echo --drive ADDRESS [--websocket] [--seconds S] [--case WORDS] [--idle SESSIONS]
//! ```

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use sapwood_benches::child::{self, Server};
use sapwood_benches::evergreen::load::{self, Shape};
use sapwood_benches::evergreen::wire::{Peer, Wire};
use sapwood_benches::evergreen::{bare, session};
use sapwood_benches::measure::{Rounds, median, percentile};
use sapwood_benches::report::Report;
use serde_json::json;

/// The measured cases: name, payload, window, and the least ratio to the bare echo that passes the gate.
const CASES: [(&str, usize, usize, f64); 4] = [
    ("32 B, window 16", 32, 16, 0.8),
    ("32 B, window 256", 32, 256, 0.8),
    ("64 KiB, window 16", 64 * 1024, 16, 0.9),
    ("64 KiB, window 256", 64 * 1024, 256, 0.9),
];

/// Session echo against a bare echo of the same messages
#[derive(Debug, Parser)]
struct Args {
    /// Run as one of the servers: `bare`, `bare-websocket`, `session` or `coalesced`
    #[arg(long, value_name = "SERVER")]
    serve: Option<String>,
    /// Only drive the server at this address (started with `--serve`, under a profiler), for one round of each case
    #[arg(long, value_name = "ADDRESS")]
    drive: Option<SocketAddr>,
    #[command(flatten)]
    rounds: Rounds,
    /// Over WebSockets instead of gRPC
    #[arg(long)]
    websocket: bool,
    /// Over WebSockets in the msgpack dialect; the bare echo sends the bytes back
    #[arg(long)]
    msgpack: bool,
    /// Measure the time of single echoes, one after the other
    #[arg(long)]
    latency: bool,
    /// Let the session join ready fragments into messages; the goals are those without this
    #[arg(long)]
    coalesced: bool,
    /// Only cases whose names contain this, for profiling
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    case: String,
    /// Measure the memory of this many idle sessions
    #[arg(
        long,
        value_name = "SESSIONS",
        default_value = "0",
        hide_default_value = true
    )]
    idle: usize,
    #[command(flatten)]
    report: Report,
}

impl Args {
    async fn peer(&self, server: SocketAddr) -> Result<Peer> {
        if self.msgpack {
            Ok(Peer::Msgpack(server))
        } else if self.websocket {
            Ok(Peer::WebSocket(server))
        } else {
            Peer::grpc(server).await
        }
    }

    fn cases(&self) -> impl Iterator<Item = (&'static str, usize, usize, f64)> {
        CASES
            .into_iter()
            .filter(|(name, ..)| name.contains(&self.case))
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(which) = &args.serve {
        let listener = child::listener().await?;
        match which.as_str() {
            "bare" => bare::serve(listener).await?,
            "bare-websocket" => bare::serve_websocket(listener).await?,
            "session" => session::serve(listener, false).await?,
            "coalesced" => session::serve(listener, true).await?,
            other => bail!("no server is called {other}"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(address) = args.drive {
        return drive(&args, address).await;
    }
    if args.idle > 0 {
        return idle(&args).await;
    }
    if args.latency {
        return latency(&args).await;
    }
    echo(&args).await
}

/// Times of single echoes: median and 99th percentile (EV-983).
async fn latency(args: &Args) -> Result<ExitCode> {
    let server = Server::start(&["--serve", "session"])?;
    let peer = args.peer(server.address).await?;
    let span = args.rounds.span();
    let took = load::one_by_one(&peer, 32, span).await?;
    let (half, most) = (percentile(&took, 50), percentile(&took, 99));
    if args.report.json {
        let report =
            json!({"echoes": took.len(), "p50_us": half, "p99_us": most, "goal_us": GOAL_P99_US});
        writeln!(std::io::stdout(), "{report}")?;
    } else {
        writeln!(
            std::io::stdout(),
            "{} echoes of 32 B, one by one: p50 {half} us, p99 {most} us (goal {GOAL_P99_US})",
            took.len()
        )?;
    }
    Ok(args.report.exit(most <= GOAL_P99_US))
}

/// EV-983.
const GOAL_P99_US: u128 = 1000;

/// One round of each case against a server that is profiled from outside.
async fn drive(args: &Args, address: SocketAddr) -> Result<ExitCode> {
    if args.idle > 0 {
        let sessions = open_idle(args, address).await?;
        writeln!(std::io::stdout(), "{} idle sessions", sessions.len())?;
        return Ok(ExitCode::SUCCESS);
    }
    let peer = args.peer(address).await?;
    for (name, bytes, window, _) in args.cases() {
        let span = args.rounds.span();
        let count = load::round(&peer, Shape { bytes, window }, span).await?;
        writeln!(std::io::stdout(), "{name:<20} {:>9} chunks", count.chunks)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Figures of one server in one case.
#[derive(Default)]
struct Figures {
    rates: Vec<f64>,
    cpu_us: Vec<f64>,
}

async fn echo(args: &Args) -> Result<ExitCode> {
    let ours = if args.coalesced {
        "coalesced"
    } else {
        "session"
    };
    let bare = if args.websocket || args.msgpack {
        "bare-websocket"
    } else {
        "bare"
    };
    let servers = [
        Server::start(&["--serve", bare])?,
        Server::start(&["--serve", ours])?,
    ];
    let peers = [
        args.peer(servers[0].address).await?,
        args.peer(servers[1].address).await?,
    ];
    let mut passed = true;
    let mut report = Vec::new();
    for (name, bytes, window, goal) in args.cases() {
        let figures = alternate(&servers, &peers, (bytes, window), args).await?;
        let [bare, session] = figures.map(|f| (median(f.rates), median(f.cpu_us)));
        let ratio = session.0 / bare.0;
        passed &= ratio >= goal;
        #[allow(clippy::cast_precision_loss, reason = "payload sizes are small")]
        let mb = |rate: f64| rate * bytes as f64 / 1e6;
        if !args.report.json {
            writeln!(
                std::io::stdout(),
                "{name:<20} bare {:>9.0}/s {:>7.1} MB/s {:>6.2} us cpu   session {:>9.0}/s {:>7.1} MB/s {:>6.2} us cpu   \
                 ratio {ratio:.3} (goal {goal})",
                bare.0,
                mb(bare.0),
                bare.1,
                session.0,
                mb(session.0),
                session.1,
            )?;
        }
        report.push(json!({
            "case": name, "bytes": bytes, "window": window, "ratio": ratio, "goal": goal,
            "bare": {"chunks_per_s": bare.0, "cpu_us_per_chunk": bare.1},
            "session": {"chunks_per_s": session.0, "cpu_us_per_chunk": session.1},
        }));
    }
    if args.report.json {
        writeln!(
            std::io::stdout(),
            "{}",
            json!({"rounds": args.rounds.rounds, "seconds": args.rounds.seconds, "cases": report})
        )?;
    }
    Ok(args.report.exit(passed))
}

/// Rounds of one case, both servers in turn.
async fn alternate(
    servers: &[Server; 2],
    peers: &[Peer; 2],
    (bytes, window): (usize, usize),
    args: &Args,
) -> Result<[Figures; 2]> {
    let span = args.rounds.span();
    let shape = Shape { bytes, window };
    let mut figures = [Figures::default(), Figures::default()];
    for peer in peers {
        load::round(peer, shape, span / 10).await?;
    }
    for _ in 0..args.rounds.rounds {
        for which in 0..2 {
            let cpu = servers[which].cpu()?;
            let count = load::round(&peers[which], shape, span).await?;
            let used = servers[which].cpu()? - cpu;
            figures[which].rates.push(count.rate());
            figures[which]
                .cpu_us
                .push(used.as_secs_f64() * 1e6 / (count.rate() * count.took.as_secs_f64()));
        }
    }
    Ok(figures)
}

/// Resident memory per idle session, with 100 sessions per connection.
async fn idle(args: &Args) -> Result<ExitCode> {
    let server = Server::start(&["--serve", "session"])?;
    let warm = args.peer(server.address).await?;
    drop(load::idle(&warm).await?);
    let before = server.resident()?;
    let alone = first_echo(args, server.address).await?;
    let _sessions = open_idle(args, server.address).await?;
    let growth = server.resident()?.saturating_sub(before);
    let among = first_echo(args, server.address).await?;
    let each = growth / u64::try_from(args.idle)?;
    let report = json!({"idle_sessions": args.idle, "bytes_per_session": each, "goal": GOAL_IDLE_BYTES,
            "new_session_us": {"alone": alone.as_micros(), "among": among.as_micros()}});
    if args.report.json {
        writeln!(std::io::stdout(), "{report}")?;
    } else {
        writeln!(
            std::io::stdout(),
            "{} idle sessions: {each} bytes each (goal {GOAL_IDLE_BYTES}); a new one and its echo took {alone:.0?} before, {among:.0?} among them",
            args.idle
        )?;
    }
    Ok(args.report.exit(each <= GOAL_IDLE_BYTES))
}

/// The median time for a new connection, a session and its first echo.
async fn first_echo(args: &Args, address: SocketAddr) -> Result<Duration> {
    let mut took = Vec::new();
    for _ in 0..TRIES {
        let began = Instant::now();
        drop(load::idle(&args.peer(address).await?).await?);
        took.push(began.elapsed().as_secs_f64());
    }
    Ok(Duration::from_secs_f64(median(took)))
}

const TRIES: usize = 21;

async fn open_idle(args: &Args, address: SocketAddr) -> Result<Vec<Wire>> {
    let mut sessions = Vec::with_capacity(args.idle);
    let mut peer = args.peer(address).await?;
    for index in 1..=args.idle {
        sessions.push(load::idle(&peer).await?);
        if index % PER_CONNECTION == 0 {
            peer = args.peer(address).await?;
        }
    }
    Ok(sessions)
}

const PER_CONNECTION: usize = 100;
/// EV-982.
const GOAL_IDLE_BYTES: u64 = 20 * 1024;
