//! Decodes chunks as chunks, as bytes, or as nothing.
//!
//! The decoders of `Chunk`, `Bytes` and `()`. Their items are the chunks' pieces, unchanged.

use bytes::{Bytes, BytesMut};

use super::{FromChunks, Out};
use crate::Result;
use crate::chunk::Chunk;
use crate::name::Mime;
use crate::want::{RequestedPorts, Want};

impl FromChunks for Chunk {
    type State = ();
    type Acc = Vec<Self>;
    type Whole = Vec<Self>;

    fn want() -> Want {
        Want {
            ports: RequestedPorts::All,
            inner: true,
            ..Want::main([Mime::ANY])
        }
    }

    fn push((): &mut (), chunk: Chunk, out: &mut Out<Self>) -> Result<()> {
        out.push(chunk);
        Ok(())
    }

    fn fold(acc: &mut Vec<Self>, item: Self) -> Result<()> {
        acc.push(item);
        Ok(())
    }

    fn whole(acc: Vec<Self>) -> Result<Vec<Self>> {
        Ok(acc)
    }
}

impl FromChunks for Bytes {
    type State = ();
    type Acc = Joined;
    type Whole = Self;

    fn want() -> Want {
        Want::main([Mime::ANY])
    }

    fn push((): &mut (), chunk: Chunk, out: &mut Out<Self>) -> Result<()> {
        if chunk.choice == 0 && !chunk.data.is_empty() {
            out.push(chunk.data);
        }
        Ok(())
    }

    fn fold(acc: &mut Joined, item: Self) -> Result<()> {
        acc.add(item);
        Ok(())
    }

    fn push_fold((): &mut (), acc: &mut Joined, chunk: Chunk) -> Result<()> {
        if chunk.choice == 0 {
            acc.add(chunk.data);
        }
        Ok(())
    }

    fn whole(acc: Joined) -> Result<Self> {
        Ok(acc.done())
    }
}

/// Concatenated bytes. A single piece is used as it is and not copied.
#[derive(Debug, Default)]
pub struct Joined {
    first: Bytes,
    rest: BytesMut,
}

impl Joined {
    pub(super) fn add(&mut self, piece: Bytes) {
        if self.rest.is_empty() && self.first.is_empty() {
            self.first = piece;
            return;
        }
        // Copied only when a second piece comes; many outputs are a single chunk.
        if self.rest.is_empty() {
            self.rest.extend_from_slice(&self.first);
        }
        self.rest.extend_from_slice(&piece);
    }

    pub(super) fn done(self) -> Bytes {
        if self.rest.is_empty() {
            self.first
        } else {
            self.rest.freeze()
        }
    }
}

impl FromChunks for () {
    type State = ();
    type Acc = ();
    type Whole = ();

    fn want() -> Want {
        Want::main([Mime::ANY])
    }

    fn push((): &mut (), _chunk: Chunk, _out: &mut Out<Self>) -> Result<()> {
        Ok(())
    }

    fn fold((): &mut (), (): Self) -> Result<()> {
        Ok(())
    }

    fn whole((): ()) -> Result<()> {
        Ok(())
    }
}
