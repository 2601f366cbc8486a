//! `cargo xtask dist`: what runs on other machines than this one.
//!
//! On Linux that is an archive with the binary and the libraries of llama.cpp, one of kernels for each kind of processor, of which
//! the binary chooses at its start:
//!
//! ```text
//! sapwood-VERSION-ARCH-linux[-PROFILE][-FEATURES]/
//!   bin/sapwood
//!   lib/sapwood/   libllama.so.0, libggml.so.0, libggml-base.so.0, libggml-cpu-*.so, and back-ends for GPUs
//!   LICENSE-*, THIRD-PARTY.txt
//! ```
//!
//! With `--static`, and on other systems, it is one file with the kernels of one kind of processor in it (AVX2 on x86-64).

mod archive;
mod notices;
mod path_flags;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use self::archive::{ArchiveFolder, PROGRAM};
use self::path_flags::{BuildFlags, Folders};
use crate::serve::FEATURES;
use crate::toolchain::{self, Machine};
use crate::{advice, process, root};

/// The profile of what is shipped.
const PROFILE: &str = "dist";

const NOTICES: &str = "THIRD-PARTY.txt";

/// Of this project, and of Rust's standard library.
const LICENCES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "LICENSE-rust.html"];

/// Options of `cargo xtask dist`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// One file without libraries, for any x86-64 processor with AVX2.
    #[arg(long, conflicts_with = "profile")]
    r#static: bool,
    /// `release` builds faster, to try the archive.
    #[arg(long, value_name = "NAME", default_value = PROFILE, value_parser = ["dist", "release"])]
    profile: String,
    /// Additional cargo features of the binary; `cuda` or `vulkan` adds a library for GPUs.
    #[arg(long, value_name = "LIST")]
    features: Option<String>,
}

impl Options {
    /// Those of the lane of CI.
    pub(crate) fn to_try() -> Self {
        Self {
            r#static: false,
            profile: "release".to_owned(),
            features: None,
        }
    }
}

/// Builds, and writes what is shipped into `target/archives`.
///
/// # Errors
/// If a tool is missing and cannot be installed, the build fails, or what was built does not start.
pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = Machine::this();
    toolchain::gpu::ensure(&machine, options.features.as_deref().unwrap_or_default())?;
    toolchain::ensure(&machine)?;
    // llama.cpp's build has variants for these.
    let with_variants = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    let with_libraries = !options.r#static && cfg!(target_os = "linux") && with_variants;
    let target = process::target_folder()?;
    let folders = Folders::of(notices::registry()?, target.clone())?;
    let flags = BuildFlags::of(&machine, &folders)?;
    // Of its own: other builds in these profiles are without the flags.
    let built = target.join("shipped").join(&options.profile);
    let mut features = FEATURES.to_owned();
    if with_libraries {
        features.push_str(",dynamic-backends");
        remove_broken_links(&built)?;
    }
    if let Some(more) = &options.features {
        features.push(',');
        features.push_str(more);
    }
    // First: what is missing there is missing after the build too, which takes long.
    let licences = write_licences(&built, &features)?;
    let archive = match with_libraries {
        true => Some(ArchiveFolder::create(
            &target.join("archives"),
            &name(options),
        )?),
        false => None,
    };
    let build = || {
        let mut build = build(&options.profile, &features, with_libraries);
        build.arg("--target-dir").arg(target.join("shipped"));
        flags.apply(&mut build);
        build
    };
    let (status, output) = process::run_and_keep(&mut build())?;
    if !status.success() {
        bail!("{}", advice::after_failed_build(&output));
    }
    let binary = built.join("sapwood");
    let Some(archive) = archive else {
        folders.ensure_not_in(&binary)?;
        let (binary, licences) = (binary.display(), licences.join(", "));
        process::print_line(&format!(
            "built {binary}; with it go these files beside it: {licences}"
        ));
        return Ok(());
    };
    // Nothing is left to build: this only says where things are.
    let messages = process::output(build().args(["--quiet", "--message-format", "json"]))?;
    archive.add_program(&binary)?;
    archive.add_libraries(&llama_build(&messages)?)?;
    for licence in licences {
        archive.add(&built.join(licence), licence)?;
    }
    for file in archive.files()? {
        folders.ensure_not_in(&file)?;
    }
    process::print_line(&format!("it runs here: {}", try_out(archive.path())?));
    let archive = archive.pack(commit_time())?;
    let bytes = std::fs::metadata(&archive)?.len();
    let archive = archive.display();
    process::print_line(&format!("wrote {archive}, {} MiB", bytes >> 20));
    Ok(())
}

