//! Lines here, a peer there: what a shell pipe needs to talk to a server elsewhere (LM-110).
//!
//! Owns: [`bridge`], and which of the messages that went out are still to be answered, so that the end of the input is not the end
//! of what was asked. Refuses to know: what messages mean beyond that; they pass as they are.
//!
//! ```text
//!   reader ─ lines ─► peer        reader ended ─► until everything is answered ─► Finished
//!   writer ◄─ lines ─ peer        peer or writer gone ─► Cut
//! ```

use std::collections::{HashMap, HashSet};

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use futures::{FutureExt, StreamExt};
use sapwood_proto::lmtp::{Fault, Line, Lines};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::wire::{MESSAGE_BYTES_MAX, Wire};
use super::{Address, Options};

/// How a bridge ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bridged {
    /// The input has ended, and everything was answered or nothing was to be waited for.
    Finished,
    /// The peer, or whoever reads our output, has gone.
    Cut,
}

/// Passes lines to a peer and back. At the end of input it goes on until everything is answered, or ends if `cancel`. A line that
/// only LMTP's own tolerant JSON reads (`NaN`) is passed, and not waited for.
///
/// # Errors
/// As [`super::Client::connect`].
pub async fn bridge(
    address: &Address,
    options: &Options,
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin,
    cancel: bool,
) -> Result<Bridged, Fault> {
    let wire = Wire::to(address, options).await?;
    Ok(pass(wire, reader, writer, cancel).await)
}

async fn pass(
    mut wire: Wire,
    mut reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    cancel: bool,
) -> Bridged {
    let mut cut = Lines::new(MESSAGE_BYTES_MAX);
    let (mut buffer, mut out) = (BytesMut::new(), BytesMut::new());
    let (mut open, mut ahead) = (Open::default(), None::<Bytes>);
    let (mut ended, mut gone) = (false, false);
    loop {
        while ahead.is_none()
            && let Some(line) = cut
                .next_line()
                .or_else(|| ended.then(|| cut.last_line()).flatten())
        {
            match line {
                Line::Text(text) => {
                    open.asked(&text);
                    ahead = Some(text.into_bytes());
                }
                Line::BadText | Line::TooLong => out.extend_from_slice(NO_MESSAGE),
            }
        }
        if !out.is_empty() {
            let written = writer.write_all_buf(&mut out).await;
            if written.is_err() || writer.flush().await.is_err() {
                return Bridged::Cut;
            }
        }
        if ended && ahead.is_none() && (cancel || open.is_answered()) {
            return Bridged::Finished;
        }
        if gone {
            return Bridged::Cut;
        }
        buffer.clear();
        // Every arm may be cancelled: what was not read is still there, and a place that was not taken goes back.
        tokio::select! {
            place = wire.outgoing.reserve(), if ahead.is_some() => match (place, ahead.take()) {
                (Ok(place), Some(message)) => place.send(message),
                _ => return Bridged::Cut,
            },
            read = reader.read_buf(&mut buffer), if ahead.is_none() && !ended => match read {
                Ok(1..) => cut.push(&buffer),
                Ok(0) | Err(_) => ended = true,
            },
            said = wire.incoming.next() => {
                let mut said = Some(said);
                // What is there already is written together.
                while let Some(heard) = said {
                    let Some(text) = heard else {
                        gone = true;
                        break;
                    };
                    open.answered(&text);
                    out.extend_from_slice(text.as_bytes());
                    out.extend_from_slice(b"\n");
                    let more = out.len() < BATCH_BYTES;
                    said = more.then(|| wire.incoming.next().now_or_never()).flatten();
                }
            }
        }
    }
}

/// What was asked and is not answered yet, by the bytes of its id.
#[derive(Default)]
struct Open {
    streams: HashSet<String>,
    requests: HashMap<String, usize>,
}

/// What of a message is looked at.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow)]
    stream_id: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

impl Open {
    fn asked(&mut self, text: &ByteString) {
        let Some((word, payload)) = text.split_once(' ') else {
            return;
        };
        let Ok(Head {
            stream_id: Some(id),
            ..
        }) = serde_json::from_str(payload)
        else {
            return;
        };
        match word {
            "GENERATE" | "SCORE" => {
                self.streams.insert(id.get().to_owned());
            }
            // It has no answer.
            "ACK" => {}
            _ => *self.requests.entry(id.get().to_owned()).or_default() += 1,
        }
    }

    fn answered(&mut self, text: &ByteString) {
        let Some((word, payload)) = text.split_once(' ') else {
            return;
        };
        let items: Vec<Head<'_>> = serde_json::from_str(payload).unwrap_or_default();
        for Head {
            stream_id,
            finish_reason,
            error,
        } in items
        {
            let Some(id) = stream_id else { continue };
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

/// What a line is answered that cannot be passed on.
const NO_MESSAGE: &[u8] = b"MSG [{\"stream_id\":null,\"error\":\"a line that is no UTF-8 or longer than 16 MiB\",\"code\":\"message_too_large\"}]\n";
/// Written at once.
const BATCH_BYTES: usize = 64 * 1024;
