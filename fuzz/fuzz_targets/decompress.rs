//! Any bytes as a compressed body.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_server::fuzz::decompress(bytes));
