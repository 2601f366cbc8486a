//! Tells whether two loaded models can use each other's saved slots: the same weights, and the same settings of all that
//! a state depends on.

use std::fmt::Write;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crc32fast::Hasher;

use super::llama;
use super::load::LoadOptions;
use super::load_error::LoadError;
use super::source::{ModelSource, parts};
use crate::gguf::GgufHeader;
use crate::llama_options::LlamaOptions;

/// Blocks of a file that are looked at, spread evenly over it, and their size: the weights of a fine-tuned model differ
/// everywhere, and reading all of a large file would take as long as loading it. The time of its last change is compared too.
const BLOCKS: u64 = 64;
const BLOCK_BYTES: u64 = 64 << 10;

/// What a model is loaded from, and how.
#[derive(Debug)]
pub(super) struct ModelOrigin {
    weights: OriginFiles,
    settings: String,
}

/// Opened before the model is loaded, so that they stay what was loaded if others take their names meanwhile.
#[derive(Debug)]
enum OriginFiles {
    Bytes(&'static [u8]),
    /// The parts of the model and the adapters.
    Files(Vec<OriginFile>),
    /// One of them cannot be opened, or was replaced.
    Unknown,
}

#[derive(Debug)]
struct OriginFile {
    path: PathBuf,
    file: File,
    /// Length and time of the last change when it was opened.
    stamp: (u64, u128),
}

impl ModelOrigin {
    /// Opens the files of a model that is about to be loaded, and which has so many.
    pub(super) fn new(source: &ModelSource, count: u64, options: &LoadOptions) -> Self {
        let adapters = options.lora.iter().map(|adapter| adapter.path.clone());
        let weights = match source {
            ModelSource::Bytes(bytes) if options.lora.is_empty() => OriginFiles::Bytes(bytes),
            // No reader of this program's model has adapters.
            ModelSource::Bytes(_) => OriginFiles::Unknown,
            ModelSource::File(path) => {
                let opened: io::Result<_> = parts(path, count)
                    .into_iter()
                    .chain(adapters)
                    .map(|path| OriginFile::open(&path))
                    .collect();
                opened.map_or(OriginFiles::Unknown, OriginFiles::Files)
            }
        };
        // What a saved slot does not depend on is set to one value. New options count until they are listed here, which is
        // the safe side. The layout of the cache, which many of these decide, counts in `identity`.
        let options = LoadOptions {
            context_tokens: None,
            cache_tokens: None,
            parallel: 1,
            kept_prefixes: None,
            threads: None,
            threads_batch: None,
            poll: 0,
            memory_bytes: None,
            draft: None,
            llama: LlamaOptions {
                batch_tokens: None,
                ubatch_tokens: None,
                mmap: None,
                mlock: None,
                numa: None,
                ..options.llama.clone()
            },
            ..options.clone()
        };
        Self {
            weights,
            settings: format!("{options:?}"),
        }
    }

    /// Opens the files of a model whose header was read, before anything waits.
    pub(super) fn of_header(
        source: &ModelSource,
        header: &GgufHeader,
        options: &LoadOptions,
    ) -> Self {
        let parts = header.number("split.count").unwrap_or(1);
        Self::new(source, parts, options)
    }

    /// Checks that a load finds the files that were looked at, which may have waited for other loads: llama.cpp opens them by their
    /// names, and some contents that nobody has looked at end the process.
    ///
    /// # Errors
    /// [`LoadError::Replaced`].
    pub(super) fn check_names(&self) -> Result<(), LoadError> {
        match self.is_replaced() {
            true => Err(LoadError::Replaced),
            false => Ok(()),
        }
    }

    /// Returns whether one of them was changed, or another file has taken its name, since they were opened.
    pub(super) fn is_replaced(&self) -> bool {
        match &self.weights {
            OriginFiles::Files(files) => files.iter().any(OriginFile::is_replaced),
            OriginFiles::Bytes(_) | OriginFiles::Unknown => false,
        }
    }

    /// From now on there is no identity: llama.cpp may have read other files.
    pub(super) fn forget(&mut self) {
        self.weights = OriginFiles::Unknown;
    }

