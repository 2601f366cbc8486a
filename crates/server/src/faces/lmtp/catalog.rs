//! The kernel's models as LMTP clients see them (LM-321, LM-331).

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use bytes::Bytes;
use sapwood_engine::api::Vocabulary;
use sapwood_kernel::{Kernel, ModelFacts, Name};
use sapwood_proto::lmtp::{
    self, InfillMarks, LmtpModelInfo, LmtpReason, Load, ModelLookup, TextEnds, TokenizerInfo,
};
use sapwood_proto::steer::Token;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::text_codec::EngineTextCodec;
use super::tokenizer;
use crate::auth::rate_limit::TokenMeter;
use crate::context::ServerContext;
use crate::ops::health::{Health, HealthState};
use crate::ops::metrics::ServerMetrics;

/// The models of a kernel.
pub(super) struct Catalog {
    kernel: Kernel,
    health: Arc<Health>,
    metrics: Arc<ServerMetrics>,
    /// The descriptions that were built. Never locked while one is built.
    known: RwLock<HashMap<Name, CatalogSnapshot>>,
    /// The description of an upstream model without facts.
    unknown: CatalogSnapshot,
}

/// The description of a model, and the facts that it was built from.
#[derive(Clone)]
struct CatalogSnapshot {
    /// Weak, because facts hold the vocabulary and with it the weights: a model that is unloaded must leave the memory.
    of: Weak<ModelFacts>,
    model: Arc<LmtpModelInfo>,
    /// The file of its tokenizer, if there is one.
    file: Option<Bytes>,
}

impl Catalog {
    pub(super) fn new(kernel: Kernel, shared: &ServerContext) -> Self {
        Self {
            kernel,
            health: Arc::clone(&shared.health),
            metrics: Arc::clone(&shared.metrics),
            known: RwLock::default(),
            unknown: CatalogSnapshot {
                of: Weak::new(),
                model: Arc::new(unknown()),
                file: None,
            },
        }
    }

    /// The models that a caller with this allowance may use.
    pub(super) const fn for_caller(&self, allowance: Option<Arc<TokenMeter>>) -> CallerCatalog<'_> {
        CallerCatalog {
            catalog: self,
            allowance,
        }
    }

    fn model(&self, name: &str) -> Result<(Name, CatalogSnapshot), LmtpReason> {
        let function = self
            .kernel
            .get(name)
            .map_err(|_| LmtpReason::ModelNotFound)?;
        let spec = function.spec();
        if spec.embeds {
            // This protocol is about tokens that a model generates.
            return Err(LmtpReason::UnsupportedOperation);
        }
        let Some(facts) = &spec.facts else {
            // Without facts there is no vocabulary: the model is not loaded, is upstream, or is no model.
            return match self.health.state(&spec.name) {
                Some(HealthState::Loading | HealthState::OnDemand) => Err(LmtpReason::ModelLoading),
                Some(HealthState::Failed) => Err(LmtpReason::EngineError),
                // An upstream computes it and checks the request (LM-712), also one that is unreachable now.
                None | Some(HealthState::Ok | HealthState::Away) if spec.model => {
                    Ok((spec.name.clone(), self.unknown.clone()))
                }
                // D-17: other functions take text, which is version 2's.
                _ => Err(LmtpReason::UnsupportedOperation),
            };
        };
        // By identity: a model that was loaded again under its name has other facts, and may have another vocabulary.
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.get(&spec.name)
            && std::ptr::eq(found.of.as_ptr(), Arc::as_ptr(facts))
        {
            return Ok((spec.name.clone(), found.clone()));
        }
        // Built without the lock, because digests of a whole vocabulary take long. Two requests may build the same; the
        // last one stays.
        drop(known);
        let (model, file) = describe(&spec.name, facts);
        let found = CatalogSnapshot {
            of: Arc::downgrade(facts),
            model: Arc::new(model),
            file,
        };
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(spec.name.clone(), found.clone());
        Ok((spec.name.clone(), found))
    }

    /// The file of a model's tokenizer, and its digest.
    pub(super) fn tokenizer(&self, name: &str) -> Option<(Bytes, String)> {
        let (_, known) = self.model(name).ok()?;
        let tokenizer = known.model.tokenizer.as_ref()?;
        Some((known.file?, tokenizer.sha256.clone()))
    }

    /// Notified whenever a model becomes ready or not (LM-322).
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.health.changes()
    }
}

