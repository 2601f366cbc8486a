//! The integration tests stand in `main.rs`, one binary.
