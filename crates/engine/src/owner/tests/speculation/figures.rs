//! What drafts save and cost, on machines whose decode calls take a given time.

use std::collections::HashMap;
use std::time::Duration;

use sapwood_proto::steer::Token;

use super::super::super::step_clock::StepClock;
use super::super::harness::{Bench, TestClock};
use super::parrot::{Machine, Output, parrot};
use super::{MODES, config, drafted};
use crate::api::{EventKind, GenerationRequest, Prompt};
use crate::scripted::{Config as Script, ScriptedTokenizer};
use crate::{RequestHandle, SpeculationMode};

/// A processor where reading the weights takes the time of some tokens.
pub(super) fn memory_bound(entries: usize) -> Duration {
    Duration::from_micros(
        10_000
            + 300 * entries.saturating_sub(1).min(16) as u64
            + 1_500 * entries.saturating_sub(16) as u64,
    )
}

/// What was measured of a model of 135 million parameters on one core.
pub(super) fn compute_bound(entries: usize) -> Duration {
    Duration::from_micros(20_000 + 13_500 * entries as u64)
}

/// Text in pieces that are about as long as tokens.
struct Pieces(HashMap<String, Token>);

impl Pieces {
    fn tokens(&mut self, text: &str) -> Vec<Token> {
        let mut pieces: Vec<String> = Vec::new();
        for letter in text.chars() {
            let goes_on = pieces.last().is_some_and(|piece: &String| {
                let is_word = letter.is_ascii_lowercase() && piece.len() < 7;
                is_word && piece.ends_with(|last: char| last.is_ascii_alphabetic() || last == ' ')
                    || letter == ' ' && piece.ends_with("  ") && piece.len() < 8
                    || letter.is_ascii_uppercase() && piece == " "
            });
            match pieces.last_mut() {
                Some(piece) if goes_on => piece.push(letter),
                _ => pieces.push(letter.to_string()),
            }
        }
        let number = |piece| {
            let next = 300 + self.0.len() as Token;
            *self.0.entry(piece).or_insert(next)
        };
        pieces.into_iter().map(number).collect()
    }
}

const CODE: &str = include_str!("../../step_clock.rs");

const ESSAY: &str = "Rivers rarely run straight for long. Water that is a little faster on the outside of a bend cuts into \
    the bank there, while on the inside it slows and lets its sand fall. So every bend grows, and the river wanders over its \
    valley like a rope that is shaken slowly. After some hundred years two bends meet, the flood breaks through the neck \
    between them, and a curved lake stays behind that fills with reeds. Farmers have always known that the land beside such \
    a river is rich and that it cannot be trusted. Engineers straightened many of them in the nineteenth century, to win \
    fields and to let ships pass; the water then ran faster, dug itself deeper, and the wells of the villages fell dry. Today \
    some are given their bends again. Nobody draws the new course in detail: a bulldozer opens the old dam at two or three \
    places, and the first spring flood does the rest of the work. Fish come back within a few seasons, kingfishers a little \
    later, and the meadows hold back so much rain that towns downstream have a day more to prepare. What it costs is space, \
    and patience with a neighbour who moves. A map of such a valley is a record of moods rather than a plan, and whoever \
    reads it learns how short our own memory of the landscape is.";

fn records() -> (String, String) {
    let names = [
        "Anna Berg",
        "Jon Dahl",
        "Kari Lund",
        "Ola Moen",
        "Siri Vik",
        "Per Haug",
    ];
    let (mut lines, mut json) = (String::new(), "[\n".to_owned());
    for (index, name) in names.iter().enumerate() {
        let (age, city) = (29 + index * 4, ["Oslo", "Bergen", "Tromso"][index % 3]);
        lines += &format!("name={name}, age={age}, city={city}\n");
        json += &format!(
            "  {{\n    \"name\": \"{name}\",\n    \"age\": {age},\n    \"city\": \"{city}\"\n  }},\n"
        );
    }
    (
        format!("Write these records as JSON:\n{lines}"),
        json + "]\n",
    )
}

/// Prompts and answers.
fn tasks() -> Vec<(&'static str, String, String)> {
    let (lines, json) = records();
    let summary = "Rivers wander because water on the outside of a bend cuts into the bank, while on the inside it slows and \
        lets its sand fall. Engineers straightened many of them in the nineteenth century, so the water ran faster and the \
        wells of the villages fell dry. Today some are given their bends again: fish come back within a few seasons, and the \
        meadows hold back so much rain that towns downstream have a day more to prepare.";
    vec![
        (
            "code edit",
            format!("Rename `waited` to `spent`:\n{CODE}"),
            CODE.replace("waited", "spent"),
        ),
        ("JSON", lines, json),
        (
            "summary",
            format!("Summarise this:\n{ESSAY}"),
            summary.to_owned(),
        ),
        (
            "free text",
            "Write an essay about rivers.".to_owned(),
            ESSAY.to_owned(),
        ),
    ]
}

