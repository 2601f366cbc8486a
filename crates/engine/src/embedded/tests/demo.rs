//! The engine end to end with the demo model, and the accuracies that its card quotes.
//!
//! Skipped with a message if the demo crate's files are not beside this crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use futures::StreamExt;
use futures::executor::block_on;
use sapwood_proto::params::GenerationParams;
use serde_json::Value;

use super::super::*;
use crate::api::{ChatMessage, ChatRequest, EventKind, FinishReason, GenerationRequest, Prompt};
use crate::{Config, Engine, RequestHandle};

/// One in this many held-out questions of a family is asked.
const EVERY: usize = 6;
/// Number of answers by which a sample may be worse than the card's accuracy over all questions of a family.
const SLACK: f64 = 2.0;
/// Share of the first questions by which another build's rounding may be worse than the card's accuracy.
const FIRST_SLACK: f64 = 0.02;

fn demo() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo");
    if folder.join("sapwood-demo.gguf").is_file() {
        return Some(folder);
    }
    eprintln!("skipped: the demo model is not there");
    None
}

fn engine(folder: &Path) -> Engine {
    let source = ModelSource::File(folder.join("sapwood-demo.gguf"));
    let options = LoadOptions {
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = load("demo", &source, &options, &mut |_| true).unwrap();
    Engine::spawn(Box::new(model), Config::default()).unwrap()
}

fn chat(question: &Value) -> ChatRequest {
    let messages = question["messages"].as_array().unwrap();
    let message = |message: &Value| ChatMessage {
        role: message["role"].as_str().unwrap().to_owned(),
        content: message["content"].as_str().unwrap_or_default().to_owned(),
        tool_calls: message.get("tool_calls").cloned().unwrap_or_default(),
        ..ChatMessage::default()
    };
    ChatRequest {
        // The last message is the answer.
        messages: messages[..messages.len() - 1].iter().map(message).collect(),
        tools: question.get("tools").cloned().unwrap_or_default(),
        ..ChatRequest::default()
    }
}

fn greedy() -> GenerationParams {
    GenerationParams {
        temperature: Some(0.0),
        ..GenerationParams::default()
    }
}

/// The file's recommended sampling, which `chat` and `run` use.
fn recommended(seed: u64) -> GenerationParams {
    GenerationParams {
        temperature: Some(0.7),
        top_p: Some(0.95),
        min_p: Some(0.05),
        seed: Some(seed),
        ..GenerationParams::default()
    }
}

fn request(chat: ChatRequest, sampling: GenerationParams) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Chat(chat));
    request.params = sampling;
    // Stories are the longest answers.
    request.params.max_tokens = Some(160);
    request
}

/// The text of an answer; `None` if it did not end by itself.
fn text(handle: RequestHandle) -> Option<String> {
    let (mut text, mut ended) = (String::new(), false);
    for event in block_on(handle.collect::<Vec<_>>()) {
        match event.kind {
            EventKind::Tokens(tokens) => text.push_str(&tokens.text),
            EventKind::Finish(finish) => ended = finish.reason == FinishReason::Stop,
            EventKind::Usage(_) | EventKind::Report(_) => {}
            EventKind::Failed(error) | EventKind::Error(error) => panic!("{error}"),
        }
    }
    ended.then_some(text)
}

fn is_right(check: &Value, answer: &str) -> bool {
    let (expected, answer) = (&check["expected"], answer.trim());
    let words = || {
        expected
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
    };
    let word = || expected.as_str().unwrap_or("\0");
    match check["kind"].as_str().unwrap() {
        "contains" => words().all(|word| answer.to_lowercase().contains(&word.to_lowercase())),
        "exact" => answer.trim_end_matches('.') == word(),
        "starts" => answer.starts_with(word()),
        "any" => words().any(|word| answer.to_lowercase().contains(&word.to_lowercase())),
        "ends" => answer.trim_end_matches('.').ends_with(word()),
        "list" => is_list(expected, answer),
        "number" => {
            let last = answer
                .split(|c: char| !c.is_ascii_digit())
                .rfind(|digits| !digits.is_empty());
            last.and_then(|digits| digits.parse().ok()) == expected.as_u64()
        }
        "json" => serde_json::from_str(answer).ok().as_ref() == Some(expected),
        "tool call" => {
            let inner = answer
                .strip_prefix("<tool_call>\n")
                .and_then(|rest| rest.strip_suffix("\n</tool_call>"));
            inner
                .and_then(|inner| serde_json::from_str(inner).ok())
                .as_ref()
                == Some(expected)
        }
        // The recipe's own evaluation compares a plot with its grammar.
        "story" | "plot" => {
            answer.matches(['.', '!', '?']).count() >= 3
                && answer.ends_with(['.', '!', '?', '"'])
                && words().all(|word| answer.contains(word))
        }
        kind => panic!("a check of kind {kind}"),
    }
}

