//! Transfers that break, stop, lie about their length or meet each other.

use super::*;

#[test]
fn a_cut_transfer_is_resumed() {
    let cut = |request: &crate::hub_server::Request| {
        let whole = ranged(request, &gguf(SIZE));
        (request.before < 2).then_some(Reply {
            cut: Some(30_000),
            ..whole
        })
    };
    let hub = FakeHub::with(&usual(), |_| None, cut);
    let user = User::new("hub-cut", &hub.hub);
    ok(&user.run(&["pull", "hf:o/r"]));
    assert_eq!(hub.ranges(), ["", "bytes=30000-", "bytes=60000-"]);
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
    assert_eq!(files(&user.models()).len(), 3, "list, file and record");
}

/// Each attempt receives much, and none comes further than the first.
#[test]
fn a_server_that_always_cuts_and_always_begins_again_is_given_up() {
    let whole = gguf(2 << 20);
    let hub = FakeHub::with(
        &[(Q4, whole.clone())],
        |_| None,
        move |_| {
            Some(Reply {
                cut: Some(3 << 19),
                ..Reply::new(200, &*whole)
            })
        },
    );
    let user = User::new("hub-always", &hub.hub);
    let mut command = user.command(&["pull", "hf:o/r"]);
    command.env("SAPWOOD_HUB__RETRIES", "2");
    fails(&run_with(command, ""), &["connection was lost"]);
    assert_eq!(hub.ranges(), ["", "bytes=1572864-", "bytes=1572864-"]);
}

#[test]
fn a_later_process_goes_on_where_an_earlier_one_has_stopped() {
    let cut = |request: &crate::hub_server::Request| {
        (request.before == 0).then(|| Reply {
            cut: Some(40_000),
            ..Reply::new(200, gguf(SIZE))
        })
    };
    let hub = FakeHub::with(&usual(), |_| None, cut);
    let user = User::new("hub-later", &hub.hub);
    fails(
        &user.run_once(&["pull", "hf:o/r"]),
        &["connection was lost", "goes on from there"],
    );
    assert_eq!(std::fs::metadata(user.part()).unwrap().len(), 40_000);
    let list = user.list();
    assert_eq!(
        (&list[0]["bytes"], &list[0]["complete"]),
        (&json!(40_000), &json!(false))
    );
    ok(&user.run(&["pull", "hf:o/r"]));
    assert_eq!(hub.ranges(), ["", "bytes=40000-"]);
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
}

#[test]
fn an_interrupt_leaves_the_part() {
    let hang = |request: &crate::hub_server::Request| {
        (request.before == 0).then(|| Reply {
            cut: Some(60_000),
            hangs: true,
            ..Reply::new(200, gguf(SIZE))
        })
    };
    let hub = FakeHub::with(&usual(), |_| None, hang);
    let user = User::new("hub-interrupt", &hub.hub);
    let mut child = user.command(&["pull", "hf:o/r"]).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(log.any(|line| line.unwrap().contains("\"percent\":60")));
    interrupt(&child, Signal::INT);
    assert!(!child.wait().unwrap().success());
    let there = std::fs::metadata(user.part()).unwrap().len();
    assert!(there <= 60_000);
    ok(&user.run(&["pull", "hf:o/r"]));
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
    if there > 0 {
        assert_eq!(hub.ranges()[1], format!("bytes={there}-"));
    }
}

#[test]
fn a_part_of_another_length_than_its_file_is_received_again() {
    let hub = FakeHub::with(
        &usual(),
        |_| None,
        |request| {
            // Has forgotten how to send parts.
            (request.before == 0).then(|| Reply::new(416, ""))
        },
    );
    let user = User::new("hub-again", &hub.hub);
    std::fs::create_dir_all(user.file("")).unwrap();
    let id = &sha256(&gguf(SIZE))[..16];
    std::fs::write(user.file(&format!("{Q4}.{id}.part")), &gguf(SIZE)[..10]).unwrap();
    ok(&user.run(&["pull", "hf:o/r"]));
    assert_eq!(hub.ranges(), ["bytes=10-", ""]);
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
}

#[test]
fn a_file_with_another_checksum_is_removed() {
    let mut damaged = gguf(SIZE);
    damaged[70_000] ^= 1;
    let hub = FakeHub::with(
        &usual(),
        |_| None,
        move |request| Some(ranged(request, &damaged)),
    );
    let user = User::new("hub-checksum", &hub.hub);
    let expect = sha256(&gguf(SIZE));
    fails(
        &user.run(&["pull", "hf:o/r"]),
        &["SHA-256", &expect, "removed"],
    );
    assert_eq!(
        hub.cdn.requests().len(),
        1,
        "it is not fetched again and again"
    );
    assert_eq!(user.names(), [""; 0]);
    assert!(
        files(&user.models())
            .iter()
            .all(|path| path.ends_with("listing.json"))
    );
}

