//! A session over a WebSocket: the meaning of frames in each dialect, with half-close and end.
//!
//! ```text
//!   frame ──decode──► message | finish (EV-738, EV-924) | abort         message ──encode──► frame
//!   the end of a session:  finish | error messages, sent separately ──► close
//! ```

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::msgpack::calls::OpenActions;
use super::{
    Action, Chunk, Dialect, Fragment, Payload, Reason, Status, WebSocketFrame, WireMessage, json,
    msgpack, protobuf,
};
use crate::code::Code;
use crate::session::Side;

/// The content of a frame.
#[derive(Clone, Debug, PartialEq)]
pub enum FrameContent {
    /// A message for the session.
    Message(WireMessage),
    /// The peer sends nothing more, and waits for running actions (EV-109).
    Finish,
    /// The peer has aborted the session.
    Abort(Status),
    /// No content.
    Nothing,
}

/// A frame of the right kind that was not parsed yet. Parsing takes time in proportion to its size and needs no state
/// of the connection, so it can be done on another thread.
#[derive(Clone, Debug)]
pub struct UnreadFrame {
    dialect: Dialect,
    side: Side,
    bytes: Bytes,
}

/// A parsed frame, for [`Codec::take`].
#[derive(Debug)]
pub struct ParsedFrame(FrameParts);

#[derive(Debug)]
enum FrameParts {
    Nothing,
    Json(json::ParsedJson),
    Msgpack(msgpack::ParsedMsgpack),
    Protobuf(WireMessage),
}

impl UnreadFrame {
    /// Number of bytes to parse.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the frame is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Parses the frame.
    ///
    /// # Errors
    /// The dialect's errors.
    pub fn read(self) -> Result<ParsedFrame, Status> {
        let parts = match self.dialect {
            Dialect::Json => FrameParts::Json(json::decode(&self.bytes, self.side)?),
            // After JSON, whose parser refuses an empty text. In the binary dialects an empty message is a no-op
            // (EV-102).
            _ if self.bytes.is_empty() => FrameParts::Nothing,
            Dialect::Msgpack => FrameParts::Msgpack(msgpack::decode(self.bytes)?),
            Dialect::Protobuf | Dialect::Grpc => {
                FrameParts::Protobuf(protobuf::decode(self.bytes)?)
            }
        };
        Ok(ParsedFrame(parts))
    }
}

/// Close code and reason of a WebSocket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketClose {
    /// The close code.
    pub code: u16,
    /// At most 123 bytes.
    pub reason: String,
}

/// Encodes and decodes one side of a session on a WebSocket.
#[derive(Debug)]
pub struct Codec {
    dialect: Dialect,
    side: Side,
    calls: OpenActions,
    /// Whether the peer uses the layout of 0.1, and is answered in it (EV-732).
    older: bool,
    /// Whether a frame was of the wrong kind, which has a close code of its own (EV-701).
    wrong_kind: bool,
}

impl Codec {
    /// Creates the codec for `side` of a session in `dialect`, which is one of [`Dialect::OF_SOCKETS`].
    #[must_use]
    pub fn new(dialect: Dialect, side: Side) -> Self {
        Self {
            dialect,
            side,
            calls: OpenActions::default(),
            older: false,
            wrong_kind: false,
        }
    }

    /// The dialect.
    #[must_use]
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Whether output is sent as text messages.
    #[must_use]
    pub fn is_text(&self) -> bool {
        self.dialect == Dialect::Json
    }

    /// Decodes one frame.
    ///
    /// # Errors
    /// `BAD_MESSAGE` for a frame of the wrong kind, and the dialect's errors.
    pub fn decode(&mut self, frame: WebSocketFrame) -> Result<FrameContent, Status> {
        let parsed = self.unread(frame)?.read()?;
        Ok(self.take(parsed))
    }

