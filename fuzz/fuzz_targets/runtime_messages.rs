//! Any bytes as what an engine asks of a runtime and what its controllers return.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_control::fuzz::runtime_messages(bytes));
