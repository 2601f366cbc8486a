//! What is left of a runtime's processes, however it or one of them ends.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpgid};
use sapwood_control::wire::Synchronisation;
use serde_json::json;

use super::engine::{Engine, EngineSetup, ISOLATIONS, YES};
use crate::process::folder;

/// A process as `/proc` shows it.
#[derive(Debug)]
struct Seen {
    pid: Pid,
    parent: i32,
    group: i32,
    command: String,
}

fn all() -> Vec<Seen> {
    let seen = |entry: std::io::Result<std::fs::DirEntry>| {
        let folder = entry.ok()?.path();
        let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
        let pid = stat.split(' ').next()?.parse().ok()?;
        let mut rest = stat[stat.rfind(')')? + 2..].split(' ').skip(1);
        Some(Seen {
            pid: Pid::from_raw(pid)?,
            parent: rest.next()?.parse().ok()?,
            group: rest.next()?.parse().ok()?,
            command: std::fs::read_to_string(folder.join("cmdline")).unwrap_or_default(),
        })
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(seen)
        .collect()
}

/// The template of a runtime.
fn template(runtime: Pid) -> Pid {
    let runtime = runtime.as_raw_nonzero().get();
    // Not one of its clones that it has left to the runtime.
    let mut templates = all().into_iter().filter(|seen| {
        let leads = seen.group == seen.pid.as_raw_nonzero().get();
        leads && seen.parent == runtime && seen.command.contains("controller-template")
    });
    templates.next().unwrap().pid
}

/// The template and its clones.
fn family(template: Pid) -> Vec<Seen> {
    let group = template.as_raw_nonzero().get();
    let family = all().into_iter().filter(|seen| seen.group == group);
    family.collect()
}

/// How many threads each of the template and its clones has.
pub(super) fn threads(runtime: Pid) -> Vec<usize> {
    let threads = |seen: Seen| {
        let tasks = format!("/proc/{}/task", seen.pid);
        std::fs::read_dir(tasks).unwrap().count()
    };
    family(template(runtime)).into_iter().map(threads).collect()
}

/// Hundredths of a second that these processes have computed.
fn ticks(processes: &[Pid]) -> u64 {
    let of = |process: &Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        let rest = stat[stat.rfind(')').unwrap() + 2..].split(' ');
        let times = rest.skip(11).take(2).map(|time| time.parse::<u64>());
        times.map(Result::unwrap).sum::<u64>()
    };
    processes.iter().map(of).sum()
}

/// Less than 2 % of one core, spins and the clocks of its threads included. AI-702
#[test]
fn ai_214_an_idle_runtime_with_40_sequences_uses_no_processor() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_idle_{isolation}"));
        let mut engine = Engine::start(&folder, &EngineSetup::isolated(isolation));
        engine.install("yes-latest", YES);
        let ids = 1..=40;
        for id in ids.clone() {
            engine.instantiate(&id.to_string(), "yes-latest");
        }
        let bind = |id: i32| json!({"id": id, "req_id": id.to_string()});
        let bind: Vec<_> = ids.clone().map(bind).collect();
        engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind}));
        let ops: Vec<_> = ids.map(|id| json!({"id": id})).collect();
        let answer = engine.main_json(&json!({"op": "mid_process", "ops": ops}));
        assert_eq!(answer["data"]["seqs"]["40"]["error"], "", "{answer}");
        let mut processes = vec![engine.pid()];
        if isolation == "sequence" {
            let family = family(template(engine.pid())).into_iter();
            processes.extend(family.map(|seen| seen.pid));
            assert_eq!(processes.len(), 42);
        }
        let before = ticks(&processes);
        engine.receive_nothing(Duration::from_secs(2));
        let used = ticks(&processes) - before;
        assert!(used < 4, "{isolation}: {used} hundredths of a second");
        assert_eq!(engine.stop(), 0);
    }
}

fn wait_until(what: &str, families: &[Pid], mut is: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !is() {
        let left = || families.iter().copied().map(family).collect::<Vec<_>>();
        assert!(Instant::now() < until, "{what}: {:?}", left());
        std::thread::yield_now();
    }
}

