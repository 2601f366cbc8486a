//! Fuzz entry point: a foreign runtime that answers anything, and an engine that asks in any order.
//!
//! Invariants: an answer is read as results that are within their limits, one for each sequence that was asked for, or as
//! an error; one message is out at a time and lists no sequence twice; and at the end nothing is left (AI-853).

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::steer::{Appended, StepWaker, Token};
use sapwood_proto::time::Time;
use serde_json::{Value, json};

use super::reply::{
    CallResult, Reply, ReplyError, ResultLimits, StepResults, TokensReply, read_begun, read_step,
};
use super::request::MainRequest;
use super::rows::RowSource;
use super::table::{RemoteTable, Wakers};
use crate::fuzz::Choices;
use crate::host::{MidReturned, Returned};
use crate::module::Abi;

/// Runs `bytes` as what an engine asks and a runtime answers.
///
/// # Panics
/// If an invariant does not hold.
pub fn reply(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let setup = choices.byte();
    if setup >= 0xf0 {
        return others(choices.rest());
    }
    let dialect = if setup.is_multiple_of(2) {
        Abi::P1
    } else {
        Abi::P2
    };
    let mut play = Play::new(dialect, usize::from(setup / 2 % 4) + 1, &mut choices);
    while let Some(op) = choices.next_byte() {
        if !play.operate(op, &mut choices) {
            break;
        }
        play.look();
    }
    play.end();
}

/// Answers to what is not a step.
fn others(bytes: &[u8]) {
    let Ok(reply) = Reply::parse(bytes) else {
        return;
    };
    if let Ok(data) = reply.data {
        let _ = data.read::<TokensReply>();
        let (begun, _) = read_begun(data, LIMITS);
        if let Ok(Returned::Begun { prompt }) = begun {
            tokens(&prompt.expect("P2 repeats the prompt"));
        }
    }
}

const LIMITS: ResultLimits = ResultLimits {
    vocabulary: 40,
    forks: 4,
};

struct Silent;

impl StepWaker for Silent {
    fn wake(&self) {}
}

/// The region of masks: what the first bytes say, again and again.
struct Masks(Vec<u8>);

