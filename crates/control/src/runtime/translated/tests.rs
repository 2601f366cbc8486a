//! Modules of each generation behind the callbacks of the other, with scripted instances.

use std::sync::Arc;

use sapwood_proto::steer::{Mask, Token, VariableWrite};

use super::super::scripted::*;
use super::super::sequence::{
    Callback, MidReturned, Returned, ReturnedBranch, ReturnedSplice, Sequence as _,
};
use super::*;
use crate::host::{Group, VariablesLimits, Waiting};

fn process(tokens: &[Token]) -> Callback {
    Callback::Process {
        backtrack: 0,
        tokens: tokens.to_vec(),
        sampled: tokens.first().copied(),
        fork_group: vec![4],
    }
}

fn posted(backtrack: u32, tokens: &[Token]) -> Callback {
    Callback::Post {
        backtrack,
        tokens: tokens.to_vec(),
    }
}

fn mask(token: Token) -> Arc<Mask> {
    let mut mask = Mask::none(VOCABULARY);
    mask.allow(token);
    Arc::new(mask)
}

fn sample(token: Token, splices: &[ReturnedSplice]) -> ReturnedBranch {
    ReturnedBranch {
        mask: Some(mask(token)),
        temperature: None,
        splices: splices.to_vec(),
        wait: None,
    }
}

fn splice(when_sampled: &[Token], backtrack: u32, ff_tokens: &[Token]) -> ReturnedSplice {
    ReturnedSplice {
        when_sampled: when_sampled.to_vec(),
        backtrack,
        ff_tokens: ff_tokens.to_vec(),
    }
}

fn without_mask(backtrack: u32, ff_tokens: &[Token]) -> ReturnedBranch {
    ReturnedBranch {
        mask: None,
        temperature: None,
        splices: vec![splice(&[], backtrack, ff_tokens)],
        wait: None,
    }
}

fn pre_of(num_forks: u32, suspend: bool, ff_tokens: &[Token]) -> Returned {
    Returned::Pre {
        num_forks,
        suspend,
        ff_tokens: ff_tokens.to_vec(),
        wait: None,
    }
}

fn call(sequence: &mut WireInstance<Scripted>, callback: Callback) -> Returned {
    sequence.call(callback);
    sequence.poll().unwrap().result.unwrap()
}

fn p1_on_p2(world: &World, script: impl IntoIterator<Item = Line>) -> WireInstance<Scripted> {
    let mut sequence = WireInstance::p1_on_p2(Scripted::new(world, script), VOCABULARY);
    sequence.bind(4);
    sequence
}

fn p2_on_p1(
    world: &World,
    script: impl IntoIterator<Item = Vec<ReturnedBranch>>,
) -> WireInstance<Scripted> {
    let script = script
        .into_iter()
        .map(|branches| Line::Returns(Returned::Branches(branches)));
    let mut sequence = WireInstance::p2_on_p1(Scripted::new(world, script));
    sequence.bind(4);
    sequence
}

#[test]
fn ai_602_a_p1_module_samples_and_stops_on_the_p2_wire() {
    let world = World::new();
    let mut it = p1_on_p2(
        &world,
        [
            runs(),
            mid(only(7)),
            post(false),
            runs(),
            mid(MidReturned::Stop),
            post(true),
        ],
    );
    assert_eq!(
        call(&mut it, process(&[])),
        Returned::Branches(vec![sample(7, &[])])
    );
    assert_eq!(call(&mut it, process(&[7])), Returned::Branches(vec![]));
    assert_eq!(call(&mut it, process(&[8])), Returned::Branches(vec![]));
    let group = Callback::Mid {
        fork_group: vec![4],
    };
    let calls: Vec<_> = world
        .take_calls()
        .into_iter()
        .map(|(_, call)| call)
        .collect();
    assert_eq!(
        calls,
        [
            Callback::Pre,
            group.clone(),
            posted(0, &[7]),
            Callback::Pre,
            group,
            posted(0, &[8])
        ]
    );
}

