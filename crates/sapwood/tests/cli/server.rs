//! `sapwood serve`: what keeps it from starting, what it answers, how it goes.

use std::path::Path;

use rustix::process::Signal;

use crate::process::{Serving, folder, run};

/// A folder whose configuration serves a scripted model that repeats its prompt.
pub(crate) fn with_echo(name: &str, more: &str) -> std::path::PathBuf {
    let here = folder(name);
    write_config(&here, more);
    here
}

/// The same, saying ten letters a second.
pub(crate) fn with_slow_echo(name: &str, more: &str) -> std::path::PathBuf {
    let here = with_echo(name, more);
    let text = std::fs::read_to_string(here.join("sapwood.toml")).unwrap();
    let slow = text.replace("\"echo\"", "\"echo\", tokens_per_s = 10.0");
    std::fs::write(here.join("sapwood.toml"), slow).unwrap();
    here
}

fn write_config(here: &Path, more: &str) {
    let text = format!(
        "test_functions = true\n{more}\n[client]\nserver = \"here\"\n[[models]]\nname = \"parrot\"\nbackend = \"scripted\"\n\
         scripted = {{ script = \"echo\" }}\n"
    );
    std::fs::write(here.join("sapwood.toml"), text).unwrap();
}

/// OA-905: without a key, on loopback only. OA-912. TR-908: also of ports for one thing.
#[test]
fn a_failed_start_is_explained_in_one_line() {
    let here = with_echo("cannot-start", "");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let no_model = folder("no-model");
    for (folder, arguments, code, parts) in [
        (
            &here,
            &["--listen", &address][..],
            6,
            ["in use", "--listen"],
        ),
        (&here, &["--listen", "nowhere"], 6, ["nowhere", "HOST:PORT"]),
        (
            &here,
            &["--listen", "127.0.0.1:0", "--listen-grpc", &address],
            6,
            [&address, "choose another port with --listen-grpc"],
        ),
        (
            &here,
            &["--listen", "127.0.0.1:0", "--listen-metrics", "0.0.0.0:0"],
            2,
            ["--api-key", "--insecure"],
        ),
        (
            &here,
            &["--listen", "0.0.0.0:0"],
            2,
            ["--api-key", "--insecure"],
        ),
        (&here, &["--log", "=nonsense="], 2, ["log", "filter"]),
        (&here, &["--default-model", "cat"], 2, ["cat", "parrot"]),
        (
            &here,
            &["--key-file", "none.toml"],
            2,
            ["none.toml", "key_file"],
        ),
        (
            &here,
            &["--upstream", "openai+http://x"],
            2,
            ["openai+http", "not built yet"],
        ),
        (&no_model, &["--model", "=x"], 2, ["--model", "NAME=PATH"]),
    ] {
        let ended = run(folder, &[&["serve"], arguments].concat());
        assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
        assert_eq!(ended.err.lines().count(), 1, "{arguments:?}: {ended:?}");
        for part in parts {
            assert!(
                ended.err.contains(part),
                "{arguments:?}: {part} is missing in {ended:?}"
            );
        }
    }
}

#[cfg(not(feature = "embedded"))]
#[test]
fn a_binary_without_an_engine_says_how_to_get_one() {
    let here = folder("no-engine");
    std::fs::write(here.join("x.gguf"), "GGUF").unwrap();
    for arguments in [
        &["serve", "--model", "x.gguf"][..],
        &["serve"],
        &["chat", "--model", "x.gguf"],
    ] {
        let ended = run(&here, arguments);
        assert_eq!(ended.code, 5, "{arguments:?}: {ended:?}");
        assert!(
            ended.err.contains("cargo xtask serve") && ended.err.lines().count() == 1,
            "{ended:?}"
        );
    }
}

/// Before anything listens, and at every command.
#[test]
fn d_52_a_missing_model_file_is_reported_at_once() {
    let here = with_echo("no-file", "");
    std::fs::write(here.join("odd.gguf"), "no").unwrap();
    for (file, why) in [
        ("nowhere.gguf", "No such file"),
        ("odd.gguf", "not a GGUF file"),
    ] {
        for command in [
            &["serve", "--listen", "127.0.0.1:0"][..],
            &["chat"],
            &["models"],
            &["run", "GENERATE", "--input", "prompt=x"],
        ] {
            let ended = run(&here, &[command, &["--model", file]].concat());
            assert_eq!((ended.code, &*ended.out), (5, ""), "{command:?}: {ended:?}");
            assert!(
                ended.err.contains(file) && ended.err.contains(why),
                "{ended:?}"
            );
            assert_eq!(ended.err.lines().count(), 1, "{command:?}: {ended:?}");
        }
    }
}

