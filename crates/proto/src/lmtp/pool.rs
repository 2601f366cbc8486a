//! Selects an upstream for each stream, as a pure state machine (LM-801 to LM-806).
//!
//! ```text
//!   away ── a good probe ──► serving ── two probes missed · connection lost · three engine errors in a row ──► away
//!    ▲                          └─ announces a drain ───► draining: running streams end there ──┐
//!    └────────────── probes after 1 s, doubling to 30 s ◄───────────── connection lost ──────────┘
//! ```

mod affinity;
mod relayed_stream;

use std::time::Duration;

use super::{LmtpError, LmtpReason};
use crate::steer::Token;
use crate::time::Time;
use affinity::AffinityTable;

pub use relayed_stream::{RelayedItem, RelayedStream};

/// Configuration of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Interval between probes of a serving upstream.
    pub probe_interval: Duration,
    /// Delay from the loss of an upstream to its first probe.
    pub back_off: Duration,
    /// Maximum of the doubling delay. An upstream that has served for this long starts again with `back_off`.
    pub back_off_max: Duration,
    /// Number of consecutive missed probes after which an upstream is removed from service.
    pub probes_missed: u32,
    /// Number of consecutive streams ended by engine errors after which it is.
    pub engine_errors: u32,
    /// Capacity of the prefix affinity table, in blocks of prompts (LM-802).
    pub blocks: usize,
    /// Whether a stream with a seed may move to another upstream: it is computed there again from its beginning, and
    /// fails if any token differs (LM-806).
    pub seeded: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            probe_interval: Duration::from_secs(10),
            back_off: Duration::from_secs(1),
            back_off_max: Duration::from_secs(30),
            probes_missed: 2,
            engine_errors: 3,
            blocks: 65_536,
            seeded: true,
        }
    }
}

/// One upstream of a pool, by its index in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolMember(usize);

impl PoolMember {
    /// The index, from 0.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What may be sent to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// New streams are sent to it.
    Serving,
    /// Its running streams may end; it gets no new ones (LM-805).
    Draining,
    /// It gets nothing until it answers a probe.
    Away,
}

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// It answered, with the number of streams of all its clients, if it reports that (LM-902).
    Answered(Option<u64>),
    /// It did not answer, or does not serve the model.
    Missed,
}

/// How a stream at one upstream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOutcome {
    /// With a finish reason.
    Well,
    /// With an error.
    Failed(LmtpReason),
    /// Its reader was dropped.
    Left,
}

#[derive(Debug)]
struct UpstreamState {
    weight: u128,
    condition: Condition,
    /// No longer configured.
    removed: bool,
    /// Our streams there.
    open: u64,
    /// Calls that its connection counts, abandoned streams included (LM-702).
    counted: u64,
    /// Streams of other clients, at the last probe.
    others: u64,
    /// When it was last chosen for a stream, as a count of the pool's streams.
    used: u64,
    missed: u32,
    engine_errors: u32,
    probe_at: Time,
    /// The next delay after a loss.
    delay: Duration,
    served_from: Time,
}

impl UpstreamState {
    /// An upstream of unknown state, probed at `probe_at`.
    fn new(weight: u32, delay: Duration, probe_at: Time) -> Self {
        Self {
            weight: weight.max(1).into(),
            condition: Condition::Away,
            removed: false,
            open: 0,
            counted: 0,
            others: 0,
            used: 0,
            missed: 0,
            engine_errors: 0,
            probe_at,
            delay,
            served_from: Time::ZERO,
        }
    }

    /// Wider than its parts: an upstream reports any number for the streams of others, and loads are multiplied.
    fn load(&self) -> u128 {
        // `counted` has the abandoned streams, and `open` those that the connection has not seen yet: the larger one is
        // taken.
        u128::from(self.open.max(self.counted)) + u128::from(self.others)
    }
}

/// The pool state machine; see the module documentation.
#[derive(Debug)]
pub struct PoolMachine {
    options: PoolOptions,
    upstreams: Vec<UpstreamState>,
    affinity: AffinityTable,
    streams: u64,
}

impl PoolMachine {
    /// Creates a pool with one upstream per weight, all away and to be probed at once. A weight of 0 counts as 1.
    pub fn new(weights: impl IntoIterator<Item = u32>, options: PoolOptions) -> Self {
        let upstream = |weight| UpstreamState::new(weight, options.back_off, Time::ZERO);
        Self {
            upstreams: weights.into_iter().map(upstream).collect(),
            affinity: AffinityTable::new(options.blocks),
            streams: 0,
            options,
        }
    }

