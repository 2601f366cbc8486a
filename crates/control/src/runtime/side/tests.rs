//! The side channel with a store in memory and scripted controllers.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    ModuleInfo, ModulePage, SteerRefusal, TagInfo, TagPage, UploadedModule,
};

use super::super::scripted::{Line, Scripted, VOCABULARY, World, post, pre, runs};
use super::super::sequence::Returned;
use super::*;

/// A store that knows one upload and no folder.
#[derive(Default)]
struct Memory {
    /// An upload waits for a message, if there is a channel.
    gate: Option<Mutex<Receiver<()>>>,
    tags: Mutex<Vec<TagInfo>>,
}

fn refusal(message: &str) -> SteerRefusal {
    SteerRefusal {
        code: Code::NotFound,
        reason: ErrorReason::UNKNOWN_CONTROLLER,
        message: message.into(),
    }
}

impl ControllerStore for Memory {
    fn upload(&self, _: SteerUser<'_>, module: Bytes) -> Result<UploadedModule, SteerRefusal> {
        if let Some(gate) = &self.gate {
            gate.lock().unwrap().recv().unwrap();
        }
        Ok(UploadedModule {
            module_id: "ab".into(),
            wasm_size: module.len() as u64,
            compiled_size: 7,
            time_ms: 3,
        })
    }

    fn set_tags(
        &self,
        user: SteerUser<'_>,
        module_id: &str,
        tags: &[String],
    ) -> Result<Vec<TagInfo>, SteerRefusal> {
        let set = tags.iter().map(|tag| TagInfo {
            tag: tag.clone(),
            module_id: module_id.into(),
            updated_at: 5,
            updated_by: user.name.into(),
            wasm_size: 6,
            compiled_size: 7,
            public: user.is_admin,
        });
        let set: Vec<_> = set.collect();
        self.tags.lock().unwrap().extend(set.clone());
        Ok(set)
    }

    fn tags(&self, page: TagPage<'_>) -> Result<Vec<TagInfo>, SteerRefusal> {
        let tags = self.tags.lock().unwrap();
        let listed = tags.iter().filter(|tag| tag.tag.starts_with(page.prefix));
        Ok(listed.cloned().collect())
    }

    fn modules(
        &self,
        _: SteerUser<'_>,
        _: ModulePage<'_>,
    ) -> Result<Vec<ModuleInfo>, SteerRefusal> {
        Ok(Vec::new())
    }

    fn module(&self, _: SteerUser<'_>, _: &str) -> Result<ModuleInfo, SteerRefusal> {
        Err(refusal("module not found"))
    }

    fn delete_tags(&self, _: SteerUser<'_>, _: &[String]) -> Result<(), SteerRefusal> {
        Ok(())
    }

    fn delete_module(&self, _: SteerUser<'_>, _: &str) -> Result<(), SteerRefusal> {
        Err(refusal("module not found"))
    }
}

/// Argument and prompt of each start.
type StartArgs = Arc<Mutex<Vec<(String, Vec<Token>)>>>;

/// Starts what the controller's name says.
struct Starter {
    scripts: HashMap<&'static str, Line>,
    world: World,
    args: StartArgs,
}

impl Launcher for Starter {
    type Sequence = Scripted;

    fn launch(&self, launch: Launch<'_>) -> Result<Scripted, RequestError> {
        let line = self
            .scripts
            .get(launch.controller)
            .ok_or_else(|| RequestError::user(format!("tag {} not found", launch.controller)))?;
        let arg = (launch.arg.to_owned(), launch.prompt);
        self.args.lock().unwrap().push(arg);
        let follow = match launch.controller {
            "forwards" => vec![
                pre(1, false, &[5]),
                post(false),
                pre(1, false, &[6, 7]),
                post(false),
                pre(2, false, &[]),
            ],
            "suspends" => vec![pre(1, true, &[])],
            "stops" => vec![pre(1, false, &[5]), post(true)],
            "fails" => vec![Line::Fails("boom")],
            _ => vec![runs()],
        };
        let sequence = Scripted::new(&self.world, follow).starting(line.clone());
        Ok(match launch.controller {
            "prints" => sequence.printing(&"x".repeat(70_000)),
            _ => sequence,
        })
    }

    fn tokenize_prompt(&self, text: &str) -> Vec<Token> {
        std::iter::once(1)
            .chain(text.bytes().map(u32::from))
            .collect()
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn memory_bytes(&self) -> u64 {
        4_096
    }
}

/// A side channel with its workers, and what it answered.
struct Side {
    channel: Arc<SideChannel<Starter>>,
    answers: Receiver<Vec<u8>>,
    pending: Arc<Pending<Scripted>>,
    args: StartArgs,
    workers: Vec<std::thread::JoinHandle<()>>,
    gate: Option<SyncSender<()>>,
}

impl Side {
    fn new(dialect: Dialect) -> Self {
        Self::with(dialect, false, &SIDE_WORKERS)
    }

