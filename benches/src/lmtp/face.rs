//! The server under test: a scripted model behind the LMTP face and our own listener.
//!
//! Owns: its settings. Refuses to know: the load.

use anyhow::Result;
use sapwood_server::lmtp;
use sapwood_server::server::{Config, Server};
use tokio::net::TcpListener;

use crate::scripted;

/// Serves until the process ends.
///
/// # Errors
/// If the server cannot be put together.
pub async fn serve(listener: TcpListener) -> Result<()> {
    let builder = Server::builder(Config::default(), Vec::new())?;
    let shared = builder.shared().clone();
    let face = lmtp::face(shared, scripted::kernel()?, lmtp::Config::default());
    builder
        .face(face)
        .build()?
        .serve(listener, std::future::pending())
        .await;
    Ok(())
}
