//! What a model function needs to open steerers for its calls: a source, the rights of the caller, and what to do with
//! text that may still be taken back.

use std::fmt;
use std::sync::Arc;

use sapwood_proto::steer::{SteerSource, SteerUser};

/// An extension: what the caller may run (AI-902). Calls within a call have it too. Without it, a call is one of this
/// process itself, which may do everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteerRights {
    /// The name of the caller's key; `localhost` without keys.
    pub user: Arc<str>,
    /// May run every controller.
    pub is_admin: bool,
    /// May run modules by hash, and tags of others.
    pub may_control: bool,
}

impl SteerRights {
    /// Those of a call whose caller is not known: constraints and public controllers alone.
    #[must_use]
    pub fn nobody() -> Self {
        Self {
            user: Arc::from("nobody"),
            is_admin: false,
            may_control: false,
        }
    }

    /// The rights as the interface of sources has them.
    #[must_use]
    pub fn as_user(&self) -> SteerUser<'_> {
        SteerUser {
            name: &self.user,
            is_admin: self.is_admin,
            may_control: self.may_control,
        }
    }
}

/// The rights of this process itself.
impl Default for SteerRights {
    fn default() -> Self {
        Self {
            user: Arc::from("local"),
            is_admin: true,
            may_control: true,
        }
    }
}

/// How long text is held that a controller may take back, for readers from which nothing can be taken back (AI-936).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HoldPolicy {
    /// Until its sequence ends.
    #[default]
    End,
    /// Until this many tokens follow it. A controller that takes back more fails its request.
    Tokens(u32),
}

/// How a model is steered.
#[derive(Clone)]
pub struct Steering {
    /// Opens controllers and native constraints, which have the names `sapwood:KIND`.
    pub source: Arc<dyn SteerSource>,
    /// For controllers that may backtrack.
    pub hold: HoldPolicy,
}

impl Steering {
    /// By this source, with text held until its sequence ends.
    #[must_use]
    pub fn new(source: Arc<dyn SteerSource>) -> Self {
        Self {
            source,
            hold: HoldPolicy::default(),
        }
    }
}

impl fmt::Debug for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steering")
            .field("hold", &self.hold)
            .finish_non_exhaustive()
    }
}