    fn with(dialect: Dialect, gated: bool, workers: &[Weight]) -> Self {
        Self::start(dialect, gated, workers, false)
    }

    fn start(dialect: Dialect, gated: bool, workers: &[Weight], restricted: bool) -> Self {
        let world = World::new();
        let pending = Arc::clone(&world.pending);
        let args = Arc::default();
        let begun = |prompt| Line::Returns(Returned::Begun { prompt });
        let scripts = HashMap::from([
            ("good", begun(None)),
            ("other-prompt", begun(Some(vec![9, 8]))),
            ("bad", Line::Fails("boom")),
            ("prints", begun(None)),
            ("long-prompt", begun(Some(vec![9; 40_000]))),
            ("forwards", begun(None)),
            ("suspends", begun(None)),
            ("stops", begun(None)),
            ("fails", begun(None)),
            (
                "never",
                Line::At(u64::MAX, Returned::Begun { prompt: None }),
            ),
        ]);
        let (send, answers) = sync_channel(1_000);
        let (open, gate) = sync_channel(1_000);
        let channel = Arc::new(SideChannel::new(SideParts {
            launcher: Starter {
                scripts,
                world,
                args: Arc::clone(&args),
            },
            store: Arc::new(Memory {
                gate: gated.then(|| Mutex::new(gate)),
                ..Memory::default()
            }),
            pending: Arc::clone(&pending),
            dialect: DialectCell::new(dialect),
            features: WireFeatures::new(),
            wake: Arc::default(),
            restricted,
            room: AnswerRoom {
                bytes_max: 60_000,
                room: 60_004,
            },
            send: Box::new(move |_, answer| send.send(answer).unwrap()),
        }));
        let workers = workers
            .iter()
            .map(|most| {
                let (channel, most) = (Arc::clone(&channel), *most);
                std::thread::spawn(move || channel.work(most))
            })
            .collect();
        Self {
            channel,
            answers,
            pending,
            args,
            workers,
            gate: gated.then_some(open),
        }
    }

    fn send(&self, request: &str) {
        self.channel.accept(request.as_bytes());
    }

    fn receive(&self) -> String {
        let answer = self.answers.recv_timeout(Duration::from_secs(60)).unwrap();
        String::from_utf8(answer).unwrap()
    }

    fn ask(&self, request: &str) -> String {
        self.send(request);
        self.receive()
    }

