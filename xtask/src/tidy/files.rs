//! Checks on single files: size, name, opening comment, words, `unsafe`.

use super::{Finding, Tree};

/// Lines of code at which a file fails. From 600 lines on it should be split.
const CODE_LINES_MAX: usize = 1_000;
/// Bytes at which a file fails, except those in [`LARGE`].
const FILE_BYTES_MAX: u64 = 500_000;
/// Files that may be larger: the demo model (D-18).
const LARGE: &[&str] = &["crates/demo/sapwood-demo.gguf"];
/// The only files with `unsafe` code; `ARCHITECTURE.md` lists them too.
const UNSAFE: &[&str] = &[
    "crates/control/src/host/artefact.rs",
    "crates/control/src/host/controller/pages/huge.rs",
    "crates/control/src/host/process/system.rs",
    "crates/control/src/wire/system.rs",
    "crates/engine/src/embedded/guard.rs",
    "crates/engine/src/embedded/llama/backends.rs",
    "crates/engine/src/embedded/llama/compute_pool.rs",
    "crates/engine/src/embedded/llama/context.rs",
    "crates/engine/src/embedded/llama/context/state.rs",
    "crates/engine/src/embedded/llama/cpu_hooks.rs",
    "crates/engine/src/embedded/llama/cpu_hooks/tests.rs",
    "crates/engine/src/embedded/llama/cpu_hooks/tests/attention.rs",
    "crates/engine/src/embedded/llama/cpu_hooks/tests/products.rs",
    "crates/engine/src/embedded/llama/mod.rs",
    "crates/engine/src/embedded/llama/model.rs",
    "crates/engine/src/embedded/llama/params.rs",
    "crates/engine/src/embedded/llama/untouched.rs",
    "crates/guest/src/allocator.rs",
    "crates/guest/src/wasm/host.rs",
    "crates/guest/src/wasm/mod.rs",
    "crates/sapwood/src/allocator.rs",
];
const FORBIDDEN_NAMES: &[&str] = &[
    "util", "utils", "common", "misc", "helpers", "helper", "types", "manager",
];

/// Checks that no file is too large to read, or too large for a repository.
pub(super) fn sizes(tree: &Tree) -> Vec<Finding> {
    let large = tree
        .files()
        .filter(|file| file.bytes > FILE_BYTES_MAX && !LARGE.contains(&file.path.as_str()))
        .filter(|file| !file.path.ends_with("Cargo.lock"))
        .map(|file| {
            Finding::new(
                &file.path,
                format!("has {} bytes; at most {FILE_BYTES_MAX}", file.bytes),
            )
        });
    let long = tree.rust().filter_map(|(path, text)| {
        let lines = code_lines(text);
        (lines > CODE_LINES_MAX).then(|| {
            Finding::new(
                path,
                format!("has {lines} lines of code; split it by concept"),
            )
        })
    });
    large.chain(long).collect()
}

/// Lines that are neither blank, comment, nor part of a test module at the end of the file.
fn code_lines(text: &str) -> usize {
    text.lines()
        .take_while(|line| !line.starts_with("#[cfg(test)]"))
        .map(str::trim_start)
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count()
}

/// Checks that no file or folder has a name without meaning.
pub(super) fn names(tree: &Tree) -> Vec<Finding> {
    let nameless = |path: &str| {
        path.split('/').any(|part| {
            FORBIDDEN_NAMES.contains(&part.rsplit_once('.').map_or(part, |(stem, _)| stem))
        })
    };
    tree.files()
        .filter(|file| nameless(&file.path))
        .map(|file| Finding::new(&file.path, "is named after nothing; name it by its noun"))
        .collect()
}

/// Checks that every module starts with a module comment. A `tests.rs` belongs to the module beside it, which has one.
pub(super) fn opening_comments(tree: &Tree) -> Vec<Finding> {
    tree.rust()
        .filter(|(path, _)| !path.ends_with("build.rs") && !path.ends_with("/tests.rs"))
        .filter(|(_, text)| {
            let first = text.lines().find(|line| {
                let line = line.trim();
                !line.is_empty() && !line.starts_with("#![")
            });
            !first.is_some_and(|line| line.starts_with("//!"))
        })
        .map(|(path, _)| {
            Finding::new(
                path,
                "must open with `//!`: what it owns, what it refuses to know",
            )
        })
        .collect()
}

