//! [`RemoteRuntime`]: the runtime of one model, over all of its processes (AI-850, AI-852).

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::SteerRefusal;
use sapwood_proto::time::Time;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::epoch::Epoch;
use super::exchange::{self, Exchanged, MainWire};
use super::options::RemoteOptions;
use super::process::{RuntimeProcess, VocabularyFile};
use super::reply::{Broken, Reply, ResultLimits, TokensReply};
use super::request::{HELLO, PING, TOKENS};
use super::side::{self, SideWire};
use super::supervision::Supervision;
use super::table::RemoteTable;
use crate::module::Abi;
use crate::runtime::Dialect;
use crate::wire::{EngineWire, SlotLimits, Synchronisation, WireConfig, WireNames};

/// The runtime of one model. Its process ends when this is dropped.
pub(super) struct RemoteRuntime {
    shared: Arc<RuntimeShared>,
    supervisor: Mutex<Option<JoinHandle<()>>>,
}

struct RuntimeShared {
    options: RemoteOptions,
    state: Mutex<RuntimeState>,
    changed: Condvar,
    origin: Instant,
}

struct RuntimeState {
    supervision: Supervision,
    current: Option<Arc<Epoch>>,
    /// Why the last process ended.
    failure: Option<String>,
    stopping: bool,
}

impl RemoteRuntime {
    pub(super) fn new(options: RemoteOptions) -> Self {
        Self {
            shared: Arc::new(RuntimeShared {
                options,
                state: Mutex::new(RuntimeState {
                    supervision: Supervision::new(),
                    current: None,
                    failure: None,
                    stopping: false,
                }),
                changed: Condvar::new(),
                origin: Instant::now(),
            }),
            supervisor: Mutex::new(None),
        }
    }

    pub(super) fn options(&self) -> &RemoteOptions {
        &self.shared.options
    }

    /// Starts the first process, unless it was started before.
    fn start(&self) -> io::Result<()> {
        let mut supervisor = self
            .supervisor
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if supervisor.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new()
                .name("controllers".into())
                .spawn(move || shared.supervise())?;
            *supervisor = Some(thread);
        }
        Ok(())
    }

    /// The process that is running; waits while one is being started, but not for ever.
    ///
    /// # Errors
    /// There is none for now.
    pub(super) fn epoch(&self) -> Result<Arc<Epoch>, SteerRefusal> {
        self.start().map_err(|error| {
            tracing::error!(%error, "there is no thread for the runtime of the controllers");
            unavailable()
        })?;
        let until = Instant::now() + REQUEST_WAIT;
        let mut state = self.shared.state();
        loop {
            if let Some(epoch) = &state.current {
                return Ok(Arc::clone(epoch));
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.stopping || left.is_zero() || state.supervision.is_unavailable() {
                return Err(unavailable());
            }
            state = self.shared.wait(state, left);
        }
    }

    /// Starts the first process and waits for what comes of it.
    ///
    /// # Errors
    /// It is no runtime for this model; for people.
    pub(super) fn started(&self) -> Result<(), String> {
        self.start().map_err(|error| error.to_string())?;
        let mut state = self.shared.state();
        loop {
            match (&state.current, &state.failure) {
                (Some(_), _) => return Ok(()),
                (None, Some(failure)) => return Err(failure.clone()),
                (None, None) => state = self.shared.wait(state, START_WAIT),
            }
        }
    }
}

impl Drop for RemoteRuntime {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.stopping = true;
        let current = state.current.clone();
        drop(state);
        self.shared.changed.notify_all();
        if let Some(epoch) = current {
            epoch.stop();
        }
        // Whoever drops the runtime waits until nothing of it is left; a thread that panicked has left nothing either.
        let supervisor = self
            .supervisor
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(supervisor) = supervisor {
            let _ = supervisor.join();
        }
    }
}

impl fmt::Debug for RemoteRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRuntime")
            .field("command", &self.shared.options.command)
            .finish_non_exhaustive()
    }
}

