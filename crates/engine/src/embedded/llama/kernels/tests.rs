use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use super::super::backends::load_library;
use super::*;

/// A program in a folder of its own, with empty libraries of these names in `folder`.
struct Installed {
    root: tempfile::TempDir,
    user: u32,
}

impl Installed {
    fn new(folder: &str, libraries: &[&str]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let libraries_at = bin.join(folder);
        fs::create_dir_all(&libraries_at).unwrap();
        Self::protect(&libraries_at, 0o755);
        for name in libraries {
            let file = libraries_at.join(name);
            fs::write(&file, "").unwrap();
            Self::protect(&file, 0o644);
        }
        let user = fs::metadata(root.path()).unwrap().uid();
        Self { root, user }
    }

    fn protect(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().canonicalize().unwrap().join(path)
    }

    fn folder(&self) -> Result<LibraryFolder, KernelsError> {
        LibraryFolder::beside(&self.path("bin/sapwood"), self.user)
    }
}

/// All variants of x86-64 and two back-ends that are not for processors.
const ALL: [&str; 19] = [
    "libggml-base.so",
    "libggml-base.so.0",
    "libggml-cpu-x64.so",
    "libggml-cpu-sse42.so",
    "libggml-cpu-sandybridge.so",
    "libggml-cpu-ivybridge.so",
    "libggml-cpu-piledriver.so",
    "libggml-cpu-haswell.so",
    "libggml-cpu-alderlake.so",
    "libggml-cpu-skylakex.so",
    "libggml-cpu-cannonlake.so",
    "libggml-cpu-cascadelake.so",
    "libggml-cpu-icelake.so",
    "libggml-cpu-cooperlake.so",
    "libggml-cpu-zen4.so",
    "libggml-cuda.so",
    "libggml-vulkan.so",
    "libllama.so.0",
    "README",
];

/// What is tried on a processor with these instructions, where every library loads.
fn chosen(libraries: &[&str], has: &[&str]) -> Result<Kernels, KernelsError> {
    let installed = Installed::new("lib/sapwood", libraries);
    let has: BTreeSet<_> = has.iter().copied().collect();
    load_from(&installed.folder()?, |it| has.contains(it), |_| Ok(()))
}

