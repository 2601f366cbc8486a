//! [`Controller`]: one instance of a module. Starts it, calls it, and copies it for a fork. Everything here runs on a worker
//! thread.

mod fork;
mod pages;

use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, Token};
use wasmtime::{Instance, Memory, Store, TypedFunc, WasmParams, WasmResults};

use super::callback::{Callback, init_argument};
use super::config::HostConfig;
use super::cpu_time::CpuTime;
use super::failure::{Abort, CallFailure};
use super::imports;
use super::program::Program;
use super::result::{RawResult, ResultLimits, Returned};
use super::state::{BestTokens, ControllerState};
use crate::module::{Abi, MainExport};

/// What a callback returned, and what it printed and wrote.
#[derive(Debug)]
pub struct Outcome {
    /// The result; after a failure the instance is gone.
    pub result: Result<Returned, CallFailure>,
    /// Output of this callback. Of a failed one, too.
    pub report: StepReport,
}

/// An instance between callbacks: no guest code is on any stack, so its state is what AI-610 lists.
pub(super) struct Controller {
    store: Store<ControllerState>,
    instance: Instance,
    memory: Memory,
    /// What `aici_create` returned.
    handle: i32,
    exports: Exports,
    program: Program,
}

#[derive(Clone)]
enum Exports {
    P1 {
        pre: TypedFunc<i32, ()>,
        mid: TypedFunc<i32, ()>,
        post: TypedFunc<i32, ()>,
    },
    P2 {
        process: TypedFunc<i32, ()>,
    },
}

impl Controller {
    /// Starts an instance for a sequence with `prompt`: start function, `aici_init`, `aici_create`, `aici_init_prompt`,
    /// all within one time limit.
    pub(super) fn start(
        program: &Program,
        state: ControllerState,
        prompt: &[Token],
        config: &HostConfig,
    ) -> (Option<Box<Self>>, Outcome) {
        let cpu = CpuTime::now();
        let mut store = new_store(program, state);
        let started = Self::try_start(&mut store, program, prompt, config);
        let (started, mut report) = finish(&mut store, None, started);
        report.micros = cpu.micros();
        match started {
            Ok((parts, returned)) => {
                let controller = parts.into_controller(store, program);
                let result = Ok(returned);
                (Some(Box::new(controller)), Outcome { result, report })
            }
            Err(mut failure) => {
                // Whatever fails before the first token is a failure of the start, but for time and memory.
                if matches!(failure.reason, ErrorReason::TRAP | ErrorReason::BAD_RESULT) {
                    failure.reason = ErrorReason::INIT;
                }
                let result = Err(failure);
                (None, Outcome { result, report })
            }
        }
    }

    fn try_start(
        store: &mut Store<ControllerState>,
        program: &Program,
        prompt: &[Token],
        config: &HostConfig,
    ) -> Ended<(Parts, Returned)> {
        arm(
            store,
            config,
            init_argument(prompt),
            config.init_time.saturating_add(config.grace_time),
        )?;
        // A P2 controller returns the whole prompt.
        let result_bytes = config.result_bytes.saturating_add(prompt.len() * 12);
        store.data_mut().result_bytes = result_bytes;
        let instance = program.instance()?.instantiate(&mut *store)?;
        store.data_mut().limiter.instantiating = false;
        let memory = find_memory(store, &instance)?;
        if let Some(start) = &program.layout().start {
            call::<(), ()>(store, &instance, start, ())?;
        }
        call_if_exported(store, &instance, "aici_init")?;
        let handle = call(store, &instance, "aici_create", ())?;
        // What the earlier calls returned is not the result of this one.
        store.data_mut().result = RawResult::default();
        call::<i32, ()>(store, &instance, "aici_init_prompt", handle)?;
        let state = store.data_mut();
        let limits = result_limits(state);
        let raw = state.take_result();
        state.result_bytes = config.result_bytes;
        let returned = match program.abi() {
            Abi::P1 => raw.begun_p1()?,
            Abi::P2 => raw.begun_p2(prompt, limits)?,
        };
        let exports = Exports::find(store, &instance, program.abi())?;
        let parts = Parts {
            instance,
            memory,
            handle,
            exports,
        };
        Ok((parts, returned))
    }

