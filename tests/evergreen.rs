//! The Evergreen face, from a client's end of a real socket.
//!
//! Owns: the server that these tests talk to. Refuses to know: the rest of the house.

mod loopback;

use std::net::SocketAddr;

use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_net::evergreen::{Address, Options, Session};
use sapwood_server::evergreen::{self, Config};
use sapwood_server::server::{self, Server};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A server on a port of its own; it goes away when this is dropped.
struct Running {
    address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

impl Running {
    async fn start(kernel: Kernel, config: Config) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let builder = Server::builder(server::Config::default(), Vec::new()).unwrap();
        let face = evergreen::face(builder.shared().clone(), kernel, config);
        let server = builder.face(face).build().unwrap();
        let (stop, stopped) = oneshot::channel();
        tokio::spawn(server.serve(listener, async {
            let _ = stopped.await;
        }));
        Self {
            address,
            _stop: stop,
        }
    }

    /// A server with the test functions and nothing else.
    async fn with_test_functions() -> Self {
        let kernel = Kernel::new();
        kernel.add_all(test_functions()).unwrap();
        Self::start(kernel, Config::default()).await
    }

    fn at(&self) -> Address {
        Address::new(format!("http://{}", self.address))
    }

    async fn session(&self) -> Session {
        Session::connect(&self.at(), Options::default())
            .await
            .unwrap()
    }
}
