//! [`LlamaOptions`]: how llama.cpp loads and computes a model, by the names of `llama-server`'s flags. Values alone: what
//! they do is in `embedded`, and a build without llama.cpp reads and checks them too.

mod patterns;

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use sapwood_proto::params::{LORA_NAME_BYTES_MAX, LORA_USES_MAX, is_lora_name};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::adapters::AdapterInfo;

/// Options of llama.cpp. Unset ones leave the choice to this crate, which is stated for each, or to llama.cpp.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaOptions {
    /// Layers that a GPU computes. Default: [`GpuLayers::Auto`].
    pub gpu_layers: Option<GpuLayers>,
    /// How several GPUs share a model. Default: by layer.
    pub split_mode: Option<SplitMode>,
    /// The share of each GPU, in any unit. Default: by their free memory.
    pub tensor_split: Option<Vec<f64>>,
    /// The GPU that is used with [`SplitMode::None`], and for small tensors with [`SplitMode::Row`]. Default: the first.
    pub main_gpu: Option<u32>,
    /// `REGEX=BUFFER`: the buffer type of the tensors whose names match; the first that matches counts. At most 16, of simple
    /// patterns.
    pub override_tensor: Option<Vec<String>>,
    /// Map the file instead of reading it: faster to start, and shared between processes. Default: true.
    pub mmap: Option<bool>,
    /// Lock the weights in memory. Default: false.
    pub mlock: Option<bool>,
    /// Placement on the nodes of a NUMA machine. One value for the whole process: that of the first model.
    pub numa: Option<Numa>,
    /// The type of cached keys. Default: f16.
    pub cache_type_k: Option<CacheType>,
    /// The type of cached values. Default: f16.
    pub cache_type_v: Option<CacheType>,
    /// Whether sliding-window layers keep as many cells as the others, instead of those of the windows alone. Default: if the
    /// latter would be more than three quarters of them.
    pub swa_full: Option<bool>,
    /// Whether attention is computed in one operation. Default: where llama.cpp can.
    pub flash_attn: Option<FlashAttention>,
    /// The maximum of tokens of one batch; 1 to 16,384. Default: 512, or `ubatch_tokens` if that is more.
    pub batch_tokens: Option<u32>,
    /// The maximum of tokens that are computed at a time, of the batch's. Default: all.
    pub ubatch_tokens: Option<u32>,
    /// How positions beyond the training context are scaled. Default: as the model's file says.
    pub rope_scaling: Option<RopeScaling>,
    /// The factor by which the context is extended.
    pub rope_scale: Option<f64>,
    /// The base frequency of the rotary embedding.
    pub rope_freq_base: Option<f64>,
    /// The factor of its frequencies: the inverse of `rope_scale`.
    pub rope_freq_scale: Option<f64>,
    /// YaRN: the training context in tokens.
    pub yarn_orig_ctx: Option<u32>,
    /// YaRN: the share of extrapolation; 0 is interpolation alone.
    pub yarn_ext_factor: Option<f64>,
    /// YaRN: the factor of attention's magnitude.
    pub yarn_attn_factor: Option<f64>,
    /// YaRN: the low correction dimension.
    pub yarn_beta_fast: Option<f64>,
    /// YaRN: the high correction dimension.
    pub yarn_beta_slow: Option<f64>,
    /// `KEY=TYPE:VALUE`: metadata that replaces the file's, of the same type and once each; types: int, float, bool, str.
    pub override_kv: Option<Vec<String>>,
    /// Prompts for fill in the middle have the suffix first (SPM), for models that were trained so. Default: false.
    pub spm_infill: Option<bool>,
}

