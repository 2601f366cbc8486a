//! [`TimedOutModules`]: modules that took too long to compile, and are not tried again for a while.
//!
//! Without it one module, uploaded again and again, would keep the compiler from all others for its whole time each time.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::module::{ModuleError, ModuleId};

/// The modules, the one that was noted first at the front.
#[derive(Debug, Default)]
pub(super) struct TimedOutModules(Mutex<VecDeque<TimedOut>>);

#[derive(Debug)]
struct TimedOut {
    id: ModuleId,
    /// The time that it was allowed.
    seconds: u64,
    at: Instant,
}

impl TimedOutModules {
    /// Notes that a module took longer than so many seconds.
    pub(super) fn insert(&self, id: ModuleId, seconds: u64, now: Instant) {
        let mut modules = self.modules(now);
        modules.retain(|module| module.id != id);
        if modules.len() >= MODULES_MAX {
            modules.pop_front();
        }
        modules.push_back(TimedOut {
            id,
            seconds,
            at: now,
        });
    }

    /// Fails if the module took too long a while ago.
    pub(super) fn check(&self, id: ModuleId, now: Instant) -> Result<(), ModuleError> {
        let modules = self.modules(now);
        let found = modules.iter().find(|module| module.id == id);
        found.map_or(Ok(()), |module| {
            Err(ModuleError::CompileTimeout {
                seconds: module.seconds,
            })
        })
    }

    /// Those that are still refused.
    fn modules(&self, now: Instant) -> MutexGuard<'_, VecDeque<TimedOut>> {
        // Its operations leave nothing half done.
        let mut modules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        modules.retain(|module| now.saturating_duration_since(module.at) < REFUSED_FOR);
        modules
    }
}

/// How long a module is refused. Not for ever: the machine may have been too busy for it.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(5 * 60);

/// Modules that are remembered. More than time out in [`REFUSED_FOR`], where each takes the compiler for seconds.
pub(super) const MODULES_MAX: usize = 128;
