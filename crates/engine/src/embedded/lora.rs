//! Checks a LoRA adapter before llama.cpp reads it, which asserts the types of its metadata, and computes with tensors of
//! any type and shape.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use sapwood_proto::params::LORA_SCALES;

use super::kind::architecture;
use super::load::LoadOptions;
use super::load_error::LoadError;
use super::source::header_of_file;
use crate::adapters::AdapterInfo;
use crate::gguf::{GgufHeader, TensorShape};
use crate::llama_options::LoraAdapter;

/// Returns what requests can choose.
pub(super) fn infos(options: &LoadOptions) -> Arc<[AdapterInfo]> {
    options.lora.iter().map(LoraAdapter::info).collect()
}

/// Returns the bytes of all adapters.
///
/// # Errors
/// [`LoadError::Adapter`], or that its file cannot be read.
pub(super) fn check(model: &GgufHeader, options: &LoadOptions) -> Result<u64, LoadError> {
    let mut bytes = 0_u64;
    for adapter in &options.lora {
        let header = header_of_file(&adapter.path)?;
        let checked = check_header(&header, architecture(model), adapter.scale)
            .and_then(|()| check_tensors(&header, model));
        checked.map_err(|why| refused(&adapter.path, &why))?;
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

#[expect(clippy::cast_possible_truncation, reason = "llama.cpp keeps 32 bits")]
fn check_header(header: &GgufHeader, model: &str, scale: f64) -> Result<(), String> {
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
    let key = "adapter.lora.alpha";
    let mut alpha = header.fractions(key).filter(|(found, _)| *found == key);
    let Some((_, alpha)) = alpha.next() else {
        return Err(format!("it lacks {key}, or that is not a 32-bit float"));
    };
    // A request may choose another scale.
    let [least, most] = LORA_SCALES.ends();
    if [scale as f32, least, most]
        .iter()
        .any(|scale| !(scale * alpha).is_finite())
    {
        return Err(format!(
            "{key}, or what a scale makes of it, is not a number of 32 bits"
        ));
    }
    if header.array("adapter.alora.invocation_tokens").is_some() {
        return Err(
            "it is an activated LoRA, which holds from certain tokens on alone, and these are not supported".to_owned(),
        );
    }
    Ok(())
}

/// Checks that the tensors are pairs that multiply with those of the model.
fn check_tensors(adapter: &GgufHeader, model: &GgufHeader) -> Result<(), String> {
    let mut pairs: BTreeMap<String, [Option<TensorShape>; 2]> = BTreeMap::new();
    for (name, shape) in &adapter.tensors {
        let (part, suffix) = if name.ends_with(".lora_a") {
            (0, ".lora_a")
        } else if name.ends_with(".lora_b") {
            (1, ".lora_b")
        } else if name.ends_with("_norm.weight") {
            // llama.cpp skips it.
            continue;
        } else {
            return Err(format!("its tensor {name:?} is none of a LoRA adapter"));
        };
        if !shape.is_multiplied() {
            return Err(format!(
                "its tensor {name:?} is of a type that is not supported"
            ));
        }
        let pair = pairs.entry(name.replace(suffix, "")).or_default();
        pair[part] = Some(*shape);
    }
    if pairs.is_empty() {
        return Err("it has no tensors".to_owned());
    }
    // The other parts of a split model have tensors too; of those llama.cpp compares the shapes.
    let is_whole = model.number("split.count").unwrap_or(1) <= 1;
    for (name, pair) in pairs {
        let [Some(a), Some(b)] = pair else {
            return Err(format!(
                "its tensor for {name:?} lacks one of the two parts"
            ));
        };
        let of_model = model.tensors.get(&name);
        if of_model.is_none() && is_whole {
            return Err(format!(
                "its tensor for {name:?} does not exist in base model: it was made for another one"
            ));
        }
        if !fits(a, b, of_model, name.ends_with("token_embd.weight")) {
            return Err(format!(
                "its tensor for {name:?} has an incorrect shape: it was made for another model"
            ));
        }
    }
    Ok(())
}

/// Returns whether two tensors of the same rank make one of this shape.
fn fits(
    a: TensorShape,
    b: TensorShape,
    of_model: Option<&TensorShape>,
    is_embedding: bool,
) -> bool {
    let (a, b) = (a.dimensions, b.dimensions);
    // For embeddings `a` has a row for each token.
    let (rank, made) = match is_embedding {
        true => (a[0], [b[1], a[1]]),
        false => (a[1], [a[0], b[1]]),
    };
    let is_pair = rank > 0 && rank == b[0] && a[2..] == b[2..];
    // The experts of a layer are the third dimension of both.
    is_pair && of_model.is_none_or(|shape| shape.dimensions == [made[0], made[1], a[2], a[3]])
}

#[cfg(test)]
mod tests {
    use super::super::random::{RandomModelShape, write, write_adapter};
    use super::*;

    fn model() -> GgufHeader {
        let mut bytes = Vec::new();
        write(&mut bytes, &RandomModelShape::tiny(), 1).unwrap();
        GgufHeader::read(&bytes[..]).unwrap()
    }

    /// An adapter whose bytes were changed where they first are equal to these.
    fn changed(from: &[u8], to: &[u8]) -> GgufHeader {
        let mut bytes = Vec::new();
        write_adapter(&mut bytes, &RandomModelShape::tiny(), 4, 1).unwrap();
        let mut at = bytes.windows(from.len());
        let at = at.position(|bytes| bytes == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to);
        GgufHeader::read(&bytes[..]).unwrap()
    }

    /// A tensor's name, its two dimensions and its type, as in a file.
    fn tensor(name: &str, dimensions: [u64; 2], kind: u32) -> Vec<u8> {
        let mut bytes = name.as_bytes().to_vec();
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend(dimensions.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes
    }

    #[test]
    fn tensors_that_llama_cpp_would_crash_with_are_refused() {
        let check = |adapter: &GgufHeader| check_tensors(adapter, &model());
        assert_eq!(check(&changed(b"GGUF", b"GGUF")), Ok(()));
        let a = "attn_q.weight.lora_a";
        let width = u64::from(RandomModelShape::tiny().width);
        // Q8_0
        let whole = tensor(a, [width, 4], 8);
        for (to, part) in [
            (tensor(a, [width, 4], 26), "not supported"),
            (tensor(a, [width, 2], 8), "incorrect shape"),
            (tensor(a, [width / 2, 4], 8), "incorrect shape"),
            (tensor(a, [width, 0], 8), "incorrect shape"),
            (tensor("attn_q.weight.lora_b", [width, 4], 8), "lacks one"),
            (tensor("attn_q.weight.lora_c", [width, 4], 8), "none of a"),
            (tensor("attn_x.weight.lora_a", [width, 4], 8), "lacks one"),
        ] {
            let why = check(&changed(&whole, &to)).unwrap_err();
            assert!(why.contains(part), "{part}: {why}");
        }
        let none = GgufHeader::default();
        assert_eq!(check(&none), Err("it has no tensors".to_owned()));
    }

    #[test]
    fn scales_are_numbers_of_32_bits() {
        let adapter = changed(b"GGUF", b"GGUF");
        let check = |adapter, scale| check_header(adapter, "llama", scale);
        assert_eq!(check(&adapter, 1.0), Ok(()));
        assert!(check(&adapter, 1e39).unwrap_err().contains("32 bits"));
        // Each is one, and their product is none.
        assert!(check(&adapter, 2e38).is_err());
        let endless = changed(&16.0_f32.to_le_bytes(), &f32::INFINITY.to_le_bytes());
        assert!(check(&endless, 1.0).unwrap_err().contains("32 bits"));
    }
}
