//! The peer address and the connection id of a request, in its extensions.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

/// The address of the peer that sent a request; stands in its extensions. A Unix socket has none.
#[derive(Clone, Copy, Debug)]
pub struct PeerInfo(pub SocketAddr);

/// The connection that a request arrived on; stands in its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// A new unique id.
    pub(crate) fn fresh() -> Self {
        // From 1: 0 in a fair share stands for no connection.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
