//! [`HostConfig`]: limits of instances and callbacks.

use std::time::Duration;

use crate::spin::{self, SPIN_MAX};

/// Limits of a host. The defaults are those of `sapwood serve`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Linear memory of one instance, in bytes.
    pub memory_bytes: usize,
    /// Memory of all instances together, in bytes: what their linear memories and tables have grown to.
    pub memory_total_bytes: usize,
    /// Elements of one table; an instance has at most two tables.
    pub table_elements: usize,
    /// Stack of one callback, in bytes.
    pub stack_bytes: usize,
    /// Live instances.
    pub instances: u32,
    /// Time limit of `init`, `create` and `init_prompt` together.
    pub init_time: Duration,
    /// Step limit of `pre_process` and `post_process` (P1).
    pub pre_step_time: Duration,
    /// Step limit of `mid_process`.
    pub step_time: Duration,
    /// A callback that is late goes on in the background and is interrupted when it has run for this many step limits
    /// (AI-812).
    pub late_steps: u32,
    /// Added to every time limit.
    pub grace_time: Duration,
    /// Instructions of one callback, counted instead of its time (AI-733). The start keeps its time limit beside it, and
    /// other callbacks ten times theirs, so that each ends. Module artefacts depend on whether it is set.
    pub fuel: Option<u64>,
    /// The steps of the clock that P2 controllers see; it stands still at zero, for equal results (AI-607).
    pub timer_resolution: Duration,
    /// What `random_get` gives (AI-1010).
    pub random: ControllerRandom,
    /// Bytes of the result of a callback.
    pub result_bytes: usize,
    /// Threads for callbacks. `None`: one fewer than the machine has cores, so that the engine keeps one (AI-703).
    pub threads: Option<usize>,
    /// Further threads, started while callbacks are slow.
    pub spare_threads: usize,
    /// Threads that a step keeps busy beside those for callbacks: the engine's, and of a runtime that serves another
    /// process its main channel too. With no more cores than that no thread spins before it sleeps.
    pub busy_beside: usize,
}

/// What controllers get from `random_get`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ControllerRandom {
    /// Nothing: it succeeds and leaves the bytes as they are (AI-607).
    #[default]
    Off,
    /// Numbers that the seed of the request and the path of forks determine (AI-1010).
    Seeded,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            memory_bytes: 64 << 20,
            memory_total_bytes: 4 << 30,
            table_elements: 100_000,
            stack_bytes: 512 << 10,
            instances: 4_096,
            init_time: Duration::from_secs(1),
            pre_step_time: Duration::from_millis(4),
            step_time: Duration::from_millis(25),
            late_steps: 10,
            grace_time: Duration::from_millis(20),
            fuel: None,
            timer_resolution: Duration::ZERO,
            random: ControllerRandom::Off,
            result_bytes: 1 << 20,
            threads: None,
            spare_threads: 64,
            busy_beside: 1,
        }
    }
}

impl HostConfig {
    /// How long a thread without work spins before it sleeps.
    pub(super) fn idle_spin(&self) -> Duration {
        if spin::cores() > self.busy_beside {
            SPIN_MAX
        } else {
            Duration::ZERO
        }
    }

    /// How many threads are kept for callbacks.
    pub(super) fn kept_threads(&self) -> usize {
        let one_fewer = || {
            let cores = std::thread::available_parallelism();
            cores.map_or(1, usize::from).saturating_sub(1)
        };
        self.threads.unwrap_or_else(one_fewer).max(1)
    }
}
