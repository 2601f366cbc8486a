//! Shared by the LMTP benches: bare senders as baselines, the server under test, and the clients that drive them.

pub mod bare;
pub mod face;
pub mod items;
pub mod load;
