//! Generation parameters: the one set that the engine, the kernel and every protocol share (D-20, D-43).
//!
//! [`GenerationParams`] holds the values that a caller has set. [`PARAMS`] is the table of those that have a name on a
//! wire: each with its type, its range and its place in the struct. Readers, writers and checks walk this table, so a
//! new parameter is a field and a row here, and besides:
//!
//! - what it does: `engine::api::Sampling` and the sampler, or `RequestTerms` of `engine::submission`;
//! - Evergreen: a field in `config.proto` with its line in `kernel::session::config`; as JSON it needs nothing;
//! - Triton: its name in `FIELDS` of `generate::settings`, and in that of `generate::union` for an input tensor;
//!   `kernel::connect::triton` only if its value is a list or an object;
//! - LMTP: a row in `lmtp::read::members`, and its default in `GenerateRequest` if the protocol fixes one. Without a row
//!   servers ignore the parameter and clients refuse it;
//! - both have the names of `SAMPLER_PARAMS`: a parameter of a sampler that only llama.cpp has belongs there.
//!
//! The core takes the widest ranges, [`ParamRanges::CORE`]; a protocol narrows some of them:
//!
//! | | core | Evergreen | Triton | LMTP |
//! |---|---|---|---|---|
//! | `max_tokens` | 0 and above | core | core | 1 and above |
//! | `temperature` | 0 to 100 | 0 to 2 | core | core |
//! | penalties | ±100 | ±2 | ±2 | core |
//! | `logit_bias` | below infinity | ±100 | ±100 | any |
//! | `n` | 64 | 16 | 16 | |
//! | `top_logprobs` | 1,000 | 20 | 20 | core |
//! | `stop`, `bad_words` | 64 of 1 KiB | 16 of 256 B | core | core |
//!
//! The parameters of the samplers that only llama.cpp has (`dry_*` to `samplers`), and `lora`, have one range everywhere.
//!
//! Defaults are a protocol's own: a parameter that is not set stays `None` until the engine resolves it.

mod domain;
mod json;
mod lora;
mod samplers;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use self::domain::holds;
pub use self::domain::{Domain, Interval};
pub use self::json::{JsonCoercion, float_to_json, lora_to_json};
pub use self::lora::{LoraName, LoraUse, is_name as is_lora_name};
pub use self::samplers::{SamplerOrder, SamplerStep};
use crate::steer::Token;

