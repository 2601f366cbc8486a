//! Streams whose readers connect, disconnect and do not return, on a virtual clock.

use std::io;
use std::sync::Weak;

use axum::body::Bytes;
use futures::stream::{self, BoxStream};
use tokio::task::yield_now;
use tokio::time::advance;

use super::*;
use crate::ops::drain;
use crate::ops::metrics::ServerMetrics;

const GRACE: Duration = Duration::from_secs(60);

fn streams(change: impl FnOnce(&mut Config)) -> Streams {
    let mut config = Config {
        resume_grace: GRACE,
        ..Config::default()
    };
    change(&mut config);
    Streams::new(&config, Drain::default())
}

/// `some` events that count from 1, followed by `end`; and a reference that is dropped with their producer.
fn request_timer(some: usize, end: EventStream) -> (EventStream, Weak<()>) {
    let there = Arc::new(());
    let seen = Arc::downgrade(&there);
    let numbers = (1..=some).map(|number| Ok(Bytes::from(format!("data: {number}\n\n"))));
    let events = stream::iter(numbers).chain(end);
    let events = events.map(move |event| {
        let _there = &there;
        event
    });
    (events.boxed(), seen)
}

fn end() -> EventStream {
    stream::empty().boxed()
}

fn never() -> EventStream {
    stream::pending().boxed()
}

fn cut() -> EventStream {
    stream::iter([Err(io::Error::other("cut"))]).boxed()
}

/// Registers and starts a stream. Returns its name and its first reader.
fn begin(
    streams: &Streams,
    events: EventStream,
) -> (String, BoxStream<'static, io::Result<Bytes>>) {
    let slot = streams
        .registration(&CallerIdentity::Anonymous(None))
        .unwrap();
    let name = slot.name().to_owned();
    let ending = RequestEnd::new(&Arc::new(ServerMetrics::new().unwrap()));
    let reader = slot.keep(events, ending);
    (name, reader.events().fuse().boxed())
}

fn read(streams: &Streams, name: &str, after: u64) -> Result<Option<EventStream>, StatusCode> {
    let read = streams.read(name, &CallerIdentity::Anonymous(None), after);
    let read = read.map(|reader| reader.map(|reader| reader.events().fuse().boxed()));
    read.map_err(|failure| failure.status)
}

/// The next `some` events, as their numbers and contents.
async fn received_events(events: &mut EventStream, some: usize) -> Vec<(u64, String)> {
    let mut all = Vec::new();
    while all.len() < some {
        let event = events.next().await.unwrap().unwrap();
        let text = String::from_utf8(event.to_vec()).unwrap();
        let (number, data) = text.strip_prefix("id: ").unwrap().split_once('\n').unwrap();
        all.push((number.parse().unwrap(), data.trim_end().to_owned()));
    }
    all
}

fn expected(numbers: impl Iterator<Item = u64>) -> Vec<(u64, String)> {
    numbers
        .map(|number| (number, format!("data: {number}")))
        .collect()
}

