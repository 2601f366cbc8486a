//! The kernels of llama.cpp that compute on the processor: those that the program was compiled with or, with the feature
//! `dynamic-backends`, the best for this processor of the libraries beside the program.
//!
//! Libraries are looked for in `../lib/sapwood` from the program's folder; never in the current directory, nor on a
//! search path. llama.cpp would look in both, so its own search is never reached: nothing of it starts before kernels are loaded.

#[cfg(any(test, feature = "dynamic-backends"))]
mod built_libraries;
mod error;
#[cfg(any(test, feature = "dynamic-backends"))]
mod library_folder;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

#[cfg(any(test, feature = "dynamic-backends"))]
use self::built_libraries::BuiltLibraries;
pub use self::error::KernelsError;
#[cfg(any(test, feature = "dynamic-backends"))]
use self::library_folder::LibraryFolder;
use super::super::instructions;

/// The kernels that compute models on the processor, and the back-ends for GPUs that were loaded with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// What they need of the processor: the name of a variant as ggml names it, such as `haswell`, or names of instructions if
    /// they were compiled in.
    pub variant: String,
    /// The folder of their library; `None` if they were compiled in.
    pub folder: Option<PathBuf>,
    /// Other back-ends from that folder, such as `vulkan`.
    pub others: Vec<String>,
    /// Names of libraries there that are not used, as they cannot be, and why; without those that are for other processors.
    pub refused: Vec<(String, String)>,
}

impl fmt::Display for Kernels {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.variant)?;
        if let Some(folder) = &self.folder {
            write!(formatter, " of {}", folder.display())?;
        }
        for other in &self.others {
            write!(formatter, ", {other}")?;
        }
        Ok(())
    }
}

/// Returns the kernels of this process. Loads their library with the first call, if they are in one.
///
/// # Errors
/// [`KernelsError`], the same at each call.
pub fn kernels() -> Result<&'static Kernels, KernelsError> {
    static KERNELS: OnceLock<Result<Kernels, KernelsError>> = OnceLock::new();
    let kernels = KERNELS.get_or_init(find);
    kernels.as_ref().map_err(Clone::clone)
}

/// A missing instruction would end the process.
#[cfg(not(feature = "dynamic-backends"))]
fn find() -> Result<Kernels, KernelsError> {
    let compiled: Vec<_> = super::compiled_for().collect();
    let missing = compiled.iter().copied().filter(|it| !instructions::has(it));
    let missing: Vec<_> = missing.collect();
    if !missing.is_empty() {
        return Err(KernelsError::Processor(missing.join(", ")));
    }
    Ok(Kernels {
        variant: match compiled.is_empty() {
            true => std::env::consts::ARCH.to_owned(),
            false => compiled.join(" "),
        },
        folder: None,
        others: Vec::new(),
        refused: Vec::new(),
    })
}

#[cfg(feature = "dynamic-backends")]
fn find() -> Result<Kernels, KernelsError> {
    let folder = LibraryFolder::of_this_program()?;
    let built = BuiltLibraries::of_this_program();
    load_from(
        &folder,
        &built,
        instructions::has,
        super::backends::load_library,
    )
}

