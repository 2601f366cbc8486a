//! The baselines of section 12 of the LMTP page: WebSockets that send items without sessions and without an engine.

use std::fmt::Write as _;

use futures::{SinkExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::{self, Message, Utf8Bytes};

/// The work of a bare sender for every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// Sends frames that were made in advance (baseline A).
    Recorded,
    /// Formats the same items each time (baseline B).
    Formatted,
}

/// Serves until the process ends; every frame holds an item of each of `streams` streams.
///
/// # Errors
/// Those of the listener.
pub async fn serve(listener: TcpListener, sender: Sender, streams: u32) -> std::io::Result<()> {
    loop {
        let (io, _) = listener.accept().await?;
        io.set_nodelay(true)?;
        tokio::spawn(async move {
            // A round ends by closing the connection.
            let _ = send(io, sender, streams).await;
        });
    }
}

async fn send(io: TcpStream, sender: Sender, streams: u32) -> Result<(), tungstenite::Error> {
    let mut socket = accept_async(io).await?;
    let _began = socket.next().await;
    let recorded: Vec<Utf8Bytes> = (0..RECORDED)
        .map(|step| Utf8Bytes::from(frame(step, streams)))
        .collect();
    for step in 0.. {
        let text = match sender {
            Sender::Recorded => recorded[step as usize % recorded.len()].clone(),
            Sender::Formatted => Utf8Bytes::from(frame(step, streams)),
        };
        socket.send(Message::Text(text)).await?;
    }
    Ok(())
}

/// Frames made in advance.
const RECORDED: u32 = 64;

/// One item of each stream, formatted as in LM-208.
fn frame(step: u32, streams: u32) -> String {
    let mut out = String::with_capacity(ITEM_BYTES * streams as usize);
    out.push_str("TOKEN [");
    for stream in 1..=streams {
        let dice = step
            .wrapping_mul(2_654_435_761)
            .wrapping_add(stream.wrapping_mul(40_503));
        let token = dice % 32_000;
        // An integer of 24 bits is exact in an f32.
        #[allow(clippy::cast_precision_loss, reason = "24 bits fit")]
        let logprob = -((dice >> 8) as f32) / 4_000_000.0;
        let comma = if stream == 1 { "" } else { "," };
        // Writing to memory cannot fail.
        let _ = write!(
            out,
            "{comma}{{\"token\":{token},\"stream_id\":{stream},\"logprob\":{logprob:?},\"finish_reason\":null,\"top_logprobs\":{{\"{token}\":{logprob:?}}}}}"
        );
    }
    out.push(']');
    out
}

/// Approximate bytes of an item.
const ITEM_BYTES: usize = 110;
