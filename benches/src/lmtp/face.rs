//! The server under test: a scripted model behind the LMTP face and our own listener.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use sapwood_engine::scripted::Config as Script;
use sapwood_server::faces::lmtp;
use sapwood_server::server::{Config, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::scripted;

/// Serves this model until the process ends.
///
/// # Errors
/// If the server cannot be built.
pub async fn serve(listener: TcpListener, model: Script) -> Result<()> {
    let builder = Server::builder(Config::default(), Vec::new())?;
    let shared = builder.shared().clone();
    let (kernel, engine) = scripted::kernel_and_engine(model)?;
    shared.metrics.watch(engine);
    let face = lmtp::face(shared, kernel, lmtp::Config::default());
    builder
        .face(face)
        .build()?
        .serve(listener, std::future::pending())
        .await;
    Ok(())
}

/// The value of the first sample in a server's `/metrics` whose name and labels begin with this text.
///
/// # Errors
/// If there is no such sample.
pub async fn metric(address: SocketAddr, name: &str) -> Result<f64> {
    let mut io = TcpStream::connect(address).await?;
    let request = "GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n";
    io.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    io.read_to_string(&mut answer).await?;
    let line = answer.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.rsplit(' ').next());
    let value = value.with_context(|| format!("the server counts no {name}"))?;
    Ok(value.parse()?)
}
