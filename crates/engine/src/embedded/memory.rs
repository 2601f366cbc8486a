//! Estimates the memory that a model will need, and reads how much is available.

use std::fs;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::llama::untouched::untouched_bytes;
use super::llama::{ContextSize, EncoderSize, SCORED_ROWS};
use super::window::SlidingWindow;
use super::work_buffer;
use crate::gguf::GgufHeader;
use crate::llama_options::{CacheType, LlamaOptions};

/// The bytes that a model will need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Estimate {
    /// The tensors, memory-mapped or read.
    pub(super) weights: u64,
    /// The KV cache: [`cell_bytes`] for each cell, and [`state_bytes`] for each slot.
    pub(super) cache: u64,
    /// The buffers of a decode call: activations, masks, logits.
    pub(super) pass: u64,
    /// The buffer in the memory of the machine through which a fork copies a slot.
    pub(super) copies: u64,
    /// The buffer that the threads of a decode call share, in the memory of the machine too.
    pub(super) work: u64,
}

/// The types of keys and values in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheTypes {
    pub(super) keys: CacheType,
    pub(super) values: CacheType,
}

impl CacheTypes {
    pub(super) fn new(options: &LlamaOptions) -> Self {
        Self {
            keys: options.cache_type_k.unwrap_or(CacheType::F16),
            values: options.cache_type_v.unwrap_or(CacheType::F16),
        }
    }
}

/// Numbers of keys and of values that each head has; `None` without a KV cache.
pub(super) fn head_sizes(header: &GgufHeader) -> Option<(u64, u64)> {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let of = |key: &str| header.number(&format!("{architecture}.{key}"));
    let width = of("embedding_length").unwrap_or(0);
    let heads = of("attention.head_count").filter(|&heads| heads > 0)?;
    let key = of("attention.key_length").unwrap_or(width / heads);
    let value = of("attention.value_length").unwrap_or(width / heads);
    Some((key, value))
}

/// Returns the bytes of one KV cell: keys and values for each layer and head.
pub(super) fn cell_bytes(header: &GgufHeader, types: CacheTypes) -> u64 {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let of = |key: &str| header.number(&format!("{architecture}.{key}"));
    // Without heads there is no KV cache.
    let Some((key, value)) = head_sizes(header) else {
        return 0;
    };
    let heads = of("attention.head_count").unwrap_or(0);
    let key_value_heads = of("attention.head_count_kv").unwrap_or(heads);
    let layers = of("block_count").unwrap_or(0);
    let bytes = |kind: CacheType, numbers: u64| {
        let (block, bytes) = kind.block();
        product(&[numbers.div_ceil(block), bytes])
    };
    let each = bytes(types.keys, key).saturating_add(bytes(types.values, value));
    // Saturating everywhere: a header may contain any numbers, and a sum that wraps around would look small.
    product(&[layers, key_value_heads, each])
}

/// Returns the bytes of the KV cache: sliding-window layers may have fewer cells than the others.
pub(super) fn cache_bytes(header: &GgufHeader, size: ContextSize, types: CacheTypes) -> u64 {
    let all = cell_bytes(header, types);
    let (windowed, window_cells) = match SlidingWindow::of(header) {
        Some(window) => (window.share_of(all), size.window_cells(window.tokens)),
        None => (0, size.cells),
    };
    let others = (all - windowed).saturating_mul(u64::from(size.cells));
    others.saturating_add(windowed.saturating_mul(u64::from(window_cells)))
}

