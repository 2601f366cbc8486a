//! Compares the engine with a bare loop over the same llama.cpp, on random weights. Also measures the time to the first
//! token beside a long prompt, and the cost of a conversation's second turn.
//!
//! Both loops sample at the same temperature among the same number of candidates, with the same threads, cache and
//! batches.
//!
//! ```text
//! embedded_decode [--rounds N] [--steps N] [--threads N] [--json] [--gate]
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use futures::StreamExt;
use futures::executor::block_on;
use futures::future::join_all;
use sapwood_benches::embedded::{
    PROMPT_TOKENS, TEMPERATURE, TOP_K, bare, model, processor_seconds, prompt,
};
use sapwood_benches::measure::median;
use sapwood_benches::report::Report;
use sapwood_engine::api::{EventKind, GenerationRequest, Prompt, TokenUsage};
use sapwood_engine::embedded::{Embedded, LoadOptions};
use sapwood_engine::{Config, Engine, RequestHandle};
use sapwood_proto::steer::Token;
use serde_json::json;

const SEQUENCES: [usize; 3] = [1, 8, 32];
/// The share of the bare loop's tokens per second that the engine must reach.
const GATE: f64 = 0.95;

/// The engine against the same llama.cpp called bare
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Tokens of each sequence in a round
    #[arg(long, default_value_t = 64)]
    steps: usize,
    /// Compute threads; default: the engine's choice
    #[arg(long)]
    threads: Option<u32>,
    #[command(flatten)]
    report: Report,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let options = LoadOptions {
        parallel: 32,
        threads: args.threads,
        ..LoadOptions::default()
    };
    let mut out = std::io::stdout().lock();
    let mut passed = true;
    for sequences in SEQUENCES {
        // llama.cpp reads every used KV cell for every token, whichever sequence it belongs to: cached prefixes of
        // finished requests slow down running ones. The bare loop caches nothing and computes its prompts in one
        // decode, so the comparison is with an engine that does the same; the cost of caching has a row of its own.
        let forgetful = LoadOptions {
            kept_prefixes: Some(0),
            parallel: u32::try_from(sequences)?,
            ..options.clone()
        };
        let eager = Config {
            // So long that every prompt is computed in one step.
            step_ms: 3_600_000,
            ..Config::default()
        };
        let mut alone = model(&forgetful)?;
        let engine = Engine::spawn(Box::new(model(&forgetful)?), eager)?;
        let ratio = decode(("decode", sequences), &mut alone, &engine, &args, &mut out)?;
        passed &= ratio >= GATE;
    }
    let mut alone = model(&options)?;
    let engine = Engine::spawn(Box::new(model(&options)?), Config::default())?;
    let most = SEQUENCES[SEQUENCES.len() - 1];
    let retained = ("decode, prefixes kept", most);
    decode(retained, &mut alone, &engine, &args, &mut out)?;
    first_token(&engine, &args, &mut out)?;
    second_turn(&engine, &args, &mut out)?;
    Ok(args.report.exit(passed))
}

/// Alternates rounds of both loops; returns the median ratio of their tokens per second.
fn decode(
    (name, sequences): (&str, usize),
    alone: &mut Embedded,
    engine: &Engine,
    args: &Args,
    out: &mut impl Write,
) -> Result<f64> {
    let (mut ours, mut theirs, mut ratios, mut work) = (vec![], vec![], vec![], vec![]);
    // The first round warms both up and is not counted.
    for round in 0..=args.rounds {
        let tokens = (sequences * args.steps) as f64;
        let at_start = processor_seconds()?;
        let bare = tokens / bare(alone, sequences, args.steps, round)?.as_secs_f64();
        let between = processor_seconds()?;
        let engine = tokens / served(engine, sequences, args.steps, round)?.as_secs_f64();
        let at_end = processor_seconds()?;
        if round > 0 {
            ours.push(engine);
            theirs.push(bare);
            ratios.push(engine / bare);
            work.push((between - at_start) / (at_end - between));
        }
    }
    let (ours, theirs, ratio, work) = (median(ours), median(theirs), median(ratios), median(work));
    if args.report.json {
        let line = json!({"bench": name, "sequences": sequences, "engine_tokens_per_second": ours,
            "bare_tokens_per_second": theirs, "ratio": ratio, "processor_time_ratio": work});
        writeln!(out, "{line}")?;
    } else {
        writeln!(
            out,
            "{name}, {sequences:2} sequences: engine {ours:7.1} tokens/s, bare {theirs:7.1}, ratio {ratio:.3}, by \
             processor time {work:.3}"
        )?;
    }
    Ok(ratio)
}

fn request(prompt: Vec<Token>, max_tokens: usize) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt));
    request.params.max_tokens = u32::try_from(max_tokens).ok();
    request.params.ignore_eos = Some(true);
    request.params.temperature = Some(TEMPERATURE);
    request.params.top_k = Some(TOP_K as u32);
    request.params.seed = Some(1);
    request
}

