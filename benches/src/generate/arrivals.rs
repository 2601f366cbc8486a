//! Measures when the events of paced streams arrive, compared with when they were due.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::load::request;

/// The arrival times of the events of one stream.
type Arrivals = Vec<Duration>;

/// Reads streams from `begin` until `end`; earlier events are not counted. Returns for each stream the arrival times of
/// its events.
///
/// # Errors
/// If no server listens, or a stream ends early.
pub async fn listen(
    address: SocketAddr,
    streams: u32,
    begin: Instant,
    end: Instant,
) -> Result<Vec<Arrivals>> {
    let mut tasks = JoinSet::new();
    for _ in 0..streams {
        let mut io = TcpStream::connect(address).await?;
        io.set_nodelay(true)?;
        io.write_all(request(address).as_bytes()).await?;
        tasks.spawn(one(io, begin, end));
    }
    let mut all = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        all.push(ended??);
    }
    Ok(all)
}

/// Events end with an empty line, which occurs nowhere else.
async fn one(mut io: TcpStream, begin: Instant, end: Instant) -> Result<Arrivals> {
    let mut room = vec![0; ROOM_BYTES];
    let (mut last, mut arrivals) = (0, Vec::new());
    loop {
        let read = io.read(&mut room);
        let Ok(read) = tokio::time::timeout_at(end.into(), read).await else {
            return Ok(arrivals);
        };
        let now = Instant::now();
        let Some(reply) = room.get(..read?).filter(|reply| !reply.is_empty()) else {
            bail!("the server closed a connection");
        };
        if reply.starts_with(b"HTTP/1.1 ") && !reply.starts_with(b"HTTP/1.1 200") {
            bail!("the server says {}", String::from_utf8_lossy(reply));
        }
        for &byte in reply {
            if byte == b'\n' && last == b'\n' && now >= begin {
                arrivals.push(now - begin);
            }
            last = byte;
        }
    }
}

/// The delay of each event, if one was due every `period` and none came early.
#[must_use]
pub fn lateness(arrivals: &[Duration], period: Duration) -> Vec<Duration> {
    let dues = (0_u32..).map(|index| period * index);
    let due = |(arrival, due): (&Duration, Duration)| arrival.as_secs_f64() - due.as_secs_f64();
    let offsets: Vec<f64> = arrivals.iter().zip(dues).map(due).collect();
    let first = offsets.iter().copied().fold(f64::INFINITY, f64::min);
    offsets
        .iter()
        .map(|offset| Duration::from_secs_f64((offset - first).max(0.0)))
        .collect()
}

const ROOM_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_relative_to_the_punctual_events() {
        let at = [103, 120, 147, 160].map(Duration::from_millis);
        let late = lateness(&at, Duration::from_millis(20));
        let whole: Vec<u128> = late.iter().map(Duration::as_millis).collect();
        assert_eq!(whole, [3, 0, 7, 0]);
        assert!(lateness(&[], Duration::from_millis(20)).is_empty());
    }
}
