//! LMTP, the Language Model Transport Protocol: token streams of a kernel's models, over WebSockets (`socket`), lines
//! (`lines`) and HTTP (`post`).
//!
//! Owns: the transports of section 1 of the page, the work that streams ask for, the face's numbers. Refuses to know: what
//! messages say (`proto::lmtp` has the machine that every transport drives), how models compute, and every other face.
//!
//! ```text
//!   socket │ lines │ post ──► Conversation ──► lmtp::Session ──► Start ──► Works: runs of the kernel
//!                      ◄── one message per step ◄── step(pieces) ◄────────────┘
//! ```

mod catalog;
mod conversation;
mod held;
mod house;
mod lines;
mod post;
mod refusals;
mod socket;
mod tally;
mod tokenizer;
mod words;
mod work;
mod works;

use std::sync::Arc;

use axum::routing::get;
use sapwood_kernel::Kernel;
use sapwood_proto::lmtp::Limits;
use tokio::io::{AsyncRead, AsyncWrite};

use self::house::House;
pub use self::lines::Ended;
use self::lines::Stream;
use self::socket::Sockets;
use crate::auth::{Access, Scope};
use crate::reception::{self, Protocol};
use crate::route::Route;
use crate::shared::{Face, Shared};
use crate::{metrics, socket as listening};

/// What can be set about this face.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections of all transports at a time; above it an upgrade is refused with 503 (LM-109).
    pub connections: usize,
    /// What one connection may hold and do.
    pub limits: Arc<Limits>,
    /// Sessions that can be come back to, with or without a connection; whoever negotiates above that gets none. 0 turns it off.
    pub resumable_sessions: usize,
    /// How many of them one key may have, or one address where there are no keys.
    pub resumable_sessions_each: usize,
    /// Connections at a time of one key, or of one network address where no key is needed; one more is refused.
    pub connections_each: usize,
    /// The model of messages that name none.
    pub default_model: Option<String>,
    /// Unknown members of GENERATE are refused instead of ignored (LM-207).
    pub strict_parameters: bool,
    /// The items of one step share a message; off gives one item per message (LM-601).
    pub coalesce: bool,
    /// A malformed message ends the connection, as at the reference server (LM-201).
    pub close_on_malformed: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            connections: 10_000,
            limits: Arc::default(),
            resumable_sessions: 1_000,
            resumable_sessions_each: 250,
            connections_each: 5_000,
            default_model: None,
            strict_parameters: false,
            coalesce: true,
            close_on_malformed: false,
        }
    }
}

/// LMTP over the models of a kernel, for every transport. Clones share it.
#[derive(Clone)]
pub struct Lmtp(Arc<House>);

impl Lmtp {
    /// Over the models of `kernel`.
    #[must_use]
    pub fn new(shared: Shared, kernel: Kernel, config: Config) -> Self {
        Self(Arc::new(House::new(shared, kernel, config)))
    }

    /// What is served over HTTP: WebSockets on `/lmtp` and `/`, and `POST /lmtp`.
    #[must_use]
    pub fn face(&self) -> Face {
        let drain = self.0.shared.drain.clone();
        let sockets: Arc<dyn Protocol> = Arc::new(Sockets(Arc::clone(&self.0)));
        let upgrades = reception::route(vec![Arc::clone(&sockets)], reception::PATIENT, drain);
        let house = Arc::clone(&self.0);
        let tokenizers = get(move |name, request| tokenizer::answer(house, name, request));
        let access = Access::Needs(Scope::Infer);
        Face {
            name: metrics::Face::Lmtp,
            routes: vec![
                Route::http("/lmtp", access, upgrades.post(post::handler(&self.0))),
                Route::http("/lmtp/tokenizer/{name}", access, tokenizers),
            ],
            root: Some(sockets),
            descriptors: Vec::new(),
            services: Vec::new(),
        }
    }

    /// Speaks lines over a pair of streams until both ends have had enough (LM-110). At the end of input running streams
    /// finish, or are `cancelled` at once if that is wished.
    pub async fn speak(
        &self,
        reader: impl AsyncRead + Send + Unpin,
        writer: impl AsyncWrite + Send + Unpin,
        cancel_at_end: bool,
    ) -> Ended {
        let stream = Stream::pair(reader, writer);
        lines::speak(&self.0, stream, None, cancel_at_end).await
    }

    /// Speaks lines with everybody who connects to a Unix socket, until the server is gone (LM-111).
    pub async fn listen(&self, socket: listening::Socket) {
        lines::listen(&self.0, socket).await;
    }
}

/// The face over the models of `kernel`.
#[must_use]
pub fn face(shared: Shared, kernel: Kernel, config: Config) -> Face {
    Lmtp::new(shared, kernel, config).face()
}
