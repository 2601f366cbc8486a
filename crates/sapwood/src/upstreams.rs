//! Upstreams: other servers whose functions are served here (D-5), joined and joined again after a loss.
//!
//! ```text
//!   away ── dial, at once ──► joined: its functions are in the kernel ◄── dial ──┐ the session has held for long, and is over;
//!    ▲  └─ no ──► wait: 1 s, doubling to 30 s ──► dial      │             │ or it is worn: calls go to a new one, those
//!    │                                                      ├─────────────┘ that run end on the old one
//!    └────────── its functions answer `unavailable` ◄───────┘ the session is over
//! ```
//!
//! Nobody waits for any of this: a server starts at once, and is not ready while none of its upstreams is there and it has no
//! model of its own (`standing`).

mod pools;
mod status;
mod target;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use futures::future::BoxFuture;
use futures::{StreamExt, stream};
use sapwood_kernel::{Error, Fun, Kernel, Name, Spec, raw};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_server::ServerContext;
use sapwood_server::metrics::ServerMetrics;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

pub(crate) use self::pools::Pools;
use self::status::UpstreamStatus;
use self::target::UpstreamTarget;
use crate::config::Config;
use crate::failure::CliError;
use crate::{client, serving};

/// The upstreams of a server, each with a task that keeps it.
pub(crate) struct Upstreams {
    /// Not begun yet.
    planned: Vec<UpstreamTask<UpstreamTarget>>,
    failed: mpsc::Sender<CliError>,
    tasks: JoinSet<()>,
    stop: watch::Sender<bool>,
    pools: Pools,
}

impl Upstreams {
    /// The configured upstreams, whose functions will stand in `kernel`; what is known of them before they are asked is there now.
    /// One that can never be joined, because it refuses our key, is reported on the second value.
    ///
    /// # Errors
    /// An address is wrong, or a name cannot be a function's.
    pub(crate) fn plan(
        kernel: &Kernel,
        config: &Config,
        shared: &ServerContext,
    ) -> Result<(Self, mpsc::Receiver<CliError>), CliError> {
        let pools = Pools::default();
        let watchers = &Watchers {
            metrics: Arc::clone(&shared.metrics),
            pools: pools.clone(),
        };
        let mut planned = Vec::new();
        for (listed, number) in config.upstreams.iter().zip(1..) {
            let url = listed.url.to_string();
            let target = UpstreamTarget::read(listed, config, watchers);
            let target = target.map_err(|status| client::unreachable(&url, &status))?;
            let standing = UpstreamStatus::of_server(&shared.health, number);
            planned.push(UpstreamTask::new(&url, target, kernel.clone(), standing));
        }
        for model in &config.models {
            let Some(upstream) = &model.upstream else {
                continue;
            };
            let name = &*model.name;
            let target = UpstreamTarget::of_model(model, upstream, config, watchers);
            let target = target.map_err(|status| client::unreachable(name, &status))?;
            let required = model.required.unwrap_or(true);
            let standing = UpstreamStatus::of_model(&shared.health, name, required);
            let mut upstream = UpstreamTask::new(name, target, kernel.clone(), standing);
            let refused = |error: Error| CliError::usage(format!("models: {error}"));
            upstream.expect(name).map_err(refused)?;
            planned.push(upstream);
        }
        let (failed, failures) = mpsc::channel(1);
        let upstreams = Self {
            planned,
            failed,
            tasks: JoinSet::new(),
            stop: watch::Sender::new(false),
            pools,
        };
        Ok((upstreams, failures))
    }

    /// Adds what they serve to the kernel, as soon as they answer, and keeps it so until they are left. A name that is taken stays
    /// whose it is, so that our own GENERATE finds the models of all.
    pub(crate) fn begin(&mut self) {
        for upstream in self.planned.drain(..) {
            let jitter = RandomState::new().hash_one(&upstream.url);
            let retained = upstream.keep(self.failed.clone(), jitter, self.stop.subscribe());
            self.tasks.spawn(retained);
        }
    }

    /// The pools among them, for a configuration that is read again.
    pub(crate) fn pools(&self) -> Pools {
        self.pools.clone()
    }

