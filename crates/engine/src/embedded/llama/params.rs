//! Translates [`LlamaOptions`] into llama.cpp's parameters. Its `SAFETY` comments refer to the arguments in [`super`].

use std::ffi::{CStr, CString, c_char};
use std::{fmt, ptr};

use llama_cpp_sys_2 as sys;

use super::LlamaBackend;
use crate::llama_options::{
    CacheType, DEVICES_MAX, FlashAttention, GpuLayers, LlamaOptions, OverrideValue, RopeScaling,
    SplitMode,
};

/// Parameters of loading a model, and the arrays that they point to.
pub(in super::super) struct ModelParams {
    gpu_layers: u32,
    load_mode: sys::llama_load_mode,
    /// With a GPU alone: llama.cpp refuses the number of one that is not there.
    split_mode: Option<sys::llama_split_mode>,
    main_gpu: Option<i32>,
    /// As many as llama.cpp reads; empty if unset.
    tensor_split: Vec<f32>,
    /// What `placements` points to.
    _patterns: Vec<CString>,
    /// Ends with an entry of null pointers.
    placements: Vec<sys::llama_model_tensor_buft_override>,
    /// Ends with an entry without a key.
    overrides: Vec<sys::llama_model_kv_override>,
}

impl fmt::Debug for ModelParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ModelParams");
        shown.field("gpu_layers", &self.gpu_layers);
        shown.finish_non_exhaustive()
    }
}

impl ModelParams {
    /// Translates options, with this many layers for a GPU.
    ///
    /// # Errors
    /// The option that this machine or this build cannot meet.
    pub(in super::super) fn new(
        _: LlamaBackend,
        options: &LlamaOptions,
        gpu_layers: u32,
    ) -> Result<Self, String> {
        let has_gpu = has_gpu();
        if !has_gpu {
            warn_without_gpu(options);
        }
        let mut placements = Vec::new();
        let mut patterns = Vec::new();
        for (pattern, buffer) in options.placements()? {
            let buft = buffer_type(buffer)?;
            let pattern = CString::new(pattern)
                .map_err(|_| "override_tensor: a NUL byte in a pattern".to_owned())?;
            placements.push(placement(pattern.as_ptr(), buft));
            patterns.push(pattern);
        }
        if !placements.is_empty() {
            placements.push(placement(ptr::null(), ptr::null_mut()));
        }
        let mut overrides: Vec<_> = options.overrides()?.iter().map(kv_override).collect();
        if !overrides.is_empty() {
            overrides.push(kv_override(&("", OverrideValue::Bool(false))));
        }
        Ok(Self {
            gpu_layers: if has_gpu { gpu_layers } else { 0 },
            load_mode: load_mode(options),
            split_mode: options.split_mode.filter(|_| has_gpu).map(split_mode),
            main_gpu: options
                .main_gpu
                .filter(|_| has_gpu)
                .map(|number| i32::try_from(number).unwrap_or(i32::MAX)),
            tensor_split: tensor_split(options)?,
            _patterns: patterns,
            placements,
            overrides,
        })
    }

    /// Returns them as llama.cpp reads them; the pointers are valid as long as this value is not dropped.
    pub(super) fn raw(&self) -> sys::llama_model_params {
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.n_gpu_layers = i32::try_from(self.gpu_layers).unwrap_or(i32::MAX);
        params.load_mode = self.load_mode;
        params.split_mode = self.split_mode.unwrap_or(params.split_mode);
        params.main_gpu = self.main_gpu.unwrap_or(params.main_gpu);
        if !self.tensor_split.is_empty() {
            params.tensor_split = self.tensor_split.as_ptr();
        }
        if !self.placements.is_empty() {
            params.tensor_buft_overrides = self.placements.as_ptr();
        }
        if !self.overrides.is_empty() {
            params.kv_overrides = self.overrides.as_ptr();
        }
        params
    }

    pub(super) fn gpu_layers(&self) -> u32 {
        self.gpu_layers
    }
}

