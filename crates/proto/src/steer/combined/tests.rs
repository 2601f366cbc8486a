//! Combined steerers, driven as an engine drives them.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::super::{ConditionalSplice, Mask, Splice, VariableWrite};
use super::*;

mod patterns;

struct NoWaker;

impl StepWaker for NoWaker {
    fn wake(&self) {}
}

fn waker() -> Arc<dyn StepWaker> {
    Arc::new(NoWaker)
}

fn run(tokens: &[Token]) -> Pre {
    Pre::Run {
        fast_forward: tokens.to_vec(),
    }
}

fn splice(backtrack: u32, tokens: &[Token]) -> Splice {
    Splice {
        backtrack,
        tokens: tokens.to_vec(),
    }
}

fn sample(sample: Sample) -> Mid {
    Mid::One(Branch::Sample(sample))
}

fn mask(tokens: &[Token]) -> SharedMask {
    let mut mask = Mask::none(SIZE);
    tokens.iter().for_each(|&token| mask.allow(token));
    Arc::new(mask)
}

/// The size of the vocabulary.
const SIZE: usize = 8;

/// Returns scripted results in order, `None` where there is none yet; then it runs and samples freely. Logs its calls.
#[derive(Clone, Default)]
struct Script {
    begun: Option<Vec<Token>>,
    pres: VecDeque<Option<Pre>>,
    mids: VecDeque<Option<Mid>>,
    posts: VecDeque<Post>,
    /// It accepts tokens below this only.
    accepts_below: Option<Token>,
    ends_at_eos: bool,
    limits_itself: bool,
    report: Option<StepReport>,
    name: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Script {
    fn note(&self, what: impl std::fmt::Display) {
        let line = format!("{}{what}", self.name);
        self.log.lock().unwrap().push(line);
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

impl Steer for Script {
    fn begin(&mut self, prompt: &[Token], _waker: &Arc<dyn StepWaker>) {
        self.note(format!("begin {prompt:?}"));
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        Ok(Some(Begun {
            prompt: self.begun.take(),
        }))
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        self.note("pre");
        Ok(self.pres.pop_front().unwrap_or_else(|| Some(run(&[]))))
    }

    fn mid_begin(&mut self, group: &[u32]) {
        self.note(format!("mid {group:?}"));
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let free = || Some(sample(Sample::default()));
        Ok(self.mids.pop_front().unwrap_or_else(free))
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let Appended {
            backtrack,
            tokens,
            sampled,
        } = appended;
        self.note(format!("post {backtrack} {tokens:?} {sampled:?}"));
        Ok(self.posts.pop_front().unwrap_or(Post::Continue))
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let name = format!("{}{index}:", self.name);
        Ok(Box::new(Self {
            name,
            ..self.clone()
        }))
    }

    fn would_accept(&mut self, _backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        let below = self.accepts_below.unwrap_or(Token::MAX);
        Ok(tokens.iter().all(|&token| token < below))
    }

    fn flush(&mut self) {
        self.note("flush");
    }

    fn limits_itself(&self) -> bool {
        self.limits_itself
    }

    fn ends_at_eos(&self) -> bool {
        self.ends_at_eos
    }

    fn take_report(&mut self) -> Option<StepReport> {
        self.report.take()
    }
}

fn combined(parts: [&Script; 2]) -> Box<dyn Steer> {
    let parts = parts.map(|part| Box::new(part.clone()) as Box<dyn Steer>);
    let mut steer = Combined::new(parts.into());
    steer.begin(&[], &waker());
    assert_eq!(steer.begin_poll(), Ok(Some(Begun::default())));
    steer
}

/// One round up to the result of `mid`, where all parts have their results at once.
fn decide(steer: &mut Box<dyn Steer>) -> Steered<Mid> {
    assert_eq!(steer.pre(), Ok(Some(run(&[]))));
    steer.mid_begin(&[1]);
    steer.mid_poll().map(Option::unwrap)
}

fn failed<T: std::fmt::Debug>(result: Steered<T>) -> &'static str {
    result.unwrap_err().reason.name()
}

#[test]
fn ai_803_a_single_steerer_is_itself() {
    let mut only = Combined::new(vec![Box::new(Script {
        pres: [Some(Pre::Fork(3))].into(),
        ..Script::default()
    })]);
    assert_eq!(only.pre(), Ok(Some(Pre::Fork(3))));
}

#[test]
fn ai_803_each_begins_with_the_prompt_that_the_one_before_it_left() {
    let log = Arc::default();
    let part = |name: &str, begun: Option<&[Token]>| -> Box<dyn Steer> {
        Box::new(Script {
            begun: begun.map(<[Token]>::to_vec),
            name: name.to_owned(),
            log: Arc::clone(&log),
            ..Script::default()
        })
    };
    let parts = vec![part("a ", None), part("b ", Some(&[7])), part("c ", None)];
    let mut steer = Combined::new(parts);
    steer.begin(&[1, 2], &waker());
    let prompt = Some(vec![7]);
    assert_eq!(steer.begin_poll(), Ok(Some(Begun { prompt })));
    let log = log.lock().unwrap();
    assert_eq!(*log, ["a begin [1, 2]", "b begin [1, 2]", "c begin [7]"]);
}

#[test]
fn ai_803_masks_are_intersected_and_shared_if_there_is_only_one() {
    let (first, second) = (mask(&[1, 2, 3]), mask(&[2, 3, 4]));
    let with = |mask: &SharedMask, bias, temperature| Script {
        mids: [Some(sample(Sample {
            mask: Some(Arc::clone(mask)),
            bias: vec![(2, bias)],
            temperature,
            splices: Vec::new(),
        }))]
        .into(),
        ..Script::default()
    };
    let one = with(&first, 0.5, None);
    let mid = decide(&mut combined([&one, &Script::default()])).unwrap();
    let Mid::One(Branch::Sample(alone)) = mid else {
        panic!("{mid:?}")
    };
    assert!(Arc::ptr_eq(alone.mask.as_ref().unwrap(), &first));
    let parts = [&one, &with(&second, 0.25, Some(0.0))];
    let mid = decide(&mut combined(parts)).unwrap();
    let expected = Sample {
        mask: Some(mask(&[2, 3])),
        bias: vec![(2, 0.5), (2, 0.25)],
        temperature: Some(0.0),
        splices: Vec::new(),
    };
    assert_eq!(mid, sample(expected));
    assert_eq!(first, mask(&[1, 2, 3]), "what is shared does not change");
    let other = with(&Arc::new(Mask::all(9)), 0.0, None);
    let result = decide(&mut combined([&one, &other]));
    assert_eq!(failed(result), "bad-result");
}

#[test]
fn ai_803_it_stops_or_suspends_if_one_does_and_the_others_keep_their_results() {
    let stops = Script {
        pres: [None, Some(Pre::Suspend), Some(Pre::Stop)].into(),
        ..Script::default()
    };
    let runs = Script::default();
    let mut steer = combined([&stops, &runs]);
    assert_eq!(steer.pre(), Ok(None), "one has no result yet");
    assert_eq!(steer.pre(), Ok(Some(Pre::Suspend)));
    assert_eq!(steer.pre(), Ok(Some(Pre::Stop)));
    assert_eq!(runs.log(), ["begin []", "pre"], "asked once");
    for (other, expected) in [(run(&[]), Pre::Wait), (Pre::Suspend, Pre::Suspend)] {
        let waits = Script {
            pres: [Some(Pre::Wait), Some(run(&[]))].into(),
            ..Script::default()
        };
        let others = Script {
            pres: [Some(other)].into(),
            ..Script::default()
        };
        let mut steer = combined([&waits, &others]);
        // AI-1005: a part that is suspended without a reason is asked in every step.
        assert_eq!(steer.pre(), Ok(Some(expected)));
        assert_eq!(steer.pre(), Ok(Some(run(&[]))));
    }
    let stops = Script {
        mids: [None, Some(Mid::Stop)].into(),
        ..Script::default()
    };
    let mut steer = combined([&runs, &stops]);
    assert_eq!(steer.pre(), Ok(Some(run(&[]))));
    steer.mid_begin(&[1]);
    assert_eq!(steer.mid_poll(), Ok(None));
    assert_eq!(steer.mid_poll(), Ok(Some(Mid::Stop)));
    let stops = Script {
        posts: [Post::Stop].into(),
        ..Script::default()
    };
    let mut steer = combined([&stops, &runs]);
    runs.log();
    let appended = Appended {
        tokens: &[5],
        sampled: Some(5),
        ..Appended::default()
    };
    assert_eq!(steer.post(appended), Ok(Post::Stop));
    assert!(runs.log().contains(&"post 0 [5] Some(5)".to_owned()));
}

#[test]
fn ai_803_forced_tokens_are_checked_with_the_others_and_fed_to_them() {
    let forces = Script {
        pres: [Some(run(&[4, 5]))].into(),
        ..Script::default()
    };
    let accepts = Script {
        accepts_below: Some(6),
        ..Script::default()
    };
    let mut steer = combined([&forces, &accepts]);
    assert_eq!(steer.pre(), Ok(Some(run(&[4, 5]))));
    let fed = ["begin []", "pre", "post 0 [4, 5] None", "pre"];
    assert_eq!(accepts.log(), fed);
    assert_eq!(forces.log(), ["begin []", "pre"]);
    let refuses = Script {
        accepts_below: Some(5),
        ..Script::default()
    };
    let mut steer = combined([&forces, &refuses]);
    assert_eq!(failed(steer.pre()), "constraint_failed");
    // Both force: one may force more than the other, but not something else.
    let more = Script {
        pres: [Some(run(&[4, 5, 6]))].into(),
        ..Script::default()
    };
    let mut steer = combined([&forces, &more]);
    assert_eq!(steer.pre(), Ok(Some(run(&[4, 5, 6]))));
    assert!(forces.log().contains(&"post 0 [6] None".to_owned()));
    let other = Script {
        pres: [Some(run(&[4, 6]))].into(),
        ..Script::default()
    };
    let mut steer = combined([&other, &forces]);
    assert_eq!(failed(steer.pre()), "constraint_failed");
}

#[test]
fn ai_405_forced_tokens_lead_to_further_ones_up_to_ten_times() {
    let forces = |rounds: usize| Script {
        pres: std::iter::repeat_n(Some(run(&[1])), rounds).collect(),
        ..Script::default()
    };
    // It forces nothing at first; then each of the two is asked again after the other's tokens.
    let other = Script {
        pres: std::iter::once(Some(run(&[])))
            .chain(std::iter::repeat_n(Some(run(&[2])), 5))
            .collect(),
        ..Script::default()
    };
    let mut steer = combined([&forces(5), &other]);
    let tokens = [1, 2].repeat(5);
    assert_eq!(steer.pre(), Ok(Some(run(&tokens))), "ten rounds");
    let mut steer = combined([&forces(6), &other]);
    assert_eq!(failed(steer.pre()), "bad-result");
}

#[test]
fn ai_803_a_part_that_stops_at_forced_tokens_ends_after_them() {
    let forces = Script {
        pres: [Some(run(&[4]))].into(),
        ..Script::default()
    };
    let stops = Script {
        posts: [Post::Stop].into(),
        ..Script::default()
    };
    let mut steer = combined([&forces, &stops]);
    assert_eq!(steer.pre(), Ok(Some(run(&[4]))));
    steer.mid_begin(&[1]);
    assert_eq!(steer.mid_poll(), Ok(Some(Mid::Stop)));
}

#[test]
fn ai_803_splices_must_satisfy_the_others() {
    let splices = Script {
        mids: [Some(Mid::One(Branch::Splice(splice(1, &[3, 4]))))].into(),
        ..Script::default()
    };
    for (below, expected) in [
        (5, Ok(Mid::One(Branch::Splice(splice(1, &[3, 4]))))),
        (4, Err("constraint_failed")),
    ] {
        let accepts = Script {
            accepts_below: Some(below),
            ..Script::default()
        };
        let mid = decide(&mut combined([&splices, &accepts]));
        assert_eq!(mid.map_err(|failure| failure.reason.name()), expected);
    }
    let other = Script {
        mids: [Some(Mid::One(Branch::Splice(splice(0, &[3, 4]))))].into(),
        ..Script::default()
    };
    let mid = decide(&mut combined([&splices, &other]));
    assert_eq!(failed(mid), "bad-result", "two splices at once");
    // A conditional splice is checked when it has applied.
    let conditional = Script {
        mids: [Some(sample(Sample {
            splices: vec![ConditionalSplice {
                when_sampled: vec![1],
                keeps_sampled: false,
                splice: splice(0, &[6]),
            }],
            ..Sample::default()
        }))]
        .into(),
        ..Script::default()
    };
    let refuses = Script {
        accepts_below: Some(5),
        ..Script::default()
    };
    let mut steer = combined([&conditional, &refuses]);
    let mid = decide(&mut steer).unwrap();
    assert!(matches!(mid, Mid::One(Branch::Sample(sample)) if sample.splices.len() == 1));
    let appended = Appended {
        backtrack: 0,
        tokens: &[6],
        sampled: Some(1),
    };
    assert_eq!(failed(steer.post(appended)), "constraint_failed");
    let sampled = Appended {
        backtrack: 0,
        tokens: &[6],
        sampled: Some(6),
    };
    assert_eq!(steer.post(sampled), Ok(Post::Continue), "the mask decided");
}

#[test]
fn ai_803_a_noop_of_one_keeps_the_decisions_of_the_others() {
    let waits = Script {
        mids: [Some(Mid::One(Branch::Noop))].into(),
        ..Script::default()
    };
    let decided = Script {
        mids: [Some(sample(Sample {
            mask: Some(mask(&[3])),
            ..Sample::default()
        }))]
        .into(),
        ..Script::default()
    };
    let mut steer = combined([&waits, &decided]);
    assert_eq!(decide(&mut steer), Ok(Mid::One(Branch::Noop)));
    let Ok(Mid::One(Branch::Sample(sample))) = decide(&mut steer) else {
        panic!("no sample")
    };
    assert_eq!(sample.mask, Some(mask(&[3])));
    assert_eq!(decided.log(), ["begin []", "pre", "mid [1]"], "asked once");
    let twice = ["begin []", "pre", "mid [1]", "pre", "mid [1]"];
    assert_eq!(waits.log(), twice);
}

#[test]
fn ai_803_a_fork_forks_all() {
    let forks = Script {
        pres: [Some(Pre::Fork(2))].into(),
        ..Script::default()
    };
    let other = Script::default();
    let mut steer = combined([&forks, &other]);
    assert_eq!(steer.pre(), Ok(Some(Pre::Fork(2))));
    let mut branch = steer.fork(1).unwrap();
    branch.mid_begin(&[1, 2]);
    // It goes on in its parent's round.
    assert_eq!(other.log(), ["begin []", "pre", "1:mid [1, 2]"]);
    assert_eq!(failed(combined([&forks, &forks]).pre()), "bad-result");
}

/// Forks, and forces token 1.
fn forking_and_forcing() -> (Script, Script) {
    let forks = Script {
        pres: [Some(Pre::Fork(2))].into(),
        ..Script::default()
    };
    let forces = Script {
        pres: [Some(run(&[1]))].into(),
        ..Script::default()
    };
    (forks, forces)
}

#[test]
fn ai_803_tokens_that_are_forced_while_another_forks_are_a_splice_of_every_branch() {
    let (forks, forces) = forking_and_forcing();
    let mut steer = combined([&forks, &forces]);
    assert_eq!(steer.pre(), Ok(Some(Pre::Fork(2))));
    let branch = steer.fork(1).unwrap();
    forces.log();
    for mut steer in [steer, branch] {
        steer.mid_begin(&[1, 2]);
        let spliced = Mid::One(Branch::Splice(splice(0, &[1])));
        assert_eq!(steer.mid_poll(), Ok(Some(spliced)));
        let appended = Appended {
            backtrack: 0,
            tokens: &[1],
            sampled: None,
        };
        assert_eq!(steer.post(appended), Ok(Post::Continue));
        assert_eq!(steer.pre(), Ok(Some(run(&[]))));
    }
    let siblings = ["begin []", "pre", "mid [1, 2]", "post 0 [1] None", "pre"];
    let siblings = siblings.map(str::to_owned);
    let log = forks.log();
    assert_eq!(log[..5], siblings, "{log:?}");
    // It has seen its own token when it forced it.
    assert_eq!(forces.log(), ["pre", "1:pre"]);
}

#[test]
fn ai_803_tokens_that_wait_for_a_fork_must_be_accepted_by_all() {
    let (mut forks, forces) = forking_and_forcing();
    forks.accepts_below = Some(1);
    let mut steer = combined([&forks, &forces]);
    steer.pre().unwrap();
    steer.mid_begin(&[1, 2]);
    assert_eq!(failed(steer.mid_poll()), "constraint_failed");
    // A part that skips its step keeps them waiting.
    let (mut forks, forces) = forking_and_forcing();
    forks.mids = [Some(Mid::One(Branch::Noop))].into();
    let mut steer = combined([&forks, &forces]);
    steer.pre().unwrap();
    steer.mid_begin(&[1, 2]);
    assert_eq!(steer.mid_poll(), Ok(Some(Mid::One(Branch::Noop))));
    // The part is asked again, in a round in which the tokens are appended as usual.
    assert_eq!(steer.pre(), Ok(Some(run(&[1]))));
    assert!(forks.log().contains(&"post 0 [1] None".to_owned()));
}

#[test]
fn ai_803_a_fork_waits_for_tokens_that_were_forced_before_it() {
    let forks = Script {
        pres: [Some(run(&[])), Some(Pre::Fork(3))].into(),
        ..Script::default()
    };
    let (_, forces) = forking_and_forcing();
    let mut steer = combined([&forks, &forces]);
    assert_eq!(steer.pre(), Ok(Some(run(&[1]))));
    steer.mid_begin(&[1]);
    let nothing = Mid::Fork(vec![Branch::Noop; 3]);
    assert_eq!(steer.mid_poll(), Ok(Some(nothing)));
    let mut branch = steer.fork(2).unwrap();
    assert_eq!(branch.pre(), Ok(Some(run(&[]))));
    branch.mid_begin(&[1, 2, 3]);
    assert_eq!(branch.mid_poll(), Ok(Some(sample(Sample::default()))));
    let log = forks.log();
    let expected = [
        "begin []",
        "pre",
        "post 0 [1] None",
        "pre",
        "2:mid [1, 2, 3]",
    ];
    assert_eq!(log, expected, "the fork is asked for what it wants once");
    // However many sequences it wants, what is made of it is bounded.
    let forks = Script {
        pres: [Some(run(&[])), Some(Pre::Fork(u32::MAX))].into(),
        ..Script::default()
    };
    let mut steer = combined([&forks, &forking_and_forcing().1]);
    steer.pre().unwrap();
    steer.mid_begin(&[1]);
    let Ok(Some(Mid::Fork(branches))) = steer.mid_poll() else {
        panic!("it forks");
    };
    assert_eq!(branches.len(), 65);
}

#[test]
fn ai_803_ai_505_each_branch_of_a_fork_has_the_demands_of_all() {
    let branch = |allowed: &[Token]| {
        Branch::Sample(Sample {
            mask: Some(mask(allowed)),
            ..Sample::default()
        })
    };
    let forks = Script {
        mids: [Some(Mid::Fork(vec![
            branch(&[1, 2]),
            Branch::Noop,
            branch(&[2, 5]),
        ]))]
        .into(),
        ..Script::default()
    };
    let masks = Script {
        mids: [Some(Mid::One(branch(&[2, 3])))].into(),
        ..Script::default()
    };
    let mut steer = combined([&forks, &masks]);
    let expected = vec![branch(&[2]), Branch::Noop, branch(&[2])];
    assert_eq!(decide(&mut steer), Ok(Mid::Fork(expected)));
    let mut second = steer.fork(1).unwrap();
    let mut third = steer.fork(2).unwrap();
    masks.log();
    // The branch that skips the step keeps the mask; the other one is asked anew.
    assert_eq!(decide(&mut second), Ok(Mid::One(branch(&[2, 3]))));
    assert_eq!(masks.log(), Vec::<String>::new());
    assert_eq!(decide(&mut third), Ok(sample(Sample::default())));
    assert_eq!(masks.log(), ["2:pre", "2:mid [1]"]);
}

#[test]
fn ai_803_the_rest_is_joined() {
    let report = |logs: &str, name: &str, micros| StepReport {
        logs: logs.to_owned(),
        storage: vec![VariableWrite {
            name: name.to_owned(),
            value: Vec::new(),
            append: false,
            when_version_is: None,
        }],
        micros,
    };
    let part = |ends_at_eos, report| Script {
        ends_at_eos,
        report: Some(report),
        ..Script::default()
    };
    let both = [
        &part(true, report("a", "x", 10)),
        &part(false, report("b", "y", 20)),
    ];
    let mut steer = combined(both);
    assert!(!steer.ends_at_eos() && !steer.may_backtrack());
    let joined = steer.take_report().unwrap();
    assert_eq!((&*joined.logs, joined.micros), ("ab", 30));
    let names = joined.storage.iter().map(|write| &*write.name);
    assert_eq!(names.collect::<Vec<_>>(), ["x", "y"]);
    assert_eq!(steer.take_report(), None);
    let ends = part(true, report("", "", 0));
    assert!(combined([&ends, &ends]).ends_at_eos());
}

/// AI-851: its lateness is that of the part that limits itself.
#[test]
fn ai_854_a_flush_reaches_every_part() {
    let log = Arc::default();
    let parts = ["a ", "b "].map(|name| Script {
        name: name.to_owned(),
        log: Arc::clone(&log),
        ..Script::default()
    });
    let mut both = combined([&parts[0], &parts[1]]);
    parts[0].log();
    both.flush();
    assert_eq!(parts[0].log(), ["a flush", "b flush"]);
    assert!(!both.limits_itself());
    let limiting = Script {
        limits_itself: true,
        ..Script::default()
    };
    assert!(combined([&parts[0], &limiting]).limits_itself());
}
