//! The border with the operating system: memory and semaphores that another process shares, and the handlers of signals.
//! The only file of the AICI runtime with `unsafe` code.
//!
//! Nothing here hands out a reference to shared bytes: the other process may change them at any moment, so they are copied
//! in and out, and words are accessed as atomics. A length that comes from shared memory is checked by the caller, and once
//! more here against the region.

use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant, SystemTime};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, Timespec};
use rustix::io::Errno;
use rustix::shm;
use rustix::thread::futex;

use super::{WireError, word};

/// A region of shared memory, mapped.
#[derive(Debug)]
pub struct SharedRegion {
    map: MmapRaw,
    /// Of a guarded region: bytes are copied through the descriptor. A page that the other process has cut off, or that
    /// there is no memory left for, is an error there, and a signal that ends the process in the map (AI-223).
    file: Option<OwnedFd>,
}

impl SharedRegion {
    /// Opens a region of `bytes` bytes, or creates it with mode 0600 (AI-103).
    ///
    /// # Errors
    /// [`WireError::Size`] if it exists with another size: resizing it would pull it away under the other process.
    pub fn open(name: &str, bytes: usize) -> Result<Self, WireError> {
        match Self::create(name, bytes) {
            Err(WireError::Open { error, .. }) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created,
        }
        let flags = shm::OFlags::RDWR;
        let file = shm::open(name, flags, Mode::empty());
        let file = file.map_err(|error| WireError::open(name, error))?;
        Self::map_whole(name, &file, bytes)
    }

    /// Opens a region that is the file of this path.
    ///
    /// # Errors
    /// As [`SharedRegion::open`]; a file that is missing is not created.
    pub fn open_file(path: &str, bytes: usize) -> Result<Self, WireError> {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty());
        let file = file.map_err(|error| WireError::open(path, error))?;
        Self::map_whole(path, &file, bytes)
    }

    fn map_whole(name: &str, file: &OwnedFd, bytes: usize) -> Result<Self, WireError> {
        let failed = |error| WireError::open(name, error);
        let status = rustix::fs::fstat(file).map_err(failed)?;
        let actual = usize::try_from(status.st_size).unwrap_or(0);
        if actual != bytes {
            return Err(WireError::Size {
                name: name.to_owned(),
                actual,
                expected: bytes,
            });
        }
        Self::map(name, file, bytes)
    }

    /// Creates a region that must not exist yet, with mode 0600 (AI-203).
    ///
    /// # Errors
    /// [`WireError::Open`].
    pub fn create(name: &str, bytes: usize) -> Result<Self, WireError> {
        Self::map(name, &Self::create_file(name, bytes)?, bytes)
    }

    /// As [`SharedRegion::create`], for a process that must outlive whatever the other one does to the region.
    ///
    /// # Errors
    /// [`WireError::Open`].
    pub fn create_guarded(name: &str, bytes: usize) -> Result<Self, WireError> {
        let file = Self::create_file(name, bytes)?;
        let region = Self::map(name, &file, bytes)?;
        Ok(Self {
            file: Some(file),
            ..region
        })
    }

    /// As [`SharedRegion::create_guarded`], without a name; `name` is for people. Returns its path for processes of the same
    /// user, which is one as long as the region is open.
    ///
    /// # Errors
    /// [`WireError::Open`].
    pub fn create_nameless(name: &str, bytes: usize) -> Result<(Self, String), WireError> {
        let failed = |error| WireError::open(name, error);
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create(name, flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let region = Self::map(name, &file, bytes)?;
        let region = Self {
            file: Some(file),
            ..region
        };
        Ok((region, path))
    }

    fn create_file(name: &str, bytes: usize) -> Result<OwnedFd, WireError> {
        let failed = |error| WireError::open(name, error);
        let flags = shm::OFlags::RDWR | shm::OFlags::CREATE | shm::OFlags::EXCL;
        let file = shm::open(name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        Ok(file)
    }

    fn map(name: &str, file: &OwnedFd, bytes: usize) -> Result<Self, WireError> {
        let map = MmapOptions::new().len(bytes).map_raw(file);
        map.map(|map| Self { map, file: None })
            .map_err(|error| WireError::Open {
                name: name.to_owned(),
                error,
            })
    }

    /// Returns its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Returns the value of the word at `offset`. `None`: there is none, or not any more.
    #[must_use]
    pub fn load(&self, offset: usize) -> Option<u32> {
        let word = self.word(offset)?;
        let Some(file) = &self.file else {
            return Some(word::load(word));
        };
        let mut bytes = [0; 4];
        let read = rustix::io::pread(file, &mut bytes, offset as u64);
        word::was_read();
        (read == Ok(4)).then(|| u32::from_ne_bytes(bytes))
    }

    /// Sets the word at `offset`; `false` if there is none, or not any more.
    pub fn store(&self, offset: usize, value: u32) -> bool {
        let Some(word) = self.word(offset) else {
            return false;
        };
        let Some(file) = &self.file else {
            word::store(word, value);
            return true;
        };
        word::is_about_to_be_written();
        rustix::io::pwrite(file, &value.to_ne_bytes(), offset as u64) == Ok(4)
    }

    /// Sets the word at `offset` if it has this value. Returns whether it had. In a guarded region this is not one step:
    /// its process is the only one that sets such a word.
    pub fn replace(&self, offset: usize, old: u32, new: u32) -> bool {
        if self.file.is_some() {
            return self.load(offset) == Some(old) && self.store(offset, new);
        }
        self.word(offset)
            .is_some_and(|word| word::replace(word, old, new))
    }

    /// Sleeps while the word at `offset` has this value, for at most `time`.
    pub(super) fn sleep(&self, offset: usize, value: u32, time: Option<Duration>) {
        let Some(word) = self.word(offset) else {
            return;
        };
        let time = time.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        match futex::wait(word, futex::Flags::empty(), value, time.as_ref()) {
            Ok(()) | Err(Errno::INTR | Errno::AGAIN | Errno::TIMEDOUT) => {}
            // Nothing else is possible for a word of ours; without this line it would be a busy loop.
            Err(_) => std::thread::yield_now(),
        }
    }

    /// Wakes everybody who sleeps on the word at `offset`.
    pub(super) fn wake(&self, offset: usize) {
        if let Some(word) = self.word(offset) {
            // Shared, not private: the peer is another process (AI-211).
            let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Returns the word at `offset`, which must be aligned, to wait on it; `None` outside of the region. In a guarded region
    /// it must not be accessed.
    #[must_use]
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let end = offset.checked_add(4)?;
        if end > self.bytes() || !offset.is_multiple_of(4) {
            return None;
        }
        // SAFETY: the word is inside of the map and aligned, because a map begins at a page. The map lives as long as
        // `self`, and this process accesses words only as atomics.
        Some(unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(offset).cast()) })
    }

    /// Appends a copy of `bytes` bytes at `offset` to `into`; `false` if they are not all inside of the region.
    pub fn read(&self, offset: usize, bytes: usize, into: &mut Vec<u8>) -> bool {
        if !self.contains(offset, bytes) {
            return false;
        }
        if let Some(file) = &self.file {
            return read_file(file, offset, bytes, into);
        }
        into.reserve(bytes);
        // SAFETY: the source is inside of the map; the destination has room for as many bytes, which are initialised
        // before the length covers them. A concurrent write by the other process can only change which bytes are copied.
        unsafe {
            let end = into.as_mut_ptr().add(into.len());
            std::ptr::copy_nonoverlapping(self.map.as_ptr().add(offset), end, bytes);
            into.set_len(into.len() + bytes);
        }
        true
    }

    /// Copies `bytes` to `offset`; `false` if they do not all fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if !self.contains(offset, bytes.len()) {
            return false;
        }
        if let Some(file) = &self.file {
            return write_file(file, offset, bytes);
        }
        // SAFETY: the destination is inside of the map, and no reference of this process points into it.
        unsafe {
            let start = self.map.as_mut_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len());
        }
        true
    }

    fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes())
    }
}