async fn settle() {
    for _ in 0..50 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn tr_1303_a_stream_without_a_reader_for_the_grace_is_removed() {
    let streams = streams(|config| config.resumable_streams = 1);
    for over in [false, true] {
        let (events, there) = request_timer(3, if over { end() } else { never() });
        let (name, mut reader) = begin(&streams, events);
        assert_eq!(received_events(&mut reader, 1).await, expected(1..=1));
        // Each reader restarts the grace.
        for after in [1, 0, 2] {
            drop(reader);
            settle().await;
            advance(GRACE - Duration::from_millis(1)).await;
            settle().await;
            assert_eq!(there.strong_count(), usize::from(!over));
            reader = read(&streams, &name, after).unwrap().unwrap();
            assert_eq!(
                received_events(&mut reader, 1).await,
                expected(after + 1..=after + 1)
            );
        }
        // A reader may take any time.
        settle().await;
        advance(10 * GRACE).await;
        settle().await;
        assert_eq!(streams.drain.open(), 1, "a drain waits for the reader");
        drop(reader);
        settle().await;
        advance(GRACE + Duration::from_millis(1)).await;
        settle().await;
        assert_eq!(there.strong_count(), 0);
        assert_eq!(read(&streams, &name, 2).err(), Some(StatusCode::NOT_FOUND));
        assert_eq!(streams.drain.open(), 0);
        assert!(
            streams
                .registration(&CallerIdentity::Anonymous(None))
                .is_some()
        );
    }
}

/// TR-609, D-29
#[tokio::test(start_paused = true)]
async fn tr_1303_an_unread_stream_pauses_at_half_of_its_buffer_and_loses_nothing() {
    let streams = streams(|config| config.resume_bytes = 2_000);
    let (events, there) = request_timer(1_000, end());
    let (name, mut reader) = begin(&streams, events);
    received_events(&mut reader, 500).await;
    drop(reader);
    settle().await;
    let channel = streams
        .channel(&name, &CallerIdentity::Anonymous(None))
        .unwrap();
    assert!(there.strong_count() == 1 && channel.follows(530).is_err());
    assert!(channel.follows(510).is_ok(), "it produced some more");
    assert_eq!(read(&streams, &name, 100).err(), Some(StatusCode::GONE));
    assert_eq!(
        read(&streams, &name, 1_000).err(),
        Some(StatusCode::BAD_REQUEST)
    );
    let mut reader = read(&streams, &name, 500).unwrap().unwrap();
    assert_eq!(
        received_events(&mut reader, 500).await,
        expected(501..=1_000)
    );
    assert!(reader.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn tr_1303_the_newer_reader_takes_over_and_the_older_is_cut() {
    let streams = streams(|_| {});
    let (events, _there) = request_timer(4, never());
    let (name, mut older) = begin(&streams, events);
    assert_eq!(received_events(&mut older, 3).await, expected(1..=3));
    let mut newer = read(&streams, &name, 2).unwrap().unwrap();
    assert!(older.next().await.unwrap().is_err());
    assert!(older.next().await.is_none());
    drop(older);
    assert_eq!(received_events(&mut newer, 2).await, expected(3..=4));
    settle().await;
    advance(2 * GRACE).await;
    settle().await;
    // A request that fails does not cut off the present reader.
    assert_eq!(
        read(&streams, &name, 9).err(),
        Some(StatusCode::BAD_REQUEST)
    );
    assert!(futures::poll!(newer.next()).is_pending());
}

#[tokio::test(start_paused = true)]
async fn tr_1303_every_reader_of_a_stream_gets_the_same_end() {
    let streams = streams(|_| {});
    for (how, well) in [(end(), true), (cut(), false)] {
        let (events, _there) = request_timer(2, how);
        let (name, mut reader) = begin(&streams, events);
        for after in [0, 2, 1] {
            let rest = 2 - usize::try_from(after).unwrap();
            if after > 0 {
                let Some(again) = read(&streams, &name, after).unwrap() else {
                    assert!(well && after == 2, "there is nothing more");
                    continue;
                };
                reader = again;
            }
            assert_eq!(
                received_events(&mut reader, rest).await,
                expected(after + 1..=2)
            );
            let last = reader.next().await;
            assert_eq!(last.is_none(), well);
            assert!(last.is_none_or(|last| last.is_err()));
            assert!(reader.next().await.is_none());
        }
    }
}

/// TR-1311
#[tokio::test(start_paused = true)]
async fn tr_1303_a_cancelled_stream_ends_with_an_event_and_cannot_be_resumed() {
    let streams = streams(|_| {});
    let (events, there) = request_timer(1, never());
    let (name, mut reader) = begin(&streams, events);
    received_events(&mut reader, 1).await;
    let cancel = |streams: &Streams| streams.cancel(&name, &CallerIdentity::Anonymous(None));
    assert!(cancel(&streams).is_ok());
    assert_eq!(read(&streams, &name, 1).err(), Some(StatusCode::NOT_FOUND));
    let last = received_events(&mut reader, 1).await;
    assert_eq!(
        last,
        [(2, r#"data: {"error":"Request was cancelled"}"#.to_owned())]
    );
    assert!(reader.next().await.is_none());
    settle().await;
    assert_eq!(there.strong_count(), 0);
    assert_eq!(cancel(&streams).unwrap_err().code, Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn tr_1303_only_streams_that_were_read_to_their_end_are_removed_for_room() {
    let streams = streams(|config| config.resumable_streams = 2);
    let (first, mut reader) = begin(&streams, request_timer(1, end()).0);
    let (second, mut other) = begin(&streams, request_timer(1, end()).0);
    received_events(&mut reader, 1).await;
    received_events(&mut other, 1).await;
    // Their ends were not read yet.
    assert!(
        streams
            .registration(&CallerIdentity::Anonymous(None))
            .is_none()
    );
    assert!(other.next().await.is_none());
    advance(Duration::from_secs(1)).await;
    assert!(reader.next().await.is_none());
    assert!(read(&streams, &second, 1).unwrap().is_none());
    let (_third, running) = begin(&streams, never());
    let known = |name: &str| read(&streams, name, 1).err() != Some(StatusCode::NOT_FOUND);
    assert!(
        known(&first) && !known(&second),
        "left first, removed first"
    );
    let (_fourth, _also) = begin(&streams, never());
    assert!(!known(&first));
    drop(running);
    settle().await;
    assert!(
        streams
            .registration(&CallerIdentity::Anonymous(None))
            .is_none()
    );
}

/// OA-904: a draining server lets no reader reconnect, so unread events are dropped.
#[tokio::test(start_paused = true)]
async fn tr_1303_a_drain_waits_only_for_streams_with_a_reader() {
    let streams = streams(|_| {});
    let (read_one, left_one) = (request_timer(1, never()), request_timer(1, never()));
    let (_, mut reader) = begin(&streams, read_one.0);
    let (_, left) = begin(&streams, left_one.0);
    drop(left);
    let drain = streams.drain.clone();
    let draining = tokio::spawn(async move { drain.run().await });
    streams.drain.reached(drain::DrainPhase::Refusing).await;
    settle().await;
    let made = [&read_one.1, &left_one.1].map(Weak::strong_count);
    assert_eq!(made, [1, 0]);
    received_events(&mut reader, 1).await;
    assert!(!draining.is_finished());
    drop(reader);
    assert_eq!(draining.await.unwrap().cut, 0);
    settle().await;
    assert_eq!(read_one.1.strong_count(), 0);
}