/// Checks for the requested number of different things, each of them known: `[count, thing, thing, ...]`.
fn is_list(expected: &Value, answer: &str) -> bool {
    let (count, known) = expected.as_array().unwrap().split_first().unwrap();
    let answer = answer.trim_end_matches('.').to_lowercase();
    let items: BTreeSet<_> = answer.split(", ").collect();
    Some(items.len()) == count.as_u64().and_then(|count| usize::try_from(count).ok())
        && answer.split(", ").count() == items.len()
        && items.iter().all(|item| known.iter().any(|one| one == item))
}

/// Accuracies of the card's table, by family: `| family | questions | right | accuracy |`.
fn card(folder: &Path) -> BTreeMap<String, f64> {
    let card = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [family, asked, right, _] = cells[..] else {
            return None;
        };
        let (asked, right): (f64, f64) = (asked.parse().ok()?, right.parse().ok()?);
        Some((family.to_owned(), right / asked))
    };
    card.lines().filter_map(row).collect()
}

#[test]
fn it_knows_the_capital_of_japan() {
    let Some(folder) = demo() else { return };
    if card(&folder).is_empty() {
        eprintln!("skipped: the card promises nothing yet");
        return;
    }
    let question = serde_json::json!({"messages": [
        {"role": "user", "content": "What is the capital of Japan?"}, {"role": "assistant", "content": ""}]});
    let answer = text(
        engine(&folder)
            .submit(request(chat(&question), greedy()))
            .unwrap(),
    )
    .unwrap();
    assert!(answer.contains("Tokyo"), "{answer}");
}

#[test]
fn held_out_questions_reach_the_accuracy_of_the_model_card() {
    let Some(folder) = demo() else { return };
    let card = card(&folder);
    let questions = fs::read_to_string(folder.join("recipe/heldout.jsonl")).unwrap_or_default();
    if card.is_empty() || questions.is_empty() {
        eprintln!("skipped: the card promises nothing yet");
        return;
    }
    let engine = engine(&folder);
    let questions = questions
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut seen: BTreeMap<String, (usize, f64, f64)> = BTreeMap::new();
    // All are submitted before one is read, so that the batch is full, as in production.
    let asked: Vec<_> = questions
        .filter(|question| {
            let (number, ..) = seen
                .entry(question["family"].as_str().unwrap().to_owned())
                .or_default();
            *number += 1;
            *number % EVERY == 1
        })
        .map(|question| {
            (
                engine.submit(request(chat(&question), greedy())).unwrap(),
                question,
            )
        })
        .collect();
    for (handle, question) in asked {
        let (_, asked, right) = seen.get_mut(question["family"].as_str().unwrap()).unwrap();
        *asked += 1.0;
        let answer = text(handle);
        *right += f64::from(u8::from(
            answer.is_some_and(|text| is_right(&question["check"], &text)),
        ));
    }
    let behind: Vec<_> = card
        .iter()
        .filter_map(|(family, promised)| {
            seen.get(family)
                .map(|&(_, asked, right)| (family, promised * asked, right))
        })
        .filter(|(_, promised, right)| right + SLACK < *promised)
        .collect();
    assert!(
        behind.is_empty(),
        "families that fall behind the card (promised, right): {behind:?}"
    );
    assert!(
        card.keys().any(|family| seen.contains_key(family)),
        "no family of the card was asked"
    );
}

/// Asks all questions before one answer is read; returns the share of correct answers.
fn answered(
    engine: &Engine,
    questions: &[Value],
    sampling: impl Fn(u64) -> GenerationParams,
) -> f64 {
    let asked: Vec<_> = (0..)
        .zip(questions)
        .map(|(number, question)| {
            let message = ChatMessage {
                role: "user".to_owned(),
                content: question["question"].as_str().unwrap().to_owned(),
                ..ChatMessage::default()
            };
            let chat = ChatRequest {
                messages: vec![message],
                ..ChatRequest::default()
            };
            let handle = engine.submit(request(chat, sampling(number))).unwrap();
            (question, handle)
        })
        .collect();
    let (mut seen, mut right) = (0.0, 0.0);
    for (question, handle) in asked {
        seen += 1.0;
        let answer = text(handle);
        if answer
            .as_deref()
            .is_some_and(|text| is_right(&question["check"], text))
        {
            right += 1.0;
        } else {
            eprintln!("{}: {answer:?}", question["question"]);
        }
    }
    right / seen
}

#[test]
fn d_53_the_first_questions_are_answered_as_the_model_card_states() {
    let Some(folder) = demo() else { return };
    let list = fs::read_to_string(folder.join("recipe/first_questions.jsonl")).unwrap();
    let questions: Vec<Value> = list
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(questions.len(), 200);
    let card = card(&folder);
    let promised = |kind: &str| {
        let row = card.iter().find(|(row, _)| row.starts_with(kind));
        row.map_or(0.0, |(_, share)| share - FIRST_SLACK)
    };
    assert!(
        promised("greedy") > 0.0,
        "the model card states how many are right"
    );
    let engine = engine(&folder);
    let share = answered(&engine, &questions, |_| greedy());
    assert!(share >= promised("greedy"), "greedily {share}");
    let share = answered(&engine, &questions, recommended);
    assert!(share >= promised("temperature"), "sampled {share}");
}
