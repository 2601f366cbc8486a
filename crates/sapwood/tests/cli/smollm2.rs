//! A real model of 135 million parameters, steered: a byte-level vocabulary, tokens that are no whole characters, several
//! tokens that end a text, a chat template.
//!
//! `cargo xtask ci --lane embedded` installs the model, builds the example controllers as modules and runs these tests.

mod constrained;
mod controlled;
mod exact;
mod named;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::process::{Serving, folder, run};

/// A path that the lane gives.
#[expect(
    clippy::disallowed_methods,
    reason = "the lane that prepares the files says where they are"
)]
fn given(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    let message = "is given by `cargo xtask ci --lane embedded`";
    path.unwrap_or_else(|| panic!("{variable} {message}"))
        .into()
}

/// A server of this model.
struct SmolLm2 {
    here: PathBuf,
    serving: Serving,
}

impl SmolLm2 {
    /// Starts a server in a folder of its own, and waits until the model is loaded.
    fn start(name: &str) -> Self {
        Self::start_in(folder(name), "")
    }

    /// The same in a folder that may have been used before, with these settings of the engine too.
    fn start_in(here: PathBuf, engine: &str) -> Self {
        let model = given("SAPWOOD_SMOLLM2");
        // A machine that is busy with other tests makes no step late.
        let config = format!(
            "[engine]\nctx = 1024\n{engine}\n[controllers]\ndir = {store:?}\nstep_ms = 5000\ninit_ms = 10000\n\
             [[models]]\nname = \"smollm2\"\npath = {model:?}\n",
            store = here.join("store"),
        );
        std::fs::write(here.join("sapwood.toml"), config).unwrap();
        let serving = Serving::start(&here, &[]);
        let ready = || serving.get("/v2/models/smollm2/ready", "");
        while !ready().starts_with("HTTP/1.1 200") {
            std::thread::yield_now();
        }
        Self { here, serving }
    }

    /// Uploads example controllers, each of which gets its name as its tag.
    fn upload(&self, controllers: &[&str]) {
        let minimal = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../controllers/wat/minimal.wat"
        );
        for &name in controllers {
            let file = self.here.join(name);
            let module = match name {
                "minimal" => wat::parse_file(minimal).unwrap(),
                _ => read(&given("SAPWOOD_CONTROLLERS").join(format!("{name}.wasm"))),
            };
            std::fs::write(&file, module).unwrap();
            let url = &self.serving.url;
            let command = ["controller", "--server", url, "upload", name, "--tag", name];
            let uploaded = run(&self.here, &command);
            assert_eq!(uploaded.code, 0, "{uploaded:?}");
        }
    }

    /// Answers a user's message with these parameters; the outputs.
    fn answer(&self, message: &str, parameters: Value) -> Value {
        let mut body = parameters;
        body["messages"] = json!([{"role": "user", "content": message}]);
        body["return_finish_reason"] = json!(true);
        let answer = self.post("/v2/models/smollm2/generate", &body);
        serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{answer}"))
    }

    /// The text of an answer.
    fn text(&self, message: &str, parameters: Value) -> String {
        let answer = self.answer(message, parameters);
        let text = answer["text_output"].as_str();
        text.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// The texts of the events of a streamed answer.
    fn pieces(&self, message: &str, parameters: Value) -> Vec<String> {
        let mut body = parameters;
        body["messages"] = json!([{"role": "user", "content": message}]);
        body["stream"] = json!(true);
        let events = self.post("/v2/models/smollm2/generate_stream", &body);
        let events = events
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        events
            .map(|event| {
                let event: Value = serde_json::from_str(event).unwrap();
                let text = event["text_output"].as_str();
                text.unwrap_or_else(|| panic!("{event}")).to_owned()
            })
            .collect()
    }

    /// The body of the answer to a POST.
    fn post(&self, path: &str, body: &Value) -> String {
        let mut socket = TcpStream::connect(self.serving.address()).unwrap();
        let body = body.to_string();
        write!(
            socket,
            "POST {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        body.to_owned()
    }
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
