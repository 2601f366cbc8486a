//! [`Compiler`]: compiles grammars of strangers within a time.
//!
//! The library has limits on sizes but none on time, and it recurses over schemas. A thread cannot be stopped from
//! outside. So each grammar compiles on a thread of its own, with a stack for the deepest schema that is read; the
//! caller waits for a limited time; and the number of such threads is limited.
//!
//! A grammar that is late goes on compiling with a lower priority, and is kept for the next one who asks for it. Another one
//! is compiled in its stead, so that hostile grammars do not stop those of others, up to a number of late ones. A caller has
//! at most half of all places, those of late grammars included, and gets nothing compiled while its late ones have them.
//!
//! A process that is cloned may have no thread that nobody waits for. There the caller waits until the thread has ended,
//! and whoever has an eye on the process ends all of it if that takes too long.

use std::panic::AssertUnwindSafe;
#[cfg(target_os = "linux")]
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::api::ParserLimits;
use llguidance::panic_utils;
use sapwood_proto::steer::{SteerRefusal, Token};

use super::automaton::{Automaton, AutomatonError};
use super::budget::{Budget, Charge};
use super::grammar::{GrammarError, GrammarText};
use super::token_env::Factory;
use super::{ConstraintConfig, ConstraintSource, busy, invalid_grammar, no_automaton};
use crate::stats::SteeringTimes;

/// Stack of a compiling thread, for the deepest grammar and schema that are let through (`PARTS_MAX`, `LEVELS_MAX`) in a
/// build without optimisation, twice over. Only the touched part takes memory.
const STACK_BYTES: usize = 512 << 20;

/// Automata of ended sequences that are kept for the next ones, for each grammar, and the bytes that each may have. Larger
/// ones are freed on the threads of masks.
const IDLE_MAX: usize = 2;
const IDLE_BYTES_MAX: usize = 1 << 20;

/// The library's limits. Its defaults are for trusted grammars on a large machine.
pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        // The work for one mask; 14 ms and 2.5 ms at the speeds that the library's documentation gives.
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        // The work for the lexer of a grammar. 1,000,000 took 2.7 s and 400 MiB.
        initial_lexer_fuel: 400_000,
        // About 1 to 2 KiB each, for each sequence.
        max_lexer_states: 20_000,
        // The errors are for strangers, and the state is long.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A grammar, compiled for one vocabulary.
pub(super) struct Compiled {
    /// The EOG tokens.
    pub(super) ends: Vec<Token>,
    /// Where the times of its masks are counted.
    pub(super) times: Arc<SteeringTimes>,
    /// Never goes on; new sequences start with copies.
    prototype: Mutex<Automaton>,
    /// Automata at their start whose caches are filled: their first masks cost a fraction of those of a copy.
    idle: Mutex<Vec<Automaton>>,
    /// Bytes of the grammar and of the prototype.
    bytes: usize,
    /// For the grammar; each automaton has its own.
    _charge: Charge,
}

impl Compiled {
    /// Returns an automaton at its start.
    pub(super) fn automaton(&self) -> Result<Automaton, AutomatonError> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        match idle {
            Some(automaton) => Ok(automaton),
            None => {
                let prototype = self.prototype.lock();
                prototype.unwrap_or_else(PoisonError::into_inner).copy()
            }
        }
    }

    /// Keeps the automaton of an ended sequence, which has consumed `tokens` tokens, for another sequence. Returns it if it
    /// is large, or so broken that its size is not known: freeing it may take long.
    pub(super) fn recycle(&self, mut automaton: Automaton, tokens: usize) -> Option<Automaton> {
        let fits = |bytes| bytes <= IDLE_BYTES_MAX;
        if !automaton.cache_bytes().is_ok_and(fits) {
            return Some(automaton);
        }
        if automaton.reset(tokens).is_ok() {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < IDLE_MAX {
                idle.push(automaton);
            }
        }
        None
    }

    /// Whether freeing it may take long.
    pub(super) const fn is_large(&self) -> bool {
        self.bytes > IDLE_BYTES_MAX
    }

    /// Bytes that it may take in the cache, those of its idle automata included.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes + IDLE_MAX * IDLE_BYTES_MAX
    }

    /// Bytes of the grammar itself.
    pub(super) const fn grammar_bytes(&self) -> usize {
        self.bytes
    }
}

/// Compiles a limited number of grammars at a time.
pub(super) struct Compiler {
    permits: Arc<Permits>,
    time: Duration,
    /// No thread is left behind.
    joins: bool,
}

struct Permits {
    threads: usize,
    overruns: usize,
    state: Mutex<State>,
    freed: Condvar,
}

/// Who asks for a grammar. All controllers are one.
type User = Option<String>;

#[derive(Default)]
struct State {
    /// Who waits for the grammars that are being compiled.
    running: Vec<User>,
    /// Who has asked for the grammars that are compiled although nobody waits for them any more.
    overruns: Vec<User>,
}

/// How many of a list are of one user.
fn count_of(user: &User, list: &[User]) -> usize {
    list.iter().filter(|other| *other == user).count()
}

