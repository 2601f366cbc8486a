//! SIGKILL at random moments for the server, the runtime of its controllers, and the processes of single controllers.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, wait};
use serde_json::{Value, json};

use crate::isolated::{Isolated, PATIENT, bytes_vocabulary, shared_objects};
use crate::process::folder;

/// A number of kills that takes seconds.
#[test]
fn ai_852_after_kills_of_any_process_nothing_is_left() {
    kill_any(16, 0x5eed_0852);
}

/// AI-742, AI-106, AI-202
#[test]
#[ignore = "takes a quarter of an hour: before a release, see CONTRIBUTING.md"]
fn ai_852_after_a_thousand_kills_nothing_is_left() {
    kill_any(1_000, 0x5eed_1000);
}

/// The objects of an own runtime have no names, so that nobody has to remove these.
#[test]
fn ai_852_a_server_killed_while_its_runtime_starts_leaves_nothing() {
    set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    for _ in 0..3 {
        Life::end_at_start("kills-at-start");
    }
}

/// Kills so many processes. The choices are those of the seed, the moments are the machine's too.
fn kill_any(kills: usize, seed: u64) {
    // Whom the killed leave behind becomes a child of this process: at the end of a server it has none.
    set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let mut chance = Chance(seed);
    let mut done = Kills::default();
    while done.all() < kills {
        let is_own = done.servers.is_multiple_of(2);
        let name = format!("kills-{kills}-{}", done.servers % 2);
        let mut life = Life::start(is_own, &name);
        while done.all() < kills && life.go_on(&mut chance, &mut done) {}
        life.end();
        done.servers += 1;
        if done.all() < kills && chance.below(2) == 0 {
            Life::end_at_start(&name);
            done.servers += 1;
        }
    }
    #[expect(clippy::print_stdout, reason = "the figures are for whoever runs it")]
    {
        println!("seed {seed:#x}: {done:?}");
    }
    assert!(
        done.runtimes > 0 && done.servers > 0 && done.workers > 0,
        "{done:?}"
    );
}

#[derive(Debug, Default)]
struct Kills {
    workers: usize,
    runtimes: usize,
    servers: usize,
}

impl Kills {
    const fn all(&self) -> usize {
        self.workers + self.runtimes + self.servers
    }
}

/// A generator of numbers that look random.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

/// One server, until it is killed.
struct Life {
    server: Isolated,
    /// This program's own runtime, which leaves nothing in shared memory even if everybody is killed.
    is_own: bool,
    streams: Vec<BufReader<TcpStream>>,
    /// A runtime that dies often is not started again for a while.
    runtime_kills: usize,
}

impl Life {
    fn start(is_own: bool, name: &str) -> Self {
        let controllers = if is_own {
            "isolation = \"process\"".to_owned()
        } else {
            let here = folder(&format!("{name}-runtime"));
            bytes_vocabulary(&here.join("vocabulary.bin"));
            format!(
                "runtime = {{ command = \"{}\", dialect = \"p2\", sync = \"futex\", args = [\"aicirt\", \
                 \"--tokenizer\", \"{}\", \"--cache-dir\", \"{}\", {PATIENT}] }}",
                env!("CARGO_BIN_EXE_sapwood"),
                here.join("vocabulary.bin").display(),
                here.join("cache").display(),
            )
        };
        let life = Self::of(Isolated::start(name, &controllers, MODEL), is_own);
        // A server that is killed while it starts the runtime of another leaves what it has created for that; see `end`.
        life.server.three_stars();
        life
    }

    /// Kills a server as soon as it has the process of its own runtime, which has not answered yet.
    fn end_at_start(name: &str) {
        let server = Isolated::start(name, "isolation = \"process\"", MODEL);
        let mut life = Self::of(server, true);
        life.streams.push(life.server.stream(&endless()));
        wait_until("there is no runtime", || {
            life.server.find_runtime().is_some()
        });
        life.end();
    }

    const fn of(server: Isolated, is_own: bool) -> Self {
        Self {
            server,
            is_own,
            streams: Vec::new(),
            runtime_kills: 0,
        }
    }

