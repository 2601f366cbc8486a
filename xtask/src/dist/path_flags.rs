//! What is shipped names no folders of the machine that built it: [`Folders`], and [`BuildFlags`] that replace them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::root;
use crate::toolchain::Machine;

/// Flags of C compilers that choose a processor, as they begin.
const OF_A_PROCESSOR: [&str; 8] = [
    "-march", "-mcpu", "-mavx", "-mbmi", "-mf16c", "-mfma", "-mfpu", "-msse",
];

/// Those of rustc, after `-C`.
const OF_A_RUST_PROCESSOR: [&str; 2] = ["target-cpu", "target-feature"];

/// Characters of folders beside letters and digits: no others reach a compiler unchanged through the files of make, a shell and
/// nvcc, which separates at commas.
const PLAIN: &str = "/._-+@~:";

/// Folders of who builds, with the names that replace them.
pub(super) struct Folders(Vec<(PathBuf, &'static str)>);

impl Folders {
    /// # Errors
    /// The name of a folder has characters that cannot be in flags.
    pub(super) fn of(registry: PathBuf, target: PathBuf) -> Result<Self> {
        // The last that matches counts: the others may be below this project's root.
        let mut folders = Vec::new();
        for (folder, name) in [
            (root(), "sapwood"),
            (target, "target"),
            (registry, "registry"),
        ] {
            // cmake follows links.
            let real = folder.canonicalize().ok();
            folders.extend(real.filter(|real| *real != folder).map(|real| (real, name)));
            folders.push((folder, name));
        }
        for (folder, _) in &folders {
            let name = folder.to_str().unwrap_or_default();
            let plain = |letter: char| letter.is_alphanumeric() || PLAIN.contains(letter);
            ensure!(
                !name.is_empty() && name.chars().all(plain),
                "the name of {} has characters, such as spaces, that flags of compilers cannot have: use a checkout, and \
                 folders CARGO_HOME and CARGO_TARGET_DIR, of letters, digits and {PLAIN}",
                folder.display()
            );
        }
        Ok(Self(folders))
    }

    fn flags(&self, flag: &str) -> impl Iterator<Item = String> {
        let folders = self.0.iter();
        folders.map(move |(folder, name)| format!("{flag}={}={name}", folder.display()))
    }

    /// Looks into a file for the folders, also into those that have no lines.
    ///
    /// # Errors
    /// It has the name of one, or cannot be read.
    pub(super) fn ensure_not_in(&self, file: &Path) -> Result<()> {
        let content = fs::read(file);
        let content = content.with_context(|| format!("cannot read {}", file.display()))?;
        for (folder, _) in &self.0 {
            ensure!(
                !names(&content, folder),
                "{} would show others the folder {} of this machine; if it is of an earlier build, which cmake has kept, remove the \
                 folder `shipped` in cargo's target folder and run this again",
                file.display(),
                folder.display()
            );
        }
        Ok(())
    }
}

/// Whether a file has the name of a folder. A short one, such as `/src`, must not be the middle of another.
fn names(content: &[u8], folder: &Path) -> bool {
    let folder = folder.as_os_str().as_encoded_bytes();
    let is_short = folder.iter().filter(|&&byte| byte == b'/').count() < 2;
    let belongs = |byte: Option<&u8>| {
        byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || b"._-/".contains(byte))
    };
    let mut from = 0;
    while let Some(at) = content[from..].iter().position(|&byte| byte == b'/') {
        let start = from + at;
        from = start + 1;
        if !content[start..].starts_with(folder) {
            continue;
        }
        let before = start.checked_sub(1).and_then(|before| content.get(before));
        let after = content.get(start + folder.len());
        if !is_short || !(belongs(before) || (after != Some(&b'/') && belongs(after))) {
            return true;
        }
    }
    false
}

/// Flags of compilers, by the variable that they are read from: they replace folders in the names of source files, which panics of
/// Rust and assertions of llama.cpp show.
pub(super) struct BuildFlags(Vec<(&'static str, String)>);

impl BuildFlags {
    /// With the flags that the machine's variables have.
    ///
    /// # Errors
    /// One of those is for a certain processor.
    pub(super) fn of(machine: &Machine, folders: &Folders) -> Result<Self> {
        let given = |variable: &str| {
            let value = machine.variable(variable).unwrap_or_default();
            let value = value.into_string().ok();
            value.with_context(|| format!("{variable} is not UTF-8"))
        };
        let mut flags = Vec::new();
        for (variable, map) in [
            ("CFLAGS", "-ffile-prefix-map"),
            ("CXXFLAGS", "-ffile-prefix-map"),
            ("CUDAFLAGS", "-Xcompiler=-ffile-prefix-map"),
        ] {
            let value = given(variable)?;
            let mut words: Vec<_> = value.split_whitespace().map(str::to_owned).collect();
            check(variable, &words, |word| {
                OF_A_PROCESSOR.iter().any(|flag| word.starts_with(flag))
            })?;
            words.extend(folders.flags(map));
            if variable == "CXXFLAGS" {
                // Where llama.cpp's own search, which is never used, would look: it is among the definitions, which come first.
                words.push("-UGGML_BACKEND_DIR".to_owned());
            }
            flags.push((variable, words.join(" ")));
        }
        // Cargo takes the first of these that is there, and not the other.
        let encoded = given("CARGO_ENCODED_RUSTFLAGS")?;
        let plain = given("RUSTFLAGS")?;
        let mut words: Vec<_> = match encoded.is_empty() {
            true => plain.split_whitespace().map(str::to_owned).collect(),
            false => encoded.split('\u{1f}').map(str::to_owned).collect(),
        };
        check("RUSTFLAGS", &words, |word| {
            let word = word.replace('_', "-");
            OF_A_RUST_PROCESSOR.iter().any(|flag| word.contains(flag))
        })?;
        words.extend(folders.flags("--remap-path-prefix"));
        flags.push(("CARGO_ENCODED_RUSTFLAGS", words.join("\u{1f}")));
        Ok(Self(flags))
    }

    pub(super) fn apply(&self, command: &mut Command) {
        command.envs(self.0.iter().map(|(variable, value)| (variable, value)));
    }
}

fn check(variable: &str, words: &[String], is_refused: impl Fn(&str) -> bool) -> Result<()> {
    if let Some(word) = words.iter().find(|word| is_refused(word)) {
        bail!(
            "{variable} has `{word}`, and what is shipped must run on other processors too: unset it, or build for this machine \
             with `cargo xtask serve`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders() -> Folders {
        Folders::of("/r/index".into(), "/t/target".into()).unwrap()
    }

    fn flags(variables: &[(&'static str, &str)]) -> Result<BuildFlags> {
        let machine = tempfile::tempdir().unwrap();
        let variables: Vec<_> = variables
            .iter()
            .map(|&(name, value)| (name, value.into()))
            .collect();
        BuildFlags::of(&Machine::fake(machine.path(), &variables), &folders())
    }

    #[test]
    fn folders_are_replaced_beside_the_flags_that_are_there() {
        let root = root().display().to_string();
        let maps = |flag: &str| {
            [
                format!("{flag}={root}=sapwood"),
                format!("{flag}=/t/target=target"),
                format!("{flag}=/r/index=registry"),
            ]
        };
        let c = maps("-ffile-prefix-map").join(" ");
        let cuda = maps("-Xcompiler=-ffile-prefix-map").join(" ");
        let rust = maps("--remap-path-prefix").join("\u{1f}");
        let given = [("CFLAGS", "-g1"), ("RUSTFLAGS", "-Cdebuginfo=1 --cfg  one")];
        let encoded = [
            ("CARGO_ENCODED_RUSTFLAGS", "--cfg\u{1f}name=\"a b\""),
            ("RUSTFLAGS", "--cfg two"),
        ];
        for (given, before, rust_before) in [
            (&given, "-g1 ", "-Cdebuginfo=1\u{1f}--cfg\u{1f}one\u{1f}"),
            (&encoded, "", "--cfg\u{1f}name=\"a b\"\u{1f}"),
        ] {
            let mut command = Command::new("cargo");
            flags(given).unwrap().apply(&mut command);
            let set: Vec<_> = command.get_envs().collect();
            for (variable, expected) in [
                ("CFLAGS", format!("{before}{c}")),
                ("CXXFLAGS", format!("{c} -UGGML_BACKEND_DIR")),
                ("CUDAFLAGS", cuda.clone()),
                ("CARGO_ENCODED_RUSTFLAGS", format!("{rust_before}{rust}")),
            ] {
                let expected = (variable.as_ref(), Some(expected.as_ref()));
                assert!(set.contains(&expected), "{variable}: {set:?}");
            }
        }
    }

    #[test]
    fn flags_for_a_certain_processor_are_refused() {
        for (variable, value) in [
            ("CFLAGS", "-O2 -march=native"),
            ("CXXFLAGS", "-mcpu=neoverse-n1"),
            ("CXXFLAGS", "-mavx2"),
            ("RUSTFLAGS", "-Ctarget-cpu=native"),
            ("RUSTFLAGS", "-C target_feature=+avx2"),
            (
                "CARGO_ENCODED_RUSTFLAGS",
                "--codegen\u{1f}target-cpu=native",
            ),
        ] {
            let error = flags(&[(variable, value)]).err();
            let error = error.unwrap_or_else(|| panic!("{variable}={value}"));
            assert!(error.to_string().contains("other processors"), "{error}");
        }
        assert!(flags(&[("CFLAGS", "-mtune=native -m64 -g")]).is_ok());
    }

    #[test]
    fn a_folder_that_flags_cannot_name_is_refused() {
        for name in ["/my builds/target", "/a=b", "/a$b", "/it's", "/a,b"] {
            let error = Folders::of("/r/index".into(), name.into()).err().unwrap();
            let text = error.to_string();
            assert!(
                text.contains(name) && text.contains("CARGO_TARGET_DIR"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_file_that_names_a_folder_is_not_shipped() {
        for (content, folder, expected) in [
            (&b"\0/t/target/x.c\0"[..], "/t/target", true),
            (b"abc/t/target", "/t/target", true),
            (b"/t/targe", "/t/target", false),
            (b"//t/t/target", "/t/target", true),
            (b"library/core/src/panic.rs", "/src", false),
            (b"\0/src/main.rs", "/src", true),
            (b"\0/src\0", "/src", true),
            (b"\0/srcs/main.rs", "/src", false),
        ] {
            let found = names(content, Path::new(folder));
            assert_eq!(found, expected, "{}", content.escape_ascii());
        }
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("libggml.so.0");
        fs::write(&file, b"\x7fELF\0/t/target/out/backends\0").unwrap();
        let error = folders().ensure_not_in(&file).unwrap_err().to_string();
        assert!(
            error.contains("libggml.so.0") && error.contains("/t/target"),
            "{error}"
        );
        fs::write(&file, b"\x7fELF\0target/out/backends\0").unwrap();
        folders().ensure_not_in(&file).unwrap();
        // A folder that a link leads to is named as it is.
        let (real, link) = (scratch.path().join("real"), scratch.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let linked = Folders::of("/r/index".into(), link.clone()).unwrap();
        for folder in [real, link] {
            fs::write(&file, folder.as_os_str().as_encoded_bytes()).unwrap();
            assert!(linked.ensure_not_in(&file).is_err());
        }
    }
}