/// Removes one of a user's from a list.
fn remove_of(user: &User, list: &mut Vec<User>) {
    if let Some(own) = list.iter().position(|other| other == user) {
        list.swap_remove(own);
    }
}

/// The right to compile one grammar. The caller or the compiling thread drops it, and then another grammar may take it.
pub(super) struct Permit {
    permits: Arc<Permits>,
    user: User,
    /// The caller waits for the end of the thread, however late it is.
    joins: bool,
    deadline: Instant,
    phase: Arc<Mutex<Phase>>,
}

/// Where a grammar is counted.
#[derive(Clone, Copy, Default, PartialEq)]
enum Phase {
    #[default]
    Running,
    Overrun,
    /// Nowhere any more. Its thread ends.
    Done,
}

impl Permits {
    /// Grammars that one caller may have: with more, its late ones would take the places of others.
    fn share(&self) -> usize {
        ((self.threads + self.overruns) / 2).max(1)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.permits.lock();
        match *phase {
            Phase::Overrun => remove_of(&self.user, &mut state.overruns),
            _ => remove_of(&self.user, &mut state.running),
        }
        *phase = Phase::Done;
        drop(state);
        // All: the one that is woken first may be one whose share is used up.
        self.permits.freed.notify_all();
    }
}

impl Compiler {
    pub(super) fn new(config: &ConstraintConfig) -> Self {
        let permits = Permits {
            threads: config.compile_threads.max(1),
            overruns: config.compile_overruns,
            state: Mutex::default(),
            freed: Condvar::new(),
        };
        Self {
            permits: Arc::new(permits),
            time: config.compile_time,
            joins: false,
        }
    }

    /// A compiler that leaves no thread behind: see [`ConstraintSource::of_cloned_processes`].
    ///
    /// [`ConstraintSource::of_cloned_processes`]: super::ConstraintSource::of_cloned_processes
    pub(super) fn joining(config: &ConstraintConfig) -> Self {
        Self {
            joins: true,
            ..Self::new(config)
        }
    }

    /// Waits until another grammar may be compiled. `time`: for that and for compiling. Each of the two takes no longer than
    /// usual, so that a grammar is not late because others were before it.
    pub(super) fn permit(
        &self,
        user: Option<&str>,
        time: Duration,
    ) -> Result<Permit, SteerRefusal> {
        let begun = Instant::now();
        let user = user.map(str::to_owned);
        let permits = &self.permits;
        let share = permits.share();
        let is_late = |state: &State| count_of(&user, &state.overruns) >= share;
        let must_wait = |state: &mut State| {
            let own = count_of(&user, &state.running) + count_of(&user, &state.overruns);
            !is_late(state) && (own >= share || state.running.len() >= permits.threads)
        };
        let waited =
            permits
                .freed
                .wait_timeout_while(permits.lock(), time.min(self.time), must_wait);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if is_late(&state) {
            return Err(busy(
                "grammars of yours are still being compiled after their time; try again later",
            ));
        }
        if timeout.timed_out() {
            return Err(busy(
                "too many grammars are being compiled; try again later",
            ));
        }
        state.running.push(user.clone());
        drop(state);
        let left = time.saturating_sub(begun.elapsed());
        Ok(Permit {
            permits: Arc::clone(permits),
            user,
            joins: self.joins,
            deadline: Instant::now() + left.min(self.time),
            phase: Arc::default(),
        })
    }

    /// Grammars that are compiled although nobody waits for them.
    #[cfg(any(test, fuzzing))]
    pub(super) fn overruns(&self) -> usize {
        self.permits.lock().overruns.len()
    }
}

/// What the caller keeps of a permit, to say that it has stopped waiting.
pub(super) struct Overrun {
    permits: Arc<Permits>,
    user: User,
    phase: Arc<Mutex<Phase>>,
}

impl Overrun {
    /// Lets another grammar be compiled in the stead of one that is late, and lowers the priority of its thread. If there are
    /// too many of these already, the grammar keeps its place until it is compiled. Returns whether it has lost it.
    pub(super) fn begin(&self, thread: &CompilingThread) -> bool {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.permits.lock();
        if *phase != Phase::Running || state.overruns.len() >= self.permits.overruns {
            return *phase == Phase::Overrun;
        }
        *phase = Phase::Overrun;
        remove_of(&self.user, &mut state.running);
        state.overruns.push(self.user.clone());
        drop(state);
        self.permits.freed.notify_all();
        // Before the phase is unlocked: without that lock the thread cannot end, and its id cannot be that of another one.
        thread.slow_down();
        true
    }
}

impl Permit {
    /// What the caller keeps when the compiling thread gets the permit.
    pub(super) fn overrun(&self) -> Overrun {
        Overrun {
            permits: Arc::clone(&self.permits),
            user: self.user.clone(),
            phase: Arc::clone(&self.phase),
        }
    }

    /// Compiles a grammar for a source, within the time that is left, and keeps it in the cache, even if it is late. The
    /// factory is built first, if it is not yet.
    pub(super) fn compile(
        self,
        source: &ConstraintSource,
        text: &GrammarText,
    ) -> Result<Arc<Compiled>, SteerRefusal> {
        let begun = Instant::now();
        let compiled = self.compile_on_thread(source, text);
        let seconds = &source.times.constraint_compile_seconds;
        seconds.observe_span(begun.elapsed());
        compiled
    }

