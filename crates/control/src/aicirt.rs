//! The AICI runtime as a process: an engine starts it and drives it over shared memory (AI-101 to AI-107).
//!
//! ```text
//!   main thread      requests ─► MainChannel ─► responses
//!   side thread      side requests ─► SideChannel (queue)
//!   workers (4)      queue ─► store, compiler, instances ─► side responses
//!   host             threads for controllers, or one that listens to their processes between steps
//!   parent watch     ends the process with its parent
//! ```
//!
//! The process ends by a signal, by the op `stop`, with its parent, or when the shared memory becomes unusable; none of these
//! has anything to save, so threads are not joined.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::steer::{ControllerStore, SteerCall, SteerSource, Token};

use crate::host::{Capabilities, Group, Host, Instance, Start, VariablesLimits, end_template};
use crate::module::Abi;
use crate::runtime::{
    AnswerRoom, CONSTRAINT_PREFIX, ConstraintSequence, Dialect, DialectCell, Launch, Launcher,
    MainChannel, MainConfig, MainReply, MaskType, NoRowFits, Pace as _, Pending, PendingLimits,
    RequestError, SIDE_WORKERS, SendAnswer, SideChannel, SideParts, StepClock, StepConfig,
    StepWake, WireFeatures, WireInstance, WireSteering, encode_failure, encode_unreadable,
};
use crate::steer::FindProgram;
use crate::trie::HostModel;
use crate::wire::{MessageSlot, Received, RuntimeWire, SendError, WireConfig, WireError};

/// What a runtime is started with.
pub struct AicirtOptions {
    /// Names and sizes of the shared objects.
    pub wire: WireConfig,
    /// The form of the protocol.
    pub dialect: Dialect,
    /// Runs controllers.
    pub host: Host,
    /// Finds them.
    pub programs: Arc<dyn FindProgram>,
    /// Stores them.
    pub store: Arc<dyn ControllerStore>,
    /// Native constraints.
    pub constraints: WireConstraints,
    /// The engine's model.
    pub model: Arc<HostModel>,
    /// The token that begins a text prompt.
    pub bos: Option<Token>,
    /// What the engine can do, in P2.
    pub capabilities: Capabilities,
    /// The elements of masks, in P2.
    pub mask_type: MaskType,
    /// The engine's padded vocabulary; 0 if it is not padded.
    pub logits: usize,
    /// Time limits of steps.
    pub times: StepTimes,
    /// How long an instance waits for its first step.
    pub pending_time: Duration,
    /// Live sequences of one request.
    pub forks: u32,
    /// Uploads are refused.
    pub restricted: bool,
}

/// Native constraints over the engine's vocabulary, the names of all of which begin with `sapwood:` (AI-840).
#[derive(Clone)]
pub struct WireConstraints {
    /// For engines that append tokens without sampling.
    pub forwarding: Arc<dyn SteerSource>,
    /// The same ones for engines that cannot: what must follow is sampled.
    pub sampling: Arc<dyn SteerSource>,
}

/// Time limits of steps.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// P1: for post and pre together.
    pub pre_step: Duration,
    /// P1: for mid.
    pub step: Duration,
    /// P2: for mid.
    pub p2_step: Duration,
    /// P1: waited longer than the limit, once per request.
    pub grace: Duration,
    /// Late steps in a row until a sequence fails.
    pub late_steps: u32,
    /// P1: a late mid skips the step instead of failing.
    pub late_mid_skips: bool,
}

/// Why a runtime ended otherwise than it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum AicirtError {
    /// The flags do not fit the engine's shared memory, or the system refuses a name.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The mask region has no space for one row.
    #[error("the mask region is too small for one row: raise --bin-size")]
    Masks,
    /// The system gives no thread, or no signal handler.
    #[error("the runtime cannot be started: {0}")]
    Start(#[from] io::Error),
    /// The engine died in the middle of a message.
    #[error("the engine stopped in the middle of a message")]
    Lost,
}

/// Prepares this process to be a runtime: signals end it at once, and so does the end of its parent, unless it is to be
/// kept. Called before a tokenizer and a store are loaded, which may take longer than an engine waits or lasts.
///
/// # Errors
/// The system gives no signal handler, or no thread.
pub fn begin(keep: bool) -> Result<(), AicirtError> {
    // Before the first answer: engines end a runtime by its process group, whenever they like (AI-105).
    crate::wire::watch_signals(end_template)?;
    if rustix::process::setpgid(None, None).is_err() {
        // Only a session's leader cannot, and that leads a group already.
        tracing::debug!("this process leads its group already");
    }
    if !keep {
        watch_parent()?;
    }
    Ok(())
}