/// Applies options to the parameters of a context.
pub(super) fn set_context_params(params: &mut sys::llama_context_params, options: &LlamaOptions) {
    if let Some(kind) = options.cache_type_k {
        params.type_k = cache_type(kind);
    }
    if let Some(kind) = options.cache_type_v {
        params.type_v = cache_type(kind);
    }
    if let Some(flash) = options.flash_attn {
        params.flash_attn_type = match flash {
            FlashAttention::Auto => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
            FlashAttention::On => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            FlashAttention::Off => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
        };
    }
    if let Some(scaling) = options.rope_scaling {
        params.rope_scaling_type = match scaling {
            RopeScaling::None => sys::LLAMA_ROPE_SCALING_TYPE_NONE,
            RopeScaling::Linear => sys::LLAMA_ROPE_SCALING_TYPE_LINEAR,
            RopeScaling::Yarn => sys::LLAMA_ROPE_SCALING_TYPE_YARN,
        };
    }
    if let Some(tokens) = options.yarn_orig_ctx {
        params.yarn_orig_ctx = tokens;
    }
    for (param, option) in [
        (&mut params.rope_freq_base, options.rope_freq_base),
        (&mut params.rope_freq_scale, options.freq_scale()),
        (&mut params.yarn_ext_factor, options.yarn_ext_factor),
        (&mut params.yarn_attn_factor, options.yarn_attn_factor),
        (&mut params.yarn_beta_fast, options.yarn_beta_fast),
        (&mut params.yarn_beta_slow, options.yarn_beta_slow),
    ] {
        *param = option.map_or(*param, single);
    }
}

/// Returns the bytes that are free on the GPUs that a model may use; `None` without one.
pub(in super::super) fn gpu_memory(options: &LlamaOptions) -> Option<u64> {
    let free: Vec<u64> = gpus().map(free_bytes).collect();
    if free.is_empty() {
        return None;
    }
    if options.split_mode == Some(SplitMode::None) {
        let main = options.main_gpu.unwrap_or(0) as usize;
        // One that is not there is llama.cpp's error.
        return Some(free.get(main).copied().unwrap_or(0));
    }
    Some(free.into_iter().fold(0, u64::saturating_add))
}

/// Returns whether there is a GPU that computes, in this build and on this machine.
pub(in super::super) fn has_gpu() -> bool {
    gpus().next().is_some()
}

/// The devices that compute layers beside the CPU. As llama.cpp does, counts integrated GPUs only if there is no other.
fn gpus() -> impl Iterator<Item = sys::ggml_backend_dev_t> {
    let of_type = |wanted| {
        devices().filter(move |&device| {
            // SAFETY: a device of the registry, which lives as long as the process.
            unsafe { sys::ggml_backend_dev_type(device) == wanted }
        })
    };
    let is_discrete = of_type(sys::GGML_BACKEND_DEVICE_TYPE_GPU).next().is_some();
    of_type(match is_discrete {
        true => sys::GGML_BACKEND_DEVICE_TYPE_GPU,
        false => sys::GGML_BACKEND_DEVICE_TYPE_IGPU,
    })
}

fn devices() -> impl Iterator<Item = sys::ggml_backend_dev_t> {
    // SAFETY: reads the registry, which `LlamaBackend::start` has filled.
    let count = unsafe { sys::ggml_backend_dev_count() };
    // SAFETY: the index is below the count.
    (0..count).map(|index| unsafe { sys::ggml_backend_dev_get(index) })
}

fn free_bytes(device: sys::ggml_backend_dev_t) -> u64 {
    let (mut free, mut total) = (0, 0);
    // SAFETY: a device of the registry, and both addresses are those of live variables.
    unsafe { sys::ggml_backend_dev_memory(device, &raw mut free, &raw mut total) };
    free as u64
}