    /// Adds an upstream: it is probed at once, and chosen as soon as it answers (LM-805).
    pub fn add(&mut self, weight: u32, now: Time) -> PoolMember {
        let upstream = UpstreamState::new(weight, self.options.back_off, now);
        self.upstreams.push(upstream);
        PoolMember(self.upstreams.len() - 1)
    }

    /// Sets the weight of an upstream; 0 counts as 1.
    pub fn set_weight(&mut self, at: PoolMember, weight: u32) {
        self.upstreams[at.0].weight = weight.max(1).into();
    }

    /// All upstreams.
    pub fn members(&self) -> impl Iterator<Item = PoolMember> + use<> {
        (0..self.upstreams.len()).map(PoolMember)
    }

    /// Chooses an upstream for a stream with this prompt, which counts there until [`Self::ended`]; never `but`
    /// (LM-803).
    ///
    /// # Errors
    /// `upstream_error`, retryable, if no upstream is available.
    pub fn route(
        &mut self,
        prompt: &[Token],
        but: Option<PoolMember>,
        now: Time,
    ) -> Result<PoolMember, LmtpError> {
        let usable = |member: PoolMember| self.serves(member) && Some(member) != but;
        let known = self.affinity.longest(prompt, usable);
        // A cached prefix is worth a longer queue only up to a point (LM-803).
        let known = known.filter(|member| !self.is_crowded(*member));
        let chosen = known.or_else(|| {
            self.members()
                .filter(|one| usable(*one))
                .min_by(by_load(self))
        });
        let Some(chosen) = chosen else {
            return Err(self.nobody(now));
        };
        self.streams += 1;
        let upstream = &mut self.upstreams[chosen.0];
        // At once, so that streams routed before this one is sent take it into account.
        upstream.open += 1;
        upstream.used = self.streams;
        Ok(chosen)
    }

    /// A stream has ended at its upstream.
    pub fn ended(&mut self, at: PoolMember, how: StreamOutcome, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        upstream.open = upstream.open.saturating_sub(1);
        match how {
            // A timeout counts too: a reference server that cannot load its model sends nothing at all (LM-710).
            StreamOutcome::Failed(
                LmtpReason::EngineError | LmtpReason::EngineDead | LmtpReason::Timeout,
            ) => {
                upstream.engine_errors += 1;
                if upstream.engine_errors >= self.options.engine_errors {
                    self.lost(at, now);
                }
            }
            StreamOutcome::Failed(LmtpReason::Draining) => self.drains(at),
            StreamOutcome::Failed(LmtpReason::ConnectionLost) => self.lost(at, now),
            // Any other error is about the request, and shows that the upstream works.
            StreamOutcome::Well | StreamOutcome::Failed(_) => upstream.engine_errors = 0,
            // Its reader left first, so nothing is known about the upstream.
            StreamOutcome::Left => {}
        }
    }

    /// Records that an upstream has computed this prompt and output; prompts with the same prefix prefer it (LM-802).
    pub fn remember(&mut self, at: PoolMember, tokens: &[Token]) {
        self.affinity.enter(tokens, at);
    }

    /// Sets the number of open calls on the connection to an upstream, abandoned ones included.
    pub fn counts(&mut self, at: PoolMember, calls: usize) {
        self.upstreams[at.0].counted = calls as u64;
    }

    /// When to probe an upstream; `None` if it was removed.
    #[must_use]
    pub fn probe_at(&self, at: PoolMember) -> Option<Time> {
        let upstream = &self.upstreams[at.0];
        (!upstream.removed).then_some(upstream.probe_at)
    }

    /// An upstream is connected, but has not shown yet what it serves. It gets streams all the same: a reference server
    /// may be busy loading a model.
    pub fn met(&mut self, at: PoolMember, now: Time) {
        self.serve(at, now);
    }

    /// Handles the result of a probe.
    pub fn probed(&mut self, at: PoolMember, probe: ProbeOutcome, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        upstream.probe_at = now + self.options.probe_interval;
        match (probe, upstream.condition) {
            (ProbeOutcome::Answered(streams), condition) => {
                upstream.missed = 0;
                // The figure includes our own streams.
                upstream.others = streams.map_or(0, |all| all.saturating_sub(upstream.open));
                // A draining upstream answers probes to its end, so only one that was away returns to service (LM-805).
                if condition == Condition::Away {
                    self.serve(at, now);
                }
            }
            (ProbeOutcome::Missed, Condition::Away) => self.postpone(at, now),
            (ProbeOutcome::Missed, Condition::Serving | Condition::Draining) => {
                upstream.missed += 1;
                // The next probe comes soon, so that a hang is detected within less than a whole interval.
                upstream.probe_at = now + self.options.back_off;
                if upstream.missed >= self.options.probes_missed {
                    self.lost(at, now);
                }
            }
        }
    }

