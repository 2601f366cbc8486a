//! What lives and ends with what: the processes of controllers, by `/proc` (AI-702, AI-742).

use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// A process as `/proc` shows it.
#[derive(Debug)]
struct SeenProcess {
    pid: Pid,
    parent: i32,
    state: char,
    /// Processor time that it has used, in ticks.
    ticks: u64,
}

/// All processes of a group, also those that have ended and were not reaped.
fn of_group(group: Pid) -> Vec<SeenProcess> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let seen = |entry: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
        let pid = stat.split(' ').next()?.parse().ok()?;
        // The name may contain anything; the last parenthesis ends it.
        let mut rest = stat[stat.rfind(')')? + 2..].split(' ');
        let state = rest.next()?.chars().next()?;
        let parent = rest.next()?.parse().ok()?;
        if rest.next()? != group.to_string() {
            return None;
        }
        let mut times = rest.skip(8).map(|time| time.parse::<u64>().unwrap());
        Some(SeenProcess {
            pid: Pid::from_raw(pid)?,
            parent,
            state,
            ticks: times.next()? + times.next()?,
        })
    };
    entries.filter_map(seen).collect()
}

fn group_of(host: &Host) -> Pid {
    host.processes().unwrap().group().unwrap()
}

/// The controllers' processes: all but the template.
fn workers(group: Pid) -> Vec<Pid> {
    let seen = of_group(group).into_iter();
    let alive = seen.filter(|seen| seen.pid != group && seen.state != 'Z');
    alive.map(|seen| seen.pid).collect()
}

/// Waits until the template and its clones are gone, without a zombie.
fn wait_until_gone(group: Pid) {
    Bell::default().wait(|| of_group(group).is_empty().then_some(()));
}

/// Processor time of the threads that listen to processes.
fn poller_ticks() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let ticks = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        let (name, rest) = stat.rsplit_once(')')?;
        let times = rest.split(' ').skip(12).take(2);
        name.ends_with("controller-poll")
            .then(|| times.map(|time| time.parse::<u64>().unwrap()).sum::<u64>())
    };
    tasks.filter_map(ticks).sum()
}

fn kill(process: Pid) {
    // It may have ended already.
    let _ = kill_process(process, Signal::KILL);
}

fn looping() -> String {
    P1 {
        mid: "(loop $l (br $l))",
        ..P1::default()
    }
    .text()
}

#[test]
fn ai_702_a_process_has_one_thread_and_no_descriptor_but_its_own_and_waits_asleep() {
    let host = host();
    let program = load(&host, &token_42());
    let mut first = Sequence::start(&host, &program).begun();
    let mut second = Sequence::start(&host, &program).begun();
    let mut child = first.fork();
    assert!(child.pre().result.is_ok());
    let group = group_of(&host);
    let workers = workers(group);
    assert_eq!(workers.len(), 3);
    for worker in &workers {
        let of = |what: &str| std::fs::read_dir(format!("/proc/{worker}/{what}")).unwrap();
        assert_eq!(of("task").count(), 1);
        let links = of("fd").map(|link| std::fs::read_link(link.unwrap().path()).unwrap());
        let links: Vec<_> = links
            .map(|link| link.to_string_lossy().into_owned())
            .collect();
        let count = |start: &str| links.iter().filter(|link| link.starts_with(start)).count();
        // Its program's initial memory may be a file without a name.
        let known = count("/dev/null") + count("socket:") + count("/memfd:wasm");
        assert_eq!(
            (count("/dev/null"), count("socket:"), known),
            (3, 1, links.len()),
            "{links:?}"
        );
    }
    let used = || -> u64 {
        let idle = of_group(group).into_iter();
        idle.filter(|seen| workers.contains(&seen.pid))
            .map(|seen| {
                assert_eq!(seen.state, 'S');
                seen.ticks
            })
            .sum()
    };
    Bell::default().wait(|| {
        let seen = of_group(group);
        seen.iter().all(|seen| seen.state == 'S').then_some(())
    });
    // While one works, the others use no time.
    let mut busy = Sequence::start(&host, &program).begun();
    let before = used();
    for _ in 0..200 {
        assert!(busy.pre().result.is_ok());
    }
    assert_eq!(used(), before);
    assert!(second.pre().result.is_ok());
    drop((first, second, child, busy, program, host));
    wait_until_gone(group);
}

#[test]
fn ai_441_a_late_process_loses_its_priority() {
    let host = new_host(HostConfig {
        step_time: Duration::from_millis(1),
        grace_time: Duration::ZERO,
        late_steps: 1_000_000,
        ..small()
    });
    let program = load(&host, &looping());
    let mut late = Sequence::start(&host, &program).begun();
    let other = Sequence::start(&host, &program).begun();
    let priorities = || {
        let processes = workers(group_of(&host)).into_iter();
        let mut priorities: Vec<_> = processes
            .map(|process| rustix::process::getpriority_process(Some(process)).unwrap())
            .collect();
        priorities.sort_unstable();
        priorities
    };
    let usual = rustix::process::getpriority_process(None).unwrap();
    assert_eq!(priorities(), [usual; 2]);
    let fork_group = vec![3];
    late.instance.call(Callback::Mid { fork_group });
    Bell::default().wait(|| (priorities() == [usual, usual.max(15)]).then_some(()));
    drop((late, other));
}

