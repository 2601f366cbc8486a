//! [`SoakClient`]: one errand after another, each on a connection of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::answer::SoakAnswer;
use super::question::{Dice, Errand, SoakQuestion, question};
use super::reference::SoakReference;
use super::verdict::{SoakTotals, compare};
use crate::generate::waves::answer;

/// One of the concurrent clients.
#[derive(Debug)]
pub struct SoakClient {
    server: SocketAddr,
    path: &'static str,
    reference: Arc<SoakReference>,
    dice: Dice,
    number: u64,
    totals: SoakTotals,
}

impl SoakClient {
    /// The client of this number; with the seed, it decides what the client does.
    #[must_use]
    pub fn new(
        server: SocketAddr,
        path: &'static str,
        reference: Arc<SoakReference>,
        seed: u64,
        number: u64,
    ) -> Self {
        Self {
            server,
            path,
            reference,
            dice: Dice::new(seed ^ (number << 40)),
            number,
            totals: SoakTotals::default(),
        }
    }

    /// Runs errands until `end`.
    ///
    /// # Errors
    /// If an answer is not that of the reference, fails, or does not end.
    pub async fn run(mut self, end: Instant) -> Result<SoakTotals> {
        let mut round = 0_u64;
        while Instant::now() < end {
            let errand = *self.dice.pick(&Errand::ALL);
            let position = format!("client {}, round {round}: {errand:?}", self.number);
            self.run_errand(errand).await.context(position)?;
            self.totals.done(errand);
            round += 1;
        }
        Ok(self.totals)
    }

    async fn run_errand(&mut self, errand: Errand) -> Result<()> {
        let asked = question(errand, &mut self.dice);
        match errand {
            Errand::Cancel => {
                let events = 1 + self.dice.below(30);
                timed(leave(self.server, self.path, &asked.body(None), events)).await
            }
            Errand::Leave => timed(leave(self.server, self.path, &asked.body(None), 0)).await,
            Errand::SecondTurn => {
                // The first turn here as well, so that the second one finds it cached, unless others have evicted it.
                let first = self.compared(errand, &asked).await?;
                let next = asked.next_turn(&first.choices[0].text, &mut self.dice);
                self.compared(errand, &next).await.map(drop)
            }
            Errand::Stop => {
                let alone = self.reference.answer(&asked).await?;
                let ended = asked.ended_by(&alone.choices[0].text);
                self.compared(errand, &ended).await.map(drop)
            }
            _ => self.compared(errand, &asked).await.map(drop),
        }
    }

    /// Asks, and compares the answer; returns that of the reference.
    async fn compared(
        &mut self,
        errand: Errand,
        question: &SoakQuestion,
    ) -> Result<Arc<SoakAnswer>> {
        let expect = self.reference.answer(question).await?;
        // Without them, fewer things are computed.
        let logprobs = (self.dice.below(3) > 0).then_some(0);
        let body = question.body(logprobs);
        let answer = timed(answer(self.server, self.path, &body)).await?;
        let found = SoakAnswer::read(&answer.reply)?;
        ensure!(
            logprobs.is_none() || found.has_logprobs(),
            "an answer without the log-probabilities that were asked for: {body}"
        );
        let verdict = compare(&expect, &found, question.is_sampled());
        let counted = self.totals.compared(errand, verdict);
        counted.map_err(|why| anyhow!("{why}\nthe request: {body}"))?;
        Ok(expect)
    }
}

/// Reads so many events of an answer, and disconnects.
async fn leave(server: SocketAddr, path: &str, body: &str, events: usize) -> Result<()> {
    let mut io = TcpStream::connect(server).await?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {server}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    io.write_all((head + body).as_bytes()).await?;
    let mut reply = Vec::new();
    let is_event = |at: &[u8]| at == EVENT;
    while reply.windows(EVENT.len()).filter(|at| is_event(at)).count() < events {
        if io.read_buf(&mut reply).await? == 0 {
            break;
        }
        // Of an answer that ends by itself, the last chunk is empty.
        if reply.ends_with(b"\r\n0\r\n\r\n") {
            break;
        }
    }
    let refused = !reply.is_empty() && !reply.starts_with(b"HTTP/1.1 200");
    ensure!(!refused, "{}", String::from_utf8_lossy(&reply));
    Ok(())
}

/// No request takes longer than this, unless it hangs.
pub(super) async fn timed<T>(request: impl Future<Output = Result<T>>) -> Result<T> {
    let ended = tokio::time::timeout(REQUEST_LIMIT, request).await;
    ended.with_context(|| format!("the stream has not ended after {REQUEST_LIMIT:?}"))?
}

/// The beginning of an event, after the line before.
const EVENT: &[u8] = b"\ndata: ";
/// The time limit of a request, on a busy machine.
const REQUEST_LIMIT: Duration = Duration::from_secs(300);
