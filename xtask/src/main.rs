//! The project's own tasks. Owns: `cargo xtask …`. Refuses to know: anything the crates do at run time.

fn main() {}