/// Checks that only the listed files contain `unsafe`.
pub(super) fn unsafe_code(tree: &Tree) -> Vec<Finding> {
    let is_unsafe = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        [
            "unsafe {",
            "unsafe fn",
            "unsafe impl",
            "unsafe extern",
            "unsafe trait",
        ]
        .iter()
        .any(|form| code.contains(form))
    };
    tree.rust()
        .filter(|(path, _)| !UNSAFE.contains(path) && !path.starts_with("xtask/"))
        .filter_map(|(path, text)| {
            let line = text.lines().position(is_unsafe)?;
            Some(Finding::new(
                format!("{path}:{}", line + 1),
                "unsafe code stands in the listed files only",
            ))
        })
        .collect()
}

/// Checks that every ignored test has a reason.
pub(super) fn ignored_tests(tree: &Tree) -> Vec<Finding> {
    let bare = concat!("#[ign", "ore]");
    tree.rust()
        .filter_map(|(path, text)| {
            let line = text.lines().position(|line| line.trim() == bare)?;
            Some(Finding::new(
                format!("{path}:{}", line + 1),
                "an ignored test says why: #[ignore = \"…\"]",
            ))
        })
        .collect()
}

/// Checks that no test is retried: a flaky test is a failing test.
pub(super) fn tests_tried_twice(tree: &Tree) -> Vec<Finding> {
    let positions = [".config/nextest.toml", ".ci/run", ".cargo/config.toml"];
    positions
        .iter()
        .filter(|location| {
            tree.text(location)
                .is_some_and(|text| text.contains("retries"))
        })
        .map(|location| {
            Finding::new(
                *location,
                "no test is tried twice: mend what makes it flaky",
            )
        })
        .collect()
}

/// Checks that no path of a machine and no loose end is in the project.
pub(super) fn forbidden_words(tree: &Tree) -> Vec<Finding> {
    let words = [
        (concat!("/ro", "ot/"), "a path of a machine"),
        (concat!("/ho", "me/"), "a path of a machine"),
        (concat!("/wo", "rk/"), "a path of a machine"),
        (concat!("arti", "factory"), "the name of a registry host"),
        (
            concat!("TO", "DO"),
            "a loose end; finish it or write an issue",
        ),
        (
            concat!("FIX", "ME"),
            "a loose end; finish it or write an issue",
        ),
    ];
    let mut findings = Vec::new();
    for file in tree
        .files()
        .filter(|file| !file.path.ends_with("Cargo.lock"))
    {
        let Some(text) = &file.text else { continue };
        for (word, what) in words {
            if let Some(line) = text.lines().position(|line| line.contains(word)) {
                findings.push(Finding::new(
                    format!("{}:{}", file.path, line + 1),
                    format!("holds {what}"),
                ));
            }
        }
    }
    findings
}

/// Checks that no face imports another: a file under `server/src/faces/FACE/` names no other face's module.
pub(super) fn faces_apart(tree: &Tree) -> Vec<Finding> {
    const FACES: &[&str] = &[
        "evergreen",
        "lmtp",
        "generate",
        "openai",
        "controllers",
        "aici",
        "functions",
    ];
    let mut findings = Vec::new();
    for (path, text) in tree.rust() {
        let Some(rest) = path.strip_prefix("crates/server/src/faces/") else {
            continue;
        };
        let Some(face) = FACES
            .iter()
            .find(|face| rest.starts_with(&format!("{face}/")))
        else {
            continue;
        };
        for other in FACES.iter().filter(|other| *other != face) {
            if text.contains(&format!("crate::faces::{other}")) {
                findings.push(Finding::new(
                    path,
                    format!("a face must not import the face {other}"),
                ));
            }
        }
    }
    findings
}

/// Keys of the configuration, which `config show` prints.
const SHOWN_OPTIONS: &str = "crates/engine/src/llama_options.rs";

/// Checks that nothing in `kernel` or `engine` derives `Serialize`; wire formats belong to the faces (KE-103 has the
/// exceptions).
pub(super) fn serialisable_types(tree: &Tree) -> Vec<Finding> {
    tree.rust()
        .filter(|(path, _)| {
            path.starts_with("crates/kernel/src/") || path.starts_with("crates/engine/src/")
        })
        .filter(|(path, _)| *path != SHOWN_OPTIONS)
        .filter_map(|(path, text)| {
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let line = code.lines().position(|line| {
                line.trim_start().starts_with("#[derive(")
                    && line
                        .split(['(', ',', ' ', ')'])
                        .any(|word| word == "Serialize")
            })?;
            Some(Finding::new(
                format!("{path}:{}", line + 1),
                "wire forms are made at the faces, not here",
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::code_lines;

    #[test]
    fn comments_and_tests_are_not_counted_as_code() {
        assert_eq!(
            code_lines("//! a\n\nfn f() {\n    // why\n}\n#[cfg(test)]\nmod tests {}\n"),
            2
        );
    }
}