    /// Kills somebody. Returns whether the server still runs.
    fn go_on(&mut self, chance: &mut Chance, done: &mut Kills) -> bool {
        while self.streams.len() < 3 {
            let stream = self.server.stream(&endless());
            // Long after everything that a server waits for.
            let time = Some(Duration::from_secs(120));
            stream.get_ref().set_read_timeout(time).unwrap();
            self.streams.push(stream);
        }
        // Now, or some lines later.
        let place = chance.below(self.streams.len());
        for _ in 0..chance.below(12) {
            self.streams[place].read_line(&mut String::new()).unwrap();
        }
        let server = self.server.pid();
        let runtime = self.server.find_runtime();
        match chance.below(12) {
            0 => return false,
            1..=3 if self.runtime_kills < 4 => {
                let Some(runtime) = runtime else {
                    return true;
                };
                self.runtime_kills += 1;
                done.runtimes += 1;
                kill(runtime);
                // What it steered has ended, each once.
                for mut stream in std::mem::take(&mut self.streams) {
                    let mut rest = String::new();
                    stream.read_to_string(&mut rest).unwrap();
                    assert!(rest.matches("\"error\"").count() <= 1, "{rest}");
                }
            }
            _ => {
                let others = descendants(server).into_iter();
                let others: Vec<_> = others
                    .filter(|seen| seen.state != 'Z' && Some(seen.pid) != runtime)
                    .collect();
                if others.is_empty() {
                    // Own runtimes have no workers, and those of another have been killed.
                    return true;
                }
                kill(others[chance.below(others.len())].pid);
                done.workers += 1;
            }
        }
        self.server.three_stars();
        let is_zombie = |seen: &Seen| seen.state == 'Z';
        wait_until("a zombie is left", || {
            !descendants(server).iter().any(is_zombie)
        });
        true
    }

    /// Kills the server, and sees what is left. It has no runtime of another that is still starting: the names of the objects
    /// are removed when both ends have opened them, and before that nobody is left to do so.
    fn end(self) {
        let prefix = format!("sw{}.", self.server.pid().as_raw_nonzero());
        self.server.kill();
        drop(self.streams);
        wait_until("processes are left", || {
            loop {
                match wait(WaitOptions::NOHANG) {
                    // One that had become a child of this process.
                    Ok(Some(_)) => {}
                    Ok(None) => break false,
                    Err(error) => break error == rustix::io::Errno::CHILD,
                }
            }
        });
        let left = shared_objects(&prefix);
        // Nobody but the server may remove the masks of a runtime that it does not know (AI-202).
        let is_of_server = |name: &String| !self.is_own && name.ends_with("-bin-shm");
        let (masks, left): (Vec<_>, Vec<_>) = left.into_iter().partition(is_of_server);
        assert_eq!(left, Vec::<String>::new());
        assert!(masks.len() <= 1, "{masks:?}");
        for name in masks {
            std::fs::remove_file(format!("/dev/shm/{name}")).unwrap();
        }
    }
}

const MODEL: &str = "tokens_per_s = 200.0, parallel = 8";

/// A stream that does not end.
fn endless() -> Value {
    json!({
        "text_input": "x",
        "parameters": {"stream": true, "max_tokens": 100_000, "controller": "endless"},
    })
}

fn kill(process: Pid) {
    // It may have ended already.
    let _ = kill_process(process, Signal::KILL);
}

/// A process as `/proc` shows it.
struct Seen {
    pid: Pid,
    parent: Pid,
    state: char,
}

/// The processes that `ancestor` has started, and those that these have started.
fn descendants(ancestor: Pid) -> Vec<Seen> {
    let seen = |entry: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
        let pid = stat.split(' ').next()?.parse().ok()?;
        // The name may contain anything; the last parenthesis ends it.
        let mut rest = stat[stat.rfind(')')? + 2..].split(' ');
        Some(Seen {
            pid: Pid::from_raw(pid)?,
            state: rest.next()?.chars().next()?,
            parent: Pid::from_raw(rest.next()?.parse().ok()?)?,
        })
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let mut others: Vec<Seen> = entries.filter_map(seen).collect();
    let (mut found, mut parents) = (Vec::new(), vec![ancestor]);
    while let Some(parent) = parents.pop() {
        let (children, rest): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|seen| seen.parent == parent);
        parents.extend(children.iter().map(|seen| seen.pid));
        found.extend(children);
        others = rest;
    }
    found
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}
