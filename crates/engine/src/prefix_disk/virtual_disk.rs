//! A disk in memory whose calls fail, are cut short, or wait as a test wants it.

use std::collections::BTreeMap;
use std::io::{self, Cursor, ErrorKind, Read};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::SystemTime;

use crate::prefix_folder::{FileId, ListedFile, PrefixDisk};

/// Files in memory, which outlive the engines that use them.
#[derive(Debug, Default)]
pub(crate) struct VirtualDisk {
    state: Mutex<DiskContents>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct DiskContents {
    files: BTreeMap<FileId, (Vec<u8>, SystemTime)>,
    faults: DiskFaults,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskFaults {
    /// Calls wait until this is false again.
    pub(crate) held: bool,
    /// Calls to read wait until this is false again.
    pub(crate) reads_held: bool,
    pub(crate) opens_fail: bool,
    pub(crate) reads_fail: bool,
    pub(crate) writes_fail: bool,
    pub(crate) removals_fail: bool,
    /// Files are cut to so many bytes where they are read, whatever length they have.
    pub(crate) cut_at: Option<usize>,
    /// Room for so many bytes in all.
    pub(crate) room: Option<usize>,
}

impl DiskFaults {
    /// A disk that hangs.
    pub(crate) const HELD: Self = Self {
        held: true,
        reads_held: false,
        opens_fail: false,
        reads_fail: false,
        writes_fail: false,
        removals_fail: false,
        cut_at: None,
        room: None,
    };
}

impl VirtualDisk {
    pub(crate) fn set(&self, faults: DiskFaults) {
        self.lock().faults = faults;
        self.released.notify_all();
    }

    /// The contents of all files, which the test may change.
    pub(crate) fn each(&self, mut change: impl FnMut(FileId, &mut Vec<u8>)) {
        for (file, (bytes, _)) in &mut self.lock().files {
            change(*file, bytes);
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.lock()
            .files
            .values()
            .map(|(bytes, _)| bytes.len())
            .sum()
    }

    pub(crate) fn files(&self) -> usize {
        self.lock().files.len()
    }

    pub(crate) fn remove_all(&self) {
        self.lock().files.clear();
    }

    fn lock(&self) -> MutexGuard<'_, DiskContents> {
        self.state.lock().unwrap()
    }

    fn begin(&self) -> MutexGuard<'_, DiskContents> {
        let state = self.lock();
        self.released
            .wait_while(state, |it| it.faults.held)
            .unwrap()
    }
}

fn failed() -> io::Error {
    io::Error::other("the disk fails")
}

impl PrefixDisk for VirtualDisk {
    fn open(&self) -> io::Result<Vec<ListedFile>> {
        let state = self.begin();
        if state.faults.opens_fail {
            return Err(failed());
        }
        let listed = state.files.iter().map(|(id, (bytes, used))| ListedFile {
            used: *used,
            id: *id,
            bytes: bytes.len() as u64,
        });
        Ok(listed.collect())
    }

    fn read(&self, file: FileId) -> io::Result<(Box<dyn Read>, u64)> {
        let state = self.begin();
        let state = self
            .released
            .wait_while(state, |it| it.faults.reads_held)
            .unwrap();
        let (mut bytes, _) = state.files.get(&file).cloned().ok_or(ErrorKind::NotFound)?;
        if state.faults.reads_fail {
            return Err(failed());
        }
        let length = bytes.len() as u64;
        bytes.truncate(state.faults.cut_at.unwrap_or(usize::MAX));
        Ok((Box::new(Cursor::new(bytes)), length))
    }

    fn write(&self, file: FileId, parts: &[&[u8]]) -> io::Result<()> {
        let mut state = self.begin();
        if state.faults.writes_fail {
            return Err(failed());
        }
        let bytes = parts.concat();
        let used: usize = state.files.values().map(|(bytes, _)| bytes.len()).sum();
        if state
            .faults
            .room
            .is_some_and(|room| used + bytes.len() > room)
        {
            return Err(ErrorKind::StorageFull.into());
        }
        let before = state.files.insert(file, (bytes, SystemTime::now()));
        assert!(before.is_none(), "no number is used twice");
        Ok(())
    }

    fn remove(&self, file: FileId) -> io::Result<()> {
        let mut state = self.begin();
        if state.faults.removals_fail {
            return Err(failed());
        }
        state.files.remove(&file);
        Ok(())
    }

    fn mark_used(&self, file: FileId, when: SystemTime) {
        let mut state = self.begin();
        if let Some((_, used)) = state.files.get_mut(&file) {
            *used = when;
        }
    }
}
