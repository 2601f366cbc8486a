use futures::{StreamExt, stream};
use http_body_util::BodyExt;
use prometheus::{IntCounter, IntGauge};

use super::*;
use crate::http::body_budget::Config;

fn intake(total: usize) -> (Arc<BodyIntake>, IntGauge) {
    let in_use = IntGauge::new("used", "-").unwrap();
    let refused = IntCounter::new("refused", "-").unwrap();
    let config = Config {
        total,
        each: total,
        ..Config::default()
    };
    let budget = BodyBudget::new(config, in_use.clone(), refused);
    let caller = CallerIdentity::Key("a".into());
    (BodyIntake::new(Arc::new(budget), caller, 0, PACE), in_use)
}

/// In such a time 16 KiB must come.
const PACE: Duration = Duration::from_secs(30);

fn pieces(pieces: Vec<Vec<u8>>) -> Body {
    let pieces = pieces
        .into_iter()
        .map(|it| Ok::<_, std::io::Error>(Bytes::from(it)));
    Body::from_stream(stream::iter(pieces))
}

async fn next(body: &mut Body) -> usize {
    let frame = body.frame().await.unwrap().unwrap();
    frame.into_data().unwrap().len()
}

#[tokio::test]
async fn d_47_a_body_is_charged_until_its_answer_begins() {
    let (intake, in_use) = intake(40_000);
    let body = intake.watching(pieces(vec![vec![b'x'; 10_000]; 4]), Framing::Lines);
    assert_eq!(body.collect().await.unwrap().to_bytes().len(), 40_000);
    assert_eq!(in_use.get(), 40_000);
    let mut more = intake.reserve();
    assert!(more.is_empty() && intake.failure().is_none());
    intake.answered();
    assert_eq!(in_use.get(), 0);
    more.hold(40_000).await.unwrap();
    // Too late to be kept for the answer.
    intake.keep(more);
    assert_eq!(in_use.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn d_47_a_body_without_room_is_refused_and_can_be_read_away() {
    let (intake, in_use) = intake(39_999);
    let mut body = intake.watching(pieces(vec![vec![b'x'; 10_000]; 8]), Framing::Lines);
    for _ in 0..3 {
        assert_eq!(next(&mut body).await, 10_000);
    }
    assert_eq!(in_use.get(), 30_000);
    assert!(body.frame().await.unwrap().is_err());
    assert_eq!(intake.failure(), Some(BodyFailure::Overloaded));
    assert_eq!(in_use.get(), 0);
    for _ in 0..4 {
        assert_eq!(next(&mut body).await, 10_000);
    }
    assert!(body.frame().await.is_none());
    assert_eq!(in_use.get(), 0);
}

/// Pieces of so many bytes, each after so many seconds, without end.
fn dripping(pieces: Vec<(usize, u64)>) -> Body {
    let pieces = stream::iter(pieces).chain(stream::pending());
    Body::from_stream(pieces.then(|(bytes, seconds)| async move {
        sleep(Duration::from_secs(seconds)).await;
        Ok::<_, std::io::Error>(Bytes::from(vec![0xa; bytes]))
    }))
}

#[tokio::test(start_paused = true)]
async fn d_47_a_stream_that_is_held_back_is_not_read_and_what_was_taken_is_refunded() {
    let (intake, in_use) = intake(100_000);
    let mut whole = vec![b'x'; 10_000];
    whole.push(b'\n');
    let part = vec![b'x'; 10_000];
    let all = vec![whole, part.clone(), part];
    let mut body = intake.watching(pieces(all), Framing::Lines);
    intake.answered();
    for (bytes, held) in [(10_001, 0), (10_000, 10_000)] {
        assert_eq!(next(&mut body).await, bytes);
        assert!(intake.hold_back(true));
        assert!(futures::poll!(body.frame()).is_pending());
        assert_eq!(in_use.get(), held);
        // The client has not stopped sending: nobody reads.
        tokio::time::advance(10 * PACE).await;
        assert!(futures::poll!(body.frame()).is_pending());
        assert!(intake.hold_back(false) && !intake.hold_back(false));
    }
    assert_eq!(next(&mut body).await, 10_000);
}

/// Of bodies, and of messages of streams. The last column: seconds until it is given up; pieces that came by then.
#[tokio::test(start_paused = true)]
async fn d_47_charged_bodies_must_arrive_at_a_minimum_rate() {
    let little = vec![(1, 29); 200];
    let slow = vec![(16 << 10, 29); 200];
    let begun = [vec![(100_000, 0)], little.clone()].concat();
    let late = [slow.clone(), little.clone()].concat();
    for (name, body, end) in [
        ("what is not charged may take its time", little, None),
        ("16 KiB within the time are enough", slow, None),
        ("a body that drips is given up", begun, Some((30, 2))),
        ("however fast it was", late, Some((200 * 29 + 30, 201))),
    ] {
        let (intake, in_use) = intake(8 << 20);
        let length = body.len();
        let mut body = intake.watching(dripping(body), Framing::Grpc);
        let began = tokio::time::Instant::now();
        let mut came = 0;
        while came < length && body.frame().await.unwrap().is_ok() {
            came += 1;
        }
        let received = (came < length).then(|| (began.elapsed().as_secs(), came));
        assert_eq!(received, end, "{name}");
        let failure = end.map(|_| BodyFailure::Slow);
        assert_eq!(intake.failure(), failure, "{name}");
        if end.is_some() {
            assert_eq!(in_use.get(), 0, "{name}");
        }
    }
}

/// What waits for room, or is not asked for, is not slow.
#[tokio::test(start_paused = true)]
async fn d_47_only_the_time_of_waiting_for_the_client_counts() {
    let (intake, in_use) = intake(8 << 20);
    let pieces = vec![(10_000, 0), (1, 20), (1, 9), (1, 2)];
    let mut body = intake.watching(dripping(pieces), Framing::Lines);
    for _ in 0..3 {
        assert!(next(&mut body).await > 0);
        sleep(Duration::from_secs(60)).await;
    }
    assert!(body.frame().await.unwrap().is_err());
    // A stream of messages that have come whole may be silent for as long as it likes.
    intake.exempt(true);
    let pieces = vec![(10_000, 0), (1, 3600)];
    let mut body = intake.watching(dripping(pieces), Framing::Lines);
    intake.answered();
    for _ in 0..2 {
        assert!(next(&mut body).await > 0);
    }
    assert_eq!(in_use.get(), 0);
}

#[tokio::test]
async fn d_47_only_the_unfinished_message_of_a_stream_is_charged() {
    let grpc = |length: u32| [&[0], &length.to_be_bytes()[..], &vec![7; length as usize]].concat();
    let lines = [vec![b'x'; 9_999], vec![b'\n'], vec![b'y'; 10_000]].concat();
    for (framing, bytes) in [
        (Framing::Grpc, [grpc(9_995), grpc(0), grpc(20_000)].concat()),
        (Framing::Lines, [lines, vec![b'z'; 10_010]].concat()),
    ] {
        for size in [1, 3, 5_000, 10_004, 30_010] {
            let (intake, in_use) = intake(40_000);
            let split = bytes.chunks(size).map(<[u8]>::to_vec).collect();
            let mut body = intake.watching(pieces(split), framing);
            intake.answered();
            let mut passed = 0;
            let mut most = 0;
            while passed < bytes.len() {
                passed += next(&mut body).await;
                most = most.max(in_use.get());
            }
            assert!(body.frame().await.is_none());
            let (left, whole) = match framing {
                Framing::Grpc => (0, 20_005),
                Framing::Lines => (20_010, 20_010),
            };
            assert_eq!(in_use.get(), left, "{framing:?} {size}");
            assert!(size > 5_000 || most == whole, "{framing:?} {size} {most}");
            drop(body);
            assert_eq!(in_use.get(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn oa_911_a_body_may_pause_up_to_its_limit() {
    let pieces = |pauses: [u64; 3]| {
        Body::from_stream(stream::unfold(0, move |index| async move {
            let pause = pauses.get(index)?;
            sleep(Duration::from_millis(*pause)).await;
            Some((Ok::<_, std::io::Error>(Bytes::from_static(b"x")), index + 1))
        }))
    };
    let empty = intake(8 << 20).0.watching(Body::empty(), Framing::Lines);
    assert!(empty.is_end_stream());
    let watching = |pauses| {
        let (intake, _) = intake(8 << 20);
        (intake.watching(pieces(pauses), Framing::Lines), intake)
    };
    for (pauses, arrives) in [
        // The limit applies to each pause, not to all together.
        ([29_999, 29_999, 29_999], true),
        ([0, 30_001, 0], false),
    ] {
        let (body, intake) = watching(pauses);
        let read = body.collect().await;
        assert_eq!(
            read.map(|all| all.to_bytes().len()).ok(),
            arrives.then_some(3)
        );
        let failure = (!arrives).then_some(BodyFailure::Stalled);
        assert_eq!(intake.failure(), failure, "{pauses:?}");
    }
    // One that is read as a stream may pause while what it asked for runs.
    let (body, intake) = watching([600_000, 0, 29_999]);
    assert!(intake.exempt(true) && !intake.exempt(true));
    let mut body = body.into_data_stream();
    assert!(body.next().await.unwrap().is_ok());
    assert!(intake.exempt(false));
    assert!(body.next().await.unwrap().is_ok() && body.next().await.unwrap().is_ok());
    let (body, intake) = watching([0, 600_000, 0]);
    intake.exempt(true);
    let mut body = body.into_data_stream();
    assert!(body.next().await.unwrap().is_ok());
    intake.exempt(false);
    assert!(body.next().await.unwrap().is_err() && intake.failure() == Some(BodyFailure::Stalled));
}
