//! Starting the binary, and what came of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// What a command left behind.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A folder of its own for one test.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// The command in `folder`, with an empty environment.
pub(crate) fn sapwood(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sapwood"));
    command.args(arguments).current_dir(folder).env_clear();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs the command to its end, with `input` on its standard input.
pub(crate) fn run_with(mut command: Command, input: &str) -> Ended {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    // A command that fails early has closed its end.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    Ended {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs `sapwood` to its end.
pub(crate) fn run(folder: &Path, arguments: &[&str]) -> Ended {
    run_with(sapwood(folder, arguments), "")
}

/// Sends a process a signal.
pub(crate) fn interrupt(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// A server that runs, and is killed at the latest when dropped.
pub(crate) struct Serving {
    child: Child,
    logs: BufReader<ChildStderr>,
    /// What was read of the log.
    read: String,
    pub(crate) url: String,
}

impl Serving {
    /// Starts `sapwood serve` in `folder` on a free port and waits until it listens.
    pub(crate) fn start(folder: &Path, arguments: &[&str]) -> Self {
        let all = [&["serve", "--listen", "127.0.0.1:0"], arguments].concat();
        Self::of(sapwood(folder, &all))
    }

    /// Starts a server by this command and waits until it listens.
    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let logs = BufReader::new(child.stderr.take().unwrap());
        let mut serving = Self {
            child,
            logs,
            read: String::new(),
            url: String::new(),
        };
        let line = serving.wait_for("listening");
        serving.url = line["url"].as_str().unwrap().to_owned();
        serving
    }

    /// Reads the log until a line has this message.
    pub(crate) fn wait_for(&mut self, message: &str) -> Value {
        loop {
            let before = self.read.len();
            let bytes = self.logs.read_line(&mut self.read).unwrap();
            assert_ne!(bytes, 0, "no `{message}` in:\n{}", self.read);
            let json: Value = serde_json::from_str(&self.read[before..]).unwrap_or_default();
            if json["message"] == message {
                return json;
            }
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.url.strip_prefix("http://").unwrap().parse().unwrap()
    }

    /// The answer to a GET, head and body.
    pub(crate) fn get(&self, path: &str, headers: &str) -> String {
        let mut socket = TcpStream::connect(self.address()).unwrap();
        write!(
            socket,
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }

    /// A number of the metrics, of all labels together.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics", "");
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let of_name = samples.filter_map(|line| {
            let (sample, value) = line.rsplit_once(' ')?;
            let whole = sample.split('{').next()? == name;
            whole.then(|| value.parse::<f64>().unwrap())
        });
        let values: Vec<f64> = of_name.collect();
        assert!(!values.is_empty(), "no {name}: {text}");
        values.iter().sum()
    }

    /// The number of its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        interrupt(&self.child, signal);
    }

    /// Waits for the end; the exit code and the whole log.
    pub(crate) fn end(mut self) -> (i32, String) {
        self.logs.read_to_string(&mut self.read).unwrap();
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        (code, std::mem::take(&mut self.read))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
