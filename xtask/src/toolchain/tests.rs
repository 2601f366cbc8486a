use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use super::{Machine, ensure, gpu, libclang, missing, packages};
use crate::process;

/// A folder as the root of a fake machine, with these programs and libraries.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(self, path: &str, content: &[u8]) -> Self {
        let path = self.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
        self
    }

    fn library(self, path: &str) -> Self {
        self.file(path, b"\x7fELF\x02")
    }

    /// Written by another process: while this one holds a file open for writing, a concurrent test may fork, and then
    /// the file cannot be run ("text file busy").
    fn program(self, name: &str, script: &str) -> Self {
        let folder = self.path().join("bin");
        std::fs::create_dir_all(&folder).unwrap();
        let root = self.path().display().to_string();
        let script = format!("#!/bin/sh\n{}\n", script.replace("ROOT", &root));
        let mut write = Command::new("/bin/sh");
        write.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]);
        let written = process::succeeds_with_input(write.arg(folder.join(name)), &script);
        assert!(written, "{name}");
        self
    }

    fn machine(&self, variables: &[(&'static str, &str)]) -> Machine {
        let variables: Vec<(&'static str, OsString)> = variables
            .iter()
            .map(|(name, value)| (*name, self.path().join(value).into()))
            .collect();
        Machine::fake(self.path(), &variables)
    }
}

/// Everything but libclang.
fn with_compilers() -> Root {
    Root::new()
        .program("cmake", "")
        .program("make", "")
        .program("c++", "/bin/cat > /dev/null")
}

fn lacks(root: &Root) -> Vec<&'static str> {
    packages(&missing(&root.machine(&[])))
}

/// The library must be the one that `clang-sys` would load: its name, in the places that it searches.
#[test]
fn libclang_is_distinguished_from_similar_libraries() {
    let cases: &[(&str, bool)] = &[
        ("usr/lib/llvm-14/lib/libclang.so", true),
        ("usr/lib/llvm-14/lib/libclang.so.1", true),
        ("usr/lib/llvm-14/lib/libclang-14.so.14.0.6", true),
        ("usr/lib/x86_64-linux-gnu/libclang-14.so.1", true),
        ("usr/lib64/libclang.so.20.1", true),
        ("usr/local/lib/libclang.so", true),
        ("opt/homebrew/opt/llvm/lib/libclang.dylib", true),
        ("usr/lib/llvm-14/lib/libclang-cpp.so.14", false),
        ("usr/lib/x86_64-linux-gnu/libclang-cpp.so.14", false),
        ("usr/lib/llvm-14/lib/libclang-cpp.so", false),
        ("usr/lib/llvm-14/lib/libLLVM-14.so.1", false),
        ("usr/lib/llvm-14/lib/libclang.a", false),
        ("somewhere/else/libclang.so", false),
    ];
    for (path, found) in cases {
        let root = Root::new().library(path);
        assert_eq!(
            libclang::library(&root.machine(&[])).is_some(),
            *found,
            "{path}"
        );
    }
    let text = Root::new().file("usr/lib/libclang.so", b"INPUT(-lclang)");
    assert!(
        libclang::library(&text.machine(&[])).is_none(),
        "no library under the name"
    );
}

#[test]
fn libclang_is_found_by_the_variable_and_by_llvm_config() {
    let root = Root::new()
        .library("opt/llvm/lib/libclang.so.1")
        .library("usr/lib/libclang.so");
    let found = |variables: &[(&'static str, &str)]| {
        let library = libclang::library(&root.machine(variables))?;
        let inside = library.strip_prefix(root.path()).unwrap();
        Some(inside.display().to_string())
    };
    let other = Some("opt/llvm/lib/libclang.so.1".to_owned());
    assert_eq!(found(&[("LIBCLANG_PATH", "opt/llvm/lib")]), other);
    let file = "opt/llvm/lib/libclang.so.1";
    assert_eq!(found(&[("LIBCLANG_PATH", file)]), other);
    // It hides every other library, as in the build.
    assert_eq!(found(&[("LIBCLANG_PATH", "opt")]), None);
    assert_eq!(found(&[("LD_LIBRARY_PATH", "opt/llvm/lib")]), other);
    assert_eq!(found(&[]), Some("usr/lib/libclang.so".to_owned()));
    let root = Root::new()
        .library("opt/llvm/lib/libclang.so.1")
        .program("llvm-config", "echo ROOT/opt/llvm");
    assert!(libclang::library(&root.machine(&[])).is_some());
}

/// A fresh Debian 12 with LLVM's own packages: `libclang-cpp` is there, libclang is not.
#[test]
fn a_machine_with_llvm_alone_lacks_libclang() {
    let root = with_compilers()
        .library("usr/lib/llvm-14/lib/libclang-cpp.so.14")
        .library("usr/lib/llvm-14/lib/libLLVM-14.so")
        .program("llvm-config", "echo ROOT/usr/lib/llvm-14");
    assert_eq!(lacks(&root), ["libclang-dev"]);
}

#[test]
fn every_missing_requirement_is_named() {
    let complete = || {
        with_compilers()
            .library("usr/lib/llvm-14/lib/libclang.so.1")
            .file("usr/lib/llvm-14/lib/clang/14.0.6/include/stddef.h", b"")
    };
    assert!(lacks(&complete()).is_empty());
    assert_eq!(
        lacks(&Root::new()),
        ["cmake", "make", "g++", "libclang-dev"]
    );
    let without_headers = with_compilers().library("usr/lib/llvm-14/lib/libclang.so.1");
    assert_eq!(lacks(&without_headers), ["libclang-dev"]);
    let with_clang = without_headers.program("clang", "");
    assert!(lacks(&with_clang).is_empty(), "clang brings headers");
    // A compiler that exists and cannot compile: gcc's front end without the C++ library.
    let broken = complete().program("c++", "[ \"$1\" = --version ]");
    assert_eq!(lacks(&broken), ["g++"]);
    let failing = complete().program("cmake", "exit 127");
    assert_eq!(lacks(&failing), ["cmake"]);
    // A user who names a generator need not have make.
    std::fs::remove_file(failing.path().join("bin/make")).unwrap();
    let lacking = packages(&missing(&failing.machine(&[("CMAKE_GENERATOR", "Ninja")])));
    assert_eq!(lacking, ["cmake"]);
}

/// Missing packages are installed, and no others are requested.
#[test]
fn missing_packages_are_installed() {
    let root = with_compilers().program("id", "echo 0").program(
        "apt-get",
        "echo \"$@\" >> ROOT/asked\n[ \"$1\" = install ] || exit 0\nPATH=/bin:/usr/bin\n\
             mkdir -p ROOT/usr/lib/llvm-14/lib/clang/14/include\n\
             printf '\\177ELF\\002' > ROOT/usr/lib/llvm-14/lib/libclang.so.1\n\
             touch ROOT/usr/lib/llvm-14/lib/clang/14/include/stddef.h",
    );
    ensure(&root.machine(&[])).unwrap();
    let asked = std::fs::read_to_string(root.path().join("asked")).unwrap();
    let last = asked.lines().last().unwrap();
    assert_eq!(
        last,
        "install -y -q --no-install-recommends --no-remove libclang-dev"
    );
    std::fs::remove_file(root.path().join("asked")).unwrap();
    ensure(&root.machine(&[])).unwrap();
    assert!(!root.path().join("asked").exists(), "it is asked once");
}

/// The message ends with the remedy.
#[test]
fn packages_that_cannot_be_installed_are_named_in_the_last_line() {
    let received = |root: &Root, variables: &[(&'static str, &str)]| {
        ensure(&root.machine(variables)).unwrap_err().to_string()
    };
    let without_apt = received(&Root::new(), &[]);
    assert!(without_apt.contains("`apt-get install -y cmake make g++ libclang-dev`"));
    let debian = || Root::new().program("apt-get", "");
    let user = debian().program("id", "echo 1000");
    let by_hand = "run `sudo apt-get install -y cmake make g++ libclang-dev`, then run this again";
    assert_eq!(received(&user, &[]), by_hand);
    let failing = Root::new()
        .program("apt-get", "[ \"$1\" = --version ]")
        .program("id", "echo 0");
    assert!(received(&failing, &[]).ends_with("by hand to see why, then run this again"));
    let useless = debian().program("id", "echo 0");
    assert!(received(&useless, &[]).starts_with("still missing after"));
    let hidden = received(&useless, &[("LIBCLANG_PATH", "nowhere")]);
    assert!(hidden.ends_with("unset it"), "{hidden}");
}

#[test]
fn missing_tools_of_a_gpu_are_named_with_what_to_install() {
    let refused = |root: &Root, features: &str| {
        let failed = gpu::ensure(&root.machine(&[]), features).unwrap_err();
        failed.to_string()
    };
    let bare = with_compilers();
    let why = refused(&bare, "stores,cuda");
    assert!(
        why.contains("nvcc") && why.contains("cuda-downloads"),
        "{why}"
    );
    let beside = with_compilers().file("usr/local/cuda/bin/nvcc", b"");
    let why = refused(&beside, "cuda");
    assert!(
        why.contains("export PATH=/usr/local/cuda/bin:$PATH"),
        "{why}"
    );
    let cuda = with_compilers().program("nvcc", "");
    assert!(gpu::ensure(&cuda.machine(&[]), "cuda").is_ok());
    let bare_cpp = Root::new().program("c++", "/bin/cat > /dev/null; exit 1");
    let why = refused(&bare_cpp, "vulkan");
    for part in ["glslc", "loader of Vulkan", "SPIR-V", "libvulkan-dev"] {
        assert!(why.contains(part), "{part} is missing in {why}");
    }
    let vulkan = with_compilers()
        .program("glslc", "")
        .file("usr/share/cmake/SPIRV-Headers/x", b"");
    assert!(gpu::ensure(&vulkan.machine(&[]), "vulkan").is_ok());
    assert!(gpu::ensure(&bare_cpp.machine(&[("VULKAN_SDK", "sdk")]), "vulkan").is_ok());
    assert!(gpu::ensure(&bare_cpp.machine(&[]), "stores").is_ok());
    if cfg!(not(target_os = "macos")) {
        assert!(refused(&bare, "metal").contains("macOS"));
    }
}
