//! Inputs and outputs of an LMTP session beside messages.

use std::sync::Arc;
use std::time::Duration;

use bytestring::ByteString;

use super::{
    ConnectionLimits, Features, GenerateRequest, LmtpError, LmtpModelInfo, LmtpReason, Score,
    TokenItem,
};

/// A stream of one session, in order of admission. Stale once the stream has ended; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey(pub(super) u64);

/// What separates messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageFraming {
    /// Frames: one message each going out, one or several coming in (LM-204).
    Frames,
    /// Lines: one message each, ended by `\n`.
    Lines,
}

/// How a session behaves; fixed when it begins.
#[derive(Clone, Debug)]
pub struct Config {
    /// What it may hold and do.
    pub limits: Arc<ConnectionLimits>,
    /// What its transport is made of.
    pub carrier: MessageFraming,
    /// The model of messages that name none.
    pub default_model: Option<ByteString>,
    /// Whether unknown members of GENERATE are refused instead of ignored (LM-207).
    pub strict_parameters: bool,
    /// Whether the items of one step share a message; off gives one item per message (LM-601).
    pub coalesce: bool,
    /// Whether each item is a message of its own, as an object instead of a list (LM-114).
    pub bare: bool,
    /// Whether a malformed message ends the connection, as at the reference server (LM-201).
    pub close_on_malformed: bool,
    /// What may be negotiated of version 2.
    pub features: Features,
    /// Whether it is in force from the first message on: subprotocol `lmtp.v2` (LM-905).
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

/// What the machine asks of its shell.
#[derive(Clone, Debug)]
pub enum LmtpOutput {
    /// Do this work. Its items go into [`super::LmtpSession::step`].
    Start(Box<StreamStart>),
    /// Stop the work of this stream; its key is stale.
    Cancel(StreamKey),
    /// Too much waits to be sent: let no stream take part in further steps (LM-607).
    Park,
    /// They may go on.
    Unpark,
    /// One stream stands still: its client or the room for it is behind (LM-952, LM-964).
    ParkStream(StreamKey),
    /// It may go on.
    UnparkStream(StreamKey),
    /// The client wants to be able to come back: answer with [`super::LmtpSession::named`]. Nothing is read before.
    Name,
    /// The client comes back to the session of this name: answer with [`super::LmtpSession::resumed`]. Nothing is read before.
    Resume(ByteString),
    /// Close the connection in order; everything that had to be said was taken, or had its time. Nothing follows.
    Close(LmtpClose),
    /// Break the connection off: its peer does not read. Nothing follows.
    Reset,
}

/// Work for one accepted stream.
#[derive(Clone, Debug)]
pub struct StreamStart {
    /// The stream, or one sample of it: each has work of its own.
    pub stream: StreamKey,
    /// Which sample; 0 for most streams.
    pub sample: u32,
    /// What the client called the model.
    pub name: ByteString,
    /// The model.
    pub model: Arc<LmtpModelInfo>,
    /// What to do with it.
    pub work: StreamDemand,
    /// Its client wants to know how it is: give that to [`super::LmtpSession::status`].
    pub statuses: bool,
    /// Its first item is to say how likely the prompt is: [`TokenItem::prompt`] (LM-974).
    pub prompt_logprobs: bool,
}

/// What a stream wants.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamDemand {
    /// Tokens.
    Generate(GenerateRequest),
    /// The probabilities of tokens.
    Score(Score),
}

/// What work gives.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamPiece {
    /// A token.
    Item(TokenItem),
    /// The end, badly.
    Failed(LmtpError),
}

/// A status of a stream or of the connection (LM-921).
#[derive(Clone, Debug, PartialEq)]
pub enum StreamUpdate {
    /// Its model is being loaded.
    Loading {
        /// From 0 to 1, if that is known.
        progress: Option<f32>,
        /// How long it may still take.
        eta: Option<Duration>,
    },
    /// It waits for a place.
    Queued {
        /// How many wait before it.
        position: u64,
        /// How long that may take.
        eta: Option<Duration>,
    },
    /// Its prompt is being computed.
    Prefill {
        /// From 0 to 1.
        progress: f32,
    },
    /// It runs, after it waited.
    Running,
    /// It is slower than it might be.
    Throttled {
        /// When that may be over.
        retry_after: Duration,
    },
    /// Something about it is not as its client may think.
    Warning {
        /// What.
        message: String,
    },
    /// New streams are refused from here on.
    Draining {
        /// How long running ones have.
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
            Self::Draining { .. } => "draining",
            Self::Shutdown => "shutdown",
        }
    }
}

/// What the transport could not make a text of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// More than [`ConnectionLimits::max_message_in`] bytes.
    TooLarge,
    /// No UTF-8.
    BadText,
}

/// How a connection is closed, and the error that its open streams get first (LM-505).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LmtpClose {
    /// The WebSocket close code.
    pub code: u16,
    /// What streams end with.
    pub reason: LmtpReason,
    /// For people.
    pub message: &'static str,
}

impl LmtpClose {
    /// Everything that was asked is done; there are no open streams.
    pub const FINISHED: Self = Self::new(1000, LmtpReason::ConnectionLost, "");
    /// As the reference server closes after a malformed message.
    pub const AS_REFERENCE: Self =
        Self::new(1000, LmtpReason::Malformed, "a malformed message was sent");
    /// The server stops.
    pub const SHUTDOWN: Self = Self::new(1001, LmtpReason::Draining, "the server is shutting down");
    /// A text that is not UTF-8.
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
    /// A defect of ours.
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

/// What a session has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LmtpStats {
    /// Streams accepted and given to the shell.
    pub streams: u64,
    /// GENERATE and SCORE refused with an error item.
    pub refused: u64,
    /// Items sent, errors left out.
    pub items_out: u64,
    /// Messages taken.
    pub messages_out: u64,
    /// Malformed messages.
    pub malformed: u64,
    /// Unknown members of GENERATE (LM-207).
    pub unknown_parameters: u64,
    /// Streams that went on elsewhere or under another id (LM-963, LM-965).
    pub resumed: u64,
}
