//! Any bytes as a message of the gRPC inference protocol.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::generate::fuzz::message(bytes));