    /// Checks a frame without parsing it: the first step of [`Codec::decode`], followed by [`UnreadFrame::read`] and
    /// [`Codec::take`], in the order of the frames.
    ///
    /// # Errors
    /// `BAD_MESSAGE` for a frame of the wrong kind.
    pub fn unread(&mut self, frame: WebSocketFrame) -> Result<UnreadFrame, Status> {
        let dialect = self.dialect;
        // Binary frames are accepted in every dialect: JSON may arrive in them too, as in the first frame (EV-701).
        let bytes = match (frame, dialect) {
            (WebSocketFrame::Text(_), dialect) if dialect != Dialect::Json => {
                self.wrong_kind = true;
                let what = "a text message in a session of a binary dialect";
                return Err(Status::new(Reason::BadMessage, what));
            }
            (WebSocketFrame::Text(bytes) | WebSocketFrame::Binary(bytes), _) => bytes,
        };
        Ok(UnreadFrame {
            dialect,
            side: self.side,
            bytes,
        })
    }

    /// Interprets a parsed frame in the state of this connection.
    pub fn take(&mut self, ParsedFrame(parts): ParsedFrame) -> FrameContent {
        match parts {
            FrameParts::Nothing => FrameContent::Nothing,
            FrameParts::Json(read) => read
                .error
                .map_or(FrameContent::Message(read.message), FrameContent::Abort),
            FrameParts::Msgpack(read) => self.take_msgpack(read),
            FrameParts::Protobuf(message) => into_content(message),
        }
    }

    /// Encodes one message. `now` is Unix time in microseconds, for the dialect whose statuses carry a timestamp.
    pub fn encode(&mut self, message: &WireMessage, now: i64, out: &mut BytesMut) {
        match self.dialect {
            Dialect::Json => json::encode(message, self.side, out),
            Dialect::Protobuf | Dialect::Grpc => {
                out.reserve(protobuf::encoded_len(message));
                protobuf::encode(message, out);
            }
            Dialect::Msgpack => {
                // `calls` has to see everything that is sent: a client's statuses are named after the ids made here,
                // and a server that aborts has to know which outputs are still open (EV-739).
                let mut ids = Vec::new();
                if self.side == Side::Client {
                    ids.extend(
                        message
                            .actions
                            .iter()
                            .map(|action| self.calls.asked(action)),
                    );
                } else {
                    message
                        .fragments
                        .iter()
                        .for_each(|fragment| self.calls.grown(fragment));
                }
                self.write_msgpack(message, &ids, now, out);
            }
        }
    }

    /// Encodes our half-close, if the dialect has a message for it: clients in every dialect, servers in msgpack only.
    /// Returns whether there is something to send.
    pub fn finish(&mut self, now: i64, out: &mut BytesMut) -> bool {
        match (self.dialect, self.side) {
            (Dialect::Msgpack, _) => self.write_msgpack(&WireMessage::default(), &[], now, out),
            (_, Side::Client) => {
                let finish = WireMessage {
                    actions: vec![Action {
                        name: FINISH.into(),
                        ..Action::default()
                    }],
                    ..WireMessage::default()
                };
                self.encode(&finish, now, out);
            }
            // The close frame is the end of a server in these dialects (EV-924).
            (_, Side::Server) => return false,
        }
        true
    }

    /// Encodes the last messages of an aborted session, to be sent separately and in this order (EV-739, EV-903).
    pub fn abort(&mut self, status: &Arc<Status>, now: i64) -> Vec<BytesMut> {
        let mut words = Vec::new();
        let mut out = BytesMut::new();
        if self.dialect == Dialect::Json {
            json::encode_error(status, &mut out);
            return vec![out];
        }
        if self.dialect == Dialect::Msgpack {
            // A 0.4.0 client is woken neither by `__abort__` nor by the close frame, and hangs if statuses and
            // `__abort__` share a message (EV-739).
            let failures = self.calls.failures(status);
            if !failures.fragments.is_empty() {
                self.write_msgpack(&failures, &[], now, &mut out);
                words.push(out.split());
            }
        }
        let last = Fragment {
            id: msgpack::ABORT.into(),
            last: true,
            chunk: Some(Chunk {
                metadata: None,
                payload: Some(Payload::Status(Some(Arc::clone(status)))),
            }),
            ..Fragment::default()
        };
        let message = WireMessage {
            fragments: [last].into_iter().collect(),
            ..WireMessage::default()
        };
        self.encode(&message, now, &mut out);
        words.push(out);
        words
    }

