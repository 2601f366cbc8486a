//! `file:` references (EV-412).
//!
//! A path is resolved relative to its root's descriptor, so no symbolic link and no `..` leads outside, even if the
//! path changes while it is resolved.

use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use futures::StreamExt;
use futures::stream::{BoxStream, try_unfold};
use rustix::fs::OFlags;
use tokio::fs::File;
use tokio::io::AsyncReadExt;
use tokio::task::spawn_blocking;
use url::Url;

use super::ResolvedContent;
use super::error::{BadConfig, Error};

/// The directories below which files may be read.
#[derive(Debug)]
pub(super) struct FileReferences(Vec<Root>);

#[derive(Debug)]
struct Root {
    path: PathBuf,
    dir: Arc<Dir>,
}

impl FileReferences {
    /// Opens the roots.
    pub(super) fn new(roots: &[PathBuf]) -> Result<Self, BadConfig> {
        let open = |path: &PathBuf| {
            let bad = |why: &str| BadConfig::new("files", &path.to_string_lossy(), why);
            if !path.is_absolute() {
                return Err(bad("write an absolute path"));
            }
            let dir = Dir::open_ambient_dir(path, ambient_authority())
                .map_err(|error| bad(&format!("it cannot be opened: {error}")))?;
            Ok(Root {
                path: path.clone(),
                dir: Arc::new(dir),
            })
        };
        roots.iter().map(open).collect::<Result<_, _>>().map(Self)
    }

    /// Opens the file of `uri`.
    pub(super) async fn open(&self, uri: &str) -> Result<ResolvedContent, Error> {
        if self.0.is_empty() {
            return Err(denied("references to files are"));
        }
        let path = path(uri)?;
        let below = |root: &Root| Some((Arc::clone(&root.dir), within(&root.path, &path)?));
        // Decided by the text of the path alone: nothing outside of the roots is looked up, so its existence is not shown.
        let Some((dir, path)) = self.0.iter().find_map(below) else {
            return Err(denied("a file of this directory is"));
        };
        // Off the async threads: a network file system may take seconds to open a file.
        let opening = spawn_blocking(move || open(&dir, &path));
        let (file, bytes) = opening
            .await
            .map_err(|_| Error::Failed("the read was cancelled"))??;
        Ok(ResolvedContent {
            bytes: Some(bytes),
            pieces: pieces(File::from_std(file)),
        })
    }
}

/// Returns the path of a URI: `file:///ABSOLUTE/PATH` and no other form.
fn path(uri: &str) -> Result<PathBuf, Error> {
    let malformed = Error::Malformed("write file:///ABSOLUTE/PATH");
    // Checked on the text, because the URL parser also accepts `file:/x` and `file://localhost/x`.
    let local = uri.get(..FILE.len());
    if !local.is_some_and(|local| local.eq_ignore_ascii_case(FILE)) {
        return Err(malformed);
    }
    let url = Url::parse(uri).map_err(|_| malformed)?;
    // They would be dropped silently, and another file read than the one that the client means.
    if url.query().is_some() || url.fragment().is_some() {
        return Err(malformed);
    }
    url.to_file_path().map_err(|()| malformed)
}

/// Returns the part of a path below a root; `None` for a path that could lead outside.
fn within(root: &Path, path: &Path) -> Option<PathBuf> {
    let rest = path.strip_prefix(root).ok()?;
    // cap-std would refuse `..` as well; here it is refused before anything is opened.
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    (rest.components().all(plain) && rest.components().next().is_some()).then(|| rest.to_owned())
}

/// Opens the file, if it is a regular one, and returns its length. The check uses the open descriptor, so a replaced
/// path cannot bypass it.
fn open(dir: &Dir, path: &Path) -> Result<(std::fs::File, u64), Error> {
    let mut options = OpenOptions::new();
    // Without `NONBLOCK`, opening a pipe without a writer would block forever.
    // `NOCTTY`: opening a terminal must not make it the terminal of this process.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    options.read(true).custom_flags(flags.bits().cast_signed());
    let file = dir
        .open_with(path, &options)
        .map_err(|error| rejection(&error))?;
    let metadata = file.metadata().map_err(|error| rejection(&error))?;
    if !metadata.is_file() {
        return Err(IRREGULAR);
    }
    Ok((file.into_std(), metadata.len()))
}

fn rejection(error: &std::io::Error) -> Error {
    tracing::debug!(%error, "a file was not opened");
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Error::NotFound,
        // cap-std also reports this error for a path that leads outside.
        ErrorKind::PermissionDenied => denied("a file that this path leads to is"),
        _ if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => IRREGULAR,
        _ => Error::Failed("the file cannot be opened"),
    }
}

fn pieces(file: File) -> BoxStream<'static, Result<Bytes, Error>> {
    // A file that grows while it is read is bounded by the limits of the caller, as an undeclared length is (EV-416).
    try_unfold(file, async |mut file| {
        let mut data = BytesMut::with_capacity(PIECE_BYTES);
        let read = file.read_buf(&mut data).await;
        let read = read.map_err(|error| {
            tracing::debug!(%error, "a file was not read");
            Error::Failed("the file cannot be read")
        })?;
        Ok((read > 0).then(|| (data.freeze(), file)))
    })
    .boxed()
}

const fn denied(what: &'static str) -> Error {
    Error::Denied { what, key: "files" }
}

const FILE: &str = "file:///";
const IRREGULAR: Error = Error::Refused("it does not name a regular file");
/// Bytes read at once.
const PIECE_BYTES: usize = 64 * 1024;
