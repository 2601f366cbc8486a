//! What a runtime is started with, and how long its answers may take (AI-850, AI-851).

use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::numbers::RemoteNumbers;
use crate::runtime::Dialect;
use crate::steer::StepObserver;
use crate::trie::HostModel;
use crate::wire::Synchronisation;

/// How a runtime is started.
#[derive(Clone, PartialEq, Eq)]
pub struct RemoteCommand {
    /// The program.
    pub program: OsString,
    /// Its arguments, before those that name the shared objects.
    pub args: Vec<OsString>,
    /// Its whole environment.
    pub environment: Vec<(OsString, OsString)>,
    /// It is this program's own runtime: it gets the vocabulary from us, has the modules in the folder that both use, and
    /// has opened everything by its first answer.
    pub own: bool,
}

impl fmt::Debug for RemoteCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Arguments and the environment may hold secrets.
        f.debug_struct("RemoteCommand")
            .field("program", &self.program)
            .finish_non_exhaustive()
    }
}

/// How long its answers may take (AI-851).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteLimits {
    /// Each message of the handshake.
    pub handshake: Duration,
    /// A step.
    pub step: Duration,
    /// The start of an instance.
    pub start: Duration,
    /// An upload.
    pub upload: Duration,
}

impl RemoteLimits {
    /// The limits that follow from those of controllers.
    #[must_use]
    pub fn new(step: Duration, grace: Duration, init: Duration) -> Self {
        Self {
            handshake: Duration::from_secs(10),
            step: step + grace + Duration::from_secs(1),
            start: init + Duration::from_secs(5),
            upload: Duration::from_secs(30),
        }
    }
}

/// What a runtime is started with.
#[derive(Clone)]
pub struct RemoteOptions {
    /// The process.
    pub command: RemoteCommand,
    /// The form of the protocol; [`Dialect::Auto`]: its answer to `tokens` decides.
    pub dialect: Dialect,
    /// How the processes wait for each other.
    pub synchronisation: Synchronisation,
    /// Bytes of each message region: whole MiB.
    pub message_bytes: usize,
    /// Bytes of the region of masks: whole MiB.
    pub mask_bytes: usize,
    /// How long its answers may take.
    pub limits: RemoteLimits,
    /// Live sequences of one request.
    pub forks: u32,
    /// The model.
    pub model: Arc<HostModel>,
    /// Where its sequences and its memory are counted.
    pub numbers: Arc<RemoteNumbers>,
    /// Gets the time of each callback.
    pub step_observer: StepObserver,
}

/// When the first process is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteStart {
    /// At once.
    Now,
    /// For the first request that needs it.
    OnDemand,
}
