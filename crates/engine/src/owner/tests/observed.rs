//! [`ObservedModel`]: a scripted model whose decode calls a test sees.

use sapwood_proto::time::Time;

use crate::api::{ModelInfo, SharedVocabulary};
use crate::model::{BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::scripted::{Config, Scripted};

/// A scripted model that calls `on_decode` with the batch after each decode call.
pub(super) struct ObservedModel<F> {
    model: Scripted,
    on_decode: F,
}

impl<F: FnMut(&[BatchEntry]) + Send> ObservedModel<F> {
    pub(super) fn new(on_decode: F) -> Self {
        Self {
            model: Scripted::new(Config::default()).unwrap(),
            on_decode,
        }
    }
}

impl<F: FnMut(&[BatchEntry]) + Send> Model for ObservedModel<F> {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }
    fn vocabulary(&self) -> SharedVocabulary {
        self.model.vocabulary()
    }
    fn capacity(&self) -> Capacity {
        self.model.capacity()
    }
    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>) {
        self.model.open(slot, opening);
    }
    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        self.model.fork(from, to, tokens);
    }
    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        self.model.truncate(slot, tokens);
    }
    fn release(&mut self, slot: SlotId) {
        self.model.release(slot);
    }
    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop> {
        let done = self.model.decode(batch, now);
        (self.on_decode)(batch);
        done
    }
    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_> {
        self.model.row(index, now)
    }
}