    /// Its sequence is gone: it counts no longer in its request, although it is freed later.
    pub(super) fn leave(&mut self) {
        self.store.data_mut().leave();
    }

    /// Sets what `top_logits` gives.
    pub(super) fn show_best_tokens(&mut self, best: BestTokens) {
        self.store.data_mut().best = best;
    }

    /// Goes on after this process was cloned, in the parent or in the clone, with random bytes of its own (AI-1010).
    #[cfg(target_os = "linux")]
    pub(super) fn draw_on(&mut self, is_clone: bool) {
        let state = self.store.data_mut();
        if is_clone {
            // It is another sequence, whose writes are its own.
            state.writes.begin_step();
        }
        if let Some(random) = &mut state.random {
            let of_clone = random.fork();
            if is_clone {
                *random = of_clone;
            }
        }
    }

    /// Calls a callback of the sequence `number`. After a failure the guest must be dropped.
    pub(super) fn call(
        &mut self,
        callback: &Callback,
        number: u32,
        config: &HostConfig,
    ) -> Outcome {
        let cpu = CpuTime::now();
        let state = self.store.data_mut();
        state.number = number;
        if callback.begins_step() {
            state.writes.begin_step();
        }
        let result = self.try_call(callback, config);
        let (result, mut report) = finish(&mut self.store, Some(&self.instance), result);
        report.micros = cpu.micros();
        Outcome { result, report }
    }

    fn try_call(&mut self, callback: &Callback, config: &HostConfig) -> Ended<Returned> {
        let function = match (&self.exports, callback) {
            (Exports::P1 { pre, .. }, Callback::Pre) => pre,
            (Exports::P1 { mid, .. }, Callback::Mid { .. }) => mid,
            (Exports::P1 { post, .. }, Callback::Post { .. }) => post,
            (Exports::P2 { process }, Callback::Process { .. }) => process,
            _ => {
                let text = "this controller has no such callback";
                return Err(CallFailure::bad_result(text).into());
            }
        };
        arm(
            &mut self.store,
            config,
            callback.argument(),
            callback.time_limit(config),
        )?;
        function.call(&mut self.store, self.handle)?;
        let state = self.store.data_mut();
        let limits = result_limits(state);
        let raw = state.take_result();
        let waits = state.waits();
        let returned = match callback {
            Callback::Pre => raw.pre(limits, &waits),
            Callback::Mid { .. } => raw.mid(limits),
            Callback::Post { .. } => raw.post(),
            Callback::Process { .. } => raw.branches(limits, &waits),
        };
        Ok(returned?)
    }

    /// Runs `aici_main` or `main` once, as `--run` does, without a time limit. Returns what it printed.
    pub(super) fn run_main(
        program: &Program,
        state: ControllerState,
        main: MainExport,
    ) -> (Result<(), CallFailure>, StepReport) {
        let mut store = new_store(program, state);
        let mut run = || -> Ended<()> {
            store.set_epoch_deadline(1);
            if store.get_fuel().is_ok() {
                store.set_fuel(u64::MAX)?;
            }
            let instance = program.instance()?.instantiate(&mut store)?;
            store.data_mut().limiter.instantiating = false;
            find_memory(&mut store, &instance)?;
            if let Some(start) = &program.layout().start {
                call::<(), ()>(&mut store, &instance, start, ())?;
            }
            call_if_exported(&mut store, &instance, "aici_init")?;
            match main {
                MainExport::AiciMain => {
                    let handle: i32 = call(&mut store, &instance, "aici_create", ())?;
                    call::<i32, ()>(&mut store, &instance, "aici_main", handle)
                }
                MainExport::Main => {
                    call::<(i32, i32), i32>(&mut store, &instance, "main", (0, 0)).map(drop)
                }
            }
        };
        let ended = run();
        finish(&mut store, None, ended)
    }
}

/// What instantiation finds, until it is joined with the store.
struct Parts {
    instance: Instance,
    memory: Memory,
    handle: i32,
    exports: Exports,
}

impl Parts {
    fn into_controller(self, store: Store<ControllerState>, program: &Program) -> Controller {
        let Self {
            instance,
            memory,
            handle,
            exports,
        } = self;
        Controller {
            store,
            instance,
            memory,
            handle,
            exports,
            program: program.clone(),
        }
    }
}

