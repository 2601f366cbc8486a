//! `sapwood models pull`, `list` and `rm` against a hub in the test, and against one that misbehaves.

mod endpoints;
mod transfers;

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