/// The result of one request: the times of its first and last token, its tokens, and its usage.
struct Answer {
    first: Instant,
    last: Instant,
    tokens: Vec<Token>,
    usage: TokenUsage,
}

async fn answer(mut handle: RequestHandle) -> Result<Answer> {
    let (mut first, mut tokens) = (None, Vec::new());
    while let Some(event) = handle.next().await {
        match event.kind {
            EventKind::Tokens(got) => {
                first.get_or_insert_with(Instant::now);
                tokens.extend(got.tokens.iter().map(|token| token.id));
            }
            EventKind::Usage(usage) => {
                let last = Instant::now();
                return Ok(Answer {
                    first: first.unwrap_or(last),
                    last,
                    tokens,
                    usage,
                });
            }
            EventKind::Finish(_) | EventKind::Report(_) => {}
            EventKind::Failed(error) | EventKind::Error(error) => bail!("{error}"),
        }
    }
    bail!("the stream ended early")
}

fn submit(engine: &Engine, request: GenerationRequest) -> Result<RequestHandle> {
    Ok(engine.submit(request)?)
}

fn served(engine: &Engine, sequences: usize, steps: usize, round: usize) -> Result<Duration> {
    let start = Instant::now();
    let answers = (0..sequences)
        .map(|number| {
            submit(
                engine,
                request(prompt(round * sequences + number, PROMPT_TOKENS), steps),
            )
        })
        .collect::<Result<Vec<_>>>()?;
    for answer in block_on(join_all(answers.into_iter().map(answer))) {
        let got = answer?.tokens.len();
        if got != steps {
            bail!("{got} tokens instead of {steps}");
        }
    }
    Ok(start.elapsed())
}

/// A short prompt alone, and while 2,000 tokens of another prompt are prefilled.
fn first_token(engine: &Engine, args: &Args, out: &mut impl Write) -> Result<()> {
    let (mut quiet, mut beside, mut long_alone) = (vec![], vec![], vec![]);
    for round in 0..args.rounds {
        let start = Instant::now();
        let short = submit(engine, request(prompt(9000 + round, 16), 4))?;
        quiet.push((block_on(answer(short))?.first - start).as_secs_f64() * 1e3);
        let begin = Instant::now();
        let long = submit(engine, request(prompt(10_000 + round, 2000), 1))?;
        let start = Instant::now();
        let short = submit(engine, request(prompt(11_000 + round, 16), 4))?;
        let (long, short) = block_on(async { futures::join!(answer(long), answer(short)) });
        beside.push((short?.first - start).as_secs_f64() * 1e3);
        long_alone.push((long?.last - begin).as_secs_f64() * 1e3);
    }
    let (quiet, beside, long) = (median(quiet), median(beside), median(long_alone));
    if args.report.json {
        let line = json!({"bench": "first_token", "alone_ms": quiet, "beside_2000_token_prompt_ms": beside,
            "long_prompt_ms": long});
        writeln!(out, "{line}")?;
    } else {
        writeln!(
            out,
            "first token of 16: alone {quiet:.0} ms, beside a 2,000-token prompt {beside:.0} ms (which takes {long:.0} ms)"
        )?;
    }
    Ok(())
}

/// The second turn repeats the first with its answer, and adds a question.
fn second_turn(engine: &Engine, args: &Args, out: &mut impl Write) -> Result<()> {
    let (mut first_ms, mut second_ms, mut cached, mut whole) = (vec![], vec![], 0, 0);
    for round in 0..args.rounds {
        let mut talk = prompt(20_000 + round, 600);
        let start = Instant::now();
        let turn = block_on(answer(submit(engine, request(talk.clone(), 32))?))?;
        first_ms.push((turn.first - start).as_secs_f64() * 1e3);
        talk.extend(turn.tokens);
        talk.extend(prompt(25_000 + round, 20));
        let start = Instant::now();
        let turn = block_on(answer(submit(engine, request(talk, 4))?))?;
        second_ms.push((turn.first - start).as_secs_f64() * 1e3);
        (cached, whole) = (turn.usage.cached_tokens, turn.usage.prompt_tokens);
    }
    let (first, second, computed) = (median(first_ms), median(second_ms), whole - cached);
    if args.report.json {
        let line = json!({"bench": "second_turn", "first_turn_ms": first, "second_turn_ms": second,
            "prompt_tokens": whole, "computed_tokens": computed});
        writeln!(out, "{line}")?;
    } else {
        writeln!(
            out,
            "second turn: {computed} of {whole} prompt tokens computed; first token after {second:.0} ms (first turn, 600 \
             tokens: {first:.0} ms)"
        )?;
    }
    Ok(())
}
