//! A sequence of clients: each does another errand, and checks the result.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use sapwood_kernel::connect::evergreen::serve;
use sapwood_kernel::{Kernel, function};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress, SessionNode};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Metadata, Status};
use sapwood_tests::request;
use sapwood_tests::socket::frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::dice::Dice;
use super::wire::Wire;

/// The errand of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Errand {
    /// Streams through two functions while writing, and calls one again at the end.
    Echo,
    /// Generates with a model.
    Generate,
    /// Starts an endless call, reads a little, and cancels it.
    Cancel,
    /// Loses its connection in the middle and resumes.
    Cut,
    /// Reads slowly.
    Slow,
    /// Serves functions of its own.
    Offer,
    /// Calls a function that fails, and continues.
    Fail,
    /// Sets a deadline that is too short.
    Late,
    /// Disconnects without a close.
    Leave,
    /// Sends long messages that take long to decode, and is refused or disconnects.
    LoadHeader,
}

const ERRANDS: [Errand; 10] = [
    Errand::Echo,
    Errand::Generate,
    Errand::Cancel,
    Errand::Cut,
    Errand::Slow,
    Errand::Offer,
    Errand::Fail,
    Errand::Late,
    Errand::Leave,
    Errand::LoadHeader,
];

/// Schemes, and what follows the port; the first three can be resumed.
const DIALECTS: [(&str, &str); 4] = [
    ("http", ""),
    ("ws", "/evergreen?dialect=protobuf"),
    ("ws", "/?dialect=json"),
    ("ws", "/?dialect=msgpack"),
];

/// How often each errand ran, and how many bytes were received.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    done: [u64; ERRANDS.len()],
    bytes: u64,
}

impl Totals {
    pub(crate) fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        for (mine, theirs) in self.done.iter_mut().zip(other.done) {
            *mine += theirs;
        }
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: u64 = self.done.iter().sum();
        write!(
            f,
            "{total} sessions, {} MiB received correctly:",
            self.bytes >> 20
        )?;
        for (errand, done) in ERRANDS.iter().zip(self.done) {
            write!(f, " {errand:?} {done}")?;
        }
        Ok(())
    }
}

/// One of the concurrent clients; each errand is a new client.
pub(crate) struct Client {
    server: SocketAddr,
    dice: Dice,
    number: u64,
    totals: Totals,
}

impl Client {
    pub(crate) const fn new(server: SocketAddr, seed: u64, number: u64) -> Self {
        Self {
            server,
            dice: Dice::new(seed ^ (number << 40)),
            number,
            totals: Totals {
                done: [0; ERRANDS.len()],
                bytes: 0,
            },
        }
    }

    /// Runs errands until `end`.
    pub(crate) async fn run(mut self, end: Instant) -> Result<Totals> {
        let mut round = 0_u64;
        while Instant::now() < end {
            let which = self.dice.below(ERRANDS.len());
            let errand = ERRANDS[which];
            let dialect = *self.dice.pick(&DIALECTS);
            let position = || {
                format!(
                    "client {}, round {round}: {errand:?} in {dialect:?}",
                    self.number
                )
            };
            let position = position();
            tokio::time::timeout(WAIT_LIMIT, self.do_it(errand, dialect))
                .await
                .with_context(|| format!("{position} hangs"))?
                .context(position)?;
            self.totals.done[which] += 1;
            round += 1;
        }
        Ok(self.totals)
    }

    async fn do_it(&mut self, errand: Errand, dialect: (&str, &str)) -> Result<()> {
        match errand {
            Errand::Echo => self.echo(dialect).await,
            Errand::Generate => self.generate(dialect).await,
            Errand::Cancel => self.cancel(dialect).await,
            Errand::Cut => self.cut().await,
            Errand::Slow => self.slow(dialect).await,
            Errand::Offer => self.offer().await,
            Errand::Fail => self.fail(dialect).await,
            Errand::Late => self.late(dialect).await,
            Errand::Leave => self.leave(dialect).await,
            Errand::LoadHeader => self.load().await,
        }
    }

    async fn session(
        &self,
        dialect: (&str, &str),
        options: ClientSessionOptions,
    ) -> Result<ClientSession> {
        let address = at(self.server, dialect);
        Ok(ClientSession::connect(&address, options).await?)
    }

