//! What to do after a build that failed: the last lines that are printed.
//!
//! The whole output of a build script is printed above them, and the relevant line is somewhere in it.

/// A text in the output of a failed build, and the advice for it.
const ADVICE: &[(&str, &str)] = &[
    ("Unable to find libclang", LIBCLANG),
    ("couldn't find any valid shared libraries", LIBCLANG),
    ("'stddef.h' file not found", LIBCLANG),
    ("'stdbool.h' file not found", LIBCLANG),
    (
        "is `cmake` not installed?",
        "install cmake (on Debian: `apt-get install -y cmake`)",
    ),
    (
        "unable to find a build program corresponding to",
        "install make (on Debian: `apt-get install -y make`)",
    ),
    ("CMAKE_CXX_COMPILER", CPP),
    ("cannot find -lstdc++", CPP),
    ("unable to find library -lstdc++", CPP),
    ("fatal error: string: No such file or directory", CPP),
    (
        "linker `cc` not found",
        "install a C compiler (on Debian: `apt-get install -y gcc libc6-dev`)",
    ),
    (
        "No space left on device",
        "make room on the disk that holds this folder: a build takes about 4 GiB in `target`",
    ),
    ("signal: 9", MEMORY),
    ("Killed signal terminated program", MEMORY),
    ("cannot allocate memory", MEMORY),
    ("failed to download", NETWORK),
    ("Could not resolve host", NETWORK),
    ("Couldn't resolve host", NETWORK),
    ("download of config.json failed", NETWORK),
    (
        "is not supported by the following package",
        "use the compiler that rust-toolchain.toml names: `rustup toolchain install`",
    ),
    (
        "could not compile `sapwood",
        "our own code does not compile: the first line that starts with `error` says where; an untouched checkout compiles, \
         so look at `git status`",
    ),
];

const LIBCLANG: &str = "install libclang with its headers (on Debian: `apt-get install -y libclang-dev`); if LIBCLANG_PATH \
                        is set, unset it";
const CPP: &str = "install a C++ compiler with its library (on Debian: `apt-get install -y g++`)";
const MEMORY: &str =
    "the compiler ran out of memory: build with one job, `CARGO_BUILD_JOBS=1 cargo xtask serve`";
const NETWORK: &str =
    "crates could not be downloaded: see that this machine reaches crates.io, or set HTTPS_PROXY";

/// The failed step and the advice, in two short lines.
pub(crate) fn after_failed_build(output: &str) -> String {
    let plain = without_colours(output);
    let failed = plain
        .lines()
        .map(str::trim)
        .find(|line| line.starts_with("error"))
        .unwrap_or("error: the build ended without saying why");
    let what = failed.split_once(": ").map_or(failed, |(_, what)| what);
    let known = ADVICE.iter().find(|(sign, _)| plain.contains(sign));
    let advice = known.map_or(
        "the lines after the first `error` above say why",
        |(_, advice)| advice,
    );
    format!("the build failed: {what}\nwhat to do: {advice}, then run this again")
}

fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        plain.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::after_failed_build;

    /// As cargo prints it: the cause is in a build script's output, far from the line with `error`.
    #[test]
    fn the_last_lines_name_the_remedy() {
        let wall = "cargo:rerun-if-changed=x\n".repeat(500);
        let script = "\u{1b}[1m\u{1b}[91merror\u{1b}[0m: failed to run custom build command for `llama-cpp-sys-2 v0.1.161`";
        let cases = [
            (
                "thread 'main' panicked at bindgen: Unable to find libclang: \"couldn't find any\"",
                "apt-get install -y libclang-dev",
            ),
            (
                "/usr/include/stdio.h:33:10: fatal error: 'stddef.h' file not found",
                "apt-get install -y libclang-dev",
            ),
            (
                "failed to execute command: No such file (os error 2)\nis `cmake` not installed?",
                "apt-get install -y cmake",
            ),
            (
                "CMake Error: CMake was unable to find a build program corresponding to \"Unix Makefiles\".",
                "apt-get install -y make",
            ),
            (
                "  No CMAKE_CXX_COMPILER could be found.",
                "apt-get install -y g++",
            ),
            (
                "c++: fatal error: Killed signal terminated program cc1plus",
                "CARGO_BUILD_JOBS=1",
            ),
            ("write: No space left on device (os error 28)", "4 GiB"),
            ("something new", "first `error` above"),
        ];
        for (cause, remedy) in cases {
            let reported = after_failed_build(&format!(
                "{script}\n--- stdout\n{wall}--- stderr\n{cause}\n"
            ));
            let lines: Vec<_> = reported.lines().collect();
            assert_eq!(lines.len(), 2, "{reported}");
            assert!(
                lines[0].ends_with("`llama-cpp-sys-2 v0.1.161`"),
                "{reported}"
            );
            assert!(lines[1].contains(remedy), "{cause}: {reported}");
        }
        assert!(after_failed_build("").contains("without saying why"));
    }
}