    /// The connection to an upstream is lost, or considered lost. Its streams' readers notice that by themselves.
    pub fn lost(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        if upstream.condition == Condition::Away {
            // Each stream of a lost connection reports the loss; only the first report doubles the delay.
            return;
        }
        // An upstream that comes and goes keeps its long delay.
        if now.since(upstream.served_from) >= self.options.back_off_max {
            upstream.delay = self.options.back_off;
        }
        upstream.condition = Condition::Away;
        self.postpone(at, now);
    }

    /// An upstream has announced that it drains. It is used again once it has disconnected and answers a probe
    /// (LM-805).
    pub fn drains(&mut self, at: PoolMember) {
        let upstream = &mut self.upstreams[at.0];
        if upstream.condition == Condition::Serving {
            upstream.condition = Condition::Draining;
        }
    }

    /// Removes an upstream from the configuration: its running streams end there, and it is not used again by itself
    /// (LM-805).
    pub fn remove(&mut self, at: PoolMember) {
        self.drains(at);
        // It stays in the list: a member is an index, and its running streams still report their ends.
        self.upstreams[at.0].removed = true;
    }

    /// Restores a removed upstream: it is used as soon as it answers a probe.
    pub fn restore(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        if std::mem::replace(&mut upstream.removed, false) {
            upstream.condition = Condition::Away;
            upstream.probe_at = now;
        }
    }

    /// What may be sent to an upstream now.
    #[must_use]
    pub fn condition(&self, at: PoolMember) -> Condition {
        self.upstreams[at.0].condition
    }

    /// Number of our streams there.
    #[must_use]
    pub fn open(&self, at: PoolMember) -> u64 {
        self.upstreams[at.0].open
    }

    /// Whether any upstream other than `but` is available.
    #[must_use]
    pub fn is_served(&self, but: Option<PoolMember>) -> bool {
        self.members()
            .any(|member| Some(member) != but && self.serves(member))
    }

    fn serves(&self, at: PoolMember) -> bool {
        let upstream = &self.upstreams[at.0];
        upstream.condition == Condition::Serving && !upstream.removed
    }

    /// Whether its load is more than twice the average load of the serving upstreams, plus four.
    fn is_crowded(&self, at: PoolMember) -> bool {
        let serving = self.members().filter(|member| self.serves(*member));
        let loads = serving.map(|member| self.upstreams[member.0].load());
        let (count, all) = loads.fold((0, 0), |(count, all), load| (count + 1, all + load));
        // load > 2 * (all / count) + 4, multiplied by `count` to avoid a rounded average.
        self.upstreams[at.0].load() * count > 2 * all + 4 * count
    }

    fn serve(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        if upstream.removed {
            // A probe that was under way during the removal must not return it to service.
            return;
        }
        upstream.condition = Condition::Serving;
        upstream.served_from = now;
        upstream.missed = 0;
        upstream.engine_errors = 0;
    }

    /// Schedules the next probe of an upstream that is away, with a doubling delay.
    fn postpone(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        upstream.probe_at = now + upstream.delay;
        upstream.delay = (upstream.delay * 2).min(self.options.back_off_max);
        // The figure of its last probe says nothing about its state when it comes back.
        upstream.others = 0;
    }

    fn nobody(&self, now: Time) -> LmtpError {
        let probes = self.members().filter_map(|member| self.probe_at(member));
        LmtpError {
            retry_after: probes.min().map(|at| at.since(now).max(SOON)),
            ..LmtpError::new(
                LmtpReason::UpstreamError,
                "no upstream of this model is available; try again",
            )
        }
    }
}

/// Compares by fewest streams for the weight; among equals, by the one unused for longest.
fn by_load(
    pool: &PoolMachine,
) -> impl Fn(&PoolMember, &PoolMember) -> std::cmp::Ordering + use<'_> {
    |a, b| {
        let (a, b) = (&pool.upstreams[a.0], &pool.upstreams[b.0]);
        // Crosswise products instead of quotients, which would round small loads to 0.
        let loads = (a.load() * b.weight).cmp(&(b.load() * a.weight));
        loads.then(a.used.cmp(&b.used))
    }
}

/// Minimum delay before an advised retry.
const SOON: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