/// Rounds in which a task is answered; the first, in which times are measured for the first time, does not count.
const ROUNDS: u64 = 4;

/// What answers to a task took after their first tokens.
#[derive(Default)]
struct Figures {
    time: Duration,
    calls: u64,
    /// Tokens of one answer.
    tokens: usize,
    /// Drafted and accepted.
    drafted: (u64, u64),
}

/// Answers a prompt `streams` times at once in each round.
fn figures_of(
    mode: SpeculationMode,
    takes: fn(usize) -> Duration,
    streams: u32,
    (prompt, answer): (&str, &str),
) -> Figures {
    let mut pieces = Pieces(HashMap::new());
    let (prompt, answer) = (pieces.tokens(prompt), pieces.tokens(answer));
    let script = Script {
        tokenizer: Some(ScriptedTokenizer::Words),
        vocab: 1_024,
        context_tokens: 8_192,
        parallel: streams,
        ..Script::default()
    };
    let machine = Machine {
        clock: TestClock::default(),
        takes,
    };
    let clock = machine.clock.clone();
    let tokens = answer.len() + 1;
    let parrot = parrot(script, Output::Given(answer), Some(machine));
    let mut bench = Bench::over(Box::new(parrot), config(mode));
    let now = clock.clone();
    bench.owner.clock = StepClock::running(move || now.now(), |_, _| ());
    let mut figures = Figures {
        tokens,
        ..Figures::default()
    };
    for round in 0..ROUNDS {
        let submit = |_| {
            let mut request = GenerationRequest::new(Prompt::Tokens(prompt.clone()));
            request.params.temperature = Some(0.0);
            bench.submit(request)
        };
        let mut handles: Vec<_> = (0..streams).map(submit).collect();
        let (time, calls) = answer_all(&mut bench, &clock, &mut handles, tokens);
        if round > 0 {
            figures.time += time / u32::try_from(ROUNDS - 1).unwrap();
            figures.calls += calls;
        }
    }
    figures.calls /= ROUNDS - 1;
    figures.drafted = drafted(&bench);
    figures
}

/// Steps until all requests are answered with so many tokens; returns the time and the decode calls after the first token of
/// each.
fn answer_all(
    bench: &mut Bench,
    clock: &TestClock,
    handles: &mut [RequestHandle],
    tokens: usize,
) -> (Duration, u64) {
    let mut answered = vec![0; handles.len()];
    let mut began = None;
    loop {
        bench.owner.step(clock.now());
        for (handle, answered) in handles.iter_mut().zip(&mut answered) {
            while let Some(event) = handle.try_next() {
                if let EventKind::Tokens(tokens) = event.kind {
                    *answered += tokens.tokens.len();
                }
            }
        }
        let state = (clock.now(), bench.engine.stats().steps.get());
        if bench.owner.is_empty() {
            assert!(answered.iter().all(|&answered| answered == tokens));
            let (time, calls) = began.unwrap_or(state);
            return (state.0.since(time), state.1 - calls);
        }
        if answered.iter().all(|&answered| answered > 0) {
            began.get_or_insert(state);
        }
    }
}

#[test]
fn drafts_save_time_where_answers_repeat_and_cost_little_where_not() {
    type Takes = fn(usize) -> Duration;
    // The most time that each task may take, as a share of that without drafts.
    let alone: [(Takes, [f64; 4]); 2] = [
        (memory_bound, [0.2, 0.6, 0.5, 1.01]),
        (compute_bound, [0.6, 0.9, 0.85, 1.01]),
    ];
    for (takes, most) in alone {
        for ((task, prompt, answer), most) in tasks().into_iter().zip(most) {
            let share = share_of(takes, 1, task, (&prompt, &answer));
            assert!(share < most, "{task}: {share}");
        }
    }
    for (takes, streams) in [
        (memory_bound as Takes, 4),
        (memory_bound, 16),
        (compute_bound, 4),
        (compute_bound, 16),
    ] {
        for (task, prompt, answer) in tasks().into_iter().skip(1) {
            let share = share_of(takes, streams, task, (&prompt, &answer));
            assert!(share < 1.05, "{streams} {task}: {share}");
        }
    }
}

/// The time with drafts as a share of that without.
fn share_of(
    takes: fn(usize) -> Duration,
    streams: u32,
    task: &str,
    (prompt, answer): (&str, &str),
) -> f64 {
    let [plain, drafting] = MODES.map(|mode| figures_of(mode, takes, streams, (prompt, answer)));
    let share = drafting.time.as_secs_f64() / plain.time.as_secs_f64();
    println!(
        "{streams} {task}, {} tokens: {share:.3} of the time, {} of {} calls, {:?}",
        plain.tokens, drafting.calls, plain.calls, drafting.drafted
    );
    share
}
