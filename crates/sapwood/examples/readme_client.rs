//! Calls a server's functions as if they were here.
#![expect(clippy::print_stdout, reason = "a program that prints")]

use futures::StreamExt;
use sapwood::kernel::{Kernel, args, connect::evergreen::import};
use sapwood::net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let session = ClientSession::connect(
        &ServerAddress::new("http://127.0.0.1:8000"),
        ClientSessionOptions::default(),
    )
    .await?;
    let kernel = Kernel::default();
    kernel.add_all(import(&session).await?)?;
    let mut run = kernel.run::<String>(
        "GENERATE",
        args! { prompt: "What is the capital of Japan?" },
    );
    while let Some(piece) = run.next().await {
        print!("{}", piece?);
    }
    Ok(())
}
