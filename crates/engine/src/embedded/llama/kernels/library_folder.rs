//! The folder with the libraries of llama.cpp, which must be one that only trusted users can write to.

use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use super::error::KernelsError;

/// Where libraries are, from the folder of the program, whose `build.rs` tells the system's loader the same.
const FOLDER: &str = "../lib/sapwood";

/// ggml looks for these names on all systems but Windows.
const PREFIX: &str = "libggml-";
/// Kernels for processors.
pub(super) const CPU_PREFIX: &str = "libggml-cpu-";
const SUFFIX: &str = ".so";

/// A folder and the back-ends in it, all of which only root and the owner of the program may write to.
#[derive(Debug)]
pub(super) struct LibraryFolder {
    path: PathBuf,
    /// Without `libggml-` and `.so`.
    names: BTreeSet<String>,
    /// Names of others, such as links that lead nowhere, and why they cannot be read.
    unreadable: Vec<(String, String)>,
}

impl LibraryFolder {
    /// # Errors
    /// [`KernelsError`]; a folder that is not to be trusted is not passed over.
    #[cfg_attr(
        not(feature = "dynamic-backends"),
        expect(dead_code, reason = "tests have no libraries beside them")
    )]
    pub(super) fn of_this_program() -> Result<Self, KernelsError> {
        let unreadable =
            |error: io::Error| KernelsError::Unreadable("the program".into(), error.to_string());
        let program = std::env::current_exe().map_err(unreadable)?;
        // Also if its file was replaced while it runs.
        let own = if cfg!(target_os = "linux") {
            Path::new("/proc/self/exe")
        } else {
            &program
        };
        let own = fs::metadata(own).map_err(unreadable)?;
        Self::beside(&program, owner(&own))
    }

    /// The folder of a program that belongs to this user.
    ///
    /// # Errors
    /// As above.
    pub(super) fn beside(program: &Path, user: u32) -> Result<Self, KernelsError> {
        let here = program.parent().unwrap_or(program);
        let found = here.join(FOLDER);
        if !has_libraries(&found) {
            return Err(KernelsError::NoFolder(found));
        }
        // As people see it, and without links, which others might change.
        let path = found.canonicalize().map_err(unreadable(&found))?;
        check(&path, user)?;
        check_above(&path, here, user)?;
        let (mut names, mut failed) = (BTreeSet::new(), Vec::new());
        for entry in fs::read_dir(&path).map_err(unreadable(&path))? {
            let entry = entry.map_err(unreadable(&path))?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| is_library(name)) else {
                continue;
            };
            let backend = name.strip_prefix(PREFIX);
            let backend = backend.and_then(|name| name.strip_suffix(SUFFIX));
            match (check(&entry.path(), user), backend) {
                (Ok(()), Some(backend)) => {
                    names.insert(backend.to_owned());
                }
                (Ok(()), None) => {}
                (Err(KernelsError::Unreadable(_, why)), Some(backend)) => {
                    failed.push((backend.to_owned(), format!("it cannot be read: {why}")));
                }
                (Err(error), _) => return Err(error),
            }
        }
        failed.sort();
        Ok(Self {
            path,
            names,
            unreadable: failed,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{PREFIX}{name}{SUFFIX}"))
    }

    /// Back-ends that cannot be read, and why.
    pub(super) fn unreadable(&self) -> &[(String, String)] {
        &self.unreadable
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Those that are not for processors.
    pub(super) fn others(&self) -> impl Iterator<Item = &str> {
        let names = self.names.iter().map(String::as_str);
        // `base` is what all of them share.
        names.filter(|name| !name.starts_with("cpu") && *name != "base")
    }
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> KernelsError {
    let path = path.to_owned();
    move |error| KernelsError::Unreadable(path.clone(), error.to_string())
}

/// `libllama.so.0` and `libggml-vulkan.so`: also what the system's loader takes.
fn is_library(name: &str) -> bool {
    name.starts_with("lib") && name.contains(SUFFIX)
}

fn has_libraries(folder: &Path) -> bool {
    // One that cannot be read is not passed over.
    fs::read_dir(folder).map_or_else(
        |error| error.kind() == io::ErrorKind::PermissionDenied,
        |mut entries| {
            entries.any(|entry| {
                entry.is_ok_and(|entry| entry.file_name().to_str().is_some_and(is_library))
            })
        },
    )
}

/// Whether only root and this user may write there.
fn check(path: &Path, user: u32) -> Result<(), KernelsError> {
    let found = fs::metadata(path).map_err(unreadable(path))?;
    if is_trusted(&found, user) {
        return Ok(());
    }
    Err(KernelsError::Untrusted(path.to_owned()))
}

/// Whether only root, this user and those who may replace the program, in the folder `here`, may replace a folder.
fn check_above(path: &Path, here: &Path, user: u32) -> Result<(), KernelsError> {
    let here = here.canonicalize().map_err(unreadable(here))?;
    let of_program = fs::metadata(&here).map_err(unreadable(&here))?;
    for above in path.ancestors().skip(1) {
        if here.starts_with(above) {
            break;
        }
        let found = fs::metadata(above).map_err(unreadable(above))?;
        if !may_hold(&found, &of_program, user) {
            return Err(KernelsError::Untrusted(above.to_owned()));
        }
    }
    Ok(())
}

/// Whether a folder may have the folder of libraries somewhere in it: others may not write to it, or replace nothing that is not
/// theirs (the sticky bit), or have the same rights in the folder of the program.
#[cfg(unix)]
fn may_hold(found: &Metadata, of_program: &Metadata, user: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let rights = |of: &Metadata| (of.uid(), of.gid(), of.mode() & 0o1022);
    let sticky = found.mode() & 0o1000 != 0 && [0, user].contains(&found.uid());
    is_trusted(found, user) || sticky || rights(found) == rights(of_program)
}

/// Without such permissions.
#[cfg(not(unix))]
fn may_hold(_: &Metadata, _: &Metadata, _: u32) -> bool {
    true
}

#[cfg(unix)]
fn is_trusted(found: &Metadata, user: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let by_others = found.mode() & 0o022 != 0;
    !by_others && [0, user].contains(&found.uid())
}

#[cfg(unix)]
fn owner(found: &Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(found)
}

/// Without such permissions.
#[cfg(not(unix))]
fn is_trusted(_: &Metadata, _: u32) -> bool {
    true
}

#[cfg(not(unix))]
fn owner(_: &Metadata) -> u32 {
    0
}
