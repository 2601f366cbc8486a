//! Selects an upstream for each stream, as a pure state machine (LM-801 to LM-806).
//!
//! ```text
//!   away ── a good probe ──► serving ── two probes missed · connection lost · three engine errors in a row ──► away
//!    ▲                          └─ says that it drains ──► draining: what runs there ends there ─┐
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

/// How a pool behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// From one probe of an upstream that serves to the next.
    pub probe_interval: Duration,
    /// From the loss of an upstream to the first probe.
    pub back_off: Duration,
    /// What that doubles to. One that has served for so long begins anew.
    pub back_off_max: Duration,
    /// Probes in a row without an answer that take an upstream out.
    pub probes_missed: u32,
    /// Streams in a row ended by its engine's errors that do.
    pub engine_errors: u32,
    /// Blocks of prompts whose upstream is remembered (LM-802).
    pub blocks: usize,
    /// Whether a stream with a seed may go on elsewhere: it is computed again there from its beginning, and fails if anything of it
    /// comes out otherwise (LM-806).
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

/// One upstream of a pool, by its place in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolMember(usize);

impl PoolMember {
    /// The number of its place, from 0.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What may be asked of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Streams go there.
    Serving,
    /// What runs there may end; nothing new goes there (LM-805).
    Draining,
    /// Nothing goes there until it answers.
    Away,
}

/// What came of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// It answered. With the streams of everybody there, where it says how many (LM-902).
    Answered(Option<u64>),
    /// It did not, or not as one that serves the model.
    Missed,
}

/// How a stream at one upstream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOutcome {
    /// With a finish.
    Well,
    /// With an error.
    Failed(LmtpReason),
    /// Nobody reads it any more.
    Left,
}

#[derive(Debug)]
struct UpstreamState {
    weight: u64,
    condition: Condition,
    /// No longer configured.
    removed: bool,
    /// Streams that we follow there.
    open: u64,
    /// What its connection counts, abandoned streams included (LM-702).
    counted: u64,
    /// Streams that are not ours, when it was last probed.
    others: u64,
    /// When a stream last went there, in streams of the pool.
    used: u64,
    missed: u32,
    engine_errors: u32,
    probe_at: Time,
    /// The next wait, when it is lost.
    delay: Duration,
    served_from: Time,
}

