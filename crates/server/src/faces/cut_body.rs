//! Response bodies that break off, so that no client takes them for complete ones (D-11, LM-113).

use futures::{Stream, StreamExt};

/// Passes on the pieces of a body, and an error one poll later: hyper sends what it holds where a body is pending, and
/// drops it at an error.
pub(crate) fn flush_before_error<T, E>(
    pieces: impl Stream<Item = Result<T, E>>,
) -> impl Stream<Item = Result<T, E>> {
    pieces.then(|piece| async move {
        if piece.is_err() {
            tokio::task::yield_now().await;
        }
        piece
    })
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn an_error_is_sent_one_poll_after_the_pieces_before_it() {
        let pieces = futures::stream::iter([Ok("first"), Ok("second"), Err("cut")]);
        let mut pieces = std::pin::pin!(flush_before_error(pieces));
        assert_eq!(poll!(pieces.next()).map(Option::unwrap), Ok("first").into());
        assert_eq!(
            poll!(pieces.next()).map(Option::unwrap),
            Ok("second").into()
        );
        assert!(poll!(pieces.next()).is_pending());
        assert_eq!(pieces.next().await, Some(Err("cut")));
    }
}