/// Puts into a folder what must go with the binary, and returns the names.
///
/// # Errors
/// One is not there.
fn write_licences(folder: &Path, features: &str) -> Result<[&'static str; 4]> {
    std::fs::create_dir_all(folder)?;
    let notices = folder.join(NOTICES);
    std::fs::write(&notices, notices::of_program(features)?)
        .with_context(|| format!("cannot write {}", notices.display()))?;
    let [apache, mit, rust] = LICENCES;
    for (from, name) in [
        (root().join(apache), apache),
        (root().join(mit), mit),
        (rust_notices()?, rust),
    ] {
        std::fs::copy(&from, folder.join(name))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    Ok([apache, mit, rust, NOTICES])
}

/// Whether what is shipped would have the licences of all that is linked.
///
/// # Errors
/// A package has no text of its licence.
pub(crate) fn check_notices() -> Result<()> {
    notices::of_program(FEATURES).map(drop)
}

/// The name of the archive, and of the folder in it: of its own for each profile and set of features, which would replace one
/// another.
fn name(options: &Options) -> String {
    let (arch, system) = (std::env::consts::ARCH, std::env::consts::OS);
    // All crates have the version of the workspace but this one.
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap_or_default();
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("version = "));
    let version = version.unwrap_or("unknown").trim_matches('"');
    let mut name = format!("sapwood-{version}-{arch}-{system}");
    if options.profile != PROFILE {
        name.push('-');
        name.push_str(&options.profile);
    }
    let separators = |letter: char| !letter.is_ascii_alphanumeric();
    let more = options.features.as_deref().unwrap_or_default();
    for feature in more.split(separators).filter(|part| !part.is_empty()) {
        name.push('-');
        name.push_str(feature);
    }
    name
}

fn build(profile: &str, features: &str, with_libraries: bool) -> Command {
    let arguments = ["build", "--profile", profile, "--package", "sapwood"];
    let mut command = process::cargo(&arguments);
    command.args(["--features", features]);
    if with_libraries {
        // llama.cpp's libraries find each other wherever they are, and carry no names of local symbols.
        command.env("CMAKE_INSTALL_RPATH", "$ORIGIN");
        command.env("CMAKE_SHARED_LINKER_FLAGS", "-s");
        command.env("CMAKE_MODULE_LINKER_FLAGS", "-s");
    }
    command
}

/// Removes the links that the build script of llama.cpp's crate puts beside the binary. They lead nowhere, and a second run of the
/// script takes them for missing, and fails because they are there.
fn remove_broken_links(built: &Path) -> Result<()> {
    for folder in ["", "deps", "examples"] {
        for name in ["libggml-base.so", "libggml.so", "libllama.so"] {
            let link = built.join(folder).join(name);
            if link.is_symlink() && !link.exists() {
                std::fs::remove_file(&link)
                    .with_context(|| format!("cannot remove {}", link.display()))?;
            }
        }
    }
    Ok(())
}

/// Finds the `OUT_DIR` of llama.cpp's crate in cargo's messages, each a line of JSON.
///
/// # Errors
/// There is none.
pub(crate) fn llama_build(messages: &str) -> Result<PathBuf> {
    let mut out = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let id = message["package_id"].as_str()?;
        let out = message["out_dir"].as_str()?;
        id.contains("llama-cpp-sys-2").then(|| PathBuf::from(out))
    });
    out.next_back()
        .context("cargo does not say where llama.cpp was built")
}

/// The notices of Rust's standard library, which rustup installs with the compiler.
fn rust_notices() -> Result<PathBuf> {
    let sysroot = process::output(&mut process::program("rustc", &["--print", "sysroot"]))?;
    Ok(Path::new(sysroot.trim()).join("share/doc/rust/COPYRIGHT-library.html"))
}

/// Has the program say which kernels it chooses on this machine.
///
/// # Errors
/// It does not start as it was packed, or has no kernels.
fn try_out(folder: &Path) -> Result<String> {
    let mut doctor = Command::new(folder.join(PROGRAM));
    // No libraries of the build, and no configuration of who builds.
    doctor.env_clear().env("HOME", folder).current_dir(folder);
    let ended = doctor.args(["doctor", "--json"]).output();
    let ended = ended.context("what was packed does not start")?;
    let found = cpu(&String::from_utf8_lossy(&ended.stdout));
    found.with_context(|| {
        let error = String::from_utf8_lossy(&ended.stderr);
        format!("what was packed does not start: {}", error.trim())
    })?
}

