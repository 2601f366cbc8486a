//! Help, completions, configuration, keys, doctor: what needs no model.

use serde_json::Value;

use crate::process::{folder, run, run_with, sapwood};

#[test]
fn help_and_version_are_data_and_mistakes_exit_2() {
    let here = folder("help");
    for (arguments, code, out, err) in [
        (&["--help"][..], 0, "Usage: sapwood", ""),
        (&["serve", "--help"], 0, "--listen <HOST:PORT>", ""),
        (
            &["--version"],
            0,
            concat!("sapwood ", env!("CARGO_PKG_VERSION")),
            "",
        ),
        (&["completions", "bash"], 0, "_sapwood", ""),
        (&["completions", "fish"], 0, "complete -c sapwood", ""),
        (&[], 2, "", "Usage: sapwood"),
        (&["serve", "--lisen", "x"], 2, "", "--listen"),
        (&["dance"], 2, "", "dance"),
        (&["completions", "basic"], 2, "", "bash"),
    ] {
        let ended = run(&here, arguments);
        assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
        assert!(
            ended.out.contains(out) && ended.err.contains(err),
            "{arguments:?}: {ended:?}"
        );
        assert!(
            ended.out.is_empty() == out.is_empty(),
            "{arguments:?}: {ended:?}"
        );
    }
}

#[test]
fn oa_912_config_show_prints_values_and_origins_without_secrets() {
    let here = folder("config-show");
    std::fs::write(
        here.join("sapwood.toml"),
        "log = \"warn\"\n[auth]\nkey = \"hush\"\n[trace]\nheaders = [\"x-key: hush\", \"Bearer hush\"]\n[references]\nhosts = [\"a.b\"]\n\
         store_options = { aws_token = \"hush\" }\n",
    )
    .unwrap();
    let mut command = sapwood(&here, &["config", "show", "--json", "--threads", "2"]);
    command
        .env("SAPWOOD_ENGINE__CTX", "128")
        .env("SAPWOOD_SERVER", "http://elsewhere:1");
    let ended = run_with(command, "");
    assert_eq!(ended.code, 0, "{ended:?}");
    let shown: Value = serde_json::from_str(&ended.out).unwrap();
    for (key, value, origin) in [
        ("log", Value::from("warn"), "file sapwood.toml"),
        ("auth.key", Value::from("***"), "file sapwood.toml"),
        (
            "references.hosts",
            Value::from(vec!["a.b"]),
            "file sapwood.toml",
        ),
        (
            "references.store_options.aws_token",
            Value::from("***"),
            "file sapwood.toml",
        ),
        ("engine.threads", Value::from(2), "flag --threads"),
        (
            "engine.ctx",
            Value::from(128),
            "environment SAPWOOD_ENGINE__CTX",
        ),
        (
            "client.server",
            Value::from("http://elsewhere:1"),
            "environment SAPWOOD_SERVER",
        ),
        ("drain.grace", Value::from("5s"), "default"),
        (
            "trace.headers",
            serde_json::json!(["x-key: ***", "***"]),
            "file sapwood.toml",
        ),
    ] {
        assert_eq!(
            (&shown[key]["value"], shown[key]["origin"].as_str()),
            (&value, Some(origin)),
            "{key}"
        );
    }
    assert!(!ended.out.contains("hush"));
    let ended = run(&here, &["config", "show"]);
    assert!(
        ended
            .out
            .contains("auth.key = \"***\"  # file sapwood.toml\n"),
        "{ended:?}"
    );
    assert!(!ended.out.contains("hush"));
}

