//! The server under test: a kernel with the test functions behind the Evergreen face and our own listener.

use anyhow::Result;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_server::faces::evergreen;
use sapwood_server::server::{Config, Server};
use tokio::net::TcpListener;

/// Serves until the process ends; `coalesce` joins ready fragments into messages.
///
/// # Errors
/// If the server cannot be built.
pub async fn serve(listener: TcpListener, coalesce: bool) -> Result<()> {
    let kernel = Kernel::new();
    kernel.add_all(test_functions())?;
    let builder = Server::builder(Config::default(), Vec::new())?;
    let config = evergreen::Config {
        coalesce,
        ..evergreen::Config::default()
    };
    let face = evergreen::face(builder.shared().clone(), kernel, config);
    builder
        .face(face)
        .build()?
        .serve(listener, std::future::pending())
        .await;
    Ok(())
}
