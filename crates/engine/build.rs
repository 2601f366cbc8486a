//! Compiles what is C++ here, where llama.cpp is built in: the guard around calls into it, operations of ggml's that are
//! computed by our own code, and the memory of KV caches.

const SOURCES: [&str; 6] = [
    "attention_x86.cpp",
    "cpu_hooks.cpp",
    "guard.cpp",
    "matmul_x86.cpp",
    "throwing.cpp",
    "untouched_memory.cpp",
];

const HEADERS: [&str; 3] = ["attention_kernel.h", "cpu_hooks.h", "matmul_kernel.h"];

fn main() {
    for file in SOURCES.iter().chain(&HEADERS) {
        println!("cargo::rerun-if-changed=src/embedded/{file}");
    }
    #[cfg(feature = "embedded")]
    compile();
    #[cfg(feature = "dynamic-backends")]
    println!("cargo::rustc-env=SAPWOOD_LIBRARIES={}", libraries());
}

#[cfg(feature = "embedded")]
#[expect(
    clippy::disallowed_methods,
    reason = "cargo tells a build script of another in its environment"
)]
fn compile() {
    let installed = std::env::var_os("DEP_LLAMA_ROOT").expect("llama.cpp's build says where it is");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .flag_if_supported("/EHsc")
        // GCC 12 takes its own intrinsics for uses of what is not set.
        .flag_if_supported("-Wno-maybe-uninitialized")
        .flag_if_supported("-Wno-uninitialized")
        .include(std::path::Path::new(&installed).join("include"))
        // A debug build computes with a real model too.
        .opt_level(3)
        .files(SOURCES.map(|file| format!("src/embedded/{file}")));
    // There ggml's CPU backend is a library that is loaded at the start, and its functions are looked for in that.
    #[cfg(feature = "dynamic-backends")]
    build.define("SAPWOOD_DYNAMIC_BACKENDS", None);
    build.compile("sapwood_guard");
}

/// Returns name, bytes and CRC-32 of each library that llama.cpp's build has installed and a program may have beside it: those that
/// it is linked with, by the names that it asks for (`libllama.so.0`), and back-ends.
#[cfg(feature = "dynamic-backends")]
#[expect(
    clippy::disallowed_methods,
    reason = "cargo tells a build script of another in its environment"
)]
fn libraries() -> String {
    let backends = std::env::var_os("DEP_LLAMA_BACKENDS_DIR");
    let backends = std::path::PathBuf::from(backends.expect("llama.cpp's build says where it is"));
    let linked = ["lib", "lib64"].map(|folder| backends.with_file_name(folder));
    let mut libraries = Vec::new();
    for folder in linked.iter().chain([&backends]) {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.expect("the folder can be read").path();
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(name) = name.filter(|name| is_asked_for(name, folder == &backends)) else {
                continue;
            };
            println!("cargo::rerun-if-changed={}", path.display());
            let content = std::fs::read(&path).expect("a library can be read");
            let (bytes, crc) = (content.len(), crc32fast::hash(&content));
            libraries.push(format!("{name}:{bytes}:{crc:08x}"));
        }
    }
    libraries.sort();
    libraries.join(",")
}

#[cfg(feature = "dynamic-backends")]
fn is_asked_for(name: &str, is_backend: bool) -> bool {
    match name.split_once(".so") {
        Some((_, "")) => is_backend,
        // Not the version that the link leads to.
        Some((_, version)) => {
            !is_backend && version[1..].bytes().all(|digit| digit.is_ascii_digit())
        }
        None => false,
    }
}
