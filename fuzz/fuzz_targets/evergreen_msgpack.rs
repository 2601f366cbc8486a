//! Any bytes as a message of the Action Engine dialect.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::evergreen::fuzz::decode_msgpack(bytes));
