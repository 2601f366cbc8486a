//! Whether a model embeds or generates, by its header.

use crate::embedding::Pooling;
use crate::gguf::GgufHeader;

/// Architectures that generate no text. Those of llama.cpp that are for other things than texts are not among them.
const ENCODERS: [&str; 11] = [
    "bert",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "llama-embed",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "t5encoder",
];

/// Architectures that do not rotate positions, so that scaling them extends nothing: they look them up in a table, or know
/// distances alone.
const NOT_ROTARY: [&str; 8] = [
    "bert",
    "bloom",
    "gpt2",
    "jina-bert-v2",
    "mpt",
    "starcoder",
    "t5",
    "t5encoder",
];

/// Returns the architecture; empty if there is none.
pub(super) fn architecture(header: &GgufHeader) -> &str {
    header.text("general.architecture").unwrap_or_default()
}

/// Returns whether it is a model that embeds: by its architecture, or because it says how to pool.
pub(super) fn is_embedding(header: &GgufHeader) -> bool {
    is_encoder(header) || pooling(header).is_some()
}

/// Returns whether it cannot generate.
pub(super) fn is_encoder(header: &GgufHeader) -> bool {
    ENCODERS.contains(&architecture(header))
}

/// Returns whether positions are rotated (RoPE), and can be scaled.
pub(super) fn rotates_positions(header: &GgufHeader) -> bool {
    !NOT_ROTARY.contains(&architecture(header))
}

/// Returns the pooling that the file names.
pub(super) fn pooling(header: &GgufHeader) -> Option<Pooling> {
    let key = format!("{}.pooling_type", architecture(header));
    header.number(&key).and_then(Pooling::from_number)
}

/// Returns the pooling of a file that names none: the mean, or the last token where tokens attend only to those before them.
pub(super) fn default_pooling(header: &GgufHeader) -> Pooling {
    let key = format!("{}.attention.causal", architecture(header));
    let causal = !is_encoder(header) && header.number(&key) != Some(0);
    if causal { Pooling::Last } else { Pooling::Mean }
}
