//! The server under test: a model behind the Triton face and our own listener.

use anyhow::Result;
use sapwood_kernel::Kernel;
use sapwood_server::faces::generate;
use sapwood_server::server::{Config, Server};
use tokio::net::TcpListener;

/// Serves until the process ends.
///
/// # Errors
/// If the server cannot be built.
pub async fn serve(listener: TcpListener, kernel: Kernel) -> Result<()> {
    let builder = Server::builder(Config::default(), Vec::new())?;
    let shared = builder.shared().clone();
    let face = generate::face(shared, kernel, generate::Config::default());
    builder
        .face(face)
        .build()?
        .serve(listener, std::future::pending())
        .await;
    Ok(())
}
