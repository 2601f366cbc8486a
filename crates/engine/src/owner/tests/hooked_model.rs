//! [`HookedModel`]: a scripted model of which a test observes or replaces some calls.

use std::time::Duration;

use sapwood_proto::time::Time;

use crate::api::{ModelInfo, SharedVocabulary};
use crate::model::{
    BatchEntry, Capacity, CheckpointTerms, DecodeStop, Interrupt, Model, OutputRow, RowFinder,
    SlotId, SlotPurpose, WarmTimes,
};
use crate::scripted::{Config as Script, Scripted};

/// What a test makes of the calls of a [`HookedModel`]. Each hook gets the scripted model, and forwards the call to it by
/// default.
pub(in crate::owner) trait ModelHooks: Send {
    fn capacity(&self, model: &Scripted) -> Capacity {
        model.capacity()
    }

    fn interrupt(&mut self, model: &mut Scripted, flag: Interrupt) {
        model.interrupt(flag);
    }

    fn open(&mut self, model: &mut Scripted, slot: SlotId, opening: &SlotPurpose<'_>) {
        model.open(slot, opening);
    }

    fn fork(&mut self, model: &mut Scripted, from: SlotId, to: SlotId, tokens: u32) {
        model.fork(from, to, tokens);
    }

    fn finish_fork(&mut self, model: &mut Scripted, slot: SlotId, tokens: u32) -> bool {
        model.finish_fork(slot, tokens)
    }

    fn forks_later(&self, model: &Scripted) -> bool {
        model.forks_later()
    }

    fn is_copied_later(&self, model: &Scripted, slot: SlotId) -> bool {
        model.is_copied_later(slot)
    }

    fn fork_bytes(&self, model: &Scripted, from: SlotId) -> usize {
        model.fork_bytes(from)
    }

    fn truncate(&mut self, model: &mut Scripted, slot: SlotId, tokens: u32) {
        model.truncate(slot, tokens);
    }

    fn set_adapters(&mut self, model: &mut Scripted, scales: &[f32]) {
        model.set_adapters(scales);
    }

    fn release(&mut self, model: &mut Scripted, slot: SlotId) {
        model.release(slot);
    }

    fn idle_cells_max(&self, model: &Scripted) -> usize {
        model.idle_cells_max()
    }

    fn saved_size(&mut self, model: &mut Scripted, slot: SlotId) -> usize {
        model.saved_size(slot)
    }

    fn rewind(
        &mut self,
        model: &mut Scripted,
        slot: SlotId,
        checkpoint: &[u8],
        tokens: u32,
    ) -> bool {
        model.rewind(slot, checkpoint, tokens)
    }

    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        model.decode(batch, now)
    }

    fn waited(&self, model: &Scripted) -> Duration {
        model.waited()
    }

    fn row<'a>(&'a mut self, model: &'a mut Scripted, index: usize, now: Time) -> OutputRow<'a> {
        model.row(index, now)
    }

    fn rows<'a>(
        &'a mut self,
        model: &'a mut Scripted,
        indexes: &[usize],
    ) -> Vec<Option<&'a mut [f32]>> {
        model.rows(indexes)
    }
}

/// A scripted model whose calls go through `hooks`.
pub(in crate::owner) struct HookedModel<H> {
    model: Scripted,
    pub(in crate::owner) hooks: H,
}

impl<H: ModelHooks> HookedModel<H> {
    pub(in crate::owner) fn new(script: Script, hooks: H) -> Self {
        Self {
            model: Scripted::new(script).unwrap(),
            hooks,
        }
    }
}

/// Calls `on_decode` with the batch after each decode call.
pub(super) struct OnDecode<F>(pub(super) F);

impl<F: FnMut(&[BatchEntry]) + Send> ModelHooks for OnDecode<F> {
    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        let done = model.decode(batch, now);
        (self.0)(batch);
        done
    }
}

/// Every method of [`Model`], those with a default too: a missing one would silently turn a feature off.
impl<H: ModelHooks> Model for HookedModel<H> {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        self.model.vocabulary()
    }

    fn capacity(&self) -> Capacity {
        self.hooks.capacity(&self.model)
    }

    fn warm_times(&self) -> Option<WarmTimes> {
        self.model.warm_times()
    }

    fn interrupt(&mut self, flag: Interrupt) {
        self.hooks.interrupt(&mut self.model, flag);
    }

    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>) {
        self.hooks.open(&mut self.model, slot, opening);
    }

    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        self.hooks.fork(&mut self.model, from, to, tokens);
    }

    fn finish_fork(&mut self, slot: SlotId, tokens: u32) -> bool {
        self.hooks.finish_fork(&mut self.model, slot, tokens)
    }

    fn forks_later(&self) -> bool {
        self.hooks.forks_later(&self.model)
    }

    fn is_copied_later(&self, slot: SlotId) -> bool {
        self.hooks.is_copied_later(&self.model, slot)
    }

    fn fork_bytes(&self, from: SlotId) -> usize {
        self.hooks.fork_bytes(&self.model, from)
    }

    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        self.hooks.truncate(&mut self.model, slot, tokens);
    }

    fn can_resume(&self, slot: SlotId, tokens: u32) -> bool {
        self.model.can_resume(slot, tokens)
    }

    fn set_adapters(&mut self, scales: &[f32]) {
        self.hooks.set_adapters(&mut self.model, scales);
    }

    fn release(&mut self, slot: SlotId) {
        self.hooks.release(&mut self.model, slot);
    }

    fn idle_cells_max(&self) -> usize {
        self.hooks.idle_cells_max(&self.model)
    }

    fn saved_bytes_max(&self) -> usize {
        self.model.saved_bytes_max()
    }

    fn restores_in_part(&self) -> bool {
        self.model.restores_in_part()
    }

    fn saved_size(&mut self, slot: SlotId) -> usize {
        self.hooks.saved_size(&mut self.model, slot)
    }

    fn save(&mut self, slot: SlotId) -> Option<Vec<u8>> {
        self.model.save(slot)
    }

    fn row_finder(&self) -> Option<RowFinder> {
        self.model.row_finder()
    }

    fn saved_identity(&self) -> Option<String> {
        self.model.saved_identity()
    }

    fn restore(&mut self, slot: SlotId, state: &[u8], tokens: u32) -> bool {
        self.model.restore(slot, state, tokens)
    }

    fn checkpoint_terms(&self) -> Option<CheckpointTerms> {
        self.model.checkpoint_terms()
    }

    fn checkpoint_size(&mut self, slot: SlotId) -> usize {
        self.model.checkpoint_size(slot)
    }

    fn checkpoint(&mut self, slot: SlotId) -> Option<Vec<u8>> {
        self.model.checkpoint(slot)
    }

    fn rewind(&mut self, slot: SlotId, checkpoint: &[u8], tokens: u32) -> bool {
        self.hooks.rewind(&mut self.model, slot, checkpoint, tokens)
    }

    fn waited(&self) -> Duration {
        self.hooks.waited(&self.model)
    }

    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop> {
        self.hooks.decode(&mut self.model, batch, now)
    }

    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_> {
        self.hooks.row(&mut self.model, index, now)
    }

    fn rows(&mut self, indexes: &[usize]) -> Vec<Option<&mut [f32]>> {
        self.hooks.rows(&mut self.model, indexes)
    }

    fn joins(&self, slot: SlotId, output: usize) -> bool {
        self.model.joins(slot, output)
    }
}
