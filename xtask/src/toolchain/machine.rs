//! The machine as the checks see it: its programs, libraries and variables. The real one, or a fake root in tests.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process;

/// Variables that change what a build finds.
const VARIABLES: [&str; 13] = [
    "CARGO_ENCODED_RUSTFLAGS",
    "CFLAGS",
    "CMAKE_GENERATOR",
    "CUDACXX",
    "CUDAFLAGS",
    "CXX",
    "CXXFLAGS",
    "LD_LIBRARY_PATH",
    "LIBCLANG_PATH",
    "LIBRARY_PATH",
    "LLVM_CONFIG_PATH",
    "RUSTFLAGS",
    "VULKAN_SDK",
];

/// Where programs, libraries and variables are looked up.
pub(crate) struct Machine {
    /// The root of the file system.
    root: PathBuf,
    /// The value of `PATH`; `None` uses the one of the process.
    path: Option<OsString>,
    variables: BTreeMap<&'static str, OsString>,
}

impl Machine {
    /// This machine.
    #[expect(
        clippy::disallowed_methods,
        reason = "these variables steer compilers, not the server"
    )]
    pub(crate) fn this() -> Self {
        let variables = VARIABLES
            .iter()
            .filter_map(|name| Some((*name, std::env::var_os(name)?)));
        Self {
            root: PathBuf::from("/"),
            path: None,
            variables: variables.collect(),
        }
    }

    /// A machine whose programs are those in `bin` below `root`.
    #[cfg(test)]
    pub(crate) fn fake(root: &Path, variables: &[(&'static str, OsString)]) -> Self {
        Self {
            root: root.to_owned(),
            path: Some(root.join("bin").into()),
            variables: variables.iter().cloned().collect(),
        }
    }

    /// A variable that is set and not empty.
    pub(crate) fn variable(&self, name: &str) -> Option<OsString> {
        self.variables
            .get(name)
            .filter(|value| !value.is_empty())
            .cloned()
    }

    /// A program of this machine.
    pub(super) fn command(&self, name: &str) -> Command {
        let mut command = process::program(name, &[]);
        if let Some(path) = &self.path {
            command.env("PATH", path);
        }
        command
    }

    /// Whether a program starts and prints its version.
    pub(super) fn answers(&self, name: &str) -> bool {
        process::succeeds(self.command(name).arg("--version"))
    }

    /// An absolute path, such as `/usr/lib`, on this machine.
    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The path of a temporary file.
    pub(super) fn scratch(&self, name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("sapwood-{}-{name}", std::process::id()))
    }
}

/// The folders in a folder, sorted by name; empty if the folder does not exist.
pub(super) fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    folders
}
