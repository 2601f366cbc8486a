//! The slots' use of the disk ([`crate::prefix_disk`]): what leaves the memory is offered to it, and what a prompt begins with is
//! read back to the memory before the prompt gets its slot.
//!
//! Nothing here waits. A sequence for which something is read is passed over until it is there, for as long as computing what is
//! read would take: at worst it starts twice as late as without a disk.

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::{FoundPrefix, KvSlots, RESTORED_SHARE, RESTORED_TOKENS_MIN};
use crate::config::PrefixDiskConfig;
use crate::outbox::OwnerWaker;
use crate::prefix_disk::{DiskTerms, DiskTier, DiskWait, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_folder::{PrefixDisk, PrefixFolder};
use crate::prefix_store::{PrefixStore, SavedId};
use crate::stats::EngineStats;

/// A sequence waits no longer for the disk, whatever its prompt takes.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Sequences wait for the list of files no longer than this after the first step: it says whether there is anything to wait for.
const OPENING_MAX: Duration = Duration::from_millis(250);

/// How long the end of an engine may wait for the disk. `docker stop` kills the process after 10 s.
const END_MAX: Duration = Duration::from_secs(8);

/// The disk of the slots of a model.
#[derive(Debug)]
pub(super) struct SlotDisk {
    pub(super) tier: DiskTier,
    /// When sequences stop to wait.
    deadlines: Vec<Time>,
    /// What a prompt token takes; `None` if that is not known.
    token_time: Option<Duration>,
    /// When the first step was made.
    began: Option<Time>,
}

/// What a sequence waits for, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::owner) struct DiskRead {
    pub(in crate::owner) wait: DiskWait,
    pub(in crate::owner) until: Time,
}

/// How much of a prompt there would be if something were read.
#[derive(Clone, Copy, Debug, Default)]
struct DiskGain {
    tokens: usize,
    prefix: Option<SavedId>,
    checkpoint: Option<SavedId>,
}

impl KvSlots {
    /// Starts to look for what an earlier engine of this model has saved. Without an identity of the model, or if nothing is
    /// saved in memory, there is no disk.
    pub(in crate::owner) fn open_disk(
        &mut self,
        config: &PrefixDiskConfig,
        waker: Arc<OwnerWaker>,
    ) {
        let folder = PrefixFolder::new(config.folder.clone());
        self.start_disk(Arc::new(folder), config.bytes, waker);
    }

    pub(in crate::owner) fn start_disk(
        &mut self,
        disk: Arc<dyn PrefixDisk>,
        bytes: u64,
        waker: Arc<OwnerWaker>,
    ) {
        let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        if self.store.is_off() || limit == 0 {
            return;
        }
        let Some(identity) = self.model.saved_identity() else {
            return;
        };
        let terms = DiskTerms {
            identity,
            limit,
            partial: self.store.is_partial(),
            checkpoints: self.checkpoints.is_on(),
            tokens_max: self.info().context_tokens as usize,
            state_max: self.store.limit(),
        };
        match DiskTier::start(disk, terms, Arc::new(move || waker.wake())) {
            Ok(tier) => {
                self.disk = Some(SlotDisk {
                    tier,
                    deadlines: Vec::new(),
                    token_time: None,
                    began: None,
                });
            }
            Err(error) => tracing::warn!(%error, "cached prefixes are not kept on the disk"),
        }
    }

    /// Takes what was read since the last step. `token_time`: what a prompt token takes.
    pub(in crate::owner) fn poll_disk(
        &mut self,
        stats: &EngineStats,
        token_time: Option<Duration>,
        now: Time,
    ) {
        let Some(disk) = &mut self.disk else { return };
        disk.token_time = token_time;
        disk.began.get_or_insert(now);
        let arrived = disk.tier.poll(stats, now);
        self.keep(arrived);
    }

    /// Adds entries of the disk to the memory.
    fn keep(&mut self, arrived: Vec<SavedEntry>) {
        for SavedEntry {
            kind,
            scope,
            prefix,
        } in arrived
        {
            self.memory_mut(kind).insert_shared(scope, prefix);
        }
        self.offer_evicted();
    }

    fn memory_mut(&mut self, kind: EntryKind) -> &mut PrefixStore {
        match kind {
            EntryKind::Prefix => &mut self.store,
            EntryKind::Checkpoint => self.checkpoints.store_mut(),
        }
    }

