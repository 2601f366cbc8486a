//! Native constraints: steerers that keep an output within a pattern, a JSON schema or a grammar (AI-840 to AI-843).
//!
//! ```text
//!   SteerCall ─► argument ─► cache ─(miss)─► compile: own thread, 2 s ─► Compiled
//!                                                                          │ one automaton per sequence
//!   engine ◄─ Steer: pre, post on the engine's thread; masks on MaskWorkers ┘
//! ```
//!
//! The automata are those of `llguidance`. Nothing in it is trusted to be quick, or not to panic: grammars come from
//! strangers. So it compiles on a thread of its own whose caller waits for a limited time, every call of it is fenced
//! against panics, and no two sequences share its state: a lock in it that one sequence holds for long would stop the
//! engine's thread, and one that a panic poisons would end all sequences of the grammar.
//!
//! Structured output is asked for under other names elsewhere; they mean: a JSON object is
//! `sapwood:json-schema` with `{"type":"object"}`, a choice is `sapwood:options`, and a schema, a regex and a Lark
//! grammar are `sapwood:json-schema`, `sapwood:regex` and `sapwood:lark`.

mod argument;
mod automaton;
mod budget;
mod cache;
mod compile;
mod followed;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod gbnf;
mod grammar;
mod lark_work;
mod mask_workers;
mod schema_depth;
mod schema_patterns;
mod steerer;
mod token_env;
mod watchdog;

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Steer, SteerCall, SteerRefusal, SteerSource};

pub use self::mask_workers::MaskWorkers;

use self::argument::Argument;
use self::automaton::AutomatonError;
use self::budget::Budget;
use self::cache::GrammarCache;
use self::compile::{Compiled, Compiler};
use self::grammar::{GrammarError, Kind};
use self::steerer::ConstraintSteer;
use self::token_env::LazyFactory;
use crate::api::SharedVocabulary;
use crate::stats::SteeringTimes;

/// What begins the name of a native constraint.
pub const NAME_PREFIX: &str = "sapwood:";

/// Limits and switches of native constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConstraintConfig {
    /// Bytes of a constraint's argument.
    pub grammar_bytes: usize,
    /// How long a request waits until its grammar can be compiled, and again until it is.
    pub compile_time: Duration,
    /// Grammars that are compiled at the same time.
    pub compile_threads: usize,
    /// Grammars that are still being compiled although nobody waits for them any more: a compiler cannot be stopped. So many do
    /// not count as `compile_threads`, so others are compiled meanwhile. A caller has at most half of both together.
    pub compile_overruns: usize,
    /// Bytes of compiled grammars to keep.
    pub cache_bytes: usize,
    /// Bytes of all states of constraints, those of live sequences and of kept grammars. One sequence may have an eighth of it.
    pub memory_bytes: usize,
    /// Appends forced tokens without sampling them (AI-841).
    pub fast_forward: bool,
}

impl Default for ConstraintConfig {
    fn default() -> Self {
        Self {
            grammar_bytes: 256 << 10,
            compile_time: Duration::from_secs(2),
            compile_threads: 2,
            compile_overruns: 4,
            cache_bytes: 256 << 20,
            memory_bytes: 1 << 30,
            fast_forward: true,
        }
    }
}

/// Opens native constraints for the requests of one model.
pub struct ConstraintSource {
    config: ConstraintConfig,
    factory: Arc<LazyFactory>,
    cache: Arc<GrammarCache>,
    budget: Arc<Budget>,
    compiler: Arc<Compiler>,
    workers: Arc<MaskWorkers>,
    times: Arc<SteeringTimes>,
    /// A thread ends the late calls of controllers. Not in processes that are cloned.
    watches_followed: bool,
}

impl ConstraintSource {
    /// Creates a source over a model's vocabulary. Cheap: the token trie is built when the first constraint is opened.
    #[must_use]
    pub fn new(
        vocabulary: SharedVocabulary,
        config: ConstraintConfig,
        workers: Arc<MaskWorkers>,
    ) -> Self {
        let cache = Arc::new(GrammarCache::new(config.cache_bytes));
        let budget = Arc::new(Budget::new(config.memory_bytes));
        budget.evict_from(&cache);
        Self {
            config,
            factory: Arc::new(LazyFactory::new(vocabulary)),
            cache,
            budget,
            compiler: Arc::new(Compiler::new(&config)),
            workers,
            times: Arc::default(),
            watches_followed: true,
        }
    }

    /// Counts the times of grammars and masks here: in those of the engine whose sequences they steer.
    #[must_use]
    pub fn with_times(self, times: Arc<SteeringTimes>) -> Self {
        Self { times, ..self }
    }