#[test]
fn oa_912_config_check_exits_0_or_2() {
    let here = folder("config-check");
    assert_eq!(run(&here, &["config", "check"]).code, 0);
    std::fs::write(here.join("odd.toml"), "[limits]\nconections = 5\n").unwrap();
    let ended = run(&here, &["config", "check", "--config", "odd.toml"]);
    assert_eq!((ended.code, ended.out.as_str()), (2, ""));
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
    for part in ["limits.conections", "odd.toml", "connections"] {
        assert!(ended.err.contains(part), "{part} is missing in {ended:?}");
    }
    for (text, part) in [
        ("[tls]\ncertificate = \"a.pem\"\nkey = \"b.pem\"\n", "a.pem"),
        ("[auth]\nkey_file = \"nowhere.toml\"\n", "nowhere.toml"),
        ("[references]\nfiles = [\"relative\"]\n", "references.files"),
        (
            "[references]\nhosts = [\"https://a.b\"]\n",
            "references.hosts",
        ),
        (
            "[trace]\nendpoint = \"collector:4317\"\n",
            "http://HOST:PORT",
        ),
        (
            "[trace]\nendpoint = \"http://x\"\nheaders = [\"hush\"]\n",
            "name: value",
        ),
    ] {
        std::fs::write(here.join("odd.toml"), text).unwrap();
        let ended = run(&here, &["config", "check", "--config", "odd.toml"]);
        assert!(ended.code == 2 && ended.err.contains(part), "{ended:?}");
    }
    let ended = run(&here, &["config", "check", "--config", "none.toml"]);
    assert!(
        ended.code == 2 && ended.err.contains("none.toml"),
        "{ended:?}"
    );
}

#[test]
fn oa_905_key_new_prints_the_secret_once_and_an_entry_that_works() {
    let here = folder("key-new");
    let ended = run(&here, &["key", "new", "anna", "--scopes", "infer,metrics"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    let secret = ended.err.trim().rsplit(' ').next().unwrap();
    assert!(secret.starts_with("sw_") && secret.len() == 67 && !ended.out.contains(secret));
    std::fs::write(here.join("keys.toml"), &ended.out).unwrap();
    std::fs::write(
        here.join("sapwood.toml"),
        "[auth]\nkey_file = \"keys.toml\"\n",
    )
    .unwrap();
    assert_eq!(run(&here, &["config", "check"]).code, 0);
    assert_eq!(
        run(&here, &["key", "new", "anna", "--scopes", "everything"]).code,
        2
    );
}

#[test]
fn doctor_suggests_remedies() {
    let here = folder("doctor");
    std::fs::write(here.join("no.gguf"), "something else").unwrap();
    let ended = run(
        &here,
        &[
            "doctor",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--model",
            "no.gguf",
        ],
    );
    assert_eq!(ended.code, 1, "{ended:?}");
    let findings: Value = serde_json::from_str(&ended.out).unwrap();
    let find = |check: &str| {
        findings
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["check"] == check)
            .unwrap()
    };
    assert_eq!(find("port")["verdict"], "ok");
    assert_eq!(find("model file")["verdict"], "fail");
    assert!(
        find("model file")["hint"]
            .as_str()
            .unwrap()
            .contains("GGUF")
    );
    for check in ["configuration", "cpu", "memory", "file descriptors"] {
        assert!(find(check)["found"].is_string(), "{check}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let ended = run(&here, &["doctor", "--listen", &address]);
    assert!(
        ended.out.contains("warn  port: ") && ended.out.contains(&address),
        "{ended:?}"
    );
}

#[test]
fn oa_912_doctor_checks_every_form_of_an_address() {
    let here = folder("doctor-listen");
    std::fs::write(here.join("file"), "in the way").unwrap();
    let taken = std::os::unix::net::UnixListener::bind(here.join("taken")).unwrap();
    for (address, verdict) in [
        ("unix:free", "ok  "),
        ("unix:taken", "warn"),
        ("unix:file", "warn"),
        ("systemd", "ok  "),
        ("nonsense", "warn"),
    ] {
        let ended = run(&here, &["doctor", "--listen", address]);
        assert!(
            ended.out.contains(&format!("{verdict}  port: ")),
            "{address}: {ended:?}"
        );
    }
    drop(taken);
    assert!(!here.join("free").exists());
}
