//! What processes need of the system beyond safe wrappers: `fork`, and what goes with it. The only `unsafe` code of the
//! isolation mode `sequence`.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// The two sides of a `fork`.
pub(super) enum Forked {
    Parent,
    Child,
}

/// Clones this process.
///
/// # Errors
/// The system has no process or no memory to give.
pub(super) fn fork() -> io::Result<Forked> {
    // SAFETY: the callers are the template and its clones, whose only thread this is: no other thread could have left a
    // lock or a structure half changed in the clone. A host function that starts a thread waits for its end
    // (`HostConstraintSource::open`), and no callback runs now.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        _ => Ok(Forked::Parent),
    }
}

/// Ends this process at once: no destructor runs, and no buffer that it shares with its parent is written twice.
pub(super) fn exit(code: i32) -> ! {
    // SAFETY: it has no preconditions.
    unsafe { libc::_exit(code) }
}

/// From here on children of this process, and what is given to it because its parent has ended, are gone as soon as
/// they end: nobody has to wait for them.
///
/// # Errors
/// The system refuses it.
pub(super) fn reap_children_at_once() -> io::Result<()> {
    // SAFETY: no handler is installed.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Ends the clones of this process, and theirs, whatever they do; this process, the template, is spared. The others
/// must have left SIGTERM as it is by default.
///
/// # Errors
/// The system refuses it.
pub(super) fn end_clones() -> io::Result<()> {
    // SAFETY: no handler is installed; the group is that of the template, whose leader this process is.
    unsafe {
        if libc::getpgrp() != libc::getpid()
            || libc::signal(libc::SIGTERM, libc::SIG_IGN) == libc::SIG_ERR
            || libc::kill(0, libc::SIGTERM) == -1
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// What [`end_template`] needs: the runtime's end of the template's socket, and the template's process.
static CONTROL: AtomicI32 = AtomicI32::new(-1);
static TEMPLATE: AtomicI32 = AtomicI32::new(0);

/// Makes a template the one that [`end_template`] ends.
pub(super) fn set_template(control: BorrowedFd<'_>, template: i32) {
    TEMPLATE.store(template, Ordering::Relaxed);
    CONTROL.store(control.as_raw_fd(), Ordering::Release);
}

/// There is no template any more, or its socket is about to be closed.
pub(super) fn unset_template(control: BorrowedFd<'_>) {
    let control = control.as_raw_fd();
    let _ = CONTROL.compare_exchange(control, -1, Ordering::AcqRel, Ordering::Relaxed);
}

/// Ends the template and its clones, and waits for that, but not for long: they have nothing to save. For a process
/// that is about to end, also in a signal handler. Without the wait, whoever inherits them would have to reap them.
pub(crate) fn end_template() {
    let control = CONTROL.swap(-1, Ordering::AcqRel);
    if control == -1 {
        return;
    }
    let template = TEMPLATE.load(Ordering::Relaxed);
    // SAFETY: `shutdown`, `waitpid` and `poll` are safe in signal handlers. The descriptor is open: it is unset before
    // it is closed.
    unsafe {
        libc::shutdown(control, libc::SHUT_RDWR);
        for _ in 0..END_MILLIS {
            // Not zero: it has ended, or another thread has waited for it.
            if libc::waitpid(template, std::ptr::null_mut(), libc::WNOHANG) != 0 {
                return;
            }
            libc::poll(std::ptr::null_mut(), 0, 1);
        }
    }
}

/// A runtime ends within 500 ms (AI-105).
const END_MILLIS: u32 = 200;

/// Closes every descriptor from `first` on, but for `kept`: what the parent of this process had open is not its own.
pub(super) fn close_from(first: RawFd, kept: RawFd) {
    let close = |from: RawFd, to: RawFd| {
        if from <= to {
            // SAFETY: the callers own none of these descriptors.
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
    };
    close(first, kept - 1);
    close(kept.max(first - 1) + 1, RawFd::MAX);
}

/// Makes a standard stream mean what `descriptor` does.
///
/// # Errors
/// The system refuses it.
pub(super) fn set_standard_stream(descriptor: BorrowedFd<'_>, stream: RawFd) -> io::Result<()> {
    // SAFETY: the standard streams belong to the process, and nobody closes them.
    if unsafe { libc::dup2(descriptor.as_raw_fd(), stream) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// While this process computes, it looks every 100 ms of processor time whether the other end of its socket is still
/// there, and ends if it is not. So a callback in an endless loop does not outlive a runtime that was killed. A process
/// that waits pays nothing. A clone has to call it again.
///
/// # Errors
/// The system refuses a handler or a timer.
pub(super) fn end_with_peer(socket: RawFd) -> io::Result<()> {
    WATCHED.store(socket, Ordering::Relaxed);
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_tick as extern "C" fn(libc::c_int) as *const () as usize;
    // Guest code may be running, whose stack may be nearly used up; and a read of the socket goes on.
    action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
    let tick = libc::timeval {
        tv_sec: 0,
        tv_usec: 100_000,
    };
    let timer = libc::itimerval {
        it_interval: tick,
        it_value: tick,
    };
    // SAFETY: both structures are initialised and outlive the calls; the handler calls only functions that are safe in
    // signal handlers.
    let set = unsafe {
        libc::sigaction(libc::SIGPROF, &raw const action, std::ptr::null_mut()) == 0
            && libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) == 0
    };
    if set {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The socket of [`end_with_peer`].
static WATCHED: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_tick(_: libc::c_int) {
    let mut polled = libc::pollfd {
        fd: WATCHED.load(Ordering::Relaxed),
        events: 0,
        revents: 0,
    };
    // SAFETY: `poll` and `_exit` are safe in signal handlers, and so is saving the error number that `poll` may change.
    unsafe {
        let number = *libc::__errno_location();
        if libc::poll(&raw mut polled, 1, 0) == 1 && polled.revents & libc::POLLHUP != 0 {
            libc::_exit(0);
        }
        *libc::__errno_location() = number;
    }
}
