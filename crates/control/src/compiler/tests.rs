//! The parent's side with shell scripts as children, and the child's side in this process.

use std::ffi::OsString;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::child::{self, answer};
use super::timed_out::{MODULES_MAX, REFUSED_FOR, TimedOutModules};
use super::{
    ArtefactCompiler, ChildLimits, Compiler, CompilerOptions, CompilerPlace, code_bytes, process,
    time_for,
};
use crate::host::Artefact;
use crate::module::{self, CheckedModule, ModuleError, ModuleId, ModuleLimits};
use crate::store::ArtefactKey;

fn options(time: Duration) -> CompilerOptions {
    CompilerOptions {
        time,
        artefact_bytes_max: 1 << 20,
        ..CompilerOptions::new(CompilerPlace::InProcess)
    }
}

/// Long enough for any child that ends by itself.
const AMPLE: Duration = Duration::from_secs(60);

fn shell(script: &str) -> Vec<OsString> {
    ["/bin/sh", "-c", script].map(OsString::from).to_vec()
}

fn compile(script: &str, time: Duration) -> Result<Artefact, ModuleError> {
    process::compile(&shell(script), b"module", &options(time))
}

#[test]
fn ai_732_a_module_travels_to_a_child_and_its_artefact_back() {
    // The script answers with what it got, under another kind.
    assert_eq!(
        compile("printf A; tail -c +2", AMPLE),
        Ok(Artefact::vouched_for(b"module".to_vec()))
    );
    let large = vec![7; (1 << 20) - 1];
    let echoed = process::compile(&shell("printf A; tail -c +2"), &large, &options(AMPLE));
    assert!(echoed == Ok(Artefact::vouched_for(large)));
    // AI-1090: an artefact may have the limit and no byte more.
    let script = shell("printf A; tail -c +2");
    let limit = vec![7; 1 << 20];
    let answered = process::compile(&script, &limit, &options(AMPLE));
    assert!(answered == Ok(Artefact::vouched_for(limit)));
    let over = process::compile(&script, &vec![7; (1 << 20) + 1], &options(AMPLE));
    assert!(over == Err(ModuleError::CompileFailed));
}

#[test]
fn ai_732_a_child_that_fails_is_a_failed_compilation() {
    for script in [
        "exit 0",
        "exit 3",
        "kill -SEGV $$",
        "kill -KILL $$",
        "cat > /dev/null; printf A",
        r"cat > /dev/null; printf 'A\012\000\000\000\000\000\000\000half'",
        r"cat > /dev/null; printf 'F\004\000\000\000\000\000\000\000oops'",
        r"cat > /dev/null; printf 'X\004\000\000\000\000\000\000\000what'",
        // A claim of 2^63 bytes is not believed.
        r"cat > /dev/null; printf 'A\000\000\000\000\000\000\000\200'",
    ] {
        let error = compile(script, AMPLE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid module: compile failed",
            "{script}"
        );
    }
    let error = process::compile(&[], b"module", &options(AMPLE)).unwrap_err();
    assert!(matches!(error, ModuleError::Host(_)));
    let missing = [OsString::from("/nonexistent/compiler")];
    let error = process::compile(&missing, b"module", &options(AMPLE)).unwrap_err();
    assert!(matches!(error, ModuleError::Host(_)));
}

#[test]
fn ai_732_what_the_engine_refuses_is_invalid() {
    let script = r"cat > /dev/null; printf 'I\004\000\000\000\000\000\000\000odd!'";
    let error = compile(script, AMPLE).unwrap_err();
    assert_eq!(error.to_string(), "invalid module: odd!");
}

#[test]
fn ai_732_a_child_that_takes_too_long_is_killed() {
    let time = Duration::from_millis(100);
    let expected = "invalid module: compilation took longer than 0 s";
    let started = Instant::now();
    for script in [
        "while :; do :; done",
        // Reads nothing, and the module does not fit into a pipe.
        "kill -STOP $$",
        "exec > /dev/null; while :; do :; done",
    ] {
        // Bytes that are no code give it no more time.
        let large = padded(6 << 20);
        let result = process::compile(&shell(script), &large, &options(time));
        // The last closes its output, which cannot be told from a crash.
        let error = result.unwrap_err().to_string();
        assert!(
            error == expected || script.starts_with("exec"),
            "{script}: {error}"
        );
    }
    assert!(started.elapsed() < AMPLE);
    // The processor time that the child allows itself is over first.
    let error = compile("kill -XCPU $$", AMPLE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalid module: compilation took longer than 60 s"
    );
}

/// The interpreter of the reference's Python controllers has 14 MB, and takes more than ten seconds of one core.
#[test]
fn ai_732_a_module_with_more_code_has_more_time() {
    let base = Duration::from_secs(10);
    assert_eq!(time_for(base, 0), base);
    assert_eq!(time_for(base, 4 << 20), base);
    let seconds = |mib: usize| time_for(base, mib << 20).as_secs();
    assert_eq!((seconds(14), seconds(64)), (34, 159));
    assert!(time_for(base, usize::MAX) > base);
}

/// A module whose code is followed by a section of so many bytes that nothing reads.
fn padded(bytes: usize) -> Vec<u8> {
    let mut module = wat::parse_str(MAIN).unwrap();
    let (name, data) = ("padding".into(), vec![0; bytes].into());
    let section = wasm_encoder::CustomSection { name, data };
    wasm_encoder::Section::append_to(&section, &mut module);
    module
}