/// Parameters that a caller has set for a generation. A field that is not set has the default of the engine or upstream
/// that runs the request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationParams {
    /// The maximum of tokens of each choice; not set: the rest of the context. 0 generates nothing.
    pub max_tokens: Option<u32>,
    /// Before this many tokens neither an end-of-generation token nor a stop ends a choice.
    pub min_tokens: Option<u32>,
    /// 0 is greedy: the most likely token.
    pub temperature: Option<f32>,
    /// Keeps the smallest set of tokens with this probability; 1 is off.
    pub top_p: Option<f32>,
    /// Keeps this many of the most likely tokens; 0 is off.
    pub top_k: Option<u32>,
    /// Keeps tokens with at least this fraction of the highest probability; 0 is off.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens of the prompt and the output (multiplies negative ones); 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from the logit of each token of the output.
    pub presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time that it occurs in the output.
    pub frequency_penalty: Option<f32>,
    /// The penalties look at this many of the last tokens, prompt included; -1 is all, 0 turns them off.
    pub penalty_last_n: Option<i32>,
    /// DRY lowers the logit of a token that would continue a repetition by this times `dry_base` to the power of the
    /// repetition's length beyond `dry_allowed_length`; 0 is off.
    pub dry_multiplier: Option<f32>,
    /// See `dry_multiplier`.
    pub dry_base: Option<f32>,
    /// Repetitions shorter than this many tokens are not penalised by DRY.
    pub dry_allowed_length: Option<u32>,
    /// DRY looks for repetitions in this many of the last tokens, prompt included; -1 is all, 0 turns it off.
    pub dry_penalty_last_n: Option<i32>,
    /// Texts that no repetition crosses for DRY; an empty list: none. Not set: those of llama.cpp.
    pub dry_sequence_breakers: Option<Vec<String>>,
    /// The probability with which XTC drops all but the least likely of the tokens that reach `xtc_threshold`; 0 is off.
    pub xtc_probability: Option<f32>,
    /// See `xtc_probability`; above 0.5 no two tokens reach it.
    pub xtc_threshold: Option<f32>,
    /// Keeps the smallest set of the most typical tokens with this probability; 1 is off.
    pub typical_p: Option<f32>,
    /// Keeps tokens whose logits are at most this many standard deviations below the highest; 0 and below is off.
    pub top_n_sigma: Option<f32>,
    /// 2: mirostat 2 decides which tokens are kept, in place of the steps that drop tokens; 0 is off.
    pub mirostat: Option<u32>,
    /// The surprise of the tokens that mirostat aims at, in bits.
    pub mirostat_tau: Option<f32>,
    /// How fast mirostat corrects itself.
    pub mirostat_eta: Option<f32>,
    /// How far the temperature follows the entropy of the row, down and up; 0 is off.
    pub dynatemp_range: Option<f32>,
    /// The exponent of the normalised entropy in the dynamic temperature.
    pub dynatemp_exponent: Option<f32>,
    /// The steps of sampling in their order; those that it leaves out are off.
    pub samplers: Option<SamplerOrder>,
    /// Equal seed, build, model and request give equal tokens (D-21).
    pub seed: Option<u64>,
    /// Texts that end a choice.
    pub stop: Vec<String>,
    /// Sequences of tokens that end a choice; a single stop token is a sequence of one.
    pub stop_sequences: Vec<Vec<Token>>,
    /// Texts that must not occur in an output.
    pub bad_words: Vec<String>,
    /// Whether the stop that ends a choice stays in the text, as is not usual.
    pub include_stop_str_in_output: Option<bool>,
    /// Continues past an end-of-generation token.
    pub ignore_eos: Option<bool>,
    /// Whether control tokens are left out of the text, as is usual; with `false` their names are part of it.
    pub skip_special_tokens: Option<bool>,
    /// The number of alternatives that are reported with each token; not set: no log-probabilities.
    pub top_logprobs: Option<u32>,
    /// Added to the logits; minus infinity forbids the token. Several biases of one token add up. Shared, because some
    /// callers send the same tens of thousands of biases again and again.
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Texts, each of whose tokens gets the bias; they are the texts among the keys of `logit_bias` on the wires.
    pub logit_bias_texts: Vec<(String, f32)>,
    /// The LoRA adapters that compute, of those that the model has; an empty list: none. Not set: those that the model
    /// applies by default.
    pub lora: Option<Vec<LoraUse>>,
    /// The number of choices.
    pub n: Option<u32>,
    /// Of a caller's requests that wait, one with a higher priority is scheduled first. It is in no table: protocols disagree
    /// about its sign, so each reads it for itself.
    pub priority: Option<i32>,
}

/// The highest priority of a request, and negated the lowest (LM-962): the same at every face, so that none outranks another.
pub const PRIORITY_MOST: i32 = 10;

/// The largest bias. Beside it no other token has a chance, and sums of several stay finite.
pub const BIAS_MOST: f32 = 1e30;

/// The ranges that one protocol accepts; see the table of the module.
#[derive(Clone, Debug)]
pub struct ParamRanges {
    /// The least `max_tokens`.
    pub max_tokens_least: i64,
    /// Of `temperature`.
    pub temperature: Interval,
    /// Of `presence_penalty` and `frequency_penalty`.
    pub penalty: Interval,
    /// Of each bias in `logit_bias`, as it is written.
    pub bias: Interval,
    /// The maximum number of entries of `logit_bias`.
    pub biases: usize,
    /// The least `top_k`: -1 where a protocol also writes "off" so.
    pub top_k_least: i64,
    /// The maximum of `n`.
    pub n: u32,
    /// The maximum of `top_logprobs`.
    pub top_logprobs: u32,
    /// The maximum number of texts in `stop`, and in `bad_words`.
    pub texts: usize,
    /// The maximum of bytes of one such text.
    pub text_bytes: usize,
}

