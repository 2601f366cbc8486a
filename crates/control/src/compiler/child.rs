//! The child's side: [`compile_stdin_to_stdout`].
//!
//! Messages, each way one: `kind 1 | length 8 (little-endian) | bytes`. The length shows that all has arrived, so a
//! parent that died while writing does not leave half a module to be compiled.

use std::io::{self, Read, Write};
use std::time::Duration;

use super::{code_bytes, time_for};
use crate::module::{self, CheckedModule, ModuleError, ModuleLimits};

/// Limits that the child sets itself. A process without unsafe code cannot set them for a child that it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChildLimits {
    /// Bytes of private memory that can be written, heap and maps, beyond what the process has at its start. This is the
    /// limit that modules meet.
    pub memory_bytes: u64,
    /// Bytes of address space. More than the memory, since it also counts the program itself, its libraries, stacks,
    /// and what allocators and the Wasm engine reserve and never touch; it bounds what the other limit does not count.
    pub address_space_bytes: u64,
    /// Processor time for a module of usual size, in whole seconds, rounded up; one with more code has more, as
    /// [`CompilerOptions::time`] says.
    ///
    /// [`CompilerOptions::time`]: super::CompilerOptions::time
    pub time: Duration,
}

impl Default for ChildLimits {
    fn default() -> Self {
        Self {
            memory_bytes: 1 << 30,
            address_space_bytes: 4 << 30,
            time: Duration::from_secs(10),
        }
    }
}

/// The whole of a compiler child: limits this process, reads a module from standard input, compiles it, and writes the
/// result to standard output. The module is checked here again: what is compiled is what this process has instrumented.
///
/// # Errors
/// Limits cannot be set, or the parent went away. An invalid module is no error: it is the result.
pub fn compile_stdin_to_stdout<A: AsRef<[u8]>>(
    limits: ChildLimits,
    compile: impl FnOnce(&CheckedModule) -> Result<A, ModuleError>,
) -> io::Result<()> {
    limits.apply()?;
    let may_take = |code_bytes| limits.limit_time(code_bytes);
    answer(compile, may_take, io::stdin().lock(), io::stdout().lock())
}

/// Compiles one module from `input`, the size of whose code it tells `may_take` before.
pub(super) fn answer<A: AsRef<[u8]>>(
    compile: impl FnOnce(&CheckedModule) -> Result<A, ModuleError>,
    may_take: impl FnOnce(usize) -> io::Result<()>,
    mut input: impl Read,
    mut output: impl Write,
) -> io::Result<()> {
    let message = read(&mut input, u64::MAX)?;
    let Some((MODULE, bytes)) = message else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    may_take(code_bytes(&bytes))?;
    let checked = module::check(&bytes, &LIMITS_OF_PARENT);
    match checked.and_then(|module| compile(&module)) {
        Ok(artefact) => write(&mut output, ARTEFACT, artefact.as_ref()),
        Err(ModuleError::Invalid(reason)) => write(&mut output, INVALID, reason.as_bytes()),
        Err(error) => write(&mut output, FAILED, error.to_string().as_bytes()),
    }
}

impl ChildLimits {
    /// Limits this process.
    fn apply(self) -> io::Result<()> {
        use rustix::process::{Resource, Rlimit, Signal, setrlimit};

        // Not outliving the parent: it may be killed in a way that lets it kill nobody. The thread that started this
        // process waits for it, so its end is the parent's.
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // Whoever uploads can wait; those whose tokens the processors are for cannot.
        rustix::process::nice(NICENESS)?;
        let limit = |resource, soft, hard| {
            let (current, maximum) = (Some(soft), Some(hard));
            setrlimit(resource, Rlimit { current, maximum })
        };
        limit(
            Resource::As,
            self.address_space_bytes,
            self.address_space_bytes,
        )?;
        // On top of what is there: allocators reserve as much as this whole limit in advance, and then a limit without it
        // leaves nothing, or by chance a little, for the module.
        let memory_bytes = self.memory_bytes.saturating_add(private_bytes());
        limit(Resource::Data, memory_bytes, memory_bytes)?;
        // A crash of the code generator must not write what a stranger uploaded to the disk.
        limit(Resource::Core, 0, 0)?;
        Ok(())
    }

    /// Limits the processor time for a module with so many bytes of code. Until it is read, the parent's clock alone counts.
    fn limit_time(self, code_bytes: usize) -> io::Result<()> {
        use rustix::process::{Resource, Rlimit, setrlimit};

        let time = time_for(self.time, code_bytes);
        let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
        // At the lower one the system sends XCPU, which the parent recognises; at the higher one KILL.
        let (current, maximum) = (Some(seconds), Some(seconds + 1));
        Ok(setrlimit(Resource::Cpu, Rlimit { current, maximum })?)
    }
}

/// What counts against the limit of private memory already; 0 where the system does not say.
fn private_bytes() -> u64 {
    let sizes = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    // In pages: size, resident, shared, text, libraries, data and stack.
    let pages = sizes.split_ascii_whitespace().nth(5);
    let pages = pages.and_then(|pages| pages.parse::<u64>().ok());
    pages.map_or(0, |pages| {
        pages.saturating_mul(rustix::param::page_size() as u64)
    })
}

/// Reads a message; `None` if it is incomplete or longer than `limit`.
pub(super) fn read(input: &mut impl Read, limit: u64) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    input.take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    let Some((kind, length)) = head.split_first() else {
        return Ok(None);
    };
    let Ok(length) = length.try_into().map(u64::from_le_bytes) else {
        return Ok(None);
    };
    if length > limit {
        return Ok(None);
    }
    // Not reserved in advance: the length is believed only as far as bytes follow.
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 == length).then_some((*kind, bytes)))
}

/// Writes a message.
pub(super) fn write(output: &mut impl Write, kind: u8, bytes: &[u8]) -> io::Result<()> {
    output.write_all(&[kind])?;
    output.write_all(&(bytes.len() as u64).to_le_bytes())?;
    output.write_all(bytes)?;
    output.flush()
}

/// The parent has applied its own limits, which are not known here.
const LIMITS_OF_PARENT: ModuleLimits = ModuleLimits {
    module_bytes: usize::MAX,
    functions: u32::MAX,
    memory_bytes: u64::MAX,
    tables: u32::MAX,
    table_elements: u64::MAX,
    mutable_globals: u32::MAX,
    dropped_segments: u32::MAX,
    check_time: Duration::MAX,
};

/// What the child adds to its niceness: beside one busy thread of the server it has a quarter of a processor. More would make
/// modules late on a machine that is always busy.
const NICENESS: i32 = 5;

/// The kinds of messages: a module to compile.
pub(super) const MODULE: u8 = b'M';
/// The artefact.
pub(super) const ARTEFACT: u8 = b'A';
/// The engine refuses the module, because of this text.
pub(super) const INVALID: u8 = b'I';
/// Anything else went wrong; the text is for the log.
pub(super) const FAILED: u8 = b'F';

const HEAD_BYTES: usize = 1 + size_of::<u64>();
