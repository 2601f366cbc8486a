//! Configuration, keys and outputs of an LMTP session: the types of its interface other than messages.

use std::sync::Arc;
use std::time::Duration;

use bytestring::ByteString;

use super::{
    BranchEvent, ConnectionLimits, Features, GenerateRequest, LmtpError, LmtpModelInfo, LmtpReason,
    Score, TokenItem,
};
use crate::steer::VariableWrite;

/// A stream of one session, in order of admission. Stale once the stream has ended; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey(pub(super) u64);

/// How messages are separated on the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageFraming {
    /// Frames: one message each going out, one or several coming in (LM-204).
    Frames,
    /// Lines: one message each, ended by `\n`.
    Lines,
}

/// Configuration of a session; fixed when it begins.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its limits.
    pub limits: Arc<ConnectionLimits>,
    /// The framing of its transport.
    pub carrier: MessageFraming,
    /// The model for messages that name none.
    pub default_model: Option<ByteString>,
    /// Whether unknown members of GENERATE are refused instead of ignored (LM-207).
    pub strict_parameters: bool,
    /// Whether the items of one step share a message; if off, each message has one item (LM-601).
    pub coalesce: bool,
    /// Whether each item is a message of its own, as an object instead of a list (LM-114).
    pub bare: bool,
    /// Whether a malformed message closes the connection, as the reference server does (LM-201).
    pub close_on_malformed: bool,
    /// The features of version 2 that may be negotiated.
    pub features: Features,
    /// Whether version 2 is in force from the first message on: subprotocol `lmtp.v2` (LM-905).
    pub negotiated: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Arc::default(),
            carrier: MessageFraming::Frames,
            default_model: None,
            strict_parameters: false,
            coalesce: true,
            bare: false,
            close_on_malformed: false,
            features: Features::BUILT,
            negotiated: false,
        }
    }
}

/// An output of the machine, for its shell to act on.
#[derive(Clone, Debug)]
pub enum LmtpOutput {
    /// Start this work. Its items are passed to [`super::LmtpSession::step`].
    Start(Box<StreamStart>),
    /// Stop the work of this stream; its key is stale.
    Cancel(StreamKey),
    /// Too many bytes are unsent: exclude all streams from further steps (LM-607).
    Park,
    /// All streams may continue.
    Unpark,
    /// Park one stream: its client is slow, or its replay buffer is full (LM-952, LM-964).
    ParkStream(StreamKey),
    /// The stream may continue.
    UnparkStream(StreamKey),
    /// The client negotiates resume: answer with [`super::LmtpSession::named`]. No message is handled before that.
    Name,
    /// The client resumes the session with this name: answer with [`super::LmtpSession::resumed`]. No message is
    /// handled before that.
    Resume(ByteString),
    /// Close the connection in order: all pending output was taken, or has timed out. No output follows.
    Close(LmtpClose),
    /// Reset the connection: its peer does not read. No output follows.
    Reset,
}

/// Work for one accepted stream.
#[derive(Clone, Debug)]
pub struct StreamStart {
    /// The stream, or one sample of it: each sample has work of its own.
    pub stream: StreamKey,
    /// The index of the sample; 0 for most streams.
    pub sample: u32,
    /// The model's name as the client sent it.
    pub name: ByteString,
    /// The model.
    pub model: Arc<LmtpModelInfo>,
    /// The work to do.
    pub work: StreamDemand,
    /// Its client wants status updates: pass them to [`super::LmtpSession::status`].
    pub statuses: bool,
    /// Its first item must have the prompt's log-probabilities: [`TokenItem::prompt`] (LM-974).
    pub prompt_logprobs: bool,
}

/// The work of a stream.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "a stream has one, and nearly every stream generates"
)]
pub enum StreamDemand {
    /// Generate tokens.
    Generate(GenerateRequest),
    /// Score tokens.
    Score(Score),
}

/// A result of a stream's work.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamPiece {
    /// A token.
    Item(TokenItem),
    /// What happens to a branch of a steered stream, by its number.
    Branch(u32, BranchEvent),
    /// A status; those of a step are sent before its items.
    Status(StreamUpdate),
    /// The end with an error.
    Failed(LmtpError),
}

