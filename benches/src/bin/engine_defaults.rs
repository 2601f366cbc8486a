//! Compares `sapwood serve` with llama.cpp's own server, each as its users start it: with a model and nothing else. The
//! programs choose their threads, slots, batches and caches themselves.
//!
//! `cargo xtask bench-engine` builds both programs, installs a model and runs this.
//!
//! ```text
//! engine_defaults --sapwood PROGRAM --llama-server PROGRAM --model FILE [--words N,N..] [--clients N,N..]
//!                 [--temperature T,T..] [--tokens N] [--same-length] [--rounds N] [--busy N] [--settings "ARGS"]
//!                 [--json]
//! ```

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use sapwood_benches::generate::waves::{Answered, Waves};
use sapwood_benches::measure::{median, percentile};
use sapwood_benches::side::{Side, prompt, text};
use serde_json::json;

/// sapwood serve beside llama-server, both at their defaults
#[derive(Debug, Parser)]
struct Args {
    /// Our binary, as `cargo xtask serve` builds it
    #[arg(long, value_name = "PROGRAM")]
    sapwood: PathBuf,
    /// llama.cpp's server
    #[arg(long, value_name = "PROGRAM")]
    llama_server: PathBuf,
    /// The model of both
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Words of a prompt
    #[arg(long, default_value = "60,700", value_delimiter = ',')]
    words: Vec<usize>,
    /// Concurrent clients
    #[arg(long, default_value = "1,8,32", value_delimiter = ',')]
    clients: Vec<u32>,
    /// Temperatures; any above 0 is with a top-p of 0.95
    #[arg(long, default_value = "0,0.7", value_delimiter = ',')]
    temperature: Vec<f32>,
    /// Tokens of an answer: half to one and a half times as many
    #[arg(long, default_value = "64")]
    tokens: u32,
    /// Answers of the same length. Those that begin together then end together, so that no stream meets the prompt of
    /// another, which happens in no real use
    #[arg(long)]
    same_length: bool,
    /// Measured rounds, in which the servers alternate
    #[arg(long, default_value = "3")]
    rounds: usize,
    /// Processes that compute something else meanwhile
    #[arg(long, default_value = "0")]
    busy: u32,
    /// Further arguments of `sapwood serve`, to compare settings with the defaults
    #[arg(
        long,
        value_name = "ARGS",
        default_value = "",
        allow_hyphen_values = true
    )]
    settings: String,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Tokens of the answer to the prompt at a place: the lengths follow each other like those of a conversation, not in order.
    fn tokens_at(&self, place: usize) -> u32 {
        if self.same_length {
            return self.tokens;
        }
        // 0 to 8 eighths above a half, each once in nine places.
        let eighths = u32::try_from(place * 5 % 9).unwrap_or(0);
        self.tokens * (4 + eighths) / 8
    }
}

/// What is measured once for each server.
#[derive(Clone, Copy, Debug)]
struct Case {
    words: usize,
    clients: u32,
    temperature: f32,
    /// The prompt continues a conversation that the server has answered.
    second_turn: bool,
}

/// Answers the prompts, and returns the times and the text of each answer.
async fn ask(
    side: &Side,
    args: &Args,
    case: Case,
    prompts: &[String],
) -> Result<(Answered, Duration)> {
    let body = |(place, prompt): (usize, &String)| {
        let mut body = (side.body)(prompt, args.tokens_at(place));
        body["temperature"] = json!(case.temperature);
        if case.temperature > 0.0 {
            body["top_p"] = json!(0.95);
        }
        body.to_string()
    };
    let waves = Waves {
        address: side.server.address,
        path: side.path,
        at_once: case.clients,
        bodies: Arc::new(prompts.iter().enumerate().map(body).collect()),
    };
    let before = side.server.cpu()?;
    let answered = waves.ask().await?;
    Ok((answered, side.server.cpu()? - before))
}

/// The figures of one server in one case, one of each per round.
#[derive(Default)]
struct Figures(BTreeMap<&'static str, Vec<f64>>);

impl Figures {
    #[allow(
        clippy::cast_precision_loss,
        reason = "counts and times of minutes are far below 2^52"
    )]
    fn add(&mut self, answered: &Answered, used: Duration, tokens: u32) {
        let all = f64::from(tokens);
        let longest = answered.gaps.iter().max().copied().unwrap_or_default();
        for (name, figure) in [
            ("tokens_per_s", all / answered.took.as_secs_f64()),
            ("first_p50_ms", percentile(&answered.first, 50) as f64 / 1e3),
            ("first_p99_ms", percentile(&answered.first, 99) as f64 / 1e3),
            ("gap_p50_ms", percentile(&answered.gaps, 50) as f64 / 1e3),
            ("gap_longest_ms", longest.as_secs_f64() * 1e3),
            ("cpu_ms_per_token", used.as_secs_f64() * 1e3 / all),
        ] {
            self.0.entry(name).or_default().push(figure);
        }
    }

    fn medians(&self) -> BTreeMap<&'static str, f64> {
        let medians = self.0.iter();
        medians
            .map(|(name, values)| (*name, median(values.clone())))
            .collect()
    }
}

