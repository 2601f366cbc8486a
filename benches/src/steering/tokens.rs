//! Tokens per second of an engine with and without steerers (AI-1108).

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::StreamExt;
use futures::executor::block_on;
use futures::future::join_all;
use sapwood_control::trie::{HostModel, TokenEntry};
use sapwood_engine::api::{EventKind, GenerationRequest, Prompt, SharedVocabulary};
use sapwood_engine::constraint::{ConstraintConfig, ConstraintSource, MaskWorkers};
use sapwood_engine::{Engine, RequestHandle};
use sapwood_proto::steer::{Steer, SteerSource, Token};

use super::controllers::{self, Callbacks, trivial_p1, trivial_p2};
use super::table::{Table, number};
use crate::measure::{Spread, process_time};

/// Opens the steerer of one sequence; `None` is a request without.
pub type Open = Box<dyn Fn() -> Result<Option<Box<dyn Steer>>>>;

/// One way to steer, and what was measured of it.
pub struct Steered {
    name: String,
    open: Open,
    rates: Vec<f64>,
    ratios: Vec<f64>,
    /// Processor time per token, in microseconds.
    cpus: Vec<f64>,
}

impl Steered {
    /// A way to steer.
    #[must_use]
    pub fn new(name: &str, open: Open) -> Self {
        Self {
            name: name.to_owned(),
            open,
            rates: Vec::new(),
            ratios: Vec::new(),
            cpus: Vec::new(),
        }
    }
}

/// The load of one round.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sequences at once.
    pub sequences: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Measured rounds.
    pub rounds: usize,
}

/// Alternates rounds of all cases, of which the first has no steerer, and adds their rows to the table. `goal`: the least
/// share of its tokens per second.
///
/// # Errors
/// A request fails.
pub fn compare(
    table: &mut Table,
    title: &str,
    engine: &Engine,
    mut cases: Vec<Steered>,
    load: Load,
    goal: Option<f64>,
) -> Result<()> {
    for round in 0..=load.rounds {
        let mut plain = f64::NAN;
        for (index, case) in cases.iter_mut().enumerate() {
            let cpu = process_time()?;
            let took = generate(engine, &case.open, load, round * 8 + index)?;
            let cpu = process_time()? - cpu;
            let tokens = (load.sequences * load.tokens) as f64;
            let rate = tokens / took.as_secs_f64();
            if index == 0 {
                plain = rate;
            }
            // The first round warms up.
            if round > 0 {
                case.rates.push(rate);
                case.ratios.push(rate / plain);
                case.cpus.push(cpu.as_secs_f64() * 1e6 / tokens);
            }
        }
    }
    for (index, case) in cases.into_iter().enumerate() {
        let ratio = Spread::of(case.ratios).median;
        let goal = match goal {
            Some(goal) if index > 0 => table.at_least(ratio, goal),
            _ => String::new(),
        };
        table.row(&[
            title.to_owned(),
            case.name,
            load.sequences.to_string(),
            number(Spread::of(case.rates).median),
            format!("{ratio:.3}"),
            number(Spread::of(case.cpus).min),
            goal,
        ]);
    }
    Ok(())
}

/// The columns of [`compare`].
pub const COLUMNS: [&str; 7] = [
    "Model",
    "Steerer",
    "Sequences",
    "Tokens/s, median",
    "Share of the unsteered rate",
    "Processor time per token, minimum, µs",
    "Goal",
];

/// No steerer, trivial controllers, and these constraints: title, controller, argument.
///
/// # Errors
/// A controller is refused.
pub fn cases(
    vocabulary: &SharedVocabulary,
    constraints: &[(&str, &'static str, &'static str)],
) -> Result<Vec<Steered>> {
    let host = controllers::host()?;
    let model = host_model(vocabulary);
    // Of P1 without a mask: whatever the model likes.
    let free = controllers::p1(&Callbacks {
        mid: "",
        ..Callbacks::default()
    });
    let mut cases = vec![Steered::new("none", Box::new(|| Ok(None)))];
    for (name, text) in [
        ("controller, P1, no mask", free),
        ("controller, P1, a mask", trivial_p1()),
        ("controller, P2, a mask", trivial_p2()),
    ] {
        let source = controllers::source(&host, &model, &text)?;
        cases.push(Steered::new(name, opens(source, "", "")));
    }
    let workers = Arc::new(MaskWorkers::new());
    for (name, controller, arg) in constraints {
        let vocabulary = Arc::clone(vocabulary);
        let source = ConstraintSource::new(
            vocabulary,
            ConstraintConfig::default(),
            Arc::clone(&workers),
        );
        cases.push(Steered::new(name, opens(source, controller, arg)));
    }
    Ok(cases)
}

fn opens(source: impl SteerSource + 'static, controller: &'static str, arg: &'static str) -> Open {
    Box::new(move || controllers::open(&source, controller, arg).map(Some))
}

fn host_model(vocabulary: &SharedVocabulary) -> Arc<HostModel> {
    let ids = 0..vocabulary.size() as Token;
    let eos = ids
        .clone()
        .find(|&id| vocabulary.is_end(id))
        .unwrap_or_default();
    let tokens = ids.map(|id| TokenEntry::text(vocabulary.bytes(id)));
    let tokenizer = Arc::clone(vocabulary);
    let tokenize = move |text: &str| tokenizer.tokenize(text, false);
    Arc::new(HostModel::new(tokens.collect(), eos, tokenize))
}

fn generate(engine: &Engine, open: &Open, load: Load, round: usize) -> Result<Duration> {
    let mut requests = Vec::new();
    for number in 0..load.sequences {
        // Prompts that differ from all others, so that no prefix is cached.
        let prompt = prompt(round * load.sequences + number, PROMPT_TOKENS);
        let mut request = GenerationRequest::new(Prompt::Tokens(prompt));
        request.params.max_tokens = u32::try_from(load.tokens).ok();
        request.params.ignore_eos = Some(true);
        request.params.temperature = Some(0.8);
        request.params.top_k = Some(40);
        request.params.seed = Some(1);
        request.steer = open()?;
        requests.push(request);
    }
    let begin = Instant::now();
    let handles = requests
        .into_iter()
        .map(|request| Ok(engine.submit(request)?));
    let handles = handles.collect::<Result<Vec<_>>>()?;
    for tokens in block_on(join_all(handles.into_iter().map(read))) {
        let tokens = tokens?;
        if tokens != load.tokens {
            bail!("{tokens} tokens instead of {}", load.tokens);
        }
    }
    Ok(begin.elapsed())
}

/// A prompt that no other number below 500 has.
fn prompt(number: usize, tokens: usize) -> Vec<Token> {
    (0..tokens)
        .map(|at| ((number + at * at * 17) % 500 + 300) as Token)
        .collect()
}

async fn read(mut handle: RequestHandle) -> Result<usize> {
    let mut tokens = 0;
    while let Some(event) = handle.next().await {
        match event.kind {
            EventKind::Tokens(got) => tokens += got.tokens.len(),
            EventKind::Error(error) => bail!("{error}"),
            _ => {}
        }
    }
    Ok(tokens)
}

const PROMPT_TOKENS: usize = 8;
