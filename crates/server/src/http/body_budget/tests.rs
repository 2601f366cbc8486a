use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntCounter, IntGauge};
use tokio::time::Instant;

use super::*;

const KIB: usize = 1 << 10;

fn budget(total: usize, each: usize) -> Arc<BodyBudget> {
    let config = Config {
        total,
        each,
        wait: Duration::from_secs(5),
    };
    let in_use = IntGauge::new("used", "-").unwrap();
    let refused = IntCounter::new("refused", "-").unwrap();
    Arc::new(BodyBudget::new(config, in_use, refused))
}

fn key(name: &str) -> CallerIdentity {
    CallerIdentity::Key(name.into())
}

#[tokio::test(start_paused = true)]
async fn d_47_a_charge_beyond_the_limit_waits_and_is_refused() {
    let budget = budget(64 * KIB, 32 * KIB);
    let mut all = budget.reserve(key("a"));
    assert_eq!(all.hold(32 * KIB).await, Ok(()));
    assert_eq!(budget.in_use.get(), 32 * 1024);
    // More than one request may ever hold is refused at once.
    let began = Instant::now();
    assert_eq!(
        budget.reserve(key("b")).hold(32 * KIB + 1).await,
        Err(BudgetFull)
    );
    assert_eq!(began.elapsed(), Duration::ZERO);
    // Another caller has room, and then the server has none for a third.
    let mut other = budget.reserve(key("b"));
    assert_eq!(other.hold(32 * KIB).await, Ok(()));
    let began = Instant::now();
    assert_eq!(
        budget.reserve(key("c")).hold(FREE + 1).await,
        Err(BudgetFull)
    );
    assert_eq!(began.elapsed(), budget.config.wait);
    assert_eq!(budget.refused.get(), 2);
    // What is small needs no room.
    assert_eq!(budget.reserve(key("c")).hold(FREE).await, Ok(()));
    drop((all, other));
    assert_eq!(budget.in_use.get(), 0);
    assert!(budget.lock().callers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn d_47_a_waiting_charge_succeeds_after_a_refund() {
    let budget = budget(64 * KIB, 32 * KIB);
    let mut first = budget.reserve(key("a"));
    first.hold(32 * KIB).await.unwrap();
    let mut second = budget.reserve(key("a"));
    let release = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        first.shrink(16 * KIB);
    };
    let began = Instant::now();
    let (retained, ()) = futures::join!(second.hold(16 * KIB), release);
    assert_eq!(
        (retained, began.elapsed()),
        (Ok(()), Duration::from_secs(3))
    );
    assert_eq!(budget.in_use.get(), 32 * 1024);
    // Less is a refund.
    second.hold(8 * KIB).await.unwrap();
    assert_eq!(budget.in_use.get(), 24 * 1024);
}

/// Each request holds a part and none can finish: all of it is refunded within the time limit.
#[tokio::test(start_paused = true)]
async fn d_47_requests_that_wait_for_each_other_end() {
    let budget = budget(64 * KIB, 64 * KIB);
    let each = (0..8).map(|_| {
        let budget = Arc::clone(&budget);
        async move {
            let mut body = budget.reserve(key("a"));
            body.hold(8 * KIB).await?;
            tokio::task::yield_now().await;
            body.hold(16 * KIB).await
        }
    });
    let began = Instant::now();
    let ended = futures::future::join_all(each).await;
    assert!(ended.contains(&Err(BudgetFull)), "{ended:?}");
    assert!(began.elapsed() <= budget.config.wait);
    assert_eq!(budget.in_use.get(), 0);
    assert_eq!(budget.reserve(key("a")).hold(64 * KIB).await, Ok(()));
}

/// A wait that is dropped leaves no charge behind.
#[tokio::test(start_paused = true)]
async fn d_47_a_wait_that_is_dropped_charges_nothing() {
    let budget = budget(16 * KIB, 16 * KIB);
    let mut first = budget.reserve(key("a"));
    first.hold(16 * KIB).await.unwrap();
    let mut second = budget.reserve(key("a"));
    let waiting = timeout(Duration::from_secs(1), second.hold(8 * KIB)).await;
    assert!(waiting.is_err());
    drop(second);
    drop(first);
    assert_eq!(budget.in_use.get(), 0);
}

/// Large bodies that trickle in delay only other large bodies.
#[tokio::test(start_paused = true)]
async fn d_47_large_requests_leave_room_for_ordinary_ones() {
    const MIB: usize = 1 << 20;
    let budget = budget(64 * MIB, 32 * MIB);
    let mut large = Vec::new();
    for caller in ["a", "b"] {
        let mut one = budget.reserve(key(caller));
        assert_eq!(one.hold(24 * MIB + 1).await, Err(BudgetFull));
        assert_eq!(one.hold(24 * MIB).await, Ok(()));
        large.push(one);
    }
    // The last quarter is for callers that hold little in all, however many there are.
    assert_eq!(budget.reserve(key("a")).hold(MIB).await, Err(BudgetFull));
    assert_eq!(
        budget.reserve(key("c")).hold(4 * MIB + 1).await,
        Err(BudgetFull)
    );
    for (caller, count) in [("c", 4), ("d", 4), ("e", 4), ("f", 2), ("g", 1), ("h", 1)] {
        for nth in 0..=count {
            let mut ordinary = budget.reserve(key(caller));
            let retained = ordinary.hold(MIB).await;
            assert_eq!(retained.is_ok(), nth < count, "{caller} {nth}");
            large.push(ordinary);
        }
    }
    drop(large);
    assert_eq!(budget.in_use.get(), 0);
}

/// Many small bodies of one caller count like a large one.
#[tokio::test(start_paused = true)]
async fn d_47_many_small_requests_of_few_callers_leave_room_for_others() {
    const MIB: usize = 1 << 20;
    let budget = budget(64 * MIB, 32 * MIB);
    let mut all = Vec::new();
    for caller in ["a", "b"] {
        loop {
            let mut one = budget.reserve(key(caller));
            if one.hold(MIB - 4_096).await.is_err() {
                break;
            }
            all.push(one);
        }
    }
    assert!(budget.in_use.get() <= 48 * MIB as i64);
    assert_eq!(budget.reserve(key("c")).hold(4 * MIB).await, Ok(()));
}

/// Of one caller's room, the last quarter is for ordinary requests: a key may stand for many people.
#[tokio::test(start_paused = true)]
async fn d_47_one_callers_large_requests_leave_room_for_its_ordinary_ones() {
    const MIB: usize = 1 << 20;
    let budget = budget(128 * MIB, 32 * MIB);
    let mut large = budget.reserve(key("a"));
    assert_eq!(large.hold(24 * MIB).await, Ok(()));
    assert_eq!(
        budget.reserve(key("a")).hold(MIB + 1).await,
        Err(BudgetFull)
    );
    let mut ordinary: Vec<_> = (0..8).map(|_| budget.reserve(key("a"))).collect();
    for one in &mut ordinary {
        assert_eq!(one.hold(MIB).await, Ok(()));
    }
    assert_eq!(budget.reserve(key("a")).hold(MIB).await, Err(BudgetFull));
}
