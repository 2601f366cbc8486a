//! The server under load, seen from outside: its memory and its metrics.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// The server under load.
pub(crate) struct Victim {
    address: SocketAddr,
    pid: u32,
}

/// Resident memory over time.
pub(crate) struct Sample {
    pub(crate) at: Duration,
    /// Bytes.
    pub(crate) resident: u64,
}

/// Numbers of polls.
pub(crate) struct Polls {
    pub(crate) all: u64,
    /// Longer than 50 ms.
    pub(crate) long: u64,
    /// Longer than a second.
    pub(crate) longest: u64,
}

impl Victim {
    pub(crate) const fn new(address: SocketAddr, pid: u32) -> Self {
        Self { address, pid }
    }

    /// Resident memory now.
    pub(crate) fn sample(&self, at: Duration) -> Result<Sample> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid))
            .context("the server is gone")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let resident = kib.context("no VmRSS")?.parse::<u64>()? * 1024;
        Ok(Sample { at, resident })
    }

    /// Waits until nothing is open, and checks that nothing has panicked.
    pub(crate) async fn empty(&self, timeout: Duration) -> Result<()> {
        let began = Instant::now();
        loop {
            let numbers = self.numbers().await?;
            let left: Vec<String> = OPEN
                .iter()
                .map(|&(name, most)| Ok((name, most, value(&numbers, name)?)))
                .collect::<Result<Vec<_>>>()?
                .into_iter()
                .filter(|(_, most, found)| found > most)
                .map(|(name, _, found)| format!("{name} is {found}"))
                .collect();
            if left.is_empty() {
                return match value(&numbers, "sapwood_panics_total")? {
                    0 => Ok(()),
                    panics => bail!("{panics} panics"),
                };
            }
            if began.elapsed() > timeout {
                bail!("{timeout:?} after the last client: {}", left.join(", "));
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Checks that tasks did not block the server's threads for long.
    pub(crate) async fn polls(&self) -> Result<Polls> {
        let numbers = self.numbers().await?;
        let below = |bound| {
            value(
                &numbers,
                &format!("sapwood_poll_seconds_bucket{{le=\"{bound}\"}}"),
            )
        };
        let all = below("+Inf")?;
        Ok(Polls {
            all,
            long: all - below("0.05")?,
            longest: all - below("1.0")?,
        })
    }

    /// Waits until its models are loaded.
    pub(crate) async fn ready(&self, timeout: Duration) -> Result<()> {
        let began = Instant::now();
        while !self.get("/readyz").await?.starts_with("HTTP/1.1 200 ") {
            if began.elapsed() > timeout {
                bail!("the server is not ready after {timeout:?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn numbers(&self) -> Result<String> {
        self.get("/metrics").await
    }

    async fn get(&self, path: &str) -> Result<String> {
        let mut socket = TcpStream::connect(self.address).await?;
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await?;
        Ok(answer)
    }
}

/// The sum of a metric over its labels.
fn value(numbers: &str, name: &str) -> Result<u64> {
    let mut found = None;
    for line in numbers.lines() {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        if !rest.starts_with([' ', '{']) {
            continue;
        }
        let value = rest.rsplit(' ').next().unwrap_or_default();
        // Gauges may be written with a fraction.
        let value = value.split('.').next().unwrap_or_default().parse::<u64>()?;
        *found.get_or_insert(0) += value;
    }
    found.with_context(|| format!("the server does not count {name}"))
}

/// The gauges that must go down, and to what: our own scrape is a connection.
const OPEN: [(&str, u64); 6] = [
    ("sapwood_connections_open", 1),
    ("sapwood_evergreen_sessions_open", 0),
    ("sapwood_evergreen_actions_open", 0),
    ("sapwood_evergreen_retained_bytes", 0),
    ("sapwood_requests_running", 0),
    ("sapwood_requests_waiting", 0),
];
