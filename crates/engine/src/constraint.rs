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
mod cache;
mod compile;
mod followed;
mod gbnf;
mod grammar;
mod mask_workers;
mod schema_depth;
mod steerer;
mod token_env;

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Steer, SteerCall, SteerRefusal, SteerSource};

pub use self::mask_workers::MaskWorkers;

use self::argument::Argument;
use self::cache::GrammarCache;
use self::compile::{Compiled, Compiler};
use self::grammar::{GrammarError, Kind};
use self::steerer::ConstraintSteer;
use self::token_env::LazyFactory;
use crate::api::SharedVocabulary;

/// What begins the name of a native constraint.
pub const NAME_PREFIX: &str = "sapwood:";

/// Limits and switches of native constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConstraintConfig {
    /// Bytes of a constraint's argument.
    pub grammar_bytes: usize,
    /// How long a request waits for its grammar to compile.
    pub compile_time: Duration,
    /// Grammars that are compiled at the same time. One that takes too long counts until it ends, so that
    /// strangers cannot occupy more processors than this.
    pub compile_threads: usize,
    /// Bytes of compiled grammars to keep.
    pub cache_bytes: usize,
    /// Appends forced tokens without sampling them (AI-841).
    pub fast_forward: bool,
}

impl Default for ConstraintConfig {
    fn default() -> Self {
        Self {
            grammar_bytes: 256 << 10,
            compile_time: Duration::from_secs(2),
            compile_threads: 2,
            cache_bytes: 256 << 20,
            fast_forward: true,
        }
    }
}

/// Opens native constraints for the requests of one model.
pub struct ConstraintSource {
    config: ConstraintConfig,
    factory: Arc<LazyFactory>,
    cache: Arc<GrammarCache>,
    compiler: Arc<Compiler>,
    workers: Arc<MaskWorkers>,
}

impl ConstraintSource {
    /// Creates a source over a model's vocabulary. Cheap: the token trie is built when the first constraint is opened.
    #[must_use]
    pub fn new(
        vocabulary: SharedVocabulary,
        config: ConstraintConfig,
        workers: Arc<MaskWorkers>,
    ) -> Self {
        Self {
            config,
            factory: Arc::new(LazyFactory::new(vocabulary)),
            cache: Arc::new(GrammarCache::new(config.cache_bytes)),
            compiler: Arc::new(Compiler::new(config.compile_threads, config.compile_time)),
            workers,
        }
    }

    /// A source for a process that is cloned, and for its clones. No thread outlives a call of it, since a clone would
    /// have the thread's locks without the thread. So [`HostConstraintSource::open`] returns only when the grammar has
    /// compiled, which may be later than its `time`; it is refused then, and what must not wait as long has to end the
    /// process. The token trie is built by [`HostConstraintSource::prepare`] before the process is cloned.
    ///
    /// [`HostConstraintSource::open`]: sapwood_proto::steer::HostConstraintSource::open
    /// [`HostConstraintSource::prepare`]: sapwood_proto::steer::HostConstraintSource::prepare
    #[must_use]
    pub fn of_cloned_processes(vocabulary: SharedVocabulary, config: ConstraintConfig) -> Self {
        Self {
            compiler: Arc::new(Compiler::waiting(config.compile_time)),
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
            compiler: Arc::clone(&self.compiler),
            workers: Arc::clone(&self.workers),
        }
    }

    /// Finds or compiles a grammar, in at most `time` if that is less than the configuration says.
    fn compiled(
        &self,
        kind: Kind,
        argument: &Argument,
        time: Duration,
    ) -> Result<Arc<Compiled>, SteerRefusal> {
        let text = argument.grammar(kind).map_err(invalid_grammar)?;
        if let Some(compiled) = self.cache.get(&text) {
            return Ok(compiled);
        }
        let permit = self.compiler.permit(time)?;
        // Requests often come in groups with one grammar: the others find what the first one compiled.
        if let Some(compiled) = self.cache.get(&text) {
            return Ok(compiled);
        }
        let compiled = Arc::new(permit.compile(&self.factory, &text)?);
        self.cache.insert(text, Arc::clone(&compiled));
        Ok(compiled)
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
        let compiled = self.compiled(kind, &argument, Duration::MAX)?;
        let steer = ConstraintSteer::new(
            compiled,
            argument.ending(),
            Arc::clone(&self.workers),
            self.config.fast_forward,
        );
        Ok(Box::new(steer))
    }
}

fn invalid_grammar(error: GrammarError) -> SteerRefusal {
    SteerRefusal {
        code: Code::InvalidRequest,
        reason: ErrorReason::INVALID_GRAMMAR,
        message: format!("invalid grammar: {error}"),
    }
}

#[cfg(test)]
mod tests;
