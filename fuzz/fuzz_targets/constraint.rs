//! Any text as a native constraint, and any choices among the tokens that it allows.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_engine::fuzz::constraint(bytes));