    /// Takes leave of all of them.
    pub(crate) async fn leave(mut self) {
        self.stop.send_replace(true);
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Whom a pool is shown to, once it is joined.
#[derive(Clone)]
struct Watchers {
    metrics: Arc<ServerMetrics>,
    pools: Pools,
}

/// Asking again would not help.
const fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::Unauthenticated | Code::PermissionDenied | Code::InvalidRequest | Code::Unimplemented
    )
}

/// How an upstream is reached. A value, so that a test can be one that comes and goes.
trait DialUpstream: Send + Sync + 'static {
    /// Joins it, once.
    fn dial(&self) -> impl Future<Output = Result<UpstreamLink, Status>> + Send;
}

/// An upstream that was reached.
struct UpstreamLink {
    functions: Vec<Fun>,
    /// Resolves when there should be another one soon: this one has made much of what it may.
    worn: BoxFuture<'static, ()>,
    /// Resolves when it is lost.
    over: BoxFuture<'static, ()>,
    /// Takes leave of it.
    leave: BoxFuture<'static, ()>,
    /// Whether it serves now, where that changes while it lasts.
    served: Option<watch::Receiver<bool>>,
}

/// Joins it, in time. A server that takes a connection and says nothing is not there.
async fn dial(dial: &impl DialUpstream) -> Result<UpstreamLink, Status> {
    let silent = |_| {
        Status::other(
            Code::Unavailable,
            "",
            "it takes connections and says nothing",
        )
    };
    timeout(JOIN_TIMEOUT, dial.dial()).await.map_err(silent)?
}

/// Once a link is worn: another one. It is tried until it is there, for the worn one may still do.
async fn renewed(
    dial: &impl DialUpstream,
    worn: BoxFuture<'static, ()>,
    jitter: u64,
) -> UpstreamLink {
    worn.await;
    let mut delays = delays(jitter);
    loop {
        match self::dial(dial).await {
            Ok(link) => return link,
            Err(status) => tracing::debug!(why = status.message, "no new session"),
        }
        sleep(delays.next().unwrap_or(DELAY_MAX)).await;
    }
}

/// One upstream.
struct UpstreamTask<D> {
    url: Arc<str>,
    dial: D,
    kernel: Kernel,
    /// What stands in the kernel for it.
    ours: BTreeMap<Name, Spec>,
    standing: UpstreamStatus,
}

impl<D: DialUpstream> UpstreamTask<D> {
    fn new(url: &str, dial: D, kernel: Kernel, standing: UpstreamStatus) -> Self {
        Self {
            url: url.into(),
            dial,
            kernel,
            ours: BTreeMap::new(),
            standing,
        }
    }

    /// It will serve the model of this name: until then that is known, and away.
    fn expect(&mut self, model: &str) -> Result<(), Error> {
        let spec = serving::absent(model, "is not connected").spec().clone();
        self.kernel.add(away(spec.clone()))?;
        self.ours.insert(spec.name.clone(), spec);
        Ok(())
    }

    /// Joins it for the first time. `Err`: that can never be.
    async fn first(&mut self) -> Result<Option<UpstreamLink>, Status> {
        match dial(&self.dial).await {
            Ok(link) => Ok(Some(self.joined(link))),
            Err(status) if is_final(status.code) => Err(status),
            Err(status) => {
                tracing::warn!(
                    upstream = &*self.url,
                    why = status.message,
                    "an upstream does not answer; it is joined when it does"
                );
                Ok(None)
            }
        }
    }

