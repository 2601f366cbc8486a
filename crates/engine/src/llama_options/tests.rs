//! How options are read, merged and checked.

use super::*;

fn read(text: &str) -> Result<LlamaOptions, String> {
    let options: LlamaOptions = serde_json::from_str(text).map_err(|why| why.to_string())?;
    options.check().map(|()| options)
}

#[test]
fn values_are_read_by_the_names_that_llama_server_has() {
    let options = read(
        r#"{"gpu_layers": "all", "split_mode": "row", "tensor_split": [3, 1.5], "numa": "isolate",
            "cache_type_k": "iq4_nl", "cache_type_v": "q8_0", "flash_attn": "on", "rope_scaling": "yarn",
            "rope_scale": 4, "override_tensor": ["a=b=CPU"],
            "override_kv": ["a_token_id=int:-1", "b=float:0.5", "c=bool:true", "d=str:x=y:z"]}"#,
    )
    .unwrap();
    assert_eq!(options.gpu_layers, Some(GpuLayers::All));
    assert_eq!(options.placements().unwrap(), [("a=b", "CPU")]);
    let overrides = [
        ("a_token_id", OverrideValue::Int(-1)),
        ("b", OverrideValue::Float(0.5)),
        ("c", OverrideValue::Bool(true)),
        ("d", OverrideValue::Text("x=y:z".to_owned())),
    ];
    assert_eq!(options.overrides().unwrap(), overrides);
    assert_eq!(options.freq_scale(), Some(0.25));
    for kind in CacheType::ALL {
        let name = serde_json::to_string(&kind).unwrap();
        assert_eq!(name.trim_matches('"'), kind.name());
    }
    for (text, layers) in [
        ("7", GpuLayers::Number(7)),
        ("\"7\"", GpuLayers::Number(7)),
        ("\"auto\"", GpuLayers::Auto),
    ] {
        let read: GpuLayers = serde_json::from_str(text).unwrap();
        assert_eq!(read, layers);
        let written = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<GpuLayers>(&written).unwrap(), layers);
    }
}

