//! A runtime that the test plays: its process only waits, and the test sits at the other end of its shared memory.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Branch, Mid, Pre, Steer, SteerCall, SteerRefusal, SteerSource, SteerUser, StepWaker,
};
use serde_json::{Value, json};

use super::*;
use crate::host::Program;
use crate::host::tests::{Bell, model};
use crate::module::ModuleId;
use crate::runtime::Dialect;
use crate::wire::{Received, RuntimeWire, Synchronisation, WireConfig};

/// The engine's end, and where its processes report themselves.
struct Setup {
    controllers: RemoteControllers,
    reports: PathBuf,
    _folder: tempfile::TempDir,
}

/// Bytes that every name means.
struct OneModule;

const MODULE: &[u8] = &[1, 2, 3];

impl FindModule for OneModule {
    fn find(&self, _: SteerUser<'_>, _: &str) -> Result<ModuleId, SteerRefusal> {
        Ok(ModuleId::of(MODULE))
    }

    fn prepare(&self, _: ModuleId) -> Result<Program, SteerRefusal> {
        Err(SteerRefusal {
            code: Code::InvalidRequest,
            reason: ErrorReason::INVALID_MODULE,
            message: "it does not compile".to_owned(),
        })
    }

    fn bytes(&self, _: ModuleId) -> Result<Vec<u8>, SteerRefusal> {
        Ok(MODULE.to_vec())
    }
}

/// One runtime process.
struct Stub {
    wire: RuntimeWire,
    prefix: String,
    pid: Pid,
}

impl Setup {
    fn new(step: Duration) -> Self {
        Self::of(step, false)
    }

    fn of(step: Duration, own: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let reports = folder.path().join("reports");
        let kind = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &reports, kind, mode, 0).unwrap();
        // The prefix is the third of the arguments that follow.
        let script = format!("echo $$ $3 > {}; exec sleep 1000", reports.display());
        let options = RemoteOptions {
            command: RemoteCommand {
                program: "/bin/sh".into(),
                args: ["-c", &script, "runtime"].map(Into::into).into(),
                environment: vec![("PATH".into(), "/usr/bin:/bin".into())],
                own,
            },
            dialect: Dialect::Auto,
            synchronisation: Synchronisation::Futex,
            message_bytes: 1 << 20,
            mask_bytes: 1 << 20,
            limits: RemoteLimits {
                handshake: Duration::from_secs(60),
                step,
                start: Duration::from_secs(60),
                upload: Duration::from_secs(60),
            },
            forks: 4,
            model: model(),
            numbers: Arc::default(),
            step_observer: Arc::new(|_| {}),
        };
        let modules = Arc::new(OneModule);
        let controllers = RemoteControllers::new(options, modules, RemoteStart::OnDemand);
        Self {
            controllers: controllers.unwrap(),
            reports,
            _folder: folder,
        }
    }

    /// Opens a steerer; `serve` plays the runtime meanwhile.
    fn open<T>(&self, serve: impl FnOnce(&Path) -> T) -> (Result<Box<dyn Steer>, SteerRefusal>, T) {
        let call = SteerCall {
            user: SteerUser {
                name: "ada",
                is_admin: false,
                may_control: false,
            },
            controller: "m1",
            arg: "a",
            watched: true,
            stops: false,
            sharer: None,
        };
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| self.controllers.open(call));
            let served = serve(&self.reports);
            (opening.join().unwrap(), served)
        })
    }
}

/// One that takes minutes to compile must not take the runtime's time for the start of an instance.
#[test]
fn ai_852_a_module_is_prepared_before_our_own_runtime_gets_it() {
    let setup = Setup::of(Duration::from_secs(60), true);
    let (opened, ()) = setup.open(|_| ());
    assert_eq!(opened.err().unwrap().message, "it does not compile");
}