/// The catalog as one caller sees it.
pub(super) struct CallerCatalog<'a> {
    catalog: &'a Catalog,
    allowance: Option<Arc<TokenMeter>>,
}

impl CallerCatalog<'_> {
    fn known(&self, name: &str) -> Result<(Name, Arc<LmtpModelInfo>), LmtpReason> {
        let limits = self.allowance.as_ref().map(|allowance| allowance.limits());
        let models = limits.as_ref().and_then(|limits| limits.models.as_ref());
        // By the model's own name where it is found, which is the one that keys list; else by the name as sent.
        let may = |name: &Name| models.is_none_or(|models| models.contains(name));
        match self.catalog.model(name) {
            Ok((name, known)) if may(&name) => Ok((name, known.model)),
            Err(why) if may(&Name::shared(name)) => Err(why),
            // Whether it exists, and its state, is only for callers that may use it.
            _ => Err(LmtpReason::InsufficientScope),
        }
    }
}

impl CallerCatalog<'_> {
    /// The same reason, after a model without facts has begun to load if that is what is missing.
    fn demanded(&self, name: &str, why: LmtpReason) -> LmtpReason {
        if why == LmtpReason::ModelLoading
            && let Ok(function) = self.catalog.kernel.get(name)
        {
            self.catalog.health.demand(&function.spec().name);
        }
        why
    }

    /// Whether a model is not loaded yet.
    fn is_loading(&self, name: &str) -> bool {
        matches!(
            self.catalog.health.state(name),
            Some(HealthState::Loading | HealthState::OnDemand)
        )
    }
}