#[test]
fn a_length_that_is_not_the_announced_one_is_refused() {
    let long = gguf(SIZE + 1);
    let replies = [
        (Reply::new(200, &*long), "another size"),
        (
            Reply {
                announced: Some(1 << 60),
                ..Reply::new(200, "GGUF")
            },
            "another size",
        ),
        (
            Reply {
                chunked: true,
                ..Reply::new(200, &*long)
            },
            "more than",
        ),
        (
            Reply::new(206, gguf(SIZE)).header("content-range", format!("bytes 5-9/{SIZE}")),
            "another part",
        ),
        (Reply::new(206, gguf(SIZE)), "another part"),
        (
            Reply::new(200, gguf(SIZE)).header("content-encoding", "gzip"),
            "compresses",
        ),
    ];
    for (reply, part) in replies {
        let hub = FakeHub::with(&usual(), |_| None, move |_| Some(reply.clone()));
        let user = User::new("hub-length", &hub.hub);
        fails(&user.run_once(&["pull", "hf:o/r"]), &[part]);
        assert!(!user.file(Q4).exists());
    }
    // An end that comes too early is a lost connection.
    let hub = FakeHub::with(
        &usual(),
        |_| None,
        |_| {
            Some(Reply {
                chunked: true,
                ..Reply::new(200, gguf(1_000))
            })
        },
    );
    let user = User::new("hub-short", &hub.hub);
    fails(
        &user.run_once(&["pull", "hf:o/r"]),
        &["connection was lost"],
    );
}

#[test]
fn a_server_that_stops_sending_is_asked_again() {
    let hub = FakeHub::with(
        &usual(),
        |_| None,
        |request| {
            (request.before == 0).then(|| Reply {
                cut: Some(50_000),
                hangs: true,
                ..Reply::new(200, gguf(SIZE))
            })
        },
    );
    let user = User::new("hub-stall", &hub.hub);
    let mut command = user.command(&["pull", "hf:o/r"]);
    command.env("SAPWOOD_HUB__STALL_TIMEOUT", "300ms");
    let pulled = run_with(command, "");
    ok(&pulled);
    assert!(pulled.err.contains("stopped sending"), "{pulled:?}");
    assert_eq!(hub.ranges(), ["", "bytes=50000-"]);
}

#[test]
fn two_processes_download_a_file_once() {
    let (open, wait) = gate();
    let hub = FakeHub::with(
        &usual(),
        |_| None,
        move |_| {
            wait();
            None
        },
    );
    let user = User::new("hub-two", &hub.hub);
    let mut first = user.command(&["pull", "hf:o/r"]).spawn().unwrap();
    let mut log = BufReader::new(first.stderr.take().unwrap()).lines();
    // It has the lock from here on.
    assert!(log.any(|line| line.unwrap().contains("\"downloading\"")));
    let mut second = user.command(&["pull", "hf:o/r"]).spawn().unwrap();
    let mut other = BufReader::new(second.stderr.take().unwrap()).lines();
    assert!(other.any(|line| line.unwrap().contains("another process downloads it")));
    open.send(()).unwrap();
    assert!(first.wait().unwrap().success());
    assert!(second.wait().unwrap().success());
    assert_eq!(hub.cdn.requests().len(), 1);
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
}

#[test]
fn a_url_is_pulled_and_resumed_with_its_validator() {
    let web = HttpServer::start(|request| {
        let whole = ranged(request, &gguf(SIZE)).header("etag", "\"v1\"");
        match request.before {
            0 => Reply {
                cut: Some(25_000),
                ..whole
            },
            _ => whole,
        }
    });
    let user = User::new("hub-url", &web);
    let url = format!("{}/a/m.gguf?sig=hush", web.url);
    let pulled = user.run(&["pull", &url]);
    ok(&pulled);
    assert!(!pulled.err.contains("hush"), "{pulled:?}");
    let requests = web.requests();
    assert_eq!(requests[1].headers["range"], "bytes=25000-");
    assert_eq!(requests[1].headers["if-range"], "\"v1\"");
    assert_eq!(requests[0].path, "/a/m.gguf?sig=hush");
    let path = pulled.out.trim();
    assert!(path.ends_with("/a/m.gguf"), "{path}");
    assert_eq!(std::fs::read(path).unwrap(), gguf(SIZE));
    let again = user.run(&["pull", &url]);
    assert!(again.err.contains("up to date"), "{again:?}");
    ok(&user.run(&["rm", &url]));
    assert_eq!(user.names(), [""; 0]);
}