impl LlamaOptions {
    /// These options, and those of `defaults` where they are unset.
    #[must_use]
    pub fn or(&self, defaults: &Self) -> Self {
        macro_rules! merged {
            ($($field:ident),*) => {
                Self { $($field: self.$field.clone().or_else(|| defaults.$field.clone())),* }
            };
        }
        let mut merged = merged!(
            gpu_layers,
            split_mode,
            tensor_split,
            main_gpu,
            override_tensor,
            mmap,
            mlock,
            numa,
            cache_type_k,
            cache_type_v,
            swa_full,
            flash_attn,
            batch_tokens,
            ubatch_tokens,
            rope_scaling,
            rope_scale,
            rope_freq_base,
            rope_freq_scale,
            yarn_orig_ctx,
            yarn_ext_factor,
            yarn_attn_factor,
            yarn_beta_fast,
            yarn_beta_slow,
            override_kv,
            spm_infill
        );
        // Two names of one setting: either of these options replaces both defaults.
        if self.rope_scale.is_some() || self.rope_freq_scale.is_some() {
            merged.rope_scale = self.rope_scale;
            merged.rope_freq_scale = self.rope_freq_scale;
        }
        merged
    }

    /// Checks what the types cannot express.
    ///
    /// # Errors
    /// The option, and what it must be.
    pub fn check(&self) -> Result<(), String> {
        self.check_ranges()?;
        self.check_scaling()?;
        self.check_split()?;
        if self.flash_attn == Some(FlashAttention::Off)
            && self.cache_type_v.is_some_and(CacheType::is_quantised)
        {
            return Err(
                "cache_type_v: a quantised type needs flash attention: choose f16, bf16 or f32, or leave flash_attn unset"
                    .to_owned(),
            );
        }
        self.placements()?;
        self.overrides()?;
        Ok(())
    }

    fn check_ranges(&self) -> Result<(), String> {
        for (name, value) in [
            ("batch_tokens", self.batch_tokens),
            ("ubatch_tokens", self.ubatch_tokens),
        ] {
            if value.is_some_and(|value| !(1..=BATCH_TOKENS_MAX).contains(&value)) {
                return Err(format!("{name}: must be from 1 to {BATCH_TOKENS_MAX}"));
            }
        }
        if let (Some(batch), Some(ubatch)) = (self.batch_tokens, self.ubatch_tokens)
            && ubatch > batch
        {
            return Err(format!(
                "ubatch_tokens: must be at most batch_tokens, which is {batch}"
            ));
        }
        if self.yarn_orig_ctx == Some(0) {
            return Err("yarn_orig_ctx: must be at least 1".to_owned());
        }
        Ok(())
    }

    fn check_scaling(&self) -> Result<(), String> {
        for (name, value) in [
            ("rope_scale", self.rope_scale),
            ("rope_scale", self.rope_scale.map(|scale| 1.0 / scale)),
            ("rope_freq_base", self.rope_freq_base),
            ("rope_freq_scale", self.rope_freq_scale),
        ] {
            if value.is_some_and(|value| !(single(value).is_normal() && value > 0.0)) {
                return Err(format!("{name}: must be a number above 0, of 32 bits"));
            }
        }
        if self.rope_scale.is_some() && self.rope_freq_scale.is_some() {
            return Err(
                "rope_scale: is the inverse of rope_freq_scale: set one of them".to_owned(),
            );
        }
        for (name, value) in [
            ("yarn_ext_factor", self.yarn_ext_factor),
            ("yarn_attn_factor", self.yarn_attn_factor),
            ("yarn_beta_fast", self.yarn_beta_fast),
            ("yarn_beta_slow", self.yarn_beta_slow),
        ] {
            // llama.cpp takes negative numbers for unset ones.
            if value.is_some_and(|value| !(single(value).is_finite() && value >= 0.0)) {
                return Err(format!(
                    "{name}: must be a number from 0 on, of 32 bits; leave it unset for the model's own"
                ));
            }
        }
        Ok(())
    }

    fn check_split(&self) -> Result<(), String> {
        let Some(shares) = &self.tensor_split else {
            return Ok(());
        };
        let valid = |share: &f64| SHARES.contains(share) || *share == 0.0;
        if shares.is_empty() || shares.len() > DEVICES_MAX || !shares.iter().all(valid) {
            return Err(format!(
                "tensor_split: must be 1 to {DEVICES_MAX} numbers from 0 on, one for each GPU, and each 0 or from 1e-30 to 1e30"
            ));
        }
        if shares.iter().all(|&share| share == 0.0) {
            return Err("tensor_split: one of the numbers must be above 0".to_owned());
        }
        Ok(())
    }