#[test]
fn ai_742_a_killed_process_ends_its_sequence_and_no_other() {
    let host = host();
    let program = load(&host, &token_42());
    let mut first = Sequence::start(&host, &program).begun();
    let group = group_of(&host);
    let [victim] = workers(group)[..] else {
        panic!("one process");
    };
    let mut child = first.fork();
    let mut grandchild = child.fork();
    assert!(grandchild.pre().result.is_ok());
    kill(victim);
    Bell::default().wait(|| (!of_group(group).iter().any(|seen| seen.pid == victim)).then_some(()));
    let died = failure(first.pre());
    assert_eq!(
        (died.reason, &*died.message),
        (ErrorReason::RUNTIME_LOST, "the controller's process died")
    );
    assert_eq!(failure(first.pre()).message, "Previous WASM Error");
    assert_eq!(
        failure(first.fork().outcome()).message,
        "Previous WASM Error"
    );
    for other in [&mut child, &mut grandchild] {
        assert!(other.mid().result.is_ok());
    }
    // In the middle of a callback too.
    let before = workers(group);
    let mut busy = Sequence::start(&host, &load(&host, &looping())).begun();
    // By what was there before and not by the numbers, which begin anew some time.
    let mut new = workers(group);
    new.retain(|pid| !before.contains(pid));
    let [running] = new[..] else {
        panic!("one more process: {new:?}");
    };
    let fork_group = vec![1];
    busy.instance.call(Callback::Mid { fork_group });
    Bell::default().wait(|| busy.instance.running_since());
    kill(running);
    assert_eq!(failure(busy.outcome()).reason, ErrorReason::RUNTIME_LOST);
    // Failed sequences that are not freed cost no time.
    let before = poller_ticks();
    for _ in 0..100 {
        of_group(group);
    }
    assert_eq!(poller_ticks(), before);
    // Freed before they are dropped: what has ended takes nothing.
    Bell::default().wait(|| (host.live() == 2).then_some(()));
    assert_eq!(of_group(group).len(), 3);
    drop((first, child, grandchild, busy, program));
    wait_until_free(&host);
    drop(host);
    wait_until_gone(group);
}

#[test]
fn ai_702_sequences_outlive_a_killed_template_and_there_is_a_new_one() {
    let host = host();
    let program = load(&host, &token_42());
    let mut first = Sequence::start(&host, &program).begun();
    let old = group_of(&host);
    kill(old);
    Bell::default().wait(|| (of_group(old).len() == 1).then_some(()));
    assert!(first.mid().result.is_ok());
    let mut child = first.fork();
    assert!(child.mid().result.is_ok());
    let mut second = Sequence::start(&host, &program).begun();
    let new = group_of(&host);
    assert_ne!(new, old);
    assert!(second.mid().result.is_ok());
    // Those of the old one are now children of this process, which reaps them.
    let this = i32::try_from(std::process::id()).unwrap();
    assert!(of_group(old).iter().any(|seen| seen.parent == this));
    drop((first, child));
    wait_until_gone(old);
    drop((second, program));
    wait_until_free(&host);
    drop(host);
    wait_until_gone(new);
}

#[test]
fn a_template_that_does_not_work_is_a_failed_start() {
    let config = HostConfig {
        instances: 2,
        ..small()
    };
    assert!(Host::in_processes(config.clone(), vec!["/no/such/program".into()]).is_err());
    // It reads a byte, and ends.
    let command = ["/usr/bin/head", "-c", "1"].map(Into::into).to_vec();
    let host = Host::in_processes(config, command).unwrap();
    let program = load(&host, &token_42());
    for _ in 0..3 {
        let mut sequence = Sequence::start(&host, &program);
        let reason = failure(sequence.outcome()).reason;
        assert!(
            [ErrorReason::RUNTIME_LOST, ErrorReason::LIMIT].contains(&reason),
            "{reason:?}"
        );
        assert_eq!(failure(sequence.pre()).message, "Previous WASM Error");
        drop(sequence);
        wait_until_free(&host);
    }
}

/// A generator of numbers that look random; the seed is fixed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

/// AI-702
#[test]
fn ai_742_after_any_kills_nothing_is_left() {
    let host = host();
    let (good, bad) = (load(&host, &token_42()), load(&host, &looping()));
    let mut chance = Chance(0x5eed_0702);
    let mut groups = vec![group_of(&host)];
    let mut sequences: Vec<Sequence> = Vec::new();
    for _ in 0..150 {
        let group = group_of(&host);
        if !groups.contains(&group) {
            groups.push(group);
        }
        let place = chance.below(sequences.len() + 1);
        let room = sequences.len() < 20;
        match (chance.below(8), sequences.get_mut(place)) {
            (0 | 1, _) if room => {
                let program = if chance.below(3) == 0 { &bad } else { &good };
                sequences.push(Sequence::start(&host, program));
            }
            (2, Some(sequence)) => {
                if let Ok(instance) = sequence.instance.fork() {
                    let bell = Arc::clone(&sequence.bell);
                    sequences.push(Sequence { instance, bell });
                }
            }
            (3, Some(sequence)) => {
                let fork_group = vec![1];
                sequence.instance.call(Callback::Mid { fork_group });
            }
            (4, Some(sequence)) => drop(sequence.instance.poll()),
            (5, Some(_)) => drop(sequences.swap_remove(place)),
            (6, _) => {
                let alive: Vec<_> = groups.iter().copied().flat_map(workers).collect();
                if !alive.is_empty() {
                    kill(alive[chance.below(alive.len())]);
                }
            }
            (7, _) if chance.below(6) == 0 => kill(group),
            _ => {}
        }
    }
    // After all of that it works.
    let mut last = Bell::default().wait(|| {
        let mut sequence = Sequence::start(&host, &good);
        sequence.outcome().result.is_ok().then_some(sequence)
    });
    assert!(last.mid().result.is_ok());
    groups.push(group_of(&host));
    drop((last, sequences));
    wait_until_free(&host);
    drop((good, bad, host));
    for group in groups {
        wait_until_gone(group);
    }
}