    fn instantiate(&self, request: &str, controller: &str, rest: &str) -> String {
        self.ask(&format!(
            r#"{{"$rid":"x","op":"instantiate","req_id":"{request}","prompt":[1],"module_id":"{controller}"{rest}}}"#
        ))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.gate = None;
        self.channel.close();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

#[test]
fn ai_102_a_restricted_runtime_changes_no_module_and_no_tag() {
    let side = Side::start(Dialect::Auto, false, &SIDE_WORKERS, true);
    for op in [
        r#""op":"mk_module","binary":"AGFz""#,
        r#""op":"set_tags","module_id":"ab","tags":["x"]"#,
        r#""op":"delete_tags","tags":["x"]"#,
        r#""op":"delete_module","module_id":"ab""#,
    ] {
        assert_eq!(
            side.ask(&format!(r#"{{"$rid":"a",{op}}}"#)),
            r#"{"$rid":"a","type":"error","error":"module upload disabled","is_user_error":true}"#
        );
    }
    let listed = side.ask(r#"{"op":"get_tags"}"#);
    assert_eq!(listed, r#"{"type":"ok","data":{"tags":[]}}"#);
}

#[test]
fn ai_311_uploads_and_tags_have_the_members_of_the_page() {
    let side = Side::new(Dialect::Auto);
    assert_eq!(
        side.ask(r#"{"$rid":"a","op":"mk_module","binary":"AGFz"}"#),
        r#"{"$rid":"a","type":"ok","data":{"module_id":"ab","wasm_size":3,"compiled_size":7,"time":3}}"#
    );
    let tag = r#"{"tag":"u.x","module_id":"ab","updated_at":5,"updated_by":"u","wasm_size":6,"compiled_size":7}"#;
    let expected = format!(r#"{{"type":"ok","data":{{"tags":[{tag}]}}}}"#);
    // One tag may stand without its list.
    for tags in [r#""u.x""#, r#"["u.x"]"#] {
        let request = format!(
            r#"{{"op":"set_tags","module_id":"ab","tags":{tags},"$auth":{{"user":"u","is_admin":false}}}}"#
        );
        assert_eq!(side.ask(&request), expected);
    }
    let listed = side.ask(r#"{"op":"get_tags","prefix":"v"}"#);
    assert_eq!(listed, r#"{"type":"ok","data":{"tags":[]}}"#);
    let listed = side.ask(r#"{"op":"get_tags"}"#);
    assert_eq!(listed.matches("u.x").count(), 2);
    let refused = side.ask(r#"{"op":"mk_module","binary":"?"}"#);
    assert!(
        refused.contains(r#""error":"invalid module: not base64"#),
        "{refused}"
    );
    assert!(refused.ends_with(r#""is_user_error":true}"#), "{refused}");
}

#[test]
fn ai_316_instantiate_runs_the_first_pre() {
    let side = Side::new(Dialect::P1i);
    let result = |tokens: &str, micros: u32| {
        format!(
            r#"{{"$rid":"x","type":"ok","data":{{"error":"","result":{{"suspend":false,"num_forks":1,"ff_tokens":[{tokens}]}},"storage":[],"logs":"","micros":{micros}}}}}"#
        )
    };
    assert_eq!(side.instantiate("r1", "good", ""), result("", 20));
    assert!(side.pending.is_ready("r1"));
    // Its fork is asked for again by the first step.
    assert_eq!(side.instantiate("r2", "forwards", ""), result("5,6,7", 60));
    assert!(side.pending.is_ready("r2"));
    for (controller, error, micros) in [
        (
            "suspends",
            "Error (setup-pre): setup-pre asked for suspend",
            20,
        ),
        (
            "stops",
            "Error (setup-pre): setup-pre asked for suspend",
            30,
        ),
        ("fails", "Error (setup-pre): boom", 20),
        ("bad", "Error (setup): boom", 10),
    ] {
        assert_eq!(
            side.instantiate("r3", controller, ""),
            format!(
                r#"{{"$rid":"x","type":"ok","data":{{"error":"{error}","result":null,"storage":[],"logs":"{error}","micros":{micros}}}}}"#
            )
        );
        assert!(!side.pending.is_ready("r3"));
    }
}

#[test]
fn ai_314_an_instance_that_was_not_bound_in_time_is_gone_from_an_idle_runtime() {
    let side = Side::with(Dialect::Auto, false, &[]);
    let quick = |queue: &SideQueue| queue.next(Weight::Quick, Duration::ZERO);
    assert!(matches!(quick(&side.channel.queue), Some(Job::Idle)));
    let now = Instant::now();
    let expired = now.checked_sub(Duration::from_secs(300)).unwrap();
    let reserved = ["old", "new"].map(|request| side.pending.reserve(request, now).unwrap());
    for (reserved, since) in reserved.into_iter().zip([expired, now]) {
        reserved.ready(Scripted::new(&World::new(), []), since);
    }
    side.channel.take(Job::Idle);
    assert!(!side.pending.is_ready("old") && side.pending.is_ready("new"));
    // A message of any kind is as good.
    side.pending.remove("new");
    let reserved = side.pending.reserve("old", now).unwrap();
    reserved.ready(Scripted::new(&World::new(), []), expired);
    side.ask(r#"{"op":"ping"}"#);
    assert_eq!(side.pending.counts(), (0, 0));
}

/// AI-315
#[test]
fn ai_224_a_long_answer_to_instantiate_is_shortened_or_leaves_no_instance() {
    let side = Side::new(Dialect::P2);
    let answer = side.instantiate("r1", "prints", "");
    assert!(answer.contains(r#""result":{"prompt":[1]}"#));
    let logs = answer.matches('x').count();
    assert!(answer.len() <= 60_000 && logs > 30_000 - 10, "{logs}");
    assert!(side.pending.is_ready("r1"));
    let answer = side.instantiate("r2", "long-prompt", "");
    let error = "Worker: result too large";
    assert_eq!(
        answer,
        format!(
            r#"{{"$rid":"x","type":"ok","data":{{"error":"{error}","result":null,"storage":[],"logs":"{error}","micros":0}}}}"#
        )
    );
    assert!(!side.pending.is_ready("r2"));
    // Its id is free again.
    let answer = side.instantiate("r2", "good", "");
    assert!(answer.contains(r#""error":"""#), "{answer}");
}

#[test]
fn ai_1002_an_instance_is_answered_compactly_too() {
    let side = Side::new(Dialect::P1i);
    side.ask(r#"{"op":"hello","features":["compact"]}"#);
    let answer = side.instantiate("r1", "good", "");
    assert_eq!(answer, r#"{"$rid":"x","type":"ok","data":{"micros":20}}"#);
}

/// AI-314
#[test]
fn ai_315_in_p1_an_instance_is_answered_by_nothing_or_an_error() {
    let side = Side::new(Dialect::Auto);
    let ok = r#"{"$rid":"x","type":"ok","data":{}}"#;
    assert_eq!(side.instantiate("r1", "good", ""), ok);
    // The answer comes after it can be bound.
    assert!(side.pending.is_ready("r1"));
    assert_eq!(
        side.instantiate("r2", "bad", ""),
        r#"{"$rid":"x","type":"error","error":"Error (setup): boom","is_user_error":true}"#
    );
    assert!(!side.pending.is_ready("r2"));
    // Its id is free again.
    assert_eq!(side.instantiate("r2", "good", ""), ok);
    let refused = side.instantiate("r1", "good", "");
    assert!(refused.contains("duplicate req_id r1"), "{refused}");
    let refused = side.instantiate("r3", "none", "");
    assert!(refused.contains("tag none not found"), "{refused}");
}

#[test]
fn ai_315_in_p2_an_instance_is_answered_by_its_prompt() {
    let side = Side::new(Dialect::P2);
    for (request, controller, prompt) in [("a", "good", "[1]"), ("b", "other-prompt", "[9,8]")] {
        let result = format!(
            r#"{{"error":"","result":{{"prompt":{prompt}}},"storage":[],"logs":"","micros":10}}"#
        );
        assert_eq!(
            side.instantiate(request, controller, ""),
            format!(r#"{{"$rid":"x","type":"ok","data":{result}}}"#)
        );
    }
    let failed = side.instantiate("c", "bad", "");
    assert!(
        failed.starts_with(
            r#"{"$rid":"x","type":"ok","data":{"error":"Error (setup): boom","result":null"#
        ),
        "{failed}"
    );
    assert!(!side.pending.is_ready("c"));
}

#[test]
fn ai_313_arguments_and_prompts_in_their_forms() {
    let side = Side::new(Dialect::Auto);
    for (request, rest) in [
        ("a", r#","module_arg":"text""#),
        ("b", r#","module_arg":{"k": [1, 2.5]}"#),
        ("c", ""),
    ] {
        assert!(side.instantiate(request, "good", rest).contains("\"ok\""));
    }
    let text = r#"{"op":"instantiate","req_id":"d","prompt":"AB","module_id":"good"}"#;
    assert!(side.ask(text).contains("\"ok\""));
    let args = side.args.lock().unwrap().clone();
    let arg = |at: usize| args[at].0.as_str();
    assert_eq!(
        (arg(0), arg(1), arg(2)),
        ("text", r#"{"k":[1,2.5]}"#, "null")
    );
    assert_eq!(args[3].1, [1, 65, 66]);
    let beyond = r#"{"op":"instantiate","req_id":"e","prompt":[100],"module_id":"good"}"#;
    assert!(
        side.ask(beyond)
            .contains("prompt token out of range (100 >= 100)")
    );
    let long = "x".repeat((1 << 20) + 1);
    let refused = side.instantiate("f", "good", &format!(r#","module_arg":"{long}""#));
    assert!(refused.contains("module_arg too long"), "{refused}");
    let longest = "x".repeat(1 << 20);
    let rest = format!(r#","module_arg":"{longest}""#);
    assert!(side.instantiate("f", "good", &rest).contains("\"ok\""));
}

#[test]
fn ai_841_a_constraint_without_a_pattern_is_refused() {
    let side = Side::new(Dialect::Auto);
    for rest in ["", r#","module_arg":null"#] {
        let refused = side.instantiate("a", "sapwood:regex", rest);
        let error =
            r#"{"$rid":"x","type":"error","error":"invalid grammar: the pattern is missing"#;
        assert!(refused.starts_with(error), "{refused}");
        assert!(refused.contains(r#""is_user_error":true"#), "{refused}");
    }
    // A pattern that happens to be these letters is one.
    let unknown = side.instantiate("a", "sapwood:regex", r#","module_arg":"null""#);
    assert!(unknown.contains("tag sapwood:regex not found"), "{unknown}");
}

/// AI-1004
#[test]
fn ai_306_a_slow_request_delays_no_other_and_can_be_cancelled() {
    let side = Side::with(Dialect::Auto, true, &SIDE_WORKERS);
    side.send(r#"{"$rid":"slow","op":"mk_module","binary":"AGFz"}"#);
    side.send(
        r#"{"$rid":"never","op":"instantiate","req_id":"n","prompt":[],"module_id":"never"}"#,
    );
    assert!(
        side.ask(r#"{"$rid":"t","op":"get_tags"}"#)
            .starts_with(r#"{"$rid":"t","type":"ok""#)
    );
    assert_eq!(
        side.ask(r#"{"op":"ping"}"#),
        r#"{"type":"ok","data":{"pong":1}}"#
    );
    // A worker that starts it just now would free its request id a moment after the answer.
    while side.channel.launches.starting() == 0 {
        std::thread::yield_now();
    }
    side.send(r#"{"$rid":"c","op":"cancel","rid":"never"}"#);
    assert_eq!(
        side.receive(),
        r#"{"$rid":"never","type":"error","error":"cancelled","is_user_error":true}"#
    );
    assert_eq!(
        side.receive(),
        r#"{"$rid":"c","type":"ok","data":{"cancelled":1}}"#
    );
    // Its request id is free.
    assert!(side.instantiate("n", "good", "").contains("\"ok\""));
    side.gate.as_ref().unwrap().send(()).unwrap();
    assert!(side.receive().starts_with(r#"{"$rid":"slow","type":"ok""#));
    let nothing = side.ask(r#"{"op":"cancel","rid":"slow"}"#);
    assert_eq!(nothing, r#"{"type":"ok","data":{"cancelled":0}}"#);
}

#[test]
fn ai_306_as_many_uploads_as_there_are_workers_delay_no_other_request() {
    let side = Side::with(Dialect::Auto, true, &SIDE_WORKERS);
    for _ in &SIDE_WORKERS {
        side.send(r#"{"$rid":"slow","op":"mk_module","binary":"AGFz"}"#);
    }
    let tags = side.ask(r#"{"$rid":"t","op":"get_tags"}"#);
    assert!(tags.starts_with(r#"{"$rid":"t","type":"ok""#), "{tags}");
    let ok = r#"{"$rid":"x","type":"ok","data":{}}"#;
    assert_eq!(side.instantiate("r1", "good", ""), ok);
    for _ in &SIDE_WORKERS {
        side.gate.as_ref().unwrap().send(()).unwrap();
        assert!(side.receive().starts_with(r#"{"$rid":"slow","type":"ok""#));
    }
}

#[test]
fn ai_302_every_op_checks_the_shape_of_the_user() {
    let side = Side::new(Dialect::Auto);
    for op in ["ping", "hello", "cancel", "drop", "stats", "get_tags", "?"] {
        let refused = side.ask(&format!(
            r#"{{"$rid":"a","op":"{op}","$auth":{{"user":1}}}}"#
        ));
        let begin = r#"{"$rid":"a","type":"error","error":"$auth must be "#;
        assert!(refused.starts_with(begin), "{refused}");
    }
}

#[test]
fn ai_1090_as_many_requests_are_open_as_the_limit_says() {
    // Nobody works, so that all of them stay open.
    let side = Side::with(Dialect::Auto, false, &[]);
    for _ in 0..SIDE_PENDING_MAX {
        side.send(r#"{"$rid":"q","op":"get_tags"}"#);
    }
    assert!(side.answers.try_recv().is_err());
    assert_eq!(
        side.ask(r#"{"$rid":"q","op":"get_tags"}"#),
        r#"{"$rid":"q","type":"error","error":"too many pending requests","is_user_error":true}"#
    );
    let stats = side.ask(r#"{"op":"stats"}"#);
    assert!(stats.contains(r#""side_pending":256"#), "{stats}");
    assert!(stats.contains(r#""memory_bytes":4096"#), "{stats}");
    // All of one id, before anybody began them.
    side.send(r#"{"op":"cancel","rid":"q"}"#);
    for _ in 0..SIDE_PENDING_MAX {
        assert!(side.receive().contains("cancelled"));
    }
    assert!(side.receive().contains(r#""cancelled":256"#));
    side.send(r#"{"op":"get_tags"}"#);
    assert!(side.answers.try_recv().is_err());
}

#[test]
fn ai_1004_an_instance_that_was_never_bound_can_be_dropped() {
    let side = Side::new(Dialect::Auto);
    side.instantiate("r", "good", "");
    assert_eq!(
        side.ask(r#"{"op":"drop","req_id":"r"}"#),
        r#"{"type":"ok","data":{}}"#
    );
    assert!(
        side.ask(r#"{"op":"drop","req_id":"r"}"#)
            .contains("invalid req_id r")
    );
    assert!(!side.pending.is_ready("r"));
}