    fn compile_on_thread(
        self,
        source: &ConstraintSource,
        text: &GrammarText,
    ) -> Result<Arc<Compiled>, SteerRefusal> {
        let (deadline, joins, overrun) = (self.deadline, self.joins, self.overrun());
        let (sender, receiver) = sync_channel(1);
        let (factory, budget) = (Arc::clone(&source.factory), Arc::clone(&source.budget));
        let (cache, times) = (Arc::clone(&source.cache), Arc::clone(&source.times));
        let text = text.clone();
        let compiling = CompilingThread::default();
        let shown = compiling.clone();
        let thread = thread::Builder::new()
            .name("compile-grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                shown.begin();
                let compiled = factory
                    .get()
                    .and_then(|factory| compile(&factory, &budget, &text, times))
                    .map(Arc::new);
                if let Ok(compiled) = &compiled {
                    // Here, so that it need not be compiled again if it is late.
                    cache.insert(text, Arc::clone(compiled));
                }
                // The permit first: a caller that has its grammar finds the next place free.
                drop(self);
                // If it is late, the receiver is gone.
                let _sent = sender.send(compiled);
            });
        let thread = thread.map_err(|error| {
            tracing::error!(%error, "no thread for a grammar");
            busy("there is no thread to compile a grammar; try again later")
        })?;
        let left = deadline.saturating_duration_since(Instant::now());
        let received = receiver.recv_timeout(left);
        if received.is_err() {
            overrun.begin(&compiling);
        }
        if joins {
            // A panic in it has dropped the sender.
            let _ended = thread.join();
        }
        let why = match received {
            Ok(compiled) => return compiled,
            Err(RecvTimeoutError::Timeout) => "it takes too long to compile; make it simpler",
            Err(RecvTimeoutError::Disconnected) => "it cannot be compiled",
        };
        Err(invalid_grammar(GrammarError::new(why.to_owned())))
    }
}

/// The thread that compiles one grammar, as its caller sees it.
#[derive(Clone, Default)]
pub(super) struct CompilingThread {
    #[cfg(target_os = "linux")]
    id: Arc<OnceLock<rustix::process::Pid>>,
}

impl CompilingThread {
    /// Called by the thread itself.
    fn begin(&self) {
        #[cfg(target_os = "linux")]
        {
            let _id = self.id.set(rustix::thread::gettid());
        }
    }

    /// Lowers the priority of the thread, which ends after its grammar.
    fn slow_down(&self) {
        // On Linux a process id means one thread.
        #[cfg(target_os = "linux")]
        if let Some(&id) = self.id.get()
            && let Err(error) = rustix::process::setpriority_process(Some(id), LOW_PRIORITY)
        {
            tracing::debug!(%error, "the priority of a late grammar cannot be lowered");
        }
    }
}

/// A tenth of the usual share. With much less a busy machine would stop it where it has a lock of the allocator, and others
/// would wait for that.
#[cfg(target_os = "linux")]
const LOW_PRIORITY: i32 = 10;

fn compile(
    factory: &Factory,
    budget: &Arc<Budget>,
    text: &GrammarText,
    times: Arc<SteeringTimes>,
) -> Result<Compiled, SteerRefusal> {
    let input = text.to_input().map_err(invalid_grammar)?;
    let create = || factory.parsers.create_parser(input.grammar);
    let built = panic_utils::catch_unwind(AssertUnwindSafe(create));
    let parser = built.map_err(|error| invalid_grammar(text.error(&error.to_string())))?;
    let mut prototype = Automaton::start(parser, budget).map_err(no_automaton)?;
    // The first mask is computed here: it is the most expensive one, and here the time is limited. It also is what sets
    // the limits of a step for the automaton and its copies.
    let mut first = prototype.copy().map_err(no_automaton)?;
    match first.next(false, &factory.ends) {
        Ok(_first) => prototype = first,
        // Fails the sequence, and not its request.
        Err(AutomatonError::Empty) => {}
        Err(error) => return Err(no_automaton(error)),
    }
    let grammar = GRAMMAR_BYTES + input.bytes * TEXT_FACTOR;
    let mut charge = Charge::new(Arc::clone(budget));
    charge
        .set(grammar)
        .map_err(|excess| no_automaton(excess.into()))?;
    let bytes = grammar + prototype.bytes().map_err(no_automaton)?;
    Ok(Compiled {
        ends: factory.ends.clone(),
        times,
        prototype: Mutex::new(prototype),
        idle: Mutex::new(Vec::new()),
        bytes,
        _charge: charge,
    })
}

/// What a compiled grammar takes besides its automata, about: a base, and for each byte of its text. The library does not say;
/// rules and schemas of a quarter of a megabyte took 150 to 190 bytes for each byte.
const GRAMMAR_BYTES: usize = 32 << 10;
const TEXT_FACTOR: usize = 192;