fn read_file(file: &OwnedFd, offset: usize, bytes: usize, into: &mut Vec<u8>) -> bool {
    let start = into.len();
    into.resize(start + bytes, 0);
    let mut done = 0;
    while done < bytes {
        let rest = &mut into[start + done..];
        match rustix::io::pread(file, rest, (offset + done) as u64) {
            // The other process has made the region smaller.
            Ok(0) => break,
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    into.truncate(start + done);
    done == bytes
}

fn write_file(file: &OwnedFd, offset: usize, bytes: &[u8]) -> bool {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], (offset + done) as u64) {
            Ok(0) => return false,
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            // No memory, for example.
            Err(_) => return false,
        }
    }
    true
}

/// The time, by which limits are measured. The model checker has a clock of its own.
pub(super) fn now() -> Instant {
    Instant::now()
}

/// Removes the name of a region. One that has none is as good.
///
/// # Errors
/// It belongs to another user, or the system refuses the name.
pub fn unlink_region(name: &str) -> Result<(), WireError> {
    match shm::unlink(name) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(WireError::open(name, error)),
    }
}

/// A POSIX named semaphore.
#[derive(Debug)]
pub struct NamedSemaphore {
    handle: *mut libc::sem_t,
}

// SAFETY: semaphores are made to be used from several threads and processes; the pointer is only given to `sem_*`.
unsafe impl Send for NamedSemaphore {}
// SAFETY: as above.
unsafe impl Sync for NamedSemaphore {}

impl NamedSemaphore {
    /// Opens the semaphore, or creates it with mode 0600 and this value.
    ///
    /// # Errors
    /// [`WireError::Open`].
    pub fn open(name: &str, value: u32) -> Result<Self, WireError> {
        Self::with_flags(name, value, libc::O_CREAT)
    }

    /// Creates a semaphore that must not exist yet.
    ///
    /// # Errors
    /// [`WireError::Open`].
    pub fn create(name: &str, value: u32) -> Result<Self, WireError> {
        Self::with_flags(name, value, libc::O_CREAT | libc::O_EXCL)
    }

