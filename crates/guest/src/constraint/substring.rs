//! The pieces of a text.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Constraint;

/// A contiguous piece of a text: a quotation.
///
/// It is found by a sorted list of all places of the text, so a byte costs a binary search. Making the list takes time that
/// grows with the square of the length for texts that repeat themselves throughout.
#[derive(Clone, Debug)]
pub struct Substring {
    text: Arc<[u8]>,
    /// The places of the text, in the order of what is there.
    places: Arc<[u32]>,
    len_min: u32,
}

/// Where one is in a [`Substring`]: the places at which what was taken so far occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubstringState {
    first: u32,
    end: u32,
    taken: u32,
}

impl Substring {
    /// Pieces of at least `len_min` bytes.
    #[must_use]
    pub fn new(text: impl AsRef<[u8]>, len_min: u32) -> Self {
        let text: Arc<[u8]> = text.as_ref().into();
        let mut places: Vec<u32> = (0..text.len() as u32).collect();
        places.sort_unstable_by(|&a, &b| text[a as usize..].cmp(&text[b as usize..]));
        Self {
            text,
            places: places.into(),
            len_min,
        }
    }
}

impl Constraint for Substring {
    type State = SubstringState;

    fn start(&self) -> SubstringState {
        SubstringState {
            first: 0,
            end: self.places.len() as u32,
            taken: 0,
        }
    }

    fn next(&self, state: &SubstringState, byte: u8) -> Option<SubstringState> {
        let places = &self.places[state.first as usize..state.end as usize];
        // What was taken is the same at all these places, so they are in the order of the byte that follows it. Where the
        // text ends there is none, which comes first.
        let following = |&place: &u32| self.text.get((place + state.taken) as usize);
        let below = places.partition_point(|place| following(place) < Some(&byte)) as u32;
        let up_to = places.partition_point(|place| following(place) <= Some(&byte)) as u32;
        (below < up_to).then_some(SubstringState {
            first: state.first + below,
            end: state.first + up_to,
            taken: state.taken + 1,
        })
    }

    fn is_complete(&self, state: &SubstringState) -> bool {
        state.taken >= self.len_min
    }
}
