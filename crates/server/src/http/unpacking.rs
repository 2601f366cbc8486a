//! Unpacks compressed input in steps, each charged to the byte budget (D-47).

use sapwood_kernel::pool::{BlockingPool, TaskSize};

use crate::http::body_budget::{BudgetFull, Reservation};
use crate::http::compressed_limit::STEP;
use crate::http::intake::BodyIntake;

/// Compressed input, and what was unpacked of it.
pub(crate) trait Unpacking: Send + Sized + 'static {
    /// Why the input is refused.
    type Error: Send + 'static;

    /// Unpacks at most `bytes` more, and returns whether that was the end, or all that is wanted. Blocks the thread.
    fn step(&mut self, bytes: usize) -> Result<bool, Self::Error>;

    /// Bytes that this holds besides the compressed input, which is charged where it arrives.
    fn held_bytes(&self) -> usize;
}

/// Why input could not be unpacked.
pub(crate) enum UnpackError<E> {
    /// The input is refused.
    Refused(E),
    /// There was no room in the byte budget; the request is marked as overloaded.
    Full,
    /// A step panicked.
    Panicked,
}

/// Unpacks all of `input`, which has `packed` compressed bytes, and returns the charge for what it holds then.
pub(crate) async fn unpack<U: Unpacking>(
    mut input: U,
    packed: usize,
    intake: &BodyIntake,
) -> Result<(U, Reservation), UnpackError<U::Error>> {
    let mut reservation = intake.reserve();
    let refused = UnpackError::Refused;
    // Small input is unpacked in place, up to one step, which costs less than moving it to another thread.
    let mut ended = packed <= UNPACKED_HERE && input.step(STEP).map_err(refused)?;
    loop {
        // Before the step that makes the bytes: small input can unpack to a thousand times its size. After the last one this
        // refunds what it has not made, or charges the bytes that were unpacked in place.
        let wanted = input.held_bytes() + if ended { 0 } else { STEP };
        if let Err(BudgetFull) = reservation.hold(wanted).await {
            intake.overrun();
            return Err(UnpackError::Full);
        }
        if ended {
            return Ok((input, reservation));
        }
        // One step at a time, and not the whole: between two of them the request may be dropped, and the pool serves others.
        let step = BlockingPool::global().run_only(intake.turn(), TaskSize::Large, move || {
            let ended = input.step(STEP);
            (input, ended)
        });
        let (given_back, step) = step.await.map_err(|_| UnpackError::Panicked)?;
        input = given_back;
        ended = step.map_err(refused)?;
    }
}

/// Compressed input up to this size is unpacked by the task that reads it; larger input goes to the thread pool.
const UNPACKED_HERE: usize = 8 << 10;
