//! Streams over upstreams that come and go, in any order: each ends exactly once, with no token twice and none lost.

use proptest::prelude::*;

use super::*;

/// What happens next.
#[derive(Clone, Debug)]
enum Op {
    Open(Asked),
    /// An upstream gives one item of each of its streams.
    Step(usize),
    Lose(usize),
    Drain(usize),
    Answer(usize),
    Miss(usize),
    /// The engine fails under this stream.
    Fail(usize),
    /// Its reader is dropped.
    Leave(usize),
    Wait(u64),
}

#[derive(Clone, Debug)]
struct Asked {
    prompt: u32,
    blocks: u32,
    max_tokens: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    Stopped,
    Penalised,
    /// Its tokens depend on the length of its prompt, as those of a seed do: it cannot simply go on elsewhere.
    Seeded,
    Score,
}

const UPSTREAMS: usize = 3;
const END: Token = 0;

fn op() -> impl Strategy<Value = Op> {
    let kind = prop_oneof![
        Just(Kind::Plain),
        Just(Kind::Stopped),
        Just(Kind::Penalised),
        Just(Kind::Seeded),
        Just(Kind::Score)
    ];
    let asked =
        (0..3_u32, 0..4_u32, 1..12_u32, kind).prop_map(|(prompt, blocks, max_tokens, kind)| {
            Asked {
                prompt,
                blocks,
                max_tokens,
                kind,
            }
        });
    let upstream = || 0..UPSTREAMS;
    prop_oneof![
        4 => asked.prop_map(Op::Open),
        8 => upstream().prop_map(Op::Step),
        2 => upstream().prop_map(Op::Lose),
        1 => upstream().prop_map(Op::Drain),
        3 => upstream().prop_map(Op::Answer),
        1 => upstream().prop_map(Op::Miss),
        1 => (0..8_usize).prop_map(Op::Fail),
        1 => (0..8_usize).prop_map(Op::Leave),
        2 => (0..40_000_u64).prop_map(Op::Wait),
    ]
}

impl Asked {
    fn work(&self) -> StreamDemand {
        let prompt = prompt(self.prompt, self.blocks);
        if self.kind == Kind::Score {
            return StreamDemand::Score(Score {
                prompt,
                scored: (1..=self.max_tokens).collect(),
                top_logprobs: 0,
                ..Score::default()
            });
        }
        StreamDemand::Generate(GenerateRequest {
            prompt,
            params: GenerationParams {
                max_tokens: Some(self.max_tokens),
                stop_sequences: match self.kind {
                    Kind::Stopped => vec![vec![3, 4], vec![5]],
                    _ => Vec::new(),
                },
                presence_penalty: (self.kind == Kind::Penalised).then_some(1.0),
                seed: (self.kind == Kind::Seeded).then_some(7),
                temperature: (self.kind == Kind::Seeded).then_some(1.0),
                ..GenerationParams::default()
            },
            ..GenerateRequest::default()
        })
    }
}

/// A model that gives the same token after the same tokens on every upstream.
fn next(tokens: &[Token]) -> Token {
    let mixed = tokens.iter().fold(7_u32, |mixed, token| {
        mixed.wrapping_mul(31).wrapping_add(*token)
    });
    (mixed >> 3) % 12
}

/// A stream at an upstream: its request, and its output so far.
struct There {
    work: StreamDemand,
    reply: Vec<Token>,
}

impl There {
    /// The next item, as the upstream ends its own stream.
    fn step(&mut self) -> ReceivedItem {
        let (token, finish) = match &self.work {
            StreamDemand::Generate(wanted) => {
                let all = [&wanted.prompt[..], &self.reply].concat();
                let drawn = wanted.params.seed.map_or(0, |_| wanted.prompt.len() as u32);
                let token = (next(&all) + drawn) % 12;
                self.reply.push(token);
                let mut stops = wanted.params.stop_sequences.iter();
                let stopped = stops.any(|stop| self.reply.ends_with(stop));
                let finish = if token == END || stopped {
                    Some(StreamFinish::Stop)
                } else {
                    (self.reply.len() == wanted.max_tokens() as usize)
                        .then_some(StreamFinish::Length)
                };
                (token, finish)
            }
            StreamDemand::Score(wanted) => {
                let token = wanted.scored[self.reply.len()];
                self.reply.push(token);
                let last = self.reply.len() == wanted.scored.len();
                (token, last.then_some(StreamFinish::Stop))
            }
        };
        ReceivedItem {
            token: Some(token),
            finish,
            ..ReceivedItem::default()
        }
    }
}

/// A stream as its reader sees it.
struct Stream {
    passage: RelayedStream,
    work: StreamDemand,
    seen: Vec<Token>,
    at: Option<(PoolMember, There)>,
    ends: Vec<Result<StreamFinish, LmtpReason>>,
    left: bool,
}

/// The output of a single upstream that is never lost.
fn undisturbed(work: &StreamDemand) -> (Vec<Token>, StreamFinish) {
    let mut there = There {
        work: work.clone(),
        reply: Vec::new(),
    };
    loop {
        if let Some(finish) = there.step().finish {
            return (there.reply, finish);
        }
    }
}

