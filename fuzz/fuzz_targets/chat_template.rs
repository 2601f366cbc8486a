//! Any text as a chat template and its messages.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_engine::fuzz::template(bytes));
