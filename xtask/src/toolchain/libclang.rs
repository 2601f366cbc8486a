//! Looks for libclang the way `clang-sys` does, which the build of llama.cpp's bindings uses, and for the headers that
//! belong to libclang and that it cannot work without.
//!
//! `libclang-cpp.so` and `libLLVM.so` come with LLVM's own packages and are other libraries.

use std::path::{Path, PathBuf};

use super::machine::{Machine, folders_in};
use crate::process;

/// The library that a build would load, if there is one.
pub(super) fn library(machine: &Machine) -> Option<PathBuf> {
    // If the variable is set, no other place is searched.
    if let Some(path) = machine.variable("LIBCLANG_PATH") {
        let path = PathBuf::from(path);
        return if is_libclang(&path) {
            Some(path)
        } else {
            in_folder(&path)
        };
    }
    search_folders(machine)
        .iter()
        .find_map(|folder| in_folder(folder))
}

/// Whether libclang finds `stddef.h` and similar headers, which belong to the compiler and not to the C library.
pub(super) fn headers_present(machine: &Machine) -> bool {
    // The headers of a clang on the `PATH` are used before libclang's own.
    if machine.answers("clang") {
        return true;
    }
    let Some(library) = library(machine) else {
        return false;
    };
    // Debian's library in /usr/lib/TRIPLE is a link to the one with the headers beside it.
    let real = std::fs::canonicalize(&library).unwrap_or_else(|_| library.clone());
    let beside = [library, real];
    let beside = beside.iter().filter_map(|library| library.parent());
    beside
        .flat_map(|folder| [folder.join("clang"), folder.join("../lib/clang")])
        .any(|folder| {
            folders_in(&folder)
                .iter()
                .any(|version| version.join("include/stddef.h").is_file())
        })
}

/// An addition to the error of a missing libclang, if a variable prevents it from being found.
pub(super) fn path_hint(machine: &Machine) -> &'static str {
    if machine.variable("LIBCLANG_PATH").is_some() && library(machine).is_none() {
        "; LIBCLANG_PATH is set and holds no libclang: unset it"
    } else {
        ""
    }
}

/// In the order of `clang-sys`: the output of llvm-config, the paths of the loader and the linker, then the usual
/// places.
fn search_folders(machine: &Machine) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let config = machine
        .variable("LLVM_CONFIG_PATH")
        .unwrap_or_else(|| "llvm-config".into());
    let config = config.to_string_lossy();
    if let Ok(prefix) = process::output(machine.command(&config).arg("--prefix")) {
        let prefix = PathBuf::from(prefix.trim());
        folders.extend(["bin", "lib", "lib64"].map(|name| prefix.join(name)));
    }
    for name in ["LD_LIBRARY_PATH", "LIBRARY_PATH"] {
        folders.extend(
            machine
                .variable(name)
                .iter()
                .flat_map(std::env::split_paths),
        );
    }
    for base in ["/usr/local", "/usr"] {
        let libraries = folders_in(&machine.at(base))
            .into_iter()
            .filter(|folder| starts_with(folder, "lib"));
        for folder in libraries {
            let below = folders_in(&folder);
            let twice = below.iter().flat_map(|folder| folders_in(folder));
            folders.extend(twice);
            folders.extend(below);
            folders.push(folder);
        }
    }
    for homebrew in ["/opt/homebrew/opt/llvm/lib", "/usr/local/opt/llvm/lib"] {
        folders.push(machine.at(homebrew));
    }
    folders
}

fn in_folder(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| is_libclang(path))
        .collect();
    found.sort();
    found.pop()
}

/// `libclang.so`, `libclang.so.1`, `libclang-14.so`, `libclang-14.so.1`: matches the name and the file. A dangling link
/// does not match.
fn is_libclang(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let versioned = name
        .strip_prefix("libclang-")
        .and_then(|rest| rest.split_once(".so"))
        .is_some_and(|(version, _)| version.chars().all(|c| c.is_ascii_digit() || c == '.'));
    let plain = name == "libclang.so" || name.starts_with("libclang.so.");
    name == "libclang.dylib" && path.is_file() || (plain || versioned) && is_elf(path)
}

fn is_elf(path: &Path) -> bool {
    use std::io::Read;
    let mut start = [0; 4];
    std::fs::File::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok())
        && start == *b"\x7fELF"
}

fn starts_with(path: &Path, start: &str) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(start))
}
