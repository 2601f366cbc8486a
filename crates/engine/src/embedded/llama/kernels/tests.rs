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

/// The libraries that are in a folder now, as those that a program was built with.
fn built(folder: &Path) -> BuiltLibraries {
    let entries = fs::read_dir(folder).unwrap();
    let libraries = entries.filter_map(|entry| {
        let path = entry.unwrap().path();
        let content = fs::read(&path).ok()?;
        let name = path.file_name()?.to_str()?;
        let (bytes, crc) = (content.len(), crc32fast::hash(&content));
        name.contains(".so")
            .then(|| format!("{name}:{bytes}:{crc:08x}"))
    });
    BuiltLibraries::parse(&libraries.collect::<Vec<_>>().join(","))
}

/// What is tried on a processor with these instructions, where every library loads.
fn chosen(libraries: &[&str], has: &[&str]) -> Result<Kernels, KernelsError> {
    let installed = Installed::new("../lib/sapwood", libraries);
    let has: BTreeSet<_> = has.iter().copied().collect();
    let built = built(&installed.path("lib/sapwood"));
    load_from(
        &installed.folder()?,
        &built,
        |it| has.contains(it),
        |_| Ok(()),
    )
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
    let installed = Installed::new("../lib/sapwood", &ALL);
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
    let built = built(&installed.path("lib/sapwood"));
    let kernels = load_from(&installed.folder().unwrap(), &built, has, load).unwrap();
    assert_eq!(
        kernels.refused,
        [("cuda".to_owned(), "it is damaged".to_owned())]
    );
    assert_eq!(
        order.into_inner(),
        [
            "libggml-cuda",
            "libggml-vulkan",
            "libggml-cpu-alderlake",
            "libggml-cpu-haswell"
        ]
    );
    let folder = installed.path("lib/sapwood");
    assert_eq!(
        kernels.to_string(),
        format!("haswell of {}, vulkan", folder.display())
    );
}

#[test]
fn without_kernels_the_error_names_the_folder_and_what_to_do() {
    let installed = Installed::new(
        "../lib/sapwood",
        &["libggml-cpu-zen4.so", "libggml-vulkan.so"],
    );
    let folder = installed.path("lib/sapwood");
    let built = built(&folder);
    let found = installed.folder().unwrap();
    let none = load_from(&found, &built, |_| false, |_| Ok(())).unwrap_err();
    let damaged = load_from(&found, &built, |_| true, |_| Err("it is damaged".into()));
    for (error, why) in [
        (none, "there is none for it"),
        (damaged.unwrap_err(), "zen4: it is damaged"),
    ] {
        assert_eq!(
            error.to_string(),
            format!(
                "no library in {} has kernels for this processor ({why}): unpack the whole archive again, which has a \
                 library for every processor of this kind, and start the program anew",
                folder.display()
            )
        );
    }
    let bare = Installed::new("other", &[]);
    let folder = bare.path("bin/../lib/sapwood");
    let error = bare.folder().unwrap_err();
    assert_eq!(error, KernelsError::NoFolder(folder.clone()));
    let text = error.to_string();
    assert!(
        text.contains(folder.to_str().unwrap()) && text.contains("unpack the whole archive"),
        "{text}"
    );
}

#[test]
fn a_folder_beside_the_program_is_not_searched() {
    // The system's loader would take the C library from there too.
    let installed = Installed::new("lib/sapwood", &ALL);
    let folder = installed.path("lib/sapwood");
    let missing = installed.folder().unwrap_err();
    assert!(matches!(missing, KernelsError::NoFolder(_)), "{missing:?}");
    fs::create_dir_all(&folder).unwrap();
    assert!(installed.folder().is_err(), "it is empty");
    fs::write(folder.join("libllama.so.0"), "").unwrap();
    Installed::protect(&folder.join("libllama.so.0"), 0o644);
    assert_eq!(installed.folder().unwrap().path(), folder);
}

#[test]
fn nothing_is_loaded_from_where_others_may_write() {
    for (path, mode) in [
        ("lib/sapwood", 0o777),
        ("lib/sapwood", 0o1777),
        ("lib/sapwood", 0o775),
        ("lib/sapwood/libggml-cpu-sse42.so", 0o666),
        ("lib/sapwood/libggml-vulkan.so", 0o664),
        // The system's loader runs these first.
        ("lib/sapwood/libllama.so.0", 0o666),
        ("lib/sapwood/libggml-base.so.0", 0o666),
        // Who may replace the folder may replace what is in it.
        ("lib", 0o777),
    ] {
        let installed = Installed::new("../lib/sapwood", &ALL);
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
    }
    // A link to a library of somebody else's is one of theirs.
    let installed = Installed::new("../lib/sapwood", &["libllama.so.0"]);
    let theirs = installed.path("theirs.so");
    fs::write(&theirs, "").unwrap();
    Installed::protect(&theirs, 0o666);
    let link = installed.path("lib/sapwood/libggml-cpu-x64.so");
    std::os::unix::fs::symlink(&theirs, &link).unwrap();
    assert_eq!(
        installed.folder().unwrap_err(),
        KernelsError::Untrusted(link)
    );
}

