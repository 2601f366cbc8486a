//! Compiles the guard around calls into llama.cpp, where that is built in.

fn main() {
    println!("cargo::rerun-if-changed=src/embedded/guard.cpp");
    #[cfg(feature = "embedded")]
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .flag_if_supported("/EHsc")
        .file("src/embedded/guard.cpp")
        .compile("sapwood_guard");
}
