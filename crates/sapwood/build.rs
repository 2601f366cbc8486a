//! Says in the binary where its libraries are, if llama.cpp is one of them.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Where the engine looks for kernels, and nowhere else.
    #[cfg(feature = "dynamic-backends")]
    println!("cargo::rustc-link-arg-bins=-Wl,-rpath,$ORIGIN/lib/sapwood:$ORIGIN/../lib/sapwood");
}
