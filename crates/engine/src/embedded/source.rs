//! Where a model's bytes are, and the header that all checks read.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use super::load_error::LoadError;
use crate::gguf::{self, GgufHeader, checks};
use crate::llama_options::LlamaOptions;

/// The source of a model.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A GGUF file.
    File(PathBuf),
    /// A GGUF file embedded in the program.
    Bytes(&'static [u8]),
}

impl ModelSource {
    /// Returns the path that messages name.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Bytes(_) => Path::new("the model in this program"),
        }
    }

    /// Reads the header, replaces what the options override, as llama.cpp will, and checks it.
    pub(super) fn header(&self, options: &LlamaOptions) -> Result<GgufHeader, LoadError> {
        let mut header = match self {
            Self::File(path) => header_of_file(path)?,
            Self::Bytes(bytes) => header_of(*bytes, bytes.len() as u64, self.path())?,
        };
        for (key, value) in options.overrides().map_err(LoadError::Option)? {
            let replaced = header.replace(key, value);
            replaced.map_err(LoadError::Option)?;
        }
        // After the replacement: llama.cpp asserts what it then uses.
        match checks::check(&header) {
            Ok(()) => Ok(header),
            Err(why) => Err(LoadError::Damaged {
                path: self.path().to_owned(),
                why: match options.override_kv {
                    Some(_) => format!("with override_kv, {why}"),
                    None => why,
                },
            }),
        }
    }
}

pub(super) fn header_of_file(path: &Path) -> Result<GgufHeader, LoadError> {
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => LoadError::Missing(path.to_owned()),
        _ => LoadError::Unreadable {
            path: path.to_owned(),
            error,
        },
    };
    // Checked before the file is opened: opening a pipe blocks until it has a writer.
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(LoadError::NotAFile(path.to_owned()));
    }
    let file = File::open(path).map_err(unreadable)?;
    header_of(BufReader::new(file), metadata.len(), path)
}

fn header_of(bytes: impl Read, length: u64, path: &Path) -> Result<GgufHeader, LoadError> {
    let path = path.to_owned();
    match GgufHeader::read(bytes) {
        // Checked here, because a mapped file that is too short ends the process when its missing pages are read.
        Ok(header) if header.file_bytes > length => Err(LoadError::Truncated {
            path,
            have: length,
            need: header.file_bytes,
        }),
        Ok(header) if header.text("general.architecture").is_none() => Err(LoadError::Damaged {
            path,
            why: "it names no architecture".to_owned(),
        }),
        Ok(header) => Ok(header),
        Err(gguf::Error::Magic) => Err(LoadError::NotGguf(path)),
        Err(error) => Err(LoadError::Damaged {
            path,
            why: error.to_string(),
        }),
    }
}

/// A copy of an embedded model as a file that is removed when this value is dropped. A mapping of it stays valid.
pub(super) struct StagedFile {
    #[cfg(target_os = "linux")]
    _file: File,
    #[cfg(not(target_os = "linux"))]
    _file: tempfile::NamedTempFile,
    pub(super) path: PathBuf,
}

impl StagedFile {
    #[cfg(target_os = "linux")]
    pub(super) fn new(bytes: &[u8]) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        let descriptor =
            // The descriptor has no name that another process could open, and does not outlive this process.
            rustix::fs::memfd_create("sapwood-model", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(descriptor);
        file.write_all(bytes)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Self { _file: file, path })
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn new(bytes: &[u8]) -> io::Result<Self> {
        // Under a name of its own: other models may be loading, and a process that crashed may have left its file.
        let mut file = tempfile::NamedTempFile::with_suffix(".gguf")?;
        file.write_all(bytes)?;
        let path = file.path().to_owned();
        Ok(Self { _file: file, path })
    }
}
