//! Any bytes as what an engine asks of a foreign runtime and what that answers.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_control::fuzz::runtime_reply(bytes));
