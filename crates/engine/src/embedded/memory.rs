//! Estimates the memory that a model will need, and reads how much is available.

use std::fs;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::llama::{ContextSize, EncoderSize, SCORED_ROWS};
use crate::gguf::GgufHeader;

/// The bytes that a model will need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Estimate {
    /// The tensors, memory-mapped or read.
    pub(super) weights: u64,
    /// The KV cache: [`cell_bytes`] for each cell, and [`state_bytes`] for each slot.
    pub(super) cache: u64,
    /// The buffers of a decode call: activations, masks, logits.
    pub(super) pass: u64,
}

/// Returns the bytes of one KV cell: keys and values of 2 bytes for each layer and head.
pub(super) fn cell_bytes(header: &GgufHeader) -> u64 {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let of = |key: &str| header.number(&format!("{architecture}.{key}"));
    let width = of("embedding_length").unwrap_or(0);
    // Without heads there is no KV cache.
    let heads = of("attention.head_count").unwrap_or(0);
    if heads == 0 {
        return 0;
    }
    let key_value_heads = of("attention.head_count_kv").unwrap_or(heads);
    let key = of("attention.key_length").unwrap_or(width / heads);
    let value = of("attention.value_length").unwrap_or(width / heads);
    let layers = of("block_count").unwrap_or(0);
    // Saturating everywhere: a header may contain any numbers, and a sum that wraps around would look small.
    product(&[layers, key_value_heads, key.saturating_add(value), 2])
}

/// Returns the bytes of the recurrent state of a slot: 4 for each number of a convolution's window and of the state, in
/// each layer. For a hybrid model every layer counts as recurrent, so this is an upper bound.
fn state_bytes(header: &GgufHeader) -> u64 {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let of = |key: &str| header.number(&format!("{architecture}.{key}"));
    let or_zero = |key: &str| of(key).unwrap_or(0);
    let width = or_zero("embedding_length");
    // Three kinds of recurrent layers, told apart by their keys: RWKV, short convolutions (LFM2), and state-space
    // models (Mamba).
    let numbers = if let Some(head) = of("wkv.head_size") {
        let shifts = of("token_shift_count").unwrap_or(2);
        product(&[width, shifts.saturating_add(head)])
    } else if let Some(past) = of("shortconv.l_cache") {
        product(&[width, past.saturating_sub(1)])
    } else {
        let (inner, state) = (or_zero("ssm.inner_size"), or_zero("ssm.state_size"));
        let groups = product(&[2, or_zero("ssm.group_count"), state]);
        let past = or_zero("ssm.conv_kernel").saturating_sub(1);
        product(&[past, inner.saturating_add(groups)]).saturating_add(product(&[state, inner]))
    };
    product(&[or_zero("block_count"), numbers, 4])
}

fn product(factors: &[u64]) -> u64 {
    factors
        .iter()
        .fold(1, |all: u64, &one| all.saturating_mul(one))
}

impl Estimate {
    /// Estimates from a header. Missing keys count as nothing, so the result tends to be too small.
    pub(super) fn new(header: &GgufHeader, size: ContextSize) -> Self {
        let architecture = header.text("general.architecture").unwrap_or_default();
        let of = |key: &str| header.number(&format!("{architecture}.{key}"));
        let batch = u64::from(size.batch_tokens);
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
        let masks = product(&[batch, u64::from(size.reach()), 4]);
        let rows = u64::from(size.slots.saturating_add(SCORED_ROWS));
        let logits = product(&[rows, vocabulary, 8]);
        // The header describes the first part of a split model; the others are assumed to be as large.
        let parts = header.number("split.count").unwrap_or(1).max(1);
        Self {
            weights: header.tensor_bytes.saturating_mul(parts),
            cache: cell_bytes(header)
                .saturating_mul(u64::from(size.cells))
                .saturating_add(state_bytes(header).saturating_mul(u64::from(size.slots))),
            pass: [activations, masks, logits]
                .into_iter()
                // 32 MiB for what has no formula here.
                .fold(32 << 20, u64::saturating_add),
        }
    }

    /// Estimates for a model that embeds. An encoder has no KV cache. llama.cpp has room for the logits of every token of a
    /// batch, which nothing reads; a decoder computes them too.
    pub(super) fn of_encoder(header: &GgufHeader, size: EncoderSize, is_encoder: bool) -> Self {
        let mut estimate = Self::new(
            header,
            ContextSize {
                cells: size.tokens,
                per_slot: false,
                batch_tokens: size.tokens,
                slots: size.texts,
                threads: size.threads,
                poll: size.poll,
            },
        );
        let vocabulary = header.length("tokenizer.ggml.tokens").unwrap_or(0);
        let copies = if is_encoder { 1 } else { 2 };
        let logits = product(&[u64::from(size.tokens), vocabulary, 4, copies]);
        estimate.pass = estimate.pass.saturating_add(logits);
        if is_encoder {
            estimate.cache = 0;
        }
        estimate
    }

