//! Any bytes as an Evergreen message.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::evergreen::fuzz::decode(bytes));
