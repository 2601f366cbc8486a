//! Published chat templates, compared with what Jinja renders: part of the lane `foreign`.
//!
//! The templates belong to other projects, so none is committed. Packages of a registry have them among their files;
//! `tests/templates/reference.py` renders them, and ignored tests of the engine and the kernel compare.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::ci::TESTED;
use crate::{process, root};

/// Runs the tests on published templates. `Ok(false)`: their packages could not be installed.
///
/// # Errors
/// A test fails.
pub(crate) fn run() -> Result<bool> {
    let folder = root().join("tests/templates");
    let position = root().join("target/foreign/templates");
    let Ok((python, archives)) = install(&folder, &position) else {
        return Ok(false);
    };
    let script = folder.join("reference.py").display().to_string();
    let rendered = position.join("rendered.jsonl");
    let mut render = process::program(&python, &[&script]);
    process::run(render.arg(archives).arg(&rendered))?;
    // The whole workspace, so that nothing is built again that the tests have built.
    let tests = [
        "test",
        "--quiet",
        "--workspace",
        "--lib",
        "--features",
        TESTED,
        "published_templates",
        "--",
        "--ignored",
    ];
    let mut tests = process::cargo(&tests);
    process::run(tests.env("SAPWOOD_TEMPLATES", rendered))?;
    Ok(true)
}

/// Installs Jinja and downloads the packages. Returns the interpreter and the folder of the packages' archives.
fn install(folder: &Path, position: &Path) -> Result<(String, PathBuf)> {
    let venv = position.join("venv");
    let python = venv.join("bin/python").display().to_string();
    if !Path::new(&python).exists() {
        let venv = venv.display().to_string();
        process::run(&mut process::program("python3", &["-m", "venv", &venv]))?;
    }
    let pip = |arguments: &[&str], list: &str| {
        let mut pip = process::program(&python, &["-m", "pip"]);
        pip.args(arguments)
            .args(["--quiet", "--disable-pip-version-check"]);
        pip.arg("-r").arg(folder.join(list));
        // Packages may run what they have built: the folder for temporary files may forbid that.
        process::run(pip.env("TMPDIR", &venv))
    };
    pip(&["install", "--no-compile"], "requirements.txt")?;
    let archives = position.join("archives");
    let list = std::fs::read_to_string(folder.join("packages.txt"))?;
    // Written when all are there, so that packages that are listed later are downloaded too.
    let complete = position.join("packages.txt");
    if std::fs::read_to_string(&complete).is_ok_and(|found| found == list) {
        return Ok((python, archives));
    }
    if archives.exists() {
        std::fs::remove_dir_all(&archives)?;
    }
    let destination = archives.display().to_string();
    let download = [
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--require-hashes",
        "-d",
        &destination,
    ];
    pip(&download, "packages.txt")?;
    std::fs::write(complete, list)?;
    Ok((python, archives))
}