impl RuntimeShared {
    fn state(&self) -> MutexGuard<'_, RuntimeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(
        &self,
        state: MutexGuard<'s, RuntimeState>,
        time: Duration,
    ) -> MutexGuard<'s, RuntimeState> {
        let waited = self.changed.wait_timeout(state, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn now(&self) -> Time {
        Time::new(self.origin.elapsed())
    }

    /// One process after the other, until the runtime is dropped.
    fn supervise(&self) {
        loop {
            let ended = self.live();
            let mut state = self.state();
            state.current = None;
            if state.stopping {
                return;
            }
            let now = self.now();
            let until = state.supervision.died(now);
            let wait_ms = until.since(now).as_millis();
            tracing::error!(why = %ended.0, wait_ms, "the runtime of the controllers has ended");
            state.failure = Some(ended.0);
            self.changed.notify_all();
            while !state.stopping && self.now() < until {
                let left = until.since(self.now());
                state = self.wait(state, left);
            }
            if state.stopping {
                return;
            }
            state.supervision.starting();
            self.options.numbers.restarted();
        }
    }

    /// The life of one process. Returns why it ended.
    fn live(&self) -> Broken {
        match self.begin() {
            Ok(running) => self.serve(running),
            Err(broken) => broken,
        }
    }

    /// Creates the objects, starts the process and shakes hands (AI-101).
    fn begin(&self) -> Result<RunningProcess, Broken> {
        let options = &self.options;
        let config = self.wire_config();
        let failed = |error: &dyn fmt::Display| Broken(format!("it cannot be started: {error}"));
        // Without names for our own: nothing stays behind, whenever both processes are killed.
        let created = match options.command.own {
            true => EngineWire::create_nameless(&config).map(|(wire, files)| (wire, Some(files))),
            false => EngineWire::create(&config).map(|wire| (wire, None)),
        };
        let (wire, files) = created.map_err(|error| failed(&error))?;
        let config = WireConfig { files, ..config };
        // Open until the process has answered, which it does not before it has read its vocabulary.
        let vocabulary = match options.command.own {
            true => Some(VocabularyFile::new(&options.model).map_err(|error| failed(&error))?),
            false => None,
        };
        let args = self.arguments(&config, vocabulary.as_ref());
        let process = RuntimeProcess::spawn(&options.command, &args);
        let process = process.map_err(|error| failed(&error))?;
        let EngineWire {
            requests,
            responses,
            side_requests,
            side_responses,
            masks,
            names,
        } = wire;
        let main = MainWire {
            requests,
            responses,
            masks,
        };
        let side = SideWire {
            requests: side_requests,
            responses: side_responses,
        };
        let mut running = RunningProcess {
            process,
            main,
            side,
            names,
            dialect: Abi::P1,
        };
        match self.shake_hands(&mut running) {
            Ok(dialect) => running.dialect = dialect,
            // How it ended says more than that it did.
            Err(Broken(_)) if running.process.has_ended() => {
                let status = running.process.reap();
                let status = status.map_err(|error| failed(&error))?;
                return Err(failed(&status));
            }
            Err(broken) => return Err(broken),
        }
        Ok(running)
    }

    fn wire_config(&self) -> WireConfig {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        WireConfig {
            synchronisation: self.options.synchronisation,
            message_bytes: self.options.message_bytes,
            mask_bytes: self.options.mask_bytes,
            // Masks are computed while the model computes, which needs the cores.
            spin: Duration::ZERO,
            limits: SlotLimits {
                stall: STALL,
                unread: UNREAD,
            },
            ..WireConfig::new(format!("/sw{}.{number}-", std::process::id()))
        }
    }

    fn arguments(&self, config: &WireConfig, vocabulary: Option<&VocabularyFile>) -> Vec<OsString> {
        let mut args = self.options.command.args.clone();
        let mib = |bytes: usize| OsString::from((bytes >> 20).to_string());
        args.push("--server".into());
        match &config.files {
            Some(files) => args.extend(["--regions".into(), files.join(",").into()]),
            None => args.extend(["--name".into(), OsString::from(&config.prefix)]),
        }
        args.push("--json-size".into());
        args.extend([mib(config.message_bytes), "--bin-size".into()]);
        args.push(mib(config.mask_bytes));
        if config.synchronisation == Synchronisation::Futex {
            args.push("--futex".into());
        }
        if let Some(file) = vocabulary {
            args.extend(["--tokenizer".into(), file.path()]);
        }
        args
    }

    /// Returns the dialect that the runtime speaks.
    fn shake_hands(&self, running: &mut RunningProcess) -> Result<Abi, Broken> {
        let options = &self.options;
        let limit = options.limits.handshake;
        let _: IgnoredAny = running.ask(PING, limit, self)?;
        let tokens: TokensReply = running.ask(TOKENS, limit, self)?;
        if options.command.own {
            // Only there: others may end at an op that they do not know.
            let _: IgnoredAny = running.ask(HELLO, limit, self)?;
        }
        let ours = options.model.vocabulary();
        if tokens.vocab_size != ours {
            let theirs = tokens.vocab_size;
            return Err(Broken(format!(
                "its vocabulary has {theirs} tokens, and the model's has {ours}: give it the tokenizer of this model"
            )));
        }
        let answered = match tokens.eos_token_id {
            Some(_) => Abi::P2,
            None => Abi::P1,
        };
        Ok(match options.dialect {
            Dialect::Auto => answered,
            // `p1i` is no setting: its only difference is an answer that is not looked at.
            Dialect::P1 | Dialect::P1i => Abi::P1,
            Dialect::P2 => Abi::P2,
        })
    }

    /// Serves sequences until the process ends.
    fn serve(&self, running: RunningProcess) -> Broken {
        let RunningProcess {
            mut process,
            main,
            side,
            names,
            dialect,
        } = running;
        let results = ResultLimits {
            vocabulary: self.options.model.vocabulary(),
            forks: self.options.forks,
        };
        let rows = self.options.mask_bytes / (4 * results.vocabulary).max(1);
        let numbers = Arc::clone(&self.options.numbers);
        let table = RemoteTable::new(dialect, rows.max(1), numbers);
        let group = process.group();
        let epoch = Arc::new(Epoch::new(table, &self.options, results, group));
        let threads = [
            spawn_for(&epoch, "controllers-step", move |epoch| {
                exchange::run(epoch, main);
            }),
            spawn_for(&epoch, "controllers-side", move |epoch| {
                side::run(epoch, side)
            }),
        ];
        if threads.iter().all(Result::is_ok) {
            let mut state = self.state();
            state.supervision.ready();
            state.current = Some(Arc::clone(&epoch));
            // Dropped while it was being started: nobody else would end it.
            if state.stopping {
                epoch.stop();
            }
            drop(state);
            self.changed.notify_all();
            tracing::info!(?dialect, "the runtime of the controllers is ready");
            process.wait_for_end();
        }
        // First, so that a request which sees its stream end gets the next process.
        self.state().current = None;
        epoch.lose();
        for thread in threads.into_iter().flatten() {
            let _ = thread.join();
        }
        let status = process.reap();
        drop(names);
        match status {
            Ok(status) => Broken(status.to_string()),
            Err(error) => Broken(error.to_string()),
        }
    }
}

