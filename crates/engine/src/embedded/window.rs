//! [`SlidingWindow`]: what the header of a model says about its sliding-window layers.

use super::kind::architecture;
use super::llama::ContextSize;
use crate::gguf::GgufHeader;

/// The sliding-window layers of a model whose other layers attend to all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlidingWindow {
    /// Tokens to which such a layer attends.
    pub(super) tokens: u32,
    /// Layers, and how many of them have the window; rounded down.
    layers: u64,
    windowed: u64,
}

/// Architectures with such layers, and the number of layers of which the last one attends to all, as llama.cpp has it where
/// the file does not say. Models of other architectures are not known to have windows.
const PERIODS: [(&str, u64); 6] = [
    ("cohere2", 4),
    ("gemma2", 2),
    ("gemma3", 6),
    ("gemma3n", 5),
    ("gpt-oss", 2),
    ("olmo2", 4),
];

impl SlidingWindow {
    /// Returns the window of a model; `None` if it has none, or its layers are not known.
    pub(super) fn of(header: &GgufHeader) -> Option<Self> {
        let name = architecture(header);
        let of = |key: &str| header.number(&format!("{name}.{key}"));
        let (_, period) = PERIODS.iter().find(|(known, _)| *known == name)?;
        let pattern = format!("{name}.attention.sliding_window_pattern");
        // A list names the layers one by one.
        if header.array(&pattern).is_some() {
            return None;
        }
        let period = header.number(&pattern).unwrap_or(*period);
        let tokens = of("attention.sliding_window")?;
        let tokens = u32::try_from(tokens).ok().filter(|&tokens| tokens > 0)?;
        let layers = of("block_count").filter(|&layers| layers > 0)?;
        Some(Self {
            tokens,
            layers,
            // 0 is every layer.
            windowed: layers - layers.checked_div(period).unwrap_or(0),
        })
    }

    /// Returns the part of a number of bytes that these layers have, if all have as many.
    pub(super) fn share_of(self, bytes: u64) -> u64 {
        let part = u128::from(bytes) * u128::from(self.windowed) / u128::from(self.layers);
        u64::try_from(part).unwrap_or(bytes)
    }

    /// Returns whether cells for the windows alone are possible, and at most three quarters of as many as the other layers have.
    /// Fewer slots can then be truncated, which is not worth less.
    pub(super) fn is_small(self, size: ContextSize) -> bool {
        if size.computes_in_parts() {
            return false;
        }
        let few = ContextSize {
            swa_full: false,
            ..size
        };
        u64::from(few.window_cells(self.tokens)) * 4 <= u64::from(size.cells) * 3
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{CacheTypes, cache_bytes, cell_bytes};
    use super::super::random::{RandomModelShape, write};
    use super::*;
    use crate::embedded::llama::ThreadLimits;
    use crate::llama_options::LlamaOptions;

    fn header(shape: &RandomModelShape) -> GgufHeader {
        let mut bytes = Vec::new();
        write(&mut bytes, shape, 1).unwrap();
        GgufHeader::read(&bytes[..]).unwrap()
    }

    fn size(cells: u32, slots: u32, per_slot: bool, swa_full: bool) -> ContextSize {
        let threads = ThreadLimits {
            decode: None,
            prefill: None,
        };
        ContextSize {
            cells,
            per_slot,
            batch_tokens: 512,
            ubatch_tokens: 512,
            slots,
            threads,
            poll: 0,
            swa_full,
        }
    }

    #[test]
    fn windowed_layers_need_the_cells_of_their_windows() {
        let of = |size: ContextSize| size.window_cells(1024);
        assert_eq!(of(size(32_768, 8, false, true)), 32_768);
        assert_eq!(of(size(32_768, 8, false, false)), 8 * 1024 + 512);
        assert_eq!(of(size(32_768, 1, true, false)), 1536);
        assert_eq!(of(size(4096, 8, false, false)), 4096, "never more than all");
        assert_eq!(of(size(1024, 1, true, false)), 1024);
        assert_eq!(size(8192, 1, false, false).window_cells(100), 768, "padded");
    }

    #[test]
    fn the_kv_cache_of_a_windowed_model_is_counted_by_its_windows() {
        let header = header(&RandomModelShape {
            layers: 4,
            ..RandomModelShape::tiny_windowed()
        });
        let window = SlidingWindow::of(&header).unwrap();
        assert_eq!((window.tokens, window.windowed), (8, 2));
        let types = CacheTypes::new(&LlamaOptions::default());
        let cell = cell_bytes(&header, types);
        let bytes = |swa_full| cache_bytes(&header, size(8192, 4, false, swa_full), types);
        assert_eq!(bytes(true), cell * 8192);
        // 4 windows of 8 tokens and 512 at a time are 768 cells.
        assert_eq!(bytes(false), cell / 2 * 8192 + cell / 2 * 768);
    }

    #[test]
    fn other_models_have_no_window() {
        for shape in [
            RandomModelShape::tiny(),
            RandomModelShape::tiny_recurrent(),
            RandomModelShape::tiny_hybrid(),
        ] {
            assert_eq!(SlidingWindow::of(&header(&shape)), None);
        }
    }
}
