//! Listening sockets: TCP, or Unix in the file system (OA-912).

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// A socket that listens.
#[derive(Debug)]
pub enum ListeningSocket {
    /// A TCP port.
    Tcp(TcpListener),
    /// A Unix socket. The file, if we made it, goes with this value.
    Unix(UnixListener, Option<SocketFile>),
}

impl From<TcpListener> for ListeningSocket {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

/// A connection that has just been accepted.
pub(crate) enum AcceptedStream {
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream),
}

impl ListeningSocket {
    /// Listens at `path`, for the owner of this process alone. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if a server listens there; `AlreadyExists` if there is something that is no socket; what the system
    /// says of the folder.
    pub fn unix(path: &Path) -> io::Result<Self> {
        clear(path)?;
        // Made under another name and moved: nobody finds it before it has its mode.
        let unseen = unseen(path);
        clear(&unseen)?;
        let listener = UnixListener::bind(&unseen)?;
        let placed = std::fs::set_permissions(&unseen, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| std::fs::rename(&unseen, path))
            .and_then(|()| SocketFile::at(path));
        if placed.is_err() {
            let _ = std::fs::remove_file(&unseen);
        }
        Ok(Self::Unix(listener, Some(placed?)))
    }

    /// Whether it can be reached from this machine only.
    ///
    /// # Errors
    /// What the system says.
    pub fn is_local(&self) -> io::Result<bool> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.ip().is_loopback()),
            Self::Unix(..) => Ok(true),
        }
    }

    /// The next connection. May be cancelled: one not yet accepted stays in the backlog.
    pub(crate) async fn accept(&self) -> io::Result<AcceptedStream> {
        match self {
            Self::Tcp(listener) => {
                let (socket, peer) = listener.accept().await?;
                socket.set_nodelay(true)?;
                Ok(AcceptedStream::Tcp(socket, peer))
            }
            Self::Unix(listener, _) => Ok(AcceptedStream::Unix(listener.accept().await?.0)),
        }
    }
}

/// Where the socket of `path` is made.
fn unseen(path: &Path) -> PathBuf {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    folder.join(format!(".{}.sock", std::process::id()))
}

/// Makes room at `path`, if what is there is left over from a server that is gone.
fn clear(path: &Path) -> io::Result<()> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Err(error) => Err(error),
    }
}

/// The file of a Unix socket; removed on drop, unless another one has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.into(),
            id: id(path)?,
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if id(&self.path).is_ok_and(|id| id == self.id) {
            // Ignored: there is no one to report it to.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn oa_912_a_unix_socket_is_the_owners_alone_and_goes_with_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let socket = ListeningSocket::unix(&path).unwrap();
        assert!(socket.is_local().unwrap());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let _client = UnixStream::connect(&path).await.unwrap();
        assert!(matches!(
            socket.accept().await.unwrap(),
            AcceptedStream::Unix(_)
        ));
        let taken = ListeningSocket::unix(&path).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        drop(socket);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn oa_912_what_a_dead_server_left_is_replaced_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // The standard library leaves the file behind, as a killed server does.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        // One that was killed before it had its name; where every server is process 1, it is in the way of each.
        drop(std::os::unix::net::UnixListener::bind(unseen(&path)).unwrap());
        let first = ListeningSocket::unix(&path).unwrap();
        // Somebody else's socket stands in its place by now: it is not ours to remove.
        std::fs::remove_file(&path).unwrap();
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(other);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a file").unwrap();
        let refused = ListeningSocket::unix(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file");
        let nowhere = ListeningSocket::unix(&folder.path().join("none/s")).unwrap_err();
        assert_eq!(nowhere.kind(), io::ErrorKind::NotFound);
    }
}