    fn with_flags(name: &str, value: u32, flags: libc::c_int) -> Result<Self, WireError> {
        let text = terminated(name)?;
        let mode: libc::c_uint = 0o600;
        // SAFETY: the name is a C string that outlives the call; mode and value have the types that `O_CREAT` wants.
        let handle = unsafe { libc::sem_open(text.as_ptr(), flags, mode, value) };
        if handle == libc::SEM_FAILED {
            return Err(WireError::Open {
                name: name.to_owned(),
                error: io::Error::last_os_error(),
            });
        }
        Ok(Self { handle })
    }

    /// Adds one and wakes a waiter.
    pub fn post(&self) {
        // SAFETY: the semaphore is open until `drop`. It fails only at a value that the other process made absurd.
        unsafe { libc::sem_post(self.handle) };
    }

    /// Takes one if there is one.
    #[must_use]
    pub fn try_wait(&self) -> bool {
        // SAFETY: the semaphore is open until `drop`.
        unsafe { libc::sem_trywait(self.handle) == 0 }
    }

    /// Takes one, waiting until `until` for it; `false` if the time has passed.
    #[must_use]
    pub fn wait(&self, until: Option<Instant>) -> bool {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let taken = match left {
                // SAFETY: the semaphore is open until `drop`.
                None => unsafe { libc::sem_wait(self.handle) == 0 },
                Some(left) => self.wait_slice(left.min(WAIT_SLICE)),
            };
            // Otherwise a signal (EINTR), or the end of a slice: wait again (AI-204).
            if taken || left.is_some_and(|left| left.is_zero()) {
                return taken;
            }
        }
    }

    fn wait_slice(&self, time: Duration) -> bool {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let until = now.saturating_add(time);
        let until = libc::timespec {
            tv_sec: libc::time_t::try_from(until.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(until.subsec_nanos()),
        };
        // SAFETY: the semaphore is open until `drop`; the time outlives the call.
        unsafe { libc::sem_timedwait(self.handle, &raw const until) == 0 }
    }
}

impl Drop for NamedSemaphore {
    fn drop(&mut self) {
        // SAFETY: it was opened by `sem_open` and is closed once.
        unsafe { libc::sem_close(self.handle) };
    }
}

/// Removes the name of a semaphore. One that has none is as good.
///
/// # Errors
/// It belongs to another user, or the system refuses the name.
pub fn unlink_semaphore(name: &str) -> Result<(), WireError> {
    let text = terminated(name)?;
    // SAFETY: the name is a C string that outlives the call.
    if unsafe { libc::sem_unlink(text.as_ptr()) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::NotFound {
        return Ok(());
    }
    Err(WireError::Open {
        name: name.to_owned(),
        error,
    })
}

fn terminated(name: &str) -> Result<CString, WireError> {
    CString::new(name).map_err(|error| WireError::Open {
        name: name.to_owned(),
        error: io::Error::new(io::ErrorKind::InvalidInput, error),
    })
}

/// From here on SIGTERM, SIGINT and SIGUSR1 end the process with exit code 0, and the other processes of its group with
/// it if it leads the group (AI-105). Before that, `last` is called, which must be safe in signal handlers. SIGBUS, which a shrunk region causes, ends it with exit code 3 after one line
/// (AI-223).
///
/// # Errors
/// The system refuses a handler.
pub fn watch_signals(last: fn()) -> io::Result<()> {
    // Fails only if it was called before.
    let _ = LAST.set(last);
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
        handle(signal, on_stop)?;
    }
    handle(libc::SIGBUS, on_bus_error)
}

/// Asks for realtime priority for this process.
///
/// # Errors
/// The user may not have it.
pub fn ask_for_realtime() -> io::Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameters are initialised and outlive the call.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) -> io::Result<()> {
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    // The thread's alternate stack, where it has one: a fault may come from generated code whose stack is nearly used up.
    action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the action is initialised, and its handler calls only functions that are safe in signal handlers.
    if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// See [`watch_signals`].
static LAST: OnceLock<fn()> = OnceLock::new();

extern "C" fn on_stop(_: libc::c_int) {
    // SAFETY: `getpgrp`, `getpid`, `signal`, `kill` and `_exit` are safe in signal handlers.
    unsafe {
        // Only in a group of its own: in the engine's group the signal would reach the engine.
        if libc::getpgrp() == libc::getpid() {
            libc::signal(libc::SIGTERM, libc::SIG_IGN);
            libc::kill(0, libc::SIGTERM);
        }
        if let Some(last) = LAST.get() {
            last();
        }
        libc::_exit(0)
    }
}

extern "C" fn on_bus_error(_: libc::c_int) {
    // SAFETY: `write` and `_exit` are safe in signal handlers; the line is static.
    unsafe {
        // Standard error may be closed, and there is no other place to report to.
        libc::write(2, BUS_ERROR.as_ptr().cast(), BUS_ERROR.len());
        libc::_exit(3)
    }
}

/// The last line of a runtime whose engine shrank a region.
const BUS_ERROR: &[u8] =
    b"sapwood aicirt: the shared memory was made smaller while it was in use\n";
/// `sem_timedwait` counts by the wall clock, which may be set back; so it is never asked for more than this at a time.
const WAIT_SLICE: Duration = Duration::from_secs(1);
