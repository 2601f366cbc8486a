//! Any bytes as an uploaded controller, and modules made from them.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_control::fuzz::controller_module(bytes));
