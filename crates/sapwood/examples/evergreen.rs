//! Asks a server over Evergreen and prints the answer as it comes.

use std::io::Write;

use futures::StreamExt;
use sapwood::kernel::{Kernel, args, connect::evergreen::import};
use sapwood::net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "http://127.0.0.1:8000".into());
    let session =
        ClientSession::connect(&ServerAddress::new(server), ClientSessionOptions::default())
            .await?;
    let kernel = Kernel::default();
    kernel.add_all(import(&session).await?)?;
    let mut run = kernel.run::<String>("GENERATE", args! { prompt: "Why is the sky blue?" });
    let mut out = std::io::stdout();
    while let Some(piece) = run.next().await {
        out.write_all(piece?.as_bytes())?;
        out.flush()?;
    }
    Ok(())
}