#[test]
fn a_link_leads_to_no_folder_that_others_may_replace() {
    let installed = Installed::new("other", &[]);
    let real = installed.path("shared/sapwood");
    fs::create_dir_all(&real).unwrap();
    Installed::protect(&real, 0o755);
    fs::write(real.join("libllama.so.0"), "").unwrap();
    Installed::protect(&real.join("libllama.so.0"), 0o644);
    fs::create_dir(installed.path("lib")).unwrap();
    std::os::unix::fs::symlink(&real, installed.path("lib/sapwood")).unwrap();
    let shared = installed.path("shared");
    for (mode, trusted) in [
        (0o755, true),
        (0o777, false),
        // As `/tmp`: nobody can replace what is not theirs.
        (0o1777, true),
    ] {
        Installed::protect(&shared, mode);
        let found = installed.folder().map(|folder| folder.path().to_owned());
        let expected = match trusted {
            true => Ok(real.clone()),
            false => Err(KernelsError::Untrusted(shared.clone())),
        };
        assert_eq!(found, expected, "{mode:o}");
    }
    // Whoever may replace the libraries may replace the program too.
    Installed::protect(&shared, 0o775);
    assert!(installed.folder().is_err());
    Installed::protect(&installed.path("bin"), 0o775);
    assert!(installed.folder().is_ok());
}

#[test]
fn libraries_of_another_build_or_copied_in_part_are_not_loaded() {
    let installed = Installed::new("../lib/sapwood", &ALL);
    let at = |name: &str| installed.path("lib/sapwood").join(name);
    let write = |name: &str, content: &str| fs::write(at(name), content).unwrap();
    for name in ALL {
        write(name, name);
    }
    let built = built(&installed.path("lib/sapwood"));
    let load = || {
        let mut loaded = Vec::new();
        let kernels = load_from(
            &installed.folder().unwrap(),
            &built,
            |_| true,
            |path| {
                let name = path.file_name().unwrap().to_str().unwrap();
                loaded.push(name.to_owned());
                Ok(())
            },
        );
        (kernels, loaded)
    };
    assert_eq!(load().0.unwrap().variant, "zen4");
    // One in part, one with another content of the same length, and one that this build does not know.
    write("libggml-cpu-zen4.so", "libggml-cpu-zen4");
    write("libggml-cpu-cooperlake.so", "LIBGGML-CPU-COOPERLAKE.SO");
    write("libggml-cuda.so", "");
    write("libggml-cpu-apple_m1.so", "");
    Installed::protect(&at("libggml-cpu-apple_m1.so"), 0o644);
    let (kernels, loaded) = load();
    let kernels = kernels.unwrap();
    assert_eq!(kernels.variant, "icelake");
    assert_eq!(loaded, ["libggml-vulkan.so", "libggml-cpu-icelake.so"]);
    let refused: Vec<_> = kernels.refused.iter().map(|(name, _)| name).collect();
    assert_eq!(refused, ["cuda", "cpu-zen4", "cpu-cooperlake"]);
    assert!(
        kernels
            .refused
            .iter()
            .all(|(_, why)| why.contains("of another build"))
    );
    // What the program is linked with is of an older build, or not there.
    for change in [
        (|path: &Path| fs::write(path, "libllama.so.1")) as fn(&Path) -> _,
        |path: &Path| fs::remove_file(path),
    ] {
        change(&at("libllama.so.0")).unwrap();
        let (kernels, loaded) = load();
        assert_eq!(loaded, [""; 0]);
        let error = kernels.unwrap_err();
        assert!(
            matches!(&error, KernelsError::OtherBuild(path, _) if *path == at("libllama.so.0")),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("unpack the whole archive again, the program with"),
            "{error}"
        );
    }
}

#[test]
fn a_link_that_leads_nowhere_is_passed_over() {
    let installed = Installed::new("../lib/sapwood", &["libggml-cpu-x64.so"]);
    let folder = installed.path("lib/sapwood");
    let built = built(&folder);
    for name in ["libggml-vulkan.so", "libggml-cpu-zen4.so"] {
        std::os::unix::fs::symlink("nowhere", folder.join(name)).unwrap();
    }
    let found = installed.folder().unwrap();
    let kernels = load_from(&found, &built, |_| true, |_| Ok(())).unwrap();
    assert_eq!(kernels.variant, "x64");
    let refused: Vec<_> = kernels.refused.iter().map(|(name, _)| name).collect();
    assert_eq!(refused, ["cpu-zen4", "vulkan"]);
}

/// A back-end for a GPU that was built elsewhere.
#[cfg(target_os = "linux")]
#[test]
fn a_back_end_of_another_build_must_be_whole() {
    let installed = Installed::new("../lib/sapwood", &["libllama.so.0"]);
    let folder = installed.path("lib/sapwood");
    let built = built(&folder);
    compile(&folder, "vulkan", &backend(3, 1));
    let file = folder.join("libggml-vulkan.so");
    assert_eq!(built.check(&file), Ok(()));
    let whole = fs::read(&file).unwrap();
    let damaged = Err("it is damaged, or copied in part".to_owned());
    for tenths in 0..10 {
        let part = &whole[..whole.len() * tenths / 10];
        fs::write(&file, part).unwrap();
        assert_eq!(built.check(&file), damaged, "{tenths} tenths");
        let mut zeros = part.to_owned();
        zeros.resize(whole.len(), 0);
        fs::write(&file, zeros).unwrap();
        assert_eq!(built.check(&file), damaged, "{tenths} tenths, then zeros");
    }
    // A header of anything must not end the process.
    for at in 0x20..0x40 {
        let mut strange = whole.clone();
        strange[at] = 0xff;
        fs::write(&file, strange).unwrap();
        let _ = built.check(&file);
    }
}

#[test]
fn libraries_belong_to_root_or_to_whom_the_program_belongs() {
    let installed = Installed::new("../lib/sapwood", &ALL);
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
    let installed = Installed::new("../lib/sapwood", &["libggml-cuda.so"]);
    let folder = installed.path("lib/sapwood");
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
            &built(&folder),
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