impl Stub {
    /// Waits for the next process, and opens its objects.
    fn start(reports: &Path) -> Self {
        let mut line = String::new();
        // Opening a named pipe waits for its writer, and reading for the writer's end.
        let mut pipe = std::fs::File::open(reports).unwrap();
        pipe.read_to_string(&mut line).unwrap();
        let (pid, prefix) = line.trim().split_once(' ').unwrap();
        let config = WireConfig {
            synchronisation: Synchronisation::Futex,
            message_bytes: 1 << 20,
            mask_bytes: 1 << 20,
            ..WireConfig::new(prefix)
        };
        Self {
            wire: RuntimeWire::open(&config).unwrap(),
            prefix: prefix.to_owned(),
            pid: Pid::from_raw(pid.parse().unwrap()).unwrap(),
        }
    }

    /// A process that shakes hands and takes a module.
    fn ready(reports: &Path) -> Self {
        Self::ready_as(reports, &json!({"vocab_size": model().vocabulary()}))
    }

    /// As [`Stub::ready`], and it speaks P2.
    fn ready_p2(reports: &Path) -> Self {
        let tokens = json!({"vocab_size": model().vocabulary(), "eos_token_id": 0});
        Self::ready_as(reports, &tokens)
    }

    fn ready_as(reports: &Path, tokens: &Value) -> Self {
        let mut stub = Self::start(reports);
        stub.handshake(tokens);
        let upload = stub.side(&json!({"module_id": ModuleId::of(MODULE).to_string()}));
        assert_eq!(upload["op"], "mk_module");
        assert_eq!(upload["binary"], "AQID");
        stub
    }

    fn handshake(&mut self, tokens: &Value) {
        assert_eq!(self.request()["op"], "ping");
        self.answer(json!({"pong": 1}));
        assert_eq!(self.request()["op"], "tokens");
        self.answer(tokens.clone());
    }

    fn request(&mut self) -> Value {
        let request = self.next_request(Instant::now() + Duration::from_secs(60));
        request.expect("a request")
    }

    fn next_request(&mut self, until: Instant) -> Option<Value> {
        let mut message = Vec::new();
        match self.wire.requests.receive(&mut message, Some(until)) {
            Ok(Received::Message) => Some(serde_json::from_slice(&message).unwrap()),
            Ok(Received::Nothing) => None,
            other => panic!("{other:?}"),
        }
    }

    fn answer(&mut self, data: Value) {
        self.answer_bytes(json!({"type": "ok", "data": data}).to_string().as_bytes());
    }

    fn answer_bytes(&mut self, bytes: &[u8]) {
        self.wire.responses.send(bytes).unwrap();
    }

