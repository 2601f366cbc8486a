//! Flags of llama.cpp's options, by the names of `llama-server`'s.

use clap::Args;
use figment::value::{Dict, Value};

use crate::config::layers::{Flags, list};
use crate::failure::CliError;

/// How models are loaded and computed by llama.cpp. The keys of `engine.llama` say more.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Loading and computing (llama.cpp)")]
pub(super) struct LlamaFlags {
    /// Layers that a GPU computes: a number, `all`, or `auto` for as many as fit (-ngl)
    #[arg(
        long,
        alias = "n-gpu-layers",
        value_name = "N|auto|all",
        allow_negative_numbers = true
    )]
    gpu_layers: Option<String>,
    /// How several GPUs share a model (-sm)
    #[arg(long, value_parser = ["none", "layer", "row"])]
    split_mode: Option<String>,
    /// The share of each GPU, for example 3,1 (-ts)
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        allow_negative_numbers = true
    )]
    tensor_split: Vec<f64>,
    /// The GPU that is used with --split-mode none (-mg)
    #[arg(long, value_name = "INDEX")]
    main_gpu: Option<u32>,
    /// Buffer type of the tensors whose names match: REGEX=BUFFER,..; may be repeated (-ot)
    #[arg(long, value_name = "REGEX=BUFFER,..", value_delimiter = ',')]
    override_tensor: Vec<String>,
    /// Read the file instead of mapping it; --mmap takes that back
    #[arg(long, overrides_with = "mmap")]
    no_mmap: bool,
    #[arg(long, overrides_with = "no_mmap", hide = true)]
    mmap: bool,
    /// Lock the weights in memory, so that they are not swapped out; --no-mlock takes that back
    #[arg(long, overrides_with = "no_mlock")]
    mlock: bool,
    #[arg(long, overrides_with = "mlock", hide = true)]
    no_mlock: bool,
    /// Placement on the nodes of a NUMA machine
    #[arg(long, value_parser = ["distribute", "isolate", "numactl"])]
    numa: Option<String>,
    /// Type of cached keys (-ctk)
    #[arg(long, value_name = "TYPE", value_parser = CACHE_TYPES)]
    cache_type_k: Option<String>,
    /// Type of cached values; quantised ones need flash attention (-ctv)
    #[arg(long, value_name = "TYPE", value_parser = CACHE_TYPES)]
    cache_type_v: Option<String>,
    /// Keep all tokens in sliding-window layers, or with =false those of the window alone
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    swa_full: Option<bool>,
    /// Flash attention (-fa)
    #[arg(long, value_parser = ["auto", "on", "off"])]
    flash_attn: Option<String>,
    /// Tokens of one batch at most
    #[arg(long, short, value_name = "TOKENS")]
    batch_size: Option<u32>,
    /// Tokens that are computed at a time (-ub)
    #[arg(long, value_name = "TOKENS")]
    ubatch_size: Option<u32>,
    /// How positions beyond the training context are scaled; a longer --ctx needs it
    #[arg(long, value_parser = ["none", "linear", "yarn"])]
    rope_scaling: Option<String>,
    /// Factor by which the context is extended
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    rope_scale: Option<f64>,
    /// Base frequency of the rotary embedding
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    rope_freq_base: Option<f64>,
    /// Factor of its frequencies: the inverse of --rope-scale
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    rope_freq_scale: Option<f64>,
    /// YaRN: training context of the model
    #[arg(long, value_name = "TOKENS")]
    yarn_orig_ctx: Option<u32>,
    /// YaRN: share of extrapolation
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    yarn_ext_factor: Option<f64>,
    /// YaRN: factor of attention's magnitude
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    yarn_attn_factor: Option<f64>,
    /// YaRN: low correction dimension
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    yarn_beta_fast: Option<f64>,
    /// YaRN: high correction dimension
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    yarn_beta_slow: Option<f64>,
    /// Metadata that replaces the file's: KEY=TYPE:VALUE, of type int, float, bool or str; may be repeated
    #[arg(long, value_name = "KEY=TYPE:VALUE")]
    override_kv: Vec<String>,
    /// Put the suffix first in prompts for fill in the middle, for models that were trained so; --no-spm-infill takes that
    /// back
    #[arg(long, overrides_with = "no_spm_infill")]
    spm_infill: bool,
    #[arg(long, overrides_with = "spm_infill", hide = true)]
    no_spm_infill: bool,
    /// Load this LoRA adapter (GGUF) with the model, with its scale if it is not 1; may be repeated
    #[arg(long, value_name = "PATH[=SCALE]", value_delimiter = ',')]
    lora: Vec<String>,
    /// The same as `llama-server` writes it
    #[arg(long, value_name = "PATH:SCALE", value_delimiter = ',', hide = true)]
    lora_scaled: Vec<String>,
    /// Load the adapters only for requests that choose them (parameter `lora`)
    #[arg(long)]
    lora_init_without_apply: bool,
}

const CACHE_TYPES: [&str; 9] = [
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1",
];