/// The variants of ggml's build (`ggml/src/CMakeLists.txt`), the best first, in the order of its own scores, with the instructions
/// that [`instructions::has`] knows. ggml asks the processor alone, so that the operating system may yet refuse what a
/// processor has; on ARM it asks the operating system, and refuses a library itself.
/// Without `sapphirerapids`: there are machines that report AMX, on which that variant dies of an illegal instruction.
#[cfg(any(test, feature = "dynamic-backends"))]
const VARIANTS: &[(&str, &[&str])] = &[
    (
        "zen4",
        &[
            "AVX2",
            "FMA",
            "F16C",
            "BMI2",
            "AVX512F",
            "AVX512-VBMI",
            "AVX512-VNNI",
            "AVX512-BF16",
        ],
    ),
    (
        "cooperlake",
        &[
            "AVX2",
            "FMA",
            "F16C",
            "BMI2",
            "AVX512F",
            "AVX512-VNNI",
            "AVX512-BF16",
        ],
    ),
    (
        "icelake",
        &[
            "AVX2",
            "FMA",
            "F16C",
            "BMI2",
            "AVX512F",
            "AVX512-VBMI",
            "AVX512-VNNI",
        ],
    ),
    (
        "cascadelake",
        &["AVX2", "FMA", "F16C", "BMI2", "AVX512F", "AVX512-VNNI"],
    ),
    (
        "cannonlake",
        &["AVX2", "FMA", "F16C", "BMI2", "AVX512F", "AVX512-VBMI"],
    ),
    ("skylakex", &["AVX2", "FMA", "F16C", "BMI2", "AVX512F"]),
    ("alderlake", &["AVX2", "FMA", "F16C", "BMI2", "AVX-VNNI"]),
    ("haswell", &["AVX2", "FMA", "F16C", "BMI2"]),
    ("piledriver", &["AVX", "FMA", "F16C"]),
    ("ivybridge", &["AVX", "F16C"]),
    ("sandybridge", &["AVX"]),
    ("sse42", &["SSE4.2"]),
    ("x64", &[]),
    ("armv9.2_2", &[]),
    ("armv9.2_1", &[]),
    ("armv8.6_2", &[]),
    ("armv8.6_1", &[]),
    ("armv8.2_3", &[]),
    ("armv8.2_2", &[]),
    ("armv8.2_1", &[]),
    ("armv8.0_1", &[]),
    ("apple_m4", &[]),
    ("apple_m2_m3", &[]),
    ("apple_m1", &[]),
];

/// Loads the back-ends of a folder that are not for the processor, and then the best kernels of those that are.
#[cfg(any(test, feature = "dynamic-backends"))]
fn load_from(
    folder: &LibraryFolder,
    built: &BuiltLibraries,
    has: impl Fn(&str) -> bool,
    mut load: impl FnMut(&std::path::Path) -> Result<(), String>,
) -> Result<Kernels, KernelsError> {
    // The system's loader has mapped them by now, but nothing of them has been called that a structure is passed to.
    for name in built.linked() {
        let path = folder.path().join(name);
        let checked = built.check(&path);
        checked.map_err(|why| KernelsError::OtherBuild(path, why))?;
    }
    let mut others = Vec::new();
    let mut refused = folder.unreadable().to_vec();
    // The order of llama.cpp, whose CPU backend is the last.
    for name in folder.others() {
        let path = folder.file(name);
        match built.check(&path).and_then(|()| load(&path)) {
            Ok(()) => others.push(name.to_owned()),
            Err(why) => refused.push((name.to_owned(), why)),
        }
    }
    let mut last = "there is none for it".to_owned();
    let mut chosen = None;
    for &(variant, needs) in VARIANTS {
        let name = format!("cpu-{variant}");
        if !folder.has(&name) || !needs.iter().all(|it| has(it)) {
            continue;
        }
        let path = folder.file(&name);
        if let Err(why) = built.check(&path) {
            last = format!("{variant}: {why}");
            refused.push((name, why));
            continue;
        }
        match load(&path) {
            Ok(()) => {
                chosen = Some(variant.to_owned());
                break;
            }
            Err(why) => {
                tracing::debug!(variant, why, "kernels are not used");
                last = format!("{variant}: {why}");
            }
        }
    }
    for (name, why) in &refused {
        tracing::warn!(
            name,
            why,
            "a library of llama.cpp is not used: it cannot be loaded"
        );
    }
    let path = folder.path().to_owned();
    let Some(variant) = chosen else {
        return Err(KernelsError::Unsupported(path, last));
    };
    Ok(Kernels {
        variant,
        folder: Some(path),
        others,
        refused,
    })
}