#[test]
fn bad_values_are_refused_with_the_option_and_the_choices() {
    let long = format!(r#"{{"override_kv": ["a=str:{}"]}}"#, "x".repeat(128));
    for (text, parts) in [
        (r#"{"gpu_layers": -1}"#, ["auto", "all"]),
        (r#"{"gpu_layers": "many"}"#, ["many", "\"all\""]),
        (r#"{"split_mode": "tensor"}"#, ["tensor", "`layer`"]),
        (r#"{"cache_type_k": "q6_k"}"#, ["q6_k", "`iq4_nl`"]),
        (r#"{"flash_attn": "maybe"}"#, ["maybe", "`auto`"]),
        (r#"{"numa": "mirror"}"#, ["mirror", "`numactl`"]),
        (r#"{"rope_scaling": "ntk"}"#, ["ntk", "`yarn`"]),
        (
            r#"{"cache_type_v": "q8_0", "flash_attn": "off"}"#,
            ["cache_type_v", "flash attention"],
        ),
        (
            r#"{"batch_tokens": 0}"#,
            ["batch_tokens", "from 1 to 16384"],
        ),
        (r#"{"batch_tokens": 16385}"#, ["batch_tokens", "16384"]),
        (
            r#"{"batch_tokens": 8, "ubatch_tokens": 9}"#,
            ["ubatch_tokens", "which is 8"],
        ),
        (r#"{"rope_scale": 0}"#, ["rope_scale", "above 0"]),
        (
            r#"{"rope_scale": 2, "rope_freq_scale": 0.5}"#,
            ["rope_scale", "one of them"],
        ),
        (r#"{"yarn_ext_factor": -1}"#, ["yarn_ext_factor", "unset"]),
        (r#"{"yarn_orig_ctx": 0}"#, ["yarn_orig_ctx", "at least 1"]),
        (r#"{"tensor_split": []}"#, ["tensor_split", "1 to 16"]),
        (r#"{"tensor_split": [1, -1]}"#, ["tensor_split", "from 0"]),
        (r#"{"tensor_split": [0, 0]}"#, ["tensor_split", "above 0"]),
        (r#"{"override_tensor": ["exps"]}"#, ["exps", "REGEX=BUFFER"]),
        (r#"{"override_kv": ["a=long:1"]}"#, ["a=long:1", "float"]),
        (
            r#"{"override_kv": ["a=int:4294967296"]}"#,
            ["a=int:", "KEY=TYPE:VALUE"],
        ),
        (
            r#"{"override_kv": ["a=bool:1"]}"#,
            ["a=bool:1", "KEY=TYPE:VALUE"],
        ),
        (long.as_str(), ["override_kv", "127"]),
    ] {
        let why = read(text).unwrap_err();
        assert!(parts.iter().all(|part| why.contains(part)), "{text}: {why}");
    }
}

#[test]
fn each_option_of_a_model_replaces_the_default_alone() {
    let defaults = read(r#"{"gpu_layers": 3, "mmap": false, "cache_type_k": "q8_0"}"#).unwrap();
    let model = read(r#"{"gpu_layers": "all", "flash_attn": "off"}"#).unwrap();
    let merged = model.or(&defaults);
    assert_eq!(
        merged.described(),
        "gpu_layers=all mmap=false cache_type_k=q8_0 flash_attn=off"
    );
    assert_eq!(LlamaOptions::default().described(), "");
}

#[test]
fn positions_are_scaled_only_where_that_is_asked_for() {
    for (text, scales) in [
        ("{}", false),
        (r#"{"rope_scaling": "none", "rope_scale": 2}"#, false),
        (r#"{"yarn_beta_fast": 2}"#, false),
        (r#"{"rope_scaling": "linear"}"#, true),
        (r#"{"rope_scale": 2}"#, true),
        (r#"{"rope_freq_base": 1000000}"#, true),
    ] {
        assert_eq!(read(text).unwrap().scales_positions(), scales, "{text}");
    }
}

/// They are two names of one setting.
#[test]
fn the_scale_of_a_model_replaces_the_inverse_of_the_default() {
    let (scale, inverse) = (r#"{"rope_scale": 4}"#, r#"{"rope_freq_scale": 0.5}"#);
    for (model, defaults, factor) in [(scale, inverse, 0.25), (inverse, scale, 0.5)] {
        let merged = read(model).unwrap().or(&read(defaults).unwrap());
        assert_eq!(merged.check(), Ok(()));
        assert_eq!(merged.freq_scale(), Some(factor));
    }
    let merged = LlamaOptions::default().or(&read(scale).unwrap());
    assert_eq!(merged.freq_scale(), Some(0.25));
}

#[test]
fn placements_are_few() {
    let with = |entries: usize| LlamaOptions {
        override_tensor: Some(vec!["exps=CPU".to_owned(); entries]),
        ..LlamaOptions::default()
    };
    assert_eq!(with(16).check(), Ok(()));
    assert!(with(17).check().unwrap_err().contains("at most 16"));
}

#[test]
fn values_that_llama_cpp_reads_otherwise_are_refused() {
    for (text, parts) in [
        (
            r#"{"override_kv": ["llama.expert_count=int:-1"]}"#,
            ["expert_count=int:-1", "from 0"],
        ),
        (
            r#"{"override_kv": ["a_token_id=int:-2"]}"#,
            ["a_token_id", "from 0"],
        ),
        (
            r#"{"override_kv": ["a=int:1", "b=int:1", "a=int:2"]}"#,
            ["override_kv: a ", "twice"],
        ),
        (r#"{"override_kv": ["a=float:1e39"]}"#, ["a=float", "KEY="]),
        (
            r#"{"override_tensor": ["(a*)*=CPU"]}"#,
            ["override_tensor", "repeated"],
        ),
        (r#"{"rope_scale": 1e-300}"#, ["rope_scale", "32 bits"]),
        (r#"{"rope_scale": 1e39}"#, ["rope_scale", "32 bits"]),
        (
            r#"{"rope_freq_scale": 1e300}"#,
            ["rope_freq_scale", "32 bits"],
        ),
        (
            r#"{"rope_freq_base": 1e-60}"#,
            ["rope_freq_base", "32 bits"],
        ),
        (
            r#"{"yarn_beta_fast": 1e300}"#,
            ["yarn_beta_fast", "32 bits"],
        ),
        (r#"{"tensor_split": [1, 1e39]}"#, ["tensor_split", "1e30"]),
        (r#"{"tensor_split": [1e-60]}"#, ["tensor_split", "1e-30"]),
    ] {
        let why = read(text).unwrap_err();
        assert!(parts.iter().all(|part| why.contains(part)), "{text}: {why}");
    }
}