    /// Whether positions are scaled by these options, so that a context may be longer than the model was trained for.
    #[must_use]
    pub fn scales_positions(&self) -> bool {
        match self.rope_scaling {
            Some(RopeScaling::None) => false,
            Some(RopeScaling::Linear | RopeScaling::Yarn) => true,
            None => {
                self.rope_scale.is_some()
                    || self.rope_freq_scale.is_some()
                    || self.rope_freq_base.is_some()
            }
        }
    }

    /// The factor of the rotary embedding's frequencies.
    #[must_use]
    pub fn freq_scale(&self) -> Option<f64> {
        let inverse = self.rope_scale.map(|scale| 1.0 / scale);
        self.rope_freq_scale.or(inverse)
    }

    /// The entries of `override_tensor`: regular expressions and names of buffer types.
    ///
    /// # Errors
    /// The entry that is none.
    pub fn placements(&self) -> Result<Vec<(&str, &str)>, String> {
        let entries = self.override_tensor.as_deref().unwrap_or_default();
        if entries.len() > PLACEMENTS_MAX {
            return Err(format!("override_tensor: at most {PLACEMENTS_MAX} entries"));
        }
        let parts = entries.iter().map(|entry| {
            // The last one: a regular expression may have an equals sign, and no buffer type does.
            let parts = entry.rsplit_once('=');
            let valid = parts.filter(|(pattern, buffer)| {
                !pattern.is_empty() && !buffer.is_empty() && !entry.contains('\0')
            });
            let (pattern, buffer) = valid.ok_or_else(|| {
                format!("override_tensor: {entry:?} is not REGEX=BUFFER, for example \"exps=CPU\"")
            })?;
            match patterns::check(pattern) {
                Ok(()) => Ok((pattern, buffer)),
                Err(why) => Err(format!("override_tensor: {pattern:?}: {why}")),
            }
        });
        parts.collect()
    }

    /// The entries of `override_kv`.
    ///
    /// # Errors
    /// The entry that is none.
    pub fn overrides(&self) -> Result<Vec<(&str, OverrideValue)>, String> {
        let entries = self.override_kv.as_deref().unwrap_or_default();
        if entries.len() > ENTRIES_MAX {
            return Err(format!("override_kv: at most {ENTRIES_MAX} entries"));
        }
        let mut keys = BTreeSet::new();
        let parsed = entries.iter().map(|entry| {
            let (key, value) = parse_override(entry).ok_or_else(|| {
                format!(
                    "override_kv: {entry:?} is not KEY=TYPE:VALUE with a type of int, float, bool or str, and at most \
                     {OVERRIDE_BYTES_MAX} bytes of key and text, for example \"tokenizer.ggml.add_bos_token=bool:false\". An int \
                     is from 0 to 4294967295; -1 is no token, for ids of tokens"
                )
            })?;
            // llama.cpp takes the first of two, without a word.
            match keys.insert(key) {
                true => Ok((key, value)),
                false => Err(format!("override_kv: {key} is there twice")),
            }
        });
        parsed.collect()
    }

    /// The options that are set, as `name=value`, for the log.
    #[must_use]
    pub fn described(&self) -> String {
        let options = serde_json::to_value(self).unwrap_or_default();
        let set = options.as_object().into_iter().flatten();
        let set = set.filter(|(_, value)| !value.is_null());
        let set: Vec<String> = set
            .map(|(name, value)| match value.as_str() {
                Some(text) => format!("{name}={text}"),
                None => format!("{name}={value}"),
            })
            .collect();
        set.join(" ")
    }
}

