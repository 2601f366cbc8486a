//! The real model under a name of a hub: downloaded at the first use, locked while a server has it.

use crate::hub_server::{FakeHub, HttpServer};
use crate::process::{Serving, folder, run_with, sapwood};

use super::given;

#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn a_model_of_the_hub_is_downloaded_at_the_first_use() {
    let here = folder("smollm2-named");
    let bytes = std::fs::read(given("SAPWOOD_SMOLLM2")).unwrap();
    let hub = FakeHub::new(&[("SmolLM2-135M-Instruct.Q4_1.gguf", bytes)]);
    let command = |arguments: &[&str], hub: &HttpServer| {
        let mut command = sapwood(&here, arguments);
        command
            .env("HF_ENDPOINT", &hub.url)
            .env("SAPWOOD_HUB__DIR", here.join("models"));
        command
    };
    let chat = [
        "chat",
        "--model",
        "hf:o/r",
        "--ctx",
        "512",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    ];
    let first = run_with(command(&chat, &hub.hub), "Hello\n");
    assert_eq!(first.code, 0, "{first:?}");
    assert!(!first.out.trim().is_empty(), "{first:?}");
    assert!(first.err.contains("\"percent\":50"), "{first:?}");
    assert_eq!(hub.cdn.requests().len(), 1);
    // Served, under the repository's name, from where it is now.
    let nobody = HttpServer::start(|request| panic!("{request:?}"));
    let serve = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--model",
        "hf:o/r:q4_1",
        "--ctx",
        "512",
    ];
    let mut serving = Serving::of(command(&serve, &nobody));
    serving.wait_for("loaded");
    assert!(
        serving
            .get("/v2/models/r/ready", "")
            .starts_with("HTTP/1.1 200")
    );
    let removed = run_with(command(&["models", "rm", "hf:o/r"], &nobody), "");
    assert_eq!(removed.code, 1, "{removed:?}");
    assert!(removed.err.contains("is in use"), "{removed:?}");
    drop(serving);
    let removed = run_with(command(&["models", "rm", "hf:o/r"], &nobody), "");
    assert_eq!(removed.code, 0, "{removed:?}");
}

#[test]
fn a_server_does_not_start_without_a_model_that_the_hub_does_not_have() {
    let here = folder("smollm2-missing");
    let hub = FakeHub::new(&[]);
    let mut command = sapwood(
        &here,
        &["serve", "--listen", "127.0.0.1:0", "--model", "x=hf:o/r"],
    );
    command
        .env("HF_ENDPOINT", &hub.hub.url)
        .env("SAPWOOD_HUB__DIR", here.join("models"));
    let ended = run_with(command, "");
    assert_eq!(ended.code, 5, "{ended:?}");
    assert!(
        ended
            .err
            .contains("cannot load the model `x`: hf:o/r: the repository has no GGUF"),
        "{ended:?}"
    );
}
