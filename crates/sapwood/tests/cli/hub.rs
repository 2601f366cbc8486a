//! `sapwood models pull`, `list` and `rm` against a hub in the test, and against one that misbehaves.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::hub_server::{COMMIT, FakeHub, HttpServer, Reply, gate, gguf, listing, ranged, sha256};
use crate::process::{Ended, folder, interrupt, run_with, sapwood};

/// A user whose hub this is.
struct User {
    here: PathBuf,
    endpoint: String,
}

impl User {
    fn new(name: &str, hub: &HttpServer) -> Self {
        Self {
            here: folder(name),
            endpoint: hub.url.clone(),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = sapwood(&self.here, &[&["models"], arguments].concat());
        command
            .env("HF_ENDPOINT", &self.endpoint)
            .env("SAPWOOD_HUB__DIR", self.models())
            .env("SAPWOOD_HUB__RETRY_WAIT", "1ms");
        command
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        run_with(self.command(arguments), "")
    }

    /// Runs it without a second attempt of anything.
    fn run_once(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(arguments);
        command.env("SAPWOOD_HUB__RETRIES", "0");
        run_with(command, "")
    }

    fn models(&self) -> PathBuf {
        self.here.join("models")
    }

    /// A file of the repository.
    fn file(&self, name: &str) -> PathBuf {
        self.models().join("hf/o/r/main").join(name)
    }

    fn list(&self) -> Value {
        let listed = self.run(&["list", "--json"]);
        assert_eq!(listed.code, 0, "{listed:?}");
        serde_json::from_str(&listed.out).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let list = self.list();
        let names = list.as_array().unwrap().iter();
        names
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// The only part below the folder of the repository.
    fn part(&self) -> PathBuf {
        let parts = files(&self.models());
        let mut parts = parts
            .into_iter()
            .filter(|path| path.extension().is_some_and(|it| it == "part"));
        let part = parts.next().expect("there is a part");
        assert_eq!(parts.next(), None);
        part
    }
}

/// All files below a folder.
fn files(below: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(below) else {
        return Vec::new();
    };
    let all = entries.flat_map(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path)
        } else {
            vec![path]
        }
    });
    all.collect()
}

fn ok(ended: &Ended) {
    assert_eq!(ended.code, 0, "{ended:?}");
}

/// A failure whose one line has all of these.
fn fails(ended: &Ended, parts: &[&str]) {
    assert_eq!(ended.code, 1, "{ended:?}");
    for part in parts {
        assert!(ended.err.contains(part), "no `{part}` in {ended:?}");
    }
    assert!(!ended.err.contains("panicked"), "{ended:?}");
}

const Q4: &str = "m-Q4_K_M.gguf";
const SIZE: usize = 100_000;

fn usual() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("README.md", b"# m".to_vec()),
        ("m-Q8_0.gguf", gguf(50_000)),
        (Q4, gguf(SIZE)),
    ]
}

#[test]
fn a_model_is_pulled_listed_and_removed() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-pull", &hub.hub);
    let pulled = user.run(&["pull", "hf:o/r"]);
    ok(&pulled);
    assert_eq!(pulled.out.trim(), user.file(Q4).to_str().unwrap());
    assert!(pulled.err.contains("hf:o/r is downloaded"), "{pulled:?}");
    assert!(pulled.err.contains("\"percent\":100"), "{pulled:?}");
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
    // Again: the list is read, and no file.
    let again = user.run(&["pull", "hf:o/r:q4_k_m"]);
    ok(&again);
    assert!(again.err.contains("up to date"), "{again:?}");
    assert_eq!(hub.cdn.requests().len(), 1);
    ok(&user.run(&["pull", "hf:o/r:Q8_0"]));
    let list = user.list();
    let q4 = &list[0];
    assert_eq!(q4["name"], format!("hf:o/r:{Q4}"));
    assert_eq!(
        (&q4["bytes"], &q4["complete"]),
        (&json!(SIZE), &json!(true))
    );
    assert_eq!(q4["path"], user.file(Q4).to_str().unwrap());
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    assert!(q4["used"].as_u64().unwrap().abs_diff(now) < 600, "{list}");
    let text = user.run(&["list"]);
    assert!(
        text.out.contains("hf:o/r:m-Q8_0.gguf") && text.out.contains("KiB"),
        "{text:?}"
    );
    let none = user.run(&["rm", "hf:o/r:Q5_K_M"]);
    fails(
        &none,
        &["no downloaded model hf:o/r:Q5_K_M", "hf:o/r:m-Q4_K_M.gguf"],
    );
    ok(&user.run(&["rm", &format!("hf:o/r:{Q4}")]));
    assert_eq!(user.names(), ["hf:o/r:m-Q8_0.gguf"]);
    ok(&user.run(&["rm", "hf:o/r"]));
    assert_eq!(files(&user.models()), [""; 0].map(PathBuf::from));
    assert!(!user.models().join("hf").exists());
}

