//! [`ArchiveFolder`]: a folder that is packed so that equal files give an equal archive.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::process;

/// The binary. It is not beside `lib`, so that the binary can look in `../lib/sapwood` alone: a second place, which would be outside
/// of the archive, would be searched by the system's loader for all libraries.
pub(super) const PROGRAM: &str = "bin/sapwood";

/// Where the binary looks for libraries: its `build.rs` names it for the system's loader, `LibraryFolder` for kernels.
const LIBRARIES: &str = "lib/sapwood";

/// The variant with AMX, which the engine never chooses.
const NEVER_LOADED: &str = "libggml-cpu-sapphirerapids.so";

/// A new folder with what is shipped. Only its owner may write to it: the binary loads nothing from folders of which that is not
/// so.
pub(super) struct ArchiveFolder(PathBuf);

impl ArchiveFolder {
    /// Removes the archive of an earlier run too: it would be taken for that of this run if this one fails.
    ///
    /// # Errors
    /// The old one cannot be removed, or the new one not created.
    pub(super) fn create(archives: &Path, name: &str) -> Result<Self> {
        let folder = archives.join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let this = Self(folder);
        match fs::remove_file(this.archive()) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                let archive = this.archive();
                return Err(error).context(format!("cannot remove {}", archive.display()));
            }
            _ => {}
        }
        for made in ["", "bin", "lib", LIBRARIES] {
            let made = this.0.join(made);
            fs::create_dir_all(&made)?;
            fs::set_permissions(made, Permissions::from_mode(0o755))?;
        }
        Ok(this)
    }

    /// The path that [`ArchiveFolder::pack`] writes to.
    fn archive(&self) -> PathBuf {
        let mut archive = self.0.clone().into_os_string();
        archive.push(".tar.gz");
        archive.into()
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn add(&self, from: &Path, name: &str) -> Result<()> {
        self.copy(from, name, 0o644)
    }

    pub(super) fn add_program(&self, from: &Path) -> Result<()> {
        self.copy(from, PROGRAM, 0o755)
    }

    /// The files that were added.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>> {
        let (mut files, mut folders) = (Vec::new(), vec![self.0.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let entry = entry?;
                match entry.file_type()?.is_dir() {
                    true => folders.push(entry.path()),
                    false => files.push(entry.path()),
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// Adds the libraries that llama.cpp's build has installed below `out`: those that the binary is linked with, by the names
    /// that it asks for (`libllama.so.0`), and its back-ends.
    ///
    /// # Errors
    /// One of them cannot be copied, or there are none.
    pub(super) fn add_libraries(&self, out: &Path) -> Result<()> {
        let mut added = [0, 0];
        for (count, folder, wanted) in [
            (0, "lib", is_linked as fn(&str) -> bool),
            (0, "lib64", is_linked),
            (1, "backends", is_backend),
        ] {
            for entry in fs::read_dir(out.join(folder)).into_iter().flatten() {
                let path = entry?.path();
                let name = path.file_name().and_then(|name| name.to_str());
                if let Some(name) = name.filter(|name| wanted(name)) {
                    self.copy(&path, &format!("{LIBRARIES}/{name}"), 0o644)?;
                    added[count] += 1;
                }
            }
        }
        ensure!(
            added.iter().all(|&count| count > 0),
            "the build of llama.cpp has left no libraries in {}",
            out.display()
        );
        Ok(())
    }

    fn copy(&self, from: &Path, name: &str, mode: u32) -> Result<()> {
        let to = self.0.join(name);
        let copied = fs::copy(from, &to);
        copied.with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(fs::set_permissions(&to, Permissions::from_mode(mode))?)
    }

    /// Packs the folder beside itself; its files have this time, in seconds. Returns the path.
    ///
    /// # Errors
    /// There is no GNU tar, or it fails.
    pub(super) fn pack(&self, time: u64) -> Result<PathBuf> {
        let archive = self.archive();
        let (parent, name) = (self.0.parent(), self.0.file_name());
        let (parent, name) = parent.zip(name).context("the folder has no name")?;
        let mut tar = process::program("tar", &["--sort=name", "--format=gnu"]);
        tar.args(["--owner=0", "--group=0", "--numeric-owner"]);
        tar.arg(format!("--mtime=@{time}"));
        // Without the time and the name that gzip would note.
        tar.args(["--use-compress-program", "gzip -9 -n"]);
        tar.arg("--create").arg("--file").arg(&archive);
        process::run(tar.arg("--directory").arg(parent).arg(name))?;
        Ok(archive)
    }
}

/// `libllama.so.0`, not the links to it of other names.
fn is_linked(name: &str) -> bool {
    let version = name.split_once(".so.").map(|(_, version)| version);
    version.is_some_and(|version| version.parse::<u32>().is_ok())
}

fn is_backend(name: &str) -> bool {
    name.starts_with("libggml-") && name.ends_with(".so") && name != NEVER_LOADED
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// What cmake installs.
    fn built() -> tempfile::TempDir {
        let out = tempfile::tempdir().unwrap();
        let (lib, backends) = (out.path().join("lib"), out.path().join("backends"));
        fs::create_dir(&lib).unwrap();
        fs::create_dir(&backends).unwrap();
        for name in ["libllama", "libggml", "libggml-base"] {
            fs::write(lib.join(format!("{name}.so.0.9.1")), name).unwrap();
            symlink(format!("{name}.so.0.9.1"), lib.join(format!("{name}.so.0"))).unwrap();
            symlink(format!("{name}.so.0"), lib.join(format!("{name}.so"))).unwrap();
        }
        for name in ["cpu-sapphirerapids", "cpu-x64", "cpu-zen4"] {
            let name = format!("libggml-{name}.so");
            fs::write(backends.join(format!("{name}.0.9.1")), &name).unwrap();
            symlink(format!("{name}.0.9.1"), backends.join(name)).unwrap();
        }
        fs::write(lib.join("libllama.a"), "").unwrap();
        out
    }

    fn folder(archives: &Path) -> ArchiveFolder {
        let folder = ArchiveFolder::create(archives, "sapwood-1").unwrap();
        folder.add_libraries(built().path()).unwrap();
        folder
            .add_program(&built().path().join("lib/libllama.so"))
            .unwrap();
        folder
    }

    #[test]
    fn each_library_is_there_once_by_the_name_that_is_asked_for() {
        let archives = tempfile::tempdir().unwrap();
        let folder = folder(archives.path());
        let libraries = folder.path().join(LIBRARIES);
        let mut names: Vec<_> = fs::read_dir(&libraries)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .inspect(|path| assert!(!path.is_symlink(), "{}", path.display()))
            .map(|path| path.file_name().unwrap().to_owned())
            .collect();
        names.sort();
        let expected = [
            "libggml-base.so.0",
            "libggml-cpu-x64.so",
            "libggml-cpu-zen4.so",
            "libggml.so.0",
            "libllama.so.0",
        ];
        assert_eq!(names, expected);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&libraries), 0o755);
        assert_eq!(mode(&libraries.join("libllama.so.0")), 0o644);
        assert_eq!(mode(&folder.path().join(PROGRAM)), 0o755);
        for made in ["", "bin", "lib"] {
            assert_eq!(mode(&folder.path().join(made)), 0o755, "{made}");
        }
        let files = folder.files().unwrap();
        assert_eq!(files.len(), 1 + expected.len());
        assert_eq!(files[0], folder.path().join(PROGRAM));
        let nothing = tempfile::tempdir().unwrap();
        let error = folder.add_libraries(nothing.path()).unwrap_err();
        assert!(error.to_string().contains("no libraries"), "{error}");
    }

    #[test]
    fn equal_files_give_equal_archives() {
        let [first, second] = [1, 2].map(|_| {
            let archives = tempfile::tempdir().unwrap();
            let archive = folder(archives.path()).pack(1_000_000).unwrap();
            assert_eq!(archive.file_name().unwrap(), "sapwood-1.tar.gz");
            fs::read(archive).unwrap()
        });
        assert!(first.len() > 100 && first == second);
    }

    #[test]
    fn what_an_earlier_run_has_left_is_not_packed() {
        let archives = tempfile::tempdir().unwrap();
        let first = folder(archives.path());
        let old = first.path().join("lib/sapwood/libggml-cuda.so");
        fs::write(&old, "").unwrap();
        let archive = first.pack(0).unwrap();
        assert!(archive.is_file());
        folder(archives.path());
        assert!(!old.exists() && !archive.exists());
    }
}
