//! Keeps work on large requests and answers away from the async threads.

use sapwood_kernel::Error;
use sapwood_kernel::pool::{BlockingPool, TaskSize};

/// Work on more bytes takes longer than moving it to another thread.
pub(super) const IN_PLACE_BYTES: usize = 64 << 10;

/// Runs `work` on so many bytes: in place, or in this turn on a thread of the pool.
///
/// # Errors
/// The work has panicked there.
pub(super) async fn offload<T: Send + 'static>(
    bytes: usize,
    turn: u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    if bytes <= IN_PLACE_BYTES {
        return Ok(work());
    }
    let pool = BlockingPool::global();
    pool.run_only(turn, TaskSize::Large, work).await
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn only_work_on_many_bytes_goes_to_the_pool() {
        let small = offload(IN_PLACE_BYTES, 0, || "done").now_or_never();
        assert_eq!(small.unwrap().unwrap(), "done");
        let works = || {
            let stats = BlockingPool::global().stats();
            stats.done + stats.running as u64
        };
        let before = works();
        let large = offload(IN_PLACE_BYTES + 1, 0, || "done").await;
        assert_eq!(large.unwrap(), "done");
        assert!(works() > before);
    }
}
