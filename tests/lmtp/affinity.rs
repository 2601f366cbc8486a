//! Hits of a pool in the prefix caches of its servers.

use futures::StreamExt;
use sapwood_proto::lmtp::{GenerateRequest, pool as machine};
use sapwood_proto::params::GenerationParams;
use sapwood_tests::{Running, spawned};

use super::pool::pool;
use super::{chatter, kernel};

/// Queries whose prompts grow by their output, six at a time, over `count` servers; returns the prompt tokens found in
/// the servers' caches.
async fn prefix_hits(count: usize) -> u64 {
    let engines: Vec<_> = (0..count).map(|_| spawned(chatter())).collect();
    let mut servers = Vec::new();
    for engine in &engines {
        let kernel = kernel("parrot", engine.clone());
        servers.push(Running::start(kernel, Default::default(), Vec::new()).await);
    }
    let servers: Vec<_> = servers.iter().collect();
    let pool = pool(&servers, machine::PoolOptions::default()).await;
    let mut prompts: Vec<Vec<u32>> = (0..6)
        .map(|query| (0..200).map(|at| 300 + query + at).collect())
        .collect();
    for _ in 0..6 {
        let asking = prompts.iter_mut().map(|prompt| async {
            let wanted = GenerateRequest {
                prompt: prompt.clone(),
                params: GenerationParams {
                    max_tokens: Some(16),
                    ..GenerationParams::default()
                },
                ..GenerateRequest::default()
            };
            let mut items = pool.generate(wanted, None);
            while let Some(item) = items.next().await {
                prompt.extend(item.unwrap().token);
            }
        });
        futures::future::join_all(asking).await;
    }
    assert!(prompts.iter().all(|prompt| prompt.len() == 200 + 6 * 16));
    let mut hits = 0;
    for engine in &engines {
        assert!(
            engine.stats().generation_tokens.get() > 0,
            "all of them work"
        );
        hits += engine.stats().prefix_hits.get();
    }
    hits
}

#[tokio::test]
async fn lm_1309_a_pool_hits_cached_prefixes_as_often_as_one_server() {
    let (one, two) = (prefix_hits(1).await, prefix_hits(2).await);
    assert!(100 * two >= 95 * one, "{two} tokens found, by one {one}");
}
