mod library;

use super::*;

/// A frame of a client, under this mask.
fn masked(head: u8, payload: &[u8], mask: [u8; 4]) -> Vec<u8> {
    let mut bytes = vec![head];
    match u16::try_from(payload.len()) {
        Ok(len) if len < 126 => bytes.push(0x80 | u8::try_from(len).unwrap()),
        Ok(len) => {
            bytes.push(0x80 | 126);
            bytes.extend(len.to_be_bytes());
        }
        Err(_) => {
            bytes.push(0x80 | 127);
            bytes.extend((payload.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(mask);
    let hidden = payload.iter().zip(mask.into_iter().cycle());
    bytes.extend(hidden.map(|(byte, mask)| byte ^ mask));
    bytes
}

fn frame(head: u8, payload: &[u8]) -> Vec<u8> {
    masked(head, payload, [0x9a, 0x01, 0xff, 0x37])
}

/// Gives a reader `bytes` as a network would that has them all there, but hands over at most `most` at a time. What was
/// said, how it ended, and how often was read.
fn receive(
    bytes: &[u8],
    most: usize,
    bytes_max: usize,
) -> (Vec<ReadFrame>, Option<SocketLoss>, usize) {
    let mut reader = FrameReader::new(Vec::new(), bytes_max);
    let (mut reply, mut rest, mut reads) = (Vec::new(), bytes, 0);
    loop {
        match reader.next() {
            Ok(Some(one)) => reply.push(one),
            Err(lost) => return (reply, Some(lost), reads),
            Ok(None) if rest.is_empty() => return (reply, None, reads),
            Ok(None) => {
                let room = reader.room();
                let count = most.min(rest.len()).min(room.capacity() - room.len());
                assert!(count > 0, "there is always room");
                room.extend_from_slice(&rest[..count]);
                rest = &rest[count..];
                reader.came();
                reads += 1;
                if count == most || rest.is_empty() {
                    reader.rest();
                }
            }
        }
    }
}

#[test]
fn ev_705_any_split_of_the_bytes_gives_the_same_messages() {
    let long: Vec<u8> = (0..70_000_u32)
        .map(|index| u8::try_from(index % 251).unwrap())
        .collect();
    let mut bytes = frame(0x81, "grüße".as_bytes());
    for (index, len) in [0, 1, 7, 8, 9, 125, 126, 127, 4_095, 65_535, 65_536, 70_000]
        .into_iter()
        .enumerate()
    {
        bytes.extend(masked(0x82, &long[..len], [index as u8, 2, 0, 255]));
    }
    bytes.extend(frame(0x01, b"in "));
    bytes.extend(frame(0x89, b"there?"));
    bytes.extend(frame(0x00, b""));
    bytes.extend(frame(0x8a, b""));
    bytes.extend(frame(0x80, b"pieces"));
    bytes.extend(frame(0x88, b"\x03\xe8bye"));
    let (whole, lost, _) = receive(&bytes, usize::MAX, 70_000);
    assert_eq!((whole.len(), lost), (1 + 12 + 4, None));
    assert_eq!(whole[0], ReadFrame::Text("grüße".into()));
    assert_eq!(whole[12], ReadFrame::Binary(long.into()));
    assert_eq!(whole[13], ReadFrame::Ping("there?".into()));
    assert_eq!(whole[15], ReadFrame::Text("in pieces".into()));
    assert_eq!(whole[16], ReadFrame::Close(Some(CloseCode::Normal)));
    for most in [1, 2, 3, 5, 13, 14, 15, 100, 4_096, 16_384, 65_536] {
        assert_eq!(receive(&bytes, most, 70_000).0, whole, "{most} at a time");
    }
}

#[test]
fn ev_705_invalid_frames_are_refused_with_their_cause() {
    let long = [b'x'; 126];
    let huge = [&[0x82, 0xff][..], &[0xff; 8], &[0; 4]].concat();
    for (what, bytes, expect) in [
        ("not masked", vec![0x82, 1, b'x'], SocketLoss::Broken),
        ("reserved bit 1", frame(0xc2, b""), SocketLoss::Broken),
        ("reserved bit 2", frame(0xa2, b""), SocketLoss::Broken),
        ("reserved bit 3", frame(0x92, b""), SocketLoss::Broken),
        ("a reserved kind", frame(0x83, b""), SocketLoss::Broken),
        ("a reserved control", frame(0x8b, b""), SocketLoss::Broken),
        ("more of nothing", frame(0x80, b"x"), SocketLoss::Broken),
        ("a ping in pieces", frame(0x09, b"x"), SocketLoss::Broken),
        ("a long ping", frame(0x89, &long), SocketLoss::Broken),
        ("half a code", frame(0x88, b"\x03"), SocketLoss::Broken),
        (
            "a code that says nothing",
            frame(0x88, b"\x03\xed"),
            SocketLoss::Broken,
        ),
        (
            "a code of nobody",
            frame(0x88, b"\x00\x01"),
            SocketLoss::Broken,
        ),
        (
            "a message within a message",
            [frame(0x02, b"x"), frame(0x82, b"y")].concat(),
            SocketLoss::Broken,
        ),
        ("no UTF-8", frame(0x81, b"\xff"), SocketLoss::NotText),
        (
            "no UTF-8 in pieces",
            [frame(0x01, b"\xc3"), frame(0x80, b"x")].concat(),
            SocketLoss::NotText,
        ),
        (
            "no UTF-8 in a reason",
            frame(0x88, b"\x03\xe8\xff"),
            SocketLoss::NotText,
        ),
        ("longer than there is", huge, SocketLoss::TooLarge),
        (
            "one byte too long",
            frame(0x82, &[0; 201]),
            SocketLoss::TooLarge,
        ),
        (
            "too long together",
            [frame(0x02, &[0; 200]), frame(0x80, b"x")].concat(),
            SocketLoss::TooLarge,
        ),
    ] {
        let (reply, lost, _) = receive(&bytes, usize::MAX, 200);
        assert_eq!((reply, lost), (Vec::new(), Some(expect)), "{what}");
    }
    // A character may be cut between frames.
    let cut = [frame(0x01, b"\xc3"), frame(0x80, b"\xbc")].concat();
    let (reply, ..) = receive(&cut, usize::MAX, 200);
    assert_eq!(reply, [ReadFrame::Text("ü".into())]);
    let exact = [frame(0x02, &[0; 199]), frame(0x80, b"x")].concat();
    assert_eq!(receive(&exact, usize::MAX, 200).1, None);
}

#[test]
fn ev_705_frames_of_a_message_are_counted() {
    for (left, expect) in [(3, None), (2, Some(SocketLoss::TooLarge))] {
        let mut reader = FrameReader::new(frame(0x02, b"x"), 200);
        assert_eq!(reader.next(), Ok(None));
        let pieces = reader.pieces.as_mut().unwrap();
        assert_eq!(pieces.frames_left, FRAMES_MAX);
        pieces.frames_left = left;
        // A byte makes up for its frame, nothing for one without.
        let rest = [(0x00, "y"), (0x00, ""), (0x00, ""), (0x80, "")];
        for (head, payload) in rest {
            let bytes = frame(head, payload.as_bytes());
            reader.room().extend_from_slice(&bytes);
        }
        assert_eq!(reader.next().err(), expect, "{left}");
    }
}

/// A large message must not take a read for every few bytes of it.
#[test]
fn ev_981_large_messages_take_few_reads() {
    let large = frame(0x82, &[b'x'; 65_536]);
    let bytes = large.repeat(10);
    let (reply, _, reads) = receive(&bytes, usize::MAX, 65_536);
    assert_eq!(reply.len(), 10);
    assert!(reads <= 15, "{reads} reads");
    let small = frame(0x82, &[b'x'; 50]).repeat(1_000);
    let (reply, _, reads) = receive(&small, usize::MAX, 65_536);
    assert_eq!(reply.len(), 1_000);
    assert!(reads <= 5, "{reads} reads");
}

/// Room is given for what has arrived, and not for what a head declares.
#[test]
fn d_47_a_head_gets_no_room_for_its_whole_message() {
    let large = frame(0x82, &[b'x'; 4 << 20]);
    let mut reader = FrameReader::new(large[..15].to_vec(), 16 << 20);
    for arrived in [1, 64 << 10, 1 << 20] {
        let missing = arrived - reader.held_bytes().min(arrived);
        reader.buf.extend_from_slice(&vec![0; missing]);
        assert!(reader.next().unwrap().is_none());
        let room = reader.room().capacity();
        let most = 8 * arrived + AHEAD + 2 * NARROW;
        assert!(room <= most, "{room} bytes after {arrived}");
    }
}

#[test]
fn ev_982_an_idle_reader_holds_no_memory() {
    let mut reader = FrameReader::new(frame(0x82, b"x"), 100_000);
    assert!(reader.next().unwrap().is_some());
    assert!(reader.next().unwrap().is_none());
    assert!(reader.room().capacity() >= NARROW);
    reader.rest();
    assert_eq!((reader.buf.capacity(), reader.block), (0, 0));
    // What has begun to come stays.
    let half = &frame(0x82, b"xyz")[..5];
    reader.room().extend_from_slice(half);
    reader.rest();
    assert_eq!(reader.buf, half);
}

/// EV-805
#[test]
fn ev_982_a_message_does_not_pin_a_large_buffer() {
    let large = frame(0x82, &[b'x'; 65_536]);
    let small = frame(0x82, &[b'y'; RETAINED_WHOLE]);
    let mut reader = FrameReader::new(Vec::new(), 65_536);
    reader.frame = None;
    let head = &large[..HEAD_MAX];
    reader.room().extend_from_slice(head);
    assert!(reader.next().unwrap().is_none());
    let room = reader.room();
    room.extend_from_slice(&large[HEAD_MAX..]);
    room.extend_from_slice(&small);
    let block = room.as_ptr_range();
    let block = block.start..block.start.wrapping_add(reader.block);
    let Some(ReadFrame::Binary(first)) = reader.next().unwrap() else {
        panic!("the large one");
    };
    assert!(block.contains(&first.as_ptr()), "nothing is copied");
    let Some(ReadFrame::Binary(second)) = reader.next().unwrap() else {
        panic!("the small one");
    };
    assert!(!block.contains(&second.as_ptr()), "it has its own");
}
