//! Which instructions of the processor may be used here: those that it has and the operating system allows.

/// Whether an instruction set, by ggml's name of it, may be used.
#[cfg(target_arch = "x86_64")]
pub(super) fn has(feature: &str) -> bool {
    match feature {
        "SSE4.2" => std::is_x86_feature_detected!("sse4.2"),
        "AVX" => std::is_x86_feature_detected!("avx"),
        "AVX2" => std::is_x86_feature_detected!("avx2"),
        "BMI2" => std::is_x86_feature_detected!("bmi2"),
        "F16C" => std::is_x86_feature_detected!("f16c"),
        "FMA" => std::is_x86_feature_detected!("fma"),
        "AVX-VNNI" => std::is_x86_feature_detected!("avxvnni"),
        // `GGML_AVX512` compiles with all of these.
        "AVX512F" => {
            std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512cd")
                && std::is_x86_feature_detected!("avx512vl")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512bw")
        }
        "AVX512-VBMI" => std::is_x86_feature_detected!("avx512vbmi"),
        "AVX512-VNNI" => std::is_x86_feature_detected!("avx512vnni"),
        "AVX512-BF16" => std::is_x86_feature_detected!("avx512bf16"),
        _ => true,
    }
}

/// Known on x86 alone.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has(_: &str) -> bool {
    true
}
