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
    /// A Unix socket. Its file, if we created it, is removed with this value.
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
    /// Listens at `path`, for the owner of this process only (mode 0600). A socket without a listener is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if a server listens there; `AlreadyExists` if there is something else than a socket; errors of the system
    /// for the folder.
    pub fn unix(path: &Path) -> io::Result<Self> {
        clear(path)?;
        // Created under another name and renamed, because a socket has the mode of the umask until `set_permissions`: nobody
        // may connect in between. Changing the umask would affect all threads.
        let unseen = unseen(path);
        clear(&unseen)?;
        let listener = UnixListener::bind(&unseen)?;
        let placed = std::fs::set_permissions(&unseen, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| std::fs::rename(&unseen, path))
            .and_then(|()| SocketFile::at(path));
        // The error that is returned is the first one; a file that cannot be removed is replaced at the next start.
        if placed.is_err() {
            let _ = std::fs::remove_file(&unseen);
        }
        Ok(Self::Unix(listener, Some(placed?)))
    }

    /// Whether it can be reached from this machine only.
    ///
    /// # Errors
    /// Those of `getsockname`.
    pub fn is_local(&self) -> io::Result<bool> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.ip().to_canonical().is_loopback()),
            Self::Unix(..) => Ok(true),
        }
    }

    /// The next connection. May be cancelled: one not yet accepted stays in the backlog.
    pub(crate) async fn accept(&self) -> io::Result<AcceptedStream> {
        match self {
            Self::Tcp(listener) => {
                let (socket, peer) = listener.accept().await?;
                // A token is one small write: with Nagle's algorithm each would wait for the acknowledgement of the one before.
                // It fails on some systems if the client has gone, which the first read will show.
                let _ = socket.set_nodelay(true);
                Ok(AcceptedStream::Tcp(socket, peer))
            }
            Self::Unix(listener, _) => Ok(AcceptedStream::Unix(listener.accept().await?.0)),
        }
    }
}

/// The temporary name of a socket, next to `path`.
fn unseen(path: &Path) -> PathBuf {
    // In the same folder, so that the rename stays within one file system; with the process id, so that two servers do not
    // take each other's.
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    folder.join(format!(".{}.sock", std::process::id()))
}

/// Removes a socket at `path` that a dead server has left.
fn clear(path: &Path) -> io::Result<()> {
    // Not following links: what one points to is not ours to remove.
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // Only connecting shows whether somebody listens. A full backlog or a missing right is another error, and the socket stays.
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Err(error) => Err(error),
    }
}

/// The file of a Unix socket; removed on drop, unless it was replaced by another one.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode: a server that was started later may have put its own socket here.
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
            // The error is ignored: the next start replaces the file.
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
    async fn oa_912_a_unix_socket_has_mode_0600_and_is_removed_with_the_server() {
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
    async fn oa_912_only_the_socket_of_a_dead_server_is_replaced() {
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
