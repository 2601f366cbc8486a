//! `THIRD-PARTY.txt`: what a program contains that others have written, and the licences that come with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::process;

/// How names of files begin that say who has rights in a package, in lower case.
const NAMES: [&str; 7] = [
    "authors",
    "copying",
    "copyright",
    "licence",
    "license",
    "notice",
    "unlicense",
];

/// Code may have such a name too: `copying.rs` is part of a garbage collector.
const CODE: [&str; 6] = ["c", "cmake", "cpp", "h", "py", "rs"];

/// The package with the code of llama.cpp.
const LLAMA: &str = "llama-cpp-sys-2";

/// Files of llama.cpp with comments about rights of others in them.
const OWN_LICENCE: [&str; 2] = [
    "llama.cpp/ggml/src/ggml-cpu/llamafile/sgemm.cpp",
    "llama.cpp/ggml/src/ggml-cpu/ops.cpp",
];

/// Packages without a text, each with another one that has the same: one of the same project or author or, for OpenTelemetry, which has no
/// text in any, one under the plain Apache-2.0.
const TEXTS_OF_OTHERS: [(&str, &str); 16] = [
    ("asn1-rs-impl", "asn1-rs"),
    ("cranelift-assembler-x64", "wasmtime"),
    ("cranelift-bitset", "wasmtime"),
    ("opentelemetry", "prost"),
    ("opentelemetry-http", "prost"),
    ("opentelemetry-otlp", "prost"),
    ("opentelemetry_sdk", "prost"),
    ("pear", "figment"),
    ("pear_codegen", "figment"),
    ("pulley-interpreter", "wasmtime"),
    ("pulley-macros", "wasmtime"),
    ("tonic-prost", "tonic"),
    ("wasmtime-internal-component-util", "wasmtime"),
    ("wasmtime-internal-core", "wasmtime"),
    ("wasmtime-internal-jit-icache-coherence", "wasmtime"),
    ("wasmtime-internal-versioned-export-macros", "wasmtime"),
];

/// A package from a registry.
struct Package {
    name: String,
    version: String,
    /// Its licence as a SPDX expression.
    expression: String,
    texts: Vec<String>,
    /// The package that has the texts, if it is another.
    texts_of: Option<&'static str>,
}

/// Returns the notices of the program `sapwood` with these features: every package that is linked into it.
///
/// # Errors
/// Cargo fails, a file cannot be read, or a package has no text.
pub(super) fn of_program(features: &str) -> Result<String> {
    let arguments = ["tree", "--locked", "--package", "sapwood", "--edges=normal"];
    let mut tree = process::cargo(&arguments);
    tree.args(["--prefix=none", "--format={p}", "--features", features]);
    let tree = process::output(&mut tree)?;
    let mut packages = packages(&metadata()?, &linked(&tree))?;
    complete(&mut packages)?;
    Ok(write(&packages))
}

/// Returns the folder that has the packages of the registry.
///
/// # Errors
/// Cargo fails, or has none from a registry.
pub(super) fn registry() -> Result<PathBuf> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array();
    let mut packages = packages.into_iter().flatten();
    let foreign = packages.find(|package| package["source"].is_string());
    let manifest = foreign.and_then(|package| package["manifest_path"].as_str());
    let folder = manifest.and_then(|path| Path::new(path).ancestors().nth(2));
    Ok(folder
        .context("cargo does not say where packages are")?
        .to_owned())
}

fn metadata() -> Result<serde_json::Value> {
    let mut metadata = process::cargo(&["metadata", "--locked", "--format-version=1"]);
    metadata.args(["--all-features", "--filter-platform", &process::host()?]);
    Ok(serde_json::from_str(&process::output(&mut metadata)?)?)
}

/// Name and version of each line of `cargo tree`.
fn linked(tree: &str) -> BTreeSet<(&str, &str)> {
    let lines = tree.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?, words.next()?.strip_prefix('v')?))
    });
    lines.collect()
}

