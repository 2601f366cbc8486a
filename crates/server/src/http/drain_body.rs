//! Reads and discards the rest of a request body when the response is ready early, as for a refused request (TR-208,
//! D-35).
//!
//! Over HTTP/1 a connection whose body was not read has to be closed, and closing it while the client still writes resets it:
//! the client then reports a broken connection, and never sees the response that says what was wrong.

use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use tokio::time::timeout;

/// Time limit for reading all of it.
const MOST: Duration = Duration::from_secs(30);
/// A client that sends nothing for this long is taken to wait for its response; over a bidirectional stream it would wait for
/// ever.
const PAUSE: Duration = Duration::from_secs(2);
/// Number of pieces that are read, plus one for each [`PIECE_BYTES`] that may be read: every piece costs time, however small it
/// is.
const PIECES: u64 = 1_000;
const PIECE_BYTES: u64 = 1 << 10;

/// The part of a body that its reader has not read.
pub(crate) struct UnreadRemainder {
    pub(crate) body: Body,
    /// Bytes that the reader has read.
    pub(crate) read: u64,
    /// The reader has polled the body. A client with `Expect: 100-continue` sends nothing before that.
    pub(crate) begun: bool,
}

impl UnreadRemainder {
    /// A body that was never polled.
    pub(crate) const fn of(body: Body) -> Self {
        Self {
            body,
            read: 0,
            begun: false,
        }
    }

    /// Reads the rest, as long as the whole body has no more than `most` bytes. `waits`: the client has sent
    /// `Expect: 100-continue`.
    pub(crate) async fn read_away(mut self, most: u64, waits: bool) {
        // Polling the body would make hyper send the 100, and with it ask for an upload that is only thrown away.
        if self.begun || !waits {
            read_away(&mut self.body, most.saturating_sub(self.read)).await;
        }
    }
}

/// Reads about `most` bytes, and returns how many it has read.
pub(crate) async fn read_away(body: &mut Body, most: u64) -> u64 {
    let mut read = 0;
    let mut pieces = PIECES.saturating_add(most / PIECE_BYTES);
    let reading = async {
        while read < most
            && pieces > 0
            && !body.is_end_stream()
            && let Ok(Some(Ok(frame))) = timeout(PAUSE, body.frame()).await
        {
            read += frame.data_ref().map_or(0, Bytes::len) as u64;
            pieces -= 1;
        }
    };
    // Whatever is left at a limit or after an error: hyper closes the connection over it.
    let _ = timeout(MOST, reading).await;
    read
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use tokio::time::{Instant, sleep};

    use super::*;

    /// Pieces of `bytes`, each after so many milliseconds, without end.
    fn dripping(bytes: usize, pause: u64) -> Body {
        let pieces = stream::repeat(()).then(move |()| async move {
            sleep(Duration::from_millis(pause)).await;
            Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; bytes]))
        });
        Body::from_stream(pieces)
    }

    #[tokio::test(start_paused = true)]
    async fn d_35_draining_a_body_is_limited_in_bytes_pieces_and_time() {
        for (bytes, pause, most, read, seconds) in [
            (1_000_000, 0, 2_500_000, 3_000_000, 0),
            (1, 0, 1 << 20, 2_024, 0),
            (1_000, 1_999, u64::MAX, 15_000, 30),
            (1_000, 2_001, u64::MAX, 0, 2),
            (1_000, 0, 0, 0, 0),
        ] {
            let began = Instant::now();
            let reported = read_away(&mut dripping(bytes, pause), most).await;
            let reported = (reported, began.elapsed().as_secs());
            assert_eq!(reported, (read, seconds), "{bytes} {pause} {most}");
        }
        assert_eq!(read_away(&mut Body::from("body"), 100).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn d_35_a_refused_body_behind_expect_100_is_not_requested() {
        let leftover = |begun| UnreadRemainder {
            body: dripping(1, 60_000),
            read: 0,
            begun,
        };
        for (begun, waits, seconds) in [
            (false, true, 0),
            (true, true, 2),
            (false, false, 2),
            (true, false, 2),
        ] {
            let began = Instant::now();
            leftover(begun).read_away(100, waits).await;
            assert_eq!(began.elapsed().as_secs(), seconds, "{begun} {waits}");
        }
    }
}