impl ModelLookup for CallerCatalog<'_> {
    fn find(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason> {
        match self.known(name) {
            // The facts of a file are known before its engine runs: that is not ready yet.
            Ok((name, _)) if self.is_loading(&name) => {
                Err(self.demanded(&name, LmtpReason::ModelLoading))
            }
            Ok((_, model)) => Ok(model),
            Err(why) => Err(self.demanded(name, why)),
        }
    }

    fn describe(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason> {
        // Without facts it is loaded: a client of LMTP opens its streams with tokens, so it needs the tokenizer first.
        let (name, model) = self.known(name).map_err(|why| self.demanded(name, why))?;
        // LM-331 needs no engine: a model that is loading is described, and marked so. One that is loaded on demand is not
        // loaded by this question, which a dashboard may ask for ever, but by the stream that follows: clients do not wait
        // for `loading` to go, they open their streams, which wait.
        if !self.is_loading(&name) {
            return Ok(model);
        }
        Ok(Arc::new(LmtpModelInfo {
            loading: true,
            ..LmtpModelInfo::clone(&model)
        }))
    }

    fn vocabulary(&self, name: &str) -> Option<Arc<dyn lmtp::TextCodec>> {
        let function = self.catalog.kernel.get(name).ok()?;
        let facts = function.spec().facts.as_ref()?;
        if !facts.vocabulary.has_text() {
            return None;
        }
        Some(Arc::new(EngineTextCodec(facts.vocabulary.clone())))
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

/// The answer of MODEL_INFO for a model, and its tokenizer file, if there is one.
fn describe(name: &Name, facts: &ModelFacts) -> (LmtpModelInfo, Option<Bytes>) {
    let ModelFacts {
        info, vocabulary, ..
    } = facts;
    // A vocabulary of unknown size has no tokens to list, so it has neither EOS tokens nor special ones.
    let known = facts.vocabulary_tokens();
    let size = known.unwrap_or(0);
    let eos: Vec<_> = (0..size)
        .filter(|&token| vocabulary.is_end(token))
        .collect();
    let special = (0..size).filter_map(|token| Some((token, vocabulary.name(token)?)));
    let file = vocabulary.file();
    let bos = vocabulary.bos();
    let model = LmtpModelInfo {
        constructor: format!("sapwood:{} {}", info.architecture, info.description),
        model_type: info.architecture.clone(),
        vocab_size: known,
        max_context: facts.context_tokens().map(|tokens| tokens as usize),
        bos,
        eos: eos.clone(),
        // An upstream model without a tokenizer is served in tokens alone (LM-712).
        tokenizer: vocabulary.has_text().then(|| TokenizerInfo {
            kind: kind(&**vocabulary, size).to_owned(),
            vocab_size: size,
            ends: Some(TextEnds {
                bos,
                eos,
                add_bos: bos.is_some(),
                infill: vocabulary.infill().map(|infill| InfillMarks {
                    prefix: infill.prefix,
                    suffix: infill.suffix,
                    middle: infill.middle,
                    suffix_first: infill.suffix_first,
                }),
            }),
            sha256: match &file {
                Some(file) => hex(Sha256::digest(file)),
                None => digest(&**vocabulary, size),
            },
            special: special.take(SPECIAL_MAX).collect(),
            url: file.is_some().then(|| tokenizer::url(name)),
        }),
        version: crate::VERSION.to_owned(),
        deterministic: info.deterministic,
        loading: false,
        default_max_tokens: facts.defaults.params().max_tokens,
        default_seed: facts.defaults.params().seed,
    };
    (model, file)
}

/// The answer of MODEL_INFO for a model of which only the name is known.
fn unknown() -> LmtpModelInfo {
    LmtpModelInfo {
        constructor: "sapwood:upstream".to_owned(),
        model_type: "upstream".to_owned(),
        vocab_size: None,
        max_context: None,
        bos: None,
        eos: Vec::new(),
        tokenizer: None,
        version: crate::VERSION.to_owned(),
        deterministic: None,
        loading: false,
        default_max_tokens: None,
        default_seed: None,
    }
}

/// The kind of tokenizer (LM-951), as the order of the vocabulary shows it: the 256 bytes come first where they, or
/// they and whole words, are all there is; SentencePiece has them in order after its first tokens; byte-level BPE
/// shuffles them.
fn kind(vocabulary: &dyn Vocabulary, size: u32) -> &'static str {
    let bytes_from = |first: Token| {
        (0..=u8::MAX).all(|byte| vocabulary.bytes(first + Token::from(byte)) == [byte])
    };
    if bytes_from(0) {
        return if size <= BYTES_AND_CONTROL {
            "bytes"
        } else {
            "words"
        };
    }
    // SentencePiece begins with a few control tokens: unknown, BOS, EOS, padding.
    if (1..8).any(bytes_from) { "spm" } else { "bpe" }
}

/// Identifies a vocabulary without a file: the digest of each token's length, as four bytes in little-endian order, and
/// of its bytes.
fn digest(vocabulary: &dyn Vocabulary, size: u32) -> String {
    let mut digest = Sha256::new();
    for token in 0..size {
        let bytes = vocabulary.bytes(token);
        // The length is written too, or vocabularies that cut the same bytes differently would be equal. It fits: a
        // token is not longer than the file of its vocabulary.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        digest.update(length.to_le_bytes());
        digest.update(bytes);
    }
    hex(digest.finalize())
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

/// Special tokens that are listed by name (LM-951).
const SPECIAL_MAX: usize = 256;
/// The largest size of a vocabulary of bytes, with its control tokens.
const BYTES_AND_CONTROL: u32 = 512;
