//! Connectors: functions and models of other servers as functions of this kernel (D-5).

pub mod evergreen;
pub mod lmtp;
mod reference;
pub mod triton;
