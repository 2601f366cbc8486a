//! Forks are exact copies (AI-711, AI-713).

use super::*;

/// Mixes the memory, globals, table and segments it can see into a hash, prints it, and changes all of them.
///
/// `mid` changes them by the sequence's id, so that parent and children go different ways.
fn hashing() -> String {
    P1 {
        globals: r#"
            (memory (export "memory") 2)
            (global $a (mut i32) (i32.const 1)) (global $b (mut i64) (i64.const 2))
            (global $c (mut f64) (f64.const 0.5)) (global $f (mut funcref) (ref.null func))
            (global $x (mut externref) (ref.null extern))
            (type $unary (func (param i32) (result i32)))
            (table $t 4 20 funcref) (table $e 1 20 externref)
            (elem (table $t) (i32.const 0) func $one $two)
            (elem $passive func $three $two)
            (data $dropped "abcd")
            (data (i32.const 5000) "start of the memory")"#,
        functions: r#"
            (func $one (type $unary) (i32.add (local.get 0) (i32.const 1)))
            (func $two (type $unary) (i32.mul (local.get 0) (i32.const 3)))
            (func $three (type $unary) (i32.xor (local.get 0) (i32.const 0x5555)))
            (func $start (i32.store (i32.const 5200) (i32.add (i32.load (i32.const 5200)) (i32.const 1))))
            (start $start)
            (func $mix (param $h i32) (param $v i32) (result i32)
                (i32.mul (i32.xor (local.get $h) (local.get $v)) (i32.const 16777619)))
            (func $hash (result i32) (local $h i32) (local $i i32)
                (local.set $h (i32.const -2128831035))
                (local.set $i (i32.const 4096))
                (loop $l
                    (local.set $h (call $mix (local.get $h) (i32.load (local.get $i))))
                    (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 4)))
                        (i32.shl (memory.size) (i32.const 16)))))
                (local.set $h (call $mix (local.get $h) (memory.size)))
                (local.set $h (call $mix (local.get $h) (global.get $a)))
                (local.set $h (call $mix (local.get $h) (i32.wrap_i64 (global.get $b))))
                (local.set $h (call $mix (local.get $h) (i32.wrap_i64 (i64.reinterpret_f64 (global.get $c)))))
                (local.set $h (call $mix (local.get $h) (ref.is_null (global.get $f))))
                (local.set $h (call $mix (local.get $h) (table.size $t)))
                (local.set $h (call $mix (local.get $h) (table.size $e)))
                (local.set $i (i32.const 0))
                (loop $l
                    (if (ref.is_null (table.get $t (local.get $i)))
                        (then (local.set $h (call $mix (local.get $h) (i32.const 7))))
                        (else (local.set $h (call $mix (local.get $h)
                            (call_indirect $t (type $unary) (local.get $i) (local.get $i))))))
                    (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (table.size $t))))
                (local.get $h))
            (func $change (param $by i32)
                (global.set $a (i32.add (global.get $a) (local.get $by)))
                (global.set $b (i64.mul (global.get $b) (i64.const 3)))
                (global.set $c (f64.mul (global.get $c) (f64.const 1.25)))
                (i32.store (i32.add (i32.const 6000) (i32.shl (i32.rem_u (global.get $a) (i32.const 20000)) (i32.const 2)))
                    (global.get $a))
                (global.set $f (table.get $t (i32.rem_u (global.get $a) (i32.const 2))))
                (table.set $t (i32.const 3) (global.get $f))
                (if (i32.eq (i32.rem_u (global.get $a) (i32.const 5)) (i32.const 0)) (then
                    (drop (table.grow $t (ref.func $three) (i32.const 1)))
                    (drop (table.grow $e (ref.null extern) (i32.const 1)))
                    (i32.store8 (i32.const 5001) (i32.const 0))))
                (if (i32.eq (i32.rem_u (global.get $a) (i32.const 7)) (i32.const 0)) (then
                    (drop (memory.grow (i32.const 1)))
                    (i32.store (i32.sub (i32.shl (memory.size) (i32.const 16)) (i32.const 4)) (global.get $a)))))"#,
        mid: "(call $change (i32.add (i32.const 1) (call $id)))
              (call $hex (call $hash)) (call $ret (i32.const 64) (i32.const 21))",
        // Initialises from segments that it drops: a second time that traps, in a fork too.
        post: "(memory.init $dropped (i32.const 5100) (i32.const 0) (i32.const 4)) (data.drop $dropped)
               (table.init $t $passive (i32.const 1) (i32.const 0) (i32.const 2)) (elem.drop $passive)
               (call $ret (i32.const 96) (i32.const 14))",
        ..P1::default()
    }
    .text()
}

/// What a sequence prints whose steps had these ids, without any fork.
fn unforked(host: &Host, program: &Program, ids: &[u32]) -> String {
    let mut sequence = Sequence::start(host, program).begun();
    let mut last = String::new();
    for id in ids {
        sequence.instance.bind(*id);
        last = sequence.mid().report.logs;
    }
    last
}

