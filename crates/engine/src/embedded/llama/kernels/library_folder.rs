//! The folder with the libraries of llama.cpp, which must be one that only trusted users can write to.

use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};

use super::error::KernelsError;

/// Where libraries are, from the folder of the program.
const FOLDERS: [&str; 2] = ["lib/sapwood", "../lib/sapwood"];

/// ggml looks for these names on all systems but Windows.
const PREFIX: &str = "libggml-";
const SUFFIX: &str = ".so";

/// A folder and the back-ends in it, all of which only root and the owner of the program may write to.
#[derive(Debug)]
pub(super) struct LibraryFolder {
    path: PathBuf,
    /// Without `libggml-` and `.so`.
    names: BTreeSet<String>,
}

impl LibraryFolder {
    /// # Errors
    /// [`KernelsError`]; a folder that is not to be trusted is not passed over.
    #[cfg_attr(
        not(feature = "dynamic-backends"),
        expect(dead_code, reason = "tests have no libraries beside them")
    )]
    pub(super) fn of_this_program() -> Result<Self, KernelsError> {
        let unreadable = |error: std::io::Error| {
            KernelsError::Unreadable("the program".into(), error.to_string())
        };
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
        let folders = FOLDERS.map(|folder| here.join(folder));
        let Some(found) = folders.iter().find(|folder| folder.is_dir()) else {
            return Err(KernelsError::NoFolder(folders.to_vec()));
        };
        // As people see it, and without links, which others might change.
        let path = found.canonicalize().map_err(unreadable(found))?;
        check(&path, user)?;
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(&path).map_err(unreadable(&path))? {
            let entry = entry.map_err(unreadable(&path))?;
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            let Some(name) = name.and_then(|name| name.strip_suffix(SUFFIX)) else {
                continue;
            };
            check(&entry.path(), user)?;
            names.insert(name.to_owned());
        }
        Ok(Self { path, names })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{PREFIX}{name}{SUFFIX}"))
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

fn unreadable(path: &Path) -> impl Fn(std::io::Error) -> KernelsError {
    let path = path.to_owned();
    move |error| KernelsError::Unreadable(path.clone(), error.to_string())
}

/// Whether only root and this user may write there. Who may change the folders above it may replace the program as well.
fn check(path: &Path, user: u32) -> Result<(), KernelsError> {
    let found = fs::metadata(path).map_err(unreadable(path))?;
    if is_trusted(&found, user) {
        return Ok(());
    }
    Err(KernelsError::Untrusted(path.to_owned()))
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
