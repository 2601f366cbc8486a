//! Any bytes as what a peer does to the shared memory.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_control::fuzz::shared_memory(bytes));