impl UpstreamState {
    /// One that nothing is known of, to be probed then.
    fn new(weight: u32, delay: Duration, probe_at: Time) -> Self {
        Self {
            weight: u64::from(weight.max(1)),
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

    fn load(&self) -> u64 {
        self.open.max(self.counted) + self.others
    }
}

/// The machine. See the module's page.
#[derive(Debug)]
pub struct PoolMachine {
    options: PoolOptions,
    upstreams: Vec<UpstreamState>,
    affinity: AffinityTable,
    streams: u64,
}

impl PoolMachine {
    /// A pool of so many upstreams, all away and to be probed at once. A weight of 0 counts as 1.
    pub fn new(weights: impl IntoIterator<Item = u32>, options: PoolOptions) -> Self {
        let upstream = |weight| UpstreamState::new(weight, options.back_off, Time::ZERO);
        Self {
            upstreams: weights.into_iter().map(upstream).collect(),
            affinity: AffinityTable::new(options.blocks),
            streams: 0,
            options,
        }
    }

    /// Another upstream is configured: it is probed at once, and asked as soon as it answers (LM-805).
    pub fn add(&mut self, weight: u32, now: Time) -> PoolMember {
        let upstream = UpstreamState::new(weight, self.options.back_off, now);
        self.upstreams.push(upstream);
        PoolMember(self.upstreams.len() - 1)
    }

    /// The weight of an upstream is this now; 0 counts as 1.
    pub fn set_weight(&mut self, at: PoolMember, weight: u32) {
        self.upstreams[at.0].weight = u64::from(weight.max(1));
    }

    /// Every upstream.
    pub fn members(&self) -> impl Iterator<Item = PoolMember> + use<> {
        (0..self.upstreams.len()).map(PoolMember)
    }

    /// Chooses an upstream for a stream with this prompt, which counts there until [`Self::ended`]; never `but` (LM-803).
    ///
    /// # Errors
    /// `upstream_error`, retryable, when none can be asked.
    pub fn route(
        &mut self,
        prompt: &[Token],
        but: Option<PoolMember>,
        now: Time,
    ) -> Result<PoolMember, LmtpError> {
        let usable = |member: PoolMember| self.serves(member) && Some(member) != but;
        let known = self.affinity.longest(prompt, usable);
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
        upstream.open += 1;
        upstream.used = self.streams;
        Ok(chosen)
    }

    /// A stream has ended at its upstream.
    pub fn ended(&mut self, at: PoolMember, how: StreamOutcome, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        upstream.open = upstream.open.saturating_sub(1);
        match how {
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
            StreamOutcome::Well | StreamOutcome::Failed(_) => upstream.engine_errors = 0,
            StreamOutcome::Left => {}
        }
    }

    /// An upstream has computed this prompt and output; what begins so goes there again (LM-802).
    pub fn remember(&mut self, at: PoolMember, tokens: &[Token]) {
        self.affinity.enter(tokens, at);
    }

    /// How many calls the connection to an upstream has open, abandoned ones included.
    pub fn counts(&mut self, at: PoolMember, calls: usize) {
        self.upstreams[at.0].counted = calls as u64;
    }

    /// When to probe an upstream; never one that was removed.
    #[must_use]
    pub fn probe_at(&self, at: PoolMember) -> Option<Time> {
        let upstream = &self.upstreams[at.0];
        (!upstream.removed).then_some(upstream.probe_at)
    }

    /// An upstream was connected to and has still to show what it serves; it is asked all the same, for reference servers
    /// may be busy loading a model.
    pub fn met(&mut self, at: PoolMember, now: Time) {
        self.serve(at, now);
    }

    /// A probe has come back.
    pub fn probed(&mut self, at: PoolMember, probe: ProbeOutcome, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        upstream.probe_at = now + self.options.probe_interval;
        match (probe, upstream.condition) {
            (ProbeOutcome::Answered(streams), condition) => {
                upstream.missed = 0;
                upstream.others = streams.map_or(0, |all| all.saturating_sub(upstream.open));
                if condition == Condition::Away {
                    self.serve(at, now);
                }
            }
            (ProbeOutcome::Missed, Condition::Away) => self.postpone(at, now),
            (ProbeOutcome::Missed, Condition::Serving | Condition::Draining) => {
                upstream.missed += 1;
                // Whether it hangs is not to be found out a whole interval later.
                upstream.probe_at = now + self.options.back_off;
                if upstream.missed >= self.options.probes_missed {
                    self.lost(at, now);
                }
            }
        }
    }

    /// The connection to an upstream is lost, or as good as lost. The readers of its streams learn it from their own polls.
    pub fn lost(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        if upstream.condition == Condition::Away {
            return;
        }
        if now.since(upstream.served_from) >= self.options.back_off_max {
            upstream.delay = self.options.back_off;
        }
        upstream.condition = Condition::Away;
        self.postpone(at, now);
    }

    /// An upstream has said that it goes. It is asked again once it has gone and come back (LM-805).
    pub fn drains(&mut self, at: PoolMember) {
        let upstream = &mut self.upstreams[at.0];
        if upstream.condition == Condition::Serving {
            upstream.condition = Condition::Draining;
        }
    }

    /// An upstream is not configured any more: what runs there ends there, and it does not come back by itself (LM-805).
    pub fn remove(&mut self, at: PoolMember) {
        self.drains(at);
        self.upstreams[at.0].removed = true;
    }

    /// One that was removed is configured again: it is asked as soon as it answers a probe.
    pub fn restore(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        if std::mem::replace(&mut upstream.removed, false) {
            upstream.condition = Condition::Away;
            upstream.probe_at = now;
        }
    }

    /// What may be asked of an upstream now.
    #[must_use]
    pub fn condition(&self, at: PoolMember) -> Condition {
        self.upstreams[at.0].condition
    }

    /// Streams that are followed there.
    #[must_use]
    pub fn open(&self, at: PoolMember) -> u64 {
        self.upstreams[at.0].open
    }

    /// Whether any upstream can be asked; with `but`, any other.
    #[must_use]
    pub fn is_served(&self, but: Option<PoolMember>) -> bool {
        self.members()
            .any(|member| Some(member) != but && self.serves(member))
    }

    fn serves(&self, at: PoolMember) -> bool {
        let upstream = &self.upstreams[at.0];
        upstream.condition == Condition::Serving && !upstream.removed
    }

    /// It has more than twice what the others have on average, and four.
    fn is_crowded(&self, at: PoolMember) -> bool {
        let serving = self.members().filter(|member| self.serves(*member));
        let loads = serving.map(|member| self.upstreams[member.0].load());
        let (count, all) = loads.fold((0, 0), |(count, all), load| (count + 1, all + load));
        self.upstreams[at.0].load() * count > 2 * all + 4 * count
    }

    fn serve(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        if upstream.removed {
            return;
        }
        upstream.condition = Condition::Serving;
        upstream.served_from = now;
        upstream.missed = 0;
        upstream.engine_errors = 0;
    }

    /// The next probe of one that is away, later each time.
    fn postpone(&mut self, at: PoolMember, now: Time) {
        let upstream = &mut self.upstreams[at.0];
        upstream.probe_at = now + upstream.delay;
        upstream.delay = (upstream.delay * 2).min(self.options.back_off_max);
        upstream.others = 0;
    }

    fn nobody(&self, now: Time) -> LmtpError {
        let probes = self.members().filter_map(|member| self.probe_at(member));
        LmtpError {
            retry_after: probes.min().map(|at| at.since(now).max(SOON)),
            ..LmtpError::new(
                LmtpReason::UpstreamError,
                "no upstream of this model is there at the moment; try again",
            )
        }
    }
}

/// The fewest streams for its weight; of equals the one that was idle for longest.
fn by_load(
    pool: &PoolMachine,
) -> impl Fn(&PoolMember, &PoolMember) -> std::cmp::Ordering + use<'_> {
    |a, b| {
        let (a, b) = (&pool.upstreams[a.0], &pool.upstreams[b.0]);
        let loads = (a.load() * b.weight).cmp(&(b.load() * a.weight));
        loads.then(a.used.cmp(&b.used))
    }
}

/// No retry is advised to be immediate.
const SOON: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
