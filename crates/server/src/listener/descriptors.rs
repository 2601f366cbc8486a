//! Checks the file-descriptor limit once at start (D-31), so that a limit that is too low is reported then and not
//! under load.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors reserved for everything but connections: model files, logs, the runtime, upstreams. Where there are few, half
/// of them.
pub const RESERVE: u64 = 256;
/// The server does not start with fewer: the runtime, the log and the ports alone need about twenty.
pub const LEAST: u64 = 64;

/// What the check found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorCheck {
    /// The soft limit in force now; `None` is unlimited.
    pub soft: Option<u64>,
    /// The hard limit; `None` is unlimited.
    pub hard: Option<u64>,
}

impl DescriptorCheck {
    /// The limits now.
    #[must_use]
    pub fn read() -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        Self {
            soft: current,
            hard: maximum,
        }
    }

    /// Raises the soft limit so that `connections` fit, as far as the hard limit allows, and returns the limits in force.
    #[must_use]
    pub fn raise_for(connections: usize) -> Self {
        let found = Self::read();
        if let Some(soft) = found.wanted(connections) {
            let wanted = Rlimit {
                current: Some(soft),
                maximum: found.hard,
            };
            // May be forbidden, in a sandbox for example; the limit that is read back below shows the result.
            let _ = setrlimit(Resource::Nofile, wanted);
        }
        Self::read()
    }

    /// The soft limit to ask for, if the one in force is too low.
    fn wanted(self, connections: usize) -> Option<u64> {
        let needed = (connections as u64).saturating_add(RESERVE);
        let soft = self.soft.filter(|soft| *soft < needed)?;
        // Never above the hard limit, which only root may raise; never lower than it was, whatever the configuration says.
        let reachable = self.hard.map_or(needed, |hard| needed.min(hard));
        (reachable > soft).then_some(reachable)
    }

    /// Whether a server can run at all.
    #[must_use]
    pub fn suffice(self) -> bool {
        self.soft.is_none_or(|soft| soft >= LEAST)
    }

    /// How many of the `connections` wanted fit, at least one.
    #[must_use]
    pub fn fit(self, connections: usize) -> usize {
        let room = self
            .soft
            .map_or(u64::MAX, |soft| (soft - RESERVE.min(soft / 2)).max(1));
        connections.min(usize::try_from(room).unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_31_the_soft_limit_is_raised_as_far_as_the_hard_one_allows() {
        let limits = |soft, hard| DescriptorCheck { soft, hard };
        for (now, connections, wanted, fit) in [
            (
                limits(Some(1_024), Some(1_048_576)),
                20_000,
                Some(20_256),
                768,
            ),
            (limits(Some(1_024), Some(4_096)), 20_000, Some(4_096), 768),
            (limits(Some(1_024), Some(1_024)), 20_000, None, 768),
            (limits(Some(1_024), None), 20_000, Some(20_256), 768),
            (limits(Some(20_256), Some(20_256)), 20_000, None, 20_000),
            (
                limits(Some(20_255), Some(20_256)),
                20_000,
                Some(20_256),
                19_999,
            ),
            (limits(None, None), 20_000, None, 20_000),
            (limits(Some(512), Some(512)), 20_000, None, 256),
            (limits(Some(256), Some(256)), 20_000, None, 128),
            (limits(Some(64), Some(256)), 20_000, Some(256), 32),
            (limits(Some(0), Some(0)), 20_000, None, 1),
        ] {
            assert_eq!(
                (now.wanted(connections), now.fit(connections)),
                (wanted, fit),
                "{now:?}"
            );
        }
        for (soft, suffices) in [(Some(63), false), (Some(64), true), (None, true)] {
            assert_eq!(limits(soft, soft).suffice(), suffices, "{soft:?}");
        }
    }
}