/// Returns the bytes of the recurrent state of a slot: 4 for each number of a convolution's window and of the state, in
/// each layer. For a hybrid model every layer counts as recurrent, so this is an upper bound.
pub(super) fn state_bytes(header: &GgufHeader) -> u64 {
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

/// Returns the bytes that a fork copies, through a buffer that is freed then: all of a slot that has cells of its own, or its
/// window. Slots that share their cells share what was forked.
fn fork_bytes(header: &GgufHeader, size: ContextSize, types: CacheTypes) -> u64 {
    // A fork needs another slot.
    if size.slots <= 1 {
        return 0;
    }
    match SlidingWindow::of(header) {
        // llama.cpp copies the slots of a model with windows within the cache.
        None if size.per_slot => cache_bytes(header, size, types).div_ceil(u64::from(size.slots)),
        Some(window) if !size.per_slot && !size.swa_full => product(&[
            window.share_of(cell_bytes(header, types)),
            u64::from(window.tokens),
        ]),
        _ => 0,
    }
}

/// Returns the bytes of the scores of a decode call: without flash attention, those of every head for every cell.
pub(super) fn score_bytes(header: &GgufHeader, size: ContextSize) -> u64 {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let heads = header.number(&format!("{architecture}.attention.head_count"));
    let (tokens, reach) = (u64::from(size.ubatch_tokens), u64::from(size.reach()));
    product(&[tokens, reach, heads.unwrap_or(0), 4])
}

/// Returns how many values the widest weight row has of those that are multiplied with all tokens.
fn widest_row(header: &GgufHeader) -> u64 {
    let architecture = header.text("general.architecture").unwrap_or_default();
    let of = |key: &str| header.number(&format!("{architecture}.{key}")).unwrap_or(0);
    let (_, value) = head_sizes(header).unwrap_or_default();
    let attended = product(&[of("attention.head_count"), value]);
    let inner = of("feed_forward_length").max(of("ssm.inner_size"));
    of("embedding_length").max(inner).max(attended)
}

fn product(factors: &[u64]) -> u64 {
    factors
        .iter()
        .fold(1, |all: u64, &one| all.saturating_mul(one))
}

impl Estimate {
    /// Estimates from a header. Missing keys count as nothing, so the result tends to be too small.
    pub(super) fn new(header: &GgufHeader, size: ContextSize, types: CacheTypes) -> Self {
        let architecture = header.text("general.architecture").unwrap_or_default();
        let of = |key: &str| header.number(&format!("{architecture}.{key}"));
        let batch = u64::from(size.ubatch_tokens);
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
        Self {
            weights: header.tensor_bytes,
            cache: cache_bytes(header, size, types)
                .saturating_add(state_bytes(header).saturating_mul(u64::from(size.slots))),
            pass: [activations, masks, logits]
                .into_iter()
                // 32 MiB for what has no formula here.
                .fold(32 << 20, u64::saturating_add),
            copies: fork_bytes(header, size, types),
            work: work_buffer::bytes(widest_row(header), size),
        }
    }

    /// Adds what another model needs, which is loaded with this one.
    pub(super) fn with(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            cache: self.cache.saturating_add(other.cache),
            pass: self.pass.saturating_add(other.pass),
            copies: self.copies.saturating_add(other.copies),
            work: self.work.saturating_add(other.work),
        }
    }

    /// Returns how many of a model's layers fit into so many bytes of GPU memory, with their part of the KV cache and the
    /// buffers of a decode call. The output counts as one layer.
    pub(super) fn layers_that_fit(&self, layers: u32, free: u64) -> u32 {
        // A twentieth stays free, for what the driver and the kernels allocate.
        let room = (free - free / 20).saturating_sub(self.pass);
        let all = u64::from(layers) + 1;
        let each = self.weights.saturating_add(self.cache).div_ceil(all).max(1);
        u32::try_from((room / each).min(all)).unwrap_or(layers)
    }

    /// Returns what stays in the memory of the machine if a GPU has so many of the model's layers.
    #[must_use]
    pub(super) fn without_layers(self, offloaded: u32, layers: u32) -> Self {
        let all = u64::from(layers) + 1;
        let rest = all.saturating_sub(u64::from(offloaded));
        // Rounded up, and multiplied in 128 bits, because a header may claim any size.
        let part = |bytes: u64| {
            let part = (u128::from(bytes) * u128::from(rest)).div_ceil(u128::from(all));
            u64::try_from(part).unwrap_or(bytes)
        };
        Self {
            weights: part(self.weights),
            cache: part(self.cache),
            ..self
        }
    }

    /// Estimates for a model that embeds. An encoder has no KV cache. llama.cpp has room for the logits of every token of a
    /// batch, which nothing reads; a decoder computes them too.
    pub(super) fn of_encoder(
        header: &GgufHeader,
        size: EncoderSize,
        is_encoder: bool,
        cache_types: CacheTypes,
    ) -> Self {
        let mut estimate = Self::new(
            header,
            ContextSize {
                cells: size.tokens,
                per_slot: false,
                batch_tokens: size.tokens,
                ubatch_tokens: size.tokens,
                slots: size.texts,
                threads: size.threads,
                poll: size.poll,
                swa_full: true,
            },
            cache_types,
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
            .saturating_add(self.copies)
            .saturating_add(self.work)
    }
}

/// Returns the bytes that are available without swapping: the system's own figure, or that of this process's control
/// groups if it is less, without what this process has mapped, and what its KV caches will grow by. `None` if neither can be read.
#[must_use]
pub fn available() -> Option<u64> {
    available_beside(0)
}

/// The same, with at least this much mapped.
fn available_beside(mapped: u64) -> Option<u64> {
    let root = Path::new("/");
    // Both figures count the page cache, and with it the weights of loaded models: they could be read again, for every token.
    let mapped = mapped_at(root).max(mapped);
    // And cells that a loaded model has not used yet.
    let promised = mapped.saturating_add(untouched_bytes());
    Some(available_at(root)?.saturating_sub(promised))
}

/// Returns the bytes of files that this process has mapped and that are in memory, each page once, without locked ones, which
/// are available to nobody.
fn mapped_at(root: &Path) -> u64 {
    let text = fs::read_to_string(root.join("proc/self/smaps_rollup")).unwrap_or_default();
    let of = |name| kibibytes(&text, name).unwrap_or(0);
    of("Pss_File:").saturating_sub(of("Locked:"))
}

/// What is available with the files that are mapped, with `/proc` and `/sys` below this folder.
fn available_at(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let meminfo = of_meminfo(&read("proc/meminfo"));
    let groups = read("proc/self/cgroup");
    let folder = root.join("sys/fs/cgroup");
    // A machine may have both versions, with the memory in one of them.
    let unified = V2.path(&groups).and_then(|path| V2.left(&folder, path));
    let folder = folder.join("memory");
    let memory = V1.path(&groups).and_then(|path| V1.left(&folder, path));
    // In a container the system's figure is that of the whole machine, so the smallest counts.
    [meminfo, unified, memory].into_iter().flatten().min()
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
        let available = available_beside(weights).unwrap_or(MAX);
        let left = available.saturating_sub(*promised);
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
/// How often a caller that waits for memory, or for its turn, is asked whether to continue waiting.
pub(super) const ASK: Duration = Duration::from_millis(100);

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

fn of_meminfo(text: &str) -> Option<u64> {
    kibibytes(text, "MemAvailable:")
}

/// Returns the bytes of a line `NAME NUMBER kB`.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// A version of control groups.
struct GroupVersion {
    /// Limits; one that is not a number is none.
    limits: &'static [&'static str],
    usage: &'static str,
    /// What the kernel drops when memory is needed, in `memory.stat`: loading a model leaves its whole file there. The
    /// system's own figure counts it as available too.
    reclaimable: &'static [&'static str],
}

