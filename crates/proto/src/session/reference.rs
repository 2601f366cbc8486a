//! External content, as readers meet it (EV-410).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytestring::ByteString;

use super::SessionMachine;
use super::port::{CursorId, NodeKey};
use super::slice::SliceOverlap;
use crate::evergreen::{Metadata, Status};

/// A reference that a reader has reached (EV-410).
#[derive(Clone, Debug)]
pub struct Referenced {
    /// Which item it is part of, counted from 0.
    pub item: u32,
    /// Whether the item begins with it.
    pub first: bool,
    /// The leaf it is from.
    pub node: NodeKey,
    /// What the item is; not what the URI is.
    pub metadata: Arc<Metadata>,
    /// Its content.
    pub content: Arc<ExternalContent>,
}

/// Content that stands elsewhere, and a place for what the shell has fetched of it: all readers share that, and it goes
/// when the fragment with the reference is let go.
pub struct ExternalContent {
    uri: ByteString,
    fetched: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl ExternalContent {
    /// What `uri` names. A copy: the URI may be a view of a receive buffer (EV-805).
    #[must_use]
    pub fn new(uri: &str) -> Self {
        Self {
            uri: ByteString::from(uri.to_owned()),
            fetched: OnceLock::new(),
        }
    }

    /// Where it stands. It may hold credentials: never logged, never sent.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// What the shell keeps here, made at the first call. One shell keeps one type of thing.
    pub fn keep<T: Any + Send + Sync>(&self, make: impl Fn() -> T) -> Arc<T> {
        let retained = self.fetched.get_or_init(|| Arc::new(make()));
        let retained = Arc::clone(retained).downcast();
        retained.unwrap_or_else(|_| Arc::new(make()))
    }
}

impl fmt::Debug for ExternalContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Elsewhere")
    }
}

impl SessionMachine {
    /// The reader has got `bytes` more of the content that it stands at. Gives which of them are meant, where a part of a
    /// node is read (EV-740).
    ///
    /// # Errors
    /// `FLATTEN_LIMIT` if that is too much for one read (EV-306); the reader has failed then.
    pub fn count_reference(
        &mut self,
        id: CursorId,
        bytes: usize,
    ) -> Result<SliceOverlap, Arc<Status>> {
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return Ok(SliceOverlap::all(bytes));
        };
        let counted = cursor.count(bytes, &self.store, &self.config.limits);
        let meant = cursor.meant(bytes);
        if let Err(status) = &counted {
            self.fail_read(id, Arc::clone(status));
        }
        counted.map(|()| meant)
    }

    /// The reader has got all of the content that it stands at, and goes on.
    pub fn end_reference(&mut self, id: CursorId) {
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.pass_reference(&mut self.store);
        }
    }

    /// The content cannot be read: the reader fails, with the status and the place of the reference.
    pub fn fail_reference(&mut self, id: CursorId, status: &Status) -> Arc<Status> {
        let cursor = self.cursors.get(id.0);
        let position = cursor.and_then(|cursor| cursor.reference(&self.store));
        let mut status = status.clone();
        if let Some((node, seq, _)) = position {
            let id = &self.store.get(node).id;
            status = status.with("node", id).with("seq", seq);
        }
        let status = Arc::new(status);
        self.fail_read(id, Arc::clone(&status));
        status
    }
}
