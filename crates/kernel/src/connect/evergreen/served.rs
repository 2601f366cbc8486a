//! Functions of this kernel that a server may call back (EV-976).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use sapwood_net::evergreen::{CallRequest, ClientSession};
use sapwood_proto::evergreen::Metadata;
use sapwood_proto::session::SessionOutput;
use sapwood_session::Live;

use crate::Result;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::session::link::SessionLink;
use crate::session::remote::to_kernel_error;
use crate::session::runs::Runs;
use crate::session::{OFFER, REVERSE, SessionOptions, listing};

/// Offers the functions of `kernel` to the server, except models: from now on every function that runs for an action of
/// this session can call them by their names, and no other function can. Functions that are added to `kernel` later are
/// not offered. A session serves one kernel at a time.
///
/// The server's calls wait until the returned future is polled; dropping it fails running calls as cancelled.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use sapwood_kernel::connect::evergreen::serve;
/// use sapwood_kernel::{Kernel, function};
/// use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
///
/// #[derive(serde::Deserialize, schemars::JsonSchema)]
/// struct Look { city: String }
///
/// let tools = Kernel::new();
/// tools.add(function("weather", "How the weather is.", |look: Look| async move {
///     format!("sunny in {}", look.city)
/// }))?;
/// let session = ClientSession::connect(&ServerAddress::new("http://127.0.0.1:8000"), ClientSessionOptions::default()).await?;
/// let served = serve(&session, tools).await?;
/// tokio::spawn(served);
/// // Whatever this session calls now may call `weather` in turn.
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Unimplemented` if the server does not announce `reverse-actions`; `Exists` if the session is served already; the
/// server's error if it refuses the offer, `BAD_NAME` where it has a function of the same name.
pub async fn serve(session: &ClientSession, kernel: Kernel) -> Result<ServedSession> {
    if !session.announces(REVERSE) {
        let what = format!("serving functions to a server that does not announce `{REVERSE}`");
        return Err(Error::Unimplemented { what });
    }
    let link = SessionLink::to(session.shared(), session.clock());
    // Before the offer: the server may call as soon as it has read it, and without a worker such calls are refused.
    if !link.with(Live::acquire_worker) {
        return Err(Error::Exists { name: OFFER.into() });
    }
    let options = SessionOptions {
        extensions: &[],
        ..SessionOptions::default()
    };
    let document = listing::offer(&kernel);
    let served = ServedSession {
        runs: Runs::new(link.clone(), kernel, Arc::new(options)),
        link,
    };
    let mut writer = session.write().map_err(to_kernel_error)?;
    let call = session.call(CallRequest {
        name: OFFER.into(),
        inputs: vec![("actions".into(), writer.node().clone())],
        outputs: vec!["result".into()],
        ..CallRequest::default()
    });
    let call = call.map_err(to_kernel_error)?;
    let metadata = Arc::new(Metadata::of("application/json"));
    // If the server refuses the offer, the result says why.
    let _ = writer.write(&metadata, document.to_string().into()).await;
    let _ = writer.end(&metadata);
    if let Some(result) = call.output("result") {
        let taken = result.read().whole().await;
        taken.map_err(|status| to_kernel_error((*status).clone()))?;
    }
    Ok(served)
}

/// Runs the calls of the server until the session is over. Does not keep the session alive.
#[must_use = "nothing is served unless it is polled"]
pub struct ServedSession {
    link: SessionLink,
    runs: Runs,
}

impl Future for ServedSession {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        // First, as in the server's task: what is woken below is polled below.
        this.runs.attend(cx.waker());
        this.link.with(|live| live.machine().nodes().begin_turn());
        for _ in 0..ROUNDS {
            loop {
                match this.link.with(|live| live.poll_work(cx)) {
                    Poll::Ready(Some(SessionOutput::Start(start))) => {
                        this.runs.start(&start);
                    }
                    Poll::Ready(Some(SessionOutput::Cancel { action, by })) => {
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
        // There is always more to do: yield, so that other tasks run.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for ServedSession {
    fn drop(&mut self) {
        // The running calls fail first; calls that are still queued go back to the owner, which refuses them.
        self.runs.give_up();
        self.link.with(Live::release_worker);
        self.link.flush();
    }
}

impl fmt::Debug for ServedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedSession").finish_non_exhaustive()
    }
}

/// Rounds of one poll before other tasks get to run.
const ROUNDS: u32 = 16;

#[cfg(test)]
mod tests;