fn parse_override(entry: &str) -> Option<(&str, OverrideValue)> {
    let (key, value) = entry.split_once('=')?;
    let (kind, value) = value.split_once(':')?;
    let fits = |text: &str| text.len() <= OVERRIDE_BYTES_MAX && !text.contains('\0');
    if key.is_empty() || !fits(key) {
        return None;
    }
    let value = match kind {
        // llama.cpp keeps no wider integers, and would cut one to its lower half. It takes a negative number for a huge one.
        "int" => {
            let is_none = |value: i64| value == -1 && key.ends_with("_token_id");
            let fits = |value: &i64| u32::try_from(*value).is_ok() || is_none(*value);
            OverrideValue::Int(value.parse().ok().filter(fits)?)
        }
        "float" => {
            let fits = |value: &f64| single(*value).is_finite();
            OverrideValue::Float(value.parse().ok().filter(fits)?)
        }
        "bool" => OverrideValue::Bool(value.parse().ok()?),
        "str" => OverrideValue::Text(Some(value.to_owned()).filter(|text| fits(text))?),
        _ => return None,
    };
    Some((key, value))
}

/// A LoRA adapter of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraAdapter {
    /// Its GGUF file.
    pub path: PathBuf,
    /// The factor of what it adds; 0 is nothing.
    #[serde(default = "whole")]
    pub scale: f64,
    /// What requests and the log call it. Default: the name of the file, without its ending.
    #[serde(default)]
    pub name: Option<String>,
    /// Whether it computes for requests that choose no adapters.
    #[serde(default = "applied")]
    pub apply: bool,
}

impl LoraAdapter {
    /// What requests and the log call it.
    #[must_use]
    pub fn shown_name(&self) -> String {
        let of_file = || self.path.file_stem().unwrap_or_default().to_string_lossy();
        self.name.clone().unwrap_or_else(|| of_file().into_owned())
    }

    /// What requests can choose.
    #[must_use]
    pub fn info(&self) -> AdapterInfo {
        AdapterInfo {
            name: self.shown_name(),
            scale: single(self.scale),
            applied: self.apply,
        }
    }

    /// Checks the adapters of one model.
    ///
    /// # Errors
    /// What is wrong, for people.
    pub fn check(adapters: &[Self]) -> Result<(), String> {
        if adapters.len() > ADAPTERS_MAX {
            return Err(format!("lora: at most {ADAPTERS_MAX} adapters"));
        }
        for (index, adapter) in adapters.iter().enumerate() {
            let shown = adapter.path.display();
            if adapter.path.as_os_str().is_empty() {
                return Err("lora: an adapter needs the path of its GGUF file".to_owned());
            }
            if !single(adapter.scale).is_finite() {
                return Err(format!(
                    "lora: the scale of {shown} must be a number of 32 bits"
                ));
            }
            // llama.cpp keeps one scale for each adapter, and two of one file would be loaded twice.
            if adapters[..index]
                .iter()
                .any(|other| other.path == adapter.path)
            {
                return Err(format!("lora: {shown} is there twice: add up the scales"));
            }
            let name = adapter.shown_name();
            if !is_lora_name(&name) {
                return Err(format!(
                    "lora: the name of {shown}, {name:?}, must have 1 to {LORA_NAME_BYTES_MAX} bytes, not begin with a \
                     bracket, and have no control characters, and no white space at its ends: give it another `name`"
                ));
            }
            if adapters[..index]
                .iter()
                .any(|other| other.shown_name() == name)
            {
                return Err(format!(
                    "lora: two adapters are called {name:?}: give one of them another `name`"
                ));
            }
        }
        Ok(())
    }
}

fn applied() -> bool {
    true
}

fn whole() -> f64 {
    1.0
}

#[expect(clippy::cast_possible_truncation, reason = "llama.cpp keeps 32 bits")]
fn single(number: f64) -> f32 {
    number as f32
}

/// The maximum of adapters of one model: a request may name all.
const ADAPTERS_MAX: usize = LORA_USES_MAX;

/// A value of `override_kv`.
#[derive(Clone, Debug, PartialEq)]
pub enum OverrideValue {
    /// `int:`
    Int(i64),
    /// `float:`
    Float(f64),
    /// `bool:`, `true` or `false`
    Bool(bool),
    /// `str:`
    Text(String),
}

