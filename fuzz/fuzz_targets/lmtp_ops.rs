//! Any bytes as a list of operations on a session of LMTP.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::lmtp::fuzz::ops(bytes));