#[test]
fn ai_602_fast_forward_of_a_p1_module_is_one_splice_and_posted_once() {
    let world = World::new();
    let script = [
        pre(1, false, &[5]),
        post(false),
        pre(1, false, &[6]),
        post(false),
        runs(),
        runs(),
        mid(only(7)),
    ];
    let mut it = p1_on_p2(&world, script);
    assert_eq!(
        call(&mut it, process(&[])),
        Returned::Branches(vec![without_mask(0, &[5, 6])])
    );
    world.take_calls();
    assert_eq!(
        call(&mut it, process(&[5, 6])),
        Returned::Branches(vec![sample(7, &[])])
    );
    let calls: Vec<_> = world
        .take_calls()
        .into_iter()
        .map(|(_, call)| call)
        .collect();
    assert_eq!(
        calls,
        [
            Callback::Pre,
            Callback::Mid {
                fork_group: vec![4]
            }
        ]
    );
}

#[test]
fn ai_602_a_p1_fork_has_its_masks_in_the_next_step() {
    let world = World::new();
    let mut it = p1_on_p2(
        &world,
        [pre(2, false, &[]), mid(only(7)), pre(1, true, &[])],
    );
    let noop = without_mask(0, &[]);
    assert_eq!(
        call(&mut it, process(&[])),
        Returned::Branches(vec![noop.clone(), noop.clone()])
    );
    let mut child = it.fork().unwrap();
    child.bind(5);
    for sequence in [&mut it, &mut child] {
        assert_eq!(
            call(sequence, process(&[])),
            Returned::Branches(vec![sample(7, &[])])
        );
    }
    assert_eq!(call(&mut it, process(&[])), Returned::Branches(vec![noop]));
}

#[test]
fn ai_602_a_p2_module_decides_in_pre_on_the_p1_wire() {
    let world = World::new();
    let mut it = p2_on_p1(
        &world,
        [
            vec![without_mask(0, &[5, 6])],
            vec![sample(7, &[])],
            vec![without_mask(0, &[])],
            vec![without_mask(2, &[9])],
            vec![],
        ],
    );
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[5, 6]));
    assert_eq!(
        call(&mut it, posted(0, &[5, 6])),
        Returned::Post { stop: false }
    );
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[]));
    // Asked again without having run, it decides nothing new.
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[]));
    let group = Callback::Mid {
        fork_group: vec![4],
    };
    assert_eq!(
        call(&mut it, group.clone()),
        Returned::Mid(MidReturned::Sample(Some(mask(7))))
    );
    call(&mut it, posted(0, &[7]));
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, true, &[]));
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[]));
    let spliced = MidReturned::Splice {
        backtrack: 2,
        ff_tokens: vec![9],
    };
    assert_eq!(call(&mut it, group), Returned::Mid(spliced));
    call(&mut it, posted(2, &[9]));
    assert_eq!(call(&mut it, Callback::Pre), pre_of(0, false, &[]));
    let calls: Vec<_> = world
        .take_calls()
        .into_iter()
        .map(|(_, call)| call)
        .collect();
    let expected = |backtrack, tokens: &[Token], sampled| Callback::Process {
        backtrack,
        tokens: tokens.to_vec(),
        sampled,
        fork_group: vec![4],
    };
    assert_eq!(
        calls,
        [
            expected(0, &[], None),
            expected(0, &[5, 6], None),
            expected(0, &[7], Some(7)),
            expected(0, &[], None),
            expected(2, &[9], Some(9))
        ]
    );
}

