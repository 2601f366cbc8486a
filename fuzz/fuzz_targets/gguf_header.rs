//! Any bytes as the header of a model file.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_engine::fuzz::gguf(bytes));