/// Finds a buffer type of this machine by its name.
fn buffer_type(name: &str) -> Result<sys::ggml_backend_buffer_type_t, String> {
    let mut known = Vec::new();
    for device in devices() {
        // SAFETY: a device of the registry; the name of its buffer type is a NUL-terminated constant, copied at once.
        let (buft, of_device) = unsafe {
            let buft = sys::ggml_backend_dev_buffer_type(device);
            if buft.is_null() {
                continue;
            }
            let text = CStr::from_ptr(sys::ggml_backend_buft_name(buft));
            (buft, text.to_string_lossy().into_owned())
        };
        if of_device == name {
            return Ok(buft);
        }
        known.push(of_device);
    }
    let known = known.join(", ");
    Err(format!(
        "override_tensor: there is no buffer type {name:?} on this machine; there are: {known}"
    ))
}

/// Warns of options that do nothing on a machine, or in a build, without a GPU.
fn warn_without_gpu(options: &LlamaOptions) {
    let is_asked = match options.gpu_layers {
        None | Some(GpuLayers::Auto | GpuLayers::Number(0)) => false,
        Some(GpuLayers::All | GpuLayers::Number(_)) => true,
    };
    let set = [
        ("gpu_layers", is_asked),
        ("split_mode", options.split_mode.is_some()),
        ("tensor_split", options.tensor_split.is_some()),
        ("main_gpu", options.main_gpu.is_some()),
    ];
    let ignored: Vec<&str> = set
        .iter()
        .filter_map(|&(name, is_set)| is_set.then_some(name))
        .collect();
    if !ignored.is_empty() {
        let ignored = ignored.join(", ");
        tracing::warn!(
            ignored,
            "no GPU can be used, and the CPU computes every layer: build with `cargo xtask serve --features cuda` (or vulkan, \
             metal), and check the driver with the maker's own tool"
        );
    }
}

fn load_mode(options: &LlamaOptions) -> sys::llama_load_mode {
    match (options.mmap.unwrap_or(true), options.mlock.unwrap_or(false)) {
        (true, true) => sys::LLAMA_LOAD_MODE_MMAP_MLOCK,
        (true, false) => sys::LLAMA_LOAD_MODE_MMAP,
        (false, true) => sys::LLAMA_LOAD_MODE_MLOCK,
        (false, false) => sys::LLAMA_LOAD_MODE_NONE,
    }
}

fn split_mode(mode: SplitMode) -> sys::llama_split_mode {
    match mode {
        SplitMode::None => sys::LLAMA_SPLIT_MODE_NONE,
        SplitMode::Layer => sys::LLAMA_SPLIT_MODE_LAYER,
        SplitMode::Row => sys::LLAMA_SPLIT_MODE_ROW,
    }
}

/// Returns as many shares as llama.cpp reads.
fn tensor_split(options: &LlamaOptions) -> Result<Vec<f32>, String> {
    let Some(shares) = &options.tensor_split else {
        return Ok(Vec::new());
    };
    // SAFETY: returns a constant of the build.
    let most = unsafe { sys::llama_max_devices() };
    if shares.len() > most {
        return Err(format!("tensor_split: this build has at most {most} GPUs"));
    }
    let mut split: Vec<f32> = shares.iter().copied().map(single).collect();
    split.resize(most.max(DEVICES_MAX), 0.0);
    Ok(split)
}

fn cache_type(kind: CacheType) -> sys::ggml_type {
    match kind {
        CacheType::F32 => sys::GGML_TYPE_F32,
        CacheType::F16 => sys::GGML_TYPE_F16,
        CacheType::Bf16 => sys::GGML_TYPE_BF16,
        CacheType::Q8_0 => sys::GGML_TYPE_Q8_0,
        CacheType::Q4_0 => sys::GGML_TYPE_Q4_0,
        CacheType::Q4_1 => sys::GGML_TYPE_Q4_1,
        CacheType::Iq4Nl => sys::GGML_TYPE_IQ4_NL,
        CacheType::Q5_0 => sys::GGML_TYPE_Q5_0,
        CacheType::Q5_1 => sys::GGML_TYPE_Q5_1,
    }
}

fn placement(
    pattern: *const c_char,
    buft: sys::ggml_backend_buffer_type_t,
) -> sys::llama_model_tensor_buft_override {
    sys::llama_model_tensor_buft_override { pattern, buft }
}

