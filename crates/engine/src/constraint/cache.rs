//! [`GrammarCache`]: compiled grammars by their content, the least recently used one dropped first (AI-841).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::compile::Compiled;
use super::grammar::GrammarText;

/// Compiled grammars of one vocabulary.
pub(super) struct GrammarCache {
    bytes_max: usize,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    by_text: HashMap<GrammarText, Entry>,
    bytes: usize,
    /// Counts uses, to order them.
    clock: u64,
}

struct Entry {
    compiled: Arc<Compiled>,
    used: u64,
}

impl GrammarCache {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            entries: Mutex::new(Entries::default()),
        }
    }

    pub(super) fn get(&self, text: &GrammarText) -> Option<Arc<Compiled>> {
        let mut entries = self.entries();
        entries.clock += 1;
        let used = entries.clock;
        let entry = entries.by_text.get_mut(text)?;
        entry.used = used;
        Some(Arc::clone(&entry.compiled))
    }

    /// Keeps a grammar; one that is larger than the whole cache is not kept.
    pub(super) fn insert(&self, text: GrammarText, compiled: Arc<Compiled>) {
        let bytes = compiled.bytes();
        if bytes > self.bytes_max {
            return;
        }
        let mut entries = self.entries();
        entries.clock += 1;
        let used = entries.clock;
        let old = entries.by_text.insert(text, Entry { compiled, used });
        if let Some(old) = &old {
            entries.bytes -= old.compiled.bytes();
        }
        entries.bytes += bytes;
        let mut dropped = Vec::new();
        while entries.bytes > self.bytes_max {
            dropped.extend(entries.take_oldest());
        }
        // Freeing a large automaton takes long, and others wait for the lock.
        drop(entries);
        drop(dropped);
    }

    /// Drops the least recently used grammar. Returns whether there was one.
    pub(super) fn drop_oldest(&self) -> bool {
        let oldest = self.entries().take_oldest();
        oldest.is_some()
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        // No call between taking and releasing the lock can panic half way through a change.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries().by_text.len()
    }
}

impl Entries {
    fn take_oldest(&mut self) -> Option<Entry> {
        // Linear, but there are few: each takes at least the room of its idle automata.
        let oldest = self.by_text.iter().min_by_key(|(_, entry)| entry.used);
        let Some(text) = oldest.map(|(text, _)| text.clone()) else {
            self.bytes = 0;
            return None;
        };
        let entry = self.by_text.remove(&text)?;
        self.bytes -= entry.compiled.bytes();
        Some(entry)
    }
}
