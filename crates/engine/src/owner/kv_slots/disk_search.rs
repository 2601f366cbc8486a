//! [`DiskSearch`]: how much of a prompt there would be with what the disk has.

use sapwood_proto::steer::Token;

use super::disk::{DiskGain, SlotDisk};
use super::slot_model::SlotModel;
use super::tiers::{RESTORED_SHARE, SavedTiers};
use crate::prefix_cache::PrefixCache;
use crate::prefix_entry::EntryKind;

/// Looks for files that would help a prompt, beside what slots and memory have.
pub(super) struct DiskSearch<'a> {
    pub(super) disk: &'a SlotDisk,
    pub(super) tiers: &'a SavedTiers,
    pub(super) cache: &'a PrefixCache,
    pub(super) model: &'a SlotModel,
    pub(super) prefix_min: usize,
    pub(super) scope: u64,
}

impl DiskSearch<'_> {
    /// Returns the best of all files. `tokens`: the prompt, whose last token is always computed.
    pub(super) fn gain(&self, tokens: &[Token]) -> DiskGain {
        let usable = tokens.split_last().map_or(tokens, |(_, rest)| rest);
        let mut gains: Vec<DiskGain> = self.prefix(usable).into_iter().collect();
        if self.tiers.checkpoints.is_on() {
            let in_memory = self.tiers.store.find(self.scope, usable);
            let saved = in_memory.and_then(|found| {
                let tokens = self.tiers.store.tokens(found.id)?;
                self.checkpoint(tokens, found.tokens)
            });
            gains.extend(saved);
            gains.extend(self.checkpoint_of_slot(tokens));
        }
        gains
            .into_iter()
            .max_by_key(|gain| gain.tokens)
            .unwrap_or_default()
    }

    /// With a prefix, and perhaps a checkpoint of it.
    fn prefix(&self, usable: &[Token]) -> Option<DiskGain> {
        let tier = &self.disk.tier;
        let found = tier.find(EntryKind::Prefix, self.scope, usable)?;
        let is_useful = found.tokens >= found.saved / RESTORED_SHARE
            && found.saved <= self.cache.cells().room();
        if !is_useful {
            return None;
        }
        let prefix = Some(found.id);
        if self.tiers.restores_in_part || found.tokens == found.saved {
            return Some(DiskGain {
                tokens: found.tokens,
                prefix,
                checkpoint: None,
            });
        }
        let tokens = tier.tokens(EntryKind::Prefix, found.id);
        let reach = self
            .tiers
            .checkpoints
            .reach(self.scope, tokens, found.tokens);
        let in_memory = DiskGain {
            tokens: reach,
            ..DiskGain::default()
        };
        let on_disk = self.checkpoint(tokens, found.tokens);
        let best = on_disk.filter(|it| it.tokens > in_memory.tokens);
        Some(DiskGain {
            prefix,
            ..best.unwrap_or(in_memory)
        })
    }

    /// With a checkpoint for a slot.
    fn checkpoint_of_slot(&self, tokens: &[Token]) -> Option<DiskGain> {
        let resumes = |slot, tokens| self.model.can_resume(slot, tokens);
        let reach = |tokens: &[Token], common| {
            let found = self.checkpoint(tokens, common);
            found.map_or(0, |found| found.tokens)
        };
        let found = self
            .cache
            .find(self.scope, tokens, self.prefix_min, resumes, reach)?;
        let (_, tokens) = self.cache.contents(found.slot);
        let rewinds = found.rewinds.then_some(found.tokens)?;
        self.checkpoint(tokens, rewinds)
    }

    /// With the checkpoint by which a slot with these tokens keeps most of the common ones.
    fn checkpoint(&self, tokens: &[Token], common: usize) -> Option<DiskGain> {
        let until = self.tiers.checkpoints.until(common)?.min(tokens.len());
        let tier = &self.disk.tier;
        let found = tier.find(EntryKind::Checkpoint, self.scope, &tokens[..until])?;
        Some(DiskGain {
            tokens: found.tokens.min(common),
            prefix: None,
            checkpoint: Some(found.id),
        })
    }
}