#[test]
fn the_token_is_sent_to_the_hub_and_not_to_where_it_redirects() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-token", &hub.hub);
    let file = user.here.join("token");
    std::fs::write(&file, "hf_of_file\n").unwrap();
    for (variables, token) in [
        (vec![("HF_TOKEN", "hf_hush")], "hf_hush"),
        (
            vec![("HF_TOKEN_PATH", file.to_str().unwrap())],
            "hf_of_file",
        ),
        (vec![("HF_HOME", user.here.to_str().unwrap())], "hf_of_file"),
        (
            vec![("HF_TOKEN", "hf_hush"), ("SAPWOOD_HUB__TOKEN", "ours")],
            "ours",
        ),
    ] {
        let mut command = user.command(&["pull", "hf:o/r"]);
        command.envs(variables);
        let seen = hub.hub.requests().len();
        let pulled = run_with(command, "");
        ok(&pulled);
        assert!(!format!("{pulled:?}").contains(token));
        for request in &hub.hub.requests()[seen..] {
            assert_eq!(request.headers["authorization"], format!("Bearer {token}"));
        }
        ok(&user.run(&["rm", "hf:o/r"]));
    }
    assert_eq!(hub.cdn.requests().len(), 4);
    for request in hub.cdn.requests() {
        assert_eq!(request.headers.get("authorization"), None);
    }
}

/// A file that lies in the working directory may have come with somebody else's project.
#[test]
fn an_endpoint_of_a_file_that_was_found_gets_no_token_but_its_own() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-found", &hub.hub);
    std::fs::write(user.here.join("token"), "hf_of_login\n").unwrap();
    let file = user.here.join("sapwood.toml");
    let endpoint = format!("[hub]\nendpoint = \"{}\"\n", hub.hub.url);
    let with_token = format!("{endpoint}token = \" its \"\n");
    for (text, arguments, variable, token) in [
        (&endpoint, &[][..], "HF_TOKEN", None),
        (&endpoint, &[], "SAPWOOD_HUB__TOKEN", None),
        (&endpoint, &[], "NONE", None),
        (&with_token, &[], "HF_TOKEN", Some("Bearer its")),
        (
            &endpoint,
            &["--config", "sapwood.toml"],
            "HF_TOKEN",
            Some("Bearer hush"),
        ),
        (
            &endpoint,
            &["--config", "sapwood.toml"],
            "NONE",
            Some("Bearer hf_of_login"),
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let seen = hub.hub.requests().len();
        let mut command = sapwood(
            &user.here,
            &[arguments, &["models", "pull", "hf:o/r"]].concat(),
        );
        command
            .env("SAPWOOD_HUB__DIR", user.models())
            .env("HF_HOME", &user.here)
            .env(variable, " hush\n");
        ok(&run_with(command, ""));
        let requests = hub.hub.requests();
        assert!(requests.len() > seen);
        for request in &requests[seen..] {
            let sent = request.headers.get("authorization").map(String::as_str);
            assert_eq!(sent, token, "{text} {arguments:?} {variable}");
        }
    }
}