/// Serves an engine until it asks the runtime to stop. [`begin`] was called before.
///
/// # Errors
/// [`AicirtError`].
pub fn run(options: AicirtOptions) -> Result<(), AicirtError> {
    let ended = serve(options);
    end_template();
    ended
}

fn serve(options: AicirtOptions) -> Result<(), AicirtError> {
    let wire = RuntimeWire::open(&options.wire)?;
    let RuntimeWire {
        requests,
        responses,
        side_requests,
        side_responses,
        masks,
    } = wire;
    let pending = Pending::new(options.pending_limits());
    let dialect = DialectCell::new(options.dialect);
    let features = WireFeatures::new();
    let wake = Arc::new(StepWake::new(options.host.outcome_poll()));
    let config = options.main_config();
    let agreed = (Arc::clone(&dialect), Arc::clone(&features));
    let main = MainChannel::new(config, agreed, Arc::clone(&pending), masks);
    let main = main.map_err(|NoRowFits| AicirtError::Masks)?;
    let side = SideChannel::new(SideParts {
        store: Arc::clone(&options.store),
        restricted: options.restricted,
        launcher: HostLauncher::from(options),
        pending,
        dialect,
        features,
        wake: Arc::clone(&wake),
        room: room_of(&side_responses),
        send: side_answers(side_responses),
    });
    start_side(Arc::new(side), side_requests)?;
    serve_main(main, requests, responses, &wake)
}

fn serve_main(
    mut main: MainChannel<WireInstance<WireSteering>>,
    mut requests: MessageSlot,
    mut responses: MessageSlot,
    wake: &StepWake,
) -> Result<(), AicirtError> {
    let room = room_of(&responses);
    let mut message = Vec::new();
    loop {
        let received = requests.receive(&mut message, None);
        let arrival = Instant::now();
        let answer = match received.map_err(|_| AicirtError::Lost)? {
            Received::Nothing => continue,
            Received::TooLong(bytes) => too_long(bytes, requests.room()),
            Received::Message => {
                let clock = StepClock {
                    arrival,
                    pace: wake,
                };
                match main.handle(&message, room, clock) {
                    MainReply::Answer(answer) => answer,
                    // Never answered: the engine does not read any more (AI-105).
                    MainReply::Stop => {
                        end_children();
                        return Ok(());
                    }
                }
            }
        };
        // First: sending waits for an engine that has not read the answer before, and meanwhile somebody must serve what
        // the processes of controllers ask for.
        wake.end();
        send(&mut responses, None, &answer).map_err(|_| AicirtError::Lost)?;
    }
}

fn room_of(responses: &MessageSlot) -> AnswerRoom {
    AnswerRoom {
        bytes_max: responses.bytes_max(),
        room: responses.room(),
    }
}

/// Ends the other processes of this group, a compiler for example. The signal reaches this process too, whose handler ends
/// it with 0.
fn end_children() {
    if rustix::process::getpgrp() == rustix::process::getpid() {
        let _ = rustix::process::kill_current_process_group(rustix::process::Signal::TERM);
    }
}

/// The answer to a message whose length is impossible.
fn too_long(bytes: u32, room: usize) -> Vec<u8> {
    encode_unreadable(&format!("msg too large; {bytes} + 4 > {room}"))
}

/// Sends the answer to the request of a `$rid`; one that does not fit is replaced by an error that does (AI-224).
fn send(responses: &mut MessageSlot, rid: Option<&str>, answer: &[u8]) -> Result<(), SendError> {
    match responses.send(answer) {
        Err(SendError::TooLarge { bytes, .. }) => {
            let bytes_max = responses.bytes_max();
            let text = format!("response too large; {bytes} > {bytes_max}");
            tracing::error!("{text}");
            let mut error = encode_failure(rid, &text);
            if error.len() > bytes_max {
                // The `$rid` is what made it too large.
                error = encode_failure(None, &text);
            }
            responses.send(&error)
        }
        sent => sent,
    }
}

fn side_answers(responses: MessageSlot) -> SendAnswer {
    let responses = Mutex::new(responses);
    Box::new(move |rid, answer| {
        let mut responses = responses.lock().unwrap_or_else(PoisonError::into_inner);
        if send(&mut responses, rid, &answer).is_err() {
            lost("the engine does not read the answers of the side channel");
        }
    })
}