    /// The close frame for a session that ended with `status`.
    #[must_use]
    pub fn close(&self, status: Option<&Status>) -> SocketClose {
        let Some(status) = status else {
            return SocketClose {
                code: NORMAL,
                reason: String::new(),
            };
        };
        let code = match status.known() {
            Some(Reason::BadMessage) if self.wrong_kind => UNSUPPORTED,
            // Before the arm for msgpack: errors of the WebSocket message itself have their close codes in every
            // dialect (EV-701, EV-705).
            Some(reason @ (Reason::BadMessage | Reason::MessageTooLarge)) => reason.close(),
            // Clients of 0.4.0 know no other close code (EV-739).
            _ if self.dialect == Dialect::Msgpack => INTERNAL,
            known => known.map_or(INTERNAL, Reason::close),
        };
        SocketClose {
            code,
            reason: reason_text(status),
        }
    }

    fn take_msgpack(&mut self, read: msgpack::ParsedMsgpack) -> FrameContent {
        let mut message = read.message;
        // Before the half-close returns: it has to be answered in the peer's layout as well.
        self.older |= read.older;
        if message.fragments.is_empty() && message.actions.is_empty() {
            // With headers it is not a half-close, only a message without content (EV-738).
            let silent = !read.headers;
            return if silent {
                FrameContent::Finish
            } else {
                FrameContent::Nothing
            };
        }
        match self.side {
            Side::Server => {
                for (id, action) in read.ids.iter().zip(&mut message.actions) {
                    self.calls.received(id, action);
                }
            }
            Side::Client => self.calls.note_received(&mut message),
        }
        into_content(message)
    }

    fn write_msgpack(
        &self,
        message: &WireMessage,
        ids: &[super::NodeId],
        now: i64,
        out: &mut BytesMut,
    ) {
        let context = msgpack::EncodeContext {
            ids,
            now,
            older: self.older,
        };
        msgpack::encode(message, context, out);
    }
}

/// The reason of a close frame: code and reason of the status (EV-903).
#[must_use]
pub fn reason_text(status: &Status) -> String {
    let mut text = format!("{}: {}", status.code.grpc_name(), status.reason);
    // The reason may be a peer's, of any length; a longer control frame would be a protocol error.
    let fits = (0..=text.len().min(REASON_BYTES))
        .rev()
        .find(|&len| text.is_char_boundary(len));
    text.truncate(fits.unwrap_or_default());
    text
}

/// The status for a close frame of the peer that no error message preceded; `None` for a normal end.
#[must_use]
pub fn status_of_close(code: u16, reason: &str) -> Option<Status> {
    if matches!(code, NORMAL | NO_CODE) {
        return None;
    }
    // Code and reason as `reason_text` writes them; any other text has no reason of ours in it.
    let name = reason.rsplit(": ").next().unwrap_or_default();
    Some(match Reason::from_name(name) {
        Some(known) => Status::new(known, "the peer closed the connection"),
        None => Status::other(
            Code::Unavailable,
            "",
            format!("the peer closed the connection with code {code}"),
        ),
    })
}

/// Converts a message; one with a final fragment `__abort__` is the peer's abort, whatever else it contains.
fn into_content(message: WireMessage) -> FrameContent {
    let mut fragments = message.fragments.iter();
    let last = fragments.find(|fragment| fragment.last && *fragment.id == *msgpack::ABORT);
    let Some(last) = last else {
        return FrameContent::Message(message);
    };
    match last.chunk.as_ref().and_then(|chunk| chunk.payload.as_ref()) {
        Some(Payload::Status(Some(status))) => FrameContent::Abort(Status::clone(status)),
        // Without a readable error status the peer has ended the session all the same.
        _ => FrameContent::Abort(Status::new(Reason::Cancelled, "the peer ended the session")),
    }
}

/// The reserved action of EV-924.
pub const FINISH: &str = "FINISH";
const NORMAL: u16 = 1000;
const UNSUPPORTED: u16 = 1003;
/// The code that libraries report for a close frame without a code.
const NO_CODE: u16 = 1005;
const INTERNAL: u16 = 1011;
/// RFC 6455: a control frame has 125 bytes, two of which are the code.
const REASON_BYTES: usize = 123;

#[cfg(test)]
mod tests;