/// AI-711
/// AI-610: what a fork copies is all the state there is.
#[test]
fn ai_713_sixteen_forks_at_each_of_twenty_steps_have_the_hashes_of_unforked_runs() {
    let host = host();
    let program = load(&host, &hashing());
    let group = Group::new(17, VariablesLimits::default());
    let mut trunk = Sequence::start_in(&host, &program, &group).begun();
    let mut path = Vec::new();
    for step in 0..20_u32 {
        let mut forks: Vec<_> = (0..16).map(|_| trunk.fork()).collect();
        // What they print depends on their ids. Two, so that two unforked runs are compared with all of them.
        for (index, fork) in (0..).zip(&mut forks) {
            fork.instance.bind(step * 20 + index % 2);
            let fork_group = vec![1];
            fork.instance.call(Callback::Mid { fork_group });
        }
        // The trunk goes on while the forks run.
        let id = step * 20 + 17;
        trunk.instance.bind(id);
        let trunk_hash = trunk.mid().report.logs;
        let expected = [0, 1].map(|index| {
            let ids: Vec<_> = path.iter().copied().chain([step * 20 + index]).collect();
            unforked(&host, &program, &ids)
        });
        assert_ne!(expected[0], expected[1]);
        for (index, fork) in forks.iter_mut().enumerate() {
            let outcome = fork.outcome();
            assert!(outcome.result.is_ok(), "{outcome:?}");
            assert_eq!(outcome.report.logs, expected[index % 2], "{step} {index}");
        }
        path.push(id);
        assert_eq!(trunk_hash, unforked(&host, &program, &path));
        drop(forks);
        Bell::default().wait(|| (host.live() == 1).then_some(()));
    }
}

#[test]
fn ai_711_dropped_segments_stay_dropped_in_a_fork() {
    let host = host();
    let program = load(&host, &hashing());
    let mut parent = Sequence::start(&host, &program).begun();
    let mut before = parent.fork();
    assert!(parent.post(&[1]).result.is_ok());
    let mut after = parent.fork();
    // The table as the parent's segment has left it.
    let hashes = [parent.mid(), after.mid()].map(|outcome| outcome.report.logs);
    assert_eq!(hashes[0], hashes[1]);
    for sequence in [&mut parent, &mut after] {
        let failure = failure(sequence.post(&[1]));
        assert!(failure.message.contains("out of bounds"), "{failure}");
    }
    assert!(before.post(&[1]).result.is_ok());
}

#[test]
fn ai_711_blobs_are_copied_and_logs_are_not() {
    let host = host();
    let module = P1 {
        pre: "(i32.store8 (i32.const 1024) (i32.const 5))
              (drop (call $tokenize (i32.const 1024) (i32.const 1)))
              (call $ret (i32.const 8) (i32.const 46))",
        mid: "(drop (call $blob (i32.const 2) (i32.const 1028) (i32.const 4)))
              (call $hex (i32.load (i32.const 1028))) (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    };
    let mut parent = Sequence::start(&host, &load(&host, &module.text())).begun();
    parent.pre();
    let mut child = parent.fork();
    assert_eq!(child.mid().report.logs, "00000007 ");
}

#[test]
fn ai_714_a_fork_of_a_failed_sequence_fails() {
    let host = host();
    let module = P1 {
        mid: "unreachable",
        ..P1::default()
    };
    let mut parent = Sequence::start(&host, &load(&host, &module.text())).begun();
    assert!(parent.mid().result.is_err());
    let mut child = parent.fork();
    assert_eq!(failure(child.outcome()).message, "Previous WASM Error");
    let mut grandchild = child.fork();
    assert_eq!(failure(grandchild.outcome()).message, "Previous WASM Error");
    drop((parent, child, grandchild));
    wait_until_free(&host);
}

/// AI-711
#[test]
fn ai_1105_a_large_memory_of_which_little_was_written_is_copied_exactly() {
    let host = new_host(HostConfig {
        memory_bytes: 32 << 20,
        ..small()
    });
    // 16 MiB, of which `pre` writes a word in each 16th page, and initial data at both ends of a page.
    let module = P1 {
        globals: "(memory (export \"memory\") 256)
            (data (i32.const 1048570) \"across a page\") (data (i32.const 9000000) \"alone\")",
        pre: "(local $i i32)
            (local.set $i (i32.const 65536))
            (loop $l
                (i32.store (local.get $i) (i32.add (i32.load (local.get $i)) (i32.const 0x01010101)))
                (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 65532))) (i32.const 16000000))))
            (i32.store (i32.const 1048576) (i32.const 0))
            (i32.store8 (i32.const 16777215) (i32.const 77))
            (call $ret (i32.const 8) (i32.const 46))",
        mid: "(local $i i32) (local $h i32)
            (local.set $i (i32.const 65536))
            (loop $l
                (local.set $h (i32.mul (i32.xor (local.get $h) (i32.load (local.get $i))) (i32.const 16777619)))
                (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 4))) (i32.const 16777216))))
            (call $hex (local.get $h)) (call $ret (i32.const 64) (i32.const 21))",
        ..P1::default()
    };
    let mut parent = Sequence::start(&host, &load(&host, &module.text())).begun();
    let fresh = parent.fork().mid().report.logs;
    parent.pre();
    let mut child = parent.fork();
    child.pre();
    let mut grandchild = child.fork();
    let once = parent.mid().report.logs;
    assert_eq!(grandchild.mid().report.logs, child.mid().report.logs);
    assert_ne!(once, fresh);
    assert_ne!(once, child.mid().report.logs);
    assert_eq!(parent.fork().mid().report.logs, once);
    // A slot that another instance has used shows nothing of it.
    drop((parent, child, grandchild));
    wait_until_free(&host);
    let mut again = Sequence::start(&host, &load(&host, &module.text())).begun();
    assert_eq!(again.fork().mid().report.logs, fresh);
    assert_eq!(again.mid().report.logs, fresh);
}
