//! The anchor of TR-1601: a bare axum handler that formats an event for each token it gets from a channel.

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

/// Serves until the process ends. `period`: how long each stream waits between two tokens; none: not at all.
///
/// # Errors
/// Those of the listener.
pub async fn serve(listener: TcpListener, period: Option<Duration>) -> std::io::Result<()> {
    use axum::serve::ListenerExt;
    let listener = listener.tap_io(|io| {
        // A connection that is gone already shows it at the first write.
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
    // Writing to memory does not fail.
    let _ = write!(
        out,
        "data: {{\"model_name\":\"load\",\"model_version\":\"1\",\"text_output\":\" w{:05}\"}}\n\n",
        token % 32_000
    );
    out.into()
}

/// About what an event takes.
const EVENT_BYTES: usize = 96;
/// Tokens that may wait.
const WAITING: usize = 16;
