//! Benchmarks; each is a binary under `src/bin`.
