//! How many processors this process can compute on at once.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

/// Returns the number of processor cores that this process may use: those of its affinity, at most what its control
/// group grants, and two hardware threads of one core counted once, because they share its arithmetic units.
#[must_use]
pub fn usable() -> u32 {
    let granted =
        available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
    let cores = cores(Path::new("/sys/devices/system/cpu"), &allowed());
    cores.map_or(granted, |cores| cores.min(granted)).max(1)
}

/// The numbers of the processors that this process may run on.
#[cfg(target_os = "linux")]
fn allowed() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Vec<usize> {
    Vec::new()
}

/// Returns the number of different cores among the given processors, as the system describes them; `None` if it does not.
fn cores(root: &Path, processors: &[usize]) -> Option<u32> {
    let core = |cpu: &usize| {
        let topology = root.join(format!("cpu{cpu}/topology"));
        // The newer name first. Equal for all hardware threads of a core.
        let read = |name| fs::read_to_string(topology.join(name)).ok();
        read("core_cpus_list").or_else(|| read("thread_siblings_list"))
    };
    let different: HashSet<String> = processors.iter().map(core).collect::<Option<_>>()?;
    u32::try_from(different.len())
        .ok()
        .filter(|&count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_threads_of_a_core_count_once_and_only_where_the_process_may_run() {
        let root = tempfile::tempdir().unwrap();
        let write = |cpu: usize, name: &str, siblings: &str| {
            let topology = root.path().join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(topology.join(name), siblings).unwrap();
        };
        for cpu in 0..2 {
            write(cpu, "core_cpus_list", "0-1\n");
        }
        for cpu in 2..4 {
            write(cpu, "thread_siblings_list", "2-3\n");
        }
        assert_eq!(cores(root.path(), &[0, 1, 2, 3]), Some(2));
        assert_eq!(cores(root.path(), &[0, 1]), Some(1));
        assert_eq!(cores(root.path(), &[0, 2]), Some(2));
        assert_eq!(cores(root.path(), &[0, 9]), None, "not described");
        assert_eq!(cores(root.path(), &[]), None);
        assert!(usable() >= 1);
    }
}
