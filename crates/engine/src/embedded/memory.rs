//! How much memory a model will take, and how much there is.
//!
//! Owns: the estimate before loading, so that a model too big is refused with numbers instead of the kernel killing the
//! process in the middle. Refuses to know: llama.cpp; the estimate is made of the file's header alone.

use std::fs;
use std::path::Path;

use super::gguf::Header;
use super::llama::SCORED_ROWS;

/// Bytes that a model is going to need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Estimate {
    /// The tensors, mapped or read.
    pub(super) weights: u64,
    /// The cache: [`cell_bytes`] for each cell.
    pub(super) cache: u64,
    /// What one pass needs: activations, masks, logits.
    pub(super) pass: u64,
}

/// The sizes that the caller chose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Tokens of all slots together.
    pub(super) cells: u32,
    /// Whether each slot has an equal part of them to itself.
    pub(super) apart: bool,
    pub(super) batch_tokens: u32,
    pub(super) slots: u32,
}

impl Sizes {
    /// The cells that a token can see.
    fn reach(self) -> u32 {
        if self.apart {
            self.cells / self.slots.max(1)
        } else {
            self.cells
        }
    }
}

/// Bytes of one cell: keys and values of 2 bytes for each layer and head.
pub(super) fn cell_bytes(header: &Header) -> u64 {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let of = |key: &str| header.number(&format!("{architecture}.{key}"));
    let width = of("embedding_length").unwrap_or(0);
    let heads = of("attention.head_count").unwrap_or(1).max(1);
    let key_value_heads = of("attention.head_count_kv").unwrap_or(heads);
    let key = of("attention.key_length").unwrap_or(width / heads);
    let value = of("attention.value_length").unwrap_or(width / heads);
    let layers = of("block_count").unwrap_or(0);
    product(&[layers, key_value_heads, key.saturating_add(value), 2])
}

fn product(factors: &[u64]) -> u64 {
    factors
        .iter()
        .fold(1, |all: u64, &one| all.saturating_mul(one))
}

impl Estimate {
    /// Reckons from a header. Keys that are missing count as nothing, so this errs towards too little.
    pub(super) fn new(header: &Header, sizes: Sizes) -> Self {
        let architecture = header.text("general.architecture").unwrap_or_default();
        let of = |key: &str| header.number(&format!("{architecture}.{key}"));
        let batch = u64::from(sizes.batch_tokens);
        let width = of("embedding_length").unwrap_or(0);
        let inner = of("feed_forward_length").unwrap_or(0);
        let vocabulary = header.length("tokenizer.ggml.tokens").unwrap_or(0);
        let activations = product(&[
            batch,
            width
                .saturating_mul(8)
                .saturating_add(inner.saturating_mul(3)),
            4,
        ]);
        let masks = product(&[batch, u64::from(sizes.reach()), 4]);
        let rows = u64::from(sizes.slots.saturating_add(SCORED_ROWS));
        let logits = product(&[rows, vocabulary, 8]);
        let parts = header.number("split.count").unwrap_or(1).max(1);
        Self {
            weights: header.tensor_bytes.saturating_mul(parts),
            cache: cell_bytes(header).saturating_mul(u64::from(sizes.cells)),
            pass: [activations, masks, logits]
                .into_iter()
                .fold(32 << 20, u64::saturating_add),
        }
    }

    /// All of it.
    pub(super) fn total(&self) -> u64 {
        self.weights
            .saturating_add(self.cache)
            .saturating_add(self.pass)
    }
}

/// Bytes that can be had without swapping: the system's own figure, and the control group's if that is less.
/// `None` where neither can be read.
pub(super) fn available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| of_meminfo(&text));
    let group = of_group(Path::new("/sys/fs/cgroup"));
    match (meminfo, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (system, group) => system.or(group),
    }
}

fn of_meminfo(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

fn of_group(folder: &Path) -> Option<u64> {
    let number = |name: &str| {
        fs::read_to_string(folder.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    // "max" is not a number: no limit.
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

/// A number of bytes for people.
pub(super) fn readable(bytes: u64) -> String {
    const MEBI: u64 = 1 << 20;
    match bytes {
        bytes if bytes >= 1024 * MEBI => format!("{:.1} GiB", bytes as f64 / (1024 * MEBI) as f64),
        bytes => format!("{} MiB", bytes.div_ceil(MEBI)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_system_says() {
        let text = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(of_meminfo(text), Some(2 << 20));
        assert_eq!(of_meminfo("MemTotal: 1 kB"), None);
        assert_eq!(readable(3 << 20), "3 MiB");
        assert_eq!(readable(3 << 29), "1.5 GiB");
    }
}