#[test]
fn a_wrong_endpoint_matters_only_to_what_needs_it() {
    let hub = FakeHub::new(&usual());
    let mut user = User::new("hub-wrong", &hub.hub);
    user.endpoint = "mirror.example".into();
    ok(&user.run(&["list"]));
    let pulled = user.run(&["pull", "hf:o/r"]);
    assert_eq!(pulled.code, 2, "{pulled:?}");
    assert!(pulled.err.contains("HF_ENDPOINT"), "{pulled:?}");
    let mut command = user.command(&["list"]);
    command.env("SAPWOOD_HUB__STALL_TIMEOUT", "1000000years");
    let refused = run_with(command, "");
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.err.contains("hub.stall_timeout"), "{refused:?}");
}

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

/// An answer of the hub to everything, and what the user reads.
#[test]
fn a_refusal_says_what_to_do() {
    let error = |status, code: &str| {
        Reply::new(status, "<html>")
            .header("x-error-code", code)
            .header("x-error-message", "said\u{9}so")
    };
    for (reply, parts) in [
        (
            error(401, "GatedRepo"),
            vec!["accept its terms at http://", "/o/r", "HF_TOKEN"],
        ),
        (
            error(403, "GatedRepo"),
            vec!["accept its terms", "(403: said"],
        ),
        (
            error(401, "RepoNotFound"),
            vec!["check that http://", "exists", "HF_TOKEN"],
        ),
        (
            error(404, "RevisionNotFound"),
            vec!["does not have it", "revision at http://"],
        ),
        (error(400, ""), vec!["answers with status 400"]),
        (
            Reply::new(429, "").header("retry-after", "3600"),
            vec!["cannot serve it now (429"],
        ),
        (Reply::new(200, "<html>"), vec!["does not answer as a hub"]),
        (Reply::new(302, ""), vec!["no valid target"]),
        (
            Reply::new(302, "").header("location", "file:///etc/passwd"),
            vec!["not the web"],
        ),
        (
            Reply::new(302, "").header("location", "/api/models/o/r/revision/main?blobs=true"),
            vec!["redirected too often"],
        ),
    ] {
        let hub = FakeHub::with(&usual(), move |_| Some(reply.clone()), |_| None);
        let user = User::new("hub-refusal", &hub.hub);
        fails(
            &user.run(&["pull", "hf:o/r"]),
            &[&parts[..], &["hf:o/r: "]].concat(),
        );
    }
    let hub = FakeHub::with(
        &usual(),
        |request| (request.before == 0).then(|| Reply::new(429, "").header("retry-after", "0")),
        |request| (request.before == 0).then(|| Reply::new(503, "")),
    );
    let user = User::new("hub-busy", &hub.hub);
    ok(&user.run(&["pull", "hf:o/r"]));
}

#[test]
fn a_choice_that_is_not_there_is_answered_with_what_is() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-choice", &hub.hub);
    fails(
        &user.run(&["pull", "hf:o/r:Q5_K_M"]),
        &["no quantisation Q5_K_M", "Q4_K_M, Q8_0"],
    );
    fails(
        &user.run(&["pull", "hf:o/r:m-Q4_K_X.gguf"]),
        &["no file", Q4],
    );
    for wrong in ["hf:o", "hf:../x", "https://h/x.bin", "./m.gguf"] {
        let refused = user.run(&["pull", wrong]);
        assert_eq!(refused.code, 2, "{refused:?}");
    }
}

