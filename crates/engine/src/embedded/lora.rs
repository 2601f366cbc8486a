//! Checks a LoRA adapter before llama.cpp reads it, which asserts the types of its metadata.

use std::path::Path;

use super::kind::architecture;
use super::load::LoadOptions;
use super::load_error::LoadError;
use super::source::header_of_file;
use crate::gguf::GgufHeader;

/// Returns the bytes of all adapters.
///
/// # Errors
/// [`LoadError::Adapter`], or that its file cannot be read.
pub(super) fn check(model: &GgufHeader, options: &LoadOptions) -> Result<u64, LoadError> {
    let mut bytes = 0_u64;
    for adapter in &options.lora {
        if !adapter.scale.is_finite() {
            return Err(refused(&adapter.path, "its scale is not a number"));
        }
        let header = header_of_file(&adapter.path)?;
        check_header(&header, architecture(model)).map_err(|why| refused(&adapter.path, &why))?;
        bytes = bytes.saturating_add(header.tensor_bytes);
    }
    Ok(bytes)
}

pub(super) fn refused(path: &Path, why: &str) -> LoadError {
    LoadError::Adapter {
        path: path.to_owned(),
        why: why.to_owned(),
    }
}

fn check_header(header: &GgufHeader, model: &str) -> Result<(), String> {
    if header.text("general.type") != Some("adapter") || header.text("adapter.type") != Some("lora")
    {
        return Err(
            "it is not a LoRA adapter: convert one with convert_lora_to_gguf.py".to_owned(),
        );
    }
    let own = architecture(header);
    if own != model {
        return Err(format!(
            "it was made for a model of architecture {own:?}, and this one is {model:?}"
        ));
    }
    let alpha = "adapter.lora.alpha";
    if header.fractions(alpha).all(|(key, _)| key != alpha) {
        return Err(format!("it lacks {alpha}, or that is not a 32-bit float"));
    }
    if header.array("adapter.alora.invocation_tokens").is_some() {
        return Err(
            "it is an activated LoRA, which holds from certain tokens on alone, and these are not supported".to_owned(),
        );
    }
    Ok(())
}