/// Translates an entry whose key and text are known to fit, with the NUL that ends them.
fn kv_override((key, value): &(&str, OverrideValue)) -> sys::llama_model_kv_override {
    let mut bytes = [0; 128];
    copy_text(&mut bytes, key);
    let (tag, value) = match value {
        OverrideValue::Int(val_i64) => (
            sys::LLAMA_KV_OVERRIDE_TYPE_INT,
            sys::llama_model_kv_override__bindgen_ty_1 { val_i64: *val_i64 },
        ),
        OverrideValue::Float(val_f64) => (
            sys::LLAMA_KV_OVERRIDE_TYPE_FLOAT,
            sys::llama_model_kv_override__bindgen_ty_1 { val_f64: *val_f64 },
        ),
        OverrideValue::Bool(val_bool) => (
            sys::LLAMA_KV_OVERRIDE_TYPE_BOOL,
            sys::llama_model_kv_override__bindgen_ty_1 {
                val_bool: *val_bool,
            },
        ),
        OverrideValue::Text(text) => {
            let mut val_str = [0; 128];
            copy_text(&mut val_str, text);
            (
                sys::LLAMA_KV_OVERRIDE_TYPE_STR,
                sys::llama_model_kv_override__bindgen_ty_1 { val_str },
            )
        }
    };
    sys::llama_model_kv_override {
        tag,
        key: bytes,
        __bindgen_anon_1: value,
    }
}

/// Copies a text and leaves the last byte 0.
fn copy_text(into: &mut [c_char; 128], text: &str) {
    for (to, from) in into[..127].iter_mut().zip(text.bytes()) {
        *to = from.cast_signed() as c_char;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "llama.cpp keeps 32 bits")]
