//! Any bytes as a message of the gRPC inference protocol, and its refusal as it is sent.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_server::fuzz::grpc(bytes));
