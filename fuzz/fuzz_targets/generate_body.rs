//! Any bytes as the body of a generate request.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::generate::fuzz::body(bytes));
