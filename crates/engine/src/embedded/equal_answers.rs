//! Whether equal requests get equal answers whatever else runs (D-21): [`Circumstances::obstacle`] says what is against it.
//!
//! The conditions are those of `docs/models.md` ("Equal answers"). Where one is not met, numbers are rounded differently by what
//! is computed together: products by the number of tokens, attention by the number of tokens and of cells.

use super::kind::architecture;
use super::load::LoadOptions;
use super::memory::{CacheTypes, head_sizes};
use crate::gguf::{GgufHeader, TensorShape};
use crate::llama_options::{CacheType, FlashAttention};

/// Types of weights, by ggml's numbers, whose product with a token has the same bits beside any other tokens: Q4_0, Q4_1, Q5_0,
/// Q5_1 and Q8_0. Floats are not among them: from two tokens on ggml adds their products up in another order.
const INVARIANT: [u32; 5] = [2, 3, 6, 7, 8];
/// Architectures with distances added to the scores of attention (ALiBi), as llama.cpp has it where the file does not say, or
/// with capped scores.
const OTHER_ATTENTION: [&str; 5] = ["baichuan", "bloom", "gemma2", "grok", "refact"];
/// What a head must be a multiple of for our attention, and at most.
const HEAD_STEP: u64 = 16;
const HEAD_MAX: u64 = 256;

/// What a model is loaded from, and into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Circumstances<'a> {
    pub(super) header: &'a GgufHeader,
    pub(super) options: &'a LoadOptions,
    /// Our attention computes on this processor.
    pub(super) own_attention: bool,
    /// There is a GPU: llama.cpp has it compute large batches even of layers that it does not hold.
    pub(super) has_gpu: bool,
    /// The tokens of each sequence are in the KV cache in their order.
    pub(super) orders_cells: bool,
}

impl Circumstances<'_> {
    /// Returns why an answer may depend on what is computed beside it; `None` if it never does.
    pub(super) fn obstacle(&self) -> Option<String> {
        let of_machine = if self.has_gpu {
            Some("a GPU computes")
        } else if !self.own_attention {
            Some("this processor has no attention of our own")
        } else {
            None
        };
        let of_machine = of_machine.map(str::to_owned);
        of_machine
            .or_else(|| self.of_weights())
            .or_else(|| self.of_attention().map(str::to_owned))
    }

    fn of_weights(&self) -> Option<String> {
        if !self.options.lora.is_empty() {
            return Some("there are LoRA adapters".to_owned());
        }
        // The tensors of the other parts are not known here.
        if self.header.number("split.count").unwrap_or(1) > 1 {
            return Some("the model is in several files".to_owned());
        }
        let tensors = &self.header.tensors;
        // Without weights of the output, those of the input are multiplied; otherwise rows of them are copied.
        let is_copied =
            |name: &str| name == "token_embd.weight" && tensors.contains_key("output.weight");
        let varies = |shape: TensorShape| shape.is_matrix() && !INVARIANT.contains(&shape.kind());
        let (name, shape) = tensors
            .iter()
            .find(|(name, shape)| varies(**shape) && !is_copied(name))?;
        Some(format!("{name} is of {}", type_name(shape.kind())))
    }

    fn of_attention(&self) -> Option<&'static str> {
        let llama = &self.options.llama;
        let types = CacheTypes::new(llama);
        if types.keys != CacheType::F16 || types.values != CacheType::F16 {
            return Some("the KV cache is not of f16");
        }
        if llama.flash_attn == Some(FlashAttention::Off) {
            return Some("flash attention is off");
        }
        if !self.orders_cells {
            return Some("slots have no cells of their own for all of their tokens");
        }
        self.has_other_attention()
            .then_some("this architecture has attention of another kind")
    }

    /// Whether a layer has attention that ours does not compute.
    fn has_other_attention(&self) -> bool {
        let name = architecture(self.header);
        let number = |key: &str| self.header.number(&format!("{name}.attention.{key}"));
        let is_ours = |size: u64| (1..=HEAD_MAX).contains(&size) && size.is_multiple_of(HEAD_STEP);
        let Some((key, value)) = head_sizes(self.header) else {
            return true;
        };
        let of_windows = [number("key_length_swa"), number("value_length_swa")];
        let heads = [key, value]
            .into_iter()
            .chain(of_windows.into_iter().flatten());
        let indexes = number("indexer.key_length").is_some();
        let is_set = |key: String| self.header.fraction(&key).is_some_and(|value| value != 0.0);
        !heads.into_iter().all(is_ours)
            || indexes
            || OTHER_ATTENTION.contains(&name)
            || is_set(format!("{name}.attention.max_alibi_bias"))
            || is_set(format!("{name}.attn_logit_softcapping"))
    }
}

