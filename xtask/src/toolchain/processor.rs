//! The instructions for which llama.cpp is built: those of this machine's processor.
//!
//! By default its kernels need AVX2, which an older processor does not have, and use nothing newer. AMX is left out: virtual
//! machines report it and then trap its instructions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::Machine;
#[cfg(target_arch = "x86_64")]
use super::{CPP_PROGRAM, compiles_with};
use crate::process;

/// A switch of llama.cpp's build, and whether it is on.
pub(crate) type Switch = (&'static str, bool);

/// The package whose build script runs cmake.
const PACKAGE: &str = "llama-cpp-sys-2";

/// Returns the switches for this machine; none where the build script sets its own.
#[cfg(target_arch = "x86_64")]
pub(crate) fn switches(machine: &Machine) -> Vec<Switch> {
    use std::arch::is_x86_feature_detected as has;
    // What `GGML_AVX512` compiles with.
    let avx512 = has!("avx512f")
        && has!("avx512cd")
        && has!("avx512vl")
        && has!("avx512dq")
        && has!("avx512bw");
    let all = [
        ("GGML_SSE42", "-msse4.2", has!("sse4.2")),
        ("GGML_AVX", "-mavx", has!("avx")),
        ("GGML_F16C", "-mf16c", has!("f16c")),
        ("GGML_FMA", "-mfma", has!("fma")),
        ("GGML_BMI2", "-mbmi2", has!("bmi2")),
        ("GGML_AVX2", "-mavx2", has!("avx2")),
        ("GGML_AVX_VNNI", "-mavxvnni", has!("avxvnni")),
        ("GGML_AVX512", "-mavx512bw", avx512),
        (
            "GGML_AVX512_VBMI",
            "-mavx512vbmi",
            avx512 && has!("avx512vbmi"),
        ),
        (
            "GGML_AVX512_VNNI",
            "-mavx512vnni",
            avx512 && has!("avx512vnni"),
        ),
        (
            "GGML_AVX512_BF16",
            "-mavx512bf16",
            avx512 && has!("avx512bf16"),
        ),
    ];
    chosen(&all, |flag| compiles_with(machine, CPP_PROGRAM, &[flag]))
}

/// Returns the switches for this machine; none where the build script sets its own.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn switches(_: &Machine) -> Vec<Switch> {
    Vec::new()
}

/// The switches of these instructions, each with its flag and whether the processor has it. An old compiler lacks the flags of newer
/// processors; one that lacks even the oldest cannot be asked, and the build keeps its own defaults.
#[cfg(target_arch = "x86_64")]
fn chosen(
    all: &[(&'static str, &str, bool)],
    compiler_takes: impl Fn(&str) -> bool,
) -> Vec<Switch> {
    if !compiler_takes("-msse4.2") {
        return Vec::new();
    }
    let switch =
        |&(name, flag, there): &(&'static str, &str, bool)| (name, there && compiler_takes(flag));
    all.iter().map(switch).collect()
}

/// Has `build`, a cargo command with this profile, compile llama.cpp with these switches.
///
/// # Errors
/// If what was built with others cannot be removed.
pub(crate) fn apply(build: &mut Command, profile: &str, switches: &[Switch]) -> Result<()> {
    build.envs(switches.iter().map(|&(name, on)| (name, value(on))));
    let folder = process::target_folder()?.join(profile).join("build");
    // cmake is not run again over what it has configured, and cargo does not know of variables that were not set before.
    if caches(&folder).iter().any(|cache| differs(cache, switches)) {
        process::print_line("llama.cpp was built for another processor: building it again");
        let arguments = [
            "clean",
            "--quiet",
            "--package",
            PACKAGE,
            "--profile",
            profile,
        ];
        process::run(&mut process::cargo(&arguments)).context("cannot remove the old build")?;
    }
    Ok(())
}

fn value(on: bool) -> &'static str {
    if on { "ON" } else { "OFF" }
}

/// The variables of each build of llama.cpp under a folder of cargo's, as cmake keeps them. A build with kernels for every
/// processor (`cargo xtask dist`) has none of these switches, and a folder of its own.
fn caches(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |path: PathBuf| fs::read_to_string(path.join("out/build/CMakeCache.txt")).ok();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PACKAGE))
        .filter_map(|entry| of(entry.path()))
        .filter(|cache| !cache.contains("GGML_CPU_ALL_VARIANTS:BOOL=ON"))
        .collect()
}

/// Whether one of the switches has another value there, or none.
fn differs(cache: &str, switches: &[Switch]) -> bool {
    switches.iter().any(|&(name, on)| {
        let mut lines = cache.lines().filter_map(|line| line.split_once(':'));
        let set = lines.find(|&(found, _)| found == name);
        let set = set.and_then(|(_, rest)| rest.split_once('='));
        set.is_none_or(|(_, found)| (found == "ON") != on)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn what_processor_and_compiler_have_is_on_and_an_unknown_compiler_decides_nothing() {
        let all = [
            ("OLD", "-msse4.2", true),
            ("NEW", "-mnew", true),
            ("NEWER", "-mnewer", true),
            ("MISSING", "-mold", false),
        ];
        let takes = |flag: &str| flag != "-mnewer";
        let expected = [
            ("OLD", true),
            ("NEW", true),
            ("NEWER", false),
            ("MISSING", false),
        ];
        assert_eq!(chosen(&all, takes), expected);
        assert_eq!(chosen(&all, |_| false), []);
    }

    #[test]
    fn a_build_with_other_switches_is_told_by_what_cmake_has_kept() {
        let cache = "# a comment\nGGML_AVX2:BOOL=ON\nGGML_AVX512:UNINITIALIZED=OFF\n";
        for (switches, expected) in [
            (vec![("GGML_AVX2", true)], false),
            (vec![("GGML_AVX2", true), ("GGML_AVX512", false)], false),
            (vec![("GGML_AVX2", false)], true),
            (vec![("GGML_AVX512", true)], true),
            (vec![("GGML_AVX_VNNI", false)], true),
            (vec![], false),
        ] {
            assert_eq!(differs(cache, &switches), expected, "{switches:?}");
        }
    }

    #[test]
    fn builds_are_found_where_cargo_puts_them() {
        let folder = std::env::temp_dir().join(format!("sapwood-caches-{}", std::process::id()));
        let out = folder.join("llama-cpp-sys-2-0123/out/build");
        fs::create_dir_all(&out).unwrap();
        fs::create_dir_all(folder.join("llama-cpp-sys-2-4567")).unwrap();
        fs::write(out.join("CMakeCache.txt"), "GGML_AVX:BOOL=ON\n").unwrap();
        let variants = folder.join("llama-cpp-sys-2-89ab/out/build");
        fs::create_dir_all(&variants).unwrap();
        let cache = "GGML_CPU_ALL_VARIANTS:BOOL=ON\n";
        fs::write(variants.join("CMakeCache.txt"), cache).unwrap();
        assert_eq!(caches(&folder), ["GGML_AVX:BOOL=ON\n"]);
        fs::remove_dir_all(&folder).unwrap();
        assert!(caches(&folder).is_empty());
    }
}
