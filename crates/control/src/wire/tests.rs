//! The layout of messages byte by byte, and both ends of a channel in one process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::*;

/// A name that no other test uses.
fn config(synchronisation: Synchronisation) -> WireConfig {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut config = WireConfig::new(format!("/swt{}.{number}-", std::process::id()));
    config.synchronisation = synchronisation;
    config.message_bytes = 4096;
    config.mask_bytes = 8192;
    config.limits = SlotLimits {
        stall: Duration::from_millis(50),
        unread: Duration::from_millis(50),
    };
    config
}

fn pair(synchronisation: Synchronisation) -> (EngineWire, RuntimeWire, WireConfig) {
    let config = config(synchronisation);
    let engine = EngineWire::create(&config).unwrap();
    let runtime = RuntimeWire::open(&config).unwrap();
    (engine, runtime, config)
}

fn left(config: &WireConfig) -> Vec<String> {
    let prefix = config.prefix.trim_start_matches('/');
    let files = std::fs::read_dir("/dev/shm").unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains(prefix)).collect()
}

const SYNCHRONISATIONS: [Synchronisation; 2] =
    [Synchronisation::Semaphores, Synchronisation::Futex];

#[test]
fn ai_204_the_bytes_of_a_message_with_semaphores() {
    let (mut engine, _runtime, _) = pair(Synchronisation::Semaphores);
    engine.requests.send(br#"{"op":"ping"}"#).unwrap();
    let region = SharedRegion::open(&engine_name(&engine, "cmd-shm"), 4096).unwrap();
    let mut bytes = Vec::new();
    assert!(region.read(0, 17, &mut bytes));
    assert_eq!(bytes, b"\x0d\0\0\0{\"op\":\"ping\"}");
}

fn engine_name(engine: &EngineWire, name: &str) -> String {
    format!("{}{name}", engine.prefix())
}

/// AI-211
#[test]
fn ai_202_the_bytes_of_an_answer_with_futexes() {
    let config = WireConfig {
        message_bytes: 8 << 20,
        ..config(Synchronisation::Futex)
    };
    let engine = EngineWire::create(&config).unwrap();
    // Opened before the runtime removes the names of message regions.
    let region = SharedRegion::open(&engine_name(&engine, "resp"), 8 << 20).unwrap();
    let mut runtime = RuntimeWire::open(&config).unwrap();
    let pong = br#"{"type":"ok","data":{"pong":1}}"#;
    runtime.responses.send(pong).unwrap();
    let mut bytes = Vec::new();
    assert!(region.read(0x40_0000, 4 + pong.len(), &mut bytes));
    assert_eq!(bytes[..4], [0x1f, 0, 0, 0]);
    assert_eq!(bytes[4..], *pong);
    let mut half = Vec::new();
    assert!(region.read(0, 8, &mut half));
    assert_eq!(half, [0; 8]);
    assert_eq!(left(&config), [format!("{}bin-shm", &config.prefix[1..])]);
}

#[test]
fn ai_201_the_names_are_exact_and_the_engine_removes_them() {
    for synchronisation in SYNCHRONISATIONS {
        let config = config(synchronisation);
        let engine = EngineWire::create(&config).unwrap();
        let prefix = &config.prefix[1..];
        let mut expected: Vec<String> = match synchronisation {
            Synchronisation::Futex => ["cmd", "resp", "cmd-side", "resp-side", "bin-shm"]
                .map(|name| format!("{prefix}{name}"))
                .to_vec(),
            Synchronisation::Semaphores => ["cmd", "resp", "cmd-side", "resp-side"]
                .iter()
                .flat_map(|name| {
                    [
                        format!("{prefix}{name}-shm"),
                        format!("sem.{prefix}{name}-wr"),
                        format!("sem.{prefix}{name}-rd"),
                    ]
                })
                .chain([format!("{prefix}bin-shm")])
                .collect(),
        };
        expected.sort();
        let mut found = left(&config);
        found.sort();
        assert_eq!(found, expected);
        drop(engine);
        assert_eq!(left(&config), Vec::<String>::new());
    }
}

/// AI-223
#[test]
fn ai_852_objects_without_names_are_found_by_their_paths() {
    let named = config(Synchronisation::Futex);
    let (mut engine, files) = EngineWire::create_nameless(&named).unwrap();
    assert_eq!(left(&named), Vec::<String>::new());
    let given = WireConfig {
        files: Some(files),
        ..named.clone()
    };
    let mut runtime = RuntimeWire::open(&given).unwrap();
    assert_eq!(left(&named), Vec::<String>::new());
    let until = || Some(Instant::now() + Duration::from_secs(60));
    let mut message = Vec::new();
    for (sender, receiver) in [
        (&mut engine.requests, &mut runtime.requests),
        (&mut runtime.responses, &mut engine.responses),
        (&mut engine.side_requests, &mut runtime.side_requests),
        (&mut runtime.side_responses, &mut engine.side_responses),
    ] {
        sender.send(b"x").unwrap();
        let received = receiver.receive(&mut message, until());
        assert_eq!((received, &message[..]), (Ok(Received::Message), &b"x"[..]));
    }
    assert!(runtime.masks.write(8, b"mask"));
    message.clear();
    assert!(engine.masks.read(8, 4, &mut message));
    assert_eq!(message, b"mask");
    // A file that is not there any more is not made anew.
    drop(engine);
    assert!(RuntimeWire::open(&given).is_err());
}

/// AI-221
#[test]
fn ai_205_the_longest_message_passes_and_one_byte_more_is_refused() {
    for synchronisation in SYNCHRONISATIONS {
        let (mut engine, mut runtime, _) = pair(synchronisation);
        let most = engine.requests.bytes_max();
        assert_eq!(
            most,
            match synchronisation {
                Synchronisation::Semaphores => 4092,
                Synchronisation::Futex => 2032,
            }
        );
        let refused = engine.requests.send(&vec![b'x'; most + 1]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!(
                "msg too large; {} + 4 > {}",
                most + 1,
                engine.requests.room()
            )
        );
        let longest = vec![b'y'; most];
        engine.requests.send(&longest).unwrap();
        let mut message = Vec::new();
        let received = runtime.requests.receive(&mut message, None).unwrap();
        assert_eq!((received, &message), (Received::Message, &longest));
    }
}

#[test]
fn ai_221_an_impossible_length_frees_the_slot() {
    for synchronisation in SYNCHRONISATIONS {
        let (mut engine, mut runtime, _) = pair(synchronisation);
        let most = engine.requests.bytes_max() as u32;
        for length in [most + 1, u32::MAX - 1] {
            engine.requests.send(b"{}").unwrap();
            engine.requests.set_length(length);
            let mut message = Vec::new();
            let received = runtime.requests.receive(&mut message, None).unwrap();
            assert_eq!(received, Received::TooLong(length));
        }
        engine.requests.send(b"{}").unwrap();
        let mut message = Vec::new();
        let received = runtime.requests.receive(&mut message, None).unwrap();
        assert_eq!(
            (received, message.as_slice()),
            (Received::Message, &b"{}"[..])
        );
    }
}

#[test]
fn ai_213_a_writer_that_dies_in_mid_copy_is_a_lost_peer() {
    let (engine, mut runtime, _) = pair(Synchronisation::Futex);
    engine.requests.set_length(u32::MAX);
    let begun = Instant::now();
    let lost = runtime.requests.receive(&mut Vec::new(), None);
    assert_eq!(lost, Err(PeerLost));
    assert!(begun.elapsed() >= Duration::from_millis(50));
}

#[test]
fn ai_213_a_slot_that_stays_half_written_is_given_up_by_a_sender_too() {
    let mut config = config(Synchronisation::Futex);
    config.limits.unread = Duration::from_secs(3_600);
    let _engine = EngineWire::create(&config).unwrap();
    let mut runtime = RuntimeWire::open(&config).unwrap();
    runtime.responses.set_length(u32::MAX);
    let begun = Instant::now();
    assert_eq!(runtime.responses.send(b"{}"), Err(SendError::Lost));
    assert!(begun.elapsed() >= Duration::from_millis(50));
}

#[test]
fn ai_245_a_peer_that_never_reads_does_not_block_the_sender() {
    for synchronisation in SYNCHRONISATIONS {
        let (_engine, mut runtime, _) = pair(synchronisation);
        runtime.responses.send(b"{}").unwrap();
        assert_eq!(runtime.responses.send(b"{}"), Err(SendError::Lost));
    }
}

/// AI-212
#[test]
fn ai_211_two_threads_exchange_messages_in_order() {
    for synchronisation in SYNCHRONISATIONS {
        let (mut engine, mut runtime, _) = pair(synchronisation);
        let echo = std::thread::spawn(move || {
            let mut message = Vec::new();
            loop {
                runtime.requests.receive(&mut message, None).unwrap();
                if message == b"stop" {
                    break;
                }
                runtime.responses.send(&message).unwrap();
            }
        });
        let mut answer = Vec::new();
        for number in 0..500 {
            let sent = vec![b'a' + (number % 26) as u8; 1 + number];
            engine.requests.send(&sent).unwrap();
            let until = Instant::now() + Duration::from_secs(20);
            let received = engine.responses.receive(&mut answer, Some(until)).unwrap();
            assert_eq!((received, &answer), (Received::Message, &sent));
        }
        engine.requests.send(b"stop").unwrap();
        echo.join().unwrap();
    }
}

#[test]
fn ai_103_a_region_of_another_size_is_refused_by_both_sizes() {
    let (_engine, _runtime, config) = pair(Synchronisation::Semaphores);
    let other = WireConfig {
        mask_bytes: 4096,
        ..config.clone()
    };
    let refused = RuntimeWire::open(&other).unwrap_err().to_string();
    assert!(
        refused.contains(&format!("{}bin-shm", config.prefix)),
        "{refused}"
    );
    assert!(
        refused.contains("8192") && refused.contains("4096"),
        "{refused}"
    );
}

/// AI-203
#[test]
fn ai_103_missing_objects_are_created_for_their_user_alone() {
    use std::os::unix::fs::PermissionsExt;
    let config = config(Synchronisation::Semaphores);
    let _runtime = RuntimeWire::open(&config).unwrap();
    let names = left(&config);
    assert_eq!(names.len(), 13);
    for name in names {
        let mode = std::fs::metadata(format!("/dev/shm/{name}")).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, 0o600, "{name}");
    }
    // An engine of the same user takes over what is left.
    drop(EngineWire::create(&config).unwrap());
    assert_eq!(left(&config), Vec::<String>::new());
}

