//! Decodes a stream of chunks as a Rust type.
//!
//! Decoders accept any bytes and give items or one error; they never panic. With several choices they read choice 0.

mod json;
mod raw;
#[cfg(test)]
mod tests;
mod text;

use std::collections::VecDeque;

pub(crate) use self::json::schema_of;
pub use self::json::{Json, Splitter};
pub use self::raw::Joined;
pub use self::text::PartialChar;
use crate::Result;
use crate::chunk::Chunk;
use crate::want::Want;

/// Types that a run can be read as.
///
/// Chunk boundaries carry no meaning (KE-111): a decoder holds in its state the bytes that the next chunk may continue.
pub trait FromChunks: Sized + Send + Unpin + 'static {
    /// The state that is held between chunks.
    type State: Default + Send + Unpin;
    /// The accumulator of a whole.
    type Acc: Default + Send + Unpin;
    /// All items of a run folded together.
    type Whole: Send;

    /// What a call must request of a function.
    fn want() -> Want;

    /// Decodes a chunk into items.
    ///
    /// # Errors
    /// `Decode`; the run ends with it, after the items pushed before.
    fn push(state: &mut Self::State, chunk: Chunk, out: &mut Out<Self>) -> Result<()>;

    /// Decodes the held bytes, at the end; unless a decoder holds none.
    ///
    /// # Errors
    /// `Decode` if it is incomplete.
    fn end(state: &mut Self::State, out: &mut Out<Self>) -> Result<()> {
        let _ = (state, out);
        Ok(())
    }

    /// Adds an item to the whole.
    ///
    /// # Errors
    /// `Decode` if it does not fit there.
    fn fold(acc: &mut Self::Acc, item: Self) -> Result<()>;

    /// Adds a chunk to the whole; for callers that need no items on the way (KE-206).
    ///
    /// # Errors
    /// As [`FromChunks::push`] and [`FromChunks::fold`].
    fn push_fold(state: &mut Self::State, acc: &mut Self::Acc, chunk: Chunk) -> Result<()> {
        let mut out = Out::default();
        let pushed = Self::push(state, chunk, &mut out);
        while let Some(item) = out.pop() {
            Self::fold(acc, item)?;
        }
        pushed
    }

    /// The whole.
    ///
    /// # Errors
    /// `Decode` if the items form none.
    fn whole(acc: Self::Acc) -> Result<Self::Whole>;
}

/// The buffer that decoders put items into. The first is stored in place, so that one item per chunk allocates nothing.
#[derive(Debug)]
pub struct Out<T> {
    first: Option<T>,
    rest: VecDeque<T>,
}

impl<T> Default for Out<T> {
    fn default() -> Self {
        Self {
            first: None,
            rest: VecDeque::new(),
        }
    }
}

impl<T> Out<T> {
    /// Appends an item.
    pub fn push(&mut self, item: T) {
        if self.first.is_none() && self.rest.is_empty() {
            self.first = Some(item);
        } else {
            self.rest.push_back(item);
        }
    }

    /// Removes the oldest item.
    pub fn pop(&mut self) -> Option<T> {
        self.first.take().or_else(|| self.rest.pop_front())
    }

    /// Whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_none() && self.rest.is_empty()
    }
}