#[test]
fn names_that_leave_the_folder_are_no_files() {
    let names = [
        "../../../../evil.gguf",
        "/tmp/evil.gguf",
        "a/../../evil.gguf",
        "e\u{1b}[2Jvil.gguf",
    ];
    let files_there: Vec<_> = names
        .iter()
        .map(|name| ((*name).to_owned(), gguf(100)))
        .collect();
    let body = listing(&files_there).to_string();
    let hub = FakeHub::with(&[], move |_| Some(Reply::new(200, &*body)), |_| None);
    let user = User::new("hub-names", &hub.hub);
    let pulled = user.run(&["pull", "hf:o/r"]);
    fails(&pulled, &["no GGUF files"]);
    assert!(!pulled.err.contains("evil"), "{pulled:?}");
    assert_eq!(hub.hub.requests().len(), 1);
}

#[test]
fn a_file_that_does_not_fit_is_refused_before_it_is_fetched() {
    let mut list = listing(&[(Q4.to_owned(), gguf(100))]);
    list["siblings"][0]["lfs"]["size"] = json!(1_u64 << 60);
    let body = list.to_string();
    let hub = FakeHub::with(
        &[(Q4, gguf(100))],
        move |request| {
            request
                .path
                .starts_with("/api")
                .then(|| Reply::new(200, &*body))
        },
        |_| None,
    );
    let user = User::new("hub-room", &hub.hub);
    fails(
        &user.run(&["pull", "hf:o/r"]),
        &["it needs 1.00 EiB more", "free", "hub.dir"],
    );
    assert_eq!(hub.hub.requests().len(), 1);
}

#[test]
fn a_folder_that_cannot_be_written_is_reported() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-folder", &hub.hub);
    std::fs::write(user.models(), "no folder").unwrap();
    fails(
        &user.run(&["pull", "hf:o/r"]),
        &["cannot write", "models/hf/o/r/main"],
    );
    // Neither home nor data folder, as for a service without a user.
    let mut command = sapwood(&user.here, &["models", "list"]);
    command.env_remove("HOME");
    let nowhere = run_with(command, "");
    if nowhere.code != 0 {
        assert!(nowhere.err.contains("hub.dir"), "{nowhere:?}");
    }
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
fn a_model_in_use_is_neither_removed_nor_replaced() {
    let hub = FakeHub::new(&usual());
    let mut user = User::new("hub-use", &hub.hub);
    ok(&user.run(&["pull", "hf:o/r"]));
    let newer = gguf(SIZE - 8);
    let later = FakeHub::new(&[(Q4, newer.clone())]);
    user.endpoint.clone_from(&later.hub.url);
    // As a server that has loaded it.
    let loaded = File::open(user.file(Q4)).unwrap();
    loaded.lock_shared().unwrap();
    fails(&user.run(&["rm", "hf:o/r"]), &["is in use"]);
    fails(
        &user.run(&["pull", "hf:o/r"]),
        &["newer version", "is in use"],
    );
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
    assert_eq!(later.cdn.requests().len(), 0);
    drop(loaded);
    ok(&user.run(&["pull", "hf:o/r"]));
    assert_eq!(std::fs::read(user.file(Q4)).unwrap(), newer);
    ok(&user.run(&["rm", "hf:o/r"]));
    assert_eq!(user.names(), [""; 0]);
}

#[test]
fn all_parts_of_a_split_file_are_pulled() {
    let parts = [
        "q/m-Q4_K_M-00001-of-00002.gguf",
        "q/m-Q4_K_M-00002-of-00002.gguf",
    ];
    let hub = FakeHub::new(&[(parts[1], gguf(300)), (parts[0], gguf(200))]);
    let user = User::new("hub-split", &hub.hub);
    let pulled = user.run(&["pull", "hf:o/r"]);
    ok(&pulled);
    assert_eq!(pulled.out.trim(), user.file(parts[0]).to_str().unwrap());
    assert_eq!(std::fs::read(user.file(parts[1])).unwrap(), gguf(300));
    let list = user.list();
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(
        (&list[0]["bytes"], &list[0]["complete"]),
        (&json!(500), &json!(true))
    );
    ok(&user.run(&["rm", "hf:o/r:Q4_K_M"]));
    assert!(!user.file(parts[1]).exists());
}

