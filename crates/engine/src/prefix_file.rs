//! [`PrefixFile`]: the saved prefixes of a model in a file, so that they outlive the process, or the time for which an idle
//! model is unloaded.
//!
//! Written whole when the engine ends, and read whole when it starts: between the two, prefixes are in memory. All
//! numbers are little-endian.
//!
//! ```text
//!   "SWPREFX1" | u32 length of the identity | identity
//!   then for each prefix, the most valuable last:
//!   u64 scope | u32 tokens | u64 bytes of the state | tokens, 4 bytes each | state | u32 CRC-32 of all of these
//! ```

use std::fs::File;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::Path;

use crc32fast::Hasher;
use sapwood_proto::steer::Token;

use crate::config::PrefixFileConfig;
use crate::prefix_store::{PrefixStore, SavedPrefix};

const MAGIC: &[u8; 8] = b"SWPREFX1";

/// A file of prefixes, and which model's they are.
#[derive(Debug)]
pub(crate) struct PrefixFile<'a> {
    config: &'a PrefixFileConfig,
    /// [`crate::model::Model::saved_identity`].
    identity: &'a str,
}

impl<'a> PrefixFile<'a> {
    pub(crate) const fn new(config: &'a PrefixFileConfig, identity: &'a str) -> Self {
        Self { config, identity }
    }

    /// Replaces the file with the most valuable prefixes of a store; returns how many. On an error the old file stays.
    pub(crate) fn write(&self, store: &PrefixStore) -> io::Result<usize> {
        let folder = self.config.path.parent().unwrap_or_else(|| Path::new("."));
        create_private(folder)?;
        // In the same folder, so that it can take the place of the old one. Only its owner can read it: the tokens are
        // those of prompts.
        let mut staged = tempfile::Builder::new()
            .prefix(".prefixes-")
            .tempfile_in(folder)?;
        let mut left = self.config.bytes;
        let chosen = store.by_value().rev().take_while(|(_, prefix)| {
            let fits = left.checked_sub(file_bytes(prefix));
            left = fits.unwrap_or(0);
            fits.is_some()
        });
        let chosen: Vec<_> = chosen.collect();
        let mut out = BufWriter::with_capacity(1 << 20, staged.as_file_mut());
        out.write_all(MAGIC)?;
        out.write_all(&length(self.identity.len()).to_le_bytes())?;
        out.write_all(self.identity.as_bytes())?;
        for (scope, prefix) in chosen.iter().rev() {
            write_entry(&mut out, *scope, prefix)?;
        }
        out.into_inner().map_err(io::IntoInnerError::into_error)?;
        staged.as_file().sync_all()?;
        staged.persist(&self.config.path)?;
        Ok(chosen.len())
    }

    /// Adds the prefixes of the file to a store, none of them longer than `tokens_max`; returns how many. A file of
    /// another model is none. What follows a damaged entry is ignored.
    pub(crate) fn read(&self, store: &mut PrefixStore, tokens_max: usize) -> io::Result<usize> {
        let file = match File::open(&self.config.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            opened => opened?,
        };
        let mut input = BufReader::with_capacity(1 << 20, file);
        if !self.is_ours(&mut input)? {
            tracing::info!(
                path = %self.config.path.display(),
                "the saved prefixes are of another model or of other settings, and are not used"
            );
            return Ok(0);
        }
        let mut count = 0;
        while let Some((scope, tokens, state)) = read_entry(&mut input, tokens_max, store.limit())?
        {
            store.insert(scope, &tokens, state);
            count += 1;
        }
        Ok(count)
    }

    fn is_ours(&self, input: &mut impl Read) -> io::Result<bool> {
        let mut magic = [0; 8];
        input.read_exact(&mut magic)?;
        let length = u32::from_le_bytes(read_array(input)?);
        if &magic != MAGIC || length as usize != self.identity.len() {
            return Ok(false);
        }
        let mut identity = vec![0; self.identity.len()];
        input.read_exact(&mut identity)?;
        Ok(identity == self.identity.as_bytes())
    }
}

/// Creates a folder that only its owner can list; one that exists stays as it is.
fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

fn file_bytes(prefix: &SavedPrefix) -> u64 {
    let bytes = ENTRY_HEAD + prefix.tokens.len() * size_of::<Token>() + prefix.state.len();
    bytes as u64
}

/// Bytes of an entry beside its tokens and its state.
const ENTRY_HEAD: usize = 8 + 4 + 8 + 4;

/// Neither a prompt nor the name of a model is longer.
fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn write_entry(out: &mut impl Write, scope: u64, prefix: &SavedPrefix) -> io::Result<()> {
    let mut sum = Hasher::new();
    let mut put = |bytes: &[u8]| {
        sum.update(bytes);
        out.write_all(bytes)
    };
    put(&scope.to_le_bytes())?;
    put(&length(prefix.tokens.len()).to_le_bytes())?;
    put(&(prefix.state.len() as u64).to_le_bytes())?;
    let tokens: Vec<u8> = prefix
        .tokens
        .iter()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    put(&tokens)?;
    put(&prefix.state)?;
    out.write_all(&sum.finalize().to_le_bytes())
}

type Entry = (u64, Vec<Token>, Vec<u8>);