    /// Offers what was evicted from memory to the disk.
    pub(super) fn offer_evicted(&mut self) {
        for kind in EntryKind::ALL {
            let evicted = self.memory_mut(kind).take_evicted();
            let Some(disk) = &mut self.disk else { continue };
            for evicted in evicted.into_iter().filter(|it| !it.superseded) {
                disk.tier.offer(SavedEntry {
                    kind,
                    scope: evicted.scope,
                    prefix: evicted.prefix,
                });
            }
        }
    }

    /// Offers all of the memory to the disk, the most valuable first. What finds no room in the queue is lost.
    pub(super) fn offer_all(&mut self) {
        for kind in EntryKind::ALL {
            let entries: Vec<_> = self.memory_mut(kind).by_value().rev().collect();
            let Some(disk) = &mut self.disk else { continue };
            for (scope, prefix) in entries {
                disk.tier.offer(SavedEntry {
                    kind,
                    scope,
                    prefix,
                });
            }
        }
    }

    /// Reads nothing more that no prompt asks for: the memory is needed otherwise.
    pub(super) fn stop_reading_ahead(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.tier.stop_reading_ahead();
        }
    }

    /// Starts to read what a prompt begins with, if that is quicker than computing it and not in memory. Returns what to wait
    /// for; `None`: nothing. `limit`: until when it waits at most, if it has waited before.
    pub(in crate::owner) fn read_from_disk(
        &mut self,
        scope: u64,
        tokens: &[Token],
        now: Time,
        limit: Option<Time>,
    ) -> Option<DiskRead> {
        let disk = self.disk.as_ref()?;
        let opened_by = disk.began.unwrap_or(now) + OPENING_MAX;
        let is_opening = disk.tier.is_opening();
        if is_opening && now >= opened_by {
            return None;
        }
        let usable = tokens.split_last().map_or(tokens, |(_, rest)| rest);
        let there = match self.find(scope, tokens) {
            Some(FoundPrefix::Slot(found)) => found.tokens,
            Some(FoundPrefix::Saved(found)) => found.tokens,
            None => 0,
        };
        let gain = match is_opening {
            true => DiskGain {
                tokens: usable.len(),
                ..DiskGain::default()
            },
            false => self.gain(disk, scope, tokens, usable),
        };
        if gain.tokens < self.prefix_min.max(there + RESTORED_TOKENS_MIN) {
            return None;
        }
        let tokens = u32::try_from(gain.tokens - there).unwrap_or(u32::MAX);
        let computing = disk.token_time.map(|time| time.saturating_mul(tokens));
        let wait = self.begin_read(gain, computing)?;
        let until = now + computing.unwrap_or(WAIT_MAX).min(WAIT_MAX);
        let until = limit.map_or(until, |limit| limit.min(until));
        let until = match is_opening {
            true => until.min(opened_by),
            false => until,
        };
        if let Some(disk) = &mut self.disk {
            disk.deadlines.push(until);
        }
        Some(DiskRead { wait, until })
    }

    fn begin_read(&mut self, gain: DiskGain, computing: Option<Duration>) -> Option<DiskWait> {
        let disk = self.disk.as_mut()?;
        if disk.tier.is_opening() {
            return Some(DiskWait::Opening);
        }
        let prefix = gain.prefix.map(|id| (EntryKind::Prefix, id));
        let checkpoint = gain.checkpoint.map(|id| (EntryKind::Checkpoint, id));
        let wanted: Vec<_> = prefix.into_iter().chain(checkpoint).collect();
        let reading = disk.tier.time_to_read(&wanted);
        if computing.is_some_and(|computing| reading >= computing) {
            disk.tier.was_too_slow();
            return None;
        }
        let mut files = [None; 2];
        for (file, (kind, id)) in files.iter_mut().zip(wanted) {
            *file = Some(disk.tier.read(kind, id)?);
        }
        // What was not written yet is there at once.
        let arrived = disk.tier.take_arrived();
        let wait = DiskWait::Files(files);
        let is_pending = disk.tier.is_pending(wait);
        self.keep(arrived);
        is_pending.then_some(wait)
    }

    /// Finds how much of a prompt there would be with what the disk has.
    fn gain(&self, disk: &SlotDisk, scope: u64, tokens: &[Token], usable: &[Token]) -> DiskGain {
        let of_prefix = || self.gain_of_prefix(disk, scope, usable);
        let mut gains: Vec<DiskGain> = of_prefix().into_iter().collect();
        if self.checkpoints.is_on() {
            let in_memory = self.store.find(scope, usable);
            let saved = in_memory.and_then(|found| {
                let tokens = self.store.tokens(found.id)?;
                self.checkpoint_on_disk(disk, scope, tokens, found.tokens)
            });
            gains.extend(saved);
            gains.extend(self.gain_of_slot(disk, scope, tokens));
        }
        gains
            .into_iter()
            .max_by_key(|gain| gain.tokens)
            .unwrap_or_default()
    }

    /// With a prefix of the disk, and perhaps a checkpoint of it.
    fn gain_of_prefix(&self, disk: &SlotDisk, scope: u64, usable: &[Token]) -> Option<DiskGain> {
        let found = disk.tier.find(EntryKind::Prefix, scope, usable)?;
        let is_useful =
            found.tokens >= found.saved / RESTORED_SHARE && found.saved <= self.cache.room();
        if !is_useful {
            return None;
        }
        let prefix = Some(found.id);
        if self.restores_in_part || found.tokens == found.saved {
            return Some(DiskGain {
                tokens: found.tokens,
                prefix,
                checkpoint: None,
            });
        }
        let tokens = disk.tier.tokens(EntryKind::Prefix, found.id);
        let in_memory = DiskGain {
            tokens: self.checkpoints.reach(scope, tokens, found.tokens),
            ..DiskGain::default()
        };
        let on_disk = self.checkpoint_on_disk(disk, scope, tokens, found.tokens);
        let best = on_disk.filter(|it| it.tokens > in_memory.tokens);
        Some(DiskGain {
            prefix,
            ..best.unwrap_or(in_memory)
        })
    }

    /// With a checkpoint of the disk for a slot.
    fn gain_of_slot(&self, disk: &SlotDisk, scope: u64, tokens: &[Token]) -> Option<DiskGain> {
        let resumes = |slot, tokens| super::can_resume(&*self.model, slot, tokens);
        let reach = |tokens: &[Token], common| {
            let found = self.checkpoint_on_disk(disk, scope, tokens, common);
            found.map_or(0, |found| found.tokens)
        };
        let found = self
            .cache
            .find(scope, tokens, self.prefix_min, resumes, reach)?;
        let (_, tokens) = self.cache.contents(found.slot);
        let rewinds = found.rewinds.then_some(found.tokens)?;
        self.checkpoint_on_disk(disk, scope, tokens, rewinds)
    }

    /// The checkpoint of the disk by which a slot with these tokens keeps most of the common ones.
    fn checkpoint_on_disk(
        &self,
        disk: &SlotDisk,
        scope: u64,
        tokens: &[Token],
        common: usize,
    ) -> Option<DiskGain> {
        let until = self.checkpoints.until(common)?.min(tokens.len());
        let found = disk
            .tier
            .find(EntryKind::Checkpoint, scope, &tokens[..until])?;
        Some(DiskGain {
            tokens: found.tokens.min(common),
            prefix: None,
            checkpoint: Some(found.id),
        })
    }

    /// Returns whether a sequence still waits for the disk.
    pub(in crate::owner) fn is_reading(&self, wait: DiskWait) -> bool {
        self.disk
            .as_ref()
            .is_some_and(|disk| disk.tier.is_pending(wait))
    }

    /// Returns when the next sequence stops to wait for the disk.
    pub(in crate::owner) fn disk_deadline(&mut self, now: Time) -> Option<Time> {
        let disk = self.disk.as_mut()?;
        let is_reading = disk.tier.is_reading();
        disk.deadlines
            .retain(|deadline| is_reading && *deadline > now);
        disk.deadlines.iter().copied().min()
    }

    /// Prefers the disk to computing, and reads nothing before it is asked for.
    #[cfg(all(test, feature = "embedded"))]
    pub(in crate::owner) fn hasten_disk(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.tier.hasten();
        }
    }

    /// Waits until the disk has done all.
    #[cfg(test)]
    pub(in crate::owner) fn settle_disk(&mut self, stats: &EngineStats) {
        if let Some(disk) = &mut self.disk {
            disk.tier.settle(stats);
        }
    }

    /// Forgets an entry of the disk that the model could not use.
    pub(super) fn forget_on_disk(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) {
        if let Some(disk) = &mut self.disk {
            disk.tier.forget(kind, scope, tokens);
        }
    }

    /// Saves all cached prefixes, and writes them and the checkpoints for the next engine of this model. Waits for the disk.
    pub(in crate::owner) fn close_disk(&mut self, stats: &EngineStats) {
        let Some(disk) = self.disk.take() else { return };
        while let Some(evicted) = self.cache.evict(None) {
            // No stream waits any more.
            self.saved_in_step = 0;
            self.save(evicted);
        }
        let memory = [&self.store, self.checkpoints.store()];
        let entries = disk.tier.finish(memory, END_MAX, stats);
        tracing::info!(entries, "cached prefixes were written to the disk");
    }
}
