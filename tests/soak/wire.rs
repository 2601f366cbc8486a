//! A proxy that cuts its connection once.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

/// Ends with all its connections when it is dropped.
pub(crate) struct Wire {
    pub(crate) address: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

impl Wire {
    /// A proxy to `server` that is cut after `bytes`, and uncut from then on.
    pub(crate) async fn cut_after(bytes: usize, server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            let mut share = bytes;
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(server).await else {
                    return;
                };
                pass(client, server, &AtomicUsize::new(share)).await;
                share = usize::MAX;
            }
        });
        Ok(Self {
            address,
            _task: AbortOnDropHandle::new(task),
        })
    }
}

/// Forwards both ways until the share is used up or one side has closed.
async fn pass(client: TcpStream, server: TcpStream, left: &AtomicUsize) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // Either may be cancelled: the other direction has ended, and with it the connection.
    tokio::select! {
        () = one_way(from_client, to_server, left) => {}
        () = one_way(from_server, to_client, left) => {}
    }
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    left: &AtomicUsize,
) {
    let mut buf = vec![0; 4_096];
    loop {
        let most = left.load(Ordering::Relaxed).min(buf.len());
        if most == 0 {
            return;
        }
        let Ok(read @ 1..) = from.read(&mut buf[..most]).await else {
            return;
        };
        let before = left.load(Ordering::Relaxed);
        left.store(before.saturating_sub(read), Ordering::Relaxed);
        if to.write_all(&buf[..read]).await.is_err() {
            return;
        }
    }
}
