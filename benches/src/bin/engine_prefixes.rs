//! Compares the prefix cache of `sapwood serve` with that of llama.cpp's own server, both at their defaults: the time to
//! the first token of prompts that begin with what the server has computed before, and of such that do not.
//!
//! `cargo xtask bench-engine --bench prefixes` builds both programs, installs a model and runs this.
//!
//! ```text
//! engine_prefixes --sapwood PROGRAM --llama-server PROGRAM --model FILE [--conversations N] [--history WORDS,WORDS..]
//!                 [--users N] [--rounds N] [--json]
//! ```

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use sapwood_benches::generate::waves::answer;
use sapwood_benches::measure::percentile;
use sapwood_benches::side::{Side, events, metric, prompt, text};
use serde_json::{Value, json};

/// The prefix caches of sapwood serve and llama-server, both at their defaults
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
    /// Conversations that take turns
    #[arg(long, default_value = "40")]
    conversations: usize,
    /// Words of the first turn of those conversations, and of those that go on after a restart; each number is a scenario
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "150,600",
        value_delimiter = ','
    )]
    history: Vec<usize>,
    /// Users of one system prompt
    #[arg(long, default_value = "16")]
    users: usize,
    /// System prompts, and tens of conversations that are regenerated and edited
    #[arg(long, default_value = "3")]
    rounds: usize,
    /// Tokens of an answer
    #[arg(long, default_value = "8")]
    tokens: u32,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// What the answers to some prompts took.
#[derive(Clone, Debug, Default)]
struct Taken {
    /// Times to the first token.
    first: Vec<Duration>,
    /// Tokens of the prompts.
    prompt: u64,
    /// Those of them that were computed.
    computed: u64,
}

impl Taken {
    fn add(&mut self, other: Self) {
        self.first.extend(other.first);
        self.prompt += other.prompt;
        self.computed += other.computed;
    }

    #[allow(
        clippy::cast_precision_loss,
        reason = "microseconds of minutes are far below 2^52"
    )]
    fn percentile_ms(&self, hundredths: usize) -> f64 {
        percentile(&self.first, hundredths) as f64 / 1e3
    }

    /// Tokens of one prompt, and computed tokens of one.
    fn tokens_each(&self) -> [u64; 2] {
        let count = (self.first.len() as u64).max(1);
        [self.prompt, self.computed].map(|tokens| (tokens + count / 2) / count)
    }
}

/// One server in one scenario.
#[derive(Clone, Debug, Default)]
struct Figures {
    /// Prompts of which the server has computed the beginning.
    warm: Taken,
    /// Prompts as long, of which it has not.
    cold: Taken,
}

impl Figures {
    fn json(&self) -> Value {
        let taken = |taken: &Taken| {
            let [prompt, computed] = taken.tokens_each();
            json!({"requests": taken.first.len(), "prompt_tokens": prompt, "computed_tokens": computed,
                "first_p50_ms": taken.percentile_ms(50), "first_p99_ms": taken.percentile_ms(99)})
        };
        json!({"warm": taken(&self.warm), "cold": taken(&self.cold)})
    }
}

/// Both servers: theirs, ours.
type Pair = [Side; 2];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = Args::parse();
    let report = Report::new(&args)?;
    {
        let sides = [
            Side::llama_server(&args.llama_server, &args.model, &[]).await?,
            Side::sapwood(&args.sapwood, &args.model, &[], &[]).await?,
        ];
        let mut numbers = Numbers(FIRST_NUMBER);
        // Not counted: programs start threads, and allocate.
        for side in &sides {
            ask(&args, side, &[numbers.prompt(60)]).await?;
        }
        for &words in &args.history {
            report.add(
                &format!("conversations in turns, {words} words"),
                &conversations(&args, &sides, &mut numbers, words).await?,
            )?;
        }
        report.add(
            "one system prompt",
            &users(&args, &sides, &mut numbers).await?,
        )?;
        let [regenerated, edited] = again(&args, &sides, &mut numbers).await?;
        report.add("regenerated", &regenerated)?;
        report.add("last turn edited", &edited)?;
        for side in &sides {
            let resident = side.server.resident()? >> 20;
            writeln!(std::io::stderr(), "{}: {resident} MiB resident", side.name)?;
        }
    }
    for &words in &args.history {
        let figures = restarted(&args, words).await?;
        report.add(&format!("after a restart, {words} words"), &figures)?;
    }
    Ok(())
}