/// The packages of `cargo metadata` that are linked, without those of this project.
fn packages(metadata: &serde_json::Value, linked: &BTreeSet<(&str, &str)>) -> Result<Vec<Package>> {
    let all = metadata["packages"].as_array();
    let mut packages = Vec::new();
    for package in all.context("cargo does not say which packages there are")? {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let (name, version) = (field("name"), field("version"));
        if !package["source"].is_string() || !linked.contains(&(name, version)) {
            continue;
        }
        let folder = Path::new(field("manifest_path")).parent();
        let folder = folder.context("cargo does not say where a package is")?;
        let mut texts = texts(folder, package["license_file"].as_str())?;
        if name == LLAMA {
            for file in OWN_LICENCE {
                texts.push(own_licence(&folder.join(file))?);
            }
        }
        packages.push(Package {
            name: name.to_owned(),
            version: version.to_owned(),
            expression: field("license").to_owned(),
            texts,
            texts_of: None,
        });
    }
    ensure!(!packages.is_empty(), "cargo has listed no dependencies");
    let key = |package: &Package| (package.name.clone(), package.version.clone());
    packages.sort_by_key(key);
    Ok(packages)
}

/// Gives packages without a text that of another, as listed.
///
/// # Errors
/// One is not listed, or the other has no text.
fn complete(packages: &mut [Package]) -> Result<()> {
    let with_text = packages.iter().filter(|package| !package.texts.is_empty());
    let with_text: BTreeMap<_, _> = with_text
        .map(|package| (package.name.clone(), package.texts.clone()))
        .collect();
    let without = packages.iter_mut();
    for package in without.filter(|package| package.texts.is_empty()) {
        let mut listed = TEXTS_OF_OTHERS.iter();
        let other = listed.find_map(|&(name, other)| (name == package.name).then_some(other));
        let found = other.and_then(|other| Some((other, with_text.get(other)?)));
        let (other, texts) = found.with_context(|| {
            format!(
                "the package {} has no text of its licence with it ({}): name a linked package with that text in TEXTS_OF_OTHERS \
                 of xtask/src/dist/notices.rs",
                package.name, package.expression
            )
        })?;
        package.texts.clone_from(texts);
        package.texts_of = Some(other);
    }
    Ok(())
}

/// The texts in a package, also of code from elsewhere that it has in folders of its own.
fn texts(package: &Path, named: Option<&str>) -> Result<Vec<String>> {
    let mut files = named.map(|name| package.join(name)).into_iter().collect();
    find(package, &mut files)?;
    let mut texts = Vec::new();
    for file in files {
        let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        texts.push(String::from_utf8_lossy(&text).into_owned());
    }
    Ok(texts)
}

fn find(folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder);
    for entry in entries.with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            find(&path, files)?;
        } else if is_notice(&path) {
            files.insert(path);
        }
    }
    Ok(())
}

fn is_notice(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.unwrap_or_default().to_lowercase();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    NAMES.iter().any(|begin| name.starts_with(begin)) && !CODE.contains(&extension)
}

/// The comments of a file of code that tell of rights in it: lines with `//`, one below the other.
///
/// # Errors
/// It cannot be read, or has none: it says so elsewhere, and so does this list then.
fn own_licence(file: &Path) -> Result<String> {
    let code = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let code = String::from_utf8_lossy(&code);
    let (mut found, mut comment) = (Vec::new(), Vec::new());
    // The last comment ends with the file.
    for line in code.lines().chain([""]) {
        if let Some(line) = line.strip_prefix("//") {
            comment.push(line.trim_start());
            continue;
        }
        let text = comment.join("\n");
        comment.clear();
        if text.to_lowercase().contains("copyright") {
            found.push(text);
        }
    }
    ensure!(
        !found.is_empty(),
        "{} tells of no rights in it any more: look where its licence is now, and change OWN_LICENCE of \
         xtask/src/dist/notices.rs",
        file.display()
    );
    Ok(found.join("\n\n"))
}