fn single(number: f64) -> f32 {
    number as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::TensorShape;
    use crate::llama_options::Numa;

    fn options(text: &str) -> LlamaOptions {
        serde_json::from_str(text).unwrap()
    }

    fn context(text: &str) -> sys::llama_context_params {
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::llama_context_default_params() };
        set_context_params(&mut params, &options(text));
        params
    }

    fn model(text: &str) -> ModelParams {
        ModelParams::new(LlamaBackend::start(None).unwrap(), &options(text), 3).unwrap()
    }

    #[test]
    fn each_option_of_a_context_arrives() {
        let plain = context("{}");
        assert_eq!(plain.type_k, sys::GGML_TYPE_F16);
        assert_eq!(plain.flash_attn_type, sys::LLAMA_FLASH_ATTN_TYPE_AUTO);
        let set = context(
            r#"{"cache_type_k": "q4_1", "cache_type_v": "bf16", "flash_attn": "on", "rope_scaling": "linear",
                "rope_scale": 8, "rope_freq_base": 5000, "yarn_orig_ctx": 77, "yarn_ext_factor": 0.5,
                "yarn_attn_factor": 1.5, "yarn_beta_fast": 31, "yarn_beta_slow": 2}"#,
        );
        assert_eq!(
            (set.type_k, set.type_v),
            (sys::GGML_TYPE_Q4_1, sys::GGML_TYPE_BF16)
        );
        assert_eq!(set.flash_attn_type, sys::LLAMA_FLASH_ATTN_TYPE_ENABLED);
        assert_eq!(set.rope_scaling_type, sys::LLAMA_ROPE_SCALING_TYPE_LINEAR);
        assert_eq!((set.rope_freq_scale, set.rope_freq_base), (0.125, 5000.0));
        assert_eq!(set.yarn_orig_ctx, 77);
        assert_eq!((set.yarn_ext_factor, set.yarn_attn_factor), (0.5, 1.5));
        assert_eq!((set.yarn_beta_fast, set.yarn_beta_slow), (31.0, 2.0));
        assert_eq!(
            context(r#"{"rope_freq_scale": 0.25}"#).rope_freq_scale,
            0.25
        );
    }

    #[test]
    fn the_blocks_of_cache_types_are_those_of_ggml() {
        for kind in CacheType::ALL {
            let of_ggml = cache_type(kind);
            // SAFETY: both read tables of constants.
            let block = unsafe { (sys::ggml_blck_size(of_ggml), sys::ggml_type_size(of_ggml)) };
            let (numbers, bytes) = kind.block();
            assert_eq!(block, (numbers.cast_signed(), bytes as usize), "{kind:?}");
        }
    }

    #[test]
    fn the_bytes_of_tensors_are_those_of_ggml() {
        // A whole number of blocks of any type.
        let elements: u64 = 1 << 10;
        for kind in 0..sys::GGML_TYPE_COUNT {
            // Of activations alone: no file has them.
            if [sys::GGML_TYPE_Q8_1, sys::GGML_TYPE_Q8_K].contains(&kind) {
                continue;
            }
            // SAFETY: both read tables of constants.
            let (block, bytes) = unsafe { (sys::ggml_blck_size(kind), sys::ggml_type_size(kind)) };
            // Types that ggml has given up have no blocks.
            let blocks = elements / block.cast_unsigned().max(1);
            let counted = TensorShape::new([elements, 1, 1, 1], kind).bytes();
            assert_eq!(counted, blocks * bytes as u64, "{kind}");
        }
    }

    #[test]
    fn each_option_of_loading_arrives() {
        let plain = model("{}");
        let raw = plain.raw();
        assert_eq!(raw.load_mode, sys::LLAMA_LOAD_MODE_MMAP);
        assert!(raw.kv_overrides.is_null() && raw.tensor_buft_overrides.is_null());
        for (text, mode) in [
            (r#"{"mlock": true}"#, sys::LLAMA_LOAD_MODE_MMAP_MLOCK),
            (r#"{"mmap": false}"#, sys::LLAMA_LOAD_MODE_NONE),
            (
                r#"{"mmap": false, "mlock": true}"#,
                sys::LLAMA_LOAD_MODE_MLOCK,
            ),
        ] {
            assert_eq!(model(text).raw().load_mode, mode, "{text}");
        }
        let set = model(
            r#"{"split_mode": "row", "main_gpu": 2, "tensor_split": [3, 1], "override_tensor": ["a=b=CPU"],
                "override_kv": ["a_token_id=int:-1", "b=float:0.5", "c=bool:true", "d=str:x"]}"#,
        );
        let raw = set.raw();
        assert_eq!(set.tensor_split[..3], [3.0, 1.0, 0.0]);
        assert_eq!(raw.tensor_split, set.tensor_split.as_ptr());
        let has_gpu = has_gpu();
        assert_eq!(raw.n_gpu_layers, if has_gpu { 3 } else { 0 });
        let split = if has_gpu {
            split_mode(SplitMode::Row)
        } else {
            plain.raw().split_mode
        };
        assert_eq!(raw.split_mode, split);
        // SAFETY: both arrays live in `set`, and end as llama.cpp expects.
        unsafe {
            let placements = std::slice::from_raw_parts(raw.tensor_buft_overrides, 2);
            assert_eq!(CStr::from_ptr(placements[0].pattern), c"a=b");
            assert!(!placements[0].buft.is_null() && placements[1].pattern.is_null());
            let overrides = std::slice::from_raw_parts(raw.kv_overrides, 5);
            let keys = overrides.iter().map(|it| CStr::from_ptr(it.key.as_ptr()));
            assert_eq!(
                keys.collect::<Vec<_>>(),
                [c"a_token_id", c"b", c"c", c"d", c""]
            );
            assert_eq!(overrides[0].__bindgen_anon_1.val_i64, -1);
            assert_eq!(overrides[1].__bindgen_anon_1.val_f64, 0.5);
            assert!(overrides[2].__bindgen_anon_1.val_bool);
            let text = CStr::from_ptr(overrides[3].__bindgen_anon_1.val_str.as_ptr());
            assert_eq!(
                (overrides[3].tag, text),
                (sys::LLAMA_KV_OVERRIDE_TYPE_STR, c"x")
            );
        }
    }

    #[test]
    fn numa_strategies_are_those_of_ggml() {
        for (numa, strategy) in [
            (Numa::Distribute, 1),
            (Numa::Isolate, 2),
            (Numa::Numactl, 3),
        ] {
            assert_eq!(super::super::numa_strategy(numa), strategy);
        }
    }
}
