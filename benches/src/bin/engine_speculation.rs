//! What speculative decoding saves and costs with a real model: answers that repeat their prompts and free text, without drafts, with
//! prompt lookup, and with a draft model if one is given.
//!
//! `cargo xtask bench-engine --bench speculation` builds the program, installs a model and runs this.
//!
//! ```text
//! engine_speculation --sapwood PROGRAM --model FILE [--draft-model FILE] [--rounds N] [--tokens N] [--clients N]
//! ```

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use sapwood_benches::generate::waves::{Waves, answer};
use sapwood_benches::measure::median;
use sapwood_benches::side::{Side, metric};
use serde_json::json;

/// Speculative decoding with a real model
#[derive(Debug, Parser)]
struct Args {
    /// Our binary, as `cargo xtask serve` builds it
    #[arg(long, value_name = "PROGRAM")]
    sapwood: PathBuf,
    /// The model
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// A smaller model with the same vocabulary
    #[arg(long, value_name = "FILE")]
    draft_model: Option<PathBuf>,
    /// Rounds, in each of which all modes answer all tasks
    #[arg(long, default_value = "5")]
    rounds: usize,
    /// Tokens of an answer
    #[arg(long, default_value = "150")]
    tokens: u32,
    /// Answers at once
    #[arg(long, default_value = "1")]
    clients: u32,
}

/// A server with one way to draft.
struct Mode {
    name: &'static str,
    side: Side,
}

/// What the answers to one task took in one mode.
#[derive(Clone, Debug, Default)]
struct Taken {
    /// Tokens per second after the first, of all streams together, a number for each round.
    speed: Vec<f64>,
    /// Drafted and accepted tokens.
    drafted: [f64; 2],
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = Args::parse();
    let modes = start(&args).await?;
    let mut taken = vec![vec![Taken::default(); modes.len()]; TASKS.len()];
    // The first round is not counted: times are measured in it that decide what is drafted later.
    for round in 0..=args.rounds {
        for (task, taken) in TASKS.iter().zip(&mut taken) {
            for (mode, taken) in modes.iter().zip(taken) {
                let before = drafted(&mode.side).await?;
                let speed = ask(&args, &mode.side, &task.prompt(round)).await?;
                let after = drafted(&mode.side).await?;
                if round > 0 {
                    taken.speed.push(speed);
                    for (sum, (after, before)) in
                        taken.drafted.iter_mut().zip(after.into_iter().zip(before))
                    {
                        *sum += after - before;
                    }
                }
            }
        }
    }
    report(&modes, &taken)
}

async fn start(args: &Args) -> Result<Vec<Mode>> {
    let mut modes = Vec::new();
    for name in ["off", "lookup"] {
        let side = Side::sapwood(&args.sapwood, &args.model, &["--speculation", name], &[]).await?;
        modes.push(Mode { name, side });
    }
    if let Some(draft) = &args.draft_model {
        let draft = draft.display().to_string();
        let arguments = ["--draft-model", draft.as_str()];
        let side = Side::sapwood(&args.sapwood, &args.model, &arguments, &[]).await?;
        modes.push(Mode {
            name: "draft model",
            side,
        });
    }
    Ok(modes)
}

/// Answers a prompt by as many streams as there are clients; returns tokens per second behind the first tokens.
async fn ask(args: &Args, side: &Side, prompt: &str) -> Result<f64> {
    let mut body = (side.body)(prompt, args.tokens);
    body["temperature"] = json!(0);
    let body = body.to_string();
    let tokens = f64::from(args.tokens - 1) * f64::from(args.clients);
    if args.clients == 1 {
        let answer = answer(side.server.address, side.path, &body).await?;
        return Ok(tokens / answer.gaps.iter().sum::<Duration>().as_secs_f64());
    }
    let waves = Waves {
        address: side.server.address,
        path: side.path,
        bodies: Arc::new(vec![body; args.clients as usize]),
        at_once: args.clients,
    };
    let answered = waves.ask().await?;
    let first = answered.first.iter().max().copied().unwrap_or_default();
    Ok(tokens / (answered.took - first).as_secs_f64())
}