impl LlamaFlags {
    /// The key and the name of each flag, and its value if it was given.
    fn values(&self) -> [(&'static str, &'static str, Option<Value>); 25] {
        let text = |value: &Option<String>| value.clone().map(Value::from);
        let count = |value: Option<u32>| value.map(Value::from);
        let number = |value: Option<f64>| value.map(Value::from);
        let texts = |values: &[String]| all(values.iter().cloned().map(Value::from));
        let split = self.tensor_split.iter().copied().map(Value::from);
        let mmap = Switch::new(("--mmap", self.mmap), ("--no-mmap", self.no_mmap));
        let mlock = Switch::new(("--mlock", self.mlock), ("--no-mlock", self.no_mlock));
        let spm_infill = Switch::new(
            ("--spm-infill", self.spm_infill),
            ("--no-spm-infill", self.no_spm_infill),
        );
        macro_rules! rows {
            ($($field:literal $flag:tt $value:expr;)*) => {
                [$((concat!("engine.llama.", $field), $flag, $value)),*]
            };
        }
        rows! {
            "gpu_layers" "--gpu-layers" text(&self.gpu_layers);
            "split_mode" "--split-mode" text(&self.split_mode);
            "tensor_split" "--tensor-split" all(split);
            "main_gpu" "--main-gpu" count(self.main_gpu);
            "override_tensor" "--override-tensor" texts(&self.override_tensor);
            "mmap" (mmap.flag) mmap.value;
            "mlock" (mlock.flag) mlock.value;
            "numa" "--numa" text(&self.numa);
            "cache_type_k" "--cache-type-k" text(&self.cache_type_k);
            "cache_type_v" "--cache-type-v" text(&self.cache_type_v);
            "swa_full" "--swa-full" self.swa_full.map(Value::from);
            "flash_attn" "--flash-attn" text(&self.flash_attn);
            "batch_tokens" "--batch-size" count(self.batch_size);
            "ubatch_tokens" "--ubatch-size" count(self.ubatch_size);
            "rope_scaling" "--rope-scaling" text(&self.rope_scaling);
            "rope_scale" "--rope-scale" number(self.rope_scale);
            "rope_freq_base" "--rope-freq-base" number(self.rope_freq_base);
            "rope_freq_scale" "--rope-freq-scale" number(self.rope_freq_scale);
            "yarn_orig_ctx" "--yarn-orig-ctx" count(self.yarn_orig_ctx);
            "yarn_ext_factor" "--yarn-ext-factor" number(self.yarn_ext_factor);
            "yarn_attn_factor" "--yarn-attn-factor" number(self.yarn_attn_factor);
            "yarn_beta_fast" "--yarn-beta-fast" number(self.yarn_beta_fast);
            "yarn_beta_slow" "--yarn-beta-slow" number(self.yarn_beta_slow);
            "override_kv" "--override-kv" texts(&self.override_kv);
            "spm_infill" (spm_infill.flag) spm_infill.value;
        }
    }

    /// The first of these flags that was given.
    pub(super) fn named(&self) -> Option<&'static str> {
        let values = self.values().into_iter();
        let mut given = values.filter_map(|(_, flag, value)| value.map(|_| flag));
        let adapter = || {
            [("--lora", &self.lora), ("--lora-scaled", &self.lora_scaled)]
                .into_iter()
                .find_map(|(flag, adapters)| (!adapters.is_empty()).then_some(flag))
        };
        given.next().or_else(adapter)
    }

    /// The adapters of the only model, of so many.
    ///
    /// # Errors
    /// [`CliError::usage`] if there is no model, or more than one.
    pub(super) fn adapters(&self, models: usize) -> Result<Vec<Value>, CliError> {
        let scaled = |given: &str, sign: char| {
            let parts = given.rsplit_once(sign);
            let scale = parts.and_then(|(path, scale)| Some((path, scale.parse::<f64>().ok()?)));
            let (path, scale) = scale.unwrap_or((given, 1.0));
            Value::from(Dict::from([
                ("path".into(), Value::from(path)),
                ("scale".into(), Value::from(scale)),
                ("apply".into(), Value::from(!self.lora_init_without_apply)),
            ]))
        };
        let plain = self.lora.iter().map(|given| scaled(given, '='));
        let with_scale = self.lora_scaled.iter().map(|given| scaled(given, ':'));
        let adapters: Vec<Value> = plain.chain(with_scale).collect();
        if !adapters.is_empty() && models != 1 {
            return Err(CliError::usage(
                "--lora is for one --model: name the model too, and of several models each one's adapters as `lora` of its \
                 [[models]]",
            ));
        }
        Ok(adapters)
    }

    pub(super) fn set(&self, flags: &mut Flags) {
        for (key, flag, value) in self.values() {
            flags.set(key, flag, value);
        }
    }
}

/// A key that one flag turns on and another one off, so that a command line can undo what a file says. The parser leaves the
/// later of the two.
struct Switch {
    /// The flag that was given.
    flag: &'static str,
    value: Option<Value>,
}

impl Switch {
    fn new((on, is_on): (&'static str, bool), (off, is_off): (&'static str, bool)) -> Self {
        Self {
            flag: if is_off { off } else { on },
            value: (is_on || is_off).then(|| Value::from(is_on)),
        }
    }
}

/// A list, unless it is empty.
fn all(values: impl Iterator<Item = Value>) -> Option<Value> {
    let mut values = values.peekable();
    values.peek().is_some().then(|| list(values))
}
