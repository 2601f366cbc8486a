//! Downloads the files of one model together: all are received before the first gets its name, so that the parts of a
//! split model are never those of two versions.
//!
//! ```text
//!   identify all ─► room? ─► receive all as parts ─► lock all old files ─► rename all ─► records
//! ```

use std::io;
use std::path::Path;

use sapwood_net::hub::HubClient;

use super::download::{
    DownloadError, IdentifiedFile, Part, RetryPolicy, WantedFile, id, identify, is_there, receive,
    replaceable, shown_bytes, usable,
};
use super::folder::{FileLock, FileRecord, free_bytes, part_path, parts_of, record_path};
use crate::progress::DownloadBar;

/// A file that is in its place, or is verified and goes there.
struct ReadyFile<'a> {
    file: &'a WantedFile,
    version: FileRecord,
    part: Option<Part>,
}

/// Downloads the files of a model, unless these versions are in their places; returns whether anything was received.
///
/// # Errors
/// [`DownloadError`]. What was received stays as parts, unless it is wrong.
pub(super) async fn download(
    client: &HubClient,
    policy: RetryPolicy,
    wanted: &[WantedFile],
) -> Result<bool, DownloadError> {
    let mut identified = Vec::new();
    for file in wanted {
        let mut one = identify(client, policy, file).await?;
        // A server would give up the others while the first is received.
        if wanted.len() > 1 {
            one.opened = None;
        }
        identified.push(one);
    }
    // Before anything is received for nothing. The locks are not held meanwhile: the files that are there can be loaded.
    for one in missing(&identified) {
        drop(replaceable(&one.file.path)?);
    }
    check_room(&identified)?;
    let mut ready = Vec::new();
    for mut one in identified {
        let name = one.file.path.file_name().unwrap_or_default();
        let bar = DownloadBar::new(&name.to_string_lossy());
        let part = receive(client, policy, &mut one, &bar).await?;
        ready.push(ReadyFile {
            file: one.file,
            version: one.version,
            part,
        });
    }
    place(&ready)?;
    Ok(ready.iter().any(|one| one.part.is_some()))
}

fn missing<'a, 'b>(
    identified: &'b [IdentifiedFile<'a>],
) -> impl Iterator<Item = &'b IdentifiedFile<'a>> {
    identified
        .iter()
        .filter(|one| !is_there(&one.file.path, &one.version))
}

/// Refuses what does not fit before anything is received.
fn check_room(identified: &[IdentifiedFile<'_>]) -> Result<(), DownloadError> {
    let rest = |one: &IdentifiedFile<'_>| {
        let part = part_path(&one.file.path, &id(one.file, &one.version));
        let there = std::fs::metadata(part).map_or(0, |part| part.len());
        one.version.bytes - usable(there, &one.version)
    };
    let needed = missing(identified).map(rest).fold(0, u64::saturating_add);
    let folder = identified.first().and_then(|one| one.file.path.parent());
    // Its folder may have to be created.
    let folder = folder
        .into_iter()
        .flat_map(Path::ancestors)
        .find(|folder| folder.exists());
    match folder.and_then(|folder| Some((folder, free_bytes(folder)?))) {
        Some((folder, free)) if needed > 0 && free < needed.saturating_add(SPARE_BYTES) => {
            Err(DownloadError::Refused(format!(
                "it needs {} more, and {} has {} free: remove models with `sapwood models rm`, or name another folder \
                 with hub.dir (SAPWOOD_HUB__DIR)",
                shown_bytes(needed),
                folder.display(),
                shown_bytes(free)
            )))
        }
        _ => Ok(()),
    }
}

/// Moves the parts to their places. If the process ends in between, the model counts as missing.
fn place(ready: &[ReadyFile<'_>]) -> Result<(), DownloadError> {
    let received = || ready.iter().filter(|one| one.part.is_some());
    // Until the end. The new files are locked as well: by their parts.
    let old: Vec<Option<FileLock>> = received()
        .map(|one| replaceable(&one.file.path))
        .collect::<Result<_, _>>()?;
    let known: Vec<_> = received()
        .zip(&old)
        .filter(|(_, old)| old.is_some())
        .map(|(one, _)| (one.file.path.as_path(), FileRecord::read(&one.file.path)))
        .collect();
    let mut is_intact = true;
    let moved = received()
        .zip(&old)
        .try_for_each(|(one, old)| invalidate(&one.file.path, old.is_some()))
        .and_then(|()| {
            received().try_for_each(|one| {
                let path = &one.file.path;
                let part = part_path(path, &id(one.file, &one.version));
                std::fs::rename(&part, path).map_err(|error| DownloadError::at(path, error))?;
                is_intact = false;
                Ok(())
            })
        });
    if let Err(error) = moved {
        // As long as no file was replaced, the old model is whole, and is to stay usable.
        if is_intact {
            restore(&known);
        }
        return Err(error);
    }
    // Those of unchanged files first: as long as one of the others is missing, so is the model.
    let unchanged = ready.iter().filter(|one| one.part.is_none());
    for one in unchanged.chain(received()) {
        let path = &one.file.path;
        let known = FileRecord::read(path).filter(|known| {
            one.part.is_none()
                && (known.commit == one.version.commit || one.version.commit.is_none())
        });
        if known.is_none() && path.is_file() {
            let written = one.version.write(path);
            written.map_err(|error| DownloadError::at(path, error))?;
        }
    }
    if let Some(gone) = ready.iter().find(|one| !one.file.path.is_file()) {
        let gone = gone.file.path.display();
        let what = format!("{gone} was removed by another process meanwhile; try again");
        return Err(DownloadError::Refused(what));
    }
    for old in received().flat_map(|one| parts_of(&one.file.path)) {
        // Parts of earlier versions are of no use any more; one that is being written stays.
        if FileLock::part(&old).is_ok() {
            let _ = std::fs::remove_file(old);
        }
    }
    Ok(())
}

/// Removes what is recorded of a file that is about to be replaced, or of one that is not there: it must not be taken for
/// that of the new file.
fn invalidate(path: &Path, is_there: bool) -> Result<(), DownloadError> {
    let written = match is_there {
        true => FileRecord::replacing().write(path),
        false => remove_record(path),
    };
    written.map_err(|error| DownloadError::at(path, error))
}

/// Writes the records of old files again, none of which was replaced.
fn restore(known: &[(&Path, Option<FileRecord>)]) {
    for (path, record) in known {
        let written = match record {
            Some(record) => record.write(path),
            None => remove_record(path),
        };
        if let Err(error) = written {
            tracing::warn!(path = %path.display(), %error, "what is known of a file cannot be recorded");
            // Without a record it counts as a file that was copied here, which is better than as one that is being replaced.
            let _ = remove_record(path);
        }
    }
}

fn remove_record(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(record_path(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Bytes that are left free on the disk.
const SPARE_BYTES: u64 = 64 << 20;
