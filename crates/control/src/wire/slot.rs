//! [`MessageSlot`]: room for one message at a time in a shared region, guarded by two semaphores or by one futex word.
//!
//! ```text
//!   semaphores                       futex (slot 0 at 0, slot 1 at half of the region)
//!   0: length  4: bytes              0: word  4: bytes
//!   wr = 1: free, rd = 1: full       0: free, FFFFFFFF: being written, else: length
//! ```
//!
//! A length is loaded once and checked against the region before a byte is copied, and the bytes are copied once; parsing
//! works on the copy (AI-221).
//!
//! The test `slot_loom` compiles this file once more over a model of memory, futexes and semaphores, where a model checker
//! tries every interleaving of the two processes, and every moment at which one of them may end.

use std::time::{Duration, Instant};

use super::Spin;
use super::system::{NamedSemaphore, SharedRegion, now};

/// One direction of a channel: one side sends, the other receives.
#[derive(Debug)]
pub struct MessageSlot {
    region: SharedRegion,
    guard: Guard,
    spin: Spin,
    limits: SlotLimits,
}

/// How long the peer may keep a slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotLimits {
    /// Half written (AI-213).
    pub stall: Duration,
    /// Full, while we send (AI-245).
    pub unread: Duration,
}

#[derive(Debug)]
pub(super) enum Guard {
    Semaphores {
        wr: NamedSemaphore,
        rd: NamedSemaphore,
    },
    /// The word's offset: 0, or half of the region.
    Futex { word: usize },
}

/// What came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A message, in the buffer.
    Message,
    /// The length of a message that no region of this size can have. The slot is free again.
    TooLong(u32),
    /// Nothing, until the time limit.
    Nothing,
}

/// The other process does not answer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other process stopped in the middle of a message")]
pub struct PeerLost;

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// It does not fit; nothing was written (AI-205).
    #[error("msg too large; {bytes} + 4 > {room}")]
    TooLarge {
        /// Its bytes.
        bytes: usize,
        /// The bytes of the region, or of half of it.
        room: usize,
    },
    /// The slot stayed full for too long.
    #[error("the other process does not read its messages")]
    Lost,
    /// The system has no shared memory left for it, or the other process has made the region smaller.
    #[error("there is no shared memory for the message")]
    NoMemory,
}

impl From<PeerLost> for SendError {
    fn from(_: PeerLost) -> Self {
        Self::Lost
    }
}

impl MessageSlot {
    pub(super) const fn new(
        region: SharedRegion,
        guard: Guard,
        spin: Spin,
        limits: SlotLimits,
    ) -> Self {
        Self {
            region,
            guard,
            spin,
            limits,
        }
    }

    /// Returns the bytes of the longest message.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        match self.guard {
            Guard::Semaphores { .. } => self.region.bytes().saturating_sub(4),
            Guard::Futex { .. } => (self.region.bytes() / 2).saturating_sub(16),
        }
    }

    /// Returns the bytes of the room that a message shares with its length.
    #[must_use]
    pub fn room(&self) -> usize {
        match self.guard {
            Guard::Semaphores { .. } => self.region.bytes(),
            Guard::Futex { .. } => self.region.bytes() / 2,
        }
    }

    /// Waits for a message until `until`, or for ever, and replaces the contents of `message` with it.
    ///
    /// # Errors
    /// [`PeerLost`] if the other process died while it was writing.
    pub fn receive(
        &mut self,
        message: &mut Vec<u8>,
        until: Option<Instant>,
    ) -> Result<Received, PeerLost> {
        message.clear();
        let bytes_max = self.bytes_max();
        match &self.guard {
            Guard::Semaphores { wr, rd } => {
                if !self.spin.until(|| rd.try_wait()) && !rd.wait(until) {
                    return Ok(Received::Nothing);
                }
                let bytes = self.region.load(0).ok_or(PeerLost)?;
                let fits = bytes as usize <= bytes_max;
                let read = fits && self.region.read(4, bytes as usize, message);
                if (fits && !read) || !self.region.store(0, 0) {
                    return Err(PeerLost);
                }
                // Also after an impossible length: a bad message must not wedge the channel (AI-204).
                wr.post();
                Ok(received(read, bytes))
            }
            Guard::Futex { word: offset } => {
                let offset = *offset;
                let region = &self.region;
                self.spin.until(|| region.load(offset).is_none_or(full));
                let Some(bytes) = wait_full(region, offset, until, self.limits.stall)? else {
                    return Ok(Received::Nothing);
                };
                let fits = bytes as usize <= bytes_max;
                let read = fits && region.read(offset + 4, bytes as usize, message);
                // No wake: writers look again by themselves (AI-212).
                if (fits && !read) || !region.store(offset, FREE) {
                    return Err(PeerLost);
                }
                Ok(received(read, bytes))
            }
        }
    }

    /// Sends a message as soon as the slot is free.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(&mut self, message: &[u8]) -> Result<(), SendError> {
        let too_large = SendError::TooLarge {
            bytes: message.len(),
            room: self.room(),
        };
        let length = u32::try_from(message.len()).map_err(|_| too_large)?;
        if message.len() > self.bytes_max() {
            return Err(too_large);
        }
        let until = now() + self.limits.unread;
        match &self.guard {
            Guard::Semaphores { wr, rd } => {
                if !self.spin.until(|| wr.try_wait()) && !wr.wait(Some(until)) {
                    return Err(SendError::Lost);
                }
                // The payload first: a reader that looks too early finds the length 0.
                if !self.region.write(4, message) || !self.region.store(0, length) {
                    wr.post();
                    return Err(SendError::NoMemory);
                }
                rd.post();
            }
            Guard::Futex { word: offset } => {
                let (region, offset) = (&self.region, *offset);
                claim(region, offset, &mut self.spin, until, self.limits.stall)?;
                if !region.write(offset + 4, message) || !region.store(offset, length) {
                    region.store(offset, FREE);
                    return Err(SendError::NoMemory);
                }
                region.wake(offset);
            }
        }
        Ok(())
    }
}

