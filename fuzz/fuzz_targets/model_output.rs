//! Any text as the output of a model of each family, cut anywhere.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sapwood_kernel::fuzz::model_output(bytes));
