//! A controller that notes what is reported to it, and asks for what a test gives it.

use std::collections::VecDeque;
use std::sync::Mutex;

use sapwood_proto::steer::{ConditionalSplice, Mask, Sample, Splice};

use super::*;

type Reported = Arc<Mutex<Vec<(Vec<Token>, Option<Token>)>>>;

/// Two tokens end a text, 2 and 5, of which it knows 2.
struct Noting {
    reported: Reported,
    pres: VecDeque<Pre>,
    mids: VecDeque<Mid>,
}

impl Steer for Noting {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        Ok(self.pres.pop_front())
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        Ok(self.mids.pop_front())
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let reported = (appended.tokens.to_vec(), appended.sampled);
        self.reported.lock().unwrap().push(reported);
        Ok(Post::Continue)
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(Self {
            reported: Arc::clone(&self.reported),
            pres: self.pres.clone(),
            mids: self.mids.clone(),
        }))
    }

    fn would_accept(&mut self, _backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        Ok(tokens.last() == Some(&2))
    }

    fn ends_at_eos(&self) -> bool {
        false
    }
}

fn opened(mids: impl IntoIterator<Item = Mid>) -> (Box<dyn Steer>, Reported) {
    opened_with([], mids)
}

fn opened_with(
    pres: impl IntoIterator<Item = Pre>,
    mids: impl IntoIterator<Item = Mid>,
) -> (Box<dyn Steer>, Reported) {
    let reported = Reported::default();
    let inner = Box::new(Noting {
        reported: Arc::clone(&reported),
        pres: pres.into_iter().collect(),
        mids: mids.into_iter().collect(),
    });
    let ends = Ends {
        known: 2,
        others: vec![5],
    };
    (OneEnd::open(inner, Arc::new(ends)), reported)
}

fn mask(tokens: &[Token]) -> Option<Arc<Mask>> {
    let mut mask = Mask::none(9);
    tokens.iter().for_each(|&token| mask.allow(token));
    Some(Arc::new(mask))
}

fn sampling(tokens: &[Token]) -> Branch {
    Branch::Sample(Sample {
        mask: mask(tokens),
        ..Sample::default()
    })
}

#[test]
fn ai_804_every_end_that_is_sampled_is_the_one_that_a_controller_knows() {
    let (steer, reported) = opened([]);
    let mut forked = { steer }.fork(1).unwrap();
    assert!(!forked.ends_at_eos());
    for (tokens, sampled, expected) in [
        (&[5][..], Some(5), (vec![2], Some(2))),
        (&[2], Some(2), (vec![2], Some(2))),
        (&[7], Some(7), (vec![7], Some(7))),
        // In the middle of a text it ends nothing.
        (&[5, 7], None, (vec![5, 7], None)),
        // Another steerer of the sequence has forced it.
        (&[7, 5], None, (vec![7, 2], None)),
        (&[5], None, (vec![2], None)),
        (&[7], Some(5), (vec![7], Some(2))),
        // A splice has kept it.
        (&[5, 7], Some(5), (vec![2, 7], Some(2))),
        (&[5, 5], Some(5), (vec![2, 2], Some(2))),
        (&[7, 5, 7], Some(5), (vec![7, 5, 7], Some(2))),
    ] {
        let appended = Appended {
            backtrack: 1,
            tokens,
            sampled,
        };
        forked.post(appended).unwrap();
        assert_eq!(reported.lock().unwrap().pop(), Some(expected));
    }
}

#[test]
fn ai_804_what_a_controller_forces_itself_it_gets_as_it_is() {
    let splice = Splice {
        backtrack: 0,
        tokens: vec![7, 5],
    };
    let fast_forward = vec![7, 5];
    let (mut steer, reported) = opened_with(
        [Pre::Run { fast_forward }],
        [
            Mid::One(Branch::Splice(splice)),
            Mid::One(sampling(&[2, 5])),
        ],
    );
    let post = |steer: &mut dyn Steer, tokens, sampled| {
        steer
            .post(Appended {
                backtrack: 0,
                tokens,
                sampled,
            })
            .unwrap();
        reported.lock().unwrap().pop().unwrap().0
    };
    steer.pre().unwrap();
    assert_eq!(post(&mut *steer, &[7, 5], None), [7, 5]);
    steer.mid_poll().unwrap();
    let mut fork = steer.fork(1).unwrap();
    assert_eq!(post(&mut *fork, &[7, 5], None), [7, 5]);
    assert_eq!(post(&mut *steer, &[7, 5], None), [7, 5]);
    steer.mid_poll().unwrap();
    assert_eq!(post(&mut *steer, &[5], Some(5)), [2]);
}

#[test]
fn ai_803_ai_804_an_end_that_another_steerer_forces_is_accepted_as_the_known_one() {
    let (mut steer, _) = opened([]);
    assert!(steer.would_accept(0, &[7, 5]).unwrap());
    assert!(steer.would_accept(0, &[2]).unwrap());
    assert!(!steer.would_accept(0, &[5, 7]).unwrap());
}

#[test]
fn ai_804_where_the_known_end_is_allowed_every_end_is() {
    let (mut steer, _) = opened([
        Mid::One(sampling(&[2, 7])),
        Mid::One(sampling(&[7])),
        Mid::One(sampling(&[2, 5])),
        Mid::Fork(vec![sampling(&[2]), Branch::Noop, sampling(&[5])]),
        Mid::Stop,
    ]);
    let mut mid = || steer.mid_poll().unwrap();
    assert_eq!(mid(), Some(Mid::One(sampling(&[2, 5, 7]))));
    assert_eq!(mid(), Some(Mid::One(sampling(&[7]))));
    assert_eq!(mid(), Some(Mid::One(sampling(&[2, 5]))));
    let forks = vec![sampling(&[2, 5]), Branch::Noop, sampling(&[5])];
    assert_eq!(mid(), Some(Mid::Fork(forks)));
    assert_eq!(mid(), Some(Mid::Stop));
    assert_eq!(mid(), None);
}

#[test]
fn ai_804_a_splice_after_the_known_end_is_one_after_every_end() {
    let splice = |when_sampled: &[Token]| {
        Mid::One(Branch::Sample(Sample {
            splices: vec![ConditionalSplice {
                when_sampled: when_sampled.to_vec(),
                keeps_sampled: true,
                splice: Splice {
                    backtrack: 0,
                    tokens: vec![7],
                },
            }],
            ..Sample::default()
        }))
    };
    let (mut steer, _) = opened([splice(&[2]), splice(&[7]), splice(&[])]);
    for expected in [&[2, 5][..], &[7], &[]] {
        assert_eq!(steer.mid_poll().unwrap(), Some(splice(expected)));
    }
}