#[test]
fn ai_602_conditional_splices_of_a_p2_module_follow_their_token() {
    let world = World::new();
    let conditional = sample(7, &[splice(&[8], 2, &[20]), splice(&[7], 0, &[21, 22])]);
    let mut it = p2_on_p1(
        &world,
        [vec![conditional.clone()], vec![conditional], vec![]],
    );
    let group = Callback::Mid {
        fork_group: vec![4],
    };
    call(&mut it, Callback::Pre);
    call(&mut it, group.clone());
    call(&mut it, posted(0, &[7]));
    // The token stays, and more follow it.
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[21, 22]));
    call(&mut it, posted(0, &[21, 22]));
    call(&mut it, Callback::Pre);
    call(&mut it, group.clone());
    call(&mut it, posted(0, &[8]));
    // The token and one before it go; the engine can do that in the next mid.
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[]));
    let spliced = MidReturned::Splice {
        backtrack: 2,
        ff_tokens: vec![20],
    };
    assert_eq!(call(&mut it, group), Returned::Mid(spliced));
    call(&mut it, posted(2, &[20]));
    call(&mut it, Callback::Pre);
    let last = world.take_calls().pop().unwrap().1;
    let expected = Callback::Process {
        backtrack: 1,
        tokens: vec![20],
        sampled: Some(8),
        fork_group: vec![4],
    };
    assert_eq!(last, expected);
}

#[test]
fn ai_502_tokens_that_were_forwarded_were_not_sampled() {
    let world = World::new();
    let follows = sample(7, &[splice(&[7], 0, &[21])]);
    let mut it = p2_on_p1(&world, [vec![without_mask(0, &[5])], vec![follows], vec![]]);
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[5]));
    call(&mut it, posted(0, &[5]));
    call(&mut it, Callback::Pre);
    let group = Callback::Mid {
        fork_group: vec![4],
    };
    call(&mut it, group);
    call(&mut it, posted(0, &[7]));
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[21]));
    call(&mut it, posted(0, &[21]));
    call(&mut it, Callback::Pre);
    let happened = |tokens: &[Token], sampled| {
        let tokens = tokens.to_vec();
        let process = Callback::Process {
            backtrack: 0,
            tokens,
            sampled,
            fork_group: vec![4],
        };
        (4, process)
    };
    assert_eq!(
        world.take_calls(),
        [
            happened(&[], None),
            happened(&[5], None),
            happened(&[7, 21], Some(7))
        ]
    );
}

/// Instances that were started before the engine's first op.
#[test]
fn ai_104_callbacks_of_the_module_s_own_generation_pass_as_they_are() {
    let world = World::new();
    let mut it = p1_on_p2(&world, [runs(), mid(only(7)), post(false)]);
    assert_eq!(call(&mut it, Callback::Pre), pre_of(1, false, &[]));
    let group = Callback::Mid {
        fork_group: vec![4, 5],
    };
    let sampled = Returned::Mid(MidReturned::Sample(Some(mask(7))));
    assert_eq!(call(&mut it, group.clone()), sampled);
    assert_eq!(
        call(&mut it, posted(0, &[7])),
        Returned::Post { stop: false }
    );
    let calls: Vec<_> = world.take_calls().into_iter().map(|it| it.1).collect();
    assert_eq!(calls, [Callback::Pre, group, posted(0, &[7])]);
    let branches = vec![sample(7, &[]), without_mask(1, &[9])];
    let mut it = p2_on_p1(&world, [branches.clone(), branches.clone()]);
    let returned = Returned::Branches(branches);
    assert_eq!(call(&mut it, process(&[])), returned);
    let mut child = it.fork().unwrap();
    child.bind(5);
    assert_eq!(call(&mut child, process(&[7])), returned);
    assert_eq!(world.take_calls(), [(4, process(&[])), (5, process(&[7]))]);
}

