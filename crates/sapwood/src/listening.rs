//! Opens the listening sockets of the configured ports (OA-912, TR-908).
//!
//! ```text
//!   HOST:PORT ─► TCP        unix:PATH ─► Unix socket        systemd ─► whichever socket was passed (LISTEN_FDS)
//! ```

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use listenfd::ListenFd;
use sapwood_server::listener::port_purpose::PortPurpose;
use sapwood_server::listener::socket::ListeningSocket;
use tokio::net::{TcpListener, UnixListener};

use crate::config::Config;
use crate::config::ports::ConfiguredPort;
use crate::failure::{CliError, Exit};

/// A socket, and its address for clients.
pub(crate) struct BoundSocket {
    pub(crate) socket: ListeningSocket,
    pub(crate) name: ServerName,
}

/// All sockets of a server.
pub(crate) struct BoundSockets {
    pub(crate) common: BoundSocket,
    /// Sockets for a single purpose.
    pub(crate) own: Vec<(BoundSocket, PortPurpose)>,
}

impl BoundSockets {
    /// The first socket that other machines can reach, if there is one.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn open_to_others(&self) -> Result<Option<&ServerName>, CliError> {
        let own = self.own.iter().map(|(listening, _)| listening);
        for listening in std::iter::once(&self.common).chain(own) {
            if !listening.is_local()? {
                return Ok(Some(&listening.name));
            }
        }
        Ok(None)
    }
}

impl BoundSocket {
    /// Whether the socket can be reached from this machine only.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn is_local(&self) -> Result<bool, CliError> {
        let local = self.socket.is_local();
        local.map_err(|error| CliError::new(error.to_string()))
    }
}

/// The address of the server, for people.
#[derive(Clone, Debug)]
pub(crate) enum ServerName {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// A Unix socket without a path.
    Unnamed,
}

impl std::fmt::Display for ServerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Unnamed => f.write_str("unix:"),
        }
    }
}

/// Binds every configured port.
///
/// # Errors
/// [`Exit::Listen`], with the port and a remedy.
pub(crate) async fn open(config: &Config) -> Result<BoundSockets, CliError> {
    let common = listen(&config.common_port()).await?;
    let mut own = Vec::new();
    for port in config.own_ports() {
        own.push((listen(&port).await?, port.purpose));
    }
    Ok(BoundSockets { common, own })
}

/// Binds one port.
///
/// # Errors
/// As [`open`].
pub(crate) async fn listen(
    ConfiguredPort { address, flag, .. }: &ConfiguredPort,
) -> Result<BoundSocket, CliError> {
    let opened = match address.strip_prefix("unix:") {
        Some(path) => unix(Path::new(path)),
        // `ListenFd` checks LISTEN_PID, so that a child process does not take sockets that were passed to its parent.
        None if address == "systemd" => passed(&mut ListenFd::from_env()),
        None => TcpListener::bind(address).await.and_then(tcp),
    };
    opened.map_err(|error| {
        let what = advice(&error, address, flag);
        CliError::exit(Exit::Listen, format!("cannot listen on {address}: {what}"))
    })
}

fn advice(error: &io::Error, address: &str, flag: &str) -> String {
    let other = if address.starts_with("unix:") {
        format!("another path with {flag} unix:PATH")
    } else {
        format!("another port with {flag} HOST:PORT")
    };
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("it is in use; stop the other program, or choose {other}")
        }
        io::ErrorKind::AlreadyExists => {
            format!("a file that is not a socket is there; choose {other}")
        }
        io::ErrorKind::PermissionDenied => format!("permission denied; choose {other}"),
        io::ErrorKind::InvalidInput if address != "systemd" => {
            "that is not an address; write HOST:PORT or unix:PATH".into()
        }
        _ => format!("{error}; choose {other}"),
    }
}

fn tcp(listener: TcpListener) -> io::Result<BoundSocket> {
    let name = ServerName::Tcp(listener.local_addr()?);
    let socket = ListeningSocket::Tcp(listener);
    Ok(BoundSocket { socket, name })
}

fn unix(path: &Path) -> io::Result<BoundSocket> {
    let socket = ListeningSocket::unix(path)?;
    let name = ServerName::Unix(path.into());
    Ok(BoundSocket { socket, name })
}

/// The first socket that systemd has passed. Its file, if it has one, is managed by systemd.
fn passed(sockets: &mut ListenFd) -> io::Result<BoundSocket> {
    if let Ok(Some(listener)) = sockets.take_unix_listener(0) {
        // Passed sockets block unless the unit says otherwise, and tokio would then block a whole thread.
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let name = address
            .as_pathname()
            .map_or(ServerName::Unnamed, |path| ServerName::Unix(path.into()));
        // `None`: the file belongs to systemd, so it is not removed at the end.
        let socket = ListeningSocket::Unix(listener, None);
        return Ok(BoundSocket { socket, name });
    }
    let Some(listener) = sockets.take_tcp_listener(0)? else {
        let why = "no socket was passed (LISTEN_FDS); start it from a .socket unit";
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    };
    listener.set_nonblocking(true)?;
    tcp(TcpListener::from_std(listener)?)
}
