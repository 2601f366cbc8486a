//! Serves a WebSocket that sends back what it receives, for Autobahn's test suite:
//!
//! ```text
//! cargo run --release -p sapwood-server --features echo --example websocket_echo -- 127.0.0.1:9001
//! wstest -m fuzzingclient -s fuzzingclient.json      with {"servers": [{"url": "ws://127.0.0.1:9001/echo"}], "cases": ["*"]}
//! ```
//!
//! Cases 2.10 and 2.11 may fail on purpose: they want an answer to each of ten pings, and of pings that come together the last has one
//! (RFC 6455, section 5.5.3). Cases 12 and 13 (compression) are not implemented: the server declines extensions.

use std::error::Error;

use sapwood_server::{Config, Server, echo};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1);
    let address = address.unwrap_or_else(|| "127.0.0.1:9001".to_owned());
    let server = Server::builder(Config::default(), Vec::new())?;
    let server = server.face(echo::face()).build()?;
    let socket = TcpListener::bind(address).await?;
    let interrupted = async {
        // Without signals it serves until it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    server.serve(socket, interrupted).await;
    Ok(())
}