#[test]
fn ai_732_the_code_of_a_module_alone_counts() {
    let main = wat::parse_str(MAIN).unwrap();
    let code = code_bytes(&main);
    assert!(code > 0 && code < main.len(), "{code} of {}", main.len());
    assert_eq!(code_bytes(&padded(8 << 20)), code);
    let mut reported = None;
    let input = {
        let mut message = Vec::new();
        child::write(&mut message, child::MODULE, &padded(8 << 20)).unwrap();
        message
    };
    let may_take = |bytes| {
        reported = Some(bytes);
        Ok(())
    };
    answer(|_| Ok(b"code"), may_take, &input[..], io::sink()).unwrap();
    assert_eq!(reported, Some(code));
    // No module, and one whose section of code claims 2 GiB.
    assert_eq!(code_bytes(b"text"), 0);
    let lie = b"\0asm\x01\0\0\0\x0a\xff\xff\xff\xff\x07\x01";
    assert!(code_bytes(lie) <= lie.len());
}

#[test]
fn ai_732_a_module_that_took_too_long_is_refused_for_a_while() {
    let (modules, now) = (TimedOutModules::default(), Instant::now());
    let id = |number: usize| ModuleId::of(&number.to_le_bytes());
    modules.insert(id(0), 10, now);
    let refused = Err(ModuleError::CompileTimeout { seconds: 10 });
    assert_eq!(modules.check(id(0), now), refused);
    assert_eq!(modules.check(id(1), now), Ok(()));
    let last = now + REFUSED_FOR - Duration::from_nanos(1);
    assert_eq!(modules.check(id(0), last), refused);
    assert_eq!(modules.check(id(0), now + REFUSED_FOR), Ok(()));
    // It is a bounded list, which the first one leaves first.
    for number in 0..=MODULES_MAX {
        modules.insert(id(number), 10, now);
    }
    assert_eq!(modules.check(id(0), now), Ok(()));
    assert_eq!(modules.check(id(1), now), refused);
    // One that is noted again takes no second place.
    modules.insert(id(1), 10, now);
    modules.insert(id(1), 10, now);
    assert_eq!(modules.check(id(2), now), refused);
}

const MAIN: &str = r#"(module (memory (export "memory") 1)
    (func (export "main") (param i32 i32) (result i32) (i32.const 0)))"#;

#[test]
fn ai_732_the_child_answers_one_module() {
    let answered = |input: &[u8], result: Result<Vec<u8>, ModuleError>| {
        let mut output = Vec::new();
        answer(|_| result, |_| Ok(()), input, &mut output)?;
        Ok::<_, io::Error>(child::read(&mut &output[..], u64::MAX)?.unwrap())
    };
    let message = |module: &[u8]| {
        let mut message = Vec::new();
        child::write(&mut message, child::MODULE, module).unwrap();
        message
    };
    let whole = message(&wat::parse_str(MAIN).unwrap());
    let code = Ok(b"code".to_vec());
    let good = answered(&whole, code.clone()).unwrap();
    assert_eq!(good, (child::ARTEFACT, b"code".to_vec()));
    let refused = answered(&whole, Err(ModuleError::Invalid("too odd".to_owned()))).unwrap();
    assert_eq!(refused, (child::INVALID, b"too odd".to_vec()));
    assert_eq!(
        answered(&whole, Err(ModuleError::CompileFailed)).unwrap().0,
        child::FAILED
    );
    // The child checks too.
    let (kind, reason) = answered(&message(b"text"), code.clone()).unwrap();
    assert_eq!(
        (kind, &reason[..]),
        (child::INVALID, &b"not a Wasm module in binary form"[..])
    );
    // A parent that died: nothing is compiled, whatever has arrived.
    for length in 0..whole.len() {
        let error = answered(&whole[..length], code.clone()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}

/// Counts how many compile at once.
struct Counting {
    running: AtomicUsize,
    most: AtomicUsize,
}

impl ArtefactCompiler for Counting {
    type Program = ();

    fn key(&self) -> ArtefactKey {
        ArtefactKey::of("counting")
    }

    fn compile(&self, _module: &CheckedModule) -> Result<Artefact, ModuleError> {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        for _ in 0..100 {
            std::thread::yield_now();
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        Ok(Artefact::vouched_for(Vec::new()))
    }

    fn load(&self, _module: &CheckedModule, _artefact: &Artefact) -> Result<(), ModuleError> {
        Ok(())
    }

    fn in_use((): &()) -> bool {
        false
    }
}

/// AI-1090
#[test]
fn ai_732_few_modules_are_compiled_at_once() {
    let bytes = wat::parse_str(MAIN).unwrap();
    let module = module::check(&bytes, &ModuleLimits::default()).unwrap();
    let host = Counting {
        running: AtomicUsize::new(0),
        most: AtomicUsize::new(0),
    };
    let compiler = Compiler::new(options(AMPLE));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let job = compiler.start_job(module.id).unwrap();
                compiler.compile(&job, &host, &module, &bytes).unwrap();
            });
        }
    });
    assert_eq!(host.most.load(Ordering::SeqCst), 1);

    // One runs and none may wait.
    let compiler = Compiler::new(CompilerOptions {
        waiting_max: 0,
        ..options(AMPLE)
    });
    let job = compiler.start_job(module.id).unwrap();
    let refused = compiler.start_job(module.id);
    assert!(matches!(refused, Err(ModuleError::Busy)));
    drop(job);
    assert!(compiler.start_job(module.id).is_ok());
}

#[test]
fn ai_732_the_default_limits() {
    let options = CompilerOptions::new(CompilerPlace::InProcess);
    let limits = ChildLimits::default();
    assert_eq!(options.time, Duration::from_secs(10));
    assert_eq!(limits.time, options.time);
    assert_eq!(limits.memory_bytes, 1 << 30);
}
