//! Removes downloaded models that are not in use.

use std::io;
use std::path::{Path, PathBuf};

use super::folder::{self, CachedFile, FileLock, ModelFolder, NoLock};
use super::selection::select;
use super::source::{ModelChoice, ModelSource};
use super::{ModelCache, unreadable};
use crate::failure::CliError;

impl ModelCache {
    /// Removes a model, or all models of a repository if the name has no choice, and all its revisions if it has none
    /// of these either; returns the bytes that are free again.
    ///
    /// # Errors
    /// There is none of this name, or a process has it loaded.
    pub(crate) fn remove(&self, name: &str) -> Result<u64, CliError> {
        let folder = self.folder()?;
        let source = ModelSource::read(Path::new(name)).map_err(CliError::usage)?;
        let (below, path) = match &source {
            ModelSource::Hub(hub) => {
                let below = folder.of_repo(hub);
                let is_all = hub.choice == ModelChoice::Usual && !name.contains('@');
                match below.parent().filter(|_| is_all) {
                    Some(revisions) => (revisions.to_owned(), None),
                    None => (below, None),
                }
            }
            ModelSource::Url(url) => {
                let path = folder.of_url(url);
                (path.parent().unwrap_or(&folder.0).to_owned(), Some(path))
            }
            ModelSource::File(_) => return Err(self.unknown(name)),
        };
        let files = ModelFolder::files(&below).map_err(|error| unreadable(&below, &error))?;
        let relative = |path: &Path| {
            let path = path.strip_prefix(&below).unwrap_or(path);
            path.to_string_lossy().into_owned()
        };
        let paths: Vec<String> = files.iter().map(|file| relative(&file.path)).collect();
        let selected = match (&source, path) {
            (ModelSource::Hub(hub), _) if hub.choice == ModelChoice::Usual => paths,
            (ModelSource::Hub(hub), _) => chosen(&paths, &hub.choice),
            (_, Some(path)) => folder::siblings(&relative(&path)),
            (_, None) => Vec::new(),
        };
        let removed: Vec<CachedFile> = files
            .into_iter()
            .filter(|file| selected.contains(&relative(&file.path)))
            .collect();
        if removed.is_empty() {
            return Err(self.unknown(name));
        }
        remove_all(&removed)?;
        for file in &removed {
            folder.prune(file.path.parent().unwrap_or(&below));
        }
        Ok(removed.iter().map(|file| file.bytes).sum())
    }
}

/// Removes files, if none of them is in use.
fn remove_all(files: &[CachedFile]) -> Result<(), CliError> {
    // All are locked before the first is removed: a model is not left in halves.
    let complete = files.iter().filter(|file| file.is_complete);
    let locks = complete.map(|file| {
        FileLock::exclusive(&file.path).map_err(|why| match why {
            NoLock::Held => CliError::new(format!(
                "{} is in use: stop the process that has it loaded, or unload the model there",
                file.path.display()
            )),
            NoLock::Gone => CliError::new(format!("{} is gone already", file.path.display())),
            NoLock::Io(error) => unreadable(&file.path, &error),
        })
    });
    let _locks = locks.collect::<Result<Vec<_>, _>>()?;
    let parts: Vec<PathBuf> = files
        .iter()
        .flat_map(|file| folder::parts_of(&file.path))
        .collect();
    let locks = parts.iter().map(|part| {
        FileLock::part(part)
            .map_err(|_| CliError::new(format!("{} is being downloaded", part.display())))
    });
    let _parts = locks.collect::<Result<Vec<_>, _>>()?;
    for part in &parts {
        removed(part)?;
    }
    for file in files {
        removed(&file.path)?;
        removed(&folder::record_path(&file.path))?;
        removed(&folder::used_path(&file.path))?;
    }
    Ok(())
}

fn removed(path: &Path) -> Result<(), CliError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let what = format!("cannot remove {}: {error}", path.display());
            Err(CliError::new(what))
        }
        _ => Ok(()),
    }
}

/// The local files of a choice; a part that is missing is no error here.
fn chosen(paths: &[String], choice: &ModelChoice) -> Vec<String> {
    let all: Vec<String> = paths
        .iter()
        .flat_map(|path| folder::siblings(path))
        .collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    select(&all, choice).unwrap_or_default()
}
