//! Knows of which files this process has the weights mapped: another model of the same file has them in the same memory, apart
//! from what llama.cpp copies.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::gguf::GgufHeader;
use crate::llama_options::LlamaOptions;

/// A file by its device and inode, whatever its path.
type FileId = (u64, u64);

/// How many models have each file mapped.
static MAPPED: Mutex<BTreeMap<FileId, usize>> = Mutex::new(BTreeMap::new());

/// A file whose weights a model has mapped, until this is dropped.
#[derive(Debug)]
pub(super) struct MappedFile(FileId);

impl MappedFile {
    /// Records the first file of a model that is about to be loaded; `None` if it will not be mapped as a whole.
    pub(super) fn new(path: &Path, options: &LlamaOptions, gpu_layers: u32) -> Option<Self> {
        let id = id(path).filter(|_| is_mapped(options, gpu_layers))?;
        *files().entry(id).or_default() += 1;
        Some(Self(id))
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        let mut files = files();
        if let Some(models) = files.get_mut(&self.0) {
            *models -= 1;
            if *models == 0 {
                files.remove(&self.0);
            }
        }
    }
}

/// Returns how many bytes of its weights a model shares with models that are loaded, or being loaded, from the same file. Those
/// of further parts of a split model do not count: their types are not known here.
pub(super) fn shared_bytes(
    path: &Path,
    header: &GgufHeader,
    options: &LlamaOptions,
    gpu_layers: u32,
) -> u64 {
    let is_shared =
        is_mapped(options, gpu_layers) && id(path).is_some_and(|id| files().contains_key(&id));
    if !is_shared {
        return 0;
    }
    let tensors = header.tensors.values();
    tensors
        .filter(|tensor| !is_copied(tensor.kind()))
        .map(|tensor| tensor.bytes())
        .fold(0, u64::saturating_add)
}

/// Whether all weights stay where the file is mapped, but for those of copied types. llama.cpp copies what is elsewhere, and
/// what is placed by name may be.
fn is_mapped(options: &LlamaOptions, gpu_layers: u32) -> bool {
    let placed = options.override_tensor.as_ref();
    options.mmap.unwrap_or(true) && gpu_layers == 0 && placed.is_none_or(|it| it.is_empty())
}

/// Whether llama.cpp may copy tensors of this type of ggml into a layout for the processor, for each model again. Measured with
/// 90 MB of Q4_0: a second model of the file takes 89 MB more.
fn is_copied(kind: u32) -> bool {
    // For newer processors, which only a build that chooses among libraries computes for.
    let has_more = cfg!(feature = "dynamic-backends") || !cfg!(target_arch = "x86_64");
    match kind {
        // Q4_0, Q2_K, Q4_K, IQ4_NL and MXFP4: `ggml-cpu/repack.cpp` with AVX2 and AVX-512.
        2 | 10 | 12 | 20 | 39 => true,
        // F16, Q4_1, Q8_0, Q5_K, Q6_K and IQ4_XS: `ggml-cpu/amx`, or `repack.cpp` with NEON.
        1 | 3 | 8 | 13 | 14 | 23 => has_more,
        _ => false,
    }
}

fn id(path: &Path) -> Option<FileId> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

fn files() -> MutexGuard<'static, BTreeMap<FileId, usize>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::random::{RandomModelShape, write};
    use super::*;

    #[test]
    fn a_file_is_shared_by_all_its_names_while_it_is_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link, copy] =
            ["m.gguf", "link.gguf", "copy.gguf"].map(|it| folder.path().join(it));
        let mut bytes = Vec::new();
        write(&mut bytes, &RandomModelShape::tiny(), 1).unwrap();
        fs::write(&path, &bytes).unwrap();
        fs::hard_link(&path, &link).unwrap();
        fs::write(&copy, &bytes).unwrap();
        let header = GgufHeader::read(&bytes[..]).unwrap();
        let usual = LlamaOptions::default();
        let read = LlamaOptions {
            mmap: Some(false),
            ..LlamaOptions::default()
        };
        let shared = |path, options, layers| shared_bytes(path, &header, options, layers);
        assert_eq!(shared(&path, &usual, 0), 0);
        assert!(MappedFile::new(&path, &read, 0).is_none());
        assert!(MappedFile::new(&path, &usual, 1).is_none());
        let first = MappedFile::new(&path, &usual, 0).unwrap();
        let second = MappedFile::new(&link, &usual, 0).unwrap();
        drop(first);
        let all = shared(&path, &usual, 0);
        // Its matrices are Q8_0.
        let is_whole = all == header.tensor_bytes;
        assert_eq!(is_whole, !is_copied(8));
        assert!(all > 0, "its norms are F32");
        assert_eq!(shared(&link, &usual, 0), all);
        for (path, options, layers) in [(&copy, &usual, 0), (&path, &read, 0), (&path, &usual, 1)] {
            assert_eq!(shared(path, options, layers), 0);
        }
        drop(second);
        assert_eq!(shared(&path, &usual, 0), 0);
    }
}
