//! A Triton server as an upstream.

use std::future::{pending, ready};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use sapwood_net::ServerAddress;
use sapwood_proto::evergreen::Status;
use tokio::time::sleep;

use super::super::UpstreamLink;
use crate::client;

/// Connects once.
pub(super) async fn dial(address: &ServerAddress) -> Result<UpstreamLink, Status> {
    let (client, functions) = client::join_triton(address).await?;
    let listed = Arc::new(client.models().await.unwrap_or_default());
    let index = client.clone();
    let is_other = move || {
        let (index, listed) = (index.clone(), Arc::clone(&listed));
        // A failure is no change: `until_unready` decides whether the server is lost.
        async move { index.models().await.is_ok_and(|now| now != *listed) }
    };
    // A client of a single model has no list that could change.
    let worn = match client.only() {
        Some(_) => pending().boxed(),
        None => changed(is_other).boxed(),
    };
    let is_ready = move || {
        let client = client.clone();
        async move { client.ready().await.is_ok() }
    };
    Ok(UpstreamLink {
        functions,
        worn,
        over: until_unready(is_ready).boxed(),
        // The protocol has no goodbye: the connection is just closed.
        leave: ready(()).boxed(),
        served: None,
    })
}

/// Resolves when the server was not ready, or did not answer, twice in a row.
async fn until_unready<F: Future<Output = bool>>(is_ready: impl Fn() -> F) {
    let mut misses = 0;
    while misses < MISSES_MAX {
        sleep(HEALTH).await;
        misses = if is_ready().await { 0 } else { misses + 1 };
    }
}

/// Resolves when the list of ready models has changed, so that it is read again.
async fn changed<F: Future<Output = bool>>(is_other: impl Fn() -> F) {
    loop {
        sleep(INDEX).await;
        if is_other().await {
            return;
        }
    }
}

const HEALTH: Duration = Duration::from_secs(10);
const MISSES_MAX: u32 = 2;
const INDEX: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::Instant;

    use super::*;

    /// A single missed answer does not make a server unavailable.
    #[tokio::test(start_paused = true)]
    async fn tr_709_a_server_is_lost_after_two_missed_checks_in_a_row() {
        let began = Instant::now();
        let asked = Cell::new(0);
        let answers = [true, false, true, false, false];
        until_unready(|| ready(answers[asked.replace(asked.get() + 1)])).await;
        assert_eq!((asked.get(), began.elapsed()), (5, 5 * HEALTH));
    }

    #[tokio::test(start_paused = true)]
    async fn tr_705_models_are_listed_again_when_the_index_changes() {
        let began = Instant::now();
        changed(|| ready(began.elapsed() > Duration::from_secs(100))).await;
        assert_eq!(began.elapsed(), Duration::from_secs(120));
    }
}
