//! The quota of bytes that a session retains (EV-801).

use crate::evergreen::{Reason, Status};

/// Counts retained bytes against a limit.
#[derive(Debug)]
pub(in crate::session) struct Quota {
    retained: u64,
    max: u64,
}

impl Quota {
    pub(super) const fn new(max: u64) -> Self {
        Self { retained: 0, max }
    }

    /// Retained bytes.
    pub(in crate::session) const fn retained(&self) -> u64 {
        self.retained
    }

    /// Charges bytes, or fails if they exceed the limit; nothing is charged then.
    pub(in crate::session) fn retain(&mut self, bytes: u64) -> Result<(), Status> {
        let value = self.retained.saturating_add(bytes);
        Status::within(Reason::RetainedLimit, "retained_bytes", value, self.max)?;
        self.retained = value;
        Ok(())
    }

    /// Refunds bytes. After an abort, what was charged before it may be refunded to a fresh quota: that stays at zero.
    pub(in crate::session) const fn give_back(&mut self, bytes: u64) {
        self.retained = self.retained.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_801_a_refused_charge_changes_nothing() {
        let mut quota = Quota::new(10);
        assert!(quota.retain(10).is_ok());
        let refused = quota.retain(1).unwrap_err();
        assert_eq!(refused.known(), Some(Reason::RetainedLimit));
        quota.give_back(4);
        assert!(quota.retain(4).is_ok());
        quota.give_back(99);
        assert_eq!(quota.retained(), 0);
    }
}