#[test]
fn ai_602_branches_of_a_p2_module_are_clones_on_the_p1_wire() {
    let world = World::new();
    let mut it = p2_on_p1(
        &world,
        [
            vec![sample(7, &[]), sample(8, &[]), without_mask(1, &[9])],
            vec![],
        ],
    );
    assert_eq!(call(&mut it, Callback::Pre), pre_of(3, false, &[]));
    let mut children: Vec<_> = [5, 6]
        .into_iter()
        .map(|id| {
            let mut child = it.fork().unwrap();
            child.bind(id);
            child
        })
        .collect();
    let group = || Callback::Mid {
        fork_group: vec![4, 5, 6],
    };
    assert_eq!(
        call(&mut it, group()),
        Returned::Mid(MidReturned::Sample(Some(mask(7))))
    );
    assert_eq!(
        call(&mut children[0], group()),
        Returned::Mid(MidReturned::Sample(Some(mask(8))))
    );
    let spliced = MidReturned::Splice {
        backtrack: 1,
        ff_tokens: vec![9],
    };
    assert_eq!(call(&mut children[1], group()), Returned::Mid(spliced));
    call(&mut children[0], posted(0, &[8]));
    call(&mut children[0], Callback::Pre);
    let (number, last) = world.take_calls().pop().unwrap();
    let expected = Callback::Process {
        backtrack: 0,
        tokens: vec![8],
        sampled: Some(8),
        fork_group: vec![4, 5, 6],
    };
    assert_eq!((number, last), (5, expected));
}

#[test]
fn ai_1005_modules_wait_on_the_other_wire() {
    let world = World::new();
    let group = Group::new(4, VariablesLimits::default());
    let wait = Some(Waiting::of_test(&group, &["go"]));
    let suspends = Returned::Pre {
        num_forks: 1,
        suspend: true,
        ff_tokens: vec![],
        wait: wait.clone(),
    };
    let noop = ReturnedBranch {
        wait,
        ..without_mask(0, &[])
    };
    let mut it = p1_on_p2(&world, [Line::Returns(suspends.clone())]);
    let returned = Returned::Branches(vec![noop.clone()]);
    assert_eq!(call(&mut it, process(&[])), returned);
    let fork = vec![sample(7, &[]), noop.clone()];
    let mut it = p2_on_p1(&world, [vec![noop], fork]);
    assert_eq!(call(&mut it, Callback::Pre), suspends);
    // A branch of a fork that does nothing has one step in which it samples nothing, and then waits.
    assert_eq!(call(&mut it, Callback::Pre), pre_of(2, false, &[]));
    let mut child = it.fork().unwrap();
    let fork_group = vec![4, 5];
    let skipped = MidReturned::Splice {
        backtrack: 0,
        ff_tokens: vec![],
    };
    let mid = call(&mut child, Callback::Mid { fork_group });
    assert_eq!(mid, Returned::Mid(skipped));
    assert_eq!(call(&mut child, Callback::Pre), suspends);
}

/// AI-953: each callback keeps to the limits, and the rounds of a step together do not pass them either.
#[test]
fn ai_608_all_callbacks_of_a_step_print_and_write_as_much_as_one_may() {
    let world = World::new();
    let rounds = (0..10).flat_map(|_| [pre(1, false, &[5]), post(false)]);
    let script = rounds.chain([runs(), mid(only(7))]);
    let logs = format!("{}\u{e9}.", "x".repeat(65_533));
    let write = |number: usize| VariableWrite {
        name: number.to_string(),
        value: Vec::new(),
        append: false,
        when_version_is: None,
    };
    let writes = (0..1_024).map(write).collect();
    let inner = Scripted::new(&world, script)
        .printing(&logs)
        .writing(writes);
    let mut it = WireInstance::p1_on_p2(inner, VOCABULARY);
    it.bind(4);
    it.call(process(&[]));
    let outcome = it.poll().unwrap();
    assert!(outcome.result.is_ok());
    assert_eq!(outcome.report.logs, logs);
    let names: Vec<_> = outcome.report.storage.iter().map(|it| &*it.name).collect();
    assert_eq!(
        (names.len(), names.first(), names.last()),
        (1_024, Some(&"0"), Some(&"1023"))
    );
}