/// What `doctor --json` says of kernels, an error if there are none, or a library of kernels is not used; `None` if it says nothing.
/// A back-end for GPUs may be unused: the machine that builds it needs no driver.
fn cpu(findings: &str) -> Option<Result<String>> {
    let findings: serde_json::Value = serde_json::from_str(findings).ok()?;
    let findings = findings.as_array()?;
    let cpu = findings.iter().find(|one| one["check"] == "cpu")?;
    let found = cpu["found"].as_str()?.to_owned();
    let mut unused = found.split("; not used: ").skip(1);
    let for_gpus = unused.all(|library| !library.starts_with("cpu"));
    Some(match cpu["verdict"].as_str()? {
        "ok" => Ok(found),
        "warn" if found.contains("; kernels: ") && for_gpus => Ok(found),
        _ => Err(anyhow::anyhow!(
            "its kernels cannot be used on this machine: {found}"
        )),
    })
}

/// The time of the commit, in seconds, which the files of the archive have: equal files give equal archives.
fn commit_time() -> u64 {
    let time = process::output(&mut process::program("git", &["log", "-1", "--format=%ct"]));
    let time = time.ok().and_then(|time| time.trim().parse().ok());
    time.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_of_llama_is_found_in_what_cargo_says() {
        let messages = concat!(
            r#"{"reason":"build-script-executed","package_id":"registry+https://index#cc@1.0.0","out_dir":"/t/cc"}"#,
            "\nnot a message\n",
            r#"{"reason":"build-script-executed","package_id":"registry+https://index#llama-cpp-sys-2@0.1.161","out_dir":"/t/out"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","package_id":"registry+https://index#llama-cpp-sys-2@0.1.161","manifest_path":"/r/llama/Cargo.toml"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        assert_eq!(llama_build(messages).unwrap(), Path::new("/t/out"));
        assert!(llama_build("{}").is_err());
    }

    #[test]
    fn a_program_without_kernels_is_not_shipped() {
        let findings = |verdict| {
            format!(
                r#"[{{"check":"configuration"}},{{"check":"cpu","verdict":"{verdict}","found":"x86_64; kernels: zen4 of /x"}}]"#
            )
        };
        assert_eq!(
            cpu(&findings("ok")).unwrap().unwrap(),
            "x86_64; kernels: zen4 of /x"
        );
        let error = cpu(&findings("fail")).unwrap().unwrap_err();
        assert!(error.to_string().contains("cannot be used"), "{error}");
        for (unused, is_shipped) in [
            ("cuda: libcuda.so.1 is missing", true),
            ("cuda: no driver; not used: vulkan: no driver", true),
            ("cpu-zen4: it is damaged", false),
            ("cuda: no driver; not used: cpu-zen4: it is damaged", false),
        ] {
            let findings = findings("warn").replace("/x", &format!("/x; not used: {unused}"));
            let found = cpu(&findings).unwrap();
            assert_eq!(found.is_ok(), is_shipped, "{unused}");
        }
        assert!(cpu("").is_none() && cpu("[]").is_none());
    }

    #[test]
    fn links_that_lead_nowhere_are_removed_and_others_stay() {
        let built = tempfile::tempdir().unwrap();
        let (deps, at) = (built.path().join("deps"), |name| built.path().join(name));
        std::fs::create_dir(&deps).unwrap();
        std::fs::write(at("libggml.so.0"), "").unwrap();
        for (to, link) in [
            ("libllama.so.0", at("libllama.so")),
            ("libllama.so.0", deps.join("libllama.so")),
            ("libggml.so.0", at("libggml.so")),
        ] {
            std::os::unix::fs::symlink(to, link).unwrap();
        }
        remove_broken_links(built.path()).unwrap();
        assert!(!at("libllama.so").is_symlink() && !deps.join("libllama.so").is_symlink());
        assert!(at("libggml.so").exists());
    }

    #[test]
    fn the_archive_is_named_by_version_machine_and_how_it_was_built() {
        let name_with = |profile: &str, features: Option<&str>| {
            name(&Options {
                r#static: false,
                profile: profile.to_owned(),
                features: features.map(str::to_owned),
            })
        };
        let name = name_with(PROFILE, None);
        assert!(name.starts_with("sapwood-0."), "{name}");
        assert!(name.ends_with("-linux") && name.contains(std::env::consts::ARCH));
        assert_eq!(name_with(PROFILE, Some("")), name);
        let other = name_with("release", Some("vulkan,sapwood/tower"));
        assert_eq!(other, format!("{name}-release-vulkan-sapwood-tower"));
    }
}