/// Processes that keep a processor busy, ended when dropped.
struct Busy(Vec<Child>);

impl Busy {
    fn start(count: u32) -> Result<Self> {
        let mut all = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new("sh");
            let command = command.args(["-c", "while :; do :; done"]);
            all.0.push(command.stdin(Stdio::null()).spawn()?);
        }
        Ok(all)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for process in &mut self.0 {
            // Both fail only if it has ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = Args::parse();
    let settings: Vec<&str> = args.settings.split_whitespace().collect();
    let sides = [
        Side::llama_server(&args.llama_server, &args.model, &[]).await?,
        Side::sapwood(&args.sapwood, &args.model, &settings, &[]).await?,
    ];
    let _busy = Busy::start(args.busy)?;
    let mut number = 0;
    for &words in &args.words {
        for &clients in &args.clients {
            for &temperature in &args.temperature {
                number = compare(&args, &sides, (words, clients, temperature), number).await?;
            }
        }
    }
    for side in &sides {
        let resident = side.server.resident()? >> 20;
        writeln!(std::io::stderr(), "{}: {resident} MiB resident", side.name)?;
    }
    Ok(())
}

/// Measures both servers with new conversations and with their second turns; `number` is that of the next prompt.
async fn compare(
    args: &Args,
    sides: &[Side; 2],
    (words, clients, temperature): (usize, u32, f32),
    mut number: usize,
) -> Result<usize> {
    // The last requests of a run leave places empty, which a server in use has filled: several requests for each client.
    let requests = clients as usize * if clients > 8 { 2 } else { 4 };
    let turns = [false, true].map(|second_turn| Case {
        words,
        clients,
        temperature,
        second_turn,
    });
    let tokens = (0..requests).map(|place| args.tokens_at(place)).sum();
    let mut figures = turns.map(|_| [Figures::default(), Figures::default()]);
    // The first round is not counted: programs start threads, and caches have no place yet.
    for round in 0..=args.rounds {
        for (place, side) in sides.iter().enumerate() {
            let mut prompts: Vec<String> = (number..number + requests)
                .map(|number| prompt(number, words))
                .collect();
            number += requests;
            for (case, figures) in turns.iter().zip(&mut figures) {
                let (answered, used) = ask(side, args, *case, &prompts).await?;
                if round > 0 {
                    figures[place].add(&answered, used, tokens);
                }
                for (place, reply) in &answered.replies {
                    prompts[*place] +=
                        &(text(reply) + "\n\nAnd what happened then, on the next day?");
                }
            }
        }
    }
    for (case, figures) in turns.iter().zip(&figures) {
        print(args, *case, sides, figures)?;
    }
    Ok(number)
}

fn print(args: &Args, case: Case, sides: &[Side; 2], figures: &[Figures; 2]) -> Result<()> {
    let mut out = std::io::stdout();
    let [theirs, ours] = [figures[0].medians(), figures[1].medians()];
    let ratio = |name: &str| ours[name] / theirs[name];
    if args.json {
        let line = json!({"words": case.words, "clients": case.clients, "temperature": case.temperature,
            "second_turn": case.second_turn, "busy": args.busy, "llama_server": theirs, "sapwood": ours});
        writeln!(out, "{line}")?;
        return Ok(());
    }
    let turn = if case.second_turn {
        "second turn"
    } else {
        "first turn"
    };
    writeln!(
        out,
        "{} words, {} clients, temperature {}, {turn}, {} busy",
        case.words, case.clients, case.temperature, args.busy
    )?;
    for (side, figures) in sides.iter().zip([&theirs, &ours]) {
        writeln!(
            out,
            "  {:12} {:7.1} tokens/s, first token {:8.1} ms (p99 {:8.1}), gap {:6.1} ms (longest {:7.1}), {:6.2} ms cpu a token",
            side.name,
            figures["tokens_per_s"],
            figures["first_p50_ms"],
            figures["first_p99_ms"],
            figures["gap_p50_ms"],
            figures["gap_longest_ms"],
            figures["cpu_ms_per_token"],
        )?;
    }
    writeln!(
        out,
        "  ratio        {:7.2}           first p99 {:.2}, longest gap {:.2}, cpu {:.2}",
        ratio("tokens_per_s"),
        ratio("first_p99_ms"),
        ratio("gap_longest_ms"),
        ratio("cpu_ms_per_token"),
    )?;
    Ok(())
}
