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

    /// Reads the header, replaces what the options override, as llama.cpp will, and checks it. The bytes of its tensors are those
    /// of all parts of a split model.
    pub(super) fn header(&self, options: &LlamaOptions) -> Result<GgufHeader, LoadError> {
        let mut header = match self {
            Self::File(path) => {
                let mut header = header_of_file(path)?;
                // It describes the tensors of the first part alone, which may have none.
                let others = bytes_of_other_parts(path, &header);
                header.tensor_bytes = header.tensor_bytes.saturating_add(others);
                header
            }
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

/// Returns the bytes of the parts of a split model after the first. Their headers are small beside their tensors, and count too.
fn bytes_of_other_parts(first: &Path, header: &GgufHeader) -> u64 {
    let count = header.number("split.count").unwrap_or(1);
    let others = parts(first, count).into_iter().skip(1);
    others
        // llama.cpp reports a part that is missing when it is loaded.
        .filter_map(|part| std::fs::metadata(part).ok())
        .map(|metadata| metadata.len())
        .fold(0, u64::saturating_add)
}

/// The files of a model: those of a split one are named by their numbers.
pub(super) fn parts(path: &Path, count: u64) -> Vec<PathBuf> {
    let all = path.to_str().and_then(|name| {
        let (start, _) = name.rsplit_once("-00001-of-")?;
        let name = |part: u64| format!("{start}-{part:05}-of-{count:05}.gguf").into();
        (count <= PARTS_MAX).then(|| (1..=count).map(name).collect())
    });
    all.unwrap_or_else(|| vec![path.to_owned()])
}

/// Far more than any model has.
const PARTS_MAX: u64 = 1000;

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

#[cfg(test)]
mod tests {
    use super::super::random::{RandomModelShape, write};
    use super::*;

    #[test]
    fn all_parts_of_a_split_model_count() {
        let named = |name: &str, count| {
            let parts = parts(Path::new(name), count);
            parts
                .iter()
                .map(|it| it.display().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(named("/m/a.gguf", 1), ["/m/a.gguf"]);
        let both = ["/m/a-00001-of-00002.gguf", "/m/a-00002-of-00002.gguf"];
        assert_eq!(named(both[0], 2), both);
        assert_eq!(named(both[0], u64::MAX), [both[0]]);
    }

    #[test]
    fn the_weights_of_a_split_model_are_those_of_all_its_parts() {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("m-00001-of-00003.gguf");
        let written = |numbers| {
            let shape = RandomModelShape {
                numbers,
                ..RandomModelShape::tiny()
            };
            write(File::create(&first).unwrap(), &shape, 1).unwrap();
            let source = ModelSource::File(first.clone());
            let header = source.header(&LlamaOptions::default()).unwrap();
            header.tensor_bytes
        };
        for (part, bytes) in [(2, 1_000), (3, 500)] {
            let path = folder.path().join(format!("m-{part:05}-of-00003.gguf"));
            std::fs::write(path, vec![0; bytes]).unwrap();
        }
        let whole = written(Vec::new());
        assert_eq!(written(vec![("split.count".to_owned(), 3)]), whole + 1_500);
    }
}
