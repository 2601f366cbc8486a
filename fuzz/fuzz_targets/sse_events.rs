//! Any bytes as server-sent events at a client.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::sse::fuzz::events(bytes));
