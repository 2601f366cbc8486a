//! Tells whether two loaded models can use each other's saved slots: the same weights, and the same settings of all that
//! a state depends on.

use std::fmt::Write;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use crc32fast::Hasher;

use super::llama;
use super::load::LoadOptions;
use super::source::ModelSource;
use crate::llama_options::{LlamaOptions, LoraAdapter};

/// Blocks of a file that are looked at, spread evenly over it, and their size: the weights of a fine-tuned model differ
/// everywhere, and reading all of a large file would take as long as loading it.
const BLOCKS: u64 = 64;
const BLOCK_BYTES: u64 = 64 << 10;

/// What a model was loaded from, and how.
#[derive(Debug)]
pub(super) struct ModelOrigin {
    source: ModelSource,
    adapters: Vec<LoraAdapter>,
    settings: String,
}

impl ModelOrigin {
    pub(super) fn new(source: &ModelSource, options: &LoadOptions) -> Self {
        // What a saved slot does not depend on is set to one value. New options count until they are listed here, which is
        // the safe side.
        let options = LoadOptions {
            context_tokens: None,
            cache_tokens: None,
            parallel: 1,
            kept_prefixes: None,
            threads: None,
            threads_batch: None,
            poll: 0,
            memory_bytes: None,
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
            source: source.clone(),
            adapters: options.lora.clone(),
            settings: format!("{options:?}"),
        }
    }

    /// Returns the text that identifies saved slots. Reads parts of the file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn identity(&self) -> io::Result<String> {
        let (bytes, sum) = match &self.source {
            ModelSource::Bytes(bytes) => (bytes.len() as u64, crc32fast::hash(bytes)),
            ModelSource::File(path) => sample(File::open(path)?)?,
        };
        let mut identity = format!(
            "sapwood {} ggml {} file {bytes} {sum:08x} {}",
            env!("CARGO_PKG_VERSION"),
            llama::library_version(),
            self.settings
        );
        for adapter in &self.adapters {
            let (bytes, sum) = sample(File::open(&adapter.path)?)?;
            let _ = write!(identity, " adapter {bytes} {sum:08x}");
        }
        Ok(identity)
    }
}

/// Returns the length of a file, and a checksum of blocks of it.
fn sample(mut file: File) -> io::Result<(u64, u32)> {
    let bytes = file.metadata()?.len();
    let mut sum = Hasher::new();
    let mut block = Vec::new();
    for at in 0..BLOCKS {
        // The first one holds the header.
        file.seek(SeekFrom::Start(bytes / BLOCKS * at))?;
        block.clear();
        (&mut file).take(BLOCK_BYTES).read_to_end(&mut block)?;
        sum.update(&block);
    }
    Ok((bytes, sum.finalize()))
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
        let identity = |options: &LoadOptions| ModelOrigin::new(&source, options).identity();
        let usual = LoadOptions::default();
        assert!(identity(&usual).is_err(), "there is no file");
        let mut bytes = vec![7; 8 << 20];
        std::fs::write(&path, &bytes).unwrap();
        let first = identity(&usual).unwrap();
        let threads = LoadOptions {
            threads: Some(3),
            parallel: 2,
            ..LoadOptions::default()
        };
        assert_eq!(identity(&threads).unwrap(), first);
        let layers = LoadOptions {
            llama: LlamaOptions {
                cache_type_k: Some(CacheType::Q8_0),
                ..LlamaOptions::default()
            },
            ..LoadOptions::default()
        };
        assert_ne!(identity(&layers).unwrap(), first);
        bytes[4 << 20] = 8;
        std::fs::write(&path, &bytes).unwrap();
        assert_ne!(identity(&usual).unwrap(), first);
    }
}
