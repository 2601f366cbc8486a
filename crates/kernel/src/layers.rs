//! The layers that come with the kernel. Each can wrap one function, a glob of names, or a whole kernel.

mod retry;
#[cfg(test)]
mod tests;
mod timeout;
mod trace;

pub use self::retry::{RetryLayer, retry};
pub use self::timeout::{Timeout, timeout};
pub use self::trace::{TraceLayer, trace};
