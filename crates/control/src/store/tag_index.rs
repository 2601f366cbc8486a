//! [`TagIndex`]: the tags as they were read last, for listings, which would otherwise open 100,000 files each time.
//!
//! Each server and runtime writes a tag by renaming a new file to it, so the folder's time of change tells whether what was
//! read is still true. That time is only as fine as the clock of the file system, and two writes may fall into one
//! tick: what was read shortly after a change is not kept.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use sapwood_proto::steer::TagInfo;

/// All tags of a folder.
#[derive(Debug, Default)]
pub(super) struct TagIndex(Mutex<Option<ReadTags>>);

/// What was read.
#[derive(Debug)]
struct ReadTags {
    /// The folder's time of change, as it was before they were read.
    changed: SystemTime,
    at: Instant,
    tags: Vec<TagInfo>,
}

impl TagIndex {
    /// The tags, if they are those of a folder that was changed at this time.
    pub(super) fn get(&self, changed: SystemTime) -> Option<Vec<TagInfo>> {
        let read = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = read.as_ref()?;
        let valid = read.changed == changed && read.at.elapsed() < AGE_MAX;
        valid.then(|| read.tags.clone())
    }

    /// Keeps tags. `changed`: of the folder, asked for when reading began, at the time `begun`.
    pub(super) fn set(&self, changed: SystemTime, begun: SystemTime, tags: &[TagInfo]) {
        let settled = begun
            .duration_since(changed)
            .is_ok_and(|since| since > TICK_MAX);
        let read = settled.then(|| ReadTags {
            changed,
            at: Instant::now(),
            tags: tags.to_vec(),
        });
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = read;
    }
}

/// Longer than a tick of any file system that has owners and modes; most have milliseconds, and some old ones a second.
const TICK_MAX: Duration = Duration::from_secs(3);
/// For a program that writes into the file of a tag, which does not change the folder.
const AGE_MAX: Duration = Duration::from_secs(10);
