//! LMTP, the Language Model Transport Protocol: token streams of the kernel's models over WebSockets (`socket`), lines
//! (`lines`) and HTTP (`post`).
//!
//! ```text
//!   socket │ lines │ post ──► ConnectionDriver ──► LmtpSession ──► Start ──► StreamWorks: runs of the kernel
//!                      ◄── one message per step ◄── step(pieces) ◄──────────────┘
//! ```

mod array_input;
mod catalog;
mod context;
mod detached;
mod driver;
mod line_input;
mod lines;
mod post;
mod recorder;
mod refusals;
mod socket;
mod text_codec;
mod tokenizer;
mod work;
mod works;

use std::sync::Arc;

use axum::routing::get;
use sapwood_kernel::Kernel;
use sapwood_proto::lmtp::ConnectionLimits;
use tokio::io::{AsyncRead, AsyncWrite};

use self::context::LmtpContext;
use self::lines::LineStream;
pub use self::lines::LinesEnd;
use self::socket::LmtpSockets;
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::{Face, ServerContext};
use crate::faces::socket_dispatch::{self, SocketProtocol};
use crate::http::route::Route;
use crate::listener::socket as listening;
use crate::ops::metrics;

/// The settings of this face.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections of all transports at a time; above it an upgrade is refused with 503 (LM-109).
    pub connections: usize,
    /// The limits of one connection.
    pub limits: Arc<ConnectionLimits>,
    /// Resumable sessions, with or without a connection; a client that negotiates above that gets none. 0 turns it off.
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
pub struct LmtpService(Arc<LmtpContext>);

impl LmtpService {
    /// Over the models of `kernel`.
    #[must_use]
    pub fn new(shared: ServerContext, kernel: Kernel, config: Config) -> Self {
        Self(Arc::new(LmtpContext::new(shared, kernel, config)))
    }

    /// The face over HTTP: WebSockets on `/lmtp` and `/`, and `POST /lmtp`.
    #[must_use]
    pub fn face(&self) -> Face {
        let drain = self.0.shared.drain.clone();
        let sockets: Arc<dyn SocketProtocol> = Arc::new(LmtpSockets(Arc::clone(&self.0)));
        // `/lmtp` has this protocol alone, and never waits for a first message; `/` shares it with Evergreen (LM-103).
        let upgrades = socket_dispatch::route(
            vec![Arc::clone(&sockets)],
            socket_dispatch::LONG_WAIT,
            drain,
        );
        let context = Arc::clone(&self.0);
        let tokenizers = get(move |name, request| tokenizer::answer(context, name, request));
        let context = Arc::clone(&self.0);
        let posts = move |request| post::answer(context, request);
        let access = RouteAccess::Needs(KeyScope::Infer);
        Face {
            name: metrics::FaceLabel::Lmtp,
            routes: vec![
                Route::http("/lmtp", access, upgrades.post(posts)),
                Route::http("/lmtp/tokenizer/{name}", access, tokenizers),
            ],
            root: Some(sockets),
            descriptors: Vec::new(),
            services: Vec::new(),
        }
    }

    /// Serves the line transport over a pair of streams until it ends (LM-110). At the end of input running streams
    /// finish, or are cancelled at once with `cancel_at_end`.
    pub async fn serve_connection(
        &self,
        reader: impl AsyncRead + Send + Unpin,
        writer: impl AsyncWrite + Send + Unpin,
        cancel_at_end: bool,
    ) -> LinesEnd {
        // Without an identity the client cannot resume: this is standard input and output, which nothing reconnects to.
        let stream = LineStream::pair(reader, writer);
        lines::serve_lines(&self.0, stream, None, cancel_at_end).await
    }

    /// Serves the line transport to all who connect to a Unix socket, until the server has drained (LM-111).
    pub async fn listen(&self, socket: listening::ListeningSocket) {
        lines::listen(&self.0, socket).await;
    }
}

/// The face over the models of `kernel`.
#[must_use]
pub fn face(shared: ServerContext, kernel: Kernel, config: Config) -> Face {
    LmtpService::new(shared, kernel, config).face()
}
