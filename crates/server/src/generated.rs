//! Server traits generated from `crates/proto/proto` by `cargo xtask codegen` (D-14); the messages are in `sapwood-proto`.
//!
//! Owns: nothing by hand. Refuses to know: what the messages mean.

#![allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    clippy::use_self,
    clippy::or_fun_call,
    reason = "generated code keeps its generator's style"
)]

/// Package `evergreen.v2`.
pub(crate) mod evergreen_v2 {
    include!("generated/evergreen.v2.rs");
}
