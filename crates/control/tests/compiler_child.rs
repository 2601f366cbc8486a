//! AI-732 with a real child: this program starts itself, with an argument that says what to do as a compiler.
//!
//! It has no test harness, because that writes to the standard output on which a child answers. It lists and runs its tests
//! as `cargo test` and `cargo nextest` ask for.

#![expect(
    clippy::unwrap_used,
    reason = "clippy does not see that these are tests"
)]

use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use sapwood_control::compiler::{
    ChildLimits, CompilerOptions, CompilerPlace, compile_stdin_to_stdout,
};
use sapwood_control::controllers::{Controllers, ControllersOptions};
use sapwood_control::host::{Host, HostConfig, compile};
use sapwood_control::module::ModuleError;
use sapwood_control::store::StoreOptions;
use sapwood_proto::steer::{ControllerStore, SteerUser, UploadedModule};

type Test = fn();

const TESTS: &[(&str, Test)] = &[
    (
        "ai_732_a_child_compiles_what_this_process_runs",
        ai_732_a_child_compiles_what_this_process_runs,
    ),
    (
        "ai_732_a_child_ends_at_its_limit_of_processor_time",
        ai_732_a_child_ends_at_its_limit_of_processor_time,
    ),
    (
        "ai_732_a_child_ends_at_its_limit_of_memory",
        ai_732_a_child_ends_at_its_limit_of_memory,
    ),
    (
        "ai_732_a_child_yields_to_its_parent",
        ai_732_a_child_yields_to_its_parent,
    ),
];

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode] = &arguments[..]
        && let Some(mode) = mode.strip_prefix("child-")
    {
        return child(mode);
    }
    let is = |flag: &str| arguments.iter().any(|argument| argument == flag);
    // None is ignored.
    let selected = |name: &str| {
        let mut names = arguments
            .iter()
            .filter(|argument| argument.starts_with("ai_"));
        !is("--ignored")
            && (names.clone().next().is_none() || names.any(|asked| name.contains(&asked[..])))
    };
    let mut output = io::stdout();
    for (name, test) in TESTS.iter().filter(|(name, _)| selected(name)) {
        if is("--list") {
            writeln!(output, "{name}: test")?;
        } else {
            // A panic ends the program, as a failure.
            test();
            writeln!(output, "test {name} ... ok")?;
        }
    }
    Ok(())
}

fn child(mode: &str) -> io::Result<()> {
    let limits = ChildLimits {
        time: Duration::from_secs(1),
        memory_bytes: 256 << 20,
        ..ChildLimits::default()
    };
    match mode {
        "honest" => compile_stdin_to_stdout(ChildLimits::default(), |module| {
            compile(&HostConfig::default(), module)
        }),
        "endless" => compile_stdin_to_stdout::<Vec<u8>>(limits, |module| {
            let mut sum = module.instrumented.len();
            loop {
                sum = std::hint::black_box(sum.wrapping_mul(3));
            }
        }),
        "greedy" => compile_stdin_to_stdout(limits, |module| {
            let mut all = Vec::new();
            for _ in 0..1024 {
                // Written, because the system counts nothing else for certain.
                all.push(std::hint::black_box(vec![1_u8; 1 << 20]));
            }
            Ok(module.instrumented.clone())
        }),
        "nice" => compile_stdin_to_stdout::<Vec<u8>>(ChildLimits::default(), |_| {
            Err(ModuleError::Invalid(niceness().to_string()))
        }),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

const ANNA: SteerUser<'_> = SteerUser {
    name: "anna",
    is_admin: false,
    may_control: true,
};

/// Uploads a module, compiled by a child that works in this way.
fn upload(mode: &str) -> (Controllers<Host>, Result<UploadedModule, String>) {
    // The child alone is limited, so that its own limits are what ends it.
    let mut compiler = CompilerOptions::new(CompilerPlace::Child(vec![
        std::env::current_exe().unwrap().into_os_string(),
        OsString::from(format!("child-{mode}")),
    ]));
    compiler.time = Duration::from_secs(120);
    let folder = tempfile::tempdir().unwrap();
    let options = ControllersOptions::new(StoreOptions::new(folder.path().to_owned()), compiler);
    let host = Host::new(HostConfig::default()).unwrap();
    let controllers = Controllers::open(host, options).unwrap();
    let bytes = wat::parse_str(MODULE).unwrap();
    let uploaded = controllers.upload(ANNA, bytes.into());
    (controllers, uploaded.map_err(|refusal| refusal.message))
}

fn ai_732_a_child_compiles_what_this_process_runs() {
    let (_controllers, uploaded) = upload("honest");
    // It has been loaded, or there would be an error.
    assert!(uploaded.unwrap().compiled_size > 0);
}

fn ai_732_a_child_ends_at_its_limit_of_processor_time() {
    let (_controllers, uploaded) = upload("endless");
    // The message has the limit of the parent, which is the same in a server.
    let expected = ModuleError::CompileTimeout { seconds: 120 };
    assert_eq!(uploaded.unwrap_err(), expected.to_string());
}

fn ai_732_a_child_ends_at_its_limit_of_memory() {
    let (_controllers, uploaded) = upload("greedy");
    assert_eq!(uploaded.unwrap_err(), "invalid module: compile failed");
}

fn niceness() -> i32 {
    rustix::process::getpriority_process(None).unwrap()
}

fn ai_732_a_child_yields_to_its_parent() {
    let (_controllers, uploaded) = upload("nice");
    // 19 is the most that there is.
    let expected = (niceness() + 5).min(19);
    assert_eq!(uploaded.unwrap_err(), format!("invalid module: {expected}"));
}

const MODULE: &str = r#"(module
    (memory (export "memory") 1)
    (func (export "aici_create") (result i32) (i32.const 1))
    (func (export "aici_init_prompt") (param i32))
    (func (export "aici_mid_process") (param i32)))"#;