#[cfg(any(test, fuzzing))]
impl MessageSlot {
    pub(super) const fn region(&self) -> &SharedRegion {
        &self.region
    }

    pub(super) const fn guard(&self) -> &Guard {
        &self.guard
    }
}

#[cfg(test)]
impl MessageSlot {
    /// Replaces the length, as a process that is mistaken or died would.
    pub(crate) fn set_length(&self, length: u32) {
        let offset = match self.guard {
            Guard::Semaphores { .. } => 0,
            Guard::Futex { word } => word,
        };
        self.region.store(offset, length);
    }
}

fn received(read: bool, bytes: u32) -> Received {
    if read {
        Received::Message
    } else {
        Received::TooLong(bytes)
    }
}

/// Whether a futex word is the length of a message.
const fn full(word: u32) -> bool {
    word != FREE && word != WRITING
}

/// Waits until the word is a length. `None`: not until `until`.
fn wait_full(
    region: &SharedRegion,
    offset: usize,
    until: Option<Instant>,
    stall: Duration,
) -> Result<Option<u32>, PeerLost> {
    let mut writing_since = None;
    loop {
        let value = region.load(offset).ok_or(PeerLost)?;
        if full(value) {
            return Ok(Some(value));
        }
        let now = now();
        let mut left = until.map(|until| until.saturating_duration_since(now));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
        if value == WRITING {
            let since = *writing_since.get_or_insert(now);
            let stalled = stall.saturating_sub(now - since);
            if stalled.is_zero() {
                return Err(PeerLost);
            }
            left = Some(left.map_or(stalled, |left| left.min(stalled)));
        } else {
            writing_since = None;
        }
        // Whatever ends the wait, the word decides: a wake, a spurious one, EINTR, EAGAIN, the time (AI-211).
        region.sleep(offset, value, left);
    }
}

/// Turns a free word into one that is being written.
fn claim(
    region: &SharedRegion,
    offset: usize,
    spin: &mut Spin,
    until: Instant,
    stall: Duration,
) -> Result<(), PeerLost> {
    let claimed = || region.replace(offset, FREE, WRITING);
    if spin.until(claimed) {
        return Ok(());
    }
    let mut writing_since = None;
    loop {
        let value = region.load(offset).ok_or(PeerLost)?;
        if value == FREE {
            if claimed() {
                return Ok(());
            }
            continue;
        }
        let now = now();
        if value == WRITING {
            // Somebody else wrote here, and died.
            let since = *writing_since.get_or_insert(now);
            if now - since >= stall {
                return Err(PeerLost);
            }
        } else {
            writing_since = None;
        }
        if now >= until {
            return Err(PeerLost);
        }
        // Readers send no wake, so this is how long a free slot may go unnoticed (AI-212).
        region.sleep(offset, value, Some(Duration::from_millis(1)));
    }
}

/// A futex word: the slot is free.
pub(super) const FREE: u32 = 0;
/// A futex word: a message is being written.
pub(super) const WRITING: u32 = u32::MAX;
