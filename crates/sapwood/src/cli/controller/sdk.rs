//! The SDK as it is written into a new project.
//!
//! It is in no registry yet, and the command may run anywhere: so the binary has its source, and a project builds without
//! a clone of this repository or a network.

/// Each file of the SDK: its path below `src`, and its text. Its own tests stay here.
pub(super) const SOURCES: &[(&str, &str)] = &[
    (
        "abi/mod.rs",
        include_str!("../../../../guest/src/abi/mod.rs"),
    ),
    ("abi/p1.rs", include_str!("../../../../guest/src/abi/p1.rs")),
    ("abi/p2.rs", include_str!("../../../../guest/src/abi/p2.rs")),
    (
        "allocator.rs",
        include_str!("../../../../guest/src/allocator.rs"),
    ),
    (
        "argument.rs",
        include_str!("../../../../guest/src/argument.rs"),
    ),
    (
        "constraint.rs",
        include_str!("../../../../guest/src/constraint.rs"),
    ),
    (
        "constraint/pattern.rs",
        include_str!("../../../../guest/src/constraint/pattern.rs"),
    ),
    (
        "constraint/substring.rs",
        include_str!("../../../../guest/src/constraint/substring.rs"),
    ),
    (
        "controller.rs",
        include_str!("../../../../guest/src/controller.rs"),
    ),
    (
        "grammar.rs",
        include_str!("../../../../guest/src/grammar.rs"),
    ),
    (
        "grammar/held.rs",
        include_str!("../../../../guest/src/grammar/held.rs"),
    ),
    (
        "grammar/local.rs",
        include_str!("../../../../guest/src/grammar/local.rs"),
    ),
    ("json.rs", include_str!("../../../../guest/src/json.rs")),
    (
        "json/reader.rs",
        include_str!("../../../../guest/src/json/reader.rs"),
    ),
    ("lib.rs", include_str!("../../../../guest/src/lib.rs")),
    ("log.rs", include_str!("../../../../guest/src/log.rs")),
    ("mask.rs", include_str!("../../../../guest/src/mask.rs")),
    (
        "matcher.rs",
        include_str!("../../../../guest/src/matcher.rs"),
    ),
    (
        "native/host.rs",
        include_str!("../../../../guest/src/native/host.rs"),
    ),
    (
        "native/mod.rs",
        include_str!("../../../../guest/src/native/mod.rs"),
    ),
    (
        "native/variables.rs",
        include_str!("../../../../guest/src/native/variables.rs"),
    ),
    (
        "prelude.rs",
        include_str!("../../../../guest/src/prelude.rs"),
    ),
    (
        "testing/cases.rs",
        include_str!("../../../../guest/src/testing/cases.rs"),
    ),
    (
        "testing/mod.rs",
        include_str!("../../../../guest/src/testing/mod.rs"),
    ),
    (
        "testing/steps.rs",
        include_str!("../../../../guest/src/testing/steps.rs"),
    ),
    (
        "testing/vocabulary.rs",
        include_str!("../../../../guest/src/testing/vocabulary.rs"),
    ),
    ("trie.rs", include_str!("../../../../guest/src/trie.rs")),
    ("vars.rs", include_str!("../../../../guest/src/vars.rs")),
    (
        "wasm/host.rs",
        include_str!("../../../../guest/src/wasm/host.rs"),
    ),
    (
        "wasm/mod.rs",
        include_str!("../../../../guest/src/wasm/mod.rs"),
    ),
];

/// The manifest of the SDK within a project.
pub(super) const MANIFEST: &str = concat!(
    "# The SDK for controllers, as this version of Sapwood has it. Replace it by that of a newer version at will.\n",
    "[package]\n",
    "name = \"sapwood-guest\"\n",
    "version = \"",
    env!("CARGO_PKG_VERSION"),
    "\"\n",
    "edition = \"2024\"\n",
    "license = \"MIT OR Apache-2.0\"\n",
    "publish = false\n\n",
    "[features]\n",
    "host = []\n",
    "p1 = []\n",
    "std = []\n",
);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// The files of a folder, tests left out, below `root`.
    fn files(root: &Path, folder: &Path, into: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(root, &path, into);
            } else if path.file_name().is_some_and(|name| name != "tests.rs") {
                let below = path.strip_prefix(root).unwrap();
                into.insert(below.to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    fn the_binary_has_every_file_of_the_sdk() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/src");
        let mut there = BTreeSet::new();
        files(&root, &root, &mut there);
        let here: BTreeSet<String> = SOURCES.iter().map(|(path, _)| (*path).to_owned()).collect();
        assert_eq!(here, there);
    }
}
