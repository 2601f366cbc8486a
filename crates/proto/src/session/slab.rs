//! A slab whose keys carry a generation, so that an old key never names a new entry.
//!
//! Cursors and actions are created and removed by the thousand in one session. Nodes are not, and are looked up far more
//! often: their table needs no check for a free entry.

/// An index and the generation of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SlabKey {
    index: u32,
    generation: u32,
}

impl SlabKey {
    pub(super) const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    #[allow(
        clippy::cast_possible_truncation,
        reason = "each half is cut out of the number"
    )]
    pub(super) const fn from_bits(bits: u64) -> Self {
        Self {
            index: bits as u32,
            generation: (bits >> 32) as u32,
        }
    }
}

#[derive(Debug)]
struct SlabEntry<T> {
    generation: u32,
    value: Option<T>,
}

/// A table of entries; see the module documentation.
#[derive(Debug)]
pub(super) struct Slab<T> {
    entries: Vec<SlabEntry<T>>,
    free: Vec<u32>,
}

// Not derived, which would ask for a default entry.
impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, value: T) -> SlabKey {
        self.insert_mut(value).0
    }

    /// Inserts an entry and returns it with its key.
    pub(super) fn insert_mut(&mut self, value: T) -> (SlabKey, &mut T) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(SlabEntry {
                generation: 0,
                value: None,
            });
            // Limits keep every slab far below 2^32 entries.
            u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
        });
        let entry = &mut self.entries[index as usize];
        let key = SlabKey {
            index,
            generation: entry.generation,
        };
        (key, entry.value.insert(value))
    }

    pub(super) fn remove(&mut self, key: SlabKey) -> Option<T> {
        let position = self.entries.get_mut(key.index as usize)?;
        if position.generation != key.generation {
            return None;
        }
        let value = position.value.take()?;
        // On removal and not on insertion, so that the old key is stale while the index is free as well.
        position.generation = position.generation.wrapping_add(1);
        self.free.push(key.index);
        Some(value)
    }

    pub(super) fn get(&self, key: SlabKey) -> Option<&T> {
        let position = self.entries.get(key.index as usize)?;
        // An occupied index is not enough: it may be another entry's by now.
        if position.generation != key.generation {
            return None;
        }
        position.value.as_ref()
    }

    pub(super) fn get_mut(&mut self, key: SlabKey) -> Option<&mut T> {
        let position = self.entries.get_mut(key.index as usize)?;
        if position.generation != key.generation {
            return None;
        }
        position.value.as_mut()
    }

    pub(super) const fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SlabKey, &T)> + Clone {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(index, position)| {
                let key = SlabKey {
                    index: u32::try_from(index).ok()?,
                    generation: position.generation,
                };
                position.value.as_ref().map(|value| (key, value))
            })
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries
            .iter_mut()
            .filter_map(|position| position.value.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!((slab.get(second), slab.len()), (Some(&'b'), 1));
    }
}
