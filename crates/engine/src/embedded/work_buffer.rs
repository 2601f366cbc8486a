//! The buffer that the threads of a decode call share: what its largest operation asks for.
//!
//! Ours ask for more than ggml's, whose buffers are small beside what is estimated without a formula. A test compares the numbers here
//! with what they ask for.

use super::llama::ContextSize;

/// Values of a weight row that share a scale, and tokens of a tile (`matmul_kernel.h`).
const BLOCK_VALUES: u64 = 32;
const TILE_TOKENS: u64 = 8;
/// A block of the tokens of a tile: their values, their scales, and what products of signed weights begin with.
const TOKEN_BLOCK_BYTES: u64 = 768;
/// A block of the rows of a tile, and one of a token as ggml quantizes it.
const ROW_BLOCK_BYTES: u64 = 160 + 36;
/// What a thread has for attention, beside two lists of cells (`attention_x86.cpp`).
const ATTENTION_BYTES: u64 = 101 << 10;
/// The sizes of parts are rounded up to this, and so is the beginning of the buffer.
const ALIGNMENT: u64 = 64;

/// Returns the bytes for the largest operations in a context of this size, of a model whose widest weight row has so many values,
/// whatever their type.
pub(super) fn bytes(widest: u64, size: ContextSize) -> u64 {
    let threads = u64::from(size.threads.most());
    let product = product_bytes(widest, u64::from(size.ubatch_tokens), threads);
    product.max(attention_bytes(u64::from(size.reach()), threads))
}

/// Those for a product of weight rows of so many values with so many tokens.
pub(super) fn product_bytes(values: u64, tokens: u64, threads: u64) -> u64 {
    let blocks = values.div_ceil(BLOCK_VALUES);
    let tiles = tokens.div_ceil(TILE_TOKENS);
    let shared = tiles.saturating_mul(blocks.saturating_mul(TOKEN_BLOCK_BYTES));
    let each = aligned(blocks.saturating_mul(ROW_BLOCK_BYTES));
    shared.saturating_add(all_threads(threads, each))
}

/// Those for attention over so many cells.
pub(super) fn attention_bytes(cells: u64, threads: u64) -> u64 {
    let list = aligned(cells.saturating_mul(4));
    all_threads(
        threads,
        ATTENTION_BYTES.saturating_add(list.saturating_mul(2)),
    )
}

fn all_threads(threads: u64, each: u64) -> u64 {
    threads.saturating_mul(each).saturating_add(ALIGNMENT)
}

/// Saturating, as everywhere: a header may contain any numbers.
fn aligned(bytes: u64) -> u64 {
    bytes.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT)
}