impl ParamRanges {
    /// The widest ranges: what the engine accepts.
    pub const CORE: Self = Self {
        max_tokens_least: 0,
        temperature: Interval::closed(0.0, 100.0),
        penalty: Interval::closed(-100.0, 100.0),
        // Biases add up, so a finite bound keeps their sum finite. Minus infinity forbids a token.
        bias: Interval::closed(f32::NEG_INFINITY, BIAS_MOST),
        biases: usize::MAX,
        top_k_least: -1,
        n: CHOICES_MAX,
        top_logprobs: 1_000,
        texts: 64,
        text_bytes: 1_024,
    };

    /// GenerateConfig of Evergreen (EV-602).
    pub const EVERGREEN: Self = Self {
        temperature: Interval::closed(0.0, 2.0),
        biases: 1_024,
        top_k_least: 0,
        texts: 16,
        text_bytes: 256,
        ..Self::TRITON
    };

    /// The fields of Triton's text models (TR-404).
    pub const TRITON: Self = Self {
        penalty: Interval::closed(-2.0, 2.0),
        bias: Interval::closed(-100.0, 100.0),
        n: 16,
        top_logprobs: 20,
        ..Self::CORE
    };

    /// The members of LMTP's GENERATE (LM-304).
    pub const LMTP: Self = Self {
        max_tokens_least: 1,
        ..Self::CORE
    };
}

/// The maximum of choices of one request, forks of its steerers included.
pub const CHOICES_MAX: u32 = 64;
/// The maximum of `dry_sequence_breakers`, and of the bytes of each.
pub const DRY_BREAKERS_MAX: usize = 64;
/// The maximum of texts in `logit_bias`.
pub const BIAS_TEXTS_MAX: usize = 1_024;
/// The maximum of bytes of a text in `logit_bias`.
pub const BIAS_TEXT_BYTES_MAX: usize = 256;
/// The maximum of stop sequences of one request.
pub const STOP_SEQUENCES_MAX: usize = 256;
/// The maximum of tokens of one stop sequence.
pub const STOP_SEQUENCE_TOKENS_MAX: usize = 64;

/// The maximum of adapters in `lora`.
pub const LORA_USES_MAX: usize = 64;
/// The maximum of bytes of an adapter's name.
pub const LORA_NAME_BYTES_MAX: usize = 128;
/// The scales of adapters in `lora`. Narrow, because keys and values that adapters drive beyond what the KV cache can hold
/// are numbers for nobody.
pub const LORA_SCALES: Interval = Interval::closed(-10.0, 10.0);

/// A parameter with an invalid value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} must be {must}")]
pub struct ParamError {
    /// The parameter.
    pub name: &'static str,
    /// What its value must be, for people; it follows "must be".
    pub must: String,
}

impl ParamError {
    fn new(name: &'static str, must: impl fmt::Display) -> Self {
        Self {
            name,
            must: must.to_string(),
        }
    }
}