    /// A source for a process that is cloned, and for its clones. No thread outlives a call of it, since a clone would
    /// have the thread's locks without the thread. So [`HostConstraintSource::open`] returns only when the grammar has
    /// compiled, which may be later than its `time`; it is refused then, and what must not wait as long has to end the
    /// process. The token trie is built by [`HostConstraintSource::prepare`] before the process is cloned.
    ///
    /// Each clone has a cache and a budget of its own, and little memory: they have at most 8 and 64 MiB, whatever `config`
    /// says.
    ///
    /// [`HostConstraintSource::open`]: sapwood_proto::steer::HostConstraintSource::open
    /// [`HostConstraintSource::prepare`]: sapwood_proto::steer::HostConstraintSource::prepare
    #[must_use]
    pub fn of_cloned_processes(vocabulary: SharedVocabulary, config: ConstraintConfig) -> Self {
        let config = ConstraintConfig {
            cache_bytes: config.cache_bytes.min(CLONED_CACHE_BYTES),
            memory_bytes: config.memory_bytes.min(CLONED_MEMORY_BYTES),
            ..config
        };
        Self {
            compiler: Arc::new(Compiler::joining(&config)),
            watches_followed: false,
            // They start no thread before a steerer is opened, which no clone does.
            ..Self::new(vocabulary, config, Arc::new(MaskWorkers::with_threads(1)))
        }
    }

    /// A source of the same constraints, for sequences that append forced tokens without sampling them, or do not.
    #[must_use]
    pub fn with_fast_forward(&self, fast_forward: bool) -> Self {
        Self {
            config: ConstraintConfig {
                fast_forward,
                ..self.config
            },
            factory: Arc::clone(&self.factory),
            cache: Arc::clone(&self.cache),
            budget: Arc::clone(&self.budget),
            compiler: Arc::clone(&self.compiler),
            workers: Arc::clone(&self.workers),
            times: Arc::clone(&self.times),
            watches_followed: self.watches_followed,
        }
    }

    /// Finds or compiles a grammar, in at most `time` if that is less than the configuration says. `user`: who asks, also
    /// through a controller.
    fn compiled(
        &self,
        kind: Kind,
        argument: &Argument,
        user: &str,
        time: Duration,
    ) -> Result<Arc<Compiled>, SteerRefusal> {
        let text = argument.grammar(kind).map_err(invalid_grammar)?;
        if let Some(compiled) = self.cache.get(&text) {
            return Ok(compiled);
        }
        let permit = self.compiler.permit(Some(user), time)?;
        // Requests often come in groups with one grammar: the others find what the first one compiled.
        if let Some(compiled) = self.cache.get(&text) {
            return Ok(compiled);
        }
        permit.compile(self, &text)
    }

    fn check_bytes(&self, argument: &str) -> Result<(), SteerRefusal> {
        let bytes = self.config.grammar_bytes;
        if argument.len() > bytes {
            return Err(invalid_grammar(GrammarError::new(format!(
                "at byte {bytes}: an argument may have {bytes} bytes"
            ))));
        }
        Ok(())
    }
}

impl SteerSource for ConstraintSource {
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        let kind = call.controller.strip_prefix(NAME_PREFIX);
        let kind = kind.and_then(Kind::from_name).ok_or_else(|| SteerRefusal {
            code: Code::NotFound,
            reason: ErrorReason::UNKNOWN_CONTROLLER,
            message: format!(
                "there is no constraint of this name; use one of {}",
                Kind::NAMES
            ),
        })?;
        self.check_bytes(call.arg)?;
        let argument = Argument::parse(kind, call.arg).map_err(invalid_grammar)?;
        // Not within the time of a grammar: building it takes long for a large vocabulary, once.
        self.factory.get()?;
        let compiled = self.compiled(kind, &argument, call.user.name, Duration::MAX)?;
        let automaton = compiled.automaton().map_err(no_automaton)?;
        let steer = ConstraintSteer::new(
            compiled,
            automaton,
            argument.ending(),
            Arc::clone(&self.workers),
            self.config.fast_forward && !call.stops,
        );
        Ok(Box::new(steer))
    }
}

/// Limits of a cloned process. The budget is the smallest of which one constraint may have as much as a fork copies.
const CLONED_CACHE_BYTES: usize = 8 << 20;
const CLONED_MEMORY_BYTES: usize = 64 << 20;

fn invalid_grammar(error: GrammarError) -> SteerRefusal {
    SteerRefusal {
        code: Code::InvalidRequest,
        reason: ErrorReason::INVALID_GRAMMAR,
        message: format!("invalid grammar: {error}"),
    }
}

/// Why a request whose grammar was compiled is refused.
fn no_automaton(error: AutomatonError) -> SteerRefusal {
    match error {
        // Its fault is none, and others will end.
        AutomatonError::Full => busy(&error.to_string()),
        _ => invalid_grammar(GrammarError::new(error.to_string())),
    }
}

fn busy(why: &str) -> SteerRefusal {
    SteerRefusal {
        code: Code::Overloaded,
        reason: ErrorReason::ENGINE_BUSY,
        message: why.to_owned(),
    }
}

#[cfg(test)]
mod tests;
