//! Compares `generate_stream` of the demo model with llama.cpp's own server and the same file (TR-1603): time to the
//! first event, and tokens per second.
//!
//! `llama-server` is not part of this project: the caller gives its path, and must have built it for the same
//! instructions.
//!
//! ```text
//! llama_server --llama-server PROGRAM [--quick] [--json] [--gate] [--model FILE] [--threads N] [--words N] [--tokens N]
//!              [--at-once N,N..] [--rounds N]
//! llama_server --serve generate
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use sapwood_benches::child::{self, Server};
use sapwood_benches::embedded::demo_file;
use sapwood_benches::generate::face;
use sapwood_benches::generate::waves::{Waves, answer};
use sapwood_benches::measure::{median, percentile};
use sapwood_benches::report::Report;
use sapwood_benches::{NAME, kernel_and_engine};
use sapwood_engine::embedded::{LoadOptions, ModelSource, load};
use serde_json::{Value, json};

/// generate_stream beside llama.cpp's own server, with the same model
#[derive(Debug, Parser)]
struct Args {
    /// llama.cpp's server
    #[arg(long, value_name = "PROGRAM")]
    llama_server: Option<PathBuf>,
    /// Run as our server
    #[arg(long, value_name = "SERVER", value_parser = ["generate"])]
    serve: Option<String>,
    /// A model for both; the demo model if not given
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Compute threads
    #[arg(long, default_value = "1")]
    threads: u32,
    /// Words of a prompt
    #[arg(long, default_value = "20")]
    words: usize,
    /// Tokens of an answer
    #[arg(long, default_value = "64")]
    tokens: u32,
    /// Concurrent streams
    #[arg(long, default_value = "1,8,32,128", value_delimiter = ',')]
    at_once: Vec<u32>,
    /// Measured rounds
    #[arg(long, default_value = "5", default_value_if("quick", "true", "2"))]
    rounds: usize,
    /// Fewer rounds
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    report: Report,
}

impl Args {
    fn file(&self) -> Result<PathBuf> {
        self.model.clone().map_or_else(demo_file, Ok)
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if args.serve.is_some() {
        let options = LoadOptions {
            context_tokens: Some(CONTEXT_TOKENS),
            cache_tokens: Some(CONTEXT_TOKENS * PARALLEL),
            parallel: PARALLEL,
            threads: Some(args.threads),
            ..LoadOptions::default()
        };
        let model = load(
            NAME,
            &ModelSource::File(args.file()?),
            &options,
            &mut |_| true,
        )?;
        let (kernel, _engine) = kernel_and_engine(Box::new(model))?;
        face::serve(child::listener().await?, kernel).await?;
        return Ok(ExitCode::SUCCESS);
    }
    compare(&args).await
}

/// One of the two servers, and the form of its requests.
struct Side {
    name: &'static str,
    server: Server,
    path: &'static str,
    /// The body for a prompt and a number of tokens.
    body: fn(&str, u32) -> Value,
}

impl Side {
    fn ours(file: &Path, threads: u32) -> Result<Self> {
        let file = file.to_str().context("the path of the model is not text")?;
        let threads = threads.to_string();
        let args = [
            "--serve",
            "generate",
            "--model",
            file,
            "--threads",
            &threads,
        ];
        Ok(Self {
            name: "generate",
            server: Server::start(&args)?,
            path: "/v2/models/load/generate_stream",
            body: |prompt, tokens| json!({"text_input": prompt, "stream": true, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}),
        })
    }

    /// With a unified cache of the same size for all its slots, and without the copies of prompts that it stores
    /// besides.
    async fn theirs(program: &Path, file: &Path, threads: u32) -> Result<Self> {
        let settings: [(&str, u32); 5] = [
            ("--threads", threads),
            ("--threads-batch", threads),
            ("--parallel", PARALLEL),
            ("--ctx-size", CONTEXT_TOKENS * PARALLEL),
            ("--cache-ram", 0),
        ];
        let settings = settings.map(|(flag, value)| [flag.to_owned(), value.to_string()]);
        Ok(Self {
            name: "llama-server",
            server: Server::llama_server(program, file, &settings.concat()).await?,
            path: "/completion",
            body: |prompt, tokens| json!({"prompt": prompt, "stream": true, "n_predict": tokens, "ignore_eos": true, "temperature": 0}),
        })
    }

    /// The text of one answer.
    async fn text(&self, args: &Args) -> Result<String> {
        let body = (self.body)(&prompt(0, args.words), args.tokens).to_string();
        let answer = answer(self.server.address, self.path, &body).await?;
        let reply = String::from_utf8_lossy(&answer.reply);
        let events = reply.lines().filter_map(|line| line.strip_prefix("data: "));
        let mut text = String::new();
        for event in events {
            let event: Value = serde_json::from_str(event)?;
            let piece = event.get("text_output").or_else(|| event.get("content"));
            text += piece.and_then(Value::as_str).unwrap_or_default();
        }
        Ok(text)
    }