/// The numbers of prompts, of four digits each, so that all have equally many tokens.
struct Numbers(usize);

impl Numbers {
    /// A prompt that neither server has seen.
    fn prompt(&mut self, words: usize) -> String {
        self.0 += 1;
        prompt(self.0, words)
    }

    /// The same prompt, but for the number at its start: what follows is not cached.
    fn cold(&mut self, prompt: &str) -> String {
        self.0 += 1;
        let rest = prompt.split_once('.').map_or(prompt, |(_, rest)| rest);
        format!("Chapter {}.{rest}", self.0)
    }
}

/// Answers prompts one after another; returns the times and the texts.
async fn ask(args: &Args, side: &Side, prompts: &[String]) -> Result<(Taken, Vec<String>)> {
    let before = counted(side).await?;
    let (mut taken, mut texts) = (Taken::default(), Vec::new());
    for prompt in prompts {
        let mut body = (side.body)(prompt, args.tokens);
        body["temperature"] = json!(0);
        let answer = answer(side.server.address, side.path, &body.to_string()).await?;
        taken.first.push(answer.first);
        texts.push(text(&answer.reply));
        let reply = String::from_utf8_lossy(&answer.reply);
        if let Some(timings) = events(&reply).find_map(|event| event.get("timings").cloned()) {
            let count = |name| timings.get(name).and_then(Value::as_u64);
            let computed = count("prompt_n").context("no prompt_n")?;
            taken.computed += computed;
            taken.prompt += computed + count("cache_n").context("no cache_n")?;
        }
    }
    let after = counted(side).await?;
    if let Some(([prompt, found], [prompt_before, found_before])) = after.zip(before) {
        taken.prompt = prompt - prompt_before;
        taken.computed = taken.prompt - (found - found_before);
    }
    Ok((taken, texts))
}

/// Our server's sums of prompt tokens, and of those that were found in the prefix cache. llama-server says it in each answer.
async fn counted(side: &Side) -> Result<Option<[u64; 2]>> {
    if side.name != "sapwood" {
        return Ok(None);
    }
    let (_, scrape) = side.server.fetch("/metrics", None).await?;
    let count = |name| metric(&scrape, name).map(whole);
    Ok(Some([
        count("sapwood_prefix_cache_queries_total")?,
        count("sapwood_prefix_cache_hits_total")?,
    ]))
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counters are whole numbers, far below 2^52"
)]
fn whole(count: f64) -> u64 {
    count as u64
}

/// Each of some conversations has a turn, then each the next.
async fn conversations(
    args: &Args,
    sides: &Pair,
    numbers: &mut Numbers,
    words: usize,
) -> Result<[Figures; 2]> {
    let mut figures = [Figures::default(), Figures::default()];
    let histories: Vec<String> = (0..args.conversations)
        .map(|_| numbers.prompt(words) + QUESTIONS[0])
        .collect();
    let mut prompts = [histories.clone(), histories];
    for turn in 0..TURNS {
        for (place, side) in sides.iter().enumerate() {
            let (taken, texts) = ask(args, side, &prompts[place]).await?;
            if turn > 0 {
                figures[place].warm.add(taken);
            }
            if turn + 1 < TURNS {
                for (prompt, text) in prompts[place].iter_mut().zip(texts) {
                    *prompt += &(text + QUESTIONS[turn + 1]);
                }
            }
        }
    }
    // At the end, so that they take nothing from the caches before.
    for (place, side) in sides.iter().enumerate() {
        let last = prompts[place].iter().take(COLD_SAMPLES);
        let cold: Vec<String> = last.map(|prompt| numbers.cold(prompt)).collect();
        figures[place].cold.add(ask(args, side, &cold).await?.0);
    }
    Ok(figures)
}