/// Reads an entry; `None` at the end of the file.
fn read_entry(
    input: &mut impl Read,
    tokens_max: usize,
    state_max: usize,
) -> io::Result<Option<Entry>> {
    let mut sum = Hasher::new();
    let scope: [u8; 8] = match read_array(input) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let tokens: [u8; 4] = read_array(input)?;
    let state: [u8; 8] = read_array(input)?;
    for head in [&scope[..], &tokens, &state] {
        sum.update(head);
    }
    let tokens = u32::from_le_bytes(tokens) as usize;
    let state = usize::try_from(u64::from_le_bytes(state)).unwrap_or(usize::MAX);
    // Before anything of this size is allocated.
    if tokens == 0 || tokens > tokens_max || state > state_max {
        return Err(damaged("an entry is too long"));
    }
    let tokens = read_bytes(input, tokens * size_of::<Token>(), &mut sum)?;
    let state = read_bytes(input, state, &mut sum)?;
    if u32::from_le_bytes(read_array(input)?) != sum.finalize() {
        return Err(damaged("a checksum is wrong"));
    }
    let (tokens, _) = tokens.as_chunks();
    let tokens = tokens.iter().map(|&token| Token::from_le_bytes(token));
    Ok(Some((u64::from_le_bytes(scope), tokens.collect(), state)))
}

fn read_bytes(input: &mut impl Read, bytes: usize, sum: &mut Hasher) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    read.try_reserve_exact(bytes)?;
    input.take(bytes as u64).read_to_end(&mut read)?;
    if read.len() < bytes {
        return Err(damaged("it is cut"));
    }
    sum.update(&read);
    Ok(read)
}

fn read_array<const N: usize>(input: &mut impl Read) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    input.read_exact(&mut array)?;
    Ok(array)
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: &str = "a model";

    fn config(folder: &tempfile::TempDir) -> PrefixFileConfig {
        PrefixFileConfig {
            path: folder.path().join("deep/m.prefixes"),
            bytes: 1 << 20,
        }
    }

    fn store() -> PrefixStore {
        PrefixStore::new(1 << 20, true)
    }

    fn filled(count: u32) -> PrefixStore {
        let mut store = store();
        for of in 0..count {
            store.insert(u64::from(of % 2), &[of, 2, 3], vec![of as u8; 100]);
        }
        store
    }

    fn contents(store: &PrefixStore) -> Vec<(u64, Vec<Token>, Vec<u8>)> {
        let entries = store.by_value();
        let entries = entries.map(|(scope, it)| (scope, it.tokens.to_vec(), it.state.clone()));
        entries.collect()
    }

    #[test]
    fn prefixes_come_back_with_their_scopes_and_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        let file = PrefixFile::new(&config, IDENTITY);
        let mut read = store();
        assert_eq!(file.read(&mut read, 3).unwrap(), 0, "there is no file yet");
        let written = filled(5);
        assert_eq!(file.write(&written).unwrap(), 5);
        assert_eq!(file.read(&mut read, 3).unwrap(), 5);
        assert_eq!(contents(&read), contents(&written));
        // A second time it takes the place of the first, and nothing is left beside it.
        assert_eq!(file.write(&filled(2)).unwrap(), 2);
        let files = std::fs::read_dir(config.path.parent().unwrap()).unwrap();
        assert_eq!(files.count(), 1);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&config.path), 0o600);
            assert_eq!(mode(config.path.parent().unwrap()), 0o700);
        }
    }

    #[test]
    fn the_most_valuable_ones_fit_into_a_small_file() {
        let folder = tempfile::tempdir().unwrap();
        let config = PrefixFileConfig {
            bytes: 3 * 136,
            ..config(&folder)
        };
        let file = PrefixFile::new(&config, IDENTITY);
        let written = filled(5);
        assert_eq!(file.write(&written).unwrap(), 3);
        let mut read = store();
        file.read(&mut read, 3).unwrap();
        assert_eq!(contents(&read), contents(&written)[2..]);
    }

    #[test]
    fn a_file_of_another_model_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        PrefixFile::new(&config, IDENTITY)
            .write(&filled(2))
            .unwrap();
        for other in ["b model", "a model of other settings", ""] {
            let read = PrefixFile::new(&config, other).read(&mut store(), 3);
            assert_eq!(read.unwrap(), 0, "{other}");
        }
    }

    #[test]
    fn a_damaged_file_gives_what_is_before_the_damage() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        let file = PrefixFile::new(&config, IDENTITY);
        file.write(&filled(3)).unwrap();
        let whole = std::fs::read(&config.path).unwrap();
        let start = 8 + 4 + IDENTITY.len();
        for at in 0..whole.len() {
            let entries = at.saturating_sub(start) / 136;
            let is_cut_between = at >= start && (at - start) % 136 < 8;
            let mut read = store();
            std::fs::write(&config.path, &whole[..at]).unwrap();
            let result = file.read(&mut read, 3);
            assert_eq!(contents(&read).len(), entries, "{at}");
            assert_eq!(result.is_ok(), is_cut_between, "{at}");
            let mut changed = whole.clone();
            changed[at] ^= 0x80;
            std::fs::write(&config.path, changed).unwrap();
            let mut read = store();
            let _ = file.read(&mut read, 3);
            assert_eq!(contents(&read).len(), entries, "{at} changed");
        }
    }

    #[test]
    fn an_entry_that_is_too_long_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        let file = PrefixFile::new(&config, IDENTITY);
        file.write(&filled(1)).unwrap();
        assert!(file.read(&mut store(), 2).is_err());
        assert!(file.read(&mut PrefixStore::new(99, true), 3).is_err());
    }
}
