//! [`Compiler`]: compiles grammars of strangers within a time.
//!
//! The library has limits on sizes but none on time, and it recurses over schemas. A thread cannot be stopped from
//! outside. So each grammar compiles on a thread of its own, with a stack for the deepest schema that is read; the
//! caller waits for a limited time; and the number of such threads is limited, those included whose callers have stopped waiting.
//!
//! A process that is cloned may have no thread that nobody waits for. There the caller waits until the thread has ended,
//! and whoever has an eye on the process ends all of it if that takes too long.

use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::api::ParserLimits;
use llguidance::panic_utils;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SteerRefusal, Token};

use super::automaton::{Automaton, AutomatonError};
use super::grammar::{GrammarError, GrammarText};
use super::invalid_grammar;
use super::token_env::{Factory, LazyFactory};

/// Stack of a compiling thread, for the deepest grammar and schema that are let through (`PARTS_MAX`, `LEVELS_MAX`) in a
/// build without optimisation, twice over. Only the touched part takes memory.
const STACK_BYTES: usize = 512 << 20;

/// Automata of ended sequences that are kept for the next ones, for each grammar, and the bytes that each may have.
const IDLE_MAX: usize = 2;
const IDLE_BYTES_MAX: usize = 1 << 20;

/// The library's limits. Its defaults are for trusted grammars on a large machine.
pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        // The work for one mask; 14 ms and 2.5 ms at the speeds that the library's documentation gives.
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
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
    /// Never goes on; new sequences start with copies.
    prototype: Mutex<Automaton>,
    /// Automata at their start whose caches are filled: their first masks cost a fraction of those of a copy.
    idle: Mutex<Vec<Automaton>>,
    bytes: usize,
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

    /// Keeps the automaton of an ended sequence, which has consumed `tokens` tokens, for another sequence.
    pub(super) fn recycle(&self, mut automaton: Automaton, tokens: usize) {
        let fits = |bytes| bytes <= IDLE_BYTES_MAX;
        if !automaton.cache_bytes().is_ok_and(fits) || automaton.reset(tokens).is_err() {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(automaton);
        }
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
    /// `None`: the caller waits for the end of each thread, so there is never more than one.
    permits: Option<Arc<Permits>>,
    time: Duration,
}

struct Permits {
    free: Mutex<usize>,
    freed: Condvar,
}

/// The right to compile one grammar. The caller or the compiling thread drops it, and then another grammar may take it.
pub(super) struct Permit {
    permits: Option<Arc<Permits>>,
    deadline: Instant,
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(permits) = &self.permits {
            *permits.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            permits.freed.notify_one();
        }
    }
}

impl Compiler {
    pub(super) fn new(threads: usize, time: Duration) -> Self {
        let permits = Permits {
            free: Mutex::new(threads.max(1)),
            freed: Condvar::new(),
        };
        Self {
            permits: Some(Arc::new(permits)),
            time,
        }
    }

    /// A compiler that leaves no thread behind: see [`ConstraintSource::of_cloned_processes`].
    ///
    /// [`ConstraintSource::of_cloned_processes`]: super::ConstraintSource::of_cloned_processes
    pub(super) const fn waiting(time: Duration) -> Self {
        Self {
            permits: None,
            time,
        }
    }

    /// Waits until another grammar may be compiled. `time`: for that and for compiling, if it is less than usual.
    pub(super) fn permit(&self, time: Duration) -> Result<Permit, SteerRefusal> {
        let time = time.min(self.time);
        let deadline = Instant::now() + time;
        let Some(permits) = &self.permits else {
            return Ok(Permit {
                permits: None,
                deadline,
            });
        };
        let free = permits.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = permits
            .freed
            .wait_timeout_while(free, time, |free| *free == 0);
        let (mut free, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return Err(SteerRefusal {
                code: Code::Overloaded,
                reason: ErrorReason::ENGINE_BUSY,
                message: "too many grammars are being compiled; try again later".to_owned(),
            });
        }
        *free -= 1;
        Ok(Permit {
            permits: Some(Arc::clone(permits)),
            deadline,
        })
    }
}

impl Permit {
    /// Compiles a grammar, within the time that is left; the factory is built first, if it is not yet.
    pub(super) fn compile(
        self,
        factory: &Arc<LazyFactory>,
        text: &GrammarText,
    ) -> Result<Compiled, SteerRefusal> {
        let (deadline, waits) = (self.deadline, self.permits.is_none());
        let (sender, receiver) = sync_channel(1);
        let (factory, text) = (Arc::clone(factory), text.clone());
        let thread = thread::Builder::new()
            .name("compile-grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let compiled = factory
                    .get()
                    .and_then(|factory| compile(&factory, &text).map_err(invalid_grammar));
                // If it is late, the receiver is gone.
                let _sent = sender.send(compiled);
                drop(self);
            });
        let thread = thread.map_err(|error| {
            tracing::error!(%error, "no thread for a grammar");
            SteerRefusal {
                code: Code::Overloaded,
                reason: ErrorReason::ENGINE_BUSY,
                message: "there is no thread to compile a grammar; try again later".to_owned(),
            }
        })?;
        if waits {
            // A panic in it has dropped the sender.
            let _ended = thread.join();
            if Instant::now() >= deadline {
                return Err(failed(LATE));
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(compiled) => compiled,
            Err(RecvTimeoutError::Timeout) => Err(failed(LATE)),
            Err(RecvTimeoutError::Disconnected) => Err(failed("it cannot be compiled")),
        }
    }
}

const LATE: &str = "it takes too long to compile; make it simpler";

fn failed(text: &str) -> SteerRefusal {
    invalid_grammar(GrammarError::new(text.to_owned()))
}

fn compile(factory: &Factory, text: &GrammarText) -> Result<Compiled, GrammarError> {
    let input = text.to_input()?;
    let built =
        panic_utils::catch_unwind(AssertUnwindSafe(|| factory.parsers.create_parser(input)));
    let parser = built.map_err(|error| text.error(&error.to_string()))?;
    let unusable = |error: AutomatonError| GrammarError::new(error.to_string());
    let mut prototype = Automaton::start(parser).map_err(unusable)?;
    // The first mask is computed here: it is the most expensive one, and here the time is limited. It also is what sets
    // the limits of a step for the automaton and its copies.
    let mut first = prototype.copy().map_err(unusable)?;
    match first.next(false, &factory.ends) {
        Ok(_first) => prototype = first,
        // Fails the sequence, and not its request.
        Err(AutomatonError::Empty) => {}
        Err(error) => return Err(unusable(error)),
    }
    let caches = prototype.cache_bytes().map_err(unusable)?;
    Ok(Compiled {
        ends: factory.ends.clone(),
        prototype: Mutex::new(prototype),
        idle: Mutex::new(Vec::new()),
        bytes: text.bytes() + caches,
    })
}