/// A process that has answered.
struct RunningProcess {
    // In this order: the process must not outlive its objects.
    process: RuntimeProcess,
    main: MainWire,
    side: SideWire,
    names: WireNames,
    dialect: Abi,
}

impl RunningProcess {
    /// Exchanges one message of the handshake.
    fn ask<T: for<'m> Deserialize<'m>>(
        &mut self,
        message: &[u8],
        limit: Duration,
        shared: &RuntimeShared,
    ) -> Result<T, Broken> {
        let mut answer = Vec::new();
        let gone = || self.process.has_ended() || shared.state().stopping;
        let exchanged = self.main.exchange(message, &mut answer, limit, gone)?;
        if let Exchanged::NotSent(text) = exchanged {
            return Err(Broken(text));
        }
        let data = Reply::parse(&answer)?.data;
        data.map_err(|error| Broken(error.text))?
            .read()
            .map_err(|error| Broken(format!("it did not say what it was asked: {error}")))
    }
}

fn spawn_for(
    epoch: &Arc<Epoch>,
    name: &str,
    run: impl FnOnce(&Epoch) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let epoch = Arc::clone(epoch);
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            let run = std::panic::AssertUnwindSafe(|| run(&epoch));
            // Without the thread nobody would be answered: a new process has new ones.
            if std::panic::catch_unwind(run).is_err() {
                epoch.kill("a thread of its engine panicked");
            }
        })
}

/// The refusal of a request while there is no runtime.
pub(super) fn unavailable() -> SteerRefusal {
    SteerRefusal {
        code: Code::Unavailable,
        reason: ErrorReason::CONTROLLERS_UNAVAILABLE,
        message: "controllers cannot be run at the moment: their runtime is not there".to_owned(),
    }
}

/// How long a request waits for a process that is being started.
const START_WAIT: Duration = Duration::from_secs(25);
/// How long a request waits for it: meanwhile it has one of the few threads for uploads and grammars.
const REQUEST_WAIT: Duration = Duration::from_secs(5);
/// A message that is half written for so long will not come (AI-213).
const STALL: Duration = Duration::from_secs(10);
/// After this time the sender looks whether the process is still there.
const UNREAD: Duration = Duration::from_millis(100);
