//! Reads the members of flow control: `window` and ACK (LM-952).

use crate::lmtp::read::PayloadMembers;
use crate::lmtp::{ConnectionLimits, LmtpError};

/// Reads the window of a request.
pub(super) fn window(
    members: &PayloadMembers<'_>,
    limits: &ConnectionLimits,
) -> Result<Option<u32>, LmtpError> {
    let max = limits.max_window;
    let range = "at least 1 and not above the limit";
    let size = members.integer("window", range, |size| {
        (1..=i128::from(max)).contains(&size)
    })?;
    Ok(size.and_then(|size| u32::try_from(size).ok()))
}

/// The number below which an ACK acknowledges all items; `None` if it has none, and then it is ignored.
pub(super) fn acknowledged(members: &PayloadMembers<'_>) -> Option<u64> {
    let seq = members.integer("seq", "0 or more", |seq| seq >= 0);
    let below = seq.ok().flatten().and_then(|seq| u64::try_from(seq).ok())?;
    // `seq` is the highest item that the client has received (LM-952).
    Some(below.saturating_add(1))
}
