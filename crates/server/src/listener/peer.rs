//! What a request knows of its connection; both stand in its extensions.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whom a request came from; stands in its extensions.
#[derive(Clone, Copy, Debug)]
pub struct PeerInfo(pub SocketAddr);

/// Which connection a request came by; stands in its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// One that no other connection has; never 0.
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
