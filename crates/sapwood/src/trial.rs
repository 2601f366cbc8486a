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
use std::path::PathBuf;
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
/// The minimum and what each GiB of its files adds: a disk that does not answer, or a model that takes for ever to load, must
/// not block the trials of other models.
const LONGEST: Duration = Duration::from_secs(5 * 60);
const LONGEST_OF_GIB: Duration = Duration::from_secs(2 * 60);
/// Maximum characters shown of the last output of a process that died.
const LAST_WORDS_MAX: usize = 300;

/// Tries the file of a model, if it has one and trying is enabled, unless this process has tried it and none of its files
/// changed since: a model that is loaded on demand would take twice as long each time.
///
/// # Errors
/// [`Exit::Model`]: it cannot be used, or could not be tried.
pub(crate) async fn pass(planned: &PlannedModel) -> Result<(), CliError> {
    let Some(arguments) = planned.trial() else {
        return Ok(());
    };
    let files = planned.trial_files();
    let longest = longest(&files);
    let trial = PassedTrial::of(&arguments, files);
    if let Some(trial) = &trial
        && passed().contains(trial)
    {
        return Ok(());
    }
    let why = match try_with(arguments, longest).await {
        Ok(output) if output.status.success() => {
            passed().extend(trial);
            None
        }
        Ok(output) => verdict(&output),
        Err(error) => Some(format!(
            "it could not be tried in a process of its own ({error}); with engine.try_files = false a configured model is loaded untried"
        )),
    };
    let Some(why) = why else { return Ok(()) };
    let what = format!("cannot load the model `{}`: {why}", planned.name);
    Err(CliError::exit(Exit::Model, what))
}

/// A trial that succeeded: its arguments, and what the files were then: all parts of the model, and its adapters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PassedTrial {
    arguments: Vec<OsString>,
    files: Vec<(PathBuf, u64, SystemTime)>,
}

impl PassedTrial {
    /// `None` if one of the files cannot be read: its trial says why.
    fn of(arguments: &[OsString], files: Vec<PathBuf>) -> Option<Self> {
        let files = files.into_iter().map(|path| {
            let metadata = std::fs::metadata(&path).ok()?;
            Some((path, metadata.len(), metadata.modified().ok()?))
        });
        Some(Self {
            arguments: arguments.to_vec(),
            files: files.collect::<Option<_>>()?,
        })
    }
}

/// How long the trial of these files may take.
fn longest(files: &[PathBuf]) -> Duration {
    let sizes = files.iter().filter_map(|path| std::fs::metadata(path).ok());
    let bytes = sizes.fold(0, |all: u64, it| all.saturating_add(it.len()));
    let of_size = LONGEST_OF_GIB.saturating_mul(u32::try_from(bytes >> 30).unwrap_or(u32::MAX));
    of_size.max(LONGEST)
}

/// Those of this process. As many as there are models and configurations that requests have loaded them with, which only keys
/// with scope `admin` can.
fn passed() -> MutexGuard<'static, HashSet<PassedTrial>> {
    static PASSED: LazyLock<Mutex<HashSet<PassedTrial>>> = LazyLock::new(Mutex::default);
    PASSED.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn try_with(arguments: Vec<OsString>, longest: Duration) -> std::io::Result<Output> {
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
    let ended = timeout(longest, child.wait_with_output()).await;
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

    #[test]
    fn a_trial_holds_until_one_of_the_files_changes() {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("m-00001-of-00002.gguf");
        let files = crate::models::parts(first.clone());
        assert_eq!(files[0], first);
        assert_eq!(files[1], folder.path().join("m-00002-of-00002.gguf"));
        assert_eq!(
            crate::models::parts("m.gguf".into()),
            [PathBuf::from("m.gguf")]
        );
        let all = "m-00001-of-99999.gguf";
        assert_eq!(crate::models::parts(all.into()), [PathBuf::from(all)]);
        let passed = || PassedTrial::of(&[], files.clone());
        std::fs::write(&files[0], "GGUF").unwrap();
        assert_eq!(passed(), None);
        std::fs::write(&files[1], "GGUF").unwrap();
        let before = passed().unwrap();
        assert_eq!(passed().unwrap(), before);
        std::fs::write(&files[1], "GGUF, and more").unwrap();
        assert_ne!(passed().unwrap(), before);
    }

    #[test]
    fn a_large_model_has_longer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let file = std::fs::File::create(&path).unwrap();
        assert_eq!(
            longest(std::slice::from_ref(&path)),
            Duration::from_secs(300)
        );
        file.set_len(10 << 30).unwrap();
        assert_eq!(longest(&[path]), Duration::from_secs(1200));
    }

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
