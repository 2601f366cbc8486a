//! Holds the default port while tests run, as a server of the developer would: a test that depends on the port fails.
//!
//! Every connection is accepted and closed, so that such a test fails at once instead of waiting.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::process;

const DEFAULT: &str = "127.0.0.1:8000";

/// The default port, held until this value is dropped.
pub(super) struct ReservedPort {
    stop: Arc<AtomicBool>,
    address: String,
    thread: Option<JoinHandle<()>>,
}

impl ReservedPort {
    /// Binds the port; `None` if it is in use already, which has the same effect.
    pub(super) fn take() -> Option<Self> {
        let retained = Self::listen(DEFAULT);
        process::print_line(&match retained {
            Some(_) => format!("{DEFAULT} is held during the tests, which must not need it"),
            None => format!("something listens on {DEFAULT}; the tests must not care"),
        });
        retained
    }

    fn listen(address: &str) -> Option<Self> {
        let listener = TcpListener::bind(address).ok()?;
        let address = listener.local_addr().ok()?.to_string();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for connection in listener.incoming() {
                drop(connection);
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        Some(Self {
            stop,
            address,
            thread: Some(thread),
        })
    }
}

impl Drop for ReservedPort {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A connection of our own wakes the thread, which then sees the flag.
        let woken = std::net::TcpStream::connect(&self.address).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;

    use super::ReservedPort;

    #[test]
    fn a_held_port_closes_connections_and_is_released_on_drop() {
        let retained = ReservedPort::listen("127.0.0.1:0").unwrap();
        let address = retained.address.clone();
        assert!(ReservedPort::listen(&address).is_none());
        let mut connection = TcpStream::connect(&address).unwrap();
        assert_eq!(connection.read(&mut [0]).unwrap_or(0), 0);
        drop(retained);
        assert!(TcpStream::connect(&address).is_err());
    }
}