    /// Returns the sum.
    pub(super) fn total(&self) -> u64 {
        self.weights
            .saturating_add(self.cache)
            .saturating_add(self.pass)
    }
}

/// Returns the bytes that are available without swapping: the system's own figure, or that of this process's control
/// groups if it is less. `None` if neither can be read.
pub(super) fn available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| of_meminfo(&text));
    // In a container the system's figure is that of the whole machine, so the smaller of the two counts.
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = of_groups(Path::new("/sys/fs/cgroup"), own_group(&groups));
    match (meminfo, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (system, group) => system.or(group),
    }
}

/// The memory that saved slots of a loaded model may take; what others may take is subtracted from what is available. Given
/// back when dropped.
#[derive(Debug)]
pub(super) struct SavedSlotsLimit(u64);

/// The sum of all [`SavedSlotsLimit`].
static PROMISED: Mutex<u64> = Mutex::new(0);

impl SavedSlotsLimit {
    /// Takes an eighth of what is available beside these weights, which may be in the page cache alone and count as available
    /// then. Saved slots are a cache, and leave most of the memory to others.
    pub(super) fn take(limit: Option<u64>, weights: u64) -> Self {
        const MAX: u64 = 8 << 30;
        let mut promised = PROMISED.lock().unwrap_or_else(PoisonError::into_inner);
        let available = available().unwrap_or(MAX);
        let left = available.saturating_sub(weights).saturating_sub(*promised);
        let bytes = (limit.unwrap_or(u64::MAX).min(left) / 8).min(MAX);
        *promised += bytes;
        Self(bytes)
    }

    pub(super) fn bytes(&self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl Drop for SavedSlotsLimit {
    fn drop(&mut self) {
        *PROMISED.lock().unwrap_or_else(PoisonError::into_inner) -= self.0;
    }
}

/// Bytes reserved for models that are being loaded: they will be used, but the system does not count them yet.
static RESERVED: Mutex<u64> = Mutex::new(0);
static RELEASED: Condvar = Condvar::new();
/// How often a caller that waits for memory is asked whether to continue waiting.
const ASK: Duration = Duration::from_millis(100);

/// Memory that is reserved for a model while it is loaded; released when dropped.
#[derive(Debug)]
pub(super) struct MemoryReservation(u64);

/// Why memory could not be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutOfMemory {
    /// Only this many bytes are available, and no other model is being loaded.
    Of(u64),
    /// The wait was stopped.
    Stopped,
}

impl MemoryReservation {
    /// Reserves `bytes` if they are `available`, as far as that is known. While other reservations leave too little,
    /// waits for them and checks again, until `goes_on` returns false.
    pub(super) fn take(
        bytes: u64,
        available: impl Fn() -> Option<u64>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Self, OutOfMemory> {
        // Held while `available` is read, so that two models which load at once cannot both count on the same bytes.
        let mut reserved = lock();
        loop {
            let available = available();
            tracing::debug!(bytes, available, reserved = *reserved, "memory");
            let fits = available.is_none_or(|all| reserved.saturating_add(bytes) <= all);
            if fits {
                *reserved = reserved.saturating_add(bytes);
                return Ok(Self(bytes));
            }
            // Nothing else is being loaded, so waiting would free nothing.
            if *reserved == 0 {
                return Err(OutOfMemory::Of(available.unwrap_or(0)));
            }
            // With a limit, so that a caller who gives up is noticed although no reservation ends.
            let waited = RELEASED.wait_timeout(reserved, ASK);
            // The lock is released before `goes_on`, which is the caller's code and may take time.
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if !goes_on() {
                return Err(OutOfMemory::Stopped);
            }
            reserved = lock();
        }
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        let mut reserved = lock();
        *reserved = reserved.saturating_sub(self.0);
        // All of them: each waits for a different number of bytes.
        RELEASED.notify_all();
    }
}

fn lock() -> MutexGuard<'static, u64> {
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the path of this process's control group, from `/proc/self/cgroup`.
fn own_group(groups: &str) -> &str {
    let mut lines = groups.lines();
    // Version 2 of control groups alone; with version 1 the system's figure counts.
    let path = lines.find_map(|line| line.strip_prefix("0::"));
    path.unwrap_or("/").trim_matches('/')
}

/// Returns the least that a control group or one of its parents leaves.
fn of_groups(root: &Path, path: &str) -> Option<u64> {
    let own = root.join(path);
    let around = own
        .ancestors()
        .take_while(|folder| folder.starts_with(root));
    // Each enclosing group limits the sum of the groups within it.
    around.filter_map(of_group).min()
}

fn of_meminfo(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

fn of_group(folder: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    // "max" is not a number: no limit.
    let limit = number("memory.max")?;
    // The kernel drops inactive file pages as soon as memory is needed; loading a model leaves its whole file in them.
    let stat = read("memory.stat").unwrap_or_default();
    let idle = stat
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "));
    let idle = idle
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0);
    let used = number("memory.current")?.saturating_sub(idle);
    Some(limit.saturating_sub(used))
}

/// Formats a number of bytes for people.
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
    fn parses_meminfo_and_cgroup_paths() {
        let text = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(of_meminfo(text), Some(2 << 20));
        assert_eq!(of_meminfo("MemTotal: 1 kB"), None);
        assert_eq!(
            own_group("0::/system.slice/x.service\n"),
            "system.slice/x.service"
        );
        assert_eq!((own_group("1:cpu:/a\n"), own_group("0::/\n")), ("", ""));
        assert_eq!(readable(3 << 20), "3 MiB");
        assert_eq!(readable(3 << 29), "1.5 GiB");
    }

