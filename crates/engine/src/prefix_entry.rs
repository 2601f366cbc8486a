//! A saved prefix as the contents of a file. All numbers are little-endian.
//!
//! ```text
//!   "SWPREFX2" | u32 length of the identity | identity
//!   u8 kind | u64 scope | u32 tokens | u64 bytes of the state | tokens, 4 bytes each | u32 CRC-32 of all of these
//!   state | u32 CRC-32 of the state
//! ```
//!
//! The first checksum is for the index, which is made of the heads alone.

use std::io::{self, ErrorKind, Read};
use std::sync::Arc;

use crc32fast::Hasher;
use sapwood_proto::steer::Token;

const MAGIC: &[u8; 8] = b"SWPREFX2";

/// What a file has of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum EntryKind {
    /// The whole state ([`crate::model::Model::save`]).
    Prefix,
    /// What the slot loses as it goes on ([`crate::model::Model::checkpoint`]).
    Checkpoint,
}

impl EntryKind {
    pub(crate) const ALL: [Self; 2] = [Self::Prefix, Self::Checkpoint];
}

/// What comes before the state.
#[derive(Debug)]
pub(crate) struct EntryHead {
    pub(crate) kind: EntryKind,
    pub(crate) scope: u64,
    pub(crate) tokens: Arc<[Token]>,
    /// Bytes of the state.
    pub(crate) state: usize,
}

/// Bytes between the identity and the tokens.
const NUMBERS: usize = 1 + 8 + 4 + 8;
const CHECKSUM: usize = 4;

/// The longest identity that is read; those of models have some thousand bytes.
const IDENTITY_MAX: usize = 1 << 20;

/// Returns the length of a file, or `None` if there can be none of so many bytes.
fn file_bytes(identity: usize, tokens: usize, state: u64) -> Option<u64> {
    let tokens = tokens.checked_mul(size_of::<Token>())?;
    let head = MAGIC.len() + 4 + identity + NUMBERS + 2 * CHECKSUM;
    state.checked_add(head.checked_add(tokens)? as u64)
}

/// Returns what a file has before and behind the pieces of a state.
pub(crate) fn around_state(
    identity: &str,
    kind: EntryKind,
    scope: u64,
    tokens: &[Token],
    state: &[&[u8]],
) -> (Vec<u8>, [u8; CHECKSUM]) {
    let mut head = Vec::with_capacity(identity.len() + size_of_val(tokens) + 64);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&length(identity.len()).to_le_bytes());
    head.extend_from_slice(identity.as_bytes());
    head.push(kind as u8);
    head.extend_from_slice(&scope.to_le_bytes());
    head.extend_from_slice(&length(tokens.len()).to_le_bytes());
    let bytes: usize = state.iter().map(|piece| piece.len()).sum();
    head.extend_from_slice(&(bytes as u64).to_le_bytes());
    head.extend(tokens.iter().flat_map(|it| it.to_le_bytes()));
    let sum = crc32fast::hash(&head);
    head.extend_from_slice(&sum.to_le_bytes());
    let mut of_state = Hasher::new();
    for piece in state {
        of_state.update(piece);
    }
    (head, of_state.finalize().to_le_bytes())
}

