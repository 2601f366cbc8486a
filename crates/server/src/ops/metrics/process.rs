//! Metrics of the process, under the conventional `process_` names.
//!
//! Not the collector of the crate `prometheus` (feature `process`): it counts processor time in whole seconds, so that a rate
//! over a usual scrape interval is off by several percent, and depends on `procfs` for what are six short files here.

use super::format::MetricsText;

pub(super) fn write(text: &mut MetricsText) {
    // Each family by itself: outside of Linux, or where `/proc` is restricted, what cannot be read is left out.
    if let Some(bytes) = resident_bytes() {
        let help = "Resident memory in bytes.";
        text.gauge("process_resident_memory_bytes", help, bytes);
    }
    if let Some(bytes) = virtual_bytes() {
        let help = "Virtual memory in bytes.";
        text.gauge("process_virtual_memory_bytes", help, bytes);
    }
    if let Some(seconds) = start_seconds() {
        let help = "When it was started, in seconds since 1970.";
        text.gauge("process_start_time_seconds", help, seconds);
    }
    if let Some(open) = open_descriptors() {
        text.gauge("process_open_fds", "Open file descriptors.", open);
    }
    if let Some(most) = crate::listener::descriptors::DescriptorCheck::read().soft {
        text.gauge("process_max_fds", "File descriptors allowed.", most);
    }
    if let Some(seconds) = cpu_seconds() {
        let help = "Processor time used, in seconds.";
        text.counter("process_cpu_seconds_total", help, seconds);
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
