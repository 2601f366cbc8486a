//! Functions of this kernel that a server may call (EV-976).
//!
//! Owns: [`serve`]: the offer, and [`Served`], which runs what the server asks for. Refuses to know: how a function runs
//! against a session (`session::runs`, the same as at a server), and how messages travel.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use sapwood_net::evergreen::{Request, Session};
use sapwood_proto::evergreen::{Dialect, Metadata};
use sapwood_proto::session::{Live, Output};

use crate::Result;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::session::link::Link;
use crate::session::remote::told;
use crate::session::runs::Runs;
use crate::session::{OFFER, Options, REVERSE, listing};

/// Offers the functions of `kernel` to the server, models excepted: from here on every function that runs for an action of
/// this session can call them by their names, and nobody else can. What is added to `kernel` later is not offered. A
/// session is served by one at a time.
///
/// The server's calls wait until what is given back is polled; dropping it fails those that run as cancelled.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use sapwood_kernel::connect::evergreen::serve;
/// use sapwood_kernel::{Kernel, function};
/// use sapwood_net::evergreen::{Address, Options, Session};
///
/// #[derive(serde::Deserialize, schemars::JsonSchema)]
/// struct Look { city: String }
///
/// let tools = Kernel::new();
/// tools.add(function("weather", "How the weather is.", |look: Look| async move {
///     format!("sunny in {}", look.city)
/// }))?;
/// let session = Session::connect(&Address::new("http://127.0.0.1:8000"), Options::default()).await?;
/// let served = serve(&session, tools).await?;
/// tokio::spawn(served);
/// // Whatever this session calls now may call `weather` in turn.
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Unimplemented` if the server does not announce `reverse-actions`; `Exists` if the session is served already; what the
/// server has against the offer, `BAD_NAME` where it has a function of the same name.
pub async fn serve(session: &Session, kernel: Kernel) -> Result<Served> {
    if !session.announces(REVERSE) {
        let what = format!("serving functions to a server that does not announce `{REVERSE}`");
        return Err(Error::Unimplemented { what });
    }
    // No dialect asks a client for manners.
    let link = Link::to(session.shared(), session.origin(), Dialect::Grpc);
    if !link.with(Live::hire) {
        return Err(Error::Exists { name: OFFER.into() });
    }
    let options = Options {
        extensions: &[],
        ..Options::default()
    };
    let document = listing::offer(&kernel);
    let served = Served {
        runs: Runs::new(link.clone(), kernel, Arc::new(options)),
        link,
    };
    let mut writer = session.write().map_err(told)?;
    let call = session.call(Request {
        name: OFFER.into(),
        inputs: vec![("actions".into(), writer.node().clone())],
        outputs: vec!["result".into()],
        ..Request::default()
    });
    let call = call.map_err(told)?;
    let metadata = Arc::new(Metadata::of("application/json"));
    // Whoever does not take it says why in the result.
    let _ = writer.write(&metadata, document.to_string().into()).await;
    let _ = writer.end(&metadata);
    if let Some(result) = call.output("result") {
        let taken = result.read().whole().await;
        taken.map_err(|status| told((*status).clone()))?;
    }
    Ok(served)
}

/// Runs what the server asks for, until the session is over. Does not keep the session.
#[must_use = "nothing is served unless it is polled"]
pub struct Served {
    link: Link,
    runs: Runs,
}

impl Future for Served {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.runs.attend(cx.waker());
        this.link.with(|live| live.machine().begin_turn());
        for _ in 0..ROUNDS {
            loop {
                match this.link.with(|live| live.poll_work(cx)) {
                    Poll::Ready(Some(Output::Start(start))) => {
                        this.runs.start(&start);
                    }
                    Poll::Ready(Some(Output::Cancel { action, by })) => {
                        this.runs.cancel(action, by);
                    }
                    Poll::Ready(Some(_)) => {}
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            let busy = this.runs.poll(cx, |_| ());
            this.link.flush();
            if !busy && this.runs.rest() {
                return Poll::Pending;
            }
        }
        // Busy without end: others must get their turn.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.runs.give_up();
        self.link.with(Live::dismiss);
        self.link.flush();
    }
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").finish_non_exhaustive()
    }
}

/// Rounds of one poll before others get their turn.
const ROUNDS: u32 = 16;

#[cfg(test)]
mod tests;
