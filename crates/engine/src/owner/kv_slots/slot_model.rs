//! [`SlotModel`]: the model behind the slots, called so that a panic costs the requests of the call alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use crate::adapters::{AdapterSet, DEFAULT_ADAPTERS, default_scales};
use crate::api::{EngineError, ModelInfo};
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, ThreadNumbers};
use crate::owner::checkpoints::Checkpoint;
use crate::owner::sequence::RunningSequence;
use crate::stats::Counter;

/// A model with the adapters that it computes with, and which lengths its slots can have.
pub(in crate::owner) struct SlotModel {
    model: Box<dyn Model>,
    /// Whether it can shorten a slot.
    truncates: bool,
    /// The scales of the adapters that it applies by default.
    default_scales: Vec<f32>,
    /// The key of the adapters with which it computes; `None` if that is not known.
    adapters: Option<u64>,
}

impl SlotModel {
    pub(super) fn new(model: Box<dyn Model>) -> Self {
        let info = model.info();
        Self {
            truncates: info.truncates,
            default_scales: default_scales(&info.adapters),
            adapters: Some(DEFAULT_ADAPTERS),
            model,
        }
    }

    pub(in crate::owner) fn info(&self) -> ModelInfo {
        self.model.info()
    }

    /// Returns the present numbers of threads, if it computes with threads.
    pub(in crate::owner) fn threads(&self) -> Option<ThreadNumbers> {
        self.model.threads()
    }

    /// The model itself. Its slots are changed by [`super::KvSlots`] only.
    pub(super) fn calls(&mut self) -> &mut dyn Model {
        &mut *self.model
    }

    /// What the model tells of itself and its slots.
    pub(super) fn facts(&self) -> &dyn Model {
        &*self.model
    }

    /// Returns whether the model can shorten slots.
    pub(super) fn truncates(&self) -> bool {
        self.truncates
    }

    /// Returns whether the model can go on after so many tokens of a slot (D-48).
    pub(super) fn can_resume(&self, slot: SlotId, tokens: usize) -> bool {
        u32::try_from(tokens).is_ok_and(|tokens| self.model.can_resume(slot, tokens))
    }

    /// Copies the first tokens of a slot. Returns false if the copy cannot be used.
    pub(super) fn fork(&mut self, from: SlotId, to: SlotId, tokens: usize) -> bool {
        self.model.fork(from, to, length(tokens));
        self.model.finish_fork(to, length(tokens))
    }

    /// Rewinds a slot to a checkpoint, and then to `tokens` tokens. Returns false if it cannot be used then.
    pub(super) fn rewind(&mut self, slot: SlotId, checkpoint: &Checkpoint, tokens: usize) -> bool {
        let (at, tokens) = (length(checkpoint.tokens), length(tokens));
        let state = checkpoint.prefix.state.whole();
        let rewound = state.is_some_and(|state| self.model.rewind(slot, &state, at))
            && (at == tokens || self.model.can_resume(slot, tokens));
        if rewound && at > tokens {
            self.model.truncate(slot, tokens);
        }
        rewound
    }

    /// Truncates a slot. Returns false, with nothing changed, if the model cannot go on from there.
    pub(super) fn truncate(&mut self, slot: SlotId, tokens: usize) -> bool {
        let can = self.truncates && self.can_resume(slot, tokens);
        if can {
            self.model.truncate(slot, length(tokens));
        }
        can
    }

    /// Returns how much of the last decode call was waiting for other models.
    pub(in crate::owner) fn waited(&self) -> Duration {
        self.model.waited()
    }

    /// Decodes a batch with these adapters; `None`: those that the model applies by default. A panic of the model is a
    /// failure of the batch.
    pub(in crate::owner) fn decode(
        &mut self,
        batch: &[BatchEntry],
        adapters: Option<&AdapterSet>,
        now: Time,
        panics: &Counter,
    ) -> Result<(), DecodeStop> {
        let message = "the model failed in this step";
        let key = adapters.map_or(DEFAULT_ADAPTERS, AdapterSet::key);
        // Not known until a call has computed: llama.cpp may fail where it lays out the graph for them.
        let before = self.adapters.take();
        let decoded = guarded(panics, message, || {
            if before != Some(key) {
                let scales = adapters.map_or(&*self.default_scales, AdapterSet::scales);
                self.model.set_adapters(scales);
            }
            self.model.decode(batch, now)
        });
        if matches!(decoded, Ok(Ok(()))) {
            self.adapters = Some(key);
        }
        decoded.unwrap_or_else(|error| Err(DecodeStop::Failed(error)))
    }

    /// Returns the output row of an entry of the last batch. A panic of the model is a failure of that request.
    #[inline]
    pub(in crate::owner) fn row(
        &mut self,
        index: usize,
        now: Time,
        panics: &Counter,
    ) -> OutputRow<'_> {
        let message = "the model failed on this request";
        let row = guarded(panics, message, || self.model.row(index, now));
        row.unwrap_or_else(OutputRow::Failed)
    }

    /// Returns the logits of several entries of the last batch; none if the model gives its rows one at a time only
    /// ([`Model::rows`]).
    pub(in crate::owner) fn rows(
        &mut self,
        indexes: &[usize],
        panics: &Counter,
    ) -> Vec<Option<&mut [f32]>> {
        let rows = guarded(panics, "the model failed on its rows", || {
            self.model.rows(indexes)
        });
        // Each is then asked for alone, so that a panic ends the request concerned.
        rows.unwrap_or_default()
    }

    /// Returns whether the next token of a sequence is reported in one event with the token that follows it
    /// ([`Model::joins`]).
    pub(in crate::owner) fn joins(&self, sequence: &RunningSequence) -> bool {
        let output = sequence.tokens.len() - sequence.prompt_tokens;
        let slot = sequence.slot;
        slot.is_some_and(|slot| self.model.joins(slot, output))
    }
}

/// A slot holds fewer tokens than the context, which is a u32.
pub(super) fn length(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Calls the model. Its panic is counted and becomes an error.
fn guarded<R>(panics: &Counter, message: &str, call: impl FnOnce() -> R) -> Result<R, EngineError> {
    // The model is used again after a panic: the requests concerned fail and their slots are released, which `Model`
    // demands to work then. Nothing else of the owner is borrowed in the call.
    catch_unwind(AssertUnwindSafe(call)).map_err(|_panic| {
        panics.add(1);
        EngineError::internal(ErrorReason::MODEL_PANIC, message)
    })
}
