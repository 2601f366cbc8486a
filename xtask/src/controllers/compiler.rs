//! Which Rust builds modules, and how it is installed: the workspace's own with the target from rustup, else Debian's.
//!
//! Debian has no standard library of this target for its newest compiler, so `core` and `alloc` are built from its source
//! package. Controllers need nothing else.

use std::path::Path;
use std::process::Command;

use crate::process;
use crate::toolchain::{self, Machine};
use crate::tools::{Tool, WASM, WASM_TARGET, answers, wasm_present};

/// A Rust that builds modules.
pub(super) enum Compiler {
    /// The one that builds the workspace.
    Own,
    /// Debian's packages.
    Debian,
}

const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// `rustc-web` is the newest compiler of a Debian release, packaged for its browsers.
const DEBIAN_PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "lld"];
/// The second number of the workspace's `rust-version`.
const MINOR_MIN: u32 = 95;

pub(crate) const RUST: Tool = Tool {
    name: "Rust for wasm32-unknown-unknown",
    by_hand: "rustup target add wasm32-unknown-unknown",
    present: || Compiler::find().is_some(),
    install: || {
        // A rustup without a network fails; packages may still come from a mirror.
        WASM.ensure()
            .or_else(|_| toolchain::install(&Machine::this(), &DEBIAN_PACKAGES))
    },
};

pub(crate) const C_COMPILER: Tool = Tool {
    name: "clang and lld for wasm32",
    by_hand: "apt-get install -y clang lld",
    present: || {
        let mut clang = process::program(
            "clang",
            &["--target=wasm32", "-x", "c", "-c", "-o", "/dev/null", "-"],
        );
        process::succeeds_with_input(&mut clang, "int f(void) { return 1; }\n")
            && answers("wasm-ld")
    },
    install: || toolchain::install(&Machine::this(), &["clang", "lld"]),
};

impl Compiler {
    /// The compiler that is there.
    pub(super) fn find() -> Option<Self> {
        if wasm_present() {
            return Some(Self::Own);
        }
        debian_present().then_some(Self::Debian)
    }

    /// A release build of the modules of a workspace.
    pub(super) fn build(&self, arguments: &[&str]) -> Command {
        let mut command = match self {
            Self::Own => process::cargo(&[]),
            Self::Debian => process::program(DEBIAN_CARGO, &[]),
        };
        command
            .args(["build", "--release", "--target", WASM_TARGET])
            .args(arguments);
        // Panic messages name source files; without their folders a module is the same wherever it was built.
        let remap = format!("--remap-path-prefix={}=sapwood", crate::root().display());
        command.env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS", remap);
        if let Self::Debian = self {
            command.args(["-Z", "build-std=core,alloc"]);
            command
                .env("RUSTC", DEBIAN_RUSTC)
                .env("RUSTC_BOOTSTRAP", "1");
            command.env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", "wasm-ld");
        }
        command
    }
}

/// Whether Debian's compiler is there, new enough, with its source and a linker.
fn debian_present() -> bool {
    let output = |argument: &[&str]| {
        process::output(&mut process::program(DEBIAN_RUSTC, argument)).unwrap_or_default()
    };
    let source =
        Path::new(output(&["--print", "sysroot"]).trim()).join("lib/rustlib/src/rust/library/core");
    minor_version(&output(&["--version"])).is_some_and(|minor| minor >= MINOR_MIN)
        && source.exists()
        && answers(DEBIAN_CARGO)
        && answers("wasm-ld")
}

/// The second number of `rustc 1.96.0 (…)`.
fn minor_version(version: &str) -> Option<u32> {
    version
        .strip_prefix("rustc 1.")?
        .split('.')
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::{MINOR_MIN, minor_version};

    #[test]
    fn versions_of_the_compiler_are_read() {
        assert_eq!(
            minor_version("rustc 1.96.0 (ac68faa20 2026-05-25)\n"),
            Some(96)
        );
        assert_eq!(minor_version(""), None);
    }

    #[test]
    fn the_oldest_compiler_is_that_of_the_workspace() {
        let manifest = include_str!("../../../Cargo.toml");
        assert!(manifest.contains(&format!("rust-version = \"1.{MINOR_MIN}\"")));
    }
}
