//! The `tokenizer.json` of a loaded model (LM-951); tests compare it with llama.cpp's tokenizer.

use bytes::Bytes;

use super::llama;
use crate::byte_pairs::{self, NoTokenizerFile, PairTokens};
use crate::gguf::GgufHeader;

/// Returns the bytes of the file.
pub(super) fn file(
    model: &llama::LlamaModel,
    header: &GgufHeader,
) -> Result<Bytes, NoTokenizerFile> {
    byte_pairs::file(header, || {
        let (adds_bos, bos) = model.bos();
        let ids = 0..model.size();
        PairTokens {
            texts: ids.clone().map(|token| model.text(token)).collect(),
            added: ids.filter_map(|token| model.added_token(token)).collect(),
            bos: bos.filter(|_| adds_bos),
        }
    })
}

#[cfg(test)]
#[cfg(feature = "tokenizer")]
mod tests;
