//! Tries a model file in a child process before a serving process loads it.
//!
//! llama.cpp ends the process if a file violates one of its assumptions, and no list of checks is complete. A model
//! that is loaded by a request, or that the server can start without, must not end the running requests of others.
//!
//! ```text
//!   serving process ── starts ──► sapwood try-model FILE: loads it, computes a few tokens
//!                   ◄─ succeeded: loads it too; anything else: reports the reason, and continues
//! ```

use std::collections::HashSet;
use std::ffi::OsString;
use std::process::{ExitStatus, Output, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::process::Command;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::failure::{CliError, Exit};
use crate::models::PlannedModel;
use crate::plain::plain;

/// Concurrent trials would each count on memory that the other one uses.
static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);
/// The hidden command that tries a file.
const COMMAND: &str = "try-model";
/// A disk that does not answer must not block the trials of other models for ever.
const LONGEST: Duration = Duration::from_secs(20 * 60);
/// Maximum characters shown of the last output of a process that died.
const LAST_WORDS_MAX: usize = 300;

/// Tries the file of a model, if it has one and trying is enabled, unless this process has tried it and it did not change
/// since: a model that is loaded on demand would take twice as long each time.
///
/// # Errors
/// [`Exit::Model`]: it cannot be used, or could not be tried.
pub(crate) async fn pass(planned: &PlannedModel) -> Result<(), CliError> {
    let Some(arguments) = planned.trial() else {
        return Ok(());
    };
    let trial = PassedTrial::of(&arguments);
    if let Some(trial) = &trial
        && passed().contains(trial)
    {
        return Ok(());
    }
    let why = match try_with(arguments).await {
        Ok(output) if output.status.success() => {
            passed().extend(trial);
            None
        }
        Ok(output) => verdict(&output),
        Err(error) => Some(format!(
            "it could not be tried in a process of its own ({error}); with engine.try_files = false it is loaded untried"
        )),
    };
    let Some(why) = why else { return Ok(()) };
    let what = format!("cannot load the model `{}`: {why}", planned.name);
    Err(CliError::exit(Exit::Model, what))
}

/// A trial that succeeded: its arguments, and what the file was then.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PassedTrial {
    arguments: Vec<OsString>,
    bytes: u64,
    changed: SystemTime,
}

impl PassedTrial {
    fn of(arguments: &[OsString]) -> Option<Self> {
        // The path is the last one.
        let metadata = std::fs::metadata(arguments.last()?).ok()?;
        Some(Self {
            arguments: arguments.to_vec(),
            bytes: metadata.len(),
            changed: metadata.modified().ok()?,
        })
    }
}

/// Those of this process. As many as there are models and configurations that requests have loaded them with, which only keys
/// with scope `admin` can.
fn passed() -> MutexGuard<'static, HashSet<PassedTrial>> {
    static PASSED: LazyLock<Mutex<HashSet<PassedTrial>>> = LazyLock::new(Mutex::default);
    PASSED.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn try_with(arguments: Vec<OsString>) -> std::io::Result<Output> {
    // Fails only if the semaphore is closed, and it is never closed.
    let _turn = ONE_AT_A_TIME.acquire().await;
    let mut child = Command::new(program()?)
        .arg(COMMAND)
        .args(arguments)
        // Otherwise ggml would start a debugger when it aborts.
        .env("GGML_NO_BACKTRACE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The request that wants the model may be cancelled.
        .kill_on_drop(true)
        .spawn()?;
    // The pipe is closed when this process ends, for whatever reason: see `be_expendable`.
    let _open = child.stdin.take();
    let ended = timeout(LONGEST, child.wait_with_output()).await;
    ended.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// The path of this program, also if its file was replaced while it runs.
pub(crate) fn program() -> std::io::Result<OsString> {
    if cfg!(target_os = "linux") {
        Ok("/proc/self/exe".into())
    } else {
        std::env::current_exe().map(Into::into)
    }
}

/// The reason that a file cannot be used, from the exit of the process that tried it.
fn verdict(output: &Output) -> Option<String> {
    if output.status.success() {
        return None;
    }
    // This exit code is the child's own verdict; its reason is the only text on standard output.
    if output.status.code() == Some(Exit::Model as i32) {
        return Some(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let ended = if was_killed(output.status) {
        "was killed, as happens when memory runs out"
    } else {
        "ended unexpectedly, as llama.cpp ends one for a file that it cannot use"
    };
    let sent = String::from_utf8_lossy(&output.stderr);
    let last = sent.lines().rfind(|line| !line.trim().is_empty());
    let last: String = plain(last.unwrap_or("no output"))
        .chars()
        .take(LAST_WORDS_MAX)
        .collect();
    let status = output.status;
    Some(format!(
        "the process that tried it {ended} ({status}: {last})"
    ))
}

#[cfg(unix)]
fn was_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(rustix::process::Signal::KILL.as_raw())
}

#[cfg(not(unix))]
fn was_killed(_: ExitStatus) -> bool {
    false
}

/// For the child process: makes it the first to be killed when memory runs out, disables core files, and ends it with
/// its parent.
#[cfg(feature = "embedded")]
pub(crate) fn be_expendable() {
    #[cfg(target_os = "linux")]
    {
        // Without permission for this, the system chooses by size.
        // Two processes hold the model for a moment; if the memory is too small, the serving one must survive.
        let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    }
    #[cfg(unix)]
    {
        let none = rustix::process::Rlimit {
            current: Some(0),
            maximum: Some(0),
        };
        // A core file would have the size of the model.
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    }
    // A thread, because loading blocks the main one. The parent never writes: the read ends when its end of the pipe is
    // closed.
    std::thread::spawn(|| {
        use std::io::Read;
        let mut rest = [0; 64];
        while std::io::stdin().read(&mut rest).is_ok_and(|read| read > 0) {}
        std::process::exit(Exit::Interrupted as i32);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ended(script: &str) -> Option<String> {
        let mut shell = Command::new("sh");
        verdict(&shell.args(["-c", script]).output().await.unwrap())
    }

    #[tokio::test]
    async fn a_file_is_refused_by_how_its_trial_ended() {
        assert_eq!(ended("exit 0").await, None);
        let reported = ended("echo 'it has no tokens'; echo noise >&2; exit 5").await;
        assert_eq!(reported.as_deref(), Some("it has no tokens"));
        for (script, parts) in [
            (
                "echo first >&2; echo 'GGML_ASSERT(n > 0) failed' >&2; echo >&2; kill -ABRT $$",
                ["llama.cpp ends one", ": GGML_ASSERT(n > 0) failed)"],
            ),
            ("kill -KILL $$", ["when memory runs out", "no output"]),
            (
                "printf 'a\\033[2Jb' >&2; exit 1",
                ["unexpectedly", "status: 1: a"],
            ),
        ] {
            let reported = ended(script).await.unwrap();
            assert!(
                parts.iter().all(|part| reported.contains(part)),
                "{reported}"
            );
            assert!(!reported.contains('\u{1b}'), "{reported:?}");
        }
        let reported = ended("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1").await;
        assert!(reported.unwrap().len() < 2 * LAST_WORDS_MAX);
    }
}
