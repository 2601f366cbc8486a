//! Any bytes as results of a controller's callbacks.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_control::fuzz::controller_results(bytes));
