//! Benchmarks; each is a binary under `src/bin`. What several of them share stands here.
//!
//! Owns: loads, anchors to compare with, child processes to measure. Refuses to know: how what is measured works inside.

pub mod child;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod evergreen;
pub mod generate;
pub mod lmtp;
pub mod measure;
pub mod report;
pub mod scripted;

/// As the command `sapwood` has it; the anchors, which are processes of the same program, have it too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
