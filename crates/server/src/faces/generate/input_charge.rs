//! [`InputCharge`]: what the inputs of a request are charged to the byte budget until its model has them (D-47).
//!
//! A head that goes out early ends the charge of the body, and a message of a stream is gone when it was read; but the prompt
//! made of them stays in memory while the call waits: for a model that is being loaded, or for its turn to be tokenised.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Extensions;

use crate::http::body_budget::Reservation;
use crate::http::intake::BodyIntake;

/// The charge of one request. Clones share it, one for each call that the request makes.
#[derive(Clone, Default)]
pub(super) struct InputCharge(Option<Arc<HeldInputs>>);

/// Bytes that the requests of one stream hold together.
#[derive(Debug, Default)]
pub(super) struct StreamHold(AtomicUsize);

struct HeldInputs {
    _reservations: Vec<Reservation>,
    /// For a message of a stream: its bytes, and the sum that they are part of.
    stream: Option<(usize, Arc<StreamHold>)>,
}

impl InputCharge {
    /// Takes over the charge of a body that was read whole, of the request with these extensions.
    pub(super) fn of_body(extensions: &Extensions) -> Self {
        let intake = extensions.get::<Arc<BodyIntake>>();
        Self::of(intake.map(|it| it.take_kept()).unwrap_or_default(), None)
    }

    /// The charge of a message, whose stream holds this much with it.
    pub(super) fn of_message(reservation: Option<Reservation>, stream: &Arc<StreamHold>) -> Self {
        let bytes = reservation.as_ref().map_or(0, Reservation::bytes);
        stream.0.fetch_add(bytes, Ordering::Relaxed);
        let stream = (bytes, Arc::clone(stream));
        Self::of(reservation.into_iter().collect(), Some(stream))
    }

    fn of(reservations: Vec<Reservation>, stream: Option<(usize, Arc<StreamHold>)>) -> Self {
        Self(Some(Arc::new(HeldInputs {
            _reservations: reservations,
            stream,
        })))
    }

    /// The call that this clone is of holds no inputs any more.
    pub(super) fn release(&mut self) {
        drop(self.0.take());
    }
}

impl fmt::Debug for InputCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InputCharge")
    }
}

impl StreamHold {
    /// The bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for HeldInputs {
    fn drop(&mut self) {
        if let Some((bytes, stream)) = &self.stream {
            stream.0.fetch_sub(*bytes, Ordering::Relaxed);
        }
    }
}
