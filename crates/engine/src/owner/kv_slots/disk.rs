//! [`SlotDisk`]: the slots' use of the disk ([`crate::prefix_disk`]), and how long sequences wait for it.
//!
//! Nothing here waits. A sequence for which something is read is passed over until it is there, for as long as computing what is
//! read would take: at worst it starts twice as late as without a disk.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::time::Time;

use crate::outbox::OwnerWaker;
use crate::prefix_disk::{DiskTerms, DiskTier, DiskWait, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_folder::PrefixDisk;
use crate::prefix_store::SavedId;
use crate::stats::EngineStats;

/// A sequence waits no longer for the disk, whatever its prompt takes.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Sequences wait for the list of files no longer than this after the first step: it says whether there is anything to wait for.
const OPENING_MAX: Duration = Duration::from_millis(250);

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
pub(super) struct DiskGain {
    pub(super) tokens: usize,
    pub(super) prefix: Option<SavedId>,
    pub(super) checkpoint: Option<SavedId>,
}

impl SlotDisk {
    /// # Errors
    /// As [`DiskTier::start`].
    pub(super) fn start(
        disk: Arc<dyn PrefixDisk>,
        terms: DiskTerms,
        waker: Arc<OwnerWaker>,
    ) -> io::Result<Self> {
        Ok(Self {
            tier: DiskTier::start(disk, terms, Arc::new(move || waker.wake()))?,
            deadlines: Vec::new(),
            token_time: None,
            began: None,
        })
    }

    /// Takes what was read since the last step. `token_time`: what a prompt token takes.
    pub(super) fn poll(
        &mut self,
        stats: &EngineStats,
        token_time: Option<Duration>,
        now: Time,
    ) -> Vec<SavedEntry> {
        self.token_time = token_time;
        self.began.get_or_insert(now);
        self.tier.poll(stats, now)
    }

    /// Returns until when sequences wait for the list of files.
    fn opened_by(&self, now: Time) -> Time {
        self.began.unwrap_or(now) + OPENING_MAX
    }

    /// Returns whether the list of files takes longer than sequences wait for it.
    pub(super) fn opens_late(&self, now: Time) -> bool {
        self.tier.is_opening() && now >= self.opened_by(now)
    }

    /// Starts to read what is gained, which spares computing so many tokens, if that is quicker. Returns what to wait for, if
    /// there is anything to wait for: what was not written yet has arrived at once. `limit`: until when at most.
    pub(super) fn read(
        &mut self,
        gain: DiskGain,
        spared: usize,
        now: Time,
        limit: Option<Time>,
    ) -> Option<DiskRead> {
        let spared = u32::try_from(spared).unwrap_or(u32::MAX);
        let computing = self.token_time.map(|time| time.saturating_mul(spared));
        let wait = match self.tier.is_opening() {
            true => DiskWait::Opening,
            false => self.read_files(gain, computing)?,
        };
        if !self.tier.is_pending(wait) {
            return None;
        }
        let until = now + computing.unwrap_or(WAIT_MAX).min(WAIT_MAX);
        let opened_by = (wait == DiskWait::Opening).then(|| self.opened_by(now));
        let limits = limit.into_iter().chain(opened_by);
        let until = limits.fold(until, Time::min);
        self.deadlines.push(until);
        Some(DiskRead { wait, until })
    }

    fn read_files(&mut self, gain: DiskGain, computing: Option<Duration>) -> Option<DiskWait> {
        let prefix = gain.prefix.map(|id| (EntryKind::Prefix, id));
        let checkpoint = gain.checkpoint.map(|id| (EntryKind::Checkpoint, id));
        let wanted: Vec<_> = prefix.into_iter().chain(checkpoint).collect();
        let reading = self.tier.time_to_read(&wanted);
        if computing.is_some_and(|computing| reading >= computing) {
            self.tier.was_too_slow();
            return None;
        }
        let mut files = [None; 2];
        for (file, (kind, id)) in files.iter_mut().zip(wanted) {
            *file = Some(self.tier.read(kind, id)?);
        }
        Some(DiskWait::Files(files))
    }

    /// Returns when the next sequence stops to wait.
    pub(super) fn deadline(&mut self, now: Time) -> Option<Time> {
        let is_reading = self.tier.is_reading();
        self.deadlines
            .retain(|deadline| is_reading && *deadline > now);
        self.deadlines.iter().copied().min()
    }
}