    /// Joins when it can be reached, again and again, until it is stopped.
    async fn keep(
        mut self,
        failed: mpsc::Sender<CliError>,
        jitter: u64,
        mut stop: watch::Receiver<bool>,
    ) {
        // Both may be cancelled: who stops wants no connection, half made or whole.
        let first = tokio::select! {
            first = self.first() => first,
            () = stop_requested(&mut stop) => return,
        };
        let mut link = match first {
            Ok(link) => link,
            Err(status) => {
                // Another upstream may have said so before.
                let _ = failed.try_send(client::unreachable(&self.url, &status));
                return;
            }
        };
        let mut delays = delays(jitter);
        loop {
            let Some(retained) = link else {
                let again = async {
                    sleep(delays.next().unwrap_or(DELAY_MAX)).await;
                    dial(&self.dial).await
                };
                // Both may be cancelled: who stops wants no connection, half made or whole.
                let dialled = tokio::select! {
                    dialled = again => dialled,
                    () = stop_requested(&mut stop) => return,
                };
                link = dialled
                    .map(|link| self.joined(link))
                    .inspect_err(|status| {
                        tracing::debug!(upstream = &*self.url, why = status.message, "not joined");
                    })
                    .ok();
                continue;
            };
            let began = Instant::now();
            // All may be cancelled: they watch, or dial.
            let next = tokio::select! {
                biased;
                () = stop_requested(&mut stop) => return retained.leave.await,
                () = retained.over => None,
                link = renewed(&self.dial, retained.worn, jitter) => Some(link),
            };
            // One that comes and goes at once is not to be hammered. One that held has most likely found its session
            // idle (EV-111), and is there again before anybody has missed it.
            let next = if next.is_none() && began.elapsed() >= DELAY_MAX {
                delays = self::delays(jitter);
                tokio::select! {
                    dialled = dial(&self.dial) => dialled.ok(),
                    () = stop_requested(&mut stop) => return,
                }
            } else {
                next
            };
            if next.is_none() {
                self.lost();
            }
            link = next.map(|link| self.joined(link));
        }
    }

    /// Puts what it serves now in the place of what it served before.
    fn joined(&mut self, mut link: UpstreamLink) -> UpstreamLink {
        let mut before = std::mem::take(&mut self.ours);
        let count = link.functions.len();
        for function in link.functions.drain(..) {
            let spec = function.spec().clone();
            let added = if before.remove(&spec.name).is_some() {
                self.kernel.replace(function);
                Ok(())
            } else {
                self.kernel.add(function)
            };
            let (name, upstream) = (spec.name.clone(), &*self.url);
            match added {
                Ok(()) => {
                    self.ours.insert(name, spec);
                }
                Err(Error::Exists { .. }) => tracing::debug!(%name, upstream, "the name is taken"),
                Err(error) => tracing::warn!(%name, upstream, %error, "not served"),
            }
        }
        for name in before.keys() {
            self.kernel.remove(name);
        }
        for name in before.keys() {
            self.standing.remove(name);
        }
        let models = self.ours.values().filter(|spec| spec.model);
        let models = models.map(|spec| &spec.name);
        self.standing.joined(models, link.served.take());
        tracing::info!(
            upstream = &*self.url,
            listed = count,
            served = self.ours.len(),
            "joined an upstream"
        );
        link
    }

    /// From now on its functions are unavailable; running calls were failed by their session.
    fn lost(&mut self) {
        self.standing.lost();
        tracing::warn!(
            upstream = &*self.url,
            "lost an upstream; it is joined again when it answers"
        );
        for spec in self.ours.values() {
            self.kernel.replace(away(spec.clone()));
        }
    }
}

/// Resolves when a stop is requested, or its sender is dropped.
async fn stop_requested(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await);
}

/// Stands for a function while its server is away. Its address is not for clients.
fn away(spec: Spec) -> Fun {
    let why = format!(
        "the server that serves {} is not connected; it is tried again",
        spec.name
    );
    raw(spec, move |_| {
        let error = Error::Remote {
            code: Code::Unavailable,
            reason: Name::new("upstream_error"),
            message: why.clone(),
            retryable: true,
            retry_after: Some(DELAY_MIN),
        };
        stream::iter([Err(error)]).boxed()
    })
}

/// The waits before each try, each lengthened by up to as much again.
fn delays(jitter: u64) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(DELAY_MIN)
        .with_max_delay(DELAY_MAX / 2)
        .without_max_times()
        .with_jitter()
        .with_jitter_seed(jitter)
        .build()
}

/// Connecting, the server's headers and its listing: what takes longer serves nobody who waits for an answer.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
/// As LM-804 has it for pools.
const DELAY_MIN: Duration = Duration::from_secs(1);
const DELAY_MAX: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
