//! The memory of KV cells that nobody has used.

use super::reuse::text;
use super::*;
use crate::embedded::llama::untouched::untouched_bytes;

/// Memory of this process in use, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.unwrap().trim().trim_end_matches(" kB");
    kibibytes.parse::<u64>().unwrap() * 1024
}

#[test]
fn cells_take_memory_once_they_were_used() {
    // 1 KiB for each cell.
    let shape = RandomModelShape {
        context_tokens: 1 << 14,
        width: 256,
        ..RandomModelShape::tiny()
    };
    let options = LoadOptions {
        cache_tokens: Some(1 << 16),
        ..options()
    };
    let bytes: &'static [u8] = written(&shape).leak();
    let source = ModelSource::Bytes(bytes);
    let before = (resident(), untouched_bytes());
    let mut model = load("m", &source, &options, &mut |_| true).unwrap();
    let grown = resident().saturating_sub(before.0);
    let untouched = untouched_bytes() - before.1;
    assert!(untouched > 60 << 20, "{untouched} bytes of cells");
    assert!(grown < untouched / 2, "{grown} of {untouched} bytes in use");
    model.open(0, &opening());
    let expected = row(&mut model, &entries(0, 0, &text(1, 60)));
    let left = untouched_bytes() - before.1;
    assert!(left < untouched && left > untouched / 2, "{left}");
    // Cells that had never been written are as good as others.
    model.release(0);
    model.open(0, &opening());
    alike(&expected, &row(&mut model, &entries(0, 0, &text(1, 60))));
    drop(model);
    assert_eq!(untouched_bytes(), before.1, "freed memory is not promised");
}
