//! Measures single costs of LMTP: large biases and named masks (LM-1307), prompts that grow by their output
//! (LM-1308), items at the client (LM-1310), and streams that are forwarded from a pool of two servers (LM-1309).
//!
//! Everything but engines runs on one thread, whose processor time is measured, so that a busy machine distorts the
//! figures little.
//!
//! ```text
//! lmtp_costs biases [--json] [--gate]
//! lmtp_costs prompts [--json] [--gate]
//! lmtp_costs reading [--quick] [--json] [--gate] [--rounds N] [--seconds S]
//! lmtp_costs pool [--quick] [--json] [--gate] [--rounds N] [--seconds S]
//! lmtp_costs serve sender | model
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use futures::StreamExt;
use sapwood_benches::child::Server;
use sapwood_benches::lmtp::bare::{self, Sender};
use sapwood_benches::lmtp::face;
use sapwood_benches::lmtp::items::generate;
use sapwood_benches::measure::{Rounds, core_time, median};
use sapwood_benches::report::Report;
use sapwood_benches::{NAME, scripted};
use sapwood_engine::Engine;
use sapwood_engine::api::Tokens;
use sapwood_engine::scripted::Config as Script;
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_kernel::{Chunk, GenerateConfig, Kernel, Mime, PromptMode, RequestedPorts, Want, args};
use sapwood_net::lmtp::pool::{LmtpPool, PoolEndpoint};
use sapwood_net::lmtp::{ConnectOptions, LmtpClient, PeerAddress, StreamItems};
use sapwood_proto::lmtp::{GenerateRequest, LmtpError};
use sapwood_proto::params::GenerationParams;
use sapwood_server::faces::lmtp::{Config, LmtpService};
use sapwood_server::server;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, ReadHalf, WriteHalf};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Costs of single operations of LMTP
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// GENERATEs with 25,000 biases, and with a mask
    Biases {
        #[command(flatten)]
        report: Report,
    },
    /// Queries as LMQL sends them: each prompt is the previous one with its output
    Prompts {
        #[command(flatten)]
        report: Report,
    },
    /// Items that our client reads
    Reading {
        #[command(flatten)]
        rounds: Rounds,
        #[command(flatten)]
        report: Report,
    },
    /// Tokens that a function forwards from the servers of a pool
    Pool {
        #[command(flatten)]
        rounds: Rounds,
        #[command(flatten)]
        report: Report,
    },
    /// Run as the server of the client
    #[command(hide = true)]
    Serve { what: Served },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    match Args::parse().what {
        What::Biases { report } => biases(report).await,
        What::Prompts { report } => prompts(report).await,
        What::Reading { rounds, report } => reading(rounds, report).await,
        What::Pool { rounds, report } => passing(rounds, report).await,
        What::Serve { what } => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
            match what {
                Served::Sender => bare::serve(listener, Sender::Recorded, STREAMS).await?,
                Served::Model => face::serve(listener, scripted::endless()).await?,
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Served {
    Sender,
    Model,
}

/// A connection with LMTP lines to a face in this thread.
struct Lines {
    reader: BufReader<ReadHalf<DuplexStream>>,
    writer: WriteHalf<DuplexStream>,
    line: String,
    /// The engine of the model behind it.
    engine: Engine,
}

impl Lines {
    fn open(model: Script) -> Result<Self> {
        let shared = server::Server::builder(server::Config::default(), Vec::new())?;
        let (kernel, engine) = scripted::kernel_and_engine(model)?;
        let lmtp = LmtpService::new(shared.shared().clone(), kernel, Config::default());
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        tokio::spawn(async move {
            let (reader, writer) = tokio::io::split(theirs);
            lmtp.serve_connection(reader, writer, true).await
        });
        let (reader, writer) = tokio::io::split(ours);
        Ok(Self {
            reader: BufReader::new(reader),
            writer,
            line: String::new(),
            engine,
        })
    }

    /// Sends a line and returns the first line of the reply.
    async fn ask(&mut self, text: &str) -> Result<&str> {
        self.writer.write_all(text.as_bytes()).await?;
        self.writer.write_all(b"\n").await?;
        self.next().await
    }

    async fn next(&mut self) -> Result<&str> {
        self.line.clear();
        self.reader.read_line(&mut self.line).await?;
        ensure!(!self.line.is_empty(), "the face has hung up");
        ensure!(
            !self.line.contains("\"error\""),
            "the face says {}",
            self.line
        );
        Ok(&self.line)
    }
}

/// Number of GENERATEs of each kind.
const ASKED: usize = 200;
const BIASES: usize = 25_000;
/// LM-1307.
const GOAL_BIASES_US: f64 = 3_000.0;
const GOAL_MASK_US: f64 = 50.0;

/// The time of a GENERATE on this thread until its first token is read. The engine steps on another thread.
async fn biases(report: Report) -> Result<ExitCode> {
    let mut lines = Lines::open(scripted::endless())?;
    let agree = format!(
        "MODEL_INFO {{\"stream_id\":0,\"model\":\"{NAME}\",\"data\":{{\"lmtp\":{{\"version\":2,\"features\":[\"masks\"]}}}}}}"
    );
    lines.ask(&agree).await?;
    let allowed = format!(
        "MASK {{\"stream_id\":0,\"model\":\"{NAME}\",\"mask\":\"m\",\"allow\":[[1000,1999],[5000,9000]]}}"
    );
    lines.ask(&allowed).await?;
    let plain = generate(1, 1);
    let with = |members: &str| format!("{},{members}}}", &plain[..plain.len() - 1]);
    // No two consecutive requests have the same bytes.
    let biased: Vec<String> = (0..8).map(|seed| with(&many_biases(seed))).collect();
    let masked = with("\"mask\":\"m\"");
    let mut costs = [Vec::new(), Vec::new(), Vec::new()];
    for asked in 0..ASKED {
        let texts = [&plain, &masked, &biased[asked % biased.len()]];
        for (text, costs) in texts.into_iter().zip(&mut costs) {
            let before = core_time()?;
            lines.ask(text).await?;
            let cost = core_time()? - before;
            costs.push(cost.as_secs_f64() * 1e6);
        }
    }
    let [plain, masked, biased] = costs.map(median);
    let reply = json!({
        "plain_us": plain, "mask_us": masked, "goal_mask_us": GOAL_MASK_US,
        "biases": BIASES, "biases_us": biased, "goal_biases_us": GOAL_BIASES_US,
    });
    let text = format!(
        "a GENERATE {plain:.1} us, with a mask {masked:.1} us (goal {GOAL_MASK_US}), \
         with {BIASES} biases {biased:.0} us (goal {GOAL_BIASES_US})"
    );
    report.print(&text, &reply)?;
    Ok(report.exit(masked < GOAL_MASK_US && biased < GOAL_BIASES_US))
}

fn many_biases(seed: usize) -> String {
    let entries: Vec<String> = (0..BIASES)
        .map(|id| format!("\"{id}\":-{}.25", (id + seed) % 100))
        .collect();
    format!("\"logit_bias\":{{{}}}", entries.join(","))
}

const QUERIES: usize = 100;
const ROUNDS: usize = 20;
const PROMPT: usize = 2_000;
const GENERATED: u32 = 16;
/// LM-1308.
const GOAL_PREFILLED: f64 = 1.1;

/// Measures the share of tokens of growing prompts that are computed again.
async fn prompts(report: Report) -> Result<ExitCode> {
    let mut lines = Lines::open(Script {
        context_tokens: 4_096,
        parallel: 16,
        kept_prefixes: 16,
        ..scripted::endless()
    })?;
    let mut new = 0;
    for query in 0..QUERIES {
        // Queries differ from their first token on.
        let mut prompt: Vec<usize> = (0..PROMPT).map(|at| 300 + query + at % 97).collect();
        new += PROMPT;
        for round in 0..ROUNDS {
            let text = format!(
                "GENERATE {{\"model\":\"{NAME}\",\"prompt\":{prompt:?},\"max_tokens\":{GENERATED},\"top_logprobs\":0,\"stream_id\":1}}"
            );
            let mut tokens = tokens(lines.ask(&text).await?)?;
            while tokens.len() < GENERATED as usize {
                tokens.extend(self::tokens(lines.next().await?)?);
            }
            prompt.extend(&tokens);
            // The tokens generated last are part of no prompt.
            new += if round + 1 < ROUNDS { tokens.len() } else { 0 };
        }
    }
    let stats = lines.engine.stats();
    let asked = stats.prompt_tokens.get();
    let prefilled = asked - stats.prefix_hits.get();
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let share = prefilled as f64 / new as f64;
    let reply = json!({
        "queries": QUERIES, "generates": ROUNDS, "prompt_tokens": asked, "new_tokens": new,
        "prefilled_tokens": prefilled, "prefilled_per_new": share, "goal": GOAL_PREFILLED,
    });
    let text = format!(
        "{QUERIES} queries of {ROUNDS} GENERATEs: {asked} prompt tokens, {new} of them new, {prefilled} prefilled: \
         {share:.3} of the new (goal {GOAL_PREFILLED})"
    );
    report.print(&text, &reply)?;
    Ok(report.exit(share <= GOAL_PREFILLED))
}

/// The tokens of a line.
fn tokens(line: &str) -> Result<Vec<usize>> {
    let (_, items) = line.split_once(' ').context("no message")?;
    let items: Value = serde_json::from_str(items)?;
    let items = items.as_array().context("no list")?;
    let token = |item: &Value| {
        item["token"]
            .as_u64()
            .and_then(|token| token.try_into().ok())
    };
    items
        .iter()
        .map(|item| token(item).context("no token"))
        .collect()
}

/// Items in a frame of the sender.
const STREAMS: u32 = 128;
/// LM-1310.
const GOAL_ITEMS: f64 = 500_000.0;

/// Measures the cost of reading at the client, including the tasks that receive the items.
async fn reading(rounds: Rounds, report: Report) -> Result<ExitCode> {
    let server = Server::start(&["serve", "sender"])?;
    let mut rates = Vec::new();
    for _ in 0..rounds.rounds {
        rates.push(items_per_cpu_second(&server, rounds.span()).await?);
    }
    let rate = median(rates);
    let reply =
        json!({"items_per_cpu_s": rate.round(), "items_per_frame": STREAMS, "goal": GOAL_ITEMS});
    let text = format!(
        "{rate:.0} items per cpu-s at the client, {STREAMS} in a frame (goal {GOAL_ITEMS})"
    );
    report.print(&text, &reply)?;
    Ok(report.exit(rate >= GOAL_ITEMS))
}

/// LM-1309: twice what LM-1301 allows per token.
const GOAL_PASSED: f64 = 250_000.0;

/// Measures the cost per forwarded token of a server, before its own face: the connections of the pool and the function
/// over them.
async fn passing(rounds: Rounds, report: Report) -> Result<ExitCode> {
    let servers = [
        Server::start(&["serve", "model"])?,
        Server::start(&["serve", "model"])?,
    ];
    let mut rates = Vec::new();
    for _ in 0..rounds.rounds {
        rates.push(passed_per_cpu_second(&servers, rounds.span()).await?);
    }
    let rate = median(rates);
    let reply = json!({"tokens_per_cpu_s": rate.round(), "streams": STREAMS, "servers": servers.len(), "goal": GOAL_PASSED});
    let text = format!(
        "{rate:.0} tokens per cpu-s passed on, {STREAMS} streams of {} servers (goal {GOAL_PASSED})",
        servers.len()
    );
    report.print(&text, &reply)?;
    Ok(report.exit(rate >= GOAL_PASSED))
}

async fn passed_per_cpu_second(servers: &[Server], span: Duration) -> Result<f64> {
    let mut endpoints = Vec::new();
    for server in servers {
        endpoints.push(PoolEndpoint {
            address: PeerAddress::parse(&server.address.to_string()).map_err(failed)?,
            model: NAME.to_owned(),
            weight: 1,
        });
    }
    let options = ConnectOptions::default();
    let pool = LmtpPool::connect(endpoints, &options, Default::default()).await;
    let kernel = Kernel::new();
    kernel.add(function(
        &pool.map_err(failed)?,
        NAME,
        LmtpModelTerms::default(),
    ))?;
    let count = Arc::new(AtomicU64::new(0));
    let mut readers = JoinSet::new();
    for stream in 0..STREAMS {
        readers.spawn(pass(kernel.clone(), stream, Arc::clone(&count)));
    }
    measured(span, &count, &mut readers).await
}

async fn pass(kernel: Kernel, stream: u32, count: Arc<AtomicU64>) -> Result<()> {
    let config = GenerateConfig {
        params: GenerationParams {
            max_tokens: Some(1 << 16),
            temperature: Some(0.0),
            top_logprobs: Some(1),
            ..GenerationParams::default()
        },
        prompt_mode: PromptMode::Raw,
        ..GenerateConfig::default()
    };
    let prompt: Vec<u8> = [256, 300 + stream]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    let prompt = Chunk::bytes(prompt).with_mime(Mime::TOKENS);
    let args = args! { prompt: prompt, config: config.into_chunk() };
    let mut want = Want::from(RequestedPorts::main());
    want.inner = true;
    let mut run = kernel.run::<Chunk>(NAME, args).wanting(want);
    while let Some(chunk) = run.next().await {
        let chunk = chunk?;
        if let Some(tokens) = chunk.inner::<Tokens>() {
            count.fetch_add(tokens.tokens.len() as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

async fn items_per_cpu_second(server: &Server, span: Duration) -> Result<f64> {
    let address = PeerAddress::parse(&server.address.to_string()).map_err(failed)?;
    let client = LmtpClient::connect(address, ConnectOptions::base())
        .await
        .map_err(failed)?;
    let count = Arc::new(AtomicU64::new(0));
    let mut readers = JoinSet::new();
    for _ in 0..STREAMS {
        let wanted = GenerateRequest {
            prompt: vec![1],
            params: GenerationParams {
                max_tokens: Some(u32::MAX),
                ..GenerationParams::default()
            },
            ..GenerateRequest::default()
        };
        let items = client.generate(NAME, wanted).await.map_err(failed)?;
        readers.spawn(read(items, Arc::clone(&count)));
    }
    measured(span, &count, &mut readers).await
}

/// The rate of `count` per second of this thread.
async fn measured(
    span: Duration,
    count: &AtomicU64,
    readers: &mut JoinSet<Result<()>>,
) -> Result<f64> {
    // All streams have started by then.
    tokio::time::sleep(span / 10).await;
    let (before, cpu) = (count.load(Ordering::Relaxed), core_time()?);
    tokio::time::sleep(span).await;
    let (after, used) = (count.load(Ordering::Relaxed), core_time()? - cpu);
    if let Some(ended) = readers.try_join_next() {
        ended??;
        bail!("a stream has ended");
    }
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let items = (after - before) as f64;
    Ok(items / used.as_secs_f64())
}

async fn read(mut items: StreamItems, count: Arc<AtomicU64>) -> Result<()> {
    while let Some(item) = items.next().await {
        item.map_err(failed)?;
        count.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

fn failed(error: LmtpError) -> Error {
    anyhow!("{error:?}")
}
