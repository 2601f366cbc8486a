//! Upstreams: other servers whose functions are served here (D-5), joined and joined again after a loss.
//!
//! ```text
//!   away ── dial, at once ──► joined: its functions are in the kernel ◄── dial ──┐ the session has held for long, and is over;
//!    ▲  └─ no ──► wait: 1 s, doubling to 30 s ──► dial      │             │ or it is worn: calls go to a new one, those
//!    │                                                      ├─────────────┘ that run end on the old one
//!    └────────── its functions answer `unavailable` ◄───────┘ the session is over
//! ```
//!
//! Nothing waits for an upstream: a server starts at once, and is not ready while none of its upstreams is connected
//! and it has no model of its own (`standing`).

mod pools;
mod status;
mod target;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use futures::future::BoxFuture;
use sapwood_kernel::{Error, Fun, Kernel, Name, Spec};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_server::ServerContext;
use sapwood_server::ops::metrics::ServerMetrics;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

pub(crate) use self::pools::Pools;
use self::status::UpstreamStatus;
use self::target::UpstreamTarget;
use crate::config::Config;
use crate::failure::CliError;
use crate::{client, model_loading};

/// The upstreams of a server, each with a task that keeps it connected.
pub(crate) struct Upstreams {
    /// Upstreams whose tasks have not been started.
    planned: Vec<UpstreamTask<UpstreamTarget>>,
    failed: mpsc::Sender<CliError>,
    tasks: JoinSet<()>,
    stop: watch::Sender<bool>,
    pools: Pools,
}

impl Upstreams {
    /// Prepares the configured upstreams, whose functions are added to `kernel`; configured models are there at once, as
    /// unavailable. An upstream that can never be joined, because it refuses our key, is reported through the second
    /// value.
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
            let target = target::lmtp::configured(model, upstream, config, watchers);
            let target = target.map_err(|status| client::unreachable(name, &status))?;
            let required = model.required.unwrap_or(true);
            let standing = UpstreamStatus::of_model(&shared.health, name, required);
            let mut upstream = UpstreamTask::new(name, target, kernel.clone(), standing);
            let refused = |error: Error| CliError::usage(format!("models: {error}"));
            // A configured model exists from the start: its callers get `unavailable` and a time to come back, not
            // `not-found`.
            upstream.expect(name).map_err(refused)?;
            planned.push(upstream);
        }
        // Room for one: the first failure ends the server.
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

    /// Starts a task per upstream, which adds its functions to the kernel as soon as it answers, until [`Self::leave`].
    /// A name that is taken is not replaced, so that our own GENERATE finds the models of all upstreams.
    pub(crate) fn begin(&mut self) {
        for upstream in self.planned.drain(..) {
            // Different in each process, so that servers that were restarted together do not dial an upstream at the
            // same moments.
            let jitter = RandomState::new().hash_one(&upstream.url);
            let retained = upstream.keep(self.failed.clone(), jitter, self.stop.subscribe());
            self.tasks.spawn(retained);
        }
    }

    /// The pools among the upstreams, for reloading the configuration.
    pub(crate) fn pools(&self) -> Pools {
        self.pools.clone()
    }

    /// Disconnects from all upstreams.
    pub(crate) async fn leave(mut self) {
        self.stop.send_replace(true);
        // Joined and not aborted: each task closes its session in order, so that the upstream does not take it for a
        // loss.
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Where a pool is registered, once it is joined.
#[derive(Clone)]
struct Watchers {
    metrics: Arc<ServerMetrics>,
    pools: Pools,
}

/// Whether a retry is pointless.
const fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::Unauthenticated | Code::PermissionDenied | Code::InvalidRequest | Code::Unimplemented
    )
}

/// Connects to an upstream. A trait, so that a test can use an upstream that comes and goes.
trait DialUpstream: Send + Sync + 'static {
    /// Connects once.
    fn dial(&self) -> impl Future<Output = Result<UpstreamLink, Status>> + Send;
}

/// A connected upstream.
struct UpstreamLink {
    functions: Vec<Fun>,
    /// Resolves when the session should be replaced soon, because it has used up much of its limits.
    worn: BoxFuture<'static, ()>,
    /// Resolves when the connection is lost.
    over: BoxFuture<'static, ()>,
    /// Disconnects.
    leave: BoxFuture<'static, ()>,
    /// Whether the upstream serves now, if that changes while it is connected.
    served: Option<watch::Receiver<bool>>,
}

