//! Layers that come with the kernel. Each spans the whole life of a stream and is usable on one function, on a glob,
//! or on a kernel.

mod retry;
#[cfg(test)]
mod tests;
mod timeout;
mod trace;

pub use self::retry::{RetryLayer, retry};
pub use self::timeout::{Timeout, timeout};
pub use self::trace::{TraceLayer, trace};