/// Returns the name of a type of weights, for people.
fn type_name(kind: u32) -> String {
    let known = match kind {
        0 => "F32",
        1 => "F16",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        20 => "IQ4_NL",
        30 => "BF16",
        39 => "MXFP4",
        other => return format!("ggml's type {other}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::random::{RandomModelShape, write};
    use super::*;
    use crate::llama_options::{LoraAdapter, OverrideValue};

    /// A model whose matrices have this type.
    fn of_type(kind: u32) -> GgufHeader {
        let mut bytes = Vec::new();
        write(&mut bytes, &RandomModelShape::tiny(), 1).unwrap();
        let mut header = GgufHeader::read(&bytes[..]).unwrap();
        for shape in header.tensors.values_mut().filter(|it| it.is_matrix()) {
            *shape = TensorShape::new(shape.dimensions, kind);
        }
        header
    }

    fn obstacle(
        header: &GgufHeader,
        options: &LoadOptions,
        change: fn(&mut Circumstances<'_>),
    ) -> Option<String> {
        let mut circumstances = Circumstances {
            header,
            options,
            own_attention: true,
            has_gpu: false,
            orders_cells: true,
        };
        change(&mut circumstances);
        circumstances.obstacle()
    }

    #[test]
    fn d_21_answers_are_equal_with_weights_whose_products_are() {
        let options = LoadOptions::default();
        for (kind, name) in [
            (2, None),
            (3, None),
            (6, None),
            (7, None),
            (8, None),
            (0, Some("F32")),
            (1, Some("F16")),
            (12, Some("Q4_K")),
            (99, Some("ggml's type 99")),
        ] {
            let found = obstacle(&of_type(kind), &options, |_| {});
            assert_eq!(found.is_some(), name.is_some(), "{kind}: {found:?}");
            let named = name.is_none_or(|name| found.unwrap().contains(name));
            assert!(named, "{kind}");
        }
        // One tensor is enough, unless it is only copied from.
        let mut mixed = of_type(8);
        let embeddings = TensorShape::new([64, 288, 1, 1], 14);
        mixed
            .tensors
            .insert("token_embd.weight".to_owned(), embeddings);
        let found = obstacle(&mixed, &options, |_| {}).unwrap();
        assert_eq!(found, "token_embd.weight is of Q6_K");
        let output = TensorShape::new([64, 288, 1, 1], 8);
        mixed.tensors.insert("output.weight".to_owned(), output);
        assert_eq!(obstacle(&mixed, &options, |_| {}), None);
    }

    #[test]
    fn d_21_answers_may_differ_where_the_machine_or_an_option_computes_otherwise() {
        let header = of_type(8);
        let usual = LoadOptions::default();
        for (change, why) in [
            (
                (|it| it.has_gpu = true) as fn(&mut Circumstances<'_>),
                "GPU",
            ),
            (|it| it.own_attention = false, "processor"),
            (|it| it.orders_cells = false, "cells"),
        ] {
            let found = obstacle(&header, &usual, change).unwrap();
            assert!(found.contains(why), "{found}");
        }
        for (options, why) in [
            (r#"{"cache_type_k": "q8_0"}"#, Some("KV cache")),
            (r#"{"cache_type_v": "bf16"}"#, Some("KV cache")),
            (r#"{"flash_attn": "off"}"#, Some("flash attention")),
            (r#"{"flash_attn": "on", "cache_type_k": "f16"}"#, None),
        ] {
            let options = LoadOptions {
                llama: serde_json::from_str(options).unwrap(),
                ..LoadOptions::default()
            };
            let found = obstacle(&header, &options, |_| {});
            assert_eq!(found.is_some(), why.is_some(), "{found:?}");
            assert!(why.is_none_or(|why| found.unwrap().contains(why)));
        }
        let adapter: LoraAdapter = serde_json::from_str(r#"{"path": "a.gguf"}"#).unwrap();
        let adapted = LoadOptions {
            lora: vec![adapter],
            ..LoadOptions::default()
        };
        let found = obstacle(&header, &adapted, |_| {}).unwrap();
        assert!(found.contains("LoRA"), "{found}");
    }

    #[test]
    fn d_21_answers_may_differ_with_attention_that_is_not_ours() {
        let int = OverrideValue::Int;
        for (key, value, ours) in [
            ("llama.attention.key_length", int(256), true),
            ("llama.attention.key_length", int(272), false),
            ("llama.attention.value_length", int(24), false),
            ("llama.attention.value_length_swa", int(512), false),
            ("llama.attention.head_count", int(0), false),
            ("llama.attention.indexer.key_length", int(64), false),
            (
                "llama.attention.max_alibi_bias",
                OverrideValue::Float(8.0),
                false,
            ),
            (
                "llama.attention.max_alibi_bias",
                OverrideValue::Float(0.0),
                true,
            ),
            (
                "llama.attn_logit_softcapping",
                OverrideValue::Float(50.0),
                false,
            ),
            (
                "general.architecture",
                OverrideValue::Text("gemma2".to_owned()),
                false,
            ),
            ("split.count", int(2), false),
        ] {
            let mut header = of_type(8);
            header.replace(key, value).unwrap();
            let found = obstacle(&header, &LoadOptions::default(), |_| {});
            assert_eq!(found.is_none(), ours, "{key}: {found:?}");
        }
    }
}