#[test]
fn reads_and_writes_stay_inside_of_the_region() {
    let (engine, _runtime, _) = pair(Synchronisation::Futex);
    let mut bytes = Vec::new();
    assert!(engine.masks.write(8190, &[1, 2]) && engine.masks.read(8190, 2, &mut bytes));
    assert_eq!(bytes, [1, 2]);
    assert!(!engine.masks.write(8191, &[1, 2]) && !engine.masks.read(8191, 2, &mut bytes));
    assert!(!engine.masks.read(usize::MAX, 2, &mut bytes) && bytes == [1, 2]);
    assert!(engine.masks.word(8188).is_some() && engine.masks.word(8192).is_none());
    assert!(engine.masks.word(2).is_none());
}

/// The runtime cuts off what the engine is about to read. In the engine's own map that would be a signal that ends it.
#[test]
fn ai_223_an_engine_outlives_a_region_that_shrinks() {
    for synchronisation in SYNCHRONISATIONS {
        let config = config(synchronisation);
        let mut engine = EngineWire::create(&config).unwrap();
        let shrink = |name: &str| {
            let path = format!("/dev/shm/{}{name}", &config.prefix[1..]);
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            move || file.set_len(0).unwrap()
        };
        let suffix = match synchronisation {
            Synchronisation::Semaphores => "-shm",
            Synchronisation::Futex => "",
        };
        let (masks, responses) = (shrink("bin-shm"), shrink(&format!("resp{suffix}")));
        // From here on the names of the message regions may be gone.
        let mut runtime = RuntimeWire::open(&config).unwrap();
        runtime.responses.send(b"x").unwrap();
        responses();
        masks();
        let (mut message, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        let received = engine.responses.receive(&mut message, Some(until));
        assert_eq!(received, Err(PeerLost), "{synchronisation:?}");
        assert!(!engine.masks.read(0, 4, &mut message) && message.is_empty());
    }
}
