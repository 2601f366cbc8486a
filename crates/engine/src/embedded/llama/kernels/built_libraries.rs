//! The libraries of llama.cpp as they were when this program was linked with them: those beside it must be the same.
//!
//! Libraries of two builds can have the same names and versions and yet disagree about their structures, which shows as wrong text,
//! if at all; and the first access to the missing end of a library that was copied in part ends the process. That can be checked in
//! time for back-ends. Those that the program is linked with are mapped by the system's loader before `main`, and one without its
//! end may end the process there (`Bus error`): what is checked then is that they are of the same build.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::library_folder::CPU_PREFIX;

/// Name, length in bytes and CRC-32 of each.
#[derive(Debug)]
pub(super) struct BuiltLibraries(BTreeMap<String, (u64, u32)>);

impl BuiltLibraries {
    /// As `build.rs` has found them.
    #[cfg(feature = "dynamic-backends")]
    pub(super) fn of_this_program() -> Self {
        Self::parse(env!("SAPWOOD_LIBRARIES"))
    }

    /// Reads `NAME:BYTES:CRC` for each, with commas between; the CRC in hexadecimal digits.
    pub(super) fn parse(list: &str) -> Self {
        let libraries = list.split(',').filter_map(|library| {
            let (name, rest) = library.split_once(':')?;
            let (bytes, crc) = rest.split_once(':')?;
            let crc = u32::from_str_radix(crc, 16).ok()?;
            Some((name.to_owned(), (bytes.parse().ok()?, crc)))
        });
        Self(libraries.collect())
    }

    /// Those that the program is linked with, such as `libllama.so.0`.
    pub(super) fn linked(&self) -> impl Iterator<Item = &str> {
        let names = self.0.keys().map(String::as_str);
        names.filter(|name| !name.ends_with(".so"))
    }

    /// Checks a library before it is loaded. A back-end for GPUs may be one that this build did not make, and then need only be whole.
    ///
    /// # Errors
    /// Why it must not be loaded.
    pub(super) fn check(&self, path: &Path) -> Result<(), String> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.unwrap_or_default();
        let same = match self.0.get(name) {
            Some(&built) => is_same(path, built),
            None if name.starts_with(CPU_PREFIX) => Ok(false),
            None => {
                return match is_whole(path) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err("it is damaged, or copied in part".to_owned()),
                    Err(error) => Err(unreadable(&error)),
                };
            }
        };
        match same {
            Ok(true) => Ok(()),
            Ok(false) => Err("it is damaged, or of another build than this program".to_owned()),
            Err(error) => Err(unreadable(&error)),
        }
    }
}

fn unreadable(error: &io::Error) -> String {
    format!("it cannot be read: {error}")
}

fn is_same(path: &Path, (bytes, crc): (u64, u32)) -> io::Result<bool> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() != bytes {
        return Ok(false);
    }
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize() == crc),
            read => hasher.update(&buffer[..read]),
        }
    }
}

/// Whether an ELF file of 64 bits has all that its headers tell of. The table of sections is at its end, so that it is missing, or
/// zeros, where the file was not copied to the end.
fn is_whole(path: &Path) -> io::Result<bool> {
    if !cfg!(target_os = "linux") {
        return Ok(true);
    }
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut header = [0; 64];
    if length < 64 {
        return Ok(false);
    }
    file.read_exact(&mut header)?;
    let word = |at: usize| u64::from(header[at]) | u64::from(header[at + 1]) << 8;
    let [sections, segments] = [0x28, 0x20].map(|at| offset(&header, at));
    // The size of an entry and their number, of the format (elf(5)).
    let (segment_bytes, segment_count) = (word(0x36), word(0x38));
    let (section_bytes, section_count) = (word(0x3a), word(0x3c));
    if !header.starts_with(b"\x7fELF\x02") || segment_bytes != 56 || section_bytes != 64 {
        return Ok(false);
    }
    let ends = |start: u64, bytes: u64| start.checked_add(bytes).is_some_and(|end| end <= length);
    if !ends(sections, 64 * section_count) || !ends(segments, 56 * segment_count) {
        return Ok(false);
    }
    let mut segment = [0; 56];
    for index in 0..segment_count {
        file.seek(SeekFrom::Start(segments + 56 * index))?;
        file.read_exact(&mut segment)?;
        // Where it starts in the file, and its bytes there.
        if !ends(offset(&segment, 0x08), offset(&segment, 0x20)) {
            return Ok(false);
        }
    }
    // The section with the names of sections is a table of strings (3).
    let mut kind = [0; 4];
    file.seek(SeekFrom::Start(
        sections.saturating_add(64 * word(0x3e) + 4),
    ))?;
    let read = file.read_exact(&mut kind);
    Ok(read.is_ok() && kind == [3, 0, 0, 0])
}

/// Eight bytes of a header, the lowest first.
fn offset(header: &[u8], at: usize) -> u64 {
    let bytes = header[at..at + 8].iter().rev();
    bytes.fold(0, |number, &byte| number << 8 | u64::from(byte))
}