/// Users with a question each after the same long system prompt; the first of them finds nothing computed.
async fn users(args: &Args, sides: &Pair, numbers: &mut Numbers) -> Result<[Figures; 2]> {
    let mut figures = [Figures::default(), Figures::default()];
    for _ in 0..args.rounds {
        let system = numbers.prompt(SYSTEM_WORDS);
        for (side, figures) in sides.iter().zip(&mut figures) {
            let prompts: Vec<String> = (0..args.users)
                .map(|user| {
                    let word = prompt(user, 3).split_off("Chapter 0. ".len());
                    format!("{system}\n\nUser: What about{word}?\n\nAnswer:")
                })
                .collect();
            let (first, rest) = prompts.split_at(1);
            figures.cold.add(ask(args, side, first).await?.0);
            figures.warm.add(ask(args, side, rest).await?.0);
        }
    }
    Ok(figures)
}

/// The same prompts once more, and then with another last question.
async fn again(args: &Args, sides: &Pair, numbers: &mut Numbers) -> Result<[[Figures; 2]; 2]> {
    let mut regenerated = [Figures::default(), Figures::default()];
    let mut edited = [Figures::default(), Figures::default()];
    for _ in 0..args.rounds {
        let histories: Vec<String> = (0..CONVERSATIONS_AGAIN)
            .map(|_| numbers.prompt(AGAIN_WORDS))
            .collect();
        let with = |question: &str| -> Vec<String> {
            histories.iter().map(|it| it.clone() + question).collect()
        };
        for (place, side) in sides.iter().enumerate() {
            let (cold, _) = ask(args, side, &with(QUESTIONS[0])).await?;
            let (same, _) = ask(args, side, &with(QUESTIONS[0])).await?;
            let (other, _) = ask(args, side, &with(QUESTIONS[1])).await?;
            regenerated[place].warm.add(same);
            edited[place].warm.add(other);
            regenerated[place].cold.add(cold.clone());
            edited[place].cold.add(cold);
        }
    }
    Ok([regenerated, edited])
}

/// Conversations go on after the servers have ended and started again. Ours keeps prefixes in a file by itself;
/// llama-server saves a slot when its client asks for it after an answer, and restores it when its client asks for that
/// before the next request.
async fn restarted(args: &Args, words: usize) -> Result<[Figures; 2]> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("the folder is not text")?;
    // One slot: what is saved and restored is then the conversation that is asked.
    let their_arguments = ["--slot-save-path", path, "--parallel", "1"].map(str::to_owned);
    let our_environment = [("SAPWOOD_ENGINE__PREFIX_DIR", path)];
    let start = async || -> Result<Pair> {
        Ok([
            Side::llama_server(&args.llama_server, &args.model, &their_arguments).await?,
            Side::sapwood(&args.sapwood, &args.model, &[], &our_environment).await?,
        ])
    };
    let mut numbers = Numbers(FIRST_NUMBER);
    let mut prompts = [Vec::new(), Vec::new()];
    let mut figures = [Figures::default(), Figures::default()];
    let sides = start().await?;
    for side in &sides {
        ask(args, side, &[numbers.prompt(60)]).await?;
    }
    for conversation in 0..CONVERSATIONS_AGAIN {
        let first = numbers.prompt(words) + QUESTIONS[0];
        for (place, side) in sides.iter().enumerate() {
            let (cold, texts) = ask(args, side, std::slice::from_ref(&first)).await?;
            figures[place].cold.add(cold);
            prompts[place].push(first.clone() + &texts.concat() + QUESTIONS[1]);
        }
        move_slot(&sides[0], "save", conversation).await?;
    }
    for side in sides {
        side.server.stop().await?;
    }
    let sides = start().await?;
    let mut restoring = Vec::new();
    // All of one server before the other, as in the other scenarios: the threads of llama-server spin for a tenth of a second
    // after its last token, and would take the processors of a prompt that follows at once.
    for (place, side) in sides.iter().enumerate() {
        for (conversation, prompt) in prompts[place].iter().enumerate() {
            if side.name != "sapwood" {
                restoring.push(move_slot(side, "restore", conversation).await?);
            }
            let (warm, _) = ask(args, side, std::slice::from_ref(prompt)).await?;
            figures[place].warm.add(warm);
        }
    }
    let each = percentile(&restoring, 50);
    writeln!(
        std::io::stderr(),
        "llama-server: {each} us to restore a slot, which its first token does not include"
    )?;
    Ok(figures)
}

