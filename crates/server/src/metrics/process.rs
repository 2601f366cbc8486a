//! What the operating system knows about this process, under the names that scrapers expect of any program.
//!
//! Owns: reading `/proc`; where there is none, the numbers are left out. Refuses to know: everything else.

use super::text::Text;

pub(super) fn write(text: &mut Text) {
    if let Some(bytes) = resident_bytes() {
        text.family(
            "process_resident_memory_bytes",
            "gauge",
            "Resident memory in bytes.",
        );
        text.sample("process_resident_memory_bytes", &[], bytes);
    }
    if let Some(open) = open_descriptors() {
        text.family("process_open_fds", "gauge", "Open file descriptors.");
        text.sample("process_open_fds", &[], open);
    }
    if let Some(most) = crate::descriptors::Descriptors::read().soft {
        text.family("process_max_fds", "gauge", "File descriptors allowed.");
        text.sample("process_max_fds", &[], most);
    }
    if let Some(seconds) = cpu_seconds() {
        text.family(
            "process_cpu_seconds_total",
            "counter",
            "Processor time used, in seconds.",
        );
        text.sample("process_cpu_seconds_total", &[], seconds);
    }
}

fn resident_bytes() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let resident: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    Some(resident * u64::try_from(rustix::param::page_size()).ok()?)
}

fn open_descriptors() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count())
}

#[expect(clippy::cast_precision_loss, reason = "exact below 2^53 ticks")]
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is a name in parentheses that may hold spaces; user and system time are the 14th and 15th.
    let (_, rest) = stat.rsplit_once(") ")?;
    let ticks = rest
        .split(' ')
        .skip(11)
        .take(2)
        .map(str::parse::<u64>)
        .sum::<Result<u64, _>>()
        .ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