    /// A message of nearly a megabyte, with parts that take long to decode or to handle.
    async fn load(&mut self) -> Result<()> {
        let many = |part: &str| part.repeat(LOAD_HEADER_BYTES / part.len());
        let message = match self.dice.below(3) {
            0 => format!(
                r#"{{"nodeFragments":[{{"id":"a","childIds":[{}"b"]}}]}}"#,
                many(r#""b","#)
            ),
            1 => format!(
                r#"{{"actions":[{{"name":"GENERATE","configs":[{{"@type":"type.googleapis.com/google.protobuf.Struct","value":{{"a":[{}0]}}}}]}}]}}"#,
                many("0,")
            ),
            _ => {
                let nodes = (0..LOAD_HEADER_BYTES / 32)
                    .map(|node| format!(r#"{{"id":"n{node}","continued":true}}"#));
                format!(
                    r#"{{"nodeFragments":[{}]}}"#,
                    nodes.collect::<Vec<_>>().join(",")
                )
            }
        };
        let mut socket = TcpStream::connect(self.server).await?;
        socket.write_all(UPGRADE).await?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(socket.read_u8().await?);
        }
        ensure!(answer.starts_with(b"HTTP/1.1 101 "), "no WebSocket");
        socket.write_all(&frame(0x81, message.as_bytes())).await?;
        if self.dice.below(2) == 0 {
            return Ok(());
        }
        // It may have been refused and closed by then; the check at the end of the soak shows that no state is left.
        let _ = socket
            .write_all(&frame(0x88, &1000_u16.to_be_bytes()))
            .await;
        let _ = tokio::io::copy(&mut socket, &mut tokio::io::sink()).await;
        Ok(())
    }

    /// Pieces of text, and the whole text.
    fn pieces(&mut self, most: usize, bytes: usize) -> Vec<Bytes> {
        let count = 1 + self.dice.below(most);
        let piece = |dice: &mut Dice| {
            let length = 1 + dice.below(bytes);
            Bytes::from(dice.letters(length))
        };
        (0..count).map(|_| piece(&mut self.dice)).collect()
    }

    async fn echo(&mut self, dialect: (&str, &str)) -> Result<()> {
        let session = self
            .session(dialect, ClientSessionOptions::default())
            .await?;
        let pieces = self.pieces(60, 4_000);
        self.pipeline(&session, pieces).await?;
        session.close().await?;
        Ok(())
    }

    /// A stream through two functions; the output has two readers, the second after the end.
    async fn pipeline(&mut self, session: &ClientSession, pieces: Vec<Bytes>) -> Result<()> {
        let expect = pieces.concat();
        let mut writer = session.write()?;
        let first = session.call(request("echo", &[("text", writer.node())], &["response"]))?;
        let between = first.output("response").context("no output")?;
        let second = session.call(request("echo", &[("text", &between)], &["response"]))?;
        let output = second.output("response").context("no output")?;
        let writing = async {
            for piece in pieces {
                writer.write(&text(), piece).await?;
            }
            writer.end(&text())?;
            Ok(())
        };
        let (written, read) = futures::join!(writing, output.read().whole());
        let written: Result<()> = written;
        written?;
        self.right(&read.map_err(to_anyhow)?, &expect)?;
        self.right(&between.read().whole().await.map_err(to_anyhow)?, &expect)
    }

    fn right(&mut self, found: &[u8], expect: &[u8]) -> Result<()> {
        ensure!(
            found == expect,
            "{} bytes came back, and not the {} that went out",
            found.len(),
            expect.len()
        );
        self.totals.bytes += found.len() as u64;
        Ok(())
    }

    async fn generate(&mut self, dialect: (&str, &str)) -> Result<()> {
        let session = self
            .session(dialect, ClientSessionOptions::default())
            .await?;
        let length = 1 + self.dice.below(400);
        let prompt = self.dice.letters(length);
        let input = leaf(&session, prompt.clone().into()).await?;
        let mut ask = request("GENERATE", &[("prompt", &input)], &["response"]);
        ask.target = "parrot".into();
        let call = session.call(ask)?;
        let answer = read(call.output("response")).await?;
        self.right(&answer, prompt.as_bytes())?;
        drop((input, call));
        session.close().await?;
        Ok(())
    }

    async fn cancel(&mut self, dialect: (&str, &str)) -> Result<()> {
        let session = self
            .session(dialect, ClientSessionOptions::default())
            .await?;
        let input = leaf(&session, "on and on".into()).await?;
        let mut ask = request("GENERATE", &[("prompt", &input)], &["response"]);
        ask.target = "endless".into();
        let call = session.call(ask)?;
        let mut reader = call.output("response").context("no output")?.read();
        for _ in 0..self.dice.below(20) {
            let piece = reader.next().await.context("it never ends")?;
            self.totals.bytes += piece.map_err(to_anyhow)?.data.len() as u64;
        }
        drop((reader, call));
        // The session is still usable.
        let pieces = self.pieces(3, 100);
        self.pipeline(&session, pieces).await?;
        session.close().await?;
        Ok(())
    }

    async fn cut(&mut self) -> Result<()> {
        let dialect = DIALECTS[self.dice.below(3)];
        let after = 2_000 + self.dice.below(100_000);
        let wire = Wire::cut_after(after, self.server).await?;
        let options = ClientSessionOptions {
            resume: true,
            ..ClientSessionOptions::default()
        };
        let session = ClientSession::connect(&at(wire.address, dialect), options).await?;
        let pieces = self.pieces(60, 2_000);
        self.pipeline(&session, pieces).await?;
        session.close().await?;
        Ok(())
    }

    async fn slow(&mut self, dialect: (&str, &str)) -> Result<()> {
        let session = self
            .session(dialect, ClientSessionOptions::default())
            .await?;
        let pieces = self.pieces(40, 64_000);
        let expect = pieces.concat();
        let mut writer = session.write()?;
        let call = session.call(request("echo", &[("text", writer.node())], &["response"]))?;
        let mut reader = call.output("response").context("no output")?.read();
        let writing = async {
            for piece in pieces {
                writer.write(&text(), piece).await?;
            }
            writer.end(&text())?;
            Ok::<_, anyhow::Error>(())
        };
        let reading = async {
            let mut all = Vec::new();
            while let Some(piece) = reader.next().await {
                all.extend_from_slice(&piece.map_err(to_anyhow)?.data);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok::<_, anyhow::Error>(all)
        };
        let ((), all) = futures::try_join!(writing, reading)?;
        self.right(&all, &expect)?;
        drop((reader, call));
        session.close().await?;
        Ok(())
    }

    /// Our functions are listed while the session is open, and can be called by name.
    async fn offer(&mut self) -> Result<()> {
        let dialect = DIALECTS[self.dice.below(3)];
        let session = self
            .session(dialect, ClientSessionOptions::default())
            .await?;
        let kernel = Kernel::new();
        kernel.add(function(
            "shout",
            "Says it louder.",
            |reply: Sent| async move { reply.text.to_uppercase() },
        ))?;
        let served = tokio::spawn(serve(&session, kernel).await?);
        let pieces = self.pieces(5, 1_000);
        self.pipeline(&session, pieces).await?;
        let input = leaf(&session, "hello".into()).await?;
        let call = session.call(request("shout", &[("text", &input)], &["output"]))?;
        let answer = read(call.output("output")).await?;
        self.right(&answer, b"HELLO")?;
        drop((input, call, session));
        served.await?;
        Ok(())
    }

    async fn fail(&mut self, dialect: (&str, &str)) -> Result<()> {
        let options = ClientSessionOptions {
            partial_failure: true,
            ..ClientSessionOptions::default()
        };
        let session = self.session(dialect, options).await?;
        let call = session.call(request("fail", &[], &["response"]))?;
        let failed = call.output("response").context("no output")?.read();
        match failed.whole().await {
            Err(status) if status.code == Code::Internal => {}
            other => bail!("failing ended with {other:?}"),
        }
        let unknown = session.call(request("nobody", &[], &["response"]))?;
        let refused = unknown.output("response").context("no output")?.read();
        match refused.whole().await {
            Err(status) if status.code == Code::NotFound => {}
            other => bail!("a function that is not there ended with {other:?}"),
        }
        let pieces = self.pieces(5, 1_000);
        self.pipeline(&session, pieces).await?;
        drop((call, unknown));
        session.close().await?;
        Ok(())
    }

    async fn late(&self, dialect: (&str, &str)) -> Result<()> {
        let options = ClientSessionOptions {
            timeout: Some(Duration::from_millis(300)),
            ..ClientSessionOptions::default()
        };
        let session = self.session(dialect, options).await?;
        let call = session.call(request("slow", &[], &["response"]))?;
        match read(call.output("response")).await {
            Err(error) if error.to_string().contains("deadline") => Ok(()),
            other => bail!("a deadline ended with {other:?}"),
        }
    }

    async fn leave(&mut self, dialect: (&str, &str)) -> Result<()> {
        match self.dice.below(4) {
            0 => {
                let mut socket = TcpStream::connect(self.server).await?;
                socket.write_all(b"GET / HTTP/1.1\r\nhos").await?;
            }
            1 => drop(
                self.session(dialect, ClientSessionOptions::default())
                    .await?,
            ),
            2 => {
                let session = self
                    .session(dialect, ClientSessionOptions::default())
                    .await?;
                let call = session.call(request("slow", &[], &["response"]))?;
                call.detach();
            }
            _ => {
                let session = self
                    .session(dialect, ClientSessionOptions::default())
                    .await?;
                let length = self.dice.below(1 << 18);
                let mut writer = session.write()?;
                let call =
                    session.call(request("echo", &[("text", writer.node())], &["response"]))?;
                writer.write(&text(), vec![b'x'; length].into()).await?;
                call.detach();
            }
        }
        Ok(())
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Sent {
    text: String,
}

fn at(server: SocketAddr, (scheme, rest): (&str, &str)) -> ServerAddress {
    ServerAddress::new(format!("{scheme}://{server}{rest}"))
}

fn text() -> Arc<Metadata> {
    Arc::new(Metadata::of("text/plain").with_role("USER"))
}

async fn leaf(session: &ClientSession, data: Bytes) -> Result<SessionNode> {
    let mut writer = session.write()?;
    writer.write(&text(), data).await?;
    Ok(writer.end(&text())?)
}

async fn read(node: Option<SessionNode>) -> Result<Vec<u8>> {
    let whole = node.context("no output")?.read().whole().await;
    whole.map_err(to_anyhow)
}

fn to_anyhow(status: Arc<Status>) -> anyhow::Error {
    Status::clone(&status).into()
}

/// The size of a large message.
const LOAD_HEADER_BYTES: usize = 900_000;
/// The start of a JSON message.
const UPGRADE: &[u8] = b"GET /evergreen HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: evergreen.v2.json\r\n\r\n";
/// The time limit of one errand, on a busy machine.
const WAIT_LIMIT: Duration = Duration::from_secs(120);
