//! Any bytes at the server's end of LMTP.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_proto::lmtp::fuzz::serve(bytes));
