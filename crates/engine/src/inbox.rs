//! The inbox of an owner: what an engine's handle and its owner share.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::outbox::{OwnerWaker, Sender};
use crate::queue::AdmissionQueue;
use crate::stats::EngineStats;
use crate::submission::Submission;

/// One command. There is no other: readers cancel and park through their outboxes.
pub(crate) struct EngineCommand {
    pub(crate) submission: Submission,
    pub(crate) outbox: Sender,
}

/// The owner's end: commands arrive here, and the waker is called when there is one.
pub(crate) struct OwnerInbox {
    pub(crate) commands: Receiver<Box<EngineCommand>>,
    pub(crate) waker: Arc<OwnerWaker>,
    pub(crate) queue: Arc<AdmissionQueue>,
    pub(crate) stats: Arc<EngineStats>,
}