/// Writes each text once, also where lines are broken elsewhere.
fn write(packages: &[Package]) -> String {
    let mut numbers = BTreeMap::new();
    let (mut list, mut texts) = (String::new(), String::new());
    for package in packages {
        let mut own = BTreeSet::new();
        for text in &package.texts {
            let words: Vec<_> = text.split_whitespace().collect();
            let next = numbers.len() + 1;
            let number = *numbers.entry(words.join(" ")).or_insert(next);
            if number == next {
                let rule = "=".repeat(20);
                let text = text.replace('\r', "");
                let text = text.trim_matches('\n').trim_end();
                // Writing to a string cannot fail, here and below.
                let _ = write!(texts, "\n{rule} {number} {rule}\n\n{text}\n");
            }
            own.insert(number);
        }
        let own: Vec<_> = own.iter().map(usize::to_string).collect();
        let Package {
            name,
            version,
            expression,
            ..
        } = package;
        let of = package.texts_of.map(|other| format!(" of {other}"));
        let (numbers, of) = (own.join(", "), of.unwrap_or_default());
        let _ = writeln!(list, "{name} {version}: {expression} [{numbers}{of}]");
    }
    format!(
        "Sapwood itself is licensed as in LICENSE-MIT or LICENSE-APACHE. The program contains these packages of others, each with\n\
         its licence and the numbers of the texts below that come with it, or with the package that is named there.\n\
         llama-cpp-sys-2 has llama.cpp and ggml. What Rust's standard library contains is in LICENSE-rust.html, which is\n\
         share/doc/rust/COPYRIGHT-library.html of its toolchain.\n\n\
         {list}{texts}"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_with_rights_in_a_package_are_told_from_code() {
        for (path, expected) in [
            ("LICENSE", true),
            ("LICENSE-APACHE", true),
            ("license-mit.txt", true),
            ("LICENSE-2.0", true),
            ("COPYING.md", true),
            ("NOTICE.txt", true),
            ("UNLICENSE", true),
            ("AUTHORS", true),
            ("gc/copying.rs", false),
            ("cmake/license.cmake", false),
            ("README.md", false),
            ("src/lib.rs", false),
        ] {
            assert_eq!(is_notice(Path::new(path)), expected, "{path}");
        }
    }

    /// Three packages in a folder, and what cargo says of them and of one of this project.
    fn registry(root: &Path) -> serde_json::Value {
        for (file, text) in [
            ("one-1.0.0/LICENSE-MIT", "Copyright One\n\nMay be used.\n"),
            ("one-1.0.0/src/vendor/LICENSE", "Of another.\r\n"),
            ("one-1.0.0/src/copying.rs", "fn copy() {}"),
            (
                "llama-cpp-sys-2-0.1.0/llama.cpp/ggml/src/ggml-cpu/llamafile/sgemm.cpp",
                "// Copyright Three\n//\n// May be used.\n\n// Multiplies.\nint x;\n",
            ),
            (
                "llama-cpp-sys-2-0.1.0/llama.cpp/ggml/src/ggml-cpu/ops.cpp",
                "// Adds.\nint y;\n\n// From elsewhere.\n// Copyright Four\nint z;\n",
            ),
            ("llama-cpp-sys-2-0.1.0/TERMS", "Of a name of its own."),
            ("two-2.1.0/LICENSE", "  Copyright One May be\nused."),
            ("two-2.0.0/LICENSE", "Not linked."),
            ("pear-1.0.0/README", "No licence."),
            ("figment-3.0.0/COPYING", "Of both."),
        ] {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let package = |name: &str, version: &str, license: &str| {
            let manifest = root.join(format!("{name}-{version}/Cargo.toml"));
            json!({"name": name, "version": version, "license": license, "source": "registry+https://index",
                "manifest_path": manifest})
        };
        let mut llama = package("llama-cpp-sys-2", "0.1.0", "MIT");
        llama["license_file"] = json!("TERMS");
        let mut ours = package("sapwood", "0.1.0", "MIT");
        ours["source"] = json!(null);
        let pear = package("pear", "1.0.0", "MIT OR Apache-2.0");
        let figment = package("figment", "3.0.0", "MIT");
        let twos = ["2.1.0", "2.0.0"].map(|version| package("two", version, "MIT"));
        let [two, old] = twos;
        json!({"packages": [two, ours, old, package("one", "1.0.0", "MIT"), pear, llama, figment]})
    }

    const TREE: &str = "sapwood v0.1.0 (/work)\none v1.0.0\npear v1.0.0 (proc-macro)\nfigment v3.0.0\ntwo v2.1.0\n\n\
        llama-cpp-sys-2 v0.1.0\none v1.0.0 (*)\n";

    #[test]
    fn each_linked_package_is_listed_and_each_text_is_there_once() {
        let root = tempfile::tempdir().unwrap();
        let metadata = registry(root.path());
        let mut packages = packages(&metadata, &linked(TREE)).unwrap();
        complete(&mut packages).unwrap();
        let found = write(&packages);
        let (_, list) = found.split_once("\n\n").unwrap();
        assert_eq!(
            list,
            "figment 3.0.0: MIT [1]\n\
             llama-cpp-sys-2 0.1.0: MIT [2, 3, 4]\n\
             one 1.0.0: MIT [5, 6]\n\
             pear 1.0.0: MIT OR Apache-2.0 [1 of figment]\n\
             two 2.1.0: MIT [5]\n\
             \n==================== 1 ====================\n\nOf both.\n\
             \n==================== 2 ====================\n\nOf a name of its own.\n\
             \n==================== 3 ====================\n\nCopyright Three\n\nMay be used.\n\
             \n==================== 4 ====================\n\nFrom elsewhere.\nCopyright Four\n\
             \n==================== 5 ====================\n\nCopyright One\n\nMay be used.\n\
             \n==================== 6 ====================\n\nOf another.\n"
        );
    }

    #[test]
    fn a_package_without_a_text_is_an_error() {
        for (lost, name) in [
            ("two-2.1.0/LICENSE", "two"),
            ("figment-3.0.0/COPYING", "figment"),
        ] {
            let root = tempfile::tempdir().unwrap();
            let metadata = registry(root.path());
            fs::remove_file(root.path().join(lost)).unwrap();
            let mut packages = packages(&metadata, &linked(TREE)).unwrap();
            let error = complete(&mut packages).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("no text"), "{error}");
        }
    }

    #[test]
    fn a_licence_that_has_left_its_file_of_llama_is_an_error() {
        for (file, code) in [
            (OWN_LICENCE[0], None),
            (OWN_LICENCE[1], Some("// Adds.\nint y;\n")),
        ] {
            let root = tempfile::tempdir().unwrap();
            let metadata = registry(root.path());
            let path = root.path().join("llama-cpp-sys-2-0.1.0").join(file);
            match code {
                Some(code) => fs::write(path, code).unwrap(),
                None => fs::remove_file(path).unwrap(),
            }
            let error = packages(&metadata, &linked(TREE)).err().unwrap();
            assert!(error.to_string().contains(file), "{error:#}");
        }
    }

    #[test]
    fn what_cargo_does_not_list_is_an_error() {
        for metadata in [json!({}), json!({"packages": []})] {
            assert!(packages(&metadata, &linked(TREE)).is_err(), "{metadata}");
        }
        let root = tempfile::tempdir().unwrap();
        let metadata = registry(root.path());
        fs::remove_dir_all(root.path().join("one-1.0.0")).unwrap();
        let error = packages(&metadata, &linked(TREE)).err().unwrap();
        assert!(error.to_string().contains("cannot read"), "{error:#}");
    }
}