struct World {
    pool: PoolMachine,
    streams: Vec<Stream>,
    now: Time,
}

impl World {
    fn ask(&mut self, index: usize, but: Option<PoolMember>) {
        let stream = &mut self.streams[index];
        match self.pool.route(stream.passage.tokens(), but, self.now) {
            Ok(member) => {
                assert_eq!(self.pool.condition(member), Condition::Serving);
                assert_ne!(Some(member), but);
                let there = There {
                    work: stream.passage.work(),
                    reply: Vec::new(),
                };
                stream.at = Some((member, there));
            }
            Err(error) => stream.ends.push(Err(error.reason)),
        }
    }

    fn step(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        let Some((member, there)) = &mut stream.at else {
            return;
        };
        let mut item = there.step();
        let member = *member;
        match stream.passage.item(&mut item) {
            RelayedItem::On => {}
            RelayedItem::Known => return,
            other => panic!("{other:?}"),
        }
        stream.seen.extend(item.token);
        if let Some(finish) = item.finish {
            self.pool.remember(member, stream.passage.tokens());
            self.pool.ended(member, StreamOutcome::Well, self.now);
            stream.at = None;
            stream.ends.push(Ok(finish));
        }
    }

    fn fail(&mut self, index: usize, reason: LmtpReason) {
        let stream = &mut self.streams[index];
        let Some((member, _)) = stream.at.take() else {
            return;
        };
        self.pool
            .ended(member, StreamOutcome::Failed(reason), self.now);
        match stream.passage.failed(LmtpError::new(reason, "")) {
            Ok(()) => self.ask(index, Some(member)),
            Err(error) => stream.ends.push(Err(error.reason)),
        }
    }

    fn of(&self, member: usize) -> Vec<usize> {
        let streams = self.streams.iter().enumerate();
        let there = streams.filter(|(_, stream)| {
            let at = stream.at.as_ref();
            at.is_some_and(|(at, _)| at.index() == member)
        });
        there.map(|(index, _)| index).collect()
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Open(asked) => {
                let work = asked.work();
                self.streams.push(Stream {
                    passage: RelayedStream::new(work.clone(), true),
                    work,
                    seen: Vec::new(),
                    at: None,
                    ends: Vec::new(),
                    left: false,
                });
                self.ask(self.streams.len() - 1, None);
            }
            Op::Step(member) => self.of(member).into_iter().for_each(|one| self.step(one)),
            Op::Lose(member) => {
                let cut = self.of(member);
                self.pool.lost(PoolMember(member), self.now);
                for one in cut {
                    self.fail(one, LmtpReason::ConnectionLost);
                }
            }
            Op::Drain(member) => {
                for one in self.of(member) {
                    self.fail(one, LmtpReason::Draining);
                }
            }
            Op::Answer(member) => {
                let probe = ProbeOutcome::Answered(Some(1));
                self.pool.probed(PoolMember(member), probe, self.now);
            }
            Op::Miss(member) => {
                self.pool
                    .probed(PoolMember(member), ProbeOutcome::Missed, self.now)
            }
            Op::Fail(index) if index < self.streams.len() => {
                self.fail(index, LmtpReason::EngineError);
            }
            Op::Leave(index) => {
                if let Some(stream) = self.streams.get_mut(index)
                    && let Some((member, _)) = stream.at.take()
                {
                    stream.left = true;
                    self.pool.ended(member, StreamOutcome::Left, self.now);
                }
            }
            Op::Fail(_) => {}
            Op::Wait(ms) => self.now = self.now + Duration::from_millis(ms),
        }
        for member in self.pool.members() {
            let here = self.of(member.index()).len();
            assert_eq!(self.pool.open(member), here as u64);
        }
    }

    fn check(&self) {
        for stream in &self.streams {
            let (whole, finish) = undisturbed(&stream.work);
            assert!(
                whole.starts_with(&stream.seen),
                "{:?} of {whole:?}",
                stream.seen
            );
            if stream.left {
                assert!(stream.ends.is_empty());
                continue;
            }
            assert_eq!(stream.ends.len(), 1, "every stream ends exactly once");
            match &stream.ends[0] {
                Ok(seen) => assert_eq!((&stream.seen, seen), (&whole, &finish)),
                Err(reason) => assert!(
                    matches!(reason, LmtpReason::UpstreamError | LmtpReason::EngineError),
                    "{reason:?}"
                ),
            }
        }
    }
}

proptest! {
    /// LM-501, LM-606: whatever happens to upstreams, the output of a stream is a prefix of the undisturbed output.
    #[test]
    fn lm_806_every_stream_ends_once_with_no_token_twice_and_none_lost(
        ops in prop::collection::vec(op(), 0..120)
    ) {
        let mut world = World { pool: pool(&[1, 2, 1]), streams: Vec::new(), now: Time::ZERO };
        for op in ops {
            world.apply(op);
        }
        // Streams that still run are completed.
        for _ in 0..16 {
            for member in 0..UPSTREAMS {
                world.apply(Op::Step(member));
            }
        }
        world.check();
    }
}
