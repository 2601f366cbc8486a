//! [`PrefixFile`]: the saved prefixes of a model in a file, so that they outlive the process, or the time for which an idle
//! model is unloaded.
//!
//! Written when the engine ends, and read when it starts: between the two, prefixes are in memory. What the old file has
//! and the memory has not stays in the new one as far as there is room. All numbers are little-endian.
//!
//! ```text
//!   "SWPREFX1" | u32 length of the identity | identity
//!   then for each prefix, the most valuable last:
//!   u64 scope | u32 tokens | u64 bytes of the state | tokens, 4 bytes each | state | u32 CRC-32 of all of these
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

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

    /// Replaces the file with the most valuable prefixes of a store, and behind them those of the old file that the store does
    /// not cover; returns how many. On an error the old file stays.
    pub(crate) fn write(&self, store: &PrefixStore) -> io::Result<usize> {
        let folder = self.config.path.parent().unwrap_or_else(|| Path::new("."));
        create_private(folder)?;
        let staging = self.staging();
        let staged = create_locked(&staging)?;
        let written = self.write_to(&staged, store);
        let placed = written.and_then(|count| {
            staged.sync_all()?;
            std::fs::rename(&staging, &self.config.path)?;
            Ok(count)
        });
        if placed.is_err() {
            // What is incomplete is of no use. The first error is the one to report.
            let _ = std::fs::remove_file(&staging);
        }
        placed
    }

    fn write_to(&self, staged: &File, store: &PrefixStore) -> io::Result<usize> {
        let mut left = self.config.bytes;
        let mut fits = |bytes: u64| {
            let rest = left.checked_sub(bytes);
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let chosen = store.by_value().rev();
        let chosen: Vec<_> = chosen
            .take_while(|(_, prefix)| fits(file_bytes(prefix.tokens.len(), prefix.state.len())))
            .collect();
        // A file that cannot be read, or that is of another model, has nothing to keep.
        let old = self.open().ok().flatten();
        let mut kept = Vec::new();
        let mut old = match old {
            Some(mut input) => {
                let entries = uncovered(&mut input, store);
                let fitting = entries.into_iter().rev().take_while(|it| fits(it.bytes));
                kept.extend(fitting);
                Some(input)
            }
            None => None,
        };
        let mut out = BufWriter::with_capacity(1 << 20, staged);
        out.write_all(MAGIC)?;
        out.write_all(&length(self.identity.len()).to_le_bytes())?;
        out.write_all(self.identity.as_bytes())?;
        for entry in kept.iter().rev() {
            if let Some(old) = &mut old {
                old.seek(SeekFrom::Start(entry.at))?;
                io::copy(&mut old.take(entry.bytes), &mut out)?;
            }
        }
        for (scope, prefix) in chosen.iter().rev() {
            write_entry(&mut out, *scope, prefix)?;
        }
        out.flush()?;
        Ok(chosen.len() + kept.len())
    }

    /// Adds the prefixes of the file to a store; returns how many. A file of another model has none. Entries of more than
    /// `tokens_max` tokens, and those that the store has no room for, are passed over. What follows a damaged entry is ignored.
    pub(crate) fn read(&self, store: &mut PrefixStore, tokens_max: usize) -> io::Result<usize> {
        let Some(mut input) = self.open()? else {
            return Ok(0);
        };
        let mut count = 0;
        while let Some(head) = EntryHead::read(&mut input)? {
            if head.tokens > tokens_max || head.state > store.limit() {
                head.skip(&mut input)?;
                continue;
            }
            let (tokens, state) = head.read_rest(&mut input)?;
            store.insert(head.scope, &tokens, state);
            count += 1;
        }
        Ok(count)
    }

    /// Opens the file behind its identity; `None` if there is none, or if it is another model's.
    fn open(&self) -> io::Result<Option<BufReader<File>>> {
        // Before it is opened: opening a pipe waits for its writer.
        match std::fs::metadata(&self.config.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Ok(metadata) if !metadata.is_file() => {
                return Err(damaged("it is not a regular file"));
            }
            found => found?,
        };
        let mut input = BufReader::with_capacity(1 << 20, File::open(&self.config.path)?);
        if self.is_ours(&mut input)? {
            return Ok(Some(input));
        }
        tracing::info!(
            path = %self.config.path.display(),
            "the saved prefixes are of another model or of other settings, and are not used"
        );
        Ok(None)
    }

    /// Where a new file is until it is complete.
    fn staging(&self) -> PathBuf {
        let mut name = self.config.path.clone().into_os_string();
        name.push(".new");
        name.into()
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

/// Creates a file that only its owner can read: the tokens are those of prompts. One that a process has left which was killed
/// is replaced.
fn create_locked(path: &Path) -> io::Result<File> {
    let create = || {
        let mut options = OpenOptions::new();
        // Never a file that is there, which might be a link to another one.
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(path)
    };
    let created = match create() {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let left = OpenOptions::new().read(true).open(path)?;
            // Locked as long as the process lives that writes it.
            left.try_lock()?;
            std::fs::remove_file(path)?;
            create()?
        }
        created => created?,
    };
    created.try_lock()?;
    Ok(created)
}

/// The bytes of an entry in the file.
fn file_bytes(tokens: usize, state: usize) -> u64 {
    (ENTRY_HEAD + tokens * size_of::<Token>() + state + CHECKSUM) as u64
}

/// Bytes of the numbers before an entry's tokens, and of its checksum.
const ENTRY_HEAD: usize = 8 + 4 + 8;
const CHECKSUM: usize = 4;

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

/// An entry in a file.
struct FileEntry {
    at: u64,
    bytes: u64,
}

/// The whole entries of a file that a store does not cover, up to the first damage that their numbers show.
fn uncovered(input: &mut BufReader<File>, store: &PrefixStore) -> Vec<FileEntry> {
    let mut entries = Vec::new();
    let Ok(end) = input.get_ref().metadata().map(|it| it.len()) else {
        return entries;
    };
    while let Ok(at) = input.stream_position()
        && let Ok(Some(head)) = EntryHead::read(input)
        && at.saturating_add(head.file_bytes()) <= end
    {
        let Ok((tokens, _)) = head.read_tokens(input) else {
            break;
        };
        let bytes = head.file_bytes();
        if !store.is_covered(head.scope, &tokens) {
            entries.push(FileEntry { at, bytes });
        }
        if input.seek(SeekFrom::Start(at + bytes)).is_err() {
            break;
        }
    }
    entries
}

/// The numbers before an entry's tokens.
struct EntryHead {
    bytes: [u8; ENTRY_HEAD],
    scope: u64,
    tokens: usize,
    state: usize,
}

impl EntryHead {
    /// Reads the head of the next entry; `None` at the end of the file.
    fn read(input: &mut impl Read) -> io::Result<Option<Self>> {
        let bytes: [u8; ENTRY_HEAD] = match read_array(input) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        };
        let mut rest = &bytes[..];
        let scope = u64::from_le_bytes(read_array(&mut rest)?);
        let tokens = u32::from_le_bytes(read_array(&mut rest)?) as usize;
        let state = u64::from_le_bytes(read_array(&mut rest)?);
        let state = usize::try_from(state).unwrap_or(usize::MAX);
        if tokens == 0 || i64::try_from(state).is_err() {
            return Err(damaged("an entry has impossible numbers"));
        }
        Ok(Some(Self {
            bytes,
            scope,
            tokens,
            state,
        }))
    }

    fn file_bytes(&self) -> u64 {
        file_bytes(self.tokens, self.state)
    }

    /// Passes over the rest of the entry.
    fn skip(&self, input: &mut BufReader<File>) -> io::Result<()> {
        let rest = self.file_bytes() - ENTRY_HEAD as u64;
        input.seek_relative(rest.cast_signed())
    }

    fn read_tokens(&self, input: &mut impl Read) -> io::Result<(Vec<Token>, Hasher)> {
        let mut sum = Hasher::new();
        sum.update(&self.bytes);
        let tokens = read_bytes(input, self.tokens * size_of::<Token>(), &mut sum)?;
        let (tokens, _) = tokens.as_chunks();
        let tokens = tokens.iter().map(|&token| Token::from_le_bytes(token));
        Ok((tokens.collect(), sum))
    }

    fn read_rest(&self, input: &mut impl Read) -> io::Result<(Vec<Token>, Vec<u8>)> {
        let (tokens, mut sum) = self.read_tokens(input)?;
        let state = read_bytes(input, self.state, &mut sum)?;
        if u32::from_le_bytes(read_array(input)?) != sum.finalize() {
            return Err(damaged("a checksum is wrong"));
        }
        Ok((tokens, state))
    }
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
        // A second time it takes the place of the first, whose other prefixes stay, and nothing is left beside it.
        assert_eq!(file.write(&filled(2)).unwrap(), 5);
        let mut read = store();
        file.read(&mut read, 3).unwrap();
        let last = contents(&read).split_off(3);
        assert_eq!(last, contents(&filled(2)));
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
            let is_cut_between = at >= start && (at - start) % 136 < ENTRY_HEAD;
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

    /// A context that is shorter than the last time, or less memory.
    #[test]
    fn an_entry_that_is_too_long_is_passed_over_and_stays_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        let file = PrefixFile::new(&config, IDENTITY);
        let mut written = store();
        written.insert(0, &[9; 4], vec![1; 10]);
        written.insert(0, &[8; 2], vec![2; 100_000]);
        written.insert(0, &[7; 2], vec![3; 10]);
        assert_eq!(file.write(&written).unwrap(), 3);
        let mut read = PrefixStore::new(10_000, true);
        assert_eq!(file.read(&mut read, 3).unwrap(), 1);
        assert_eq!(contents(&read), [(0, vec![7; 2], vec![3; 10])]);
        assert_eq!(file.write(&read).unwrap(), 3);
        let mut again = store();
        assert_eq!(file.read(&mut again, 4).unwrap(), 3);
    }

    /// A prefix that a longer one serves is not kept beside it.
    #[test]
    fn a_covered_prefix_of_the_old_file_goes() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        let file = PrefixFile::new(&config, IDENTITY);
        file.write(&filled(3)).unwrap();
        let mut longer = store();
        longer.insert(0, &[0, 2, 3, 4], vec![1; 10]);
        assert_eq!(file.write(&longer).unwrap(), 3);
        std::fs::write(&config.path, b"SWPREFX1 and nothing of use").unwrap();
        assert_eq!(file.write(&longer).unwrap(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn what_a_killed_process_has_left_is_replaced_and_links_and_pipes_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder);
        let file = PrefixFile::new(&config, IDENTITY);
        file.write(&filled(1)).unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, file.staging()).unwrap();
        assert_eq!(file.write(&filled(2)).unwrap(), 2);
        assert_eq!(std::fs::read(&other).unwrap(), b"precious");
        // While another process writes, this one does not.
        let lock = create_locked(&file.staging()).unwrap();
        assert!(file.write(&filled(3)).is_err());
        drop(lock);
        assert_eq!(file.write(&filled(3)).unwrap(), 3);
        std::fs::remove_file(&config.path).unwrap();
        let pipe = std::process::Command::new("mkfifo")
            .arg(&config.path)
            .status();
        assert!(pipe.unwrap().success());
        assert!(file.read(&mut store(), 3).is_err());
    }
}