#[test]
fn nothing_is_downloaded_offline() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-offline", &hub.hub);
    for variable in ["HF_HUB_OFFLINE", "SAPWOOD_HUB__OFFLINE"] {
        let mut command = user.command(&["pull", "hf:o/r"]);
        command.env(
            variable,
            if variable.starts_with("HF") {
                "1"
            } else {
                "true"
            },
        );
        fails(&run_with(command, ""), &["hf:o/r is not in", "hub.offline"]);
    }
    assert_eq!(hub.hub.requests().len(), 0);
    let mut command = user.command(&["pull", "hf:o/r"]);
    // Nothing listens at port 9, which is reserved for `discard`.
    command
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("SAPWOOD_HUB__RETRIES", "1");
    fails(
        &run_with(command, ""),
        &["127.0.0.1:9 does not answer", "HF_ENDPOINT"],
    );
}

/// Nothing but the proxy knows where `hub.test` and `cdn.test` are.
#[test]
fn a_model_is_pulled_through_the_proxy_of_the_environment() {
    let proxy = HttpServer::start(|request| {
        let file = format!("http://hub.test/o/r/resolve/{COMMIT}/{Q4}");
        match request.path.as_str() {
            "http://hub.test/api/models/o/r/revision/main?blobs=true" => {
                Reply::new(200, listing(&[(Q4.to_owned(), gguf(SIZE))]).to_string())
            }
            path if path == file => Reply::new(302, "").header("location", "http://cdn.test/x"),
            "http://cdn.test/x" => Reply::new(200, gguf(SIZE)),
            _ => Reply::new(407, ""),
        }
    });
    let mut user = User::new("hub-proxy", &proxy);
    let address = proxy.url.replace("http://", "http://me:hush@");
    let pull = |user: &User, variables: &[(&str, &str)]| {
        let mut command = user.command(&["pull", "hf:o/r"]);
        command
            .envs(variables.iter().copied())
            .env("SAPWOOD_HUB__RETRIES", "0");
        let pulled = run_with(command, "");
        assert!(!format!("{pulled:?}").contains("hush"), "{pulled:?}");
        pulled
    };
    user.endpoint = "http://hub.test".to_owned();
    for variable in ["http_proxy", "HTTP_PROXY", "ALL_PROXY"] {
        ok(&pull(&user, &[(variable, &address)]));
        assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
        ok(&user.run(&["rm", "hf:o/r"]));
    }
    let requests = proxy.requests();
    assert_eq!(requests.len(), 9);
    for request in requests {
        assert_eq!(request.headers["proxy-authorization"], "Basic bWU6aHVzaA==");
    }
    user.endpoint = "http://other.test".to_owned();
    fails(
        &pull(&user, &[("HTTP_PROXY", &address)]),
        &["does not connect to other.test (407)", "USER:PASSWORD@"],
    );
    // Nothing listens at port 9, which is reserved for `discard`.
    user.endpoint = "http://127.0.0.1:9".to_owned();
    let direct = [("HTTP_PROXY", &*address), ("NO_PROXY", "127.0.0.1")];
    fails(&pull(&user, &direct), &[": 127.0.0.1:9 does not answer"]);
    let wrong = [("HTTP_PROXY", "http://me:p@hush@p:1")];
    fails(&pull(&user, &wrong), &[": 127.0.0.1:9 does not answer"]);
    user.endpoint = "http://hub.test".to_owned();
    let wrong = pull(&user, &wrong);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(
        wrong.err.contains("see HTTPS_PROXY, HTTP_PROXY"),
        "{wrong:?}"
    );
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

#[test]
fn a_url_of_something_else_is_refused() {
    for (reply, parts) in [
        (
            Reply::new(200, "<html>please log in</html>"),
            ["not a GGUF file", "removed"],
        ),
        (
            Reply {
                chunked: true,
                ..Reply::new(200, gguf(100))
            },
            ["how large", ""],
        ),
        (Reply::new(404, ""), ["does not have it (404)", ""]),
        (
            Reply::new(302, "").header("location", "/elsewhere"),
            ["redirected too often", ""],
        ),
    ] {
        let web = HttpServer::start(move |_| reply.clone());
        let user = User::new("hub-page", &web);
        let pulled = user.run_once(&["pull", &format!("{}/m.gguf", web.url)]);
        fails(&pulled, &parts);
        assert_eq!(user.names(), [""; 0], "{pulled:?}");
    }
}

#[test]
fn a_mirror_below_a_path_and_a_revision_are_asked_for() {
    let hub = HttpServer::start(|request| match request.path.as_str() {
        "/mirror/api/models/o/r/revision/refs%2Fpr%2F3?blobs=true" => {
            Reply::new(200, listing(&[(Q4.to_owned(), gguf(100))]).to_string())
        }
        path if path == format!("/mirror/o/r/resolve/{COMMIT}/{Q4}") => Reply::new(200, gguf(100)),
        path => panic!("{path}"),
    });
    let mut user = User::new("hub-mirror", &hub);
    user.endpoint += "/mirror";
    ok(&user.run(&["pull", "hf:o/r@refs/pr/3"]));
    let name = format!("hf:o/r@refs/pr/3:{Q4}");
    assert_eq!(user.names(), [&*name]);
    ok(&user.run(&["rm", &name]));
}

#[test]
fn doctor_and_config_know_named_models() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-doctor", &hub.hub);
    let config = |path: &str| {
        let text = format!("[[models]]\nname = \"m\"\npath = \"{path}\"\n");
        std::fs::write(user.here.join("sapwood.toml"), text).unwrap();
    };
    let run = |arguments: &[&str]| {
        let mut command = sapwood(&user.here, arguments);
        command.env("SAPWOOD_HUB__DIR", user.models());
        run_with(command, "")
    };
    config("hf:o/r:Q8_0");
    let before = run(&["doctor"]);
    assert!(
        before.out.contains("hf:o/r:Q8_0 is not downloaded yet"),
        "{before:?}"
    );
    ok(&user.run(&["pull", "hf:o/r:Q8_0"]));
    let after = run(&["doctor"]);
    assert!(after.out.contains("hf:o/r:Q8_0 is downloaded"), "{after:?}");
    let mut command = sapwood(&user.here, &["config", "show"]);
    command.envs([
        ("HF_ENDPOINT", "http://mirror:1"),
        ("HF_TOKEN", "hush"),
        ("HF_HUB_OFFLINE", "0"),
    ]);
    let origins = run_with(command, "");
    for line in [
        "hub.endpoint = \"http://mirror:1\"  # environment HF_ENDPOINT\n",
        "hub.token = \"***\"  # environment HF_TOKEN\n",
        "hub.offline = false  # environment HF_HUB_OFFLINE\n",
    ] {
        assert!(origins.out.contains(line), "{origins:?}");
    }
    config("hf:nonsense");
    let wrong = run(&["config", "check"]);
    assert_eq!(wrong.code, 2);
    assert!(
        wrong
            .err
            .contains("models.path: the model `m`: write hf:OWNER/REPO"),
        "{wrong:?}"
    );
    config("https://h/m.gguf?sig=hush");
    let shown = run(&["config", "show"]);
    ok(&shown);
    assert!(
        shown.out.contains("sig=***") && !shown.out.contains("hush"),
        "{shown:?}"
    );
}

#[test]
fn help_teaches_the_forms() {
    let hub = FakeHub::new(&[]);
    let user = User::new("hub-help", &hub.hub);
    for (arguments, parts) in [
        (&["--help"][..], ["models pull hf:", "models rm hf:"]),
        (&["pull", "--help"], ["OWNER/REPO:Q6_K", "HF_TOKEN"]),
    ] {
        let help = user.run(arguments);
        ok(&help);
        assert!(parts.iter().all(|part| help.out.contains(part)), "{help:?}");
    }
}