/// The sums of drafted and of accepted tokens.
async fn drafted(side: &Side) -> Result<[f64; 2]> {
    let (_, scrape) = side.server.fetch("/metrics", None).await?;
    // A counter that has no sample yet is not there.
    let count = |name| metric(&scrape, name).unwrap_or(0.0);
    Ok([
        count("sapwood_draft_tokens_total"),
        count("sapwood_accepted_tokens_total"),
    ])
}

fn report(modes: &[Mode], taken: &[Vec<Taken>]) -> Result<()> {
    let mut out = std::io::stdout();
    write!(out, "| Answer |")?;
    for mode in modes {
        write!(out, " {}: tokens/s |", mode.name)?;
    }
    for mode in &modes[1..] {
        write!(
            out,
            " {}: speed, 1 without | accepted of drafted |",
            mode.name
        )?;
    }
    let columns = 1 + modes.len() + 2 * (modes.len() - 1);
    writeln!(out, "\n|{}", "---|".repeat(columns))?;
    for (task, taken) in TASKS.iter().zip(taken) {
        write!(out, "| {} |", task.name)?;
        let speeds: Vec<f64> = taken.iter().map(|it| median(it.speed.clone())).collect();
        for speed in &speeds {
            write!(out, " {speed:.1} |")?;
        }
        for (taken, speed) in taken.iter().zip(&speeds).skip(1) {
            let [drafted, accepted] = taken.drafted;
            write!(
                out,
                " {:.2} | {accepted:.0} of {drafted:.0} |",
                speed / speeds[0]
            )?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Something to write.
struct Task {
    name: &'static str,
    /// What the prompt says before and after the text.
    before: &'static str,
    text: &'static str,
    after: &'static str,
}

impl Task {
    /// A prompt that is new in each round, so that all of it is computed.
    fn prompt(&self, round: usize) -> String {
        let Self {
            before,
            text,
            after,
            ..
        } = self;
        format!("Task {round}. {before}{text}{after}")
    }
}

const CODE: &str = "\
def total(orders, tax):
    waited = 0
    for order in orders:
        if order.closed:
            waited += order.price * order.count
        else:
            waited += order.price * order.count * 0.5
    return waited * (1 + tax)


def names(orders):
    found = []
    for order in orders:
        if order.name not in found:
            found.append(order.name)
    return sorted(found)
";

const RECORDS: &str = "\
name=Anna Berg, age=29, city=Oslo
name=Jon Dahl, age=33, city=Bergen
name=Kari Lund, age=37, city=Tromso
name=Ola Moen, age=41, city=Oslo
name=Siri Vik, age=45, city=Bergen
";

const TEXT: &str = "\
Rivers rarely run straight for long. Water that is a little faster on the outside of a bend cuts into the bank there, while on the \
inside it slows and lets its sand fall. So every bend grows, and the river wanders over its valley. After some hundred years two bends \
meet, the flood breaks through the neck between them, and a curved lake stays behind that fills with reeds.
";

const TASKS: [Task; 4] = [
    Task {
        name: "code with a new name",
        before: "Rename `waited` to `sum` in this Python code:\n\n```python\n",
        text: CODE,
        after: "```\n\nThe code after the change:\n\n```python\n",
    },
    Task {
        name: "records as JSON",
        before: "Write these records as JSON:\n\n",
        text: RECORDS,
        after: "\n[\n  {\"name\": \"Anna Berg\", \"age\": 29, \"city\": \"Oslo\"},\n",
    },
    Task {
        name: "a text with its own words",
        before: "Repeat the important sentences of this text.\n\n",
        text: TEXT,
        after: "\nThe important sentences are:\n\n",
    },
    Task {
        name: "free text",
        before: "Write a story about a lighthouse keeper who finds a letter.\n\n",
        text: "",
        after: "",
    },
];
