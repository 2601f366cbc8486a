//! Controllers as text, and a host that runs them.

use std::sync::Arc;

use anyhow::{Context, Result};
use sapwood_control::host::{Capabilities, Host, HostConfig, Program};
use sapwood_control::module::{ModuleLimits, check};
use sapwood_control::steer::{ModelControllers, RequestLimits};
use sapwood_control::trie::HostModel;
use sapwood_proto::steer::{Steer, SteerCall, SteerSource, SteerUser};

/// The smallest controller in the form with three callbacks: allows one token, for ever.
#[must_use]
pub fn trivial_p1() -> String {
    p1(&Callbacks::default())
}

/// What the callbacks of a P1 controller do, beside returning their result.
#[derive(Clone, Copy, Debug)]
pub struct Callbacks<'t> {
    /// Pages of 64 KiB.
    pub pages: u32,
    /// Further functions, data and globals.
    pub more: &'t str,
    /// In `init_prompt`.
    pub begin: &'t str,
    /// In `pre`.
    pub pre: &'t str,
    /// In `mid`.
    pub mid: &'t str,
    /// In `post`.
    pub post: &'t str,
}

impl Default for Callbacks<'_> {
    fn default() -> Self {
        Self {
            pages: 2,
            more: "",
            begin: "",
            pre: "",
            // Token 42 is bit 10 of word 1; the rest of the mask is memory that nothing writes.
            mid: "(i32.store (i32.const 2052) (i32.const 0x400)) (call $mask (i32.const 2048))",
            post: "",
        }
    }
}

/// A P1 controller.
#[must_use]
pub fn p1(callbacks: &Callbacks<'_>) -> String {
    let Callbacks {
        pages,
        more,
        begin,
        pre,
        mid,
        post,
    } = callbacks;
    format!(
        r#"(module
          (import "env" "aici_host_return_process_result" (func $return (param i32 i32)))
          (import "env" "aici_host_return_logit_bias" (func $mask (param i32)))
          (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
          (memory (export "memory") {pages})
          (data (i32.const 0) "{{}}")
          (data (i32.const 8) "{{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}}")
          (data (i32.const 64) "{{\"SampleWithBias\":{{}}}}")
          (data (i32.const 96) "{{\"stop\":false}}")
          {more}
          (func (export "aici_create") (result i32) (i32.const 1))
          (func (export "aici_init_prompt") (param i32)
            {begin} (call $return (i32.const 0) (i32.const 2)))
          (func (export "aici_pre_process") (param i32)
            {pre} (call $return (i32.const 8) (i32.const 46)))
          (func (export "aici_mid_process") (param i32)
            {mid} (call $return (i32.const 64) (i32.const 21)))
          (func (export "aici_post_process") (param i32)
            {post} (call $return (i32.const 96) (i32.const 14))))"#
    )
}

/// The same controller as [`trivial_p1`], in the form with one callback.
#[must_use]
pub fn trivial_p2() -> String {
    const RESULT: &str = r#"{"branches":[{"sample_mask":0,"splices":[]}]}"#;
    let (data, len) = (RESULT.replace('"', "\\\""), RESULT.len());
    format!(
        r#"(module
          (import "env" "aici_host_return_process_result" (func $return (param i32 i32)))
          (import "env" "aici_host_return_logit_bias" (func $mask (param i32) (result i32)))
          (import "env" "aici_host_read_blob" (func $blob (param i32 i32 i32) (result i32)))
          (memory (export "memory") 2)
          (data (i32.const 64) "{data}")
          (func (export "aici_create") (result i32) (i32.const 1))
          ;; Returns the prompt that it got.
          (func (export "aici_init_prompt") (param i32)
            (call $return (i32.const 8192) (call $blob (i32.const 4) (i32.const 8192) (i32.const 8192))))
          (func (export "aici_mid_process") (param i32)
            (i32.store (i32.const 2052) (i32.const 0x400))
            (drop (call $mask (i32.const 2048)))
            (call $return (i32.const 64) (i32.const {len}))))"#
    )
}

/// A P1 controller that is as large as an interpreter: about two megabytes of code and one of data, and a main function
/// table. Its callbacks are trivial.
#[must_use]
pub fn large() -> String {
    use std::fmt::Write;
    let mut more = String::from("(global $g (mut i32) (i32.const 1))");
    let mut random = 0x9e37_79b9_u32;
    for function in 0..LARGE_FUNCTIONS {
        let _ = write!(
            more,
            "(func $f{function} (param i32) (result i32) (local i32)"
        );
        for _ in 0..LARGE_STATEMENTS {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let _ = write!(
                more,
                "(local.set 1 (i32.add (i32.mul (local.get 0) (i32.const {random}))\
                 (i32.xor (local.get 1) (i32.load offset=4096 (i32.and (local.get 1) (i32.const 0xffff))))))\
                 (if (i32.lt_u (local.get 1) (i32.const {function})) (then (local.set 0 (i32.const {function}))))"
            );
        }
        let _ = write!(more, "(local.get 1))");
    }
    let names: String = (0..LARGE_FUNCTIONS).map(|it| format!(" $f{it}")).collect();
    let _ = write!(
        more,
        "(table {LARGE_FUNCTIONS} funcref) (elem (i32.const 0){names}) (data (i32.const 65536) \"{}\")",
        "sapwood ".repeat(LARGE_DATA_BYTES / 8)
    );
    p1(&Callbacks {
        pages: 64,
        more: &more,
        ..Callbacks::default()
    })
}

const LARGE_FUNCTIONS: u32 = 4_000;
const LARGE_STATEMENTS: u32 = 14;
const LARGE_DATA_BYTES: usize = 1 << 20;

/// The bytes of a module.
///
/// # Errors
/// The text is no module.
pub fn bytes(text: &str) -> Result<Vec<u8>> {
    Ok(wat::parse_str(text)?)
}

/// A host with the limits of `sapwood serve`.
///
/// # Errors
/// Those of the Wasm engine.
pub fn host() -> Result<Host> {
    Ok(Host::new(HostConfig::default())?)
}

/// The same for a runtime that serves another process.
///
/// # Errors
/// Those of the Wasm engine.
pub fn runtime_host() -> Result<Host> {
    Ok(Host::new(HostConfig {
        busy_beside: 2,
        ..HostConfig::default()
    })?)
}

/// Compiles and loads a module.
///
/// # Errors
/// It is refused.
pub fn load(host: &Host, text: &str) -> Result<Program> {
    let module = check(&bytes(text)?, &ModuleLimits::default())?;
    let artefact = host.compile(&module)?;
    Ok(host.load(&module, &artefact)?)
}

/// Opens steerers of one module.
///
/// # Errors
/// The module is refused.
pub fn source(host: &Host, model: &Arc<HostModel>, text: &str) -> Result<ModelControllers> {
    let program = load(host, text)?;
    Ok(ModelControllers::new(
        host.clone(),
        Arc::new(move |_: SteerUser<'_>, _: &str| Ok(program.clone())),
        Arc::clone(model),
        Capabilities::ALL,
        RequestLimits::default(),
    ))
}

/// Opens a steerer.
///
/// # Errors
/// The source refuses it.
pub fn open(source: &dyn SteerSource, controller: &str, arg: &str) -> Result<Box<dyn Steer>> {
    let call = SteerCall {
        user: SteerUser {
            name: "bench",
            is_admin: true,
            may_control: true,
        },
        controller,
        arg,
        watched: false,
        stops: false,
        sharer: None,
    };
    source.open(call).context("open a steerer")
}
