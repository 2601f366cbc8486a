//! Fuzz entry point: a peer that writes garbage into the shared memory, lies about lengths, posts semaphores when it
//! likes, and cuts regions off.
//!
//! Invariants: what is received is what stood in the region, within its limits; an impossible length frees the slot; a
//! slot that is not free is not written; and nothing waits for a peer that has no time left (AI-221, AI-223).

use std::fs::{File, OpenOptions};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::slot::{FREE, Guard, MessageSlot, PeerLost, Received, SendError, SlotLimits, WRITING};
use super::{EngineWire, RuntimeWire, Synchronisation, WireConfig};
use crate::fuzz::Choices;

/// Runs `bytes` as a list of operations on the objects of one engine and one runtime.
///
/// # Panics
/// If an invariant does not hold.
pub fn slots(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let config = config(&mut choices);
    let Ok(engine) = EngineWire::create(&config) else {
        return;
    };
    // With futexes the names are gone once the runtime has opened them.
    let files = Files::open(&config);
    let Ok(runtime) = RuntimeWire::open(&config) else {
        return;
    };
    // The engine copies through descriptors, the runtime through its map; what each sends the other one receives.
    let mut channels = [
        Channel::new(engine.requests, runtime.requests),
        Channel::new(runtime.responses, engine.responses),
        Channel::new(engine.side_requests, runtime.side_requests),
        Channel::new(runtime.side_responses, engine.side_responses),
    ];
    while let Some(byte) = choices.next_byte() {
        let place = usize::from(byte) % channels.len();
        let channel = &mut channels[place];
        match byte / 4 % 8 {
            0 => channel.send(&mut choices),
            1 | 2 => channel.receive(),
            3 => channel.write_garbage(&mut choices),
            4 => channel.lie(&mut choices),
            5 => channel.post(&mut choices),
            // In a process of the runtime the rest would be SIGBUS, which ends it by design.
            6 if choices.byte() == 0 => return outlives(channels, &files, &mut choices),
            _ => {}
        }
    }
}

fn config(choices: &mut Choices<'_>) -> WireConfig {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut config = WireConfig::new(format!("/swf{}.{number}-", std::process::id()));
    if choices.flag() {
        config.synchronisation = Synchronisation::Futex;
    }
    let sizes = [64, 4096, 8, 38, 39, 4097, 32, 6];
    config.message_bytes = sizes[choices.below(sizes.len())];
    config.mask_bytes = 64;
    config.spin = Duration::ZERO;
    // Nobody else acts while a call waits: whatever is not there at once never is.
    config.limits = SlotLimits {
        stall: Duration::ZERO,
        unread: Duration::ZERO,
    };
    config
}

/// One direction, with what its semaphores must stand at.
struct Channel {
    sender: MessageSlot,
    receiver: MessageSlot,
    wr: u32,
    rd: u32,
}

impl Channel {
    const fn new(sender: MessageSlot, receiver: MessageSlot) -> Self {
        Self {
            sender,
            receiver,
            wr: 1,
            rd: 0,
        }
    }

    /// Where the length is.
    const fn word(&self) -> usize {
        match self.receiver.guard() {
            Guard::Semaphores { .. } => 0,
            Guard::Futex { word } => *word,
        }
    }

    const fn is_futex(&self) -> bool {
        matches!(self.receiver.guard(), Guard::Futex { .. })
    }

    fn length(&self) -> Option<u32> {
        self.receiver.region().load(self.word())
    }

    fn contents(&self, bytes: usize) -> Vec<u8> {
        let mut contents = Vec::new();
        let region = self.receiver.region();
        assert!(region.read(self.word() + 4, bytes, &mut contents));
        contents
    }

    fn send(&mut self, choices: &mut Choices<'_>) {
        let message = choices.bytes();
        let most = self.sender.bytes_max();
        let is_free = if self.is_futex() {
            self.length() == Some(FREE)
        } else {
            self.wr > 0
        };
        match self.sender.send(message) {
            Ok(()) => {
                assert!(is_free && message.len() <= most);
                assert_eq!(self.length(), Some(message.len() as u32));
                assert_eq!(self.contents(message.len()), message);
                self.wr = self.wr.saturating_sub(1);
                self.rd += 1;
            }
            Err(SendError::TooLarge { .. }) => assert!(message.len() > most),
            Err(SendError::Lost) => assert!(!is_free),
            Err(SendError::NoMemory) => assert!(!self.word().is_multiple_of(4) || most == 0),
        }
    }