impl Exports {
    fn find(store: &mut Store<ControllerState>, instance: &Instance, abi: Abi) -> Ended<Self> {
        let mut find = |name| instance.get_typed_func(&mut *store, name);
        Ok(match abi {
            Abi::P1 => Self::P1 {
                pre: find("aici_pre_process")?,
                mid: find("aici_mid_process")?,
                post: find("aici_post_process")?,
            },
            Abi::P2 => Self::P2 {
                process: find("aici_mid_process")?,
            },
        })
    }
}

/// How a call ended, before its failure is put into words.
type Ended<T> = Result<T, Broken>;

#[derive(Debug)]
enum Broken {
    /// In the guest, or in a host function.
    Wasm(wasmtime::Error),
    /// In what it returned.
    Result(CallFailure),
}

impl From<wasmtime::Error> for Broken {
    fn from(error: wasmtime::Error) -> Self {
        Self::Wasm(error)
    }
}

impl From<CallFailure> for Broken {
    fn from(failure: CallFailure) -> Self {
        Self::Result(failure)
    }
}

fn new_store(program: &Program, state: ControllerState) -> Store<ControllerState> {
    let mut store = Store::new(program.engine(), state);
    store.limiter(|state| &mut state.limiter);
    imports::interrupt_when_late(&mut store);
    store
}

/// Prepares a store for a call that takes at most `time`, and at most the fuel of a callback.
fn arm(
    store: &mut Store<ControllerState>,
    config: &HostConfig,
    argument: Vec<u8>,
    time: Duration,
) -> Ended<()> {
    if let Some(fuel) = config.fuel {
        store.set_fuel(fuel)?;
    }
    let deadline = Instant::now().checked_add(time);
    store.data_mut().begin_call(argument, deadline);
    // The clock ticks about once per millisecond, and each tick looks at the deadline.
    store.set_epoch_deadline(1);
    Ok(())
}

fn find_memory(store: &mut Store<ControllerState>, instance: &Instance) -> Ended<Memory> {
    let memory = instance.get_memory(&mut *store, "memory");
    let memory = memory.ok_or_else(|| CallFailure::bad_result("the module has no memory"))?;
    store.data_mut().memory = Some(memory);
    Ok(memory)
}

fn call<P: WasmParams, R: WasmResults>(
    store: &mut Store<ControllerState>,
    instance: &Instance,
    name: &str,
    params: P,
) -> Ended<R> {
    let function = instance.get_typed_func::<P, R>(&mut *store, name)?;
    Ok(function.call(store, params)?)
}

fn call_if_exported(
    store: &mut Store<ControllerState>,
    instance: &Instance,
    name: &str,
) -> Ended<()> {
    if instance.get_func(&mut *store, name).is_some() {
        call::<(), ()>(store, instance, name, ())?;
    }
    Ok(())
}

fn result_limits(state: &ControllerState) -> ResultLimits {
    ResultLimits {
        vocabulary: state.vocabulary(),
        branches: state.member().group().forks_max() as usize,
    }
}

/// Puts a failure into words, and takes what was printed and written. `instance`: of it, `aici_panic` is called after a
/// fatal error.
fn finish<T>(
    store: &mut Store<ControllerState>,
    instance: Option<&Instance>,
    ended: Ended<T>,
) -> (Result<T, CallFailure>, StepReport) {
    let mut report = store.data_mut().take_report();
    let error = match ended {
        Ok(value) => return (Ok(value), report),
        Err(Broken::Result(failure)) => return (Err(failure), report),
        Err(Broken::Wasm(error)) => error,
    };
    let failure = CallFailure::of_call(&error, &report.logs);
    let fatal = error
        .downcast_ref::<Abort>()
        .is_some_and(|abort| abort.fatal);
    if let Some(instance) = instance
        && fatal
    {
        store
            .data_mut()
            .set_deadline(Instant::now().checked_add(PANIC_TIME));
        // A trap is how it is meant to end.
        let _ = call_if_exported(store, instance, "aici_panic");
        store.data_mut().append_after_error(&mut report);
    }
    (Err(failure), report)
}

/// What `aici_panic` may take to print its last words.
const PANIC_TIME: Duration = Duration::from_millis(10);
