//! A model whose output repeats itself, or is given; with a clock, its decode calls take time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::super::harness::TestClock;
use super::super::hooked_model::{HookedModel, ModelHooks};
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::ranking::mix;
use crate::scripted::{Config as Script, Scripted};

/// The EOG token of the scripted vocabulary.
pub(super) const END: Token = 257;

/// What follows a sequence.
pub(super) enum Output {
    /// One of so many letters or the end, with probabilities that depend on the last two tokens.
    Letters(u32),
    /// These tokens, then the end.
    Given(Vec<Token>),
    /// Those that belong to the first token of the prompt, then the end.
    ByFirst(HashMap<Token, Vec<Token>>),
}

impl Output {
    /// The logits after these tokens of a sequence with a prompt of so many.
    pub(super) fn logits(&self, tokens: &[Token], prompt: usize) -> Vec<f32> {
        let mut row = vec![f32::NEG_INFINITY; 258];
        match self {
            Self::Letters(count) => {
                let last = tokens.iter().rev().take(2);
                let key = last.fold(7, |key, &token| mix(key ^ u64::from(token)));
                for letter in 0..*count {
                    let noise = mix(key ^ u64::from(letter)) % 1_000;
                    row[(97 + letter) as usize] = noise as f32 / 200.0;
                }
                row[END as usize] = 0.0;
            }
            Self::Given(output) => only(output, tokens.len() - prompt, &mut row),
            Self::ByFirst(outputs) => only(&outputs[&tokens[0]], tokens.len() - prompt, &mut row),
        }
        row
    }
}

/// Leaves the token at this place of the output alone, behind it the end.
fn only(output: &[Token], place: usize, row: &mut Vec<f32>) {
    let next = *output.get(place).unwrap_or(&END) as usize;
    row.resize(row.len().max(next + 1), f32::NEG_INFINITY);
    row[next] = 0.0;
}

/// How long decode calls take, on the clock that they move.
#[derive(Clone)]
pub(super) struct Machine {
    pub(super) clock: TestClock,
    pub(super) takes: fn(usize) -> Duration,
}

/// The result of a decode call, by its number.
pub(super) type Failure = Box<dyn Fn(usize) -> Result<(), DecodeStop> + Send>;

/// A model with this output.
pub(super) type Parrot = HookedModel<ParrotHooks>;

pub(super) struct ParrotHooks {
    output: Output,
    /// What each slot holds, and the length of its prompt.
    slots: Vec<(Vec<Token>, usize)>,
    batch: Vec<BatchEntry>,
    row: Vec<f32>,
    machine: Option<Machine>,
    /// Cells that slots share are counted for each.
    pub(super) copies_count: bool,
    /// A decode call of more entries finds no room.
    pub(super) entries_max: usize,
    /// What becomes of a decode call, by its number.
    pub(super) fails: Option<Failure>,
    /// The sizes of the decode calls.
    pub(super) calls: Arc<Mutex<Vec<usize>>>,
}

pub(super) fn parrot(script: Script, output: Output, machine: Option<Machine>) -> Parrot {
    let hooks = ParrotHooks {
        output,
        slots: Vec::new(),
        batch: Vec::new(),
        row: Vec::new(),
        machine,
        copies_count: false,
        fails: None,
        entries_max: usize::MAX,
        calls: Arc::default(),
    };
    HookedModel::new(script, hooks)
}

impl ParrotHooks {
    fn held(&mut self, slot: SlotId) -> &mut Vec<Token> {
        &mut self.slots[slot as usize].0
    }
}

impl ModelHooks for ParrotHooks {
    fn open(&mut self, model: &mut Scripted, slot: SlotId, opening: &SlotPurpose<'_>) {
        model.open(slot, opening);
        let slots = model.capacity().slots as usize;
        self.slots.resize(slots, (Vec::new(), 0));
        self.slots[slot as usize] = (Vec::new(), opening.prompt.len());
    }

    fn fork(&mut self, model: &mut Scripted, from: SlotId, to: SlotId, tokens: u32) {
        model.fork(from, to, tokens);
        *self.held(to) = self.held(from)[..tokens as usize].to_vec();
    }

    fn truncate(&mut self, model: &mut Scripted, slot: SlotId, tokens: u32) {
        assert!(self.held(slot).len() >= tokens as usize);
        model.truncate(slot, tokens);
        self.held(slot).truncate(tokens as usize);
    }

    fn release(&mut self, model: &mut Scripted, slot: SlotId) {
        model.release(slot);
        self.held(slot).clear();
    }

    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        if batch.len() > self.entries_max {
            return Err(DecodeStop::Full);
        }
        if let Some(fails) = &self.fails {
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.push(batch.len());
            let call = calls.len() - 1;
            drop(calls);
            fails(call)?;
        } else {
            self.calls.lock().unwrap().push(batch.len());
        }
        let capacity = model.capacity();
        assert!(batch.len() <= capacity.batch_tokens as usize);
        let rows = batch.iter().filter(|entry| entry.row).count();
        assert!(rows <= capacity.rows as usize, "{rows} rows");
        for entry in batch {
            let held = self.held(entry.slot);
            assert_eq!(held.len(), entry.position as usize);
            held.push(entry.token);
        }
        let held: usize = self.slots.iter().map(|(tokens, _)| tokens.len()).sum();
        assert!(capacity.slots > 1 || held <= capacity.cells as usize);
        assert!(
            !self.copies_count || held <= capacity.cells as usize,
            "{held}"
        );
        self.batch = batch.to_vec();
        if let Some(machine) = &self.machine {
            let clock = &machine.clock;
            clock.go_to(clock.now() + (machine.takes)(batch.len()));
        }
        model.decode(batch, now)
    }

    fn row<'a>(&'a mut self, model: &'a mut Scripted, index: usize, _: Time) -> OutputRow<'a> {
        let entry = self.batch[index];
        assert!(entry.row);
        let (held, prompt) = &self.slots[entry.slot as usize];
        let tokens = &held[..=entry.position as usize];
        self.row = self.output.logits(tokens, *prompt);
        let vocabulary_tokens = model.info().vocabulary_tokens as usize;
        self.row.resize(vocabulary_tokens, f32::NEG_INFINITY);
        OutputRow::Logits(&mut self.row)
    }
}
