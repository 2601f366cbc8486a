//! Any bytes as the WebSocket frames of a client.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_server::fuzz::websocket(bytes));
