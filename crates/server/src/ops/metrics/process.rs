//! Metrics of the process, under the conventional `process_` names.
//!
//! Not the collector of the crate `prometheus` (feature `process`): it counts processor time in whole seconds, so that a rate
//! over a usual scrape interval is off by several percent, and depends on `procfs` for what are six short files here.

use super::format::MetricsText;

pub(super) fn write(text: &mut MetricsText) {
    // Each family by itself: outside of Linux, or where `/proc` is restricted, what cannot be read is left out.
    if let Some(bytes) = resident_bytes() {
        text.family(
            "process_resident_memory_bytes",
            "gauge",
            "Resident memory in bytes.",
        );
        text.sample("process_resident_memory_bytes", &[], bytes);
    }
    if let Some(bytes) = virtual_bytes() {
        let name = "process_virtual_memory_bytes";
        text.family(name, "gauge", "Virtual memory in bytes.");
        text.sample(name, &[], bytes);
    }
    if let Some(seconds) = start_seconds() {
        let name = "process_start_time_seconds";
        text.family(name, "gauge", "When it was started, in seconds since 1970.");
        text.sample(name, &[], seconds);
    }
    if let Some(open) = open_descriptors() {
        text.family("process_open_fds", "gauge", "Open file descriptors.");
        text.sample("process_open_fds", &[], open);
    }
    if let Some(most) = crate::listener::descriptors::DescriptorCheck::read().soft {
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

/// User and system time: the 14th and 15th field.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    Some(seconds(field(&stat, 14)? + field(&stat, 15)?))
}

fn virtual_bytes() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/self/stat").ok()?, 23)
}

/// The 22nd field counts from the start of the machine, which is in another file.
fn start_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let machine = std::fs::read_to_string("/proc/stat").ok()?;
    let booted = machine
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?;
    Some(booted.trim().parse::<f64>().ok()? + seconds(field(&stat, 22)?))
}

/// A field of `/proc/self/stat`, counted from 1. The second is a name in parentheses that may hold spaces.
fn field(stat: &str, number: usize) -> Option<u64> {
    // From the last parenthesis, because the name may contain some as well.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(number.checked_sub(3)?)?.parse().ok()
}

#[expect(clippy::cast_precision_loss, reason = "exact below 2^53 ticks")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}