/// Neither a prompt nor an identity is longer.
fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// Reads what comes before the state in a file of so many bytes. `None` if it is of another model, or of other settings.
///
/// # Errors
/// If the file cannot be read, or is damaged. Nothing is allocated that is longer than the file.
pub(crate) fn read_head(
    input: &mut dyn Read,
    bytes: u64,
    identity: &str,
) -> io::Result<Option<EntryHead>> {
    let mut input = SummedInput {
        input,
        sum: Hasher::new(),
    };
    if &input.array()? != MAGIC {
        return Err(damaged("it has another format"));
    }
    let length = u32::from_le_bytes(input.array()?) as usize;
    if length > IDENTITY_MAX || length as u64 > bytes {
        return Err(damaged("its numbers are impossible"));
    }
    if input.bytes(length)? != identity.as_bytes() {
        return Ok(None);
    }
    let [kind] = input.array()?;
    let kind = EntryKind::ALL.into_iter().find(|it| *it as u8 == kind);
    let scope = u64::from_le_bytes(input.array()?);
    let tokens = u32::from_le_bytes(input.array()?) as usize;
    let state = u64::from_le_bytes(input.array()?);
    // Before anything is allocated for these numbers.
    if file_bytes(identity.len(), tokens, state) != Some(bytes) {
        return Err(damaged("it is cut, or its numbers are impossible"));
    }
    let tokens = input.bytes(tokens * size_of::<Token>())?;
    let sum = input.sum.clone().finalize();
    let kind = kind.filter(|_| !tokens.is_empty());
    let Some(kind) = kind.filter(|_| input.array().is_ok_and(|it| u32::from_le_bytes(it) == sum))
    else {
        return Err(damaged("a checksum is wrong"));
    };
    let (tokens, _) = tokens.as_chunks();
    Ok(Some(EntryHead {
        kind,
        scope,
        tokens: tokens.iter().map(|it| Token::from_le_bytes(*it)).collect(),
        state: usize::try_from(state).map_err(io::Error::other)?,
    }))
}

/// Reads the state behind a head.
///
/// # Errors
/// As [`read_head`].
pub(crate) fn read_state(input: &mut dyn Read, head: &EntryHead) -> io::Result<Vec<u8>> {
    let mut input = SummedInput {
        input,
        sum: Hasher::new(),
    };
    let state = input.bytes(head.state)?;
    let sum = input.sum.clone().finalize();
    if u32::from_le_bytes(input.array()?) != sum {
        return Err(damaged("a checksum is wrong"));
    }
    Ok(state)
}

struct SummedInput<'a> {
    input: &'a mut dyn Read,
    sum: Hasher,
}

impl SummedInput<'_> {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut array = [0; N];
        self.input.read_exact(&mut array)?;
        self.sum.update(&array);
        Ok(array)
    }

    fn bytes(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        let mut read = Vec::new();
        read.try_reserve_exact(bytes)?;
        self.input.take(bytes as u64).read_to_end(&mut read)?;
        if read.len() < bytes {
            return Err(damaged("it is cut"));
        }
        self.sum.update(&read);
        Ok(read)
    }
}

pub(crate) fn damaged(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: &str = "a model";

    const TOKENS: [Token; 3] = [1, 2, 300];

    fn state() -> Vec<u8> {
        (0..100).collect()
    }

    fn written(kind: EntryKind) -> Vec<u8> {
        let (head, tail) = around_state(
            IDENTITY,
            kind,
            7,
            &TOKENS,
            &[&state()[..40], &state()[40..]],
        );
        [&head, &state()[..], &tail].concat()
    }

    fn read(mut bytes: &[u8], identity: &str) -> io::Result<Option<(EntryHead, Vec<u8>)>> {
        let length = bytes.len() as u64;
        let Some(head) = read_head(&mut bytes, length, identity)? else {
            return Ok(None);
        };
        let state = read_state(&mut bytes, &head)?;
        Ok(Some((head, state)))
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        for kind in EntryKind::ALL {
            let (head, read) = read(&written(kind), IDENTITY).unwrap().unwrap();
            assert_eq!((head.kind, head.scope), (kind, 7));
            assert_eq!((&*head.tokens, read), (&TOKENS[..], state()));
        }
    }

    #[test]
    fn an_entry_of_another_model_is_not_read() {
        let bytes = written(EntryKind::Prefix);
        for other in ["b model", "a model of other settings", ""] {
            assert!(read(&bytes, other).unwrap().is_none(), "{other}");
        }
    }

    #[test]
    fn no_damaged_entry_is_read() {
        let bytes = written(EntryKind::Prefix);
        for at in 0..bytes.len() {
            assert!(read(&bytes[..at], IDENTITY).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                // A changed identity is another one.
                assert!(!matches!(read(&changed, IDENTITY), Ok(Some(_))), "{at}");
            }
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(read(&longer, IDENTITY).is_err());
    }
}