impl RowSource for Masks {
    fn bytes(&self, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        Some(self.0.get(offset..offset.checked_add(bytes)?)?.to_vec())
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

struct Play {
    table: RemoteTable,
    dialect: Abi,
    waker: Arc<dyn StepWaker>,
    masks: Masks,
    now: Time,
    /// The sequences that an engine steers by.
    ids: Vec<u64>,
    /// The request that waits for its answer.
    open: Option<MainRequest>,
}

impl Play {
    fn new(dialect: Abi, ops_max: usize, choices: &mut Choices<'_>) -> Self {
        let pattern = choices.word().to_le_bytes();
        let masks = pattern.into_iter().cycle().take(choices.below(4) * 160);
        Self {
            table: RemoteTable::new(dialect, ops_max, Arc::default()),
            dialect,
            waker: Arc::new(Silent),
            masks: Masks(masks.collect()),
            now: Time::from_millis(1_000),
            ids: Vec::new(),
            open: None,
        }
    }

    /// Returns whether the process still runs.
    fn operate(&mut self, op: u8, choices: &mut Choices<'_>) -> bool {
        let place = choices.below(self.ids.len().min(256));
        let id = self.ids.get(place).copied().unwrap_or(u64::MAX);
        match op % 12 {
            0 if self.ids.len() < 16 => {
                let waker = Arc::clone(&self.waker);
                let request = format!("r{}", self.ids.len());
                self.ids.push(self.table.insert(request, waker));
            }
            1 if self.ids.len() < 16 => {
                let forked = self.table.fork(id, choices.below(4) as u32);
                self.ids.extend(forked);
            }
            2 if self.dialect == Abi::P1 => self.table.ask_pre(id, self.now),
            2 | 3 => self.table.ask_mid(id, self.now),
            4 => {
                let token = choices.below(LIMITS.vocabulary) as Token;
                let tokens = &[token];
                let appended = Appended {
                    backtrack: choices.below(3) as u32,
                    tokens,
                    sampled: choices.flag().then_some(token),
                };
                let _ = self.table.happened(id, appended);
            }
            5 => {
                self.table.free(id, self.now);
                self.ids.retain(|other| *other != id);
            }
            6 => drop(self.table.flush()),
            7 => {
                let answer = self.structured(choices);
                return self.answer(&answer);
            }
            8 => {
                let text = choices.bytes();
                return self.answer(text);
            }
            9 => {
                // The data of an answer as the bytes say.
                let data = String::from_utf8_lossy(choices.bytes());
                let answer = format!("{{\"type\":\"ok\",\"data\":{data}}}");
                return self.answer(answer.as_bytes());
            }
            10 => self.table.watch(id),
            _ => self.now = self.now + Duration::from_millis(choices.byte().into()),
        }
        true
    }

    /// What the engine does between steps.
    fn look(&mut self) {
        for &id in &self.ids {
            let results = [self.table.poll_pre(id), self.table.poll_mid(id)];
            results.iter().flatten().for_each(within);
            let _ = self.table.take_report(id);
        }
        let _ = self.table.take_abandoned();
        if let Some(request) = self.table.next_request(self.now) {
            assert!(self.open.is_none(), "one at a time");
            if !matches!(request, MainRequest::PostPre { .. }) {
                let mut ids = request.ids();
                ids.sort_unstable();
                assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
            }
            self.open = Some(request);
        }
    }

    /// As the exchange thread does. Returns whether the runtime may go on.
    fn answer(&mut self, message: &[u8]) -> bool {
        let Some(request) = self.open.take() else {
            return true;
        };
        let Ok(reply) = Reply::parse(message) else {
            return false;
        };
        match reply.data {
            Err(error) => self.refuse(&error),
            Ok(data) => {
                let live = self.table.sent_live().to_vec();
                let read = read_step(&request, &live, data, &self.masks, LIMITS);
                let Ok(results) = read else {
                    return false;
                };
                check(&request, &live, &results);
                wake(self.table.take_results(results, self.now));
                true
            }
        }
    }

    fn refuse(&mut self, error: &ReplyError) -> bool {
        let (is_somebodys, woken) = self.table.refused(error, self.now);
        wake(woken);
        is_somebodys
    }

    /// An answer of the right shape, with results of any kind.
    fn structured(&self, choices: &mut Choices<'_>) -> Vec<u8> {
        let Some(request) = &self.open else {
            return Vec::new();
        };
        let ids = [request.ids(), self.table.sent_live().to_vec()].concat();
        let results = |choices: &mut Choices<'_>| -> Value {
            let results = ids.iter().filter_map(|id| {
                let result = result(choices)?;
                Some((id.to_string(), result))
            });
            Value::Object(results.collect())
        };
        let data = match self.dialect {
            Abi::P1 => json!({
                "seqs": results(choices),
                "post_seqs": results(choices),
                "pre_seqs": results(choices),
            }),
            Abi::P2 => json!({
                "seqs": results(choices),
                "dtype": (["f32", "f16", "bf16", "bool", "f64"][choices.below(5)]),
                "first_mask_byte_offset": 16 * choices.below(3),
                "mask_num_bytes": ([160, 80, 8, 5, 0][choices.below(5)]),
                "mask_num_elts": ([40, 64, 39][choices.below(3)]),
                "num_masks": choices.below(4),
            }),
        };
        json!({"type": "ok", "data": data}).to_string().into_bytes()
    }

    fn end(mut self) {
        for id in std::mem::take(&mut self.ids) {
            self.table.free(id, self.now);
        }
        let lost = super::epoch::lost();
        wake(self.table.lose(lost));
        self.table.free(0, self.now);
        assert!(self.table.is_empty(), "a sequence is left");
    }
}

/// A result of one sequence, or none.
fn result(choices: &mut Choices<'_>) -> Option<Value> {
    let token = choices.below(LIMITS.vocabulary + 1);
    let result = match choices.below(10) {
        0 => return None,
        1 => json!(null),
        2 => json!({"suspend": false, "num_forks": choices.below(6), "ff_tokens": []}),
        3 => json!({"suspend": choices.flag(), "num_forks": 1, "ff_tokens": [token]}),
        4 => json!({"suspend": true, "num_forks": 1, "ff_tokens": []}),
        5 => json!({"stop": choices.flag()}),
        6 => json!({"ff_tokens": [token], "backtrack": choices.below(4)}),
        7 => {
            let splice = json!({"ff_tokens": [token], "backtrack": choices.below(4)});
            json!({"branches": vec![json!({"splices": [splice]}); choices.below(6)]})
        }
        8 => json!({"branches": [{"sample_mask": choices.below(5), "temperature": 0.5}]}),
        _ => json!("?"),
    };
    let logs = ["", "⏲ timeout [deadline: 4ms]", "printed"][choices.below(3)];
    let error = ["", "", "", "Worker: timeout", "Error (mid): x"][choices.below(5)];
    Some(json!({"error": error, "logs": logs, "result": result}))
}

fn wake(woken: Wakers) {
    for waker in woken {
        waker.wake();
    }
}

/// Checks that there is one result for each sequence that was asked for, and no other.
fn check(request: &MainRequest, live: &[u64], results: &StepResults) {
    let ids: Vec<u64> = results.mid.iter().map(|(id, _)| *id).collect();
    match request {
        MainRequest::PostPre { .. } => assert!(ids.is_empty()),
        _ => assert_eq!(ids, request.ids()),
    }
    assert!(results.post.iter().all(|(id, _)| live.contains(id)));
    assert!(results.pre.iter().all(|(id, _)| live.contains(id)));
    let pre = results.pre.iter().filter_map(|(_, result)| result.as_ref());
    let others = results.mid.iter().chain(&results.post);
    others.map(|(_, result)| result).chain(pre).for_each(within);
}

/// Checks that a result is within the limits.
fn within(result: &CallResult) {
    match result {
        Ok(Returned::Pre {
            num_forks,
            ff_tokens,
            ..
        }) => {
            assert!(*num_forks <= LIMITS.forks);
            tokens(ff_tokens);
        }
        Ok(Returned::Mid(MidReturned::Splice { ff_tokens, .. })) => tokens(ff_tokens),
        Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) => {
            assert_eq!(mask.vocabulary(), LIMITS.vocabulary);
        }
        Ok(Returned::Branches(branches)) => {
            assert!(branches.len() <= LIMITS.forks as usize);
            for branch in branches {
                let vocabulary = branch.mask.as_ref().map(|mask| mask.vocabulary());
                assert!(vocabulary.is_none_or(|it| it == LIMITS.vocabulary));
                assert!(
                    branch
                        .temperature
                        .is_none_or(|it| it.is_finite() && it >= 0.0)
                );
                for splice in &branch.splices {
                    tokens(&splice.when_sampled);
                    tokens(&splice.ff_tokens);
                }
            }
        }
        Ok(_) | Err(_) => {}
    }
}

fn tokens(tokens: &[Token]) {
    assert!(
        tokens
            .iter()
            .all(|token| (*token as usize) < LIMITS.vocabulary)
    );
}
