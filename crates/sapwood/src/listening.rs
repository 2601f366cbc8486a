//! From the key `listen` to a socket that listens (OA-912).
//!
//! Owns: the three ways to write it, and what is said where it does not work. Refuses to know: what is served.
//!
//! ```text
//!   HOST:PORT ─► TCP        unix:PATH ─► Unix socket        systemd ─► whichever socket was passed (LISTEN_FDS)
//! ```

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use listenfd::ListenFd;
use sapwood_server::socket::Socket;
use tokio::net::{TcpListener, UnixListener};

use crate::failure::{Exit, Failure};

/// A socket, and how a client names it.
pub(crate) struct Listening {
    pub(crate) socket: Socket,
    pub(crate) name: Name,
}

/// Where the server is.
#[derive(Clone, Debug)]
pub(crate) enum Name {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// A Unix socket without a path.
    Unnamed,
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Unnamed => f.write_str("unix:"),
        }
    }
}

/// Begins to listen.
///
/// # Errors
/// [`Exit::Listen`], saying what to do.
pub(crate) async fn listen(address: &str) -> Result<Listening, Failure> {
    let opened = match address.strip_prefix("unix:") {
        Some(path) => unix(Path::new(path)),
        None if address == "systemd" => passed(&mut ListenFd::from_env()),
        None => TcpListener::bind(address).await.and_then(tcp),
    };
    opened.map_err(|error| {
        let what = advice(&error, address);
        Failure::exit(Exit::Listen, format!("cannot listen on {address}: {what}"))
    })
}

fn advice(error: &io::Error, address: &str) -> String {
    let other = if address.starts_with("unix:") {
        "another path with --listen unix:PATH"
    } else {
        "another port with --listen HOST:PORT"
    };
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("it is in use; stop the other program, or choose {other}")
        }
        io::ErrorKind::AlreadyExists => {
            format!("there is a file that is no socket; choose {other}")
        }
        io::ErrorKind::PermissionDenied => format!("that needs more rights; choose {other}"),
        io::ErrorKind::InvalidInput if address != "systemd" => {
            "that is no address; write HOST:PORT or unix:PATH".into()
        }
        _ => format!("{error}; choose {other}"),
    }
}

fn tcp(listener: TcpListener) -> io::Result<Listening> {
    let name = Name::Tcp(listener.local_addr()?);
    let socket = Socket::Tcp(listener);
    Ok(Listening { socket, name })
}

fn unix(path: &Path) -> io::Result<Listening> {
    let socket = Socket::unix(path)?;
    let name = Name::Unix(path.into());
    Ok(Listening { socket, name })
}

/// The first socket that systemd has passed; what file it stands at is systemd's business.
fn passed(sockets: &mut ListenFd) -> io::Result<Listening> {
    if let Ok(Some(listener)) = sockets.take_unix_listener(0) {
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let name = address
            .as_pathname()
            .map_or(Name::Unnamed, |path| Name::Unix(path.into()));
        let socket = Socket::Unix(listener, None);
        return Ok(Listening { socket, name });
    }
    let Some(listener) = sockets.take_tcp_listener(0)? else {
        let why = "no socket was passed (LISTEN_FDS); start it from a .socket unit";
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    };
    listener.set_nonblocking(true)?;
    tcp(TcpListener::from_std(listener)?)
}
