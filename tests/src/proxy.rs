//! A proxy to a server, which can be cut.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// A proxy between client and server; when it is dropped, its connections end.
pub struct Proxy {
    /// Its address for clients.
    pub address: SocketAddr,
    cuts: watch::Sender<u64>,
    hangs: watch::Sender<bool>,
    _task: AbortOnDropHandle<()>,
}

impl Proxy {
    /// A proxy to the server at `to`.
    pub async fn to(to: SocketAddr) -> Self {
        Self::from(Ipv4Addr::LOCALHOST, to).await
    }

    /// The same, with connections to the server from this address of the loopback network.
    pub async fn from(from: Ipv4Addr, to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cuts, _) = watch::channel(0);
        let (hangs, _) = watch::channel(false);
        let (cut, hang) = (cuts.clone(), hangs.clone());
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (mut cut, mut hang) = (cut.subscribe(), hang.subscribe());
                tokio::spawn(async move {
                    let socket = TcpSocket::new_v4().unwrap();
                    socket.bind((from, 0).into()).unwrap();
                    let Ok(mut server) = socket.connect(to).await else {
                        return;
                    };
                    // All may be cancelled: bytes in flight are lost, as with a cut cable.
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => return,
                        _ = cut.changed() => return,
                        _ = hang.wait_for(|hangs| *hangs) => {}
                    }
                    // Both ends stay connected, and nothing is forwarded.
                    let _ = cut.changed().await;
                });
            }
        });
        Self {
            address,
            cuts,
            hangs,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Stops forwarding on every connection without closing any, like a server that hangs.
    pub fn hang(&self) {
        self.hangs.send_replace(true);
    }

    /// Cuts every connection; new ones can be made.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}