/// A parameter's place in [`GenerationParams`].
#[derive(PartialEq)]
pub enum ParamField<'a> {
    /// [`Domain::Count`] and [`Domain::OneOf`].
    Count(&'a mut Option<u32>),
    /// [`Domain::Window`].
    Window(&'a mut Option<i32>),
    /// [`Domain::Number`].
    Number(&'a mut Option<f32>),
    /// [`Domain::Seed`].
    Seed(&'a mut Option<u64>),
    /// [`Domain::Flag`].
    Flag(&'a mut Option<bool>),
    /// [`Domain::Texts`].
    Texts(&'a mut Vec<String>),
    /// [`Domain::Texts`], where no text is another value than none set.
    OptionalTexts(&'a mut Option<Vec<String>>),
    /// [`Domain::Samplers`].
    Samplers(&'a mut Option<SamplerOrder>),
    /// [`Domain::Lora`].
    Lora(&'a mut Option<Vec<LoraUse>>),
    /// [`Domain::Tokens`].
    Tokens(&'a mut Vec<Vec<Token>>),
    /// [`Domain::Biases`].
    Biases {
        /// Those by token id.
        tokens: &'a mut Arc<[(Token, f32)]>,
        /// Those by text.
        texts: &'a mut Vec<(String, f32)>,
    },
}

/// A row of [`PARAMS`].
#[derive(Debug)]
pub struct ParamSpec {
    /// The name on the wires.
    pub name: &'static str,
    /// The name of its member in LMTP, where that protocol has one; `None` for what LMTP reads in a way of its own.
    pub lmtp: Option<&'static str>,
    domain: fn(&ParamRanges) -> Domain,
    // One accessor for reading and writing, so that a row cannot name two fields. Readers need `&mut` or a clone.
    field: fn(&mut GenerationParams) -> ParamField<'_>,
}

impl ParamSpec {
    /// Returns the row of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        PARAMS.iter().find(|param| param.name == name)
    }

    /// Returns the row of this member of LMTP.
    #[must_use]
    pub fn of_lmtp(member: &str) -> Option<&'static Self> {
        PARAMS.iter().find(|param| param.lmtp == Some(member))
    }

    const fn in_lmtp(self, member: Option<&'static str>) -> Self {
        Self {
            lmtp: member,
            ..self
        }
    }

    /// Returns the type and range of the parameter where `ranges` apply.
    #[must_use]
    pub fn domain(&self, ranges: &ParamRanges) -> Domain {
        (self.domain)(ranges)
    }

    /// Returns the parameter's place in `params`.
    #[must_use]
    pub fn field<'a>(&self, params: &'a mut GenerationParams) -> ParamField<'a> {
        (self.field)(params)
    }
}

macro_rules! param {
    ($field:ident: $kind:ident, $domain:expr) => {
        param!($field, stringify!($field), $kind, $domain)
    };
    ($field:ident, $name:expr, $kind:ident, $domain:expr) => {
        ParamSpec {
            name: $name,
            lmtp: Some($name),
            domain: $domain,
            field: |params| ParamField::$kind(&mut params.$field),
        }
    };
}

/// Every parameter that has a name on a wire.
pub const PARAMS: &[ParamSpec] = &[
    param!(max_tokens: Count, |ranges| count(ranges.max_tokens_least, u32::MAX)),
    param!(min_tokens: Count, |_| count(0, u32::MAX)),
    param!(temperature: Number, |ranges| Domain::Number(ranges.temperature)),
    // 0 would leave no token to sample from.
    param!(top_p: Number, |_| Domain::Number(Interval::above(0.0, 1.0))),
    param!(top_k: Count, |ranges| count(ranges.top_k_least, u32::MAX)),
    param!(min_p: Number, |_| Domain::Number(Interval::below(0.0, 1.0))),
    param!(repetition_penalty: Number, |_| Domain::Number(Interval::above(0.0, 10.0))),
    param!(presence_penalty: Number, |ranges| Domain::Number(ranges.penalty)),
    param!(frequency_penalty: Number, |ranges| Domain::Number(ranges.penalty)),
    param!(penalty_last_n: Window, |_| Domain::Window),
    param!(dry_multiplier: Number, |_| number(0.0, 100.0)),
    // Below 1 a longer repetition would be penalised less than a shorter one.
    param!(dry_base: Number, |_| number(1.0, 100.0)),
    param!(dry_allowed_length: Count, |_| count(1, 1_000_000)),
    param!(dry_penalty_last_n: Window, |_| Domain::Window),
    param!(dry_sequence_breakers: OptionalTexts, |_| Domain::Texts {
        count: DRY_BREAKERS_MAX,
        bytes: DRY_BREAKERS_MAX,
    }),
    param!(xtc_probability: Number, |_| number(0.0, 1.0)),
    param!(xtc_threshold: Number, |_| number(0.0, 1.0)),
    param!(typical_p: Number, |_| Domain::Number(Interval::above(0.0, 1.0))),
    // -1 is what llama.cpp's clients send for "off".
    param!(top_n_sigma: Number, |_| number(-1.0, 100.0)),
    param!(mirostat: Count, |_| Domain::OneOf(&[0, 2])),
    param!(mirostat_tau: Number, |_| number(0.0, 100.0)),
    param!(mirostat_eta: Number, |_| number(0.0, 1.0)),
    param!(dynatemp_range: Number, |_| number(0.0, 100.0)),
    param!(dynatemp_exponent: Number, |_| number(0.0, 100.0)),
    param!(samplers: Samplers, |_| Domain::Samplers),
    param!(seed: Seed, |_| Domain::Seed),
    param!(stop: Texts, texts),
    // On the wires that have this table's names, a stop is a single token.
    param!(stop_sequences, "stop_token_ids", Tokens, |_| Domain::Tokens)
        .in_lmtp(Some("stop_tokens")),
    param!(bad_words: Texts, texts),
    param!(include_stop_str_in_output: Flag, |_| Domain::Flag),
    param!(ignore_eos: Flag, |_| Domain::Flag),
    param!(skip_special_tokens: Flag, |_| Domain::Flag).in_lmtp(Some("skip_special")),
    param!(top_logprobs: Count, |ranges| count(0, ranges.top_logprobs)),
    ParamSpec {
        name: "logit_bias",
        lmtp: Some("logit_bias"),
        domain: |ranges| Domain::Biases {
            count: ranges.biases,
            each: ranges.bias,
        },
        field: |params| ParamField::Biases {
            tokens: &mut params.logit_bias,
            texts: &mut params.logit_bias_texts,
        },
    },
    param!(lora: Lora, |_| Domain::Lora),
    // LMTP has it too, but each of its samples is a request of its own there (LM-973).
    param!(n: Count, |ranges| count(1, ranges.n)).in_lmtp(None),
];

/// The parameters of the samplers that only llama.cpp has, which Triton and LMTP both take.
pub const SAMPLER_PARAMS: [&str; 15] = [
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "top_n_sigma",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "dynatemp_range",
    "dynatemp_exponent",
    "samplers",
];

/// Joins lists of names, which have `N` names together.
pub(crate) const fn joined<const N: usize>(lists: &[&[&'static str]]) -> [&'static str; N] {
    let mut all = [""; N];
    let mut filled = 0;
    // Constants cannot use iterators.
    let mut list = 0;
    while list < lists.len() {
        let mut at = 0;
        while at < lists[list].len() {
            all[filled] = lists[list][at];
            filled += 1;
            at += 1;
        }
        list += 1;
    }
    assert!(filled == N, "N is the number of all names");
    all
}

const fn count(least: i64, most: u32) -> Domain {
    Domain::Count { least, most }
}

const fn number(least: f32, most: f32) -> Domain {
    Domain::Number(Interval::closed(least, most))
}

const fn texts(ranges: &ParamRanges) -> Domain {
    Domain::Texts {
        count: ranges.texts,
        bytes: ranges.text_bytes,
    }
}

impl GenerationParams {
    /// Gives each parameter of the table that is not set the value that it has in `defaults`. A list is set if it is not
    /// empty.
    pub fn fill_from(&mut self, defaults: &Self) {
        let mut defaults = defaults.clone();
        for param in PARAMS {
            fill(param.field(self), param.field(&mut defaults));
        }
    }

    /// Returns the first parameter of the table that is set and for which `is_wanted` is false.
    #[must_use]
    pub fn set_beside(&self, is_wanted: impl Fn(&str) -> bool) -> Option<&'static str> {
        let (mut params, mut unset) = (self.clone(), Self::default());
        let mut is_set = |param: &&ParamSpec| param.field(&mut params) != param.field(&mut unset);
        let others = PARAMS.iter().filter(|param| !is_wanted(param.name));
        let mut others = others.filter(|param| is_set(param));
        others.next().map(|param| param.name)
    }

    /// A bias as it was meant: -100 and below forbid the token (D-20).
    #[must_use]
    pub const fn bias(written: f32) -> f32 {
        if written <= FORBIDDING {
            f32::NEG_INFINITY
        } else {
            written
        }
    }

    /// Checks every value that is set against `ranges`, and every token against a vocabulary of this size.
    ///
    /// # Errors
    /// The first parameter that is out of its range.
    pub fn check(&mut self, ranges: &ParamRanges, vocabulary: u32) -> Result<(), ParamError> {
        for param in PARAMS {
            let domain = param.domain(ranges);
            if !holds(&domain, param.field(self), vocabulary) {
                return Err(match domain {
                    // In this process a stop may have several tokens, so its field is named, not the wire's.
                    Domain::Tokens => ParamError::new(
                        "stop_sequences",
                        format_args!(
                            "at most {STOP_SEQUENCES_MAX} sequences of 1 to {STOP_SEQUENCE_TOKENS_MAX} tokens within the \
                             vocabulary of {vocabulary}"
                        ),
                    ),
                    Domain::Biases { .. } => ParamError::new(
                        param.name,
                        format_args!(
                            "numbers below infinity for tokens within the vocabulary of {vocabulary}, and for at \
                             most {BIAS_TEXTS_MAX} texts of 1 to {BIAS_TEXT_BYTES_MAX} bytes"
                        ),
                    ),
                    other => ParamError::new(param.name, other),
                });
            }
        }
        // Only if both are set: the rest of the context, which `max_tokens` stands for otherwise, is not known here.
        match (self.min_tokens, self.max_tokens) {
            (Some(min), Some(max)) if min > max => {
                Err(ParamError::new("min_tokens", "at most max_tokens"))
            }
            _ => Ok(()),
        }
    }
}

/// Moves the value of `from` to `field` if that has none. Both are the field of one row.
fn fill(field: ParamField<'_>, from: ParamField<'_>) {
    fn one<T>(field: &mut Option<T>, from: &mut Option<T>) {
        if field.is_none() {
            *field = from.take();
        }
    }
    fn all<T>(field: &mut Vec<T>, from: &mut Vec<T>) {
        if field.is_empty() {
            *field = std::mem::take(from);
        }
    }
    match (field, from) {
        (ParamField::Count(field), ParamField::Count(from)) => one(field, from),
        (ParamField::Window(field), ParamField::Window(from)) => one(field, from),
        (ParamField::Number(field), ParamField::Number(from)) => one(field, from),
        (ParamField::Seed(field), ParamField::Seed(from)) => one(field, from),
        (ParamField::Flag(field), ParamField::Flag(from)) => one(field, from),
        (ParamField::Texts(field), ParamField::Texts(from)) => all(field, from),
        (ParamField::OptionalTexts(field), ParamField::OptionalTexts(from)) => one(field, from),
        (ParamField::Samplers(field), ParamField::Samplers(from)) => one(field, from),
        (ParamField::Lora(field), ParamField::Lora(from)) => one(field, from),
        (ParamField::Tokens(field), ParamField::Tokens(from)) => all(field, from),
        (
            ParamField::Biases { tokens, texts },
            ParamField::Biases {
                tokens: from,
                texts: from_texts,
            },
        ) if tokens.is_empty() && texts.is_empty() => {
            *tokens = Arc::clone(from);
            all(texts, from_texts);
        }
        // A row has one field, so that both are of one kind.
        _ => {}
    }
}

/// A bias at or below this value forbids the token, for clients that write it so (D-20).
const FORBIDDING: f32 = -100.0;