/// OA-904, OA-804.
#[test]
fn oa_904_sigterm_drains_and_exits_0() {
    let here = with_echo("drains", "[drain]\ngrace = \"0s\"");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    assert!(
        serving
            .get("/readyz?verbose", "")
            .contains("{\"status\":\"ok\",\"parts\":{\"parrot\":\"ok\"}}")
    );
    assert!(
        serving
            .get("/metrics", "")
            .contains("sapwood_requests_running{model=\"parrot\"} 0\n")
    );
    assert!(serving.get("/", "").contains("<code>parrot</code>"));
    let access = serving.wait_for("request");
    assert_eq!(
        (&access["route"], &access["status"]),
        (&"/readyz".into(), &200.into()),
        "{access}"
    );
    serving.signal(Signal::TERM);
    let (code, log) = serving.end();
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("\"message\":\"drained\""), "{log}");
}

/// TR-1001
#[test]
fn tr_1002_metrics_have_tritons_names_unless_they_are_switched_off() {
    for (keys, there) in [("", true), ("[metrics]\ntriton = false", false)] {
        let here = with_echo("triton-names", keys);
        let mut serving = Serving::start(&here, &[]);
        serving.wait_for("loaded");
        let text = serving.get("/metrics", "");
        let success = "nv_inference_request_success{model=\"parrot\",version=\"1\"} 0\n";
        let load = "nv_model_load_duration_secs{model=\"parrot\",version=\"1\"} ";
        for name in [success, load, "nv_cpu_utilization "] {
            assert_eq!(text.contains(name), there, "{name} {text}");
        }
        assert_eq!(text.contains("nv_"), there);
        assert!(text.contains("sapwood_model_load_seconds{model=\"parrot\"} "));
    }
}

#[test]
fn oa_904_a_second_signal_ends_at_once_with_130() {
    let here = with_echo("twice", "[drain]\ngrace = \"1h\"");
    let mut serving = Serving::start(&here, &[]);
    serving.signal(Signal::INT);
    serving.wait_for("draining");
    assert!(
        serving.get("/readyz", "").starts_with("HTTP/1.1 503"),
        "unready at once"
    );
    serving.signal(Signal::INT);
    assert_eq!(serving.end().0, 130);
}

/// OA-904: SIGHUP reloads keys and log filter without dropping connections.
#[test]
fn oa_905_sighup_replaces_keys_and_never_removes_all() {
    let here = with_echo("hangup", "[auth]\nkey = \"one\"");
    let mut serving = Serving::start(&here, &[]);
    let asks = |serving: &Serving, key: &str| {
        let answer = serving.get("/version", &format!("authorization: Bearer {key}\r\n"));
        answer[9..12].parse::<u16>().unwrap()
    };
    assert_eq!((asks(&serving, "one"), asks(&serving, "two")), (200, 401));
    write_config(&here, "[auth]\nkey = \"two\"");
    serving.signal(Signal::HUP);
    serving.wait_for("reloaded keys, certificates and log filter");
    assert_eq!((asks(&serving, "one"), asks(&serving, "two")), (401, 200));
    write_config(&here, "");
    serving.signal(Signal::HUP);
    serving.wait_for("not reloaded");
    assert_eq!(
        asks(&serving, "none"),
        401,
        "an emptied file must not open the server"
    );
}

/// A mistake in one part leaves every part as it was, whichever is read first.
#[test]
fn oa_904_a_reload_that_fails_changes_nothing() {
    let here = with_echo("halves", "[auth]\nkey = \"one\"");
    let mut serving = Serving::start(&here, &[]);
    let asks = |serving: &Serving, key: &str| {
        let answer = serving.get("/version", &format!("authorization: Bearer {key}\r\n"));
        answer[9..12].parse::<u16>().unwrap()
    };
    write_config(&here, "log = \"=\"\n[auth]\nkey = \"two\"");
    serving.signal(Signal::HUP);
    serving.wait_for("not reloaded");
    assert_eq!((asks(&serving, "one"), asks(&serving, "two")), (200, 401));
}

/// EV-914: what there is can be read without a session.
#[test]
fn ev_914_actions_and_targets_are_listed_over_http() {
    let here = with_echo("listing", "");
    let mut serving = Serving::start(&here, &[]);
    serving.wait_for("loaded");
    let answer = serving.get("/evergreen/v2/actions", "");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let listed: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(
        (&listed["targets"], &listed["default_target"]),
        (&serde_json::json!(["parrot"]), &"parrot".into())
    );
    let named = |name: &str| {
        listed["actions"]
            .as_array()
            .unwrap()
            .iter()
            .any(|action| action["name"] == name)
    };
    assert!(
        named("GENERATE") && named("echo") && !named("parrot"),
        "{listed}"
    );
}