const V2: GroupVersion = GroupVersion {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
};

/// Without a limit it has one of almost 2^63 bytes.
const V1: GroupVersion = GroupVersion {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    // `total_` counts the groups within too, as the usage does.
    reclaimable: &["total_inactive_file", "total_active_file"],
};

impl GroupVersion {
    /// Returns the path of this process's group, from `/proc/self/cgroup`: `NUMBER:CONTROLLERS:PATH` for each hierarchy, that of
    /// version 2 with the number 0 and no controllers.
    fn path<'a>(&self, groups: &'a str) -> Option<&'a str> {
        let is_unified = self.usage == V2.usage;
        let path = groups.lines().find_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let is_it = match is_unified {
                true => number == "0" && controllers.is_empty(),
                false => controllers.split(',').any(|name| name == "memory"),
            };
            is_it.then_some(path)
        });
        path.map(|path| path.trim_matches('/'))
    }

    /// Returns the least that a group or one of its parents leaves.
    fn left(&self, root: &Path, path: &str) -> Option<u64> {
        let own = root.join(path);
        // In a container the path may be that of the machine, of which only the root is there.
        let around = own
            .ancestors()
            .take_while(|folder| folder.starts_with(root));
        // Each enclosing group limits the sum of the groups within it.
        around.filter_map(|folder| self.of_group(folder)).min()
    }

    fn of_group(&self, folder: &Path) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        // "max" is not a number: no limit.
        let limit = self.limits.iter().filter_map(|name| number(name)).min()?;
        let stat = read("memory.stat").unwrap_or_default();
        let bytes = |line: &str| {
            let (name, bytes) = line.split_once(' ')?;
            let counts = self.reclaimable.contains(&name);
            counts.then(|| bytes.trim().parse::<u64>().ok()).flatten()
        };
        let idle = stat.lines().filter_map(bytes).fold(0, u64::saturating_add);
        let used = number(self.usage)?.saturating_sub(idle);
        Some(limit.saturating_sub(used))
    }
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
    fn parses_meminfo() {
        let text = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(of_meminfo(text), Some(2 << 20));
        assert_eq!(of_meminfo("MemTotal: 1 kB"), None);
        assert_eq!(readable(3 << 20), "3 MiB");
        assert_eq!(readable(3 << 29), "1.5 GiB");
    }

    /// Files of a machine, and what it has available.
    type Machine = (&'static [(&'static str, &'static str)], Option<u64>);
    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemAvailable: 4096 kB\n");
    const MACHINES: &[Machine] = &[
        (&[], None),
        (&[MEMINFO], Some(4 << 20)),
        // Version 2 without a limit, and with one; a file that was read once is in the page cache, and in nobody's way.
        (
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/outer/inner\n"),
                ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
                ("sys/fs/cgroup/outer/inner/memory.current", "900\n"),
            ],
            Some(4 << 20),
        ),
        (
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/outer/inner\n"),
                ("sys/fs/cgroup/outer/inner/memory.max", "1000\n"),
                ("sys/fs/cgroup/outer/inner/memory.current", "900\n"),
                (
                    "sys/fs/cgroup/outer/inner/memory.stat",
                    "anon 50\nfile 820\ninactive_file 700\nactive_file 100\nslab_reclaimable 20\nshmem 20\n",
                ),
            ],
            Some(920),
        ),
        // The group around it has less.
        (
            &[
                ("proc/self/cgroup", "0::/outer/inner\n"),
                ("sys/fs/cgroup/outer/inner/memory.max", "1000\n"),
                ("sys/fs/cgroup/outer/inner/memory.current", "100\n"),
                ("sys/fs/cgroup/outer/memory.max", "max\n"),
                ("sys/fs/cgroup/outer/memory.high", "1200\n"),
                ("sys/fs/cgroup/outer/memory.current", "1150\n"),
            ],
            Some(50),
        ),
        // A container that sees the path of the machine, and its own group at the root.
        (
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/../../docker/0123\n"),
                ("sys/fs/cgroup/memory.max", "1000\n"),
                ("sys/fs/cgroup/memory.current", "10\n"),
            ],
            Some(990),
        ),
        // Version 1, among other controllers.
        (
            &[
                MEMINFO,
                (
                    "proc/self/cgroup",
                    "9:cpu,cpuacct:/other\n4:memory:/docker/0123\n1:name=systemd:/docker/0123\n",
                ),
                (
                    "sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes",
                    "2000\n",
                ),
                (
                    "sys/fs/cgroup/memory/docker/0123/memory.usage_in_bytes",
                    "1900\n",
                ),
                (
                    "sys/fs/cgroup/memory/docker/0123/memory.stat",
                    "inactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 300\n",
                ),
                (
                    "sys/fs/cgroup/memory/memory.limit_in_bytes",
                    "9223372036854771712\n",
                ),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"),
            ],
            Some(1400),
        ),
        (
            &[
                MEMINFO,
                ("proc/self/cgroup", "4:memory:/docker/0123\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "3000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n"),
            ],
            Some(2000),
        ),
        // Both, with the memory in version 1.
        (
            &[
                MEMINFO,
                ("proc/self/cgroup", "4:memory:/a\n0::/b\n"),
                ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "700\n"),
                ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "100\n"),
                ("sys/fs/cgroup/unified/b/cgroup.procs", "1\n"),
            ],
            Some(600),
        ),
    ];

    #[test]
    fn limits_of_both_versions_of_control_groups_count_without_the_page_cache() {
        for (files, expected) in MACHINES {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in *files {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            assert_eq!(available_at(root.path()), *expected, "{files:?}");
        }
    }

    #[test]
    fn mapped_files_count_once_and_without_locked_pages() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(mapped_at(root.path()), 0);
        fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let text = "55d0-7ffc ---p 00000000 00:00 0  [rollup]\nRss:  9000 kB\nPss:  800 kB\nPss_Anon:  300 kB\n\
                    Pss_File:             500 kB\nPss_Shmem:  0 kB\nLocked:  100 kB\n";
        fs::write(root.path().join("proc/self/smaps_rollup"), text).unwrap();
        assert_eq!(mapped_at(root.path()), 400 << 10);
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
    fn cells_are_as_large_as_the_types_of_their_numbers() {
        use super::super::random::{RandomModelShape, write};
        let mut bytes = Vec::new();
        let shape = RandomModelShape {
            heads: 2,
            key_value_heads: 2,
            ..RandomModelShape::tiny()
        };
        write(&mut bytes, &shape, 1).unwrap();
        let header = GgufHeader::read(&bytes[..]).unwrap();
        let cell = |keys, values| cell_bytes(&header, CacheTypes { keys, values });
        // Two layers, two heads of 32 numbers.
        assert_eq!(cell(CacheType::F16, CacheType::F16), 4 * (64 + 64));
        assert_eq!(cell(CacheType::F32, CacheType::Q8_0), 4 * (128 + 34));
        assert_eq!(cell(CacheType::Q4_0, CacheType::Q5_1), 4 * (18 + 24));
    }

    #[test]
    fn layers_of_a_gpu_are_not_in_the_memory_of_the_machine() {
        let whole = Estimate {
            weights: 3000,
            cache: 300,
            pass: 50,
            copies: 0,
            work: 0,
        };
        let (none, all) = (whole.without_layers(0, 2), whole.without_layers(3, 2));
        assert_eq!((none, all.total()), (whole, 50));
        assert_eq!(whole.without_layers(1, 2).total(), 2000 + 200 + 50);
        assert_eq!(whole.without_layers(9, 2).total(), 50);
        // 1100 for each of two layers and the output, beside 50 and a twentieth.
        for (free, fit) in [
            (0, 0),
            (1200, 0),
            (1220, 1),
            (2400, 2),
            (3540, 3),
            (1 << 40, 3),
        ] {
            assert_eq!(whole.layers_that_fit(2, free), fit, "{free}");
        }
        let copied = Estimate { copies: 7, ..whole };
        assert_eq!(copied.without_layers(3, 2).total(), 50 + 7);
        assert_eq!(copied.layers_that_fit(2, 1220), 1, "they are in no GPU");
        let working = Estimate { work: 9, ..whole };
        assert_eq!(working.without_layers(3, 2).total(), 50 + 9);
        assert_eq!(working.layers_that_fit(2, 1220), 1, "nor is that");
        let huge = Estimate {
            weights: u64::MAX,
            ..whole
        };
        assert_eq!(huge.without_layers(1, 1).weights, u64::MAX.div_ceil(2));
    }

    #[test]
    fn a_fork_copies_a_slot_of_its_own_cells_or_a_window() {
        use super::super::llama::ThreadLimits;
        use super::super::random::{RandomModelShape, write};
        let of = |shape: RandomModelShape, per_slot, swa_full, slots| {
            let mut bytes = Vec::new();
            write(&mut bytes, &shape, 1).unwrap();
            let header = GgufHeader::read(&bytes[..]).unwrap();
            let size = ContextSize {
                cells: 1024,
                per_slot,
                batch_tokens: 32,
                ubatch_tokens: 32,
                slots,
                threads: ThreadLimits {
                    decode: None,
                    prefill: None,
                },
                poll: 0,
                swa_full,
            };
            let types = CacheTypes::new(&LlamaOptions::default());
            let estimate = Estimate::new(&header, size, types);
            assert!(estimate.total() >= estimate.cache + estimate.copies);
            estimate.copies
        };
        let tiny = RandomModelShape::tiny;
        assert_eq!(of(tiny(), true, true, 4), 256 * (2 * 2 * 32 * 2));
        assert_eq!(of(tiny(), true, true, 1), 0, "there is no other slot");
        assert_eq!(of(tiny(), false, true, 4), 0);
        // One of two layers has a window of 8.
        let windowed = RandomModelShape::tiny_windowed;
        assert_eq!(of(windowed(), false, false, 4), 8 * (2 * 32 * 2));
        assert_eq!(of(windowed(), false, true, 4), 0);
        assert_eq!(of(windowed(), true, true, 4), 0, "copied in the cache");
    }

    #[test]
    fn recurrent_layers_need_state_per_slot_and_no_kv_cells() {
        use super::super::random::{RandomModelShape, write};
        let of = |shape: RandomModelShape| {
            let mut bytes = Vec::new();
            write(&mut bytes, &shape, 1).unwrap();
            let header = GgufHeader::read(&bytes[..]).unwrap();
            let types = CacheTypes::new(&LlamaOptions::default());
            (cell_bytes(&header, types), state_bytes(&header))
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
