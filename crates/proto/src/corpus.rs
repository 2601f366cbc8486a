//! Runs the committed fuzzing corpora in tests.

/// Runs every input of a target; there must be at least one.
pub(crate) fn replay(target: &str, run: fn(&[u8])) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("fuzz/corpus has no folder for this target") {
        run(&std::fs::read(entry.unwrap().path()).unwrap());
        files += 1;
    }
    assert!(files > 0);
}