    /// A file that was read once is in the page cache, and is not in the way of anything.
    #[test]
    fn reclaimable_page_cache_counts_as_available_in_a_control_group() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("outer/inner");
        fs::create_dir_all(&inner).unwrap();
        let left = || of_groups(root.path(), "outer/inner");
        assert_eq!(left(), None);
        let write = |folder: &Path, name: &str, text: &str| {
            fs::write(folder.join(name), text).unwrap();
        };
        write(&inner, "memory.max", "max\n");
        write(&inner, "memory.current", "900\n");
        assert_eq!(left(), None, "no limit");
        write(&inner, "memory.max", "1000\n");
        assert_eq!(left(), Some(100));
        write(
            &inner,
            "memory.stat",
            "anon 100\ninactive_file 700\nactive_file 100\n",
        );
        assert_eq!(left(), Some(800));
        // The group around it has less.
        let outer = inner.parent().unwrap();
        write(outer, "memory.max", "1200\n");
        write(outer, "memory.current", "1150\n");
        assert_eq!(left(), Some(50));
    }

    /// Two models that fit one by one: the second waits for the first, and sees what that one has taken.
    #[test]
    fn concurrent_loads_do_not_reserve_the_same_memory() {
        let left = Mutex::new(1_000_u64 << 40);
        let available = || Some(*left.lock().unwrap());
        let half = 600 << 40;
        let first = MemoryReservation::take(half, available, &mut || true).unwrap();
        let stopped = MemoryReservation::take(half, available, &mut || false);
        assert_eq!(stopped.unwrap_err(), OutOfMemory::Stopped);
        // The first one is loaded while the second waits.
        let mut first = Some(first);
        let second = MemoryReservation::take(half, available, &mut || {
            *left.lock().unwrap() = 400 << 40;
            first.take();
            true
        });
        assert_eq!(second.unwrap_err(), OutOfMemory::Of(400 << 40));
        // What was small fits beside it.
        assert!(MemoryReservation::take(1, available, &mut || true).is_ok());
    }

    #[test]
    fn recurrent_layers_need_state_per_slot_and_no_kv_cells() {
        use super::super::random::{RandomModelShape, write};
        let of = |shape: RandomModelShape| {
            let mut bytes = Vec::new();
            write(&mut bytes, &shape, 1).unwrap();
            let header = GgufHeader::read(&bytes[..]).unwrap();
            (cell_bytes(&header), state_bytes(&header))
        };
        // Two layers, two heads of 16 numbers for keys and for values, 2 bytes each.
        assert_eq!(of(RandomModelShape::tiny()), (2 * 2 * 32 * 2, 0));
        // A convolution that sees 3 tokens back of a width of 64.
        assert_eq!(of(RandomModelShape::tiny_hybrid()), (256, 2 * 3 * 64 * 4));
        let without = RandomModelShape {
            numbers: vec![("mamba.attention.head_count".to_owned(), 0)],
            ..RandomModelShape::tiny_recurrent()
        };
        // 3 tokens back of an inner width of 128, and 16 numbers of state for each.
        assert_eq!(of(without), (0, 2 * (3 * 128 + 16 * 128) * 4));
    }
}