fn start_side(side: Arc<SideChannel<HostLauncher>>, mut requests: MessageSlot) -> io::Result<()> {
    for (number, most) in SIDE_WORKERS.into_iter().enumerate() {
        let side = Arc::clone(&side);
        std::thread::Builder::new()
            .name(format!("aici-work-{number}"))
            .spawn(move || side.work(most))?;
    }
    let serve = move || {
        let mut message = Vec::new();
        loop {
            match requests.receive(&mut message, None) {
                Ok(Received::Message) => side.accept(&message),
                Ok(Received::TooLong(bytes)) => {
                    side.unreadable(&format!("msg too large; {bytes} + 4 > {}", requests.room()));
                }
                Ok(Received::Nothing) => {}
                Err(error) => lost(&error.to_string()),
            }
        }
    };
    std::thread::Builder::new()
        .name("aici-side".into())
        .spawn(serve)?;
    Ok(())
}

/// Ends the process: without one of its channels a runtime is of no use, and the main thread may wait for ever.
fn lost(reason: &str) -> ! {
    tracing::error!("{reason}");
    end_template();
    std::process::exit(SHARED_MEMORY_LOST);
}

/// Ends the process when its parent has ended (AI-106). The process is watched, not the thread that spawned this one.
fn watch_parent() -> io::Result<()> {
    let Some(parent) = rustix::process::getppid() else {
        return Ok(());
    };
    let handle = rustix::process::pidfd_open(parent, rustix::process::PidfdFlags::empty());
    if rustix::process::getppid() != Some(parent) {
        std::process::exit(0);
    }
    let watch = move || {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        loop {
            let half_second = Timespec {
                tv_sec: 0,
                tv_nsec: 500_000_000,
            };
            match &handle {
                Ok(handle) => {
                    let mut ends = [PollFd::new(handle, PollFlags::IN)];
                    // Interrupted, it looks again; an error is as good as an end of the wait.
                    let _ = poll(&mut ends, None);
                }
                // A kernel before 5.3.
                Err(_) => {
                    let _ = poll(&mut [], Some(&half_second));
                }
            }
            if rustix::process::getppid() != Some(parent) {
                tracing::info!("the engine has ended");
                end_template();
                std::process::exit(0);
            }
        }
    };
    std::thread::Builder::new()
        .name("aici-parent".into())
        .spawn(watch)?;
    Ok(())
}

impl AicirtOptions {
    fn pending_limits(&self) -> PendingLimits {
        let limits = PendingLimits::default();
        let instances = self.host.config().instances as usize;
        PendingLimits {
            sequences: limits.sequences.min(instances),
            ttl: self.pending_time,
            ..limits
        }
    }

    fn main_config(&self) -> MainConfig {
        MainConfig {
            steps: StepConfig {
                vocabulary: self.model.vocabulary(),
                eos: self.model.eos(),
                pre_step_time: self.times.pre_step,
                step_time: self.times.step,
                grace_time: self.times.grace,
                late_steps: self.times.late_steps,
                late_mid_skips: self.times.late_mid_skips,
                repeats_pre: self.dialect == Dialect::P1i,
                forks: self.forks as usize,
                sequences: self.pending_limits().sequences,
            },
            capabilities: self.capabilities,
            mask_type: self.mask_type,
            logits: self.logits,
            p2_step_time: self.times.p2_step,
        }
    }
}

/// Starts controllers on the host.
struct HostLauncher {
    host: Host,
    programs: Arc<dyn FindProgram>,
    constraints: WireConstraints,
    model: Arc<HostModel>,
    bos: Option<Token>,
    capabilities: Capabilities,
    forks: u32,
}

impl HostLauncher {
    /// A native constraint, which is a P2 controller on either wire.
    fn constrain(
        &self,
        launch: &Launch<'_>,
        capabilities: Capabilities,
    ) -> Result<ConstraintSequence, RequestError> {
        let source = if capabilities.ff_tokens {
            &self.constraints.forwarding
        } else {
            &self.constraints.sampling
        };
        let steer = source.open(SteerCall {
            user: launch.user,
            controller: launch.controller,
            arg: launch.arg,
            watched: true,
            stops: false,
            sharer: None,
        })?;
        let request = Group::new(self.forks, VariablesLimits::default()).enter();
        let request = request.map_err(|failure| RequestError::user(failure.message))?;
        let (prompt, waker) = (&launch.prompt, &launch.waker);
        Ok(ConstraintSequence::new(steer, prompt, waker, request))
    }
}