/// Saves or restores the slot of llama-server, and returns how long it took.
async fn move_slot(side: &Side, action: &str, conversation: usize) -> Result<Duration> {
    let path = format!("/slots/0?action={action}");
    let body = json!({"filename": format!("{conversation}.slot")}).to_string();
    let began = Instant::now();
    let (status, reply) = side.server.fetch(&path, Some(&body)).await?;
    ensure!(status == 200, "{path}: {reply}");
    Ok(began.elapsed())
}

/// Prints a line for each scenario.
struct Report {
    json: bool,
}

impl Report {
    fn new(args: &Args) -> Result<Self> {
        if !args.json {
            writeln!(std::io::stdout(), "{HEAD}")?;
        }
        Ok(Self { json: args.json })
    }

    fn add(&self, scenario: &str, figures: &[Figures; 2]) -> Result<()> {
        let [theirs, ours] = figures;
        let mut line = String::new();
        if self.json {
            let (theirs, ours) = (theirs.json(), ours.json());
            line =
                json!({"scenario": scenario, "llama_server": theirs, "sapwood": ours}).to_string();
        } else {
            write!(line, "| {scenario} |")?;
            for figures in figures {
                let [prompt, computed] = figures.warm.tokens_each();
                write!(line, " {computed} of {prompt} |")?;
            }
            for figures in figures {
                write!(line, " {:.0} ms |", figures.cold.percentile_ms(50))?;
            }
            for hundredths in [50, 99] {
                for figures in figures {
                    let warm = figures.warm.percentile_ms(hundredths);
                    write!(line, " {warm:.0} ms |")?;
                }
            }
            for figures in figures {
                let cold = figures.cold.percentile_ms(50);
                write!(line, " {:.1} |", cold / figures.warm.percentile_ms(50))?;
            }
            for hundredths in [50, 99] {
                let [theirs, ours] = [theirs, ours].map(|it| it.warm.percentile_ms(hundredths));
                write!(line, " {:.2} |", ours / theirs)?;
            }
        }
        Ok(writeln!(std::io::stdout(), "{line}")?)
    }
}

const HEAD: &str = "\
| Scenario | Computed tokens of a warm prompt: llama-server | Sapwood | Cold, p50: llama-server | Sapwood | Warm, p50: llama-server | Sapwood | Warm, p99: llama-server | Sapwood | Cold / warm: llama-server | Sapwood | Sapwood / llama-server, p50 | p99 |
|---|---|---|---|---|---|---|---|---|---|---|---|---|";
/// Before the number of the first prompt.
const FIRST_NUMBER: usize = 1000;
/// Words of a conversation that is regenerated and edited, about as many tokens.
const AGAIN_WORDS: usize = 300;
/// Words of a system prompt.
const SYSTEM_WORDS: usize = 1000;
/// Turns of a conversation.
const TURNS: usize = 3;
/// Conversations whose last prompt is computed cold.
const COLD_SAMPLES: usize = 10;
/// Conversations of a round that are regenerated and edited, and that go on after a restart.
const CONVERSATIONS_AGAIN: usize = 10;
/// What ends the prompt of each turn.
const QUESTIONS: [&str; TURNS] = [
    "\n\nWhat happened to the boat on the next day?\n\n",
    "\n\nAnd who wrote the letter from the town?\n\n",
    "\n\nWhy did the mill close its doors?\n\n",
];
