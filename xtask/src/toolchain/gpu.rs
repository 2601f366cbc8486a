//! What the GPU back-ends of llama.cpp need in addition, by cargo feature. Nothing of it is installed here: a toolkit has
//! gigabytes, and must match the driver.

use anyhow::{Result, bail};

use super::compiles_with;
use super::machine::Machine;

/// The tests' program for the headers of Vulkan, which are C++ here.
const VULKAN_PROGRAM: &str = "#include <vulkan/vulkan.hpp>\nint main() { return 0; }\n";
/// Where the CUDA toolkit is installed by default.
const CUDA: &str = "/usr/local/cuda/bin/nvcc";
/// Where cmake finds the SPIR-V headers of Debian, Fedora and a source install.
const SPIRV: [&str; 4] = [
    "/usr/share/cmake/SPIRV-Headers",
    "/usr/lib/cmake/SPIRV-Headers",
    "/usr/local/share/cmake/SPIRV-Headers",
    "/usr/lib64/cmake/SPIRV-Headers",
];

/// Checks the tools of the GPU back-ends among `features`, a list with commas.
///
/// # Errors
/// What is missing for one of them, and what to install.
pub(crate) fn ensure(machine: &Machine, features: &str) -> Result<()> {
    for feature in features.split(',').map(str::trim) {
        match feature {
            "cuda" => cuda(machine)?,
            "vulkan" => vulkan(machine)?,
            "metal" if !cfg!(target_os = "macos") => {
                bail!(
                    "--features metal: Metal is the GPU interface of macOS; here use `cuda` or `vulkan`"
                );
            }
            _ => {}
        }
    }
    Ok(())
}

fn cuda(machine: &Machine) -> Result<()> {
    if machine.variable("CUDACXX").is_some() || machine.answers("nvcc") {
        return Ok(());
    }
    // cmake looks for the compiler on the PATH, wherever it finds the libraries.
    if machine.at(CUDA).exists() {
        bail!(
            "--features cuda: the compiler `nvcc` is at {CUDA} and not on the PATH: run `export \
             PATH=/usr/local/cuda/bin:$PATH`, then run this again"
        );
    }
    bail!(
        "--features cuda: the CUDA toolkit is missing (its compiler `nvcc` is not on the PATH): install it from \
         https://developer.nvidia.com/cuda-downloads (on Debian also `apt-get install -y nvidia-cuda-toolkit` of non-free), \
         then run this again"
    );
}

fn vulkan(machine: &Machine) -> Result<()> {
    let needs = [
        ("glslc, the compiler of shaders", machine.answers("glslc")),
        (
            "the headers and the loader of Vulkan",
            compiles_with(machine, VULKAN_PROGRAM, &["-lvulkan"]),
        ),
        (
            "the SPIR-V headers",
            SPIRV.iter().any(|path| machine.at(path).exists()),
        ),
    ];
    // The SDK has all of them in a folder of its own.
    if machine.variable("VULKAN_SDK").is_some() {
        return Ok(());
    }
    let missing: Vec<&str> = needs
        .iter()
        .filter_map(|&(name, present)| (!present).then_some(name))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "--features vulkan: missing: {}: install them (on Debian: `apt-get install -y glslc libvulkan-dev spirv-headers`, on \
         Fedora: `dnf install glslc vulkan-devel spirv-headers-devel`, elsewhere the SDK of https://vulkan.lunarg.com with \
         VULKAN_SDK set), then run this again",
        missing.join(", ")
    );
}
