//! Says in the binary where its libraries are, if llama.cpp is one of them.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Where the engine looks for kernels, and before all other places: a `DT_RUNPATH` would come after LD_LIBRARY_PATH.
    #[cfg(feature = "dynamic-backends")]
    println!("cargo::rustc-link-arg-bins=-Wl,--disable-new-dtags");
    // One place, in the archive: the system's loader looks there for the C library too, and whoever owns a place beside the archive
    // would have their code run first.
    #[cfg(feature = "dynamic-backends")]
    println!("cargo::rustc-link-arg-bins=-Wl,-rpath,$ORIGIN/../lib/sapwood");
}