impl From<AicirtOptions> for HostLauncher {
    fn from(options: AicirtOptions) -> Self {
        Self {
            host: options.host,
            programs: options.programs,
            constraints: options.constraints,
            model: options.model,
            bos: options.bos,
            capabilities: options.capabilities,
            forks: options.forks,
        }
    }
}

impl Launcher for HostLauncher {
    type Sequence = WireInstance<WireSteering>;

    fn launch(&self, launch: Launch<'_>) -> Result<Self::Sequence, RequestError> {
        let dialect = launch.dialect;
        // P1 has no flags for what an engine can do.
        let capabilities = match dialect {
            Dialect::P2 => self.capabilities,
            Dialect::Auto | Dialect::P1 | Dialect::P1i => Capabilities::WIRE,
        };
        let (abi, steering) = if launch.controller.starts_with(CONSTRAINT_PREFIX) {
            let constraint = self.constrain(&launch, capabilities)?;
            (Abi::P2, WireSteering::Constraint(constraint))
        } else {
            let program = self.programs.find(launch.user, launch.controller)?;
            let group = Group::new(self.forks, VariablesLimits::default());
            group.set_caller(launch.user.name);
            let start = Start {
                model: Arc::clone(&self.model),
                arg: launch.arg.into(),
                prompt: launch.prompt,
                group,
                capabilities,
                waker: launch.waker,
            };
            let instance = Instance::start(&self.host, &program, start);
            (program.abi(), WireSteering::Module(instance))
        };
        Ok(match (abi, dialect) {
            (Abi::P1, Dialect::P1 | Dialect::P1i) | (Abi::P2, Dialect::P2) => {
                WireInstance::Direct(steering)
            }
            // Where the dialect is not decided yet, either kind of callback may come: they translate those of the other
            // generation only.
            (Abi::P1, _) => WireInstance::p1_on_p2(steering, self.model.vocabulary()),
            (Abi::P2, _) => WireInstance::p2_on_p1(steering),
        })
    }

    fn tokenize_prompt(&self, text: &str) -> Vec<Token> {
        let text = self
            .model
            .tokenize(text.as_bytes(), crate::trie::TokenView::Named);
        self.bos.into_iter().chain(text).collect()
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn memory_bytes(&self) -> u64 {
        self.host.memory_bytes() as u64
    }
}

/// The exit code of a runtime whose shared memory is unusable (AI-107).
const SHARED_MEMORY_LOST: i32 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::EngineWire;

    /// AI-301
    #[test]
    fn ai_224_an_answer_that_does_not_fit_is_an_error_with_its_rid() {
        let mut config = WireConfig::new(format!("/swr{}-", std::process::id()));
        config.message_bytes = 4_096;
        config.mask_bytes = 4_096;
        let mut engine = EngineWire::create(&config).unwrap();
        let mut runtime = RuntimeWire::open(&config).unwrap();
        let bytes_max = runtime.side_responses.bytes_max();
        let mut answered = |rid: &str, bytes: usize| {
            send(&mut runtime.side_responses, Some(rid), &vec![b'x'; bytes]).unwrap();
            let (mut answer, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
            let received = engine.side_responses.receive(&mut answer, Some(until));
            assert_eq!(received, Ok(Received::Message));
            String::from_utf8(answer).unwrap()
        };
        assert_eq!(answered("a", bytes_max), "x".repeat(bytes_max));
        let error = format!(
            r#""type":"error","error":"response too large; {} > {bytes_max}","is_user_error":false}}"#,
            bytes_max + 1
        );
        assert_eq!(
            answered("a", bytes_max + 1),
            format!(r#"{{"$rid":"a",{error}"#)
        );
        // The error with the longest possible `$rid`, and one that is a byte longer.
        let rest = format!(r#"{{"$rid":"",{error}"#).len();
        let rid = "r".repeat(bytes_max - rest);
        assert_eq!(
            answered(&rid, bytes_max + 1),
            format!(r#"{{"$rid":"{rid}",{error}"#)
        );
        assert_eq!(
            answered(&format!("{rid}r"), bytes_max + 1),
            format!("{{{error}")
        );
    }
}
