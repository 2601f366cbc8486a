//! Any bytes at the client's end of LMTP.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::lmtp::fuzz::client(bytes));