// The one who asks is compiled with these alone.
#[cfg(any(feature = "embedded", feature = "tokenizer", test, fuzzing))]
impl OverrideValue {
    /// The name of its type.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Bool(_) => "bool",
            Self::Text(_) => "str",
        }
    }
}

/// The maximum of tokens of one batch.
pub const BATCH_TOKENS_MAX: u32 = 16_384;
/// What `llama_max_devices` returns.
pub(crate) const DEVICES_MAX: usize = 16;
const ENTRIES_MAX: usize = 256;
/// The maximum of entries of `override_tensor`: llama.cpp may compile the pattern of each for every tensor.
const PLACEMENTS_MAX: usize = 16;
/// Shares that can be added up in 32 bits.
const SHARES: std::ops::RangeInclusive<f64> = 1e-30..=1e30;
/// llama.cpp has 128 bytes for each, and ends them with a NUL.
const OVERRIDE_BYTES_MAX: usize = 127;

/// How many layers a GPU computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuLayers {
    /// As many as fit into its free memory.
    Auto,
    /// Every layer.
    All,
    /// This many, from the last on.
    Number(u32),
}

impl Serialize for GpuLayers {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => to.serialize_str("auto"),
            Self::All => to.serialize_str("all"),
            Self::Number(number) => to.serialize_u32(*number),
        }
    }
}

impl<'de> Deserialize<'de> for GpuLayers {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(GpuLayersVisitor)
    }
}

struct GpuLayersVisitor;

impl Visitor<'_> for GpuLayersVisitor {
    type Value = GpuLayers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of layers, \"auto\" or \"all\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<GpuLayers, E> {
        match text {
            "auto" => Ok(GpuLayers::Auto),
            "all" => Ok(GpuLayers::All),
            // A flag's value is text.
            number => match number.parse() {
                Ok(number) => Ok(GpuLayers::Number(number)),
                Err(_) => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
            },
        }
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<GpuLayers, E> {
        let out_of_range = |_| E::invalid_value(de::Unexpected::Unsigned(number), &self);
        u32::try_from(number)
            .map(GpuLayers::Number)
            .map_err(out_of_range)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<GpuLayers, E> {
        let out_of_range = |_| E::invalid_value(de::Unexpected::Signed(number), &self);
        u32::try_from(number)
            .map(GpuLayers::Number)
            .map_err(out_of_range)
    }
}

/// How several GPUs share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitMode {
    /// They do not: one GPU has all of it.
    None,
    /// Each has some of the layers.
    Layer,
    /// Each has some rows of every layer.
    Row,
}

/// Placement of threads and memory on the nodes of a NUMA machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Numa {
    /// Over all nodes.
    Distribute,
    /// On the node where the process started.
    Isolate,
    /// As `numactl` has set it.
    Numactl,
}

/// Whether attention is computed in one operation, which needs less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FlashAttention {
    /// Where llama.cpp can.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How positions beyond the training context are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeScaling {
    /// Not at all, even if the model's file says so.
    None,
    /// All frequencies by one factor.
    Linear,
    /// Low frequencies alone.
    Yarn,
}

/// The type of a number in the KV cache, by ggml's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "these are ggml's names of its types")]
pub enum CacheType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    #[serde(rename = "iq4_nl")]
    Iq4Nl,
    Q5_0,
    Q5_1,
}

impl CacheType {
    /// Every type.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Iq4Nl,
        Self::Q5_0,
        Self::Q5_1,
    ];

    /// The numbers of a block, and its bytes.
    #[must_use]
    pub fn block(self) -> (u64, u64) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 | Self::Iq4Nl => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
        }
    }

    /// Whether numbers share a scale.
    #[must_use]
    pub fn is_quantised(self) -> bool {
        self.block().0 > 1
    }

    /// ggml's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Iq4Nl => "iq4_nl",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
        }
    }
}

#[cfg(test)]
mod tests;