#[test]
fn the_best_variant_is_chosen_that_processor_and_system_allow() {
    const HASWELL: [&str; 6] = ["SSE4.2", "AVX", "AVX2", "FMA", "F16C", "BMI2"];
    let haswell_and = |more: &[&'static str]| [&HASWELL, more].concat();
    for (has, expected) in [
        (vec![], "x64"),
        (vec!["SSE4.2"], "sse42"),
        (vec!["SSE4.2", "AVX"], "sandybridge"),
        (vec!["SSE4.2", "AVX", "F16C"], "ivybridge"),
        (vec!["SSE4.2", "AVX", "F16C", "FMA"], "piledriver"),
        (haswell_and(&[]), "haswell"),
        (haswell_and(&["AVX-VNNI"]), "alderlake"),
        (haswell_and(&["AVX512F"]), "skylakex"),
        (haswell_and(&["AVX512F", "AVX512-VBMI"]), "cannonlake"),
        (haswell_and(&["AVX512F", "AVX512-VNNI"]), "cascadelake"),
        (
            haswell_and(&["AVX512F", "AVX512-VBMI", "AVX512-VNNI"]),
            "icelake",
        ),
        (
            haswell_and(&["AVX512F", "AVX512-VNNI", "AVX512-BF16"]),
            "cooperlake",
        ),
        (
            haswell_and(&[
                "AVX512F",
                "AVX512-VBMI",
                "AVX512-VNNI",
                "AVX512-BF16",
                "AVX-VNNI",
            ]),
            "zen4",
        ),
        // The system has the wide registers switched off, and the processor says what it has all the same.
        (haswell_and(&["AVX512-VBMI", "AVX512-VNNI"]), "haswell"),
    ] {
        let kernels = chosen(&ALL, &has).unwrap();
        assert_eq!(kernels.variant, expected, "{has:?}");
        assert_eq!(kernels.others, ["cuda", "vulkan"]);
    }
    let kernels = chosen(&["libggml-cpu-sse42.so", "libggml-cpu-x64.so"], &HASWELL).unwrap();
    assert_eq!(kernels.variant, "sse42", "the others are not there");
    let kernels = chosen(
        &["libggml-cpu-armv8.0_1.so", "libggml-cpu-armv8.2_2.so"],
        &[],
    )
    .unwrap();
    assert_eq!(
        kernels.variant, "armv8.2_2",
        "ggml itself refuses what is not for an ARM processor"
    );
}

#[test]
fn back_ends_come_first_and_what_does_not_load_is_passed_over() {
    let installed = Installed::new("lib/sapwood", &ALL);
    let order = RefCell::new(Vec::new());
    let load = |path: &Path| {
        assert!(path.is_file(), "{}", path.display());
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        order.borrow_mut().push(name.clone());
        match name.as_str() {
            "libggml-vulkan" | "libggml-cpu-haswell" => Ok(()),
            _ => Err("it is damaged".to_owned()),
        }
    };
    let has = |it: &str| !it.starts_with("AVX512");
    let kernels = load_from(&installed.folder().unwrap(), has, load).unwrap();
    assert_eq!(
        order.into_inner(),
        [
            "libggml-cuda",
            "libggml-vulkan",
            "libggml-cpu-alderlake",
            "libggml-cpu-haswell"
        ]
    );
    let folder = installed.path("bin/lib/sapwood");
    assert_eq!(
        kernels.to_string(),
        format!("haswell of {}, vulkan", folder.display())
    );
}

#[test]
fn without_kernels_the_error_names_the_folder_and_what_to_do() {
    let installed = Installed::new("lib/sapwood", &["libggml-cpu-zen4.so", "libggml-vulkan.so"]);
    let folder = installed.path("bin/lib/sapwood");
    let none = load_from(&installed.folder().unwrap(), |_| false, |_| Ok(())).unwrap_err();
    let damaged = load_from(
        &installed.folder().unwrap(),
        |_| true,
        |_| Err("it is damaged".into()),
    );
    for (error, why) in [
        (none, "there is none for it"),
        (damaged.unwrap_err(), "zen4: it is damaged"),
    ] {
        assert_eq!(
            error.to_string(),
            format!(
                "no library in {} has kernels for this processor ({why}): unpack the whole archive again, which has a \
                 library for every processor of this kind",
                folder.display()
            )
        );
    }
    let bare = Installed::new("other", &[]);
    let (first, second) = (
        bare.path("bin/lib/sapwood"),
        bare.path("bin/../lib/sapwood"),
    );
    let error = bare.folder().unwrap_err();
    assert_eq!(error, KernelsError::NoFolder(vec![first.clone(), second]));
    let text = error.to_string();
    assert!(
        text.contains(first.to_str().unwrap()) && text.contains("unpack the whole archive"),
        "{text}"
    );
}

#[test]
fn the_folder_beside_the_program_comes_before_the_one_beside_its_folder() {
    let installed = Installed::new("../lib/sapwood", &ALL);
    assert_eq!(
        installed.folder().unwrap().path(),
        installed.path("lib/sapwood")
    );
    let nearer = installed.path("bin/lib/sapwood");
    fs::create_dir_all(&nearer).unwrap();
    Installed::protect(&nearer, 0o755);
    assert_eq!(installed.folder().unwrap().path(), nearer);
}

#[test]
fn nothing_is_loaded_from_where_others_may_write() {
    for (path, mode) in [
        ("bin/lib/sapwood", 0o777),
        ("bin/lib/sapwood", 0o1777),
        ("bin/lib/sapwood", 0o775),
        ("bin/lib/sapwood/libggml-cpu-sse42.so", 0o666),
        ("bin/lib/sapwood/libggml-vulkan.so", 0o664),
    ] {
        let installed = Installed::new("lib/sapwood", &ALL);
        let path = installed.path(path);
        Installed::protect(&path, mode);
        let error = installed.folder().unwrap_err();
        assert_eq!(error, KernelsError::Untrusted(path.clone()), "{mode:o}");
        assert!(
            error
                .remedy()
                .contains(&format!("chmod go-w {}", path.display())),
            "{error}"
        );
        // Where the nearer folder is not to be trusted, the other one is not tried.
        fs::create_dir_all(installed.path("lib/sapwood")).unwrap();
        assert!(installed.folder().is_err());
    }
    // A link to a library of somebody else's is one of theirs.
    let installed = Installed::new("lib/sapwood", &[]);
    let theirs = installed.path("theirs.so");
    fs::write(&theirs, "").unwrap();
    Installed::protect(&theirs, 0o666);
    let link = installed.path("bin/lib/sapwood/libggml-cpu-x64.so");
    std::os::unix::fs::symlink(&theirs, &link).unwrap();
    assert_eq!(
        installed.folder().unwrap_err(),
        KernelsError::Untrusted(link)
    );
}

#[test]
fn libraries_belong_to_root_or_to_whom_the_program_belongs() {
    let installed = Installed::new("lib/sapwood", &ALL);
    let beside = |user| LibraryFolder::beside(&installed.path("bin/sapwood"), user);
    assert!(beside(installed.user).is_ok());
    // A program of another user; what root owns may be loaded by all.
    assert_eq!(beside(installed.user + 1).is_ok(), installed.user == 0);
}

/// Writes the source of a back-end of ggml, and compiles it as a library.
fn compile(folder: &Path, name: &str, source: &str) {
    let file = folder.join("backend.c");
    fs::write(&file, source).unwrap();
    let library = folder.join(format!("libggml-{name}.so"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    let status = compiler.arg(&file).status().unwrap();
    assert!(status.success(), "{name}");
    Installed::protect(&library, 0o755);
}

/// A back-end without devices, with the layout of ggml's `struct ggml_backend_reg`.
fn backend(api_version: u32, score: u32) -> String {
    format!(
        "#include <stddef.h>
        static const char * name(void * r) {{ return \"Test\"; }}
        static size_t count(void * r) {{ return 0; }}
        static void * device(void * r, size_t i) {{ return NULL; }}
        static void * function(void * r, const char * n) {{ return NULL; }}
        static struct {{ int version; const char * (*name)(void *); size_t (*count)(void *); void * (*device)(void *, size_t);
            void * (*function)(void *, const char *); void * context; }} reg
            = {{ {api_version}, name, count, device, function, NULL }};
        void * ggml_backend_init(void) {{ return &reg; }}
        int ggml_backend_score(void) {{ return {score}; }}"
    )
}

#[test]
fn ggml_loads_what_fits_it_and_says_why_not() {
    /// `GGML_BACKEND_API_VERSION`.
    const FITTING: u32 = 3;
    let installed = Installed::new("lib/sapwood", &["libggml-cuda.so"]);
    let folder = installed.path("bin/lib/sapwood");
    for (name, source) in [
        ("cpu-haswell", backend(FITTING, 0)),
        ("cpu-ivybridge", backend(FITTING + 1, 1)),
        ("cpu-sandybridge", "int nothing;".to_owned()),
    ] {
        compile(&folder, name, &source);
    }
    let load = || {
        let mut tried = Vec::new();
        let loaded = load_from(
            &installed.folder().unwrap(),
            |_| true,
            |path| {
                let loaded = load_library(path);
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                tried.push((name, loaded.clone().err().unwrap_or_default()));
                loaded
            },
        );
        (tried, loaded)
    };
    let (tried, loaded) = load();
    for ((name, why), (tried, reason)) in [
        ("libggml-cuda", "file too short"),
        ("libggml-cpu-haswell", "it is not for this machine"),
        ("libggml-cpu-ivybridge", "incompatible API version"),
        (
            "libggml-cpu-sandybridge",
            "failed to find ggml_backend_init",
        ),
    ]
    .into_iter()
    .zip(&tried)
    {
        assert!(
            tried == name && reason.contains(why),
            "{name}: {tried}: {reason}"
        );
    }
    let error = loaded.unwrap_err();
    assert!(error.to_string().contains("sandybridge: "), "{error}");
    compile(&folder, "cpu-x64", &backend(FITTING, 1));
    let (_, loaded) = load();
    assert_eq!(loaded.unwrap().variant, "x64");
}

/// A test has no libraries beside it.
#[cfg(not(feature = "dynamic-backends"))]
#[test]
fn the_kernels_of_this_process_are_found_once_and_described() {
    let kernels = kernels().unwrap();
    assert_eq!(kernels, super::kernels().unwrap());
    assert!(!kernels.variant.is_empty() && kernels.to_string().starts_with(&kernels.variant));
}
