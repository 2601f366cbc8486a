//! Connects a local line transport with a remote LMTP server, for use in a shell pipe (LM-110).
//!
//! ```text
//!   reader ─ lines ─► peer        reader ended ─► until everything is answered ─► Finished
//!   writer ◄─ lines ─ peer        peer or writer closed ─► Cut
//! ```

use std::collections::{HashMap, HashSet};

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use futures::{FutureExt, StreamExt};
use sapwood_proto::lmtp::{LineSplitter, LmtpError, WireLine};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::wire::LmtpConnection;
use super::{ConnectOptions, PeerAddress};
use crate::connection::MESSAGE_BYTES_MAX;

/// How a bridge ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BridgeEnd {
    /// The input has ended, and everything was answered or `cancel` was set.
    Finished,
    /// The peer, or the reader of the output, has disconnected.
    Cut,
}

/// Forwards lines to a peer and back. At the end of input it continues until everything is answered, or ends if
/// `cancel`. A line that only LMTP's own tolerant JSON parser accepts (`NaN`) is forwarded, but its answer is not
/// waited for.
///
/// # Errors
/// As [`super::LmtpClient::connect`].
pub async fn bridge(
    address: &PeerAddress,
    options: &ConnectOptions,
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin,
    cancel: bool,
) -> Result<BridgeEnd, LmtpError> {
    let wire = LmtpConnection::to(address, options).await?;
    Ok(pass(wire, reader, writer, cancel).await)
}

async fn pass(
    mut wire: LmtpConnection,
    mut reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    cancel: bool,
) -> BridgeEnd {
    let mut cut = LineSplitter::new(MESSAGE_BYTES_MAX);
    let (mut buffer, mut out) = (BytesMut::new(), BytesMut::new());
    let (mut open, mut ahead) = (PendingCalls::default(), None::<Bytes>);
    let (mut ended, mut removed) = (false, false);
    loop {
        while ahead.is_none()
            // One line at a time: while the peer takes no more, the input is not read on, and the local writer waits in
            // its pipe.
            && let Some(line) = cut
                .next_line()
                .or_else(|| ended.then(|| cut.last_line()).flatten())
        {
            match line {
                WireLine::Text(text) => {
                    // Before it is sent, so that an answer cannot come first.
                    open.asked(&text);
                    ahead = Some(text.into_bytes());
                }
                WireLine::BadText | WireLine::TooLong => out.extend_from_slice(NO_MESSAGE),
            }
        }
        if !out.is_empty() {
            // Meanwhile nothing is received: a local reader that is slow holds up the peer.
            let written = writer.write_all_buf(&mut out).await;
            if written.is_err() || writer.flush().await.is_err() {
                return BridgeEnd::Cut;
            }
        }
        if ended && ahead.is_none() && (cancel || open.is_answered()) {
            return BridgeEnd::Finished;
        }
        // After the output is written: what the peer sent before it left still reaches the reader.
        if removed {
            return BridgeEnd::Cut;
        }
        buffer.clear();
        // Every branch is cancel-safe: unread input stays in its reader, and an unused permit is returned.
        tokio::select! {
            place = wire.outgoing.reserve(), if ahead.is_some() => match (place, ahead.take()) {
                (Ok(target), Some(message)) => target.send(message),
                _ => return BridgeEnd::Cut,
            },
            read = reader.read_buf(&mut buffer), if ahead.is_none() && !ended => match read {
                Ok(1..) => cut.push(&buffer),
                // A failure to read is a half-close like the end of input: running streams finish (LM-110).
                Ok(0) | Err(_) => ended = true,
            },
            reply = wire.incoming.next() => {
                let mut reply = Some(reply);
                // Everything that is ready is written in one batch.
                while let Some(received) = reply {
                    let Some(text) = received else {
                        removed = true;
                        break;
                    };
                    open.answered(&text);
                    out.extend_from_slice(text.as_bytes());
                    out.extend_from_slice(b"\n");
                    let more = out.len() < BATCH_BYTES;
                    reply = more.then(|| wire.incoming.next().now_or_never()).flatten();
                }
            }
        }
    }
}

/// Calls that are not answered yet, by the bytes of their ids.
#[derive(Default)]
struct PendingCalls {
    streams: HashSet<String>,
    requests: HashMap<String, usize>,
}

/// The members of a message that matter here.
#[derive(Deserialize)]
struct MessageHead<'a> {
    #[serde(borrow)]
    stream_id: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

impl PendingCalls {
    fn asked(&mut self, text: &ByteString) {
        let Some((word, payload)) = text.split_once(' ') else {
            return;
        };
        let Ok(MessageHead {
            stream_id: Some(id),
            ..
        }) = serde_json::from_str(payload)
        else {
            return;
        };
        match word {
            // The id of a stream is unique while it lives (LM-508). Requests may share theirs, so they are counted.
            "GENERATE" | "SCORE" => {
                self.streams.insert(id.get().to_owned());
            }
            // An ACK has no answer.
            "ACK" => {}
            _ => *self.requests.entry(id.get().to_owned()).or_default() += 1,
        }
    }

    fn answered(&mut self, text: &ByteString) {
        let Some((word, payload)) = text.split_once(' ') else {
            return;
        };
        // What cannot be read as a list ends no call: the bridge then runs until the peer disconnects.
        let items: Vec<MessageHead<'_>> = serde_json::from_str(payload).unwrap_or_default();
        for MessageHead {
            stream_id,
            finish_reason,
            error,
        } in items
        {
            let Some(id) = stream_id else { continue };
            // Every item has a `finish_reason`, which is `null` until the last; `null` is read as `None`.
            let over = finish_reason.is_some() || error.is_some();
            if word == "TOKEN" && over {
                self.streams.remove(id.get());
            }
            if word == "MSG"
                && let Some(count) = self.requests.get_mut(id.get())
            {
                *count -= 1;
                if *count == 0 {
                    self.requests.remove(id.get());
                }
            }
        }
    }

    fn is_answered(&self) -> bool {
        self.streams.is_empty() && self.requests.is_empty()
    }
}

/// The answer to a line that cannot be forwarded.
const NO_MESSAGE: &[u8] = b"MSG [{\"stream_id\":null,\"error\":\"a line is not UTF-8, or is longer than 16 MiB\",\"code\":\"message_too_large\"}]\n";
/// The maximum of bytes written at once.
const BATCH_BYTES: usize = 64 * 1024;
