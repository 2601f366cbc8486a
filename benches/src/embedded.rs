//! Shared by the embedded benches: a model to measure, and a bare loop over llama.cpp as the baseline.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use sapwood_engine::embedded::random::{self, RandomModelShape};
use sapwood_engine::embedded::{Embedded, LoadOptions, ModelSource, load};
use sapwood_engine::model::{BatchEntry, Model, OutputRow, SlotPurpose};
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

/// Tokens of each sequence before the measured ones.
pub const PROMPT_TOKENS: usize = 8;
/// Candidates of each sampled token.
pub const TOP_K: usize = 40;
/// The temperature of both loops.
pub const TEMPERATURE: f32 = 0.8;

/// The file of the random model of about 100 million parameters, written once to the folder for temporary files.
///
/// # Errors
/// Those of writing.
pub fn model_file() -> Result<PathBuf> {
    let path = std::env::temp_dir().join("sapwood-bench-100m.gguf");
    if !path.exists() {
        let unfinished = path.with_extension("unfinished");
        let mut out = BufWriter::new(File::create(&unfinished)?);
        random::write(&mut out, &RandomModelShape::hundred_million(), 1)?;
        out.flush()?;
        std::fs::rename(&unfinished, &path)?;
    }
    Ok(path)
}

/// The file of the demo model, written to the folder for temporary files.
///
/// # Errors
/// Those of writing.
pub fn demo_file() -> Result<PathBuf> {
    let path = std::env::temp_dir().join("sapwood-bench-demo.gguf");
    std::fs::write(&path, sapwood_demo::MODEL)?;
    Ok(path)
}

/// Loads the random model.
///
/// # Errors
/// Those of loading.
pub fn model(options: &LoadOptions) -> Result<Embedded> {
    Ok(load(
        "bench",
        &ModelSource::File(model_file()?),
        options,
        &mut |_| true,
    )?)
}

/// A prompt whose first token differs from that of every other `number` below 30,000, so that no prefix is cached.
#[must_use]
pub fn prompt(number: usize, tokens: usize) -> Vec<Token> {
    (0..tokens)
        .map(|at| ((number + at * at * 17) % 30_000 + 300) as Token)
        .collect()
}

/// Decodes `steps` tokens of each of `sequences` sequences without an engine; returns the time, prompts included.
/// `round` makes the prompts distinct.
///
/// # Errors
/// Those of the model.
pub fn bare(
    model: &mut dyn Model,
    sequences: usize,
    steps: usize,
    round: usize,
) -> Result<Duration> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut candidates = Vec::with_capacity(TOP_K + 1);
    let prompts: Vec<_> = (0..sequences)
        .map(|slot| prompt(round * sequences + slot, PROMPT_TOKENS))
        .collect();
    for (slot, prompt) in prompts.iter().enumerate() {
        model.open(
            slot as u32,
            &SlotPurpose {
                prompt,
                seed: 0,
                choice: 0,
                max_tokens: None,
            },
        );
    }
    let mut next = Vec::with_capacity(sequences);
    let start = Instant::now();
    let mut batch: Vec<BatchEntry> = prompts
        .iter()
        .enumerate()
        .flat_map(|(slot, prompt)| {
            prompt
                .iter()
                .enumerate()
                .map(move |(at, &token)| entry(slot, at, token))
        })
        .collect();
    decode(model, &batch)?;
    for slot in 0..sequences {
        next.push(sample(
            model,
            (slot + 1) * PROMPT_TOKENS - 1,
            &mut candidates,
            &mut random,
        )?);
    }
    // The first token of each sequence came with its prompt.
    for step in 0..steps - 1 {
        batch.clear();
        batch.extend(
            next.iter()
                .enumerate()
                .map(|(slot, &token)| entry(slot, PROMPT_TOKENS + step, token)),
        );
        decode(model, &batch)?;
        for (slot, next) in next.iter_mut().enumerate() {
            *next = sample(model, slot, &mut candidates, &mut random)?;
        }
    }
    let taken = start.elapsed();
    for slot in 0..sequences {
        model.release(slot as u32);
    }
    Ok(taken)
}

fn entry(slot: usize, at: usize, token: Token) -> BatchEntry {
    let row = at + 1 >= PROMPT_TOKENS;
    BatchEntry {
        slot: slot as u32,
        position: at as u32,
        token,
        row,
    }
}

fn decode(model: &mut dyn Model, batch: &[BatchEntry]) -> Result<()> {
    match model.decode(batch, Time::ZERO) {
        Ok(()) => Ok(()),
        Err(stop) => bail!("the model stopped: {stop:?}"),
    }
}

/// Selects the best [`TOP_K`] in one pass over the row, then samples one of them.
fn sample(
    model: &mut dyn Model,
    index: usize,
    candidates: &mut Vec<(f32, Token)>,
    random: &mut Random,
) -> Result<Token> {
    let OutputRow::Logits(logits) = model.row(index, Time::ZERO) else {
        bail!("the model gave no row")
    };
    candidates.clear();
    let mut least = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > least || candidates.len() < TOP_K {
            let at = candidates.partition_point(|&(better, _)| better >= logit);
            candidates.insert(at, (logit, token as Token));
            candidates.truncate(TOP_K);
            least = if candidates.len() == TOP_K {
                candidates[TOP_K - 1].0
            } else {
                f32::NEG_INFINITY
            };
        }
    }
    let best = candidates[0].0;
    let weight = |logit: f32| ((logit - best) / TEMPERATURE).exp();
    let mut left = random.fraction()
        * candidates
            .iter()
            .map(|&(logit, _)| weight(logit))
            .sum::<f32>();
    for &(logit, token) in candidates.iter() {
        left -= weight(logit);
        if left <= 0.0 {
            return Ok(token);
        }
    }
    Ok(candidates[0].1)
}

struct Random(u64);

impl Random {
    fn fraction(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1_u64 << 24) as f32
    }
}

/// Processor time of this process's living threads so far, in seconds (Linux). A busy machine distorts it less than
/// wall time.
///
/// # Errors
/// If the kernel does not report it.
pub fn processor_seconds() -> Result<f64> {
    let mut nanoseconds = 0.0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        nanoseconds += stat
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .parse::<f64>()?;
    }
    Ok(nanoseconds / 1e9)
}
