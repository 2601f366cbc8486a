//! The wire of the AICI protocol: messages and masks in POSIX shared memory, between an engine and a runtime in another
//! process (AI-201 to AI-245).
//!
//! ```text
//!   engine ── Pcmd ───────► runtime        one message at a time in each region, guarded by two semaphores
//!          ◄── Presp ─────                 (`wr`, `rd`) or by one futex word
//!          ── Pcmd-side ──►
//!          ◄── Presp-side ─
//!          ◄── Pbin ──────                 masks: no guard, the answer on Presp says that they are there
//! ```

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod objects;
mod slot;
mod system;
mod word;

/// What `word` is made of. The model checker has other ones.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU32, Ordering, fence};
}

use std::io;

pub use self::objects::{
    EngineWire, RegionFiles, RuntimeWire, Synchronisation, WireConfig, WireNames,
};
pub use self::slot::{MessageSlot, PeerLost, Received, SendError, SlotLimits};
pub use self::system::{
    NamedSemaphore, SharedRegion, ask_for_realtime, unlink_region, unlink_semaphore, watch_signals,
};
pub use crate::spin::{SPIN_MAX, Spin};

/// Why shared objects could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A region exists with another size.
    #[error(
        "the shared memory {name} has {actual} bytes, but the flags say {expected}: give the runtime the sizes of the engine"
    )]
    Size {
        /// Its name.
        name: String,
        /// The bytes that it has.
        actual: usize,
        /// The bytes that the flags ask for.
        expected: usize,
    },
    /// The system refuses.
    #[error("cannot open the shared object {name}: {error}")]
    Open {
        /// Its name.
        name: String,
        /// What the system reports.
        #[source]
        error: io::Error,
    },
}

impl WireError {
    fn open(name: &str, error: rustix::io::Errno) -> Self {
        Self::Open {
            name: name.to_owned(),
            error: error.into(),
        }
    }
}

#[cfg(test)]
mod tests;