    /// Returns the text that identifies saved slots of a context with so many KV caches. `long_rope`: whether it is so long that
    /// llama.cpp computes positions by the factors for long contexts, if the model has any. Reads parts of the files.
    ///
    /// # Errors
    /// If a file cannot be read, or was changed since it was opened.
    pub(super) fn identity(&self, caches: u32, long_rope: bool) -> io::Result<String> {
        // A state has a part for each KV cache, and llama.cpp reads no state with another number of them.
        let mut identity = format!(
            "sapwood {} ggml {} caches {caches} long rope {long_rope} {}",
            env!("CARGO_PKG_VERSION"),
            llama::library_version(),
            self.settings
        );
        match &self.weights {
            OriginFiles::Bytes(bytes) => {
                let _ = write!(identity, " bytes {:08x}", crc32fast::hash(bytes));
            }
            OriginFiles::Files(files) => {
                for file in files {
                    let ((bytes, changed), sum) = (file.stamp, file.sample()?);
                    let _ = write!(identity, " file {bytes} {changed} {sum:08x}");
                }
            }
            OriginFiles::Unknown => {
                return Err(io::Error::other(
                    "its files could not be opened, or were replaced while it was loaded",
                ));
            }
        }
        Ok(identity)
    }
}

impl OriginFile {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let stamp = stamp(&file.metadata()?)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            stamp,
        })
    }

    fn is_replaced(&self) -> bool {
        let id = |metadata: &Metadata| (metadata.dev(), metadata.ino());
        let opened = self.file.metadata().map(|metadata| id(&metadata));
        let is_same = |named: Metadata| {
            let is_opened = opened.is_ok_and(|opened| opened == id(&named));
            is_opened && stamp(&named).is_ok_and(|stamp| stamp == self.stamp)
        };
        !std::fs::metadata(&self.path).is_ok_and(is_same)
    }

    fn sample(&self) -> io::Result<u32> {
        let sum = sample(&self.file)?;
        if stamp(&self.file.metadata()?)? == self.stamp {
            Ok(sum)
        } else {
            Err(io::Error::other(
                "it was changed after the model was loaded",
            ))
        }
    }
}

fn stamp(metadata: &Metadata) -> io::Result<(u64, u128)> {
    let changed = metadata.modified()?.duration_since(UNIX_EPOCH);
    Ok((metadata.len(), changed.unwrap_or_default().as_nanos()))
}

/// Returns a checksum of blocks of a file.
fn sample(mut file: &File) -> io::Result<u32> {
    let bytes = file.metadata()?.len();
    let mut sum = Hasher::new();
    let mut block = Vec::new();
    for at in 0..BLOCKS {
        // The first one holds the header.
        file.seek(SeekFrom::Start(bytes / BLOCKS * at))?;
        block.clear();
        file.take(BLOCK_BYTES).read_to_end(&mut block)?;
        sum.update(&block);
    }
    Ok(sum.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama_options::CacheType;

    #[test]
    fn weights_and_settings_that_matter_make_another_identity() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let source = ModelSource::File(path.clone());
        let origin = |options: &LoadOptions| ModelOrigin::new(&source, 1, options);
        let identity = |options: &LoadOptions| origin(options).identity(1, false);
        let usual = LoadOptions::default();
        assert!(identity(&usual).is_err(), "there is no file");
        let mut bytes = vec![7; 8 << 20];
        std::fs::write(&path, &bytes).unwrap();
        let loaded = origin(&usual);
        assert!(!loaded.is_replaced());
        let first = loaded.identity(1, false).unwrap();
        assert_ne!(loaded.identity(4, false).unwrap(), first);
        assert_ne!(loaded.identity(1, true).unwrap(), first);
        let threads = LoadOptions {
            threads: Some(3),
            parallel: 2,
            ..LoadOptions::default()
        };
        assert_eq!(identity(&threads).unwrap(), first);
        let types = LoadOptions {
            llama: LlamaOptions {
                cache_type_k: Some(CacheType::Q8_0),
                ..LlamaOptions::default()
            },
            ..LoadOptions::default()
        };
        assert_ne!(identity(&types).unwrap(), first);
        // Another file takes its name: what was loaded is what it was.
        bytes[4 << 20] = 8;
        let other = folder.path().join("other.gguf");
        std::fs::write(&other, &bytes).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert!(loaded.is_replaced());
        assert_ne!(identity(&usual).unwrap(), first);
        assert_eq!(loaded.identity(1, false).unwrap(), first);
        // The file itself is changed: nobody knows what is in memory.
        let loaded = origin(&usual);
        bytes.truncate(7 << 20);
        std::fs::write(&path, &bytes).unwrap();
        assert!(loaded.identity(1, false).is_err());
        assert!(loaded.check_names().is_err());
    }
}
