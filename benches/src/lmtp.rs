//! What the LMTP benches share: bare senders to compare with, the server under test, and the clients that drive them.

pub mod bare;
pub mod face;
pub mod items;
pub mod load;
