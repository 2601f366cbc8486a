//! A hub in the test: the HTTP interface of the Hugging Face hub, a content network on another port, and faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A request that was received.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    /// How many requests for this path came before.
    pub(crate) before: usize,
}

/// The answer to a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// In place of the body's length.
    pub(crate) announced: Option<u64>,
    /// Sends so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// Then keeps the connection open until the client closes it.
    pub(crate) hangs: bool,
    /// Sends the body in chunks, without its length.
    pub(crate) chunked: bool,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            body: body.into(),
            ..Self::default()
        }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

type Answer = dyn Fn(&Request) -> Reply + Send + Sync;

/// A server of HTTP/1.1 with one request per connection.
pub(crate) struct HttpServer {
    pub(crate) url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl HttpServer {
    pub(crate) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (seen, answer) = (Arc::clone(&requests), Arc::new(answer));
        // Ends with the process of the test.
        std::thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                std::thread::spawn(move || serve(socket, &seen, &*answer));
            }
        });
        Self { url, requests }
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

/// A client that goes away ends it.
fn serve(socket: TcpStream, seen: &Mutex<Vec<Request>>, answer: &Answer) -> Option<()> {
    let mut reader = BufReader::new(socket.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = BTreeMap::new();
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let request = {
        let mut seen = seen.lock().unwrap();
        let before = seen.iter().filter(|one| one.path == path).count();
        let request = Request {
            path,
            headers,
            before,
        };
        seen.push(request.clone());
        request
    };
    send(socket, answer(&request))
}

fn send(mut socket: TcpStream, reply: Reply) -> Option<()> {
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if reply.chunked {
        head.push_str("transfer-encoding: chunked\r\n");
    } else {
        let length = reply.announced.unwrap_or(reply.body.len() as u64);
        head.push_str(&format!("content-length: {length}\r\n"));
    }
    socket.write_all((head + "\r\n").as_bytes()).ok()?;
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
    if reply.chunked {
        let size = format!("{:x}\r\n", body.len());
        socket.write_all(size.as_bytes()).ok()?;
        socket.write_all(body).ok()?;
        socket.write_all(b"\r\n0\r\n\r\n").ok()?;
    } else {
        socket.write_all(body).ok()?;
    }
    if reply.hangs {
        let _closed = socket.read(&mut [0; 1]);
    }
    Some(())
}

/// A file of `bytes` bytes that begins as a GGUF file does; the same for the same number.
pub(crate) fn gguf(bytes: usize) -> Vec<u8> {
    let rest = (0..bytes as u32 - 4).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8);
    b"GGUF".iter().copied().chain(rest).collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    let sum = Sha256::digest(bytes);
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

type Files = Vec<(String, Vec<u8>)>;
type Override = Box<dyn Fn(&Request) -> Option<Reply> + Send + Sync>;

/// A hub with one repository, `o/r`.
pub(crate) struct FakeHub {
    pub(crate) hub: HttpServer,
    pub(crate) cdn: HttpServer,
}

impl FakeHub {
    pub(crate) fn new(files: &[(&str, Vec<u8>)]) -> Self {
        Self::with(files, |_| None, |_| None)
    }

    /// `of_hub` and `of_cdn` answer first, if they want to.
    pub(crate) fn with(
        files: &[(&str, Vec<u8>)],
        of_hub: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
        of_cdn: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let files: Files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.clone()))
            .collect();
        let files = Arc::new(files);
        let (of_hub, of_cdn): (Override, Override) = (Box::new(of_hub), Box::new(of_cdn));
        let cdn = HttpServer::start({
            let files = Arc::clone(&files);
            move |request| of_cdn(request).unwrap_or_else(|| content(request, &files))
        });
        let there = cdn.url.clone();
        let hub = HttpServer::start(move |request| {
            of_hub(request).unwrap_or_else(|| interface(request, &files, &there))
        });
        Self { hub, cdn }
    }

    /// The `range` headers of the requests for content; empty for a whole file.
    pub(crate) fn ranges(&self) -> Vec<String> {
        let requests = self.cdn.requests().into_iter();
        let range = |mut request: Request| request.headers.remove("range").unwrap_or_default();
        requests.map(range).collect()
    }
}

fn interface(request: &Request, files: &Files, cdn: &str) -> Reply {
    if request.path == "/api/models/o/r/revision/main?blobs=true" {
        return Reply::new(200, listing(files).to_string());
    }
    let file = request
        .path
        .strip_prefix(&format!("/o/r/resolve/{COMMIT}/"));
    match file.and_then(|name| files.iter().find(|(known, _)| known == name)) {
        Some((name, bytes)) => Reply::new(302, "")
            .header("location", format!("{cdn}/cdn/{name}"))
            .header("x-linked-etag", format!("\"{}\"", sha256(bytes)))
            .header("x-linked-size", bytes.len().to_string()),
        None => Reply::new(404, "").header("x-error-message", "Entry not found"),
    }
}

/// The list of files.
pub(crate) fn listing(files: &[(String, Vec<u8>)]) -> Value {
    let siblings = files.iter().map(|(name, bytes)| {
        let lfs = json!({"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134});
        json!({"rfilename": name, "size": bytes.len(), "blobId": "x", "lfs": lfs})
    });
    json!({"id": "o/r", "sha": COMMIT, "siblings": siblings.collect::<Vec<_>>()})
}

/// A file, or the rest of it.
fn content(request: &Request, files: &Files) -> Reply {
    let name = request.path.strip_prefix("/cdn/").unwrap_or_default();
    match files.iter().find(|(known, _)| known == name) {
        Some((_, bytes)) => ranged(request, bytes),
        None => Reply::new(404, ""),
    }
}

/// `bytes`, or the part that the request is for.
pub(crate) fn ranged(request: &Request, bytes: &[u8]) -> Reply {
    let range = request.headers.get("range");
    let Some(range) = range.and_then(|range| range.strip_prefix("bytes=")) else {
        return Reply::new(200, bytes);
    };
    let from: usize = range.trim_end_matches('-').parse().unwrap();
    if from >= bytes.len() {
        return Reply::new(416, "");
    }
    let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
    Reply::new(206, &bytes[from..]).header("content-range", range)
}

/// Holds up an answer until the test lets it go.
pub(crate) fn gate() -> (SyncSender<()>, impl Fn() + Send + Sync) {
    let (open, opened): (_, Receiver<()>) = sync_channel(1);
    let opened = Mutex::new(opened);
    (open, move || {
        // A test that has failed meanwhile has dropped the other end.
        let _ = opened.lock().unwrap().recv();
    })
}
