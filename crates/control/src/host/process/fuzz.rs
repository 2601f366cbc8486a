//! What fuzzing knows of messages between the runtime and the processes of controllers.

use super::message;
use super::outcome::{read_outcome, write_outcome};
use crate::host::controller::Outcome;
use crate::host::result::{ResultLimits, Waits};

/// Bytes before the values of a message: its length and its kind.
const HEAD: usize = 5;

/// Checks that an outcome comes out of a controller's process as it went in.
///
/// # Panics
/// If it does not.
pub(in crate::host) fn passes(outcome: &Outcome, limits: ResultLimits, waits: &Waits<'_>) {
    let written = write_outcome(outcome);
    let read = read_outcome(&written[HEAD..], limits, waits);
    let read = read.expect("what the host accepts is an outcome");
    // Waits have the time of their reading in them.
    let names = |outcome: &Outcome| format!("{:?}", write_outcome(outcome));
    assert_eq!(names(&read), names(outcome));
}

/// Reads `bytes` as an outcome.
///
/// # Panics
/// If it is read otherwise after it was written again.
pub(in crate::host) fn outcome(bytes: &[u8], limits: ResultLimits, waits: &Waits<'_>) {
    if let Some(outcome) = read_outcome(bytes, limits, waits) {
        passes(&outcome, limits, waits);
    }
}

/// Reads `bytes` as every other message that a controller's process or the runtime sends.
///
/// # Panics
/// If one is read otherwise after it was written again.
pub(in crate::host) fn messages(bytes: &[u8]) {
    if let Some((number, callback)) = message::read_call(bytes) {
        assert_eq!(message::call(number, &callback)[HEAD..], *bytes);
    }
    if let Some(forked) = message::read_forked(bytes) {
        let written = message::forked(forked.err().as_deref());
        assert_eq!(written[HEAD..], *bytes);
    }
    if let Some(name) = message::read_name(bytes) {
        assert_eq!(message::read_variable(name)[HEAD..], *bytes);
    }
    if let Some(write) = message::read_write(bytes) {
        assert_eq!(message::write_variable(&write)[HEAD..], *bytes);
    }
    if let Some(charged) = message::read_charge(bytes) {
        assert_eq!(message::charge(charged)[HEAD..], *bytes);
    }
    if let Some(start) = message::StartMessage::read(bytes) {
        assert_eq!(start.message()[HEAD..], *bytes);
    }
    if let Some(module) = message::LaunchedModule::read(bytes) {
        assert_eq!(module.message()[HEAD..], *bytes);
    }
    let _ = message::read_config(bytes);
    let _ = message::read_charged(bytes);
    let _ = message::read_versioned(bytes);
    let _ = message::read_written(bytes);
}
