//! The baseline of TR-1601: a bare axum handler that formats an event for each token that it receives from a channel.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use futures::StreamExt;
use http::header::CONTENT_TYPE;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Serves until the process ends. `period`: the delay of each stream between two tokens; `None`: no delay.
///
/// # Errors
/// Those of the listener.
pub async fn serve(listener: TcpListener, period: Option<Duration>) -> std::io::Result<()> {
    use axum::serve::ListenerExt;
    let listener = listener.tap_io(|io| {
        // Errors are ignored: a closed connection shows at the first write.
        let _ = io.set_nodelay(true);
    });
    let events = post(move || async move { events(period) });
    let routes = Router::new().route("/v2/models/load/generate_stream", events);
    axum::serve(listener, routes).await
}

fn events(period: Option<Duration>) -> Response {
    let (send, receive) = mpsc::channel::<u32>(WAITING);
    tokio::spawn(async move {
        let mut pace = period.map(tokio::time::interval);
        for token in 0.. {
            if let Some(pace) = &mut pace {
                pace.tick().await;
            }
            if send.send(token).await.is_err() {
                return;
            }
        }
    });
    let events = ReceiverStream::new(receive).map(|token| Ok::<_, Infallible>(event(token)));
    let kind = [(CONTENT_TYPE, "text/event-stream; charset=utf-8")];
    (kind, Body::from_stream(events)).into_response()
}

fn event(token: u32) -> Bytes {
    let mut out = String::with_capacity(EVENT_BYTES);
    // Writing to memory cannot fail.
    let _ = write!(
        out,
        "data: {{\"model_name\":\"load\",\"model_version\":\"1\",\"text_output\":\" w{:05}\"}}\n\n",
        token % 32_000
    );
    out.into()
}

/// Approximate bytes of an event.
const EVENT_BYTES: usize = 96;
/// Tokens that may wait in the channel.
const WAITING: usize = 16;