    /// Answers one request of the side channel with `data`.
    fn side(&mut self, data: &Value) -> Value {
        let (mut message, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        let received = self.wire.side_requests.receive(&mut message, Some(until));
        assert_eq!(received, Ok(Received::Message));
        let request: Value = serde_json::from_slice(&message).unwrap();
        let answer = json!({"$rid": request["$rid"], "type": "ok", "data": data}).to_string();
        self.wire.side_responses.send(answer.as_bytes()).unwrap();
        request
    }

    /// Begins a sequence, up to its first `post_pre_process`, which has no answer yet.
    fn begin(&mut self, steer: &mut dyn Steer, bell: &Arc<Bell>) -> Value {
        let waker: Arc<dyn StepWaker> = Arc::clone(bell) as _;
        steer.begin(&[1, 2], &waker);
        let start = self.side(&json!({}));
        assert_eq!(start["op"], "instantiate");
        assert_eq!(start["$auth"], json!({"user": "ada", "is_admin": false}));
        assert_eq!(
            (&start["prompt"], &start["module_arg"]),
            (&json!([1, 2]), &json!("a"))
        );
        assert!(bell.wait(|| steer.begin_poll().transpose()).is_ok());
        steer.bind(1);
        assert_eq!(steer.pre(), Ok(None));
        steer.flush();
        let bind = self.request();
        assert_eq!(bind["pre_ops"][0]["req_id"], start["req_id"]);
        bind
    }

    /// Neither the process nor an object of it is there.
    fn is_gone(&self) -> bool {
        let names = std::fs::read_dir("/dev/shm").unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let process = Path::new("/proc").join(self.pid.to_string());
        !process.exists() && !names.any(|name| name.contains(&self.prefix[1..]))
    }
}

fn pre_answer(id: &Value) -> Value {
    let id = id.as_u64().unwrap().to_string();
    let pre = json!({"suspend": false, "num_forks": 1, "ff_tokens": []});
    json!({"post_seqs": {}, "pre_seqs": {id: {"error": "", "result": pre, "logs": "hi\n", "micros": 0}}})
}

/// AI-850, AI-854
#[test]
fn ai_854_a_step_is_two_messages_of_p1() {
    let setup = Setup::new(Duration::from_secs(60));
    let (steer, mut stub) = setup.open(Stub::ready);
    let (mut steer, bell) = (steer.unwrap(), Arc::new(Bell::default()));
    let bind = stub.begin(&mut *steer, &bell);
    let id = &bind["pre_ops"][0]["id"];
    stub.answer(pre_answer(id));
    let run = Pre::Run {
        fast_forward: Vec::new(),
    };
    assert_eq!(bell.wait(|| steer.pre().transpose()), Ok(run));
    assert_eq!(steer.take_report().unwrap().logs, "hi\n");
    steer.mid_begin(&[1]);
    assert_eq!(steer.mid_poll(), Ok(None), "nothing waits here");
    steer.flush();
    assert_eq!(
        stub.request(),
        json!({"op": "mid_process", "ops": [{"id": id}]})
    );
    let row: Vec<u8> = (0..model().vocabulary())
        .flat_map(|token| if token == 42 { 0.0_f32 } else { -100.0 }.to_le_bytes())
        .collect();
    assert!(stub.wire.masks.write(0, &row));
    let seq = json!({"error": "", "result": null});
    stub.answer(json!({"seqs": {id.to_string(): seq}, "num_seqs": 1}));
    let mid = bell.wait(|| steer.mid_poll().transpose()).unwrap();
    let Mid::One(Branch::Sample(sample)) = mid else {
        panic!("a mask is expected");
    };
    let mask = sample.mask.unwrap();
    assert_eq!((mask.count(), mask.allows(42)), (1, true));
    let appended = Appended {
        backtrack: 0,
        tokens: &[42],
        sampled: Some(42),
    };
    steer.post(appended).unwrap();
    drop(steer);
    // Alone, since nothing else is asked.
    let freed = stub.request();
    assert_eq!(
        (&freed["op"], &freed["freed"]),
        (&json!("post_pre_process"), &json!([id]))
    );
    drop(setup);
    assert!(stub.is_gone());
}

/// As in this process: it is no suspension, and goes on as soon as the runtime's answer is another one.
#[test]
fn ai_1005_a_sequence_waits_for_what_only_the_runtime_sees() {
    let setup = Setup::new(Duration::from_secs(60));
    let (steer, mut stub) = setup.open(Stub::ready_p2);
    let (mut steer, bell) = (steer.unwrap(), Arc::new(Bell::default()));
    let waker: Arc<dyn StepWaker> = Arc::clone(&bell) as _;
    steer.begin(&[1, 2], &waker);
    stub.side(&json!({"error": "", "result": {"prompt": [1, 2]}}));
    assert!(bell.wait(|| steer.begin_poll().transpose()).is_ok());
    steer.bind(1);
    let run = || {
        Ok(Some(Pre::Run {
            fast_forward: Vec::new(),
        }))
    };
    assert_eq!(steer.pre(), run());
    steer.mid_begin(&[1]);
    steer.flush();
    let answer = |request: &Value, branches: Value| {
        let id = request["ops"][0]["id"].to_string();
        json!({"seqs": {id: {"error": "", "result": {"branches": branches}}}, "dtype": "f32",
               "first_mask_byte_offset": 0, "mask_num_bytes": 0, "mask_num_elts": 0, "num_masks": 0})
    };
    let waits = json!([{"splices": [{}], "wait": ["a"]}]);
    let request = stub.request();
    stub.answer(answer(&request, waits.clone()));
    let mid = bell.wait(|| steer.mid_poll().transpose());
    assert_eq!(mid, Ok(Mid::One(Branch::Noop)));
    for branches in [waits.clone(), waits, json!([])] {
        let request = bell.wait(|| {
            assert_eq!(steer.pre(), Ok(Some(Pre::Wait)));
            steer.flush();
            stub.next_request(Instant::now())
        });
        assert_eq!(request["ops"][0]["tokens"], json!([]));
        stub.answer(answer(&request, branches));
    }
    let pre = bell.wait(|| match steer.pre() {
        Ok(Some(Pre::Wait)) => None,
        other => Some(other),
    });
    assert_eq!(pre, run());
    steer.mid_begin(&[1]);
    assert_eq!(
        steer.mid_poll(),
        Ok(Some(Mid::Stop)),
        "which was the answer"
    );
}

/// What a runtime does instead of answering a step.
#[derive(Clone, Copy, Debug)]
enum Misdeed {
    Garbage,
    Empty,
    NoResults,
    HugeLength,
    NoAnswer,
    Death,
    SideGarbage,
}

/// AI-851, AI-853
#[test]
fn ai_852_every_kind_of_death_costs_its_sequences_and_the_next_request_has_another_process() {
    for misdeed in [
        Misdeed::Garbage,
        Misdeed::Empty,
        Misdeed::NoResults,
        Misdeed::HugeLength,
        Misdeed::NoAnswer,
        Misdeed::Death,
        Misdeed::SideGarbage,
    ] {
        let step = match misdeed {
            Misdeed::NoAnswer => Duration::from_millis(50),
            _ => Duration::from_secs(60),
        };
        let setup = Setup::new(step);
        let (steer, mut stub) = setup.open(Stub::ready);
        let (mut steer, bell) = (steer.unwrap(), Arc::new(Bell::default()));
        stub.begin(&mut *steer, &bell);
        // Kept: one that nobody waits for would be taken back.
        let mut other = None;
        match misdeed {
            Misdeed::Garbage => stub.answer_bytes(b"{\"type\":"),
            Misdeed::Empty => stub.answer_bytes(b"{}"),
            Misdeed::NoResults => stub.answer(json!({"seqs": {}})),
            Misdeed::HugeLength => {
                stub.wire.responses.set_length(u32::MAX - 1);
            }
            Misdeed::NoAnswer => {}
            Misdeed::Death => kill_process(stub.pid, Signal::KILL).unwrap(),
            Misdeed::SideGarbage => {
                // Read while something of the side channel is pending.
                let waker: Arc<dyn StepWaker> = Arc::clone(&bell) as _;
                let (opened, ()) = setup.open(|_| {});
                other.insert(opened.unwrap()).begin(&[1], &waker);
                stub.wire.side_responses.send(b"[").unwrap();
            }
        }
        let failure = bell.wait(|| steer.pre().transpose()).unwrap_err();
        assert_eq!(failure.reason, ErrorReason::RUNTIME_LOST, "{misdeed:?}");
        drop(other);
        // Modules are uploaded again.
        let (next, mut second) = setup.open(Stub::ready);
        assert!(stub.is_gone(), "{misdeed:?}");
        second.begin(&mut *next.unwrap(), &bell);
        drop(setup);
        assert!(second.is_gone(), "{misdeed:?}");
    }
}

#[test]
fn ai_850_a_runtime_that_refuses_a_module_refuses_the_request() {
    let setup = Setup::new(Duration::from_secs(60));
    let (refused, stub) = setup.open(|reports| {
        let mut stub = Stub::start(reports);
        stub.handshake(&json!({"vocab_size": model().vocabulary()}));
        let (mut message, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        let received = stub.wire.side_requests.receive(&mut message, Some(until));
        assert_eq!(received, Ok(Received::Message));
        let request: Value = serde_json::from_slice(&message).unwrap();
        let answer = json!({"$rid": request["$rid"], "type": "error", "error": "invalid module: no", "is_user_error": true});
        stub.wire.side_responses.send(answer.to_string().as_bytes()).unwrap();
        stub
    });
    let refusal = refused.err().unwrap();
    assert_eq!(
        (refusal.reason, refusal.message.as_str()),
        (ErrorReason::INVALID_MODULE, "invalid module: no")
    );
    drop(setup);
    assert!(stub.is_gone());
}
