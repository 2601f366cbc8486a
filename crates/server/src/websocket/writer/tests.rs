use std::task::Waker;

use super::*;

/// Takes so many bytes at a time, and none after so many calls.
struct Slow {
    taken: Vec<u8>,
    each: usize,
    calls_left: usize,
}

impl AsyncWrite for Slow {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.calls_left == 0 {
            return Poll::Pending;
        }
        self.calls_left -= 1;
        let each = self.each;
        let all = bytes.iter().flat_map(|slice| slice.iter().copied());
        let before = self.taken.len();
        self.taken.extend(all.take(each));
        Poll::Ready(Ok(self.taken.len() - before))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[test]
fn ev_705_partial_writes_keep_the_order_of_frames() {
    let lengths = [0, 1, 125, 126, GATHERED - 1, GATHERED, 3, 65_535, 65_536, 2];
    let mut expect = Vec::new();
    for (index, len) in lengths.into_iter().enumerate() {
        expect.push(if index % 2 == 0 { 0x81 } else { 0x82 });
        match u16::try_from(len) {
            Ok(short) if short < 126 => expect.push(u8::try_from(len).unwrap()),
            Ok(short) => {
                expect.push(126);
                expect.extend(short.to_be_bytes());
            }
            Err(_) => {
                expect.push(127);
                expect.extend((len as u64).to_be_bytes());
            }
        }
        expect.extend(vec![u8::try_from(index).unwrap(); len]);
    }
    let mut cx = Context::from_waker(Waker::noop());
    for each in [1, 2, 13, 4_096, 100_000, usize::MAX] {
        let mut writer = FrameWriter::default();
        let mut slow = Slow {
            taken: Vec::new(),
            each,
            calls_left: 0,
        };
        for (index, len) in lengths.into_iter().enumerate() {
            let kind = if index % 2 == 0 {
                FrameKind::Text
            } else {
                FrameKind::Binary
            };
            writer.put(kind, vec![u8::try_from(index).unwrap(); len].into());
            // Some of it goes while there is more to come.
            slow.calls_left = 3;
            let _ = writer.poll_write(Pin::new(&mut slow), &mut cx);
        }
        assert_eq!(writer.len() + slow.taken.len(), expect.len());
        slow.calls_left = usize::MAX;
        let done = writer.poll_write(Pin::new(&mut slow), &mut cx);
        assert!(matches!(done, Poll::Ready(Ok(()))));
        assert_eq!(writer.len(), 0);
        assert!(slow.taken == expect, "{each} at a time");
    }
}

#[test]
fn ev_705_control_frames_have_their_heads() {
    for (kind, expect) in [
        (FrameKind::Ping, [0x89, 0]),
        (FrameKind::Pong, [0x8a, 0]),
        (FrameKind::Close, [0x88, 0]),
    ] {
        let mut writer = FrameWriter::default();
        writer.put(kind, Bytes::new());
        assert_eq!(writer.open[..], expect);
    }
}

#[test]
fn ev_982_a_large_write_buffer_is_freed() {
    let mut writer = FrameWriter::default();
    for _ in 0..10 {
        writer.put(FrameKind::Binary, vec![0; GATHERED - 1].into());
    }
    writer.rest();
    assert!(
        writer.open.capacity() > RETAINED_BYTES,
        "it waits to be written"
    );
    let mut all = Slow {
        taken: Vec::new(),
        each: usize::MAX,
        calls_left: usize::MAX,
    };
    let mut cx = Context::from_waker(Waker::noop());
    assert!(writer.poll_write(Pin::new(&mut all), &mut cx).is_ready());
    writer.rest();
    assert_eq!(writer.open.capacity(), 0);
}