    fn receive(&mut self) {
        let length = self.length();
        let is_there = if self.is_futex() {
            length.is_none_or(|word| word != FREE && word != WRITING)
        } else {
            self.rd > 0
        };
        let most = self.receiver.bytes_max();
        let fits = length.is_some_and(|length| length as usize <= most);
        let expected = (is_there && fits).then(|| self.contents(length.unwrap_or(0) as usize));
        let mut message = b"of the last call".to_vec();
        let received = self.receiver.receive(&mut message, Some(Instant::now()));
        match (received, expected) {
            (Ok(Received::Message), Some(expected)) => assert_eq!(message, expected),
            (Ok(Received::TooLong(bytes)), None) => {
                assert!(is_there && Some(bytes) == length && message.is_empty());
            }
            (Ok(Received::Nothing), None) => assert!(!is_there && message.is_empty()),
            (Err(PeerLost), None) => assert!(length.is_none()),
            (received, expected) => panic!("{received:?} of {expected:?}"),
        }
        if is_there && length.is_some() {
            assert_eq!(self.length(), Some(FREE), "the slot is free again");
            self.rd = self.rd.saturating_sub(1);
            self.wr += 1;
        }
    }

    fn write_garbage(&self, choices: &mut Choices<'_>) {
        let (at, bytes) = (choices.byte(), choices.bytes());
        let at = usize::from(at).min(self.sender.region().bytes());
        let room = self.sender.region().bytes() - at;
        let garbage = &bytes[..bytes.len().min(room)];
        assert!(self.sender.region().write(at, garbage));
    }

    fn lie(&self, choices: &mut Choices<'_>) {
        let most = self.receiver.bytes_max() as u32;
        let length = match choices.below(6) {
            0 => most,
            1 => most + 1,
            2 => WRITING,
            3 => FREE,
            4 => WRITING - 1,
            _ => choices.word(),
        };
        self.sender.region().store(self.word(), length);
    }

    fn post(&mut self, choices: &mut Choices<'_>) {
        let Guard::Semaphores { wr, rd } = self.receiver.guard() else {
            return;
        };
        if choices.flag() {
            wr.post();
            self.wr += 1;
        } else {
            rd.post();
            self.rd += 1;
        }
    }
}

/// The message regions as files, by which a peer makes them smaller.
struct Files(Vec<File>);

impl Files {
    fn open(config: &WireConfig) -> Self {
        let suffix = match config.synchronisation {
            Synchronisation::Semaphores => "-shm",
            Synchronisation::Futex => "",
        };
        let open = |name: &str| {
            let path = format!("/dev/shm/{}{name}{suffix}", &config.prefix[1..]);
            OpenOptions::new().write(true).open(path).ok()
        };
        Self(["cmd", "resp"].into_iter().filter_map(open).collect())
    }
}

/// The runtime cuts its regions off. The engine goes on, and is told that its peer is lost.
fn outlives(channels: [Channel; 4], files: &Files, choices: &mut Choices<'_>) {
    let [mut requests, mut responses, ..] = channels;
    for file in &files.0 {
        let bytes = u64::from(choices.byte());
        // Only ever smaller: a larger region is still there.
        if bytes < file.metadata().map_or(0, |status| status.len()) {
            let _ = file.set_len(bytes);
        }
    }
    let mut message = Vec::new();
    while let Some(byte) = choices.next_byte() {
        if byte % 2 == 0 {
            let _ = requests.sender.send(choices.bytes());
        } else {
            let received = responses
                .receiver
                .receive(&mut message, Some(Instant::now()));
            assert!(
                received != Ok(Received::Message)
                    || message.len() <= responses.receiver.bytes_max()
            );
        }
    }
}
