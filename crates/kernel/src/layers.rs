//! Layers that come with the kernel. Each spans the whole life of a stream and is usable on one function, on a glob,
//! or on a kernel.
//!
//! Owns: nothing but the list. Refuses to know: functions.

mod retry;
#[cfg(test)]
mod tests;
mod timeout;
mod trace;

pub use self::retry::{Retry, retry};
pub use self::timeout::{Timeout, timeout};
pub use self::trace::{Trace, trace};