/// A status of a stream or of the connection (LM-921).
#[derive(Clone, Debug, PartialEq)]
pub enum StreamUpdate {
    /// Its model is being loaded.
    Loading {
        /// Progress from 0 to 1, if known.
        progress: Option<f32>,
        /// Estimated remaining time.
        eta: Option<Duration>,
    },
    /// It waits for a slot.
    Queued {
        /// Number of streams before it in the queue.
        position: u64,
        /// Estimated waiting time.
        eta: Option<Duration>,
    },
    /// Its prompt is being prefilled.
    Prefill {
        /// Progress from 0 to 1.
        progress: f32,
    },
    /// It runs, after it has waited.
    Running,
    /// It runs slower than it could.
    Throttled {
        /// When that may be over.
        retry_after: Duration,
    },
    /// A warning about the stream.
    Warning {
        /// The text of the warning.
        message: String,
    },
    /// Its controller has printed something (LM-972).
    Log {
        /// The branch of the work; the client is sent the number of its sample.
        branch: u32,
        /// The text.
        message: String,
    },
    /// Its controller has written a variable (LM-972).
    Storage {
        /// The branch of the work; the client is sent the number of its sample.
        branch: u32,
        /// What was written.
        write: VariableWrite,
    },
    /// New streams are refused from now on.
    Draining {
        /// Time left for running streams.
        deadline: Option<Duration>,
    },
    /// The connection ends.
    Shutdown,
}

impl StreamUpdate {
    /// The event's name on the wire.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Loading { .. } => "loading",
            Self::Queued { .. } => "queued",
            Self::Prefill { .. } => "prefill",
            Self::Running => "running",
            Self::Throttled { .. } => "throttled",
            Self::Warning { .. } => "warning",
            Self::Log { .. } => "log",
            Self::Storage { .. } => "storage",
            Self::Draining { .. } => "draining",
            Self::Shutdown => "shutdown",
        }
    }
}

/// Input that the transport could not decode as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// More than [`ConnectionLimits::max_message_in`] bytes.
    TooLarge,
    /// Not UTF-8.
    BadText,
}

/// How a connection is closed, and the error that its open streams get first (LM-505).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LmtpClose {
    /// The WebSocket close code.
    pub code: u16,
    /// The error of its open streams.
    pub reason: LmtpReason,
    /// The message of that error, for humans.
    pub message: &'static str,
}

impl LmtpClose {
    /// All requests are done; there are no open streams.
    pub const FINISHED: Self = Self::new(1000, LmtpReason::ConnectionLost, "");
    /// Closed as the reference server does after a malformed message.
    pub const AS_REFERENCE: Self =
        Self::new(1000, LmtpReason::Malformed, "a malformed message was sent");
    /// The server is shutting down.
    pub const SHUTDOWN: Self = Self::new(1001, LmtpReason::Draining, "the server is shutting down");
    /// A text is not UTF-8.
    pub const BAD_TEXT: Self = Self::new(
        1007,
        LmtpReason::Malformed,
        "a message that is not UTF-8 was sent",
    );
    /// The key was revoked.
    pub const REVOKED: Self = Self::new(1008, LmtpReason::InsufficientScope, "the key was revoked");
    /// Too many malformed messages (LM-202).
    pub const MALFORMED: Self = Self::new(
        1008,
        LmtpReason::Malformed,
        "too many malformed messages were sent",
    );
    /// A frame above the limit (LM-1201).
    pub const TOO_LARGE: Self = Self::new(
        1009,
        LmtpReason::MessageTooLarge,
        "a message larger than max_message_in was sent",
    );
    /// An internal error.
    pub const INTERNAL: Self = Self::new(
        1011,
        LmtpReason::EngineError,
        "the server failed; try again",
    );

    const fn new(code: u16, reason: LmtpReason, message: &'static str) -> Self {
        Self {
            code,
            reason,
            message,
        }
    }
}

/// Counters of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LmtpStats {
    /// Streams accepted and passed to the shell.
    pub streams: u64,
    /// GENERATE and SCORE refused with an error item.
    pub refused: u64,
    /// Items sent, without errors.
    pub items_out: u64,
    /// Messages taken by the transport.
    pub messages_out: u64,
    /// Malformed messages.
    pub malformed: u64,
    /// Unknown members of GENERATE (LM-207).
    pub unknown_parameters: u64,
    /// Streams resumed on another connection or under another id (LM-963, LM-965).
    pub resumed: u64,
}
