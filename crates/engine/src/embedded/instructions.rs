//! Which instructions of the processor llama.cpp was compiled for, and whether this machine has them. Without them the process
//! would die of an illegal instruction.

use super::llama;
use super::load_error::LoadError;

/// Returns what this machine's processor lacks of the instructions for which llama.cpp was compiled; may be called at any time.
#[must_use]
pub fn missing_instructions() -> Vec<&'static str> {
    llama::compiled_for()
        .filter(|feature| !has(feature))
        .collect()
}

pub(super) fn check() -> Result<(), LoadError> {
    let missing = missing_instructions();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(LoadError::Processor(missing.join(", ")))
    }
}

#[cfg(target_arch = "x86_64")]
fn has(feature: &str) -> bool {
    match feature {
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

#[cfg(not(target_arch = "x86_64"))]
fn has(_: &str) -> bool {
    true
}
