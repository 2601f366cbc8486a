//! Any bytes as a list of operations on a session.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::session::fuzz::ops(bytes));