/// Connects within [`JOIN_TIMEOUT`]. A server that accepts a connection and sends nothing counts as unavailable.
async fn dial(dial: &impl DialUpstream) -> Result<UpstreamLink, Status> {
    let silent = |_| {
        Status::other(
            Code::Unavailable,
            "",
            "it accepts connections but does not answer",
        )
    };
    timeout(JOIN_TIMEOUT, dial.dial()).await.map_err(silent)?
}

/// Waits until the link is worn, then connects again. Retries until it succeeds, because the worn link may still work.
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
            Err(status) => tracing::debug!(why = status.message, "could not open a new session"),
        }
        sleep(delays.next().unwrap_or(DELAY_MAX)).await;
    }
}

/// The task of one upstream.
struct UpstreamTask<D> {
    url: Arc<str>,
    dial: D,
    kernel: Kernel,
    /// The functions that it has added to the kernel.
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

    /// Announces a model that the upstream will serve: until it is connected, calls of it fail as unavailable.
    fn expect(&mut self, model: &str) -> Result<(), Error> {
        let spec = model_loading::absent(model, "is not connected")
            .spec()
            .clone();
        // `add`: a name that is taken twice in the configuration is an error, and not the last one's.
        self.kernel.add(away(spec.clone()))?;
        self.ours.insert(spec.name.clone(), spec);
        Ok(())
    }

    /// Connects for the first time. `Err`: it can never succeed.
    async fn first(&mut self) -> Result<Option<UpstreamLink>, Status> {
        match dial(&self.dial).await {
            Ok(link) => Ok(Some(self.joined(link))),
            // Only at the first time, as a mistake of the configuration: later, a running server must not end because of it.
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

    /// Keeps the upstream connected: connects again after each loss, until it is stopped.
    async fn keep(
        mut self,
        failed: mpsc::Sender<CliError>,
        jitter: u64,
        mut stop: watch::Receiver<bool>,
    ) {
        // Both arms may be cancelled: after a stop no connection is needed, half made or whole.
        let first = tokio::select! {
            first = self.first() => first,
            () = stop_requested(&mut stop) => return,
        };
        let mut link = match first {
            Ok(link) => link,
            Err(status) => {
                // The channel is full if another upstream has reported a failure before.
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
                // Both arms may be cancelled: after a stop no connection is needed, half made or whole.
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
            // All arms may be cancelled: they only watch or dial.
            let next = tokio::select! {
                // In this order, because a stop ends everything, and a session that is over has nothing left to be
                // replaced.
                biased;
                () = stop_requested(&mut stop) => return retained.leave.await,
                () = retained.over => None,
                link = renewed(&self.dial, retained.worn, jitter) => Some(link),
            };
            // An upstream that is lost soon after it was joined is retried with delays. One that held has most likely
            // closed an idle session (EV-111), so it is dialled once at once, before its functions become unavailable.
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

    /// Replaces the functions that it served before with those that it serves now.
    fn joined(&mut self, mut link: UpstreamLink) -> UpstreamLink {
        let mut before = std::mem::take(&mut self.ours);
        let count = link.functions.len();
        for function in link.functions.drain(..) {
            let spec = function.spec().clone();
            // `replace` where it is ours already, so that the name never disappears between two sessions.
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
                Err(error) => {
                    tracing::warn!(%name, upstream, %error, "an upstream's function is not served")
                }
            }
        }
        // What the upstream has served before and does not serve any more.
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

    /// Makes its functions unavailable. Running calls were failed by their session.
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

/// A stand-in for a function while its server is disconnected. The error does not contain the server's address.
fn away(spec: Spec) -> Fun {
    let error = Error::Remote {
        code: Code::Unavailable,
        reason: Name::new("upstream_error"),
        message: format!(
            "the server that serves {} is not connected; it is tried again",
            spec.name
        ),
        retryable: true,
        retry_after: Some(DELAY_MIN),
    };
    model_loading::failing(spec, error)
}

/// The delays before each try, each with a random extra of up to its own length.
fn delays(jitter: u64) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(DELAY_MIN)
        // Half, because the jitter adds up to as much again.
        .with_max_delay(DELAY_MAX / 2)
        .without_max_times()
        .with_jitter()
        .with_jitter_seed(jitter)
        .build()
}

/// Covers connecting, the server's headers and its listing.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The same delays as LM-804 has for pools.
const DELAY_MIN: Duration = Duration::from_secs(1);
const DELAY_MAX: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
