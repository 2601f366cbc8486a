//! A table whose keys are never mistaken for one another.
//!
//! Owns: reuse of places, with a generation per place so that a stale key finds nothing. Refuses to know: what it
//! holds. Cursors and actions come and go by the thousand in one session; nodes do not, and have plain indices.

/// A place and the generation of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
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
struct Place<T> {
    generation: u32,
    tenant: Option<T>,
}

/// The table.
#[derive(Debug)]
pub(super) struct Slab<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, tenant: T) -> Key {
        if let Some(index) = self.free.pop() {
            let place = &mut self.places[index as usize];
            place.tenant = Some(tenant);
            return Key {
                index,
                generation: place.generation,
            };
        }
        // Limits keep every slab far below 2^32 places.
        let index = u32::try_from(self.places.len()).unwrap_or(u32::MAX);
        self.places.push(Place {
            generation: 0,
            tenant: Some(tenant),
        });
        Key {
            index,
            generation: 0,
        }
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        let place = self.places.get_mut(key.index as usize)?;
        if place.generation != key.generation {
            return None;
        }
        let tenant = place.tenant.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(key.index);
        Some(tenant)
    }

    pub(super) fn get(&self, key: Key) -> Option<&T> {
        let place = self.places.get(key.index as usize)?;
        place
            .tenant
            .as_ref()
            .filter(|_| place.generation == key.generation)
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.places.get_mut(key.index as usize)?;
        place
            .tenant
            .as_mut()
            .filter(|_| place.generation == key.generation)
    }

    pub(super) const fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let key = Key {
                index: u32::try_from(index).ok()?,
                generation: place.generation,
            };
            place.tenant.as_ref().map(|tenant| (key, tenant))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slab = Slab::new();
        let first = slab.insert('a');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!((slab.get(second), slab.len()), (Some(&'b'), 1));
    }
}
