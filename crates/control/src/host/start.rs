//! [`Start`]: with what an instance starts.

use std::sync::Arc;

use sapwood_proto::steer::{StepWaker, Token};

use super::group::Group;
use super::state::Capabilities;
use crate::trie::HostModel;

/// With what an instance starts.
pub struct Start {
    /// The model whose tokens it steers.
    pub model: Arc<HostModel>,
    /// The argument, as the controller gets it.
    pub arg: Arc<str>,
    /// The prompt of the sequence.
    pub prompt: Vec<Token>,
    /// The request.
    pub group: Arc<Group>,
    /// What the engine can do.
    pub capabilities: Capabilities,
    /// Called whenever there is an outcome; also of all forks.
    pub waker: Arc<dyn StepWaker>,
}
