//! Runs a server in a process of its own, so that its processor time and memory can be measured apart from the load's.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A listener for a server that [`Server::start`] has started; prints its address.
///
/// # Errors
/// If there is no free port, or standard output is closed.
pub async fn listener() -> Result<TcpListener> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
    Ok(listener)
}

/// A running server. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    process: Child,
    /// Its address.
    pub address: SocketAddr,
}

impl Server {
    /// Starts this program with `args`; the first line that it prints is its address.
    ///
    /// # Errors
    /// If it does not start or prints something else.
    pub fn start(args: &[&str]) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .context("start the server")?;
        let stdout = process.stdout.take().context("the server has no stdout")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line
            .trim()
            .parse()
            .context("the server did not print its address")?;
        Ok(Self { process, address })
    }

    /// Starts another program, which will listen at `address`. It is ready once `GET` of `path` returns 200.
    ///
    /// # Errors
    /// If it does not start, exits, or needs more than a minute.
    pub async fn spawn_at(command: &mut Command, address: SocketAddr, path: &str) -> Result<Self> {
        let process = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start the other server")?;
        let mut server = Self { process, address };
        let timeout = Instant::now() + WAIT_LIMIT;
        while !ready(address, path).await {
            if let Some(status) = server.process.try_wait()? {
                bail!("the other server ended: {status}");
            }
            ensure!(
                Instant::now() < timeout,
                "the other server is not ready after {WAIT_LIMIT:?}"
            );
            tokio::time::sleep(PAUSE).await;
        }
        Ok(server)
    }

    /// Starts llama.cpp's own server at a free port, with a model and these further arguments. If another process takes the
    /// port in between, the server ends, and so does the bench.
    ///
    /// # Errors
    /// As [`Server::spawn_at`].
    pub async fn llama_server(program: &Path, model: &Path, arguments: &[String]) -> Result<Self> {
        let address = free_address()?;
        let mut command = Command::new(program);
        command.arg("--model").arg(model);
        command.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
        command.args(arguments);
        Self::spawn_at(&mut command, address, "/health").await
    }

    /// Ends the server in order, as a supervisor does, and waits for its end.
    ///
    /// # Errors
    /// If it ends with another status than success, or does not end.
    pub async fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.process), Signal::TERM)?;
        let limit = Instant::now() + STOP_LIMIT;
        let status = loop {
            if let Some(status) = self.process.try_wait()? {
                break status;
            }
            // It is killed when it is dropped.
            ensure!(
                Instant::now() < limit,
                "the server has not ended {STOP_LIMIT:?} after a SIGTERM"
            );
            tokio::time::sleep(PAUSE).await;
        };
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }

    /// `GET` of a path, or `POST` of JSON to it: the status and the body.
    ///
    /// # Errors
    /// If the connection fails, or what comes back is not HTTP or does not end.
    pub async fn fetch(&self, path: &str, post: Option<&str>) -> Result<(u16, String)> {
        let fetched = tokio::time::timeout(WAIT_LIMIT, self.exchange(path, post)).await;
        fetched.with_context(|| format!("no answer to {path} after {WAIT_LIMIT:?}"))?
    }

    async fn exchange(&self, path: &str, post: Option<&str>) -> Result<(u16, String)> {
        let address = self.address;
        let (method, body) = post.map_or(("GET", ""), |body| ("POST", body));
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let mut io = TcpStream::connect(address).await?;
        io.write_all((head + body).as_bytes()).await?;
        let mut reply = Vec::new();
        io.read_to_end(&mut reply).await?;
        let reply = String::from_utf8_lossy(&reply);
        let (head, body) = reply.split_once("\r\n\r\n").context("no HTTP")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok((status, body.to_owned()))
    }

    /// Processor time used so far, user and system.
    ///
    /// # Errors
    /// If there is no `/proc`.
    pub fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        // The command's name is in parentheses and may hold spaces; fields are counted after it.
        let rest = stat.rsplit(')').next().unwrap_or_default();
        let ticks = |index: usize| {
            rest.split_whitespace()
                .nth(index)
                .and_then(|n| n.parse::<u64>().ok())
        };
        let used = ticks(11)
            .zip(ticks(12))
            .context("/proc/PID/stat is not as expected")?;
        Ok(Duration::from_millis((used.0 + used.1) * TICK_MS))
    }

    /// Resident memory in bytes, with the pages of mapped files.
    ///
    /// # Errors
    /// If there is no `/proc`.
    pub fn resident(&self) -> Result<u64> {
        self.memory("VmRSS:")
    }

    /// Resident memory in bytes that belongs to the process alone. The pages of a mapped model are not: the kernel takes them away and
    /// brings them back as other programs need memory.
    ///
    /// # Errors
    /// If there is no `/proc`.
    pub fn anonymous(&self) -> Result<u64> {
        self.memory("RssAnon:")
    }

    fn memory(&self, field: &str) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let kib = line
            .and_then(|line| line.split_whitespace().next())
            .with_context(|| format!("no {field}"))?;
        Ok(kib.parse::<u64>()? * 1024)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only if the process has exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An address of this machine that is free now.
///
/// # Errors
/// If there is none.
pub fn free_address() -> Result<SocketAddr> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

async fn ready(address: SocketAddr, path: &str) -> bool {
    let ask = async {
        let mut io = TcpStream::connect(address).await?;
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        io.write_all(request.as_bytes()).await?;
        let mut status = [0; b"HTTP/1.1 200".len()];
        io.read_exact(&mut status).await?;
        Ok::<_, std::io::Error>(status == *b"HTTP/1.1 200")
    };
    ask.await.unwrap_or(false)
}

/// Maximum time for another server to load its model.
const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// How long a server may take to end: as it lets open calls end.
const STOP_LIMIT: Duration = Duration::from_secs(120);
/// Poll interval while it loads.
const PAUSE: Duration = Duration::from_millis(50);
/// The kernel reports processor time in hundredths of a second.
const TICK_MS: u64 = 10;
