//! [`MemoryBudget`]: the memory of all instances together, and [`InstanceLimiter`], which charges an instance's to it.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sapwood_proto::error_reason::ErrorReason;
use wasmtime::ResourceLimiter;

use super::failure::Abort;
use super::home::Home;

/// Bytes in use by all instances of a host, and their limit (AI-741).
#[derive(Debug)]
pub(super) struct MemoryBudget {
    used: AtomicUsize,
    limit: usize,
    /// In a controller's process: who counts instead.
    home: Option<Arc<dyn Home>>,
    /// In a controller's process: bytes that were given back here. The runtime gets them when the process ends, and
    /// until then they are taken first.
    credit: AtomicUsize,
}

impl MemoryBudget {
    pub(super) const fn new(limit: usize) -> Self {
        Self {
            used: AtomicUsize::new(0),
            limit,
            home: None,
            credit: AtomicUsize::new(0),
        }
    }

    /// The budget of the runtime, seen from a controller's process.
    #[cfg(target_os = "linux")]
    pub(super) const fn of_home(home: Arc<dyn Home>) -> Self {
        Self {
            used: AtomicUsize::new(0),
            limit: 0,
            home: Some(home),
            credit: AtomicUsize::new(0),
        }
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes so many bytes; `false` if that would be more than there are.
    pub(super) fn charge(&self, bytes: usize) -> bool {
        if let Some(home) = &self.home {
            // One thread runs here, so nobody takes it in between.
            let credit = self.credit.load(Ordering::Relaxed);
            let more = bytes.saturating_sub(credit);
            let granted = more == 0 || home.charge(more);
            if granted {
                let rest = credit.saturating_sub(bytes);
                self.credit.store(rest, Ordering::Relaxed);
            }
            return granted;
        }
        let add = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
            .is_ok()
    }

    /// Gives bytes back.
    pub(super) fn refund(&self, bytes: usize) {
        if self.home.is_some() {
            self.credit.fetch_add(bytes, Ordering::Relaxed);
            return;
        }
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Limits the memory and tables of one instance. Refunds its charges when it is dropped, with the instance's store.
#[derive(Debug)]
pub(super) struct InstanceLimiter {
    budget: Arc<MemoryBudget>,
    charged: usize,
    /// Of the charged bytes, those of the linear memory, and those of what the host keeps for the instance. Both
    /// together are limited by `memory_bytes`.
    linear: usize,
    held: usize,
    memory_bytes: usize,
    table_elements: usize,
    /// During instantiation a refusal has another text.
    pub(super) instantiating: bool,
}

impl InstanceLimiter {
    pub(super) const fn new(
        budget: Arc<MemoryBudget>,
        memory_bytes: usize,
        table_elements: usize,
    ) -> Self {
        Self {
            budget,
            charged: 0,
            linear: 0,
            held: 0,
            memory_bytes,
            table_elements,
            instantiating: true,
        }
    }

    /// Charges what the host keeps for the instance beside its memory: constraints and masks (AI-1007). `bytes` is all
    /// of it, as it is now.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), Abort> {
        if let Some(fewer) = self.held.checked_sub(bytes) {
            self.budget.refund(fewer);
            self.charged -= fewer;
        } else {
            self.check_memory(self.linear.saturating_add(bytes))?;
            self.charge(bytes - self.held)?;
        }
        self.held = bytes;
        Ok(())
    }

    fn check_memory(&self, bytes: usize) -> Result<(), Abort> {
        if bytes > self.memory_bytes {
            let text = format!("memory limit: more than {} bytes", self.memory_bytes);
            return Err(Abort::limit(ErrorReason::MEMORY, text));
        }
        Ok(())
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Abort> {
        if self.budget.charge(bytes) {
            self.charged += bytes;
            return Ok(());
        }
        let text = if self.instantiating {
            MEMORY_EXHAUSTED
        } else {
            ALL_MEMORY_EXHAUSTED
        };
        Err(Abort::limit(ErrorReason::MEMORY, text))
    }
}

/// The memory of all instances does not suffice for what one of them asks for.
pub(super) const ALL_MEMORY_EXHAUSTED: &str =
    "controller memory exhausted: all instances together have reached their limit";
/// The memory of all instances does not suffice for a further one.
pub(super) const MEMORY_EXHAUSTED: &str = "controller memory exhausted";

impl ResourceLimiter for InstanceLimiter {
    // A refused growth is a trap and not the -1 of `memory.grow`: allocators answer that with an abort of their own,
    // whose text says less (AI-608).
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        self.check_memory(desired.saturating_add(self.held))?;
        // The module's own maximum, which the guest may run into and handle.
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        self.charge(desired.saturating_sub(current))?;
        self.linear = desired;
        Ok(true)
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired > self.table_elements {
            let text = format!("table limit: more than {} elements", self.table_elements);
            return Err(Abort::limit(ErrorReason::MEMORY, text).into());
        }
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        self.charge(desired.saturating_sub(current) * size_of::<usize>())?;
        Ok(true)
    }
}

impl Drop for InstanceLimiter {
    fn drop(&mut self) {
        self.budget.refund(self.charged);
    }
}
