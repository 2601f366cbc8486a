//! Random patterns, combined: the output is that of their intersection.

use proptest::prelude::*;

use super::*;

/// Allows one of a few tokens at each place, forces those without an alternative, and answers late.
#[derive(Clone, Debug)]
struct Pattern {
    places: Vec<Vec<Token>>,
    at: usize,
    /// Calls without a result before each one with a result.
    delays: VecDeque<u8>,
    left: u8,
}

impl Pattern {
    fn new(places: Vec<Vec<Token>>, delays: Vec<u8>) -> Self {
        Self {
            places,
            at: 0,
            delays: delays.into(),
            left: 0,
        }
    }

    /// Whether the result is there.
    fn is_ready(&mut self) -> bool {
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return false;
        }
        self.delays.rotate_left(1);
        self.left = self.delays.front().copied().unwrap_or(0);
        true
    }

    fn allows(&self, tokens: &[Token]) -> bool {
        let places = self.places.get(self.at..self.at + tokens.len());
        let allowed = |(place, token): (&Vec<Token>, &Token)| place.contains(token);
        places.is_some_and(|places| places.iter().zip(tokens).all(allowed))
    }
}

impl Steer for Pattern {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        if !self.is_ready() {
            return Ok(None);
        }
        if self.at == self.places.len() {
            return Ok(Some(Pre::Stop));
        }
        let forced = self.places[self.at..]
            .iter()
            .map_while(|place| (place.len() == 1).then(|| place[0]));
        let forced: Vec<Token> = forced.collect();
        self.at += forced.len();
        Ok(Some(run(&forced)))
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if !self.is_ready() {
            return Ok(None);
        }
        Ok(Some(match self.places.get(self.at) {
            Some(place) => sample(Sample {
                mask: Some(mask(place)),
                ..Sample::default()
            }),
            None => Mid::Stop,
        }))
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        assert!(self.allows(appended.tokens), "{self:?}: {appended:?}");
        self.at += appended.tokens.len();
        Ok(Post::Continue)
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(self.clone()))
    }

    fn would_accept(&mut self, _backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        Ok(self.allows(tokens))
    }
}

/// Drives a steerer until it stops; samples the smallest allowed token after `choose` others.
fn drive(mut steer: Box<dyn Steer>, choose: usize) -> Steered<Vec<Token>> {
    let mut output = Vec::new();
    let poll = |steer: &mut Box<dyn Steer>| loop {
        if let Some(pre) = steer.pre()? {
            return Ok(pre);
        }
    };
    loop {
        match poll(&mut steer)? {
            Pre::Run { fast_forward } => output.extend(fast_forward),
            Pre::Stop => return Ok(output),
            other => panic!("{other:?}"),
        }
        steer.mid_begin(&[1]);
        let mid = loop {
            if let Some(mid) = steer.mid_poll()? {
                break mid;
            }
        };
        let sampled = match mid {
            Mid::Stop => return Ok(output),
            Mid::One(Branch::Sample(Sample {
                mask: Some(mask), ..
            })) => {
                let allowed: Vec<Token> = (0..).take(SIZE).filter(|&t| mask.allows(t)).collect();
                let Some(&token) = allowed.get(choose % allowed.len().max(1)) else {
                    return Err(refused());
                };
                token
            }
            other => panic!("{other:?}"),
        };
        output.push(sampled);
        steer.post(Appended {
            backtrack: 0,
            tokens: &[sampled],
            sampled: Some(sampled),
        })?;
    }
}

fn patterns() -> impl Strategy<Value = Vec<Vec<Token>>> {
    let place = prop::collection::btree_set(0..4_u32, 1..4);
    prop::collection::vec(place.prop_map(|place| place.into_iter().collect()), 8)
}

proptest! {
    /// Whatever forces tokens and whatever is late: the output satisfies all parts, and it is that of one steerer with
    /// the intersection of all, unless nothing satisfies all of them.
    #[test]
    fn ai_803_combined_patterns_are_their_intersection(
        parts in prop::collection::vec((patterns(), prop::collection::vec(0..3_u8, 1..6)), 2..4),
        choose in 0..4_usize,
    ) {
        let places = (0..8).map(|at| {
            let all = |token: &Token| parts.iter().all(|(places, _)| places[at].contains(token));
            (0..4).filter(all).collect::<Vec<Token>>()
        });
        let both: Vec<Vec<Token>> = places.collect();
        let possible = both.iter().all(|place| !place.is_empty());
        let boxed = parts.iter().map(|(places, delays)| {
            Box::new(Pattern::new(places.clone(), delays.clone())) as Box<dyn Steer>
        });
        let mut steer = Combined::new(boxed.collect());
        steer.begin(&[], &waker());
        prop_assert!(steer.begin_poll()?.is_some());
        let fork = steer.fork(1)?;
        let output = drive(steer, choose);
        match &output {
            Ok(output) => {
                prop_assert!(possible);
                let alone = drive(Box::new(Pattern::new(both, vec![0])), choose);
                prop_assert_eq!(Ok(output), alone.as_ref());
            }
            Err(failure) => prop_assert!(!possible, "{}", failure),
        }
        prop_assert_eq!(drive(fork, choose), output, "a fork does the same");
    }
}
