//! The models as clients of LMTP see them (LM-321, LM-331).
//!
//! Owns: [`Catalog`]: the facts of each model, gathered once for each time it is loaded. Refuses to know: connections, and
//! how models run.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use sapwood_engine::api::Vocabulary;
use sapwood_kernel::{Facts, Kernel, Name};
use sapwood_proto::lmtp::{self, Load, Model, Models, Reason, Tokenizer};
use sapwood_proto::steer::Token;
use sha2::{Digest, Sha256};

use super::words::Words;
use crate::allowance::Allowance;
use crate::health::{Health, State};
use crate::metrics::Metrics;
use crate::shared::Shared;

/// The models of a kernel.
pub(super) struct Catalog {
    kernel: Kernel,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    /// What was gathered of which facts; never held while gathering.
    known: RwLock<HashMap<Name, Known>>,
}

/// What was gathered, and of which facts.
type Known = (Arc<Facts>, Arc<Model>);

impl Catalog {
    pub(super) fn new(kernel: Kernel, shared: &Shared) -> Self {
        Self {
            kernel,
            health: Arc::clone(&shared.health),
            metrics: Arc::clone(&shared.metrics),
            known: RwLock::default(),
        }
    }

    /// The models that a caller with this allowance may use.
    pub(super) const fn for_caller(&self, allowance: Option<Arc<Allowance>>) -> Permitted<'_> {
        Permitted {
            catalog: self,
            allowance,
        }
    }

    fn model(&self, name: &str) -> Result<(Name, Arc<Model>), Reason> {
        let function = self.kernel.get(name).map_err(|_| Reason::ModelNotFound)?;
        let spec = function.spec();
        let Some(facts) = &spec.facts else {
            // D-17: other functions take text, which is version 2's.
            return Err(if self.is_loading(name) {
                Reason::ModelLoading
            } else {
                Reason::UnsupportedOperation
            });
        };
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, model)) = known.get(&spec.name)
            && Arc::ptr_eq(of, facts)
        {
            return Ok((spec.name.clone(), Arc::clone(model)));
        }
        drop(known);
        let model = Arc::new(describe(facts));
        let entry = (Arc::clone(facts), Arc::clone(&model));
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(spec.name.clone(), entry);
        Ok((spec.name.clone(), model))
    }

    fn is_loading(&self, name: &str) -> bool {
        let parts = self.health.parts_now();
        parts
            .iter()
            .any(|(part, state)| part == name && *state == State::Loading)
    }
}

/// A catalog with a caller's eyes.
pub(super) struct Permitted<'a> {
    catalog: &'a Catalog,
    allowance: Option<Arc<Allowance>>,
}

impl Models for Permitted<'_> {
    fn find(&self, name: &str) -> Result<Arc<Model>, Reason> {
        let (name, model) = self.catalog.model(name)?;
        let limits = self.allowance.as_ref().map(|allowance| allowance.limits());
        let models = limits.and_then(|limits| limits.models.as_ref());
        if models.is_some_and(|models| !models.contains(&name)) {
            return Err(Reason::InsufficientScope);
        }
        Ok(model)
    }

    fn vocabulary(&self, name: &str) -> Option<Arc<dyn lmtp::Vocabulary>> {
        let function = self.catalog.kernel.get(name).ok()?;
        let facts = function.spec().facts.as_ref()?;
        if !facts.vocabulary.has_text() {
            return None;
        }
        Some(Arc::new(Words(facts.vocabulary.clone())))
    }

    fn load(&self) -> Load {
        let mut load = Load::default();
        for engine in self.catalog.metrics.engines() {
            let stats = engine.stats();
            load.running += stats.requests_running.get();
            load.queued += stats.requests_waiting.get();
            load.parked += stats.streams_parked.get();
        }
        load
    }
}

/// What MODEL_INFO says of a model.
fn describe(facts: &Facts) -> Model {
    let Facts { info, vocabulary } = facts;
    let tokens = 0..info.vocabulary_tokens;
    Model {
        constructor: format!("sapwood:{} {}", info.architecture, info.description),
        model_type: info.architecture.clone(),
        vocab_size: info.vocabulary_tokens,
        max_context: info.context_tokens as usize,
        bos: vocabulary.beginning(),
        eos: tokens.filter(|&token| vocabulary.is_end(token)).collect(),
        // A model elsewhere is served in tokens alone (LM-712).
        tokenizer: vocabulary.has_text().then(|| Tokenizer {
            kind: kind(&**vocabulary, info.vocabulary_tokens).to_owned(),
            vocab_size: info.vocabulary_tokens,
            sha256: digest(&**vocabulary, info.vocabulary_tokens),
        }),
        version: crate::VERSION.to_owned(),
    }
}

/// How text becomes tokens, as the order of the vocabulary shows it: bytes come first where they, or they and whole words, are
/// all there is; SentencePiece keeps them in order behind its first tokens; the byte-level way shuffles them.
fn kind(vocabulary: &dyn Vocabulary, size: u32) -> &'static str {
    let bytes_from = |first: Token| {
        (0..=u8::MAX).all(|byte| *vocabulary.bytes(first + Token::from(byte)) == [byte])
    };
    if bytes_from(0) {
        return if size <= BYTES_AND_CONTROL {
            "bytes"
        } else {
            "words"
        };
    }
    if (1..8).any(bytes_from) { "spm" } else { "bpe" }
}

/// Which vocabulary it is, where no file of it is known: the digest of every token's length, as four bytes with the lowest
/// first, and its bytes.
fn digest(vocabulary: &dyn Vocabulary, size: u32) -> String {
    let mut digest = Sha256::new();
    for token in 0..size {
        let bytes = vocabulary.bytes(token);
        // A token is no longer than its vocabulary's file.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        digest.update(length.to_le_bytes());
        digest.update(&bytes);
    }
    digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The most that a vocabulary of bytes has, its control tokens included.
const BYTES_AND_CONTROL: u32 = 512;