    /// One round. `number` makes its prompts distinct, so that a prefix cache has no more than their first words.
    async fn round(
        &self,
        args: &Args,
        at_once: u32,
        number: usize,
        figures: &mut Figures,
    ) -> Result<()> {
        let requests = (at_once as usize * TURNS).max(REQUESTS_LEAST);
        let body = |index| {
            let prompt = prompt(number * REQUESTS_MOST + index, args.words);
            (self.body)(&prompt, args.tokens).to_string()
        };
        let waves = Waves {
            address: self.server.address,
            path: self.path,
            at_once,
            bodies: Arc::new((0..requests).map(body).collect()),
        };
        let cpu = self.server.cpu()?;
        let answered = waves.ask().await?;
        let used = self.server.cpu()? - cpu;
        figures.add(
            &answered.first,
            answered.took,
            used,
            answered.bytes(),
            requests * args.tokens as usize,
        );
        Ok(())
    }
}

/// A prompt that shares no prefix with the others.
fn prompt(number: usize, words: usize) -> String {
    let words = (1..words).map(|at| WORDS[(number + at * at) % WORDS.len()]);
    words.fold(format!("{number}"), |text, word| text + " " + word)
}

/// Figures of one server, one per round.
#[derive(Default)]
struct Figures {
    rates: Vec<f64>,
    first_p50_us: Vec<f64>,
    first_p99_us: Vec<f64>,
    cpu_us: Vec<f64>,
    bytes: Vec<f64>,
}

impl Figures {
    #[allow(
        clippy::cast_precision_loss,
        reason = "counts and times of a few seconds are far below 2^52"
    )]
    fn add(
        &mut self,
        first: &[Duration],
        took: Duration,
        used: Duration,
        bytes: usize,
        tokens: usize,
    ) {
        let tokens = tokens as f64;
        self.rates.push(tokens / took.as_secs_f64());
        self.first_p50_us.push(percentile(first, 50) as f64);
        self.first_p99_us.push(percentile(first, 99) as f64);
        self.cpu_us.push(used.as_secs_f64() * 1e6 / tokens);
        self.bytes.push(bytes as f64 / tokens);
    }

    fn medians(self) -> Medians {
        Medians {
            rate: median(self.rates),
            first_p50_us: median(self.first_p50_us),
            first_p99_us: median(self.first_p99_us),
            cpu_us: median(self.cpu_us),
            bytes: median(self.bytes),
        }
    }
}

struct Medians {
    rate: f64,
    first_p50_us: f64,
    first_p99_us: f64,
    cpu_us: f64,
    bytes: f64,
}

impl Medians {
    fn json(&self) -> Value {
        json!({"tokens_per_s": self.rate, "first_p50_us": self.first_p50_us, "first_p99_us": self.first_p99_us,
            "cpu_us_per_token": self.cpu_us, "bytes_per_token": self.bytes})
    }
}

async fn compare(args: &Args) -> Result<ExitCode> {
    let file = args.file()?;
    let program = args.llama_server.as_ref();
    let program = program.context("say with --llama-server where llama.cpp's server is")?;
    let sides = [
        Side::theirs(program, &file, args.threads).await?,
        Side::ours(&file, args.threads)?,
    ];
    let texts = [sides[0].text(args).await?, sides[1].text(args).await?];
    ensure!(
        texts[0] == texts[1],
        "they do not say the same, so they do not compute the same: {texts:?}"
    );
    let (mut passed, mut number) = (true, 1);
    for &at_once in &args.at_once {
        let mut figures = [Figures::default(), Figures::default()];
        for _ in 0..args.rounds {
            for (side, figures) in sides.iter().zip(&mut figures) {
                side.round(args, at_once, number, figures).await?;
                number += 1;
            }
        }
        passed &= report(args, at_once, &sides, figures.map(Figures::medians))?;
    }
    if !args.report.json {
        let memory = [sides[0].server.resident()?, sides[1].server.resident()?].map(|n| n >> 20);
        let [theirs, ours] = memory;
        writeln!(
            std::io::stdout(),
            "resident memory: {} {theirs} MiB, {} {ours} MiB",
            sides[0].name,
            sides[1].name
        )?;
    }
    Ok(args.report.exit(passed))
}

/// Prints one line for each server; returns whether the goals are met.
fn report(args: &Args, at_once: u32, sides: &[Side; 2], figures: [Medians; 2]) -> Result<bool> {
    let [theirs, ours] = &figures;
    let (rate, first) = (
        ours.rate / theirs.rate,
        ours.first_p99_us / theirs.first_p99_us,
    );
    let mut out = std::io::stdout();
    if args.report.json {
        let report = json!({"at_once": at_once, "threads": args.threads, "words": args.words, "tokens": args.tokens,
            "llama_server": theirs.json(), "generate": ours.json(), "rate_ratio": rate, "first_p99_ratio": first});
        writeln!(out, "{report}")?;
    } else {
        for (side, figures) in sides.iter().zip(&figures) {
            writeln!(
                out,
                "{at_once:3} at once: {:12} {:7.0} tokens/s   first event p50 {:8.0} us p99 {:8.0} us   {:6.1} us cpu and {:.0} bytes a token",
                side.name,
                figures.rate,
                figures.first_p50_us,
                figures.first_p99_us,
                figures.cpu_us,
                figures.bytes
            )?;
        }
        writeln!(
            out,
            "             rate {rate:.2} (goal 1), first event p99 {first:.2} (goal at most 1)"
        )?;
    }
    Ok(rate >= 1.0 && first <= 1.0)
}

/// Context of one stream, for both servers; the demo model was trained for no more than some hundreds of tokens.
const CONTEXT_TOKENS: u32 = 256;
/// Maximum streams in one batch.
const PARALLEL: u32 = 128;
/// Requests of each stream in a round, one after the other.
const TURNS: usize = 2;
/// Minimum requests of a round with few streams, so that there is a tail to measure.
const REQUESTS_LEAST: usize = 32;
/// More requests than any round has.
const REQUESTS_MOST: usize = 1000;
/// The words of prompts.
const WORDS: [&str; 12] = [
    "river", "stone", "the", "and", "capital", "of", "seven", "green", "trees", "are", "near",
    "water",
];
