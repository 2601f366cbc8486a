//! Tests of encoding Rust values as chunks.

use futures::executor::block_on;

use super::*;

fn shown(chunks: Chunks) -> Vec<String> {
    let show = |item: Result<Chunk>| match item {
        Ok(chunk) => format!("{}.{} {} {}", chunk.choice, chunk.part, chunk.mime, chunk),
        Err(error) => format!("! {error}"),
    };
    block_on(chunks.map(show).collect())
}

/// KE-R19: bytes unchanged, other values as UTF-8 of their string form; one chunk, choice 0.
#[test]
fn ke_211_a_plain_value_is_one_chunk() {
    let part = Part {
        mime: "image/png".into(),
        role: "USER".into(),
        name: "a.png".into(),
        data: Bytes::from_static(b"png"),
    };
    for (chunks, expect) in [
        ("a".into_chunks(), "0.0 text/plain a"),
        (String::from("b").into_chunks(), "0.0 text/plain b"),
        (Text::from("c").into_chunks(), "0.0 text/plain c"),
        (
            Bytes::from("d").into_chunks(),
            "0.0 application/octet-stream d",
        ),
        (
            IntoChunks::into_chunks(vec![101_u8]),
            "0.0 application/octet-stream e",
        ),
        (true.into_chunks(), "0.0 application/json true"),
        ((-7_i64).into_chunks(), "0.0 application/json -7"),
        (0.1_f32.into_chunks(), "0.0 application/json 0.1"),
        (
            serde_json::json!({"a": 1}).into_chunks(),
            "0.0 application/json {\"a\":1}",
        ),
        (Json(vec![1, 2]).into_chunks(), "0.0 application/json [1,2]"),
        (
            Chunk::text("f").with_mime("text/html").into_chunks(),
            "0.0 text/html f",
        ),
        (part.into_chunks(), "0.0 image/png png"),
        (Some("g").into_chunks(), "0.0 text/plain g"),
        (Ok::<_, Error>("h").into_chunks(), "0.0 text/plain h"),
    ] {
        assert_eq!(shown(chunks), [expect]);
    }
    assert!(shown(().into_chunks()).is_empty() && shown(None::<String>.into_chunks()).is_empty());
}

#[test]
fn ke_r19_a_plain_value_is_one_chunk_of_choice_zero() {
    ke_211_a_plain_value_is_one_chunk();
}

#[test]
fn ke_211_errors_are_wrapped_once_and_odd_numbers_refused() {
    let first = |chunks: Chunks| block_on(chunks.into_future()).0.unwrap();
    assert!(matches!(
        first(f64::INFINITY.into_chunks()),
        Err(Error::Decode { .. })
    ));
    assert!(matches!(
        first(f32::NAN.into_chunks()),
        Err(Error::Decode { .. })
    ));
    let own: Result<String, std::fmt::Error> = Err(std::fmt::Error);
    assert!(matches!(first(own.into_chunks()), Err(Error::Function(_))));
    let ours: Result<String, Error> = Err(Error::Released);
    assert!(
        matches!(first(ours.into_chunks()), Err(Error::Released)),
        "not wrapped twice"
    );
}

/// KE-R20: one chunk per element, in order, lazily. Also the NDJSON records of KE-112.
#[test]
fn ke_212_a_stream_is_one_chunk_per_item() {
    let numbers = StreamOf(iter([1, 2])).into_chunks();
    assert_eq!(
        shown(numbers),
        [
            "0.0 application/x-ndjson 1\n",
            "0.0 application/x-ndjson 2\n"
        ]
    );
    let words = StreamOf(iter(["a", "b"])).into_chunks();
    assert_eq!(shown(words), ["0.0 text/plain a", "0.0 text/plain b"]);
    let part = |text: &'static str| Part {
        mime: Mime::TEXT,
        role: Default::default(),
        name: Default::default(),
        data: Bytes::from(text),
    };
    assert_eq!(
        shown(StreamOf(iter([part("a"), part("b")])).into_chunks()),
        ["0.0 text/plain a", "0.1 text/plain b"]
    );
    let failing = StreamOf(iter([Ok("a"), Err(Error::Released), Ok("never")])).into_chunks();
    assert_eq!(
        shown(failing),
        [
            "0.0 text/plain a",
            "! the beginning of this stream has been released"
        ]
    );
    assert_eq!(
        <StreamOf<futures::stream::Empty<i32>> as IntoChunks>::mimes(),
        [Mime::NDJSON]
    );
}

#[test]
fn ke_r20_a_stream_gives_its_elements_lazily() {
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = asked.clone();
    let numbers = (0..10_u32).inspect(move |_| {
        counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    });
    let mut chunks = StreamOf(iter(numbers)).into_chunks();
    for seen in 1..=3 {
        assert!(block_on(chunks.next()).is_some());
        assert_eq!(
            asked.load(std::sync::atomic::Ordering::SeqCst),
            seen,
            "item k is seen before k + 1 is asked for"
        );
    }
}