/// A runtime with three sequences, of which one is in an endless loop, and its template.
fn busy(name: &str, under_shell: bool) -> (Engine, Pid, Pid) {
    let folder = folder(name);
    let setup = EngineSetup {
        under_shell,
        // The loop does not end by itself.
        flags: &["--wasm-max-step-time", "100000000"],
        ..EngineSetup::isolated("sequence")
    };
    let mut engine = Engine::start(&folder, &setup);
    engine.install("yes-latest", YES);
    engine.install("loop-latest", &YES.replace("(;MID;)", "(loop $l (br $l))"));
    engine.instantiate("r1", "yes-latest");
    engine.instantiate("r2", "loop-latest");
    let bind = [
        json!({"id": 1, "req_id": "r1"}),
        json!({"id": 2, "req_id": "r2"}),
    ];
    engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind}));
    engine.main_json(&json!({"op": "mid_process", "ops": [{"id": 1}, {"id": 3, "clone_id": 1}]}));
    engine.send_main(&json!({"op": "mid_process", "ops": [{"id": 2}]}));
    let runtime = if under_shell {
        engine.runtime_of_shell()
    } else {
        engine.pid()
    };
    let template = template(runtime);
    assert_eq!(family(template).len(), 4);
    (engine, runtime, template)
}

/// AI-105
#[test]
fn ai_702_nothing_is_left_when_a_runtime_is_stopped() {
    let (engine, runtime, template) = busy("aicirt_left_signal", false);
    rustix::process::kill_process_group(runtime, Signal::TERM).unwrap();
    let mut engine = engine;
    assert_eq!(engine.wait(), Some(0));
    assert!(family(template).is_empty(), "{:?}", family(template));

    let folder = folder("aicirt_left_stop");
    let mut engine = Engine::start(&folder, &EngineSetup::new(Synchronisation::Futex));
    engine.install("yes-latest", YES);
    engine.instantiate("r1", "yes-latest");
    let template = super::processes::template(engine.pid());
    assert_eq!(family(template).len(), 2);
    assert_eq!(engine.stop(), 0);
    assert!(family(template).is_empty(), "{:?}", family(template));
}

/// AI-106
#[test]
fn ai_702_nothing_is_left_when_a_runtime_or_its_engine_is_killed() {
    // Whom the killed leave behind becomes a child of this process, which reaps it.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    for (under_shell, with_template) in [(false, false), (true, false), (false, true)] {
        let name = format!("aicirt_left_{under_shell}_{with_template}");
        let (mut engine, _, template) = busy(&name, under_shell);
        if with_template {
            // So nobody is left who could end the controllers; the one that loops has to find out by itself.
            kill_process(template, Signal::KILL).unwrap();
        }
        engine.kill();
        wait_until("processes are left", &[template], || {
            let _ = waitpgid(template, WaitOptions::NOHANG);
            family(template).is_empty()
        });
    }
}

#[test]
fn ai_742_a_killed_controller_or_template_costs_its_sequence_alone() {
    let folder = folder("aicirt_left_worker");
    let mut engine = Engine::start(&folder, &EngineSetup::isolated("sequence"));
    engine.install("yes-latest", YES);
    engine.instantiate("r1", "yes-latest");
    let old = template(engine.pid());
    let only = |seen: &Seen| seen.pid != old;
    let victim = family(old).into_iter().find(only).unwrap().pid;
    engine.instantiate("r2", "yes-latest");
    let bind = [
        json!({"id": 1, "req_id": "r1"}),
        json!({"id": 2, "req_id": "r2"}),
    ];
    engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind}));
    kill_process(victim, Signal::KILL).unwrap();
    let answer = engine.main_json(&json!({"op": "mid_process", "ops": [{"id": 1}, {"id": 2}]}));
    let seqs = &answer["data"]["seqs"];
    assert_eq!(seqs["1"]["error"], "Worker: died", "{answer}");
    assert_eq!(seqs["2"]["error"], "", "{answer}");
    // It is gone, without a trace.
    wait_until("the killed process is there", &[old], || {
        family(old).len() == 2
    });

    kill_process(old, Signal::KILL).unwrap();
    wait_until("the killed template is there", &[old], || {
        family(old).len() == 1
    });
    engine.instantiate("r3", "yes-latest");
    let bind = [json!({"id": 3, "req_id": "r3"})];
    engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind, "freed": [1]}));
    let answer = engine.main_json(&json!({"op": "mid_process", "ops": [{"id": 2}, {"id": 3}]}));
    for id in ["2", "3"] {
        assert_eq!(answer["data"]["seqs"][id]["error"], "", "{answer}");
    }
    let new = template(engine.pid());
    assert_ne!(new, old);
    engine.main_json(&json!({"op": "post_pre_process", "freed": [2, 3]}));
    wait_until("freed sequences have processes", &[old, new], || {
        family(old).is_empty() && family(new).len() == 1
    });
    assert_eq!(engine.stop(), 0);
    assert!(family(new).is_empty(), "{:?}", family(new));
}
