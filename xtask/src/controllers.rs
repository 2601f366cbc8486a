//! The example controllers: tested natively, built as modules in every language, and run by the host's tests.
//!
//! The modules stay in `target/controllers`, each under its example's name; those of the form with three callbacks end
//! in `.p1.wasm`.

mod compiler;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::root;
use crate::{ci, process};
use compiler::Compiler;
pub(crate) use compiler::{C_COMPILER, RUST};

/// The project that `sapwood controller new` makes here.
const NEW_PROJECT: &str = "my-first";
/// A hello-world module (AI-640), in bytes.
const YES_BYTES_MAX: u64 = 20 * 1024;

/// Tests and builds everything, then runs the modules.
///
/// # Errors
/// Something does not build, a test fails, or the smallest module is too large.
pub(crate) fn lane() -> Result<()> {
    // Modules of examples that were renamed would still be run.
    clear(&folder())?;
    native_tests()?;
    let modules = modules()?;
    let compiler = Compiler::find().context(NO_COMPILER)?;
    let examples = root().join("controllers");
    copy(
        &build(&compiler, &examples, &["--features", "p1"])?,
        &modules,
        "p1.wasm",
    )?;
    build_c(&modules.join("c-yes.wasm"))?;
    new_project(&compiler, &modules)?;
    let yes = modules.join("yes.wasm");
    let bytes = fs::metadata(&yes)
        .with_context(|| format!("no {}", yes.display()))?
        .len();
    process::print_line(&format!("yes.wasm has {bytes} bytes"));
    ensure!(
        bytes <= YES_BYTES_MAX,
        "yes.wasm has {bytes} bytes; a hello-world module has at most {YES_BYTES_MAX}"
    );
    // The whole workspace, so that nothing is built again that the tests have built.
    let mut tests = process::cargo(&[
        "test",
        "--workspace",
        "--features",
        ci::TESTED,
        "--test",
        "examples",
        "--",
        "--include-ignored",
    ]);
    process::run(tests.env("SAPWOOD_CONTROLLERS", &modules))
}

/// Builds the modules of the examples in Rust; returns the folder that they are in.
///
/// # Errors
/// There is no compiler, or something does not build.
pub(crate) fn modules() -> Result<PathBuf> {
    let compiler = Compiler::find().context(NO_COMPILER)?;
    let built = build(&compiler, &root().join("controllers"), &[])?;
    let modules = folder();
    fs::create_dir_all(&modules)?;
    copy(&built, &modules, "wasm")?;
    Ok(modules)
}

const NO_COMPILER: &str = "no Rust compiler for WebAssembly";

fn folder() -> PathBuf {
    root().join("target/controllers")
}

fn clear(modules: &Path) -> Result<()> {
    fs::create_dir_all(modules)?;
    for module in wasm_files(modules)? {
        fs::remove_file(module)?;
    }
    Ok(())
}

/// Formatting, lints and tests of the examples, with the workspace's own compiler.
fn native_tests() -> Result<()> {
    let examples = root().join("controllers");
    for arguments in [
        &["fmt", "--check"][..],
        &["clippy", "--quiet", "--all-targets", "--", "-D", "warnings"],
        &["test", "--quiet"],
    ] {
        let mut command = process::cargo(arguments);
        command
            .current_dir(&examples)
            .env("CARGO_TARGET_DIR", target());
        process::run(&mut command)?;
    }
    Ok(())
}

/// A target folder of its own, so that neither these features nor this profile build anything of the workspace again.
fn target() -> PathBuf {
    folder().join("build")
}

/// Builds the modules of a project; returns their paths.
fn build(compiler: &Compiler, project: &Path, arguments: &[&str]) -> Result<Vec<PathBuf>> {
    let mut command = compiler.build(arguments);
    command
        .current_dir(project)
        .env("CARGO_TARGET_DIR", target());
    process::run(&mut command)?;
    wasm_files(&target().join("wasm32-unknown-unknown/release"))
}

fn wasm_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    let is_module = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| extension == "wasm")
    };
    Ok(paths.into_iter().filter(is_module).collect())
}

/// Copies modules under the names of their examples.
fn copy(modules: &[PathBuf], folder: &Path, extension: &str) -> Result<()> {
    ensure!(!modules.is_empty(), "no module was built");
    for module in modules {
        let name = module
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .replace('_', "-");
        fs::copy(module, folder.join(format!("{name}.{extension}")))?;
    }
    Ok(())
}

/// The command that the header of the C examples names.
fn build_c(module: &Path) -> Result<()> {
    let mut command = process::program(
        "clang",
        &["--target=wasm32", "-O2", "-fno-builtin", "-nostdlib"],
    );
    command.args(["-Wl,--no-entry", "-Wall", "-Werror", "-o"]);
    process::run(command.arg(module).arg("controllers/c/yes.c"))
}

/// Makes a project with the command that a user types, tests it and builds its module.
fn new_project(compiler: &Compiler, modules: &Path) -> Result<()> {
    let project = target().join(NEW_PROJECT);
    // The command overwrites nothing, so what an earlier run made has to go.
    if project.exists() {
        fs::remove_dir_all(&project)?;
    }
    fs::create_dir_all(target())?;
    let binary = ci::build_server()?.display().to_string();
    let mut make = process::program(&binary, &["controller", "new", NEW_PROJECT]);
    process::run(make.current_dir(target()))?;
    let mut tests = process::cargo(&["test", "--quiet"]);
    tests
        .current_dir(&project)
        .env("CARGO_TARGET_DIR", target());
    process::run(&mut tests)?;
    let built = build(compiler, &project, &[])?;
    let own = |module: &PathBuf| module.file_stem().is_some_and(|stem| stem == "my_first");
    copy(
        &built.into_iter().filter(own).collect::<Vec<_>>(),
        modules,
        "wasm",
    )
}
